"""Growing storage of the quantised part of a cache: one for the keys and one for the values of a layer."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from assay.serving.kivi.quantize import Axis, Pad, dequantize, quantize_groups


@dataclass
class PackedStore:
    """Packed tokens ``[batch, kv_heads, length, head_dim]`` of one layer, appended at the end and never rewritten.

    The buffers are larger than what they hold, by at most an eighth or ``step`` tokens, whichever is more: an append
    writes in place, and a token is copied about eight times in all however long the cache grows. (Doubling would copy
    less but leave up to half of the memory unused, in a cache whose point is to save memory.)

    A snapshot shares the buffers but keeps its own length. It stays valid while tokens are appended, since those are
    written behind its end or into new buffers; it is invalid after :meth:`truncate` and further appends.
    """

    bits: int
    axis: Axis
    group_size: int
    meta_dtype: torch.dtype
    step: int = 128
    length: int = 0
    codes: Tensor | None = None
    scale: Tensor | None = None
    zero: Tensor | None = None

    def _rows(self, tokens: int) -> int:
        return tokens // self.group_size if self.axis == "channel" else tokens

    def append(self, x: Tensor) -> None:
        """Quantise ``[batch, kv_heads, n, head_dim]`` and put it at the end; whole groups only on axis "channel"."""
        new = quantize_groups(x, self.bits, self.axis, self.group_size, meta_dtype=self.meta_dtype)
        start, stop = self._rows(self.length), self._rows(self.length + x.shape[-2])
        tokens = self.length + x.shape[-2]
        # The first append is a prompt; what follows comes token by token, so room is made from then on.
        room = self._rows(tokens + max(self.step, tokens // 8)) if self.codes is not None else stop
        for name in ("codes", "scale", "zero"):
            buffer, part = getattr(self, name), getattr(new, name)
            if buffer is None:
                setattr(self, name, part)
                continue
            # Promoted once, when the first value beyond float16 comes.
            dtype = torch.promote_types(buffer.dtype, part.dtype)
            if buffer.shape[2] < stop or dtype != buffer.dtype:
                larger = buffer.new_empty((*buffer.shape[:2], room, *buffer.shape[3:]), dtype=dtype)
                larger[:, :, :start] = buffer[:, :, :start]
                buffer = larger
                setattr(self, name, buffer)
            buffer[:, :, start:stop] = part
        self.length = tokens

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zero points of tokens ``start`` to ``stop`` (views)."""
        assert self.codes is not None and self.scale is not None and self.zero is not None
        rows = slice(self._rows(start), self._rows(stop))
        return self.codes[:, :, rows], self.scale[:, :, rows], self.zero[:, :, rows]

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """Tokens ``start`` to ``stop`` as a dense tensor; whole groups on axis "channel"."""
        return dequantize(*self.part(start, self.length if stop is None else stop), bits=self.bits, axis=self.axis).to(
            dtype
        )

    def truncate(self, length: int) -> None:
        """Keep the first tokens; whole groups on axis "channel"."""
        self.length = length

    def snapshot(self) -> PackedStore:
        """The store as it is now; later appends do not show in it."""
        return copy(self)

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the three tensors, without their spare room, by what ``change`` makes of them."""
        if self.codes is not None:
            self.codes, self.scale, self.zero = (change(t).contiguous() for t in self.part(0, self.length))

    @property
    def packed_bytes(self) -> int:
        """Bytes of the codes that are in use."""
        return 0 if self.codes is None else self.part(0, self.length)[0].nbytes

    @property
    def meta_bytes(self) -> int:
        """Bytes of the scales and zero points that are in use."""
        return 0 if self.codes is None else sum(t.nbytes for t in self.part(0, self.length)[1:])

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, spare room included."""
        return sum(t.untyped_storage().nbytes() for t in (self.codes, self.scale, self.zero) if t is not None)


@dataclass
class SimulatedStore:
    """The same tokens after quantising and de-quantising, held dense: for bit widths that are not packed."""

    bits: int
    axis: Axis
    group_size: int
    meta_dtype: torch.dtype
    pad: Pad = "edge"
    length: int = 0
    dense: Tensor | None = None

    def fake(self, x: Tensor) -> Tensor:
        """``x`` as it comes back from storage."""
        quantised = quantize_groups(x, self.bits, self.axis, self.group_size, meta_dtype=self.meta_dtype, pad=self.pad)
        return quantised.dequantize()

    def append(self, x: Tensor) -> None:
        """As :meth:`PackedStore.append`."""
        x = self.fake(x)
        self.dense = x if self.dense is None else torch.cat([self.dense[:, :, : self.length], x], -2)
        self.length += x.shape[-2]

    def dequantize(self, dtype: torch.dtype, start: int = 0, stop: int | None = None) -> Tensor:
        """As :meth:`PackedStore.dequantize`."""
        assert self.dense is not None
        return self.dense[:, :, start : self.length if stop is None else stop].to(dtype)

    def truncate(self, length: int) -> None:
        """As :meth:`PackedStore.truncate`."""
        self.length = length

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """As :meth:`PackedStore.map`."""
        if self.dense is not None:
            self.dense = change(self.dense[:, :, : self.length])

    @property
    def packed_bytes(self) -> int:
        """Bytes of what is held, which is dense: simulation saves nothing."""
        return 0 if self.dense is None else self.dense[:, :, : self.length].nbytes

    @property
    def meta_bytes(self) -> int:
        """None are held."""
        return 0

    @property
    def allocated_bytes(self) -> int:
        """As :attr:`packed_bytes`, with what the storage has beyond it."""
        return 0 if self.dense is None else self.dense.untyped_storage().nbytes()
