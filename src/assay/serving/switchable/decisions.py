"""Which blocks and tokens of a model run for each row of a batch, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decisions:
    """What runs, for each row of a batch. True: it runs.

    Attributes
    ----------
    attn, ffn
        ``[batch, layers]``: attention and feed-forward block of each layer; an encoder's layers come first, then a
        decoder's. Of an encoder-decoder model's decoder, ``attn`` covers self-attention.
    tokens
        ``[batch, tokens]``: tokens of the (encoder's or decoder-only model's) input that stay after the first layer;
        ``None`` keeps all.
    cross
        ``[batch, layers]``: cross-attention of a decoder's layers; ``None`` means ``attn``.
    """

    attn: Tensor
    ffn: Tensor
    tokens: Tensor | None = None
    cross: Tensor | None = None

    def __post_init__(self) -> None:
        if self.attn.ndim != 2 or self.attn.shape != self.ffn.shape:
            raise ValueError(
                f"attn and ffn must both be [batch, layers], not {tuple(self.attn.shape)} and {tuple(self.ffn.shape)}"
            )
        if self.cross is not None and self.cross.shape != self.attn.shape:
            raise ValueError(f"cross must be [batch, layers] like attn, not {tuple(self.cross.shape)}")
        if self.tokens is not None and (self.tokens.ndim != 2 or len(self.tokens) != len(self.attn)):
            raise ValueError(f"tokens must be [batch, tokens] of {len(self.attn)} rows, not {tuple(self.tokens.shape)}")
        for name in ("attn", "ffn", "tokens", "cross"):
            given = getattr(self, name)
            if given is not None and given.dtype != torch.bool:
                object.__setattr__(self, name, given.bool())

    @property
    def crossed(self) -> Tensor:
        """``cross``, or ``attn`` where there is none."""
        return self.attn if self.cross is None else self.cross

    def __len__(self) -> int:
        return len(self.attn)

    def rows(self, index: Any) -> Decisions:
        """The decisions of some rows."""
        tokens = None if self.tokens is None else self.tokens[index]
        cross = None if self.cross is None else self.cross[index]
        return Decisions(self.attn[index], self.ffn[index], tokens, cross)

    def to(self, device: Any) -> Decisions:
        """The same on a device."""
        tokens = None if self.tokens is None else self.tokens.to(device)
        cross = None if self.cross is None else self.cross.to(device)
        return Decisions(self.attn.to(device), self.ffn.to(device), tokens, cross)

    @classmethod
    def full(cls, batch: int, layers: int, device: Any = None) -> Decisions:
        """Everything runs."""
        ones = torch.ones(batch, layers, dtype=torch.bool, device=device)
        return cls(ones, ones.clone())

    @classmethod
    def static(cls, attn: Any, ffn: Any, batch: int = 1, device: Any = None) -> Decisions:
        """The same for every row: one boolean for each layer."""
        both = (torch.as_tensor(x, dtype=torch.bool, device=device).expand(batch, -1) for x in (attn, ffn))
        return cls(*both)

    def buckets(self) -> list[Tensor]:
        """Row numbers grouped by what runs: equal layer decisions, and equally many tokens kept."""
        parts = [self.attn, self.ffn, self.crossed]
        if self.tokens is not None:
            count = self.tokens.sum(-1, keepdim=True)
            parts = [p.long() for p in parts] + [count]
        _, group = torch.cat(parts, 1).unique(dim=0, return_inverse=True)
        return [(group == g).nonzero().flatten() for g in range(int(group.max()) + 1)] if len(self) else []


def sizes(config: Any) -> dict[str, Any]:
    """What the count of operations needs to know of a configuration of ``transformers``."""
    decoder = config.get_text_config(decoder=True)
    kind = config.model_type
    heads = getattr(decoder, "num_attention_heads", None) or getattr(decoder, "n_head", None) or decoder.num_heads
    width = getattr(decoder, "hidden_size", None) or decoder.d_model
    dim = getattr(decoder, "head_dim", None) or getattr(decoder, "d_kv", None) or width // heads
    kv_heads = getattr(decoder, "num_key_value_heads", None) or heads
    if kind == "bart":
        feed, feed_encoder = config.decoder_ffn_dim, config.encoder_ffn_dim
        layers, encoder = config.decoder_layers, config.encoder_layers
    elif kind == "t5":
        feed = feed_encoder = config.d_ff
        layers, encoder = config.num_decoder_layers, config.num_layers
    else:
        feed = getattr(decoder, "intermediate_size", None) or getattr(decoder, "n_inner", None) or 4 * width
        feed_encoder, encoder, layers = 0, 0, decoder.num_hidden_layers
    gated = kind in ("llama", "mistral", "qwen2", "qwen3") or (kind == "t5" and config.is_gated_act)
    return {
        "width": width,
        "inner": heads * dim,
        "kv": kv_heads * dim,
        "feed": feed,
        "feed_encoder": feed_encoder,
        "matrices": 3 if gated else 2,
        "layers": layers,
        "encoder": encoder,
        "vocabulary": decoder.vocab_size,
    }


def flops(config: Any, inputs: int, outputs: int = 0, decisions: Decisions | None = None, policy: int = 0) -> Tensor:
    """Floating-point operations of one teacher-forced pass, ``[batch]`` (float64); a multiply-add counts as 2.

    For each layer and token: projections ``4 d d_inner + 4 d d_kv`` (``8 d^2`` for plain multi-head attention), scores
    and mix ``4 T d_inner`` (all of the ``T x T`` products, as they are computed), feed-forward ``4 d d_ff`` (``6 d
    d_ff`` if gated); cross-attention projects its keys and values once for each token of the source. Then the head,
    ``2 d V`` a token, and the policy.

    Parameters
    ----------
    config
        Of the model.
    inputs, outputs
        Tokens of the prompt or source, and tokens after it (of the target).
    decisions
        What runs; everything by default, for a batch of one. Padding counts like tokens that are dropped.
    policy
        Operations of the policy (:meth:`Policy.flops`), if it is to be counted.
    """
    s = sizes(config)
    total = s["encoder"] + s["layers"]
    chosen = decisions or Decisions.full(1, total)
    if chosen.attn.shape[1] != total:
        raise ValueError(f"decisions are about {chosen.attn.shape[1]} layers, but the model has {total}")
    d, inner, kv = s["width"], s["inner"], s["kv"]
    dropped = 0 if chosen.tokens is None else (~chosen.tokens).sum(-1).double().cpu()
    attn, ffn, cross = (x.double().cpu().clone() for x in (chosen.attn, chosen.ffn, chosen.crossed))
    for first in {0, s["encoder"]}:  # the first layer of a stack always runs
        attn[:, first] = ffn[:, first] = cross[:, first] = 1

    def attention(t: Any) -> Any:
        return t * (4 * d * inner + 4 * d * kv) + 4 * t * t * inner

    count: Any = torch.full((len(chosen),), float(policy), dtype=torch.float64)
    tokens = outputs if s["encoder"] else inputs + outputs
    for i in range(s["encoder"]):
        t = inputs - (dropped if i else 0)
        count = count + attn[:, i] * attention(t) + ffn[:, i] * t * 2 * s["matrices"] * d * s["feed_encoder"]
    for j in range(s["layers"]):
        i = s["encoder"] + j
        t = tokens - (dropped if j and not s["encoder"] else 0)
        count = count + attn[:, i] * attention(t) + ffn[:, i] * t * 2 * s["matrices"] * d * s["feed"]
        if s["encoder"]:
            source = inputs - dropped
            both = 4 * t * d * inner + 4 * source * d * kv + 4 * t * source * inner
            count = count + cross[:, i] * both
    return count + tokens * 2 * d * s["vocabulary"]


def relative_cost(config: Any, inputs: int, outputs: int, decisions: Decisions, policy: int = 0) -> Tensor:
    """Operations over those of the whole model without a policy, ``[batch]``."""
    return flops(config, inputs, outputs, decisions, policy) / flops(config, inputs, outputs)
