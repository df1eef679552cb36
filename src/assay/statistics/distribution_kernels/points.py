"""Kernels between points, and what they become between bags: exact inner products, Fourier features, scales."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from assay.statistics.distribution_kernels.bags import Array, Bags, as_bags, check_positive

PointKernel = Literal["gaussian", "laplace", "matern32", "energy"]
POINT_KERNELS = ("gaussian", "laplace", "matern32", "energy")
#: Kernel values computed at once: 2 MB, which stay in the cache of a core.
_BLOCK = 512
#: Points from which the length scale is taken.
SCALE_POINTS = 1000
_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy"}


# --- scales ----------------------------------------------------------------------------------------------------------


def spread(bags: Bags, weights: Array) -> tuple[Array, Array]:
    """Mean and standard deviation of each coordinate, (d,) and (d,), where every bag counts by its weight.

    Bags count the same whatever their size, so that repeating the points of a bag changes nothing. Coordinates that
    are constant get the deviation 1.
    """
    share = weights / weights.sum()
    center = share @ bags.means(bags.points)
    deviation = np.sqrt(share @ bags.means((bags.points - center) ** 2))
    deviation[deviation <= 1e-12 * np.abs(center)] = 1.0
    deviation[deviation == 0] = 1.0
    return center, deviation


def median_distance(points: Array, weights: Array | None = None) -> float:
    """Median Euclidean distance between different points; 1 where there are none.

    ``weights`` (n,) count a point several times: the pair (i, j) weighs ``w_i w_j``.
    """
    from scipy.spatial.distance import pdist

    return weighted_median(pdist(points), None if weights is None else pair_weights(weights))


def pair_weights(weights: Array) -> Array | None:
    """``w_i w_j`` of all pairs i < j, in the order of SciPy's ``pdist``; ``None`` where all are equal."""
    if (weights == weights[0]).all():
        return None
    i, j = np.triu_indices(len(weights), 1)
    return weights[i] * weights[j]


def weighted_median(values: Array, weights: Array | None) -> float:
    """Median of the positive values; 1 where there are none."""
    keep = values > 0
    if weights is not None:
        keep &= weights > 0
    values = values[keep]
    if len(values) == 0:
        return 1.0
    if weights is None:
        # The lower of two middle values: the same as with weights, and when everything is repeated.
        middle = (len(values) - 1) // 2
        return float(np.partition(values, middle)[middle])
    order = np.argsort(values)
    total = np.cumsum(weights[keep][order])
    return float(values[order][np.searchsorted(total, 0.5 * total[-1] * (1 - 1e-12))])


def point_scale(bags: Bags, weights: Array, rng: np.random.Generator) -> float:
    """Half of the median distance between (at most 1000) points, where every bag counts by its weight.

    Half, since pooled points also differ by the shifts between bags, which are larger than the shapes of single bags.
    """
    mass = bags.shares() * np.repeat(weights, bags.sizes)
    points = bags.points
    if len(points) > SCALE_POINTS:
        rows = rng.choice(len(points), SCALE_POINTS, p=mass / mass.sum())
        return 0.5 * median_distance(points[rows])
    return 0.5 * median_distance(points, mass)


# --- exact inner products of kernel means ----------------------------------------------------------------------------


def kernel_values(r2: Array, kernel: str, scale: float) -> Array:
    """Kernel of squared distances; overwrites ``r2``. Not for "energy", which is no function of the distance."""
    if kernel == "gaussian":
        r2 *= -0.5 / scale**2
        return np.exp(r2, out=r2)
    np.sqrt(r2, out=r2)
    if kernel == "laplace":
        r2 *= -1.0 / scale
        return np.exp(r2, out=r2)
    r2 *= np.sqrt(3.0) / scale
    decay = np.exp(-r2)
    r2 += 1.0
    r2 *= decay
    return r2


def point_gram(A: Any, B: Any = None, kernel: PointKernel = "gaussian", length_scale: float = 1.0) -> Array:
    """Inner products of kernel mean embeddings: the means of ``k(x, y)`` over x in a bag of A and y in one of B.

    Parameters
    ----------
    A, B
        Bags, see :func:`as_bags`. Without B, the (N, N) Gram matrix of A at half of the work.
    kernel
        With r the Euclidean distance and s the length scale: "gaussian" ``exp(-r^2/(2 s^2))``; "laplace" ``exp(-r/s)``;
        "matern32" ``(1 + sqrt(3) r/s) exp(-sqrt(3) r/s)``; "energy" ``|x| + |y| - r``, unbounded and without a scale,
        whose squared distances are the energy distance.
    length_scale
        s > 0.

    Returns
    -------
    Array (N_A, N_B). With U the matrix of A, ``U_ii + U_jj - 2 U_ij`` is the squared maximum mean discrepancy (the
    biased V-statistic, which is never negative; the unbiased one would not give a positive semidefinite kernel).

    Notes
    -----
    All pairs of points are computed, in blocks of 512 x 512, without storing them.
    """
    if kernel not in POINT_KERNELS:
        raise ValueError(f"kernel must be one of {POINT_KERNELS}, got {kernel!r}")
    check_positive("length_scale", length_scale)
    a = as_bags(A, name="A")
    b = a if B is None else as_bags(B, name="B")
    if a.dim != b.dim:
        raise ValueError(f"A has {a.dim} coordinates a point, B has {b.dim}")
    out = np.zeros((len(a), len(b)))
    # Distances suffer from cancellation far from the origin. (The energy kernel depends on it.)
    shift = np.zeros(a.dim) if kernel == "energy" else a.points.mean(0)
    x, y = a.points - shift, b.points - shift
    x2, y2 = (x**2).sum(1), (y**2).sum(1)
    for lo in range(0, len(x), _BLOCK):
        hi = min(lo + _BLOCK, len(x))
        rows, row_starts = _segments(a, lo, hi)
        for left in range(lo if B is None else 0, len(y), _BLOCK):
            right = min(left + _BLOCK, len(y))
            block = x[lo:hi] @ y[left:right].T
            block *= -2.0
            block += x2[lo:hi, None]
            block += y2[left:right]
            np.maximum(block, 0.0, out=block)
            if B is None and left == lo:
                np.fill_diagonal(block, 0.0)
            if kernel == "energy":
                block = np.sqrt(x2[lo:hi])[:, None] + np.sqrt(y2[left:right]) - np.sqrt(block)
            else:
                block = kernel_values(block, kernel, length_scale)
            if a.weights is not None:
                block *= a.weights[lo:hi, None]
            if b.weights is not None:
                block *= b.weights[left:right]
            columns, starts = _segments(b, left, right)
            sums = np.add.reduceat(np.add.reduceat(block, starts, axis=1), row_starts, axis=0)
            out[rows[0] : rows[1], columns[0] : columns[1]] += sums
            if B is None and left > lo:
                out[columns[0] : columns[1], rows[0] : rows[1]] += sums.T
    if a.weights is None:
        out /= a.sizes[:, None]
    if b.weights is None:
        out /= b.sizes
    return 0.5 * (out + out.T) if B is None else out


