"""Which key-value cache serves a model best at equal memory: quantised, selected from, evicted or merged.

A comparison of our own: what each paper claims is asked by ``kivi``, ``quest`` and ``cam``. Here all caches stand in
one table, on one model and text, at the bytes that KIVI's 2 and 4 bits take.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Arm, Claim, Frontier, Metric, Race, Scale, Statement, Timed
from assay.errors import InputError
from assay.workloads.language import KeysValues, agreement, attending, forward, model_config, replay
from assay.workloads.long_context import LongContext, LongContextTask
from assay.workloads.questions import step_by_step

if TYPE_CHECKING:
    import torch

BITS = (2, 4)
LEAST = 40  # tokens that the smallest budget must leave: sinks, the targets of a merge, some pages


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """What all arms share: a model, a prompt ``[1, P]``, its exact keys and values, and what is decoded after it.

    ``steps`` ``[1, n]`` are decoded one by one. In setting "text" they are followed by ``targets`` and compared with
    the full cache's ``reference``; in "retrieval" the last of them belong to the ``answer``. ``budgets`` are the tokens
    whose 16-bit keys and values take the bytes of KIVI at 2 and 4 bits.
    """

    model: Any
    prompt: torch.Tensor
    layers: KeysValues
    steps: torch.Tensor
    budgets: dict[int, int]
    timed: int
    targets: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    answer: torch.Tensor | None = None


@dataclass(frozen=True)
class CachesTask(LongContextTask):
    """Windows of a long text ("text", timed as well) and facts hidden in a long prompt ("retrieval")."""

    timed: int = 8

    def prepare(self, setting: str, replicate: int) -> Reading:
        """Process the prompt once, and count what KIVI holds of it."""
        import torch

        found = super().prepare(setting, replicate)
        budgets = {bits: _kivi_tokens(found.model.config, found.layers, bits) for bits in BITS}
        if setting == "retrieval":
            prompt = torch.tensor(self.questions[replicate].context, device=self.device)[None]
            steps = torch.cat([found.question[0], found.answer[:-1]])[None]
            return Reading(found.model, prompt, found.layers, steps, budgets, self.timed, answer=found.answer)
        prompt = torch.tensor(self.documents[replicate][: self.prompt], device=self.device)[None]
        compared = {"targets": found.targets, "reference": found.reference}
        return Reading(found.model, prompt, found.layers, found.next, budgets, self.timed, **compared)


@dataclass(frozen=True)
class LongTexts(LongContext):
    """A causal language model, long texts that it continues, facts hidden in long prompts, and the timed decoding."""

    timed: int | None = field(default=None, metadata={"help": "tokens that are decoded in the timed call"})

    def build(self, *, device: str, seed: int) -> CachesTask:
        """Check everything and cut the text; see :meth:`LongContext.build`."""
        base = super().build(device=device, seed=seed)
        timed = self.timed or 8
        if not 1 <= timed <= base.continuation:
            raise InputError(f"--timed must be from 1 to the --continuation of {base.continuation}, not {timed}")
        if base.folder is not None:
            _check_model(base, self.model or "the embedded model")
        shortest = min(base.prompt, *(len(q.context) for q in base.questions))
        least = LEAST * 6  # KIVI-2 holds at least a sixth of a 16-bit cache
        if shortest < least:
            raise InputError(
                f"--prompt and --haystack must be at least {least} tokens, so that budgets hold {LEAST}; not {shortest}"
            )
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        return CachesTask(**known | {"digest": f"{base.digest}-{timed}", "timed": timed})


def _check_model(base: LongContextTask, name: str) -> None:
    """Every cache must be able to serve the model, before anything is computed."""
    from assay.serving import EvictionCache, KIVICache, QuestCache
    from assay.serving.kivi.quantize import check_head_dim

    assert base.folder is not None
    config = model_config(base.folder, name).get_text_config(decoder=True)
    try:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        check_head_dim(dim, BITS[0], 32, "quantising values per token")
        for make in (KIVICache, QuestCache):
            make(config)
        EvictionCache(config, budget=LEAST)
    except ValueError as error:
        raise InputError(f"--model {name!r}: {error}") from error


# --- caches -----------------------------------------------------------------------------------------------------------

Make = Callable[[Reading], tuple[Any, str]]


def _halved(layers: KeysValues) -> KeysValues:
    """Keys and values in 16 bits, in which sizes are counted whatever the model computes with."""
    import torch

    return [(keys.to(torch.bfloat16), values.to(torch.bfloat16)) for keys, values in layers]


def _dense_bytes(layers: KeysValues) -> int:
    return sum(2 * (keys.numel() + values.numel()) for keys, values in layers)


def _kivi_bytes(config: Any, layers: KeysValues, bits: int) -> int:
    from assay.serving import KIVICache

    return int(replay(KIVICache(config, k_bits=bits, v_bits=bits), _halved(layers)).memory_footprint()["total"])


def _kivi_tokens(config: Any, layers: KeysValues, bits: int) -> int:
    """As many tokens in 16 bits as fit into what KIVI holds. What a policy keeps besides is not held against it."""
    tokens = layers[0][0].shape[2]
    return int(_kivi_bytes(config, layers, bits) * tokens // _dense_bytes(layers))


def _full(shared: Reading) -> tuple[Any, str]:
    from transformers import DynamicCache

    return replay(DynamicCache(config=shared.model.config), shared.layers), "sdpa"


def _kivi(bits: int) -> Make:
    def make(shared: Reading) -> tuple[Any, str]:
        from assay.serving import KIVICache, register_kivi_attention

        register_kivi_attention()
        return replay(KIVICache(shared.model.config, k_bits=bits, v_bits=bits), shared.layers), "kivi"

    return make


def _quanto(bits: int) -> Make:
    """The cache of transformers with KIVI's group, window and axes.

    It packs whole groups of 32 tokens of what comes first; what is left of a prompt goes to its window.
    """

    def make(shared: Reading) -> tuple[Any, str]:
        from transformers import QuantizedCache

        sizes = {"q_group_size": 32, "residual_length": 128, "axis_key": -1, "axis_value": 0}
        cache = QuantizedCache("quanto", shared.model.config, nbits=bits, **sizes)
        whole = shared.prompt.shape[1] // 32 * 32
        for part in (slice(0, whole), slice(whole, None)):
            layers = [(keys[:, :, part], values[:, :, part]) for keys, values in shared.layers]
            if layers[0][0].shape[2]:
                replay(cache, layers)
        return cache, "sdpa"

    return make


def _quest(bits: int) -> Make:
    """A step reads as many bytes as the budget holds, metadata of all pages and the paper's dense layers included."""

    def make(shared: Reading) -> tuple[Any, str]:
        from assay.serving import QuestCache, register_quest_attention

        register_quest_attention()
        tokens, layers, page = shared.prompt.shape[1], len(shared.layers), 16
        dense = min(2, layers // 2)
        budget = (layers * shared.budgets[bits] - dense * tokens) // (layers - dense) - tokens // page
        cache = QuestCache(
            shared.model.config, page_size=page, token_budget=max(2 * page, budget), dense_layers=range(dense)
        )
        with attending(shared.model, "quest"):
            return replay(cache, shared.layers), "quest"

    return make


def _evicting(bits: int, policy: str, merges: bool = False) -> Make:
    """The prompt is processed with full attention, which the policy watches; then what is over the budget leaves."""

    def make(shared: Reading) -> tuple[Any, str]:
        from assay.serving import CaM, EvictionCache, register_eviction_attention

        register_eviction_attention()
        config = shared.model.config
        cache = EvictionCache(config, policy, shared.budgets[bits], merge=CaM() if merges else None)
        with attending(shared.model, "evict"):
            forward(shared.model.base_model, shared.prompt, cache)
        return cache, "evict"

    return make


# --- arms -------------------------------------------------------------------------------------------------------------


def _fork(cache: Any) -> Any:
    """A copy that can be appended to. transformers' layers replace their tensors, ours append to them in place."""
    fork = copy.copy(cache)
    ours = [type(layer).__module__.startswith("assay.") for layer in cache.layers]
    fork.layers = [copy.deepcopy(layer) if own else copy.copy(layer) for layer, own in zip(cache.layers, ours)]
    return fork


def _sizes(cache: Any, shared: Reading) -> dict[str, float]:
    """Share of a full 16-bit cache that is held after the prompt, and (of a cache that was used) read by a step."""
    full = _dense_bytes(shared.layers)
    if hasattr(cache, "stats"):  # Quest: counted by its steps
        stats = cache.stats()
        held = stats["bytes"] / (stats["bytes"] - stats["metadata_bytes"])
        return {"held": held, "read": stats["density"]}
    if hasattr(cache, "eviction_layers"):
        size = cache.memory_footprint()
        keys = shared.layers[0][0]
        held = (size["kv"] * 2 / keys.element_size() + size["book"]) / full
        return {"held": held, "read": held}
    return {"held": 1.0, "read": 1.0}


def _quantised(shared: Reading, bits: int, quanto: bool) -> dict[str, float]:
    """The same of a cache that packs its numbers. Quanto's reads are left open: it unpacks everything every step."""
    import dataclasses

    from assay.claims.kivi import _bytes

    half = dataclasses.replace(shared, layers=_halved(shared.layers))
    if quanto:
        return {"held": _bytes(_quanto(bits)(half)[0]) / _dense_bytes(shared.layers)}
    held = _kivi_bytes(shared.model.config, shared.layers, bits) / _dense_bytes(shared.layers)
    return {"held": held, "read": held}


def _decodes(make: Make, packed: tuple[int, bool] | None = None) -> Callable[[Reading, int], Timed]:
    """Continue the text token by token, and time the first of those steps from where the prompt ended."""

    def run(shared: Reading, replicate: int) -> Timed:
        model, state = shared.model, {}
        filled, attention = make(shared)
        cache = _fork(filled)
        sizes = _sizes(cache, shared) if packed is None else _quantised(shared, *packed)
        with attending(model, attention):
            logits = step_by_step(model, cache, shared.steps)[0].float()
        if hasattr(cache, "stats"):
            sizes = _sizes(cache, shared)
        assert shared.reference is not None and shared.targets is not None
        metrics = {**agreement(logits, shared.reference, shared.targets), **sizes}

        def before() -> None:
            state["cache"] = _fork(filled)

        def call() -> None:
            with attending(model, attention):
                for t in range(shared.timed):
                    forward(model, shared.steps[:, t : t + 1], state["cache"])

        return Timed(call, metrics, before, per=shared.timed)

    return run


def _finds(make: Make) -> Callable[[Reading, int], dict[str, float]]:
    """Ask for what the prompt hides, token by token; the answer's tokens are given after they were predicted."""

    def run(shared: Reading, replicate: int) -> dict[str, float]:
        import torch

        cache, attention = make(shared)
        with attending(shared.model, attention):
            logits = step_by_step(shared.model, cache, shared.steps)[0].float()
        assert shared.answer is not None
        logits = logits[-len(shared.answer) :]
        right = (logits.argmax(-1) == shared.answer).all()
        return {"nll": torch.nn.functional.cross_entropy(logits, shared.answer).item(), "exact": float(right)}

    return run


POLICIES = {"streaming": "StreamingLLM", "h2o": "H2O", "tova": "TOVA", "cam": "CaM on StreamingLLM"}


def _arms() -> tuple[Arm, ...]:
    caches: list[tuple[str, str, str, Make, tuple[int, bool] | None]] = [
        ("full", "reference", "full cache", _full, None),
    ]
    for bits in BITS:
        at = f"at KIVI-{bits}'s bytes"
        caches.append((f"kivi-{bits}", "method", f"KIVI-{bits}", _kivi(bits), (bits, False)))
        caches.append((f"quanto-{bits}", "baseline", f"quanto, {bits} bits", _quanto(bits), (bits, True)))
        caches.append((f"quest-{bits}", "method", f"Quest, reads {at}", _quest(bits), None))
        for name, label in POLICIES.items():
            make = _evicting(bits, "streaming", merges=True) if name == "cam" else _evicting(bits, name)
            role = "method" if name == "cam" else "baseline"
            caches.append((f"{name}-{bits}", role, f"{label}, {at}", make, None))
    arms = []
    for name, role, label, make, packed in caches:
        needs = ("optimum-quanto>=0.2.7",) if name.startswith("quanto") else ()
        what: dict[str, Any] = {"role": role, "label": label, "requires": needs}
        arms.append(Arm(name, _decodes(make, packed), race="decode", where=("text",), **what))
        arms.append(Arm(f"find-{name}", _finds(make), where=("retrieval",), **what))
    return tuple(arms)


def _statements() -> tuple[Statement, ...]:
    found = []
    for bits in BITS:
        forgets = tuple(f"{name}-{bits}" for name in POLICIES)
        at = f"at the bytes of KIVI-{bits}"
        found += [
            Statement(
                name=f"quantise-{bits}",
                text=f"KIVI-{bits} stays closer to the full cache than caches that forget, {at}",
                metric="kl",
                method=f"kivi-{bits}",
                baselines=forgets,
                where=("text",),
            ),
            Statement(
                name=f"select-{bits}",
                text=f"Quest, which holds everything and reads as much, stays closer than caches that forget, {at}",
                metric="kl",
                method=f"quest-{bits}",
                baselines=forgets,
                where=("text",),
            ),
            Statement(
                name=f"find-{bits}",
                text=f"KIVI-{bits} predicts an answer hidden in the prompt better than caches that forget, {at}",
                metric="nll",
                method=f"find-kivi-{bits}",
                baselines=tuple(f"find-{name}" for name in forgets),
                where=("retrieval",),
            ),
            Statement(
                name=f"merge-{bits}",
                text=f"Merging evicted values stays closer to the full cache than dropping them, {at}",
                metric="kl",
                method=f"cam-{bits}",
                baselines=(f"streaming-{bits}",),
                where=("text",),
                decides=False,
            ),
        ]
    return tuple(found)


CLAIM = Claim(
    slug="caches",
    title="Key-value caches at equal memory",
    family="serving",
    paper=None,
    question="Which key-value cache answers most like my model's own, for how much memory and time?",
    statements=_statements(),
    metrics=(
        Metric("ppl", "perplexity", None),
        Metric("kl", "KL from the full cache", "lower", "nat/token"),
        Metric("top1", "same most likely token", "higher"),
        Metric("nll", "negative log-likelihood (retrieval: of the answer)", "lower", "nat/token"),
        Metric("exact", "hidden answers found", "higher"),
        Metric("held", "bytes held after the prompt, of a full 16-bit cache", "lower"),
        Metric("read", "bytes that a step reads, of a full 16-bit cache", "lower"),
        Metric("seconds", "decoding time of a token", "lower", "s"),
    ),
    arms=_arms(),
    workload=LongTexts,
    scales={
        "smoke": Scale(
            2,
            {
                "model": "random",
                "prompt": 256,
                "continuation": 4,
                "haystack": 256,
                "timed": 1,
                "dtype": "float32",
            },
            {"decode": Race(rounds=1, warmup=1)},
        ),
        "desk": Scale(
            5,
            {"prompt": 1024, "continuation": 32, "haystack": 800, "timed": 4, "dtype": "float32"},
            {"decode": Race(rounds=2, warmup=1)},
        ),
        # A model of 7 billion parameters with as many key heads as query heads as --model, PG-19 as --text.
        "paper": Scale(
            20,
            {"prompt": 16384, "continuation": 256, "haystack": 16384, "timed": 64, "dtype": "bfloat16"},
            {"decode": Race(rounds=5, warmup=2)},
        ),
    },
    unit="document",
    snippet="""\
from assay.serving import EvictionCache, KIVICache, QuestCache      # see `assay card kivi`, `quest` and `cam`
""",
    example="assay run kivi quest cam --model ./my-llama --text my-documents.jsonl",
    devices=("cpu", "cuda"),
    frontiers=(
        Frontier("memory", "Memory against closeness to the full cache", "held", "kl", "text"),
        Frontier("time", "Decoding time against closeness to the full cache", "seconds", "kl", "text"),
    ),
    notes=(
        "Equal memory: caches that forget hold as many tokens in 16 bits as fit into what KIVI holds of the prompt at "
        "2 or 4 bits; what a policy notes about tokens besides (8 to 60 bytes a token and head) is in the table, but "
        "not taken from its budget. Quest holds everything, and reads that many bytes in a step.",
        "Bytes are counted as those of a 16-bit model, whatever dtype the arms compute in.",
        "Caches that forget see the whole prompt at once, before they forget: their best case. A prompt in chunks, or "
        "a conversation, makes them forget earlier.",
        "At this prompt length a step's time is that of the model's weights and of launching operations, more than "
        "that of its cache; the curve of attention time against context length is in `quest`.",
    ),
)
