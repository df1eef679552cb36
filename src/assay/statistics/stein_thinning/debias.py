"""Low-rank debiasing: near-optimal simplex weights for n biased points without the n x n kernel matrix."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, sqrt

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning._cores import Float, Index
from assay.statistics.stein_thinning.kernel import (
    SteinKernel,
    as_float,
    as_kernel,
    check_count,
    check_random_state,
    check_weights,
)
from assay.statistics.stein_thinning.rounding import frequencies, stratified_round

_SHRINK = 0.95  # of the step after a restart
_CUTOFF = 1e-12  # of the largest diagonal entry: below it a pivot is rounding


def rp_cholesky(
    kernel: SteinKernel | ArrayLike,
    rank: int,
    *,
    weights: ArrayLike | None = None,
    shift: float = 0.0,
    random_state: int | np.random.Generator | None = None,
) -> tuple[Float, Index]:
    r"""Randomly pivoted partial Cholesky factor of :math:`A = \sqrt{w_i}\,(K_{ij} + c)\sqrt{w_j}`.

    Each pivot is drawn with probability proportional to the diagonal of what is not yet explained.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix ``(n, n)``.
    rank
        Most pivots to take.
    weights : array (n,)
        Not negative, sum 1. Without them A is K + c itself. A point of weight 0 is never a pivot.
    shift
        c, at least 0.

    Returns
    -------
    F : array (n, r)
        A is about F F'.
    pivots : array (r,)
        Distinct rows; r falls short of ``rank`` when A is exhausted (a residual diagonal below 1e-12 of the largest
        entry of A's diagonal is rounding).

    Notes
    -----
    O(n r) kernel entries and O(n r^2) operations. Source: Chen, Epperly, Tropp, Webber, "Randomly pivoted Cholesky",
    2022; weighted as in Li, Dwivedi, Mackey, ICML 2024. Their code takes 1e-8 as an absolute cutoff and adds it to
    the root of the pivot; relative to the diagonal, the result does not depend on the unit of X.
    """
    fitted = as_kernel(kernel)
    n = fitted.n
    most = min(check_count(rank, "rank", 1), n)
    root = np.ones(n) if weights is None else np.sqrt(check_weights(weights, n))
    if not (np.isfinite(shift) and shift >= 0):
        raise ValueError(f"shift must be a number of at least 0, got {shift!r}")
    rng = check_random_state(random_state)
    support = np.flatnonzero(root)
    whole = support.size == n
    scale = root[support]
    residual = scale * scale * (fitted._diagonal[support] + shift)
    floor = _CUTOFF * residual.max(initial=0.0)
    factor = np.zeros((support.size, most), order="F")
    pivots: list[int] = []
    while len(pivots) < most:
        residual[residual <= floor] = 0.0
        cumulative = np.cumsum(residual)
        if cumulative[-1] == 0:
            break
        s = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
        i = len(pivots)
        row = fitted.row(int(support[s])) if whole else fitted.matrix(support[s : s + 1], support)[0]
        column = scale[s] * scale * (row + shift) - factor[:, :i] @ factor[s, :i]
        if column[s] > floor:
            factor[:, i] = column / np.sqrt(column[s])
            residual = np.maximum(0.0, residual - factor[:, i] ** 2)
            pivots.append(int(support[s]))
        residual[s] = 0.0
    full = np.zeros((n, len(pivots)))
    full[support] = factor[:, : len(pivots)]
    return full, np.array(pivots, dtype=np.int64)


def amd_simplex(
    product: ArrayLike | Callable[[Float], Float],
    weights: ArrayLike,
    *,
    n_iterations: int,
    step: float,
    min_step: float,
) -> Float:
    r"""Minimise :math:`w^\top K w` over the simplex by accelerated mirror descent with restarts.

    With :math:`b = 2/(t+1)`: :math:`\nabla = 2((1-b)Kw + bKv)`, :math:`v \propto v\exp(-t\,\eta\,\nabla)`,
    :math:`w \leftarrow (1-b)w + bv`. If the objective did not fall while the step is at least ``min_step``, the
    iteration is undone, v = w, t = 1, and the step shrinks by 0.95.

    Parameters
    ----------
    product
        The matrix K, or a function that gives K v: it is called once an iteration.
    weights : array (n,)
        Where to start; a weight of 0 stays 0.
    n_iterations
        Number of iterations.
    step, min_step
        First :math:`\eta`, and the :math:`\eta` at which descent is no longer enforced: :math:`1/(8\max_i K_{ii})`
        by the analysis.

    Returns
    -------
    Weights ``(n,)``, not negative, sum 1.

    Notes
    -----
    Source: Wang, Abernethy, Levy, "No-regret dynamics in the Fenchel game", 2023 (algorithm 14), with the restarts of
    Li, Dwivedi, Mackey, ICML 2024.
    """
    if callable(product):
        multiply = product
    else:
        K = as_float(product, "product")
        multiply = lambda v: K @ v  # noqa: E731
    w = check_weights(weights, as_float(weights, "weights").size).copy()
    for name, value in (("step", step), ("min_step", min_step)):
        if not (np.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    check_count(n_iterations, "n_iterations", 0)
    w /= w.sum()
    v = w
    Kw = Kv = multiply(w)
    last, t = float(w @ Kw), 1
    for _ in range(n_iterations):
        b = 2 / (t + 1)
        exponent = (2 * t * step) * ((1 - b) * Kw + b * Kv)
        # The least exponent among the living: an entry at 0 must not decide the scale of the others.
        v_next = v * np.exp(np.minimum(0.0, exponent[v > 0].min() - exponent))
        v_next /= v_next.sum()
        Kv_next = multiply(v_next)
        w_next = (1 - b) * w + b * v_next
        Kw_next = (1 - b) * Kw + b * Kv_next
        value = float(w_next @ Kw_next)
        if value < last or step < min_step:
            w, v, Kw, Kv, last, t = w_next, v_next, Kw_next, Kv_next, value, t + 1
        else:
            v, Kv, t = w, Kw, 1
            step *= _SHRINK
    w = np.maximum(0.0, w)
    return w / w.sum()


def low_rank_debias(
    kernel: SteinKernel | ArrayLike,
    rank: int,
    *,
    n_iterations: int | None = None,
    rounds: int = 3,
    random_state: int | np.random.Generator | None = None,
) -> Float:
    r"""Weights on all n points that nearly minimise the discrepancy from the target, in sub-quadratic time.

    Each round replaces K by :math:`FF^\top + D`, F from :func:`rp_cholesky` with the present weights and D what is
    missing on the diagonal, and minimises by :func:`amd_simplex`. Later rounds first round the weights to n points.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix ``(n, n)``.
    rank
        r. The paper's experiments take n^0.4 or n^0.5.
    n_iterations
        Of mirror descent a round; :math:`7\sqrt n` by default, as in the paper.
    rounds
        Q; 3 as in the paper.

    Returns
    -------
    Weights ``(n,)``, not negative, sum 1.

    Notes
    -----
    ``rounds`` times n r kernel entries, and 4 n r operations an iteration. The surrogate has K's diagonal but is no
    upper bound of :math:`w^\top K w`. Source: Li, Dwivedi, Mackey, ICML 2024, section 4.1 (LD).
    """
    fitted = as_kernel(kernel)
    n = fitted.n
    most = check_count(rank, "rank", 1)
    steps = ceil(7 * sqrt(n)) if n_iterations is None else check_count(n_iterations, "n_iterations", 0)
    rng = check_random_state(random_state)
    w = np.full(n, 1 / n)
    for round_number in range(check_count(rounds, "rounds", 1)):
        if round_number > 0:
            w = frequencies(stratified_round(w, n, random_state=rng), n)
        support = np.flatnonzero(w)
        present = w[support]
        weighted, _ = rp_cholesky(fitted, most, weights=w, random_state=rng)
        # The factor of sqrt(w) K sqrt(w) is sqrt(w) times that of K with the same pivots. No weight is below 1/n here.
        factor = np.ascontiguousarray(weighted[support] / np.sqrt(present)[:, None])
        diagonal = fitted._diagonal[support]
        missing = np.maximum(0.0, diagonal - np.einsum("ij,ij->i", factor, factor))

        def product(v: Float, F: Float = factor, D: Float = missing) -> Float:
            return F @ (v @ F) + D * v

        smallest = 1 / (8 * diagonal.max())
        step = smallest if round_number == 0 else max(smallest, 1 / (8 * float(present @ diagonal)))
        better = amd_simplex(product, present, n_iterations=steps, step=step, min_step=smallest)
        if better @ product(better) < present @ product(present):
            w = np.zeros(n)
            w[support] = better
    return w
