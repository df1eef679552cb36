"""From a claim and a workload to a run: checks everything, finds what is missing, and has it computed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import operator
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from assay.bench import executors, provenance
from assay.bench.claim import SCALES, Arm, Claim, ScaleName, Task
from assay.bench.executors import Progress, Tally
from assay.bench.store import Name, Store, assemble, utc_now
from assay.bench.trial import Run, RunKey, expected_arms
from assay.bench.worker import Bench, Job, Plan, reference_of
from assay.errors import InputError


def execute(
    claim: Claim,
    workload: Any,
    *,
    scale: ScaleName = "desk",
    replicates: int | None = None,
    arms: Sequence[str] | None = None,
    device: str | None = None,
    seed: int = 0,
    executor: str = "local",
    jobs: int | None = None,
    threads: int = 1,
    store: Store | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    reference: str | None = None,
) -> Run:
    """Run the trials of a claim that the store does not hold yet, and give all of them.

    Parameters
    ----------
    claim
        The claim.
    workload
        An instance of ``claim.workload``. Fields that are ``None`` take the scale's value.
    scale
        ``"smoke"``, ``"desk"`` or ``"paper"``.
    replicates
        How many; default: the scale's, or as many as the data have if those are fewer.
    arms
        Names of the arms to run; default: all.
    device
        Where to compute; default: the claim's first device, or CUDA where the claim names it and there is one.
    seed
        Base of all randomness, at least 0.
    executor
        ``"local"``; ``"ray"`` (a cluster on this machine), ``"auto"`` (the one that this machine belongs to) or
        ``host:port`` of a cluster's head.
    jobs
        Worker processes of the local executor; default: as many as fill the cores. With 1, all but the races run in
        this process.
    threads
        Threads that a trial may use; races get all cores, alone.
    store
        Where trials are kept; default: :func:`assay.bench.store.default_location`.
    progress
        Called as ``progress(done, total, label)``.
    reference
        How worker processes find the claim (``"module:attribute"``); default: found out.

    Returns
    -------
    Run
        With those trials of the store that were asked for, failed ones included.

    Raises
    ------
    InputError
        Something that was asked for cannot be; nothing has been written then.
    StoreError
        The store cannot be read or written.
    KeyboardInterrupt
        After Ctrl-C. Trials that were finished are in the store, and the next call goes on from there.
    """
    _check_word("scale", scale, [s for s in SCALES if s in claim.scales])
    _check_executor(executor)
    device = _device(claim, device)
    seed, threads = _whole("seed", seed, 0), _whole("threads", threads, 1)
    jobs = None if jobs is None else _whole("jobs", jobs, 1)
    chosen = _pick_arms(claim, arms)
    workload = _with_defaults(claim, workload, claim.scales[scale].options)
    task = workload.build(device=device, seed=seed)
    count = _count(replicates, claim, scale, task)

    skipped = {arm.name: why for arm in chosen if (why := missing_requirement(arm.requires))}
    able = [arm for arm in chosen if arm.name not in skipped]
    options = {f.name: getattr(workload, f.name) for f in dataclasses.fields(workload)}
    key = RunKey(
        claim=claim.slug,
        scale=scale,
        workload=task.digest,
        code=provenance.fingerprint(claim),
        device=device.partition(":")[0],
        seed=seed,
    )
    about = {
        "title": task.title,
        "options": options,
        "settings": tuple(task.settings),
        "replicates": count,
        "arms": tuple(arm.name for arm in chosen),
        "skipped": skipped,
    }
    opened = store if isinstance(store, Store) else Store(store)
    try:
        opened.check()
        done = opened.done(key)
        wanted = _wanted(task, able, count)
        missing = {name for name in wanted if not done.get(name, False)}
        if missing:
            plan = Plan(
                reference=reference or reference_of(claim) or "",
                workload=workload,
                key=key,
                device=device,
                threads=threads,
                store=opened.address,
                about=about,
                since=utc_now(),
                races=claim.scales[scale].races,
            )
            if ":" in plan.reference:
                plan = dataclasses.replace(plan, paths=tuple(p or str(Path.cwd()) for p in sys.path))
            plain, races = _jobs(claim, missing, wanted, done)
            tally = Tally(len(wanted), set(missing), progress, claim.unit, len(task.settings))
            tally.start()
            _compute(Bench(plan, claim, task), plain, races, executor, jobs, opened, tally)
        elif done:
            opened.describe(key, **about)
        return assemble(claim, key, opened.trials(key), **about)
    finally:
        if opened is not store:
            opened.close()


def missing_requirement(requires: Iterable[str]) -> str:
    """What an arm lacks here, with the line that installs it; empty if nothing."""
    lacking = []
    for text in requires:
        requirement = Requirement(text)
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append((text, ""))
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            lacking.append((text, f" (found {found})"))
    if not lacking:
        return ""
    quoted = " ".join(f"'{text}'" if set("<>=!~[; ") & set(text) else text for text, _ in lacking)
    return f"needs {', '.join(text + found for text, found in lacking)}: pip install {quoted}"


def _wanted(task: Task, arms: Sequence[Arm], count: int) -> list[Name]:
    """The trials of a complete run, in the order in which they are computed."""
    return [
        (setting, replicate, arm.name)
        for replicate in range(count)
        for setting in task.settings
        for arm in expected_arms(arms, setting)
    ]


def _jobs(
    claim: Claim, missing: set[Name], wanted: Sequence[Name], done: Mapping[Name, bool]
) -> tuple[list[Job], list[Job]]:
    """One job for each replicate in each setting with its missing arms; and one with its races, where one is missing.

    A race is run as a whole, with arms that the store holds from another time as well: times of different sessions
    must not be compared.
    """
    races_of = {arm.name: arm.race for arm in claim.arms}
    able = {arm.name for arm in claim.arms if not missing_requirement(arm.requires)}
    known = {*wanted, *done}
    plain: dict[tuple[str, int], list[str]] = {}
    races: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {}
    for name in wanted:
        setting, replicate, arm = name
        if name not in missing:
            continue
        if (race := races_of[arm]) is None:
            plain.setdefault((setting, replicate), []).append(arm)
        else:
            races.setdefault((setting, replicate), {})[race] = tuple(
                a for a, r in races_of.items() if r == race and a in able and (setting, replicate, a) in known
            )
    return (
        [Job(s, r, arms=tuple(arms)) for (s, r), arms in plain.items()],
        [Job(s, r, races=tuple(found.items())) for (s, r), found in races.items()],
    )


def _compute(
    bench: Bench,
    plain: Sequence[Job],
    races: Sequence[Job],
    executor: str,
    jobs: int | None,
    store: Store,
    tally: Tally,
) -> None:
    plan = bench.plan
    if executor == "local":
        workers = executors.workers_for(jobs, plan.threads, plan.device, len(plain))
        if not plan.reference and (workers > 1 or races):
            raise InputError(
                f"claim {bench.claim.slug!r} is no module's attribute, so that worker processes cannot import it; make "
                "it one (CLAIM in its file), or run it with jobs=1."
            )
        executors.run_local(bench, plain, races, workers, store, tally)
        return
    from assay.bench.ray_executor import run_ray

    run_ray(bench, plain, races, executor, store, tally)


def _check_word(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        near = get_close_matches(str(given), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise InputError(f"{what} {given!r} is unknown; {hint}")


def _check_executor(given: str) -> None:
    if given != "local" and ":" not in given:
        _check_word("executor", given, ["local", "ray", "auto"])
    if given.startswith("ray://"):
        raise InputError(
            f"executor {given!r} is the address of a Ray Client, over which trials cannot stream back; run on a "
            "machine of the cluster (or one that reaches it) and give host:port of its head (port 6379), or 'auto'."
        )
    if given != "local" and importlib.util.find_spec("ray") is None:
        raise InputError(f"executor {given!r} needs ray, which is not installed: pip install 'assay[ray]'")


def _whole(what: str, given: Any, least: int) -> int:
    try:
        number = operator.index(given)
    except TypeError:
        number = least - 1
    if number < least or isinstance(given, bool):
        raise InputError(f"{what} must be a whole number of at least {least}, not {given!r}")
    return number


def _pick_arms(claim: Claim, names: Sequence[str] | None) -> list[Arm]:
    if names is None:
        return list(claim.arms)
    if isinstance(names, str):
        names = [names]
    known = [arm.name for arm in claim.arms]
    for name in names:
        _check_word(f"arm of {claim.slug}:", name, known)
    if not names:
        raise InputError(f"arms is empty; {claim.slug} has: {', '.join(known)}")
    return [arm for arm in claim.arms if arm.name in names]


def _with_defaults(claim: Claim, workload: Any, options: Mapping[str, Any]) -> Any:
    kind: Any = claim.workload
    if not isinstance(workload, kind):
        raise InputError(f"workload of {claim.slug} must be a {claim.workload.__name__}, not {type(workload).__name__}")
    unset = {name: value for name, value in options.items() if getattr(workload, name) is None}
    return dataclasses.replace(workload, **unset)


def _count(replicates: int | None, claim: Claim, scale: ScaleName, task: Task) -> int:
    if replicates is None:
        asked = claim.scales[scale].replicates
        return asked if task.limit is None else min(asked, task.limit)
    count = _whole("replicates", replicates, 1)
    if task.limit is not None and count > task.limit:
        raise InputError(
            f"replicates is {count}, but there are only {task.limit} ({claim.unit}) in {task.title}; give "
            f"{task.limit} at most"
        )
    return count


def _device(claim: Claim, given: str | None) -> str:
    if given is None:
        return "cuda" if "cuda" in claim.devices and _cuda_count() else claim.devices[0]
    kind, _, number = given.partition(":")
    _check_word(f"device of {claim.slug}:", kind, claim.devices)
    if kind == "cuda":
        there = _cuda_count()
        if not there:
            raise InputError(f"device is {given!r}, but torch finds no CUDA device on this machine; leave it out")
        if number and (not number.isdigit() or int(number) >= there):
            raise InputError(f"device is {given!r}, but this machine has cuda:0 to cuda:{there - 1}")
    elif number:
        raise InputError(f"device {given!r} is unknown; expected {kind!r}")
    return given


def _cuda_count() -> int:
    """CUDA devices that torch can use. Torch is loaded only where the system has a driver for some."""
    if sys.platform == "linux" and not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")):
        return 0
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
