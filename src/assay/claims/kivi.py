"""Does KIVI keep a language model's predictions while its cache shrinks to a fifth, and at what speed (ICML 2024)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from assay.bench.claim import Arm, Claim, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.errors import InputError
from assay.workloads.language import (
    CausalText,
    Document,
    KeysValues,
    TextTask,
    agreement,
    attending,
    continue_with,
    forward,
    model_config,
    random_model,
    replay,
    synthetic_keys_values,
)

PAPER = Paper(
    title="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    authors="Zirui Liu, Jiayi Yuan, Hongye Jin, Shaochen (Henry) Zhong, Zhaozhuo Xu, Vladimir Braverman, Beidi Chen, "
    "Xia Hu",
    venue="ICML 2024",
    url="https://arxiv.org/abs/2402.02750",
)


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoding:
    """What the timed arms share: layers of a model's shapes, the contents of a cache, how many tokens to decode."""

    model: Any
    layers: KeysValues
    tokens: int


@dataclass(frozen=True)
class KIVITask(TextTask):
    """Documents (setting "text") and a race over decoded tokens (setting "decode")."""

    length: int = 4096
    tokens: int = 128
    layers: int = 2
    batch: int = 1

    def prepare(self, setting: str, replicate: int) -> Document | Decoding:
        """As :class:`TextTask` for "text"; for "decode" the model's shapes with random contents.

        Speed and size do not depend on the contents, and all of a model's layers cost the same.
        """
        if setting == "text":
            return super().prepare(setting, replicate)
        import torch
        from transformers import AutoModelForCausalLM

        source = self.folder
        config = random_model().config if source is None else model_config(source, str(source))
        config = copy.deepcopy(config.get_text_config(decoder=True))
        config.num_hidden_layers = min(self.layers, config.num_hidden_layers)
        if getattr(config, "layer_types", None):
            full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
            config.num_hidden_layers = min(config.num_hidden_layers, len(full))
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        loader: Any = AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(replicate)
            model = loader.from_config(config, dtype=getattr(torch, self.dtype)).base_model
        model = model.eval().requires_grad_(False).to(self.device)
        layers = synthetic_keys_values(
            config, self.length, batch=self.batch, seed=replicate, dtype=self.dtype, device=self.device
        )
        return Decoding(model, layers, self.tokens)


@dataclass(frozen=True)
class Texts(CausalText):
    """A causal language model, texts that it continues, and the size of the timed decoding."""

    length: int | None = field(default=None, metadata={"help": "tokens in the cache when the timed decoding starts"})
    tokens: int | None = field(default=None, metadata={"help": "tokens that are decoded in the timed call"})
    layers: int | None = field(default=None, metadata={"help": "layers of the model that the timed decoding runs"})
    batch: int | None = field(default=None, metadata={"help": "sequences that are decoded at once when timed"})

    def build(self, *, device: str, seed: int) -> KIVITask:
        """Check everything and cut the text; see :meth:`CausalText.build`."""
        sizes = {"length": self.length or 4096, "tokens": self.tokens or 128, "layers": self.layers or 2}
        sizes["batch"] = self.batch or 1
        for name, value in sizes.items():
            if value < 1:
                raise InputError(f"--{name} must be at least 1, not {value}")
        base = super().build(device=device, seed=seed)
        if base.folder is not None:
            from assay.serving import KIVICache
            from assay.serving.kivi.quantize import check_head_dim

            name = self.model or "the embedded model"
            config = model_config(base.folder, name).get_text_config(decoder=True)
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            try:
                check_head_dim(dim, 2, 32, "quantising values per token")
                KIVICache(config)
            except ValueError as error:
                raise InputError(f"--model {name!r}: {error}") from error
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        known["digest"] = "-".join([base.digest, *(str(v) for v in sizes.values())])
        return KIVITask(**known | sizes | {"settings": ("text", "decode")})


# --- caches -----------------------------------------------------------------------------------------------------------

Make = Callable[[Any], Any]


def _exact(config: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=config)


def _kivi(**options: Any) -> Make:
    def make(config: Any) -> Any:
        from assay.serving import KIVICache

        return KIVICache(config, **options)

    return make


def _fake(bits: int, key_axis: str, value_axis: str) -> Make:
    """All tokens quantised, no window: the paper's study of axes."""
    axes = {"key_axis": key_axis, "value_axis": value_axis}
    return _kivi(k_bits=bits, v_bits=bits, residual_length=0, simulate=True, **axes)


