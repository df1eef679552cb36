"""Long contexts: a fact hidden in a long prompt, and long texts; for claims about what a cache may leave out.

The embedded haystack is the pass key task of the literature (five digits in repetitive filler, at a known depth). The
embedded text is Python's own reference, the articles of ``pydoc_data.topics`` one after the other: some 110,000 tokens,
of which windows of any length are cut.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from assay.errors import InputError
from assay.workloads.language import (
    EMBEDDED,
    RANDOM,
    CausalText,
    KeysValues,
    TextTask,
    embedded_texts,
    load_model,
    load_tokenizer,
    model_config,
    prefill,
    random_model,
)

if TYPE_CHECKING:
    import torch

HEAD = "There is important information hidden inside a lot of irrelevant text. Find it and memorize it.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = " The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "\nWhat is the pass key? The pass key is "
DEPTHS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85)
SEPARATOR = "\n\n"
ALL_ARTICLES = "Python's reference as one text"


def long_text() -> str:
    """The articles of Python's reference as one text."""
    return SEPARATOR.join(embedded_texts())


@dataclass(frozen=True)
class Question:
    """A context, a question about it, and the tokens that answer it."""

    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


def passkey(tokenizer: Any, length: int, depth: float, key: str) -> Question:
    """A context of exactly ``length`` tokens with a pass key at ``depth`` (0: beginning, 1: end), and the question.

    Everything is put together from tokens (the filler's are those of one sentence, repeated), so that all prompts of a
    length can be batched without padding.

    Raises
    ------
    ValueError
        ``length`` is too short for the instruction and the pass key, or ``depth`` is outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must lie in [0, 1], not {depth}")
    head, needle = _tokens(tokenizer, HEAD), _tokens(tokenizer, NEEDLE.format(key=key))
    room = length - len(head) - len(needle)
    if room < 0:
        raise ValueError(f"length must be at least {length - room} tokens, not {length}")
    sentence = _tokens(tokenizer, FILLER)
    filler = (sentence * (room // len(sentence) + 1))[:room]
    at = int(depth * room)
    context = [*head, *filler[:at], *needle, *filler[at:]]
    return Question(tuple(context), tuple(_tokens(tokenizer, QUESTION)), tuple(_tokens(tokenizer, key)))


def passkeys(tokenizer: Any, length: int, count: int, seed: int = 0) -> list[Question]:
    """``count`` pass keys at the depths of :data:`DEPTHS` in turn; digits come from ``random.Random(seed)``."""
    draw = Random(seed)
    keys = ["".join(draw.choice("0123456789") for _ in range(5)) for _ in range(count)]
    return [passkey(tokenizer, length, DEPTHS[i % len(DEPTHS)], key) for i, key in enumerate(keys)]


def read_questions(path: str, tokenizer: Any) -> list[Question]:
    """Questions of a ``.jsonl`` file, one object with the fields "context", "question" and "answer" a line.

    Raises
    ------
    InputError
        The file is missing, or a line lacks a field or a text in it.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--qa {path!r} is no file; expected a .jsonl with the fields context, question and answer")
    found = []
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"--qa {path!r} is not UTF-8 text (byte {error.start})") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"--qa {path!r}, line {number} is not JSON: {error}") from error
        parts = []
        for name in ("context", "question", "answer"):
            text = value.get(name) if isinstance(value, dict) else None
            tokens = _tokens(tokenizer, text) if isinstance(text, str) else []
            if not tokens:
                raise InputError(f"--qa {path!r}, line {number} has no text in the field {name!r}")
            parts.append(tuple(tokens))
        found.append(Question(*parts))
    if not found:
        raise InputError(f"--qa {path!r} is empty")
    return found


