"""Weights to points with multiplicity."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning._cores import Float, Index
from assay.statistics.stein_thinning.kernel import as_float, check_count, check_random_state, check_weights


def stratified_round(weights: ArrayLike, size: int, *, random_state: int | np.random.Generator | None = None) -> Index:
    r"""Replace weights by ``size`` equally weighted points, repeats allowed.

    Point i is taken :math:`\lfloor N w_i\rfloor` times; what is left is drawn by stratified resampling in input order,
    one draw a stratum. A residual below 1 overlaps at most two strata, so a count lies above :math:`N w_i - 1` and
    below :math:`N w_i + 2`, and is :math:`N w_i` on average. Weights that are multiples of 1/N need no chance.

    Parameters
    ----------
    weights : array (n,)
        Not negative, sum 1.
    size
        N.

    Returns
    -------
    Index array ``(size,)``, sorted.

    Notes
    -----
    Source: Li, Dwivedi, Mackey, "Debiased Distribution Compression", ICML 2024, appendix on stratified residual
    resampling.
    """
    w = check_weights(weights, as_float(weights, "weights").size)
    total = check_count(size, "size", 1)
    scaled = w * (total / w.sum())
    whole = np.round(scaled)
    # A multiple of 1/N is off by rounding only; floor alone would lose a copy of it.
    base = np.where(np.abs(scaled - whole) <= 1e-9 * np.maximum(1.0, whole), whole, np.floor(scaled))
    rest = scaled - base
    left = total - int(base.sum())
    counts = base.astype(np.int64)
    if left > 0:
        rng = check_random_state(random_state)
        rest = np.maximum(rest, 0.0)
        ticks = (np.arange(left) + rng.random(left)) / left
        cumulative = np.cumsum(rest)
        drawn = np.searchsorted(cumulative / cumulative[-1], ticks, side="right")
        counts += np.bincount(np.minimum(drawn, w.size - 1), minlength=w.size)
    return np.repeat(np.arange(w.size), counts)


def frequencies(sequence: ArrayLike, n: int) -> Float:
    """Weights ``(n,)`` of a sequence of indices with repeats."""
    indices = np.asarray(sequence, dtype=np.int64)
    return np.bincount(indices, minlength=n) / indices.size
