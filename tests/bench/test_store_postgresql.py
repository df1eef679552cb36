"""The store on a PostgreSQL server, which is started here on a free loopback port; skipped where there is none."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from assay.bench.runner import execute
from assay.bench.store import Store
from assay.errors import StoreError

sys.path.insert(0, str(Path(__file__).parent))
toys = importlib.import_module("toy_claims")
store_tests = importlib.import_module("test_store")
KEY, ABOUT, trial, failed = (getattr(store_tests, name) for name in ("KEY", "ABOUT", "trial", "failed"))

BIN = max(Path("/usr/lib/postgresql").glob("*/bin/initdb"), default=None, key=lambda p: int(p.parts[-3]))
pytestmark = [
    pytest.mark.skipif(BIN is None, reason="PostgreSQL is not installed in /usr/lib/postgresql"),
    pytest.mark.xdist_group("postgresql"),
]


@pytest.fixture(scope="module")
def server():
    folder = Path(tempfile.mkdtemp(prefix="assay-pg-"))
    # The server refuses to run as root.
    as_user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    if as_user:
        shutil.chown(folder, "postgres", "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def call(tool, *arguments):
        command = [*as_user, str(BIN.parent / tool), *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        call("initdb", "-D", "data", "-U", "assay", "--auth=trust", "--no-sync")
        options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
        call("pg_ctl", "-D", "data", "-w", "-l", "log", "-o", options, "start")
        try:
            yield f"postgresql+psycopg://assay@127.0.0.1:{port}"
        finally:
            call("pg_ctl", "-D", "data", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def url(server, request):
    import psycopg

    name = f"db{abs(hash(request.node.name))}"
    with psycopg.connect(server.replace("+psycopg", "") + "/postgres", autocommit=True) as connection:
        connection.execute(f"create database {name}")
    return f"{server}/{name}"


@pytest.mark.parametrize(
    "test",
    [
        store_tests.test_what_goes_in_comes_out,
        store_tests.test_a_trial_is_there_once_and_the_first_success_stays,
        store_tests.test_all_trials_of_a_call_or_none,
        store_tests.test_runs_do_not_mix,
        store_tests.test_the_run_used_last_comes_first,
        store_tests.test_a_run_can_be_loaded_from_its_record,
    ],
    ids=lambda test: test.__name__,
)
def test_as_on_sqlite(url, test, monkeypatch):
    monkeypatch.setattr(Store, "path", None)
    monkeypatch.setattr(store_tests, "Store", lambda _: Store(url))
    with Store(url) as store:
        test(store)


def test_reading_and_checking_make_no_tables(url):
    import psycopg

    store = Store(url)
    store.check()
    assert store.trials(KEY) == () and store.runs() == [] and store.done(KEY) == {}
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        assert connection.execute("select 1 from pg_tables where tablename like 'assay%'").fetchall() == []


def test_it_lives_beside_other_tables(url):
    import psycopg

    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute("create table runs (x int)")
    Store(url).add(KEY, [trial()])
    assert len(Store(url).trials(KEY)) == 1


def test_two_processes_write_at_once(url):
    store_tests.both_at_once(url)


def test_a_run_with_workers_and_its_resumption(url, tmp_path):
    work = toys.ToyWorkload()
    first = execute(toys.PLAIN, work, store=url, jobs=2, replicates=3)
    again = execute(toys.PLAIN, work, store=url, jobs=2, replicates=4)
    here = execute(toys.PLAIN, work, store=tmp_path / "t.sqlite", jobs=1, replicates=4)
    assert [t.metrics for t in again.trials] == [t.metrics for t in here.trials]
    assert [t for t in again.trials if t.replicate < 3] == list(first.trials)


def test_a_database_that_is_not_there(server):
    with pytest.raises(StoreError, match=r"not there; make it \(createdb NAME\)"):
        Store(f"{server}/nowhere").check()


def test_a_user_that_is_not_there(server):
    with pytest.raises(StoreError, match=r"refused the login|cannot be reached"):
        Store(f"{server.replace('assay@', 'nobody@')}/postgres").check()


def test_a_read_only_database(url):
    store = Store(url)
    store.add(KEY, [trial()])
    name = url.rsplit("/", 1)[1]
    import psycopg

    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"alter database {name} set default_transaction_read_only = on")
    assert len(Store(url).trials(KEY)) == 1
    with pytest.raises(StoreError, match="the database is read-only"):
        Store(url).add(KEY, [trial(1)])


def test_a_server_that_goes_away_and_comes_back(url):
    import psycopg

    store = Store(url)
    store.add(KEY, [trial()])
    with psycopg.connect(url.rsplit("/", 1)[0].replace("+psycopg", "") + "/postgres", autocommit=True) as other:
        other.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [url.rsplit("/")[-1]]
        )
    with pytest.raises(StoreError):
        store.add(KEY, [trial(1)])
    store.add(KEY, [trial(1)])
    assert len(store.trials(KEY)) == 2
