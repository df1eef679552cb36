"""Memory that was measured: the peak of a process, and the bytes that tensors hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np


@dataclass(eq=False)  # two open blocks are two, whatever they have seen
class Peak:
    """Highest memory within a :func:`measure_peak` block; the numbers are there once the block has ended.

    Attributes
    ----------
    rss
        Highest resident memory of the process in bytes.
    rss_rise
        How much of it came on top of what was resident when the block began.
    device
        Highest memory of the CUDA allocator in bytes, over all devices together; 0 without CUDA.
    exact
        Whether ``rss`` is the peak of the block. Where the system cannot reset its high-water mark (not Linux, or
        forbidden), it is that of the whole life of the process, and ``rss_rise`` an upper bound.
    """

    rss: int = 0
    rss_rise: int = 0
    device: int = 0
    exact: bool = False


@dataclass(frozen=True)
class PeakMemory:
    """What :func:`peak_memory` measured, in bytes: see :class:`Peak`; ``result_bytes`` are held by what came back."""

    rss: int
    rss_rise: int
    device: int
    result_bytes: int


_open: list[Peak] = []


@contextmanager
def measure_peak() -> Iterator[Peak]:
    """Measure the peak memory of a block of this process. Blocks may be nested.

    On Linux the kernel keeps the high-water mark, so nothing is sampled and no peak is missed; the mark is reset when
    the block begins. Entering and leaving costs some tens of microseconds, whatever the size of the process. The peak
    is that of the process, so other threads count. Memory that an allocator kept from earlier work can be used again
    without a rise; :func:`peak_memory` starts from a fresh process.
    """
    peak = Peak()
    _note(_open)  # the mark that outer blocks have seen so far is about to be lost
    peak.exact = _reset()
    before = _now()
    _open.append(peak)
    try:
        yield peak
    finally:
        _note(_open)
        _open.remove(peak)
        peak.rss_rise = max(0, peak.rss - before)


def _note(peaks: list[Peak]) -> None:
    if not peaks:
        return
    rss, device = _high_water(), _device_peak()
    for peak in peaks:
        peak.rss, peak.device = max(peak.rss, rss), max(peak.device, device)


def _reset() -> bool:
    cuda = _cuda()
    if cuda is not None:
        for index in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(index)
    try:
        fd = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        os.write(fd, b"5")  # only the high-water mark: no page table is walked
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _status(field: bytes) -> int | None:
    try:
        fd = os.open("/proc/self/status", os.O_RDONLY)
    except OSError:
        return None
    try:
        text = os.read(fd, 8192)
    finally:
        os.close(fd)
    start = text.find(field)
    return int(text[start + len(field) :].split(None, 1)[0]) * 1024 if start >= 0 else None


def _high_water() -> int:
    mark = _status(b"VmHWM:")
    return _lifetime_peak() if mark is None else mark


def _now() -> int:
    rss = _status(b"VmRSS:")
    return _lifetime_peak() if rss is None else rss


def _lifetime_peak() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _cuda() -> Any:
    """``torch.cuda`` if torch is loaded and has used a device; asking must not start CUDA."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda if cuda is not None and cuda.is_available() and cuda.is_initialized() else None


def _device_peak() -> int:
    cuda = _cuda()
    return 0 if cuda is None else sum(cuda.max_memory_allocated(i) for i in range(cuda.device_count()))


