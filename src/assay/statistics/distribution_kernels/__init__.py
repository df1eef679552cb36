"""Kernel machines whose inputs are distributions that are seen through samples: bags of points.

A bag (the cells of a patient, the pixels of a patch, the readings of an hour) is embedded in a Hilbert space, by its
kernel mean or by its sliced quantiles (sliced Wasserstein), and a kernel machine learns on top: regression,
classification, quantiles. Start with :class:`DistributionRegressor`, :class:`DistributionClassifier` or
:class:`DistributionQuantileRegressor`; the embeddings alone are transformers for any other model.

Source: Fiedler, Massiani, Solowjow, Trimpe, "On Statistical Learning Theory for Distributional Inputs", ICML 2024.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "Bags": "bags",
        "DistributionClassifier": "estimators",
        "DistributionQuantileRegressor": "estimators",
        "DistributionRegressor": "estimators",
        "FrameBags": "bags",
        "MeanEmbedding": "embeddings",
        "MomentEmbedding": "embeddings",
        "SlicedWassersteinEmbedding": "embeddings",
        "as_bags": "bags",
        "bag_distances": "kernels",
        "bag_gram": "kernels",
        "bags_from_frame": "bags",
        "bags_from_padded": "bags",
        "exact_sliced_wasserstein": "transport",
        "loo_residuals": "solvers",
        "point_gram": "points",
        "second_stage_report": "reports",
        "stability_report": "reports",
    },
)
