"""What a run looks like: a static page for each claim with an index, Markdown, and a fragment for notebooks.

Pages are complete in themselves: styles and pictures are inline, nothing is loaded, no script is needed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

import assay
from assay.bench import charts, plots, wording
from assay.bench.claim import Arm, Claim, Metric, Statement
from assay.bench.plots import plot
from assay.bench.trial import Run, Trial, error_line, expected_arms
from assay.bench.verdict import Answer, Decision, Verdict
from assay.errors import InputError

__all__ = ["plot", "to_markdown", "verdict_html", "write_report"]


@dataclass(frozen=True)
class Cell:
    """One metric of one arm over the replicates."""

    value: str
    spread: str = ""


@dataclass(frozen=True)
class ArmRow:
    """One arm in one setting."""

    label: str
    role: str
    n: int
    failed: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class ArmTable:
    """Arms that report the same metrics, in one setting."""

    title: str
    metrics: tuple[Metric, ...]
    rows: tuple[ArmRow, ...]


@dataclass(frozen=True)
class Row:
    """One comparison, in words."""

    against: str
    effect: str
    interval: str
    n: int
    answer: Answer
    reason: str
    decides: bool


@dataclass(frozen=True)
class DecisionView:
    """One statement in one setting (of no name: one that this task does not have) with its comparisons."""

    setting: str
    answer: Answer
    rows: tuple[Row, ...]

    @property
    def deciding(self) -> Row:
        """The comparison with the strongest baseline; the first, where none can be told to be that."""
        return next((r for r in self.rows if r.decides), self.rows[0])


@dataclass(frozen=True)
class StatementView:
    """One statement over all its settings."""

    statement: Statement
    metric: Metric
    answer: Answer
    bound: str
    decisions: tuple[DecisionView, ...]
    pictures: tuple[plots.Picture, ...]

    @property
    def asked(self) -> bool:
        """Whether the task has a setting that the statement is about."""
        return any(d.setting for d in self.decisions)


@dataclass(frozen=True)
class Failure:
    """The first of the failed trials of an arm in a setting that ended with the same line."""

    label: str
    setting: str
    replicate: int
    last: str
    error: str
    more: int


def write_report(results: Sequence[tuple[Run, Verdict]], folder: str | Path) -> Path:
    """Write ``index.html`` and one page for each result.

    Parameters
    ----------
    results
        Runs with their verdicts; several of one claim (on different data) get a page each.
    folder
        Where to write; made if it is missing. Pages of the same name are replaced, other files are left alone.

    Returns
    -------
    Path
        The index.

    Raises
    ------
    InputError
        ``folder`` is a file, or cannot be written to.
    """
    folder = Path(folder)
    pages, taken = [], {"index"}
    for run, verdict in results:
        name = _file_name(run.claim.slug, taken)
        pages.append(_context(run, verdict) | {"file": f"{name}.html"})
    texts = {}
    for page in pages:
        claim: Claim = page["claim"]
        title = f"{claim.slug}: {page['verdict'].answer} · assay"
        texts[page["file"]] = _render("claim.html", **page, title=title, description=claim.question)
    tally = _tally([v.answer for _, v in results])
    texts["index.html"] = _render("index.html", pages=pages, tally=tally, title="assay: claims", description=tally)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise InputError(f"the report cannot be written to {str(folder)!r}: {e.strerror or e}") from e
    return folder / "index.html"


def verdict_html(run: Run, verdict: Verdict) -> str:
    """A fragment of HTML with the answer and the comparisons that decided, for ``_repr_html_`` in notebooks."""
    return _render("fragment.html", **_context(run, verdict, pictures=False))


def to_markdown(run: Run, verdict: Verdict) -> str:
    """The whole report, but for pictures and tracebacks, as Markdown."""
    c = _context(run, verdict, pictures=False)
    claim, text = run.claim, wording.markdown_text
    out = [f"# {text(claim.question)}", ""]
    out += [f"**{wording.SYMBOLS[verdict.answer]} {verdict.answer}.** {c['summary']}", ""]
    out += [
        f"{text(claim.title)} ({wording.markdown_code(claim.slug)}), measured on {text(run.title)}: "
        f"{text(c['amount'])}, scale {run.key.scale}{', ' + c['dates'] if c['dates'] else ''}.",
        "",
    ]
    out += [f"- Warning: {text(w)}" for w in verdict.warnings] + [""] * bool(verdict.warnings)
    for s in c["statements"]:
        aside = "" if s.statement.decides else " (shown, does not decide)"
        aside = aside if s.asked else " (not asked of this task)"
        out += [f"## {wording.SYMBOLS[s.answer]} {text(s.statement.text)}{aside}", ""]
        out += [f"{text(wording.formula(s.statement, claim))}; {s.metric.better} is better.", ""]
        head: tuple[str, ...] = ("Setting", "Against", "Effect", "95% interval", "Bound", "n", "Answer", "Why")
        rows: list[tuple[object, ...]] = [
            (d.setting, r.against + " (strongest)" * r.decides, r.effect, r.interval, s.bound, r.n, r.answer, r.reason)
            for d in s.decisions
            for r in d.rows
        ]
        out += [wording.markdown_table(head, rows, numeric=(2, 3, 4, 5)), ""]
    if c["reported"]:
        out += ["## What the paper reported", "", "Not measured here.", ""]
        rows = [(s.text, s.reported.text, s.reported.setting, s.reported.source) for s in c["reported"]]
        out += [wording.markdown_table(("Statement", "Reported by the paper", "Setting", "Where"), rows), ""]
    out += [
        "## All arms",
        "",
        f"Median over the {text(wording.units(claim.unit))} (mean; quartiles). All measured here.",
        "",
    ]
    for t in c["tables"]:
        head = ("Arm", "Role", "n", *map(wording.labelled, t.metrics))
        rows = [
            (r.label, r.role, f"{r.n}" + f", {r.failed} failed" * bool(r.failed), *map(_cell_text, r.cells))
            for r in t.rows
        ]
        out += [f"### {text(t.title)}", "", wording.markdown_table(head, rows, numeric=range(2, len(head))), ""]
    out += curves_markdown(run, "##")
    if run.skipped or c["failures"]:
        out += ["## Arms that did not run", ""]
        out += [f"- {text(wording.arm_label(claim, a))}: {text(why)}" for a, why in run.skipped.items()]
        for f in c["failures"]:
            more = f" and {f.more} more like it" if f.more else ""
            out += [f"- {text(f.label)}, {text(f.setting)}, {text(claim.unit)} {f.replicate}: {text(f.last)}{more}"]
        out += [""]
    if claim.notes:
        out += ["## Notes", "", *(f"- {text(n)}" for n in claim.notes), ""]
    out += ["## How to reproduce it", "", "```", c["command"].replace("```", "'''"), "```", ""]
    out += [f"- {name}: {text(value)}" for name, value in c["facts"]]
    for e in c["environments"]:
        out += [f"- {text(e['title'])}: " + "; ".join(f"{text(k)} {text(v)}" for k, v in e["rows"])]
    return "\n".join(out) + "\n"


def curves_markdown(run: Run, level: str) -> list[str]:
    """Lines with the growths as tables, and the arms on each Pareto front."""
    out = []
    for growth in run.claim.growths:
        head, rows = charts.growth_table(run, growth)
        if rows:
            out += [f"{level} {wording.markdown_text(growth.text)}", "", charts.growth_note(growth), ""]
            out += [wording.markdown_table(head, rows, numeric=range(1, len(head))), ""]
    for frontier in run.claim.frontiers:
        sentence = charts.front_sentence(run, frontier)
        if sentence:
            out += [f"{level} {wording.markdown_text(frontier.text)}", "", wording.markdown_text(sentence), ""]
    return out


def _cell_text(cell: Cell) -> str:
    return f"{cell.value} ({cell.spread})" if cell.spread else cell.value


@cache
def _environment() -> jinja2.Environment:
    """Jinja with everything escaped; an unknown name in a template is an error, never an empty string."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("assay.bench", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(symbols=wording.SYMBOLS, keys=wording.KEYS, version=assay.__version__)
    return environment


