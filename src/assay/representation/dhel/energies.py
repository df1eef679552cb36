"""Energies over all pairs, in blocks of rows, with their gradients computed on the way forward.

Both energies end in one number, so the gradient of a block of rows is known as soon as the block is: it is added to a
sum of the shape of the embeddings, and the block is dropped. Memory is a block and the embeddings, whatever the batch,
and nothing is computed twice. The price is that no second derivatives exist.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from assay.representation.dhel.kernels import Kernel, value_and_slope

#: Entries of one block where the caller gives no ``chunk_size``: by device type. On CPUs a block should stay in cache.
BLOCK = {"cpu": 1 << 19}
BLOCK_ELSEWHERE = 1 << 26

#: Largest exponent for which no row maximum is needed: exp(-80) is a normal number in float32.
SAFE = 80.0

#: Other embeddings, and the diagonals of ``anchors @ other.T`` that are left out.
Block = tuple[Tensor, tuple[int, ...]]


def block_rows(anchors: Tensor, columns: int, chunk_size: int | None) -> int:
    """How many rows a block has."""
    if chunk_size is not None:
        return chunk_size
    entries = BLOCK.get(anchors.device.type, BLOCK_ELSEWHERE)
    return max(1, min(anchors.shape[0], entries // max(columns, 1)))


def mean_logsumexp(anchors: Tensor, blocks: Sequence[Block], temperature: float, chunk_size: int | None) -> Tensor:
    """``mean_i log sum_j exp(a_i . b_j / temperature)`` over all rows ``b`` of all blocks but the excluded ones.

    Parameters
    ----------
    anchors
        Unit rows, ``(m, d)``.
    blocks
        Pairs of unit rows ``(n, d)`` and diagonals: diagonal ``k`` holds the entries ``(i, i + k)``.
    temperature
        Positive.
    chunk_size
        Rows of a block, or ``None`` for as many as :data:`BLOCK` allows.
    """
    columns = sum(other.shape[0] for other, _ in blocks)
    rows = block_rows(anchors, columns, chunk_size)
    same = len(blocks) == 1 and blocks[0][0] is anchors
    others = () if same else tuple(other for other, _ in blocks)
    diagonals = tuple(d for _, d in blocks)
    value: Tensor = _LogSumExp.apply(1.0 / temperature, diagonals, rows, anchors, *others)
    return value


def mean_kernel(
    kernel: Kernel, anchors: Tensor, other: Tensor, diagonal: int, count: int, chunk_size: int | None
) -> Tensor:
    """``mean_i sum_j K(|a_i - b_j|^2) / (count - 1)`` over all rows but those on the diagonal."""
    rows = block_rows(anchors, other.shape[0], chunk_size)
    others = () if other is anchors else (other,)
    value: Tensor = _KernelEnergy.apply(kernel, diagonal, count, rows, anchors, *others)
    return value


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, diagonals: tuple[tuple[int, ...], ...], rows: int, anchors: Tensor, *others: Tensor
    ) -> Tensor:
        m = anchors.shape[0]
        same = not others  # the anchors against themselves: the Gram matrix is symmetric
        sides = (anchors,) if same else others
        wanted = any(ctx.needs_input_grad)
        of_anchors = torch.zeros_like(anchors) if wanted else None
        of_sides = (of_anchors,) if same else tuple(torch.zeros_like(o) if wanted else None for o in others)
        total = anchors.new_zeros(())
        bounded = 2.0 * scale < SAFE  # then exp((x - 1) / temperature) cannot underflow for any cosine x
        for start in range(0, m, rows):
            part = anchors[start : start + rows]
            scaled = part * scale
            if bounded:
                shift: Tensor = anchors.new_full((1, 1), scale)
                scores = [torch.addmm(-shift, scaled, side.T) for side in sides]
            else:
                scores = [scaled @ side.T for side in sides]
            for s, excluded in zip(scores, diagonals):
                for k in excluded:
                    if -s.shape[0] < k + start < s.shape[1]:
                        s.diagonal(k + start).fill_(-torch.inf)
            if not bounded:
                shift = functools.reduce(torch.maximum, [s.amax(1, keepdim=True) for s in scores])
                for s in scores:
                    s.sub_(shift)
            for s in scores:
                s.exp_()
            z = functools.reduce(torch.add, [s.sum(1, keepdim=True) for s in scores])
            total += (z.log() + shift).sum()
            if of_anchors is None:
                continue
            weight = z.reciprocal() * (scale / m)
            for s, side, gradient in zip(scores, sides, of_sides):
                of_anchors[start : start + rows] += (s @ side) * weight
                assert gradient is not None
                gradient.addmm_(s.T, part * weight)
        if of_anchors is not None:
            ctx.save_for_backward(of_anchors, *(() if same else of_sides))
        return total / m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (None, None, None, *(gradient * g for g in ctx.saved_tensors))


class _KernelEnergy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, diagonal: int, count: int, rows: int, anchors: Tensor, *others: Tensor
    ) -> Tensor:
        m = anchors.shape[0]
        other = others[0] if others else anchors
        wanted = any(ctx.needs_input_grad)
        of_anchors = torch.empty_like(anchors) if wanted else None
        of_other = torch.zeros_like(other) if wanted and others else None
        total = anchors.new_zeros(())
        two = anchors.new_full((1, 1), 2.0)
        scale = 1.0 / (m * (count - 1))
        for start in range(0, m, rows):
            part = anchors[start : start + rows]
            r2 = torch.addmm(two, part, other.T, alpha=-2.0).clamp_min_(0.0)
            value, slope = value_and_slope(kernel, r2)
            value.diagonal(diagonal + start).zero_()
            total += value.sum()
            if of_anchors is None:
                continue
            # On the sphere r^2 = 2 - 2 a.b; the normalisation takes out the radial part of this gradient.
            slope.diagonal(diagonal + start).zero_()
            here = of_anchors[start : start + rows]
            torch.mm(slope, other, out=here)
            here.mul_(-2.0 * scale)
            if of_other is None:
                here.mul_(2.0)  # each pair is met from both sides, and the slopes are symmetric
            else:
                of_other.addmm_(slope.T, part, alpha=-2.0 * scale)
        if of_anchors is not None:
            ctx.save_for_backward(of_anchors, *(() if of_other is None else (of_other,)))
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (None, None, None, None, *(gradient * g for g in ctx.saved_tensors))
