"""Compiled loops over the Stein kernel. Every public function of the family ends here.

Points arrive whitened (see :class:`~assay.statistics.stein_thinning.SteinKernel`): ``Z`` and ``G`` of shape ``(d, n)``
hold points and scores coordinate by coordinate, ``c`` of shape ``(n,)`` a factor per point, and with
``q2 = 1 / (1 + |z_i - z_j|^2)`` the kernel is

    ``k(i, j) = c_i c_j sqrt(q2) (g_i'g_j + q2 ((g_i - g_j)'(z_i - z_j) + d - 3 + 3 q2))``

that is one division and one square root an entry. ``K`` of shape ``(n, n)`` holds the entries where they are stored,
else it has shape ``(0, 0)`` and rows are evaluated when they are needed.

The loops carry no fast-math: an entry has the same bits in whichever block, row, thread or storage it is computed, so
stored and streamed runs pick the same points.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

Float = NDArray[np.float64]
Index = NDArray[np.int64]

_TILE = 256  # entries evaluated at once: the accumulators of a tile stay in the L1 cache
_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy"}


@njit(**_OPTIONS)
def fill(A: Float, B: Float, a: Float, i: int, Z: Float, G: Float, c: Float, lo: int, hi: int, out: Float) -> None:
    """Write ``k`` of point ``i`` of ``(A, B, a)`` with the points ``lo:hi`` of ``(Z, G, c)`` to ``out[:hi - lo]``."""
    d = Z.shape[0]
    shift = d - 3.0
    r2 = np.empty(_TILE)
    cross = np.empty(_TILE)
    dot = np.empty(_TILE)
    for start in range(lo, hi, _TILE):
        size = min(_TILE, hi - start)
        zi, gi = A[0, i], B[0, i]
        z, g = Z[0, start : start + size], G[0, start : start + size]
        for j in range(size):
            dz = zi - z[j]
            r2[j] = dz * dz
            cross[j] = (gi - g[j]) * dz
            dot[j] = gi * g[j]
        for k in range(1, d):
            zi, gi = A[k, i], B[k, i]
            z, g = Z[k, start : start + size], G[k, start : start + size]
            for j in range(size):
                dz = zi - z[j]
                r2[j] += dz * dz
                cross[j] += (gi - g[j]) * dz
                dot[j] += gi * g[j]
        ci = a[i]
        cj = c[start : start + size]
        tile = out[start - lo : start - lo + size]
        for j in range(size):
            q2 = 1.0 / (1.0 + r2[j])
            tile[j] = (ci * cj[j]) * (np.sqrt(q2) * (dot[j] + q2 * (cross[j] + (shift + 3.0 * q2))))


@njit(**_OPTIONS)
def matrix(A: Float, B: Float, a: Float, Z: Float, G: Float, c: Float, out: Float) -> None:
    """Fill ``out`` with the kernel between all points of ``(A, B, a)`` and all of ``(Z, G, c)``."""
    for i in range(out.shape[0]):
        fill(A, B, a, i, Z, G, c, 0, out.shape[1], out[i])


@njit(parallel=True, **_OPTIONS)
def matrix_parallel(A: Float, B: Float, a: Float, Z: Float, G: Float, c: Float, out: Float) -> None:
    """Do what :func:`matrix` does, with threads over rows."""
    for i in prange(out.shape[0]):
        fill(A, B, a, i, Z, G, c, 0, out.shape[1], out[i])


@njit(**_OPTIONS)
def get_row(K: Float, Z: Float, G: Float, c: Float, i: int, buffer: Float) -> Float:
    """Row ``i`` of the kernel: a view of ``K`` where it is stored, else ``buffer`` filled anew."""
    if K.shape[0] > 0:
        return K[i]
    fill(Z, G, c, i, Z, G, c, 0, buffer.shape[0], buffer)
    return buffer


@njit(**_OPTIONS)
def add_argmin(objective: Float, factor: float, row: Float) -> int:
    """``objective += factor * row``, and the lowest index of its minimum, in one pass over memory."""
    best, arg = np.inf, 0
    n = objective.shape[0]
    for start in range(0, n, _TILE):
        stop = min(start + _TILE, n)
        lower = 0
        for j in range(start, stop):
            value = objective[j] + factor * row[j]
            objective[j] = value
            lower += value < best
        # Few tiles hold a new minimum, so this second, branching loop hardly ever runs.
        if lower > 0:
            for j in range(start, stop):
                if objective[j] < best:
                    best, arg = objective[j], j
    return arg


@njit(**_OPTIONS)
def greedy(K: Float, Z: Float, G: Float, c: Float, objective: Float, tilt: Float, m: int) -> Index:
    """Greedy minimisation; ``objective`` (used up) is half the diagonal, ``tilt`` (or empty) is added at every step."""
    picks = np.empty(m, dtype=np.int64)
    buffer = np.empty(objective.shape[0] if K.shape[0] == 0 else 0)
    j = add_argmin(objective, 0.0, objective)
    picks[0] = j
    for t in range(1, m):
        if tilt.shape[0] > 0:
            for i in range(tilt.shape[0]):
                objective[i] += tilt[i]
        j = add_argmin(objective, 1.0, get_row(K, Z, G, c, j, buffer))
        picks[t] = j
    return picks


@njit(parallel=True, **_OPTIONS)
def greedy_parallel(Z: Float, G: Float, c: Float, objective: Float, tilt: Float, m: int, chunks: int) -> Index:
    """Do what :func:`greedy` does without a stored matrix, with threads over chunks of points."""
    n = objective.shape[0]
    picks = np.empty(m, dtype=np.int64)
    buffer = np.empty(n)
    best = np.empty(chunks, dtype=np.int64)
    size = (n + chunks - 1) // chunks
    j = add_argmin(objective, 0.0, objective)
    picks[0] = j
    for t in range(1, m):
        for b in prange(chunks):
            lo, hi = b * size, min(n, (b + 1) * size)
            if lo < hi:
                fill(Z, G, c, j, Z, G, c, lo, hi, buffer[lo:hi])
                if tilt.shape[0] > 0:
                    for i in range(lo, hi):
                        objective[i] += tilt[i]
                best[b] = lo + add_argmin(objective[lo:hi], 1.0, buffer[lo:hi])
            else:
                best[b] = n - 1
        j = best[0]
        for b in range(1, chunks):
            if objective[best[b]] < objective[j]:
                j = best[b]
        picks[t] = j
    return picks


@njit(**_OPTIONS)
def refine(K: Float, Z: Float, G: Float, c: Float, half_diagonal: Float, sequence: Index) -> Index:
    """One pass of swaps: each position in turn moves to the point that makes the discrepancy least."""
    result = sequence.copy()
    objective = half_diagonal.copy()
    buffer = np.empty(objective.shape[0] if K.shape[0] == 0 else 0)
    for j in sequence:
        add_argmin(objective, 1.0, get_row(K, Z, G, c, j, buffer))
    for t in range(result.shape[0]):
        j = add_argmin(objective, -1.0, get_row(K, Z, G, c, result[t], buffer))
        result[t] = j
        add_argmin(objective, 1.0, get_row(K, Z, G, c, j, buffer))
    return result


@njit(**_OPTIONS)
def _signed_sum(sign: Float, rx: Float, ry: Float, at: Index, n: int) -> float:
    """``sum_p sign[p] (rx[at[p]] - ry[at[p]])`` over p < n, in four partial sums that do not wait for each other."""
    a0, a1, a2, a3 = 0.0, 0.0, 0.0, 0.0
    whole = n - n % 4
    for p in range(0, whole, 4):
        i0, i1, i2, i3 = at[p], at[p + 1], at[p + 2], at[p + 3]
        a0 += sign[p] * (rx[i0] - ry[i0])
        a1 += sign[p + 1] * (rx[i1] - ry[i1])
        a2 += sign[p + 2] * (rx[i2] - ry[i2])
        a3 += sign[p + 3] * (rx[i3] - ry[i3])
    for p in range(whole, n):
        a0 += sign[p] * (rx[at[p]] - ry[at[p]])
    return (a0 + a1) + (a2 + a3)


@njit(**_OPTIONS)
def halve(
    K: Float, Z: Float, G: Float, c: Float, diagonal: Float, sequence: Index, delta: float, uniforms: Float
) -> NDArray[np.bool_]:
    """Kernel halving; ``True`` marks the positions of ``sequence`` that went to half 0.

    Without a stored matrix, ``Z``, ``G`` and ``c`` hold the points in the order of the sequence.
    ``diagonal`` holds ``k(x, x)`` in the order of the sequence.
    """
    n = sequence.shape[0]
    stored = K.shape[0] > 0
    positions = np.arange(0 if stored else n)
    sign = np.empty(n)  # +1 for half 1, -1 for half 0: S - 2 S0 as one signed sum
    first = np.zeros(n, dtype=np.bool_)
    bx = np.empty(0 if stored else n)
    by = np.empty(0 if stored else n)
    factor = np.sqrt(2.0 * np.log(2.0 / delta))
    sigma2 = 0.0
    for i in range(n // 2):
        x, y = 2 * i, 2 * i + 1
        if stored:
            rx, ry = K[sequence[x]], K[sequence[y]]
            kxy = rx[sequence[y]]
            alpha = _signed_sum(sign, rx, ry, sequence, x)
        else:
            fill(Z, G, c, x, Z, G, c, 0, y + 1, bx)
            fill(Z, G, c, y, Z, G, c, 0, x, by)
            kxy = bx[y]
            alpha = _signed_sum(sign, bx, by, positions, x)
        b2 = max(0.0, diagonal[x] + diagonal[y] - 2.0 * kxy)
        a = max(max(np.sqrt(b2 * sigma2) * factor, b2), 1e-10)
        sigma2 += b2 * max(0.0, 1.0 + (b2 - 2.0 * a) * sigma2 / (a * a))
        swap = uniforms[i] < min(1.0, max(0.0, 1.0 - alpha / a) / 2.0)
        first[x], first[y] = not swap, swap
        sign[x], sign[y] = (1.0, -1.0) if swap else (-1.0, 1.0)
    return first


@njit(**_OPTIONS)
def weighted_rows(K: Float, Z: Float, G: Float, c: Float, indices: Index, weights: Float, n: int) -> Float:
    """``sum_t weights[t] K[indices[t]]``, of shape ``(n,)``."""
    total = np.zeros(n)
    buffer = np.empty(n if K.shape[0] == 0 else 0)
    for t in range(indices.shape[0]):
        add_argmin(total, weights[t], get_row(K, Z, G, c, indices[t], buffer))
    return total


@njit(**_OPTIONS)
def swap_line_search(
    K: Float, Z: Float, G: Float, c: Float, diagonal: Float, weights: Float, clamp: bool
) -> tuple[Float, Float]:
    """Swap every point of the support for the one that a line search likes best; weights and ``K @ weights``."""
    n = diagonal.shape[0]
    w = weights.copy()
    support = np.flatnonzero(w)
    g = weighted_rows(K, Z, G, c, support, w[support], n)
    value = 0.0
    for j in support:
        value += w[j] * g[j]
    buffer = np.empty(n if K.shape[0] == 0 else 0)
    for j in support:
        wj = w[j]
        if abs(1.0 - wj) < 1e-12:
            continue
        value = (value - 2.0 * wj * g[j] + wj * wj * diagonal[j]) / (1.0 - wj) ** 2
        row = get_row(K, Z, G, c, j, buffer)
        scale = 1.0 / (1.0 - wj)
        for i in range(n):
            g[i] = (g[i] - wj * row[i]) * scale
            w[i] *= scale
        w[j] = 0.0
        best, arg, step = np.inf, int(j), 0.0
        for i in range(n):
            if w[i] == 0.0:
                a = (value - g[i]) / max(value - 2.0 * g[i] + diagonal[i], 1e-12 * diagonal[i])
                if clamp:
                    a = min(1.0, max(0.0, a))
                new = (1.0 - a) ** 2 * value + 2.0 * a * (1.0 - a) * g[i] + a * a * diagonal[i]
                if new < best:
                    best, arg, step = new, i, a
        row = get_row(K, Z, G, c, arg, buffer)
        for i in range(n):
            g[i] = (1.0 - step) * g[i] + step * row[i]
            w[i] *= 1.0 - step
        w[arg] += step
        value = best
    return w, g
