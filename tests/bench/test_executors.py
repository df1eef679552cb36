import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from assay.bench import executors
from assay.bench.claim import Arm, Race, Timed
from assay.bench.executors import Tally, workers_for
from assay.bench.runner import execute
from assay.bench.store import Store, utc_now
from assay.bench.worker import Bench, Job, Plan

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
toys = importlib.import_module("toy_claims")
Work = toys.ToyWorkload


def numbers(run):
    return {(t.setting, t.replicate, t.arm): dict(t.metrics) for t in run.trials}


def test_the_same_numbers_here_and_in_any_number_of_processes(tmp_path):
    log = tmp_path / "log"
    runs = [execute(toys.PLAIN, Work(log=str(log)), store=tmp_path / f"{jobs}.sqlite", jobs=jobs) for jobs in (1, 2, 3)]
    assert numbers(runs[0]) == numbers(runs[1]) == numbers(runs[2]) and len(runs[0].trials) == 24
    pids = [line.split()[2] for line in log.read_text().splitlines()]
    assert set(pids[:12]) == {str(os.getpid())} and str(os.getpid()) not in pids[12:]
    assert len(pids) == 36


def test_an_arm_that_kills_its_process_costs_only_itself(tmp_path):
    switch = tmp_path / "switch"
    switch.touch()
    work = Work(switch=str(switch))
    run = execute(toys.DEADLY, work, store=tmp_path / "t.sqlite", jobs=2, scale="smoke")
    lost = {(t.setting, t.replicate, t.arm) for t in run.trials if t.status == "failed"}
    assert lost == {("one", 1, "deadly"), ("three", 1, "deadly")} and len(run.trials) == 18
    assert all("The worker process died" in t.error and t.environment for t in run.trials if t.status == "failed")
    switch.unlink()
    again = execute(toys.DEADLY, work, store=tmp_path / "t.sqlite", jobs=2, scale="smoke")
    assert all(t.status == "ok" for t in again.trials)


def test_a_race_that_kills_its_process_is_recorded(tmp_path):
    run = execute(toys.DEADLY_RACE, Work(), store=tmp_path / "t.sqlite", jobs=1, scale="smoke", replicates=1)
    assert {(t.arm, t.status) for t in run.trials} == {("method", "ok"), ("fast", "failed"), ("killer", "failed")}


@pytest.fixture
def plan(tmp_path):
    """A plan as workers get it, for tests of what they do inside this process."""
    work = Work(nap=0.0, switch=str(tmp_path / "switch"))
    run = execute(toys.RACING, work, store=tmp_path / "done.sqlite", jobs=1, scale="smoke", arms=["method"])
    about = {
        "title": "",
        "options": {},
        "settings": run.settings,
        "replicates": 3,
        "arms": ("method",),
        "skipped": {},
    }
    store = Store(tmp_path / "t.sqlite")
    return Plan("toy_claims:RACING", work, run.key, "cpu", 1, store.address, about, utc_now(), {"speed": Race(3, 1)})


def test_what_a_worker_does(plan, monkeypatch):
    for name in ("_plan", "_bench", "_store"):
        monkeypatch.setattr(executors, name, getattr(executors, name))
    executors._begin(cloudpickle.dumps(plan), os.getppid())
    job = Job("one", 0, arms=("method", "baseline"), races=(("speed", ("fast", "slow")),))
    try:
        assert executors._work(job) == list(job.names)
    finally:
        executors._bench.limit.__exit__(None, None, None)
    stored = {t.arm: t for t in Store(plan.store).trials(plan.key)}
    assert set(stored) == {"method", "baseline", "fast", "slow"}
    assert stored["slow"].metrics["seconds_high"] >= stored["slow"].metrics["seconds"] >= 0.005


def test_a_race_whose_arms_go_wrong(plan, tmp_path):
    bench = Bench(plan)
    (tmp_path / "switch").touch()
    ((fast, slow),) = bench.run(Job("one", 0, races=(("speed", ("fast", "slow")),)))
    assert fast.metrics["seconds"] > 0 and "the switch is on" in slow.error and slow.metrics == {}
    ((lone, untimed),) = bench.run(Job("one", 0, races=(("speed", ("slow", "method")),)))
    assert lone.status == untimed.status == "failed" and "must return Timed, not {'loss'" in untimed.error
    (tmp_path / "switch").unlink()

    class Turncoat:
        calls = 0

        def __call__(self):
            Turncoat.calls += 1
            if Turncoat.calls > 1:
                raise ArithmeticError("not again")

    arm = Arm("slow", lambda shared, replicate: Timed(Turncoat(), before=lambda: None), "method", race="speed")
    bench.claim = replace(bench.claim, arms=(*bench.claim.arms[:3], arm))
    ((fast, slow),) = bench.run(Job("one", 0, races=(("speed", ("fast", "slow")),)))
    assert "not again" in slow.error and "not again" in fast.error  # nobody was timed to the end


