"""The cache of one attention layer: slots that tokens enter and leave, per row and key-value head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from assay.serving._batch import BatchOperations
from assay.serving.cam import merge as merging
from assay.serving.cam.merge import CaM
from assay.serving.cam.policies import CacheState, Policy, check_rank, lowest, order, resolve, rule

HISTORY = 400  # queries that "scissorhands" looks back on
ROOM = 64  # spare slots of a buffer that has to grow, at least
POPCOUNT = torch.tensor([bin(byte).count("1") for byte in range(256)])
SLOTS = ("keys", "values", "positions", "scores", "draws", "low")  # tensors [batch, kv_heads, slots, ...]
STATE = (*SLOTS, "first", "rows")
BLOCK = 64  # random numbers that are made ahead, a token each
BELOW_ONE = 1 - 2**-24


class EvictionLayer(BatchOperations, DynamicLayer):
    """The cache of one layer; :class:`EvictionCache` has the parameters and their meaning.

    A token lives in a *slot*. ``positions`` ``[batch, kv_heads, slots]`` tells which one, by its place in the text, and
    is -1 for an empty slot: slots are in no particular order once tokens have left, since a new token takes the place
    of the one that left last. ``update`` writes and returns keys and values; the attention function calls ``record``
    with the weights that it computed, and at last ``settle``, which merges and evicts.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(
        self,
        *,
        policy: str | Policy,
        budget: int | float,
        n_sink: int | float | None,
        n_recent: int | float | None,
        merge: CaM | None,
        prefill_scores: str,
        rotation: Tensor | None,
        seed: int,
        index: int,
        first_row: int,
    ) -> None:
        super().__init__()
        self.rule = rule(policy)
        self.sizes = (policy, budget, n_sink, n_recent, merge.m if merge else None)
        self.merge = merge
        self.prefill_scores = prefill_scores
        self.rotation = rotation
        self.seed, self.index, self.first_row = seed, index, first_row
        self.custom = callable(policy)
        self.samples = merge is not None and merge.mask != "all" and (merge.mask, merge.clamp) != ("threshold", (0, 1))
        self.accumulates = self.rule.cumulative or (merge is not None and merge.uses == "cumulative")
        self.watches = policy != "streaming" or (merge is not None and merge.uses is not None)
        self.reset()

    # -- what transformers calls ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = None
        self.positions: Tensor | None = None
        self.scores: Tensor | None = None
        self.draws: Tensor | None = None
        self.low: Tensor | None = None
        self.block: tuple[int, Tensor] | None = None
        self.first: Tensor | None = None
        self.rows: Tensor | None = None
        self.current: Tensor | None = None
        self.is_initialized = False
        self.seen = self.used = self.count = self.new = 0
        self.newest = -1  # slot of the newest token
        self.prompt = 0
        self.evicted = self.pending = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take device, dtype and shapes from the first keys and values, and what a ratio of them is."""
        for name, x in (("keys", key_states), ("values", value_states)):
            if x.ndim != 4:
                raise ValueError(f"{name} must have shape [batch, kv_heads, tokens, head_dim], not {tuple(x.shape)}")
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads = key_states.shape[:2]
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        self.positions = torch.empty((batch, heads, 0), dtype=torch.int64, device=self.device)
        if self.accumulates:
            self.scores = torch.empty((batch, heads, 0), device=self.device)
        if self.samples:
            self.draws = torch.empty((batch, heads, 0), device=self.device)
        if self.rule.low_counts:
            self.low = torch.empty((batch, heads, 0, HISTORY // 8), dtype=torch.uint8, device=self.device)
        self.rows = torch.arange(batch, device=self.device) + self.first_row
        self.is_initialized = True

    def set_sizes(self, prompt: int) -> None:
        """Fix the counts that depend on the length of the prompt."""
        self.prompt = prompt
        self.budget, self.left, self.n_sink, self.n_recent = resolve(*self.sizes, prompt)
        if self.merge is not None:
            self.m = self.n_recent if self.merge.m is None else self.merge.m
            if self.m < 1:
                raise ValueError("merge has m=None, the recent window, but n_recent is 0")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Give ``[batch, kv_heads, n, head_dim]`` their slots; return keys and values of all slots."""
        if self.pending:
            raise RuntimeError(
                "the attention of the last call did not report to this cache, so nothing would ever be evicted; "
                "call register_eviction_attention() and model.set_attn_implementation('evict')"
            )
        key_states, value_states = key_states.detach(), value_states.detach()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None and self.positions is not None
        if key_states.shape[:2] != self.keys.shape[:2] or key_states.shape[2] != value_states.shape[2]:
            raise ValueError(
                f"the cache holds [batch, kv_heads] = {list(self.keys.shape[:2])}, but keys of shape "
                f"{list(key_states.shape)} and values of shape {list(value_states.shape)} came"
            )
        if self.prompt == 0:
            self.set_sizes(key_states.shape[2])
        self.new = key_states.shape[2]
        if self.new == 1 and self.used > self.budget:
            self._replace(key_states, value_states)
        else:
            self._append(key_states, value_states)
        self.seen += self.new
        self.count += self.new
        self.pending = self.new > 0
        keys = self.keys[:, :, : self.used]
        if self.rotation is not None and self.evicted:
            keys = self._shifted(keys)
        keys.eviction_layer = self  # type: ignore[attr-defined]  # how the attention function finds this layer
        return keys, self.values[:, :, : self.used]

    def _replace(self, key: Tensor, value: Tensor) -> None:
        """Put one token into an empty slot; after an eviction every row and head has one."""
        assert self.keys is not None and self.values is not None and self.positions is not None
        if self.is_ring:
            self.newest = self._after(self.newest)
            self.keys[:, :, self.newest] = key[:, :, 0]
            self.values[:, :, self.newest] = value[:, :, 0]
            self.positions[:, :, self.newest] = self.seen
            if self.scores is not None:
                self.scores[:, :, self.newest] = 0
            if self.draws is not None:
                self.draws[:, :, self.newest] = self._draw()
            return
        slot = self.positions.argmin(-1, keepdim=True)
        self.keys.scatter_(2, slot.unsqueeze(-1).expand_as(key), key)
        self.values.scatter_(2, slot.unsqueeze(-1).expand_as(value), value)
        self.positions.scatter_(2, slot, self.seen)
        if self.scores is not None:
            self.scores.scatter_(2, slot, 0)
        if self.draws is not None:
            self.draws.scatter_(2, slot, self._draw().unsqueeze(-1))
        if self.low is not None:
            self.low.scatter_(2, slot.unsqueeze(-1).expand(-1, -1, 1, self.low.shape[-1]), 0)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens behind the used slots, in buffers that grow to one slot beyond the budget at most."""
        assert self.keys is not None and self.positions is not None
        start, stop = self.used, self.used + self.new
        if self.keys.shape[2] < stop:
            room = max(stop, min(self.budget + 1, stop + max(ROOM, stop // 8)))
            for name in SLOTS:
                old = getattr(self, name)
                if old is not None:
                    larger = old.new_empty((*old.shape[:2], room, *old.shape[3:]))
                    larger[:, :, :start] = old[:, :, :start]
                    setattr(self, name, larger)
        assert self.values is not None
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        self.positions[:, :, start:stop] = torch.arange(self.seen, self.seen + self.new, device=self.device)
        if self.scores is not None:
            self.scores[:, :, start:stop] = 0
        if self.low is not None:
            self.low[:, :, start:stop] = 0
        if self.draws is not None:
            self.draws[:, :, start:stop] = self._drawn(self.seen, self.seen + self.new)
        self.used = stop
        self.newest = stop - 1

    @property
    def is_ring(self) -> bool:
        """Whether slots from ``n_sink`` on are a ring in the order of the text, the same for all rows and heads.

        So it is with "streaming" and no padding: the oldest of the window always leaves, and its slot comes after that
        of the newest. The step is then a matter of slices instead of searches.
        """
        return self.sizes[0] == "streaming" and self.first is None

    def _after(self, slot: int) -> int:
        """The next slot of the ring."""
        return slot + 1 if slot < self.budget else self.n_sink

    def _drawn(self, start: int, stop: int) -> Tensor:
        """The random numbers of the tokens at these positions, ``[batch or 1, kv_heads, tokens]``."""
        assert self.rows is not None and self.keys is not None
        place = torch.arange(start, stop, device=self.rows.device)[None, None]
        if self.first is not None:
            place = place - self.first[:, None, None]
        numbers = merging.uniform(self.seed, self.index, self.rows, self.keys.shape[1], place)
        return numbers.float().clamp(max=BELOW_ONE)

    def _draw(self) -> Tensor:
        """The random numbers of the new token; they are made in blocks."""
        start, end = self.seen - self.seen % BLOCK, self.seen - self.seen % BLOCK + BLOCK
        if self.block is None or self.block[0] != start:
            self.block = start, self._drawn(start, end)
        return self.block[1][:, :, self.seen - start]

    def _shifted(self, keys: Tensor) -> Tensor:
        """Keys rotated so that the tokens held stand next to each other and end where the new ones begin."""
        assert self.positions is not None and self.rotation is not None
        held = self.positions[:, :, : self.used]
        old = (held >= 0) & (held < self.seen - self.new)
        # rank of a token among the old ones: how many old ones are later
        by_age = torch.where(old, held, -1).argsort(-1, descending=True)
        later = torch.empty_like(held).scatter_(-1, by_age, torch.arange(self.used, device=held.device).expand_as(held))
        shift = torch.where(old, self.seen - self.new - 1 - later - held, 0)
        angle = shift.unsqueeze(-1) * self.rotation.to(held.device)
        cos, sin = angle.cos(), angle.sin()
        half = self.rotation.shape[0]
        a, b, rest = keys[..., :half].float(), keys[..., half : 2 * half].float(), keys[..., 2 * half :]
        return torch.cat([(a * cos - b * sin).to(keys.dtype), (b * cos + a * sin).to(keys.dtype), rest], -1)

    def get_seq_length(self) -> int:
        """Tokens seen, evicted ones included: what positions and masks are counted by."""
        return self.seen

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens, as long as nothing was evicted and no scores are summed."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, not {tokens_to_remove}")
        if tokens_to_remove == 0:
            return
        if self.evicted:
            raise RuntimeError("tokens were evicted, so a cache that lacks the last ones cannot be restored")
        if self.accumulates or self.low is not None:
            raise RuntimeError("the scores of this cache include the attention of the tokens that crop would remove")
        if self.seen + tokens_to_remove < 0:
            raise ValueError(f"cannot remove {-tokens_to_remove} tokens of {self.seen}")
        self.seen += tokens_to_remove
        self.used += tokens_to_remove
        self.newest = self.used - 1
        self.count += tokens_to_remove

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        self.block = None
        for name in STATE:
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, change(held))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows ``beam_idx`` of the batch. Random numbers stay with the place in the batch, not with the beam."""
        rows = self.rows
        super().reorder_cache(beam_idx)
        self.rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch; every copy draws random numbers of its own."""
        super().batch_repeat_interleave(repeats)
        if self.rows is not None:
            self.rows = torch.arange(len(self.rows), device=self.rows.device) + self.first_row

    # -- what the attention function calls --------------------------------------------------------------------------

    @property
    def has_gaps(self) -> bool:
        """Whether some slot may be empty, so that attention must mask it."""
        return self.first is not None or self.count < self.used

    @property
    def needs_weights(self) -> bool:
        """Whether anything is done with the attention weights of this call."""
        if self.new > 1 and self.count <= self.budget:
            return (self.accumulates or self.low is not None) and self.prefill_scores != "none"
        return self.watches

    def set_padding(self, real: Tensor) -> None:
        """Empty the slots of padding before the first real token of each row of a prompt, ``[batch, tokens]``."""
        assert self.positions is not None
        first = real.int().argmax(-1)
        if bool((first > 0).any()):
            self.first = first
            if self.draws is not None:  # counted from the first real token
                self.draws[:, :, : self.used] = self._drawn(0, self.used)
            held = self.positions[:, :, : self.used]
            held[held < first[:, None, None]] = -1

    def record(self, weights: Tensor, start: int, visible: Tensor | None) -> None:
        """Take in the attention weights of some queries of this call.

        Parameters
        ----------
        weights
            ``[batch, kv_heads, queries, slots]`` in float32, the mean over the query heads of a group.
        start
            Number of the first of these queries within the call.
        visible
            Boolean, of a shape that broadcasts with ``weights``: which slots a query could attend to.
        """
        assert self.positions is not None
        queries = weights.shape[2]
        last = start + queries == self.new
        if last:
            self.current = weights[:, :, -1]
        if self.new > 1 and self.prefill_scores != "full":
            if self.prefill_scores == "none" or not last:
                return
            weights, start, queries = weights[:, :, -1:], self.new - 1, 1
            visible = visible if visible is None or visible.shape[2] == 1 else visible[:, :, -1:]
        if self.first is not None:  # padding asks no questions
            place = torch.arange(queries, device=weights.device) + self.seen - self.new + start
            weights = weights * (place >= self.first[:, None])[:, None, :, None]
        if self.scores is not None:
            self.scores[:, :, : self.used] += weights.sum(2) if queries > 1 else weights[:, :, 0]
        if self.low is not None:
            self._count_low(weights, start, visible)

    def _count_low(self, weights: Tensor, start: int, visible: Tensor | None) -> None:
        """Note for each of the last 400 queries which tokens got less than the mean weight, a bit each."""
        assert self.low is not None
        skip = max(0, weights.shape[2] - HISTORY)
        weights = weights[:, :, skip:]
        if visible is None:
            below = weights < 1 / self.used
        else:
            visible = visible[:, :, skip:] if visible.shape[2] > 1 else visible
            below = (weights < 1 / visible.sum(-1, keepdim=True)) & visible
        if self.first is not None:
            place = torch.arange(weights.shape[2], device=weights.device) + self.seen - self.new + start + skip
            below = below & (place >= self.first[:, None])[:, None, :, None]
        for query in range(weights.shape[2]):
            byte, bit = divmod((self.seen - self.new + start + skip + query) % HISTORY, 8)
            target = self.low[:, :, : self.used, byte]
            target &= 255 - (1 << bit)
            target |= below[:, :, query].to(torch.uint8) << bit

    def settle(self) -> None:
        """End a call: merge and evict what is over the budget."""
        assert self.positions is not None
        self.pending = False
        excess: int | Tensor
        if self.first is None:
            if self.count <= self.budget:
                return
            excess = self.count - self.left
            self.count = self.left
        else:
            if self.used <= self.budget:
                return
            held = (self.positions[:, :, : self.used] >= 0).sum(-1)
            excess = torch.where(held > self.budget, held - self.left, 0)
        self.evicted = True
        if isinstance(excess, int) and excess == 1 and self.new == 1:
            self._evict_one(None)
        elif self.new == 1 and not self.rule.halves and isinstance(excess, Tensor):
            self._evict_one(excess > 0)
        else:
            self._evict_many(excess)
        self.current = None

    def _rank(self) -> tuple[Tensor, Tensor]:
        """Ranks of all slots, protected and empty ones last, and their positions."""
        assert self.positions is not None
        held = self.positions[:, :, : self.used]
        low = None
        if self.low is not None:
            low = POPCOUNT.to(held.device)[self.low[:, :, : self.used].long()].sum(-1)
        scores = self.scores[:, :, : self.used] if self.scores is not None else None
        state = CacheState(held, scores, self.current, low)
        rank = self.rule.rank(state)
        if self.custom:
            check_rank(rank, state)
        sinks = self.n_sink if self.first is None else (self.first + self.n_sink)[:, None, None]
        # Sinks and recent tokens never leave, so both are known by their position.
        protected = (held < sinks) | (held >= self.seen - self.n_recent)
        if self.first is not None:
            protected |= held < 0
        return rank.masked_fill(protected, torch.inf if rank.is_floating_point() else merging.FAR), held

    def _evict_one(self, over: Tensor | None) -> None:
        """Evict one token of every row and head, or of those that are ``over`` the budget."""
        assert self.positions is not None
        if self.is_ring:
            slot = self._after(self.newest)
            if self.merge is not None:
                self._merge_ring(slot)
            self.positions[:, :, slot] = -1
            return
        rank, held = self._rank()
        victim = lowest(rank, held)
        if self.merge is not None:
            self._merge(held, victim, over)
        gone: int | Tensor = -1
        if over is not None:
            gone = torch.where(over.unsqueeze(-1), -1, held.gather(-1, victim.unsqueeze(-1)))
            held.scatter_(-1, victim.unsqueeze(-1), gone)
        else:
            held.scatter_(-1, victim.unsqueeze(-1), gone)

    def _evict_many(self, excess: int | Tensor) -> None:
        """Evict the ``excess`` lowest ranks, oldest first, and close the gaps if the buffers are larger than needed."""
        rank, held = self._rank()
        by_rank = order(rank, held)
        most = excess if isinstance(excess, int) else int(excess.max())
        slots = by_rank[..., :most]
        leaves = torch.ones_like(slots, dtype=torch.bool)
        if isinstance(excess, Tensor):
            leaves = torch.arange(most, device=slots.device) < excess.unsqueeze(-1)
        if self.merge is not None and (self.new == 1 or self.merge.merge_prefill):
            ages = torch.where(leaves, held.gather(-1, slots), merging.FAR).argsort(-1)
            for victim, active in zip(slots.gather(-1, ages).unbind(-1), leaves.gather(-1, ages).unbind(-1)):
                self._merge(held, victim, active)
                of_victim = held.gather(-1, victim.unsqueeze(-1))
                held.scatter_(-1, victim.unsqueeze(-1), torch.where(active.unsqueeze(-1), -1, of_victim))
        else:
            held.scatter_(-1, slots, torch.where(leaves, -1, held.gather(-1, slots)))
        if self.used > self.budget + 1:
            self._compact()

    def _compact(self) -> None:
        """Move the tokens that are left to the front, in the order of the text; empty slots come last."""
        assert self.positions is not None
        held = self.positions[:, :, : self.used]
        slots = torch.where(held < 0, merging.FAR, held).argsort(-1)[..., : self.budget]
        for name in SLOTS:
            old = getattr(self, name)
            if old is None:
                continue
            index = slots if old.ndim == 3 else slots.unsqueeze(-1).expand(*slots.shape, old.shape[3])
            new = old.new_zeros((*old.shape[:2], self.budget + 1, *old.shape[3:]))
            new[:, :, : self.budget] = old.gather(2, index)
            setattr(self, name, new)
        self.used = self.budget
        self.newest = self.used - 1

    def _merge(self, held: Tensor, victim: Tensor, active: Tensor | None) -> None:
        """Merge the victim's value, where the mask says so and it is ``active``."""
        cam = self.merge
        assert cam is not None and self.values is not None
        recent = self.seen - self.n_recent
        slots, taken = merging.merge_targets(held, victim, self.m, recent if cam.targets == "recent" else 0)
        if cam.uses is None:
            merged = taken[..., 0]
        else:
            p = merging.merge_probability(
                self._statistic(), held, victim, slots, taken, mask=cam.mask, clamp=cam.clamp, recent=recent
            )
            merged = p > 0.5
            if self.draws is not None:
                merged = self.draws[:, :, : self.used].gather(-1, victim.unsqueeze(-1)).squeeze(-1) < p
        if active is not None:
            merged = merged & active
        merging.merge_values(self.values[:, :, : self.used], victim, slots, taken, merged)

    def _merge_ring(self, slot: int) -> None:
        """The same for one slot of all rows and heads, whose followers are the next slots of the ring."""
        cam = self.merge
        assert cam is not None and self.values is not None
        count = min(self.m, self.n_recent)
        start = self._after(slot)
        parts = [slice(start, min(start + count, self.used))]
        if start + count > self.used:
            parts.append(slice(self.n_sink, self.n_sink + start + count - self.used))
        share = self.values[:, :, slot : slot + 1] / count
        if cam.uses is not None:
            statistic = self._statistic()
            own = statistic[:, :, slot]
            if cam.mask == "bernoulli":
                sums = [statistic[:, :, part].sum(-1) for part in parts]
                reference = (sums[0] if len(sums) == 1 else sums[0] + sums[1]) / count
            elif cam.mask == "bernoulli_current":
                reference = (statistic[:, :, self.n_sink :].sum(-1, dtype=torch.float64) - own) / self.n_recent
            elif cam.mask == "threshold":
                reference = (statistic.sum(-1, dtype=torch.float64) - own) / (self.used - 1)
            else:
                others = [x for x in (statistic[:, :, :slot], statistic[:, :, slot + 1 :]) if x.shape[-1]]
                reference = torch.stack([x.amax(-1) for x in others]).amax(0)
            u = None if self.draws is None else self.draws[:, :, slot]
            merged = merging.merges(own, reference, u, cam.mask, cam.clamp)
            share = torch.where(merged[..., None, None], share, share.new_zeros(()))
        for part in parts:
            self.values[:, :, part] += share

    def _statistic(self) -> Tensor:
        """What the mask looks at, ``[batch, kv_heads, slots]``."""
        assert self.merge is not None
        statistic = self.current if self.merge.uses == "current" else self.scores
        assert statistic is not None
        return statistic[:, :, : self.used]
