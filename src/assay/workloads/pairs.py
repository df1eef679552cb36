"""A large and a small causal language model with one vocabulary, and a text cut into windows for training and test."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import InputError
from assay.workloads.language import load_tokenizer, model_config, model_folder

if TYPE_CHECKING:
    import torch

#: Share of the text, at its end, that no model is trained on.
HELD = 0.1


@dataclass(frozen=True)
class TextWindows:
    """Windows of ``length`` tokens: random ones of the text's first nine tenths, even ones of its end."""

    train: NDArray[np.int64]
    end: NDArray[np.int64]
    length: int

    def draw(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Windows ``[count, length]`` for training."""
        starts = random.integers(len(self.train) - self.length + 1, size=count)
        return self.train[starts[:, None] + np.arange(self.length)]

    def held(self, count: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Windows for test that do not overlap, ``[at most count, length]``, in random order."""
        windows = self.end[: len(self.end) // self.length * self.length].reshape(-1, self.length)
        return windows[random.permutation(len(windows))[:count]]


def text_windows(tokenizer: Any, texts: Sequence[str], length: int, name: str) -> TextWindows:
    """Tokenise texts, join them, and keep the last tenth apart.

    Raises
    ------
    InputError
        The last tenth has fewer than two windows.
    """
    if length < 8:
        raise InputError(f"--length must be at least 8 tokens, not {length}")
    rows = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    tokens = np.array([t for row in rows for t in row], dtype=np.int64)
    cut = len(tokens) - max(int(HELD * len(tokens)), 1)
    if len(tokens) - cut < 2 * length:
        raise InputError(
            f"{name} is too short: its last tenth is for test and must hold two windows of {length} tokens, so that "
            f"{int(2 * length / HELD)} are needed in all, and it has {len(tokens)}; give a longer text or a smaller "
            "--length"
        )
    return TextWindows(tokens[:cut], tokens[cut:], length)


@contextlib.contextmanager
def _of(option: str) -> Iterator[None]:
    """Let messages about a model name the option that it was given with."""
    try:
        yield
    except InputError as error:
        raise InputError(str(error).replace("--model", option)) from error


def check_model(name: str | None, option: str) -> tuple[Path, Any, Any]:
    """Folder, configuration and tokenizer of a model that was given with an option (the embedded one for ``None``).

    Raises
    ------
    InputError
        It cannot be used; the message names the option.
    """
    with _of(option):
        folder = model_folder(name)
        shown = name or folder.name
        return folder, model_config(folder, shown), load_tokenizer(folder, shown)


def check_pair(primary: str, secondary: str) -> tuple[Path, Path, Any]:
    """Folders of a large and a small model, and their common tokenizer.

    Raises
    ------
    InputError
        One of them cannot be used, their vocabularies differ, or a token of one is another in the other.
    """
    large, large_config, tokenizer = check_model(primary, "--primary")
    small, small_config, other = check_model(secondary, "--secondary")
    sizes = [c.get_text_config(decoder=True).vocab_size for c in (large_config, small_config)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"--primary {primary!r} has a vocabulary of {sizes[0]} and --secondary {secondary!r} one of {sizes[1]}; "
            "a small model can only draft for a large one with the same tokens"
        )
    if tokenizer.get_vocab() != other.get_vocab():
        raise InputError(
            f"the tokenizers of --primary {primary!r} and --secondary {secondary!r} number their tokens differently"
        )
    return large, small, tokenizer


def load_trainable(folder: Path, dtype: str, device: str) -> Any:
    """A model of its own (nobody else's), in evaluation mode, with gradients.

    Raises
    ------
    InputError
        The weights cannot be read, or some are missing.
    """
    from assay.workloads.language import load_model

    return copy.deepcopy(load_model(folder, dtype, device)).requires_grad_(True)


def first_layers(model: Any, layers: int) -> Any:
    """A model of the first layers of another, which shares (and does not train) its embeddings and its head.

    Raises
    ------
    ValueError
        There are not more than so many layers.
    """
    total = model.config.num_hidden_layers
    if not 1 <= layers < total:
        raise ValueError(f"layers must be from 1 to {total - 1}, not {layers}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    import torch

    with torch.device("meta"):
        small = type(model)(config)
    small.to_empty(device=model.device)
    small.base_model.embed_tokens = model.base_model.embed_tokens
    small.base_model.rotary_emb = copy.deepcopy(model.base_model.rotary_emb)
    small.base_model.layers = torch.nn.ModuleList(copy.deepcopy(m) for m in model.base_model.layers[:layers])
    small.base_model.norm = copy.deepcopy(model.base_model.norm)
    small.lm_head = model.lm_head
    small.to(next(model.parameters()).dtype).requires_grad_(True)
    shared: tuple[torch.nn.Module, ...] = (small.base_model.embed_tokens, small.lm_head)
    for module in shared:
        module.requires_grad_(False)
    return small.eval()
