"""DHEL and kernel contrastive losses, the losses that they replace, and what tells whether embeddings collapse.

Two losses for pairs of views on the unit sphere that pull on positives and push on other samples in separate terms:
DHEL (a log-sum-exp energy inside each view) and KCL (a kernel energy, whose expectation does not depend on the batch
size). From Koromilas, Bouritsas, Giannakopoulos, Nicolaou, Panagakis, "Bridging Mini-Batch and Asymptotic Analysis in
Contrastive Learning: From InfoNCE to Kernel-Based Losses", ICML 2024.
"""

from __future__ import annotations

from assay.representation.dhel.kernels import IMQ, Gaussian, LogKernel, Riesz
from assay.representation.dhel.losses import (
    align_uniform_loss,
    dcl_loss,
    dhel_loss,
    info_nce_loss,
    kcl_loss,
    ntxent_loss,
)
from assay.representation.dhel.metrics import (
    alignment,
    effective_rank,
    embedding_report,
    numeric_rank,
    similarity_variance,
    uniformity,
    wasserstein_uniformity,
)
from assay.representation.dhel.modules import (
    AlignUniformLoss,
    DCLLoss,
    DHELLoss,
    InfoNCELoss,
    KCLLoss,
    NTXentLoss,
    from_labels,
)
from assay.representation.dhel.theory import (
    BatchSizeRow,
    batch_size_bias,
    cross_polytope,
    minimum_value,
    simplex,
    uniform_gaussian_energy,
)

__all__ = [
    "IMQ",
    "AlignUniformLoss",
    "BatchSizeRow",
    "DCLLoss",
    "DHELLoss",
    "Gaussian",
    "InfoNCELoss",
    "KCLLoss",
    "LogKernel",
    "NTXentLoss",
    "Riesz",
    "align_uniform_loss",
    "alignment",
    "batch_size_bias",
    "cross_polytope",
    "dcl_loss",
    "dhel_loss",
    "effective_rank",
    "embedding_report",
    "from_labels",
    "info_nce_loss",
    "kcl_loss",
    "minimum_value",
    "ntxent_loss",
    "numeric_rank",
    "similarity_variance",
    "simplex",
    "uniform_gaussian_energy",
    "uniformity",
    "wasserstein_uniformity",
]