def _render(template: str, **context: Any) -> str:
    return _environment().get_template(template).render(**context)


def _file_name(slug: str, taken: set[str]) -> str:
    """A name that stays in the folder and is not taken: slugs of other packages may be anything."""
    base = re.sub(r"[^A-Za-z0-9_-]+", "-", slug).strip("-") or "claim"
    name, i = base, 2
    while name.lower() in taken:
        name, i = f"{base}-{i}", i + 1
    taken.add(name.lower())
    return name


def _tally(answers: Sequence[Answer]) -> str:
    count = Counter(answers)
    parts = [f"{count[a]} {a}" for a in wording.SYMBOLS if count[a]]
    if not parts:
        return "No claim has been run yet."
    return f"{len(answers)} claim{'s' * (len(answers) != 1)}: {', '.join(parts)}."


def _context(run: Run, verdict: Verdict, pictures: bool = True) -> dict[str, Any]:
    """Everything that a page says, with numbers already in words."""
    claim = run.claim
    url = claim.paper.url if claim.paper is not None else ""
    drawn = [*(charts.growth_chart(run, g) for g in claim.growths if pictures)]
    drawn += [charts.frontier_chart(run, f) for f in claim.frontiers if pictures]
    return {
        "run": run,
        "claim": claim,
        "verdict": verdict,
        "summary": wording.summary(verdict),
        "amount": _amount(run),
        "units": wording.units(claim.unit),
        "dates": _dates(run.trials),
        "paper_url": url if re.match(r"https?://", url) else "",
        "statements": statement_views(run, verdict, pictures),
        "reported": [s for s in claim.statements if s.reported is not None],
        "tables": arm_tables(run),
        "charts": [c for c in drawn if c is not None],
        "failures": failures(run),
        "command": wording.command(run),
        "facts": _facts(run),
        "environments": _environments(run.trials),
        "label": lambda name: wording.arm_label(claim, name),
    }


