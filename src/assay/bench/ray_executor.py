"""Runs jobs on a Ray cluster. Trials stream back to the driver, which is the only one that writes to the store.

Ray's own retries are off: when a process or a node dies, the driver knows which trials have arrived, and sends what is
left of the replicate to another one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle

from assay.bench.executors import Tally, died
from assay.bench.store import Store
from assay.bench.trial import Trial
from assay.bench.worker import Bench, Job, Plan
from assay.errors import InputError

ATTEMPTS = 4
"""How often a trial may lose its process or node until it is given up as failed."""

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def run_ray(bench: Bench, jobs: Sequence[Job], races: Sequence[Job], address: str, store: Store, tally: Tally) -> None:
    """Run the jobs on a cluster, and then the races one after the other, each with all cores of one node.

    ``address`` is ``"ray"`` for a cluster on this machine that ends with the run, or what ``ray.init`` takes.
    """
    if address == "ray":
        # A cluster of one machine listens on the loopback address; read when ray is imported. Despite its name it
        # means this on every system.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    import ray

    with _connected(address), _hushed():
        # Which GPU is Ray's decision: it shows each process only its own, as the first.
        plan = replace(bench.plan, device=bench.plan.device.partition(":")[0])
        _check_resources(plan)
        _Driver(bench, store, tally).run(plan, jobs)
        if races:
            cores = max(int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"])
            _Driver(bench, store, tally, at_once=1).run(replace(plan, threads=max(1, cores)), races)


def _check_resources(plan: Plan) -> None:
    """Ray would wait for ever for a node that can run what none can."""
    import ray

    needed = {"CPU": plan.threads} | ({} if plan.device == "cpu" else {"GPU": 1})
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(what, 0) >= n for what, n in needed.items()) for node in nodes):
        asked = " and ".join(f"{n} {what}" for what, n in needed.items())
        raise InputError(f"executor: no node of the Ray cluster has the {asked} that a trial needs (threads, device)")


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    import ray

    if ray.is_initialized():  # by the user, who will end it, too
        yield
        return
    _probe(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address == "ray":
            # No dashboard, and little memory for objects: what travels is a few numbers a trial.
            ray.init(address="local", include_dashboard=False, object_store_memory=200 * 2**20, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise _unreachable(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def _probe(address: str) -> None:
    """Knock at the address of a cluster: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str, error: BaseException) -> InputError:
    said = (str(error).splitlines() or [""])[0]
    return InputError(
        f"executor {address!r}: no Ray cluster can be reached there ({said}); expected 'ray' for one on this machine, "
        "'auto' or 'host:port'"
    )


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Send what Ray prints about processes that died to our log: it would go to stdout, and into ``--json``."""
    import ray._private.worker as inside

    show = getattr(inside, "print_to_stdstream", None)
    if show is None:
        yield
        return
    log = logging.getLogger("assay.ray")

    def hush(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
        log.info("%s", data.get("lines"))

    inside.print_to_stdstream = hush
    try:
        yield
    finally:
        inside.print_to_stdstream = show


class _Driver:
    """Keeps a cluster busy with the jobs of a plan, and records what comes back."""

    def __init__(self, bench: Bench, store: Store, tally: Tally, at_once: int | None = None) -> None:
        self.bench, self.store, self.tally, self.at_once = bench, store, tally, at_once

    def run(self, plan: Plan, jobs: Sequence[Job]) -> None:
        import ray

        gpus = 0 if plan.device == "cpu" else 1
        remote: Any = ray.remote(num_cpus=plan.threads, num_gpus=gpus, max_retries=0, num_returns="streaming")(_stream)
        handed = ray.put(cloudpickle.dumps(plan)), plan.paths
        waiting = deque((job, 0) for job in jobs)
        flying: dict[Any, tuple[Job, int]] = {}  # by the stream of its trials
        try:
            while waiting or flying:
                while waiting and len(flying) < self._room(plan):
                    job, losses = waiting.popleft()
                    flying[remote.remote(*handed, job)] = job, losses
                ready: list[Any]
                ready, _ = ray.wait(list(flying), num_returns=1, timeout=5.0, fetch_local=True)
                for stream in ready:
                    job, losses = flying.pop(stream)
                    try:
                        trials = ray.get(next(stream))
                    except StopIteration:
                        continue
                    except ray.exceptions.RayTaskError as error:
                        raise error.cause from None
                    except ray.exceptions.RayError:
                        waiting.extend(self._after_loss(job, losses + 1))
                        continue
                    self._record(job, trials)
                    flying[stream] = _without(job, {t.arm for t in trials}), losses
        finally:
            for stream in flying:
                with contextlib.suppress(Exception):
                    ray.cancel(stream, force=True)

    def _after_loss(self, job: Job, losses: int) -> list[tuple[Job, int]]:
        """What to send again when the process of a job has died: all of it, then arm by arm, then nothing.

        Trials that were finished just before may be lost on their way, so that only an arm that was alone in its
        process can be held responsible.
        """
        if losses < 2 or not job.names:
            return [(job, losses)] if job.names else []
        parts = [replace(job, arms=(arm,), races=()) for arm in job.arms]
        parts += [replace(job, arms=(), races=(one,)) for one in job.races]
        if len(parts) > 1:
            return [(part, losses) for part in parts]
        if losses < ATTEMPTS:
            return [(job, losses)]
        self._record(job, died(job, [arm for _, _, arm in job.names]))
        return []

    def _room(self, plan: Plan) -> int:
        """How many jobs are handed out at once: two for each that can run, so that none waits for the driver."""
        import ray

        return self.at_once or max(2, 2 * int(ray.cluster_resources().get("CPU", 1)) // plan.threads)

    def _record(self, job: Job, trials: Sequence[Trial]) -> None:
        self.bench.record(self.store, job, trials)
        self.tally.finished((t.setting, t.replicate, t.arm) for t in trials)


def _without(job: Job, arms: set[str]) -> Job:
    return replace(
        job,
        arms=tuple(a for a in job.arms if a not in arms),
        races=tuple((name, racers) for name, racers in job.races if not arms & set(racers)),
    )


# ---- on the cluster

_bench: Bench | None = None
_packed: bytes = b""


def _stream(packed: bytes, paths: Sequence[str], job: Job) -> Iterator[list[Trial]]:
    global _bench, _packed
    if _bench is None or _packed != packed:
        if _bench is not None:
            _bench.limit.__exit__(None, None, None)
        sys.path.extend(p for p in paths if p not in sys.path)
        _bench, _packed = Bench(cloudpickle.loads(packed)), packed
        _bench.limit.__enter__()
    yield from _bench.run(job)
