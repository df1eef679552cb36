"""What every loss does first: check two views, put them on the sphere in full precision, gather other ranks'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


@dataclass(frozen=True)
class Views:
    """Two views of the same items, as unit rows.

    ``u`` and ``v`` are this rank's ``(m, d)``; ``all_u`` and ``all_v`` those of all ranks, ``(count, d)``, with this
    rank's from row ``offset`` on. On one rank they are the same objects.
    """

    u: Tensor
    v: Tensor
    all_u: Tensor
    all_v: Tensor
    offset: int

    @property
    def count(self) -> int:
        """Items over all ranks."""
        return self.all_u.shape[0]

    @property
    def alone(self) -> bool:
        """Whether there is one rank."""
        return self.all_u is self.u


@contextmanager
def views(out0: Tensor, out1: Tensor, gather: bool, check_finite: bool | None) -> Iterator[Views]:
    """Check and normalise two views; the block runs without autocast, in float32 at least.

    Raises
    ------
    TypeError, ValueError
        Something is no floating tensor, the shapes are not two equal ``(M, d)``, fewer than two items are there, or
        rows are zero or not finite.
    """
    for name, out in (("out0", out0), ("out1", out1)):
        if not isinstance(out, Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(out).__name__}")
        if not out.is_floating_point():
            raise TypeError(f"{name} must be floating, got {out.dtype}")
    if out0.ndim != 2 or out0.shape != out1.shape or out0.shape[1] == 0:
        raise ValueError(f"out0 and out1 must have one shape (M, d), got {tuple(out0.shape)} and {tuple(out1.shape)}")
    if out0.device != out1.device:
        raise ValueError(f"out0 and out1 must be on one device, got {out0.device} and {out1.device}")
    distributed = gather and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if out0.shape[0] * (dist.get_world_size() if distributed else 1) < 2 or out0.shape[0] < 1:
        raise ValueError(f"out0 has {out0.shape[0]} item(s): a loss needs at least 2 items per view")
    if check_finite or (check_finite is None and out0.device.type == "cpu"):
        for name, out in (("out0", out0), ("out1", out1)):
            check_rows(name, out)
    with torch.autocast(device_type=out0.device.type, enabled=False):
        u, v = unit_rows(out0), unit_rows(out1)
        if u.dtype != v.dtype:
            u, v = u.double(), v.double()
        if not distributed:
            yield Views(u, v, u, v, 0)
            return
        _check_equal_sizes(u)
        both = _Gather.apply(torch.stack([u, v]))
        yield Views(u, v, both[0], both[1], dist.get_rank() * u.shape[0])


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1, in float32 at least (float64 stays)."""
    wide = x if x.dtype == torch.float64 else x.float()
    # Dividing by the largest entry first keeps the squares of very large and very small rows in range.
    largest = wide.detach().abs().amax(1, keepdim=True)
    return torch.nn.functional.normalize(wide / largest.clamp_min(torch.finfo(wide.dtype).tiny), dim=1)


def check_rows(name: str, x: Tensor) -> None:
    """Refuse rows that have no direction.

    Raises
    ------
    ValueError
        A row is zero, or holds NaN or infinity; the message names the first.
    """
    largest = x.detach().abs().amax(1)  # NaN where a row has one
    bad = ~torch.isfinite(largest) | (largest == 0)
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        what = "is zero" if bool(largest[row] == 0) else "holds NaN or infinity"
        raise ValueError(f"{name}: row {row} {what}; it has no direction on the sphere")


def _check_equal_sizes(x: Tensor) -> None:
    """Refuse batches of different sizes: the collectives would hang, and the mean over ranks be another."""
    mine = torch.tensor(x.shape, device=x.device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    shapes = [tuple(f.tolist()) for f in found]
    if len(set(shapes)) > 1:
        raise ValueError(f"all ranks must have batches of one shape, got {shapes}; use drop_last=True")


class _Gather(torch.autograd.Function):
    """Rows of all ranks; the gradient of a row is the sum over the ranks that used it."""

    @staticmethod
    def forward(ctx: Any, pair: Tensor) -> Tensor:
        pair = pair.contiguous()
        parts = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, pair)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


def mean_over_ranks(value: Tensor) -> Tensor:
    """The mean of a number over ranks, without gradient."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
