"""The RQR loss and its derivatives in NumPy, and checks that the whole folder shares."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.floating[Any]]


def check_coverage(coverage: Any) -> float:
    """Give ``coverage`` as a float in (0, 1), or raise."""
    if isinstance(coverage, bool) or not isinstance(coverage, Real):
        raise TypeError(f"coverage must be a number in (0, 1), got {coverage!r}")
    if not 0.0 < float(coverage) < 1.0:
        raise ValueError(f"coverage must lie in (0, 1), got {coverage!r}; 0.9 asks for 90% intervals")
    return float(coverage)


def check_lam(lam: Any, *, infinite: bool = False) -> float:
    """Give the penalty ``lam`` as a float >= 0, or raise."""
    if isinstance(lam, bool) or not isinstance(lam, Real):
        raise TypeError(f"lam must be a number >= 0, got {lam!r}")
    value = float(lam)
    if math.isnan(value) or value < 0 or (math.isinf(value) and not infinite):
        raise ValueError(f"lam must be {'' if infinite else 'finite and '}>= 0, got {lam!r}")
    return value


def check_vectors(**arrays: ArrayLike) -> tuple[Array, ...]:
    """Give one-dimensional finite floating arrays of one length > 0, or raise with the name of the culprit.

    float32 stays float32; whatever is not floating becomes float64.
    """
    out: list[Array] = []
    for name, value in arrays.items():
        array = np.asarray(value)
        if array.dtype.kind not in "fiub":
            raise TypeError(f"{name} must hold numbers, got dtype {array.dtype}")
        if array.dtype.kind != "f":
            array = array.astype(np.float64)
        if array.ndim != 1:
            raise ValueError(f"{name} must have shape (n,), got {array.shape}")
        if array.size == 0:
            raise ValueError(f"{name} is empty")
        if not np.isfinite(array).all():
            raise ValueError(f"{name} holds NaN or infinite values")
        out.append(array)
    lengths = {name: len(a) for name, a in zip(arrays, out)}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"arrays must have one length, got {lengths}")
    return tuple(out)


def rqr_loss(y: ArrayLike, lower: ArrayLike, upper: ArrayLike, coverage: float = 0.9, lam: float = 0.0) -> Array:
    """RQR loss (RQR-W for ``lam > 0``) of each sample.

    With ``k = (y - lower)(y - upper)`` and ``a = coverage + 2 lam``::

        loss = max(a k, (a - 1) k) + lam/2 (upper - lower)^2
             = max(coverage k, (coverage - 1) k) + 2 lam (y - (lower + upper)/2)^2

    so the width penalty is a squared-error penalty on the midpoint. The loss is never negative, and swapping the bounds
    does not change it: they need not be sorted.

    Parameters
    ----------
    y, lower, upper
        Shape (n,): targets and the two bounds in the same unit.
    coverage
        Share of targets that the interval should hold, in (0, 1).
    lam
        Penalty >= 0. 0 is plain RQR. The level is corrected by ``2 lam``, so that the coverage does not depend on it.

    Returns
    -------
    Shape (n,), in the squared unit of ``y``. The mean of it is what RQR minimises.

    Raises
    ------
    ValueError
        Shapes differ or are not (n,), a value is not finite, ``coverage`` is outside (0, 1), ``lam`` is negative.

    Notes
    -----
    Pouplin et al., ICML 2024, sections 3 and 4.
    """
    coverage, lam = check_coverage(coverage), check_lam(lam)
    y_, m1, m2 = check_vectors(y=y, lower=lower, upper=upper)
    kappa = (y_ - m1) * (y_ - m2)
    # The right-hand form: the left one is a difference of large numbers when lam is large.
    return np.maximum(coverage * kappa, (coverage - 1.0) * kappa) + 2.0 * lam * (y_ - 0.5 * (m1 + m2)) ** 2


def rqr_grad_hess(
    y: ArrayLike, m1: ArrayLike, m2: ArrayLike, coverage: float = 0.9, lam: float = 0.0
) -> tuple[Array, Array]:
    """Gradient and positive curvature of :func:`rqr_loss` in its two bounds, for second-order boosting.

    With ``c = a`` where ``(y - m1)(y - m2) >= 0``, else ``a - 1``, ``a = coverage + 2 lam`` and ``w = m2 - m1``::

        dL/dm1 = -c (y - m2) - lam w,    dL/dm2 = -c (y - m1) + lam w

    On each smooth piece the Hessian is ``[[lam, c - lam], [c - lam, lam]]``, which is indefinite in general. The
    curvature returned for both bounds is ``lam + |c - lam|``, the row sum of its absolute values: a diagonal matrix
    that bounds it from above, so that Newton steps with it never overshoot within a piece. It is always positive.

    Parameters
    ----------
    y, m1, m2
        Shape (n,).
    coverage, lam
        As for :func:`rqr_loss`.

    Returns
    -------
    ``(gradient, curvature)``, both of shape (n, 2), columns in the order m1, m2.

    Raises
    ------
    ValueError
        As for :func:`rqr_loss`.
    """
    coverage, lam = check_coverage(coverage), check_lam(lam)
    y_, b1, b2 = check_vectors(y=y, m1=m1, m2=m2)
    level = coverage + 2.0 * lam
    c = np.where((y_ - b1) * (y_ - b2) >= 0, level, level - 1.0)
    width = b2 - b1
    gradient = np.stack([-c * (y_ - b2) - lam * width, -c * (y_ - b1) + lam * width], axis=1)
    curvature = lam + np.abs(c - lam)
    return gradient, np.stack([curvature, curvature], axis=1)
