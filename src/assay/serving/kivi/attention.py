"""Attention on packed keys and values, registered with ``transformers`` under the name ``"kivi"``.

For a query ``q`` and a group ``g`` of keys with scale ``s_g`` and zero point ``z_g`` (one each per channel)::

    q . K'^T = (q * s_g) . codes^T + q . z_g

so the query is scaled once a group and the keys are never restored. For values with scales ``s_{t,h}`` and zero points
``z_{t,h}`` of token ``t`` and channel group ``h``, and attention weights ``p_t``::

    out_h = sum_t (p_t s_{t,h}) codes_{t,h} + sum_t p_t z_{t,h}

A byte holds the codes of several planes (see :func:`~assay.serving.kivi.pack_codes`). Plane ``k`` is cut out by one
mask without a shift, as ``codes * 2**(bits k)``; the power of two, exact in floating point, goes into the small
operand. Work goes in chunks whose unpacked codes stay in the processor's cache: that is the only dense temporary.
Everything is computed in float32. Grouped queries share the packed heads, which are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from assay.serving.kivi import cpu
from assay.serving.kivi.store import PackedStore
from assay.serving.kivi.view import PackedView

# From this many queries on, one dense copy costs less than scaling every query once a group.
DENSE_QUERIES = 16
# Unpacked elements of a chunk: large enough that the calls cost little, small enough to bound the dense temporary.
CHUNK_CPU, CHUNK_GPU = 2**20, 2**24
# Extras of other attentions that change the result, which this one does not compute.
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


def register_kivi_attention() -> None:
    """Make ``"kivi"`` known to ``transformers``, for ``model.set_attn_implementation("kivi")``.

    Registers :func:`kivi_attention_forward` and the mask that it needs (the one of ``"sdpa"``). Calling it again does
    no harm. With any other cache, or before anything is packed, ``"kivi"`` computes exactly what ``"sdpa"`` does.
    """
    AttentionInterface.register("kivi", kivi_attention_forward)
    AttentionMaskInterface.register("kivi", sdpa_mask)


def kivi_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in the form in which ``transformers`` calls it.

    Parameters
    ----------
    module
        The attention module; ``is_causal`` is read from it where the argument is ``None``.
    query
        ``[batch, heads, n, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``, as :meth:`KIVICache.update` returned them.
    attention_mask
        ``[batch, 1 or heads, n, tokens]``, boolean (true: attend) or additive; ``None`` with ``n > 1`` means causal,
        aligned to the last token.
    dropout, scaling
        As for ``torch.nn.functional.scaled_dot_product_attention``.

    Returns
    -------
    ``[batch, n, heads, head_dim]`` in the dtype of ``query``, and ``None`` for the weights.

    Raises
    ------
    ValueError
        The model asks for something that this attention does not compute; the message names it.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attention 'kivi' does not compute {name!r}, which {type(module).__name__} uses; "
                "call model.set_attn_implementation('eager')"
            )
    if not isinstance(key, PackedView) and not isinstance(value, PackedView):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    queries, tokens = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if attention_mask is None and causal and queries > 1:
        position = torch.arange(tokens, device=query.device)
        attention_mask = (position <= position[tokens - queries :, None])[None, None]
    if queries > DENSE_QUERIES:
        key, value = (x.dense() if isinstance(x, PackedView) else x for x in (key, value))
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
        )
    out = packed_attention(query, key, value, attention_mask, scaling=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(q K'^T * scaling + mask) V'`` without restoring ``K'`` and ``V'``.

    Shapes are those of :func:`kivi_attention_forward`; ``mask`` ``None`` masks nothing. Returns ``[batch, heads, n,
    head_dim]`` in the dtype of ``query``. ``scaling`` defaults to ``head_dim ** -0.5``.
    """
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    scale = dim**-0.5 if scaling is None else scaling
    # The queries of all heads that share a key-value head become rows of one matrix.
    q = (query.float() * scale).reshape(batch, kv_heads, -1, dim)
    logits = _logits(q, key)
    if mask is not None:
        shaped = logits.view(batch, heads, queries, -1)
        shaped = shaped.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else shaped + mask
        logits = shaped.reshape(logits.shape)
    weights = logits.softmax(-1)
    if mask is not None and mask.dtype == torch.bool:
        weights = weights.nan_to_num()  # a row that may attend to nothing (padding) gives 0, as in sdpa
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return _mix(weights, value).view(batch, heads, queries, -1).to(query.dtype)


