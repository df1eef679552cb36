"""Intervals for paired effects: Student's t, exact Wilcoxon, and the hull of both that a verdict uses.

Everything works on the last axis, so that one function serves a single comparison and a simulation of a hundred
thousand of them (``scripts/calibration.py``). Two-sided 95% throughout: an end is on the wrong side of the truth with
probability at most 2.5%.

Why the Wilcoxon end keeps its promise for *every* distribution of differences that is symmetric about the truth
(taken as 0), with ties, zeros and rounding: given the absolute values, the signs are independent fair coins. Break ties
among the absolute values anyhow and give zeros a coin of their own; the sum ``T`` of the ranks with positive sign then
has the textbook null distribution exactly, and it equals the number of pairs ``i <= j`` whose member of higher rank is
positive. A pair whose Walsh average ``(d_i + d_j) / 2`` is strictly positive is always among those. So at most ``T`` of
the ``m = n(n+1)/2`` averages are positive, and the k-th smallest can be positive only if ``T >= m - k + 1``, which has
the probability ``P(T <= k - 1) <= 2.5%`` that chose ``k``. Floating point changes nothing: ``a - b`` and ``b - a`` are
exact negatives, and a rounded sum has the sign of the exact one. Widening an interval cannot raise the error, so the
hull with any other interval inherits the promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

Array = NDArray[np.float64]

ONE_SIDED = 0.025
EXACT_FROM = 6  # 2**-6 < 2.5% < 2**-5: with five pairs even "all positive" is no proof without a further assumption
LEAST = 3  # with two pairs, t has one degree of freedom and rests on nothing but the normal assumption

_EXACT_NULL_UP_TO = 400
_ALL_PAIRS_UP_TO = 1000
_CHUNK = 1 << 22
_FINEST = 64


@dataclass(frozen=True)
class Intervals:
    """Effects with their ends on the scale of the statement, and ``flat`` where the effects did not vary."""

    effect: Array
    low: Array
    high: Array
    flat: NDArray[np.bool_]


def paired_interval(method: Array, baseline: Array, *, ratio: bool = False) -> Intervals:
    """Interval of the mean difference (or geometric mean ratio) of paired values.

    Parameters
    ----------
    method, baseline
        Finite values of shape ``(..., n)``, paired along the last axis; positive if ``ratio``.
    ratio
        Work on ``log(method) - log(baseline)``, and give the results as ratios.

    Returns
    -------
    Intervals
        Of shape ``(...)``. From six pairs on: the hull of the t-interval and the exact Wilcoxon interval. With three
        to five: the t-interval, widened on each side by half of the lattice step where the values are rounded
        (:func:`resolution`). With fewer: ends NaN. Where the effects are equal up to floating-point noise, ``flat`` is
        set; the ends then prove nothing.
    """
    method, baseline = np.broadcast_arrays(np.asarray(method, float), np.asarray(baseline, float))
    effects = np.log(method) - np.log(baseline) if ratio else method - baseline
    n = effects.shape[-1]
    effect = effects.mean(-1)
    flat = np.ptp(effects, axis=-1) <= float_noise(method, baseline, ratio=ratio)
    if n < LEAST:
        low = high = np.full(effect.shape, np.nan)
    else:
        low, high = t_interval(effects)
        if n >= EXACT_FROM:
            walsh_low, walsh_high = wilcoxon_interval(effects)
            low, high = np.minimum(low, walsh_low), np.maximum(high, walsh_high)
        else:
            guard = resolution(method, baseline) / 2
            if ratio:  # d log(v) = dv / v, at its largest for the smallest value
                guard = guard / np.minimum(method, baseline).min(-1)
            low, high = low - guard, high + guard
    if ratio:
        with np.errstate(over="ignore"):
            effect, low, high = np.exp(effect), np.exp(low), np.exp(high)
    return Intervals(effect, low, high, flat)


def t_interval(effects: Array) -> tuple[Array, Array]:
    """Student's 95% interval of the mean along the last axis (n >= 2)."""
    n = effects.shape[-1]
    centre = effects.mean(-1)
    half = stdtrit(n - 1, 1 - ONE_SIDED) * effects.std(-1, ddof=1) / np.sqrt(n)
    return centre - half, centre + half


