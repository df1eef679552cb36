"""Cholesky thinning: a support by random pivots, with weights that only preserve constants."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning._cores import Float, Index
from assay.statistics.stein_thinning.debias import rp_cholesky
from assay.statistics.stein_thinning.kernel import (
    SteinKernel,
    as_kernel,
    check_count,
    check_random_state,
    check_weights,
)
from assay.statistics.stein_thinning.recombination import _better, swap_line_search


def cholesky_thin(
    kernel: SteinKernel | ArrayLike,
    weights: ArrayLike,
    n_points: int,
    *,
    swap: bool = True,
    random_state: int | np.random.Generator | None = None,
) -> Float:
    r"""Take debiased weights to at most ``n_points`` points with weights of sum 1 that may be negative.

    The support are the pivots of :func:`rp_cholesky` on K + c, c the mean of the m largest :math:`K_{ii}` among points
    that carry weight; the weights there solve :math:`K_{SS}v = 1`, normalised; then a swap by line search, and the
    solve again.

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
    Weights ``(n,)``, at most m of them not 0, sum 1.

    Notes
    -----
    Source: Li, Dwivedi, Mackey, ICML 2024, section 4.3.
    """
    fitted = as_kernel(kernel)
    w = check_weights(weights, fitted.n)
    m = check_count(n_points, "n_points", 1)
    heavy = np.sort(fitted._diagonal[w > 0])[::-1]
    shift = float(heavy[:m].mean())
    _, support = rp_cholesky(fitted, m, weights=w, shift=shift, random_state=check_random_state(random_state))
    result = constant_weights(fitted, np.sort(support))
    if swap:
        swapped = swap_line_search(fitted, result, negative=True)
        result = _better(fitted, constant_weights(fitted, np.flatnonzero(swapped)), swapped)
    return result


def constant_weights(kernel: SteinKernel, support: Index) -> Float:
    """Minimiser of ``v'Kv`` among weights of sum 1 on a support; repeats make K singular, hence least squares."""
    v = np.linalg.lstsq(kernel.matrix(support, support), np.ones(support.size), rcond=1e-12)[0]
    result = np.zeros(kernel.n)
    result[support] = v / v.sum()
    return result
