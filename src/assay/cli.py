"""The command ``assay``: parse, call, print. What it prints is made of what :mod:`assay.bench.api` returns."""

from __future__ import annotations

import dataclasses
import inspect
import json as jsonlib
import os
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from cyclopts import App, CycloptsError, Group, Parameter

import assay
from assay.bench import registry
from assay.errors import InputError, StoreError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from assay.bench.api import Result
    from assay.bench.claim import Claim
    from assay.bench.verdict import Answer, Decision

EXAMPLES = """
**Examples**

- `assay list` : which claims there are
- `assay card kivi` : what KIVI is, and the lines that use it
- `assay run rqr` : the paper's claim on built-in data
- `assay run rqr --data prices.csv --target price` : the same claim on your table
- `assay run rqr --help` : the options of that claim
- `assay run kivi quest cam --model ./my-llama --text my.txt` : methods of one kind in one table
- `assay results` : what has been measured so far
- `assay report` : the same as web pages
"""

app = App(
    name="assay",
    help="Run the claims of research papers on your own machine, model and data.",
    help_epilogue=EXAMPLES,
    help_format="markdown",
    version=assay.__version__,
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)


@app.command(name="list", help_epilogue="")
def list_() -> None:
    """List the claims that can be run, one a line: slug, family, what it is."""
    from rich.table import Table

    table = Table("slug", "family", "what it is", box=None, pad_edge=False, header_style="bold")
    for entry in registry.entries().values():
        table.add_row(entry.slug, entry.family, entry.title)
    _console().print(table)


@app.command(help_epilogue="")
def card(slug: str, /) -> None:
    """Show what a method is: its paper, the snippet that uses it, what its claim compares, the paper's numbers.

    Example: `assay card kivi`

    Parameters
    ----------
    slug
        A method's name as in `assay list`.
    """
    claim = registry.load(slug)
    print(_card(claim))


@dataclass
class _RunOptions:
    """Options that every claim has."""

    scale: Literal["smoke", "desk", "paper"] = "desk"
    """smoke takes seconds and decides little, desk takes minutes on two cores, paper is the paper's own setting."""
    replicates: int | None = None
    """How many paired repetitions (seeds, documents, ...); the scale's own number by default."""
    arms: Annotated[list[str] | None, Parameter(consume_multiple=True, negative=())] = None
    """Run these arms only, e.g. `--arms rqr_w qr`."""
    device: str | None = None
    """cpu, cuda or cuda:1; the claim's first device by default."""
    seed: int = 0
    """Base of all seeds."""
    executor: str = "local"
    """local (processes on this machine), ray (a local cluster), or a cluster: host:port, or auto."""
    jobs: int | None = None
    """Worker processes of the local executor; one per core by default."""
    store: str | None = None
    """SQLite file or database URL (postgresql+psycopg://...); $ASSAY_STORE or the user's data folder by default."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print one JSON object for each claim instead of tables."""
    report: Path | None = None
    """Also write the report page to this folder."""
    quiet: Annotated[bool, Parameter(negative=())] = False
    """No progress bar."""


def _run(slugs: Sequence[str], options: _RunOptions, workload: dict[str, Any]) -> int:
    """Run claims one after the other; a workload option goes to every claim that knows it."""
    from assay.bench import api
    from assay.bench.report import write_report

    results = []
    for claim in [registry.load(slug) for slug in dict.fromkeys(slugs)]:
        names = {f.name for f in dataclasses.fields(claim.workload)}
        result = api.run(
            claim.slug,
            scale=options.scale,
            replicates=options.replicates,
            arms=options.arms,
            device=options.device,
            seed=options.seed,
            executor=options.executor,
            jobs=options.jobs,
            store=options.store,
            progress=not options.quiet,
            **{k: v for k, v in workload.items() if k in names},
        )
        results.append(result)
        if options.json:
            print(jsonlib.dumps(_as_json(result), allow_nan=False))
        else:
            _print(result)
    if options.report is not None:
        index = write_report([(r.run, r.verdict) for r in results], options.report)
        print(f"Report: {index.resolve()}", file=sys.stderr if options.json else sys.stdout)
    return 1 if any(t.status == "failed" for r in results for t in r.run.trials) else 0


