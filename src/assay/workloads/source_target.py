"""Pairs of texts, what is given and what is wanted, for a causal or an encoder-decoder model of the user's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from assay.errors import InputError

Row = dict[str, list[int]]


def read_pairs(path: str) -> list[tuple[str, str]]:
    """The pairs of a ``.jsonl`` file with the fields "source" and "target".

    Raises
    ------
    InputError
        The file is missing or empty, or a line lacks one of the two texts.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"--data {path!r} is no file; expected a .jsonl with the fields source and target")
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"--data {path!r} is not UTF-8 text (byte {error.start})") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"--data {path!r}, line {number} is not JSON: {error}") from error
        found = [value.get(name) if isinstance(value, dict) else None for name in ("source", "target")]
        for name, text in zip(("source", "target"), found):
            if not isinstance(text, str) or not text.strip():
                raise InputError(f"--data {path!r}, line {number} has no text in the field {name!r}")
        pairs.append((str(found[0]), str(found[1])))
    if len(pairs) < 10:
        raise InputError(f"--data {path!r} holds {len(pairs)} pairs; at least 10 are needed")
    return pairs


def any_config(folder: Path, name: str) -> Any:
    """Configuration of a model of any type, encoder-decoder ones as well.

    Raises
    ------
    InputError
        It cannot be read.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        line = f"{error}".strip().splitlines() or [type(error).__name__]
        raise InputError(f"--model {name!r}: its config.json cannot be used: {line[0]}") from error


def encode_pairs(
    tokenizer: Any, pairs: list[tuple[str, str]], longest: int, encodes: bool, pad: int, end: int | None
) -> list[Row]:
    """Rows of one length: ``input_ids``, ``attention_mask`` and ``labels`` (-100 where nothing is predicted).

    Causal models (``encodes`` false) read source and target as one sequence, padded on the right; encoder-decoder
    models get the source as input and the target as labels. Both are cut to ``longest`` tokens; a target ends with
    ``end``.
    """
    coded = []
    for source, target in pairs:
        given, wanted = (tokenizer(t, add_special_tokens=False)["input_ids"][:longest] for t in (source, target))
        coded.append((given, wanted + ([] if end is None else [end])))
    rows = []
    if encodes:
        widths = [max(len(c[i]) for c in coded) for i in range(2)]
        for given, wanted in coded:
            rows.append(
                {
                    "input_ids": given + [pad] * (widths[0] - len(given)),
                    "attention_mask": [1] * len(given) + [0] * (widths[0] - len(given)),
                    "labels": wanted + [-100] * (widths[1] - len(wanted)),
                }
            )
        return rows
    width = max(len(g) + len(w) for g, w in coded)
    for given, wanted in coded:
        spare = width - len(given) - len(wanted)
        rows.append(
            {
                "input_ids": given + wanted + [pad] * spare,
                "attention_mask": [1] * (len(given) + len(wanted)) + [0] * spare,
                "labels": [-100] * len(given) + wanted + [-100] * spare,
            }
        )
    return rows
