"""The vocabulary in which a claim is written. It knows no method, and importing it loads nothing heavy.

A claim file (``assay/claims/SLUG.py``) defines one module-level ``CLAIM``. Its arms import the part and the peers
*inside* their functions, so that ``assay card SLUG`` and ``assay run SLUG --help`` answer at once.

How the words fit together::

    Claim ── statements   what must be true, of which metric, against which baselines
          ├─ arms         functions (shared, replicate) -> {metric: value}
          ├─ workload     a dataclass whose fields are the user's options; .build() checks them and gives a Task
          ├─ scales       replicates and option defaults for smoke, desk and paper

          └─ growths, frontiers   pictures: a metric against a size, two metrics against each other

    Task  ── settings     the conditions under which everything is repeated ("exponential", "401ksubs")
          └─ prepare()    what all arms of one replicate in one setting share: a split, a prefill, a trained model
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

ScaleName = Literal["smoke", "desk", "paper"]
SCALES: tuple[ScaleName, ...] = ("smoke", "desk", "paper")


@dataclass(frozen=True)
class Paper:
    """Where a method comes from."""

    title: str
    authors: str
    venue: str = "ICML 2024"
    url: str = ""


@dataclass(frozen=True)
class Metric:
    """One number that arms report.

    ``better`` is the direction that a user wants; ``None`` marks a number that is shown but never decides.
    ``counted`` marks an exact count (bytes, tokens): it is compared as it is, without an interval, since equal values
    over replicates are then no accident. Never set it on anything that noise can touch.
    """

    name: str
    label: str
    better: Literal["lower", "higher"] | None
    unit: str = ""
    counted: bool = False


@dataclass(frozen=True)
class Reported:
    """A number that the paper reported, with the setting that it was measured in.

    ``value`` is set only where the number is the same quantity as the statement's effect (same metric, same
    difference or ratio), so that the report may mark it on the axis of the measured effect.
    """

    text: str
    setting: str
    source: str
    value: float | None = None


@dataclass(frozen=True)
class Statement:
    """One sentence of the claim, and the comparison that decides it.

    The *effect* is ``method - baseline`` (``scale="difference"``) or ``method / baseline`` (``scale="ratio"``, the
    geometric mean over replicates), paired by replicate. The statement holds in a setting when the whole 95% interval
    of the effect lies on the good side of ``bound`` for **every** baseline; the good side follows from the metric.

    * superiority: leave ``bound`` at no difference (0, or 1 for ratios), or stricter: ``bound=0.85`` for a ratio of a
      metric where lower is better asks for at least 15% less;
    * non-inferiority ("same quality"): a ``bound`` on the other side of no difference, the stated margin:
      ``bound=0.02`` for a difference in nats where lower is better allows 0.02 nat of loss.

    With ``constant`` and no baselines, the method's metric itself is compared with that value.
    ``where`` limits the statement to some settings; empty means each one of them, and all must hold.
    A statement with ``decides=False`` is evaluated and printed, but the claim's answer does not depend on it.
    """

    name: str
    text: str
    metric: str
    method: str
    baselines: tuple[str, ...] = ()
    constant: float | None = None
    scale: Literal["difference", "ratio"] = "difference"
    bound: float | None = None
    where: tuple[str, ...] = ()
    reported: Reported | None = None
    decides: bool = True

    def __post_init__(self) -> None:
        if bool(self.baselines) == (self.constant is not None):
            raise ValueError(f"statement {self.name!r} needs either baselines or a constant, and not both")
        if self.scale == "ratio" and self.bound is not None and self.bound <= 0:
            raise ValueError(f"statement {self.name!r}: the bound of a ratio must be positive, not {self.bound}")

    @property
    def neutral(self) -> float:
        """The effect that means no difference: 0, or 1 for a ratio."""
        return 1.0 if self.scale == "ratio" else 0.0

    @property
    def limit(self) -> float:
        """``bound``, or no difference where it was left out."""
        return self.neutral if self.bound is None else self.bound


@dataclass(frozen=True)
class Arm:
    """The method, an ablation of it, or a baseline.

    ``run(shared, replicate)`` gets what ``Task.prepare`` made and returns ``{metric: value}``.

    A *timed* arm names a ``race``. Its ``run`` does the set-up and returns a :class:`Timed`; all arms of one race are
    then measured interleaved in one process, alone on the machine, and each gets the metrics ``seconds`` (median of
    one call), ``seconds_low`` and ``seconds_high`` (quartiles) beside those that ``Timed`` carries.

    ``requires`` names distributions (``"mapie"``, ``"hqq>=0.2"``) without which the arm is skipped by name, with the
    line that installs them.
    """

    name: str
    run: Callable[[Any, int], Any]
    role: Literal["method", "ablation", "baseline", "reference"]
    label: str = ""
    requires: tuple[str, ...] = ()
    race: str | None = None
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class Timed:
    """What a timed arm returns: the call to be measured, and metrics that are known besides the time.

    ``before`` runs untimed ahead of every call (to restore a state that the call uses up). ``per`` is how many units
    of work a call does (tokens, say): the seconds that are reported are those of one unit.
    """

    call: Callable[[], object]
    metrics: Mapping[str, float] = field(default_factory=dict)
    before: Callable[[], object] | None = None
    per: int = 1

    def __post_init__(self) -> None:
        if self.per < 1:
            raise ValueError(f"per must be at least 1, not {self.per}")


@dataclass(frozen=True)
class Race:
    """How often a race measures: ``rounds`` interleaved calls of each arm, after ``warmup`` calls of each."""

    rounds: int = 7
    warmup: int = 1


@dataclass(frozen=True)
class Growth:
    """A curve: how a metric of some arms grows with a size.

    ``sizes`` maps settings to sizes ("32k" to 32768); settings that a run does not have are left out. For each arm an
    exponent ``p`` of ``metric ~ c * size**p`` is fitted to the medians over replicates, from the size ``fit_from`` on
    (fixed costs flatten what lies below).
    """

    name: str
    text: str
    metric: str
    arms: tuple[str, ...]
    sizes: Mapping[str, float]
    size_label: str
    fit_from: float = 0.0
    reported: Reported | None = None


@dataclass(frozen=True)
class Frontier:
    """Arms in the plane of two metrics in one setting, with the Pareto front: those that no other arm beats in both."""

    name: str
    text: str
    x: str
    y: str
    setting: str


@dataclass(frozen=True)
class Scale:
    """How large a run is: the replicates, and the defaults of workload fields that the user did not set."""

    replicates: int
    options: Mapping[str, Any] = field(default_factory=dict)
    races: Mapping[str, Race] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """What a workload builds: data that has been checked, cut into settings and replicates.

    ``digest`` identifies the data and all options that can change a number; ``title`` says in a line what it is;
    ``limit`` is the largest number of replicates (documents in a file, say), or ``None``.
    """

    settings: Sequence[str]
    digest: str
    title: str
    limit: int | None

    def prepare(self, setting: str, replicate: int) -> Any:
        """Make what all arms of this replicate share. Deterministic: the same arguments give the same object."""
        ...


class Workload(Protocol):
    """A dataclass whose fields are the user's options, each with ``metadata={"help": ...}``.

    A field that is left at ``None`` takes the value of the scale's ``options``, where there is one.
    """

    def build(self, *, device: str, seed: int) -> Task:
        """Check everything that can be checked cheaply and give the task.

        Raises ``InputError`` on what cannot be used. Heavy things (models) are loaded in ``Task.prepare``, since this
        runs in the process that only hands out the work, too.
        """
        ...


@dataclass(frozen=True)
class Claim:
    """A paper's claim as something that runs; see the module for how the parts fit together.

    Attributes
    ----------
    slug, title, family, paper
        What it is called and where it comes from; a comparison of several methods has no paper of its own.
    question
        What a user asks ("Would 2-bit caches hurt my model?").
    statements, metrics, arms, workload, scales
        The vocabulary of this module.
    unit
        What a replicate is: "seed", "document", "data set".
    snippet
        Lines of Python that use the part alone; a test executes them.
    example
        A command line that runs the claim on the user's own files.
    devices
        Where the arms can run; the first is the default unless CUDA is present and named.
    notes
        What is known about why a statement holds or does not, printed with the verdict.
    growths, frontiers
        Curves and planes that the report draws beside the statements.
    """

    slug: str
    title: str
    family: str
    paper: Paper | None
    question: str
    statements: tuple[Statement, ...]
    metrics: tuple[Metric, ...]
    arms: tuple[Arm, ...]
    workload: type
    scales: Mapping[ScaleName, Scale]
    unit: str
    snippet: str
    example: str
    devices: tuple[str, ...] = ("cpu",)
    notes: tuple[str, ...] = ()
    growths: tuple[Growth, ...] = ()
    frontiers: tuple[Frontier, ...] = ()

    def __post_init__(self) -> None:
        arms, metrics = {a.name for a in self.arms}, {m.name for m in self.metrics}
        for what, names in (("arm", [a.name for a in self.arms]), ("metric", [m.name for m in self.metrics])):
            if len(names) != len(set(names)):
                raise ValueError(f"claim {self.slug!r} names an {what} twice: {sorted(names)}")
        for s in self.statements:
            if s.metric not in metrics:
                raise ValueError(f"statement {s.name!r} of {self.slug!r} decides on unknown metric {s.metric!r}")
            if self.metric(s.metric).better is None:
                raise ValueError(f"statement {s.name!r} of {self.slug!r}: metric {s.metric!r} has no better direction")
            for arm in (s.method, *s.baselines):
                if arm not in arms:
                    raise ValueError(f"statement {s.name!r} of {self.slug!r} names unknown arm {arm!r}")
        for g in self.growths:
            if unknown := [n for n in (*g.arms, g.metric) if n not in arms | metrics]:
                raise ValueError(f"growth {g.name!r} of {self.slug!r} names unknown {', '.join(map(repr, unknown))}")
        for f in self.frontiers:
            for name in (f.x, f.y):
                if name not in metrics or self.metric(name).better is None:
                    raise ValueError(f"frontier {f.name!r} of {self.slug!r}: {name!r} is no metric with a direction")

    def metric(self, name: str) -> Metric:
        """The metric of that name."""
        return next(m for m in self.metrics if m.name == name)

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(a for a in self.arms if a.name == name)
