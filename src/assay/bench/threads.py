"""Fixes how many threads a trial may use, so that its numbers and times do not depend on how many run beside it."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from threadpoolctl import threadpool_limits

_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_POOLS = ("numpy", "scipy.linalg", "sklearn", "torch", "numba", "faiss")


def thread_variables(threads: int) -> dict[str, str]:
    """Environment variables for a process whose libraries are to use that many threads."""
    fixed = {name: str(threads) for name in (*_VARIABLES, "NUMBA_NUM_THREADS")}
    return fixed | {"TOKENIZERS_PARALLELISM": "false"}


class ThreadLimit:
    """Limits BLAS, OpenMP, torch and numba in this process; a context manager that restores what was there.

    Libraries that are loaded while it is active are caught by :meth:`refresh`, which costs microseconds when there
    are none.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._limits: list[threadpool_limits] = []
        self._loaded: frozenset[str] = frozenset()
        self._before: dict[str, str | None] = {}
        self._torch: int | None = None
        self._numba: int | None = None

    def __enter__(self) -> ThreadLimit:
        # Not numba's: it refuses to go on when its variable changes after its threads have started.
        self._before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ.update(dict.fromkeys(_VARIABLES, str(self.threads)))
        self.refresh()
        return self

    def refresh(self) -> None:
        """Apply the limit to libraries that have been loaded since the last call."""
        loaded = frozenset(name for name in _POOLS if name in sys.modules)
        if loaded == self._loaded:
            return
        self._loaded = loaded
        torch, numba = sys.modules.get("torch"), sys.modules.get("numba")
        if torch is not None and self._torch is None and hasattr(torch, "set_num_threads"):
            self._torch = torch.get_num_threads()  # before its pool is limited, which it would show
            torch.set_num_threads(self.threads)
        if numba is not None and self._numba is None and hasattr(numba, "set_num_threads"):
            self._numba = numba.get_num_threads()
            numba.set_num_threads(min(self.threads, numba.config.NUMBA_NUM_THREADS))
        self._limits.append(threadpool_limits(limits=self.threads))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for limit in reversed(self._limits):
            limit.restore_original_limits()
        if self._torch is not None:
            sys.modules["torch"].set_num_threads(self._torch)
        if self._numba is not None:
            sys.modules["numba"].set_num_threads(self._numba)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.__init__(self.threads)  # type: ignore[misc]
