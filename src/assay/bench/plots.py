"""Pictures of paired effects: drawn by hand as SVG for the report page, and by matplotlib for notebooks.

The SVG has no ``viewBox``: places along the axis are percentages and type is in CSS pixels, so one picture is as
readable at 360 px as on a wide screen, and takes its colours from the page's variables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np

from assay.bench import wording
from assay.bench.claim import Claim, Statement
from assay.bench.trial import Run
from assay.bench.verdict import Answer, Comparison, Decision, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: dict[Answer, str] = {"holds": "#1a7f4b", "does not hold": "#b3372f", "undecided": "#8a6d1a"}
PAPER = "#6f42c1"
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
    side: int = 0


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
    heading: str = ""
    effect_label: str = ""
    dots_label: str = ""


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

    def value(self, percent: float) -> float:
        """The value at a place, the inverse of :meth:`at`."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        x = low + (percent - _MARGIN) / (100 - 2 * _MARGIN) * (high - low)
        return math.exp(x) if self.log else x

    def _inside(self, value: float) -> float:
        return min(max(value, self.low), self.high)

    def holds(self, value: float) -> bool:
        """Whether the value lies in the range."""
        return self.low <= value <= self.high

    def length(self) -> float:
        """How long the range is, in the units that it is drawn in."""
        return math.log(self.high / self.low) if self.log else self.high - self.low

    def ticks(self) -> list[float]:
        """Three to six round numbers in the range."""
        if not self.log:
            return round_steps(self.low, self.high)
        span = self.high / self.low
        if span < 3:
            return round_steps(self.low, self.high)
        steps = (1, 1.5, 2, 3, 5, 7) if span < 8 else (1, 2, 5) if span < 100 else (1,)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
        keep = math.ceil(len(found) / 6)
        return found[::keep] if len(found) > 1 else round_steps(self.low, self.high)


def round_steps(low: float, high: float) -> list[float]:
    """Three to six round numbers between two."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _finite(comparison: Comparison, log: bool) -> np.ndarray:
    values = np.asarray(comparison.effects, dtype=float)
    return values[np.isfinite(values) & (values > 0)] if log else values[np.isfinite(values)]


def make_axis(decisions: Sequence[Decision]) -> Axis | None:
    """A range that shows the deciding comparisons, the bound and no difference well, and of the others what it can.

    Other baselines, single wild effects and the paper's number may widen the range to at most three times of what the
    deciding comparisons need; what lies further out is named at the edge, rather than squeezing all others into a spot.
    """
    statement = decisions[0].statement
    log = statement.scale == "ratio"
    ranges = [_range(c, log) for d in decisions for c in d.comparisons]
    if not any(ranges):
        return None
    deciding = [_range(d.deciding, log) for d in decisions if d.deciding is not None]
    core = [v for r in (deciding if any(deciding) else ranges) for v in r] + [statement.limit, statement.neutral]
    wide = core + [v for r in ranges for v in r]
    wide += [float(v) for d in decisions for c in d.comparisons for v in _finite(c, log)]
    value = paper_value(statement)
    if value is not None:
        wide.append(value)
    turn, back = (math.log, math.exp) if log else (float, float)
    low, high = turn(min(core)), turn(max(core))
    span = high - low
    if span <= max(1e-12 * max(abs(low), abs(high)), 1e-200):
        span = 0.1 * (abs(high) if abs(high) > 1e-100 else 1.0)
    low, high = max(turn(min(wide)), low - span), min(turn(max(wide)), high + span)
    pad = max(0.05 * (high - low), 0.01 * span)
    return Axis(back(low - pad), back(high + pad), log)


def _range(comparison: Comparison, log: bool) -> list[float]:
    """The places that a comparison must be seen at: its effect, its interval, and four fifths of its dots."""
    found = [v for v in (comparison.effect, comparison.low, comparison.high) if math.isfinite(v) and (v > 0 or not log)]
    values = _finite(comparison, log)
    if found and len(values):
        found += [float(v) for v in np.quantile(values, [0.1, 0.9])]
    return found


def paper_value(statement: Statement) -> float | None:
    """The paper's number, where it is the same quantity as the effect and can stand on its axis."""
    value = statement.reported.value if statement.reported is not None else None
    if value is None or not math.isfinite(value) or (statement.scale == "ratio" and value <= 0):
        return None
    return value


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
    axis = make_axis(decisions)
    if axis is None:
        return None
    metric = claim.metric(statement.metric)
    timed = claim.arm(statement.method).race is not None and statement.scale == "ratio"
    top, groups = 26, []
    for d in decisions:
        heading = d.setting if len(decisions) > 1 else ""
        start = top
        top += 24 if heading else 0
        rows = []
        for c in d.comparisons:
            rows.append(_row(c, statement, claim, axis, top))
            top += 66 if rows[-1].dots else 46
        groups.append(Group(_shorten(heading), start, tuple(rows)))
        top += 6
    limit, value = axis.at(statement.limit), paper_value(statement)
    most = max((len(_finite(c, axis.log)) for d in decisions for c in d.comparisons), default=0)
    reported = statement.reported
    dotted = any(r.dots for g in groups for r in g.rows)
    dots = f"{MOST_DOTS} of {most:,} effects" if most > MOST_DOTS else f"one {claim.unit}"
    return Picture(
        title=f"{statement.text}: measured effects",
        description=_description(decisions, claim),
        height=top + 26,
        axis=top + 2,
        groups=tuple(groups),
        ticks=tuple((axis.at(t), wording.plain(t) + ("×" if axis.log else "")) for t in axis.ticks()),
        bound=limit,
        bound_label=_shorten(f"bound {wording.with_unit(wording.plain(statement.limit), statement, metric)}", 36),
        neutral=axis.at(statement.neutral) if statement.limit != statement.neutral else None,
        good=(0.0, limit) if metric.better == "lower" else (limit, 100.0),
        bars=timed,
        caption=f"{wording.formula(statement, claim)}.",
        paper=axis.at(value) if value is not None else None,
        paper_off=value is not None and not axis.holds(value),
        paper_label=reported.text if reported is not None else "",
        effect_label="measured effect" + (", counted" if metric.counted else " and its 95% interval"),
        dots_label=dots if dotted else "",
    )


