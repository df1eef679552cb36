"""Debiased distribution compression with Stein kernels.

From n points that were aimed at the wrong distribution (burn-in, tempering, an approximate sampler, a proposal) and
the gradients of the right log density at them, pick a small weighted or unweighted subset that represents the right
distribution. Start with :func:`compress`; everything that it is made of is here, too.

Method: Li, Dwivedi, Mackey, "Debiased Distribution Compression", ICML 2024. NumPy, SciPy and numba only; scikit-learn,
ArviZ, torch, JAX, PyMC or Stan are imported by the piece that needs them, when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assay.statistics.stein_thinning.adapters import (
    cmdstan_score,
    from_arviz,
    jax_score,
    pymc_score,
    to_arviz,
    torch_score,
)
from assay.statistics.stein_thinning.cholesky import cholesky_thin
from assay.statistics.stein_thinning.coreset import METHODS, Coreset, compress
from assay.statistics.stein_thinning.debias import amd_simplex, low_rank_debias, rp_cholesky
from assay.statistics.stein_thinning.greedy import stein_thin
from assay.statistics.stein_thinning.kernel import SteinKernel, ksd
from assay.statistics.stein_thinning.kernel_thinning import (
    compress_pp,
    kernel_halve,
    kernel_split,
    kernel_swap,
    kernel_thin,
)
from assay.statistics.stein_thinning.recombination import (
    recombination_thin,
    recombine,
    simplex_qp,
    swap_line_search,
)
from assay.statistics.stein_thinning.rounding import stratified_round

if TYPE_CHECKING:
    from assay.statistics.stein_thinning.estimator import SteinCompressor

__all__ = [
    "METHODS",
    "Coreset",
    "SteinCompressor",
    "SteinKernel",
    "amd_simplex",
    "cholesky_thin",
    "cmdstan_score",
    "compress",
    "compress_pp",
    "from_arviz",
    "jax_score",
    "kernel_halve",
    "kernel_split",
    "kernel_swap",
    "kernel_thin",
    "ksd",
    "low_rank_debias",
    "pymc_score",
    "recombination_thin",
    "recombine",
    "rp_cholesky",
    "simplex_qp",
    "stein_thin",
    "stratified_round",
    "swap_line_search",
    "to_arviz",
    "torch_score",
]


def __getattr__(name: str) -> Any:
    # scikit-learn takes a second to import, and only the estimator needs it.
    if name == "SteinCompressor":
        from assay.statistics.stein_thinning.estimator import SteinCompressor

        return SteinCompressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
