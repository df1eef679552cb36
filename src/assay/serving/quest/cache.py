"""The Quest cache: all tokens, in pages that carry the range of their keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    get_layer_types_and_kwargs,
)

from assay._state import load_state, save_state
from assay.serving._batch import BatchOperations
from assay.serving.quest.pages import Gqa, build_metadata

# Layer types of a model configuration that keep transformers' own layer class: their cache does not grow with the
# text, or holds something else than keys and values.
STANDARD_TYPES = ("sliding_attention", "chunked_attention", "linear_attention", "conv", "dummy")


class QuestLayer(BatchOperations, DynamicLayer):
    """The cache of one attention layer; :class:`QuestCache` has the parameters and their meaning.

    Keys and values lie in buffers ``[batch, kv_heads, pages * page_size, head_dim]`` that grow by an eighth, metadata
    in ``[batch, kv_heads, pages, 2 * head_dim]``. ``keys`` and ``values`` are views of the part that is in use.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        *,
        page_size: int = 16,
        token_budget: int = 1024,
        gqa: Gqa = "head",
        force_last: bool | None = None,
        max_query_len: int = 1,
        parity: Literal["eval"] | None = None,
        track_recall: bool = False,
    ) -> None:
        super().__init__()
        for name, number in (("page_size", page_size), ("max_query_len", max_query_len)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
        if token_budget < 2 * page_size:
            raise ValueError(
                f"token_budget must hold at least two pages of {page_size} tokens, {2 * page_size}, not {token_budget}"
            )
        if gqa not in get_args(Gqa):
            raise ValueError(f"gqa must be one of {get_args(Gqa)}, not {gqa!r}")
        if parity not in (None, "eval"):
            raise ValueError(f"parity must be None or 'eval', not {parity!r}")
        self.page_size = page_size
        self.token_budget = token_budget
        self.gqa: Gqa = gqa
        self.force_last = parity is None if force_last is None else force_last
        self.max_query_len = max_query_len
        self.parity = parity
        self.track_recall = track_recall
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._meta: Tensor | None = None
        self._length = 0
        self.is_initialized = False
        self.clear_stats()

    def clear_stats(self) -> None:
        """Start counting anew."""
        self._counted = dict.fromkeys(("steps", "possible", "sparse", "tokens_read", "tokens_total", "scored"), 0)
        self._last_read: list[Tensor] = []
        self._recalls: list[Tensor] = []

    # -- what transformers calls ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take device, dtype and shapes from the first keys and values."""
        for name, x in (("keys", key_states), ("values", value_states)):
            if x.ndim != 4:
                raise ValueError(f"{name} must have shape [batch, kv_heads, tokens, head_dim], not {tuple(x.shape)}")
        self.dtype, self.device = key_states.dtype, key_states.device
        (batch, heads), dims = key_states.shape[:2], (key_states.shape[3], value_states.shape[3])
        self._key = key_states.new_zeros((batch, heads, 0, dims[0]))
        self._value = value_states.new_zeros((batch, heads, 0, dims[1]))
        self._meta = key_states.new_zeros((batch, heads, 0, 2 * dims[0]))
        self._length = 0
        self._narrow()
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, n, head_dim]`` and return all keys and values.

        The first call returns what it was given; later ones return views of the buffers, valid until the next call.
        The keys carry this layer as attribute ``_quest``, by which attention ``"quest"`` finds the pages.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self._key is not None and self._value is not None
        if key_states.shape[:2] != self._key.shape[:2] or key_states.shape[2] != value_states.shape[2]:
            raise ValueError(
                f"the cache holds [batch, kv_heads] = {list(self._key.shape[:2])}, but keys of shape "
                f"{list(key_states.shape)} and values of shape {list(value_states.shape)} came"
            )
        start, stop = self._length, self._length + key_states.shape[2]
        self._reserve(stop)
        self._key[:, :, start:stop] = key_states.detach()
        self._value[:, :, start:stop] = value_states.detach()
        self._length = stop
        self._refresh(start)
        self._narrow()
        if start == 0:
            return key_states, value_states
        self._count(key_states.shape[2])
        keys = self._key[:, :, :stop]  # its own view, or the layer and its keys would hold on to each other
        keys._quest = self  # type: ignore[attr-defined]
        return keys, self._value[:, :, :stop]

    def _reserve(self, tokens: int) -> None:
        """Make room, an eighth more than asked for."""
        assert self._key is not None and self._value is not None and self._meta is not None
        pages = -(-tokens // self.page_size)
        if pages <= self._meta.shape[2]:
            return
        pages += max(1, pages // 8)

        def grown(x: Tensor, rows: int) -> Tensor:
            # Zeros, since attention multiplies spare tokens of the last page by a weight of 0.
            new = x.new_zeros((*x.shape[:2], rows, x.shape[3]))
            new[:, :, : x.shape[2]] = x
            return new

        self._key, self._value = (grown(x, pages * self.page_size) for x in (self._key, self._value))
        self._meta = grown(self._meta, pages)

    def _refresh(self, start: int) -> None:
        """Make the metadata of the pages from token ``start`` on anew."""
        assert self._key is not None and self._meta is not None
        if start >= self._length:
            return
        page = start // self.page_size
        new = build_metadata(self._key[:, :, page * self.page_size : self._length], self.page_size)
        self._meta[:, :, page : page + new.shape[2]] = new

    def _narrow(self) -> None:
        assert self._key is not None and self._value is not None
        self.keys, self.values = self._key[:, :, : self._length], self._value[:, :, : self._length]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._length

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens. The page that is cut gets its metadata from what is left."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, not {tokens_to_remove}")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        length = self._length + tokens_to_remove
        if length < 0:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens of {self._length}")
        assert self._key is not None and self._value is not None
        self._key[:, :, length : self._length] = 0
        self._value[:, :, length : self._length] = 0
        self._length = length
        if length % self.page_size:
            self._refresh(length - 1)
        self._narrow()

    def reset(self) -> None:
        """Forget all tokens and statistics."""
        self._forget()

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            assert self._key is not None and self._value is not None and self._meta is not None
            self._key, self._value, self._meta = change(self._key), change(self._value), change(self._meta)
            self._narrow()

    # -- what attention asks for ------------------------------------------------------------------------------------

    @property
    def pages(self) -> int:
        """Pages in use, the last one perhaps incomplete."""
        return -(-self._length // self.page_size)

    def paged(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of whole pages ``[batch, kv_heads, >= pages * page_size, head_dim]``, and the metadata."""
        assert self._key is not None and self._value is not None and self._meta is not None
        return self._key, self._value, self._meta[:, :, : self.pages]

    def pages_to_read(self, queries: int) -> int | None:
        """How many pages a step of so many queries reads; ``None`` where it is dense."""
        if queries > self.max_query_len:
            return None
        count = self.token_budget // self.page_size
        if self.parity == "eval":
            count = max(3, min(self.token_budget, self._length) // self.page_size)
        return count if count < self.pages else None

    def _count(self, queries: int) -> None:
        """A step counts as dense until attention says otherwise."""
        if queries > self.max_query_len:
            return
        for name, more in (
            ("steps", 1),
            ("possible", self.pages_to_read(queries) is not None),
            ("tokens_read", self._length),
            ("tokens_total", self._length),
        ):
            self._counted[name] += int(more)

    def count_sparse(self, pages: Tensor, recall: Tensor | None) -> None:
        """Note that the last step read ``pages`` ``[batch, heads, count]`` alone."""
        spare = self.pages * self.page_size - self._length
        self._counted["sparse"] += 1
        self._counted["scored"] += self.pages
        self._counted["tokens_read"] += pages.shape[2] * self.page_size - self._length
        if self.force_last:
            self._counted["tokens_read"] -= spare
        elif spare:  # a tensor, since asking for its value would make a GPU wait
            self._last_read.append((pages[..., -1] == self.pages - 1).float().mean() * spare)
        if recall is not None:
            self._recalls.append(recall)

    def counts(self) -> dict[str, float]:
        """What :meth:`QuestCache.stats` adds up."""
        recall = float(torch.stack(self._recalls).mean()) if self._recalls else float("nan")
        unread = float(torch.stack(self._last_read).sum()) if self._last_read else 0.0
        return {**self._counted, "tokens_read": self._counted["tokens_read"] - unread, "recall": recall}


class QuestCache(Cache):
    """A key-value cache for ``transformers`` of which each decoding step reads only the most promising pages.

    Nothing is forgotten: all keys and values stay, in pages of ``page_size`` tokens with the channel-wise maximum and
    minimum of their keys. A decoding step scores every page with an upper bound of the product of its query with any
    key of the page (:func:`~assay.serving.quest.page_scores`), takes the ``token_budget / page_size`` best, the current
    one among them, and computes exact attention over their tokens. It saves time, not memory.

    ::

        register_quest_attention()
        model.set_attn_implementation("quest")
        cache = QuestCache(model.config, token_budget=1024)
        model.generate(**inputs, past_key_values=cache)

    Prompts are processed densely, in one piece or in chunks. So is a step whose whole context fits the budget: its
    output is then the very one of attention ``"sdpa"``.

    Parameters
    ----------
    config
        The model's configuration. Layers with sliding-window, chunked or linear attention keep transformers' own layer
        class (with one warning), since their cache does not grow with the text.
    page_size
        ``S``, default 16 (the paper's). Metadata takes ``1 / S`` of the cache, and is read in full each step.
    token_budget
        Tokens that a query head reads in a step and layer, at least two pages; default 1,024 (the paper's
        configuration for LongBench). Rounded down to whole pages.
    dense_layers
        Indices of layers that always read everything, default the first two, where attention is spread out (paper,
        sections 3 and 4). Those beyond the model's last layer are ignored.
    gqa
        Where query heads share a key-value head: ``"head"`` (default) selects pages for each query head; ``"max"`` and
        ``"sum"`` select once for the group, by the largest score or the sum, which reads less memory.
    force_last
        Always read the page of the current token, as one of the budget; default true, as in the authors' kernels
        (false with ``parity="eval"``). Without it a token may not attend to itself.
    max_query_len
        Steps of up to so many tokens after the prompt are sparse, default 1. With more, the tokens of a step (those
        that speculative decoding verifies, say) share a selection, by the largest score. Larger steps are dense.
    parity
        ``"eval"`` selects ``min(max(3, min(token_budget, tokens) // S), pages)`` pages, as the authors' accuracy code
        does: it is sparse even where the context fits the budget.
    track_recall
        Measure, at the price of dense attention, the share of attention weight that the selection covers.

    Raises
    ------
    ValueError
        An argument is out of its range, or the model has layers or a structure that cannot work with this cache (the
        message names it). ``update`` raises it when the batch changes between calls.

    Notes
    -----
    For inference: no gradient flows through tokens of earlier calls. ``torch.compile`` of the decoding step is not
    supported (``is_compileable`` is false). Any other attention implementation works with this cache, densely; a
    warning says so. Source: "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (ICML 2024),
    section 3.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        *,
        page_size: int = 16,
        token_budget: int = 1024,
        dense_layers: Iterable[int] = (0, 1),
        gqa: Gqa = "head",
        force_last: bool | None = None,
        max_query_len: int = 1,
        parity: Literal["eval"] | None = None,
        track_recall: bool = False,
    ) -> None:
        self.options: dict[str, Any] = {
            "page_size": page_size,
            "token_budget": token_budget,
            "gqa": gqa,
            "force_last": force_last,
            "max_query_len": max_query_len,
            "parity": parity,
            "track_recall": track_recall,
        }
        QuestLayer(**self.options)  # complain about options even where no layer would use them
        name = getattr(config, "model_type", type(config).__name__)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"config is of {name!r}, an encoder-decoder model; QuestCache supports decoders only")
        self.decoder_config = config.get_text_config(decoder=True)
        types, kwargs = get_layer_types_and_kwargs(self.decoder_config)
        self.dense_layers = tuple(sorted(set(dense_layers)))
        if self.dense_layers and self.dense_layers[0] < 0:
            raise ValueError(f"dense_layers must not be negative, but {self.dense_layers} came")
        if unknown := sorted(set(types) - {"full_attention", *STANDARD_TYPES}):
            raise ValueError(f"config is of {name!r}, whose layers {unknown} hold a cache that QuestCache cannot page")
        if "full_attention" not in types:
            raise ValueError(f"config is of {name!r}, whose layers are all {sorted(set(types))}: nothing to select")
        heads = getattr(self.decoder_config, "num_attention_heads", None)
        kv_heads = getattr(self.decoder_config, "num_key_value_heads", None) or heads
        if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
            raise ValueError(f"config has {heads} attention heads, which is no multiple of {kv_heads} key-value heads")
        if others := sorted(set(types) - {"full_attention", "dummy"}):
            warnings.warn(f"layers {others} of {name!r} keep their own cache, which does not grow", stacklevel=2)
        layers: list[Any] = []
        for index, (kind, own) in enumerate(zip(types, kwargs)):
            if kind == "full_attention" and index not in self.dense_layers:
                layers.append(QuestLayer(**self.options))
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**own))
        self._warned = False
        super().__init__(layers=layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer; see :meth:`QuestLayer.update`."""
        attention = getattr(self.decoder_config, "_attn_implementation", None)
        if attention not in (None, "quest") and not self._warned:
            self._warned = True
            warnings.warn(
                f"QuestCache saves nothing with attention implementation {attention!r}; call "
                "assay.serving.quest.register_quest_attention() and model.set_attn_implementation('quest')",
                stacklevel=2,
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _quest_layers(self) -> list[QuestLayer]:
        return [layer for layer in self.layers if isinstance(layer, QuestLayer)]

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens held; without ``layer_idx`` those of the first layer that holds keys and values."""
        if layer_idx is None or not isinstance(self.layers[layer_idx], CacheLayerMixin):
            return self._quest_layers()[0].get_seq_length() if self._quest_layers() else super().get_seq_length()
        return super().get_seq_length(layer_idx)

    def stats(self) -> dict[str, float]:
        """What decoding steps read since the cache was made or reset (prompts are not counted).

        Returns
        -------
        dict
            ``steps``: steps times paged layers; ``sparse_steps``: those that read selected pages; ``missed_steps``:
            those that could have, but were dense since the model uses another attention or re-wraps the keys.
            ``tokens_read``, ``tokens_total``: tokens read, on average of the heads that select, and held, summed over
            steps and paged layers. ``density``: bytes read over bytes that dense attention would read, with
            metadata and dense layers counted. ``recall``: mean share of attention weight on selected pages (NaN without
            ``track_recall``). ``bytes``: keys, values and metadata held; ``metadata_bytes``: of which metadata;
            ``allocated_bytes``: with the spare room of growing buffers.
        """
        layers: list[Any] = list(self._quest_layers())
        counts = [layer.counts() for layer in layers]
        total = {
            name: sum(c[name] for c in counts)
            for name in ("steps", "possible", "sparse", "tokens_read", "tokens_total", "scored")
        }
        full: list[Any] = [x for x in self.layers if type(x) is DynamicLayer]
        # A page's metadata are two vectors, as many as a token's key and value.
        dense = len(full) / len(layers) * total["tokens_total"] if layers else 0.0
        read, everything = total["tokens_read"] + total["scored"] + dense, total["tokens_total"] + dense
        recalls = [c["recall"] for c in counts if c["recall"] == c["recall"]]
        meta = sum(x.paged()[2].nbytes for x in layers if x.is_initialized)
        plain = [t for x in full if x.is_initialized for t in (x.keys, x.values)]
        held = sum(t.nbytes for t in [*plain, *(t for x in layers if x.is_initialized for t in (x.keys, x.values))])
        spare = [t for x in layers if x.is_initialized for t in (x._key, x._value, x._meta)]
        return {
            "steps": total["steps"],
            "sparse_steps": total["sparse"],
            "missed_steps": total["possible"] - total["sparse"],
            "tokens_read": total["tokens_read"],
            "tokens_total": total["tokens_total"],
            "density": read / everything if everything else 1.0,
            "recall": sum(recalls) / len(recalls) if recalls else float("nan"),
            "bytes": held + meta,
            "metadata_bytes": meta,
            "allocated_bytes": sum(t.nbytes for t in [*spare, *plain]),
        }

    def clear_stats(self) -> None:
        """Start counting anew."""
        for layer in self._quest_layers():
            layer.clear_stats()

    def save(self, folder: str | Path) -> Path:
        """Write options and tokens to a folder, as JSON and safetensors; :meth:`load` makes the metadata anew.

        Raises
        ------
        ValueError
            A layer is neither paged nor a plain full one (sliding windows, say).
        """
        tensors: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if type(layer) not in (QuestLayer, DynamicLayer):
                raise ValueError(f"layer {index} is a {type(layer).__name__}, which save() does not support")
            if layer.is_initialized:
                tensors[f"{index}.keys"], tensors[f"{index}.values"] = layer.keys, layer.values
        config = {"options": self.options, "dense_layers": self.dense_layers, "layers": len(self.layers)}
        return save_state(folder, "QuestCache", config, tensors)

    @classmethod
    def load(cls, folder: str | Path, config: Any) -> QuestCache:
        """Read a cache that :meth:`save` wrote.

        Parameters
        ----------
        folder
            As given to :meth:`save`.
        config
            The configuration of the same model.

        Raises
        ------
        FileNotFoundError, ValueError
            The folder holds no such cache, or one of a model with another number of layers.
        """
        state, tensors = load_state(folder, "QuestCache", torch_tensors=True)
        cache = cls(config, dense_layers=state["dense_layers"], **state["options"])
        if len(cache.layers) != state["layers"]:
            raise ValueError(
                f"{folder} holds a cache of {state['layers']} layers, but config is of a model with {len(cache.layers)}"
            )
        for index, layer in enumerate(cache.layers):
            if f"{index}.keys" in tensors:
                layer.update(tensors[f"{index}.keys"], tensors[f"{index}.values"])
        return cache


def read_fraction(length: int, token_budget: int, page_size: int = 16) -> float:
    """Closed form of the bytes that a sparse step reads over those of a dense one, ``1/S + K S / l`` (paper, 3.4).

    Its inverse is the most that sparsity can speed up attention that waits for memory: 8 at 32,768 tokens with a budget
    of 2,048 and pages of 16.
    """
    if length <= token_budget:
        return 1.0
    return 1 / page_size + token_budget // page_size * page_size / length
