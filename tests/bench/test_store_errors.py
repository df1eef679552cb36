"""Every way in which a store can fail: one sentence that names the store and says what to do; no traceback needed."""

import contextlib
import errno
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa

from assay.bench import store as module
from assay.bench.store import Store
from assay.bench.store_errors import explain
from assay.bench.trial import RunKey, Trial
from assay.errors import StoreError

KEY = RunKey("toy", "desk", "w0", "c0", "cpu", 0)


def trial(i=0, error=""):
    return Trial("one", i, "a", "failed" if error else "ok", {} if error else {"loss": 1.0}, error=error)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "trials.sqlite"


@pytest.fixture
def filled(path):
    with Store(path) as store:
        store.add(KEY, [trial()])
    return path


@contextlib.contextmanager
def unprivileged():
    """As a user whom permissions bind: root may do everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def refuse(store, *words, call="add"):
    with pytest.raises(StoreError) as caught:
        store.add(KEY, [trial(1)]) if call == "add" else getattr(store, call)(*([KEY] if call == "trials" else []))
    told = str(caught.value)
    assert str(store) in told and "\n" not in told
    for word in words:
        assert word in told
    return told


def test_locked(filled, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    other = sqlite3.connect(filled, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    refuse(Store(filled), "locked by another program", "wait")
    refuse(Store(filled), "locked by another program", call="check")
    other.execute("COMMIT")
    Store(filled).add(KEY, [trial(1)])


def test_locked_while_it_is_made(path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    path.parent.mkdir()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    refuse(Store(path), "locked by another program")


@pytest.fixture
def common():
    """A folder that other users can reach, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="assay-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_read_only_file(common):
    path = common / "trials.sqlite"
    with Store(path) as store:
        store.add(KEY, [trial()])
    path.chmod(0o444)
    common.chmod(0o777)
    with unprivileged():
        refuse(Store(path), "read-only", "permissions")
        refuse(Store(path), "read-only", call="check")


def test_read_only_folder(common):
    with unprivileged():
        for path in (common / "trials.sqlite", common / "a" / "b.sqlite"):
            refuse(Store(path), "read-only", call="check")
            refuse(Store(path), "read-only")
    assert list(common.iterdir()) == []


def test_a_folder_is_no_store(tmp_path):
    refuse(Store(tmp_path), "folder")
    refuse(Store(tmp_path), "folder", call="trials")


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    refuse(Store(tmp_path / "file" / "trials.sqlite"), "file and not a folder", call="check")
    refuse(Store(tmp_path / "file" / "trials.sqlite"), "file and not a folder")


@pytest.mark.parametrize("call", ["add", "trials", "runs", "check"])
def test_not_a_database(tmp_path, call):
    path = tmp_path / "prices.csv"
    path.write_text("price,size\n" * 100)
    refuse(Store(path), "not an SQLite database", call=call)
    assert path.read_text() == "price,size\n" * 100


def test_the_database_of_another_program(tmp_path):
    path = tmp_path / "bookmarks.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("create table bookmarks (x)")
    before = path.read_bytes()
    refuse(Store(path), "another program", "bookmarks")
    refuse(Store(path), "another program", call="check")
    assert path.read_bytes() == before


def test_corrupt(path):
    with Store(path) as store:
        for i in range(300):
            store.add(KEY, [trial(i, error="x" * 500)])
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    refuse(Store(path), "damaged", call="trials")
    refuse(Store(path), "damaged")


def test_newer_schema(filled):
    with sqlite3.connect(filled) as raw:
        raw.execute("update assay_meta set value = '99'")
    refuse(Store(filled), "schema 99", "Upgrade assay", call="trials")
    refuse(Store(filled), "schema 99")


def test_full_database(filled):
    store = Store(filled)
    sa.event.listen(store._open(), "connect", lambda raw, _: raw.execute("PRAGMA max_page_count=15"))
    with pytest.raises(StoreError, match="disk is full; free some space"):
        for i in range(100):
            store.add(KEY, [trial(i, error="x" * 1000)])
    kept = Store(filled).trials(KEY)
    assert 1 <= len(kept) < 100
    Store(filled).add(KEY, [trial(99)])  # there is room again


def test_full_disk(filled):
    """The system refuses to write more of the file, as it does on a full disk or beyond a quota."""
    code = f"""
import resource
from assay.bench.store import *
from assay.bench.trial import *
from assay.errors import StoreError
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
store = Store({str(filled)!r})
try:
    for i in range(1, 2000):
        store.add(RunKey{tuple(KEY.__dict__.values())}, [Trial("one", i, "a", "ok", {{"loss": 1.0}}, error="x" * 1000)])
except StoreError as error:
    print(i, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    stored, told = done.stdout.split(" ", 1)
    assert "disk is full" in told and str(filled) in told
    assert [t.replicate for t in Store(filled).trials(KEY)] == list(range(int(stored)))  # all before, nothing of it
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("url", "word"),
    [
        ("", "empty"),
        ("mysql://host/db", "'mysql'"),
        ("oracle+thick://host/db", "'oracle'"),
        ("://x", "not a URL"),
        ("postgresql+psycopg://u:secret@host:port/db", "not a URL"),
        ("sqlite://", "must be a file"),
        ("sqlite:///:memory:", "must be a file"),
    ],
)
def test_bad_address(url, word):
    with pytest.raises(StoreError, match=word) as caught:
        Store(url)
    assert "secret" not in str(caught.value)


def test_unreachable_server():
    for url in ("postgresql://me:secret@127.0.0.1:9/db", "postgres://me:secret@127.0.0.1:9/db"):
        store = Store(url)
        assert "secret" not in repr(store) and "secret" in store.address
        told = refuse(store, "cannot be reached", "host and port", call="check")
        assert "secret" not in told
        refuse(store, "cannot be reached", call="trials")


def test_driver_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    refuse(Store("postgresql://host/db"), "pip install 'assay[postgresql]'", call="check")


def test_what_is_not_foreseen_is_told_as_it_is():
    told = str(explain(sa.exc.SQLAlchemyError("odd"), "S"))
    assert "S cannot be used" in told and "odd" in told
    assert "disk is full" in str(explain(OSError(errno.ENOSPC, "No space left on device"), "S"))
