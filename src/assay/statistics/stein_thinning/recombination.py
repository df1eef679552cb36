"""Fewer weighted points with the same moments, and the best weights on a few points."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from assay.statistics.stein_thinning import _cores
from assay.statistics.stein_thinning._cores import Float, Index
from assay.statistics.stein_thinning.debias import rp_cholesky
from assay.statistics.stein_thinning.kernel import (
    SteinKernel,
    as_float,
    as_kernel,
    check_count,
    check_random_state,
    check_weights,
)


def recombine(moments: ArrayLike, weights: ArrayLike) -> Float:
    r"""Put weights on few points without changing their moments (Carathéodory, constructively).

    Parameters
    ----------
    moments : array (n, k)
        k functions at n points.
    weights : array (n,)
        w, not negative, sum 1.

    Returns
    -------
    Weights ``(n,)``: at most k + 1 of them positive, none negative, sum 1, with
    :math:`\sum_i w'_i f(x_i) = \sum_i w_i f(x_i)` for all k functions. With n <= k + 1 the input comes back.

    Notes
    -----
    Points are put into about 2(k+1) consecutive groups, the grouped problem is solved, and the groups that lost their
    mass are dropped: O(k^3 log(n/k) + n k). Columns are scaled by :math:`\sqrt{w}`, which keeps the problem well
    conditioned when the moments are a factor of the kernel. Source: Tchernychova, "Carathéodory cubature measures",
    2016; Li, Dwivedi, Mackey, ICML 2024, appendix on recombination thinning.
    """
    F = as_float(moments, "moments")
    if F.ndim != 2:
        raise ValueError(f"moments must have shape (n, k), got {F.shape}")
    w = check_weights(weights, F.shape[0])
    m = F.shape[1] + 1
    active = np.flatnonzero(w)
    if active.size <= m:
        return w.copy()
    root = np.sqrt(w[active])
    columns = np.vstack([F[active].T * root, root])  # (m, n)
    size = np.sqrt((columns**2).sum(axis=1, keepdims=True))
    columns = columns / np.where(size > 0, size, 1.0)  # a moment's unit must not decide what counts as rounding
    x = root.copy()
    positions = np.arange(active.size)
    while positions.size > 2 * m:
        groups = np.array_split(positions, 2 * m)
        grouped = np.stack([columns[:, g] @ x[g] for g in groups], axis=1)
        scale = _basic_solution(grouped, np.ones(len(groups)))
        for factor, group in zip(scale, groups):
            x[group] *= factor
        positions = positions[x[positions] > 0]
    x[positions] *= _basic_solution(columns[:, positions] * x[positions], np.ones(positions.size))
    result = np.zeros(F.shape[0])
    result[active] = np.maximum(0.0, x * root)
    return result / result.sum()


def _basic_solution(columns: Float, x: Float) -> Float:
    """Move ``x > 0`` along the null space of ``columns`` until no more than ``rank`` entries are left."""
    rows, n = columns.shape
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    # Columns of unit length: groups differ in mass by orders of magnitude.
    _, values, basis = np.linalg.svd(columns / norms, full_matrices=True)
    rank = int((values > values[0] * 1e-13 * max(rows, n)).sum())
    null = basis[rank:] / norms
    x = x.copy()
    for i in range(null.shape[0]):
        v = null[i]
        if not (v > 0).any():
            v = -v
        ratios = np.full(n, np.inf)
        rising = v > 1e-14 * np.abs(v).max()
        ratios[rising] = x[rising] / v[rising]
        k = int(np.argmin(ratios))
        x = np.maximum(0.0, x - ratios[k] * v)
        x[k] = 0.0
        null[i + 1 :] -= np.outer(null[i + 1 :, k] / v[k], v)
        null[i + 1 :, k] = 0.0
    return x


def simplex_qp(K: ArrayLike, weights: ArrayLike | None = None) -> Float:
    r"""Exact minimiser of :math:`v^\top K v` over the simplex, by a primal active-set method.

    Parameters
    ----------
    K : array (m, m)
        Symmetric positive semidefinite; a ridge of 1e-12 of its mean diagonal is added, since points may repeat.
    weights : array (m,)
        Where to start; the objective never rises above its value there. Equal weights by default.

    Returns
    -------
    Weights ``(m,)``, not negative, sum 1.
    """
    A = as_float(K, "K")
    if A.ndim != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"K must be a square matrix, got shape {A.shape}")
    m = A.shape[0]
    start = np.full(m, 1 / m) if weights is None else check_weights(weights, m)
    ridge = 1e-12 * float(np.trace(A)) / m
    A = A + np.diag(np.full(m, ridge))
    v = start / start.sum()
    free = v > 0
    for _ in range(10 * m + 10):
        rows = np.flatnonzero(free)
        target = _constant_solution(A[np.ix_(rows, rows)])
        move = target - v[rows]
        if target.min() >= 0:
            v = np.zeros(m)
            v[rows] = target
            slack = A @ v
            level = float(v @ slack)
            blocked = np.where(free, np.inf, slack)
            worst = int(np.argmin(blocked))
            if not blocked[worst] < level * (1 - 1e-10):
                break
            free[worst] = True
            continue
        falling = move < 0
        limits = np.full(rows.size, np.inf)
        limits[falling] = v[rows][falling] / -move[falling]
        k = int(np.argmin(limits))
        v[rows] = np.maximum(0.0, v[rows] + min(1.0, limits[k]) * move)
        v[rows[k]] = 0.0
        free &= v > 0
        v /= v.sum()
    return v if v @ A @ v <= start @ A @ start else start


def _constant_solution(A: Float) -> Float:
    """Minimiser of ``v'Av`` among ``v`` of sum 1 and any sign."""
    try:
        v = cho_solve(cho_factor(A), np.ones(A.shape[0]))
    except LinAlgError:
        v = np.linalg.lstsq(A, np.ones(A.shape[0]), rcond=1e-12)[0]
    return v / v.sum()


