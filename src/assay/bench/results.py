"""Results that are committed: one JSON file a claim, and the tables of the documentation that are made from them.

A file holds all that a page or a table says, so that both can be made again without measuring. Numbers have seven
significant digits, keys keep one order, and a trial takes a line: ``git diff`` shows what a new measurement changed.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assay.bench import provenance, registry, wording
from assay.bench.claim import Arm, Claim, Frontier, Growth, Metric, Paper, Reported, ScaleName, Statement
from assay.bench.report import arm_tables, curves_markdown
from assay.bench.trial import Run, RunKey, Trial, error_line
from assay.bench.verdict import Comparison, Decision, Verdict
from assay.errors import InputError

SCHEMA = 1
DIGITS = 7
LINE = 118
Result = Mapping[str, Any]

INTRODUCTION = """\
# Results

What `assay run` measured on the default workloads, whatever it says. The file is written by `scripts/generate.py` from
`results/*.json`; `make results CLAIM=slug` measures a claim anew. Effects are paired by replicate, with 95% intervals;
the strongest baseline decides ([how to read a verdict](docs/verdicts.md)).
The papers' numbers come from other models, data and machines: they have tables of their own.
"""


def export(run: Run, verdict: Verdict, folder: str | Path) -> Path:
    """Write ``SLUG.json`` to the folder, which is made if it is missing, and return its path."""
    path = Path(folder) / f"{run.claim.slug}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(to_result(run, verdict)) + "\n", encoding="utf-8")
    return path


def load_results(folder: str | Path) -> list[Result]:
    """All results of a folder, by slug; JSON files of another kind, which name no claim, are left alone.

    Raises
    ------
    InputError
        A file is not a result, or comes from a newer assay.
    """
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(result, dict) and "slug" not in result:
                continue
            schema = result["schema"]
            if schema > SCHEMA:
                raise InputError(f"{path} has schema {schema}, from a newer assay; this one reads up to {SCHEMA}")
            restore(result)
        except InputError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise InputError(f"{path} is not a result of assay: {type(e).__name__}: {e}") from e
        found.append(result)
    return sorted(found, key=lambda r: r["slug"])


def is_stale(result: Result) -> bool:
    """Whether the sources of the claim or the method have changed since they were measured, or are gone."""
    try:
        claim = registry.load(result["slug"])
    except InputError:
        return True
    return bool(provenance.fingerprint(claim) != result["code"])


def to_result(run: Run, verdict: Verdict) -> dict[str, Any]:
    """A run and its verdict as values that JSON can hold."""
    claim = run.claim
    order = {a: i for i, a in enumerate(run.arms)}
    places = {s: i for i, s in enumerate(run.settings)}
    trials = sorted(run.trials, key=lambda t: (places.get(t.setting, -1), order.get(t.arm, -1), t.replicate))
    environments: list[Mapping[str, Any]] = []
    for t in trials:
        if t.environment not in environments:
            environments.append(t.environment)
    days = sorted(t.finished[:10] for t in trials if t.finished)
    return {
        "schema": SCHEMA,
        "slug": claim.slug,
        "title": claim.title,
        "family": claim.family,
        "question": claim.question,
        "paper": dataclasses.asdict(claim.paper) if claim.paper is not None else None,
        "answer": verdict.answer,
        "scale": run.key.scale,
        "date": days[-1] if days else datetime.now(UTC).date().isoformat(),
        "command": wording.command(run),
        "device": run.key.device,
        "seed": run.key.seed,
        "replicates": run.replicates,
        "unit": claim.unit,
        "workload": {"title": run.title, "digest": run.key.workload, "options": _plain(run.options)},
        "code": run.key.code,
        "environments": [_plain(e) for e in environments],
        "settings": list(run.settings),
        "metrics": [dataclasses.asdict(m) for m in claim.metrics],
        "arms": [
            {"name": a.name, "role": a.role, "label": a.label, "race": a.race, "where": list(a.where)}
            for a in claim.arms
        ],
        "asked": list(run.arms),
        "skipped": dict(run.skipped),
        "warnings": list(verdict.warnings),
        "notes": list(claim.notes),
        "statements": [_plain(dataclasses.asdict(s)) for s in claim.statements],
        "growths": [_plain(dataclasses.asdict(g)) for g in claim.growths],
        "frontiers": [dataclasses.asdict(f) for f in claim.frontiers],
        "decisions": [_from_decision(d) for d in verdict.decisions],
        "trials": [_from_trial(t, environments) for t in trials],
    }


def _from_decision(d: Decision) -> dict[str, Any]:
    comparisons = [
        {
            "baseline": c.baseline,
            "answer": c.answer,
            "n": c.n,
            "effect": rounded(c.effect),
            "low": rounded(c.low),
            "high": rounded(c.high),
            "reason": c.reason,
            "replicates": list(c.replicates),
            "effects": [rounded(v) for v in c.effects],
        }
        for c in d.comparisons
    ]
    deciding = next((i for i, c in enumerate(d.comparisons) if c is d.deciding), None)
    return {
        "statement": d.statement.name,
        "setting": d.setting,
        "answer": d.answer,
        "reason": d.reason,
        "deciding": deciding,
        "comparisons": comparisons,
    }


def _from_trial(t: Trial, environments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"setting": t.setting, "arm": t.arm, "replicate": t.replicate}
    if t.status == "ok":
        row["metrics"] = {name: rounded(v) for name, v in t.metrics.items()}
    else:
        # The frames name folders of one machine; one line says what went wrong.
        row["error"] = error_line(t.error)
    row["seconds"] = rounded(t.seconds, 3)
    row["peak_mib"] = round(t.peak_rss / 2**20)
    if t.peak_device:
        row["peak_device_mib"] = round(t.peak_device / 2**20)
    where = environments.index(t.environment)
    return row | ({"environment": where} if where else {})


def restore(result: Result) -> tuple[Run, Verdict]:
    """The run and the verdict that a result was made of, but for what it leaves out (arms cannot run again)."""
    statements = {s["name"]: _statement(s) for s in result["statements"]}
    claim = Claim(
        slug=result["slug"],
        title=result["title"],
        family=result["family"],
        paper=Paper(**result["paper"]) if result["paper"] is not None else None,
        question=result["question"],
        statements=tuple(statements.values()),
        metrics=tuple(Metric(**m) for m in result["metrics"]),
        arms=tuple(Arm(run=_gone, **{**a, "where": tuple(a["where"])}) for a in result["arms"]),
        workload=object,
        scales={},
        unit=result["unit"],
        snippet="",
        example="",
        notes=tuple(result["notes"]),
        growths=tuple(_growth(g) for g in result.get("growths", ())),
        frontiers=tuple(Frontier(**f) for f in result.get("frontiers", ())),
    )
    work, scale = result["workload"], result["scale"]
    key = RunKey(claim.slug, scale, work["digest"], result["code"], result["device"], result["seed"])
    run = Run(
        claim=claim,
        key=key,
        title=work["title"],
        settings=tuple(result["settings"]),
        replicates=result["replicates"],
        arms=tuple(result["asked"]),
        trials=tuple(_trial(t, result) for t in result["trials"]),
        skipped=result["skipped"],
        options=work["options"],
    )
    decisions = tuple(_decision(d, statements) for d in result["decisions"])
    units = {s.metric: claim.metric(s.metric).unit for s in statements.values()}
    return run, Verdict(result["answer"], decisions, tuple(result["warnings"]), units)


def _gone(shared: Any, replicate: int) -> Any:
    raise RuntimeError("this arm was read from a result and cannot run")


def _statement(s: Mapping[str, Any]) -> Statement:
    reported = Reported(**s["reported"]) if s["reported"] is not None else None
    return Statement(**{**s, "baselines": tuple(s["baselines"]), "where": tuple(s["where"]), "reported": reported})


def _growth(g: Mapping[str, Any]) -> Growth:
    reported = Reported(**g["reported"]) if g["reported"] is not None else None
    return Growth(**{**g, "arms": tuple(g["arms"]), "reported": reported})


def _trial(t: Mapping[str, Any], result: Result) -> Trial:
    return Trial(
        setting=t["setting"],
        replicate=t["replicate"],
        arm=t["arm"],
        status="failed" if "error" in t else "ok",
        metrics={name: _number(v) for name, v in t.get("metrics", {}).items()},
        error=t.get("error", ""),
        seconds=_number(t["seconds"]),
        peak_rss=t["peak_mib"] * 2**20,
        peak_device=t.get("peak_device_mib", 0) * 2**20,
        finished=result["date"],
        environment=result["environments"][t.get("environment", 0)],
    )


def _decision(d: Mapping[str, Any], statements: Mapping[str, Statement]) -> Decision:
    comparisons = tuple(
        Comparison(
            baseline=c["baseline"],
            answer=c["answer"],
            reason=c["reason"],
            n=c["n"],
            effect=_number(c["effect"]),
            low=_number(c["low"]),
            high=_number(c["high"]),
            replicates=tuple(c["replicates"]),
            effects=tuple(_number(v) for v in c["effects"]),
        )
        for c in d["comparisons"]
    )
    deciding = comparisons[d["deciding"]] if d["deciding"] is not None else None
    return Decision(statements[d["statement"]], d["setting"], d["answer"], d["reason"], comparisons, deciding)


def _number(value: float | str | None) -> float:
    return math.nan if value is None else float(value)


def rounded(value: float, digits: int = DIGITS) -> float | str | None:
    """A number for JSON: ``digits`` significant digits; NaN is null, and infinities are told in words."""
    value = float(value)
    if math.isnan(value):
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)


def _plain(value: Any) -> Any:
    """What JSON can hold; anything else as its text."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def dump(value: Any, indent: int = 0, flat: bool = False) -> str:
    """JSON in which whatever fits on a line stands on one, and each trial does, however long (``flat``)."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if flat or len(text) + indent <= LINE or not isinstance(value, dict | list):
        return text
    if isinstance(value, dict):
        items = []
        for k, v in value.items():
            rows = k == "trials" and isinstance(v, list)
            shown = _lines([dump(t, flat=True) for t in v], indent + 1, "[]") if rows else dump(v, indent + 1)
            items.append(f"{json.dumps(k, ensure_ascii=False)}: {shown}")
        return _lines(items, indent, "{}")
    return _lines([dump(v, indent + 1) for v in value], indent, "[]")


def _lines(items: Sequence[str], indent: int, marks: str) -> str:
    if not items:
        return marks
    pad = "\n" + " " * (indent + 1)
    return f"{marks[0]}{pad}" + f",{pad}".join(items) + f"\n{' ' * indent}{marks[1]}"


def results_markdown(results: Iterable[Result]) -> str:
    """The text of RESULTS.md: an overview, then each claim with what was measured and what its paper reported."""
    results = list(results)
    out = [INTRODUCTION]
    if not results:
        return f"{INTRODUCTION}\nNothing has been measured yet.\n"
    head = ("Claim", "Question", "Answer", "Scale", "Measured on", "Date")
    rows = [(r["slug"], r["question"], _answer(r), r["scale"], r["workload"]["title"], r["date"]) for r in results]
    out.append(wording.markdown_table(head, rows) + "\n")
    for r in results:
        out.append(f"## {r['slug']}\n\n{wording.markdown_text(r['title'])}.\n\n{result_markdown(r)}")
    return "\n".join(out)


def _answer(result: Result) -> str:
    stale = " (stale)" if is_stale(result) else ""
    return f"{wording.SYMBOLS[result['answer']]} {result['answer']}{stale}"


def result_markdown(result: Result) -> str:
    """One claim's answer, measured table, table of the paper's numbers, and how it was measured."""
    run, verdict = restore(result)
    claim, text = run.claim, wording.markdown_text
    out = [f"**{wording.SYMBOLS[verdict.answer]} {verdict.answer}.** {wording.summary(verdict)}", ""]
    if is_stale(result):
        out += [f"**Stale:** the method or its claim has changed since this was measured; "
                f"`make results CLAIM={claim.slug}` measures it anew.", ""]  # fmt: skip
    rows = []
    for d in verdict.decisions:
        aside = "" if d.statement.decides else " (does not decide)"
        metric = claim.metric(d.statement.metric)
        for c in d.comparisons:
            against = wording.against(c, d.statement, claim)
            rows.append((
                d.statement.text + aside,
                d.setting,
                wording.effect(c, d.statement, metric),
                wording.interval(c, metric),
                wording.bound(d.statement, metric),
                f"{wording.SYMBOLS[c.answer]} {c.answer}",
                against + (" (strongest)" if c is d.deciding and len(d.comparisons) > 1 else ""),
                c.n,
            ))  # fmt: skip
        if not d.comparisons:
            answer = f"{wording.SYMBOLS[d.answer]} {d.answer}: {d.reason}"
            bound, dash = wording.bound(d.statement, metric), wording.MISSING
            rows.append((d.statement.text + aside, d.setting, dash, dash, bound, answer, dash, 0))
    head = ("Statement", "Setting", "Measured effect", "95% interval", "Bound", "Answer", "Against", "n")
    out += [wording.markdown_table(head, rows, numeric=(2, 3, 4, 7)), ""]
    out += _planes(run) + curves_markdown(run, "####")
    reported = [s for s in claim.statements if s.reported is not None]
    if reported:
        table = [(s.text, s.reported.text, s.reported.setting, s.reported.source) for s in reported if s.reported]
        out += ["Reported by the paper, not measured here:", ""]
        out += [wording.markdown_table(("Statement", "The paper’s number", "Its setting", "Where"), table), ""]
    many = f" in each of {len(run.settings)} settings" if len(run.settings) > 1 else ""
    unit = f"{run.replicates} {text(wording.units(claim.unit, run.replicates))}{many}"
    out += [f"- Measured on {text(run.title)}: {unit}, scale {result['scale']}, {result['date']}"]
    out += [f"- Command: {wording.markdown_code(result['command'])}"]
    for e in result["environments"]:
        lines = (("Machine", wording.machine(e)), ("Versions", wording.versions(e)), ("Commit", wording.commit(e)))
        out += [f"- {name}: {text(value)}" for name, value in lines if value]
    out += [f"- Warning: {text(w)}" for w in result["warnings"]]
    for arm, why in result["skipped"].items():
        if not any(why in w for w in result["warnings"]):
            out.append(f"- Skipped: {text(wording.arm_label(claim, arm))}, {text(why)}")
    out += [f"- {text(n)}" for n in result["notes"]]
    return "\n".join(out) + "\n"


def _planes(run: Run) -> list[str]:
    """The medians of all arms, where a claim is about where they stand among each other."""
    out = []
    for t in arm_tables(run) if run.claim.frontiers else ():
        head = ("Arm", *map(wording.labelled, t.metrics))
        rows = [(r.label, *(c.value for c in r.cells)) for r in t.rows]
        title = wording.markdown_text(t.title)
        out += [f"All arms, {title}: medians over the {wording.units(run.claim.unit)}, measured here", ""]
        out += [wording.markdown_table(head, rows, numeric=range(1, len(head))), ""]
    return out


def methods_table(results: Iterable[Result]) -> str:
    """The table of methods for the README: what there is, how to import it, and what was measured."""
    measured = {r["slug"]: r for r in results}
    lines = ["| Method | Family | What it is | Import | Measured |", "|---|---|---|---|---|"]
    for entry in _own():
        if entry.members:
            line = f"compares {', '.join(entry.members)}"
        else:
            line = f"`{import_line(registry.load(entry.slug))}`"
        r = measured.get(entry.slug)
        answer = f"[{_answer(r)}](RESULTS.md#{entry.slug})" if r is not None else "not measured yet"
        what = wording.markdown_text(entry.title)
        lines.append(f"| [{entry.slug}]({card_path(entry)}) | {entry.family} | {what} | {line} | {answer} |")
    return "\n".join(lines)


def import_line(claim: Claim) -> str:
    """The line of the claim's snippet that imports the part.

    Raises
    ------
    ValueError
        The snippet has none.
    """
    for line in claim.snippet.splitlines():
        if line.startswith(("from assay", "import assay")):
            return line.strip()
    raise ValueError(f"the snippet of claim {claim.slug!r} imports nothing from assay")


def _own() -> list[registry.Entry]:
    """The claims of this repository, in the order of the table of slugs; comparisons come last."""
    return [e for e in registry.entries().values() if e.target.startswith("assay.claims.")]


def card_path(entry: registry.Entry) -> str:
    """Where the card of a method, or the page of a comparison, lies in the repository."""
    return f"docs/{'comparisons' if entry.members else 'methods'}/{entry.slug}.md"


def replace_block(text: str, name: str, block: str) -> str:
    """Put a block between ``<!-- NAME:begin -->`` and ``<!-- NAME:end -->``.

    Raises
    ------
    ValueError
        The text does not hold each of the two marks once, in that order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs one {begin} and after it one {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n\n{block.strip()}\n\n{end}{after}"


def generated(root: Path) -> dict[Path, str]:
    """The text that every generated file of the repository should have.

    Raises
    ------
    InputError
        A result cannot be read, or a file that should hold a generated block is missing or has no marks for it.
    """
    results = load_results(root / "results")
    measured = {r["slug"]: r for r in results}
    blocks = {root / "README.md": ("methods", methods_table(results))}
    for entry in _own():
        r = measured.get(entry.slug)
        missing = f"Not measured yet; `make results CLAIM={entry.slug}` does it."
        blocks[root / card_path(entry)] = (
            "results",
            missing if r is None else result_markdown(r),
        )
    texts = {root / "RESULTS.md": results_markdown(results)}
    for path, (name, block) in blocks.items():
        try:
            texts[path] = replace_block(path.read_text(encoding="utf-8"), name, block)
        except (OSError, ValueError) as e:
            raise InputError(f"{path.relative_to(root)}: {e.strerror if isinstance(e, OSError) else e}") from e
    return texts


def differences(texts: Mapping[Path, str], root: Path) -> list[str]:
    """A unified diff for each file that is not as it should be."""
    out = []
    for path, text in texts.items():
        old = path.read_text(encoding="utf-8") if path.exists() else ""
        if old != text:
            name = str(path.relative_to(root))
            lines = difflib.unified_diff(old.splitlines(), text.splitlines(), name, f"{name} (generated)", lineterm="")
            out.append("\n".join(lines))
    return out


def measure(
    slugs: Sequence[str],
    folder: Path,
    *,
    scale: ScaleName = "desk",
    store: str | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Run claims on their default workloads and export each as soon as it is done.

    Parameters
    ----------
    slugs
        Which; all of this repository where it is empty.
    folder
        Where the results go.
    scale
        ``"smoke"``, ``"desk"`` or ``"paper"``.
    store
        Where trials are kept; by default a fresh store that is removed afterwards, so that all is measured anew.
    say
        Gets a line of progress at a time.
    """
    from assay.bench import api

    names = [registry.find(s).slug for s in slugs] or [e.slug for e in _own()]
    paths = []
    with tempfile.TemporaryDirectory(prefix="assay-results-") as scratch:
        for i, slug in enumerate(names, 1):
            say(f"[{i}/{len(names)}] {slug}, scale {scale}")
            start = time.perf_counter()
            done = api.run(slug, scale=scale, store=store or str(Path(scratch) / "trials.sqlite"))
            paths.append(export(done.run, done.verdict, folder))
            took = time.perf_counter() - start
            say(f"[{i}/{len(names)}] {slug}: {done.verdict.answer}, {took:.0f} s, written to {paths[-1]}")
    return paths