def statement_views(run: Run, verdict: Verdict, pictures: bool = True) -> list[StatementView]:
    """The decisions of a verdict by statement, in the claim's order."""
    claim, views = run.claim, []
    for statement in claim.statements:
        decisions = [d for d in verdict.decisions if d.statement.name == statement.name]
        if not decisions:
            continue
        metric = claim.metric(statement.metric)
        views.append(
            StatementView(
                statement=statement,
                metric=metric,
                answer=overall([d.answer for d in decisions if d.setting]),
                bound=wording.bound(statement, metric),
                decisions=tuple(DecisionView(d.setting, d.answer, _rows(d, claim, metric)) for d in decisions),
                pictures=tuple(plots.pictures(decisions, claim)) if pictures else (),
            )
        )
    return views


def overall(answers: Sequence[Answer]) -> Answer:
    """The answer of several decisions that must all hold."""
    if "does not hold" in answers:
        return "does not hold"
    return "holds" if answers and set(answers) == {"holds"} else "undecided"


def _rows(decision: Decision, claim: Claim, metric: Metric) -> tuple[Row, ...]:
    s, dash = decision.statement, wording.MISSING
    if not decision.comparisons:
        return (Row(dash, dash, dash, 0, decision.answer, decision.reason, False),)
    return tuple(
        Row(
            against=wording.against(c, s, claim),
            effect=wording.effect(c, s, metric),
            interval=wording.interval(c, metric),
            n=c.n,
            answer=c.answer,
            reason=c.reason,
            decides=c is decision.deciding and len(decision.comparisons) > 1,
        )
        for c in decision.comparisons
    )


def arm_tables(run: Run) -> list[ArmTable]:
    """Median, mean and quartiles of every metric of every arm; timed arms apart from the others."""
    claim, tables = run.claim, []
    arms = [claim.arm(a) for a in run.arms]
    races = list(dict.fromkeys(a.race for a in arms))
    for setting in run.settings:
        for race in sorted(races, key=lambda r: r is not None):
            here = [a for a in expected_arms(arms, setting) if a.race == race and a.name not in run.skipped]
            found = {a.name: list(run.select(setting, a.name).values()) for a in here}
            metrics = _metrics(claim, [t for trials in found.values() for t in trials])
            if not metrics and not any(found.values()):
                continue
            title = setting if race is None else f"{setting}, race: {race}"
            rows = tuple(_arm_row(a, found[a.name], metrics) for a in here)
            tables.append(ArmTable(title, tuple(metrics), rows))
    return tables


