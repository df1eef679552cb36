"""Layers of ``transformers`` models whose blocks can be left out, and inputs whose tokens can leave after layer 1."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from assay.serving.switchable.decisions import Decisions

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
SUPPORTED = (*LLAMA_LIKE, "gpt2", "bart", "t5")


@dataclass(frozen=True)
class _Place:
    index: int
    place: int
    stack: int
    count: int
    encodes: bool

    @property
    def has_inputs(self) -> bool:
        """Whether the layer's tokens are those that may be dropped."""
        return self.stack == 0


@dataclass
class Active:
    """How the layers run at the moment.

    ``decide`` is called with the first layer's output where ``decisions`` are not known yet. With ``skip`` blocks
    that no row needs are not computed, and tokens that are dropped leave the sequence; all rows then agree. Otherwise
    a block is computed for the rows that need it (attention that fills a cache: for all), and dropped tokens are
    masked. ``first`` is an output of the first layer to be used instead of computing it. ``stop`` ends the pass after
    the first layer.
    """

    decisions: Decisions | None
    skip: bool
    decide: Callable[[Tensor], Decisions] | None = None
    first: Tensor | None = None
    stop: bool = False
    after_first: Tensor | None = None
    kept: Tensor | None = None
    plan: dict[str, list[bool]] | None = None
    gates: dict[str, Tensor] | None = None

    def rows(self, block: str, at: _Place) -> Tensor:
        """The rows that need a block. Decisions come to the CPU once a pass, not once a block."""
        if self.gates is None:
            assert self.decisions is not None
            d = self.decisions.to("cpu")
            self.gates = {"attn": d.attn, "ffn": d.ffn, "cross": d.crossed}
        return self.gates[block][:, at.index].nonzero()[:, 0]

    def runs(self, block: str, at: _Place) -> bool:
        """Whether a block runs, where all rows agree; the first layer of a stack always does."""
        if not at.place:
            return True
        if self.plan is None:
            assert self.decisions is not None
            d = self.decisions
            self.plan = {"attn": d.attn[0].tolist(), "ffn": d.ffn[0].tolist(), "cross": d.crossed[0].tolist()}
        return self.plan[block][at.index]


ACTIVE: ContextVar[Active | None] = ContextVar("switchable", default=None)


class FirstLayerDone(Exception):
    """Ends a pass after the first layer."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Mixed(Exception):
    """The rows of a batch do not agree on what runs."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self.decisions = decisions


@contextlib.contextmanager
def running(active: Active | None) -> Iterator[Active | None]:
    """Let the layers run like this for a while."""
    token = ACTIVE.set(active)
    try:
        yield active
    finally:
        ACTIVE.reset(token)


# -- the blocks of each family: from hidden states to hidden states, residual and norm included ----------------------


def _llama_attention(layer: Any, h: Tensor, kw: dict[str, Any]) -> Tensor:
    return h + layer.self_attn(hidden_states=layer.input_layernorm(h), **kw)[0]


def _llama_ffn(layer: Any, h: Tensor) -> Tensor:
    return h + layer.mlp(layer.post_attention_layernorm(h))


def _gpt2_attention(layer: Any, h: Tensor, kw: dict[str, Any]) -> Tensor:
    kw = {k: v for k, v in kw.items() if k not in ("encoder_hidden_states", "encoder_attention_mask")}
    return layer.attn(layer.ln_1(h), **kw)[0] + h


def _gpt2_ffn(layer: Any, h: Tensor) -> Tensor:
    return h + layer.mlp(layer.ln_2(h))


def _bart_attention(layer: Any, h: Tensor, kw: dict[str, Any]) -> Tensor:
    kw = {k: v for k, v in kw.items() if k not in ("encoder_hidden_states", "encoder_attention_mask", "use_cache")}
    x = layer.self_attn(h, **kw)[0]
    return layer.self_attn_layer_norm(h + torch.nn.functional.dropout(x, p=layer.dropout, training=layer.training))


def _bart_cross(layer: Any, h: Tensor, kw: dict[str, Any]) -> Tensor:
    own = ("encoder_hidden_states", "encoder_attention_mask", "use_cache", "attention_mask")
    rest = {k: v for k, v in kw.items() if k not in own}
    x = layer.encoder_attn(
        h,
        key_value_states=kw["encoder_hidden_states"],
        attention_mask=kw.get("encoder_attention_mask"),
        **rest,
    )[0]
    return layer.encoder_attn_layer_norm(h + torch.nn.functional.dropout(x, p=layer.dropout, training=layer.training))


def _bart_ffn(layer: Any, h: Tensor) -> Tensor:
    drop = torch.nn.functional.dropout
    x = drop(layer.activation_fn(layer.fc1(h)), p=layer.activation_dropout, training=layer.training)
    x = drop(layer.fc2(x), p=layer.dropout, training=layer.training)
    return layer.final_layer_norm(h + x)


