"""Bridges: densities from PyMC and JAX, results to ArviZ. Each imports its host when it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from assay.statistics.pgps.sampler import PGPSResult, systematic


@dataclass(frozen=True)
class LogpAndGrad:
    """A log density that comes with its gradient, as functions of NumPy rows ``[n, d]``.

    ``function(x) -> (values [n], gradients [n, d])``; anything that :class:`~assay.statistics.pgps.PGPS` takes.
    """

    function: Callable[[np.ndarray], tuple[Any, Any]]

    def logp_and_grad(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients as tensors of the dtype of ``x``."""
        value, gradient = self.function(x.detach().cpu().numpy())
        return tuple(torch.as_tensor(np.array(v), dtype=x.dtype, device=x.device) for v in (value, gradient))  # type: ignore[return-value]


def from_rows(logp: Callable[[np.ndarray], float], grad: Callable[[np.ndarray], Any]) -> LogpAndGrad:
    """A density from functions of a single point ``[d]``, called row by row (Stan, or whatever is given so)."""

    def function(x: np.ndarray) -> tuple[Any, Any]:
        return np.array([float(logp(row)) for row in x]), np.array([np.asarray(grad(row)) for row in x])

    return LogpAndGrad(function)


def from_jax(logdensity: Callable[[Any], Any]) -> LogpAndGrad:
    """A density from a JAX function of a single point ``[d]``, such as BlackJAX takes; compiled and vectorised."""
    import jax

    compiled = jax.jit(jax.vmap(jax.value_and_grad(logdensity)))
    return LogpAndGrad(lambda x: compiled(x))


def from_pymc(model: Any) -> tuple[LogpAndGrad, int]:
    """The density of a PyMC model in its unconstrained coordinates, and their number.

    ``model.logp_dlogp_function(ravel_inputs=True)`` is called row by row.
    """
    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    point = model.initial_point()
    dim = int(sum(np.size(point[v.name]) for v in model.continuous_value_vars))

    def evaluate(x: np.ndarray) -> tuple[Any, Any]:
        pairs = [function(row) for row in x]
        return np.array([float(v) for v, _ in pairs]), np.array([g for _, g in pairs])

    return LogpAndGrad(evaluate), dim


def to_arviz(result: PGPSResult, names: Sequence[str] | None = None, *, seed: int = 0) -> Any:
    """A result as ArviZ ``InferenceData``: one chain of particles of equal weight (systematic resampling).

    ``names`` are those of the columns (default ``x`` with dimension ``x_dim_0``). The group ``sample_stats`` holds the
    weight that each draw had before resampling and, as attributes, the steps (t, dt, loss, ess); the attributes of
    ``posterior`` are the log evidence and the effective sample size.
    """
    import arviz

    generator = torch.Generator().manual_seed(seed)
    picked = systematic(result.weights, generator)
    draws = result.particles[picked].detach().cpu().numpy()[None]
    if names is not None and len(names) != draws.shape[2]:
        raise ValueError(f"names must name the {draws.shape[2]} columns, not {len(names)}")
    posterior = {"x": draws} if names is None else {name: draws[:, :, i] for i, name in enumerate(names)}
    data = arviz.from_dict(posterior=posterior, sample_stats={"weight": result.weights[picked].cpu().numpy()[None]})
    data.sample_stats.attrs.update(
        {name: [getattr(s, name) for s in result.trace] for name in ("t", "dt", "loss", "ess")}
    )
    attributes = {"log_evidence": result.log_evidence, "ess": result.ess, "n_score_evals": result.n_score_evals}
    data.posterior.attrs.update(attributes | {"inference_library": "assay", "sampling_method": "pgps"})
    return data
