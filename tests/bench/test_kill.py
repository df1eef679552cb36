"""A run that is killed again and again gives what an unbroken one gives."""

import importlib
import multiprocessing
import os
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path

from assay.bench.runner import execute
from assay.bench.store import Store
from assay.bench.verdict import decide

sys.path.insert(0, str(Path(__file__).parent))
toys = importlib.import_module("toy_claims")

REPLICATES = 50
WORK = {"nap": 0.006}
KILLS = 20


def drive(store, jobs):
    os.setsid()  # a process group of its own, workers included
    execute(toys.PLAIN, toys.ToyWorkload(**WORK), store=store, jobs=jobs, replicates=REPLICATES)


def there(path, key):
    return {(t.setting, t.replicate, t.arm): t for t in Store(path).trials(key)}


def test_twenty_kills_change_nothing(tmp_path):
    chance = random.Random(0)
    servers = multiprocessing.get_context("forkserver")  # starts a driver in milliseconds
    servers.set_forkserver_preload(["assay.bench.runner", "toy_claims"])
    path = tmp_path / "killed" / "trials.sqlite"
    unbroken = execute(
        toys.PLAIN, toys.ToyWorkload(**WORK), store=tmp_path / "unbroken.sqlite", jobs=1, replicates=REPLICATES
    )
    key = unbroken.key
    committed = {}
    watch = Store(path)
    progress = []
    for kill in range(KILLS):
        driver = servers.Process(target=drive, args=(str(path), 2 if kill % 7 == 0 else 1))
        driver.start()
        aim = len(committed) + chance.randrange(0, 10)  # 0: somewhere on its way to the first trial
        until = time.monotonic() + 30
        while len(watch.done(key)) < aim and driver.is_alive() and time.monotonic() < until:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.012))
        before = there(path, key)
        assert driver.is_alive(), "it was to be killed in the middle"
        try:
            os.killpg(driver.pid, signal.SIGKILL)
        except ProcessLookupError:  # too early to have a group
            os.kill(driver.pid, signal.SIGKILL)
        driver.join(10)
        assert driver.exitcode == -signal.SIGKILL
        after = there(path, key)
        assert all(after[name] == trial for name, trial in (committed | before).items())  # none lost, none run again
        committed = after
        progress.append(len(after))
    assert 40 < len(committed) < len(unbroken.trials), progress

    resumed = execute(toys.PLAIN, toys.ToyWorkload(**WORK), store=path, jobs=1, replicates=REPLICATES)
    final = {(t.setting, t.replicate, t.arm): t for t in resumed.trials}
    assert all(final[name] == trial for name, trial in committed.items())
    assert len(resumed.trials) == len(final) == len(unbroken.trials)
    with sqlite3.connect(path) as raw:
        assert raw.execute("select count(*) from assay_trials").fetchone() == (len(unbroken.trials),)
        assert raw.execute("pragma integrity_check").fetchone() == ("ok",)
    assert [t.metrics for t in resumed.trials] == [t.metrics for t in unbroken.trials]
    assert decide(resumed) == decide(unbroken)
    print("trials in the store after each kill:", progress)
