"""Sliced Wasserstein distances: quantiles of projections, and exact distances of pairs for checks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike

from assay.statistics.distribution_kernels.bags import Array, Bags, as_bags

_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy"}
#: Projected values held at once for each thread, 32 MB.
_VALUES = 1 << 22


def random_directions(n: int, d: int, rng: np.random.Generator) -> Array:
    """``n`` unit vectors, uniform on the sphere of R^d, shape (n, d). In one dimension there is one, whatever n is."""
    if d == 1:
        return np.ones((1, 1))
    draws = rng.standard_normal((n, d))
    return draws / np.sqrt((draws**2).sum(1, keepdims=True))


def sliced_quantiles(bags: Bags, directions: Array, n_quantiles: int, n_jobs: int = 1) -> Array:
    """Quantiles of the projections of each bag, divided by ``sqrt(L Q)``.

    Parameters
    ----------
    bags
        N bags in R^d.
    directions
        L unit vectors (L, d).
    n_quantiles
        Q; the levels are ``(j - 1/2)/Q``.
    n_jobs
        Threads, each for a range of bags.

    Returns
    -------
    Array (N, L Q). Entry (l, j) of a bag of M points is their ``ceil(M (j - 1/2)/Q)``-th smallest projection on
    direction l (the inverse distribution function, without interpolation: it sees the empirical measure only, so that
    repeated points change nothing). With ``Q = M`` for all bags, squared distances of rows are those of sliced
    Wasserstein for these directions, exactly.
    """
    out = np.empty((len(bags), len(directions), n_quantiles))
    scale = 1.0 / np.sqrt(len(directions) * n_quantiles)

    def work(rows: tuple[int, int]) -> None:
        lo, hi = bags.offsets[rows[0]], bags.offsets[rows[1]]
        offsets = bags.offsets[rows[0] : rows[1] + 1] - lo
        # (L, points), so that what is sorted lies side by side
        projected = directions @ bags.points[lo:hi].T
        if bags.weights is not None:
            _weighted(projected, offsets, bags.weights[lo:hi], scale, out[rows[0] : rows[1]])
            return
        # NumPy sorts with vector instructions: five times as fast as a compiled loop with numba's sort (AVX-512).
        for a, b in pairwise(offsets):
            projected[:, a:b].sort(axis=1)
        _pick(projected, offsets, scale, out[rows[0] : rows[1]])

    _in_ranges(work, bags, max(1, _VALUES // len(directions)), n_jobs)
    return out.reshape(len(bags), -1)


def _in_ranges(work: Callable[[tuple[int, int]], None], bags: Bags, points: int, n_jobs: int) -> None:
    """Call ``work`` with ranges of bags of about so many points, in threads if asked to."""
    points = min(points, max(1, -(-len(bags.points) // n_jobs)))
    cuts = [0]
    while cuts[-1] < len(bags):
        limit = bags.offsets[cuts[-1]] + points
        cuts.append(max(cuts[-1] + 1, int(np.searchsorted(bags.offsets, limit, "right")) - 1))
    ranges = list(pairwise(cuts))
    if n_jobs == 1 or len(ranges) == 1:
        for one in ranges:
            work(one)
        return
    with ThreadPoolExecutor(n_jobs) as pool:
        list(pool.map(work, ranges))


@njit(**_OPTIONS)
def _pick(projected: Array, offsets: Any, scale: float, out: Array) -> None:  # pragma: no cover
    """Take quantiles of sorted projections. Ranks are integers: no level falls on the wrong side by rounding."""
    n, L, Q = out.shape
    for i in range(n):
        size = offsets[i + 1] - offsets[i]
        for k in range(L):
            for j in range(Q):
                rank = ((2 * j + 1) * size + 2 * Q - 1) // (2 * Q) - 1
                out[i, k, j] = scale * projected[k, offsets[i] + rank]


@njit(**_OPTIONS)
def _weighted(projected: Array, offsets: Any, weights: Array, scale: float, out: Array) -> None:  # pragma: no cover
    n, L, Q = out.shape
    for i in range(n):
        lo, hi = offsets[i], offsets[i + 1]
        for k in range(L):
            order = np.argsort(projected[k, lo:hi])
            rank = 0
            total = weights[lo + order[0]]
            for j in range(Q):
                level = (j + 0.5) / Q - 1e-12
                while total < level and rank < hi - lo - 1:
                    rank += 1
                    total += weights[lo + order[rank]]
                out[i, k, j] = scale * projected[k, lo + order[rank]]


@njit(**_OPTIONS)
def _pairs(pa: Array, oa: Any, wa: Array, pb: Array, ob: Any, wb: Array, out: Array) -> None:  # pragma: no cover
    """Mean over directions of squared W_2 of sorted, weighted projections: one walk through both quantile functions."""
    L = pa.shape[0]
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            total = 0.0
            for k in range(L):
                a, b = oa[i], ob[j]
                left, right = wa[k, a], wb[k, b]
                while True:
                    step = min(left, right)
                    gap = pa[k, a] - pb[k, b]
                    total += step * gap * gap
                    left -= step
                    right -= step
                    if left <= 1e-15:
                        a += 1
                        if a == oa[i + 1]:
                            break
                        left += wa[k, a]
                    if right <= 1e-15:
                        b += 1
                        if b == ob[j + 1]:
                            break
                        right += wb[k, b]
            out[i, j] = np.sqrt(total / L)


def exact_sliced_wasserstein(A: Any, B: Any = None, directions: ArrayLike | None = None) -> Array:
    """Sliced Wasserstein distances SW_2 of all pairs of bags, exact also where sizes or weights differ.

    Each pair is one walk through two sorted samples, (M_a + M_b) L steps. The embedding is faster and what the machines
    use; this is for checks, and for bags of few points with different sizes, whose grid of quantiles is coarse.

    Parameters
    ----------
    A, B
        Bags; B is A by default.
    directions
        Unit vectors (L, d): ``SlicedWassersteinEmbedding.directions_``. Not needed in one dimension.

    Returns
    -------
    Array (N_A, N_B): the root of the mean over directions of the squared 2-Wasserstein distances of the projections.
    """
    a = as_bags(A, name="A")
    b = a if B is None else as_bags(B, name="B")
    if a.dim != b.dim:
        raise ValueError(f"A has {a.dim} coordinates a point, B has {b.dim}")
    if directions is None:
        if a.dim > 1:
            raise ValueError(f"directions is needed for points with {a.dim} coordinates: unit vectors (L, {a.dim})")
        directions = np.ones((1, 1))
    theta = np.asarray(directions, dtype=np.float64)
    if theta.ndim != 2 or theta.shape[1] != a.dim or not np.allclose((theta**2).sum(1), 1.0):
        raise ValueError(f"directions must be unit vectors (L, {a.dim}), got shape {theta.shape}")

    def sort(bags: Bags) -> tuple[Array, Array]:
        projected = theta @ bags.points.T
        weights = np.empty_like(projected)
        share = bags.shares()
        for lo, hi in zip(bags.offsets[:-1], bags.offsets[1:]):
            order = np.argsort(projected[:, lo:hi], axis=1)
            projected[:, lo:hi] = np.take_along_axis(projected[:, lo:hi], order, 1)
            weights[:, lo:hi] = share[lo:hi][order]
        return projected, weights

    pa, wa = sort(a)
    pb, wb = (pa, wa) if B is None else sort(b)
    out = np.empty((len(a), len(b)))
    _pairs(pa, a.offsets, wa, pb, b.offsets, wb, out)
    return out
