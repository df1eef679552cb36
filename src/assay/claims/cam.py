"""Does merging the values of evicted tokens help a language model whose cache holds few of them (ICML 2024)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Arm, Claim, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.errors import InputError
from assay.workloads.language import (
    CausalText,
    TextTask,
    agreement,
    attending,
    forward,
    load_model,
    load_tokenizer,
    model_config,
    random_model,
)
from assay.workloads.questions import Question, choose, read_questions, step_by_step

if TYPE_CHECKING:
    import torch

PAPER = Paper(
    title="CaM: Cache Merging for Memory-efficient LLMs Inference",
    authors="Yuxin Zhang, Yuxuan Du, Gen Luo, Yunshan Zhong, Zhenyu Zhang, Shiwei Liu, Rongrong Ji",
    venue="ICML 2024",
    url="https://proceedings.mlr.press/v235/zhang24n.html",
)
RACE_HEAD = 8  # tokens beyond the budget that fill a timed cache, so that it is in its steady state


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What the arms of "text" share: a model and documents that it reads token by token with a small cache."""

    model: Any
    ids: torch.Tensor
    prompt: int
    reference: torch.Tensor
    budget: int
    m: int
    seed: int


@dataclass(frozen=True)
class Attending:
    """What the arms of "attention" share: a model and documents that it reads at once."""

    model: Any
    ids: torch.Tensor
    m: int


@dataclass(frozen=True)
class Choosing:
    """What the arms of "choices" share: a context that is read with a small cache, and the answers to choose from."""

    model: Any
    context: torch.Tensor
    choices: tuple[torch.Tensor, ...]
    answer: int
    budget: int
    m: int
    seed: int


@dataclass(frozen=True)
class Decoding:
    """What the timed arms share: layers of a model's shapes, and how much is held and decoded."""

    model: Any
    ids: torch.Tensor
    tokens: int
    m: int