@app.command(name="run", help_epilogue="")
def _run_help(*slug: str) -> None:
    """Run claims: the method against its strongest alternatives, over several replicates, and decide.

    Every claim has options of its own, for your model and data; name it to see them: `assay run rqr --help`.

    Methods that a comparison knows (`assay list`) run as that comparison, in one table: `assay run kivi quest cam`.
    Name one alone to run its paper's claim.

    Trials are stored as they finish: an interrupted run resumes when it is started again, and nothing is computed
    twice. Exit code: 0 (whatever the answer), 1 if an arm failed, 2 for input that cannot be used, 130 for Ctrl-C.

    Examples: `assay run rqr`, `assay run kivi --scale smoke`, `assay run kivi --model ./my-llama --text my.txt`,
    `assay run rqr stein_thinning --replicates 20 --report out/`

    Parameters
    ----------
    slug
        One claim or several, as in `assay list`.
    """
    raise InputError("SLUG is missing: name one claim or several, e.g. `assay run rqr`; `assay list` shows them")


@app.command(help_epilogue="")
def results(
    slug: str | None = None, /, *, store: str | None = None, json: Annotated[bool, Parameter(negative=())] = False
) -> None:
    """Show what the store holds: every run, or the latest verdict of one claim.

    Examples: `assay results`, `assay results rqr`, `assay results rqr --store team.sqlite`

    Parameters
    ----------
    slug
        A claim; without it, all runs are listed.
    store
        SQLite file or database URL; $ASSAY_STORE or the user's data folder by default.
    json
        Print JSON instead of tables.
    """
    from assay.bench.api import stored

    found = stored(store, slug, latest=slug is not None)
    for result in found:
        if json:
            print(jsonlib.dumps(_as_json(result)))
        elif slug is not None:
            _print(result)
    if not json and slug is None:
        _print_runs(found)


