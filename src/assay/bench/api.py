"""What Python users call, ``assay.run(...)`` and ``assay.list_claims()``; the command line is a thin layer over it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.bench import registry
from assay.bench.claim import SCALES, Claim, ScaleName
from assay.bench.trial import Run
from assay.bench.verdict import Verdict, decide
from assay.errors import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from assay.bench.store import Store

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Result:
    """A claim that has been run: trials, verdict, and ways to look at them.

    Attributes
    ----------
    run
        The trials and everything that they were run with.
    verdict
        The answer; ``str(result.verdict.answer)`` is ``"holds"``, ``"does not hold"`` or ``"undecided"``.
    """

    run: Run
    verdict: Verdict

    @property
    def table(self) -> pd.DataFrame:
        """One row per comparison: effect, 95% interval, bound, answer; the paper's number in a column of its own."""
        return self.verdict.table()

    @property
    def trials(self) -> pd.DataFrame:
        """One row per trial: setting, replicate, arm, status, seconds, peak memory and the metrics."""
        import pandas as pd

        rows = [
            {
                "setting": t.setting,
                "replicate": t.replicate,
                "arm": t.arm,
                "status": t.status,
                "seconds_wall": t.seconds,
                "peak_rss": t.peak_rss,
                **t.metrics,
            }
            for t in self.run.trials
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """Draw the paired effects of every deciding comparison with their intervals and bounds (matplotlib)."""
        from assay.bench.report import plot

        return plot(self.run, self.verdict)

    def report(self, folder: str | Path = "assay-report") -> Path:
        """Write the report page to ``folder`` and return the path of its index."""
        from assay.bench.report import write_report

        return write_report([(self.run, self.verdict)], Path(folder))

    def to_markdown(self) -> str:
        """The result as Markdown."""
        from assay.bench.report import to_markdown

        return to_markdown(self.run, self.verdict)

    def _repr_html_(self) -> str:
        from assay.bench.report import verdict_html

        return verdict_html(self.run, self.verdict)

    def __str__(self) -> str:
        return f"{self.run.claim.slug}: {self.verdict.answer}\n{self.table.to_string(index=False)}"


def list_claims() -> dict[str, str]:
    """Slug to one line of what it is, for every claim that is installed."""
    return {slug: entry.title for slug, entry in registry.entries().items()}


def make_workload(claim: Claim, options: Mapping[str, Any]) -> Any:
    """The claim's workload with the options that the user set.

    Raises
    ------
    InputError
        An option is not a field of the workload (the nearest is suggested), or the dataclass refuses its value.
    """
    fields = {f.name for f in dataclasses.fields(claim.workload)}
    for name in options:
        if name not in fields:
            near = get_close_matches(name, fields, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(sorted(fields))}"
            raise InputError(f"{claim.slug} has no option {name!r}; {hint}")
    return claim.workload(**options)


def run(
    slug: str,
    *,
    scale: ScaleName = "desk",
    replicates: int | None = None,
    arms: Sequence[str] | None = None,
    device: str | None = None,
    seed: int = 0,
    executor: str = "local",
    jobs: int | None = None,
    store: str | Path | Store | None = None,
    progress: bool | Progress = True,
    **options: Any,
) -> Result:
    """Run a paper's claim and decide it.

    Trials that the store already holds for the same data, options, code, device and seed are not run again, so an
    interrupted run resumes and a larger ``replicates`` adds to what is there.

    Parameters
    ----------
    slug
        Which claim, as in ``assay list``.
    scale
        ``"smoke"`` (seconds, too small to decide much), ``"desk"`` (minutes on two cores) or ``"paper"``.
    replicates
        How many paired repetitions; the scale's number by default.
    arms
        Names of the arms to run; all by default. A statement whose arms are missing stays undecided.
    device
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``; by default the first that the claim supports.
    seed
        Base of all seeds.
    executor
        ``"local"`` (processes on this machine), ``"ray"`` (a Ray cluster on this machine), or the address of a Ray
        cluster (``host:port``, or ``auto`` for the one that this machine belongs to).
    jobs
        Worker processes of the local executor; by default one per core.
    store
        SQLite file or SQLAlchemy URL; by default ``$ASSAY_STORE``, else the user's data folder.
    progress
        ``True`` draws a bar on the terminal; a callable gets ``(done, total, label)``.
    **options
        Fields of the claim's workload, e.g. ``data=frame, target="price"``.

    Returns
    -------
    Result
        With ``.verdict``, ``.table``, ``.trials``, ``.plot()`` and ``.report()``.

    Raises
    ------
    InputError
        Something that was given cannot be used; nothing has been computed or written.
    StoreError
        The store cannot be read or written.
    """
    from assay.bench.runner import execute
    from assay.bench.store import Store

    if scale not in SCALES:
        raise InputError(f"scale must be one of {', '.join(SCALES)}, not {scale!r}")
    claim = registry.load(slug)
    workload = make_workload(claim, options)
    opened = store if isinstance(store, Store) else Store(store)
    try:
        with _progress(progress, claim.slug) as report:
            done = execute(
                claim,
                workload,
                scale=scale,
                replicates=replicates,
                arms=arms,
                device=device,
                seed=seed,
                executor=executor,
                jobs=jobs,
                store=opened,
                progress=report,
            )
    finally:
        if opened is not store:
            opened.close()
    return Result(done, decide(done))


def stored(store: str | Path | None = None, slug: str | None = None, *, latest: bool = False) -> list[Result]:
    """Results that a store holds, decided anew from their trials; the run that was used last comes first.

    Parameters
    ----------
    store
        SQLite file or SQLAlchemy URL; by default ``$ASSAY_STORE``, else the user's data folder.
    slug
        Only runs of this claim.
    latest
        Only one run of each claim: the last one.

    Raises
    ------
    InputError
        The slug is unknown, or the store holds nothing that was asked for.
    StoreError
        The store cannot be read.
    """
    from assay.bench.store import Store

    wanted = registry.find(slug).slug if slug is not None else None
    found: list[Result] = []
    with Store(store) as opened:
        for record in opened.runs():
            name = record.key.claim
            if (wanted is not None and name != wanted) or name not in registry.entries():
                continue
            if latest and any(r.run.claim.slug == name for r in found):
                continue
            claim = registry.load(name)
            # A run may be older than the claim's present form: what the claim no longer knows cannot be judged.
            record = dataclasses.replace(
                record, arms=tuple(a for a in record.arms if a in {x.name for x in claim.arms})
            )
            run = opened.load(record, claim)
            found.append(Result(run, decide(run)))
        if not found:
            what = f"no run of {wanted}" if wanted else "no runs"
            raise InputError(f"the store {opened} holds {what}; start with `assay run {wanted or 'rqr'}`")
    return found


class _progress:
    """A rich bar on standard error, a callable of the user, or nothing."""

    def __init__(self, wanted: bool | Progress, title: str) -> None:
        self.wanted = wanted
        self.title = title

    def __enter__(self) -> Progress | None:
        if not isinstance(self.wanted, bool):
            return self.wanted
        if not self.wanted:
            return None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("{task.fields[title]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task("preparing", total=None, title=self.title)

        def report(done: int, total: int, label: str) -> None:
            self.bar.update(self.task, completed=done, total=total, description=label)

        return report

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "bar"):
            self.bar.stop()
