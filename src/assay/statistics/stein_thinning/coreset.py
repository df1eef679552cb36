"""One call from biased points and scores of the right target to a small coreset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, isqrt
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from assay._state import load_state, save_state
from assay.statistics.stein_thinning._cores import Float, Index
from assay.statistics.stein_thinning.cholesky import cholesky_thin
from assay.statistics.stein_thinning.debias import low_rank_debias
from assay.statistics.stein_thinning.greedy import stein_thin
from assay.statistics.stein_thinning.kernel import (
    SteinKernel,
    as_float,
    check_count,
    check_points,
    check_random_state,
    discrepancy,
    fit_kernel,
)
from assay.statistics.stein_thinning.kernel_thinning import compress_pp, kernel_thin
from assay.statistics.stein_thinning.recombination import recombination_thin
from assay.statistics.stein_thinning.rounding import frequencies, stratified_round

Method = Literal["skt", "lskt", "sr", "lsr", "sc", "lsc", "st"]
METHODS: tuple[str, ...] = get_args(Method)
_QUADRATIC = ("skt", "sr", "sc")


@dataclass(frozen=True, eq=False)
class Coreset:
    """A small set of points that stands for a target distribution.

    Attributes
    ----------
    indices : int array (m,)
        Rows of the input, sorted. Equal-weight methods may repeat a row.
    weights : float array (m,)
        Sum 1. Equal for ``"skt"``, ``"lskt"`` and ``"st"``; not negative for ``"sr"`` and ``"lsr"``; of any sign for
        ``"sc"`` and ``"lsc"``.
    points : float array (m, d)
        The rows themselves.
    mmd : float
        Kernel Stein discrepancy from the target, the root of w'Kw (unitless). Comparable under one kernel only.
    n_input : int
        Number of input points.
    method : str
        Name of the method.
    info : mapping
        ``n_unique`` (distinct points), ``lengthscale``, and ``rank`` for the low-rank methods.
    """

    indices: Index
    weights: Float
    points: Float
    mmd: float
    n_input: int
    method: str
    info: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.indices.size

    def dense_weights(self) -> Float:
        """Weights over all input points, shape ``(n_input,)``."""
        return np.bincount(self.indices, weights=self.weights, minlength=self.n_input).astype(np.float64)

    def expectation(self, f: Callable[[Float], ArrayLike] | ArrayLike) -> Any:
        """Estimate the mean of ``f`` under the target.

        Parameters
        ----------
        f
            A function of the points, ``(m, d)`` to ``(m, ...)``, which is the use that makes a coreset pay: ``f`` is
            evaluated m times. Or an array ``(n_input, ...)`` of values at all input points.

        Returns
        -------
        A float, or an array of the shape that f has at a point.
        """
        if callable(f):
            values = as_float(f(self.points), "the value of f")
            if values.ndim == 0 or values.shape[0] != len(self):
                raise ValueError(f"f must give one value for each of {len(self)} points, got shape {values.shape}")
        else:
            everywhere = as_float(f, "f")
            if everywhere.ndim == 0 or everywhere.shape[0] != self.n_input:
                raise ValueError(
                    f"f must be a function or an array of {self.n_input} rows, one for each input point, "
                    f"got shape {everywhere.shape}"
                )
            values = everywhere[self.indices]
        mean = np.tensordot(self.weights, values, axes=(0, 0))
        return float(mean) if mean.ndim == 0 else mean

    def resample(self, k: int, *, random_state: int | np.random.Generator | None = None) -> Index:
        """Give ``k`` equally weighted rows of the input that stand for the weights (stratified), sorted.

        Raises
        ------
        ValueError
            Some weights are negative, as those of ``"sc"`` and ``"lsc"`` may be.
        """
        if self.weights.min() < 0:
            raise ValueError(f"weights of method {self.method!r} may be negative and cannot be resampled; use 'sr'")
        return self.indices[stratified_round(self.weights, k, random_state=random_state)]

    def save(self, folder: str | Path) -> Path:
        """Write the coreset to ``folder`` as JSON and safetensors."""
        return save_state(
            folder,
            "Coreset",
            {"mmd": self.mmd, "n_input": self.n_input, "method": self.method, "info": dict(self.info)},
            {"indices": self.indices, "weights": self.weights, "points": self.points},
        )

    @classmethod
    def load(cls, folder: str | Path) -> Coreset:
        """Read what :meth:`save` wrote."""
        config, tensors = load_state(folder, "Coreset")
        return cls(**tensors, **config)


def compress(
    X: ArrayLike,
    scores: ArrayLike,
    n_points: int | Literal["sqrt"] = "sqrt",
    method: Method = "skt",
    *,
    rank: int | Literal["auto"] = "auto",
    kernel: SteinKernel | None = None,
    delta: float = 0.5,
    log_density: ArrayLike | None = None,
    laplacian: ArrayLike | None = None,
    entropy: float | None = None,
    max_matrix_bytes: float = 2e9,
    random_state: int | np.random.Generator | np.random.RandomState | None = None,
) -> Coreset:
    r"""Compress points that may follow the wrong distribution into a few that represent the target P.

    ========  =======================================================  =================  ====================
    method    what it does                                             weights            kernel entries
    ========  =======================================================  =================  ====================
    skt       Stein kernel thinning (default)                          equal              O(n^2)
    lskt      the same, low-rank debiasing and Compress++              equal              O(n r + 4^g n log n)
    sr        Stein recombination                                      not negative       O(n^2)
    lsr       the same, low-rank debiasing                             not negative       O(n m)
    sc        Stein Cholesky                                           sum 1, any sign    O(n^2)
    lsc       the same, low-rank debiasing                             sum 1, any sign    O(n m)
    st        greedy Stein thinning, the baseline; may be regularised  equal              O(n m)
    ========  =======================================================  =================  ====================

    Parameters
    ----------
    X : array (n, d)
        Points: draws of a chain in their order (not shuffled, burn-in included), of an approximate sampler, or of
        another distribution whose support covers P. Any float dtype; computation is in float64.
    scores : array (n, d)
        Gradient of the log density of P (up to a constant) at the points, in the same coordinates, from the full
        data. Minibatch gradients, or those of another target, bias the result without a sign of it.
    n_points
        m, from 1 to n. ``"sqrt"`` is the integer part of :math:`\sqrt n`; for ``"lskt"`` the next power of two at or
        above :math:`\sqrt n`, and only powers of two are possible.
    method
        See above.
    rank
        r of the low-rank methods. ``"auto"``: :math:`\lceil n^{0.4}\rceil` for lskt (one of the two of the paper's
        experiments), m for lsr and lsc.
    kernel
        A :class:`SteinKernel`, fitted or not; M = I and the median length scale by default. A fitted one that has
        been stored is used as it is, so several methods can share one matrix.
    delta
        Of kernel halving, see :func:`kernel_halve`.
    log_density, laplacian, entropy
        Regularisation of ``method="st"``, see :func:`stein_thin`.
    max_matrix_bytes
        The O(n^2) methods keep the matrix (8 n^2 bytes) if that is at most this, else they evaluate rows again when
        they need them. The result is the same.
    random_state
        Seed or generator. ``"st"`` uses none.

    Returns
    -------
    Coreset

    Warns
    -----
    UserWarning
        Fewer than m/2 distinct points; the mean score of the debiased points lies more than 5 standard errors of m
        draws from 0 (the input does not cover P, or the scores are not P's); the input falls into two far-apart
        clusters, whose proportions no Stein kernel can tell.

    Raises
    ------
    ValueError, TypeError
        An argument that cannot be used, named.

    Notes
    -----
    Source: Li, Dwivedi, Mackey, "Debiased Distribution Compression", ICML 2024.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).normal(scale=2, size=(1000, 3))  # wider than the target
    >>> coreset = compress(X, -X, random_state=0)                     # scores of the standard normal
    >>> len(coreset), bool(abs(coreset.points.var() - 1) < 0.5)
    (31, True)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    points, gradients = check_points(X, scores)
    n = points.shape[0]
    m = _size(n_points, n, method)
    if rank == "auto":
        r = ceil(n**0.4) if method == "lskt" else m
    elif isinstance(rank, str):
        raise ValueError(f"rank must be 'auto' or an integer, got {rank!r}")
    else:
        r = check_count(rank, "rank", 1, n)
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
    if method != "st" and not (log_density is None and laplacian is None and entropy is None):
        raise ValueError(f"log_density, laplacian and entropy regularise method='st' only, not {method!r}")
    rng = check_random_state(random_state)
    fitted = fit_kernel(kernel, points, gradients)
    if method in _QUADRATIC and not fitted.stored and 8 * n * n <= max_matrix_bytes:
        fitted = fitted.copy().store()
    _warn_of_clusters(points)
    indices, weights, debiased = _run(fitted, m, method, r, delta, (log_density, laplacian, entropy), rng)
    if not fitted.free:
        _warn_of_coverage(gradients, debiased, m)
    info: dict[str, Any] = {"n_unique": int(np.unique(indices).size), "lengthscale": fitted.lengthscale_}
    if method.startswith("l"):
        info["rank"] = r
    if info["n_unique"] < m / 2:
        warnings.warn(
            f"compress kept {info['n_unique']} distinct points for n_points={m}: the input has few points that the "
            "target favours; ask for fewer, or give more input",
            UserWarning,
            stacklevel=2,
        )
    return Coreset(indices, weights, points[indices], discrepancy(fitted, indices, weights), n, method, info)


