"""What every cache layer of this family does to its batch in the same way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class BatchOperations:
    """Operations of a ``transformers`` cache layer that change all of its tensors alike.

    A layer says in ``_map`` which tensors it holds; this says what happens to them. It stands before the layer class
    of ``transformers`` in the list of bases, whose own versions know of keys and values only.
    """

    is_initialized: bool
    device: torch.device

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the layer, batch first, by what ``change`` makes of it."""
        raise NotImplementedError

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows ``beam_idx`` of the batch."""
        self._map(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch."""
        self._map(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep rows ``indices`` of the batch."""
        self._map(lambda t: t[indices.to(t.device)])

    def offload(self) -> None:
        """Move everything to the CPU."""
        self._map(lambda t: t.to("cpu"))

    def prefetch(self) -> None:
        """Move everything back to the layer's device."""
        if self.is_initialized:
            self._map(lambda t: t.to(self.device))
