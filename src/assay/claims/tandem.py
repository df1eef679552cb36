"""Does a small model that reads a large one's states draft better, and losslessly (ICML 2024)."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Arm, Claim, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.claims._options import filled
from assay.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from assay.claims._tandem_models import Drafted, Duel

PAPER = Paper(
    title="Tandem Transformers for Inference Efficient LLMs",
    authors="Aishwarya P S, Pranav Ajit Nair, Yashas Samaga, Toby Boyd, Sanjiv Kumar, Prateek Jain, "
    "Praneeth Netrapalli",
    venue="ICML 2024",
    url="https://arxiv.org/abs/2402.08644",
)
DRAFT = 4
LENGTHS = (1, 2, 3, 4, 6, 8)
THRESHOLDS = (0.2, 0.4, 0.6, 0.8)
LEARNED = 0.7  # of the symbols: what the embedded large model must predict before drafters are trained for it
TRY = 100  # fewer steps than these are a try of the machinery, and no large model is asked to have learned anything


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chains:
    """Training and test data of the in-context Markov language, where test data come from another stream."""

    language: Any

    def draw(self, count: int, random: np.random.Generator) -> Any:
        """``[count, length]`` new chains."""
        return self.language.sample(count, random)

    held = draw


@dataclass(frozen=True)
class Loops:
    """What the timed arms share: a large model, a small one, a drafter of its states, and a prompt."""

    primary: Any
    secondary: Any
    tandem: Any
    prompt: torch.Tensor
    new_tokens: int


@dataclass(frozen=True)
class TandemTask:
    """Drafters that are trained and tested ("chains" or "text"), and a race of decoding loops ("decode")."""

    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    device: str
    seed: int
    symbols: int
    length: int
    primary_steps: int
    recipe: dict[str, Any]
    timed: int
    least: float
    dtype: str = "float32"
    folders: tuple[Path, Path] | None = None
    windows: Any = None

    def prepare(self, setting: str, replicate: int) -> Duel | Loops:
        """Train the large model for this seed, or load the user's; for "decode" random models of the same shapes."""
        from assay.claims._tandem_models import Duel, Recipe, small_llama, train_from_scratch

        seed = 1000 * self.seed + replicate
        if setting == "decode":
            return self._race(seed)
        recipe = Recipe(**self.recipe)
        if setting == "text":
            from assay.workloads.pairs import load_trainable

            assert self.folders is not None
            primary, secondary = (load_trainable(folder, self.dtype, self.device) for folder in self.folders)
            primary.requires_grad_(False)
            return Duel(primary, secondary, self.windows, recipe, seed, self.device)
        from assay.workloads.markov import PermutationChains

        source = Chains(PermutationChains(self.symbols, self.length))
        primary = small_llama(self.symbols, 64, 3, 4, seed)
        accuracy = train_from_scratch(primary, source, self.primary_steps, seed, self.least)
        if accuracy < self.least:
            raise RuntimeError(
                f"the large model predicts {accuracy:.3f} of the symbols after {self.primary_steps} steps and more: it "
                f"has not found the rule (above {self.least}), so that there is nothing to hand on"
            )
        secondary = small_llama(self.symbols, 32, 1, 2, seed + 500)
        primary.requires_grad_(False).to(self.device)

        def mid_size() -> Any:
            model = small_llama(self.symbols, 64, 2, 4, seed + 700)
            train_from_scratch(model, source, self.primary_steps, seed, self.least)
            return model.to(self.device)

        return Duel(primary, secondary.to(self.device), source, recipe, seed, self.device, mid_size)

    def _race(self, seed: int) -> Loops:
        """Models whose drafts are all accepted: the small one is a copy of the large one, and so is the tandem's.

        At equal acceptance what differs is the loop around the models.
        """
        import torch

        from assay.claims._tandem_models import small_llama
        from assay.serving import TandemConfig, TandemModel

        primary = small_llama(64, 64, 2, 4, seed).requires_grad_(False).to(self.device)
        twin = copy.deepcopy(primary)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the secondary is not smaller is the point here
            tandem = TandemModel(primary, twin, TandemConfig(layer_map=[0, 1])).eval()
        with torch.no_grad():
            for linear in tandem.projections.maps:
                linear.weight.copy_(torch.eye(len(linear.weight)))
                linear.bias.zero_()
        prompt = torch.randint(64, (1, 32), generator=torch.Generator().manual_seed(seed)).to(self.device)
        return Loops(primary, copy.deepcopy(primary), tandem, prompt, self.timed)


