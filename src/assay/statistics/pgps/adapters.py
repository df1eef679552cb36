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
    """A density from a JAX function of a single point ``[d]``, such as BlackJAX takes; compiled and vectorised.

    It is evaluated in float64, whether or not ``jax_enable_x64`` is set.
    """
    import jax

    compiled = jax.jit(jax.vmap(jax.value_and_grad(logdensity)))

    def function(x: np.ndarray) -> tuple[Any, Any]:
        with jax.enable_x64(True):
            value, gradient = compiled(x)
            return np.asarray(value), np.asarray(gradient)

    return LogpAndGrad(function)


@dataclass(frozen=True)
class PyMCDensity(LogpAndGrad):
    """The density of a PyMC model in its unconstrained coordinates; made by :func:`from_pymc`.

    Attributes
    ----------
    dim
        Number of coordinates.
    names
        One name a coordinate, that of PyMC's value variable: ``"mu"``, ``"sigma_log__"``, ``"beta[0]"``.
    start
        The model's initial point ``[dim]``: a ``center`` for :class:`~assay.statistics.pgps.PGPS`.
    constrain
        Points ``[n, dim]`` to the model's own variables, deterministic ones included: name to array ``[n, ...]``.
    """

    dim: int
    names: tuple[str, ...]
    start: np.ndarray
    constrain: Callable[[np.ndarray], dict[str, np.ndarray]]


def from_pymc(model: Any) -> PyMCDensity:
    """The density of a PyMC model in its unconstrained coordinates, where positive variables are logarithms, etc.

    ::

        density = from_pymc(model)
        result = PGPS(density, density.dim, center=density.start).run()
        to_arviz(result, density)

    The log density includes the Jacobian of the transforms, so that its normalising constant is the evidence of the
    model. ``model.logp_dlogp_function(ravel_inputs=True)`` is called row by row (tens of microseconds each).

    Raises
    ------
    ValueError
        The model has discrete variables, which have no gradient, or no free variable.
    """
    variables = list(model.continuous_value_vars)
    discrete = [v.name for v in model.value_vars if v not in variables]
    if discrete or not variables:
        raise ValueError(f"model must have continuous free variables only, not {discrete or 'none'}")
    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    point = model.initial_point()
    values = [np.asarray(point[v.name], dtype=np.float64) for v in variables]
    shapes, ends = [v.shape for v in values], np.cumsum([v.size for v in values])
    names = tuple(
        v.name if not shape else f"{v.name}{list(i)}" for v, shape in zip(variables, shapes) for i in np.ndindex(shape)
    )
    compiled: list[Any] = []  # made at the first call, since it takes seconds

    def evaluate(x: np.ndarray) -> tuple[Any, Any]:
        pairs = [function(row) for row in np.asarray(x, dtype=np.float64)]
        return np.array([float(v) for v, _ in pairs]), np.array([g for _, g in pairs])

    def constrain(x: np.ndarray) -> dict[str, np.ndarray]:
        own = [v for v in model.unobserved_value_vars if not v.name.endswith("__")]
        if not compiled:
            compiled.append(model.compile_fn(own, inputs=variables, point_fn=False, on_unused_input="ignore"))
        rows = [
            compiled[0](*(part.reshape(shape) for part, shape in zip(np.split(row, ends[:-1]), shapes)))
            for row in np.asarray(x, dtype=np.float64)
        ]
        return {v.name: np.stack([np.asarray(row[i]) for row in rows]) for i, v in enumerate(own)}

    start = np.concatenate([v.ravel() for v in values])
    return PyMCDensity(evaluate, int(ends[-1]), names, start, constrain)


def to_arviz(result: PGPSResult, names: Sequence[str] | PyMCDensity | None = None, *, seed: int = 0) -> Any:
    """A result as ArviZ ``InferenceData``: one chain of particles of equal weight (systematic resampling).

    Parameters
    ----------
    result
        Of :meth:`PGPS.run` or of a baseline.
    names
        Of the columns; default ``x`` with dimension ``x_dim_0``. Or what :func:`from_pymc` gave: then the posterior
        holds the variables of the model under their names, in their own (constrained) units, and the group
        ``unconstrained_posterior`` the coordinates in which particles moved.
    seed
        Of the resampling.

    Returns
    -------
    InferenceData
        ``sample_stats`` holds the weight that each draw had before resampling and, as attributes, the steps (t, dt,
        loss, ess). Attributes of ``posterior``: ``log_evidence``, ``ess``, ``n_score_evals``. Draws are one chain
        without an order: ``r_hat`` means nothing, and their number overstates ``ess``.

    Raises
    ------
    ValueError
        ``names`` are not as many as there are columns.
    """
    import arviz

    generator = torch.Generator().manual_seed(seed)
    picked = systematic(result.weights, generator)
    draws = result.particles[picked].detach().cpu().numpy()[None]
    labels = names.names if isinstance(names, PyMCDensity) else names
    if labels is not None and len(labels) != draws.shape[2]:
        raise ValueError(f"names must name the {draws.shape[2]} columns, not {len(labels)}")
    columns = {"x": draws} if labels is None else {name: draws[:, :, i] for i, name in enumerate(labels)}
    own = {k: v[None] for k, v in names.constrain(draws[0]).items()} if isinstance(names, PyMCDensity) else columns
    data = arviz.from_dict(posterior=own, sample_stats={"weight": result.weights[picked].cpu().numpy()[None]})
    if own is not columns:
        data.add_groups({"unconstrained_posterior": columns})
    data.sample_stats.attrs.update(
        {name: [getattr(s, name) for s in result.trace] for name in ("t", "dt", "loss", "ess")}
    )
    attributes = {"log_evidence": result.log_evidence, "ess": result.ess, "n_score_evals": result.n_score_evals}
    data.posterior.attrs.update(attributes | {"inference_library": "assay", "sampling_method": "pgps"})
    return data
