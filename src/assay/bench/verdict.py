"""From trials to an answer: *holds*, *does not hold* or *undecided*, with an effect and its interval."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from assay.bench.claim import Statement
from assay.bench.trial import Run

if TYPE_CHECKING:
    import pandas as pd

Answer = Literal["holds", "does not hold", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """The method against one baseline (``None``: against the statement's constant) in one setting.

    ``effects`` are the paired effects by replicate on the statement's scale (``method - baseline``, or
    ``method / baseline``), in the order of ``replicates``. ``effect``, ``low`` and ``high`` are NaN where nothing
    could be computed. ``reason`` says in words what decided, or what stood in the way.
    """

    baseline: str | None
    answer: Answer
    reason: str
    n: int
    effect: float
    low: float
    high: float
    replicates: tuple[int, ...] = ()
    effects: tuple[float, ...] = ()


@dataclass(frozen=True)
class Decision:
    """One statement in one setting. ``deciding`` is the comparison with the strongest baseline."""

    statement: Statement
    setting: str
    answer: Answer
    reason: str
    comparisons: tuple[Comparison, ...]
    deciding: Comparison | None


@dataclass(frozen=True)
class Verdict:
    """The answer to a claim on one task.

    ``decisions`` has one entry for each statement and setting. ``warnings`` are sentences for the user (asymmetric
    differences, few replicates, missing baselines, trials from different machines).
    """

    answer: Answer
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = field(default=())

    def table(self) -> pd.DataFrame:
        """One row for each comparison."""
        raise NotImplementedError


def decide(run: Run) -> Verdict:
    """Evaluate every statement of the run's claim in every setting that it applies to."""
    raise NotImplementedError