def _tokens(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


# -- the workload ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Haystack:
    """What all arms share in setting "retrieval": the model, the context's prefill, the question and its answer.

    ``question`` and ``answer`` are ``[1, tokens]`` and ``[tokens]``. The context is processed in full; the question and
    the answer are what a cache must serve.
    """

    model: Any
    layers: KeysValues
    question: torch.Tensor
    answer: torch.Tensor


@dataclass(frozen=True)
class LongContextTask(TextTask):
    """Settings "retrieval" (:class:`Haystack`) and "text" (:class:`~assay.workloads.language.Document`)."""

    questions: tuple[Question, ...] = ()

    @property
    def limit(self) -> int | None:
        """The number of documents or of questions, whichever is smaller."""
        return min(len(self.documents), len(self.questions))

    def prepare(self, setting: str, replicate: int) -> Any:
        """Load the model and process the context or the document's prompt once."""
        import torch

        if setting != "retrieval":
            return super().prepare(setting, replicate)
        if self.folder is None:
            model = random_model(self.dtype, self.device)
        else:
            model = load_model(self.folder, self.dtype, self.device)
        asked = self.questions[replicate]
        context, question = (torch.tensor(x, device=self.device)[None] for x in (asked.context, asked.question))
        answer = torch.tensor(asked.answer, device=self.device)
        return Haystack(model, prefill(model, context), question, answer)


@dataclass(frozen=True)
class LongContext(CausalText):
    """A causal language model, facts hidden in long prompts, and long texts that it continues."""

    haystack: int | None = field(default=None, metadata={"help": "tokens of the context that hides a pass key"})
    qa: str | None = field(
        default=None,
        metadata={"help": ".jsonl with fields context, question and answer, one a line [default: pass keys]"},
    )

    def build(self, *, device: str, seed: int) -> LongContextTask:
        """Check model, text and questions, and cut the text into documents.

        Raises
        ------
        InputError
            An option cannot be used, a document has too few tokens, or the model has too few positions.
        """
        length = self.haystack or 800
        if length < 64:
            raise InputError(f"--haystack must be at least 64 tokens, not {length}")
        if self.model == RANDOM:
            if self.qa is not None:
                raise InputError(f"--qa needs a model with a tokenizer; leave out --model {RANDOM}")
            base = super().build(device=device, seed=seed)
            return _task(base, _random_questions(length, seed, len(base.documents)), length, seed)
        base = self._embedded(device) if self.text is None else super().build(device=device, seed=seed)
        assert base.folder is not None
        name = self.model or EMBEDDED
        tokenizer = load_tokenizer(base.folder, name)
        if self.qa is None:
            questions = passkeys(tokenizer, length, len(base.documents), seed)
        else:
            questions = read_questions(self.qa, tokenizer)
        needed = max(len(q.context) + len(q.question) + len(q.answer) for q in questions)
        room = getattr(model_config(base.folder, name).get_text_config(decoder=True), "max_position_embeddings", None)
        if room and needed > room:
            what = f"--haystack {length}" if self.qa is None else f"the longest line of --qa {self.qa!r}"
            raise InputError(f"{what} needs {needed} positions with its question, and {name!r} has {room}")
        return _task(base, questions, length, seed, self.qa)

    def _embedded(self, device: str) -> TextTask:
        """Windows of the one long text, with the checks of :meth:`CausalText.build`."""
        from tempfile import TemporaryDirectory

        with TemporaryDirectory() as folder:
            file = Path(folder) / "text.txt"
            file.write_text(long_text(), "utf-8")
            kept = {f.name: getattr(self, f.name) for f in fields(CausalText)} | {"text": str(file)}
            try:
                base = CausalText(**kept).build(device=device, seed=0)
            except InputError as error:
                raise InputError(str(error).replace(str(file), ALL_ARTICLES)) from None
        known = {f.name: getattr(base, f.name) for f in fields(base)}
        known["title"] = base.title.replace(str(file), ALL_ARTICLES)
        return TextTask(**known)


def _task(
    base: TextTask, questions: Sequence[Question], length: int, seed: int, qa: str | None = None
) -> LongContextTask:
    known = {f.name: getattr(base, f.name) for f in fields(base)}
    asked = hashlib.sha256(json.dumps([[q.context, q.question, q.answer] for q in questions]).encode()).hexdigest()
    known["digest"] = f"{base.digest}-{asked[:16]}"
    hidden = f"pass keys in {length} tokens" if qa is None else f"{len(questions)} questions of {qa}"
    known["title"] = f"{base.title}; {hidden}"
    known["settings"] = ("retrieval", "text")
    return LongContextTask(**known, questions=tuple(questions))


def _random_questions(length: int, seed: int, count: int) -> list[Question]:
    draw = Random(seed)

    def some(n: int) -> tuple[int, ...]:
        return tuple(draw.randrange(256) for _ in range(n))

    return [Question(some(length), some(4), some(3)) for _ in range(count)]
