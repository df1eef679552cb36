"""Which token leaves the cache: eviction policies as ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheState:
    """What a policy sees of one layer, all ``[batch, kv_heads, slots]``.

    Attributes
    ----------
    positions
        Int64: position in the text of the token in each slot, -1 for an empty slot.
    scores
        Float32: attention that the token has received so far, summed over queries (mean over the query heads of a
        group); 0 when it entered. ``None`` with a named policy that does not need it.
    current
        Float32: attention of the newest query. ``None`` with a named policy that does not need it.
    low_counts
        Int64: of the last 400 queries, how many gave the token less than the mean weight; ``None`` unless the policy
        is "scissorhands".
    """

    positions: Tensor
    scores: Tensor | None = None
    current: Tensor | None = None
    low_counts: Tensor | None = None


# A rank for every slot; the lowest leave first, of equal ones the oldest.
Policy = Callable[[CacheState], Tensor]


def streaming(state: CacheState) -> Tensor:
    """Oldest first (StreamingLLM, Xiao et al. 2024). With protected sinks it is a window and the first tokens."""
    return state.positions


def h2o(state: CacheState) -> Tensor:
    """Least attention so far first (heavy hitter oracle, Zhang et al. 2023)."""
    assert state.scores is not None
    return state.scores


def tova(state: CacheState) -> Tensor:
    """Least attention at this step first (Oren et al. 2024). The newest token is no exception."""
    assert state.current is not None
    return state.current


def scissorhands(state: CacheState) -> Tensor:
    """The token first that was below the mean weight most often (Liu et al. 2023)."""
    assert state.low_counts is not None
    return -state.low_counts


@dataclass(frozen=True)
class Rule:
    """A policy with what goes with it: what it needs to see, and its defaults."""

    rank: Policy
    cumulative: bool = False
    low_counts: bool = False
    halves: bool = False


RULES = {
    "streaming": Rule(streaming),
    "h2o": Rule(h2o, cumulative=True),
    "scissorhands": Rule(scissorhands, low_counts=True, halves=True),
    "tova": Rule(tova),
}


def rule(policy: str | Policy) -> Rule:
    """The rule of a name, or of a function of the user's."""
    if callable(policy):
        return Rule(policy, cumulative=True)
    if policy not in RULES:
        raise ValueError(f"policy must be one of {tuple(RULES)} or a function of a CacheState, not {policy!r}")
    return RULES[policy]


def check_rank(rank: Tensor, state: CacheState) -> None:
    """Raise ``ValueError`` if what a user's policy returned cannot be used."""
    if not isinstance(rank, Tensor) or rank.shape != state.positions.shape:
        got = tuple(rank.shape) if isinstance(rank, Tensor) else type(rank).__name__
        raise ValueError(f"policy must return a tensor of shape {tuple(state.positions.shape)}, not {got}")
    if rank.is_floating_point() and bool(rank.isnan().any()):
        raise ValueError("policy returned NaN for a token")


def split(size: int | float | None, prompt: int, name: str) -> int | None:
    """A count, or a ratio of the prompt as a count."""
    if size is None or isinstance(size, int):
        return size
    return max(1, round(size * prompt)) if name == "budget" else round(size * prompt)


def check_size(size: int | float | None, name: str, least: int) -> None:
    """Raise ``ValueError`` unless a size is a count of at least ``least``, a ratio in (0, 1], or ``None``."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int | float):
        raise ValueError(f"{name} must be a number, not {size!r}")
    if isinstance(size, float) and not 0 < size <= 1:
        raise ValueError(f"{name} as a float is a ratio of the prompt in (0, 1], not {size!r}")
    if isinstance(size, int) and size < least:
        raise ValueError(f"{name} must be at least {least}, not {size}")


def resolve(
    policy: str | Policy,
    budget: int | float,
    n_sink: int | float | None,
    n_recent: int | float | None,
    m: int | None,
    prompt: int,
) -> tuple[int, int, int, int]:
    """``(budget, tokens left after an eviction, sinks, recent)`` for a prompt of that many tokens.

    Raises
    ------
    ValueError
        They do not fit into each other.
    """
    total = split(budget, prompt, "budget")
    assert total is not None
    left = total - total // 2 if rule(policy).halves else total
    sinks = split(n_sink, prompt, "n_sink")
    if sinks is None:
        sinks = 4 if policy == "streaming" else 0
    recent = split(n_recent, prompt, "n_recent")
    if recent is None:
        recent = {"streaming": total - sinks, "h2o": total // 2, "scissorhands": 10}.get(str(policy), 0)
    if sinks + recent > left or recent < 0:
        halved = f" ({left} after an eviction)" if left != total else ""
        raise ValueError(
            f"budget of {total} tokens{halved} is too small for n_sink={sinks} and n_recent={recent} "
            f"with policy {policy!r}; for a ratio these are counts at a prompt of {prompt} tokens"
        )
    if policy == "streaming" and sinks + recent < total:
        raise ValueError(
            f"policy 'streaming' keeps n_sink + n_recent tokens, but {sinks} + {recent} is less than budget={total}"
        )
    if m is not None and total <= m:
        raise ValueError(f"budget must be larger than m={m} of merge, not {total}")
    return total, left, sinks, recent


def lowest(rank: Tensor, positions: Tensor) -> Tensor:
    """Slot of the lowest rank, of equal ones the oldest, ``[batch, kv_heads]``."""
    least = rank.amin(-1, keepdim=True)
    return torch.where(rank == least, positions, torch.iinfo(torch.int64).max).argmin(-1)


def order(rank: Tensor, positions: Tensor) -> Tensor:
    """All slots, lowest rank first, of equal ones the oldest."""
    by_age = positions.argsort(-1)
    return by_age.gather(-1, rank.gather(-1, by_age).sort(dim=-1, stable=True).indices)
