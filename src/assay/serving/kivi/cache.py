"""The KIVI cache: keys quantised per channel, values per token, the newest tokens in full precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

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
from assay.serving.kivi.quantize import PACKED_BITS, Axis, Pad, check_head_dim, check_quantizer
from assay.serving.kivi.store import PackedStore, SimulatedStore
from assay.serving.kivi.view import PackedView

# Layer types of a model configuration that keep transformers' own layer class: their cache does not grow with the
# text, or holds something else than keys and values. "full_attention" is what KIVI compresses.
STANDARD_TYPES = ("sliding_attention", "chunked_attention", "linear_attention", "conv", "dummy")
# Attention implementations that compute with what a cache returns through ordinary tensor operations.
ATTENTIONS = ("sdpa", "eager", "kivi", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class KIVILayer(BatchOperations, DynamicLayer):
    """The cache of one attention layer; :class:`KIVICache` has the parameters and their meaning.

    After ``l`` tokens the state depends on ``l`` alone, not on the chunks in which they came. With groups along tokens
    (axis ``"channel"``) the first ``l - l mod R`` tokens are quantised, in blocks of ``R``; with groups along channels
    (axis ``"token"``) the first ``max(0, l - R)`` are. ``keys`` and ``values`` hold the rest as it came.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        *,
        k_bits: int = 2,
        v_bits: int = 2,
        group_size: int = 32,
        residual_length: int = 128,
        key_axis: Axis = "channel",
        value_axis: Axis = "token",
        meta_dtype: torch.dtype = torch.float16,
        simulate: bool = False,
        pad: Pad = "edge",
    ) -> None:
        super().__init__()
        for name, bits, axis in (("k_", k_bits, key_axis), ("v_", v_bits, value_axis)):
            check_quantizer(bits, axis, group_size, meta_dtype, name)
            if bits not in PACKED_BITS and not simulate:
                raise ValueError(
                    f"{name}bits={bits} is not packed, only {PACKED_BITS} are; use simulate=True for sweeps"
                )
        if residual_length < (0 if simulate else 1):
            raise ValueError(
                f"residual_length must be at least {0 if simulate else 1}, not {residual_length} "
                "(0 needs simulate=True)"
            )
        if residual_length % group_size:
            raise ValueError(
                f"residual_length must be a multiple of group_size, but {residual_length} is none of {group_size}"
            )
        if pad not in ("edge", "zero"):
            raise ValueError(f"pad must be 'edge' or 'zero', not {pad!r}")
        self.residual_length = residual_length
        self.group_size = group_size
        self.simulate = simulate
        self.record_past = False
        self.first_real: Tensor | None = None
        shared = {"group_size": group_size, "meta_dtype": meta_dtype}
        if simulate:
            self._make_key: Callable[[], Any] = lambda: SimulatedStore(k_bits, key_axis, pad=pad, **shared)  # type: ignore[arg-type]
            self._make_value: Callable[[], Any] = lambda: SimulatedStore(v_bits, value_axis, pad=pad, **shared)  # type: ignore[arg-type]
        else:
            step = max(residual_length, group_size)
            self._make_key = lambda: PackedStore(k_bits, key_axis, step=step, **shared)  # type: ignore[arg-type]
            self._make_value = lambda: PackedStore(v_bits, value_axis, step=step, **shared)  # type: ignore[arg-type]
        self.key_store = self._make_key()
        self.value_store = self._make_value()

    # -- what transformers calls ------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take device, dtype and shapes from the first keys and values."""
        for name, x, store in (("keys", key_states, self.key_store), ("values", value_states, self.value_store)):
            if x.ndim != 4:
                raise ValueError(f"{name} must have shape [batch, kv_heads, tokens, head_dim], not {tuple(x.shape)}")
            if store.axis == "token":
                check_head_dim(x.shape[-1], store.bits, store.group_size, f"quantising {name} with axis 'token'")
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        if self.first_real is not None:
            self.first_real = _match_batch(self.first_real, key_states.shape[0]).to(self.device)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append ``[batch, kv_heads, n, head_dim]`` and return all keys and values that this call's attention sees.

        The first call returns what it was given: a prompt's own attention is exact, and compressed only afterwards.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        if key_states.shape[:2] != self.keys.shape[:2] or key_states.shape[2] != value_states.shape[2]:
            raise ValueError(
                f"the cache holds [batch, kv_heads] = {list(self.keys.shape[:2])}, but keys of shape "
                f"{list(key_states.shape)} and values of shape {list(value_states.shape)} came"
            )
        first = self.get_seq_length() == 0
        past_keys, past_values = self.keys, self.values
        self.keys = torch.cat([past_keys, key_states], -2)
        self.values = torch.cat([past_values, value_states], -2)
        if first:
            seen = key_states, value_states
        else:
            seen = (
                self._seen(self.key_store, past_keys, key_states, self.keys),
                self._seen(self.value_store, past_values, value_states, self.values),
            )
        if not self.record_past:
            self.flush()
        return seen

    def _seen(self, store: Any, past: Tensor, new: Tensor, residual: Tensor) -> Tensor:
        """What attention sees of keys or values, before anything of this call is quantised."""
        if self.simulate:
            if self.residual_length == 0 and past.shape[2]:  # an incomplete last group is quantised as well, padded
                residual = torch.cat([store.fake(past), new], -2)
            return torch.cat([store.dequantize(self.dtype), residual], -2) if store.length else residual
        return PackedView(store, residual) if store.length else residual

    def flush(self) -> None:
        """Quantise what the full-precision window no longer holds; it touches no other token."""
        assert self.keys is not None and self.values is not None
        self.keys = self._flush(self.key_store, self.keys)
        self.values = self._flush(self.value_store, self.values)

    def _flush(self, store: Any, residual: Tensor) -> Tensor:
        window, length = self.residual_length, residual.shape[2]
        n = length - window if store.axis == "token" else length - length % (window or self.group_size)
        if n <= 0:
            return residual
        block = residual[:, :, :n]
        store.append(self._without_padding(block, store.length) if store.axis == "channel" else block)
        # Every slice of a prompt would keep the whole prompt's memory alive.
        return residual[:, :, n:].clone() if n > 1 else residual[:, :, n:]

    def _without_padding(self, block: Tensor, start: int) -> Tensor:
        """The block with its padding replaced by the first real token of the row, so that it widens no group."""
        if self.first_real is None:
            return block
        tokens = block.shape[2]
        # Every R tokens are one block on their own: the padding of one takes the first real token of the same one.
        size = self.residual_length or self.group_size
        position = torch.arange(start, start + tokens, device=block.device)
        ends = (position // size + 1) * size - 1
        first = self.first_real[:, None]
        source = torch.where((position < first) & (first <= ends), first, position) - start
        return block.gather(2, source[:, None, :, None].expand_as(block))

    def get_seq_length(self) -> int:
        """Tokens held, quantised and not."""
        return self.key_store.length + self.keys.shape[2] if self.is_initialized and self.keys is not None else 0

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, and flush what was held back while recording the past.

        Inside the full-precision window nothing is lost. Where it reaches into quantised keys of axis ``"channel"``,
        the block that is cut comes back to full precision with the error that quantising it made.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, not {tokens_to_remove}")
        if not self.is_initialized:
            return
        length = self.get_seq_length() + tokens_to_remove
        if length < 0:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens of {self.get_seq_length()}")
        assert self.keys is not None and self.values is not None
        self.keys = self._crop(self.key_store, self.keys, length)
        self.values = self._crop(self.value_store, self.values, length)
        self.flush()

    def _crop(self, store: Any, residual: Tensor, length: int) -> Tensor:
        if length >= store.length:
            return residual[:, :, : length - store.length]
        if store.axis == "token":
            store.truncate(length)
            return residual[:, :, :0]
        kept = length - length % (self.residual_length or self.group_size)
        block = store.dequantize(self.dtype, kept, store.length)[:, :, : length - kept].clone()
        store.truncate(kept)
        return block

    def reset(self) -> None:
        """Forget all tokens."""
        self.key_store, self.value_store = self._make_key(), self._make_value()
        super().reset()

    def activate_past_recording(self) -> None:
        """From now on wait for :meth:`crop` before quantising, so that rejected speculative tokens leave no trace."""
        self.record_past = True

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            self.keys, self.values = change(self.keys), change(self.values)
            self.key_store.map(change)
            self.value_store.map(change)
        if self.first_real is not None:
            self.first_real = change(self.first_real)

    # -- beyond transformers ----------------------------------------------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Bytes of this layer, from the sizes of its tensors; the keys of :meth:`KIVICache.memory_footprint`."""
        if not self.is_initialized:
            return dict.fromkeys(("packed", "meta", "residual", "allocated", "dense16"), 0)
        assert self.keys is not None and self.values is not None
        rows = self.get_seq_length() * self.keys.shape[0] * self.keys.shape[1]
        stores = (self.key_store, self.value_store)
        return {
            "packed": sum(s.packed_bytes for s in stores),
            "meta": sum(s.meta_bytes for s in stores),
            "residual": self.keys.nbytes + self.values.nbytes,
            "allocated": sum(s.allocated_bytes for s in stores)
            + self.keys.untyped_storage().nbytes()
            + self.values.untyped_storage().nbytes(),
            "dense16": 2 * rows * (self.keys.shape[3] + self.values.shape[3]),
        }


def _match_batch(first_real: Tensor, batch: int) -> Tensor:
    """``first_real`` for a batch that ``generate`` may have expanded for beams or several return sequences."""
    if batch % first_real.shape[0]:
        raise ValueError(f"set_padding got a mask of {first_real.shape[0]} rows, but keys of a batch of {batch} came")
    return first_real.repeat_interleave(batch // first_real.shape[0], 0)


class KIVICache(Cache):
    """A key-value cache in 2 or 4 bits for ``transformers`` models, without calibration.

    Keys (after rotary embedding) are quantised per channel, in groups of ``group_size`` consecutive tokens; values per
    token, in groups of ``group_size`` consecutive channels; the newest tokens stay as they are. The quantiser is that
    of :func:`~assay.serving.kivi.quantize_groups`. The prompt's own attention is exact; the cache is compressed after
    it. A decoded token attends to ``[quantised | full precision]``, and only then is what left the window quantised,
    once and for all: no group changes after it was written, and the cost of a step's quantising does not grow.

    Pass a fresh one to ``model.generate`` or to the model's forward::

        cache = KIVICache(model.config)
        model.generate(**inputs, past_key_values=cache)

    With attention ``"sdpa"`` or ``"eager"`` a layer's keys and values are made dense for the moment of its attention.
    :func:`~assay.serving.kivi.register_kivi_attention` and ``model.set_attn_implementation("kivi")`` compute on the
    packed data instead.

    Parameters
    ----------
    config
        The model's configuration. Layers with sliding-window, chunked or linear attention keep transformers' own
        layer class (with one warning), since their cache does not grow with the text.
    k_bits, v_bits
        2 ("KIVI-2", default), 4 ("KIVI-4") or 8; 1 and 3 only with ``simulate``. The paper finds 2 enough for models
        with as many key heads as query heads, and 4 necessary where they are few (multi- or grouped-query attention).
    group_size
        ``G``, default 32 (the paper's). Larger groups save memory: ``bits + 32/G`` bits an element with 16-bit scales.
        For values it must divide the head dimension.
    residual_length
        ``R``, default 128 (the paper's), a multiple of ``group_size``. The newest ``l mod R`` keys and ``min(l, R)``
        values are in full precision. 32 saves memory at little loss. 0 is possible with ``simulate``.
    key_axis, value_axis
        ``"channel"`` or ``"token"``; other than the defaults they serve ablation. The window follows the axis: blocks
        of ``R`` tokens for ``"channel"``, token by token for ``"token"``.
    meta_dtype
        Type of scales and zero points, default float16 (also for bfloat16 models: it is the more precise one here).
    skip_layers
        Indices of layers that stay in full precision.
    simulate
        Hold quantised-and-restored dense tensors instead of packed ones. For studies of bit widths and axes; it saves
        no memory. With ``residual_length=0`` every token is quantised, an incomplete last group padded by ``pad``.
    pad
        ``"edge"`` (default) or ``"zero"`` (the paper's study); only used with ``simulate`` and ``residual_length=0``.

    Raises
    ------
    ValueError
        An argument is out of its range; the head dimension is no multiple of ``group_size``; the model's layers or its
        attention implementation are of a type that cannot work with this cache (the message names it). ``update``
        raises it when the batch changes between calls, and when a quantised key or value is NaN or infinite.

    Notes
    -----
    For inference: no gradient flows through quantised tokens. ``torch.compile`` of the decoding step is not supported
    (``is_compileable`` is false). Source: "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache" (ICML
    2024), sections 3 and 4, algorithm 1. Algorithm 1 quantises before a step's attention, the authors' code after it;
    this class does the latter, which is never less accurate.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        *,
        k_bits: int = 2,
        v_bits: int = 2,
        group_size: int = 32,
        residual_length: int = 128,
        key_axis: Axis = "channel",
        value_axis: Axis = "token",
        meta_dtype: torch.dtype = torch.float16,
        skip_layers: Iterable[int] = (),
        simulate: bool = False,
        pad: Pad = "edge",
    ) -> None:
        self.options = {
            "k_bits": k_bits,
            "v_bits": v_bits,
            "group_size": group_size,
            "residual_length": residual_length,
            "key_axis": key_axis,
            "value_axis": value_axis,
            "meta_dtype": meta_dtype,
            "simulate": simulate,
            "pad": pad,
        }
        name = getattr(config, "model_type", type(config).__name__)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"config is of {name!r}, an encoder-decoder model; KIVICache supports decoders only")
        self.decoder_config = config.get_text_config(decoder=True)
        types, kwargs = get_layer_types_and_kwargs(self.decoder_config)
        self.skip_layers = tuple(sorted(set(skip_layers)))
        if self.skip_layers and not 0 <= self.skip_layers[0] <= self.skip_layers[-1] < len(types):
            raise ValueError(f"skip_layers must lie in 0 .. {len(types) - 1}, not {self.skip_layers}")
        if unknown := sorted(set(types) - {"full_attention", *STANDARD_TYPES}):
            raise ValueError(
                f"config is of {name!r}, whose layers {unknown} hold a cache that KIVICache cannot quantise"
            )
        if "full_attention" not in types:
            raise ValueError(f"config is of {name!r}, whose layers are all {sorted(set(types))}: nothing to quantise")
        if others := sorted(set(types) - {"full_attention", "dummy"}):
            warnings.warn(f"layers {others} of {name!r} keep their own cache, which does not grow", stacklevel=2)
        layers: list[Any] = []
        for index, (kind, own) in enumerate(zip(types, kwargs)):
            if kind == "full_attention" and index not in self.skip_layers:
                layers.append(KIVILayer(**self.options))  # type: ignore[arg-type]
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**own))
        super().__init__(layers=layers)
        self._check_attention()

    def _check_attention(self) -> None:
        """Refuse attention implementations that look into the memory of what the cache returns."""
        attention = getattr(self.decoder_config, "_attn_implementation", None)
        if attention is not None and attention not in ATTENTIONS:
            raise ValueError(
                f"attention implementation {attention!r} cannot work with KIVICache; use one of {ATTENTIONS}, "
                "for instance model.set_attn_implementation('sdpa')"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer; see :meth:`KIVILayer.update`."""
        self._check_attention()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def set_padding(self, attention_mask: Tensor) -> None:
        """Tell which tokens of a left-padded prompt are padding, before the prompt is processed.

        Parameters
        ----------
        attention_mask
            ``[batch, tokens]``, zeros before the first real token of a row and ones from there on.

        Padding shares groups with real tokens and can widen their range. With this, padding in a block of keys takes
        the value of the row's first real token of that block before minimum and maximum are taken. Without it results
        are valid, but a little less accurate.
        """
        if attention_mask.ndim != 2:
            raise ValueError(f"attention_mask must have shape [batch, tokens], not {tuple(attention_mask.shape)}")
        real = attention_mask.bool()
        first = real.int().argmax(-1)
        if not torch.equal(real, torch.arange(real.shape[1], device=real.device) >= first[:, None]):
            raise ValueError("attention_mask must be left-padded: zeros, then ones to the end, in every row")
        if self.get_seq_length() > 0:
            raise ValueError(f"set_padding must come before the prompt; the cache holds {self.get_seq_length()} tokens")
        for layer in self._kivi_layers():
            layer.first_real = first

    def _kivi_layers(self) -> list[KIVILayer]:
        return [layer for layer in self.layers if isinstance(layer, KIVILayer)]

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens held; without ``layer_idx`` those of the first quantised layer."""
        if layer_idx is None or not isinstance(self.layers[layer_idx], CacheLayerMixin):
            return self._kivi_layers()[0].get_seq_length() if self._kivi_layers() else super().get_seq_length()
        return super().get_seq_length(layer_idx)

    def memory_footprint(self) -> dict[str, float]:
        """Bytes held, counted from the sizes of the tensors.

        Returns
        -------
        dict
            ``packed``: codes; ``meta``: scales and zero points; ``residual``: tokens in full precision, in the model's
            dtype; ``other``: layers that are not quantised; ``total``: their sum; ``dense16``: what a 16-bit cache of
            the same tokens would take, other layers as they are; ``ratio``: ``dense16 / total``; ``allocated``: with
            the spare room of growing buffers, at most an eighth (or ``residual_length`` tokens) more than ``packed``
            and ``meta``. The dense copy of one layer that attention other than ``"kivi"`` makes for a moment is not
            part of the cache, and not counted.
        """
        total = dict.fromkeys(("packed", "meta", "residual", "other", "allocated", "dense16"), 0)
        for layer in self.layers:
            if isinstance(layer, KIVILayer):
                for name, size in layer.memory().items():
                    total[name] += size
            else:
                held = sum(t.nbytes for t in vars(layer).values() if isinstance(t, Tensor) and t.ndim > 1)
                for name in ("other", "allocated", "dense16"):
                    total[name] += held
        used = total["packed"] + total["meta"] + total["residual"] + total["other"]
        return {**total, "total": used, "ratio": total["dense16"] / used if used else 1.0}

    def save(self, folder: str | Path) -> Path:
        """Write options and tokens to a folder, as JSON and safetensors; :meth:`load` reads them.

        Raises
        ------
        ValueError
            A layer is neither quantised nor a plain full-precision one (sliding windows, say).
        """
        tensors: dict[str, Tensor] = {}
        lengths: list[list[int]] = []
        for index, layer in enumerate(self.layers):
            if type(layer) not in (KIVILayer, DynamicLayer):
                raise ValueError(f"layer {index} is a {type(layer).__name__}, which save() does not support")
            stores = (layer.key_store, layer.value_store) if isinstance(layer, KIVILayer) else ()
            lengths.append([store.length for store in stores])
            if not layer.is_initialized:
                continue
            assert layer.keys is not None and layer.values is not None
            tensors[f"{index}.keys"], tensors[f"{index}.values"] = layer.keys, layer.values
            if isinstance(layer, KIVILayer) and layer.first_real is not None:
                tensors[f"{index}.first_real"] = layer.first_real
            for name, store in zip(("key", "value"), stores):
                fields = ("dense",) if isinstance(store, SimulatedStore) else ("codes", "scale", "zero")
                if store.length:
                    store.map(lambda t: t)  # leaves the spare room behind
                    tensors |= {f"{index}.{name}_{f}": getattr(store, f) for f in fields}
        config = {**self.options, "meta_dtype": str(self.options["meta_dtype"]).removeprefix("torch.")}
        return save_state(
            folder, "KIVICache", {"options": config, "skip_layers": self.skip_layers, "lengths": lengths}, tensors
        )

    @classmethod
    def load(cls, folder: str | Path, config: Any) -> KIVICache:
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
        state, tensors = load_state(folder, "KIVICache", torch_tensors=True)
        options = {**state["options"], "meta_dtype": getattr(torch, state["options"]["meta_dtype"])}
        cache = cls(config, skip_layers=state["skip_layers"], **options)
        if len(cache.layers) != len(state["lengths"]):
            raise ValueError(
                f"{folder} holds a cache of {len(state['lengths'])} layers, but config is of a model "
                f"with {len(cache.layers)}"
            )
        for index, (layer, lengths) in enumerate(zip(cache.layers, state["lengths"])):
            if f"{index}.keys" not in tensors:
                continue
            keys, values = tensors[f"{index}.keys"], tensors[f"{index}.values"]
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if not isinstance(layer, KIVILayer):
                continue
            layer.first_real = tensors.get(f"{index}.first_real")
            for name, length in zip(("key", "value"), lengths):
                store = getattr(layer, f"{name}_store")
                store.length = length
                for field in ("dense", "codes", "scale", "zero"):
                    if f"{index}.{name}_{field}" in tensors:
                        setattr(store, field, tensors[f"{index}.{name}_{field}"])
        return cache


def cache_bytes(
    length: int,
    head_dim: int,
    *,
    bits: int = 2,
    group_size: int = 32,
    residual_length: int = 128,
    meta_bytes: int = 2,
    element_bytes: int = 2,
) -> float:
    """Closed form of the bytes that a :class:`KIVICache` holds for one sequence, layer and key-value head.

    ``D * [(n_k + n_v) * (bits/8 + 2 * meta_bytes / G) + (2 l - n_k - n_v) * element_bytes]`` with
    ``n_k = l - l mod R`` and ``n_v = max(0, l - R)``. A 16-bit cache takes ``4 l D``.
    """
    keys, values = length - length % residual_length, max(0, length - residual_length)
    packed = (keys + values) * (bits / 8 + 2 * meta_bytes / group_size)
    return head_dim * (packed + (2 * length - keys - values) * element_bytes)
