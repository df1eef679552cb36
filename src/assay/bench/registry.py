"""Finds claims by slug. Listing them imports none; a claim is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import entry_points

from assay.bench.claim import Claim
from assay.claims import CLAIMS, COMPARISONS
from assay.errors import InputError

GROUP = "assay.claims"


@dataclass(frozen=True)
class Entry:
    """What is known of a claim without importing it. ``target`` is ``module:attribute``.

    ``members`` are the claims of single methods that a comparison is about; none for any other claim.
    """

    slug: str
    family: str
    title: str
    target: str
    members: tuple[str, ...] = ()


def entries() -> dict[str, Entry]:
    """All claims by slug: our own, then those that installed packages add by the entry point group ``assay.claims``.

    An entry point is named by its slug and points at a :class:`Claim`. One that takes a slug of ours is ignored: a
    package cannot silently replace a claim that a user believes to be assay's.
    """
    found = {slug: Entry(slug, family, title, f"assay.claims.{slug}:CLAIM") for slug, (family, title) in CLAIMS.items()}
    for slug, (family, title, members) in COMPARISONS.items():
        found[slug] = Entry(slug, family, title, f"assay.claims.{slug}:CLAIM", members)
    for point in entry_points(group=GROUP):
        if point.name not in found:
            where = point.dist.name if point.dist is not None else point.module
            found[point.name] = Entry(point.name, "external", f"from {where}", point.value)
    return found


def find(slug: str) -> Entry:
    """The entry of a slug; hyphens and case do not matter.

    Raises
    ------
    InputError
        No claim has that slug; the message suggests the nearest.
    """
    known = entries()
    wanted = slug.strip().lower().replace("-", "_")
    if wanted in known:
        return known[wanted]
    if slug in known:
        return known[slug]
    near = get_close_matches(wanted, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "`assay list` shows what there is."
    raise InputError(f"SLUG {slug!r} is not a claim of assay; {hint}")


def comparison(slugs: Sequence[str]) -> Entry | None:
    """The comparison that two or more claims are members of, all of them; ``None`` where there is none."""
    wanted = set(slugs)
    if len(wanted) < 2:
        return None
    return next((e for e in entries().values() if e.members and wanted <= set(e.members)), None)


def load(slug: str) -> Claim:
    """Import the claim of a slug.

    Raises
    ------
    InputError
        The slug is unknown, its module cannot be imported, or it holds no :class:`Claim` of that slug.
    """
    entry = find(slug)
    module, _, attribute = entry.target.partition(":")
    try:
        claim = getattr(importlib.import_module(module), attribute or "CLAIM", None)
    except ImportError as error:
        raise InputError(f"claim {entry.slug!r} ({entry.title}) cannot be imported from {module}: {error}") from error
    if not isinstance(claim, Claim) or claim.slug != entry.slug:
        raise InputError(f"entry point {entry.slug!r} must point at a Claim with that slug; {entry.target} is not one")
    return claim
