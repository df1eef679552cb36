"""From trials to an answer: *holds*, *does not hold* or *undecided*, with an effect and its interval.

``docs/verdicts.md`` explains the rules to users, with their measured error rates; the intervals are in
:mod:`assay.bench.intervals`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from assay.bench.claim import Metric, Statement
from assay.bench.intervals import EXACT_FROM, LEAST, asymmetry, paired_interval
from assay.bench.trial import Run, Trial, error_line

if TYPE_CHECKING:
    import pandas as pd

Answer = Literal["holds", "does not hold", "undecided"]

ASYMMETRIC_BELOW = 0.005


@dataclass(frozen=True)
class Comparison:
    """The method against one baseline (``None``: against the statement's constant) in one setting.

    ``effects`` are the paired effects by replicate on the statement's scale (``method - baseline``, or
    ``method / baseline``), in the order of ``replicates``. ``effect``, ``low`` and ``high`` are NaN where nothing
    could be computed. ``reason`` says in words what decided, or what stood in the way.

    Where replicates are missing or failed, the numbers describe the pairs that there are, and the answer is
    *undecided*.
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
    """One statement in one setting. ``deciding`` is the comparison with the strongest baseline.

    A statement that applies to none of the run's settings has one decision with ``setting=""`` and no comparisons.
    """

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
    differences, few replicates, missing baselines, trials from different machines). ``units`` are those of the
    deciding metrics by name.
    """

    answer: Answer
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = field(default=())
    units: Mapping[str, str] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        """One row for each comparison (and for a decision without one, so that it is not lost).

        ``unit`` is that of the effect: the metric's for a difference, ``×`` for a ratio. ``paper`` and
        ``reported_setting`` are what the paper reported, in its words; no measured number stands in them.
        """
        import pandas as pd

        rows = []
        for d in self.decisions:
            s = d.statement
            for c in d.comparisons or (_nothing(None, d.reason),):
                constant = None if s.constant is None else f"constant {s.constant:g}"
                rows.append(
                    {
                        "statement": s.name,
                        "setting": d.setting,
                        "method": s.method,
                        "baseline": constant if c.baseline is None else c.baseline,
                        "metric": s.metric,
                        "unit": "×" if s.scale == "ratio" else self.units.get(s.metric, ""),
                        "effect": c.effect,
                        "low": c.low,
                        "high": c.high,
                        "limit": s.limit,
                        "n": c.n,
                        "answer": c.answer,
                        "reason": c.reason,
                        "paper": s.reported.text if s.reported else "",
                        "reported_setting": s.reported.setting if s.reported else "",
                    }
                )
        return pd.DataFrame(rows, columns=list(_COLUMNS))


_COLUMNS = (
    *("statement", "setting", "method", "baseline", "metric", "unit", "effect", "low", "high", "limit", "n"),
    *("answer", "reason", "paper", "reported_setting"),
)


def decide(run: Run) -> Verdict:
    """Evaluate every statement of the run's claim in every setting that it applies to.

    A statement applies to the settings that its ``where`` names (all, if empty), as far as the method and at least
    one of its baselines run there (``Arm.where``); in each setting it is compared with the baselines that run there.
    The claim *holds* if every deciding decision does, *does not hold* if any does not, and is *undecided* otherwise.
    A statement that applies to no setting of this task cannot be asked of it: it takes no part in the answer and is
    named in the warnings. If no statement is left, the claim is *undecided*.

    Replicates are numbered ``0 .. run.replicates - 1``; trials beyond are not looked at.
    """
    bench = _Trials(run)
    decisions: list[Decision] = []
    for statement in run.claim.statements:
        settings = [s for s in run.settings if _applies(run, statement, s)]
        decisions += [_decide(bench, statement, s) for s in settings] or [_not_applicable(run, statement)]
    answer = _all([d.answer for d in decisions if d.statement.decides and d.setting])
    units = {s.metric: run.claim.metric(s.metric).unit for s in run.claim.statements}
    return Verdict(answer, tuple(decisions), tuple(dict.fromkeys(_warnings(bench, decisions))), units)


class _Trials:
    """The run's trials by setting and arm, and what can be said of those that are missing."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._found: dict[tuple[str, str], dict[int, Trial]] = {}
        for t in run.trials:
            if 0 <= t.replicate < run.replicates and t.arm in run.arms:
                self._found.setdefault((t.setting, t.arm), {})[t.replicate] = t

    def of(self, setting: str, arm: str) -> dict[int, Trial]:
        return self._found.get((setting, arm), {})

    def absent(self, arm: str, setting: str) -> str:
        """Why an arm took no part at all, or nothing if it did."""
        if arm not in self.run.arms:
            return f"arm {arm!r} was not run (--arms)"
        if arm in self.run.skipped and not self.of(setting, arm):
            return f"arm {arm!r} was skipped: {self.run.skipped[arm]}"
        return ""

    def values(self, setting: str, arm: str, metric: str, positive: bool) -> tuple[dict[int, float], str]:
        """Usable values by replicate, and what is wrong with the others."""
        if problem := self.absent(arm, setting):
            return {}, problem
        trials, n = self.of(setting, arm), self.run.replicates
        values: dict[int, float] = {}
        wrong: dict[str, list[int]] = {}
        for r in range(n):
            trial = trials.get(r)
            if trial is None:
                wrong.setdefault("has no trial", []).append(r)
            elif trial.status != "ok":
                wrong.setdefault("failed", []).append(r)
            elif metric not in trial.metrics:
                wrong.setdefault(f"did not report {metric!r}", []).append(r)
            elif (value := _number(trial.metrics[metric])) is None:
                wrong.setdefault(f"gave a {metric!r} that is not a finite number", []).append(r)
            elif positive and value <= 0:
                wrong.setdefault(f"gave a {metric!r} that is not positive, so that no ratio exists,", []).append(r)
            else:
                values[r] = value
        parts = [f"{what} in {len(rs)} of {n} replicates ({_listed(rs)})" for what, rs in wrong.items()]
        return values, f"arm {arm!r} {' and '.join(parts)}" if parts else ""


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _listed(replicates: list[int], most: int = 6) -> str:
    shown = ", ".join(str(r) for r in replicates[:most])
    return shown + (", …" if len(replicates) > most else "")