def wilcoxon_interval(effects: Array) -> tuple[Array, Array]:
    """Closed interval of the pseudo-median that inverts the exact signed-rank test, along the last axis (n >= 6).

    The ends are the k-th smallest and k-th largest of the ``n(n+1)/2`` Walsh averages; coverage is at least 95% for
    every distribution that is symmetric about the truth (proof in the module's text).
    """
    n = effects.shape[-1]
    k = wilcoxon_rank(n)
    if k < 1:
        raise ValueError(f"effects: {n} pairs cannot reach {ONE_SIDED:.1%} one-sided; at least {EXACT_FROM} are needed")
    rows = effects.reshape(-1, n)
    low, high = np.empty(len(rows)), np.empty(len(rows))
    if n > _ALL_PAIRS_UP_TO:
        for r, row in enumerate(rows):
            x = np.sort(row)
            low[r], high[r] = _walsh_select(x, k), -_walsh_select(-x[::-1], k)
    else:
        i, j = np.triu_indices(n)
        step = max(1, _CHUNK // i.size)
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            sums = np.partition(part[:, i] + part[:, j], (k - 1, i.size - k), axis=1)
            low[start : start + step] = sums[:, k - 1] / 2
            high[start : start + step] = sums[:, i.size - k] / 2
    return low.reshape(effects.shape[:-1]), high.reshape(effects.shape[:-1])


@lru_cache(maxsize=1024)
def wilcoxon_rank(n: int) -> int:
    """How far from the extreme Walsh average the interval's end lies: the largest k with P(T <= k - 1) <= 2.5%.

    Exact up to n = 400. Beyond, the normal approximation with continuity correction: the signed-rank distribution is
    symmetric with negative excess kurtosis, so that its tail at 1.96 standard deviations is lighter than the normal
    one and the approximation errs on the safe side (a test compares it with the exact rank).
    """
    if n <= _EXACT_NULL_UP_TO:
        return _exact_rank(n)
    return _normal_rank(n)


def _exact_rank(n: int) -> int:
    size = n * (n + 1) // 4 + 1  # the lower half is enough: ranks only move the sum up
    p = np.zeros(size)
    p[0] = 1.0
    for rank in range(1, n + 1):
        p[rank:] += p[:-rank].copy() if rank < size else 0.0
        p /= 2
    return int(np.searchsorted(np.cumsum(p), ONE_SIDED, side="right"))


def _normal_rank(n: int) -> int:
    mean, sd = n * (n + 1) / 4, np.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return int(np.floor(mean + ndtri(ONE_SIDED) * sd - 0.5)) + 1


def _walsh_select(x: Array, k: int) -> float:
    """The k-th smallest Walsh average of sorted ``x`` without forming all pairs: bisection over counts, O(n log n)."""
    n = x.size
    own = np.arange(n)
    run_start, run_end = np.searchsorted(x, x, side="left"), np.searchsorted(x, x, side="right")

    def above(bound: float) -> NDArray[np.intp]:
        """For each i, the first j >= i with x[i] + x[j] > bound."""
        first = np.searchsorted(x, bound - x, side="right")
        # bound - x is rounded: step over neighbours (and their ties) until the sums themselves agree
        while (back := (first > 0) & (x + x[first - 1] > bound)).any():
            first = np.where(back, run_start[first - 1], first)
        while (on := (first < n) & (x + x[np.minimum(first, n - 1)] <= bound)).any():
            first = np.where(on, run_end[np.minimum(first, n - 1)], first)
        return np.maximum(first, own)

    low, high = np.nextafter(2 * x[0], -np.inf), 2 * x[-1]  # count(low) < k <= count(high), in sums
    while True:
        middle = low + (high - low) / 2
        first = above(middle)
        if (first - own).sum() >= k:
            if middle >= high:
                return float(high / 2)
            high = middle
        else:
            # jump to the next sum that exists; it is the answer once enough of them are not above it
            inside = first < n
            low = float((x[inside] + x[first[inside]]).min())
            if (above(low) - own).sum() >= k:
                return low / 2


def resolution(method: Array, baseline: Array) -> Array:
    """Step of the lattice on which rounded values lie, along the last axis; 0 where there is none.

    An approximate greatest common divisor of the gaps between neighbouring values of each arm, so that the two arms
    may be offset against each other (a baseline that is one constant, say). Steps finer than 1/64 of the smallest gap
    are not looked for: they are too small to matter. Continuous values fit such a lattice only by accident.
    """
    shape = method.shape[:-1]
    a, b = np.atleast_2d(method), np.atleast_2d(baseline)
    a, b = a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1])
    noise = float_noise(a, b)[:, None]
    gaps = np.concatenate([np.diff(np.sort(a, -1), axis=-1), np.diff(np.sort(b, -1), axis=-1)], -1)
    gaps[gaps <= noise] = 0.0
    smallest = np.where(gaps > 0, gaps, np.inf).min(-1)
    step = np.zeros(len(gaps))
    left = np.flatnonzero(np.isfinite(smallest))
    for divisor in range(1, _FINEST + 1):
        if not left.size:
            break
        candidate = (smallest[left] / divisor)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            cells = gaps[left] / candidate
            # the candidate itself is a gap, off by noise, and that error grows with the number of cells
            slack = 1e-6 + 2 * noise[left] / candidate * (1 + cells)
            fits = (np.abs(cells - np.rint(cells)) <= np.minimum(slack, 0.05)).all(-1)
        step[left[fits]] = candidate[fits, 0]
        left = left[~fits]
    return step.reshape(shape)


