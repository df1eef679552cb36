"""Attention over selected pages, registered with ``transformers`` under the name ``"quest"``."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from assay.serving.quest.cache import QuestLayer
from assay.serving.quest.pages import covered_mass, page_attention, page_scores, select_pages, visible_pages

# Extras of other attentions that change the result, which this one does not compute.
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "head_mask")


def register_quest_attention() -> None:
    """Make ``"quest"`` known to ``transformers``, for ``model.set_attn_implementation("quest")``.

    Registers :func:`quest_attention_forward` and the mask that it needs (the one of ``"sdpa"``). Calling it again does
    no harm. With any other cache ``"quest"`` computes exactly what ``"sdpa"`` does.
    """
    AttentionInterface.register("quest", quest_attention_forward)
    AttentionMaskInterface.register("quest", sdpa_mask)


def quest_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention in the form in which ``transformers`` calls it.

    Prompts, layers without pages, and contexts within the budget get dense attention, the very function of ``"sdpa"``.

    Parameters
    ----------
    module
        The attention module; ``is_causal`` is read from it where the argument is ``None``.
    query
        ``[batch, heads, n, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``, the very tensors that :meth:`QuestCache.update` returned. Where a model
        copies or reshapes them on the way, attention is dense, and counted in ``QuestCache.stats()["missed_steps"]``.
    attention_mask
        ``[batch, 1 or heads, n, tokens]``, boolean (true: attend) or additive; ``None`` with ``n > 1`` means causal,
        aligned to the last token.
    dropout, scaling
        As for ``torch.nn.functional.scaled_dot_product_attention``.

    Returns
    -------
    ``[batch, n, heads, head_dim]`` in the dtype of ``query``, and ``None`` for the weights; with the keyword
    ``output_attentions`` dense weights and dense output, with a warning.

    Raises
    ------
    ValueError
        The model asks for something that this attention does not compute; the message names it.
    """
    for name in UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"attention 'quest' does not compute {name!r}, which {type(module).__name__} uses; "
                "call model.set_attn_implementation('eager')"
            )
    layer: QuestLayer | None = getattr(key, "_quest", None)
    queries, tokens = query.shape[2], key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if layer is not None and attention_mask is None and causal and queries > 1:
        position = torch.arange(tokens, device=query.device)
        attention_mask = (position <= position[tokens - queries :, None])[None, None]
    if kwargs.get("output_attentions"):
        warnings.warn("attention 'quest' computes no weights; this call is dense and eager instead", stacklevel=2)
        return _eager(query, key, value, attention_mask, scaling, causal and queries > 1)
    # A layer that has moved on since it returned this tensor no longer describes it.
    count = layer.pages_to_read(queries) if layer is not None and layer.get_seq_length() == tokens else None
    if layer is None or count is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    if kwargs.get("sliding_window") is not None:
        raise ValueError(
            f"attention 'quest' does not compute 'sliding_window', which {type(module).__name__} uses in a layer "
            "that its configuration calls full attention; call model.set_attn_implementation('sdpa')"
        )
    out = _sparse(layer, query, attention_mask, count, scaling, dropout)
    return out.transpose(1, 2).contiguous(), None


def _sparse(
    layer: QuestLayer, query: Tensor, mask: Tensor | None, count: int, scaling: float | None, dropout: float
) -> Tensor:
    key, value, metadata = layer.paged()
    size, tokens = layer.page_size, layer.get_seq_length()
    scores = page_scores(query, metadata, layer.gqa)
    visible = None if mask is None else visible_pages(mask, size, scores.shape[1])
    pages = select_pages(scores, count, visible=visible, force_last=layer.force_last)
    recall = None
    if layer.track_recall:
        recall = covered_mass(query, key[:, :, :tokens], pages, size, mask, scaling=scaling).mean()
    layer.count_sparse(pages, recall)
    return page_attention(query, key, value, pages, size, mask, length=tokens, scaling=scaling, dropout=dropout)


def _eager(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Dense attention that materialises its weights."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    logits = (query @ key.transpose(2, 3)).float() * (query.shape[3] ** -0.5 if scaling is None else scaling)
    if mask is None and causal:
        n, tokens = logits.shape[2:]
        mask = torch.ones(n, tokens, dtype=torch.bool, device=query.device).tril(tokens - n)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(-1).nan_to_num().to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights
