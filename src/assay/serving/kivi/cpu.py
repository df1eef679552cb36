"""The two loops of packed attention for CPUs, compiled by numba where that is installed.

They read each packed byte once and keep what they unpack in the first-level cache, which PyTorch's operators cannot.
:mod:`assay.serving.kivi.attention` uses them for the default axes and computes the same with PyTorch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from assay.serving.kivi.store import PackedStore

try:
    import numba
    import numpy as np
except ImportError:  # pragma: no cover (numba is optional)
    numba = None  # type: ignore[assignment]

# Packed bytes below which starting threads costs more than it gains.
PARALLEL_BYTES = 2**18

Kernel = Callable[..., None]


def _compile(loop: Callable[..., None]) -> Kernel:
    return numba.njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")(loop)


@cache
def key_logits(bits: int, rows: int, dim: int) -> Kernel:
    """``out[b, m, t] = q[b, m] . (codes * scale + zero)[b, t]`` for groups along tokens (axis "channel").

    The shapes are constants of the compiled loop, which lets the compiler unroll and vectorise it.
    """
    planes, mask = 8 // bits, (1 << bits) - 1

    def loop(
        q: Any, codes: Any, scale: Any, zero: Any, out: Any, first: int, last: int
    ) -> None:  # pragma: no cover (compiled)
        queries = q.shape[1]
        scaled = np.empty((queries, dim), np.float32)
        plain = np.empty((planes, dim), np.float32)
        offset = np.empty(queries, np.float32)
        for b in range(q.shape[0]):
            for g in range(first, last):
                for m in range(queries):
                    total = np.float32(0)
                    for d in range(dim):
                        scaled[m, d] = q[b, m, d] * scale[b, g, d]
                        total += q[b, m, d] * zero[b, g, d]
                    offset[m] = total
                for r in range(rows):
                    for k in range(planes):
                        for d in range(dim):
                            plain[k, d] = np.float32((np.int32(codes[b, g, r, d]) >> (bits * k)) & mask)
                    for m in range(queries):
                        for k in range(planes):
                            total = np.float32(0)
                            for d in range(dim):
                                total += scaled[m, d] * plain[k, d]
                            out[b, m, (g * planes + k) * rows + r] = total + offset[m]

    return _compile(loop)


@cache
def value_mix(bits: int, width: int, groups: int) -> Kernel:
    """``out[b, m] += sum_t p[b, m, t] * (codes * scale + zero)[b, t]`` for groups along channels (axis "token")."""
    planes, mask = 8 // bits, (1 << bits) - 1
    dim = planes * width
    size = dim // groups

    def loop(
        p: Any, codes: Any, scale: Any, zero: Any, out: Any, first: int, last: int
    ) -> None:  # pragma: no cover (compiled)
        queries = p.shape[1]
        # Eight tokens at a time: the sums are read and written once for all of them.
        plain = np.zeros((8, dim), np.float32)
        weight = np.zeros((groups, 8), np.float32)
        total = np.zeros(dim, np.float32)
        for b in range(p.shape[0]):
            for start in range(first, last, 8):
                count = min(8, last - start)
                for i in range(count):
                    for k in range(planes):
                        for j in range(width):
                            plain[i, k * width + j] = np.float32(
                                (np.int32(codes[b, start + i, j]) >> (bits * k)) & mask
                            )
                weight[:] = 0
                for m in range(queries):
                    for i in range(count):
                        for h in range(groups):
                            weight[h, i] = p[b, m, start + i] * scale[b, start + i, h]
                    for h in range(groups):
                        for j in range(size):
                            c = h * size + j
                            sum0 = weight[h, 0] * plain[0, c] + weight[h, 1] * plain[1, c]
                            sum1 = weight[h, 2] * plain[2, c] + weight[h, 3] * plain[3, c]
                            sum2 = weight[h, 4] * plain[4, c] + weight[h, 5] * plain[5, c]
                            sum3 = weight[h, 6] * plain[6, c] + weight[h, 7] * plain[7, c]
                            total[c] = (sum0 + sum1) + (sum2 + sum3)
                    for c in range(dim):
                        out[b, m, c] += total[c]

    return _compile(loop)


def available(store: PackedStore, axis: str) -> bool:
    """Whether the loop for this axis can run on the store."""
    return numba is not None and store.axis == axis and store.codes is not None and store.codes.device.type == "cpu"


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kivi")


def logits(q: Tensor, store: PackedStore) -> Tensor:
    """``q K'^T``: float32 ``[batch, kv_heads, rows, head_dim]`` to ``[batch, kv_heads, rows, store.length]``."""
    codes, scale, zero = store.part(0, store.length)
    out = q.new_empty((*q.shape[:3], store.length))
    kernel = key_logits(store.bits, codes.shape[3], codes.shape[4])
    parts = _parts(store, scale.shape[2])
    _run(kernel, _arrays(q, store, scale, zero), [_array(out)] * len(parts), parts)
    return out


def mix(weights: Tensor, store: PackedStore) -> Tensor:
    """``weights V'``: float32 ``[batch, kv_heads, rows, store.length]`` to ``[batch, kv_heads, rows, head_dim]``."""
    codes, scale, zero = store.part(0, store.length)
    parts = _parts(store, store.length)
    kernel = value_mix(store.bits, codes.shape[3], scale.shape[3])
    # A sum for each thread, over its share of the tokens.
    sums = weights.new_zeros((len(parts), *weights.shape[:3], codes.shape[3] * 8 // store.bits))
    _run(kernel, _arrays(weights, store, scale, zero), [_array(s) for s in sums], parts)
    return sums.sum(0).add_((weights @ zero.float()).repeat_interleave(store.group_size, -1))


def _parts(store: PackedStore, rows: int) -> list[tuple[int, int]]:
    """Ranges of groups or tokens, one for each thread that PyTorch may use."""
    threads = min(torch.get_num_threads(), rows) if store.packed_bytes > PARALLEL_BYTES else 1
    return list(pairwise(rows * i // threads for i in range(threads + 1)))


def _array(x: Tensor) -> Any:
    return x.contiguous().flatten(0, 1).numpy()


def _arrays(small: Tensor, store: PackedStore, scale: Tensor, zero: Tensor) -> list[Any]:
    assert store.codes is not None
    # The whole buffer of codes, since its used part would not be contiguous.
    return [_array(small), _array(store.codes), _array(scale.float()), _array(zero.float())]


def _run(kernel: Kernel, arrays: list[Any], outs: list[Any], parts: list[tuple[int, int]]) -> None:
    jobs = [_pool(len(parts)).submit(kernel, *arrays, out, *part) for out, part in zip(outs[1:], parts[1:])]
    kernel(*arrays, outs[0], *parts[0])
    for job in jobs:
        job.result()