@dataclass(frozen=True)
class Pair:
    """A large and a small language model with one vocabulary, and what they are tuned and tested on."""

    primary: str | None = field(
        default=None, metadata={"help": "folder or (downloaded) hub id of the large model [default: trained here]"}
    )
    secondary: str | None = field(default=None, metadata={"help": "the same of the small model"})
    text: str | None = field(
        default=None,
        metadata={"help": "text file or .jsonl for --primary and --secondary [default: Python's reference]"},
    )
    steps: int | None = field(default=None, metadata={"help": "training steps of every drafter"})
    primary_steps: int | None = field(default=None, metadata={"help": "training steps of the embedded large model"})
    batch: int | None = field(default=None, metadata={"help": "sequences in a training batch"})
    length: int | None = field(default=None, metadata={"help": "tokens in a sequence"})
    windows: int | None = field(default=None, metadata={"help": "held-out sequences"})
    prompts: int | None = field(default=None, metadata={"help": "prompts that are decoded speculatively"})
    new_tokens: int | None = field(default=None, metadata={"help": "tokens decoded after each prompt"})
    timed: int | None = field(default=None, metadata={"help": "tokens decoded in a timed call"})
    block_size: int | None = field(default=None, metadata={"help": "block size in training [default: 2, the paper's]"})
    lr: float | None = field(default=None, metadata={"help": "learning rate of every drafter"})

    def build(self, *, device: str, seed: int) -> TandemTask:
        """Check everything that can be checked before training.

        Raises
        ------
        InputError
            An option cannot be used, or the two models do not fit together.
        """
        own = self.primary is not None or self.secondary is not None
        defaults = {
            "steps": 200,
            "primary_steps": 450,
            "batch": 8 if own else 64,
            "length": 128 if own else 97,
            "windows": 64 if own else 256,
            "prompts": 8,
            "new_tokens": 48,
            "timed": 40,
            "block_size": 2,
        }
        sizes = filled(self, defaults, {"length": 16})
        lr = self.lr if self.lr is not None else 1e-4 if own else 5e-3
        if not lr > 0:
            raise InputError(f"--lr must be positive, not {lr}")
        recipe = {
            "steps": sizes["steps"],
            "batch": sizes["batch"],
            "lr": lr,
            "lr_projection": 10 * lr if own else lr,
            "init": "ridge" if own else "random",
            "block_size": sizes["block_size"],
            "draft_length": DRAFT,
            "windows": sizes["windows"],
            "prompts": sizes["prompts"],
            "new_tokens": sizes["new_tokens"],
        }
        known: dict[str, Any] = {"device": device, "seed": seed, "symbols": 16, "recipe": recipe}
        known |= {name: sizes[name] for name in ("length", "primary_steps", "timed")}
        known["least"] = LEARNED if sizes["primary_steps"] >= TRY else 0.0
        if not own:
            if self.text is not None:
                raise InputError("--text is for --primary and --secondary; the embedded pair has a language of its own")
            about = f"chains of {sizes['length']} symbols whose rule is in the context"
            title = f"{about}: a 3-layer model, drafters of 1 layer trained for {sizes['steps']} steps"
            digest = hashlib.sha256(repr((sizes, recipe, seed, known["least"])).encode()).hexdigest()[:16]
            return TandemTask(settings=("chains", "decode"), digest=digest, title=title, limit=None, **known)
        return self._own(known, sizes)

    def _own(self, known: dict[str, Any], sizes: dict[str, int]) -> TandemTask:
        from assay.workloads.language import embedded_texts, fingerprint, read_texts
        from assay.workloads.pairs import check_pair, text_windows

        if self.primary is None or self.secondary is None:
            missing = "--primary" if self.primary is None else "--secondary"
            raise InputError(f"{missing} is missing: give both a large and a small model")
        texts = embedded_texts() if self.text is None else read_texts(self.text)
        large, small, tokenizer = check_pair(self.primary, self.secondary)
        _check_secondary(small, self.secondary)
        source = "Python's reference" if self.text is None else self.text
        windows = text_windows(tokenizer, texts, sizes["length"], source)
        digest = fingerprint(large, fingerprint(small), _short(windows.train, windows.end), repr(known))
        title = (
            f"{self.secondary} as drafter of {self.primary} on {source}: windows of {sizes['length']} tokens, "
            f"{sizes['steps']} steps"
        )
        more = {"folders": (large, small), "windows": windows}
        return TandemTask(settings=("text", "decode"), digest=digest, title=title, limit=None, **known | more)


