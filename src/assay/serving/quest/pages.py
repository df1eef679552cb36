"""Pages of a key-value cache: bounds, scores, selection, and attention over a selection. Pure functions.

A page is ``S`` consecutive tokens, by absolute position in the cache. With ``M`` and ``m`` the channel-wise maximum and
minimum of its keys, no key of the page can have a larger product with a query than ::

    score = sum_c max(q_c M_c, q_c m_c) = max(q, 0) . M + min(q, 0) . m

The right-hand side is a product with the concatenated metadata ``[M, m]``, so that one matrix product scores all pages.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from assay.serving.quest import cpu

Gqa = Literal["head", "max", "sum"]


def build_metadata(keys: Tensor, page_size: int) -> Tensor:
    """Maximum and minimum of the keys of each page, per channel.

    Parameters
    ----------
    keys
        ``[batch, kv_heads, tokens, head_dim]``, as they enter the product with the query (after rotary embedding).
    page_size
        Tokens per page, ``S``. The last page may be incomplete.

    Returns
    -------
    ``[batch, kv_heads, ceil(tokens / S), 2 * head_dim]`` in the dtype of ``keys``: maxima, then minima.
    """
    if keys.ndim != 4:
        raise ValueError(f"keys must have shape [batch, kv_heads, tokens, head_dim], not {tuple(keys.shape)}")
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, not {page_size}")
    tokens = keys.shape[2]
    whole = tokens - tokens % page_size
    parts = [keys[:, :, :whole].unflatten(2, (whole // page_size, page_size))] if whole else []
    if whole < tokens:
        parts.append(keys[:, :, None, whole:])
    if not parts:
        return keys.new_empty((*keys.shape[:2], 0, 2 * keys.shape[3]))
    meta = [torch.cat([p.amax(3), p.amin(3)], -1) for p in parts]
    return meta[0] if len(meta) == 1 else torch.cat(meta, 2)


def page_scores(query: Tensor, metadata: Tensor, gqa: Gqa = "head") -> Tensor:
    """Upper bound of ``q . k`` over the keys of each page.

    Parameters
    ----------
    query
        ``[batch, heads, n, head_dim]``. Several queries share one score: the largest of theirs.
    metadata
        ``[batch, kv_heads, pages, 2 * head_dim]`` of :func:`build_metadata`. ``heads`` is a multiple of ``kv_heads``.
    gqa
        ``"head"``: a score for each query head. ``"max"`` and ``"sum"``: one for each key-value head, the largest or
        the sum over the query heads that share it.

    Returns
    -------
    ``[batch, heads or kv_heads, pages]`` in float32 (float64 for float64), without the factor ``1 / sqrt(head_dim)``.
    """
    if gqa not in get_args(Gqa):
        raise ValueError(f"gqa must be one of {get_args(Gqa)}, not {gqa!r}")
    batch, heads, n, dim = query.shape
    kv_heads, pages = metadata.shape[1], metadata.shape[2]
    if heads % kv_heads:
        raise ValueError(f"query has {heads} heads, which is no multiple of the {kv_heads} key-value heads")
    if metadata.shape[3] != 2 * dim:
        raise ValueError(f"metadata must have 2 * {dim} channels for this query, not {metadata.shape[3]}")
    # Half precision would overflow: the bound is a sum of head_dim products with the extreme value of each channel.
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    q = query.to(exact).reshape(batch, kv_heads, -1, dim)
    signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], -1)
    scores = (signed @ metadata.to(exact).transpose(2, 3)).view(batch, kv_heads, -1, n, pages)
    scores = scores[:, :, :, 0] if n == 1 else scores.amax(3)
    if gqa == "head":
        return scores.reshape(batch, heads, pages)
    return scores.amax(2) if gqa == "max" else scores.sum(2)


def select_pages(scores: Tensor, count: int, *, visible: Tensor | None = None, force_last: bool = True) -> Tensor:
    """The ``count`` pages with the largest scores, in ascending order.

    Parameters
    ----------
    scores
        ``[batch, heads, pages]``, floating.
    count
        Pages to select, from 1 to ``pages``.
    visible
        ``[batch, 1 or heads, pages]``, boolean: whether any token of the page may be attended to. Others come last.
    force_last
        Always select the last page, as one of the ``count``: it holds the current token.

    Returns
    -------
    ``[batch, heads, count]``, int64. Among equal scores the lower index wins.
    """
    pages = scores.shape[-1]
    if not 1 <= count <= pages:
        raise ValueError(f"count must be from 1 to the {pages} pages, not {count}")
    scores = scores.float() + 0.0  # a copy, in which -0.0 is 0.0
    if visible is not None:
        scores.masked_fill_(~visible, float("-inf"))
    if force_last:
        scores[..., -1] = float("inf")
    # topk leaves ties open. As integers, scores keep their order, and the index goes into the low half.
    bits = scores.view(torch.int32)
    order = (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits).long().bitwise_left_shift_(32)
    order += torch.arange(pages - 1, -1, -1, device=scores.device)
    return order.topk(count, sorted=False).indices.sort(-1).values


def page_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    page_size: int,
    mask: Tensor | None = None,
    *,
    length: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(q K^T * scaling + mask) V`` over the tokens of the selected pages alone.

    Parameters
    ----------
    query
        ``[batch, heads, n, head_dim]``.
    key, value
        ``[batch, kv_heads, tokens, head_dim]``; best with ``tokens`` a multiple of ``page_size`` (otherwise they are
        padded, which copies them), of which ``length`` are in use. Spare ones must be finite.
    pages
        ``[batch, heads or kv_heads, count]``, ascending, of :func:`select_pages`; with ``kv_heads``, all queries of a
        group share them.
    page_size
        Tokens per page.
    mask
        ``[batch, 1 or heads, n, length]``, boolean (true: attend) or additive; ``None`` masks nothing.
    length
        Tokens in use, default ``tokens``.
    scaling
        Default ``head_dim ** -0.5``.
    dropout
        Of the attention weights.

    Returns
    -------
    ``[batch, heads, n, head_dim]`` in the dtype of ``query``; a query that may attend to nothing gets 0.
    """
    batch, heads, n, dim = query.shape
    length = key.shape[2] if length is None else length
    if spare := -key.shape[2] % page_size:
        key, value = (torch.nn.functional.pad(x, (0, 0, 0, spare)) for x in (key, value))
    chosen, count = pages.shape[1], pages.shape[2]
    fast = cpu.available(query, key, value)
    half = query.dtype in (torch.float16, torch.bfloat16)
    q = (query.float() if half else query).reshape(batch, chosen, -1, dim)
    q = q * (dim**-0.5 if scaling is None else scaling)
    if fast:
        logits = cpu.logits(q, key, pages, page_size)
    else:
        k = _gather(key, pages, page_size).transpose(2, 3)
        logits = q @ k.to(q.dtype)
    if mask is not None:
        shaped = logits.view(batch, chosen, heads // chosen, n, count * page_size)
        bias = _selected_mask(pages, page_size, mask, length, heads)
        shaped.masked_fill_(~bias, float("-inf")) if bias.dtype == torch.bool else shaped.add_(bias)
    elif spare := -length % page_size:  # in the last page, which stands last if it was selected
        cut = pages[..., -1:, None] == length // page_size
        logits[..., -spare:].masked_fill_(cut, float("-inf"))
    weights = logits.softmax(-1)
    if mask is not None:
        weights = weights.nan_to_num_()
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    if fast:
        out = cpu.mix(weights, value, pages, page_size)
    else:
        out = weights.to(value.dtype) @ _gather(value, pages, page_size)
    return out.reshape(batch, heads, n, -1).to(query.dtype)


def covered_mass(
    query: Tensor,
    key: Tensor,
    pages: Tensor,
    page_size: int,
    mask: Tensor | None = None,
    *,
    scaling: float | None = None,
) -> Tensor:
    """Share of the full attention weights that falls on the selected pages ("recall"), ``[batch, heads, n]``.

    Arguments are those of :func:`page_attention`. It reads all keys: for diagnosis, not for speed.
    """
    batch, heads, n, dim = query.shape
    tokens = key.shape[2]
    q = query.float().reshape(batch, key.shape[1], -1, dim)
    logits = (q @ key.float().transpose(2, 3)).view(batch, heads, n, tokens)
    logits = logits * (dim**-0.5 if scaling is None else scaling)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else logits + mask
    chosen = torch.zeros((*pages.shape[:2], -(-tokens // page_size)), device=key.device).scatter_(2, pages, 1.0)
    chosen = chosen.repeat_interleave(page_size, 2)[..., :tokens].repeat_interleave(heads // pages.shape[1], 1)
    return (logits.softmax(-1) * chosen[:, :, None]).sum(-1)


def visible_pages(mask: Tensor, page_size: int, heads: int) -> Tensor:
    """Whether a page has a token that any query may attend to.

    ``mask`` ``[batch, 1 or query heads, n, tokens]`` to ``[batch, 1 or heads, pages]``.
    """
    seen = (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).any(2)
    if seen.shape[1] not in (1, heads):
        seen = seen.unflatten(1, (heads, -1)).any(2)
    seen = torch.nn.functional.pad(seen, (0, -seen.shape[2] % page_size))
    return seen.unflatten(2, (-1, page_size)).any(3)


def _gather(x: Tensor, pages: Tensor, page_size: int) -> Tensor:
    """Tokens of the selected pages, ``[batch, heads of pages, count * page_size, head_dim]``."""
    batch, kv_heads, tokens, dim = x.shape
    chosen = pages.shape[1]
    rows = torch.arange(batch * kv_heads, device=x.device).view(batch, kv_heads, 1)
    flat = pages + rows.repeat_interleave(chosen // kv_heads, 1) * (tokens // page_size)
    picked = x.reshape(-1, page_size * dim).index_select(0, flat.flatten())
    return picked.view(batch, chosen, -1, dim)


def _selected_mask(pages: Tensor, page_size: int, mask: Tensor, length: int, heads: int) -> Tensor:
    """The mask at the selected tokens, for logits ``[batch, chosen, heads / chosen, n, count * page_size]``."""
    batch, chosen = pages.shape[:2]
    token = (pages[..., None] * page_size + torch.arange(page_size, device=pages.device)).view(batch, chosen, 1, 1, -1)
    inside = token < length
    shaped = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (chosen, heads // chosen))
    shaped = shaped.expand(batch, chosen, -1, -1, -1)
    picked = shaped.gather(4, token.clamp(max=length - 1).expand(-1, -1, *shaped.shape[2:4], -1))
    return picked & inside if mask.dtype == torch.bool else picked.float().masked_fill(~inside, float("-inf"))
