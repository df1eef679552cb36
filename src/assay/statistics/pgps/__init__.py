"""Path-guided particle-based sampling: particles that find far modes and their weights.

::

    result = PGPS(log_prob, dim=2, n_particles=1000, seed=0).run()
    result.particles, result.weights, result.log_evidence
    to_arviz(result)

Source: "Path-Guided Particle-based Sampling" (ICML 2024).
"""

from assay.statistics.pgps.adapters import LogpAndGrad, PyMCDensity, from_jax, from_pymc, from_rows, to_arviz
from assay.statistics.pgps.baselines import langevin, minibatches, pfg, sgld, svgd, tempered_smc
from assay.statistics.pgps.classifier import PGPSBayesianMLPClassifier
from assay.statistics.pgps.path import Density, Gaussian, LwSPath, gaussian
from assay.statistics.pgps.sampler import PGPS, PGPSResult, PGPSState, Step, systematic
from assay.statistics.pgps.velocity import Velocity, fit_adam, fit_least_squares, random_layer, residual

__all__ = [
    "PGPS",
    "Density",
    "Gaussian",
    "LogpAndGrad",
    "LwSPath",
    "PGPSBayesianMLPClassifier",
    "PGPSResult",
    "PGPSState",
    "PyMCDensity",
    "Step",
    "Velocity",
    "fit_adam",
    "fit_least_squares",
    "from_jax",
    "from_pymc",
    "from_rows",
    "gaussian",
    "langevin",
    "minibatches",
    "pfg",
    "random_layer",
    "residual",
    "sgld",
    "svgd",
    "systematic",
    "tempered_smc",
    "to_arviz",
]
