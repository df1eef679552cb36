"""A key-value cache with a fixed number of tokens, which may merge the values of those that leave."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)

from assay._state import load_state, save_state
from assay.serving.cam.layer import STATE, EvictionLayer
from assay.serving.cam.merge import CaM
from assay.serving.cam.policies import Policy, check_size, resolve, rule
from assay.serving.cam.rope import rotary_frequencies

PrefillScores = Literal["full", "last", "none"]
# Layer types of a model configuration that keep transformers' own layer class: their cache does not grow with the
# text, or holds something else than keys and values. "full_attention" is what tokens are evicted from.
STANDARD_TYPES = ("sliding_attention", "chunked_attention", "linear_attention", "conv", "dummy")
COUNTERS = ("seen", "used", "count", "newest", "prompt", "evicted")


class EvictionCache(Cache):
    """A key-value cache of ``budget`` tokens for ``transformers`` models, with or without cache merging (CaM).

    A call's attention sees all tokens held and its own. Then whatever is over the budget leaves: a token of every batch
    row and key-value head on its own, chosen by the ``policy``. With ``merge``, the value of the token that leaves may
    go to tokens that stay (see :class:`~assay.serving.cam.CaM`). Tokens keep their original position, and the cache
    counts all tokens that it has seen, so that positions and masks stay right.

    Its attention has to tell it the weights::

        register_eviction_attention()
        model.set_attn_implementation("evict")
        cache = EvictionCache(model.config, policy="streaming", budget=256, merge=CaM(mask="threshold"))
        model.generate(**inputs, past_key_values=cache)

    Parameters
    ----------
    config
        The model's configuration. Layers with sliding-window, chunked or linear attention keep transformers' own
        layer class (with one warning), since their cache does not grow with the text.
    policy
        ``"streaming"`` (default): the first ``n_sink`` and the newest tokens stay. ``"h2o"``: the newest ``n_recent``
        stay, and of the others those with the largest attention so far. ``"scissorhands"``: once the budget is
        exceeded, half of it leaves at once, first the tokens that most of the last 400 queries gave less than the mean
        weight. ``"tova"``: the token with the least attention from the newest query leaves. Or a function of a
        :class:`~assay.serving.cam.CacheState` that returns a rank for every slot, of which the lowest leaves.
    budget
        Tokens held after a call: a count, or as a float a ratio of the prompt (of its first chunk, if the prompt comes
        in chunks) between 0 and 1. No default: it is what you pay.
    n_sink
        First tokens that always stay, count or ratio. Default 4 for "streaming" (StreamingLLM's), else 0.
    n_recent
        Newest tokens that always stay, count or ratio. Default: the rest of the budget for "streaming", half of it for
        "h2o", 10 for "scissorhands" (each its paper's), 0 for "tova".
    merge
        How values are merged; ``None`` (default) drops them.
    prefill_scores
        Which queries of a prompt count towards the attention so far: ``"full"`` (default) all, ``"last"`` the last,
        ``"none"`` none. Only used where something is summed.
    pos_shift
        Count positions inside the cache: keys are rotated, at every step, to where they stand among the tokens held.
        Default false. Only useful for texts beyond the length that the model was trained on, and only for models with
        ordinary rotary embeddings.
    seed
        Of the random masks. They depend on seed, batch row, layer, head and token alone: neither the other rows of a
        batch nor padding changes them.
    first_row
        Number of the first batch row, for those random numbers: row ``b`` of a batch gives what it gives alone with
        ``first_row=b``. Default 0.

    Raises
    ------
    ValueError
        An argument is out of its range; the budget is smaller than ``n_sink + n_recent`` or no larger than ``m``; the
        model's layers or its attention implementation cannot work with this cache. ``update`` raises it when the batch
        changes between calls.
    RuntimeError
        The model's attention does not report its weights: nothing would be evicted.

    Notes
    -----
    For inference: no gradient flows through the cache, and ``torch.compile`` is not supported. Assisted (speculative)
    generation is refused by name: it takes tokens back, but what their arrival evicted is gone. A prompt that comes in
    chunks loses tokens after each chunk, so its result is not that of the prompt in one piece.

    Key-value heads that serve several query heads see the mean of their weights (the paper has one query head each).

    Source: "CaM: Cache Merging for Memory-efficient LLMs Inference" (ICML 2024).
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        policy: str | Policy = "streaming",
        budget: int | float | None = None,
        *,
        n_sink: int | float | None = None,
        n_recent: int | float | None = None,
        merge: CaM | None = None,
        prefill_scores: PrefillScores = "full",
        pos_shift: bool = False,
        seed: int = 0,
        first_row: int = 0,
    ) -> None:
        rule(policy)
        if budget is None:
            raise ValueError("budget is missing: a number of tokens, or a ratio of the prompt as a float")
        check_size(budget, "budget", 2)
        check_size(n_sink, "n_sink", 0)
        check_size(n_recent, "n_recent", 0)
        if merge is not None and not isinstance(merge, CaM):
            raise TypeError(f"merge must be a CaM or None, not {type(merge).__name__}")
        if prefill_scores not in get_args(PrefillScores):
            raise ValueError(f"prefill_scores must be one of {get_args(PrefillScores)}, not {prefill_scores!r}")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed must be an integer, not {seed!r}")
        if not any(isinstance(size, float) for size in (budget, n_sink, n_recent)):
            resolve(policy, budget, n_sink, n_recent, merge.m if merge else None, 0)
        self.options = {
            "policy": policy,
            "budget": budget,
            "n_sink": n_sink,
            "n_recent": n_recent,
            "prefill_scores": prefill_scores,
            "seed": seed,
            "first_row": first_row,
        }
        self.merge, self.pos_shift = merge, pos_shift
        name = getattr(config, "model_type", type(config).__name__)
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"config is of {name!r}, an encoder-decoder model; EvictionCache supports decoders only")
        self.decoder_config = config.get_text_config(decoder=True)
        types, kwargs = get_layer_types_and_kwargs(self.decoder_config)
        if unknown := sorted(set(types) - {"full_attention", *STANDARD_TYPES}):
            raise ValueError(f"config is of {name!r}, whose layers {unknown} hold a cache that nothing can leave")
        if "full_attention" not in types:
            raise ValueError(f"config is of {name!r}, whose layers are all {sorted(set(types))}: nothing to evict")
        if others := sorted(set(types) - {"full_attention", "dummy"}):
            warnings.warn(f"layers {others} of {name!r} keep their own cache, which does not grow", stacklevel=2)
        rotation = rotary_frequencies(self.decoder_config) if pos_shift else None
        layers: list[Any] = []
        for index, (kind, own) in enumerate(zip(types, kwargs)):
            if kind == "full_attention":
                layers.append(EvictionLayer(merge=merge, rotation=rotation, index=index, **self.options))  # type: ignore[arg-type]
            else:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**own))
        super().__init__(layers=layers)
        attention = str(getattr(self.decoder_config, "_attn_implementation", None))
        if "flash" in attention or "flex" in attention:
            raise ValueError(
                f"attention implementation {attention!r} has no weights to choose tokens by; "
                "call register_eviction_attention() and model.set_attn_implementation('evict')"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a layer; see :meth:`EvictionLayer.update`."""
        attention = getattr(self.decoder_config, "_attn_implementation", None)
        if attention not in (None, "evict") and isinstance(self.layers[layer_idx], EvictionLayer):
            raise RuntimeError(
                f"attention implementation {attention!r} does not report its weights, so nothing would be evicted; "
                "call register_eviction_attention() and model.set_attn_implementation('evict')"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Refuse what needs to take tokens back: assisted generation."""
        raise ValueError(
            f"assisted generation takes back tokens that the model rejects, but an EvictionCache (policy "
            f"{self.options['policy']!r}) has already dropped others for them; generate without an assistant"
        )

    def eviction_layers(self) -> list[EvictionLayer]:
        """The layers that tokens are evicted from."""
        return [layer for layer in self.layers if isinstance(layer, EvictionLayer)]

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Tokens seen; without ``layer_idx`` by the first layer that tokens are evicted from."""
        if layer_idx is None or not isinstance(self.layers[layer_idx], CacheLayerMixin):
            return self.eviction_layers()[0].get_seq_length()
        return super().get_seq_length(layer_idx)

    def positions(self, layer_idx: int) -> Tensor:
        """Positions in the text of the tokens that a layer holds, ``[batch, kv_heads, slots]``, sorted; -1 is empty."""
        layer = self.layers[layer_idx]
        if not isinstance(layer, EvictionLayer):
            raise ValueError(f"layer {layer_idx} is a {type(layer).__name__}, from which nothing is evicted")
        if layer.positions is None:
            raise ValueError("the cache is empty")
        return layer.positions[:, :, : layer.used].sort(-1).values

    def memory_footprint(self) -> dict[str, float]:
        """Bytes held, counted from the sizes of the tensors.

        Returns
        -------
        dict
            ``kv``: keys and values of the slots in use (up to ``budget + 1``: one is empty between steps); ``book``:
            positions, scores and counts; ``other``: layers that nothing is evicted from; ``total``: their sum;
            ``allocated``: with spare room; ``dense``: a cache of all tokens seen, in the model's dtype; ``ratio``:
            ``dense / total``.
        """
        total = dict.fromkeys(("kv", "book", "other", "allocated", "dense"), 0)
        for layer in self.layers:
            if not isinstance(layer, EvictionLayer):
                held = sum(t.nbytes for t in vars(layer).values() if isinstance(t, Tensor) and t.ndim > 1)
                for name in ("other", "allocated", "dense"):
                    total[name] += held
                continue
            for name in STATE:
                tensor = getattr(layer, name)
                if tensor is None:
                    continue
                used = tensor[:, :, : layer.used] if tensor.ndim > 2 else tensor
                total["kv" if name in ("keys", "values") else "book"] += used.nbytes
                total["allocated"] += tensor.nbytes
                if name in ("keys", "values"):
                    total["dense"] += used[:, :, :1].nbytes * layer.seen
        held = total["kv"] + total["book"] + total["other"]
        return {**total, "total": held, "ratio": total["dense"] / held if held else 1.0}

    def save(self, folder: str | Path) -> Path:
        """Write options and tokens to a folder, as JSON and safetensors; :meth:`load` reads them.

        Raises
        ------
        ValueError
            The policy is a function, or a layer is not one that tokens are evicted from (sliding windows, say).
        """
        if callable(self.options["policy"]):
            raise ValueError("policy is a function, which save() cannot write; save() needs a policy with a name")
        tensors: dict[str, Tensor] = {}
        counters = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, EvictionLayer):
                raise ValueError(f"layer {index} is a {type(layer).__name__}, which save() does not support")
            counters.append({name: getattr(layer, name) for name in COUNTERS})
            for name in STATE:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[f"{index}.{name}"] = tensor[:, :, : layer.used] if tensor.ndim > 2 else tensor
        config = {
            "options": self.options,
            "merge": asdict(self.merge) if self.merge else None,
            "pos_shift": self.pos_shift,
            "counters": counters,
        }
        return save_state(folder, "EvictionCache", config, tensors)

    @classmethod
    def load(cls, folder: str | Path, config: Any) -> EvictionCache:
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
        state, tensors = load_state(folder, "EvictionCache", torch_tensors=True)
        merge = CaM(**state["merge"]) if state["merge"] else None
        cache = cls(config, merge=merge, pos_shift=state["pos_shift"], **state["options"])
        if len(cache.layers) != len(state["counters"]):
            raise ValueError(
                f"{folder} holds a cache of {len(state['counters'])} layers, but config is of a model "
                f"with {len(cache.layers)}"
            )
        for index, (layer, counters) in enumerate(zip(cache.layers, state["counters"])):
            if f"{index}.keys" not in tensors:
                continue
            layer.lazy_initialization(tensors[f"{index}.keys"], tensors[f"{index}.values"])
            for name in STATE:
                setattr(layer, name, tensors.get(f"{index}.{name}"))
            for name in COUNTERS:
                setattr(layer, name, counters[name])
            if layer.prompt:
                layer.set_sizes(layer.prompt)
        return cache
