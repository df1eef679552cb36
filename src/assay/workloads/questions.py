"""Multiple-choice questions from a user's file, and how a model with a cache of any kind answers them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import InputError
from assay.workloads.language import forward

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Question:
    """A question as tokens: what comes before the answer, the answers to choose from, and the number of the right one.

    The likeliest choice is the answer that a model gives.
    """

    context: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int


def read_questions(path: str, tokenizer: Any) -> tuple[Question, ...]:
    """The questions of a ``.jsonl`` file with the fields context, choices (two or more texts) and answer (from 0).

    Choices follow the context as they are: a space between them belongs to the choice.

    Raises
    ------
    InputError
        The file is missing or empty, or a line is no such question.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--choices {path!r} is no file; expected a .jsonl with context, choices and answer")
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"--choices {path!r} is not UTF-8 text (byte {error.start})") from error

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--choices {path!r}, line {number}"
        try:
            question = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON: {error}") from error
        if not isinstance(question, dict):
            raise InputError(f"{where} is no JSON object with the fields context, choices and answer")
        context, choices, answer = (question.get(key) for key in ("context", "choices", "answer"))
        if not isinstance(context, str) or not context.strip():
            raise InputError(f"{where} has no text in the field 'context'")
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise InputError(f"{where}: expected two or more texts in the field 'choices'")
        if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
            raise InputError(f"{where}: expected a number from 0 to {len(choices) - 1} in the field 'answer'")
        tokens = Question(encode(context), tuple(encode(choice) for choice in choices), answer)
        if not tokens.context or not all(tokens.choices):
            raise InputError(f"{where}: the context or a choice has no tokens")
        found.append(tokens)
    if not found:
        raise InputError(f"--choices {path!r} holds no questions")
    return tuple(found)


def step_by_step(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[batch, tokens, vocabulary]`` of tokens ``[batch, tokens]`` that are read one by one."""
    import torch

    return torch.cat([forward(model, ids[:, t : t + 1], cache).logits for t in range(ids.shape[1])], 1)


def choose(
    model: Any, cache: Any, context: torch.Tensor, choices: Sequence[torch.Tensor], at_once: int
) -> torch.Tensor:
    """Log-probabilities of the choices, ``[choices]``: their mean log-likelihood per token, normalised over them.

    The first ``at_once`` tokens of the context are read in one call and the others one by one, as are the choices, each
    from a copy of the cache.
    """
    import torch

    start = min(at_once, context.shape[1])
    last = forward(model, context[:, :start], cache).logits[:, -1:]
    if start < context.shape[1]:
        last = step_by_step(model, cache, context[:, start:])[:, -1:]
    scores = []
    for choice in choices:
        parts = [last]
        if choice.shape[1] > 1:
            parts.append(step_by_step(model, copy.deepcopy(cache), choice[:, :-1]))
        scores.append(torch.cat(parts, 1).float().log_softmax(-1).gather(-1, choice[..., None]).mean())
    return torch.stack(scores).log_softmax(0)
