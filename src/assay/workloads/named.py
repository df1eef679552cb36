"""A user's own function, named on the command line as ``module:callable``."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.errors import InputError


def load_named(reference: str, option: str, example: str) -> Callable[..., Any]:
    """The function. Its module is imported, because the user named it.

    Parameters
    ----------
    reference
        ``module:callable``.
    option
        What errors call it, such as ``"--loss"``.
    example
        A reference as it should look.

    Raises
    ------
    InputError
        The module cannot be imported, or has no such function.
    """
    module, _, name = reference.partition(":")
    if not module or not name:
        raise InputError(f"{option} {reference!r} must have the form module:callable, e.g. {example}")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        raise InputError(f"{option} {reference!r}: {error}") from error
    if not callable(found):
        raise InputError(f"{option} {reference!r}: module {module!r} has no function {name!r}")
    return found


def source_of(reference: str) -> str:
    """The code of ``module:callable``, identified by the file of its module: one that was edited is another one."""
    module = importlib.import_module(reference.partition(":")[0])
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] if file else ""
