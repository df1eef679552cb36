"""Numbers, answers and settings in words: what the report, the results and the terminal say in the same way."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from assay.bench.claim import Claim, Metric, Statement
from assay.bench.trial import Run
from assay.bench.verdict import Answer, Comparison, Decision, Verdict

MISSING = "–"
MINUS = "−"
SYMBOLS: dict[Answer, str] = {"holds": "✓", "does not hold": "✗", "undecided": "?"}
KEYS: dict[Answer, str] = {"holds": "holds", "does not hold": "fails", "undecided": "open"}


def number(value: float | None, digits: int = 4) -> str:
    """A number with ``digits`` significant digits, thousands apart by commas; NaN and ``None`` are a dash."""
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if size < -4 or size >= 12:
        mantissa, _, exponent = f"{value:.{max(digits - 1, 0)}e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = f"{value:,.{max(digits - 1 - size, 0)}f}"
    return text.replace("-", MINUS)


def together(*values: float) -> list[str]:
    """Numbers that stand side by side, with as many decimals as their spread deserves.

    The spread of the finite ones is shown with two digits, so that an interval is not longer than what it knows.
    """
    finite = [v for v in values if math.isfinite(v)]
    spread = max(finite) - min(finite) if finite else 0.0
    if spread <= 0 or max(abs(v) for v in finite) >= 1e12:
        return [number(v) for v in values]
    decimals = 1 - math.floor(math.log10(spread))
    if decimals > 6:
        return [number(v, 4) for v in values]
    out = []
    for v in values:
        text = f"{v:,.{max(decimals, 0)}f}".replace("-", MINUS) if math.isfinite(v) else number(v)
        out.append(text[1:] if text[0] == MINUS and not text.strip("−0.,") else text)
    return out


def effect(comparison: Comparison, statement: Statement, metric: Metric) -> str:
    """The effect with its unit: ``−0.012 nat``, or ``0.52×`` for a ratio."""
    value = together(comparison.effect, comparison.low, comparison.high)[0]
    return value if value == MISSING else with_unit(value, statement, metric)


def interval(comparison: Comparison) -> str:
    """The 95% interval, ``−0.020 to −0.004``; a dash where there is none; ``exact`` for a count."""
    low, high = comparison.low, comparison.high
    if math.isnan(low) or math.isnan(high):
        return MISSING
    if low == high == comparison.effect:
        return "exact"
    _, first, last = together(comparison.effect, low, high)
    return f"{first} to {last}"


def with_unit(text: str, statement: Statement, metric: Metric) -> str:
    """A number of the statement's scale with what it counts: ``0.5×``, or ``0.5 nat``."""
    if statement.scale == "ratio":
        return f"{text}×"
    return f"{text} {metric.unit}" if metric.unit else text


def bound(statement: Statement, metric: Metric) -> str:
    """What the interval must satisfy, ``< 0.85×``."""
    side = "<" if metric.better == "lower" else ">"
    return f"{side} {with_unit(plain(statement.limit), statement, metric)}"


def plain(value: float) -> str:
    """A number that somebody chose, as it was chosen: ``0.05``, not ``0.0500``."""
    return f"{value:.6g}".replace("-", MINUS)


def formula(statement: Statement, claim: Claim) -> str:
    """What the effect is, in words: method minus baseline, in nats."""
    metric = claim.metric(statement.metric)
    unit = f" ({metric.unit})" if metric.unit else ""
    if not statement.baselines:
        return f"{metric.label}{unit} of {arm_label(claim, statement.method)}"
    operation = "divided by that of" if statement.scale == "ratio" else "minus that of"
    unit = "" if statement.scale == "ratio" else unit
    return f"{metric.label}{unit} of {arm_label(claim, statement.method)}, {operation} the baseline"


def arm_label(claim: Claim, name: str | None) -> str:
    """What an arm is called for readers; ``None`` is the constant of a statement."""
    if name is None:
        return "the constant"
    return next((a.label or a.name for a in claim.arms if a.name == name), name)


def against(comparison: Comparison | None, statement: Statement, claim: Claim) -> str:
    """The other side of a comparison: a baseline's label, or the constant."""
    if comparison is None:
        return MISSING
    if comparison.baseline is None:
        constant = statement.constant if statement.constant is not None else statement.limit
        return f"the constant {plain(constant)}"
    return arm_label(claim, comparison.baseline)