@app.command(help_epilogue="")
def report(
    *slug: str,
    out: Path = Path("assay-report"),
    store: str | None = None,
    markdown: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Write the report: a page for each claim that the store holds, and an index. Opens from the file.

    Examples: `assay report`, `assay report rqr kivi --out site/`, `assay report rqr --markdown > rqr.md`

    Parameters
    ----------
    slug
        The claims to report; all that the store holds by default. The latest run of each is shown.
    out
        Folder to write to.
    store
        SQLite file or database URL; $ASSAY_STORE or the user's data folder by default.
    markdown
        Print Markdown instead of writing pages.
    """
    from assay.bench.api import stored
    from assay.bench.report import to_markdown, write_report

    found = [r for s in slug for r in stored(store, s, latest=True)] if slug else stored(store, latest=True)
    if markdown:
        print("\n\n".join(to_markdown(r.run, r.verdict) for r in found))
    else:
        print(f"Report: {write_report([(r.run, r.verdict) for r in found], out).resolve()}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        if tokens[:1] == ["run"]:
            slugs = _slugs(tokens[1:])
            if slugs:
                return int(_run_app(_chosen(slugs))(tokens[1:], exit_on_error=False, print_error=False) or 0)
        app(tokens, exit_on_error=False, print_error=False)
        return 0
    except CycloptsError as error:
        return _fail(str(error).strip(), "`assay --help` and `assay run SLUG --help` show what there is")
    except (InputError, StoreError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; finished trials are kept, the same command resumes", code=130)
    except BrokenPipeError:  # `assay list | head`
        # Python flushes standard output once more at exit; give it a place to go.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
        return 0


def _slugs(tokens: Sequence[str]) -> list[str]:
    """Claims named in the tokens after ``run``: those before the first option, else any token that is a claim."""
    leading = []
    for token in tokens:
        if token.startswith("-"):
            break
        leading.append(token)
    if leading:
        return [registry.find(token).slug for token in leading]
    known = registry.entries()
    return [t for t in tokens if t.replace("-", "_") in known]


def _chosen(slugs: Sequence[str]) -> list[str]:
    """The claims that these names ask for: a comparison, where it is about all of them, else each one."""
    found = [registry.find(slug).slug for slug in slugs]
    comparison = registry.comparison(found)
    return found if comparison is None else [comparison.slug]


def _run_app(slugs: Sequence[str]) -> App:
    """The parser of ``assay run SLUG...``: the common options and the workload fields of these claims."""
    claims = [registry.load(slug) for slug in slugs]
    names: dict[str, tuple[Any, dataclasses.Field[Any]]] = {}
    for claim in claims:
        hints = typing.get_type_hints(claim.workload)
        for f in dataclasses.fields(claim.workload):
            kind = _cli_type(hints[f.name])
            if kind is not None:
                names.setdefault(f.name, (kind, f))
    group = Group("Workload: your model, data and settings", sort_key=0)
    common = Group("Options of every claim", sort_key=1)
    # Two claims may give one option different defaults, so an option that was not set must stay unset.
    parameters = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                kind | None,
                Parameter(help=f.metadata.get("help", ""), group=group, negative=(), show_default=_shown(f)),
            ],
        )
        for name, (kind, f) in names.items()
    ]
    slug = inspect.Parameter(
        "slug", inspect.Parameter.VAR_POSITIONAL, annotation=Annotated[str, Parameter(help="The claims to run.")]
    )
    run = inspect.Parameter(
        "run_options",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[_RunOptions | None, Parameter(name="*", group=common)],
    )

    def command(*slug: str, run_options: _RunOptions | None = None, **workload: Any) -> int:
        chosen = {k: v for k, v in workload.items() if v is not None}
        return _run(_chosen(slug), run_options or _RunOptions(), chosen)

    command.__signature__ = inspect.Signature([slug, *parameters, run])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (slug, *parameters, run)}
    command.__doc__ = "\n\n".join(_summary(claim) for claim in claims)
    return App(
        name=f"assay run {' '.join(slugs)}",
        default_command=command,
        help_format="markdown",
        version_flags=[],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )


def _cli_type(hint: Any) -> Any:
    """The part of a field's type that can be given on a command line, or ``None`` if there is none."""
    simple = (str, int, float, bool, Path)
    if typing.get_origin(hint) in (Union, types.UnionType):
        kept = [k for k in (_cli_type(a) for a in typing.get_args(hint)) if k is not None]
        return Union[tuple(kept)] if kept else None  # noqa: UP007
    if hint in simple or typing.get_origin(hint) in (Literal, list, tuple):
        return hint
    return None


def _shown(f: dataclasses.Field[Any]) -> Any:
    """What ``--help`` shows as the default of a workload's field."""
    if f.default is None or f.default is dataclasses.MISSING:
        return False
    return lambda _: f.default


def _summary(claim: Claim) -> str:
    desk = claim.scales.get("desk")
    text = f"**{claim.slug}**: {claim.title}. {claim.question}"
    if desk is not None:
        text += f" At desk scale: {desk.replicates} replicates ({claim.unit})."
    return f"{text}\n\nExample: `{claim.example}`\n\nArms: {', '.join(a.name for a in claim.arms)}"


def _card(claim: Claim) -> str:
    """The card of a method as text."""
    lines = [
        f"{claim.slug}: {claim.title}",
        f"  {claim.question}",
        "",
        *_paper(claim),
        "  Use it",
        *(f"      {line}" for line in claim.snippet.strip().splitlines()),
        "",
        f"  Try it on your own: {claim.example}",
        "",
        "  What its claim says",
    ]
    for s in claim.statements:
        against = ", ".join(s.baselines) if s.baselines else f"the value {s.constant:g}"
        lines.append(f"    - {s.text} [{s.method} against {against}, by {claim.metric(s.metric).label}]")
        if s.reported is not None:
            lines.append(f"      the paper: {s.reported.text} ({s.reported.setting}; {s.reported.source})")
    lines += ["", f"  Arms      {', '.join(a.name for a in claim.arms)}"]
    lines += [f"  Devices   {', '.join(claim.devices)}", "", f"  assay run {claim.slug} --help   shows its options"]
    return "\n".join(lines)


def _paper(claim: Claim) -> list[str]:
    if claim.paper is None:
        return []
    p = claim.paper
    return [f"  Paper   {p.title}. {p.authors}. {p.venue}. {p.url}".rstrip(), ""]


COLOURS = {"holds": "green", "does not hold": "red", "undecided": "yellow"}


def _print(result: Result) -> None:
    """What was measured, statement by statement; what the paper reported stands on a line of its own."""
    from rich.padding import Padding
    from rich.text import Text

    run, verdict, console = result.run, result.verdict, _console()
    claim = run.claim
    console.print(_answer(f"{claim.slug}: ", verdict.answer, "bold"))
    console.print(Text(claim.question))
    console.print(Text(f"{run.title}; {run.replicates} replicates ({claim.unit}), scale {run.key.scale}", "dim"))
    for statement in claim.statements:
        decisions = [d for d in verdict.decisions if d.statement is statement and d.setting]
        if not decisions:
            continue
        informative = "" if statement.decides else " (informative, does not decide)"
        console.print()
        console.print(Text.assemble((f"{statement.name}: ", "bold"), f"{statement.text}{informative}"))
        console.print(Padding(_statement_table(claim, decisions), (0, 0, 0, 2)))
        if statement.reported is not None:
            r = statement.reported
            paper = f"the paper reported: {r.text} ({r.setting}; {r.source})"
            console.print(Padding(Text(paper, "magenta"), (0, 0, 0, 2)))
    for setting in run.settings:
        for table in _arms_tables(result, setting):
            console.print()
            console.print(table)
    _print_curves(result, console)
    console.print()
    open_ = [
        f"{d.statement.name}, {d.setting}: {d.reason}"
        for d in verdict.decisions
        if d.answer != "holds" and d.setting and d.statement.decides
    ]
    for line in dict.fromkeys([*open_, *verdict.warnings, *claim.notes]):
        console.print(f"- {line}", markup=False, highlight=False)


def _statement_table(claim: Claim, decisions: Sequence[Decision]) -> Table:
    """One row for each setting: the comparison with the strongest baseline."""
    from rich.table import Table
    from rich.text import Text

    from assay.bench import wording

    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("setting")
    for name in ("effect", "95% interval", "must be"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("against the strongest of" if any(len(d.comparisons) > 1 for d in decisions) else "against")
    table.add_column("n", justify="right")
    table.add_column("answer", no_wrap=True)
    for d in decisions:
        s, c = d.statement, d.deciding
        metric = claim.metric(s.metric)
        measured = (wording.effect(c, s, metric), wording.interval(c, metric)) if c else (wording.MISSING,) * 2
        table.add_row(
            Text(d.setting),
            *measured,
            wording.bound(s, metric),
            Text(wording.against(c, s, claim) + (f" ({len(d.comparisons)})" if len(d.comparisons) > 1 else "")),
            str(c.n) if c else wording.MISSING,
            _answer("", d.answer),
        )
    return table


def _answer(before: str, answer: Answer, style: str = "") -> Text:
    from rich.text import Text

    from assay.bench.wording import SYMBOLS

    return Text(f"{SYMBOLS[answer]} {before}{answer}", style=f"{style} {COLOURS[answer]}".strip())


def _arms_tables(result: Result, setting: str) -> list[Table]:
    """Medians over replicates in one setting: a table of the arms, and one for each of its races."""
    from rich.table import Table
    from rich.text import Text

    from assay.bench.wording import arm_label, number

    run, frame = result.run, result.trials
    frame = frame[frame["setting"] == setting] if len(frame) else frame
    groups: dict[str | None, list[tuple[str, Any]]] = {}
    for arm in run.arms:
        rows = frame[frame["arm"] == arm] if len(frame) else frame
        if len(rows):
            groups.setdefault(run.claim.arm(arm).race, []).append((arm, rows))
    tables = []
    for race, arms in groups.items():
        names = [
            m.name for m in run.claim.metrics if m.name in frame and any(rows[m.name].notna().any() for _, rows in arms)
        ]
        table = Table(
            title=Text(f"{setting}{f', race {race!r}' if race else ''}: medians over replicates", "dim"),
            title_justify="left",
            box=None,
            pad_edge=False,
            header_style="dim",
        )
        table.add_column("arm", no_wrap=True)
        for name in names:
            m = run.claim.metric(name)
            arrow = {"lower": " ↓", "higher": " ↑", None: ""}[m.better]
            table.add_column(Text(f"{name}{arrow}"), justify="right", no_wrap=len(names) < 8)
        labelled = len(names) < 8  # more columns leave no room
        if labelled:
            table.add_column("", no_wrap=True, overflow="ellipsis")
        for arm, rows in arms:
            label = arm_label(run.claim, arm)
            cells = [number(float(rows[name].median())) for name in names]
            table.add_row(arm, *cells, *([Text(label if label != arm else "", "dim")] if labelled else []))
        tables.append(table)
    return tables


def _print_curves(result: Result, console: Console) -> None:
    """Growths as tables, and the arms on the Pareto fronts."""
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from assay.bench import charts

    run = result.run
    for growth in run.claim.growths:
        head, rows = charts.growth_table(run, growth)
        if not rows:
            continue
        table = Table(box=None, pad_edge=False, header_style="dim")
        for i, name in enumerate(head):
            table.add_column(Text(name), justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print()
        console.print(Text(growth.text, "bold"))
        console.print(Padding(table, (0, 0, 0, 2)))
        console.print(Padding(Text(charts.growth_note(growth), "dim"), (0, 0, 0, 2)))
    for frontier in run.claim.frontiers:
        sentence = charts.front_sentence(run, frontier)
        if sentence:
            console.print()
            console.print(Text.assemble((f"{frontier.text}: ", "bold"), sentence))


def _print_runs(found: Sequence[Result]) -> None:
    from rich.table import Table

    table = Table("claim", "answer", "on", "scale", "replicates", "trials", box=None, pad_edge=False)
    for r in found:
        ok = sum(t.status == "ok" for t in r.run.trials)
        table.add_row(r.run.claim.slug, r.verdict.answer, r.run.title, r.run.key.scale, str(r.run.replicates), str(ok))
    _console().print(table)


def _as_json(result: Result) -> dict[str, Any]:
    """A result as JSON values; NaN becomes null."""
    run = result.run
    table = result.table
    return {
        "claim": run.claim.slug,
        "answer": result.verdict.answer,
        "workload": run.title,
        "scale": run.key.scale,
        "replicates": run.replicates,
        "seed": run.key.seed,
        "device": run.key.device,
        "comparisons": jsonlib.loads(table.to_json(orient="records")),
        "warnings": list(result.verdict.warnings),
        "skipped": dict(run.skipped),
        "trials": jsonlib.loads(result.trials.to_json(orient="records")),
    }


def _console() -> Console:
    """The console that is open at the time of the call: tests and pipes replace standard output."""
    from rich.console import Console

    # A pipe has no width; a narrow default would fold every cell of a table that goes to a file.
    width = None if sys.stdout.isatty() else 160
    return Console(width=width)


def _fail(message: str, hint: str = "", code: int = 2) -> int:
    print(f"assay: {message}" + (f"\n{hint}" if hint else ""), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