def _size(n_points: int | str, n: int, method: str) -> int:
    if isinstance(n_points, str):
        if n_points != "sqrt":
            raise ValueError(f"n_points must be 'sqrt' or an integer, got {n_points!r}")
        return 1 << _power_of_four(n) if method == "lskt" else isqrt(n)
    m = check_count(n_points, "n_points", 1, n)
    if method == "lskt" and m & (m - 1):
        raise ValueError(f"n_points must be a power of two for method='lskt' (sqrt(4**k)), got {m}; use 'skt' instead")
    return m


def _power_of_four(n: int) -> int:
    """Give the least p with 4^p >= n."""
    return ((n - 1).bit_length() + 1) // 2


def _run(
    kernel: SteinKernel,
    m: int,
    method: str,
    rank: int,
    delta: float,
    regularisation: tuple[ArrayLike | None, ArrayLike | None, float | None],
    rng: np.random.Generator,
) -> tuple[Index, Float, Float]:
    """Indices, weights, and the debiased weights over all points that they were made from."""
    n = kernel.n
    if method in ("skt", "lskt", "st"):
        if method == "st":
            log_density, laplacian, entropy = regularisation
            sequence = np.sort(stein_thin(kernel, m, log_density=log_density, laplacian=laplacian, entropy=entropy))
            debiased = frequencies(sequence, n)
        elif method == "skt":
            size = m << (-(-n // m) - 1).bit_length()
            picks = stein_thin(kernel, size)
            debiased = frequencies(picks, n)
            # Counts over N round to themselves, and the first m picks are Stein thinning's own m points.
            sequence = kernel_thin(kernel, np.sort(picks), m, delta=delta, baseline=picks[:m], random_state=rng)
        else:
            debiased = low_rank_debias(kernel, rank, random_state=rng)
            sequence = stratified_round(debiased, m * m, random_state=rng)
            sequence = compress_pp(kernel, sequence, delta=delta, random_state=rng)
        return sequence, np.full(m, 1 / m), debiased
    if method.startswith("l"):
        debiased = low_rank_debias(kernel, rank, random_state=rng)
    else:
        debiased = frequencies(stein_thin(kernel, n), n)
    thin = recombination_thin if method.endswith("sr") else cholesky_thin
    w = thin(kernel, debiased, m, random_state=rng)
    support = np.flatnonzero(w)
    return support, w[support], debiased


def _warn_of_coverage(scores: Float, w: Float, size: int) -> None:
    """Under P every score has mean zero, give or take the standard error of ``size`` draws."""
    if size < 8:  # a mean over a handful of points tells nothing
        return
    mean = w @ scores
    spread = np.sqrt(np.maximum(0.0, w @ (scores - mean) ** 2) / size)
    far = np.abs(mean) > 5 * spread + 1e-8 * np.abs(scores).max()
    if far.any():
        k = int(np.argmax(np.abs(mean) / np.maximum(spread, 1e-300)))
        warnings.warn(
            f"after debiasing, the mean score of coordinate {k} is {mean[k]:.3g}, more than 5 standard errors from 0: "
            "the input points do not cover the target, or the scores are not its gradients",
            UserWarning,
            stacklevel=3,
        )


def _warn_of_clusters(points: Float) -> None:
    """Look for two clusters along the first principal axis: the best split into two, each of a tenth or more."""
    n = points.shape[0]
    sample = points[np.linspace(0, n - 1, 2000, dtype=int)] if n > 2000 else points
    if sample.shape[0] < 20:
        return
    centred = sample - sample.mean(axis=0)
    scale = np.abs(centred).max()
    if scale == 0:
        return
    axis = np.linalg.svd((centred / scale).T @ (centred / scale))[0][:, 0]
    t = np.sort(centred @ axis) / scale
    size = t.size
    cut = np.arange(max(1, size // 10), size - size // 10)
    total, squares = np.cumsum(t), np.cumsum(t * t)
    left, right = total[cut - 1] / cut, (total[-1] - total[cut - 1]) / (size - cut)
    within = (squares[-1] - cut * left**2 - (size - cut) * right**2) / size
    best = int(np.argmin(within))
    gap, sd = right[best] - left[best], np.sqrt(max(within[best], 1e-300))
    if gap > 6 * sd:
        warnings.warn(
            f"X falls into two clusters {gap / sd:.1f} standard deviations apart: a Stein kernel cannot tell in which "
            "proportion the target visits far-apart modes; check the weights of the modes by other means",
            UserWarning,
            stacklevel=3,
        )
