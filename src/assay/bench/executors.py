"""Where jobs are run: in this process, in worker processes of this machine, or on a Ray cluster (``ray_executor``).

All of them run the same code on the same job (:mod:`assay.bench.worker`), with the same number of threads.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
from joblib import cpu_count
from joblib.externals.loky import ProcessPoolExecutor
from joblib.externals.loky.process_executor import BrokenProcessPool

from assay.bench import provenance
from assay.bench.store import Name, Store, utc_now
from assay.bench.threads import thread_variables
from assay.bench.trial import Trial
from assay.bench.worker import Bench, Job, Plan

Progress = Callable[[int, int, str], object]
"""Called with trials done, trials in all, and what was finished last."""


@dataclass
class Tally:
    """Counts finished trials for whoever watches. Trials that an earlier run stored count as done."""

    total: int
    waiting: set[Name]
    watch: Progress | None = None
    unit: str = "replicate"
    settings: int = 1
    _told: float = field(default=0.0, repr=False)

    def finished(self, names: Iterable[Name]) -> None:
        """Note trials that are there now; tells the watcher about ten times a second at most, and of the last one."""
        fresh = [name for name in names if name in self.waiting]
        self.waiting.difference_update(fresh)
        now = time.monotonic()
        if self.watch is not None and fresh and (not self.waiting or now - self._told > 0.1):
            self._told = now
            setting, replicate, arm = fresh[-1]
            where = f"{setting}, " if self.settings > 1 else ""
            self.watch(self.total - len(self.waiting), self.total, f"{where}{self.unit} {replicate}: {arm}")

    def start(self) -> None:
        """Tell the watcher how much there is to do."""
        if self.watch is not None:
            self.watch(self.total - len(self.waiting), self.total, "starting")


def workers_for(jobs: int | None, threads: int, device: str, waiting: int) -> int:
    """How many processes to use: what was asked for, else as many as fill the cores; one for a GPU."""
    if jobs is None:
        jobs = 1 if device != "cpu" else max(1, cpu_count() // threads)
    return max(1, min(jobs, waiting))


def run_local(
    bench: Bench, jobs: Sequence[Job], races: Sequence[Job], workers: int, store: Store, tally: Tally
) -> None:
    """Run the jobs on this machine, and then the races, one after the other with nothing beside them.

    ``bench`` is the plan as it was opened here; with one worker, jobs run in this very process. A race always gets a
    fresh process that may use all cores.
    """
    if workers == 1:
        _inline(bench, jobs, store, tally)
    else:
        _in_processes(bench.plan, jobs, workers, store, tally)
    if races:
        _in_processes(replace(bench.plan, threads=cpu_count()), races, 1, store, tally)


def _inline(bench: Bench, jobs: Sequence[Job], store: Store, tally: Tally) -> None:
    with bench.limit:
        for job in jobs:
            for trials in bench.run(job):
                bench.record(store, job, trials)
                tally.finished((t.setting, t.replicate, t.arm) for t in trials)


def _in_processes(plan: Plan, jobs: Sequence[Job], workers: int, store: Store, tally: Tally) -> None:
    """Run jobs in worker processes; one that dies (out of memory, a crash in C) costs only the arm that it was at.

    When a process dies, the pool is lost and does not say what the process was doing. Jobs start in the order in
    which they were given, so it is one of the first ``workers`` that are left: those are run again one by one, in a
    process that they have for themselves, where a second death has only one explanation.
    """
    left = list(jobs)
    while left:
        left = _drain(plan, left, workers, store, tally)
        suspects, left = left[:workers], left[workers:]
        while suspects:
            suspects = _drain(plan, suspects, 1, store, tally)
            if suspects:
                suspects = [*_without_the_deadly(plan, suspects[0], store, tally), *suspects[1:]]


def _without_the_deadly(plan: Plan, job: Job, store: Store, tally: Tally) -> list[Job]:
    """Record the arm that a process died at as failed: the first that left no trial. A race is lost as a whole."""
    left = _remaining(job, store, plan)
    if left is None:
        return []
    lost = left.arms[:1] or left.races[0][1]
    store.describe(plan.key, **plan.about)
    store.add(plan.key, died(job, lost))
    tally.finished((job.setting, job.replicate, arm) for arm in lost)
    rest = _remaining(left, store, plan)
    return [] if rest is None else [rest]


def died(job: Job, arms: Iterable[str]) -> list[Trial]:
    """Failed trials of arms whose process is gone."""
    told = (
        "The worker process died while it ran this arm: it was killed (often for lack of memory), or it crashed in "
        "compiled code. There is no traceback."
    )
    common = {"status": "failed", "error": told, "finished": utc_now(), "environment": provenance.environment()}
    return [Trial(job.setting, job.replicate, arm, **common) for arm in arms]  # type: ignore[arg-type]


def _remaining(job: Job, store: Store, plan: Plan) -> Job | None:
    """The part of a job that has left no trial in this run yet, or ``None``."""
    there = store.done(plan.key, since=plan.since)
    arms = tuple(a for a in job.arms if (job.setting, job.replicate, a) not in there)
    races = tuple((n, rs) for n, rs in job.races if any((job.setting, job.replicate, a) not in there for a in rs))
    return replace(job, arms=arms, races=races) if arms or races else None


def _drain(plan: Plan, jobs: Sequence[Job], workers: int, store: Store, tally: Tally) -> list[Job]:
    """Run jobs in a fresh pool. Gives those that were left when a process died, in order; none if all went well."""
    left = dict.fromkeys(jobs)
    outcomes: queue.SimpleQueue[tuple[Job, Any]] = queue.SimpleQueue()
    flying: dict[Job, Any] = {}
    clean = False

    def submit(job: Job) -> None:
        with _interrupts_held():  # workers start here and inherit it: Ctrl-C is for this process alone
            flying[job] = pool.submit(_work, job)
            flying[job].add_done_callback(lambda future: outcomes.put((job, future)))

    pool = ProcessPoolExecutor(
        max_workers=workers,
        initializer=_begin,
        initargs=(cloudpickle.dumps(plan), os.getpid()),
        env=thread_variables(plan.threads),
    )
    try:
        upcoming = iter(jobs)
        for job in itertools.islice(upcoming, 2 * workers):
            submit(job)
        while left:
            try:
                job, future = outcomes.get(timeout=1.0)
            except queue.Empty:
                tally.finished(store.done(plan.key, since=plan.since))
                continue
            error = future.exception()
            if isinstance(error, BrokenProcessPool):
                return list(left)
            if error is not None:
                raise error
            del left[job], flying[job]
            for job in itertools.islice(upcoming, 1):
                submit(job)
            tally.finished(future.result())
        clean = True
        return []
    finally:
        # Loky's thread fails, loudly, if it is told to stop while a job is on its way into the queue of the workers.
        # There is room in it for all that were submitted, so that this is a matter of milliseconds.
        until = time.monotonic() + 1.0
        while not all(f.running() or f.done() for f in flying.values()) and time.monotonic() < until:
            time.sleep(0.001)
        pool.shutdown(wait=True, kill_workers=not clean)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- in the worker process

_plan: bytes = b""
_bench: Bench | None = None
_store: Store | None = None


def _begin(plan: bytes, parent: int) -> None:
    """Prepare a worker process. What can fail waits for the first job, whose future can tell of it."""
    global _plan
    _plan = plan
    logging.disable(logging.INFO)  # what libraries chat about would run through the progress bar of the driver
    loky = sys.modules["joblib.externals.loky.process_executor"]
    if hasattr(loky, "_USE_PSUTIL"):
        # Loky takes a process that grew by 300 MB for a leaking one and ends it; a loaded model is not a leak.
        loky._USE_PSUTIL = False  # type: ignore[attr-defined]
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()


def _leave_with(parent: int) -> None:
    """End this process when the one that started it is gone: nobody else would."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _work(job: Job) -> list[Name]:
    global _bench, _store
    if _bench is None:
        plan = cloudpickle.loads(_plan)
        _bench, _store = Bench(plan), Store(plan.store)
        _bench.limit.__enter__()
    finished: list[Name] = []
    assert _store is not None
    for trials in _bench.run(job):
        _bench.record(_store, job, trials)
        finished.extend((t.setting, t.replicate, t.arm) for t in trials)
    return finished
