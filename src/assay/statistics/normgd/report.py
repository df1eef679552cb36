"""Whether a fit is singular, how strongly, and what error that means."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike


def singularity_report(
    hess_fn: Callable[[Any], Any],
    theta: ArrayLike,
    *,
    path: ArrayLike | None = None,
    n: int | None = None,
    stability: float = 0.0,
    rtol: float = 1e-6,
) -> dict[str, Any]:
    """Spectrum of the Hessian at a fit, and the exponent by which curvature vanishes on the way to it.

    Parameters
    ----------
    hess_fn
        ``theta -> Hessian (d, d)``.
    theta
        The fit, shape ``(d,)``.
    path
        Iterates ``(T, d)`` of NormGD that lead to it. The exponent ``a`` of ``lambda_max ~ |theta_t - theta|^a`` is the
        slope of ``log lambda_max`` on ``log |step|``, over the iterates before the noise of the sample takes
        over: those with more than twice the last ``lambda_max``. Four of them are needed; fewer in at least five
        iterates mean that the curvature hardly vanishes, and give the exponent 0. A rough number: on samples it was
        within 0.2 of 2, and 1 of 4; it is too small where the path begins so far that the curvature is bounded there,
        as that of a mixture is (0.5 to 1 for 2).
    n
        Rows of the sample. With ``n`` and an exponent, ``radius`` is ``(d/n)^(1 / (2 (a - stability)))``, the error to
        expect up to a constant (for a regular fit, ``(d/n)^(1/2)``).
    stability
        The exponent g of the deviation of the sample's Hessian (p - 2 for a polynomial link, 0 for mixtures).
    rtol
        Eigenvalues below ``rtol`` times the largest one (at the start of the path, if given) count as zero.

    Returns
    -------
    dict
        ``eigenvalues`` (ascending), ``rank``, ``condition``, ``exponent`` (NaN without a path), ``radius`` (NaN
        without n), ``singular``.

    Warns
    -----
    UserWarning
        The condition number grows more than tenfold along the path: directions vanish at different rates, the
        stiff one sets the step, and NormGD stays slow in the others.

    Raises
    ------
    ValueError
        ``theta``, ``path`` or what ``hess_fn`` gives has the wrong shape, or is not finite; n is not positive.
    FloatingPointError
        The Hessian at ``theta`` is not finite.

    Notes
    -----
    The exponents are those of "Improving Computational Complexity in Statistical Models with Local Curvature
    Information", ICML 2024: homogeneity (a) of the population's Hessian, stability (g) of the sample's. Reading a off
    the path is ours.
    """
    theta = np.asarray(theta, dtype=np.float64)
    if theta.ndim != 1 or not np.isfinite(theta).all():
        raise ValueError(f"theta must be a finite vector, got shape {theta.shape}")
    if n is not None and not n > 0:
        raise ValueError(f"n must be positive, got {n}")
    H = np.asarray(hess_fn(theta), dtype=np.float64)
    if H.shape != (theta.size, theta.size):
        raise ValueError(f"hess_fn must give shape {(theta.size, theta.size)}, got {H.shape}")
    if not np.isfinite(H).all():
        raise FloatingPointError(f"the Hessian at {theta} is not finite")
    values = np.linalg.eigvalsh(H)
    top, exponent = float(np.abs(values).max()), float("nan")
    if path is not None:
        points = np.asarray(path, dtype=np.float64)
        if points.ndim != 2 or points.shape[1] != theta.size or len(points) < 2 or not np.isfinite(points).all():
            raise ValueError(f"path must be finite with shape (T, {theta.size}), T at least 2, got {points.shape}")
        spectra = np.array([np.linalg.eigvalsh(np.asarray(hess_fn(p), dtype=np.float64)) for p in points])
        top = max(top, float(np.abs(spectra).max()))
        lam, step = spectra[:-1, -1], np.linalg.norm(np.diff(points, axis=0), axis=1)
        use = np.flatnonzero((lam > 2 * max(float(spectra[-1, -1]), 0.0)) & (step > 0))
        if len(use) >= 4:
            exponent = float(np.polyfit(np.log(step[use]), np.log(lam[use]), 1)[0])
        elif len(lam) >= 4:
            exponent = 0.0
        definite = spectra[spectra[:, 0] > 0]
        if len(definite) >= 2 and definite[-1, -1] / definite[-1, 0] > 10 * definite[0, -1] / definite[0, 0]:
            warnings.warn(
                "the condition number of the Hessian grows along the path: directions vanish at different rates, "
                "and NormGD is slow in the flat ones",
                UserWarning,
                stacklevel=2,
            )
    rank = int((np.abs(values) > rtol * top).sum())
    singular = rank < theta.size or exponent > 0.5
    radius = float("nan")
    if n is not None:
        order = exponent - stability if singular and exponent - stability > 0 else 1.0
        radius = float((theta.size / n) ** (1 / (2 * order)))
    smallest = float(np.abs(values).min())
    return {
        "eigenvalues": values,
        "rank": rank,
        "condition": float(np.abs(values).max()) / smallest if smallest else float("inf"),
        "exponent": exponent,
        "radius": radius,
        "singular": bool(singular),
    }
