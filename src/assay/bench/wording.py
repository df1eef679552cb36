"""Numbers, answers and settings in words: what the report, the results and the terminal say in the same way."""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from os import PathLike
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


def exact(value: float) -> str:
    """A counted number, all digits that matter: ``11,520``, not ``1.152e4``."""
    return f"{value:,.10g}".replace("-", MINUS) if math.isfinite(value) else number(value)


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
    low, high = comparison.low, comparison.high
    counted = metric.counted and math.isfinite(comparison.effect)
    value = f"{comparison.effect:,.4g}".replace("-", MINUS) if counted else together(comparison.effect, low, high)[0]
    return value if value == MISSING else with_unit(value, statement, metric)


def interval(comparison: Comparison, metric: Metric | None = None) -> str:
    """The 95% interval, ``−0.020 to −0.004``; a dash where there is none.

    A counted ``metric`` has no interval: it is ``exact``, or the range over the replicates is given and called so.
    """
    low, high = comparison.low, comparison.high
    if math.isnan(low) or math.isnan(high):
        return MISSING
    if metric is not None and metric.counted:
        return "exact" if low == high else f"range {number(low)} to {number(high)}"
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


def labelled(metric: Metric) -> str:
    """What a metric is called for readers, with its unit: ``time (s)``."""
    return f"{metric.label} ({metric.unit})" if metric.unit else metric.label


def formula(statement: Statement, claim: Claim) -> str:
    """What the effect is, in words: method minus baseline, in nats."""
    metric = claim.metric(statement.metric)
    ratio = statement.scale == "ratio"
    operation, what = ("divided by", metric.label) if ratio else ("minus", labelled(metric))
    other = "that of the baseline" if statement.baselines else f"the constant {plain(statement.constant or 0.0)}"
    text = f"{what} of {arm_label(claim, statement.method)}, {operation} {other}"
    return text[:1].upper() + text[1:]


def units(unit: str, count: int = 2) -> str:
    """The word for a replicate, as a plural unless there is one: ``seeds``, ``data sets``, ``batches of documents``."""
    head, of, rest = unit.partition(" of ")
    ending = "es" if head.endswith(("s", "x", "ch", "sh")) else "s"
    return unit if count == 1 else f"{head}{ending}{of}{rest}"


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
    deciding = [d for d in verdict.decisions if d.statement.decides and d.setting]
    if not deciding:
        return "Nothing was decided."
    names = {d.statement.name for d in deciding}
    count = Counter(d.answer for d in deciding)
    settings = {d.setting for d in deciding}
    many = len(settings)
    across = "" if many == 1 else " in both settings" if many == 2 else f" in all {many} settings"
    if len(count) == 1:
        if len(deciding) == 1:
            return f"The one statement {_verb(deciding[0].answer, 1)}."
        what = "both statements" if len(names) == 2 else f"all {len(names)} statements"
        what = "The one statement" if len(names) == 1 else what[0].upper() + what[1:]
        return f"{what} {_verb(deciding[0].answer, len(names))}{across}."
    parts = [f"{count[a]} {_verb(a, count[a])}" for a in SYMBOLS if count[a]]
    of = f" in {many} settings" if many > 1 else ""
    listed = ", ".join(parts[:-1]) + " and " + parts[-1]
    return f"Of {len(deciding)} decisions ({len(names)} statement{'s' * (len(names) > 1)}{of}), {listed}."


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
        spread = interval(c, metric)
        if spread == MISSING:
            spread = "no interval"
        elif not metric.counted:
            spread = f"95% interval {spread}"
        text = f"effect {effect(c, statement, metric)}, {spread}, n = {c.n}, {c.answer}"
        parts.append(f"against {against(c, statement, claim)}: {text}")
    return ", ".join(filter(None, [decision.setting, "; ".join(parts) or decision.reason]))


def command(run: Run) -> str:
    """The command line that repeats the run. Options that have the value of the scale or the default are left out."""
    parts = ["assay", "run", run.claim.slug]
    defaults = _defaults(run)
    for name, value in run.options.items():
        if value is None or value is False or (name in defaults and _same(value, defaults[name])):
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            parts.append(flag)
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                parts += [flag, _option(item)]
    parts += ["--scale", run.key.scale, "--replicates", str(run.replicates)]
    if set(run.arms) != {a.name for a in run.claim.arms}:
        parts += ["--arms", *run.arms]
    parts += ["--device", run.key.device, "--seed", str(run.key.seed)]
    return shlex.join(parts)


def _defaults(run: Run) -> dict[str, Any]:
    work = run.claim.workload
    own = {f.name: f.default for f in dataclasses.fields(work)} if dataclasses.is_dataclass(work) else {}
    scale = next((s for name, s in run.claim.scales.items() if name == run.key.scale), None)
    return own | dict(scale.options if scale is not None else {})


def _same(value: Any, default: Any) -> bool:
    """Equality of plain values; a store gives lists for tuples, and arrays have no single answer."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) and all(map(_same, value, default))
    return isinstance(value, str | int | float) and type(value) is type(default) and value == default


def _option(value: Any) -> str:
    """An option as it is typed; data that were given in memory are named by their type."""
    return str(value) if isinstance(value, str | int | float | PathLike) else f"<{type(value).__name__}>"


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
    line = re.sub(r"([\\|*`\[\]]|(?<!\w)_|_(?!\w))", r"\\\1", line)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"&(?=#?\w+;)", "&amp;", line))


def markdown_code(text: str) -> str:
    """Text as a span of code."""
    return "`" + " ".join(text.split()).replace("`", "'") + "`"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]], numeric: Collection[int] = ()) -> str:
    """A Markdown table. Cells are not padded: one that grows changes its own line, and no other, in a diff."""
    rule = "|" + "|".join("--:" if i in numeric else "---" for i in range(len(head))) + "|"
    lines = ["| " + " | ".join(markdown_text(str(x)) for x in row) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])