@dataclass(frozen=True)
class CaMTask(TextTask):
    """Batches of documents ("text", "attention"), questions if there are some, and a race over decoded tokens."""

    documents_each: int = 3
    scored: int = 48
    attended: int = 192
    budget: int = 32
    m: int = 16
    questions: tuple[Question, ...] = ()
    held: int = 256
    tokens: int = 16
    layers: int = 4

    @property
    def limit(self) -> int | None:
        """The number of batches of documents, and of questions."""
        batches = len(self.documents) // self.documents_each
        return min(batches, len(self.questions)) if self.questions else batches

    def prepare(self, setting: str, replicate: int) -> Reading | Attending | Choosing | Decoding:
        """Load the model and take the replicate's documents; for "text" predict them with the full cache as well."""
        import torch

        if setting == "decode":
            return self._race(replicate)
        folder = self.folder
        model = random_model(self.dtype, self.device) if folder is None else load_model(folder, self.dtype, self.device)
        if setting == "choices":
            asked = self.questions[replicate]
            head, *tails = (torch.tensor(x, device=self.device)[None] for x in (asked.context, *asked.choices))
            return Choosing(model, head, tuple(tails), asked.answer, self.budget, self.m, replicate)
        batch = self.documents[replicate * self.documents_each : (replicate + 1) * self.documents_each]
        ids = torch.tensor(batch, device=self.device)
        if setting == "attention":
            return Attending(model, ids[:, : self.attended], self.m)
        ids = ids[:, : self.prompt + self.scored + 1]
        with attending(model, "sdpa"):
            reference = forward(model, ids[:, :-1]).logits[:, self.prompt :].float()
        return Reading(model, ids, self.prompt, reference, self.budget, self.m, replicate)

    def _race(self, replicate: int) -> Decoding:
        """The model's shapes with random weights: speed does not depend on them, and all layers cost the same."""
        import torch
        from transformers import AutoModelForCausalLM

        config = random_model().config if self.folder is None else model_config(self.folder, str(self.folder))
        config = copy.deepcopy(config.get_text_config(decoder=True))
        config.num_hidden_layers = min(self.layers, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        loader: Any = AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(replicate)
            model = loader.from_config(config, dtype=getattr(torch, self.dtype)).base_model
            ids = torch.randint(config.vocab_size, (1, self.held + RACE_HEAD))
        model = model.eval().requires_grad_(False).to(self.device)
        return Decoding(model, ids.to(self.device), self.tokens, min(self.m, self.held - 1))


@dataclass(frozen=True)
class Texts(CausalText):
    """A causal language model, texts or questions that it reads with a small cache, and the size of the race."""

    budget: int | None = field(default=None, metadata={"help": "tokens that a bounded cache holds"})
    m: int | None = field(default=None, metadata={"help": "tokens that a value is merged into"})
    documents: int | None = field(default=None, metadata={"help": "documents in a replicate"})
    attended: int | None = field(
        default=None, metadata={"help": "tokens of a document whose attention outputs are compared"}
    )
    choices: str | None = field(
        default=None,
        metadata={"help": ".jsonl of questions: context, choices (a list), answer (a number from 0)"},
    )
    held: int | None = field(default=None, metadata={"help": "tokens held in the timed decoding"})
    tokens: int | None = field(default=None, metadata={"help": "tokens that are decoded in the timed call"})
    layers: int | None = field(default=None, metadata={"help": "layers of the model that the timed decoding runs"})

    def build(self, *, device: str, seed: int) -> CaMTask:
        """Check everything and cut the text; see :meth:`CausalText.build`."""
        scored, prompt = self.continuation or 48, self.prompt or 32
        sizes = {
            "budget": self.budget or 32,
            "m": self.m or 16,
            "documents": self.documents or 3,
            "attended": self.attended or 192,
            "held": self.held or 256,
            "tokens": self.tokens or 16,
            "layers": self.layers or 4,
        }
        for name, value in sizes.items():
            if value < 1:
                raise InputError(f"--{name} must be at least 1, not {value}")
        for name, least in (("budget", 12), ("held", 12), ("attended", 64)):
            if sizes[name] < least or sizes[name] <= sizes["m"]:
                raise InputError(f"--{name} must be at least {least} and more than --m {sizes['m']}, not {sizes[name]}")
        longest = max(scored, sizes["attended"] - prompt - 1)
        base = CausalText.build(replace(self, prompt=prompt, continuation=longest), device=device, seed=seed)
        if len(base.documents) < sizes["documents"]:
            raise InputError(f"--documents {sizes['documents']} are more than the {len(base.documents)} there are")
        self._check_model(base)
        questions = self._questions(base)
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        known |= {"scored": scored, "questions": questions, **{k: v for k, v in sizes.items() if k != "documents"}}
        known["documents_each"] = sizes["documents"]
        known["digest"] = "-".join([base.digest, str(scored), *map(str, sizes.values()), _short(questions)])
        settings = ("text", "attention", *(("choices",) if questions else ()), "decode")
        title = base.title.rsplit(":", 1)[0]
        known["title"] = (
            f"{title}: {prompt} tokens of prompt, {scored} predicted one by one with {sizes['budget']} in the cache, "
            f"{sizes['documents']} documents at a time, {base.dtype}"
        )
        return CaMTask(**known | {"settings": settings})

    def _questions(self, base: TextTask) -> tuple[Question, ...]:
        if self.choices is None:
            return ()
        if base.folder is None:
            raise InputError("--choices needs a model with a tokenizer, not the random one")
        return read_questions(self.choices, load_tokenizer(base.folder, self.model or "the embedded model"))

    def _check_model(self, base: TextTask) -> None:
        if base.folder is None:
            return
        from assay.serving import EvictionCache

        name = self.model or "the embedded model"
        try:
            EvictionCache(model_config(base.folder, name), budget=8)
        except ValueError as error:
            raise InputError(f"--model {name!r}: {error}") from error


def _short(value: Any) -> str:
    import hashlib

    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


# --- arms -------------------------------------------------------------------------------------------------------------

MASKS = {
    "bernoulli": "paper's mask",
    "bernoulli_current": "mask of the summaries, LLaMA",
    "threshold": "threshold mask",
    "max": "mask of the question answering",
    "all": "no mask",
}


def _cache(config: Any, policy: str, mask: str | None, budget: int, m: int, seed: int) -> Any:
    """The cache of an arm: every policy and every mask with the same number of tokens."""
    from assay.serving import CaM, EvictionCache

    merge = CaM(m=m, mask=mask) if mask else None
    recent = {"scissorhands": min(10, budget // 4)}.get(policy)
    return EvictionCache(config, policy, budget, n_recent=recent, merge=merge, seed=seed)


def _evicting(model: Any) -> AbstractContextManager[None]:
    from assay.serving import register_eviction_attention

    register_eviction_attention()
    return attending(model, "evict")


def _full(shared: Reading | Choosing, replicate: int) -> dict[str, float]:
    """Nothing is evicted: one forward pass."""
    if isinstance(shared, Choosing):
        from transformers import DynamicCache

        with attending(shared.model, "sdpa"):
            return _chooses(shared, DynamicCache(config=shared.model.config))
    targets = shared.ids[:, shared.prompt + 1 :].flatten()
    reference = shared.reference.flatten(0, 1)
    text = shared.model.config.get_text_config(decoder=True)
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    tokens = shared.ids.shape[1] - 1
    size = 2 * tokens * text.num_hidden_layers * heads * dim * shared.reference.element_size()
    return {**agreement(reference, reference, targets), "bytes": float(size)}


def _reads(policy: str, mask: str | None = None, share: float = 1.0) -> Callable[[Any, int], dict[str, float]]:
    """Read with a bounded cache, token by token."""

    def run(shared: Reading | Choosing, replicate: int) -> dict[str, float]:
        cache = _cache(shared.model.config, policy, mask, int(shared.budget * share), shared.m, shared.seed)
        with _evicting(shared.model):
            if isinstance(shared, Choosing):
                return _chooses(shared, cache)
            head, tail = shared.ids[:, : shared.prompt], shared.ids[:, shared.prompt : -1]
            forward(shared.model, head, cache)
            logits = step_by_step(shared.model, cache, tail)
        targets = shared.ids[:, shared.prompt + 1 :].flatten()
        found = agreement(logits.float().flatten(0, 1), shared.reference.flatten(0, 1), targets)
        return {**found, "bytes": cache.memory_footprint()["total"] / len(shared.ids)}

    return run


def _chooses(shared: Choosing, cache: Any) -> dict[str, float]:
    """Answer a question whose context is read token by token once it is beyond the budget."""
    chances = choose(shared.model, cache, shared.context, shared.choices, shared.budget)
    return {"nll": -chances[shared.answer].item(), "accuracy": float(chances.argmax() == shared.answer)}


def _attends(mask: str | None) -> Callable[[Attending, int], dict[str, float]]:
    """How far one eviction moves later attention outputs, with merges at their probability."""

    def run(shared: Attending, replicate: int) -> dict[str, float]:
        from assay.serving import CaM, perturbation_report

        variants = {mask: CaM(m=min(shared.m, 28), mask=mask)} if mask else {}
        report = perturbation_report(shared.model, shared.ids, variants)
        found = report[report.variant == (mask or "evict")].mean(numeric_only=True)
        return {"change": found["norm"], "change_unscaled": found["norm_unscaled"], "merge_rate": found["merge_rate"]}

    return run


def _decodes(policy: str | None, mask: str | None = None) -> Callable[[Decoding, int], Timed]:
    """Time the decoding of some tokens with a full cache; without a policy plain attention over as many tokens."""

    def run(shared: Decoding, replicate: int) -> Timed:
        from transformers import DynamicCache

        model, state = shared.model, {}
        held = shared.ids.shape[1] - RACE_HEAD
        if policy is None:
            filled: Any = DynamicCache(config=model.config)
            with attending(model, "sdpa"):
                forward(model, shared.ids[:, :held], filled)
        else:
            filled = _cache(model.config, policy, mask, held, shared.m, replicate)
            with _evicting(model):
                forward(model, shared.ids[:, :held], filled)
                for t in range(held, shared.ids.shape[1]):
                    forward(model, shared.ids[:, t : t + 1], filled)
        token = shared.ids[:, :1]

        def before() -> None:
            # The race's model is its own, and a switch outside the clock is free.
            model.set_attn_implementation("sdpa" if policy is None else "evict")
            state["cache"] = copy.deepcopy(filled)

        def call() -> None:
            for _ in range(shared.tokens):
                forward(model, token, state["cache"])

        return Timed(call, {}, before)

    return run


READ = ("text", "choices")


def _arms() -> Sequence[Arm]:
    arms = [
        Arm("full", _full, "reference", "full cache", where=READ),
        Arm("streaming-half", _reads("streaming", share=0.5), "baseline", "StreamingLLM, half the budget", where=READ),
    ]
    for policy, label in (("streaming", "StreamingLLM"), ("h2o", "H2O"), ("scissorhands", "Scissorhands")):
        arms.append(Arm(policy, _reads(policy), "baseline", label, where=READ))
        for mask in MASKS if policy == "streaming" else ("bernoulli", "threshold"):
            role = "method" if mask in ("bernoulli", "threshold") else "ablation"
            name = f"{policy}+{mask.replace('_', '-')}"
            arms.append(Arm(name, _reads(policy, mask), role, f"{label} + CaM, {MASKS[mask]}", where=READ))  # type: ignore[arg-type]
    arms.append(Arm("tova", _reads("tova"), "baseline", "TOVA", where=READ))
    arms.append(Arm("evict", _attends(None), "baseline", "eviction", where=("attention",)))
    for mask, label in MASKS.items():
        role = "method" if mask in ("bernoulli", "threshold") else "ablation"
        name = f"merge-{mask.replace('_', '-')}"
        arms.append(Arm(name, _attends(mask), role, f"merge, {label}", where=("attention",)))  # type: ignore[arg-type]
    for name, policy_or_none, kind, role, label in (
        ("decode-dense", None, None, "reference", "plain attention over as many tokens"),
        ("decode-streaming", "streaming", None, "baseline", "StreamingLLM"),
        ("decode-streaming+bernoulli", "streaming", "bernoulli", "method", "StreamingLLM + CaM, paper's mask"),
        ("decode-streaming+threshold", "streaming", "threshold", "method", "StreamingLLM + CaM, threshold mask"),
        ("decode-h2o", "h2o", None, "baseline", "H2O"),
        ("decode-h2o+bernoulli", "h2o", "bernoulli", "method", "H2O + CaM, paper's mask"),
    ):
        run = _decodes(policy_or_none, kind)
        arms.append(Arm(name, run, role, label, race="decode", where=("decode",)))  # type: ignore[arg-type]
    return arms


def _helps(policy: str, label: str, reported: Reported | None = None) -> Statement:
    return Statement(
        name=f"helps-{policy}",
        text=f"{label} predicts better with CaM (the paper's mask) at the same budget",
        metric="nll",
        method=f"{policy}+bernoulli",
        baselines=(policy,),
        where=READ,
        reported=reported,
    )


CLAIM = Claim(
    slug="cam",
    title="CaM: merging evicted tokens into a bounded key-value cache",
    family="serving",
    paper=PAPER,
    question="My cache is too small for my text: does merging what it drops help my model, or harm it?",
    statements=(
        Statement(
            name="compression",
            text="A smaller StreamingLLM cache is further from the full cache than one of twice its size",
            metric="kl",
            method="streaming",
            baselines=("streaming-half",),
            where=("text",),
        ),
        Statement(
            name="perturbation",
            text="Merging with the paper's mask moves attention outputs less than eviction does",
            metric="change",
            method="merge-bernoulli",
            baselines=("evict",),
            scale="ratio",
            where=("attention",),
        ),
        Statement(
            name="perturbation-unscaled",
            text="The same as the paper counts it, without the softmax making up for the evicted weight",
            metric="change_unscaled",
            method="merge-bernoulli",
            baselines=("evict",),
            scale="ratio",
            where=("attention",),
            decides=False,
        ),
        Statement(
            name="mask",
            text="The paper's mask predicts better than merging always",
            metric="nll",
            method="streaming+bernoulli",
            baselines=("streaming+all",),
            where=READ,
        ),
        Statement(
            name="mask-attention",
            text="The paper's mask moves attention outputs less than merging always does",
            metric="change",
            method="merge-bernoulli",
            baselines=("merge-all",),
            scale="ratio",
            where=("attention",),
        ),
        Statement(
            name="always-harms",
            text="Merging always predicts worse than eviction",
            metric="nll",
            method="streaming",
            baselines=("streaming+all",),
            where=READ,
        ),
        _helps(
            "streaming",
            "StreamingLLM",
            Reported(
                "RTE 49.5 without and 54.6 % with CaM, OpenBookQA 30.0 and 31.8 %",
                "LLaMA-7B (as many key heads as query heads), zero-shot, cache of 20 % of the prompt",
                "section 5, zero-shot tasks",
            ),
        ),
        _helps("h2o", "H2O"),
        _helps("scissorhands", "Scissorhands"),
        Statement(
            name="cost",
            text="CaM adds less than 5 % to the time of decoding with StreamingLLM",
            metric="seconds",
            method="decode-streaming+bernoulli",
            baselines=("decode-streaming",),
            scale="ratio",
            bound=1.05,
            where=("decode",),
            reported=Reported(
                "26.1 without and 27.3 ms per token with CaM; 19.1 and 19.3 GB",
                "LLaMA-7B on PG-19, one A800 GPU",
                "section 5, efficiency",
                value=27.3 / 26.1,
            ),
        ),
        Statement(
            name="threshold",
            text="StreamingLLM predicts better with CaM and the threshold mask",
            metric="nll",
            method="streaming+threshold",
            baselines=("streaming",),
            where=READ,
            decides=False,
        ),
        Statement(
            name="threshold-harmless",
            text="StreamingLLM predicts at most 0.01 nat per token worse with CaM and the threshold mask",
            metric="nll",
            method="streaming+threshold",
            baselines=("streaming",),
            bound=0.01,
            where=("text",),
            decides=False,
        ),
        Statement(
            name="threshold-attention",
            text="Merging with the threshold mask moves attention outputs less than eviction does",
            metric="change",
            method="merge-threshold",
            baselines=("evict",),
            scale="ratio",
            where=("attention",),
            decides=False,
        ),
    ),
    metrics=(
        Metric("nll", "negative log-likelihood (text: per token; choices: of the right one)", "lower", "nat"),
        Metric("kl", "KL from the full cache", "lower", "nat/token"),
        Metric("ppl", "perplexity", None),
        Metric("top1", "same most likely token", "higher"),
        Metric("accuracy", "questions answered right", "higher"),
        Metric("bytes", "cache of a document at the end", "lower", "B", counted=True),
        Metric("change", "change of attention outputs, of their norm", "lower"),
        Metric("change_unscaled", "the same without scaling the softmax", "lower"),
        Metric("merge_rate", "evictions that merge", None),
        Metric("seconds", "time of the decoded tokens", "lower", "s"),
    ),
    arms=tuple(_arms()),
    workload=Texts,
    scales={
        "smoke": Scale(
            2,
            {
                "model": "random",
                "prompt": 12,
                "continuation": 12,
                "budget": 12,
                "m": 4,
                "documents": 2,
                "attended": 64,
                "held": 16,
                "tokens": 2,
                "layers": 1,
                "dtype": "float32",
            },
            {"decode": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(
            8,
            {
                "prompt": 32,
                "continuation": 48,
                "budget": 32,
                "m": 16,
                "documents": 3,
                "attended": 192,
                "held": 256,
                "tokens": 16,
                "layers": 4,
                "dtype": "float32",
            },
            {"decode": Race(rounds=2, warmup=1)},
        ),
        # WikiText or PG-19 as --text, zero-shot tasks as --choices, and the paper's LLaMA-7B as --model.
        "paper": Scale(
            30,
            {
                "prompt": 64,
                "continuation": 1984,
                "budget": 64,
                "m": 16,
                "documents": 4,
                "attended": 192,
                "held": 64,
                "tokens": 128,
                "layers": 32,
                "dtype": "float16",
            },
            {"decode": Race(rounds=5, warmup=1)},
        ),
    },
    unit="batch of documents",
    snippet="""\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from assay.serving import CaM, EvictionCache, register_eviction_attention

config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
model = LlamaForCausalLM(config).eval()          # or AutoModelForCausalLM.from_pretrained(...)
register_eviction_attention()
model.set_attn_implementation("evict")           # this attention tells the cache its weights
cache = EvictionCache(model.config, "streaming", budget=64, merge=CaM(mask="threshold"))
output = model.generate(torch.ones(1, 40, dtype=torch.long), max_new_tokens=80, do_sample=False, cache=cache)
print(cache.memory_footprint()["ratio"])         # times smaller than a cache of all tokens
""",
    example="assay run cam --model ./my-llama --text my-documents.jsonl --choices my-questions.jsonl",
    devices=("cpu", "cuda"),
    notes=(
        "That the paper's mask does not help here has a reason that can be derived. When a token with weight A leaves, "
        "the softmax scales the others up by 1/(1 - A), which the paper's analysis leaves out. Dropping its value V "
        "then changes an output o by A(o - V)/(1 - A), merging it by (A o + (a - A) V)/(1 - A), where a is the mean "
        "weight of the targets. Even a perfectly matched merge (a = A) leaves A o/(1 - A): outputs are inflated, "
        "and every merge adds to it.",
        "Attention summed over steps favours old tokens, so the mask of the paper's text fires for most victims "
        "(merge_rate). A mask that fires for prominent tokens only (threshold) avoids the harm, and changes little.",
        "The embedded model is small, shares a key head between three query heads, and its weights were rounded to 4 "
        "bits; the paper's models have 7 to 65 billion parameters and a key head for each query head. Repeat this "
        "with --model on one of those before calling the paper wrong.",
        "All arms hold the same number of tokens; those that look at attention hold 4 to 16 bytes of bookkeeping a "
        "token and head besides (Scissorhands 50 more), which the bytes include.",
        "On a small model a step's time is that of launching operations, of which CaM adds about twenty a layer, "
        "however large the layer is: its share shrinks as the model grows.",
    ),
)
