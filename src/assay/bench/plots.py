"""Pictures of paired effects: drawn by hand as SVG for the report page, and by matplotlib for notebooks.

The SVG has no ``viewBox``: places along the axis are percentages and type is in CSS pixels, so one picture is as
readable at 360 px as on a wide screen, and takes its colours from the page's variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from assay.bench import wording
from assay.bench.claim import Claim, Statement
from assay.bench.trial import Run
from assay.bench.verdict import Comparison, Decision, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DOTS = 150
_DOT = 1.4  # per cent of the axis that a dot covers on a narrow screen
_STACK = 4.5  # px between dots that would otherwise cover each other
_MARGIN = 4.0  # per cent left free at both ends of the axis


@dataclass(frozen=True)
class Row:
    """One comparison: what it is called, its dots as (x %, y px from the middle), its interval and effect in %."""

    label: str
    answer: str
    top: int
    dots: tuple[tuple[float, float], ...] = ()
    beyond: tuple[int, int] = (0, 0)
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Group:
    """The comparisons of one setting."""

    heading: str
    top: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Picture:
    """Everything that the template draws; places are per cent of the width, heights are px."""

    title: str
    description: str
    height: int
    axis: int
    groups: tuple[Group, ...]
    ticks: tuple[tuple[float, str], ...]
    bound: float
    bound_label: str
    neutral: float | None
    good: tuple[float, float]
    bars: bool
    caption: str
    paper: float | None = None
    paper_off: bool = False
    paper_label: str = ""
    legend: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """The range that a picture shows, linear or logarithmic (ratios)."""

    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """Where a value lies in per cent of the width; values beyond the range lie on its edge."""
        low, high, x = (math.log(v) if self.log else v for v in (self.low, self.high, self._inside(value)))
        return round(_MARGIN + (100 - 2 * _MARGIN) * (x - low) / (high - low), 2)

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range."""
        return self.low <= value <= self.high

    def ticks(self) -> list[float]:
        """Three to six round numbers in the range."""
        if not self.log:
            return _round_steps(self.low, self.high)
        span = self.high / self.low
        if span < 3:
            return _round_steps(self.low, self.high)
        steps = (1, 2, 5) if span < 100 else (1,)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
        keep = math.ceil(len(found) / 6)
        return found[::keep] if len(found) > 1 else _round_steps(self.low, self.high)


def _round_steps(low: float, high: float) -> list[float]:
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _finite(comparison: Comparison, log: bool) -> np.ndarray:
    values = np.asarray(comparison.effects, dtype=float)
    return values[np.isfinite(values) & (values > 0)] if log else values[np.isfinite(values)]


def make_axis(statement: Statement, comparisons: Sequence[Comparison]) -> Axis | None:
    """A range that shows every interval, the bound and no difference, and nearly all effects.

    Single wild effects are left beyond the edge rather than allowed to squeeze all others into one spot.
    """
    log = statement.scale == "ratio"
    seen = [
        v
        for c in comparisons
        for v in (c.effect, c.low, c.high)
        if math.isfinite(v) and not (log and v <= 0)
    ]
    if not seen:
        return None
    core = [*seen, statement.limit]
    if statement.baselines:
        core.append(statement.neutral)
    pool = [_finite(c, log) for c in comparisons]
    for values in pool:
        if len(values):
            core += [float(v) for v in np.quantile(values, [0.1, 0.9])]
    wide = core + [float(v) for values in pool for v in values]
    if statement.reported is not None and statement.reported.value is not None:
        value = statement.reported.value
        if math.isfinite(value) and not (log and value <= 0):
            wide.append(value)
    turn = math.log if log else float
    back = math.exp if log else float
    low, high = turn(min(core)), turn(max(core))
    span = (high - low) or (abs(high) or 1.0) * 0.1
    low, high = max(turn(min(wide)), low - span), min(turn(max(wide)), high + span)
    pad = 0.05 * ((high - low) or span)
    return Axis(back(low - pad), back(high + pad), log)


