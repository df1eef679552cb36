"""Greedy Stein thinning, plain and with the regularisation that repairs its known faults."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning import _cores
from assay.statistics.stein_thinning._cores import Index
from assay.statistics.stein_thinning.kernel import SteinKernel, _threads, as_float, as_kernel, check_count


def stein_thin(
    kernel: SteinKernel | ArrayLike,
    n_points: int,
    *,
    log_density: ArrayLike | None = None,
    laplacian: ArrayLike | None = None,
    entropy: float | None = None,
) -> Index:
    r"""Pick points one at a time, each the one that leaves the least discrepancy from the target.

    Step t takes :math:`\arg\min_i K_{ii}/2 + \sum_{s<t} K_{i j_s}`, the lowest index on ties; points may be picked
    again. The result stands for equal weights 1/m, and its first k entries are the result for k points.

    Parameters
    ----------
    kernel
        A fitted :class:`SteinKernel`, or a kernel matrix ``(n, n)``.
    n_points
        m; may exceed n.
    log_density, laplacian : array (n,)
        Switch on the regularised form, which avoids two faults of every Stein kernel: attraction to low-density
        stationary points of log p (``laplacian``: its authors take the sum of the positive parts of the second
        derivatives of log p; of what is given, the positive part is added to :math:`K_{ii}`) and blindness to the
        proportions of far-apart modes (``log_density``: log p up to a constant).
        Step t then minimises :math:`K_{ii} + \Delta^+\log p_i + 2\sum_{s<t} K_{i j_s} - \lambda t \log p_i`.
    entropy
        :math:`\lambda`; 1/m by default, the value that its authors recommend. Needs ``log_density``.

    Returns
    -------
    Index array ``(m,)`` in order of choice. O(n m) kernel entries, O(n) memory.

    Notes
    -----
    Sources: Riabiz et al., "Optimal thinning of MCMC output", JRSS-B 2022; Bénard, Staber, Da Veiga, "Kernel Stein
    discrepancy thinning: a theoretical perspective of pathologies and a practical fix with regularization",
    NeurIPS 2023.
    """
    fitted = as_kernel(kernel)
    m = check_count(n_points, "n_points", 1)
    objective = fitted.diag()
    tilt = np.empty(0)
    if laplacian is not None:
        objective += np.maximum(0.0, _per_point(laplacian, "laplacian", fitted.n))
    objective /= 2
    if log_density is not None:
        strength = 1 / m if entropy is None else float(entropy)
        if not (np.isfinite(strength) and strength >= 0):
            raise ValueError(f"entropy must be a number of at least 0, got {entropy!r}")
        tilt = -strength / 2 * _per_point(log_density, "log_density", fitted.n)
        objective += tilt
    elif entropy is not None:
        raise ValueError("entropy needs log_density, the log density of the target at the points")
    if fitted.n_jobs > 1 and not fitted.stored and fitted.n >= 1 << 14:
        with _threads(fitted.n_jobs):
            return _cores.greedy_parallel(*fitted.parts()[1:], objective, tilt, m, fitted.n_jobs)
    return _cores.greedy(*fitted.parts(), objective, tilt, m)


def _per_point(values: ArrayLike, name: str, n: int) -> np.ndarray:
    array = as_float(values, name)
    if array.shape != (n,):
        raise ValueError(f"{name} must have shape ({n},), got {array.shape}")
    return array
