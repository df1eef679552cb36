"""What a run leaves behind: trials, and the run that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from assay.bench.claim import Arm, Claim


@dataclass(frozen=True)
class Trial:
    """One arm on one replicate in one setting: the unit that is stored and resumed.

    ``error`` holds the traceback of an arm that raised; ``metrics`` is then empty. ``seconds`` is the wall time of the
    arm without the shared preparation. ``peak_rss`` is the highest resident memory of the process during the trial
    in bytes, ``peak_device`` the same of the CUDA allocator (0 without one). ``environment`` describes machine and
    library versions (see :mod:`assay.bench.provenance`).
    """

    setting: str
    replicate: int
    arm: str
    status: Literal["ok", "failed"]
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    peak_rss: int = 0
    peak_device: int = 0
    finished: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunKey:
    """Everything that must agree before two trials may stand in one table.

    ``workload`` is the task's digest; ``code`` the fingerprint of the claim, the part and the workloads' sources.
    """

    claim: str
    scale: str
    workload: str
    code: str
    device: str
    seed: int


@dataclass(frozen=True)
class Run:
    """A claim on one task, with the trials that the store holds for it: what a verdict and a report are made of.

    ``arms`` are the arms that were asked for; ``skipped`` names those of them that cannot run here, with the reason
    and the remedy.
    """

    claim: Claim
    key: RunKey
    title: str
    settings: tuple[str, ...]
    replicates: int
    arms: tuple[str, ...]
    trials: tuple[Trial, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def select(self, setting: str, arm: str) -> dict[int, Trial]:
        """Trials of one arm in one setting, by replicate."""
        return {t.replicate: t for t in self.trials if t.setting == setting and t.arm == arm}


def expected_arms(arms: Sequence[Arm], setting: str) -> list[Arm]:
    """The arms that run in a setting: all whose ``where`` is empty or names it."""
    return [a for a in arms if not a.where or setting in a.where]


def error_line(traceback: str) -> str:
    """The line of a traceback that says what went wrong: the first after the last frame that is not indented."""
    lines = [line for line in traceback.splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith('  File "')]
    after = [line for line in lines[frames[-1] + 1 :] if not line.startswith(" ")] if frames else lines
    return (after or lines or ["no message"])[0].strip()
