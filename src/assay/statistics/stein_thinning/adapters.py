"""Bridges to the tools that draws and gradients come from; each imports its host when it is called.

A *score function* here maps points ``(n, d)`` to gradients ``(n, d)`` of the target's log density, both in the
coordinates of the points. For PyMC and Stan these are the unconstrained ones, with the Jacobian of the transform in
the density: draws in the constrained space go with no gradient that a sampler can give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from assay.statistics.stein_thinning._cores import Float
from assay.statistics.stein_thinning.coreset import Coreset
from assay.statistics.stein_thinning.kernel import as_float, check_points

ScoreFunction = Callable[[Float], Float]


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of all chains, one chain after the other, with their scores.

    ``points`` and ``scores`` have shape ``(n_chains * n_draws, d)``; ``names`` has one name a column, such as
    ``"beta[2]"``.
    """

    points: Float
    scores: Float
    names: tuple[str, ...]
    n_chains: int
    n_draws: int


def _posterior(data: Any) -> Any:
    """Group ``posterior`` as a dataset: of an InferenceData, a DataTree, or the dataset itself."""
    if hasattr(data, "data_vars") and not hasattr(data, "children"):
        return data
    try:
        group = data["posterior"]
    except (KeyError, TypeError):
        raise ValueError(
            "data must hold a group 'posterior' (ArviZ InferenceData or DataTree), and holds none"
        ) from None
    return group.to_dataset() if hasattr(group, "to_dataset") else group


def _stacked(dataset: Any, var_names: Sequence[str] | None) -> tuple[Float, tuple[str, ...], int, int]:
    names = list(dataset.data_vars) if var_names is None else list(var_names)
    missing = [name for name in names if name not in dataset.data_vars]
    if missing or not names:
        raise ValueError(f"var_names {missing or names} not in the posterior, which holds {list(dataset.data_vars)}")
    columns, labels = [], []
    for name in names:
        variable = dataset[name]
        if not {"chain", "draw"} <= set(variable.dims):
            raise ValueError(f"variable {name!r} must have dimensions chain and draw, got {tuple(variable.dims)}")
        values = np.asarray(variable.transpose("chain", "draw", ...).values)
        chains, draws = values.shape[:2]
        columns.append(values.reshape(chains * draws, -1))
        labels += [name if values.ndim == 2 else f"{name}{list(i)}" for i in np.ndindex(values.shape[2:])]
    return as_float(np.concatenate(columns, axis=1), "data"), tuple(labels), chains, draws


def from_arviz(data: Any, grad_logp: ScoreFunction | ArrayLike | str, var_names: Sequence[str] | None = None) -> Draws:
    """Take draws out of an ArviZ object and pair them with scores.

    Parameters
    ----------
    data
        ArviZ ``InferenceData`` (before 1.0), xarray ``DataTree`` (from 1.0), or a dataset with dimensions ``chain``
        and ``draw``.
    grad_logp
        A score function ``(n, d) -> (n, d)``; an array ``(n, d)``, chain by chain; or the name of a group of ``data``
        that holds the gradient of each variable under the variable's name.
    var_names
        Variables in the order in which ``grad_logp`` takes them; all by default. For PyMC these are the value
        variables (``"sigma_log__"``), which ``pymc.sample`` keeps with
        ``idata_kwargs={"include_transformed": True}``.

    Returns
    -------
    Draws
    """
    points, names, chains, draws = _stacked(_posterior(data), var_names)
    if isinstance(grad_logp, str):
        try:
            group = data[grad_logp]
        except (KeyError, TypeError):
            raise ValueError(f"grad_logp names the group {grad_logp!r}, which data does not hold") from None
        dataset = group.to_dataset() if hasattr(group, "to_dataset") else group
        wanted = list(_posterior(data).data_vars) if var_names is None else var_names
        scores = _stacked(dataset, wanted)[0]
    elif callable(grad_logp):
        scores = np.asarray(grad_logp(points))
    else:
        scores = np.asarray(grad_logp)
    points, scores = check_points(points, scores)
    return Draws(points, scores, names, chains, draws)


