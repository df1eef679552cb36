"""Where trials are kept: one transaction for each finished trial, so that a run that is killed loses nothing finished.

The default is one SQLite file; a team gives the URL of a PostgreSQL database instead. Four tables::

    assay_meta          the version of this schema
    assay_runs          one row for each RunKey: its title, options, settings, and what was last asked of it
    assay_environments  machine and library versions, once for each distinct content
    assay_trials        one row for each (run, setting, replicate, arm), so that nothing can be there twice

A store is opened when it is first used, and made when the first thing is written: a command that fails on bad input
leaves neither a file nor a folder behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine, make_url

from assay.bench.claim import Claim
from assay.bench.store_errors import explain
from assay.bench.trial import Run, RunKey, Trial
from assay.errors import StoreError

SCHEMA = 1
Name = tuple[str, int, str]
"""Setting, replicate and arm: what names a trial inside its run."""
PATIENCE = 30.0
"""Seconds that a process waits for another one to finish writing."""

_LOCK = 0x6173736179  # the number of the advisory lock under which PostgreSQL tables are made: "assay" in ASCII

_metadata = sa.MetaData()
_meta = sa.Table(
    "assay_meta", _metadata, sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.Text, nullable=False)
)
_KEY = ("claim", "scale", "workload", "code", "device", "seed")
_runs = sa.Table(
    "assay_runs",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    *(sa.Column(name, sa.Text, nullable=False) for name in _KEY[:-1]),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("title", sa.Text, nullable=False),
    sa.Column("options", sa.Text, nullable=False),
    sa.Column("settings", sa.Text, nullable=False),
    sa.Column("arms", sa.Text, nullable=False),
    sa.Column("skipped", sa.Text, nullable=False),
    sa.Column("replicates", sa.Integer, nullable=False),
    sa.Column("first_used", sa.Text, nullable=False),
    sa.Column("last_used", sa.Text, nullable=False),
    sa.UniqueConstraint(*_KEY, name="assay_runs_key"),
)
_environments = sa.Table(
    "assay_environments",
    _metadata,
    sa.Column("digest", sa.Text, primary_key=True),
    sa.Column("content", sa.Text, nullable=False),
)
_TRIAL = ("run", "setting", "replicate", "arm")
_trials = sa.Table(
    "assay_trials",
    _metadata,
    sa.Column("run", sa.Integer, sa.ForeignKey("assay_runs.id"), primary_key=True),
    sa.Column("setting", sa.Text, primary_key=True),
    sa.Column("replicate", sa.Integer, primary_key=True),
    sa.Column("arm", sa.Text, primary_key=True),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("error", sa.Text, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("peak_rss", sa.BigInteger, nullable=False),
    sa.Column("peak_device", sa.BigInteger, nullable=False),
    sa.Column("finished", sa.Text, nullable=False),
    sa.Column("environment", sa.Text, sa.ForeignKey("assay_environments.digest"), nullable=False),
)


@dataclass(frozen=True)
class RunRecord:
    """What the store knows of one run: what was last asked of it, and how many of its trials are there."""

    key: RunKey
    title: str
    options: Mapping[str, Any]
    settings: tuple[str, ...]
    arms: tuple[str, ...]
    skipped: Mapping[str, str]
    replicates: int
    first_used: str
    last_used: str
    ok: int = 0
    failed: int = 0


def default_location() -> str:
    """``$ASSAY_STORE``, else ``assay/trials.sqlite`` in the user's data folder (``$XDG_DATA_HOME``)."""
    if given := os.environ.get("ASSAY_STORE"):
        return given
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(home) / "assay" / "trials.sqlite")


