"""Round-to-nearest asymmetric quantisation in groups, and its packed storage.

A group ``X`` of ``G`` numbers is stored as ``G`` codes of ``bits`` bits, a scale ``s`` and a zero point ``z``::

    q_max = 2**bits - 1        z = min X        s = (max X - min X) / q_max
    code  = clamp(round((X - z) / s), 0, q_max)                X' = code * s + z

Minimum, maximum and range are taken in float32. ``s`` and ``z`` are then rounded to the type in which they are
stored, and the codes are computed from the rounded values, so that ``|X - X'| <= s/2`` holds for what is stored, up to
the rounding of ``z`` and of ``q_max * s`` at the two ends of a group. A constant group has ``s = 0`` and is exact (up
to the rounding of ``z``); dividing by its range, as the authors' code does, would give NaN.

Axes, for tensors ``[..., tokens, channels]``:

* ``"channel"`` (per channel): a group is ``G`` consecutive **tokens** of one channel;
* ``"token"`` (per token): a group is ``G`` consecutive **channels** of one token.

Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML 2024), section 3.1 and algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Axis = Literal["channel", "token"]
Pad = Literal["edge", "zero"]

BITS = (1, 2, 3, 4, 8)
PACKED_BITS = (2, 4, 8)
META_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FLOAT16_SAFE = 6e4
"""Above this, zero points no longer fit float16 (65,504) with room for rounding; such groups keep float32."""


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes, scales and zero points of a tensor ``[..., tokens, channels]``; what :func:`quantize_groups` returns.

    Attributes
    ----------
    codes
        uint8, ``8 / bits`` codes a byte for 2, 4 and 8 bits, one a byte for 1 and 3 bits.
        ``[..., tokens/G, G*bits/8, channels]`` for axis ``"channel"``, ``[..., tokens, channels*bits/8]`` for
        ``"token"``; see :func:`pack_codes` for the order within a byte.
    scale, zero
        ``[..., tokens/G, channels]`` for axis ``"channel"``, ``[..., tokens, channels/G]`` for ``"token"``.
    bits, axis, group_size
        As given to :func:`quantize_groups`.
    shape
        Of the tensor that was quantised, without padding.
    dtype
        Of the tensor that was quantised, the default of :meth:`dequantize`.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    axis: Axis
    group_size: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """``codes * scale + zero``, computed in float32, as ``dtype`` (default: that of the input)."""
        dense = dequantize(self.codes, self.scale, self.zero, bits=self.bits, axis=self.axis)
        return dense[..., : self.shape[-2], :].to(dtype or self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def cat(self, other: QuantizedTensor) -> QuantizedTensor:
        """Both one after the other along the tokens; no code changes.

        Raises
        ------
        ValueError
            The two differ in bits, axis, group size or shape, or the first ends in a padded group.
        """
        if (self.bits, self.axis, self.group_size) != (other.bits, other.axis, other.group_size):
            raise ValueError(
                f"other must have bits={self.bits}, axis={self.axis!r} and group_size={self.group_size}, "
                f"not bits={other.bits}, axis={other.axis!r} and group_size={other.group_size}"
            )
        if self.shape[:-2] != other.shape[:-2] or self.shape[-1] != other.shape[-1]:
            raise ValueError(f"other must agree with shape {self.shape} in all but the tokens, not {other.shape}")
        if self.axis == "channel" and self.shape[-2] % self.group_size:
            raise ValueError(
                f"{self.shape[-2]} tokens end in a padded group of {self.group_size}: nothing can follow it"
            )
        dim = -3 if self.axis == "channel" else -2
        meta = torch.promote_types(self.scale.dtype, other.scale.dtype)
        return replace(
            self,
            codes=torch.cat([self.codes, other.codes], dim),
            scale=torch.cat([self.scale.to(meta), other.scale.to(meta)], -2),
            zero=torch.cat([self.zero.to(meta), other.zero.to(meta)], -2),
            shape=(*self.shape[:-2], self.shape[-2] + other.shape[-2], self.shape[-1]),
        )


def quantize_groups(
    x: Tensor,
    bits: int,
    axis: Axis,
    group_size: int = 32,
    *,
    meta_dtype: torch.dtype = torch.float16,
    pad: Pad = "edge",
) -> QuantizedTensor:
    """Quantise a tensor in groups; the formula is that of the module.

    Parameters
    ----------
    x
        ``[..., tokens, channels]``, any floating dtype.
    bits
        1, 2, 3, 4 or 8. 2, 4 and 8 are packed; 1 and 3 take a byte each and serve sweeps only.
    axis
        ``"channel"``: groups run along tokens; ``"token"``: groups run along channels.
    group_size
        Numbers in a group, ``G``. The paper uses 32.
    meta_dtype
        In which scales and zero points are stored: float16 (default), bfloat16 or float32. float16 keeps three more
        bits than bfloat16: a zero point of -20 is off by up to 0.008 instead of 0.06. If a value beyond 6e4 occurs,
        all scales and zero points are returned as float32, and the groups concerned keep float32 precision.
    pad
        How a last group of fewer than ``G`` tokens is filled (axis ``"channel"``): with its last token
        (``"edge"``) or with zeros, which then take part in minimum and maximum, as in the paper's study of axes
        (``"zero"``).

    Returns
    -------
    A :class:`QuantizedTensor`.

    Raises
    ------
    TypeError
        ``x`` is no floating tensor.
    ValueError
        An argument is out of its range; the channels are no multiple of ``group_size`` (axis ``"token"``); a group
        does not fill whole bytes; or ``x`` holds NaN or infinity.
    """
    check_quantizer(bits, axis, group_size, meta_dtype)
    if pad not in ("edge", "zero"):
        raise ValueError(f"pad must be 'edge' or 'zero', not {pad!r}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating tensor, not {x.dtype if isinstance(x, Tensor) else type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"x must have shape [..., tokens, channels], not {tuple(x.shape)}")
    shape, dtype = tuple(x.shape), x.dtype
    x = x.detach()
    if axis == "token":
        check_head_dim(shape[-1], bits, group_size, "axis 'token'")
        groups, dim = x.unflatten(-1, (shape[-1] // group_size, group_size)), -1
    else:
        if short := -shape[-2] % group_size:
            fill = x[..., -1:, :] if pad == "edge" else torch.zeros_like(x[..., -1:, :])
            x = torch.cat([x, fill.expand(*shape[:-2], short, shape[-1])], -2)
        groups, dim = x.unflatten(-2, (x.shape[-2] // group_size, group_size)), -2
    groups = groups.float()
    low, high = torch.aminmax(groups, dim=dim)
    scale = (high - low) / (2**bits - 1)
    scale, low = _round_meta(scale, low, high, meta_dtype)
    # A scale of 0 (a constant group, or a range below the smallest float16) leaves every code at 0.
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0).unsqueeze(dim)
    codes = groups.sub(low.float().unsqueeze(dim)).mul_(inverse).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    if axis == "token":
        codes = codes.flatten(-2)
    return QuantizedTensor(
        pack_codes(codes, bits, axis) if bits in PACKED_BITS else codes,
        scale,
        low,
        bits,
        axis,
        group_size,
        shape,
        dtype,
    )


def _round_meta(scale: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero point as they are stored. One look at the largest magnitude finds NaN, infinity and overflow."""
    if low.numel() == 0:
        return scale.to(dtype), low.to(dtype)
    size = torch.maximum(low.abs(), high.abs())
    largest = size.amax().item()
    if not largest < float("inf"):
        raise ValueError("x must be finite, but holds NaN or infinity")
    if dtype != torch.float16 or largest <= FLOAT16_SAFE:
        return scale.to(dtype), low.to(dtype)
    # Only the groups that need it keep float32, so that no group depends on its neighbours.
    fits = size <= FLOAT16_SAFE
    return torch.where(fits, scale.half().float(), scale), torch.where(fits, low.half().float(), low)