@dataclass(frozen=True)
class Family:
    """How the layers of a type of model are taken apart. ``names`` are those of the positional arguments after h."""

    names: tuple[str, ...]
    attention: Callable[[Any, Tensor, dict[str, Any]], Tensor]
    ffn: Callable[[Any, Tensor], Tensor]
    cross: Callable[[Any, Tensor, dict[str, Any]], Tensor] | None = None


LLAMA = Family(("attention_mask", "position_ids", "cache", "use_cache"), _llama_attention, _llama_ffn)
GPT2 = Family(("cache", "attention_mask", "encoder_hidden_states"), _gpt2_attention, _gpt2_ffn)
BART = Family(
    ("attention_mask", "encoder_hidden_states", "encoder_attention_mask", "cache"),
    _bart_attention,
    _bart_ffn,
    _bart_cross,
)


def stacks(model: Any) -> list[tuple[Any, list[Any]]]:
    """The model's layers as ``(family, layers)``, an encoder's first; ``None`` is T5's family, which is its own.

    Raises
    ------
    NotImplementedError
        The model is of a type whose layers are not known.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind in LLAMA_LIKE:
        return [(LLAMA, list(model.base_model.layers))]
    if kind == "gpt2":
        if model.config.add_cross_attention:
            raise NotImplementedError("a GPT-2 with cross-attention is not supported")
        return [(GPT2, list(model.base_model.h))]
    if kind == "bart" and model.config.is_encoder_decoder:
        return [(BART, list(model.base_model.encoder.layers)), (BART, list(model.base_model.decoder.layers))]
    if kind == "t5":
        return [(None, list(model.encoder.block)), (None, list(model.decoder.block))]
    raise NotImplementedError(f"models of type {kind!r} are not supported; supported are {', '.join(SUPPORTED)}")


def install(model: Any) -> int:
    """Make the layers of a model ask what runs; returns how many there are. Doing it again changes nothing."""
    found = stacks(model)
    encoder = len(found[0][1]) if len(found) > 1 else 0
    index = 0
    for stack, (family, layers) in enumerate(found):
        for place, layer in enumerate(layers):
            # The prompt's or the source's tokens are in the first stack.
            layer.switchable_place = _Place(index, place, stack, len(layers), bool(encoder))
            if not isinstance(layer, Switched):
                kind: Any = type(layer)
                layer.__class__ = _switched_class(kind, family)
            index += 1
    return index


class Switched:
    """Marks the class of a layer whose blocks can be left out."""


@functools.cache
def _switched_class(kind: type, family: Family | None) -> type:
    """A layer's class with a ``forward`` that asks what runs. Layers change their class, so that copies work, too."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        active = ACTIVE.get()
        if active is None:
            return kind.forward(self, hidden_states, *args, **kwargs)  # type: ignore[attr-defined]
        if family is None:
            return _run_t5(active, self, self.switchable_place, hidden_states, args, kwargs)
        kw = dict(zip(family.names, args)) | kwargs
        return _run(active, self, family, self.switchable_place, hidden_states, kw)

    return type(kind.__name__, (Switched, kind), {"forward": forward, "__module__": kind.__module__})


# -- running a layer ---------------------------------------------------------------------------------------------------