def _dots(values: np.ndarray, axis: Axis) -> tuple[tuple[tuple[float, float], ...], tuple[int, int]]:
    """Dots that do not cover each other: those in one spot are stacked around the middle."""
    beyond = int((values < axis.low).sum()), int((values > axis.high).sum())
    inside = np.sort(values[(values >= axis.low) & (values <= axis.high)])
    if len(inside) > MOST_DOTS:
        inside = np.quantile(inside, (np.arange(MOST_DOTS) + 0.5) / MOST_DOTS)
    spots: dict[int, list[float]] = {}
    for x in (axis.at(float(v)) for v in inside):
        spots.setdefault(round(x / _DOT), []).append(x)
    most = max((len(s) for s in spots.values()), default=1)
    step = min(_STACK, 20 / max(most - 1, 1))
    dots = [(x, round((i - (len(spot) - 1) / 2) * step, 2)) for spot in spots.values() for i, x in enumerate(spot)]
    return tuple(dots), beyond


def _shorten(text: str, most: int = 46) -> str:
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def draw(decisions: Sequence[Decision], claim: Claim) -> Picture | None:
    """Lay out one statement in one or several settings on a shared axis; ``None`` where there is no number at all."""
    statement = decisions[0].statement
    axis = make_axis(statement, [c for d in decisions for c in d.comparisons])
    if axis is None:
        return None
    metric = claim.metric(statement.metric)
    bars = claim.arm(statement.method).race is not None and statement.scale == "ratio"
    top, groups, most = 26, [], 0
    for d in decisions:
        heading = d.setting if len(decisions) > 1 else ""
        start = top
        top += 24 if heading else 0
        rows = []
        for c in d.comparisons:
            values = _finite(c, axis.log)
            dots, beyond = _dots(values, axis) if len(values) > 1 else ((), (0, 0))
            most = max(most, len(values))
            label = f"{'' if c.baseline is None else 'against '}{wording.against(c, statement, claim)}"
            usable = math.isfinite(c.effect) and not (axis.log and c.effect <= 0)
            spread = usable and math.isfinite(c.low) and math.isfinite(c.high) and not (axis.log and c.low <= 0)
            rows.append(
                Row(
                    label=_shorten(label),
                    answer=wording.KEYS[c.answer],
                    top=top,
                    dots=dots,
                    beyond=beyond,
                    effect=axis.at(c.effect) if usable else None,
                    low=axis.at(c.low) if spread else None,
                    high=axis.at(c.high) if spread else None,
                    text="" if usable else "no effect could be computed",
                )
            )
            top += 64 if dots else 44
        groups.append(Group(_shorten(heading), start, tuple(rows)))
        top += 6
    limit = axis.at(statement.limit)
    good = (0.0, limit) if metric.better == "lower" else (limit, 100.0)
    reported = statement.reported
    value = reported.value if reported is not None else None
    if value is not None and (not math.isfinite(value) or (axis.log and value <= 0)):
        value = None
    description = ". ".join(wording.in_sentence(d, claim) for d in decisions)
    description += f". The statement holds where the interval is {wording.bound(statement, metric)}."
    if reported is not None and value is not None:
        description += f" The paper reported {reported.text} ({reported.setting})."
    if reported is not None and value is None:
        description += f" The paper's number, {reported.text}, is of another kind and is not on this axis."
    return Picture(
        title=f"{statement.text}: measured effects",
        description=description,
        height=top + 26,
        axis=top + 2,
        groups=tuple(groups),
        ticks=tuple((axis.at(t), wording.plain(t) + ("×" if axis.log else "")) for t in axis.ticks()),
        bound=limit,
        bound_label=f"bound {wording.with_unit(wording.plain(statement.limit), statement, metric)}",
        neutral=axis.at(statement.neutral) if statement.baselines and statement.limit != statement.neutral else None,
        good=good,
        bars=bars,
        caption=f"{wording.formula(statement, claim)}.",
        paper=axis.at(value) if value is not None else None,
        paper_off=value is not None and not axis.holds(value),
        paper_label=reported.text if reported is not None else "",
        legend={"dots": _dots_text(most, claim.unit)} if most > 1 else {},
    )


def _dots_text(most: int, unit: str) -> str:
    if most > MOST_DOTS:
        return f"{MOST_DOTS} quantiles of {most:,} paired effects"
    return f"one {unit}"


