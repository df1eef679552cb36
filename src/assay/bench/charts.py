"""Curves and planes: how a metric grows with a size, and which arms no other arm beats in two metrics.

Drawn by hand as SVG, as :mod:`assay.bench.plots` is: places along the width are percentages, heights are pixels. Every
arm has a letter, which the legend explains, so that nothing depends on colour and no label covers another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import ascii_lowercase, ascii_uppercase

import numpy as np

from assay.bench import wording
from assay.bench.claim import Frontier, Growth
from assay.bench.plots import round_steps
from assay.bench.trial import Run

LETTERS = ascii_uppercase + ascii_lowercase
LEAST = 3  # different sizes that a fit needs
_LEFT, _RIGHT = 11.0, 3.0  # per cent left free for the labels of the vertical axis, and at the other end
_TOP, _BOTTOM = 26, 256  # px from the top of the drawing to the ends of the plane
_FLOOR = 16  # px below a logarithmic axis where zeros lie
NOTHING = 1e-4  # of the largest value: what lies below is drawn as nothing, since noise would stretch the axis
_ROOM = 12  # px kept free within the plane above and below


@dataclass(frozen=True)
class Series:
    """One arm of a growth: medians over replicates by size, and the fitted exponent with its 95% interval."""

    arm: str
    label: str
    points: tuple[tuple[float, float], ...]
    exponent: tuple[float, float, float] | None


@dataclass(frozen=True)
class Point:
    """One arm of a frontier: medians over replicates, and whether no other arm is at least as good in both."""

    arm: str
    label: str
    x: float
    y: float
    front: bool


def growth_series(run: Run, growth: Growth) -> list[Series]:
    """The curves of a growth, of the arms and settings that were measured."""
    from assay.bench.race import fit_exponent  # SciPy, which ``assay list`` does without

    found = []
    for arm in growth.arms:
        points = []
        for setting, size in sorted(growth.sizes.items(), key=lambda item: item[1]):
            value = _median(run, setting, arm, growth.metric)
            if value is not None and value > 0:
                points.append((float(size), value))
        fitted = [(s, v) for s, v in points if s >= growth.fit_from]
        exponent = None
        if len({s for s, _ in fitted}) >= LEAST:
            exponent = fit_exponent([s for s, _ in fitted], [v for _, v in fitted])
        if points:
            found.append(Series(arm, wording.arm_label(run.claim, arm), tuple(points), exponent))
    return found


def frontier_points(run: Run, frontier: Frontier) -> list[Point]:
    """The arms of a frontier that were measured, in the claim's order."""
    claim = run.claim
    found = []
    for arm in run.arms:
        x, y = (_median(run, frontier.setting, arm, metric) for metric in (frontier.x, frontier.y))
        if x is not None and y is not None:
            found.append((arm, x, y))
    signs = [-1.0 if claim.metric(m).better == "higher" else 1.0 for m in (frontier.x, frontier.y)]
    front = pareto([(signs[0] * x, signs[1] * y) for _, x, y in found])
    return [Point(arm, wording.arm_label(claim, arm), x, y, f) for (arm, x, y), f in zip(found, front)]


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which points no other point dominates, both numbers better when lower.

    A point is dominated by one that is no worse in both and better in one; equal points stand side by side.
    """
    return [
        not any(a <= x and b <= y and (a < x or b < y) for j, (a, b) in enumerate(points) if j != i)
        for i, (x, y) in enumerate(points)
    ]


def _median(run: Run, setting: str, arm: str, metric: str) -> float | None:
    values = [t.metrics[metric] for t in run.select(setting, arm).values() if metric in t.metrics]
    finite = [v for v in values if math.isfinite(v)]
    return float(np.median(finite)) if finite else None


# -- in words -------------------------------------------------------------------------------------------------------


def growth_table(run: Run, growth: Growth) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a column for each size, and the exponent at the end. Empty rows where nothing was measured."""
    series = growth_series(run, growth)
    names = _measured(series, growth)
    head = [wording.labelled(run.claim.metric(growth.metric)), *names.values(), "Exponent", "95% interval"]
    rows = []
    for s in series:
        values = dict(s.points)
        cells = [wording.number(values.get(size), 3) for size in names]
        rows.append([s.label, *cells, *exponent_text(s)])
    return head, rows


