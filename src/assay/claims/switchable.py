"""Can a policy that switches blocks off for each input keep a model's quality for less computation (ICML 2024)."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Arm, Claim, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.claims._options import filled
from assay.errors import InputError

if TYPE_CHECKING:
    import torch

    from assay.claims._switchable_arms import Trained

PAPER = Paper(
    title="Switchable Decision: Dynamic Neural Generation Networks",
    authors="Shujian Zhang, Korawat Tanwisuth, Chengyue Gong, Pengcheng He, Mingyuan Zhou",
    venue="ICML 2024",
    url="https://proceedings.mlr.press/v235/zhang24at.html",
)
BLOCKS = ("attention", "ffn")
SEEDS = {"train": 0, "validation": 1, "test": 2}
ENOUGH = 0.95  # exact match that the embedded model must reach before policies are trained for it
WEIGHTS = (0.1, 1.0)  # of the cost, where it is added to the loss
TRY = 200  # fewer steps than these are a try of the machinery, and no model is asked to have learned anything


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wide:
    """What the timed arms share: a model of random weights, half of whose blocks its policy leaves out, and inputs."""

    switched: Any
    ids: torch.Tensor


@dataclass(frozen=True)
class SwitchableTask:
    """A model that stands missing blocks ("digits", or "data": the user's), and a race on a wider one ("forward")."""

    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    device: str
    seed: int
    sizes: dict[str, Any]
    tasks: tuple[str, ...] = ()
    folder: Path | None = None
    encodes: bool = False
    rows: tuple[dict[str, list[int]], ...] = ()

    def prepare(self, setting: str, replicate: int) -> Trained | Wide:
        """Train or load the model for this seed; for "forward" a model of random weights."""
        seed = 1000 * self.seed + replicate
        if setting == "forward":
            return self._race(seed)
        return self._own(seed) if setting == "data" else self._digits(seed)

    def _digits(self, seed: int) -> Trained:
        import numpy as np
        import torch

        from assay.claims._switchable_arms import Trained, measure, small_gpt2, switched, train_model
        from assay.serving import Decisions
        from assay.workloads.digits import DigitTasks

        language, s = DigitTasks(self.tasks), self.sizes

        def batch(count: int, random_state: Any) -> dict[str, torch.Tensor]:
            drawn = language.sample(count, random_state)
            ids, labels, task = (torch.from_numpy(np.ascontiguousarray(x)) for x in drawn)
            return {"input_ids": ids.to(self.device), "labels": labels.to(self.device), "task": task}

        def train(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
            drawn = batch(count, int(torch.randint(2**31, (), generator=generator)))
            return {k: drawn[k] for k in ("input_ids", "labels")}

        def draw(count: int, purpose: str) -> dict[str, torch.Tensor]:
            return batch(count, [seed, SEEDS[purpose], 7])

        base = small_gpt2(language.vocabulary, language.length, s["layers"], 64, seed).to(self.device)
        shared = Trained(base, copy.deepcopy(base), s["plain_steps"], draw, train, s, 2e-3, seed, self.tasks)
        train_model(shared, s["base_steps"], s["drop"])
        model = switched(shared, BLOCKS)
        everything = Decisions.full(s["tested"], model.layers, self.device)
        exact = measure(shared, model, everything, "validation")["exact"]
        if s["base_steps"] >= TRY and exact < ENOUGH:
            raise RuntimeError(
                f"the model solves {exact:.3f} of the tasks after {s['base_steps']} steps, less than {ENOUGH}; give "
                "more --base-steps"
            )
        return shared

    def _own(self, seed: int) -> Trained:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

        from assay.claims._switchable_arms import Trained, train_model

        s = self.sizes
        loader: Any = AutoModelForSeq2SeqLM if self.encodes else AutoModelForCausalLM
        base = loader.from_pretrained(self.folder, local_files_only=True, dtype=torch.float32).eval().to(self.device)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed)).tolist()
        held = max(2, len(order) // 5)
        parts = {"test": order[:held], "validation": order[held : 2 * held], "train": order[2 * held :]}

        def stacked(numbers: list[int]) -> dict[str, torch.Tensor]:
            names = self.rows[0]
            return {n: torch.tensor([self.rows[i][n] for i in numbers], device=self.device) for n in names}

        def train(count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
            picks = torch.randint(len(parts["train"]), (count,), generator=generator).tolist()
            return stacked([parts["train"][i] for i in picks])

        def draw(count: int, purpose: str) -> dict[str, torch.Tensor]:
            return stacked(parts[purpose][:count])

        shared = Trained(copy.deepcopy(base), base, s["base_steps"], draw, train, s, 1e-4, seed)
        if s["base_steps"]:
            train_model(shared, s["base_steps"], s["drop"])
        return shared

    def _race(self, seed: int) -> Wide:
        import torch

        from assay.claims._switchable_arms import small_gpt2
        from assay.serving import SwitchableConfig, make_switchable

        s = self.sizes
        base = small_gpt2(64, 128, s["deep"], s["width"], seed).to(self.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = make_switchable(base, SwitchableConfig(BLOCKS)).eval()
        with torch.no_grad():  # every other block, whatever the input
            bias = model.policy.last.bias
            bias.copy_(torch.tensor([2.0, -2.0]).repeat(len(bias) // 2 + 1)[: len(bias)])
        ids = torch.randint(64, (s["timed_rows"], 128), generator=torch.Generator().manual_seed(seed))
        return Wide(model, ids.to(self.device))


@dataclass(frozen=True)
class Instances:
    """A model and the inputs for which its blocks are switched off."""

    model: str | None = field(
        default=None,
        metadata={"help": "folder or (downloaded) hub id of a causal or encoder-decoder model [default: trained here]"},
    )
    data: str | None = field(default=None, metadata={"help": ".jsonl for --model with the fields source and target"})
    steps: int | None = field(default=None, metadata={"help": "training steps of every policy"})
    base_steps: int | None = field(
        default=None,
        metadata={"help": "steps in which the model learns to stand missing blocks (0: leave it as it is)"},
    )
    plain_steps: int | None = field(
        default=None, metadata={"help": "steps of the embedded model that learns its tasks without missing blocks"}
    )
    batch: int | None = field(default=None, metadata={"help": "rows in a training batch"})
    tested: int | None = field(default=None, metadata={"help": "rows for test, and as many for validation"})
    eps: float | None = field(
        default=None, metadata={"help": "loss that may be given up, in nat per token [default: 0]"}
    )
    lr: float | None = field(default=None, metadata={"help": "learning rate of every policy [default: 0.002]"})
    drop: float | None = field(default=None, metadata={"help": "probability of a missing block in --base-steps"})
    layers: int | None = field(default=None, metadata={"help": "layers of the embedded model"})
    longest: int | None = field(default=None, metadata={"help": "tokens of a source and of a target are cut to this"})
    width: int | None = field(default=None, metadata={"help": "hidden size of the timed model"})
    deep: int | None = field(default=None, metadata={"help": "layers of the timed model"})
    timed_rows: int | None = field(default=None, metadata={"help": "rows of 128 tokens in a timed call"})

    def build(self, *, device: str, seed: int) -> SwitchableTask:
        """Check everything that can be checked before training.

        Raises
        ------
        InputError
            An option or a file cannot be used.
        """
        own = self.model is not None or self.data is not None
        defaults: dict[str, Any] = {
            "steps": 400,
            "base_steps": 500 if own else 1000,
            "plain_steps": 400,
            "batch": 16 if own else 128,
            "tested": 200 if own else 1500,
            "layers": 4,
            "longest": 128,
            "width": 256,
            "deep": 8,
            "timed_rows": 8,
        }
        least = {"layers": 2, "deep": 2, "base_steps": 0, "width": 4, "longest": 4}
        sizes = filled(self, defaults, least) | filled(
            self, {"eps": 0.0, "drop": 0.25, "lr": 2e-3}, {"eps": 0, "drop": 0, "lr": 0}
        )
        if not sizes["lr"]:
            raise InputError("--lr must be positive, not 0")
        if sizes["drop"] > 1:
            raise InputError(f"--drop must be at most 1, not {sizes['drop']}")
        if sizes["width"] % 4:
            raise InputError(f"--width must be a multiple of 4 heads, not {sizes['width']}")
        known: dict[str, Any] = {"limit": None, "device": device, "seed": seed, "sizes": sizes}
        if not own:
            tasks = ("copy", "reverse", "sort")
            digest = hashlib.sha256(repr((sorted(sizes.items()), tasks, seed)).encode()).hexdigest()[:16]
            title = (
                f"copy, reverse and sort 8 digits: a decoder of {sizes['layers']} layers, policies trained for "
                f"{sizes['steps']} steps"
            )
            return SwitchableTask(settings=("digits", "forward"), digest=digest, title=title, tasks=tasks, **known)
        return self._own(known)

    def _own(self, known: dict[str, Any]) -> SwitchableTask:
        from assay.serving.switchable.layers import SUPPORTED
        from assay.workloads.language import fingerprint, load_tokenizer, model_folder
        from assay.workloads.source_target import any_config, encode_pairs, read_pairs

        if self.model is None or self.data is None:
            missing = "--model" if self.model is None else "--data"
            raise InputError(f"{missing} is missing: give both a model and pairs of source and target")
        pairs = read_pairs(self.data)
        folder = model_folder(self.model)
        config = any_config(folder, self.model)
        if config.model_type not in SUPPORTED:
            raise InputError(
                f"--model {self.model!r} is of type {config.model_type!r}; supported are {', '.join(SUPPORTED)}"
            )
        tokenizer = load_tokenizer(folder, self.model)
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        end = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
        encodes = bool(config.is_encoder_decoder)
        rows = encode_pairs(tokenizer, pairs, known["sizes"]["longest"], encodes, pad, end)
        self._check_rows(config, tokenizer, rows)
        digest = fingerprint(folder, rows, sorted(known["sizes"].items()), known["seed"])
        title = (
            f"{self.model} on {len(rows)} pairs of {self.data}: policies trained for {known['sizes']['steps']} steps"
        )
        settings = ("data", "forward")
        return SwitchableTask(
            settings=settings, digest=digest, title=title, folder=folder, encodes=encodes, rows=tuple(rows), **known
        )

    def _check_rows(self, config: Any, tokenizer: Any, rows: list[dict[str, list[int]]]) -> None:
        """What would otherwise fail after minutes: too few layers or positions, tokens that the model does not know."""
        from assay.serving.switchable.decisions import sizes

        shape = sizes(config)
        if min(n for n in (shape["layers"], shape["encoder"] or shape["layers"])) < 2:
            raise InputError(f"--model {self.model!r} has a stack of one layer, which always runs: nothing to switch")
        if len(tokenizer) > shape["vocabulary"]:
            raise InputError(
                f"--model {self.model!r} knows {shape['vocabulary']} tokens, and its tokenizer makes {len(tokenizer)}"
            )
        room = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        longest = max(len(rows[0]["input_ids"]), len(rows[0]["labels"]))
        if room and config.model_type != "t5" and longest > room:
            raise InputError(
                f"--longest {self.longest or 128} makes rows of {longest} tokens, and {self.model!r} has {room} "
                "positions"
            )


# --- arms -------------------------------------------------------------------------------------------------------------

WHERE = ("digits", "data")


def _full(shared: Trained, replicate: int) -> dict[str, float]:
    from assay.claims._switchable_arms import measure, switched
    from assay.serving import Decisions

    model = switched(shared, BLOCKS)
    rows = len(shared.draw(shared.tested, "test")["input_ids"])
    return measure(shared, model, Decisions.full(rows, model.layers, model.device))


def _decides(candidates: tuple[str, ...] = BLOCKS, **how: Any) -> Callable[[Trained, int], dict[str, float]]:
    """Train a policy, and let it decide on new inputs."""

    def run(shared: Trained, replicate: int) -> dict[str, float]:
        from assay.claims._switchable_arms import measure, trained_policy

        return measure(shared, trained_policy(shared, candidates, **how), None)

    return run


def _unprepared(shared: Trained, replicate: int) -> dict[str, float]:
    """A policy for the model that was trained as long without missing blocks."""
    from assay.claims._switchable_arms import not_robustified

    return _decides()(not_robustified(shared), replicate)


def _policys(shared: Trained) -> tuple[Any, Any, float]:
    """The policy's model, its decisions on the test data, and their mean cost on the validation data."""
    from assay.claims._switchable_arms import measure, trained_policy

    model = trained_policy(shared, BLOCKS)
    batch = shared.draw(shared.tested, "test")
    chosen = model.decide(batch["input_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return model, chosen, measure(shared, model, None, "validation")["cost"]


def _chance(shared: Trained, replicate: int) -> dict[str, float]:
    from assay.claims._switchable_arms import by_chance, measure

    model, chosen, _ = _policys(shared)
    return measure(shared, model, by_chance(shared, model, chosen))


def _static(shared: Trained, replicate: int) -> dict[str, float]:
    from assay.claims._switchable_arms import best_static, mask_of, measure

    model, chosen, most = _policys(shared)
    return measure(shared, model, mask_of(model, best_static(shared, model, most), len(chosen)))


def _early(shared: Trained, replicate: int) -> dict[str, float]:
    from assay.claims._switchable_arms import leaving_early

    model, _, most = _policys(shared)
    return leaving_early(shared, model, most)


def _timed(kind: str) -> Callable[[Wide, int], Timed]:
    """One pass over the inputs: the whole model, the policy's decisions, or the same blocks without deciding.

    "mixed": every row leaves out half of the blocks, and each row others, in one pass.
    """

    def run(shared: Wide, replicate: int) -> Timed:
        import torch

        from assay.serving import Decisions

        model, ids = shared.switched, shared.ids
        chosen = model.decide(ids)
        if kind == "mixed":
            turn = torch.arange(len(ids))[:, None] + torch.arange(model.layers)
            chosen = Decisions(turn % 2 == 0, turn // 2 % 2 == 0)

        def call() -> Any:
            with torch.inference_mode():
                if kind == "full":
                    return model.model(ids).logits
                decisions = chosen if kind in ("given", "mixed") else None
                return model(ids, decisions=decisions, mode="mask" if kind == "mixed" else "bucket").logits

        def pruned() -> Any:
            with torch.inference_mode():
                return small(ids).logits

        if kind == "pruned":
            from assay.claims._switchable_arms import prune

            small = prune(model, chosen)
            return Timed(pruned, {"cost": model.cost(chosen, ids.shape[1]).mean().item()})
        cost = 1.0 if kind == "full" else model.cost(chosen, ids.shape[1]).mean().item()
        return Timed(call, {"cost": cost})

    return run


def _arms() -> tuple[Arm, ...]:
    here: dict[str, Any] = {"where": WHERE}
    race: dict[str, Any] = {"race": "forward", "where": ("forward",)}
    return (
        Arm("full", _full, "reference", "whole model", **here),
        Arm("policy", _decides(), "method", "policy on attention and feed-forward", **here),
        Arm("random", _chance, "baseline", "random, as often as the policy", **here),
        Arm("static", _static, "baseline", "best static mask of at most its cost", **here),
        Arm("early-exit", _early, "baseline", "confident rows leave early, at most its cost", **here),
        Arm("attention", _decides(("attention",)), "ablation", "policy on attention", **here),
        Arm("ffn", _decides(("ffn",)), "ablation", "policy on feed-forward", **here),
        Arm("tokens", _decides((*BLOCKS, "token")), "ablation", "policy on tokens as well", where=("digits",)),
        *(
            Arm(f"weighted-{w:g}", _decides(objective="weighted", weight=w), "ablation", f"loss + {w:g} x cost", **here)
            for w in WEIGHTS
        ),
        Arm("quality-only", _decides(objective="quality"), "ablation", "loss alone", **here),
        Arm("no-baseline", _decides(baseline=False), "ablation", "policy gradient without a baseline", **here),
        Arm("unprepared", _unprepared, "ablation", "policy for a model that never missed a block", **here),
        Arm("time-full", _timed("full"), "reference", "whole model", **race),
        Arm("time-policy", _timed("policy"), "method", "policy decides, half the blocks run", **race),
        Arm("time-given", _timed("given"), "ablation", "the same blocks, known before", **race),
        Arm("time-pruned", _timed("pruned"), "baseline", "a model that has just these blocks", **race),
        Arm("time-mixed", _timed("mixed"), "method", "half the blocks run, others for every row", **race),
    )


CLAIM = Claim(
    slug="switchable",
    title="Switchable decision: blocks that a policy switches off for each input",
    family="serving",
    paper=PAPER,
    question="Could a policy skip blocks of my model for inputs that do not need them, and keep its quality?",
    statements=(
        Statement(
            name="quality",
            text="With the policy as many answers are right as with the whole model (at most 0.02 fewer)",
            metric="exact",
            method="policy",
            baselines=("full",),
            bound=-0.02,
            where=WHERE,
            reported=Reported(
                "about 40 % less computation at equal accuracy",
                "BART on summarisation, question answering and classification",
                "abstract",
            ),
        ),
        Statement(
            name="cost",
            text="The policy takes at most 0.7 of the operations, deciding included",
            metric="cost",
            method="policy",
            baselines=("full",),
            scale="ratio",
            bound=0.7,
            where=WHERE,
        ),
        Statement(
            name="instances",
            text="Deciding for each input beats the best static mask, chance and leaving early, at no more cost",
            metric="exact",
            method="policy",
            baselines=("static", "random", "early-exit"),
            where=WHERE,
        ),
        Statement(
            name="both-kinds",
            text="Switching both kinds of blocks costs less than switching one (each at its own quality)",
            metric="cost",
            method="policy",
            baselines=("attention", "ffn"),
            scale="ratio",
            where=WHERE,
            decides=False,
        ),
        Statement(
            name="time",
            text="Half the blocks take at most 0.7 of the whole model's time, deciding included",
            metric="seconds",
            method="time-policy",
            baselines=("time-full",),
            scale="ratio",
            bound=0.7,
            where=("forward",),
        ),
        Statement(
            name="mixed",
            text="So does a batch in which every row leaves out other blocks",
            metric="seconds",
            method="time-mixed",
            baselines=("time-full",),
            scale="ratio",
            bound=0.7,
            where=("forward",),
            decides=False,
        ),
        Statement(
            name="overhead",
            text="Deciding and switching take at most 3 % more time than a model that was pruned to these blocks",
            metric="seconds",
            method="time-policy",
            baselines=("time-pruned",),
            scale="ratio",
            bound=1.03,
            where=("forward",),
            decides=False,
        ),
        Statement(
            name="constraint",
            text="The constraint keeps more answers right than a sum of loss and cost (each at its own cost)",
            metric="exact",
            method="policy",
            baselines=tuple(f"weighted-{w:g}" for w in WEIGHTS),
            where=WHERE,
            decides=False,
        ),
        Statement(
            name="prepared",
            text="A model that learned to stand missing blocks lets the policy leave out more than one that did not",
            metric="cost",
            method="policy",
            baselines=("unprepared",),
            scale="ratio",
            where=WHERE,
            decides=False,
        ),
    ),
    metrics=(
        Metric("exact", "answers that are right to the last token", "higher"),
        Metric("tokens", "tokens that are right", "higher"),
        Metric("nll", "negative log-likelihood", "lower", "nat/token"),
        Metric("cost", "operations, of the whole model's", "lower"),
        Metric("masks", "different masks of blocks among the inputs", None),
        *(Metric(f"exact_{t}", f"right answers: {t}", "higher") for t in ("copy", "reverse", "sort")),
        *(Metric(f"cost_{t}", f"operations: {t}", "lower") for t in ("copy", "reverse", "sort")),
        Metric("seconds", "time of a pass", "lower", "s"),
    ),
    arms=_arms(),
    workload=Instances,
    scales={
        "smoke": Scale(
            2,
            {
                "steps": 20,
                "base_steps": 30,
                "plain_steps": 10,
                "batch": 16,
                "tested": 50,
                "layers": 2,
                "width": 32,
                "deep": 2,
                "timed_rows": 1,
            },
            {"forward": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(
            5,
            {
                "steps": 400,
                "base_steps": 1000,
                "plain_steps": 400,
                "batch": 128,
                "tested": 1500,
                "layers": 4,
                "width": 256,
                "deep": 8,
                "timed_rows": 8,
            },
            {"forward": Race(rounds=15, warmup=2)},
        ),
        # facebook/bart-base as --model and XSum, SQuAD or GLUE as --data.
        "paper": Scale(
            3,
            {
                "steps": 20_000,
                "base_steps": 20_000,
                "batch": 32,
                "tested": 2000,
                "longest": 512,
                "width": 768,
                "deep": 12,
            },
            {"forward": Race(rounds=30, warmup=3)},
        ),
    },
    unit="seed",
    snippet="""\
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from assay.serving import SwitchableConfig, SwitchableTrainer, make_switchable

gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=2, vocab_size=50, n_positions=64))   # or yours
model = make_switchable(gpt2, SwitchableConfig(candidates=("attention", "ffn")))
rows = [{"input_ids": x, "labels": x} for x in torch.randint(50, (64, 16))]      # -100 in labels: the prompt
trainer = SwitchableTrainer(model, rows)
trainer.robustify(20, batch_size=16)             # some thousand: the model learns to stand missing blocks
trainer.train_policy(20, batch_size=16)          # then a policy learns which, quality first
output = model.generate(torch.randint(50, (4, 8)), max_new_tokens=8, do_sample=False, pad_token_id=0)
print(model.cost(model.last_decisions, 8).mean())    # operations, of the whole model's
""",
    example="assay run switchable --model ./my-bart --data my-pairs.jsonl --steps 2000",
    devices=("cpu", "cuda"),
    notes=(
        "The three tasks need different amounts of work, so that the best blocks depend on the input: see cost by "
        "task. A policy that makes one mask for all inputs has collapsed to a static one; 'masks' counts them.",
        "The model is trained with blocks missing at random (each with probability 0.25), without which leaving any "
        "out would ruin it. All arms share that model but one, which learned without (see --plain-steps; a model of "
        "yours is trained as long as the other).",
        "Static masks, chance and leaving early may cost what the policy costs on validation data; static masks are "
        "tried exhaustively. Leaving early judges a whole answer by its least confident token, which decoding could "
        "only do at the end: a bound in its favour; against it is that the head was not trained to read early layers. "
        "The cost of the policies includes deciding.",
        "Operations become time only where the blocks are large enough to be worth skipping: the timed model has 256 "
        "channels. Inputs with different masks run one group after the other.",
        "Only an abstract-level description of the paper was open to us; its tables are not quoted.",
    ),
)