def test_workers():
    assert workers_for(None, 1, "cpu", 100) == max(1, executors.cpu_count())
    assert workers_for(None, 1000, "cpu", 100) == 1 and workers_for(None, 1, "cuda", 100) == 1
    assert workers_for(7, 1, "cuda", 100) == 7 and workers_for(7, 1, "cpu", 3) == 3 and workers_for(2, 1, "cpu", 0) == 1


def test_progress_is_told_while_a_long_replicate_runs(tmp_path):
    told = []
    work = Work(nap=1.2, settings=("one",))
    execute(toys.PLAIN, work, store=tmp_path / "t.sqlite", jobs=2, replicates=2, progress=lambda *a: told.append(a[0]))
    assert told[0] == 0 and told[-1] == 4 and len(told) >= 3  # not only when both replicates were complete


def test_the_tally_tells_seldom_and_always_of_the_last():
    told = []
    names = [("s", i, "a") for i in range(1000)]
    tally = Tally(1005, set(names), lambda *a: told.append(a), "seed")
    tally.start()
    for name in names:
        tally.finished([name, name, ("s", 0, "not waited for")])
    assert told[0] == (5, 1005, "starting") and told[-1] == (1005, 1005, "seed 999: a") and len(told) < 100


SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import toy_claims
from assay.bench.runner import execute
store, nap, jobs, executor = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
def told(done, total, label):
    print(done, total, label, flush=True)
try:
    execute(toy_claims.PLAIN, toy_claims.ToyWorkload(nap=nap), store=store, jobs=jobs, replicates=40,
            executor=executor, progress=told)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(130)
"""


def start(store, nap, jobs, executor="local"):
    """A driver as a shell starts it: the head of a process group of its own."""
    command = [sys.executable, "-c", SCRIPT, str(store), str(nap), str(jobs), executor]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=interruptible)


def interruptible():
    """A shell's background jobs ignore Ctrl-C, and so would whatever these tests start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def members(group):
    """Processes of a process group that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def gone(group, seconds=10.0):
    until = time.monotonic() + seconds
    while members(group) and time.monotonic() < until:
        time.sleep(0.05)
    return not members(group)


def until_done(driver, least):
    """Read what the driver tells until some trials are done."""
    for line in driver.stdout:
        if line[0].isdigit() and int(line.split()[0]) >= least:
            return
    raise AssertionError(driver.stderr.read())


@pytest.mark.parametrize(
    ("jobs", "executor"),
    [(1, "local"), (2, "local"), pytest.param(1, "ray", marks=pytest.mark.xdist_group("ray"))],
)
def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(tmp_path, jobs, executor):
    if executor == "ray":
        pytest.importorskip("ray")
    store = tmp_path / "t.sqlite"
    driver = start(store, 0.05, jobs, executor)
    until_done(driver, 10)
    os.killpg(driver.pid, signal.SIGINT)  # the terminal sends it to all of them
    out, err = driver.communicate(timeout=20)
    assert driver.returncode == 130 and out.endswith("interrupted\n") and err == ""
    assert gone(driver.pid)
    kept = Store(store).trials(Store(store).runs()[0].key)
    assert 10 <= len(kept) < 160 and all(t.status == "ok" for t in kept)
    run = execute(toys.PLAIN, Work(nap=0.0), store=store, jobs=1, replicates=40)
    assert len(run.trials) == 160 and all(t in run.trials for t in kept)


def test_a_store_that_fills_up_ends_the_run_and_keeps_what_is_finished(tmp_path):
    store = tmp_path / "t.sqlite"
    execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=1)
    size = str(store.stat().st_size + 20_000)
    limited = (
        "import resource, sys; n = int(sys.argv.pop(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (n, n))\n"
        + SCRIPT.replace("KeyboardInterrupt", "StoreError").replace(
            "import sys", "import sys; from assay.errors import *"
        )
    )
    command = [sys.executable, "-c", limited, size, str(store), "0.001", "2", "local"]
    # coverage writes files, too, and would run into the limit
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=plain)
    assert done.returncode == 130 and done.stderr == "", done.stderr
    kept = Store(store).trials(Store(store).runs()[0].key)
    assert 4 < len(kept) < 160
    run = execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=40)
    assert len(run.trials) == 160 and all(t in run.trials for t in kept)


def test_workers_leave_when_the_driver_was_killed(tmp_path):
    driver = start(tmp_path / "t.sqlite", 0.02, 2)
    until_done(driver, 10)
    assert len(members(driver.pid)) >= 3
    os.kill(driver.pid, signal.SIGKILL)  # it alone: nobody tells the workers
    driver.wait(10)
    assert gone(driver.pid)


def test_two_drivers_at_once(tmp_path):
    store = tmp_path / "t.sqlite"
    drivers = [start(store, 0.002, 1), start(store, 0.002, 1)]
    for driver in drivers:
        _, err = driver.communicate(timeout=60)
        assert driver.returncode == 0, err
    run = execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=40)
    alone = execute(toys.PLAIN, Work(), store=tmp_path / "alone.sqlite", jobs=1, replicates=40)
    assert len(Store(store).runs()) == 1 and numbers(run) == numbers(alone) and len(run.trials) == 160
