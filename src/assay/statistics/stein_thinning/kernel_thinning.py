"""Kernel thinning with a mean-zero kernel: halve, split, swap, and the near-linear Compress++."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning import _cores
from assay.statistics.stein_thinning._cores import Index
from assay.statistics.stein_thinning.greedy import stein_thin
from assay.statistics.stein_thinning.kernel import (
    SteinKernel,
    as_kernel,
    check_count,
    check_indices,
    check_random_state,
)

Seed = int | np.random.Generator | None


def kernel_halve(
    kernel: SteinKernel | ArrayLike, sequence: ArrayLike, *, delta: float = 0.5, random_state: Seed = None
) -> tuple[Index, Index]:
    r"""Split a sequence of points into two halves that represent it, and each other, better than chance would.

    Each consecutive pair (x, y) is dealt out at once: x goes to half 0 and y to half 1, swapped with probability
    :math:`\min(1, \frac12 \max(0, 1 - \alpha/a))`, where :math:`\alpha = S(x) - S(y) - 2 S_0(x) + 2 S_0(y)` sums the
    kernel over the points dealt so far (S) and those in half 0 (:math:`S_0`), and
    :math:`a = \max(b\sigma\sqrt{2\ln(2/\delta)}, b^2)` with :math:`b^2 = K_{xx} + K_{yy} - 2K_{xy}`.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix.
    sequence : array (N,)
        Row numbers, repeats allowed; N is even. The order matters: pairs are neighbours.
    delta
        Failure probability, between 0 and 1. The default of 0.5 is that of the authors' code, at every call (the
        analysis divides it by N).

    Returns
    -------
    Two index arrays ``(N/2,)``, in the order of the sequence. O(N^2) kernel entries, O(N) memory.

    Notes
    -----
    Source: Dwivedi, Mackey, "Kernel thinning", COLT 2021.
    """
    fitted = as_kernel(kernel)
    points = check_indices(sequence, fitted.n)
    if points.size % 2:
        raise ValueError(f"sequence must have an even length, got {points.size}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie between 0 and 1, got {delta}")
    uniforms = check_random_state(random_state).random(points.size // 2)
    parts = fitted.parts() if fitted.stored else (fitted.parts()[0], *fitted._gather(points))
    first = _cores.halve(*parts, fitted._diagonal[points], points, float(delta), uniforms)
    return points[first], points[~first]


def kernel_split(
    kernel: SteinKernel | ArrayLike,
    sequence: ArrayLike,
    rounds: int,
    *,
    delta: float = 0.5,
    random_state: Seed = None,
) -> list[Index]:
    """Halve again and again: ``2**rounds`` candidate coresets of ``N / 2**rounds`` points each."""
    fitted = as_kernel(kernel)
    points = check_indices(sequence, fitted.n)
    count = check_count(rounds, "rounds", 0)
    if points.size % (1 << count):
        raise ValueError(f"sequence must have a length that 2**{count} divides, got {points.size}")
    rng = check_random_state(random_state)
    candidates = [points]
    for _ in range(count):
        candidates = [
            half for whole in candidates for half in kernel_halve(fitted, whole, delta=delta, random_state=rng)
        ]
    return candidates


def squared_mmd(kernel: SteinKernel, sequence: Index) -> float:
    """Squared discrepancy of equal weights on a sequence with repeats."""
    return float(kernel.matrix(sequence, sequence).mean())


def kernel_swap(kernel: SteinKernel | ArrayLike, candidates: list[Index], *, baseline: Index | None = None) -> Index:
    """Refine the best candidate, and Stein thinning's choice, and give the better of the two.

    Each position in turn is moved to whichever input point makes the discrepancy least (the present one included, so
    it never rises); one pass.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix.
    candidates
        Index arrays of one length m.
    baseline
        The second candidate; Stein thinning's m points by default.

    Returns
    -------
    Sorted index array ``(m,)``, repeats allowed.
    """
    fitted = as_kernel(kernel)
    checked = [check_indices(c, fitted.n) for c in candidates]
    if not checked or len({c.size for c in checked}) != 1:
        raise ValueError(f"candidates must be index arrays of one length, got lengths {[c.size for c in checked]}")
    best = min(checked, key=lambda c: squared_mmd(fitted, c))
    second = stein_thin(fitted, best.size) if baseline is None else check_indices(baseline, fitted.n)
    half = fitted.diag() / 2
    # The order of the swaps is the order of the sequence: refined is sorted only when it is given back.
    refined = [_cores.refine(*fitted.parts(), half, c) for c in (best, second)]
    return np.sort(min([*refined, second], key=lambda c: squared_mmd(fitted, c)))


def kernel_thin(
    kernel: SteinKernel | ArrayLike,
    sequence: ArrayLike,
    n_points: int,
    *,
    delta: float = 0.5,
    baseline: Index | None = None,
    random_state: Seed = None,
) -> Index:
    """Mean-zero kernel thinning: split a sequence of ``n_points * 2**t`` points, then swap.

    Returns
    -------
    Sorted index array ``(n_points,)``, repeats allowed. O(N^2) kernel entries.
    """
    fitted = as_kernel(kernel)
    points = check_indices(sequence, fitted.n)
    m = check_count(n_points, "n_points", 1, points.size)
    rounds = (points.size // m).bit_length() - 1
    if m << rounds != points.size:
        raise ValueError(f"sequence must have n_points * 2**t = {m} * 2**t entries, got {points.size}")
    candidates = kernel_split(fitted, points, rounds, delta=delta, random_state=random_state)
    return kernel_swap(fitted, candidates, baseline=baseline)


def compress_pp(
    kernel: SteinKernel | ArrayLike,
    sequence: ArrayLike,
    *,
    oversampling: int = 4,
    delta: float = 0.5,
    random_state: Seed = None,
) -> Index:
    """KT-Compress++: from N = 4^p points to sqrt(N), in about 4^g N log N kernel entries instead of N^2.

    Compress cuts a sequence into four quarters, compresses each, and halves what is left of them together, down to
    pieces of 4^g points. Its outermost call leaves out the last halving, and kernel thinning takes the
    2^(g+1) sqrt(N) points that remain to sqrt(N).

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix.
    sequence : array (4^p,)
        Row numbers in the order of the chain, repeats allowed.
    oversampling
        g; at most p - 1 is used. 4 is the value of the authors' code, which also keeps ``delta`` at every size.

    Returns
    -------
    Sorted index array ``(2^p,)``, repeats allowed.

    Notes
    -----
    Source: Shetty, Dwivedi, Mackey, "Distribution compression in near-linear time", ICLR 2022; Li, Dwivedi, Mackey,
    ICML 2024, algorithm LSKT.
    """
    fitted = as_kernel(kernel)
    points = check_indices(sequence, fitted.n)
    power = (points.size.bit_length() - 1) // 2
    if 4**power != points.size:
        raise ValueError(f"sequence must have 4**p entries, got {points.size}")
    g = min(check_count(oversampling, "oversampling", 0), power - 1)
    if power == 0:
        return kernel_swap(fitted, [points])
    rng = check_random_state(random_state)

    def compress(part: Index, outermost: bool) -> Index:
        if part.size == 4**g:
            return part
        joined = np.concatenate([compress(quarter, False) for quarter in np.split(part, 4)])
        if outermost:
            return joined
        halves = kernel_halve(fitted, joined, delta=delta, random_state=rng)
        return halves[int(rng.random() < 0.5)]

    left = compress(points, True)
    return kernel_swap(fitted, kernel_split(fitted, left, g + 1, delta=delta, random_state=rng))
