"""Attention that tells the cache its weights, registered with ``transformers`` under the name ``"evict"``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from assay.serving.cam.layer import EvictionLayer

NAME = "evict"
# Elements of the attention weights that are held at a time while a prompt is processed (256 MB in float32).
WEIGHTS = 2**26
# Extras of other attentions that change the result, which this one does not compute.
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


def register_eviction_attention() -> None:
    """Make ``"evict"`` known to ``transformers``, for ``model.set_attn_implementation("evict")``.

    Registers :func:`eviction_attention_forward` and the mask that it needs (the one of ``"sdpa"``). Calling it again
    does no harm. With any other cache ``"evict"`` computes what ``"eager"`` does.
    """
    AttentionInterface.register(NAME, eviction_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def eviction_attention_forward(
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
    """Attention in the form in which ``transformers`` calls it; it ends the cache's call by merging and evicting.

    Parameters
    ----------
    module
        The attention module; ``is_causal`` is read from it where the argument is ``None``.
    query
        ``[batch, heads, n, head_dim]``.
    key, value
        ``[batch, kv_heads, slots, head_dim]``, as :meth:`EvictionCache.update` returned them.
    attention_mask
        ``[batch, 1, n, tokens seen]``, boolean (true: attend) or additive; ``None`` with ``n > 1`` means causal.
    dropout, scaling
        As for ``torch.nn.functional.scaled_dot_product_attention``. The cache sees weights before dropout.

    Returns
    -------
    ``[batch, n, heads, head_dim]`` in the dtype of ``query``, and ``None`` for the weights, which the cache has.

    Raises
    ------
    ValueError
        The model asks for something that this attention does not compute; the message names it.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attention 'evict' does not compute {name!r}, which {type(module).__name__} uses; "
                "an EvictionCache cannot serve this model"
            )
    if attention_mask is not None and (attention_mask.ndim != 4 or attention_mask.shape[1] != 1):
        raise ValueError(
            f"attention_mask must have shape [batch, 1, n, tokens] for attention 'evict', "
            f"not {tuple(attention_mask.shape)}"
        )
    layer: EvictionLayer | None = getattr(key, "eviction_layer", None)
    queries, scale = query.shape[2], query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if layer is not None and layer.seen == layer.new and attention_mask is not None:
        layer.set_padding(_visible(attention_mask)[:, 0, -1])
    batch, kv_heads, slots, _ = key.shape
    step = max(1, WEIGHTS // max(1, batch * query.shape[1] * slots))
    parts = []
    for start in range(0, queries, step):
        part = slice(start, min(queries, start + step))
        mask = _mask(layer, attention_mask, part, queries, slots, causal, query.device)
        weights = _weights(query[:, :, part], key, mask, scale)
        if layer is not None and layer.needs_weights:
            seen = weights.detach()
            seen = seen.view(batch, kv_heads, -1, *seen.shape[2:]).mean(2) if seen.shape[1] != kv_heads else seen
            layer.record(seen, start, None if mask is None else _visible(mask))
        weights = torch.nn.functional.dropout(weights.to(query.dtype), dropout)
        parts.append(_grouped(weights, value))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    if layer is not None:
        layer.settle()
    return out.transpose(1, 2).contiguous(), None


def _visible(mask: Tensor) -> Tensor:
    """A mask as a boolean one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _mask(
    layer: EvictionLayer | None,
    mask: Tensor | None,
    part: slice,
    queries: int,
    slots: int,
    causal: bool,
    device: torch.device,
) -> Tensor | None:
    """The mask of some queries, from the order of the text to that of the slots; ``None`` masks nothing."""
    if layer is None:
        if mask is not None:
            return mask[:, :, part, :slots]
        if not causal or queries == 1:
            return None
        place = torch.arange(slots, device=device)
        return (place <= place[slots - queries :][part, None])[None, None]
    assert layer.positions is not None
    held = layer.positions[:, :, : layer.used]
    if mask is None:
        if queries == 1:
            return (held >= 0).unsqueeze(2) if layer.has_gaps else None
        place = torch.arange(layer.seen - queries, layer.seen, device=device)[part]
        if not layer.evicted:  # every head's slots are in the order of the text
            held = held[:1, :1]
        return (held.unsqueeze(2) <= place[:, None]) & (held >= 0).unsqueeze(2)
    mask = mask[:, :, part, : layer.seen]
    if not layer.evicted:
        return mask
    index = held.clamp(min=0).unsqueeze(2).expand(-1, -1, mask.shape[2], -1)
    mask = mask.expand(held.shape[0], held.shape[1], -1, -1).gather(-1, index)
    return (
        mask & (held >= 0).unsqueeze(2)
        if mask.dtype == torch.bool
        else mask.where((held >= 0).unsqueeze(2), torch.finfo(mask.dtype).min)
    )


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention weights ``[batch, heads, n, slots]`` in float32."""
    logits = _grouped(query, key.transpose(2, 3)) * scale
    if mask is not None:
        if mask.shape[1] > 1:  # one mask for the query heads that share a key-value head
            logits = logits.view(*mask.shape[:2], -1, *logits.shape[2:])
            mask = mask.unsqueeze(2)
        logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min) if mask.dtype == torch.bool else logits + mask
        logits = logits.view(query.shape[0], query.shape[1], query.shape[2], -1)
    return logits.softmax(-1, dtype=torch.float32)


def _grouped(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` with ``[batch, heads, n, a]`` and ``[batch, kv_heads, a, b]``.

    Query heads that share a key-value head become rows of one matrix: nothing is repeated in memory.
    """
    batch, heads, queries, _ = left.shape
    kv_heads = right.shape[1]
    if heads == kv_heads:
        return left @ right
    rows = left.reshape(batch, kv_heads, heads // kv_heads * queries, -1)
    return (rows @ right).view(batch, heads, queries, -1)
