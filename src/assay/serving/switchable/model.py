"""A transformer whose attention blocks, feed-forward blocks and input tokens are switched off for each input."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from assay._state import load_state, save_state
from assay.serving._saved import reference, saved_model
from assay.serving.switchable.decisions import Decisions, relative_cost, sizes
from assay.serving.switchable.layers import Active, FirstLayerDone, Mixed, install, running, stacks
from assay.serving.switchable.policy import Policy, log_probability

CANDIDATES = ("attention", "ffn", "token")
Mode = Literal["mask", "bucket"]


@dataclass(frozen=True)
class SwitchableConfig:
    """Options of a :class:`SwitchableModel`.

    Attributes
    ----------
    candidates
        What may be switched off: any of ``"attention"``, ``"ffn"`` and ``"token"``; default all three.
    hidden
        Hidden units of the policy; default 64.
    eps
        How much the quality loss may exceed that of the full model; default 0: quality first (lexicographic).
    alpha, beta, lambda_max
        Of :func:`~assay.serving.switchable.barrier_direction`; defaults 1, 1 and 50.
    min_layers
        First layers of a stack that always run; at least and by default 1.
    split_cross
        Decide on a decoder's cross-attention apart from its self-attention; default false.
    special_tokens
        Tokens that are never dropped, besides those that the model's configuration names as beginning, end and padding.

    Notes
    -----
    Only the abstract-level description of the paper was open to us: the decision space, the policy's input, policy
    gradient and the lexicographic constraint are the paper's; the sizes and defaults are ours.
    """

    candidates: tuple[str, ...] = CANDIDATES
    hidden: int = 64
    eps: float = 0.0
    alpha: float = 1.0
    beta: float = 1.0
    lambda_max: float = 50.0
    min_layers: int = 1
    split_cross: bool = False
    special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidates", tuple(self.candidates))
        object.__setattr__(self, "special_tokens", tuple(self.special_tokens))
        if not self.candidates or not set(self.candidates) <= set(CANDIDATES):
            raise ValueError(f"candidates must be some of {CANDIDATES}, not {self.candidates}")
        for name, least in (("hidden", 1), ("min_layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("eps", "alpha", "beta", "lambda_max"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, but {getattr(self, name)} came")


def make_switchable(model: Any, config: SwitchableConfig | None = None) -> SwitchableModel:
    """Let the blocks of a ``transformers`` model be switched off; see :class:`SwitchableModel`."""
    return SwitchableModel(model, config)


class SwitchableModel(nn.Module):
    """A causal or encoder-decoder model with a policy that switches off what an input can do without.

    The first layer of each stack always runs. From its output a small policy decides, once for each input, which
    attention and feed-forward blocks of the later layers run and which input tokens stay; a block that does not run is
    the identity (post-norm models: its norm belongs to it). Dropped tokens keep the state that the first layer gave
    them, and nobody sees them.

    The model's layers are changed in place, without copying weights: where nothing is switched (:meth:`full`, or the
    model called directly), they compute the same bits as before.

    Parameters
    ----------
    model
        A Llama, Mistral, Qwen2, Qwen3, GPT-2, BART or T5 with a head. Tokens of a T5 cannot be dropped.
    config
        Options.

    Attributes
    ----------
    model, policy, options
        The model, the :class:`~assay.serving.switchable.Policy`, and the options.
    last_decisions
        What ran in the last :meth:`forward` or :meth:`generate`.

    Raises
    ------
    NotImplementedError
        The type of the model is not supported.
    ValueError
        It has fewer than two layers, or nothing to decide on.

    Notes
    -----
    Source: "Switchable Decision: Dynamic Neural Generation Networks" (ICML 2024).
    """

    def __init__(self, model: Any, config: SwitchableConfig | None = None) -> None:
        super().__init__()
        self.options = config or SwitchableConfig()
        found = stacks(model)
        if any(len(layers) < 2 for _, layers in found):
            raise ValueError("model has a stack of fewer than two layers: there is nothing to switch after the first")
        text = model.config.get_text_config(decoder=True)
        slides = set(getattr(text, "layer_types", None) or ["full_attention"]) != {"full_attention"}
        if "token" in self.options.candidates and (slides or getattr(text, "sliding_window", None)):
            raise NotImplementedError(
                "tokens cannot be dropped from a model with sliding windows, which count tokens; leave 'token' out of "
                "candidates"
            )
        if "token" in self.options.candidates and model.config.model_type == "t5":
            raise NotImplementedError(
                "tokens of a T5 cannot be dropped: its layers share biases of relative positions; leave 'token' out of "
                "candidates"
            )
        self.layers = install(model)
        self.model = model
        self.encodes = len(found) > 1
        starts = [0, len(found[0][1])][: len(found)]
        least = self.options.min_layers
        fixed = {s + i for s, (_, layers) in zip(starts, found) for i in range(min(least, len(layers)))}
        free = [i for i in range(self.layers) if i not in fixed]
        self._slots: dict[str, list[int]] = {
            "attn": free if "attention" in self.options.candidates else [],
            "ffn": free if "ffn" in self.options.candidates else [],
            "cross": [i for i in free if i >= starts[-1]] if self.encodes and self._splits() else [],
        }
        count = sum(map(len, self._slots.values()))
        if not count and "token" not in self.options.candidates:
            raise ValueError(f"min_layers={least} leaves no block of the model's {self.layers} layers to decide on")
        where = next(model.parameters())
        self.policy = Policy(
            sizes(model.config)["width"], count, self.options.hidden, "token" in self.options.candidates
        ).to(where.device)
        self.last_decisions: Decisions | None = None

    def _splits(self) -> bool:
        return self.options.split_cross and "attention" in self.options.candidates

    @property
    def config(self) -> Any:
        """The configuration of the model."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @contextlib.contextmanager
    def full(self) -> Iterator[SwitchableModel]:
        """Let everything run for a while."""
        self._full, before = True, getattr(self, "_full", False)
        try:
            yield self
        finally:
            self._full = before

    # -- deciding ---------------------------------------------------------------------------------------------------

    def protected(self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Tokens that are never dropped, ``[batch, tokens]``: special ones, the first, the last of the prompt, targets.

        ``labels`` are those of a decoder-only model: every token from the one that predicts the first of them stays.
        """
        special = set(self.options.special_tokens)
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self.config, name, None)
            special |= set(value if isinstance(value, Sequence) else [] if value is None else [value])
        kept = torch.isin(input_ids, torch.tensor(sorted(special), device=input_ids.device, dtype=input_ids.dtype))
        real = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
        place = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        first = torch.where(real, place, input_ids.shape[1]).amin(1, keepdim=True)
        last = torch.where(real, place, -1).amax(1, keepdim=True)
        kept = kept | (place == first) | (place == last)
        if labels is not None and not self.encodes:
            target = labels != -100
            start = torch.where(target, place, input_ids.shape[1]).amin(1, keepdim=True)
            kept = kept | (place >= start - 1)
        return kept & real

    def view(self, input_ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor | None:
        """Tokens that the policy may look at, ``[batch, tokens]``: those that are real, and before the first target."""
        if labels is None or self.encodes:
            return mask
        place = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        start = torch.where(labels != -100, place, input_ids.shape[1]).amin(1, keepdim=True)
        seen = place < start
        return seen if mask is None else seen & mask.bool()

    def _from(self, blocks: Tensor, tokens: Tensor | None, kept: Tensor, real: Tensor) -> Decisions:
        """Decisions from what the policy takes; blocks that are not decided on run."""
        ones = torch.ones(len(blocks), self.layers, dtype=torch.bool, device=blocks.device)
        parts = {"attn": ones, "ffn": ones.clone(), "cross": ones.clone()}
        at = 0
        for name, slots in self._slots.items():
            parts[name][:, slots] = blocks[:, at : at + len(slots)]
            at += len(slots)
        cross = parts["cross"] if self._slots["cross"] else None
        stay = None if tokens is None else (tokens | kept) & real
        return Decisions(parts["attn"], parts["ffn"], stay, cross)

    def choose(
        self,
        states: Tensor,
        kept: Tensor,
        mask: Tensor | None = None,
        sample: bool = False,
        generator: torch.Generator | None = None,
        view: Tensor | None = None,
    ) -> tuple[Decisions, Tensor]:
        """Decisions from the first layer's output, and their log-probability ``[batch]`` under the policy.

        ``kept`` are the tokens of :meth:`protected`, ``mask`` is zero for padding, ``view`` (:meth:`view`; default
        ``mask``) for what the policy may not see.
        """
        logits, token_logits = self.policy(states, mask if view is None else view)

        def take(x: Tensor) -> Tensor:
            if not sample:
                return x > 0
            draws = torch.rand(x.shape, generator=generator, device="cpu" if generator is not None else x.device)
            return draws.to(x.device) < x.sigmoid()

        real = torch.ones_like(kept) if mask is None else mask.bool()
        blocks = take(logits.detach())
        tokens = None if token_logits is None else take(token_logits.detach())
        log = log_probability(logits, blocks)
        if token_logits is not None and tokens is not None:
            log = log + log_probability(token_logits, tokens, (real & ~kept).to(log.dtype))
        return self._from(blocks, tokens, kept, real), log

    @torch.no_grad()
    def decide(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        sample: bool = False,
        generator: torch.Generator | None = None,
    ) -> Decisions:
        """What shall run for each row, from one pass of the first layer.

        Parameters
        ----------
        input_ids, attention_mask
            ``[batch, tokens]`` of the prompt, or of the source of an encoder-decoder model.
        labels
            Of a decoder-only model: where the prompt ends (see :meth:`protected`).
        sample, generator
            Draw from the policy instead of taking what is likelier than not.
        """
        kept = self.protected(input_ids, attention_mask, labels)
        # As generate() counts positions behind padding; in training, labels come with the model's own count.
        states = self.first_layer(input_ids, attention_mask, counted=labels is None)
        view = self.view(input_ids, attention_mask, labels)
        return self.choose(states, kept, attention_mask, sample, generator, view)[0]

    def first_layer(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, counted: bool = False) -> Tensor:
        """Output of the first layer, ``[batch, tokens, width]``.

        With ``counted``, positions of a decoder-only model begin after padding, as they do in ``generate()``; otherwise
        they are what the model's ``forward`` makes of a mask.
        """
        target: Any = self.model.get_encoder() if self.encodes else self.model
        given = {"input_ids": input_ids, "attention_mask": attention_mask}
        if counted and attention_mask is not None and not self.encodes:
            given["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        try:
            with running(Active(None, skip=False, stop=True)):
                target(**given)
        except FirstLayerDone as done:
            return done.hidden
        raise RuntimeError("the model's first layer was not reached")

    # -- running ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        decisions: Decisions | Literal["sample"] | None = None,
        mode: Mode = "mask",
        generator: torch.Generator | None = None,
        first: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass, as the model's own ``forward``.

        Parameters
        ----------
        input_ids, attention_mask, labels, **kwargs
            As for the model.
        decisions
            What runs; by default what the policy finds likelier than not, ``"sample"`` draws from it.
        mode
            ``"mask"`` (default): one pass, in which a block is computed for the rows that need it (attention: if
            ``use_cache`` is false; otherwise it is computed for all rows, and dropped) and dropped tokens are masked.
            ``"bucket"``: rows with equal decisions run together, and what does not run is not computed.
        first
            Output of the first layer for these rows, where it is known already (mode "mask", given decisions).
        """
        if mode not in ("mask", "bucket"):
            raise ValueError(f"mode must be 'mask' or 'bucket', not {mode!r}")
        if isinstance(decisions, str) and decisions != "sample":
            raise ValueError(f"decisions must be Decisions, 'sample' or None, not {decisions!r}")
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **kwargs}
        if getattr(self, "_full", False):
            return self.model(**given)
        if isinstance(decisions, Decisions):
            decisions = self._check(decisions, input_ids, attention_mask)
            self.last_decisions = decisions
            if mode == "mask" or len(decisions.buckets()) == 1:
                with running(Active(decisions, skip=mode == "bucket", first=first)):
                    return self.model(**given)
            return self._buckets(decisions, given)
        kept = self.protected(input_ids, attention_mask, labels)
        view = self.view(input_ids, attention_mask, labels)

        def decide(states: Tensor) -> Decisions:
            return self.choose(states, kept, attention_mask, decisions == "sample", generator, view)[0]

        active = Active(None, skip=mode == "bucket", decide=decide)
        try:
            with running(active), torch.set_grad_enabled(torch.is_grad_enabled()):
                out = self.model(**given)
        except Mixed as mixed:
            self.last_decisions = mixed.decisions
            return self._buckets(mixed.decisions, given)
        self.last_decisions = active.decisions
        return out

    def _check(self, decisions: Decisions, input_ids: Tensor, mask: Tensor | None) -> Decisions:
        """The decisions, if they fit; padding is never kept."""
        if not len(input_ids):
            raise ValueError("input_ids hold no rows")
        if decisions.attn.shape != (len(input_ids), self.layers):
            raise ValueError(
                f"decisions must be about {len(input_ids)} rows and {self.layers} layers, "
                f"not {tuple(decisions.attn.shape)}"
            )
        if decisions.tokens is not None and decisions.tokens.shape[1] > input_ids.shape[1]:
            raise ValueError(
                f"decisions are about {decisions.tokens.shape[1]} tokens, but input_ids hold {input_ids.shape[1]}"
            )
        if decisions.tokens is not None and mask is not None:
            real = mask[:, : decisions.tokens.shape[1]].bool()
            return replace(decisions, tokens=decisions.tokens & real)
        return decisions

    def _buckets(self, decisions: Decisions, given: dict[str, Any]) -> Any:
        """Run each group of rows, and put the logits together."""
        batch = len(decisions)
        logits: Tensor | None = None
        labels = given.pop("labels", None)
        if self.encodes and labels is not None and given.get("decoder_input_ids") is None:
            given["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=labels)
        for rows in decisions.buckets():
            part = {k: v[rows] if isinstance(v, Tensor) and len(v) == batch else v for k, v in given.items()}
            with running(Active(decisions.rows(rows), skip=True)):
                out = self.model(**part)
            if logits is None:
                logits = out.logits.new_empty(batch, *out.logits.shape[1:])
            logits = logits.index_copy(0, rows.to(logits.device), out.logits)
        assert logits is not None
        out.logits = logits
        for name in ("cache", "past_key_values"):  # that of the last group alone would be of no use
            if name in out:
                out[name] = None
        if labels is not None:
            ours, wanted = (logits, labels) if self.encodes else (logits[:, :-1], labels[:, 1:])
            out.loss = nn.functional.cross_entropy(ours.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)
        return out

    @torch.no_grad()
    def generate(
        self,
        inputs: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decisions: Decisions | Literal["sample"] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Generate; what runs is decided once for each row and stays, so that caches are consistent.

        Rows with equal decisions are generated together, and nothing that does not run is computed. Everything else is
        as in ``transformers``: sampling, beams, several sequences, padding on the left.

        Parameters
        ----------
        inputs, attention_mask
            ``[batch, tokens]``: prompts, or sources of an encoder-decoder model. ``input_ids`` is another name for
            ``inputs``, so that what a tokenizer returns can be passed on.
        decisions
            As for :meth:`forward`.
        **kwargs
            As for ``generate`` of the model; tensors with a row for each input are split with the rows.

        Returns
        -------
        Tokens ``[batch * num_return_sequences, longest]``, padded on the right.
        """
        inputs = input_ids if inputs is None else inputs
        if inputs is None or inputs.ndim != 2 or not inputs.numel():
            shape = None if inputs is None else tuple(inputs.shape)
            raise ValueError(f"inputs must be [batch, tokens] with at least one token, not {shape}")
        if kwargs.get("return_dict_in_generate"):
            raise ValueError("return_dict_in_generate is not supported: rows are generated in groups")
        if kwargs.get("assistant_model") is not None or kwargs.get("prompt_lookup_num_tokens"):
            raise ValueError("assisted generation takes tokens back, which layers without a cache cannot do")
        if getattr(self, "_full", False):
            return self.model.generate(inputs, attention_mask=attention_mask, **kwargs)
        if not isinstance(decisions, Decisions):
            decisions = self.decide(inputs, attention_mask, sample=decisions == "sample")
        decisions = self._check(decisions, inputs, attention_mask)
        self.last_decisions = decisions
        drops = decisions.tokens is not None and not bool(decisions.tokens.all())
        if drops and kwargs.get("cache_implementation"):
            raise ValueError(
                "cache_implementation must be left out where tokens are dropped: layers hold fewer of them"
            )
        if any(kwargs.get(name) is not None for name in ("cache", "past_key_values")):
            raise ValueError("a cache cannot be given: every group of rows needs one of its own")
        batch, parts = len(inputs), []
        given = kwargs if attention_mask is None else kwargs | {"attention_mask": attention_mask}
        for rows in decisions.buckets():
            part = {k: v[rows] if isinstance(v, Tensor) and len(v) == batch else v for k, v in given.items()}
            with running(Active(decisions.rows(rows), skip=True)):
                out = self.model.generate(inputs[rows], **part)
            parts.append((rows, out if isinstance(out, Tensor) else out.sequences))
        return self._together(parts, batch, kwargs)

    def _together(self, parts: list[tuple[Tensor, Tensor]], batch: int, kwargs: dict[str, Any]) -> Tensor:
        several = len(parts[0][1]) // len(parts[0][0])
        longest = max(tokens.shape[1] for _, tokens in parts)
        config = self.model.generation_config
        pad = kwargs.get("pad_token_id", config.pad_token_id)
        if pad is None:
            stop = kwargs.get("eos_token_id", config.eos_token_id)
            pad = stop[0] if isinstance(stop, Sequence) else 0 if stop is None else stop
        merged = parts[0][1].new_full((batch, several, longest), int(pad))
        for rows, tokens in parts:
            merged[rows, :, : tokens.shape[1]] = tokens.view(len(rows), several, -1)
        return merged.flatten(0, 1)

    def cost(self, decisions: Decisions, inputs: int, outputs: int = 0) -> Tensor:
        """Operations with these decisions over those of the full model, policy included, ``[batch]``."""
        return relative_cost(self.config, inputs, outputs, decisions, self.policy.flops(inputs))

    # -- saving -----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path, *, save_model: bool = False) -> Path:
        """Write options and policy as JSON and safetensors; :meth:`load` reads them.

        The model is kept by reference (the name or folder that it was loaded from), unless ``save_model``.
        """
        folder = Path(folder)
        state = {"options": asdict(self.options), "model": reference(self.model), "encodes": self.encodes}
        written = save_state(folder, "SwitchableModel", state, dict(self.policy.state_dict()))
        if save_model:
            self.model.save_pretrained(folder / "model")
        return written

    @classmethod
    def load(cls, folder: str | Path, model: Any = None) -> SwitchableModel:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        folder
            As given to :meth:`save`.
        model
            The model. By default the one in the folder, else that of the name or path it had when saved, which must be
            on this machine.
        """
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        folder = Path(folder)
        state, tensors = load_state(folder, "SwitchableModel", torch_tensors=True)
        if model is None:
            loader: Any = AutoModelForSeq2SeqLM if state["encodes"] else AutoModelForCausalLM
            model = saved_model(folder, "model", state["model"], loader)
        switched = cls(model, SwitchableConfig(**state["options"]))
        switched.policy.load_state_dict(tensors)
        return switched.eval()


Quality = Callable[[SwitchableModel, dict[str, Tensor], Decisions], Tensor]


def token_loss(
    model: SwitchableModel, batch: dict[str, Tensor], decisions: Decisions, first: Tensor | None = None
) -> Tensor:
    """Mean negative log-likelihood of each row's labels, teacher forced, ``[batch]`` in nat per token.

    ``first`` is the output of the first layer, where it is known.
    """
    labels = batch["labels"]
    given = {"use_cache": False} | {k: v for k, v in batch.items() if k != "labels"}
    if model.encodes and "decoder_input_ids" not in given:
        given["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=labels)
    logits = model(**given, decisions=decisions, first=first).logits
    ours, wanted = (logits, labels) if model.encodes else (logits[:, :-1], labels[:, 1:])
    loss = nn.functional.cross_entropy(ours.float().transpose(1, 2), wanted, ignore_index=-100, reduction="none")
    counted = (wanted != -100).sum(1).clamp(min=1)
    return loss.sum(1) / counted