def _row(c: Comparison, statement: Statement, claim: Claim, axis: Axis, top: int) -> Row:
    values = _finite(c, axis.log)
    dots, beyond = _dots(values, axis) if len(values) > 1 and values.min() < values.max() else ((), (0, 0))
    label = f"against {wording.against(c, statement, claim)}"
    usable = math.isfinite(c.effect) and not (axis.log and c.effect <= 0)
    inside = usable and axis.holds(c.effect)
    spread = inside and math.isfinite(c.low) and math.isfinite(c.high) and not (axis.log and c.low <= 0)
    text = "" if usable else "no effect could be computed"
    if usable and not inside:
        text = f"effect {wording.effect(c, statement, claim.metric(statement.metric))}, beyond the axis"
    return Row(
        label=_shorten(label),
        answer=wording.KEYS[c.answer],
        top=top,
        dots=dots if inside else (),
        beyond=beyond if inside and dots else (0, 0),
        effect=axis.at(c.effect) if inside else None,
        low=axis.at(c.low) if spread else None,
        high=axis.at(c.high) if spread else None,
        text=_shorten(text),
        side=0 if inside or not usable else -1 if c.effect < axis.low else 1,
    )


def _description(decisions: Sequence[Decision], claim: Claim) -> str:
    """The picture's numbers in sentences."""
    statement = decisions[0].statement
    text = ". ".join(wording.in_sentence(d, claim) for d in decisions)
    text += f". The statement asks for {wording.bound(statement, claim.metric(statement.metric))}."
    reported = statement.reported
    if reported is not None and paper_value(statement) is not None:
        text += f" The paper reported {reported.text} ({reported.setting})."
    elif reported is not None:
        text += f" The paper's number, {reported.text}, is of another kind and is not on this axis."
    return text


def pictures(decisions: Sequence[Decision], claim: Claim) -> list[Picture]:
    """The pictures of one statement: all settings on one axis if that shows each well, else one for each setting."""
    shared = make_axis(decisions)
    if shared is None:
        return []
    own = [a for a in (make_axis([d]) for d in decisions) if a is not None]
    together = all(a.length() > shared.length() / 5 for a in own)
    drawn = [(group, draw(group, claim)) for group in ([decisions] if together else [[d] for d in decisions])]
    return [p if together else replace(p, heading=group[0].setting) for group, p in drawn if p is not None]


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
    shown = [d for d in verdict.decisions if make_axis([d]) is not None]
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
    axis = make_axis([decision])
    assert axis is not None
    for y, c in enumerate(decision.comparisons):
        row = _row(c, statement, claim, axis, 0)
        if row.dots:
            xs = [axis.value(x) for x, _ in row.dots]
            axes.scatter(xs, [y - 0.12 - dy / 80 for _, dy in row.dots], s=9, color="0.45", alpha=0.6, linewidths=0)
        colour = COLOURS[c.answer]
        if row.effect is not None:
            if row.low is not None:
                axes.plot([c.low, c.high], [y + 0.25] * 2, color=colour, linewidth=2.5, solid_capstyle="butt")
            axes.plot([c.effect], [y + 0.25], "o", color=colour, markersize=6)
        elif row.text:
            x = axis.high if row.side > 0 else axis.low
            axes.text(x, y, f" {row.text} ", ha="right" if row.side > 0 else "left", va="center", fontsize="small")
    axes.axvline(statement.limit, color="0.15", linestyle="--", linewidth=1)
    if axis.log:
        axes.set_xscale("log")
    axes.set_xlim(axis.low, axis.high)
    ticks = axis.ticks()
    axes.set_xticks(ticks, [wording.plain(t) + ("×" if axis.log else "") for t in ticks])
    axes.set_xticks([], minor=True)
    value = paper_value(statement)
    if value is not None and axis.holds(value):
        edge = axes.get_xaxis_transform()
        axes.axvline(value, color=PAPER, linestyle=":", linewidth=1.2)
        axes.plot([value], [0], "D", color=PAPER, mfc="white", transform=edge, clip_on=False, zorder=5)
        axes.annotate("paper", (value, 0), (6, 5), edge, "offset points", color=PAPER, fontsize="small")
    labels = [fill(wording.against(c, statement, claim), 26) for c in decision.comparisons]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    title = f"{wording.SYMBOLS[decision.answer]} {decision.answer}: {statement.text} [{decision.setting}]"
    axes.set_title(fill(title, 68), loc="left", fontsize="medium")
    what = f", method {'/' if axis.log else '−'} {'baseline' if statement.baselines else 'constant'}"
    axes.set_xlabel(f"{metric.label}{what}, bound {wording.bound(statement, metric)}", fontsize="small")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
