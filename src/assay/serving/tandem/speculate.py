"""Generation with a tandem: the drafter and its cache, lossless verification by transformers, and drafting alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.candidate_generator import CandidateGenerator

from assay.serving.tandem.adapters import call, positions_of, rotations, step, unwrapped
from assay.serving.tandem.router import Router, confident

if TYPE_CHECKING:
    from assay.serving.tandem.model import TandemModel


class Drafter:
    """The secondary with its cache: projected entries for tokens that the primary has read, own ones after them.

    Parameters
    ----------
    model
        The tandem.
    mask
        ``[batch, tokens]`` of the prompt, with zeros for tokens that nobody sees; ``None`` if there are none.
    """

    def __init__(self, model: TandemModel, mask: Tensor | None = None) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.secondary.config)
        self.mask = None if mask is None or bool(mask.all()) else mask.long()
        self.read, self.own = 0, 0
        self._turns: list[tuple[Tensor, Tensor]] = []

    def _positions(self, start: int, count: int, batch: int, device: torch.device) -> Tensor:
        if self.mask is not None:
            return positions_of(self._seen(start + count))[:, start:]
        return torch.arange(start, start + count, device=device).expand(batch, -1)

    def _seen(self, length: int) -> Tensor:
        """The mask of the first tokens; all that come after the prompt are seen."""
        assert self.mask is not None
        more = max(0, length - self.mask.shape[1])
        return torch.nn.functional.pad(self.mask, (0, more), value=1)[:, :length]

    def absorb(self, hidden_states: Any, count: int) -> None:
        """Replace the own entries by projected states of the next ``count`` tokens, the first of those that came."""
        self.cache.crop(-self.own)
        self.own, self._turns = 0, []
        if not count:
            return
        sources = set(self.model.projections.sources)
        states = {source: hidden_states[source][:, :count] for source in sources}
        first = next(iter(states.values()))
        positions = self._positions(self.read, count, len(first), first.device)
        for index, (keys, values) in enumerate(self.model.project(states, positions)):
            self.cache.update(keys, values, index)
        self.read += count

    def _turn(self, token: Tensor) -> tuple[Tensor, Tensor] | None:
        """The rotation of the next own token; those of a whole draft are computed at once."""
        if self.own >= len(self._turns):
            count = max(8, self.own + 1)
            positions = self._positions(self.read, count, 1, token.device)
            found = rotations(self.model.secondary, positions)
            if found is None:
                return None
            cos, sin = found
            self._turns = list(zip(cos.split(1, 1), sin.split(1, 1)))
        return self._turns[self.own]

    def step(self, token: Tensor) -> Tensor:
        """Logits ``[batch, vocabulary]`` in float32 after one more own token ``[batch, 1]``."""
        place = self.read + self.own
        if self.mask is None and (turn := self._turn(token)) is not None:
            self.own += 1
            return step(self.model.secondary, token, self.cache, turn).float()
        positions = self._positions(place, 1, len(token), token.device)
        mask = None if self.mask is None else self._seen(place + 1)
        out = call(self.model.secondary, token, self.cache, position_ids=positions, attention_mask=mask)
        self.own += 1
        return out.logits[:, -1].float()


class TandemCandidateGenerator(CandidateGenerator):
    """Drafts for the assisted decoding of ``transformers``; :meth:`TandemModel.generate` sets it up.

    A round: own entries of the last draft leave the secondary's cache, projected states of the tokens that were
    accepted come in their place, and drafting begins with the newest token, which the primary has not read yet.
    Acceptance (greedy: the longest prefix that agrees; sampled: ``min(1, p_primary / p_draft)``, and the residual
    distribution on rejection), logits processors, stopping and streaming are those of transformers.

    Parameters
    ----------
    model
        The tandem.
    draft_length
        Most tokens that are drafted in a round.
    adaptive
        A :class:`Router` or a probability; drafting stops after a token that it does not trust.
    generation_config, logits_processor, model_kwargs
        As ``transformers`` gives them to a candidate generator.
    """

    requires_model_outputs = True
    model_kwargs_overrides = {"output_hidden_states": True}  # noqa: RUF012 (the form that transformers reads)

    def __init__(
        self,
        model: TandemModel,
        draft_length: int,
        adaptive: Router | float | None = None,
        *,
        generation_config: Any,
        logits_processor: Any = None,
        model_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self.model, self.draft_length, self.adaptive = model, draft_length, adaptive
        self.processors: Any = LogitsProcessorList() if logits_processor is None else logits_processor
        self.samples, self.longest = bool(generation_config.do_sample), generation_config.max_length
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.stops = set() if eos is None else set(eos.flatten().tolist())
        self.drafter = Drafter(model, (model_kwargs or {}).get("attention_mask"))
        self.rounds: list[tuple[int, int]] = []
        self._drafted = 0

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens so far with a draft behind them, and (when sampling) the logits that the draft was drawn from."""
        self._drafted = 0
        if is_first_iteration or model_outputs is None:
            return input_ids, None  # the primary has not read the prompt
        length = input_ids.shape[1]
        count = min(self.draft_length, self.longest - length - 1)
        self.drafter.absorb(model_outputs.hidden_states, length - 1 - self.drafter.read)
        if count < 1:
            return input_ids, None
        ids, logits = input_ids, []
        with torch.no_grad():
            for place in range(count):
                scores = self.processors(ids, self.drafter.step(ids[:, -1:]))
                chances = scores.softmax(-1) if self.samples or self.adaptive is not None else None
                if self.samples:
                    assert chances is not None
                    token = torch.multinomial(chances, 1)
                else:
                    token = scores.argmax(-1, keepdim=True)
                logits.append(scores)
                ids = torch.cat([ids, token], 1)
                if self.stops and int(token) in self.stops:
                    break
                if chances is not None and not confident(self.adaptive, chances, token, place):
                    break
        self._drafted = ids.shape[1] - length
        return ids, torch.stack(logits, 1) if self.samples else None

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Note how many of the drafted tokens were accepted."""
        if self._drafted:
            self.rounds.append((self._drafted, int(num_matches)))


@contextlib.contextmanager
def drafting(
    model: TandemModel, draft_length: int = 4, adaptive: Router | float | None = None
) -> Iterator[list[TandemCandidateGenerator]]:
    """Let ``model.primary.generate(..., assistant_model=model.secondary)`` draft with the tandem.

    Gives the list of candidate generators that were made, whose ``rounds`` tell tokens drafted and accepted.
    """
    made: list[TandemCandidateGenerator] = []

    def make(generation_config: Any, logits_processor: Any, model_kwargs: Any, **kwargs: Any) -> Any:
        made.append(
            TandemCandidateGenerator(
                model,
                draft_length,
                adaptive,
                generation_config=generation_config,
                logits_processor=logits_processor,
                model_kwargs=model_kwargs,
            )
        )
        return made[-1]

    primary = unwrapped(model.primary)
    primary._get_candidate_generator = make  # transformers has no registry; an attribute hides the method
    try:
        yield made
    finally:
        del primary._get_candidate_generator


def generate(
    model: TandemModel, inputs: Tensor, draft_length: int, adaptive: Router | float | None, kwargs: dict[str, Any]
) -> Any:
    """Speculative generation; see :meth:`TandemModel.generate`."""
    if inputs.ndim != 2 or not inputs.shape[1]:
        raise ValueError(f"inputs must be [1, tokens] with at least one token, not {tuple(inputs.shape)}")
    if inputs.shape[0] != 1:
        raise ValueError(
            f"inputs hold {inputs.shape[0]} sequences, and transformers verifies one at a time; generate them one by "
            "one, or with speculative=False"
        )
    if isinstance(adaptive, bool) or not (adaptive is None or isinstance(adaptive, Router | float | int)):
        raise ValueError(f"adaptive must be a Router, a probability or None, not {adaptive!r}")
    if isinstance(adaptive, float | int) and not 0 <= adaptive <= 1:
        raise ValueError(f"adaptive as a probability must lie in [0, 1], not {adaptive}")
    for name in ("num_beams", "num_return_sequences"):
        if (kwargs.get(name) or 1) > 1:
            raise ValueError(f"{name} must be 1 for speculative generation, not {kwargs[name]}")
    with drafting(model, draft_length, adaptive) as made:
        out = model.primary.generate(inputs, assistant_model=model.secondary, **kwargs)
    if not made:  # the text would be right, but drafted by the secondary alone
        raise RuntimeError(
            f"{type(model.primary).__name__}.generate() did not ask for the tandem's drafts; give the model inside it "
            "as primary"
        )
    return out


@torch.no_grad()
def generate_alone(
    model: TandemModel,
    inputs: Tensor,
    block_size: int,
    free_token: bool = False,
    *,
    attention_mask: Tensor | None = None,
    max_new_tokens: int = 20,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The secondary's own tokens ``[batch, prompt + new]``; see :meth:`TandemModel.generate`."""
    if inputs.ndim != 2 or not inputs.shape[1]:
        raise ValueError(f"inputs must be [batch, tokens] with at least one token, not {tuple(inputs.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, but {max_new_tokens} came")
    if attention_mask is not None and not bool(attention_mask[:, -1].all()):
        raise ValueError("attention_mask must have its zeros on the left: prompts must end where generation begins")
    processors: Any = LogitsProcessorList()
    if do_sample:
        if temperature != 1:
            processors.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            processors.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            processors.append(TopPLogitsWarper(top_p))
    own = unwrapped(model.primary).generation_config
    eos = own.eos_token_id if eos_token_id is None else eos_token_id
    stops = torch.tensor([] if eos is None else [eos], device=inputs.device).flatten()
    pads = (pad_token_id, own.pad_token_id, int(stops[0]) if len(stops) else 0)
    pad = next(token for token in pads if token is not None)
    ids, mask = inputs, attention_mask
    alive = torch.ones(len(ids), 1, dtype=torch.bool, device=ids.device)
    large = DynamicCache(config=model.primary.config)
    drafter = Drafter(model, mask)
    end = ids.shape[1] + max_new_tokens

    def choose(logits: Tensor) -> None:
        nonlocal ids, mask, alive
        scores = processors(ids, logits.float())
        if do_sample:
            token = torch.multinomial(scores.softmax(-1), 1, generator=generator)
        else:
            token = scores.argmax(-1, keepdim=True)
        token = torch.where(alive, token, pad)
        ids = torch.cat([ids, token], 1)
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        alive = alive & ~torch.isin(token, stops)

    while ids.shape[1] < end and bool(alive.any()):
        # The primary reads all but the newest token, which begins the next block; or that one as well.
        stop = ids.shape[1] - (0 if free_token else 1)
        if stop > drafter.read:
            new = ids[:, drafter.read : stop]
            known = None if drafter.mask is None else drafter._seen(stop)
            positions = drafter._positions(drafter.read, new.shape[1], len(new), new.device)
            out = model.read(new, known, large, position_ids=positions)
            drafter.absorb(out.hidden_states, new.shape[1])
            if free_token:
                choose(out.logits[:, -1])
        for _ in range(block_size):
            if ids.shape[1] >= end or not bool(alive.any()):
                break
            choose(drafter.step(ids[:, -1:]))
    return ids