def pictures(decisions: Sequence[Decision], claim: Claim) -> list[Picture]:
    """The pictures of one statement: all settings on one axis if that shows each well, else one for each setting."""
    statement = decisions[0].statement
    shared = make_axis(statement, [c for d in decisions for c in d.comparisons])
    own = [a for a in (make_axis(statement, d.comparisons) for d in decisions) if a is not None]
    if shared is None:
        return []
    turn = math.log if shared.log else float
    whole = turn(shared.high) - turn(shared.low)
    if all(turn(a.high) - turn(a.low) > whole / 6 for a in own):
        return [p for p in [draw(decisions, claim)] if p is not None]
    return [p for p in (draw([d], claim) for d in decisions) if p is not None]


def plot(run: Run, verdict: Verdict) -> Figure:
    """Draw the paired effects of every statement and setting with intervals, bounds and the paper's numbers.

    Returns
    -------
    matplotlib.figure.Figure
        One panel for each decision that has numbers. It is closed for pyplot: a notebook shows it once, where it is
        the value of a cell, and nothing is left open.
    """
    import matplotlib.pyplot as plt

    claim = run.claim
    shown = [d for d in verdict.decisions if make_axis(d.statement, d.comparisons) is not None]
    heights = [0.9 + 0.42 * len(d.comparisons) for d in shown] or [1.0]
    figure = plt.figure(figsize=(7.5, 0.5 + sum(heights)), layout="constrained")
    try:
        figure.suptitle(f"{claim.title}: {verdict.answer}", x=0.01, ha="left", fontsize="large")
        panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        if not shown:
            panels[0].set_axis_off()
            panels[0].text(0, 0.5, "No effect could be computed.")
        for axes, decision in zip(panels, shown):
            _panel(axes, decision, claim)
    finally:
        plt.close(figure)
    return figure


def _panel(axes: Axes, decision: Decision, claim: Claim) -> None:
    statement, metric = decision.statement, claim.metric(decision.statement.metric)
    colours = {"holds": "#1a7f4b", "does not hold": "#b3372f", "undecided": "#8a6d1a"}
    axis = make_axis(statement, decision.comparisons)
    assert axis is not None
    for y, c in enumerate(decision.comparisons):
        values = _finite(c, axis.log)
        if len(values) > 1:
            dots, _ = _dots(values, axis)
            xs = [_value(axis, x) for x, _ in dots]
            axes.scatter(xs, [y - 0.12 - dy / 80 for _, dy in dots], s=9, color="0.45", alpha=0.6, linewidths=0)
        if math.isfinite(c.effect):
            axes.plot([c.low, c.high], [y + 0.25] * 2, color=colours[c.answer], linewidth=2.5, solid_capstyle="butt")
            axes.plot([c.effect], [y + 0.25], "o", color=colours[c.answer], markersize=6)
    axes.axvline(statement.limit, color="0.15", linestyle="--", linewidth=1)
    if axis.log:
        axes.set_xscale("log")
    axes.set_xlim(axis.low, axis.high)
    ticks = axis.ticks()
    axes.set_xticks(ticks, [wording.plain(t) + ("×" if axis.log else "") for t in ticks])
    axes.set_xticks([], minor=True)
    value = statement.reported.value if statement.reported is not None else None
    if value is not None and axis.holds(value):
        axes.axvline(value, color="#6f42c1", linestyle=":", linewidth=1.2)
        axes.plot([value], [1.0], "D", color="#6f42c1", mfc="white", transform=axes.get_xaxis_transform(), clip_on=False)
        axes.annotate("paper", (value, 1.0), (5, 3), xycoords=axes.get_xaxis_transform(), textcoords="offset points",
                      color="#6f42c1", fontsize="small")  # fmt: skip
    axes.set_yticks(range(len(decision.comparisons)), [wording.against(c, statement, claim) for c in decision.comparisons])
    axes.set_ylim(len(decision.comparisons) - 0.4, -0.6)
    title = f"{wording.SYMBOLS[decision.answer]} {decision.answer}: {statement.text} [{decision.setting}]"
    axes.set_title(title, loc="left", fontsize="medium", wrap=True)
    axes.set_xlabel(f"{wording.formula(statement, claim)}; bound {wording.bound(statement, metric)}", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _value(axis: Axis, percent: float) -> float:
    """The inverse of :meth:`Axis.at`."""
    low, high = (math.log(axis.low), math.log(axis.high)) if axis.log else (axis.low, axis.high)
    x = low + (percent - _MARGIN) / (100 - 2 * _MARGIN) * (high - low)
    return math.exp(x) if axis.log else x