def float_noise(method: Array, baseline: Array, *, ratio: bool = False) -> Array:
    """What rounding alone can do to an effect: four units in the last place of the largest value.

    The last place is float32's where all values fit into a float32 exactly, since they were then computed in one.
    """
    with np.errstate(over="ignore"):
        single = np.all((method == np.float32(method)) & (baseline == np.float32(baseline)), axis=-1)
    eps = np.where(single, np.finfo(np.float32).eps, np.finfo(np.float64).eps)
    if ratio:
        # relative noise of each value, and the rounding of its logarithm
        largest = np.maximum(np.abs(np.log(method)), np.abs(np.log(baseline))).max(-1)
        return np.asarray(4 * (eps + np.finfo(np.float64).eps * largest))
    return np.asarray(4 * eps * np.maximum(np.abs(method), np.abs(baseline)).max(-1))


def asymmetry(effects: Array) -> float:
    """Two-sided p-value of the triples test (Randles, Fligner, Policello and Wolfe 1980) for symmetry about any centre.

    A triple leans right if its middle value is nearer to its smaller one. The share of right-leaning minus left-leaning
    triples is studentised by its jackknife error. ``effects`` is one-dimensional; 1.0 where nothing can be said: fewer
    than ten values, or more than half of them tied, which makes the normal approximation worthless. Of more than 300
    values, 300 evenly spaced order statistics stand for all.
    """
    x = np.sort(effects)
    if x.size < 10 or np.unique(x, return_counts=True)[1].max() > x.size / 2:
        return 1.0
    if x.size > 300:
        x = x[np.linspace(0, x.size - 1, 300).round().astype(int)]
    n = x.size
    i, k = np.triu_indices(n, 2)
    sums = x[i] + x[k]
    # members i < j < k: those before `left` lie nearer to x[i], those from `right` on nearer to x[k]
    left = np.clip(np.searchsorted(2 * x, sums, "left"), i + 1, k)
    right = np.clip(np.searchsorted(2 * x, sums, "right"), i + 1, k)
    lean = (left - (i + 1)) - (k - right)
    as_middle = np.cumsum(
        sum(s * np.bincount(at, minlength=n) for s, at in ((1, i + 1), (-1, left), (-1, right), (1, k)))
    )
    own = np.bincount(i, lean, n) + np.bincount(k, lean, n) + as_middle
    total = lean.sum()
    without = (total - own) / ((n - 1) * (n - 2) * (n - 3) / 6)
    error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
    if error == 0:
        return 1.0 if total == 0 else 0.0
    return float(2 * stdtr(n - 1, -abs(total / (n * (n - 1) * (n - 2) / 6)) / error))