def pack_codes(codes: Tensor, bits: int, axis: Axis) -> Tensor:
    """Pack uint8 codes, ``8 / bits`` a byte.

    Slot ``k`` of a byte (bits ``k*bits`` and up) holds a code that lies ``k/per`` of the packed dimension further on,
    ``per = 8 / bits``: one mask over all bytes then gives a contiguous plane of codes, which is what makes unpacking
    fast. The packed dimension is the group (dim -2 of ``[..., groups, G, channels]``) for axis ``"channel"`` and all
    channels (dim -1 of ``[..., tokens, channels]``) for ``"token"``.
    """
    per, dim = 8 // bits, -2 if axis == "channel" else -1
    if per == 1:
        return codes
    planes = codes.chunk(per, dim)
    packed = planes[0].clone()
    for k in range(1, per):
        packed |= planes[k] << (bits * k)
    return packed


def unpack_codes(packed: Tensor, bits: int, axis: Axis) -> Tensor:
    """The codes that :func:`pack_codes` packed, as uint8."""
    per, dim = 8 // bits, -2 if axis == "channel" else -1
    if per == 1:
        return packed
    return torch.cat([(packed >> (bits * k)) & (2**bits - 1) for k in range(per)], dim)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, *, bits: int, axis: Axis) -> Tensor:
    """``codes * scale + zero`` in float32, ``[..., tokens, channels]``, from the layout of :class:`QuantizedTensor`."""
    codes = unpack_codes(codes, bits, axis) if bits in PACKED_BITS else codes
    if axis == "channel":
        return torch.addcmul(zero.float().unsqueeze(-2), codes.float(), scale.float().unsqueeze(-2)).flatten(-3, -2)
    groups = codes.float().unflatten(-1, (scale.shape[-1], codes.shape[-1] // max(1, scale.shape[-1])))
    return torch.addcmul(zero.float().unsqueeze(-1), groups, scale.float().unsqueeze(-1)).flatten(-2)


def check_quantizer(bits: int, axis: str, group_size: int, meta_dtype: torch.dtype, name: str = "") -> None:
    """Raise ``ValueError`` for what no tensor could be quantised with; ``name`` is put before the arguments' names."""
    if isinstance(bits, bool) or bits not in BITS:
        raise ValueError(f"{name}bits must be one of {BITS}, not {bits!r}")
    if axis not in ("channel", "token"):
        raise ValueError(f"{name}axis must be 'channel' or 'token', not {axis!r}")
    if not isinstance(group_size, int) or group_size < 1:
        raise ValueError(f"group_size must be a positive integer, not {group_size!r}")
    if meta_dtype not in META_DTYPES:
        raise ValueError(f"meta_dtype must be one of {META_DTYPES}, not {meta_dtype!r}")
    if axis == "channel" and bits in PACKED_BITS and group_size % (8 // bits):
        raise ValueError(f"group_size must be a multiple of {8 // bits} to fill bytes at {bits} bits, not {group_size}")


def check_head_dim(head_dim: int, bits: int, group_size: int, name: str) -> None:
    """Raise ``ValueError`` unless groups of channels fill a head, and its codes whole bytes."""
    if head_dim % group_size:
        fit = [g for g in range(8, head_dim + 1) if head_dim % g == 0] or [head_dim]
        raise ValueError(
            f"{name} needs channels that are a multiple of group_size, but {head_dim} is none of {group_size}; "
            f"group sizes that fit: {fit}"
        )
    if bits in PACKED_BITS and head_dim % (8 // bits):
        raise ValueError(f"{name} needs channels that are a multiple of {8 // bits} at {bits} bits, not {head_dim}")