def _logits(q: Tensor, key: Tensor) -> Tensor:
    """``q K'^T``: ``[batch, kv_heads, rows, head_dim]`` to ``[batch, kv_heads, rows, tokens]``."""
    if not isinstance(key, PackedView):
        return q @ key.float().transpose(2, 3)
    store = key.store
    if cpu.available(store, "channel"):
        return torch.cat([cpu.logits(q, store), q @ key.residual.float().transpose(2, 3)], -1)
    out = q.new_empty((*q.shape[:3], key.shape[2]))
    for start, stop in _chunks(store, q):
        target = out[..., start:stop]
        if store.axis == "channel":
            _channel_logits(q, store, start, stop, target)
        else:
            torch.matmul(q, store.dequantize(torch.float32, start, stop).transpose(2, 3), out=target)
    if key.residual.shape[2]:
        out[..., store.length :] = q @ key.residual.float().transpose(2, 3)
    return out


def _mix(weights: Tensor, value: Tensor) -> Tensor:
    """``weights V'``: ``[batch, kv_heads, rows, tokens]`` to ``[batch, kv_heads, rows, head_dim]``."""
    if not isinstance(value, PackedView):
        return weights @ value.float()
    store, residual = value.store, value.residual
    out = weights[..., store.length :] @ residual.float()
    if cpu.available(store, "token"):
        return out + cpu.mix(weights[..., : store.length], store)
    for start, stop in _chunks(store, residual):
        p = weights[..., start:stop]
        out += (
            _token_mix(p, store, start, stop) if store.axis == "token" else p @ store.dequantize(p.dtype, start, stop)
        )
    return out


def _chunks(store: PackedStore, like: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of whole groups whose unpacked codes fit the budget."""
    per_token = like.shape[0] * like.shape[1] * like.shape[3]
    budget = CHUNK_CPU if like.device.type == "cpu" else CHUNK_GPU
    size = max(1, budget // (per_token * store.group_size)) * store.group_size
    for start in range(0, store.length, size):
        yield start, min(store.length, start + size)


def _planes(codes: Tensor, bits: int, out: Tensor) -> None:
    """Codes of every plane as floats, plane ``k`` times ``2**(bits k)``; ``out`` has the planes at dim 0."""
    for k in range(8 // bits):
        out[k].copy_(torch.bitwise_and(codes, (2**bits - 1) << (bits * k)))


def _channel_logits(q: Tensor, store: PackedStore, start: int, stop: int, out: Tensor) -> None:
    codes, scale, zero = store.part(start, stop)
    batch, heads, groups, rows, dim = codes.shape  # rows of bytes; planes * rows = group size
    planes = 8 // store.bits
    unpacked = q.new_empty((batch, heads, groups, planes, rows, dim))
    _planes(codes, store.bits, unpacked.movedim(3, 0))
    scaled = q.unsqueeze(2) * scale.float().unsqueeze(3)  # [batch, heads, groups, q rows, dim]
    dots = scaled @ unpacked.flatten(3, 4).transpose(3, 4)  # [batch, heads, groups, q rows, group size]
    shrink = torch.exp2(torch.arange(planes, device=q.device) * -float(store.bits)).repeat_interleave(rows)
    offset = (q @ zero.float().transpose(2, 3)).transpose(2, 3).unsqueeze(-1)
    dots = torch.addcmul(offset, dots, shrink)
    out.unflatten(-1, (groups, planes * rows)).copy_(dots.transpose(2, 3))


def _token_mix(p: Tensor, store: PackedStore, start: int, stop: int) -> Tensor:
    codes, scale, zero = store.part(start, stop)
    batch, heads, tokens, width = codes.shape
    planes, group = 8 // store.bits, store.group_size
    unpacked = p.new_empty((planes, batch, heads, tokens, width))
    _planes(codes, store.bits, unpacked)
    # Channels that lie in one plane and in one group share their weights: plane k, channels i*part to (i+1)*part.
    part = gcd(width, group)
    out = p.new_empty((*p.shape[:3], planes, width))
    scales = scale.float().movedim(3, 0).unsqueeze(3)  # [groups, batch, heads, 1, tokens]
    first = torch.arange(planes, device=p.device) * width
    for i in range(0, width, part):
        which = (first + i) // group
        weights = p * scales[which]
        out[..., i : i + part] = (weights @ unpacked[..., i : i + part]).movedim(0, 3)
    out *= torch.exp2(torch.arange(planes, device=p.device) * -float(store.bits)).unsqueeze(1)
    offset = (p @ zero.float()).repeat_interleave(group, -1)
    return out.flatten(3) + offset
