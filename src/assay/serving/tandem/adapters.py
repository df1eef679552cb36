"""How layers of Llama-like models turn a hidden state into keys and values, and the caches that take them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3")

KeysValues = list[tuple[Tensor, Tensor]]


def check_secondary(model: Any) -> None:
    """Raise ``NotImplementedError`` unless the layers of a model can be given states of another one.

    Supported are decoders with a norm before attention, rotary positions and full attention in every layer.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in SUPPORTED:
        raise NotImplementedError(
            f"secondary is of type {kind!r}, whose layers cannot be given another model's states; "
            f"supported are {', '.join(SUPPORTED)}"
        )
    types = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if types != {"full_attention"} or getattr(model.config, "sliding_window", None):
        raise NotImplementedError(
            f"secondary of type {kind!r} has layers {sorted(types)} or a sliding window; every layer must see all"
        )


def keys_values(model: Any, states: list[Tensor], positions: Tensor) -> KeysValues:
    """Keys and values that the layers of ``model`` make of given inputs.

    Parameters
    ----------
    model
        A causal language model of a type in :data:`SUPPORTED`.
    states
        One input ``[batch, tokens, hidden]`` for each layer, as it comes out of the layer before: the layer's own norm,
        projections and rotary positions are applied here.
    positions
        ``[batch, tokens]``: position in the text of every state.

    Returns
    -------
    For each layer ``[batch, kv_heads, tokens, head_dim]``, twice.
    """
    decoder = model.base_model
    cos, sin = decoder.rotary_emb(states[0], position_ids=positions)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    found = []
    for layer, state in zip(decoder.layers, states, strict=True):
        attention = layer.self_attn
        x = layer.input_layernorm(state)
        shape = (*x.shape[:2], -1, attention.head_dim)
        keys, values = attention.k_proj(x).view(shape), attention.v_proj(x).view(shape).transpose(1, 2)
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        keys = keys.transpose(1, 2)
        if getattr(attention, "use_rope", True):
            half = keys.shape[-1] // 2
            turned = torch.cat([-keys[..., half:], keys[..., :half]], -1)
            keys = keys * cos + turned * sin
        found.append((keys, values))
    return found


def positions_of(mask: Tensor) -> Tensor:
    """Position in the text of every token of an attention mask ``[batch, tokens]``; 0 for padding on the left."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def unwrapped(model: Any) -> Any:
    """The model whose ``generate`` runs: the inner one, if adapters were put around it."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


_ARGUMENTS: dict[type, str] = {}


def cache_argument(model: Any) -> str:
    """What this release of transformers calls the cache in a model's forward."""
    kind = type(unwrapped(model))
    if kind not in _ARGUMENTS:  # a signature takes as long to read as a small layer to run
        _ARGUMENTS[kind] = "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"
    return _ARGUMENTS[kind]


def call(model: Any, ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
    """The model on ``[batch, tokens]``, with a cache if there is one."""
    given = {} if cache is None else {cache_argument(model): cache}
    return model(input_ids=ids, use_cache=cache is not None, **given, **kwargs)


# Types whose decoder is nothing but embedding, layers, norm and head, in the order of these names.
PLAIN = ("llama", "mistral", "qwen2", "qwen3")


def rotations(model: Any, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines for :func:`step` at ``[batch, tokens]`` positions; ``None`` for types that it cannot run."""
    if model.config.model_type not in PLAIN:
        return None
    like = model.base_model.embed_tokens.weight[:1]
    return model.base_model.rotary_emb(like, position_ids=positions)


def step(model: Any, token: Tensor, cache: Any, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Logits ``[batch, vocabulary]`` after one token ``[batch, 1]``, from the model's own layers; without padding.

    For small models the arguments, masks and outputs that a whole call prepares take as long as its layers.
    """
    decoder = model.base_model
    hidden = decoder.embed_tokens(token)
    for layer in decoder.layers:
        hidden = layer(
            hidden,
            attention_mask=None,
            position_embeddings=rotation,
            use_cache=True,
            **{cache_argument(model): cache},
        )
    return model.lm_head(decoder.norm(hidden))[:, -1]


class _Prepend(CacheLayerMixin):
    """A layer that holds given keys and values, and shows them before those that come; for one call."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.context, self.is_initialized = (keys, values), True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: it was made with what it holds."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Show what is held, then what comes. Nothing is kept."""
        keys, values = self.context
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)

    def get_seq_length(self) -> int:
        """0: the tokens of the call are the text's first."""
        return 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys in all, and where they begin."""
        return self.context[0].shape[2] + query_length, 0


def prepended(layers: KeysValues) -> Cache:
    """A cache that shows given keys and values before those of a call: the parallel pass of training."""
    return Cache(layers=[_Prepend(keys, values) for keys, values in layers])


class StackedProjections(nn.Module):
    """One affine map from the primary's hidden size to the secondary's for each layer of the secondary.

    ``y_i = W_i x_{l(i)} + b_i``. Layers that read the same primary layer are computed in one matrix product.

    Parameters
    ----------
    inputs, outputs
        Hidden sizes of primary and secondary.
    sources
        ``l(i)``: primary layer that feeds secondary layer ``i``; 0 is the embedding.
    std
        Standard deviation of the weights at random initialisation; default 0.02.
    """

    def __init__(self, inputs: int, outputs: int, sources: list[int], std: float = 0.02) -> None:
        super().__init__()
        self.sources = list(sources)
        self.maps: Any = nn.ModuleList(nn.Linear(inputs, outputs) for _ in sources)
        self.randomise(std)

    def randomise(self, std: float = 0.02) -> None:
        """Weights from N(0, std^2), no bias."""
        for linear in self.maps:
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)

    def forward(self, hidden_states: Any) -> list[Tensor]:
        """The input of every secondary layer, from the primary's states by layer number."""
        outputs: list[Any] = [None] * len(self.maps)
        for source in sorted(set(self.sources)):
            users = [i for i, s in enumerate(self.sources) if s == source]
            maps = [self.maps[i] for i in users]
            x = hidden_states[source]
            if len(maps) == 1:
                outputs[users[0]] = maps[0](x)
                continue
            weight = torch.cat([m.weight for m in maps])
            bias = torch.cat([m.bias for m in maps])
            for i, y in zip(users, nn.functional.linear(x, weight, bias).chunk(len(maps), -1)):
                outputs[i] = y
        return outputs
