"""How much evicting or merging a token changes the outputs of attention, in closed form.

With attention weights ``A``, values ``V`` and output ``o = sum_k A_k V_k``, a token ``i`` leaves, and its value goes to
targets ``J`` (``V_k += V_i / |J|``). ``a`` is the mean of ``A`` over ``J``. The paper leaves the other weights as they
are when ``i`` has gone ("unscaled")::

    evict   -A_i V_i                     merge   (a - A_i) V_i

In a real cache the softmax makes up for the missing weight by scaling the others by ``1 / (1 - A_i)``::

    evict   A_i (o - V_i) / (1 - A_i)    merge   (A_i o + (a - A_i) V_i) / (1 - A_i)

So a merge that matches perfectly (``a = A_i``) still leaves ``A_i o / (1 - A_i)``: it inflates the output. That is why
merging often can be worse than dropping.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from assay.serving.cam.merge import CaM, merge_probability, merge_targets

if TYPE_CHECKING:
    import pandas as pd


def eviction_change_unscaled(weight: Tensor, value: Tensor) -> Tensor:
    """``-A_i V_i``: ``weight`` ``[...]``, ``value`` ``[..., head_dim]``."""
    return -weight.unsqueeze(-1) * value


def merge_change_unscaled(weight: Tensor, value: Tensor, target_mean: Tensor) -> Tensor:
    """``(a - A_i) V_i``: ``weight`` and ``target_mean`` ``[...]``, ``value`` ``[..., head_dim]``."""
    return (target_mean - weight).unsqueeze(-1) * value


def eviction_change(weight: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """``A_i (o - V_i) / (1 - A_i)``: ``weight`` ``[...]``, ``value`` and ``output`` ``[..., head_dim]``."""
    return (weight / (1 - weight)).unsqueeze(-1) * (output - value)


def merge_change(weight: Tensor, value: Tensor, output: Tensor, target_mean: Tensor) -> Tensor:
    """``(A_i o + (a - A_i) V_i) / (1 - A_i)``, with the shapes of the functions above."""
    change = weight.unsqueeze(-1) * output + (target_mean - weight).unsqueeze(-1) * value
    return change / (1 - weight).unsqueeze(-1)


def perturbation_report(
    model: Any,
    ids: Tensor,
    variants: Mapping[str, CaM] | None = None,
    *,
    n_sink: int = 4,
    window: int = 28,
    victims: Sequence[int] | None = None,
    steps: int = 16,
) -> pd.DataFrame:
    """Expected change of the attention outputs when one token of a StreamingLLM window leaves, per document.

    One forward pass without eviction gives all weights and values. For every layer (but those with a sliding window),
    query head and victim ``i`` the
    token leaves at ``t = i + window``, when it is the oldest of the window. The outputs of the next ``steps`` queries
    change as in the formulas of this module; random masks enter with their probability.

    Parameters
    ----------
    model
        A causal language model of ``transformers``; its attention implementation is put back afterwards.
    ids
        ``[documents, tokens]``, int64, without padding.
    variants
        Name to :class:`CaM`. Default: the five masks with ``m=16``.
    n_sink, window
        Of the StreamingLLM cache, default 4 and 28: what "kept" and "recent" mean for the masks.
    victims
        Positions. Default 12, 19, 26, ... as far as the text reaches, below 120.
    steps
        Queries after the eviction, default 16.

    Returns
    -------
    pandas.DataFrame
        Columns ``document``, ``variant`` ("evict" and those given), ``relative``: mean norm of the change over that of
        plain eviction, with the softmax scaled as in a real cache; ``relative_unscaled``: the same as the paper
        counts; ``norm`` and ``norm_unscaled``: the mean norms themselves, over the mean norm of the output;
        ``merge_rate``: mean probability.

    Raises
    ------
    ValueError
        The text is too short, a victim is out of place, or a variant has ``m`` beyond the window.
    """
    from transformers import DynamicCache

    if ids.ndim != 2:
        raise ValueError(f"ids must have shape [documents, tokens], not {tuple(ids.shape)}")
    tokens = ids.shape[1]
    if victims is None:
        victims = range(n_sink + 8, min(120, tokens - window - steps), 7)
    if not victims or min(victims) < n_sink or max(victims) + window + steps >= tokens:
        raise ValueError(
            f"victims must lie from n_sink={n_sink} to below tokens - window - steps = {tokens - window - steps} "
            f"for a text of {tokens} tokens, not {list(victims)}"
        )
    if variants is None:
        masks = ("bernoulli", "bernoulli_current", "threshold", "max", "all")
        variants = {mask: CaM(mask=mask) for mask in masks}  # type: ignore[arg-type]
    for name, cam in variants.items():
        if cam.m is not None and cam.m > window:
            raise ValueError(f"variant {name!r} has m={cam.m}, which is beyond window={window}")
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        rows = []
        for document, line in enumerate(ids):
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                out = model(line[None], cache=cache, output_attentions=True)
            sums: dict[str, Tensor] = {}
            layers = 0
            for weights, layer in zip(out.attentions, cache.layers):
                values = getattr(layer, "values", None)
                if values is None or values.shape[-2] != tokens:  # a window of its own: nothing is evicted there
                    continue
                layers += 1
                found = _layer_sums(weights[0], values[0], variants, n_sink, window, list(victims), steps)
                for name, part in found.items():
                    sums[name] = sums.get(name, torch.zeros(())) + part
            plain = sums["evict"]
            for name in ("evict", *variants):
                real, unscaled, rate, output = sums[name].tolist()
                scaled = real / float(plain[0]), unscaled / float(plain[1])
                norms = real / output, unscaled / output
                rows.append((document, name, *scaled, *norms, rate / layers))
    finally:
        model.set_attn_implementation(before)
    import pandas as pd

    names = ["document", "variant", "relative", "relative_unscaled", "norm", "norm_unscaled", "merge_rate"]
    return pd.DataFrame(rows, columns=names)


def _layer_sums(
    weights: Tensor,
    values: Tensor,
    variants: Mapping[str, CaM],
    n_sink: int,
    window: int,
    victims: list[int],
    steps: int,
) -> dict[str, Tensor]:
    """Means over heads, victims and steps of one layer: change (real, unscaled), probability, norm of the output."""
    weights, values = weights.double(), values.double()
    heads, tokens, _ = weights.shape
    kv_heads = values.shape[0]
    output = weights @ values.repeat_interleave(heads // kv_heads, 0)
    grouped = weights.view(kv_heads, -1, tokens, tokens).mean(1)
    sums: dict[str, Tensor] = {}
    for i in victims:
        t = i + window
        later = slice(t + 1, t + 1 + steps)
        own = weights[:, later, i]
        value = values[:, i].repeat_interleave(heads // kv_heads, 0).unsqueeze(1).expand(-1, steps, -1)
        o = output[:, later]
        evict = (eviction_change(own, value, o).norm(dim=-1), eviction_change_unscaled(own, value).norm(dim=-1))
        size = o.norm(dim=-1).mean()
        _add(sums, "evict", evict, torch.zeros(heads, 1, dtype=own.dtype), evict, size)
        place = torch.arange(tokens)
        kept = (place < n_sink) | ((place >= i) & (place <= t))
        held = torch.where(kept, place, -1).expand(1, kv_heads, -1)
        victim = torch.full((1, kv_heads), i)
        for name, cam in variants.items():
            slots, taken = merge_targets(held, victim, cam.m or window)
            statistic = grouped[:, t] if cam.uses == "current" else grouped[:, : t + 1].sum(1)
            p = merge_probability(
                statistic[None], held, victim, slots, taken, mask=cam.mask, clamp=cam.clamp, recent=t + 1 - window
            )
            p = p[0].repeat_interleave(heads // kv_heads).unsqueeze(1)
            mean = weights[:, later].index_select(2, slots[0, 0]).mean(-1)
            merge = (
                merge_change(own, value, o, mean).norm(dim=-1),
                merge_change_unscaled(own, value, mean).norm(dim=-1),
            )
            _add(sums, name, evict, p, merge, size)
    return {name: total / len(victims) for name, total in sums.items()}


def _add(
    sums: dict[str, Tensor],
    name: str,
    evict: tuple[Tensor, Tensor],
    p: Tensor,
    merge: tuple[Tensor, Tensor],
    size: Tensor,
) -> None:
    expected = [((1 - p) * e + p * m).mean() for e, m in zip(evict, merge)]
    sums[name] = sums.get(name, torch.zeros(4, dtype=p.dtype)) + torch.stack([*expected, p.mean(), size])
