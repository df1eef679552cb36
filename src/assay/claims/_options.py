"""Options of a workload that are numbers: their defaults, and the least that they may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assay.errors import InputError


def filled(workload: Any, defaults: Mapping[str, Any], least: Mapping[str, float] | None = None) -> dict[str, Any]:
    """The options that are named in ``defaults``, with these where none was given.

    Parameters
    ----------
    workload
        The dataclass of options.
    defaults
        By name; whole numbers.
    least
        The least value of an option, 1 by default.

    Raises
    ------
    InputError
        A value is below its least.
    """
    found = {}
    for name, default in defaults.items():
        given = getattr(workload, name)
        found[name] = default if given is None else given
        bound = (least or {}).get(name, 1)
        if not found[name] >= bound:
            raise InputError(f"--{name.replace('_', '-')} must be at least {bound}, not {found[name]}")
    return found
