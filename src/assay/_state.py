"""How every part saves what it has learned: a folder with ``config.json`` and ``tensors.safetensors``.

Nothing is pickled, so nothing that a file holds can run when it is loaded.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = "config.json"
TENSORS = "tensors.safetensors"


def save_state(folder: str | Path, kind: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """Write ``config`` (JSON values) and ``tensors`` (NumPy arrays or torch tensors) to ``folder``.

    Parameters
    ----------
    folder
        Made if it is missing. Files of an earlier save in it are replaced.
    kind
        Name of the class; :func:`load_state` refuses a folder that holds another kind.
    config
        Values that JSON can hold. Infinities and NaN are kept.
    tensors
        Name to array. All NumPy, or all torch.

    Returns
    -------
    The folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(t, torch.Tensor) for t in tensors.values()):
        from safetensors.torch import save_file

        save_file({k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}, folder / TENSORS)
    else:
        from safetensors.numpy import save_file as save_numpy

        save_numpy({k: np.ascontiguousarray(t) for k, t in tensors.items()}, folder / TENSORS)
    (folder / CONFIG).write_text(json.dumps({"kind": kind, **config}, indent=2) + "\n", encoding="utf-8")
    return folder


def load_state(folder: str | Path, kind: str, *, torch_tensors: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what :func:`save_state` wrote.

    Parameters
    ----------
    folder
        The folder given to :func:`save_state`.
    kind
        The class that is expected in it.
    torch_tensors
        Give torch tensors (on the CPU) instead of NumPy arrays.

    Returns
    -------
    ``(config, tensors)``, without the key ``kind``.

    Raises
    ------
    FileNotFoundError
        The folder lacks one of the two files.
    ValueError
        The files hold another kind of object, or are damaged.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: expected the folder that {kind}.save() wrote")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{folder / CONFIG} is not valid JSON: {error}") from error
    found = config.pop("kind", None)
    if found != kind:
        raise ValueError(f"{folder} holds a {found!r}, not a {kind!r}")
    from safetensors import SafetensorError

    try:
        if torch_tensors:
            from safetensors.torch import load_file

            return config, load_file(folder / TENSORS)
        from safetensors.numpy import load_file as load_numpy

        return config, load_numpy(folder / TENSORS)
    except SafetensorError as error:
        raise ValueError(f"{folder / TENSORS} is damaged: {error}") from error
