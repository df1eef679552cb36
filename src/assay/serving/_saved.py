"""The model that a saved part goes with: in the part's folder, or by reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def reference(model: Any) -> str | None:
    """The name or folder that a model was loaded from, if it is known."""
    return getattr(model.config, "_name_or_path", "") or None


def saved_model(folder: Path, name: str, source: str | None, loader: Any) -> Any:
    """The model in ``folder / name``, or else the one of that :func:`reference`, which must be on this machine.

    Raises
    ------
    ValueError
        Neither is known. The message asks for the argument ``name``.
    """
    inside = folder / name
    where = str(inside) if inside.is_dir() else source
    if where is None:
        raise ValueError(f"{folder} does not say where its {name} is; give it as {name}")
    return loader.from_pretrained(where, local_files_only=True)
