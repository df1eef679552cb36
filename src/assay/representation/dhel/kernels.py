"""Kernels of the squared distance, for :func:`~assay.representation.dhel.kcl_loss`.

A kernel is called with squared distances and gives values of the same shape. Those of this module also give their
derivative with respect to the squared distance, which spares automatic differentiation over a Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

Kernel = Callable[[Tensor], Tensor]

#: Smallest squared distance that a Riesz kernel sees: distances below 1e-6 count as 1e-6.
SMALLEST = 1e-12


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")
    return float(value)


@dataclass(frozen=True)
class Gaussian:
    """``exp(-t r^2)``, ``t > 0`` (2 in the authors' code)."""

    t: float = 2.0

    def __post_init__(self) -> None:
        _positive("t", self.t)

    def __call__(self, r2: Tensor) -> Tensor:
        """Values at squared distances."""
        return torch.exp(-self.t * r2)

    def value_and_slope(self, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Values and derivatives; overwrites ``r2``."""
        value = r2.mul_(-self.t).exp_()
        return value, -self.t * value


@dataclass(frozen=True)
class LogKernel:
    """``-log(1 + t r^2)``, ``t > 0``.

    The authors' code takes half of this for the energy: their ``gamma`` of 16 is 8 with this kernel in both roles.
    """

    t: float = 2.0

    def __post_init__(self) -> None:
        _positive("t", self.t)

    def __call__(self, r2: Tensor) -> Tensor:
        """Values at squared distances."""
        return -torch.log1p(self.t * r2)

    def value_and_slope(self, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Values and derivatives; overwrites ``r2``."""
        value = -torch.log1p(r2.mul_(self.t))
        return value, r2.add_(1.0).reciprocal_().mul_(-self.t)


@dataclass(frozen=True)
class IMQ:
    """Inverse multiquadric ``c / sqrt(c^2 + r^2)``, ``c > 0`` (2 in the authors' code)."""

    c: float = 2.0

    def __post_init__(self) -> None:
        _positive("c", self.c)

    def __call__(self, r2: Tensor) -> Tensor:
        """Values at squared distances."""
        return self.c * torch.rsqrt(self.c**2 + r2)

    def value_and_slope(self, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Values and derivatives; overwrites ``r2``."""
        value = self.c * r2.add_(self.c**2).rsqrt_()
        return value, value**3 * (-0.5 / self.c**2)


@dataclass(frozen=True)
class Riesz:
    """``r^-s`` for ``s > 0``, ``-r^|s|`` for ``s < 0``; distances below 1e-6 count as 1e-6 and have no gradient.

    With ``s > 0`` it diverges where points meet, and serves as energy only. In float32 squared distances are known to
    about 1e-7, so nearly equal points have noisy values: use float64 if such points matter.
    """

    s: float = 1.0

    def __post_init__(self) -> None:
        if self.s == 0:
            raise ValueError("s must not be 0: the kernel is constant")
        _positive("|s|", abs(self.s))

    def __call__(self, r2: Tensor) -> Tensor:
        """Values at squared distances."""
        return math.copysign(1.0, self.s) * r2.clamp_min(SMALLEST) ** (-0.5 * self.s)

    def value_and_slope(self, r2: Tensor) -> tuple[Tensor, Tensor]:
        """Values and derivatives."""
        clamped = r2.clamp_min(SMALLEST)
        value = math.copysign(1.0, self.s) * clamped ** (-0.5 * self.s)
        slope = (value / clamped).mul_(-0.5 * self.s)
        return value, slope.masked_fill_(r2 < SMALLEST, 0.0)


_BY_NAME: dict[str, Any] = {"gaussian": Gaussian, "log": LogKernel, "imq": IMQ, "riesz": Riesz}
KERNEL_NAMES = (*_BY_NAME, "gaussian_riesz")


def value_and_slope(kernel: Kernel, r2: Tensor) -> tuple[Tensor, Tensor]:
    """Values and derivatives of any kernel, by automatic differentiation where it does not give them itself."""
    own = getattr(kernel, "value_and_slope", None)
    if own is not None:
        value, slope = own(r2)
        return value, slope
    with torch.enable_grad():
        at = r2.detach().requires_grad_()
        value = kernel(at)
        (slope,) = torch.autograd.grad(value.sum(), at)
    return value.detach(), slope


def resolve_kernels(energy: object, align: object, t: float) -> tuple[Kernel, Kernel]:
    """The kernels ``(align, energy)`` that the arguments of KCL name; ``t`` is the parameter of named ones.

    Raises
    ------
    TypeError, ValueError
        Something is no kernel, or one that diverges at 0 is asked to measure alignment.
    """
    found = _kernel("energy_kernel", energy, t)
    if align is None:
        aligned = Gaussian(2.0) if energy == "gaussian_riesz" else found
    else:
        aligned = _kernel("align_kernel", align, t)
    if isinstance(aligned, Riesz) and aligned.s > 0:
        raise ValueError(
            f"align_kernel must be finite at distance 0, which a Riesz kernel with s = {aligned.s:g} > 0 is not: give "
            "another align_kernel, s < 0, or energy_kernel='gaussian_riesz'"
        )
    return aligned, found


def _kernel(name: str, given: object, t: float) -> Kernel:
    if isinstance(given, str):
        if given not in KERNEL_NAMES:
            raise ValueError(f"{name} must be one of {', '.join(KERNEL_NAMES)} or a callable, got {given!r}")
        if given == "gaussian_riesz" and name == "align_kernel":
            raise ValueError("align_kernel must be one kernel; 'gaussian_riesz' names a pair, for energy_kernel")
        if given.endswith("riesz"):
            if isinstance(t, bool) or not isinstance(t, (int, float)):
                raise TypeError(f"t must be a number, got {type(t).__name__}")
            return Riesz(float(t))
        kernel: Kernel = _BY_NAME[given](_positive("t", t))
        return kernel
    if isinstance(given, Mapping):
        options = dict(given)
        if options.get("name") not in _BY_NAME:
            raise ValueError(f"{name} must name one of {', '.join(_BY_NAME)}, got {dict(given)!r}")
        made: Kernel = _BY_NAME[options.pop("name")](**options)
        return made
    if not callable(given):
        raise TypeError(f"{name} must be a name or a callable of squared distances, got {type(given).__name__}")
    probe = given(torch.ones(2))
    if not isinstance(probe, Tensor) or probe.shape != (2,):
        raise TypeError(f"{name} must map a tensor of squared distances to one of the same shape")
    if probe.requires_grad:
        raise ValueError(f"{name} has trainable parameters, which would get no gradient")
    return given


def kernel_config(kernel: Kernel) -> dict[str, Any]:
    """A built-in kernel as JSON values."""
    for name, kind in _BY_NAME.items():
        if isinstance(kernel, kind):
            return {"name": name, **asdict(kernel)}
    raise TypeError(f"a kernel of one's own ({kernel!r}) cannot be written as JSON; only {', '.join(_BY_NAME)} can")
