"""Names of a package that are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose names live in its submodules.

    Parameters
    ----------
    package
        ``__name__`` of the package.
    names
        Public name to the submodule that defines it. The submodules themselves can be had by name, too.
    """
    modules = sorted(set(names.values()))
    public = sorted([*names, *modules])

    def get(name: str) -> Any:
        if name in names:
            return getattr(importlib.import_module(f"{package}.{names[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: public, public