def _quantized(backend: str, bits: int, axis_key: int, axis_value: int) -> Make:
    """The cache of transformers, with KIVI's group and window, and the axes that predict best of all four pairs.

    For quanto these group keys along tokens and values along channels, as KIVI does.
    """

    def make(config: Any) -> Any:
        from transformers import QuantizedCache

        return QuantizedCache(
            backend,
            config,
            nbits=bits,
            q_group_size=32,
            residual_length=128,
            axis_key=axis_key,
            axis_value=axis_value,
        )

    return make


# --- arms -------------------------------------------------------------------------------------------------------------


def _predicts(make: Make) -> Callable[[Document, int], dict[str, float]]:
    """Continue the document from a cache that was compressed after the shared prefill."""

    def run(shared: Document, replicate: int) -> dict[str, float]:
        with attending(shared.model, "sdpa"):
            cache = replay(make(shared.model.config), shared.layers)
            logits = continue_with(shared.model, cache, shared.next)
        return agreement(logits, shared.reference, shared.targets)

    return run


def _decodes(make: Make, attention: str) -> Callable[[Decoding, int], Timed]:
    """Time the decoding of some tokens from a filled cache, and count what the cache holds in 16 bits."""

    def run(shared: Decoding, replicate: int) -> Timed:
        import torch

        from assay.serving.kivi import register_kivi_attention

        register_kivi_attention()
        model, config = shared.model, shared.model.config
        filled = replay(make(config), shared.layers)
        state: dict[str, Any] = {}
        token = torch.ones((shared.layers[0][0].shape[0], 1), dtype=torch.long, device=shared.layers[0][0].device)

        def before() -> None:
            model.set_attn_implementation(attention)
            state["cache"] = _fork(filled)

        def call() -> None:
            for _ in range(shared.tokens):
                forward(model, token, state["cache"])

        half = [(keys.to(torch.bfloat16), values.to(torch.bfloat16)) for keys, values in shared.layers]
        rows = sum(keys.shape[0] * keys.shape[2] for keys, _ in half)
        size = _bytes(replay(make(config), half)) / rows
        return Timed(call, {"bytes": size}, before)

    return run


def _fork(cache: Any) -> Any:
    """A copy that can be appended to. transformers' layers replace their tensors, ours append to them in place."""
    fork = copy.copy(cache)
    fork.layers = [copy.deepcopy(x) if hasattr(x, "key_store") else copy.copy(x) for x in cache.layers]
    return fork


