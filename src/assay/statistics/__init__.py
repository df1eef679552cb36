"""Estimation and sampling: parts for scikit-learn, torch, SciPy and ArviZ.

Names are imported on first use, so ``import assay.statistics`` is free.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Bags": "distribution_kernels",
        "DistributionClassifier": "distribution_kernels",
        "DistributionQuantileRegressor": "distribution_kernels",
        "DistributionRegressor": "distribution_kernels",
        "MeanEmbedding": "distribution_kernels",
        "MomentEmbedding": "distribution_kernels",
        "SlicedWassersteinEmbedding": "distribution_kernels",
        "as_bags": "distribution_kernels",
        "bag_distances": "distribution_kernels",
        "bag_gram": "distribution_kernels",
        "bags_from_frame": "distribution_kernels",
        "bags_from_padded": "distribution_kernels",
        "LwSPath": "pgps",
        "NormGD": "normgd",
        "PGPS": "pgps",
        "PGPSBayesianMLPClassifier": "pgps",
        "PGPSResult": "pgps",
        "PolynomialLinkRegressor": "normgd",
        "RQRLoss": "rqr",
        "RQRRegressor": "rqr",
        "RQRBoostingRegressor": "rqr",
        "ConformalIntervalRegressor": "rqr",
        "interval_report": "rqr",
        "rqr_loss": "rqr",
        "SteinKernel": "stein_thinning",
        "SteinCompressor": "stein_thinning",
        "Coreset": "stein_thinning",
        "SymmetricGaussianMixture": "normgd",
        "normgd_minimize": "normgd",
        "singularity_report": "normgd",
    },
)