def peak_memory(function: Callable[..., object], *args: Any, **kwargs: Any) -> PeakMemory:
    """Call a function in a fresh Python process and measure its peak memory there.

    Nothing that this process has allocated, cached or loaded is counted. Modules that the function's definition and
    arguments need are imported before the measurement begins; what the function imports itself is part of its peak.

    Parameters
    ----------
    function, *args, **kwargs
        What is called. They travel by cloudpickle, so closures work; a function of a module that can be imported
        travels as its name.

    Returns
    -------
    PeakMemory
        ``result_bytes`` is :func:`tensor_bytes` of the returned object, which itself stays in the other process.

    Raises
    ------
    RuntimeError
        If the call raises (with its traceback), or the process dies (with the signal: usually memory ran out).
    """
    from joblib.externals.loky.backend.reduction import dumps  # cloudpickle, wherever this joblib has it from

    with tempfile.TemporaryDirectory(prefix="assay-memory-") as folder:
        job, out = Path(folder, "job"), Path(folder, "out")
        job.write_bytes(dumps((function, args, kwargs)))
        paths = os.pathsep.join(str(Path(p or ".").resolve()) for p in sys.path)
        code = "import sys; from assay.bench.memory import _child; _child(*sys.argv[1:])"
        done = subprocess.run(
            [sys.executable, "-c", code, str(job), str(out)],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        name = getattr(function, "__qualname__", repr(function))
        if done.returncode < 0:
            killer = signal.Signals(-done.returncode).name
            hint = " (memory ran out?)" if killer == "SIGKILL" else ""
            raise RuntimeError(f"the process that measured {name} was ended by {killer}{hint}")
        if done.returncode or not out.exists():
            raise RuntimeError(f"{name} could not be measured:\n{done.stderr.decode(errors='replace').strip()}")
        return PeakMemory(*(int(line) for line in out.read_text().split()))


def _child(job: str, out: str) -> None:
    import pickle

    # our own parent wrote this a moment ago into a folder that only this user can read: no stored state
    function, args, kwargs = pickle.loads(Path(job).read_bytes())
    with measure_peak() as peak:
        result = function(*args, **kwargs)
    numbers = (peak.rss, peak.rss_rise, peak.device, tensor_bytes(result))
    Path(out).write_text(" ".join(map(str, numbers)))


_OPAQUE = (str, bytes, bytearray, int, float, complex, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def tensor_bytes(obj: object) -> int:
    """Bytes of memory that the tensors and arrays within an object keep alive.

    Walks containers and the attributes of objects (modules, caches, dataclasses, tensors wrapped in tensor
    subclasses). A view counts the whole storage that it keeps alive, and memory that several tensors share counts once.
    Gradients of leaves count. Tensors on the meta device hold nothing.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    seen: dict[int, object] = {}  # holds what it saw, so that no id is used twice
    todo: list[object] = [obj]
    while todo:
        item = todo.pop()
        if item is None or isinstance(item, _OPAQUE) or id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, np.ndarray):
            todo += _walk_array(item, spans)
        elif _is_tensor(item):
            todo += _walk_tensor(item, spans)
        else:
            todo += _parts(item)
    return sum(_union(found) for found in spans.values())


def _is_tensor(item: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(item, torch.Tensor)


def _walk_array(array: np.ndarray, spans: dict[str, list[tuple[int, int]]]) -> list[object]:
    owner: Any = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner.nbytes:
        start, end = np.lib.array_utils.byte_bounds(owner)
        spans.setdefault("cpu", []).append((start, end))
    within = list(array.flat) if array.dtype.hasobject else []
    # memory that somebody else owns (a tensor behind .numpy(), a buffer)
    return [*within, *([owner.base] if owner.base is not None else [])]


def _walk_tensor(tensor: Any, spans: dict[str, list[tuple[int, int]]]) -> list[object]:
    more: list[object] = []
    if tensor.is_leaf and tensor.grad is not None:
        more.append(tensor.grad)
    if hasattr(tensor, "__tensor_flatten__"):  # a wrapper subclass has no storage of its own
        return [*more, *(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])]
    layout = str(tensor.layout)
    if layout == "torch.sparse_coo":
        return [*more, tensor._indices(), tensor._values()]
    if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
        return [*more, tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if layout in ("torch.sparse_csc", "torch.sparse_bsc"):
        return [*more, tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.device.type != "meta":
        storage = tensor.untyped_storage()
        if storage.nbytes():
            spans.setdefault(str(tensor.device), []).append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return more


def _parts(item: Any) -> list[object]:
    parts: list[object] = []
    if isinstance(item, Mapping):
        parts += [*item.keys(), *item.values()]
    elif isinstance(item, list | tuple | Set) or type(item).__name__ == "deque":
        parts += list(item)
    parts += list(getattr(item, "__dict__", {}).values())
    for kind in type(item).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):
                parts.append(getattr(item, name))
    return parts


def _union(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total