def _metrics(claim: Claim, trials: Sequence[Trial]) -> list[Metric]:
    """The metrics that the trials report, the claim's own first and in its order."""
    seen = {name for t in trials for name in t.metrics}
    own = [m for m in claim.metrics if m.name in seen]
    # The quartiles of a race are the spread of "seconds" within one trial; the table shows the spread over trials.
    rest = sorted(seen - {m.name for m in own} - {"seconds_low", "seconds_high"})
    return own + [Metric(name, name, None, "s" if name == "seconds" else "") for name in rest]


def _arm_row(arm: Arm, trials: Sequence[Trial], metrics: Sequence[Metric]) -> ArmRow:
    ok = [t for t in trials if t.status == "ok"]
    cells = tuple(_cell([t.metrics[m.name] for t in ok if m.name in t.metrics], m) for m in metrics)
    return ArmRow(arm.label or arm.name, arm.role, len(ok), len(trials) - len(ok), cells)


def _cell(values: Sequence[float], metric: Metric) -> Cell:
    finite = np.asarray([v for v in values if np.isfinite(v)], dtype=float)
    lost = f"; {len(values) - len(finite)} not finite" if len(finite) < len(values) else ""
    if not len(finite):
        return Cell(wording.MISSING, lost[2:])
    low, middle, high = (float(q) for q in np.quantile(finite, [0.25, 0.5, 0.75]))
    if low == high and finite.min() == finite.max():
        text = wording.exact(middle) if metric.counted else wording.number(middle)
        return Cell(text, ("the same in all" if len(finite) > 1 else "") + lost)
    shown, first, last, mean = wording.together(middle, low, high, float(finite.mean()))
    return Cell(shown, f"mean {mean}; {first} to {last}{lost}")


def failures(run: Run) -> list[Failure]:
    """Failed trials, those of an arm and setting that ended with the same line told once."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for t in run.trials:
        if t.status == "failed":
            groups.setdefault((t.arm, t.setting, error_line(t.error)), []).append(t)
    return [
        Failure(wording.arm_label(run.claim, arm), setting, same[0].replicate, last, same[0].error, len(same) - 1)
        for (arm, setting, last), same in groups.items()
    ]


def _amount(run: Run) -> str:
    unit = f"{run.replicates} {wording.units(run.claim.unit, run.replicates)}"
    many = len(run.settings)
    return unit if many == 1 else f"{unit} in each of {many} settings"


def _dates(trials: Sequence[Trial]) -> str:
    days = sorted({t.finished[:10] for t in trials if t.finished})
    if not days:
        return ""
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def _facts(run: Run) -> list[tuple[str, str]]:
    expected = sum(len(expected_arms([run.claim.arm(a) for a in run.arms], s)) for s in run.settings) * run.replicates
    ok = sum(t.status == "ok" for t in run.trials)
    seconds = sum(t.seconds for t in run.trials)
    memory = max((t.peak_rss for t in run.trials), default=0)
    device = max((t.peak_device for t in run.trials), default=0)
    facts = [
        ("Data", run.title),
        ("Seed", str(run.key.seed)),
        ("Device", run.key.device),
        ("Trials", f"{ok:,} of {expected:,} finished without an error"),
        ("Time in arms", f"{wording.number(seconds, 3)} s"),
        ("Peak memory", f"{memory / 2**20:,.0f} MiB resident" if memory else ""),
        ("Peak on device", f"{device / 2**20:,.0f} MiB" if device else ""),
        ("Finished", _dates(run.trials)),
        ("Workload", run.key.workload[:16]),
        ("Code", run.key.code[:16]),
        ("assay", assay.__version__),
    ]
    return [(name, value) for name, value in facts if value]


def _environments(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Machines and library versions, each that differs from the others once."""
    distinct: dict[str, list[Mapping[str, Any]]] = {}
    for t in trials:
        if t.environment:
            distinct.setdefault(json.dumps(t.environment, sort_keys=True, default=str), []).append(t.environment)
    total = sum(len(same) for same in distinct.values())
    found = []
    for same in distinct.values():
        e = same[0]
        rows = [("Machine", wording.machine(e)), ("Versions", wording.versions(e)), ("Commit", wording.commit(e))]
        of = "" if len(distinct) == 1 else f" of {len(same)} of {total} trials"
        found.append({"title": f"Machine and versions{of}", "rows": [(k, v) for k, v in rows if v]})
    return found
