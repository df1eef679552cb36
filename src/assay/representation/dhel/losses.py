"""The losses as functions of two views.

All take raw or normalised outputs ``out0`` and ``out1`` of shape ``(M, d)``, row ``i`` of both being views of one item,
and give a scalar (natural logarithms, no unit). They normalise rows themselves: below, ``u_i`` and ``v_i`` are unit
rows, ``tau`` is the temperature, ``r`` a distance. Half precision and autocast are computed in float32.

Keyword arguments of all of them
    gather_distributed
        Under ``torch.distributed``, compare this rank's anchors with the items of all ranks. The value is this rank's
        share: its mean over ranks is the loss of the whole batch, and so is the gradient that
        ``DistributedDataParallel`` averages. All ranks need batches of one size.
    chunk_size
        Rows of the Gram matrix that exist at a time; the result is the same. By default a block has about half a
        million entries on a CPU, 64 million elsewhere.
    check_finite
        Refuse rows that are zero or not finite. By default on the CPU only, since it waits for the device.

Errors: ``TypeError`` for what is no floating tensor or number, ``ValueError`` for shapes that are not two equal
``(M, d)`` with ``M >= 2`` over all ranks, for rows without direction, and for parameters out of range. There are no
second derivatives.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from assay.representation.dhel.energies import mean_kernel, mean_logsumexp
from assay.representation.dhel.kernels import Gaussian, Kernel, resolve_kernels
from assay.representation.dhel.views import Views, mean_over_ranks, views

Variant = Literal["official", "paper", "single"]
VARIANTS = ("official", "paper", "single")


def dhel_loss(
    out0: Tensor,
    out1: Tensor,
    temperature: float = 0.3,
    variant: Variant = "official",
    energy_weight: float | None = None,
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """Decoupled hyperspherical energy loss.

    ``-mean_i u_i.v_i / tau + w (E_u + E_v)`` with ``E_u = mean_i log sum_{j != i} exp(u_i.u_j / tau)``, negatives from
    the same view only and no positive among them.

    Parameters
    ----------
    out0, out1
        Two views, ``(M, d)``.
    temperature
        ``tau > 0``; 0.3 is the default of the authors' code.
    variant
        "official": ``w = 1``, what the authors' code computes. "paper": ``w = 1/2``, the paper's loss made symmetric;
        it behaves like DCL. "single": ``w = 1`` with ``E_u`` alone, the paper's loss of one view.
    energy_weight
        ``w >= 0``, in place of the variant's.

    Notes
    -----
    Koromilas et al., ICML 2024, section 4. The other keyword arguments and errors are those of all losses, see
    :mod:`assay.representation.dhel.losses`.
    """
    tau = check_number("temperature", temperature)
    w = dhel_weight(variant, energy_weight)
    check_chunk(chunk_size)
    with views(out0, out1, gather_distributed, check_finite) as z:
        energy = _within(z.u, z.all_u, z.offset, tau, chunk_size)
        if variant != "single":
            energy = energy + _within(z.v, z.all_v, z.offset, tau, chunk_size)
        return w * energy - _cosine(z) / tau


def kcl_loss(
    out0: Tensor,
    out1: Tensor,
    energy_kernel: str | Kernel = "gaussian",
    align_kernel: str | Kernel | None = None,
    t: float = 2.0,
    gamma: float = 16.0,
    variant: Variant = "official",
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """Kernel contrastive loss, whose expectation over random batches does not depend on the batch size.

    ``-2 mean_i K_A(r(u_i, v_i)) + gamma (E_u + E_v)`` with ``E_u = mean_{i<j} K_U(r(u_i, u_j))``.

    Parameters
    ----------
    out0, out1
        Two views, ``(M, d)``.
    energy_kernel
        ``K_U``: "gaussian" ``exp(-t r^2)``, "log" ``-log(1 + t r^2)``, "imq" ``t/sqrt(t^2 + r^2)``, "riesz" with
        ``s = t`` (``r^-s``, or ``-r^|s|`` for ``s < 0``), "gaussian_riesz" (Riesz energy, Gaussian alignment with
        ``t = 2``), or any callable of squared distances, such as :class:`Gaussian`. A callable is differentiated
        automatically.
    align_kernel
        ``K_A``; ``None`` takes ``energy_kernel``. It must be finite at 0.
    t
        Parameter of kernels that are given by name; 2 in the authors' code.
    gamma
        Weight ``>= 0`` of the energy. 16 is the default of the authors' code, and it spreads more than it aligns on
        small data: try 2 to 8.
    variant
        "official" (above), "paper": half of it, ``-mean K_A + gamma/2 (E_u + E_v)``, or "single":
        ``-mean K_A + gamma E_u``.

    Notes
    -----
    Koromilas et al., ICML 2024, section 5. The other keyword arguments and errors are those of all losses, see
    :mod:`assay.representation.dhel.losses`.
    """
    aligned, energy = resolve_kernels(energy_kernel, align_kernel, t)
    gamma = check_number("gamma", gamma, least=0.0)
    check_variant(variant)
    check_chunk(chunk_size)
    with views(out0, out1, gather_distributed, check_finite) as z:
        pull = aligned((z.u - z.v).square().sum(1)).mean()
        push = mean_kernel(energy, z.u, z.all_u, z.offset, z.count, chunk_size)
        if variant != "single":
            push = push + mean_kernel(energy, z.v, z.all_v, z.offset, z.count, chunk_size)
        pulls, pushes = {"official": (2.0, 1.0), "paper": (1.0, 0.5), "single": (1.0, 1.0)}[variant]
        return gamma * pushes * push - pulls * pull


def info_nce_loss(
    out0: Tensor,
    out1: Tensor,
    temperature: float = 0.3,
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """InfoNCE between views: ``mean_i [-u_i.v_i / tau + log sum_j exp(u_i.v_j / tau)]``, averaged with u, v swapped.

    Keyword arguments and errors: see :mod:`assay.representation.dhel.losses`.
    """
    tau = check_number("temperature", temperature)
    check_chunk(chunk_size)
    with views(out0, out1, gather_distributed, check_finite) as z:
        across = mean_logsumexp(z.u, [(z.all_v, ())], tau, chunk_size)
        back = mean_logsumexp(z.v, [(z.all_u, ())], tau, chunk_size)
        return 0.5 * (across + back) - _cosine(z) / tau


def ntxent_loss(
    out0: Tensor,
    out1: Tensor,
    temperature: float = 0.3,
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """NT-Xent, the loss of SimCLR.

    For the anchor ``u_i``: ``-u_i.v_i / tau + log(sum_j exp(u_i.v_j / tau) + sum_{j != i} exp(u_i.u_j / tau))``; the
    mean over all 2M anchors. Keyword arguments and errors: see :mod:`assay.representation.dhel.losses`.
    """
    return _both_views(out0, out1, temperature, False, gather_distributed, chunk_size, check_finite)


def dcl_loss(
    out0: Tensor,
    out1: Tensor,
    temperature: float = 0.3,
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """Decoupled contrastive loss (Yeh et al., ECCV 2022): NT-Xent without the positive in the denominator.

    Keyword arguments and errors: see :mod:`assay.representation.dhel.losses`.
    """
    return _both_views(out0, out1, temperature, True, gather_distributed, chunk_size, check_finite)


def align_uniform_loss(
    out0: Tensor,
    out1: Tensor,
    lam: float = 1.0,
    t: float = 2.0,
    alpha: float = 2.0,
    *,
    gather_distributed: bool = False,
    chunk_size: int | None = None,
    check_finite: bool | None = None,
) -> Tensor:
    """Alignment and uniformity (Wang and Isola, ICML 2020).

    ``mean_i |u_i - v_i|^alpha + lam/2 [log mean_{i<j} exp(-t |u_i - u_j|^2) + the same of v]``. Keyword arguments and
    errors: see :mod:`assay.representation.dhel.losses`.
    """
    lam = check_number("lam", lam, least=0.0)
    kernel, alpha = Gaussian(check_number("t", t)), check_number("alpha", alpha)
    check_chunk(chunk_size)
    with views(out0, out1, gather_distributed, check_finite) as z:
        r2 = (z.u - z.v).square().sum(1)
        # A power below 1 of r^2 has no derivative at 0.
        pull = (r2 if alpha == 2 else r2.clamp_min(1e-12) ** (0.5 * alpha)).mean()
        each = [
            _log_mean(mean_kernel(kernel, own, everybody, z.offset, z.count, chunk_size), z.alone)
            for own, everybody in ((z.u, z.all_u), (z.v, z.all_v))
        ]
        return pull + 0.5 * lam * (each[0] + each[1])


# --- pieces -----------------------------------------------------------------------------------------------------------


def _cosine(z: Views) -> Tensor:
    """Mean cosine of positive pairs."""
    return (z.u * z.v).sum(1).mean()


def _within(own: Tensor, everybody: Tensor, offset: int, tau: float, chunk_size: int | None) -> Tensor:
    return mean_logsumexp(own, [(everybody, (offset,))], tau, chunk_size)


def _both_views(
    out0: Tensor,
    out1: Tensor,
    temperature: float,
    decoupled: bool,
    gather_distributed: bool,
    chunk_size: int | None,
    check_finite: bool | None,
) -> Tensor:
    tau = check_number("temperature", temperature)
    check_chunk(chunk_size)
    with views(out0, out1, gather_distributed, check_finite) as z:
        m, k = z.u.shape[0], z.offset
        if z.alone:  # one symmetric Gram matrix
            both = torch.cat([z.u, z.v])
            energy = mean_logsumexp(both, [(both, (0, m, -m) if decoupled else (0,))], tau, chunk_size)
        else:
            positive = (k,) if decoupled else ()
            of_u = mean_logsumexp(z.u, [(z.all_v, positive), (z.all_u, (k,))], tau, chunk_size)
            of_v = mean_logsumexp(z.v, [(z.all_u, positive), (z.all_v, (k,))], tau, chunk_size)
            energy = 0.5 * (of_u + of_v)
        return energy - _cosine(z) / tau


def _log_mean(share: Tensor, alone: bool) -> Tensor:
    """Logarithm of the mean over ranks of ``share``, such that the mean of its gradients over ranks is the gradient."""
    if alone:
        return share.log()
    mean = mean_over_ranks(share)
    return share / mean + (mean.log() - 1.0) + (1.0 - share.detach() / mean)


# --- parameters -------------------------------------------------------------------------------------------------------


def check_number(name: str, value: object, least: float | None = None) -> float:
    """A finite number that is positive, or at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not math.isfinite(value) or (value <= 0 if least is None else value < least):
        wanted = "positive" if least is None else f"at least {least:g}"
        raise ValueError(f"{name} must be {wanted} and finite, got {value!r}")
    return float(value)


def check_chunk(chunk_size: object) -> None:
    """Refuse what is no number of rows."""
    if chunk_size is None:
        return
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size must be an int or None, got {type(chunk_size).__name__}")
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")


def check_variant(variant: object) -> None:
    """Refuse an unknown variant."""
    if variant not in VARIANTS:
        raise ValueError(f"variant must be one of {', '.join(VARIANTS)}, got {variant!r}")


def dhel_weight(variant: object, energy_weight: float | None) -> float:
    """The weight of each energy."""
    check_variant(variant)
    if energy_weight is None:
        return 0.5 if variant == "paper" else 1.0
    return check_number("energy_weight", energy_weight, least=0.0)