def to_arviz(coreset: Coreset, data: Any) -> Any:
    """Give the coreset's draws as an object of the kind of ``data``: one chain of m draws.

    All variables of the posterior are kept, not only those that were compressed over. The weights are
    ``sample_stats.weight``; for equal-weight methods every ArviZ function can be used as it is.
    """
    import xarray

    posterior = _posterior(data)
    sizes = posterior.sizes["chain"] * posterior.sizes["draw"]
    if sizes != coreset.n_input:
        raise ValueError(f"data must hold the {coreset.n_input} draws that were compressed, got {sizes}")
    chain, draw = np.divmod(coreset.indices, posterior.sizes["draw"])
    pick = {"chain": xarray.DataArray(chain, dims="draw"), "draw": xarray.DataArray(draw, dims="draw")}
    small = posterior.drop_vars(["chain", "draw"], errors="ignore").isel(pick).expand_dims("chain", axis=0)
    small = small.assign_coords(chain=[0], draw=np.arange(len(coreset)))
    weight = xarray.Dataset(
        {"weight": (("chain", "draw"), coreset.weights[None])}, coords={"chain": [0], "draw": np.arange(len(coreset))}
    )
    if hasattr(data, "children") or isinstance(data, xarray.Dataset):
        return xarray.DataTree.from_dict({"posterior": small, "sample_stats": weight})
    return type(data)(posterior=small, sample_stats=weight)


def pymc_score(model: Any) -> ScoreFunction:
    """Score function of a PyMC model on its unconstrained (value) variables.

    Columns are the continuous value variables in ``model.continuous_value_vars``, each flattened; the density
    includes the Jacobian of the transforms.

    Raises
    ------
    ValueError
        The model has discrete variables, which have no gradient.
    """
    variables = list(model.continuous_value_vars)
    discrete = [v.name for v in model.value_vars if v not in variables]
    if discrete:
        raise ValueError(f"model has discrete variables, which have no gradient: {discrete}")
    gradient = model.compile_dlogp()
    start = model.initial_point()
    shapes = {v.name: np.shape(start[v.name]) for v in variables}
    width = sum(int(np.prod(shape)) for shape in shapes.values())

    def score(points: Float) -> Float:
        X = _columns(points, width)
        out = np.empty_like(X)
        for i, x in enumerate(X):
            point, at = dict(start), 0
            for name, shape in shapes.items():
                size = int(np.prod(shape))
                point[name] = x[at : at + size].reshape(shape)
                at += size
            out[i] = gradient(point)
        return out

    return score


def cmdstan_score(model: Any) -> ScoreFunction:
    """Score function of a Stan model on its unconstrained parameters, through BridgeStan.

    Parameters
    ----------
    model
        A ``bridgestan.StanModel``. (CmdStanPy's ``log_prob`` starts a process a point and takes constrained
        parameters, so it is of no use here; ``model.param_unconstrain`` turns CmdStanPy draws into points.)
    """
    if not hasattr(model, "log_density_gradient"):
        raise TypeError(
            f"model must be a bridgestan.StanModel, got {type(model).__name__}; for CmdStanPy build one from the same "
            "Stan file and data (pip install bridgestan)"
        )
    width = model.param_unc_num()

    def score(points: Float) -> Float:
        X = _columns(points, width)
        return np.stack([np.asarray(model.log_density_gradient(np.ascontiguousarray(x))[1], float) for x in X])

    return score


def jax_score(logdensity: Callable[[Any], Any]) -> ScoreFunction:
    """Score function of a JAX log density of one point ``(d,)``, differentiated and vectorised.

    Switch on ``jax_enable_x64``: float32 gradients limit the discrepancy that can be told from zero.
    """
    import jax

    gradient = jax.jit(jax.vmap(jax.grad(logdensity)))
    return lambda points: np.asarray(gradient(points), dtype=np.float64)


def torch_score(logdensity: Callable[[Any], Any], *, batch_size: int = 4096) -> ScoreFunction:
    """Score function of a torch log density that maps a batch ``(b, d)`` of float64 to ``(b,)``."""
    import torch

    def score(points: Float) -> Float:
        parts = []
        for part in torch.as_tensor(np.asarray(points, dtype=np.float64)).split(batch_size):
            x = part.clone().requires_grad_(True)
            value = logdensity(x)
            if value.shape != (x.shape[0],):
                raise ValueError(f"logdensity must map ({x.shape[0]}, d) to ({x.shape[0]},), got {tuple(value.shape)}")
            parts.append(torch.autograd.grad(value.sum(), x)[0])
        return torch.cat(parts).numpy()

    return score


def _columns(points: ArrayLike, width: int) -> Float:
    X = as_float(points, "points")
    if X.ndim != 2 or X.shape[1] != width:
        raise ValueError(f"points must have shape (n, {width}), one column an unconstrained parameter, got {X.shape}")
    return X