class Store:
    """Trials on disk or in a database. Opens on first use; pickles as its address, so that workers can write, too.

    Parameters
    ----------
    where
        Path of an SQLite file (made with its folders when the first trial is stored), or the URL of a database:
        ``sqlite:///trials.sqlite``, ``postgresql+psycopg://user@host/name``. Default: :func:`default_location`.

    Raises
    ------
    StoreError
        The address is not one, or names a database that is not supported. Every method raises it, with a remedy, when
        the store is locked, read-only, damaged, full, unreachable or of a newer schema.
    """

    def __init__(self, where: str | os.PathLike[str] | None = None) -> None:
        self.url = _parse(default_location() if where is None else os.fspath(where))
        self._engine: Engine | None = None
        self._ready = False
        self._run_ids: dict[RunKey, int] = {}
        self._stored_environments: set[str] = set()

    @property
    def path(self) -> Path | None:
        """The SQLite file, or ``None`` for a database server."""
        return Path(self.url.database or "") if self.url.get_backend_name() == "sqlite" else None

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else self.url.render_as_string(hide_password=True)

    def __repr__(self) -> str:
        return f"Store({str(self)!r})"

    def __reduce__(self) -> tuple[type[Store], tuple[str]]:
        return Store, (self.address,)

    @property
    def address(self) -> str:
        """What :class:`Store` opens it by; with the password, if there is one."""
        return self.url.render_as_string(hide_password=False)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back. The store opens again when it is next used."""
        if self._engine is not None:
            self._engine.dispose()
        self._engine, self._ready = None, False

    # ---- writing

    def add(self, key: RunKey, trials: Sequence[Trial], *, replace: bool = False) -> None:
        """Store finished trials of one run, all of them or none.

        A trial that is there already stays as it is, unless it had failed: writing the same trial twice, or from two
        processes at once, changes nothing.

        Parameters
        ----------
        key
            The run that they belong to; made without a title if :meth:`describe` did not name it before.
        trials
            The trials.
        replace
            Let the new trials win over those that are there: for the arms of a race, which mean something only
            together.
        """
        if not trials:
            return
        with self._writing() as connection:
            run = self._run_id(connection, key)
            digests = [self._environment(connection, t.environment) for t in trials]
            rows = [
                {"run": run, "environment": digest, "metrics": _dump_metrics(t.metrics)}
                | {name: getattr(t, name) for name in ("setting", "replicate", "arm", "status", "error")}
                | {name: getattr(t, name) for name in ("seconds", "peak_rss", "peak_device")}
                | {"finished": t.finished or utc_now()}
                for t, digest in zip(trials, digests)
            ]
            connection.execute(_upsert(connection.dialect.name, replace), rows)
        self._stored_environments.update(digests)
        self._run_ids[key] = run

    def describe(
        self,
        key: RunKey,
        *,
        title: str,
        options: Mapping[str, Any],
        settings: Sequence[str],
        replicates: int,
        arms: Sequence[str],
        skipped: Mapping[str, str],
    ) -> None:
        """Write what is asked of a run, so that a report can be made from the store alone. The last call wins.

        The runner calls it when all checks have passed and before anything is computed, which also finds out whether
        the store can be written to.
        """
        asked = {
            "title": title,
            "options": json.dumps({k: _plain(v) for k, v in options.items()}),
            "settings": json.dumps(list(settings)),
            "arms": json.dumps(list(arms)),
            "skipped": json.dumps(dict(skipped)),
            "replicates": replicates,
            "last_used": utc_now(),
        }
        with self._writing() as connection:
            run = self._run_id(connection, key)
            connection.execute(_runs.update().where(_runs.c.id == run).values(**asked))
        self._run_ids[key] = run

    # ---- reading

    def trials(self, key: RunKey) -> tuple[Trial, ...]:
        """All trials of a run, in the order of setting, replicate and arm."""
        with self._reading() as connection:
            if connection is None:
                return ()
            query = (
                sa.select(_trials, _environments.c.content)
                .join(_runs, _runs.c.id == _trials.c.run)
                .join(_environments, _environments.c.digest == _trials.c.environment)
                .where(*_matches(key))
                .order_by(_trials.c.setting, _trials.c.replicate, _trials.c.arm)
            )
            parsed: dict[str, dict[str, Any]] = {}
            found = []
            for row in connection.execute(query):
                if row.environment not in parsed:
                    parsed[row.environment] = json.loads(row.content)
                found.append(
                    Trial(
                        setting=row.setting,
                        replicate=row.replicate,
                        arm=row.arm,
                        status=row.status,
                        metrics=_load_metrics(row.metrics),
                        error=row.error,
                        seconds=row.seconds,
                        peak_rss=row.peak_rss,
                        peak_device=row.peak_device,
                        finished=row.finished,
                        environment=parsed[row.environment],
                    )
                )
            return tuple(found)

    def done(self, key: RunKey, *, since: str = "") -> dict[Name, bool]:
        """The trials of a run that are there, and whether they succeeded.

        With ``since``, failed ones that finished before that time are left out.
        """
        with self._reading() as connection:
            if connection is None:
                return {}
            columns = _trials.c.setting, _trials.c.replicate, _trials.c.arm, _trials.c.status
            query = sa.select(*columns).join(_runs, _runs.c.id == _trials.c.run).where(*_matches(key))
            if since:
                query = query.where((_trials.c.status == "ok") | (_trials.c.finished >= since))
            return {(s, r, a): status == "ok" for s, r, a, status in connection.execute(query)}

    def check(self) -> None:
        """Raise what would stop a run from being stored, before it has computed anything. Writes nothing."""
        with self._reading() as connection:
            there = connection is not None
        if self.path is None:
            return
        # SQLite lets a transaction begin on some files that it cannot write to, so permissions are looked at, too.
        place = next(p for p in (self.path, *self.path.parents) if p.exists())
        with self._explained():
            if place != self.path and not place.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(place))
            for needed in {place, self.path.parent if place == self.path else place}:
                if not os.access(needed, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
                    raise PermissionError(errno.EACCES, "not writable", str(needed))
        if there:
            with self._writing():
                pass

    def runs(self) -> list[RunRecord]:
        """All runs, the one that was used last first."""
        with self._reading() as connection:
            if connection is None:
                return []
            counted = {
                (run, status): n
                for run, status, n in connection.execute(
                    sa.select(_trials.c.run, _trials.c.status, sa.func.count()).group_by(
                        _trials.c.run, _trials.c.status
                    )
                )
            }
            query = _runs.select().order_by(_runs.c.last_used.desc(), _runs.c.id.desc())
            return [
                RunRecord(
                    key=RunKey(**{name: getattr(row, name) for name in _KEY}),
                    title=row.title,
                    options=json.loads(row.options),
                    settings=tuple(json.loads(row.settings)),
                    arms=tuple(json.loads(row.arms)),
                    skipped=json.loads(row.skipped),
                    replicates=row.replicates,
                    first_used=row.first_used,
                    last_used=row.last_used,
                    ok=counted.get((row.id, "ok"), 0),
                    failed=counted.get((row.id, "failed"), 0),
                )
                for row in connection.execute(query)
            ]

    def load(self, record: RunRecord, claim: Claim) -> Run:
        """The run of a record, with its trials: what :func:`assay.bench.verdict.decide` takes."""
        return assemble(
            claim,
            record.key,
            self.trials(record.key),
            title=record.title,
            settings=record.settings,
            replicates=record.replicates,
            arms=record.arms,
            skipped=record.skipped,
            options=record.options,
        )

    # ---- inside

    def _run_id(self, connection: Connection, key: RunKey) -> int:
        if key in self._run_ids:
            return self._run_ids[key]
        now = utc_now()
        empty = {"title": "", "options": "{}", "settings": "[]", "arms": "[]", "skipped": "{}", "replicates": 0}
        values = {name: getattr(key, name) for name in _KEY} | empty | {"first_used": now, "last_used": now}
        connection.execute(
            _INSERT[connection.dialect.name](_runs).values(**values).on_conflict_do_nothing(index_elements=_KEY)
        )
        return int(connection.execute(sa.select(_runs.c.id).where(*_matches(key))).scalar_one())

    def _environment(self, connection: Connection, environment: Mapping[str, Any]) -> str:
        content = json.dumps(dict(environment), sort_keys=True, default=str)
        digest = hashlib.sha256(content.encode()).hexdigest()[:32]
        if digest not in self._stored_environments:
            statement = _INSERT[connection.dialect.name](_environments).values(digest=digest, content=content)
            connection.execute(statement.on_conflict_do_nothing(index_elements=["digest"]))
        return digest

    @contextlib.contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction; the tables are there."""
        with self._explained():
            engine = self._open()
            if not self._ready:
                self._make(engine)
            with engine.connect().execution_options(assay_write=True) as connection, connection.begin():
                yield connection

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Connection | None]:
        """A connection, or ``None`` where nothing was ever stored: reading makes nothing."""
        if self._engine is None and self.path is not None and not self.path.exists():
            yield None
            return
        with self._explained(), self._open().connect() as connection:
            if self._ready or self._schema(connection) is not None:
                self._ready = True
                yield connection
            else:
                yield None

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError, ModuleNotFoundError) as error:
            raise explain(error, str(self)) from error

    def _open(self) -> Engine:
        if self._engine is None:
            lite = self.path is not None
            arguments = {"timeout": PATIENCE} if lite else {"connect_timeout": 10}
            engine = sa.create_engine(self.url, connect_args=arguments)
            if lite:
                # The driver's own idea of when to begin is switched off: a write must take the lock at its start, or
                # two writers that both began by reading would each be refused at once instead of waiting.
                sa.event.listen(engine, "connect", _on_connect)
                sa.event.listen(engine, "begin", _on_begin)
            self._engine = engine
        return self._engine

    def _make(self, engine: Engine) -> None:
        """Make folder, file and tables where they are missing; refuse what is not ours."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with engine.connect() as connection:
                if self._schema(connection) is None:
                    _use_wal(connection)
        with engine.connect().execution_options(assay_write=True) as connection, connection.begin():
            if self.path is None:
                connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
            if self._schema(connection) is None:
                _metadata.create_all(connection)
                connection.execute(_meta.insert().values(key="schema", value=str(SCHEMA)))
        self._ready = True

    def _schema(self, connection: Connection) -> int | None:
        """The version of the tables, or ``None`` where there are none yet."""
        names = sa.inspect(connection).get_table_names()
        if _meta.name not in names:
            if names and self.path is not None:
                raise StoreError(
                    f"the store {self} is an SQLite database of another program (it has a table {names[0]!r}); "
                    "give another file by --store or ASSAY_STORE."
                )
            return None
        version = int(connection.execute(sa.select(_meta.c.value).where(_meta.c.key == "schema")).scalar_one())
        if version > SCHEMA:
            raise StoreError(
                f"the store {self} has schema {version}, and this assay knows schemas up to {SCHEMA}: a newer assay "
                "made it. Upgrade assay (pip install -U assay), or give another store by --store or ASSAY_STORE."
            )
        return version


def assemble(
    claim: Claim,
    key: RunKey,
    trials: Sequence[Trial],
    *,
    title: str,
    settings: Sequence[str],
    replicates: int,
    arms: Sequence[str],
    skipped: Mapping[str, str],
    options: Mapping[str, Any],
) -> Run:
    """A run with those of the stored trials that were asked for, in the order of the claim."""
    rank_s, rank_a = {s: i for i, s in enumerate(settings)}, {a: i for i, a in enumerate(arms)}
    mine = [t for t in trials if t.setting in rank_s and t.arm in rank_a and t.replicate < replicates]
    mine.sort(key=lambda t: (rank_s[t.setting], t.replicate, rank_a[t.arm]))
    return Run(
        claim=claim,
        key=key,
        title=title,
        settings=tuple(settings),
        replicates=replicates,
        arms=tuple(arms),
        trials=tuple(mine),
        skipped=dict(skipped),
        options=dict(options),
    )


def utc_now() -> str:
    """The time as it is stored: ISO 8601, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _parse(where: str) -> URL:
    if not where.strip():
        raise StoreError("the store is an empty string; give a file or a URL by --store or ASSAY_STORE.")
    if "://" not in where:
        return URL.create("sqlite", database=str(Path(where).expanduser().absolute()))
    try:
        url = make_url(where)
        backend = url.get_backend_name()
    except (sa.exc.ArgumentError, ValueError) as error:
        raise StoreError(
            f"the store {where.split('@')[-1]!r} is not a URL that can be read; expected a file name, or something "
            "like postgresql+psycopg://user@host/database."
        ) from error
    if backend == "postgres":
        url, backend = url.set(drivername="postgresql+psycopg"), "postgresql"
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    if backend not in ("sqlite", "postgresql"):
        raise StoreError(
            f"the store is on {backend!r}, which assay cannot use; expected an SQLite file or a PostgreSQL database "
            "(postgresql+psycopg://user@host/database)."
        )
    if backend == "sqlite":
        if not url.database or url.database == ":memory:":
            raise StoreError("the store must be a file: worker processes cannot share an SQLite database in memory.")
        url = URL.create("sqlite", database=str(Path(url.database).expanduser().absolute()))
    return url


