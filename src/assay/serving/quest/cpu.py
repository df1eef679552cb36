"""The two loops of attention over pages for CPUs, compiled by numba where that is installed.

They read selected pages where they lie, which saves gathering them into new memory first.
:mod:`assay.serving.quest.pages` uses them for float32 and computes the same with PyTorch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

try:
    import numba
    import numpy as np
except ImportError:  # pragma: no cover (numba is optional)
    numba = None  # type: ignore[assignment]

# Bytes to read below which starting threads costs more than it gains.
PARALLEL_BYTES = 2**20

Kernel = Callable[..., None]


def _compile(loop: Callable[..., None]) -> Kernel:
    return numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")(loop)


@cache
def key_logits(dim: int) -> Kernel:
    """``out[u, r, j * size + s] = q[u, r] . key[row(u), pages[u, j] * size + s]``.

    The head dimension is a constant of the compiled loop, which lets the compiler unroll and vectorise it.
    """

    def loop(
        q: Any, key: Any, pages: Any, out: Any, size: int, first: int, last: int
    ) -> None:  # pragma: no cover (compiled)
        rows, share = q.shape[1], q.shape[0] // key.shape[0]
        fours = size - size % 4
        for u in range(first, last):
            b = u // share
            for j in range(pages.shape[1]):
                t, i = pages[u, j] * size, j * size
                for s in range(0, fours, 4):  # four tokens at a time: more reads are under way at once
                    for r in range(rows):
                        sum0 = sum1 = sum2 = sum3 = np.float32(0)
                        for d in range(dim):
                            sum0 += q[u, r, d] * key[b, t + s, d]
                            sum1 += q[u, r, d] * key[b, t + s + 1, d]
                            sum2 += q[u, r, d] * key[b, t + s + 2, d]
                            sum3 += q[u, r, d] * key[b, t + s + 3, d]
                        out[u, r, i + s], out[u, r, i + s + 1] = sum0, sum1
                        out[u, r, i + s + 2], out[u, r, i + s + 3] = sum2, sum3
                for s in range(fours, size):
                    for r in range(rows):
                        total = np.float32(0)
                        for d in range(dim):
                            total += q[u, r, d] * key[b, t + s, d]
                        out[u, r, i + s] = total

    return _compile(loop)


@cache
def value_mix(dim: int) -> Kernel:
    """``out[u, r] = sum p[u, r, j * size + s] * value[row(u), pages[u, j] * size + s]``."""

    def loop(
        p: Any, value: Any, pages: Any, out: Any, size: int, first: int, last: int
    ) -> None:  # pragma: no cover (compiled)
        rows, share = p.shape[1], p.shape[0] // value.shape[0]
        eights = size - size % 8
        total = np.zeros((rows, dim), np.float32)
        for u in range(first, last):
            total[:] = 0
            b = u // share
            for j in range(pages.shape[1]):
                t, i = pages[u, j] * size, j * size
                for s in range(0, eights, 8):  # the sums are read and written once for eight tokens
                    for r in range(rows):
                        w0, w1, w2, w3 = p[u, r, i + s], p[u, r, i + s + 1], p[u, r, i + s + 2], p[u, r, i + s + 3]
                        w4, w5, w6, w7 = p[u, r, i + s + 4], p[u, r, i + s + 5], p[u, r, i + s + 6], p[u, r, i + s + 7]
                        for d in range(dim):
                            sum0 = w0 * value[b, t + s, d] + w1 * value[b, t + s + 1, d]
                            sum1 = w2 * value[b, t + s + 2, d] + w3 * value[b, t + s + 3, d]
                            sum2 = w4 * value[b, t + s + 4, d] + w5 * value[b, t + s + 5, d]
                            sum3 = w6 * value[b, t + s + 6, d] + w7 * value[b, t + s + 7, d]
                            total[r, d] += (sum0 + sum1) + (sum2 + sum3)
                for s in range(eights, size):
                    for r in range(rows):
                        w = p[u, r, i + s]
                        for d in range(dim):
                            total[r, d] += w * value[b, t + s, d]
            out[u] = total

    return _compile(loop)


def available(*tensors: Tensor) -> bool:
    """Whether the loops can run on these."""
    return numba is not None and all(
        t.device.type == "cpu" and t.dtype == torch.float32 and not t.requires_grad for t in tensors
    )


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quest")


def logits(q: Tensor, key: Tensor, pages: Tensor, size: int) -> Tensor:
    """``[batch, chosen, rows, head_dim]`` times the selected keys: ``[batch, chosen, rows, count * size]``."""
    out = q.new_empty((*q.shape[:3], pages.shape[2] * size))
    _run(key_logits(q.shape[3]), q, key, pages, size, out)
    return out


def mix(weights: Tensor, value: Tensor, pages: Tensor, size: int) -> Tensor:
    """``[batch, chosen, rows, count * size]`` times the selected values: ``[batch, chosen, rows, head_dim]``."""
    out = weights.new_empty((*weights.shape[:3], value.shape[3]))
    _run(value_mix(value.shape[3]), weights, value, pages, size, out)
    return out


def _run(kernel: Kernel, small: Tensor, large: Tensor, pages: Tensor, size: int, out: Tensor) -> None:
    """Call a kernel on all heads, shared among as many threads as PyTorch uses."""
    arrays = [t.contiguous().flatten(0, 1).numpy() for t in (small, large, pages)] + [out.flatten(0, 1).numpy()]
    units = arrays[0].shape[0]
    work = 4 * pages.numel() * size * large.shape[3]
    threads = min(torch.get_num_threads(), units) if work > PARALLEL_BYTES else 1
    if threads == 1:
        kernel(*arrays, size, 0, units)
        return
    bounds = [units * i // threads for i in range(threads + 1)]
    for job in [_pool(threads).submit(kernel, *arrays, size, a, b) for a, b in pairwise(bounds)]:
        job.result()