def _runs_in(run: Run, arm: str, setting: str) -> bool:
    where = run.claim.arm(arm).where
    return not where or setting in where


def _baselines(run: Run, statement: Statement, setting: str) -> tuple[str | None, ...]:
    if statement.constant is not None:
        return (None,)
    return tuple(b for b in statement.baselines if _runs_in(run, b, setting))


def _applies(run: Run, statement: Statement, setting: str) -> bool:
    if statement.where and setting not in statement.where:
        return False
    return _runs_in(run, statement.method, setting) and bool(_baselines(run, statement, setting))


def _all(answers: list[Answer]) -> Answer:
    if "does not hold" in answers:
        return "does not hold"
    return "holds" if answers and set(answers) == {"holds"} else "undecided"


def _not_applicable(run: Run, statement: Statement) -> Decision:
    where = ", ".join(statement.where) or "settings in which its arms run"
    here = ", ".join(run.settings) or "none"
    reason = f"not asked: it is about {where}; the settings of this run are {here}"
    return Decision(statement, "", "undecided", reason, (), None)


def _decide(bench: _Trials, statement: Statement, setting: str) -> Decision:
    metric = bench.run.claim.metric(statement.metric)
    comparisons = tuple(
        _compare(bench, statement, metric, setting, b) for b in _baselines(bench.run, statement, setting)
    )
    answer = _all([c.answer for c in comparisons])
    deciding = _strongest(comparisons, metric, bench.run.replicates)
    if answer == "undecided":
        reason = "; ".join(dict.fromkeys(f"{_against(c)}{c.reason}" for c in comparisons if c.answer == answer))
    elif answer == "does not hold":
        reason = "; ".join(f"{_against(c)}{c.reason}" for c in comparisons if c.answer == answer)
    else:
        assert deciding is not None
        reason = f"{_against(deciding)}{deciding.reason}"
        if len(comparisons) > 1:
            reason += f"; it is the strongest of {len(comparisons)} baselines"
    return Decision(statement, setting, answer, reason, comparisons, deciding)