def _gate(column: Tensor, h: Tensor, batch: int) -> Tensor:
    """A row of ``column`` for each row of ``h``: rows are repeated for beams and returned sequences."""
    column = column.to(h.device)
    if len(column) != batch:
        column = column.repeat_interleave(batch // len(column), 0)
    return column


def _apply(
    active: Active,
    block: str,
    at: _Place,
    h: Tensor,
    alive: Tensor | None,
    compute: Callable[[Tensor, Tensor | None], Tensor],
    apart: bool = True,
) -> Tensor:
    """``h`` after a block, for the rows that need it and the tokens that are left.

    ``compute`` takes states and the rows that they are of (``None``: all). Where rows are not ``apart``, since they
    fill a cache together, all are computed.
    """
    if active.skip:
        return compute(h, None) if active.runs(block, at) else h
    decisions = active.decisions
    if not at.place or decisions is None:  # the first layer of each stack, from which caches take their length
        return compute(h, None)
    if not apart or len(decisions) != len(h):
        gates = {"attn": decisions.attn, "ffn": decisions.ffn, "cross": decisions.crossed}[block]
        keep = _gate(gates[:, at.index], h, len(h))[:, None, None]
        return torch.where(keep if alive is None else keep & alive[..., None], compute(h, None), h)
    rows = active.rows(block, at)
    if len(rows) == len(h):
        new = compute(h, None)
    elif len(rows):
        rows = rows.to(h.device)
        some = compute(h[rows], rows)
        new = h.to(some.dtype).index_copy(0, rows, some)
    else:
        return h
    return new if alive is None else torch.where(alive[..., None], new, h)


def _of_rows(value: Any, rows: Tensor | None, batch: int) -> Any:
    """What an argument (a tensor, or a tuple or dict of them) holds for some rows; what is for all stays."""
    if rows is None:
        return value
    if isinstance(value, dict):
        return {name: _of_rows(v, rows, batch) for name, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_of_rows(v, rows, batch) for v in value)
    if isinstance(value, Tensor) and value.ndim > 1 and len(value) == batch:
        return value[rows]
    return value


def _after_first(active: Active, at: _Place, h: Tensor) -> None:
    """The first layer has run: its output decides what happens in the others."""
    if at.index:
        return
    if active.stop:
        raise FirstLayerDone(h)
    if active.decisions is None:
        assert active.decide is not None
        active.decisions = active.decide(h)
        if active.skip and len(active.decisions.buckets()) > 1:
            raise Mixed(active.decisions)


def _tokens(active: Active, h: Tensor, length: int) -> Tensor | None:
    """Which of ``length`` keys are left, ``[batch, length]``; tokens after those that were decided on all are."""
    decisions = active.decisions
    if decisions is None or decisions.tokens is None:
        return None
    keep = _gate(decisions.tokens, h, len(h))
    if keep.shape[1] < length:
        keep = torch.cat([keep, keep.new_ones(len(keep), length - keep.shape[1])], 1)
    return keep


def _index(keep: Tensor) -> Tensor:
    """Places of the kept tokens, ``[batch, kept]``; every row keeps as many."""
    return keep.nonzero()[:, 1].view(len(keep), -1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """Tokens ``[batch, kept, ...]`` of ``[batch or 1, tokens, ...]``."""
    x = x.expand(len(index), *x.shape[1:])
    return x.gather(1, index.view(*index.shape, *[1] * (x.ndim - 2)).expand(*index.shape, *x.shape[2:]))


def _masked(mask: Tensor | None, keep: Tensor, queries: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """An additive mask in which dropped tokens are seen by none."""
    keys = keep.shape[1]
    hidden = ~keep[:, None, None, :]
    if mask is None and causal and queries > 1:
        place = torch.arange(keys, device=keep.device)
        hidden = hidden | (place > place[keys - queries :, None])
    least = torch.finfo(dtype).min
    added = torch.zeros(hidden.shape, dtype=dtype, device=keep.device).masked_fill(hidden, least)
    if mask is None:
        return added
    if mask.dtype == torch.bool:
        return added.masked_fill(~mask[..., :keys], least)
    return (added + mask[..., :keys]).clamp(min=least)


def _few(mask: Tensor | None, index: Tensor) -> Tensor | None:
    """The mask of the kept queries and keys; padding has left with the dropped tokens."""
    if mask is None:
        return None
    mask = mask.expand(len(index), *mask.shape[1:])
    rows = index[:, None, :, None].expand(-1, mask.shape[1], -1, mask.shape[3])
    mask = mask.gather(2, rows)
    return mask.gather(3, index[:, None, None, :].expand(-1, mask.shape[1], mask.shape[2], -1))


def _run(active: Active, layer: Any, family: Family, at: _Place, h: Tensor, kw: dict[str, Any]) -> Tensor:
    if at.index == 0:
        h = active.first if active.first is not None else family.ffn(layer, family.attention(layer, h, kw))
        _after_first(active, at, h)
        active.after_first = h
        return _leave(active, at, h)
    alive, kw = _narrow(active, at, h, kw)
    batch, apart = len(h), kw.get("cache") is None

    def attention(x: Tensor, rows: Tensor | None) -> Tensor:
        return family.attention(layer, x, _of_rows(kw, rows, batch))

    h = _apply(active, "attn", at, h, alive, attention, apart)
    if family.cross is not None and kw.get("encoder_hidden_states") is not None:
        cross, seen = family.cross, _source(active, h, kw)
        h = _apply(active, "cross", at, h, alive, lambda x, rows: cross(layer, x, _of_rows(seen, rows, batch)), apart)
    h = _apply(active, "ffn", at, h, alive, lambda x, _: family.ffn(layer, x))
    return _return(active, at, h)


def _leave(active: Active, at: _Place, h: Tensor) -> Tensor:
    """After the first layer, dropped tokens leave the sequence."""
    active.kept = None
    keep = _tokens(active, h, h.shape[1])
    if not active.skip or keep is None or bool(keep.all()):
        return h
    if keep.shape[1] != h.shape[1]:
        return h  # a decoding step: the prompt has been read
    active.kept = _index(keep)
    return _take(h, active.kept)


def _return(active: Active, at: _Place, h: Tensor) -> Tensor:
    """After the last layer, tokens that had left stand again where they were, as the first layer left them."""
    if active.kept is None or not at.has_inputs or at.place != at.count - 1:
        return h
    assert active.after_first is not None
    index = active.kept[..., None].expand(*active.kept.shape, h.shape[2])
    return active.after_first.scatter(1, index, h)


def _narrow(active: Active, at: _Place, h: Tensor, kw: dict[str, Any]) -> tuple[Tensor | None, dict[str, Any]]:
    """What a later layer is called with once tokens have been dropped, and which of its tokens are still there."""
    if not at.has_inputs:
        return None, kw
    cache = kw.get("cache")
    past = 0 if cache is None else cache.get_seq_length()
    length = past or h.shape[1]  # the first layer has already added this call's tokens to the cache
    keep = _tokens(active, h, length)
    if keep is None or bool(keep.all()):
        return None, kw
    if active.skip:
        if active.kept is None:
            if h.shape[1] > 1:
                raise NotImplementedError("several tokens at once after a prompt whose tokens were dropped")
            return None, kw | {"attention_mask": None}  # what is left of the prompt has no padding
        # Without a mask, attention is causal among the kept ones, in their order.
        few = kw | {"attention_mask": _few(kw.get("attention_mask"), active.kept)}
        if few.get("position_embeddings") is not None:
            few["position_embeddings"] = tuple(_take(x, active.kept) for x in few["position_embeddings"])
        if few.get("position_ids") is not None:
            few["position_ids"] = _take(few["position_ids"], active.kept)
        return None, few
    mask = _masked(kw.get("attention_mask"), keep, h.shape[1], not at.encodes, h.dtype)
    alive = keep[:, -h.shape[1] :]
    return alive, kw | {"attention_mask": mask}


def _source(active: Active, h: Tensor, kw: dict[str, Any]) -> dict[str, Any]:
    """Cross-attention sees the tokens of the source that are left."""
    source = kw["encoder_hidden_states"]
    keep = _tokens(active, h, source.shape[1])
    if keep is None or bool(keep.all()):
        return kw
    if active.skip:
        index = _index(keep)
        return kw | {"encoder_hidden_states": _take(source, index), "encoder_attention_mask": None}
    mask = _masked(kw.get("encoder_attention_mask"), keep, 1, False, h.dtype)
    return kw | {"encoder_attention_mask": mask}


# -- T5, whose layers pass the bias of relative positions on ---------------------------------------------------------

T5_NAMES = (
    "attention_mask",
    "position_bias",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "encoder_decoder_position_bias",
)


def _run_t5(active: Active, layer: Any, at: _Place, h: Tensor, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    kw = dict(zip(T5_NAMES, args)) | kwargs
    bias, cross_bias = kw.pop("position_bias", None), kw.pop("encoder_decoder_position_bias", None)
    source, source_mask = kw.pop("encoder_hidden_states", None), kw.pop("encoder_attention_mask", None)
    decisions = active.decisions
    if decisions is not None and decisions.tokens is not None and not bool(decisions.tokens.all()):
        raise NotImplementedError(
            "tokens of a T5 cannot be dropped: its layers share biases of relative positions; leave 'token' out of "
            "candidates"
        )
    given = at.index == 0 and active.first is not None
    mask = kw.pop("attention_mask", None)
    state: dict[str, Any] = {"bias": bias, "cross": cross_bias}
    batch, apart = len(h), all(kw.get(name) is None for name in ("cache", "past_key_values"))

    def attention(x: Tensor, rows: Tensor | None) -> Tensor:
        few = _of_rows(kw | {"attention_mask": mask, "position_bias": bias}, rows, batch)
        out, found, _ = layer.layer[0](x, **few)
        if rows is None:  # the first layer makes the bias, for all
            state["bias"] = found
        return out

    def cross(x: Tensor, rows: Tensor | None) -> Tensor:
        more = {"key_value_states": source, "attention_mask": source_mask, "position_bias": cross_bias}
        out, found, _ = layer.layer[1](x, **_of_rows(kw | more, rows, batch))
        if rows is None:
            state["cross"] = found
        return out

    h = _apply(active, "attn", at, h, None, attention, apart)
    if layer.is_decoder and source is not None:
        h = _apply(active, "cross", at, h, None, cross, apart)
    h = _apply(active, "ffn", at, h, None, lambda x, _: layer.layer[-1](x))
    if given:
        assert active.first is not None
        h = active.first
    _after_first(active, at, h)
    return h, state["bias"], state["cross"]