def _segments(bags: Bags, lo: int, hi: int) -> tuple[tuple[int, int], NDArray[np.int64]]:
    """Bags with points among ``lo:hi``, as a range, and where each starts, counted from ``lo``."""
    first = int(np.searchsorted(bags.offsets, lo, "right")) - 1
    last = int(np.searchsorted(bags.offsets, hi, "left"))
    return (first, last), np.maximum(bags.offsets[first:last] - lo, 0)


def self_products(bags: Bags, kernel: str, scale: float) -> Array:
    """Squared norms of the kernel means, (N,)."""
    return np.array([point_gram(bags[i], None, kernel, scale)[0, 0] for i in range(len(bags))])  # type: ignore[arg-type]


# --- random Fourier features -----------------------------------------------------------------------------------------


def frequencies(kernel: str, scale: float, d: int, n: int, rng: np.random.Generator) -> Array:
    """Draws (d, n) of the spectral measure: normal (gaussian), or Student's t with 1 (laplace) or 3 (matern32) degrees.

    The Fourier transform of a Matern kernel of order nu is a multivariate t density with 2 nu degrees of freedom.
    """
    w = rng.standard_normal((d, n)) / scale
    if kernel == "gaussian":
        return w
    degrees = {"laplace": 1, "matern32": 3}[kernel]
    return w / np.sqrt(rng.chisquare(degrees, n) / degrees)


@njit(**_OPTIONS)
def fourier_means(points: Array, offsets: Any, share: Array, W: Array, out: Array) -> None:  # pragma: no cover
    """Weighted means over bags of cos and sin of ``W'x``: out (N, 2 D) of points (P, d) and W (d, D).

    Cosine and sine of one argument share its reduction and are summed on the spot, so that no array of the size of the
    points times D is ever written. Cody-Waite reduction in two steps and the minimax polynomials of fdlibm; the error
    is below 1e-14 for arguments below 1e6. Branchless, so that compilers vectorise over the frequencies.
    """
    d, D = W.shape
    arg = np.empty(D)
    cosine = np.empty(D)
    sine = np.empty(D)
    for i in range(len(offsets) - 1):
        cosine[:] = 0.0
        sine[:] = 0.0
        for p in range(offsets[i], offsets[i + 1]):
            x0, weight = points[p, 0], share[p]
            for j in range(D):
                arg[j] = x0 * W[0, j]
            for k in range(1, d):
                xk = points[p, k]
                for j in range(D):
                    arg[j] += xk * W[k, j]
            for j in range(D):
                x = arg[j]
                n = np.floor(x * 0.6366197723675814 + 0.5)
                r = (x - n * 1.5707963267341256) - n * 6.077100506506192e-11
                z = r * r
                s = -2.5050760253406863e-8 + z * 1.58969099521155010e-10
                s = 2.7557313707070068e-6 + z * s
                s = -1.9841269829857949e-4 + z * s
                s = 8.33333333332248946e-3 + z * s
                s = r + r * z * (-1.6666666666666632e-1 + z * s)
                c = 2.08757232129817483e-9 + z * -1.13596475577881948e-11
                c = -2.75573143513906633e-7 + z * c
                c = 2.48015872894767294e-5 + z * c
                c = -1.38888888888741096e-3 + z * c
                c = 1.0 - 0.5 * z + z * z * (4.16666666666666019e-2 + z * c)
                quadrant = n - 4.0 * np.floor(n * 0.25)
                odd = quadrant == 1.0 or quadrant == 3.0
                sign_s = -weight if quadrant >= 2.0 else weight
                sign_c = -weight if quadrant == 1.0 or quadrant == 2.0 else weight
                cosine[j] += sign_c * (s if odd else c)
                sine[j] += sign_s * (c if odd else s)
        for j in range(D):
            out[i, j] = cosine[j]
            out[i, D + j] = sine[j]