def _short(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()[:16]


def _check_secondary(folder: Path, name: str) -> None:
    from assay.serving.tandem.adapters import check_secondary
    from assay.workloads.language import model_config

    class Shape:
        config = model_config(folder, name)

    try:
        check_secondary(Shape)
    except NotImplementedError as error:
        raise InputError(f"--secondary {name!r}: {error}") from error


# --- arms -------------------------------------------------------------------------------------------------------------

TRAINED = ("chains", "text")


def _cost_ratio(duel: Duel, model: Any = None) -> float:
    """Time of a model (the small one) over the large one's for a token, as its weights besides embeddings are read."""
    models = (duel.secondary if model is None else model, duel.primary)
    small, large = (sum(p.numel() for p in m.base_model.layers.parameters()) for m in models)
    return small / large


def _alone(duel: Duel, model: Any, block_size: int) -> float:
    """Modelled time of a token without verification: a tandem's large part runs once for a block, as for one token."""
    if not hasattr(model, "projections"):
        return _cost_ratio(duel, model)
    return _cost_ratio(duel, model.secondary) + _cost_ratio(duel, model.primary) / block_size


def _counts(duel: Duel, found: Drafted) -> dict[str, float]:
    from assay.serving.tandem import speedup

    return {
        "accepted": found.accepted,
        "drafted": found.drafted,
        "identical": found.identical,
        "modelled": speedup(found.accepted, found.drafted, _cost_ratio(duel), 1.0),
        "cost_ratio": _cost_ratio(duel),
    }


def _large(duel: Duel, replicate: int) -> dict[str, float]:
    from assay.claims._tandem_models import quality, reference

    return {**quality(duel, reference(duel), duel.recipe.block_size), "alone": 1.0}


def _drafts(kind: str, block_size: int | None = None) -> Callable[[Duel, int], dict[str, float]]:
    """Train a drafter (once for all arms of a replicate), test its predictions, and decode with its drafts."""

    def run(duel: Duel, replicate: int) -> dict[str, float]:
        from assay.claims._tandem_models import decode, drafter, predictions, quality

        model = drafter(duel, kind)
        size = block_size or duel.recipe.block_size
        found = quality(duel, predictions(duel, model, size), size) | {"alone": _alone(duel, model, size)}
        return {**found, **_counts(duel, decode(duel, model, duel.recipe.draft_length))}

    return run


def _mid_size(duel: Duel, replicate: int) -> dict[str, float]:
    """Train a model of two of the large one's three layers by the same rule, and test its predictions."""
    from assay.claims._tandem_models import predictions, quality

    assert duel.mid_size is not None
    model, size = duel.mid_size(), duel.recipe.block_size
    return {**quality(duel, predictions(duel, model, size), size), "alone": _alone(duel, model, size)}


def _best_length(duel: Duel, replicate: int) -> dict[str, float]:
    """Tandem-Distil with the draft length that is best on other prompts, by modelled cost."""
    from assay.claims._tandem_models import decode, drafter

    model = drafter(duel, "tandem-distil")
    tried = {n: _counts(duel, decode(duel, model, n, tuning=True))["modelled"] for n in LENGTHS}
    return _counts(duel, decode(duel, model, max(tried, key=lambda n: tried[n])))


def _threshold(duel: Duel, replicate: int) -> dict[str, float]:
    """Drafting stops where the drafted token's probability is below the value that is best on other prompts."""
    from assay.claims._tandem_models import decode, drafter

    model = drafter(duel, "tandem-distil")
    tried = {t: _counts(duel, decode(duel, model, LENGTHS[-1], t, tuning=True))["modelled"] for t in THRESHOLDS}
    return _counts(duel, decode(duel, model, LENGTHS[-1], max(tried, key=lambda t: tried[t])))


def _routed(*thresholds: float) -> Callable[[Duel, int], dict[str, float]]:
    """Drafting stops where a router doubts that the token is accepted, by the threshold that is best on other prompts.

    The fixed length and the plain threshold that it is compared with are chosen by as many tries.
    """

    def run(duel: Duel, replicate: int) -> dict[str, float]:
        import torch

        from assay.claims._tandem_models import decode, drafter
        from assay.serving import fit_router

        model = drafter(duel, "tandem-distil")
        data = torch.cat(list(duel.batches(4)))
        router = duel.remember(
            "router", lambda: fit_router(model, data, draft_length=LENGTHS[-1], label="hard", seed=duel.seed)
        )
        tried = {}
        for router.threshold in thresholds if len(thresholds) > 1 else ():
            tried[router.threshold] = _counts(duel, decode(duel, model, LENGTHS[-1], router, tuning=True))["modelled"]
        router.threshold = max(tried, key=lambda t: tried[t]) if tried else thresholds[0]
        return _counts(duel, decode(duel, model, LENGTHS[-1], router))

    return run


def _timed_decoding(kind: str) -> Callable[[Loops, int], Timed]:
    """Greedy decoding of some tokens: the large model alone, with an assistant of transformers, or with a tandem."""

    def run(shared: Loops, replicate: int) -> Timed:
        from assay.claims._tandem_models import seen

        options = {"max_new_tokens": shared.new_tokens, "min_new_tokens": shared.new_tokens, "do_sample": False}
        options |= seen(shared.prompt)
        model = shared.primary
        if kind == "tandem":
            return Timed(
                lambda: shared.tandem.generate(shared.prompt, draft_length=DRAFT, **options), per=shared.new_tokens
            )
        if kind == "host":
            config = shared.secondary.generation_config
            config.num_assistant_tokens, config.num_assistant_tokens_schedule = DRAFT, "constant"
            config.assistant_confidence_threshold = 0.0
            options |= {"assistant_model": shared.secondary}
        return Timed(lambda: model.generate(shared.prompt, pad_token_id=0, **options), per=shared.new_tokens)

    return run


def _arms() -> tuple[Arm, ...]:
    kinds = (
        ("small-ce", "baseline", "small model"),
        ("small-distil", "baseline", "small model, distilled"),
        ("tandem-ce", "method", "Tandem-CE"),
        ("tandem-distil", "method", "Tandem-Distil"),
        ("tandem-random", "ablation", "Tandem-CE, random blocks"),
        ("tandem-layer", "ablation", "Tandem-CE, other layers"),
    )
    arms = [Arm("primary", _large, "reference", "large model", where=TRAINED)]
    arms += [Arm(kind, _drafts(kind), role, label, where=TRAINED) for kind, role, label in kinds]  # type: ignore[arg-type]
    for kind, _, label in kinds[2:5]:
        arms.append(Arm(f"{kind}-4", _drafts(kind, 4), "ablation", f"{label}, read in blocks of 4", where=TRAINED))
    arms += [
        Arm("mid-size", _mid_size, "baseline", "mid-size model", where=("chains",)),
        Arm("fixed-length", _best_length, "baseline", "Tandem-Distil, best fixed length", where=TRAINED),
        Arm("threshold", _threshold, "baseline", "Tandem-Distil, best confidence threshold", where=TRAINED),
        Arm("router", _routed(*THRESHOLDS), "method", "Tandem-Distil, router", where=TRAINED),
        Arm("router-0.8", _routed(0.8), "ablation", "Tandem-Distil, router, the paper's threshold", where=TRAINED),
    ]
    for kind, role, label in (
        ("primary", "reference", "large model alone"),
        ("host", "baseline", "assisted generation of transformers"),
        ("tandem", "method", "tandem"),
    ):
        arms.append(Arm(f"decode-{kind}", _timed_decoding(kind), role, label, race="decode", where=("decode",)))  # type: ignore[arg-type]
    return tuple(arms)


CLAIM = Claim(
    slug="tandem",
    title="Tandem: a drafter that reads the large model's states",
    family="serving",
    paper=PAPER,
    question="Would my small model draft better for my large one if it read the large one's states?",
    statements=(
        Statement(
            name="lossless",
            text="Speculative decoding with the tandem says what the large model says, token for token",
            metric="identical",
            method="tandem-distil",
            constant=1.0,
            bound=-1e-9,
            where=TRAINED,
        ),
        Statement(
            name="lossless-router",
            text="So does decoding with drafts whose length a router decides",
            metric="identical",
            method="router",
            constant=1.0,
            bound=-1e-9,
            where=TRAINED,
        ),
        Statement(
            name="accuracy",
            text="The tandem predicts the next token better than the small model alone",
            metric="accuracy",
            method="tandem-ce",
            baselines=("small-ce",),
            where=TRAINED,
            reported=Reported(
                "3.3 points more accurate next-token predictions than the small model alone",
                "PaLM2 Bison and Gecko, pre-training data",
                "abstract",
                value=0.033,
            ),
        ),
        Statement(
            name="accuracy-distilled",
            text="The distilled tandem predicts the next token better than the distilled small model",
            metric="accuracy",
            method="tandem-distil",
            baselines=("small-distil",),
            where=TRAINED,
        ),
        Statement(
            name="alone",
            text="Alone, in blocks of 2, it predicts as well (at most 0.01 fewer) as a mid-size model that takes 1.14 "
            "times its modelled time",
            metric="accuracy",
            method="tandem-distil",
            baselines=("mid-size",),
            bound=-0.01,
            where=("chains",),
            reported=Reported(
                "1.16 times faster than a model of comparable quality",
                "PaLM2 Bison with Gecko against Otter, TPUv5e",
                "abstract",
            ),
        ),
        Statement(
            name="accepted",
            text="More drafted tokens are accepted in a round than from the distilled small model, 4 drafted",
            metric="accepted",
            method="tandem-distil",
            baselines=("small-distil",),
            where=TRAINED,
            reported=Reported(
                "11.24 % more tokens accepted in a block, 1.11 to 1.17 times faster in all",
                "PaLM2 Bison with distilled Gecko; Reddit, CNN/DailyMail, LM1B; TPUv5e",
                "experiments, speculative decoding",
            ),
        ),
        Statement(
            name="adaptive",
            text="A router for the draft length beats the best fixed length, in tokens for their modelled cost",
            metric="modelled",
            method="router",
            baselines=("fixed-length",),
            scale="ratio",
            where=TRAINED,
            reported=Reported(
                "1.04 to 1.09 times faster with adaptive block length", "PaLM2 Bison and Gecko, TPUv5e", "experiments"
            ),
        ),
        Statement(
            name="overhead",
            text="At equal acceptance, decoding is at least 1.2 times faster than transformers' assisted generation",
            metric="seconds",
            method="decode-tandem",
            baselines=("decode-host",),
            scale="ratio",
            bound=1 / 1.2,
            where=("decode",),
        ),
        Statement(
            name="confidence",
            text="A router beats the best threshold on the drafted token's probability",
            metric="modelled",
            method="router",
            baselines=("threshold",),
            scale="ratio",
            where=TRAINED,
            decides=False,
        ),
    ),
    metrics=(
        Metric("accuracy", "next tokens that are predicted", "higher"),
        Metric("ce", "cross-entropy", "lower", "nat/token"),
        Metric("agreement", "same most likely token as the large model", "higher"),
        Metric("tv", "total variation distance from the large model", "lower"),
        Metric("accepted", "accepted tokens in a round", "higher"),
        Metric("drafted", "drafted tokens in a round", None),
        Metric("modelled", "modelled speed-up over the large model", "higher"),
        Metric("alone", "modelled time of a token without verification, of the large model's", "lower"),
        Metric("cost_ratio", "size of the small model's layers over the large one's", None),
        Metric("identical", "outputs that are those of the large model", "higher", counted=True),
        Metric("prefix", "accepted of 4, given the text", "higher"),
        *(Metric(f"agree_{i}", f"agreement of the {i}. token in a block of 4", "higher") for i in range(1, 5)),
        Metric("seconds", "time of a decoded token", "lower", "s"),
    ),
    arms=_arms(),
    workload=Pair,
    scales={
        "smoke": Scale(
            2,
            {
                "steps": 3,
                "primary_steps": 3,
                "batch": 4,
                "length": 24,
                "windows": 4,
                "prompts": 1,
                "new_tokens": 8,
                "timed": 4,
            },
            {"decode": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(5, {"steps": 200, "primary_steps": 450, "timed": 40}, {"decode": Race(rounds=5, warmup=1)}),
        # A pair such as SmolLM2-1.7B and SmolLM2-135M, and a sample of fineweb-edu as --text.
        "paper": Scale(
            3,
            {"steps": 100_000, "batch": 16, "length": 1024, "prompts": 1000, "new_tokens": 128, "timed": 128},
            {"decode": Race(rounds=10, warmup=2)},
        ),
    },
    unit="seed",
    snippet="""\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from assay.serving import TandemConfig, TandemModel

shape = {"vocab_size": 99, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
large = LlamaForCausalLM(LlamaConfig(**shape, hidden_size=64, num_hidden_layers=4)).eval()   # or from_pretrained(...)
small = LlamaForCausalLM(LlamaConfig(**shape, hidden_size=32, num_hidden_layers=1)).eval()
text = torch.randint(99, (8, 64))                                     # tokens to begin from; then TandemTrainer
tandem = TandemModel(large, small, TandemConfig(block_size=2)).initialise(text).eval()
output = tandem.generate(text[:1, :20], draft_length=4, max_new_tokens=30, do_sample=False)
print(torch.equal(output, large.generate(text[:1, :20], max_new_tokens=30, do_sample=False)))   # True
""",
    example="assay run tandem --primary ./my-1b --secondary ./my-100m --text my-documents.jsonl --steps 2000",
    devices=("cpu", "cuda"),
    notes=(
        "The embedded language is made so that understanding the context needs depth and saying the next symbol does "
        "not: a permutation of 16 symbols is drawn for each sequence and must be read from it. A model of one layer "
        "cannot; one that reads the states of three layers can. Gains on text between pre-trained models are smaller "
        "(the paper: 3.3 points); measure yours with --primary and --secondary.",
        "The modelled speed-up is (1 + accepted) / (drafted * r + 1), where r is the size of the small model's layers "
        "over that of the large one's: decoding that waits for memory, in which the large model reads a few tokens in "
        "the time of one. On a CPU, and with models of this size, wall time follows the number of calls instead.",
        "The race has drafts that are all accepted, by copies of the large model: what it compares is the loop around "
        "the models. Its models are so small that launching operations is what takes the time.",
        "Where the small model takes more than half the large one's time for a token, speculation loses whatever is "
        "accepted: look at cost_ratio.",
        "The mid-size model has two of the large model's three layers. Both are trained by one rule: --primary-steps, "
        "and up to 600 more until 0.7 of the symbols are predicted. Where the mid-size model stays far below, two "
        "layers do not find the rule in that time.",
        "'Other layers' feeds the one layer of the embedded small model from the large one's layer before the last; "
        "with more layers it is the uniform map.",
        "Every drafter is trained from the same start with the same batches, steps and learning rate. The first half "
        "of the steps is cross-entropy; in the second, distilled drafters learn half of it, half the large model.",
    ),
)