def _measured(series: Sequence[Series], growth: Growth) -> dict[float, str]:
    """The sizes that any curve has, in order, and the settings that have them."""
    names = {float(size): setting for setting, size in growth.sizes.items()}
    return {size: names[size] for size in sorted({size for s in series for size, _ in s.points})}


def exponent_text(series: Series) -> tuple[str, str]:
    """The fitted exponent and its interval."""
    if series.exponent is None:
        return wording.MISSING, wording.MISSING
    value, low, high = series.exponent
    return f"{value:.2f}".replace("-", wording.MINUS), f"[{low:.2f}, {high:.2f}]".replace("-", wording.MINUS)


def growth_note(growth: Growth) -> str:
    """What was fitted, in a sentence."""
    start = f", from {wording.plain(growth.fit_from)} on" if growth.fit_from else ""
    text = f"Exponents p of {growth.metric} ~ c · size^p, fitted to the medians over replicates{start}."
    if growth.reported is not None:
        text += f" The paper reported: {growth.reported.text} ({growth.reported.setting}; {growth.reported.source})."
    return text


def front_sentence(run: Run, frontier: Frontier) -> str:
    """The arms on the front, from the best in ``x`` to the best in ``y``."""
    points = [p for p in frontier_points(run, frontier) if p.front]
    if not points:
        return ""
    ordered = sorted(points, key=lambda p: p.x, reverse=run.claim.metric(frontier.x).better == "higher")
    x, y = run.claim.metric(frontier.x), run.claim.metric(frontier.y)
    return f"On the Pareto front of {x.name} and {y.name}: {'; '.join(p.label for p in ordered)}."


# -- drawn ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A letter at a place (per cent, px)."""

    x: float
    y: float
    letter: str
    strong: bool