def _against(comparison: Comparison) -> str:
    return "" if comparison.baseline is None else f"against {comparison.baseline}: "


def _strongest(comparisons: tuple[Comparison, ...], metric: Metric, replicates: int) -> Comparison | None:
    """The comparison that looks worst for the method; incomplete ones only where there is no other."""
    sign = 1 if metric.better == "lower" else -1
    measured = [c for c in comparisons if not math.isnan(c.effect)]
    complete = [c for c in measured if c.n == replicates]

    def unfavourable(c: Comparison) -> tuple[float, float]:
        end = c.high if sign > 0 else c.low
        return (math.inf if math.isnan(end) else sign * end, sign * c.effect)

    return max(complete or measured, key=unfavourable, default=None)


def _nothing(baseline: str | None, reason: str) -> Comparison:
    return Comparison(baseline, "undecided", reason, 0, math.nan, math.nan, math.nan)


def _compare(bench: _Trials, statement: Statement, metric: Metric, setting: str, baseline: str | None) -> Comparison:
    ratio = statement.scale == "ratio"
    ours, problem = bench.values(setting, statement.method, metric.name, ratio)
    if baseline is None:
        assert statement.constant is not None
        if ratio and statement.constant <= 0:
            return _nothing(None, f"no ratio to the constant {statement.constant:g} exists")
        theirs, other = dict.fromkeys(ours, float(statement.constant)), ""
    else:
        theirs, other = bench.values(setting, baseline, metric.name, ratio)
    problem = "; ".join(p for p in (problem, other) if p)
    replicates = tuple(r for r in ours if r in theirs)
    if not replicates:
        return _nothing(baseline, problem or "the run has no replicates")
    a = np.array([ours[r] for r in replicates])
    b = np.array([theirs[r] for r in replicates])
    with np.errstate(over="ignore", invalid="ignore"):
        effects = a / b if ratio else a - b
        if metric.counted:
            effect = float(np.exp(np.log(a / b).mean()) if ratio else effects.mean())
            low, high, flat = float(effects.min()), float(effects.max()), False
            if low == high:
                effect = low  # a mean of equal numbers is rounded; a count is not
        else:
            found = paired_interval(a, b, ratio=ratio)
            effect, low, high, flat = float(found.effect), float(found.low), float(found.high), bool(found.flat)
    if not problem and not (np.isfinite(effects).all() and math.isfinite(effect)):
        problem = "the effects are too large for a floating-point number"
    answer, reason = _answer(statement, metric, len(replicates), low, high, flat)
    if problem:
        answer, reason = "undecided", problem
    effects_ = tuple(float(e) for e in effects)
    return Comparison(baseline, answer, reason, len(replicates), effect, low, high, replicates, effects_)


def _answer(statement: Statement, metric: Metric, n: int, low: float, high: float, flat: bool) -> tuple[Answer, str]:
    """Where the interval lies. The limit itself belongs to the bad side."""
    if not metric.counted:
        if n < LEAST:
            return "undecided", f"{n} replicate{'s' * (n > 1)}: at least {LEAST} are needed for an interval"
        if flat:
            return "undecided", f"no variation over replicates: {n} equal effects are not {n} pieces of evidence"
    limit = statement.limit
    lower = metric.better == "lower"
    good, bad = ("below", "above") if lower else ("above", "below")
    if metric.counted:
        where, span = f"all {n} replicates lie" if n > 1 else "the one replicate lies", f"({_span(low, high)}, counted)"
        between = f"the replicates lie on both sides of the bound {limit:g} {span}"
    else:
        where, span = "the 95% interval lies", f"({_span(low, high)})"
        between = f"the 95% interval {span} contains the bound {limit:g}"
    if (high < limit) if lower else (low > limit):
        return "holds", f"{where} {good} the bound {limit:g} {span}"
    if (low >= limit) if lower else (high <= limit):
        touching = " or on" if (low == limit if lower else high == limit) else ""
        return "does not hold", f"{where} {bad}{touching} the bound {limit:g} {span}"
    return "undecided", between


