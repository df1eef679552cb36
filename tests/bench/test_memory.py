import collections
import dataclasses
import mmap
import os
import resource
import sys
import time
import types
import warnings

import numpy as np
import pytest
import scipy.sparse

from assay.bench import memory
from assay.bench.memory import measure_peak, peak_memory, tensor_bytes

MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the high-water mark is Linux's")


def use(mib):
    """Touch fresh pages and give them back: straight from the system, since an allocator may have kept some."""
    with mmap.mmap(-1, mib * MIB) as block:
        for page in range(0, mib * MIB, mmap.PAGESIZE):
            block[page] = 1


@linux
def test_peak_of_a_block_counts_what_is_freed_before_it_ends():
    with measure_peak() as peak:
        use(80)
    assert peak.exact and 79 * MIB < peak.rss_rise < 90 * MIB
    assert peak.rss > peak.rss_rise and peak.device == 0
    with measure_peak() as small:
        pass
    assert small.rss_rise < 5 * MIB  # the mark of the first block is gone


@linux
def test_nested_blocks_do_not_take_the_mark_from_each_other():
    with measure_peak() as outer:
        use(120)
        with measure_peak() as inner:
            use(40)
        with measure_peak() as last:
            pass
    assert outer.rss_rise > 119 * MIB and 39 * MIB < inner.rss_rise < 60 * MIB and last.rss_rise < 15 * MIB
    assert not memory._open


def test_a_block_that_raises_is_measured_too():
    with pytest.raises(KeyError), measure_peak() as peak:
        raise KeyError
    assert peak.rss > 0 and not memory._open


def test_measuring_costs_well_under_a_millisecond():
    spent = []
    for _ in range(300):
        start = time.perf_counter()
        with measure_peak():
            pass
        spent.append(time.perf_counter() - start)
    assert np.median(spent) < 0.5e-3


def test_without_a_resettable_mark_the_lifetime_peak_is_told(monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError

    with monkeypatch.context() as patch:
        patch.setattr(memory.os, "open", refuse)
        with measure_peak() as peak:
            pass
    assert not peak.exact
    assert peak.rss == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@linux
def test_a_mark_that_cannot_be_written_is_not_exact(monkeypatch):
    def refuse(fd, data):
        raise OSError

    monkeypatch.setattr(memory.os, "write", refuse)
    with measure_peak() as peak:
        pass
    assert not peak.exact and peak.rss > 0


def test_device_peak_comes_from_torch_if_it_has_used_a_device(monkeypatch):
    reset = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 2,
        reset_peak_memory_stats=reset.append,
        max_memory_allocated=lambda i: 100 + i,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    with measure_peak() as peak:
        pass
    assert reset == [0, 1] and peak.device == 201


@linux
def test_fresh_process_does_not_count_what_this_one_holds():
    ballast = np.ones(60 * MIB // 8)

    def work(mib, *, keep):
        import numpy as np

        block = np.ones(mib * 2**17)
        return [block[:10], block] if keep else None

    found = peak_memory(work, 30, keep=True)
    assert found.result_bytes == 30 * MIB
    assert 29 * MIB < found.rss_rise < 45 * MIB
    assert found.device == 0
    assert peak_memory(work, 30, keep=False).result_bytes == 0
    assert ballast.nbytes == 60 * MIB


def test_a_call_that_raises_in_the_fresh_process_is_told_with_its_traceback():
    def broken():
        raise ZeroDivisionError("over the moon")

    with pytest.raises(RuntimeError, match=r"broken could not be measured:\n(?s:.*)ZeroDivisionError: over the moon"):
        peak_memory(broken)


@linux
def test_a_process_that_is_killed_is_told():
    def die():
        os.kill(os.getpid(), 9)

    with pytest.raises(RuntimeError, match=r"ended by SIGKILL \(memory ran out"):
        peak_memory(die)


def test_arrays_count_their_buffer_once():
    a = np.zeros((100, 10))
    assert tensor_bytes(a) == 8000
    assert tensor_bytes([a, a, a.T, a[::2], {"x": (a[3],)}]) == 8000
    assert tensor_bytes(a[5:6]) == 8000  # a view keeps all of it
    assert tensor_bytes([a, a.copy()]) == 16000
    assert tensor_bytes(np.zeros(0)) == 0
    assert tensor_bytes(np.frombuffer(bytearray(64))) == 64


def test_objects_are_walked():
    @dataclasses.dataclass
    class Holder:
        x: np.ndarray
        more: dict

    class Slots:
        __slots__ = ("one", "unset")

        def __init__(self):
            self.one = np.zeros(3)

    class Single:
        __slots__ = "y"

    holder = Holder(np.zeros(2), {1: [np.zeros(4)], "self": None})
    holder.more["self"] = holder
    single = Single()
    single.y = np.zeros(7)
    assert tensor_bytes(holder) == 48
    assert tensor_bytes(Slots()) == 24 and tensor_bytes(single) == 56
    assert tensor_bytes(collections.deque([np.zeros(5)])) == 40
    assert tensor_bytes(np.array([np.zeros(5), None], dtype=object)) == 40 + 16
    sparse = scipy.sparse.eye(10, format="csr")
    assert tensor_bytes(sparse) == sparse.data.nbytes + sparse.indices.nbytes + sparse.indptr.nbytes
    assert tensor_bytes((1, "text", None, np, len, use, Holder)) == 0


def test_tensors_count_their_storage_once():
    torch = pytest.importorskip("torch")
    t = torch.zeros(10, 10)
    assert tensor_bytes([t, t[2:], t.view(-1), t.numpy()]) == 400
    assert tensor_bytes(t[0]) == 400
    assert tensor_bytes(t.numpy()) == 400
    assert tensor_bytes(torch.zeros(5, dtype=torch.uint8)) == 5
    assert tensor_bytes(torch.zeros(10**9, device="meta")) == 0
    layer = torch.nn.Linear(10, 5)
    assert tensor_bytes(layer) == 4 * 55
    layer(torch.ones(10)).sum().backward()
    assert tensor_bytes(layer) == 2 * 4 * 55
    tied = torch.nn.Sequential(layer, layer)
    assert tensor_bytes(tied) == 2 * 4 * 55


def test_sparse_and_wrapped_tensors_count_what_is_inside():
    torch = pytest.importorskip("torch")
    dense = torch.eye(4)
    assert tensor_bytes(dense.to_sparse()) == 2 * 4 * 8 + 4 * 4
    starts, places, values = torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls these beta
        for make in (torch.sparse_csr_tensor, torch.sparse_csc_tensor):
            assert tensor_bytes(make(starts, places, values)) == 3 * 8 + 2 * 8 + 2 * 4

    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, packed):
            return torch.Tensor._make_wrapper_subclass(cls, (8,), dtype=torch.float32)

        def __init__(self, packed):
            self.packed = packed

        def __tensor_flatten__(self):
            return ["packed"], None

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    assert tensor_bytes(Wrapper(torch.zeros(2, dtype=torch.uint8))) == 2


@pytest.mark.cuda
def test_device_memory_is_measured():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    torch.zeros(1, device="cuda")
    with measure_peak() as peak:
        torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    assert 64 * MIB <= peak.device < 80 * MIB + torch.cuda.memory_allocated()
    assert tensor_bytes(torch.zeros(16, device="cuda")) >= 64
