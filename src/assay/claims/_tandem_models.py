"""What the claim of tandem trains and measures: drafters of one large model, from the same start on the same data."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

EXTRA_STEPS, MOST_EXTRA = 200, 3
#: Positions in a drafted block whose agreement with the large model is reported.
POSITIONS = 4


class Source(Protocol):
    """Sequences for training and test."""

    def draw(self, count: int, random: np.random.Generator) -> Any:
        """``[count, length]`` for training."""
        ...

    def held(self, count: int, random: np.random.Generator) -> Any:
        """``[at most count, length]`` for test."""
        ...


@dataclass(frozen=True)
class Recipe:
    """How every drafter is trained, and how all are tested. The same for all arms."""

    steps: int
    batch: int
    lr: float
    lr_projection: float
    init: str
    block_size: int
    draft_length: int
    windows: int
    prompts: int
    new_tokens: int


@dataclass
class Duel:
    """What all arms of a replicate share: the large model, the small one before training, data, and what is trained.

    ``memo`` keeps trained drafters and reference outputs for the arms that need them again. ``mid_size`` trains a
    model between the two, which owes nothing to the large one.
    """

    primary: Any
    secondary: Any
    source: Source
    recipe: Recipe
    seed: int
    device: str
    mid_size: Callable[[], Any] | None = None
    memo: dict[Any, Any] = field(default_factory=dict)

    def random(self, purpose: int) -> np.random.Generator:
        """A random state for a purpose: training data, test data, ..."""
        return np.random.default_rng([self.seed, purpose])

    def batches(self, steps: int) -> Iterator[torch.Tensor]:
        """Batches for training, ``[batch, length]``; the same ones for every arm."""
        import torch

        random = self.random(1)
        for _ in range(steps):
            yield torch.from_numpy(self.source.draw(self.recipe.batch, random)).to(self.device)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, which is called once."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def held(self) -> torch.Tensor:
        """Sequences for test, ``[windows, length]``."""
        import torch

        return self.remember(
            "held",
            lambda: torch.from_numpy(self.source.held(self.recipe.windows, self.random(2))).to(self.device),
        )

    def prompts(self, *, tuning: bool = False) -> list[torch.Tensor]:
        """First halves ``[1, length // 2]`` of held-out sequences, or of other ones for what is chosen by trying."""
        import torch

        count = self.recipe.prompts
        if tuning:
            rows = torch.from_numpy(self.source.draw(count, self.random(3))).to(self.device)
        else:
            rows = self.held[-count:]
        return [row[None, : rows.shape[1] // 2] for row in rows]


# --- training ---------------------------------------------------------------------------------------------------------


def small_llama(vocabulary: int, width: int, layers: int, heads: int, seed: int) -> Any:
    """A Llama without special tokens, with the initial weights that ``torch.nn`` modules have by default.

    With the small ones that language models start from, the induction task takes several times as many steps.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        for module in model.modules():
            if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
                module.reset_parameters()
        if model.config.pad_token_id is not None:
            model.model.embed_tokens.weight.data[0].normal_()  # symbol 0 is one like the others
            model.model.embed_tokens.padding_idx = None
    return model.eval()


def optimise(
    groups: list[dict[str, Any]], steps: int, loss_of: Callable[[torch.Tensor, int], torch.Tensor], data: Any
) -> None:
    """AdamW with weight decay 0.01, warm-up over a tenth of the steps, cosine to a tenth, gradients clipped to 1."""
    import torch

    parameters = [p for group in groups for p in group["params"]]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.01, fused=parameters[0].device.type in ("cpu", "cuda"))
    warmup = max(1, steps // 10)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    for step, ids in enumerate(data):
        optimiser.zero_grad(set_to_none=True)
        loss_of(ids, step).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        schedule.step()


def train_from_scratch(model: Any, source: Source, steps: int, seed: int, least: float) -> float:
    """Train a model from scratch; go on while its accuracy on the second half of new chains is below ``least``.

    Returns the accuracy, which may have stayed below.
    """
    import torch

    from assay.serving.tandem import tandem_loss

    random, accuracy = np.random.default_rng([seed, 0]), 0.0
    test = torch.from_numpy(source.held(128, np.random.default_rng([seed, 4])))

    def batches(count: int) -> Iterator[torch.Tensor]:
        return (torch.from_numpy(source.draw(32, random)) for _ in range(count))

    def loss_of(ids: torch.Tensor, step: int) -> torch.Tensor:
        return tandem_loss(model(ids).logits, ids)

    for part in range(1 + MOST_EXTRA):
        count = EXTRA_STEPS if part else steps
        model.train()
        optimise([{"params": list(model.parameters()), "lr": 5e-3}], count, loss_of, batches(count))
        model.eval()
        with torch.inference_mode():
            right = model(test).logits[:, :-1].argmax(-1) == test[:, 1:]
        accuracy = right[:, right.shape[1] // 2 :].float().mean().item()
        if accuracy > least:
            break
    return accuracy


def drafter(duel: Duel, kind: str) -> Any:
    """The trained drafter of a kind: a causal language model for "small-...", a tandem for "tandem-..."."""

    def make() -> Any:
        model = untrained(duel, kind)
        _train(duel, model, kind)
        return model.eval()

    return duel.remember(kind, make)


def untrained(duel: Duel, kind: str) -> Any:
    """The drafter before training: a copy of the small model, alone or with new projections."""
    secondary = copy.deepcopy(duel.secondary)
    if kind.startswith("small"):
        return secondary
    from assay.serving import TandemConfig, TandemModel

    layer_map = other_layers(duel.primary, secondary) if kind == "tandem-layer" else "last"
    return TandemModel(duel.primary, secondary, TandemConfig(block_size=duel.recipe.block_size, layer_map=layer_map))


def other_layers(primary: Any, secondary: Any) -> list[int]:
    """The layers that a uniform map takes; the one before the last where that map is the default again."""
    large, small = (m.config.get_text_config(decoder=True).num_hidden_layers for m in (primary, secondary))
    uniform = [round((i + 1) * large / small) for i in range(small)]
    return [max(1, large - 1)] * small if set(uniform) == {large} else uniform


def _train(duel: Duel, model: Any, kind: str) -> None:
    """Cross-entropy in the first half of the steps, and for distilled drafters half of it, half KL, in the second."""
    import torch

    from assay.serving.tandem import tandem_loss

    recipe = duel.recipe
    tandem = kind.startswith("tandem")
    distils = kind.endswith("distil")
    if tandem:
        model.initialise(next(iter(duel.batches(1))), init=recipe.init)
    secondary = [p for p in (model.secondary if tandem else model).parameters() if p.requires_grad]
    groups = [{"params": secondary, "lr": recipe.lr}]
    if tandem:
        groups.append({"params": list(model.projections.parameters()), "lr": recipe.lr_projection})
    sizes = duel.random(5).integers(1, 9, size=recipe.steps)

    def loss_of(ids: torch.Tensor, step: int) -> torch.Tensor:
        mixed = distils and step >= recipe.steps // 2
        if tandem:
            out = model(ids, block_size=int(sizes[step]) if kind == "tandem-random" else None)
            logits, teacher = out.logits, out.primary_logits
        else:
            logits, teacher = model(input_ids=ids, use_cache=False).logits, None
        if mixed and teacher is None:
            with torch.no_grad():
                teacher = duel.primary(input_ids=ids, use_cache=False).logits
        return tandem_loss(logits, ids, teacher, 0.5 if mixed else 0.0)

    model.train()
    optimise(groups, recipe.steps, loss_of, duel.batches(recipe.steps))


# --- measuring --------------------------------------------------------------------------------------------------------


def predictions(duel: Duel, model: Any, block_size: int | None = None) -> Any:
    """Logits of a drafter on the held-out sequences, in the parallel form."""
    import torch

    with torch.inference_mode():
        if hasattr(model, "projections"):
            return model(duel.held, block_size=block_size).logits.float()
        return model(input_ids=duel.held).logits.float()


def reference(duel: Duel) -> Any:
    """Logits of the large model on the held-out sequences."""
    return duel.remember("reference", lambda: predictions(duel, duel.primary))


def quality(duel: Duel, logits: Any, block_size: int) -> dict[str, float]:
    """Cross-entropy, accuracy, agreement and distance from the large model, on the second half of the sequences.

    ``agree_i``: agreement of tokens that come ``i``-th in their block. ``prefix``: tokens that a draft of
    :data:`POSITIONS` would have got accepted, given the text, greedily.
    """
    ids, theirs = duel.held, reference(duel)
    half = ids.shape[1] // 2
    ours, theirs, next_ids = logits[:, half:-1], theirs[:, half:-1], ids[:, half + 1 :]
    log = ours.log_softmax(-1)
    same = ours.argmax(-1) == theirs.argmax(-1)
    found = {
        "ce": -log.gather(-1, next_ids[..., None]).mean().item(),
        "accuracy": (ours.argmax(-1) == next_ids).float().mean().item(),
        "agreement": same.float().mean().item(),
        "tv": (log.exp() - theirs.softmax(-1)).abs().sum(-1).mean().item() / 2,
    }
    if block_size == POSITIONS:
        start = -half % POSITIONS
        blocks = same[:, start : start + (same.shape[1] - start) // POSITIONS * POSITIONS]
        blocks = blocks.reshape(len(blocks), -1, POSITIONS).float()
        found |= {f"agree_{i + 1}": blocks[..., i].mean().item() for i in range(POSITIONS)}
        found["prefix"] = blocks.cumprod(-1).sum(-1).mean().item()
    return found


@dataclass(frozen=True)
class Drafted:
    """Speculative decoding of the prompts: tokens drafted and accepted by round, and whether it was lossless."""

    rounds: tuple[tuple[int, int], ...]
    identical: float

    @property
    def accepted(self) -> float:
        """Accepted tokens in a round."""
        return sum(a for _, a in self.rounds) / max(1, len(self.rounds))

    @property
    def drafted(self) -> float:
        """Drafted tokens in a round."""
        return sum(d for d, _ in self.rounds) / max(1, len(self.rounds))


def seen(prompt: Any) -> dict[str, Any]:
    """A mask of ones: transformers would take the symbol 0, which is one like the others, for padding."""
    import torch

    return {"attention_mask": torch.ones_like(prompt)}


def plain_output(duel: Duel, tuning: bool) -> list[Any]:
    """What the large model says on its own, greedily, after each prompt."""

    def make() -> list[Any]:
        options = {"max_new_tokens": duel.recipe.new_tokens, "do_sample": False, "pad_token_id": 0}
        return [duel.primary.generate(p, **options, **seen(p)) for p in duel.prompts(tuning=tuning)]

    return duel.remember(("plain", tuning), make)


def decode(duel: Duel, model: Any, draft_length: int, adaptive: Any = None, *, tuning: bool = False) -> Drafted:
    """Decode all prompts greedily with a drafter, each to the same length, and compare with the large model alone.

    A small model drafts as assistant of transformers' own assisted generation, with as many tokens in each round;
    ``adaptive`` is then its confidence threshold.
    """
    import torch

    from assay.serving.tandem import drafting

    tandem = hasattr(model, "projections")
    if not tandem:
        options = model.generation_config
        options.num_assistant_tokens, options.num_assistant_tokens_schedule = draft_length, "constant"
        options.assistant_confidence_threshold = adaptive or 0.0
    assistant = model.secondary if tandem else model
    rounds: list[tuple[int, int]] = []
    same = []
    for prompt, expected in zip(duel.prompts(tuning=tuning), plain_output(duel, tuning)):
        with drafting(model, draft_length, adaptive) if tandem else assisting(duel.primary) as made:
            out = duel.primary.generate(
                prompt,
                assistant_model=assistant,
                max_new_tokens=duel.recipe.new_tokens,
                do_sample=False,
                pad_token_id=0,
                **seen(prompt),
            )
        rounds += made[0].rounds
        same.append(float(torch.equal(out, expected)))
    return Drafted(tuple(rounds), sum(same) / len(same))


@contextlib.contextmanager
def assisting(primary: Any) -> Iterator[list[Any]]:
    """Note what transformers' assisted generation drafts and accepts, as ``rounds`` of the generators that it makes."""
    made: list[Any] = []
    real = type(primary)._get_candidate_generator

    def make(**kwargs: Any) -> Any:
        generator = real(primary, **kwargs)
        generator.rounds = []
        drafts, update = generator.get_candidates, generator.update_candidate_strategy

        def get_candidates(input_ids: torch.Tensor, **more: Any) -> Any:
            out = drafts(input_ids, **more)
            generator.drafted = out[0].shape[1] - input_ids.shape[1]
            return out

        def update_candidate_strategy(input_ids: torch.Tensor, scores: Any, num_matches: Any) -> None:
            if generator.drafted:
                generator.rounds.append((generator.drafted, int(num_matches)))
            update(input_ids, scores, num_matches)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
        made.append(generator)
        return generator

    primary._get_candidate_generator = make
    try:
        yield made
    finally:
        del primary._get_candidate_generator
