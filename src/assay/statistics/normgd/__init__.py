"""Normalized gradient descent (NormGD): fast fits where the Fisher information vanishes.

``theta <- theta - eta / lambda_max(H(theta)) * grad f(theta)``, with ``H`` the Hessian of the loss at ``theta``. Near a
singular optimum gradient and Hessian vanish together, so the normalised step keeps its size relative to the distance.
Use :class:`NormGD` in torch, :func:`normgd_minimize` with SciPy, or one of the two estimators.

Source: Ren, Zhuo, Sanghavi, Ho et al., "Improving Computational Complexity in Statistical Models with Local Curvature
Information", ICML 2024.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "NormGD": "optimizer",
        "PolynomialLink": "models",
        "PolynomialLinkRegressor": "estimators",
        "SymmetricGaussianMixture": "estimators",
        "SymmetricMixture": "models",
        "guarded_eigenvalue": "eigenvalue",
        "lanczos_extremes": "eigenvalue",
        "normgd_minimize": "minimize",
        "singularity_report": "report",
    },
)
