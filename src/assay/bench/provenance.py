"""Where a number comes from: the machine and versions that it was measured with, and the code that made it."""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import assay
from assay.bench.claim import Claim

LIBRARIES = (
    "numpy",
    "scipy",
    "torch",
    "transformers",
    "scikit-learn",
    "numba",
    "pandas",
    "accelerate",
    "triton",
    "optimum-quanto",
    "hqq",
    "mapie",
    "goodpoints",
    "stein-thinning",
    "arviz",
)
"""Distributions whose version a trial remembers."""

_APART = ("assay", "assay.bench", "assay.cli", "assay.errors", "assay._lazy", "assay.claims")
"""Modules that no number of a trial depends on (beneath bench and cli: all of them)."""


def environment() -> dict[str, Any]:
    """Machine, versions and commit, as values that JSON can hold. Imports no library to look at it.

    The GPU is named when torch has been loaded and has used it.
    """
    return {
        **_machine(),
        "gpu": _gpu(),
        "libraries": dict(_libraries()),
        "assay": assay.__version__,
        **_commit(),
    }


@cache
def _machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory(),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpu() -> str:
    torch = sys.modules.get("torch")
    try:
        # Asking an idle CUDA for its name would claim some hundred MiB of the card for nothing.
        if torch is not None and torch.cuda.is_initialized():
            return str(torch.cuda.get_device_name())
    except (AttributeError, RuntimeError):
        pass
    return ""


@cache
def _libraries() -> tuple[tuple[str, str], ...]:
    found = []
    for name in LIBRARIES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    return tuple(found)


@cache
def _commit() -> dict[str, Any]:
    """The commit of the checkout that this package is used from; empty for an installed package."""
    package = Path(assay.__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # An environment may lie inside some other repository, whose commit says nothing of us.
        if Path(git("rev-parse", "--show-toplevel")).resolve() / "src" / "assay" != package:
            return {"commit": "", "dirty": False}
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", str(package)))}
    except (OSError, subprocess.SubprocessError):
        return {"commit": "", "dirty": False}


def fingerprint(claim: Claim) -> str:
    """SHA-256 (hexadecimal) over the sources that a trial's numbers depend on.

    Those are the claim's module, the part (``assay/FAMILY/SLUG.py`` or the folder), and whatever modules of assay they
    import, directly or through others, imports inside functions included; not the bench and the command line. For a
    claim from another package, its module and what that imports of its own package and of assay. Bytes count: an
    edited comment makes a new fingerprint, since nobody can say which edits are harmless.
    """
    digest = hashlib.sha256()
    for name, path in sorted(sources(claim).items()):
        digest.update(f"{name}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def sources(claim: Claim) -> dict[str, Path]:
    """The modules that :func:`fingerprint` covers, and their files."""
    module = module_of(claim)
    return _closure([module, *_part(claim)], {"assay", module.partition(".")[0]})


def module_of(claim: Claim) -> str:
    """The module that defines a claim.

    A claim does not know it, so it is the module that holds the very object; where several do, the one that defines
    the arms or the workload, and otherwise the first in the alphabet.
    """
    holders = sorted(
        name
        for name, module in list(sys.modules.items())
        if module is not None and any(value is claim for value in list(getattr(module, "__dict__", {}).values()))
    )
    makers = [getattr(arm.run, "__module__", "") for arm in claim.arms] + [claim.workload.__module__]
    return next((name for name in makers if name in holders), holders[0] if holders else makers[0])


def _part(claim: Claim) -> list[str]:
    name = f"assay.{claim.family}.{claim.slug}"
    path = _locate(name)
    if path is None:
        return []
    if path.name != "__init__.py":
        return [name]
    inside = sorted(p.relative_to(path.parent).with_suffix("").parts for p in path.parent.rglob("*.py"))
    return [".".join([name, *parts]).removesuffix(".__init__") for parts in inside]


def _closure(start: Iterable[str], tops: set[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    waiting = list(start)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        path = _locate(name)
        if path is None:
            continue
        found[name] = path
        for imported in _imports(name, path):
            top = imported.partition(".")[0]
            if top in tops and not _is_apart(imported) and imported not in found:
                waiting.append(imported)
    return found


def _is_apart(name: str) -> bool:
    if name in _APART or name.startswith(("assay.bench.", "assay.cli.")):
        return True
    # The table of a family's public names: it grows with every method, and changes no number of this one.
    path = _locate(name)
    return name.startswith("assay.") and name.count(".") == 1 and path is not None and path.name == "__init__.py"


def _imports(name: str, path: Path) -> Iterator[str]:
    """Modules that a file may import, by the text of its import statements."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            yield from _with_parents(base)
            for alias in node.names:
                inside = f"{base}.{alias.name}"
                if _locate(inside) is not None:
                    yield inside
                else:
                    yield from _lazily(base, alias.name)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for n in range(1, len(parts) + 1):
        yield ".".join(parts[:n])


def _lazily(package: str, name: str) -> Iterator[str]:
    """The submodule that a package serves a name from, where its ``__init__`` holds a table of names to modules."""
    path = _locate(package)
    if path is None or path.name != "__init__.py":
        return
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if (
                    isinstance(key, ast.Constant)
                    and key.value == name
                    and isinstance(value, ast.Constant)
                    and isinstance(value.value, str)
                ):
                    yield f"{package}.{value.value}"


def _locate(name: str) -> Path | None:
    """The source file of a module, found without importing it; only its top package must have been imported."""
    top, *rest = name.split(".")
    module = sys.modules.get(top)
    if module is None or not name:
        return None
    roots = [Path(p) for p in getattr(module, "__path__", [])]
    if not rest:
        file = getattr(module, "__file__", None)
        return Path(file) if file and file.endswith(".py") else None
    for root in roots:
        for path in (root.joinpath(*rest[:-1], f"{rest[-1]}.py"), root.joinpath(*rest, "__init__.py")):
            if path.is_file():
                return path
    return None
