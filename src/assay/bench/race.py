"""Interleaved timing: every arm once a round, A B A B, so that a ratio survives a noisy machine."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

Call = Callable[[], object]

SHORTEST = 1e-3
"""Seconds that one measurement lasts at least; shorter calls are repeated within it."""

_MOST_LOOPS = 1_000_000
_RESAMPLES = 9999


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with the ends of its 95% interval (NaN with fewer than three rounds)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RaceResult:
    """Seconds of one call by arm and round.

    ``seconds[name][i]`` is the mean over the ``loops[name]`` calls that the arm made in round ``i``.
    """

    seconds: dict[str, NDArray[np.float64]]
    loops: dict[str, int]

    def median(self, name: str) -> float:
        """Median seconds of one call."""
        return float(np.median(self.seconds[name]))

    def quartiles(self, name: str) -> tuple[float, float]:
        """Lower and upper quartile of the seconds of one call."""
        low, high = np.quantile(self.seconds[name], (0.25, 0.75))
        return float(low), float(high)

    def ratio(self, a: str, b: str, *, seed: int = 0) -> Ratio:
        """Median seconds of ``a`` over median seconds of ``b``; below 1 where ``a`` is faster.

        The interval is the percentile bootstrap over rounds, drawn for both arms together: what slows a round down
        slows both. It says how well *this* race in *this* process is known, not how the ratio varies over machines.
        """
        x, y = self.seconds[a], self.seconds[b]
        value = float(np.median(x) / np.median(y))
        if x.size < 3:
            return Ratio(value, math.nan, math.nan)
        rounds = np.random.default_rng(seed).integers(x.size, size=(_RESAMPLES, x.size))
        low, high = np.quantile(np.median(x[rounds], axis=1) / np.median(y[rounds], axis=1), (0.025, 0.975))
        return Ratio(value, float(low), float(high))


def race(
    calls: Mapping[str, Call],
    *,
    rounds: int = 7,
    warmup: int = 1,
    before: Mapping[str, Call] | None = None,
    synchronize: Call | None = None,
    seed: int = 0,
) -> RaceResult:
    """Time calls against each other in this process.

    Parameters
    ----------
    calls
        What is timed, by name.
    rounds
        Measurements of each call. The order within a round is drawn anew for every other round and reversed in the one
        after it, so that no arm is always early or always behind the same neighbour.
    warmup
        Untimed calls of each ahead of the race. One more call (some, of a short one) finds out how often a measurement
        must repeat the call to last a millisecond.
    before
        Untimed calls that run ahead of every single call of the same name, to restore what it uses up.
    synchronize
        Called before each clock reading. By default it waits for CUDA, if torch is loaded and has used a device.
    seed
        Of the order.

    Returns
    -------
    RaceResult

    Raises
    ------
    ValueError
        For no calls, fewer than one round, a negative warm-up, or a ``before`` without a call of its name.

    Notes
    -----
    Garbage is collected ahead of each round; the collector is off while a clock runs.
    """
    before = {} if before is None else before
    if not calls:
        raise ValueError("calls is empty: a race needs at least one call")
    if rounds < 1 or warmup < 0:
        raise ValueError(f"rounds must be at least 1 and warmup at least 0, not {rounds} and {warmup}")
    if unknown := sorted(set(before) - set(calls)):
        raise ValueError(f"before names {unknown}, which are not among the calls {sorted(calls)}")

    names = list(calls)
    for _ in range(warmup):
        for name in names:
            _measure(calls[name], before.get(name), 1, synchronize)
    collecting = gc.isenabled()
    try:
        gc.disable()
        loops = {name: _loops(calls[name], before.get(name), synchronize) for name in names}
        seconds = {name: np.empty(rounds) for name in names}
        rng = np.random.default_rng(seed)
        order = names
        for r in range(rounds):
            gc.collect()
            order = order[::-1] if r % 2 else [names[i] for i in rng.permutation(len(names))]
            for name in order:
                seconds[name][r] = _measure(calls[name], before.get(name), loops[name], synchronize)
    finally:
        if collecting:
            gc.enable()
    return RaceResult(seconds, loops)


def _measure(call: Call, before: Call | None, loops: int, synchronize: Call | None) -> float:
    """Seconds of one call: the mean over ``loops`` of them."""
    wait = synchronize or _cuda_wait()
    if before is None:
        wait()
        start = perf_counter_ns()
        for _ in range(loops):
            call()
        wait()
        return (perf_counter_ns() - start) / loops / 1e9
    total = 0
    for _ in range(loops):
        before()
        wait()
        start = perf_counter_ns()
        call()
        wait()
        total += perf_counter_ns() - start
    return total / loops / 1e9


def _cuda_wait() -> Call:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.synchronize
    return lambda: None


def _loops(call: Call, before: Call | None, synchronize: Call | None) -> int:
    loops = 1
    while True:
        lasted = _measure(call, before, loops, synchronize) * loops
        if SHORTEST <= lasted < 100 * SHORTEST:  # did the call last, or was the process put to sleep within it?
            lasted = min(lasted, _measure(call, before, loops, synchronize) * loops)
        if lasted >= SHORTEST or loops >= _MOST_LOOPS:
            return loops
        # a tenth more than it takes at the last pace, at most tenfold since the first paces mislead
        wanted = math.ceil(1.1 * loops * SHORTEST / max(lasted, 1e-9))
        loops = min(max(wanted, loops + 1), 10 * loops, _MOST_LOOPS)


def fit_exponent(sizes: ArrayLike, seconds: ArrayLike) -> tuple[float, float, float]:
    """Exponent ``p`` of a growth ``seconds ~ c * sizes**p``, with its 95% interval.

    Least squares on the logarithms, with Student's t for the interval. The exponent describes the sizes that were
    measured; fixed costs flatten it at small ones.

    Parameters
    ----------
    sizes
        Positive sizes, at least three different ones; shape ``(k,)``.
    seconds
        Positive times (or bytes) of each size, shape ``(k,)``: medians of a race, say.

    Returns
    -------
    tuple of float
        Exponent, low end, high end.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    if x.ndim != 1 or x.shape != y.shape:
        raise ValueError(f"sizes and seconds must be one-dimensional and of one length, not {x.shape} and {y.shape}")
    if np.unique(x).size < 3:
        raise ValueError(f"sizes must hold at least three different values, not {np.unique(x).size}")
    for what, values in (("sizes", x), ("seconds", y)):
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ValueError(f"{what} must be positive and finite, not {values.tolist()}")
    u, v = np.log(x) - np.log(x).mean(), np.log(y)
    slope = float(u @ v / (u @ u))
    residual = v - v.mean() - slope * u
    degrees = x.size - 2
    half = float(stdtrit(degrees, 0.975) * math.sqrt(residual @ residual / degrees / (u @ u)))
    return slope, slope - half, slope + half
