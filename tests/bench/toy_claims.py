"""Small claims for tests of the bench: known numbers, switches for every way in which an arm can go wrong."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from assay.bench.claim import Arm, Claim, Metric, Paper, Race, Scale, Statement, Timed
from assay.errors import InputError


@dataclass
class ToyTask:
    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    options: dict
    seed: int

    def prepare(self, setting, replicate):
        if self.options["fail_prepare"] == replicate:
            raise RuntimeError("no such luck")
        if self.options["refuse"] == replicate:
            raise InputError("text is shorter than the context")
        if log := self.options["log"]:
            with Path(log).open("a") as file:
                file.write(f"{setting} {replicate} {os.getpid()}\n")
        rng = np.random.default_rng([self.seed, replicate, len(setting)])
        return rng.normal(size=(60, 60)), self.options


@dataclass
class ToyWorkload:
    nap: float | None = field(default=None, metadata={"help": "seconds that an arm sleeps"})
    settings: tuple[str, ...] = ("one", "three")
    limit: int | None = None
    switch: str = ""  # a file: while it exists, the arm `flaky` raises, and `deadly` is killed
    fail_prepare: int = -1
    refuse: int = -1
    log: str = ""
    bad: str = ""

    def build(self, *, device: str, seed: int) -> ToyTask:
        if self.bad:
            raise InputError(f"bad is {self.bad!r}")
        options = asdict(self)
        content = json.dumps([options["settings"], options["limit"], device, seed])
        digest = hashlib.sha256(content.encode()).hexdigest()
        return ToyTask(tuple(self.settings), digest, "toy data", self.limit, options, seed)


def _numbers(shared, replicate, shift):
    matrix, options = shared
    time.sleep(options["nap"] or 0)
    singular = np.linalg.svd(matrix, compute_uv=False)
    return {"loss": float(singular.sum() / 60 + shift), "bytes": 64.0}


def on(options):
    return bool(options["switch"]) and Path(options["switch"]).exists()


def nothing(shared, replicate):
    return {"loss": 1.0}


def method(shared, replicate):
    return _numbers(shared, replicate, -1.0 + 0.01 * replicate)


def baseline(shared, replicate):
    return _numbers(shared, replicate, 0.0)


def flaky(shared, replicate):
    if on(shared[1]):
        raise ZeroDivisionError("the switch is on")
    return {"loss": 1.0}


def deadly(shared, replicate):
    if on(shared[1]) and replicate == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"loss": 1.0}


def wordy(shared, replicate):
    return {"loss": "low"} if replicate == 0 else {"lozz": 1.0} if replicate == 1 else None


def not_finite(shared, replicate):
    return {"loss": [float("nan"), float("inf"), -float("inf")][replicate % 3]}


def fast(shared, replicate):
    matrix, _ = shared
    return Timed(lambda: matrix @ matrix, {"bytes": 1.0})


def slow(shared, replicate):
    _, options = shared

    def call():
        if on(options):
            raise ZeroDivisionError("the switch is on")
        time.sleep(0.005)

    return Timed(call, {"bytes": 2.0})


def killer(shared, replicate):
    return Timed(lambda: os.kill(os.getpid(), signal.SIGKILL))


PAPER = Paper("Toys", "A. Author")
LOSS = Metric("loss", "loss", "lower")
BYTES = Metric("bytes", "bytes held", "lower", "B", counted=True)
SECONDS = Metric("seconds", "time", "lower", "s")


def _claim(slug, arms, statements, **more):
    return Claim(
        slug=slug,
        title="A toy",
        family="toys",
        paper=PAPER,
        question="Does it play?",
        statements=statements,
        metrics=(LOSS, BYTES, SECONDS),
        arms=arms,
        workload=ToyWorkload,
        scales={
            "smoke": Scale(3, {"nap": 0.0}, {"speed": Race(3, 1)}),
            "desk": Scale(6, {"nap": 0.004}, {"speed": Race(5, 1)}),
        },
        unit="seed",
        snippet="",
        example="",
        **more,
    )


BETTER = Statement("better", "It is better.", "loss", "method", ("baseline",))
PLAIN = _claim("toy", (Arm("method", method, "method"), Arm("baseline", baseline, "baseline")), (BETTER,))
TRIVIAL = _claim("trivial", (Arm("method", nothing, "method"), Arm("baseline", nothing, "baseline")), (BETTER,))
TRICKY = _claim(
    "tricky",
    (
        Arm("method", method, "method"),
        Arm("flaky", flaky, "baseline"),
        Arm("wordy", wordy, "baseline"),
        Arm("not_finite", not_finite, "baseline", where=("one",)),
        Arm("absent", method, "baseline", requires=("no-such-thing>=2", "numpy")),
        Arm("old", method, "baseline", requires=("numpy<1",)),
        Arm("baseline", baseline, "baseline"),
    ),
    (BETTER,),
)
DEADLY = _claim(
    "deadly",
    (
        Arm("method", method, "method"),
        Arm("deadly", deadly, "ablation"),
        Arm("baseline", baseline, "baseline"),
    ),
    (BETTER,),
)
RACING = _claim(
    "racing",
    (
        Arm("method", method, "method"),
        Arm("baseline", baseline, "baseline"),
        Arm("fast", fast, "method", race="speed"),
        Arm("slow", slow, "baseline", race="speed"),
    ),
    (
        BETTER,
        Statement("faster", "It is faster.", "seconds", "fast", ("slow",), scale="ratio"),
    ),
)
DEADLY_RACE = _claim(
    "deadly_race",
    (
        Arm("method", method, "method"),
        Arm("fast", fast, "baseline", race="speed"),
        Arm("killer", killer, "baseline", race="speed"),
    ),
    (Statement("faster", "It is faster.", "seconds", "fast", ("killer",), scale="ratio"),),
)