def summary(verdict: Verdict) -> str:
    """The answer in one sentence, with how many decisions it is made of."""
    deciding = [d for d in verdict.decisions if d.statement.decides]
    if not deciding:
        return "Nothing was decided."
    names = {d.statement.name for d in deciding}
    count = Counter(d.answer for d in deciding)
    settings = {d.setting for d in deciding}
    across = f" over {len(settings)} settings" if len(settings) > 1 else ""
    if len(count) == 1:
        if len(deciding) == 1:
            return f"The one statement {_verb(deciding[0].answer, 1)}."
        what = "both statements" if len(names) == 2 else f"all {len(names)} statements"
        what = "The one statement" if len(names) == 1 else what[0].upper() + what[1:]
        return f"{what} {_verb(deciding[0].answer, len(names))}{across}."
    parts = [f"{count[a]} {_verb(a, count[a])}" for a in SYMBOLS if count[a]]
    listed = ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"Of {len(deciding)} decisions ({len(names)} statement{'s' * (len(names) > 1)}{across}), {listed}."


def _verb(answer: Answer, n: int) -> str:
    many = {"holds": "hold", "does not hold": "do not hold", "undecided": "are undecided"}
    one = {"holds": "holds", "does not hold": "does not hold", "undecided": "is undecided"}
    return (one if n == 1 else many)[answer]


def in_sentence(decision: Decision, claim: Claim) -> str:
    """A decision for somebody who cannot see the table: effect, interval, n and answer against each baseline."""
    statement, metric = decision.statement, claim.metric(decision.statement.metric)
    parts = []
    for c in decision.comparisons:
        if math.isnan(c.effect):
            parts.append(f"against {against(c, statement, claim)}: no effect could be computed, {c.answer}")
            continue
        spread = interval(c)
        spread = {"exact": "exact count", MISSING: "no interval"}.get(spread, f"95% interval {spread}")
        text = f"effect {effect(c, statement, metric)}, {spread}, n = {c.n}, {c.answer}"
        parts.append(f"against {against(c, statement, claim)}: {text}")
    return f"{decision.setting}, " + "; ".join(parts) if parts else f"{decision.setting}: nothing was compared"


def command(run: Run) -> str:
    """The command line that repeats the run."""
    parts = ["assay", "run", run.claim.slug]
    for name, value in run.options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if isinstance(value, bool):
            parts.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, list | tuple):
            for item in value:
                parts += [flag, str(item)]
        else:
            parts += [flag, str(value)]
    parts += ["--scale", run.key.scale, "--replicates", str(run.replicates)]
    if set(run.arms) != {a.name for a in run.claim.arms}:
        parts += ["--arms", ",".join(run.arms)]
    parts += ["--device", run.key.device, "--seed", str(run.key.seed)]
    return shlex.join(parts)


def machine(environment: Mapping[str, Any]) -> str:
    """The machine of an environment in a line."""
    cores, memory = environment.get("cores"), environment.get("memory_gib")
    parts = [
        str(environment.get("cpu") or ""),
        f"{cores} core{'s' * (cores != 1)}" if cores else "",
        f"{memory:g} GiB" if memory else "",
        str(environment.get("gpu") or ""),
        str(environment.get("platform") or ""),
    ]
    return ", ".join(p for p in parts if p)


def versions(environment: Mapping[str, Any]) -> str:
    """Python and the libraries of an environment in a line."""
    python = environment.get("python")
    found = [("Python", python)] if python else []
    found += list((environment.get("libraries") or {}).items())
    return ", ".join(f"{name} {version}" for name, version in found)


def commit(environment: Mapping[str, Any]) -> str:
    """The commit of an environment, and whether files had been changed since."""
    text = str(environment.get("commit") or "")[:12]
    return f"{text} with uncommitted changes" if text and environment.get("dirty") else text


def markdown_text(text: str) -> str:
    """Text that Markdown shows as it is, on one line: no tags, no table cells, no emphasis by accident."""
    line = " ".join(str(text).split())
    for mark in ("\\", "|", "*", "_", "`", "[", "]"):
        line = line.replace(mark, f"\\{mark}")
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Collection[int] = ()) -> str:
    """A Markdown table. Cells are not padded: one that grows changes its own line, and no other, in a diff."""
    rule = "|" + "|".join("--:" if i in numeric else "---" for i in range(len(head))) + "|"
    lines = ["| " + " | ".join(markdown_text(str(x)) for x in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
