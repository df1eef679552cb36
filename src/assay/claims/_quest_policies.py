"""What Quest is compared with, computed densely under a mask: for quality only, nobody should time it.

No package of today offers StreamingLLM, H2O or TOVA as a cache for current ``transformers``, so they are here, as the
paper's protocol has them: per query head, the first layers exempt as for Quest, and forgetting only after the prompt.
Oracle and random selection read pages, as many as Quest does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from assay.serving.quest import build_metadata, page_scores, select_pages

Policy = Literal["streaming", "h2o", "tova", "oracle", "random", "literal"]
NAME = "assay_policy"
SINKS = 4


class PolicyLayer(DynamicLayer):
    """All keys and values, and which of them each query head still sees."""

    def __init__(self, policy: Policy, budget: int, page_size: int, seed: int) -> None:
        super().__init__()
        self.policy, self.budget, self.page_size = policy, budget, page_size
        self.generator = torch.Generator().manual_seed(seed)
        self.kept: Tensor | None = None  # [batch, heads, tokens]
        self.mass: Tensor | None = None  # accumulated attention of H2O, the same shape

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return everything; the keys carry this layer for :func:`policy_attention`."""
        first = self.get_seq_length() == 0
        super().update(key_states, value_states)
        assert self.keys is not None and self.values is not None
        keys = self.keys[:]
        if not first:
            keys._policy = self  # type: ignore[attr-defined]
        return keys, self.values

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """One decoding step: ``[batch, heads, 1, head_dim]``. Eviction policies then forget, for good."""
        heads, tokens = query.shape[1], keys.shape[2]
        group = heads // keys.shape[1]
        logits = (query @ keys.repeat_interleave(group, 1).transpose(2, 3))[:, :, 0] * scaling
        seen = self._seen(query, keys, logits)
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        if self.policy in ("h2o", "tova") and tokens > self.budget:
            self._forget(seen, weights)
        elif self.policy == "h2o":
            self._accumulate(weights)
        return weights[:, :, None] @ values.repeat_interleave(group, 1)

    def _seen(self, query: Tensor, keys: Tensor, logits: Tensor) -> Tensor:
        batch, heads, tokens = logits.shape
        seen = torch.ones(batch, heads, tokens, dtype=torch.bool, device=logits.device)
        if self.policy == "streaming":
            if tokens > self.budget:
                seen[..., SINKS : tokens - (self.budget - SINKS)] = False
            return seen
        if self.policy in ("h2o", "tova"):
            if self.kept is not None:
                seen[..., : self.kept.shape[2]] = self.kept
            return seen
        count, pages = self.budget // self.page_size, -(-tokens // self.page_size)
        if count >= pages:
            return seen
        if self.policy == "oracle":
            spare = pages * self.page_size - tokens
            padded = torch.nn.functional.pad(logits, (0, spare), value=float("-inf"))
            scores = padded.unflatten(2, (pages, self.page_size)).amax(-1)
        elif self.policy == "random":
            scores = torch.rand(batch, heads, pages, generator=self.generator).to(logits.device)
        else:  # what the authors' accuracy code does, with metadata made anew from all keys
            scores = page_scores(query, build_metadata(keys, self.page_size))
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, select_pages(scores, count), True)
        return chosen.repeat_interleave(self.page_size, 2)[..., :tokens]

    def _accumulate(self, weights: Tensor) -> Tensor:
        mass = weights.clone()
        if self.mass is not None:
            mass[..., : self.mass.shape[2]] += self.mass
        self.mass = mass
        return mass

    def _forget(self, seen: Tensor, weights: Tensor) -> None:
        """TOVA keeps what the last query attended to most; H2O the newest half, and the heaviest of the rest."""
        tokens = seen.shape[2]
        recent = self.budget // 2 if self.policy == "h2o" else 0
        rank = (self._accumulate(weights) if self.policy == "h2o" else weights).masked_fill(~seen, -1.0)
        if recent:
            rank[..., tokens - recent :] = float("inf")
        kept = torch.zeros_like(seen).scatter_(2, rank.topk(self.budget, -1).indices, True)
        self.kept = kept & seen


def policy_cache(
    config: Any, policy: Policy, budget: int, *, dense_layers: Iterable[int], page_size: int = 16
) -> Cache:
    """A cache whose layers follow a policy under attention :data:`NAME`; ``dense_layers`` keep and read everything."""
    AttentionInterface.register(NAME, policy_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    dense = set(dense_layers)
    count = config.get_text_config(decoder=True).num_hidden_layers
    return Cache(
        layers=[DynamicLayer() if i in dense else PolicyLayer(policy, budget, page_size, i) for i in range(count)]
    )


def policy_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention that follows the policy of the layer; anything but a single query without padding is dense."""
    layer: PolicyLayer | None = getattr(key, "_policy", None)
    if layer is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if query.shape[2] > 1 or attention_mask is not None:
        raise ValueError("a policy decodes single tokens without padding")
    out = layer.attend(query, key, value, query.shape[3] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2).contiguous(), None
