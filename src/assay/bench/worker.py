"""What happens inside one process: a replicate is prepared once, and its arms are run, measured and recorded."""

from __future__ import annotations

import importlib
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.bench import provenance, registry
from assay.bench.claim import Arm, Claim, Race, Task, Timed
from assay.bench.memory import measure_peak
from assay.bench.store import Name, Store, utc_now
from assay.bench.threads import ThreadLimit
from assay.bench.trial import RunKey, Trial
from assay.errors import InputError

RACE_METRICS = ("seconds", "seconds_low", "seconds_high")


@dataclass(frozen=True)
class Plan:
    """What every worker of a run needs to know. It pickles; the claim travels as a reference and is imported there.

    ``paths`` are appended to ``sys.path``, for claims that no installed package brings. ``about`` is what
    :meth:`Store.describe` writes ahead of the first trial; ``since`` is when the run was started.
    """

    reference: str
    workload: Any
    key: RunKey
    device: str
    threads: int
    store: str
    about: Mapping[str, Any]
    since: str
    races: Mapping[str, Race] = field(default_factory=dict)
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One replicate in one setting, with the arms that are missing. ``races`` names arms that are timed together."""

    setting: str
    replicate: int
    arms: tuple[str, ...] = ()
    races: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def names(self) -> tuple[Name, ...]:
        """The trials that it will leave."""
        arms = [*self.arms, *(arm for _, racers in self.races for arm in racers)]
        return tuple((self.setting, self.replicate, arm) for arm in arms)


def load_claim(reference: str) -> Claim:
    """The claim of a reference: a slug, or ``module:attribute`` for one that is not in the registry."""
    module, colon, attribute = reference.partition(":")
    if not colon:
        return registry.load(reference)
    claim = getattr(importlib.import_module(module), attribute, None)
    if not isinstance(claim, Claim):
        raise InputError(f"claim reference {reference!r} does not name a Claim")
    return claim


def reference_of(claim: Claim) -> str | None:
    """How another process finds a claim: its slug, or ``module:attribute``; ``None`` where nothing leads to it."""
    if claim.slug in registry.entries() and registry.load(claim.slug) is claim:
        return claim.slug
    module = provenance.module_of(claim)
    names = vars(sys.modules[module]) if module in sys.modules else {}
    attribute = next((name for name, value in names.items() if value is claim), None)
    return None if attribute is None or module == "__main__" else f"{module}:{attribute}"


class Bench:
    """A plan that has been opened in this process: the claim is imported and the task built.

    Whoever runs jobs enters ``limit`` around them, so that the threads are those of the plan.
    """

    def __init__(self, plan: Plan, claim: Claim | None = None, task: Task | None = None) -> None:
        sys.path.extend(p for p in plan.paths if p not in sys.path)
        self.plan = plan
        self.claim = claim or load_claim(plan.reference)
        self.limit = ThreadLimit(plan.threads)
        if task is None:
            task = plan.workload.build(device=plan.device, seed=plan.key.seed)
            told = f"what {plan.key.claim} is run on is not what the run was started with"
            if task.digest != plan.key.workload:
                raise InputError(
                    f"{told}: the data have digest {task.digest[:12]}, expected {plan.key.workload[:12]}. A file was "
                    "changed meanwhile, or this machine has another one under the same name; run again."
                )
            if (code := provenance.fingerprint(self.claim)) != plan.key.code:
                raise InputError(
                    f"{told}: the code has fingerprint {code[:12]}, expected {plan.key.code[:12]}. A source was edited "
                    "meanwhile, or this machine has another version of it; run again."
                )
        self.task = task
        self.described = False

    def run(self, job: Job) -> Iterator[list[Trial]]:
        """Run what is missing of one replicate, and yield trials as they finish; the arms of a race together.

        An arm that raises leaves a failed trial with its traceback, and the others go on. If the preparation raises,
        all arms fail with its traceback; an ``InputError`` there ends the run, since it says that what the user gave
        cannot be used.
        """
        try:
            shared = self.task.prepare(job.setting, job.replicate)
        except InputError:
            raise
        except (Exception, SystemExit) as error:
            told = _traceback(error)
            yield [self._trial(name, error=told) for name in job.names]
            return
        for arm in job.arms:
            yield [self._run_arm(job, self.claim.arm(arm), shared)]
        for name, arms in job.races:
            yield self._run_race(job, name, [self.claim.arm(a) for a in arms], shared)

    def record(self, store: Store, job: Job, trials: Sequence[Trial]) -> None:
        """Write finished trials, and before the first ones of this process what the run is."""
        if not self.described:
            store.describe(self.plan.key, **self.plan.about)
            self.described = True
        store.add(self.plan.key, trials, replace=bool(job.races))

    def _run_arm(self, job: Job, arm: Arm, shared: Any) -> Trial:
        self.limit.refresh()
        name = (job.setting, job.replicate, arm.name)
        metrics: dict[str, float] = {}
        told = ""
        start = time.perf_counter()
        with measure_peak() as peak:
            try:
                metrics = self._checked(arm, arm.run(shared, job.replicate))
            except (Exception, SystemExit) as error:
                told = _traceback(error)
        seconds = time.perf_counter() - start
        return self._trial(
            name, metrics=metrics, error=told, seconds=seconds, peak_rss=peak.rss, peak_device=peak.device
        )

    def _run_race(self, job: Job, name: str, arms: Sequence[Arm], shared: Any) -> list[Trial]:
        """Set every arm up, time those that could be, and give all of them; one that raises leaves the race."""
        ready: dict[str, Timed] = {}
        told: dict[str, str] = {}
        known: dict[str, dict[str, float]] = {}
        start = time.perf_counter()
        with measure_peak() as peak:
            for arm in arms:
                self.limit.refresh()
                try:
                    timed = arm.run(shared, job.replicate)
                    if not isinstance(timed, Timed):
                        raise TypeError(
                            f"arm {arm.name!r} is in race {name!r} and must return Timed, not {timed!r:.80}"
                        )
                    known[arm.name] = self._checked(arm, timed.metrics)
                    if timed.before is not None:
                        timed.before()
                    timed.call()  # the first warm-up; one that raises must not take the others down with it
                    ready[arm.name] = timed
                except (Exception, SystemExit) as error:
                    told[arm.name] = _traceback(error)
            self.limit.refresh()
            times: dict[str, dict[str, float]] = {}
            if ready:
                try:
                    times = self._time(name, ready)
                except (Exception, SystemExit) as error:
                    told |= dict.fromkeys(ready, _traceback(error))
        seconds = time.perf_counter() - start
        return [
            self._trial(
                (job.setting, job.replicate, arm.name),
                metrics={} if arm.name in told else known[arm.name] | times[arm.name],
                error=told.get(arm.name, ""),
                seconds=seconds,
                peak_rss=peak.rss,
                peak_device=peak.device,
            )
            for arm in arms
        ]

    def _time(self, name: str, ready: Mapping[str, Timed]) -> dict[str, dict[str, float]]:
        from assay.bench.race import race  # SciPy, which most workers can do without

        how = self.plan.races.get(name, Race())
        result = race(
            {arm: timed.call for arm, timed in ready.items()},
            rounds=how.rounds,
            warmup=max(0, how.warmup - 1),
            before={arm: timed.before for arm, timed in ready.items() if timed.before is not None},
        )
        times = {}
        for arm in ready:
            low, high = result.quartiles(arm)
            seconds = (float(x) / ready[arm].per for x in (result.median(arm), low, high))
            times[arm] = dict(zip(RACE_METRICS, seconds))
        return times

    def _checked(self, arm: Arm, metrics: Any) -> dict[str, float]:
        if not isinstance(metrics, Mapping):
            raise TypeError(f"arm {arm.name!r} must return {{metric: number}}, not {type(metrics).__name__}")
        known = {m.name for m in self.claim.metrics}
        checked = {}
        for name, value in metrics.items():
            if name not in known:
                raise ValueError(f"arm {arm.name!r} reported {name!r}, which is not a metric of {self.claim.slug}")
            if isinstance(value, (str, bytes)) or value is None:
                raise TypeError(f"arm {arm.name!r} reported {name!r} as {value!r:.80}; expected a number")
            try:
                checked[name] = float(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"arm {arm.name!r} reported {name!r} as {value!r:.80}; expected a number") from error
        return checked

    def _trial(
        self,
        name: Name,
        *,
        metrics: Mapping[str, float] | None = None,
        error: str = "",
        seconds: float = 0.0,
        peak_rss: int = 0,
        peak_device: int = 0,
    ) -> Trial:
        setting, replicate, arm = name
        return Trial(
            setting=setting,
            replicate=replicate,
            arm=arm,
            status="failed" if error else "ok",
            metrics={} if error else dict(metrics or {}),
            error=error,
            seconds=seconds,
            peak_rss=peak_rss,
            peak_device=peak_device,
            finished=utc_now(),
            environment=provenance.environment(),
        )


def _traceback(error: BaseException) -> str:
    """The traceback, without our own frame at its top."""
    trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