def swap_line_search(kernel: SteinKernel | ArrayLike, weights: ArrayLike, *, negative: bool = False) -> Float:
    r"""Exchange each point of the support for the one that a line search likes best, which never hurts.

    For each point j in turn: w_j is removed and the rest renormalised; of all points i outside the support, the one
    is added that makes :math:`(1-a)^2 A + 2a(1-a)g_i + a^2K_{ii}` least at its best a
    (:math:`g = Kw`, :math:`A = w^\top K w`).

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix.
    weights : array (n,)
        Sum 1.
    negative
        Whether a may leave [0, 1], and weights may be negative.

    Returns
    -------
    Weights ``(n,)`` on no more points than before.
    """
    fitted = as_kernel(kernel)
    w = check_weights(weights, fitted.n, negative=negative)
    swapped, _ = _cores.swap_line_search(*fitted.parts(), fitted._diagonal, w, not negative)
    swapped = swapped if negative else np.maximum(0.0, swapped)
    return _better(fitted, swapped / swapped.sum(), w)


def _better(kernel: SteinKernel, new: Float, old: Float) -> Float:
    """Give the weights with the lower discrepancy; ties go to the new ones."""
    return new if _squared(kernel, new) <= _squared(kernel, old) or not np.isfinite(_squared(kernel, old)) else old


def _squared(kernel: SteinKernel, w: Float) -> float:
    support = np.flatnonzero(w)
    return float(w[support] @ kernel.matrix(support, support) @ w[support])


def recombination_thin(
    kernel: SteinKernel | ArrayLike,
    weights: ArrayLike,
    n_points: int,
    *,
    swap: bool = True,
    random_state: int | np.random.Generator | None = None,
) -> Float:
    """Take debiased weights to at most ``n_points`` points: recombine, swap, then the best weights on the support.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix.
    weights : array (n,)
        Debiased weights, not negative, sum 1.
    n_points
        m.
    swap
        Whether to run :func:`swap_line_search`; off as an ablation.

    Returns
    -------
    Weights ``(n,)``, at most m of them positive, none negative, sum 1.

    Notes
    -----
    The moments kept are the m - 1 columns of the weighted randomly pivoted Cholesky factor, and the mass. Source: Li,
    Dwivedi, Mackey, ICML 2024, section 4.2.
    """
    fitted = as_kernel(kernel)
    w = check_weights(weights, fitted.n)
    m = check_count(n_points, "n_points", 1)
    if m == 1:  # no moment but the mass: any one point keeps it, so take the best
        w = np.zeros(fitted.n)
        w[int(np.argmin(fitted._diagonal))] = 1.0
        return w
    support = np.flatnonzero(w)
    if support.size > m:
        factor, _ = rp_cholesky(fitted, m - 1, weights=w, random_state=check_random_state(random_state))
        # rp_cholesky gives sqrt(w) times the functions whose means are to be kept.
        reduced = recombine(factor[support] / np.sqrt(w[support])[:, None], w[support] / w[support].sum())
        w = np.zeros(fitted.n)
        w[support] = reduced
    if swap:
        w = swap_line_search(fitted, w / w.sum())
    return best_weights(fitted, np.flatnonzero(w), w)


def best_weights(kernel: SteinKernel, support: Index, weights: Float) -> Float:
    """Exact simplex weights on a support, from those given."""
    result = np.zeros(kernel.n)
    result[support] = simplex_qp(kernel.matrix(support, support), weights[support] / weights[support].sum())
    return _better(kernel, result, weights)
