"""How good prediction intervals are: coverage, width, Winkler score, and coverage where it is hardest."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.rqr.formulas import Array, check_coverage, check_vectors


def _bounds(y: ArrayLike, lower: ArrayLike, upper: ArrayLike) -> tuple[Array, Array, Array]:
    """Check targets and bounds; bounds may be infinite, never NaN or crossed."""
    (y_,) = check_vectors(y=y)
    low, high = np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
    for name, bound in (("lower", low), ("upper", high)):
        if bound.shape != y_.shape:
            raise ValueError(f"{name} must have the shape of y, {y_.shape}, got {bound.shape}")
        if np.isnan(bound).any():
            raise ValueError(f"{name} holds NaN")
    crossed = int((low > high).sum())
    if crossed:
        raise ValueError(f"lower exceeds upper in {crossed} of {len(y_)} rows; sort the bounds first")
    return y_.astype(np.float64), low, high


def winkler_score(y: ArrayLike, lower: ArrayLike, upper: ArrayLike, coverage: float = 0.9) -> float:
    """Mean Winkler (interval) score: width plus ``2/(1-coverage)`` times the distance of a target outside.

    A proper score: the true equal-tailed quantiles have the lowest. Shorter intervals of the same coverage can score
    worse. In the unit of ``y``; shapes (n,).

    Raises
    ------
    ValueError
        Shapes differ, a value is NaN, a bound is crossed, ``coverage`` is outside (0, 1).
    """
    coverage = check_coverage(coverage)
    y_, low, high = _bounds(y, lower, upper)
    outside = np.maximum(low - y_, 0) + np.maximum(y_ - high, 0)
    return float(np.mean(high - low + 2.0 / (1.0 - coverage) * outside))


def _hsic(inside: Array, width: Array, rows: int = 2000) -> float:
    """``sqrt(HSIC)`` of coverage indicator and standardised width, Gaussian kernels, at most 2000 spaced rows."""
    step = max(1, -(-len(width) // rows))
    v, w = inside[::step], width[::step]
    m = len(w)
    if m < 2 or not np.isfinite(w).all() or w.min() == w.max() or v.min() == v.max():
        return 0.0
    sd = w.std()
    w = w / sd
    k = np.exp(-((v[:, None] - v[None]) ** 2))
    g = np.exp(-((w[:, None] - w[None]) ** 2))
    k = k - k.mean(0)
    k = k - k.mean(1, keepdims=True)
    return float(np.sqrt(max((g * k).sum(), 0.0)) / (m - 1))


def interval_report(
    y: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    X: ArrayLike | None = None,
    groups: ArrayLike | None = None,
    *,
    coverage: float = 0.9,
    strata: int = 5,
) -> dict[str, Any]:
    """All there is to know about intervals on data that was not used to make them.

    Parameters
    ----------
    y, lower, upper
        Shape (n,). Bounds may be infinite.
    X
        Features (n, p), numeric: adds the worst coverage over ``strata`` equally filled slices of each column.
    groups
        Labels (n,): adds the coverage of each group.
    coverage
        The nominal level, in (0, 1); it only enters the Winkler score.
    strata
        Number of equally filled strata of interval width.

    Returns
    -------
    dict with

    - ``n``, ``coverage`` and its standard error ``coverage_se``;
    - ``mean_width``, ``median_width``, ``winkler`` in the unit of ``y``;
    - ``coverage_by_width``: coverage in each stratum of width, narrow to wide, and its minimum
      ``worst_stratum_coverage`` (size-stratified coverage);
    - ``hsic``: dependence between coverage and width, 0 where there is none;
    - ``infinite``: share of intervals with an infinite bound;
    - with ``X``: ``worst_slice_coverage`` and ``worst_slice`` as ``(column, slice)``;
    - with ``groups``: ``coverage_by_group``.

    Raises
    ------
    ValueError
        Shapes do not fit, NaN, crossed bounds, ``coverage`` outside (0, 1), ``strata`` below 1.
    """
    coverage = check_coverage(coverage)
    y_, low, high = _bounds(y, lower, upper)
    if strata < 1:
        raise ValueError(f"strata must be at least 1, got {strata}")
    n, width = len(y_), high - low
    inside = ((y_ >= low) & (y_ <= high)).astype(np.float64)
    share = float(inside.mean())

    def by_slices(values: Array) -> list[float]:
        order = np.argsort(values, kind="stable")
        return [float(inside[part].mean()) for part in np.array_split(order, min(strata, n))]

    by_width = by_slices(width)
    report: dict[str, Any] = {
        "n": n,
        "coverage": share,
        "coverage_se": float(np.sqrt(share * (1.0 - share) / n)),
        "mean_width": float(width.mean()),
        "median_width": float(np.median(width)),
        "winkler": winkler_score(y_, low, high, coverage),
        "coverage_by_width": by_width,
        "worst_stratum_coverage": min(by_width),
        "hsic": _hsic(inside, width),
        "infinite": float(np.isinf(width).mean()),
    }
    if X is not None:
        features = np.asarray(X, dtype=np.float64)
        if features.ndim != 2 or len(features) != n or np.isnan(features).any():
            raise ValueError(f"X must be numeric of shape ({n}, p) without NaN, got shape {features.shape}")
        worst = min(
            (value, (column, at))
            for column in range(features.shape[1])
            for at, value in enumerate(by_slices(features[:, column]))
        )
        report["worst_slice_coverage"], report["worst_slice"] = worst
    if groups is not None:
        labels = np.asarray(groups)
        if labels.shape != (n,):
            raise ValueError(f"groups must have shape ({n},), got {labels.shape}")
        report["coverage_by_group"] = {
            label: float(inside[labels == label].mean()) for label in np.unique(labels).tolist()
        }
    return report