def _on_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("assay_write") else "BEGIN")


def _use_wal(connection: Connection) -> None:
    """Switch the file to write-ahead logging, by which readers never wait for a writer.

    The switch needs the file for itself, and SQLite does not wait for that: two processes that make a store at the
    same time would see "locked". So we wait.
    """
    connection.rollback()
    raw = connection.connection.cursor()
    until = time.monotonic() + PATIENCE
    while True:
        try:
            raw.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.02)


_INSERT: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


@cache
def _upsert(dialect: str, replace: bool) -> Any:
    """Insert trials; on those that are there, write only over failed ones, or over all of them."""
    statement = _INSERT[dialect](_trials)
    fresh = {c.name: statement.excluded[c.name] for c in _trials.columns if c.name not in _TRIAL}
    failed = None if replace else _trials.c.status == "failed"
    return statement.on_conflict_do_update(index_elements=_TRIAL, set_=fresh, where=failed)


def _matches(key: RunKey) -> list[sa.ColumnElement[bool]]:
    return [_runs.c[name] == getattr(key, name) for name in _KEY]


def _dump_metrics(metrics: Mapping[str, float]) -> str:
    """JSON as the standard has it: numbers that are not finite become strings, for readers other than Python."""
    return json.dumps({k: v if math.isfinite(v) else repr(float(v)) for k, v in metrics.items()}, allow_nan=False)


def _load_metrics(text: str) -> dict[str, float]:
    return {name: float(value) for name, value in json.loads(text).items()}


def _plain(value: Any) -> Any:
    """An option as something that JSON can hold: data given in memory is named by its type and shape."""
    try:
        json.dumps(value)
        return value
    except (TypeError, ValueError):
        pass
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(v) for v in value]
    return str(value) if len(str(value)) <= 200 else type(value).__name__


__all__ = ["RunRecord", "Store", "StoreError", "assemble", "default_location", "utc_now"]