def _bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds, as far as they are in use."""
    if hasattr(cache, "memory_footprint"):
        return int(cache.memory_footprint()["total"])
    return sum(_tensor_bytes(value) for layer in cache.layers for value in vars(layer).values())


def _tensor_bytes(value: Any) -> int:
    import torch

    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_tensor_bytes, value))
    if not isinstance(value, torch.Tensor):
        return 0
    inner = [t for t in vars(value).values() if isinstance(t, torch.Tensor)]  # quanto wraps its tensors in tensors
    return sum(map(_tensor_bytes, inner)) if inner else value.nbytes


QUANTO, HQQ = ("optimum-quanto>=0.2.7",), ("hqq",)
T, C = "token", "channel"

CLAIM = Claim(
    slug="kivi",
    title="KIVI: 2-bit key-value cache without calibration",
    family="serving",
    paper=PAPER,
    question="Would a 2-bit key-value cache change what my model predicts, and what would it save?",
    statements=(
        Statement(
            name="axes",
            text="At 2 bits with every token quantised, keys per channel and values per token predict best",
            metric="kl",
            method="fake2-kC-vT",
            baselines=("fake2-kT-vT", "fake2-kC-vC", "fake2-kT-vC"),
            where=("text",),
            reported=Reported(
                "GSM8K exact match 12.21 for kC-vT; 4.55 kT-vT, 0.00 kC-vC, 0.08 kT-vC (16 bit: 22.67)",
                "Llama-2-13B, all tokens quantised, groups of 32",
                "section 3, study of quantisation axes",
            ),
        ),
        Statement(
            name="window",
            text="The full-precision window brings 2 bits closer to full precision",
            metric="kl",
            method="kivi2",
            baselines=("fake2-kC-vT",),
            where=("text",),
            reported=Reported(
                "GSM8K exact match 12.21 without and 20.77 with the window (16 bit: 22.67)",
                "Llama-2-13B, groups of 32, window of 128",
                "section 4, main results",
            ),
        ),
        Statement(
            name="quality-4-bit",
            text="KIVI-4 predicts as well as full precision (at most 0.02 nat per token worse)",
            metric="nll",
            method="kivi4",
            baselines=("fp",),
            bound=0.02,
            where=("text",),
            reported=Reported(
                "CoQA / TruthfulQA / GSM8K 59.67 / 22.58 / 4.47 against 59.83 / 23.20 / 4.55 at 16 bit",
                "Falcon-7B (multi-query attention), KIVI-4",
                "section 4, main results",
            ),
        ),
        Statement(
            name="quality-2-bit",
            text="KIVI-2 predicts as well as full precision (at most 0.02 nat per token worse)",
            metric="nll",
            method="kivi2",
            baselines=("fp",),
            bound=0.02,
            where=("text",),
            reported=Reported(
                "CoQA / TruthfulQA / GSM8K 66.23 / 29.84 / 20.77 against 66.37 / 29.53 / 22.67 at 16 bit; on Falcon-7B "
                "(multi-query attention) 57.48 / 24.98 / 3.41 against 59.83 / 23.20 / 4.55",
                "Llama-2-13B (as many key heads as query heads), KIVI-2",
                "section 4, main results",
            ),
        ),
        Statement(
            name="memory",
            text="KIVI-2 holds a cache in less than 1/4.5 of the bytes of 16 bits",
            metric="bytes",
            method="decode-kivi2",
            baselines=("decode-fp",),
            scale="ratio",
            bound=1 / 4.5,
            where=("decode",),
            reported=Reported(
                "2.6 times less peak memory, weights included; up to 4 times larger batches",
                "Llama-2-7B on one A100-80GB",
                "section 4, efficiency",
            ),
        ),
        Statement(
            name="speed",
            text="KIVI-2 decodes faster than transformers' QuantizedCache at 2 bits",
            metric="seconds",
            method="decode-kivi2",
            baselines=("decode-quanto2", "decode-hqq2"),
            scale="ratio",
            where=("decode",),
        ),
        Statement(
            name="speed-16-bit",
            text="KIVI-2 decodes no slower than the uncompressed cache at the same batch",
            metric="seconds",
            method="decode-kivi2",
            baselines=("decode-fp",),
            scale="ratio",
            where=("decode",),
            decides=False,
            reported=Reported(
                "2.35 to 3.47 times the throughput, at the larger batches that the saved memory allows",
                "Llama-2-7B on one A100-80GB, prompts of 161 and outputs of 338 tokens, batch as large as fits",
                "section 4, efficiency",
            ),
        ),
        Statement(
            name="peers",
            text="KIVI-2 predicts closer to full precision than transformers' QuantizedCache at 2 bits",
            metric="kl",
            method="kivi2",
            baselines=("quanto2", "hqq2"),
            where=("text",),
            decides=False,
        ),
    ),
    metrics=(
        Metric("kl", "KL from full precision", "lower", "nat/token"),
        Metric("nll", "negative log-likelihood", "lower", "nat/token"),
        Metric("ppl", "perplexity", None),
        Metric("top1", "same most likely token", "higher"),
        Metric("bytes", "cache per token and layer, 16-bit model", "lower", "B", counted=True),
        Metric("seconds", "time of the decoded tokens", "lower", "s"),
    ),
    arms=(
        Arm("fp", _predicts(_exact), "reference", "full precision", where=("text",)),
        Arm("fake4-kT-vT", _predicts(_fake(4, T, T)), "ablation", "4 bit kT-vT, no window", where=("text",)),
        Arm("fake2-kT-vT", _predicts(_fake(2, T, T)), "ablation", "2 bit kT-vT, no window", where=("text",)),
        Arm("fake2-kC-vC", _predicts(_fake(2, C, C)), "ablation", "2 bit kC-vC, no window", where=("text",)),
        Arm("fake2-kT-vC", _predicts(_fake(2, T, C)), "ablation", "2 bit kT-vC, no window", where=("text",)),
        Arm("fake2-kC-vT", _predicts(_fake(2, C, T)), "ablation", "2 bit kC-vT, no window", where=("text",)),
        Arm("kivi2-r32", _predicts(_kivi(residual_length=32)), "ablation", "KIVI-2, window 32", where=("text",)),
        Arm("kivi2", _predicts(_kivi()), "method", "KIVI-2", where=("text",)),
        Arm("kivi4", _predicts(_kivi(k_bits=4, v_bits=4)), "method", "KIVI-4", where=("text",)),
        Arm(
            "quanto2",
            _predicts(_quantized("quanto", 2, -1, 0)),
            "baseline",
            "QuantizedCache quanto, 2 bit",
            requires=QUANTO,
            where=("text",),
        ),
        Arm(
            "quanto4",
            _predicts(_quantized("quanto", 4, -1, 0)),
            "baseline",
            "QuantizedCache quanto, 4 bit",
            requires=QUANTO,
            where=("text",),
        ),
        Arm(
            "hqq2",
            _predicts(_quantized("hqq", 2, 0, 1)),
            "baseline",
            "QuantizedCache hqq, 2 bit",
            requires=HQQ,
            where=("text",),
        ),
        Arm(
            "hqq4",
            _predicts(_quantized("hqq", 4, 1, 1)),
            "baseline",
            "QuantizedCache hqq, 4 bit",
            requires=HQQ,
            where=("text",),
        ),
        Arm("decode-fp", _decodes(_exact, "sdpa"), "reference", "DynamicCache", race="decode", where=("decode",)),
        Arm("decode-kivi2", _decodes(_kivi(), "kivi"), "method", "KIVI-2", race="decode", where=("decode",)),
        Arm(
            "decode-kivi4",
            _decodes(_kivi(k_bits=4, v_bits=4), "kivi"),
            "method",
            "KIVI-4",
            race="decode",
            where=("decode",),
        ),
        Arm(
            "decode-quanto2",
            _decodes(_quantized("quanto", 2, -1, 0), "sdpa"),
            "baseline",
            "QuantizedCache quanto, 2 bit",
            requires=QUANTO,
            race="decode",
            where=("decode",),
        ),
        Arm(
            "decode-hqq2",
            _decodes(_quantized("hqq", 2, 0, 1), "sdpa"),
            "baseline",
            "QuantizedCache hqq, 2 bit",
            requires=HQQ,
            race="decode",
            where=("decode",),
        ),
    ),
    workload=Texts,
    scales={
        "smoke": Scale(
            2,
            {
                "model": "random",
                "prompt": 128,
                "continuation": 16,
                "length": 256,
                "tokens": 4,
                "layers": 1,
                "batch": 1,
                "dtype": "float32",
            },
            {"decode": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(
            12,
            {
                "prompt": 512,
                "continuation": 64,
                "length": 4096,
                "tokens": 128,
                "layers": 2,
                "batch": 1,
                "dtype": "float32",
            },
            {"decode": Race(rounds=1, warmup=0)},
        ),
        # The paper's models need --model; its generation tasks are not rebuilt: likelihoods of long documents stand in.
        "paper": Scale(
            50,
            {
                "prompt": 2048,
                "continuation": 512,
                "length": 160,
                "tokens": 338,
                "layers": 32,
                "batch": 96,
                "dtype": "float16",
            },
            {"decode": Race(rounds=3, warmup=1)},
        ),
    },
    unit="document",
    snippet="""\
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from assay.serving import KIVICache

config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
model = LlamaForCausalLM(config).eval()          # or AutoModelForCausalLM.from_pretrained(...)
cache = KIVICache(model.config)                  # 2 bits; k_bits=4, v_bits=4 for few key-value heads
output = model.generate(torch.ones(1, 600, dtype=torch.long), max_new_tokens=40, do_sample=False, cache=cache)
print(cache.memory_footprint()["ratio"])         # times smaller than 16 bit
""",
    example="assay run kivi --model ./my-llama --text my-documents.jsonl",
    devices=("cpu", "cuda"),
    notes=(
        "With few key-value heads (grouped or multi-query attention) the paper itself recommends KIVI-4; the embedded "
        "model has 3 key-value heads for 9 query heads.",
        "A prompt whose length is a multiple of the window (512, of 128) leaves no key in full precision: this is the "
        "least favourable length for KIVI.",
        "The race runs the model's shapes with random contents, through as many layers as --layers says; every layer "
        "costs the same. On one CPU core the model's own weights dominate, so a smaller cache helps less than on a GPU "
        "with a large batch.",
    ),
)
