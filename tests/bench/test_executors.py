import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.bench import executors
from assay.bench.executors import Tally, workers_for
from assay.bench.runner import execute
from assay.bench.store import Store

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
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


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


@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_keeps_what_is_finished_and_leaves_no_process(tmp_path, jobs):
    store = tmp_path / "t.sqlite"
    driver = start(store, 0.02, jobs)
    until_done(driver, 10)
    os.killpg(driver.pid, signal.SIGINT)  # the terminal sends it to all of them
    out, err = driver.communicate(timeout=20)
    assert driver.returncode == 130 and out.endswith("interrupted\n") and err == ""
    assert gone(driver.pid)
    kept = Store(store).trials(Store(store).runs()[0].key)
    assert 10 <= len(kept) < 160 and all(t.status == "ok" for t in kept)
    run = execute(toys.PLAIN, Work(nap=0.0), store=store, jobs=1, replicates=40)
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