@dataclass(frozen=True)
class Key:
    """A line of the legend."""

    letter: str
    text: str
    strong: bool


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws."""

    title: str
    description: str
    x_label: str
    y_label: str
    xticks: tuple[tuple[float, str], ...]
    yticks: tuple[tuple[float, str], ...]
    lines: tuple[tuple[float, float, float, float, bool], ...]
    marks: tuple[Mark, ...]
    legend: tuple[Key, ...]
    caption: str
    height: int = _BOTTOM + 44
    bottom: int = _BOTTOM
    left: float = _LEFT
    right: float = 100 - _RIGHT


class _Scale:
    """Where values lie between two places; logarithmic where values span more than a decade.

    Zeros, and what is next to nothing beside the largest value, then lie together below the axis.
    """

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool | None = None) -> None:
        self.least = NOTHING * max(values) if log is None else 0.0
        positive = [v for v in values if v > max(self.least, 0)]
        many = bool(positive) and min(values) >= -self.least and max(positive) > 10 * min(positive)
        self.log = bool(positive) and (many if log is None else log)
        self.zeros = self.log and len(positive) < len(values)
        shown = positive if self.log else list(values)
        self.low, self.high = min(shown), max(shown)
        if self.low == self.high:
            pad = abs(self.low) / 2 or 0.5
            self.low, self.high = self.low - pad, self.high + pad
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        if self.log and value <= self.least:
            return self.start + math.copysign(_FLOOR, self.start - self.end)
        turn = math.log if self.log else float
        share = (turn(value) - turn(self.low)) / (turn(self.high) - turn(self.low))
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self) -> list[float]:
        if not self.log or self.high < 3 * self.low:
            return [t for t in round_steps(self.low, self.high) if self.low <= t <= self.high]
        steps = (1, 2, 5) if self.high < 300 * self.low else (1,)
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        found = [s * 10.0**d for d in decades for s in steps if self.low <= s * 10.0**d <= self.high]
        return ([0.0] if self.zeros else []) + found[:: math.ceil(len(found) / 6)]


def growth_chart(run: Run, growth: Growth) -> Chart | None:
    """Both axes logarithmic, so that a power of the size is a straight line; ``None`` where nothing was measured."""
    series = growth_series(run, growth)
    if not series:
        return None
    claim, metric = run.claim, run.claim.metric(growth.metric)
    names = _measured(series, growth)
    across = _Scale(list(names), _LEFT, 100 - _RIGHT - 2, log=True)
    up = _Scale([v for s in series for _, v in s.points], _BOTTOM - _ROOM, _TOP + _ROOM, log=True)
    lines, marks, keys = [], [], []
    for letter, s in zip(LETTERS, series):
        strong = claim.arm(s.arm).role == "method"
        places = [(across.at(x), up.at(y)) for x, y in s.points]
        lines += [(*a, *b, strong) for a, b in pairwise(places)]
        marks += [Mark(x, y, letter, strong) for x, y in places[-1:]]
        value, interval = exponent_text(s)
        keys.append(Key(letter, f"{s.label}: exponent {value} {interval}", strong))
    said = "; ".join(k.text for k in keys)
    return Chart(
        title=growth.text,
        description=f"{metric.label} against {growth.size_label}, both logarithmic. {said}.",
        x_label=growth.size_label,
        y_label=wording.labelled(metric),
        xticks=tuple((across.at(size), name) for size, name in names.items()),
        yticks=tuple((up.at(t), wording.plain(t)) for t in up.ticks()),
        lines=tuple(lines),
        marks=tuple(_apart(marks)),
        legend=tuple(keys),
        caption=growth_note(growth),
    )


def frontier_chart(run: Run, frontier: Frontier) -> Chart | None:
    """Arms as letters in the plane, those on the front joined by steps; ``None`` where nothing was measured."""
    points = frontier_points(run, frontier)
    if not points:
        return None
    claim, sentence = run.claim, front_sentence(run, frontier)
    x, y = claim.metric(frontier.x), claim.metric(frontier.y)
    values = [p.y for p in points]
    across = _Scale([p.x for p in points], _LEFT + 2, 100 - _RIGHT - 2)
    up = _Scale(values, _BOTTOM - _ROOM, _TOP + _ROOM)
    if up.zeros:
        up = _Scale(values, _BOTTOM - _ROOM - _FLOOR, _TOP + _ROOM)
    marks = [Mark(across.at(p.x), up.at(p.y), letter, p.front) for letter, p in zip(LETTERS, points)]
    front = sorted((m for m in marks if m.strong), key=lambda m: (m.x, m.y))
    lines = []
    for a, b in pairwise(front):  # what is reached by spending up to x: level until the next arm is affordable
        lines += [(a.x, a.y, b.x, a.y, True), (b.x, a.y, b.x, b.y, True)]
    keys = [
        Key(k, f"{p.label} ({wording.number(p.x, 3)}, {wording.number(p.y, 3)})", p.front)
        for k, p in zip(LETTERS, points)
    ]
    return Chart(
        title=frontier.text,
        description=f"{y.label} against {x.label}. {sentence}",
        x_label=f"{wording.labelled(x)}, {x.better} is better",
        y_label=f"{wording.labelled(y)}, {y.better} is better",
        xticks=tuple((across.at(t), wording.plain(t)) for t in across.ticks()),
        yticks=tuple((up.at(t), wording.plain(t) if t or not up.zeros else "≈0") for t in up.ticks()),
        lines=tuple(lines),
        marks=tuple(_apart(marks)),
        legend=tuple(keys),
        caption=f"{sentence} Medians over the {wording.units(claim.unit)}; strong letters are on the front.",
    )


def _apart(marks: Sequence[Mark], least: float = 15.0) -> list[Mark]:
    """The marks with letters that would cover each other moved sideways, in the order of the places."""
    placed: list[Mark] = []
    for m in sorted(marks, key=lambda m: (m.x, m.y)):
        x = m.x
        while any(abs(p.x - x) < 2.6 and abs(p.y - m.y) < least for p in placed):
            x = round(x + 2.7, 2)
        placed.append(Mark(min(x, 99.0), m.y, m.letter, m.strong))
    return placed
