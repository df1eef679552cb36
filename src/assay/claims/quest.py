"""Does Quest find what a long prompt hides, predict like the full cache, and decode faster (ICML 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Arm, Claim, Growth, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.errors import InputError
from assay.workloads.language import Document, agreement, attending, model_config, replay
from assay.workloads.long_context import Haystack, LongContext, LongContextTask
from assay.workloads.questions import step_by_step

if TYPE_CHECKING:
    import torch

PAPER = Paper(
    title="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
    authors="Jiaming Tang, Yilong Zhao, Kan Zhu, Guangxuan Xiao, Baris Kasikci, Song Han",
    venue="ICML 2024",
    url="https://arxiv.org/abs/2406.10774",
)
PAGE = 16
TIMED = tuple(2**i for i in range(10, 16))  # tokens; settings "1k" to "32k"


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Context:
    """What the timed arms share: one layer's keys and values ``[1, kv_heads, tokens, head_dim]`` and a query."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    budget: int
    threads: int


@dataclass(frozen=True)
class QuestTask(LongContextTask):
    """Retrieval, text, and one decoding step of attention over a growing context."""

    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    budget: int = 2048
    attention_threads: int = 1

    def prepare(self, setting: str, replicate: int) -> Haystack | Document | Context:
        """As :class:`LongContextTask`; for sizes ("32k") random keys, values and query, since speed ignores contents.

        The keys drift slowly along the text, as real ones do, so that pages differ in their range.
        """
        if setting in ("retrieval", "text"):
            return super().prepare(setting, replicate)
        import torch

        tokens = int(setting.removesuffix("k")) * 1024
        draw = torch.Generator().manual_seed(replicate)
        kind: dict[str, Any] = {"generator": draw, "dtype": torch.float32}
        drift = torch.randn(1, self.kv_heads, tokens // 256, 1, self.head_dim, **kind)
        keys = torch.randn(1, self.kv_heads, tokens // 256, 256, self.head_dim, **kind).add_(drift).flatten(2, 3)
        values = torch.randn(1, self.kv_heads, tokens, self.head_dim, **kind)
        query = torch.randn(1, self.heads, 1, self.head_dim, **kind)
        dtype = getattr(torch, self.dtype)
        query, keys, values = (x.to(device=self.device, dtype=dtype) for x in (query, keys, values))
        return Context(query, keys, values, self.budget, self.attention_threads)


@dataclass(frozen=True)
class LongTexts(LongContext):
    """A causal language model, long texts, facts hidden in them, and the sizes of the timed attention."""

    longest: int | None = field(default=None, metadata={"help": "largest context of the timed attention, in tokens"})
    budget: int | None = field(default=None, metadata={"help": "tokens that the timed Quest reads"})
    heads: int | None = field(default=None, metadata={"help": "query heads of the timed attention"})
    kv_heads: int | None = field(default=None, metadata={"help": "key-value heads of the timed attention"})
    head_dim: int | None = field(default=None, metadata={"help": "head dimension of the timed attention"})
    attention_threads: int | None = field(
        default=None, metadata={"help": "threads of the timed attention; 1 is least disturbed by what else is running"}
    )

    def build(self, *, device: str, seed: int) -> QuestTask:
        """Check everything and cut the text; see :meth:`LongContext.build`."""
        sizes = {"heads": 8, "kv_heads": 8, "head_dim": 128, "budget": 2048, "attention_threads": 1}
        sizes = {name: getattr(self, name) or default for name, default in sizes.items()}
        longest = self.longest or TIMED[-1]
        if longest < TIMED[0]:
            raise InputError(f"--longest must be at least {TIMED[0]} tokens, not {longest}")
        for name, size in sizes.items():
            least = 2 * PAGE if name == "budget" else 1
            if size < least:
                raise InputError(f"--{name.replace('_', '-')} must be at least {least}, not {size}")
        if sizes["heads"] % sizes["kv_heads"]:
            raise InputError(f"--heads {sizes['heads']} must be a multiple of --kv-heads {sizes['kv_heads']}")
        base = super().build(device=device, seed=seed)
        if base.folder is not None:
            from assay.serving import QuestCache

            name = self.model or "the embedded model"
            config = model_config(base.folder, name)
            try:
                QuestCache(config)
            except ValueError as error:
                raise InputError(f"--model {name!r}: {error}") from error
            if config.get_text_config(decoder=True).num_hidden_layers < 2:
                raise InputError(f"--model {name!r} has one layer, which Quest would leave dense")
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        known["digest"] = "-".join([base.digest, str(longest), *(str(v) for v in sizes.values())])
        contexts = tuple(f"{n // 1024}k" for n in TIMED if n <= longest)
        return QuestTask(**known | sizes | {"settings": ("retrieval", "text", *contexts)})


# --- caches -----------------------------------------------------------------------------------------------------------

Make = Callable[[Any], tuple[Any, str]]


def _dense_layers(config: Any) -> tuple[int, ...]:
    """The first two layers, as in the paper; of a model with few layers at most half. The same for every arm."""
    layers = config.get_text_config(decoder=True).num_hidden_layers
    return tuple(range(min(2, layers // 2)))


def _full(config: Any) -> tuple[Any, str]:
    from transformers import DynamicCache

    return DynamicCache(config=config), "sdpa"


def _quest(budget: int, **options: Any) -> Make:
    def make(config: Any) -> tuple[Any, str]:
        from assay.serving import QuestCache, register_quest_attention

        register_quest_attention()
        return QuestCache(config, token_budget=budget, dense_layers=_dense_layers(config), **options), "quest"

    return make


def _policy(policy: Any, budget: int) -> Make:
    def make(config: Any) -> tuple[Any, str]:
        from assay.claims._quest_policies import NAME, policy_cache

        return policy_cache(config, policy, budget, dense_layers=_dense_layers(config), page_size=PAGE), NAME

    return make


# --- arms -------------------------------------------------------------------------------------------------------------


def _run(make: Make, shared: Haystack | Document, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Decode ``ids`` after the shared prefill; logits, and what share of the cache a step read and the cache held."""
    model = shared.model
    cache, attention = make(model.config)
    with attending(model, attention):
        replay(cache, shared.layers)
        logits = step_by_step(model, cache, ids)[0].float()
    return logits, _traffic(cache, cache.get_seq_length())


def _traffic(cache: Any, tokens: int) -> dict[str, float]:
    """Share of a full cache that a step reads (``read``) and that stays in memory (``held``), metadata included."""
    if hasattr(cache, "stats"):
        stats = cache.stats()
        return {"read": stats["density"], "held": stats["bytes"] / (stats["bytes"] - stats["metadata_bytes"])}
    limited = [layer for layer in cache.layers if hasattr(layer, "budget")]
    dense = len(cache.layers) - len(limited)
    share = (dense + sum(min(1.0, layer.budget / tokens) for layer in limited)) / len(cache.layers)
    pages = bool(limited) and limited[0].policy in ("oracle", "random", "literal")
    return {"read": share, "held": 1.0 if pages else share}


def _retrieves(make: Make) -> Callable[[Haystack, int], dict[str, float]]:
    """Ask for what the context hides, token by token; the answer's tokens are given after they were predicted."""

    def run(shared: Haystack, replicate: int) -> dict[str, float]:
        import torch

        ids = torch.cat([shared.question[0], shared.answer[:-1]])[None]
        logits, traffic = _run(make, shared, ids)
        logits = logits[shared.question.shape[1] - 1 :]
        right = logits.argmax(-1) == shared.answer
        nll = torch.nn.functional.cross_entropy(logits, shared.answer)
        return {"exact": float(right.all()), "tokens": right.float().mean().item(), "nll": nll.item(), **traffic}

    return run


def _predicts(make: Make) -> Callable[[Document, int], dict[str, float]]:
    """Continue the document token by token."""

    def run(shared: Document, replicate: int) -> dict[str, float]:
        logits, traffic = _run(make, shared, shared.next)
        return {**agreement(logits, shared.reference, shared.targets), **traffic}

    return run


def _both(make: Make) -> Callable[[Any, int], dict[str, float]]:
    def run(shared: Any, replicate: int) -> dict[str, float]:
        return (_retrieves if isinstance(shared, Haystack) else _predicts)(make)(shared, replicate)

    return run


class _Module:
    """As much of an attention module as attention functions look at."""

    is_causal = True
    training = False

    def __init__(self, groups: int) -> None:
        self.num_key_value_groups = groups


def _timed(
    shared: Context, step: Callable[[], object], read: float, before: Callable[[], object] | None = None
) -> Timed:
    """A step with the threads that the workload says, whatever the race would grant."""
    import torch

    def call() -> object:
        granted = torch.get_num_threads()
        torch.set_num_threads(shared.threads)
        try:
            return step()
        finally:
            torch.set_num_threads(granted)

    return Timed(call, {"read": read}, before)


def _dense_step(shared: Context, replicate: int) -> Timed:
    """The attention that transformers calls by default, on contiguous tensors, without the cost of appending."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    module: Any = _Module(shared.query.shape[1] // shared.keys.shape[1])
    scale = shared.query.shape[3] ** -0.5
    tensors = shared.query, shared.keys, shared.values
    return _timed(shared, lambda: sdpa_attention_forward(module, *tensors, None, scaling=scale), 1.0)


def _quest_step(**options: Any) -> Callable[[Context, int], Timed]:
    """Append a token, refresh the metadata of its page, select, attend."""

    def run(shared: Context, replicate: int) -> Timed:
        from assay.serving.quest import QuestLayer, quest_attention_forward

        module: Any = _Module(shared.query.shape[1] // shared.keys.shape[1])
        layer = QuestLayer(page_size=PAGE, token_budget=shared.budget, **options)
        last = shared.keys[:, :, -1:], shared.values[:, :, -1:]
        layer.update(shared.keys[:, :, :-1], shared.values[:, :, :-1])
        scale = shared.query.shape[3] ** -0.5

        def step() -> object:
            keys, values = layer.update(*last)
            return quest_attention_forward(module, shared.query, keys, values, None, scaling=scale)

        step()
        counts = layer.counts()
        read = (counts["tokens_read"] + counts["scored"]) / counts["tokens_total"]
        return _timed(shared, step, read, lambda: layer.crop(-1))

    return run


def _simulated_step(shared: Context, replicate: int) -> Timed:
    """Quest as the authors' accuracy code computes it: metadata from all keys, then dense attention under a mask."""
    from assay.claims._quest_policies import PolicyLayer

    layer = PolicyLayer("literal", shared.budget, PAGE, replicate)
    scale = shared.query.shape[3] ** -0.5
    return _timed(shared, lambda: layer.attend(shared.query, shared.keys, shared.values, scale), 1.0)


def _kivi_step(shared: Context, replicate: int) -> Timed:
    """Attention on a 2-bit cache of the same tokens, which reads all of them in a fifth of the bytes."""
    from assay.serving.kivi import KIVILayer, packed_attention

    layer = KIVILayer()
    layer.update(shared.keys[:, :, :-1], shared.values[:, :, :-1])
    keys, values = layer.update(shared.keys[:, :, -1:], shared.values[:, :, -1:])
    held = sum(layer.memory()[name] for name in ("packed", "meta", "residual"))
    read = held / (shared.keys.nbytes + shared.values.nbytes)
    return _timed(shared, lambda: packed_attention(shared.query, keys, values), read)


SIZES = tuple(f"{n // 1024}k" for n in TIMED)
QUALITY = ("retrieval", "text")
EVICTION = {"h2o": "H2O", "tova": "TOVA", "streaming": "StreamingLLM"}


def _quality_arms() -> tuple[Arm, ...]:
    """The full cache, and at each budget Quest, its ablations and what it is compared with, where it is compared."""
    arms = [Arm("full", _both(_full), "reference", "full cache", where=QUALITY)]
    for budget, where in ((64, ("retrieval",)), (128, QUALITY), (256, QUALITY)):
        plain, shared = _both(_quest(budget)), _both(_quest(budget, gqa="max"))
        arms.append(Arm(f"quest-{budget}", plain, "method", f"Quest, {budget} tokens", where=where))
        if budget < 256:
            label = f"Quest, {budget}, one page list a group"
            arms.append(Arm(f"quest-max-{budget}", shared, "ablation", label, where=("retrieval",)))
            best = _both(_policy("oracle", budget))
            arms.append(Arm(f"oracle-{budget}", best, "reference", f"best pages, {budget}", where=where))
        forgets = ("text",) if budget == 256 else ("retrieval",)
        for policy, label in EVICTION.items():
            run = _both(_policy(policy, budget))
            arms.append(Arm(f"{policy}-{budget}", run, "baseline", f"{label}, {budget}", where=forgets))
    chance, loose = _both(_policy("random", 128)), _both(_quest(128, force_last=False, parity="eval"))
    arms.append(Arm("random-128", chance, "ablation", "random pages, 128", where=("retrieval",)))
    arms.append(Arm("quest-eval-128", loose, "ablation", "Quest, 128, as the accuracy code", where=("retrieval",)))
    return tuple(arms)


def _race_arms() -> tuple[Arm, ...]:
    race: dict[str, Any] = {"race": "attention", "where": SIZES}
    return (
        Arm("attend-dense", _dense_step, "baseline", "scaled_dot_product_attention", **race),
        Arm("attend-quest", _quest_step(gqa="max"), "method", "Quest, one page list a group", **race),
        Arm("attend-quest-head", _quest_step(gqa="head"), "ablation", "Quest, a page list a query head", **race),
        Arm("attend-kivi2", _kivi_step, "reference", "KIVI-2, all tokens", **race),
        Arm("attend-simulated", _simulated_step, "reference", "Quest by masking dense attention", **race),
    )


CLAIM = Claim(
    slug="quest",
    title="Quest: decode from the pages of the cache that matter",
    family="serving",
    paper=PAPER,
    question="Would reading only part of the key-value cache lose what my prompts say, and what time would it save?",
    statements=(
        Statement(
            name="retrieval",
            text="Finds what the context hides nearly as often as the full cache (at most 0.4 less), at 128 tokens",
            metric="exact",
            method="quest-128",
            baselines=("full",),
            bound=-0.4,
            where=("retrieval",),
            reported=Reported(
                "passkey accuracy 65 / 99 / 99 / 99 / 100 % with budgets of 32 / 64 / 128 / 256 / 512 tokens",
                "LongChat-7b-v1.5-32k, 10k tokens",
                "section 4, passkey retrieval",
            ),
        ),
        Statement(
            name="retrieval-eviction",
            text="Predicts the hidden answer better than caches that forget, at 128 tokens",
            metric="nll",
            method="quest-128",
            baselines=("h2o-128", "tova-128", "streaming-128"),
            where=("retrieval",),
            reported=Reported(
                "passkey accuracy 99 % against 1 % (H2O), 3 % (TOVA) and 1 % (StreamingLLM), 128 tokens",
                "LongChat-7b-v1.5-32k, 10k tokens",
                "section 4, passkey retrieval",
            ),
        ),
        Statement(
            name="text",
            text="Continues a text as well as the full cache (at most 0.05 nat per token worse), at 256 tokens",
            metric="nll",
            method="quest-256",
            baselines=("full",),
            bound=0.05,
            where=("text",),
            reported=Reported(
                "the perplexity curves overlap at a budget of 4,096 tokens",
                "LongChat-7b-v1.5-32k on PG19, up to 32k tokens",
                "section 4, language modelling",
            ),
        ),
        Statement(
            name="text-eviction",
            text="Stays closer to the full cache than caches that forget, at 256 tokens",
            metric="kl",
            method="quest-256",
            baselines=("h2o-256", "tova-256", "streaming-256"),
            where=("text",),
            reported=Reported(
                "H2O and TOVA lie above Quest in perplexity at a budget of 4,096 tokens",
                "LongChat-7b-v1.5-32k on PG19, up to 32k tokens",
                "section 4, language modelling",
            ),
        ),
        Statement(
            name="speed",
            text="A step of attention takes less than a quarter of the dense one's time, 2,048 of 32k tokens",
            metric="seconds",
            method="attend-quest",
            baselines=("attend-dense",),
            scale="ratio",
            bound=0.25,
            where=("32k",),
            reported=Reported(
                "7.03 times faster self-attention (and 2.23 times faster decoding, with 4-bit weights)",
                "Llama-2-7B shapes on a GPU, 32k tokens, budget 2,048",
                "section 4, efficiency",
                value=1 / 7.03,
            ),
        ),
        Statement(
            name="simulation",
            text="At least five times faster than masking dense attention, as the authors' accuracy code does",
            metric="seconds",
            method="attend-quest",
            baselines=("attend-simulated",),
            scale="ratio",
            bound=0.2,
            where=("32k",),
            decides=False,
        ),
        Statement(
            name="bound-or-oracle",
            text="The bound on the scores costs nothing against knowing the scores",
            metric="nll",
            method="quest-128",
            baselines=("oracle-128",),
            bound=0.05,
            where=("retrieval",),
            decides=False,
        ),
        Statement(
            name="shared-pages",
            text="One page list for the query heads of a group is as good as one for each (at most 0.05 nat worse)",
            metric="nll",
            method="quest-max-128",
            baselines=("quest-128",),
            bound=0.05,
            where=("retrieval",),
            decides=False,
        ),
    ),
    metrics=(
        Metric("exact", "answers that are right to the last token", "higher"),
        Metric("tokens", "tokens of the answer that are right", "higher"),
        Metric("nll", "negative log-likelihood", "lower", "nat/token"),
        Metric("ppl", "perplexity", None),
        Metric("kl", "KL from the full cache", "lower", "nat/token"),
        Metric("top1", "same most likely token", "higher"),
        Metric("read", "share of a full cache that a step reads", "lower", counted=True),
        Metric("held", "share of a full cache that stays in memory", "lower", counted=True),
        Metric("seconds", "time of a step of attention", "lower", "s"),
    ),
    arms=(*_quality_arms(), *_race_arms()),
    workload=LongTexts,
    scales={
        "smoke": Scale(
            2,
            {
                "model": "random",
                "prompt": 320,
                "continuation": 4,
                "haystack": 300,
                "dtype": "float32",
                "longest": 1024,
                "budget": 256,
                "heads": 4,
                "kv_heads": 2,
                "head_dim": 64,
                "attention_threads": 1,
            },
            {"attention": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(
            12,
            {
                "prompt": 1024,
                "continuation": 32,
                "haystack": 800,
                "dtype": "float32",
                "longest": 32768,
                "budget": 2048,
                "heads": 8,
                "kv_heads": 8,
                "head_dim": 128,
                "attention_threads": 1,
            },
            {"attention": Race(rounds=3, warmup=1)},
        ),
        # Needs --model, one with 32k positions (the paper's: lmsys/longchat-7b-v1.5-32k). Its budgets for passkeys are
        # these three and larger; PG19 is given with --text.
        "paper": Scale(
            100,
            {
                "prompt": 30000,
                "continuation": 512,
                "haystack": 10000,
                "dtype": "float16",
                "longest": 32768,
                "budget": 2048,
                "heads": 32,
                "kv_heads": 32,
                "head_dim": 128,
                "attention_threads": 1,
            },
            {"attention": Race(rounds=20, warmup=3)},
        ),
    },
    unit="prompt",
    growths=(
        Growth(
            name="attention",
            text="Time of a step of attention against the length of the context",
            metric="seconds",
            arms=("attend-dense", "attend-quest", "attend-quest-head", "attend-kivi2"),
            sizes={name: float(size) for name, size in zip(SIZES, TIMED)},
            size_label="tokens in the cache",
            fit_from=4096.0,  # twice the default budget: shorter contexts are dense
        ),
    ),
    snippet="""\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from assay.serving import QuestCache, register_quest_attention

config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2, vocab_size=99)
model = LlamaForCausalLM(config).eval()          # or AutoModelForCausalLM.from_pretrained(...)
register_quest_attention()
model.set_attn_implementation("quest")
cache = QuestCache(model.config, token_budget=128)
output = model.generate(torch.ones(1, 600, dtype=torch.long), max_new_tokens=40, do_sample=False, cache=cache)
print(cache.stats()["density"])                  # share of the cache that a step read
""",
    example="assay run quest --model ./my-llama --text my-documents.jsonl --qa my-questions.jsonl",
    devices=("cpu", "cuda"),
    notes=(
        "Quest saves time, not memory: it holds 1/16 more than the full cache. Caches that forget hold only what they "
        "read, and cannot bring back what turns out to matter.",
        "The caches that forget are computed densely under a mask, for quality only; like Quest they leave the first "
        "two layers alone, and they forget only after the prompt.",
        "The timed Quest appends a token and refreshes its page; dense attention is timed without appending. What can "
        "be gained is limited by the bytes: 1 / (1/16 + budget/tokens), 8 at 32k tokens with a budget of 2,048.",
        "The text's setting is far from the paper's: 1,024 tokens, of which the newest 256 tell most of what comes "
        "next, so that caches which forget lose little, too. --prompt takes longer ones, up to the model's positions.",
        "On the embedded model (30 layers, head dimension 64, 3 key-value heads) the bound is looser than the true "
        "scores: the arm 'best pages' shows what a perfect bound would find with as many pages.",
    ),
)
