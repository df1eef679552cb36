"""What is known about the losses exactly: their least value on a batch, and how their mean moves with its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from assay.representation.dhel.kernels import Riesz
from assay.representation.dhel.losses import check_number
from assay.representation.dhel.modules import (
    AlignUniformLoss,
    DCLLoss,
    DHELLoss,
    InfoNCELoss,
    KCLLoss,
    NTXentLoss,
)


def simplex(M: int, d: int) -> Tensor:
    """Vertices of a regular simplex on the unit sphere, ``(M, d)`` in float64: all cosines are ``-1/(M-1)``.

    Raises
    ------
    ValueError
        ``M < 2`` or ``M > d + 1``, where there is none.
    """
    if not 2 <= M <= d + 1:
        raise ValueError(f"M must be from 2 to d + 1 = {d + 1}, got {M}: there is no such regular simplex")
    centred = torch.eye(M, dtype=torch.float64) - 1.0 / M
    # An orthonormal basis of the hyperplane that holds the centred vertices, of dimension M - 1.
    basis = torch.linalg.svd(centred).Vh[: M - 1]
    points = torch.nn.functional.normalize(centred @ basis.T, dim=1)
    return torch.cat([points, points.new_zeros(M, d - M + 1)], 1)


def cross_polytope(d: int) -> Tensor:
    """The ``2d`` points plus and minus each axis, ``(2d, d)`` in float64."""
    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    axes = torch.eye(d, dtype=torch.float64)
    return torch.cat([axes, -axes])


def minimum_value(loss: nn.Module, M: int, d: int) -> float:
    """Least value of a loss over all batches of ``M`` pairs on the sphere in ``d`` dimensions.

    For ``M <= d + 1`` both views are the same regular simplex; for KCL with ``M = 2d`` they are the cross-polytope,
    which is universally optimal.

    Parameters
    ----------
    loss
        One of the losses of this package. Kernels of KCL must decrease and be convex in the squared distance (for
        ``M = 2d``: completely monotone, up to a constant). The built-in ones are, but for Riesz with ``s < -2``; for a
        callable of one's own it is the caller's to know.
    M, d
        Items and dimensions.

    Notes
    -----
    Koromilas et al., ICML 2024, section 3; the values follow from the configurations.

    Raises
    ------
    TypeError, ValueError
        Another loss, or sizes or kernels for which no minimum is known here.
    """
    if not isinstance(loss, (DHELLoss, KCLLoss, InfoNCELoss, NTXentLoss, DCLLoss, AlignUniformLoss)):
        raise TypeError(f"loss must be one of this package's, got {type(loss).__name__}")
    kernel = loss.options.get("energy_kernel")
    for k in (kernel, loss.options.get("align_kernel")):
        if isinstance(k, Riesz) and k.s < -2:
            raise ValueError(f"the minimum is not known for a Riesz kernel with s = {k.s:g} < -2")
    if 2 <= M <= d + 1:
        cosines = {-1.0 / (M - 1): M - 1}
    elif kernel is not None and 2 * d == M:
        cosines = {0.0: M - 2, -1.0: 1}
    else:
        raise ValueError(f"the minimum is known for 2 <= M <= d + 1 (and M = 2d for KCL), not M = {M}, d = {d}")
    if isinstance(loss, KCLLoss):
        o = loss.options
        r2 = torch.tensor([2.0 - 2.0 * c for c in cosines], dtype=torch.float64)
        counts = torch.tensor(list(cosines.values()), dtype=torch.float64)
        energy = float((o["energy_kernel"](r2) * counts).sum()) / (M - 1)
        pull = float(o["align_kernel"](torch.zeros(1, dtype=torch.float64)))
        official = 2.0 * (o["gamma"] * energy - pull)
        return {"official": official, "paper": 0.5 * official, "single": o["gamma"] * energy - pull}[o["variant"]]
    if isinstance(loss, AlignUniformLoss):
        return float(-2.0 * loss.options["lam"] * loss.options["t"] * M / (M - 1))
    tau = loss.options["temperature"]
    others = math.log(M - 1) - 1.0 / ((M - 1) * tau)  # log of the sum over the M - 1 others of one view
    if isinstance(loss, DHELLoss):
        sides = 1 if loss.options["variant"] == "single" else 2
        return -1.0 / tau + sides * loss.energy_weight * others
    if isinstance(loss, DCLLoss):
        return -1.0 / tau + math.log(2.0) + others
    views = 1.0 if isinstance(loss, InfoNCELoss) else 2.0
    return float(np.logaddexp(0.0, math.log(views) + others - 1.0 / tau))


def uniform_gaussian_energy(d: int, t: float = 2.0) -> float:
    """``E exp(-t |x - y|^2)`` for independent uniform points on the sphere in ``d`` dimensions.

    ``exp(-2t) Gamma(d/2) t^(1-d/2) I_(d/2-1)(2t)`` with the modified Bessel function; the least that the Gaussian
    energy can be for many points.
    """
    from scipy.special import hyp0f1

    if d < 1:
        raise ValueError(f"d must be at least 1, got {d}")
    t = check_number("t", t)
    return float(math.exp(-2.0 * t) * hyp0f1(0.5 * d, t * t))


class BatchSizeRow(NamedTuple):
    """Mean loss over random batches of one size.

    ``mean`` is of the loss without the logarithm of its number of negatives (``offset``, which is 0 for KCL); ``low``
    and ``high`` are its 95% interval over batches. ``whole`` is the same of all items as one batch.
    """

    size: int
    mean: float
    low: float
    high: float
    offset: float
    whole: float


def batch_size_bias(
    loss: nn.Module,
    u: Tensor,
    v: Tensor,
    sizes: Sequence[int] = (2, 4, 16, 64, 256),
    n_batches: int = 400,
    seed: int = 0,
) -> list[BatchSizeRow]:
    """How the mean of a loss over random batches (without replacement) moves with the batch size.

    KCL is made of U-statistics: its mean is the same for all sizes. A mean of logarithms is not, and is lower for small
    batches.

    Parameters
    ----------
    loss
        One of the losses of this package.
    u, v
        Two views of ``N`` items, ``(N, d)``.
    sizes
        From 2 to ``N``.
    n_batches
        Of each size, at least 2.
    seed
        Of the draws.
    """
    n = u.shape[0]
    if n_batches < 2:
        raise ValueError(f"n_batches must be at least 2, got {n_batches}")
    for size in sizes:
        if not 2 <= size <= n:
            raise ValueError(f"sizes must lie between 2 and the number of items, {n}, got {size}")
    offset = _offset(loss)
    rng = np.random.default_rng(seed)
    rows = []
    with torch.no_grad():
        whole = float(loss(u, v)) - offset(n)
        for size in sizes:
            values = np.empty(n_batches)
            for k in range(n_batches):
                chosen = torch.from_numpy(rng.choice(n, size, replace=False)).to(u.device)
                values[k] = float(loss(u[chosen], v[chosen])) - offset(size)
            half = 1.959964 * values.std(ddof=1) / math.sqrt(n_batches)
            mean = float(values.mean())
            rows.append(BatchSizeRow(size, mean, mean - half, mean + half, offset(size), whole))
    return rows


def _offset(loss: nn.Module) -> Callable[[int], float]:
    """The logarithm of the number of terms in a loss's sums, by batch size."""
    if isinstance(loss, DHELLoss):
        weight = loss.energy_weight * (1 if loss.options["variant"] == "single" else 2)
        return lambda m: weight * math.log(m - 1)
    if isinstance(loss, InfoNCELoss):
        return lambda m: math.log(m)
    if isinstance(loss, NTXentLoss):
        return lambda m: math.log(2 * m - 1)
    if isinstance(loss, DCLLoss):
        return lambda m: math.log(2 * (m - 1))
    if isinstance(loss, (KCLLoss, AlignUniformLoss)):
        return lambda m: 0.0
    raise TypeError(f"loss must be one of this package's, got {type(loss).__name__}")