def _span(low: float, high: float) -> str:
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def _warnings(bench: _Trials, decisions: list[Decision]) -> Iterator[str]:
    run = bench.run
    for d in decisions:
        if not d.setting:
            yield f"Statement {d.statement.name!r} takes no part in the answer: {d.reason}."
    yield from _missing_arms(bench, decisions)
    yield from _failures(bench)
    yield from _few(run, decisions)
    yield from _asymmetric(run, decisions)
    yield from _mixed(run)


def _missing_arms(bench: _Trials, decisions: list[Decision]) -> Iterator[str]:
    for d in decisions:
        arms = (d.statement.method, *(c.baseline for c in d.comparisons if c.baseline is not None))
        for arm in arms if d.setting else ():
            if why := bench.absent(arm, d.setting):
                yield f"{'The method' if arm == d.statement.method else 'A baseline'} is missing: {why}"


def _failures(bench: _Trials) -> Iterator[str]:
    for setting in bench.run.settings:
        for arm in bench.run.arms:
            trials = bench.of(setting, arm)
            failed = [t for _, t in sorted(trials.items()) if t.status != "ok"]
            if failed:
                count = f"{len(failed)} of {len(trials)} trials of arm {arm!r} failed in setting {setting!r}"
                yield f"{count}; the first with: {error_line(failed[0].error)}"


def _few(run: Run, decisions: list[Decision]) -> Iterator[str]:
    few: dict[int, list[str]] = {}
    for d in decisions:
        if not run.claim.metric(d.statement.metric).counted:
            for n in {c.n for c in d.comparisons if LEAST <= c.n < EXACT_FROM}:
                few.setdefault(n, []).append(d.statement.name)
    for n, names in sorted(few.items()):
        yield (
            f"Only {n} replicates ({', '.join(dict.fromkeys(names))}): the interval leans on normally distributed "
            f"differences. From {EXACT_FROM} replicates on it does not."
        )


def _asymmetric(run: Run, decisions: list[Decision]) -> Iterator[str]:
    for d in decisions:
        if run.claim.metric(d.statement.metric).counted:
            continue
        found = []
        for c in d.comparisons:
            effects = np.log(c.effects) if d.statement.scale == "ratio" else np.array(c.effects)
            if np.isfinite(effects).all() and asymmetry(effects) < ASYMMETRIC_BELOW:
                found.append(c.baseline or "the constant")
        if found:
            yield (
                f"The effects of {d.statement.name!r} in setting {d.setting!r} are asymmetric (against "
                f"{', '.join(found)}): the 2.5% error of the answer is not guaranteed, see docs/verdicts.md."
            )


def _mixed(run: Run) -> Iterator[str]:
    """Machines and versions that differ between trials. What an entry leaves empty differs from nothing."""
    kinds: list[Mapping[str, Any]] = []
    for t in run.trials:
        if t.arm in run.arms and t.environment not in kinds:
            kinds.append(t.environment)
    seen: dict[str, dict[str, None]] = {}
    for kind in kinds:
        for name, value in _flat(kind):
            seen.setdefault(name, {})[value] = None
    differing = {name: list(values) for name, values in seen.items() if len(values) > 1}
    parts = [f"{name} ({' / '.join(values[:3])}{' / …' * (len(values) > 3)})" for name, values in differing.items()]
    if parts:
        more = " and more" * (len(parts) > 6)
        yield f"The trials come from environments that differ in {', '.join(parts[:6])}{more}."


def _flat(environment: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif value not in (None, "") and name not in ("commit", "dirty"):  # code that matters is in the run's key
            yield f"{prefix}{name}", str(value)
