"""The merging of an evicted value into retained ones: targets, the sampled mask, and the merge itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Mask = Literal["bernoulli", "bernoulli_current", "threshold", "max", "all"]
Statistic = Literal["cumulative", "current"]
Targets = Literal["next", "recent"]

FAR = torch.iinfo(torch.int64).max
# A ratio counts as above 1 from here on: means of equal float32 numbers differ from them by rounding.
ABOVE_ONE = 1 + 1e-6
STATISTIC: dict[str, Statistic] = {
    "bernoulli": "cumulative",
    "bernoulli_current": "current",
    "threshold": "current",
    "max": "cumulative",
    "all": "current",
}


@dataclass(frozen=True)
class CaM:
    """Cache merging: what happens to the value of a token that a policy evicts.

    The value ``V_i`` of the victim goes to the ``m`` retained tokens ``J`` that follow it, if a random mask says so::

        p = clamp(s_i / ref(s), low, high),  M ~ Bernoulli(p),  V_k += M V_i / |J|  for k in J

    with a statistic ``s`` of attention. Keys never change. The output of the step itself still uses the old values.

    Parameters
    ----------
    m
        Targets, default 16 (the paper's perplexity experiments; 32 in its summaries). Where fewer tokens follow,
        those are used, and their number is the divisor. ``None`` means ``n_recent`` of the cache (its question
        answering). ``m=1`` is the ablation without averaging: the whole value goes to the next token.
    mask
        Which statistic, what it is divided by, and how the ratio decides:

        ==================== ======================== ====================== ==========================
        mask                 statistic                denominator            decision
        ==================== ======================== ====================== ==========================
        "bernoulli"          attention summed so far  mean of the targets    sampled; the paper's text
        "bernoulli_current"  attention of this step   mean of recent tokens  sampled; summaries, LLaMA
        "threshold"          attention of this step   mean of kept tokens    ratio > 1; summaries, OPT
        "max"                attention summed so far  maximum of kept tokens sampled; question answering
        "all"                none                     none                   always; the ablation
        ==================== ======================== ====================== ==========================

        "threshold" is what we recommend for use: it fires for prominent tokens only. "Kept" does not count the victim.
    statistic
        Overrides the statistic of the mask: ``"cumulative"`` or ``"current"`` (the ablation without accumulation).
    targets
        ``"next"``: the ``m`` tokens after the victim. ``"recent"``: the oldest ``m`` of the recent window. They are the
        same for the policy "streaming".
    clamp
        Interval of ``p``, default ``(0, 1)``. ``(0, 0)`` never merges.
    merge_prefill
        Whether tokens that are evicted right after a prompt (any call with more than one token) merge as well. Default
        false, as in the authors' summarisation code.

    Notes
    -----
    Source: "CaM: Cache Merging for Memory-efficient LLMs Inference" (ICML 2024), section 4, and the authors' code,
    which has the five masks.
    """

    m: int | None = 16
    mask: Mask = "bernoulli"
    statistic: Statistic | None = None
    targets: Targets = "next"
    clamp: tuple[float, float] = (0.0, 1.0)
    merge_prefill: bool = False

    def __post_init__(self) -> None:
        if self.m is not None and (isinstance(self.m, bool) or not isinstance(self.m, int) or self.m < 1):
            raise ValueError(f"m must be a positive integer or None, not {self.m!r}")
        if self.mask not in STATISTIC:
            raise ValueError(f"mask must be one of {tuple(STATISTIC)}, not {self.mask!r}")
        if self.statistic is not None and self.statistic not in get_args(Statistic):
            raise ValueError(f"statistic must be one of {get_args(Statistic)} or None, not {self.statistic!r}")
        if self.targets not in get_args(Targets):
            raise ValueError(f"targets must be one of {get_args(Targets)}, not {self.targets!r}")
        object.__setattr__(self, "clamp", tuple(self.clamp))
        if len(self.clamp) != 2 or not 0 <= self.clamp[0] <= self.clamp[1] <= 1:
            raise ValueError(f"clamp must be (low, high) with 0 <= low <= high <= 1, not {self.clamp!r}")

    @property
    def uses(self) -> Statistic | None:
        """The statistic that the mask needs; ``None`` for the mask "all"."""
        return None if self.mask == "all" else self.statistic or STATISTIC[self.mask]


def merge_targets(positions: Tensor, victim: Tensor, m: int, start: int = 0) -> tuple[Tensor, Tensor]:
    """The ``m`` tokens that follow a victim.

    Parameters
    ----------
    positions
        ``[batch, kv_heads, slots]``, int64: position in the text of the token in each slot, -1 for an empty slot.
    victim
        ``[batch, kv_heads]``: slot of the victim.
    m
        Number of targets.
    start
        Only tokens from this position on are targets.

    Returns
    -------
    ``(slots, taken)``, both ``[batch, kv_heads, min(m, slots)]``: slots of the targets in order, and whether there is
    such a target.
    """
    of_victim = positions.gather(-1, victim.unsqueeze(-1))
    following = positions > of_victim
    if start > 0:
        following &= positions >= start
    found = torch.where(following, positions, FAR).topk(min(m, positions.shape[-1]), largest=False)
    return found.indices, found.values < FAR


def merge_probability(
    statistic: Tensor,
    positions: Tensor,
    victim: Tensor,
    slots: Tensor,
    taken: Tensor,
    *,
    mask: Mask = "bernoulli",
    clamp: tuple[float, float] = (0.0, 1.0),
    recent: int = 0,
) -> Tensor:
    """Probability that the victim's value is merged, ``[batch, kv_heads]``; the table is in :class:`CaM`.

    Parameters
    ----------
    statistic
        ``[batch, kv_heads, slots]``: attention, of one step or summed, not negative.
    positions, victim
        As for :func:`merge_targets`.
    slots, taken
        What :func:`merge_targets` gave.
    mask, clamp
        As for :class:`CaM`.
    recent
        Position of the first token of the recent window, for the mask "bernoulli_current".

    Returns
    -------
    Float64; 0 where there is no target, or where the denominator is 0.
    """
    count = taken.sum(-1)
    if mask == "all":
        return (count > 0).double()
    own = statistic.gather(-1, victim.unsqueeze(-1)).squeeze(-1).double()
    if mask == "bernoulli":
        reference = (statistic.gather(-1, slots).double() * taken).sum(-1) / count.clamp(min=1)
    else:
        kept = positions >= (recent if mask == "bernoulli_current" else 0)
        kept = kept.scatter(-1, victim.unsqueeze(-1), False)
        chosen = torch.where(kept, statistic, 0).double()
        reference = chosen.amax(-1) if mask == "max" else chosen.sum(-1) / kept.sum(-1).clamp(min=1)
    ratio = torch.where(reference > 0, own / reference, 0.0)
    if mask == "threshold":
        ratio = (ratio > ABOVE_ONE).double()
    return torch.where(count > 0, ratio.clamp(*clamp), 0.0)


def merges(own: Tensor, reference: Tensor, u: Tensor | None, mask: Mask, clamp: tuple[float, float]) -> Tensor:
    """``u < clamp(own / reference, *clamp)`` for uniform numbers ``u``, in few operations, as boolean.

    ``u`` is ``None`` for masks that are not sampled.
    """
    if mask == "threshold":
        merged = (own > reference * ABOVE_ONE) & (reference > 0)
        return merged if u is None else u < torch.where(merged, clamp[1], clamp[0])
    assert u is not None
    merged = (u * reference < own) & (reference > 0)
    return merged if clamp == (0.0, 1.0) else merged & (u < clamp[1]) | (u < clamp[0])


def merge_values(values: Tensor, victim: Tensor, slots: Tensor, taken: Tensor, merged: Tensor) -> None:
    """Add ``V_i / |J|`` to the values of the targets, in place, where ``merged`` says so.

    ``values`` is ``[batch, kv_heads, slots, head_dim]``; the rest as for :func:`merge_probability`, and ``merged``
    boolean ``[batch, kv_heads]``.
    """
    dim = values.shape[-1]
    count = taken.sum(-1).clamp(min=1)
    evicted = values.gather(2, victim[..., None, None].expand(-1, -1, 1, dim))
    share = evicted / count[..., None, None]
    # Where nothing is merged this adds zeros; a NaN of the victim must not come through them.
    added = torch.where((taken & merged.unsqueeze(-1)).unsqueeze(-1), share, 0)
    values.scatter_add_(2, slots.unsqueeze(-1).expand(-1, -1, -1, dim), added)


def uniform(seed: int, layer: int, rows: Tensor, heads: int, counter: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) that depend on their coordinates alone, ``[batch, kv_heads, ...]`` in float64.

    The mask of a token must not depend on which other rows share its batch, so numbers are not drawn one after the
    other but computed: a 64-bit mix (the finaliser of SplitMix64) of ``seed``, ``layer``, row, head and ``counter``
    (broadcastable with ``[batch, kv_heads, ...]``: a token's position, counted from the row's first token).
    """
    shape = [1] * (counter.ndim - 2)
    state = torch.full_like(counter, _signed(seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019))
    head = torch.arange(heads, device=counter.device)
    for part in (torch.full_like(counter, layer), rows.view(-1, 1, *shape), head.view(1, -1, *shape), counter):
        state = _mix((state ^ part) + _signed(0x9E3779B97F4A7C15))
    return ((state >> 11) & (2**53 - 1)).double() * 2.0**-53


def _signed(value: int) -> int:
    """The 64 low bits as a signed number, which is what tensors hold."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _mix(x: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & (2**33 - 1))
