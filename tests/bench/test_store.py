import json
import math
import multiprocessing
import os
import pickle
import sqlite3
from dataclasses import replace

import pytest

from assay.bench.store import Store, default_location
from assay.bench.trial import RunKey, Trial

KEY = RunKey("toy", "desk", "w0", "c0", "cpu", 0)
ABOUT = {
    "title": "toy data",
    "options": {"nap": 0.1, "data": None},
    "settings": ("one", "two"),
    "replicates": 4,
    "arms": ("a", "b"),
    "skipped": {"c": "needs d: pip install d"},
}


def trial(replicate=0, arm="a", setting="one", **more):
    metrics = more.pop("metrics", {"loss": 0.1 + replicate})
    return Trial(setting, replicate, arm, more.pop("status", "ok"), metrics, environment={"cpu": "x"}, **more)


def failed(replicate=0, arm="a"):
    return trial(replicate, arm, status="failed", metrics={}, error="Traceback: no")


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "deep" / "er" / "trials.sqlite") as opened:
        yield opened


def test_what_goes_in_comes_out(store):
    metrics = {"pi": math.pi, "tiny": 5e-324, "many": 2.0**53, "inf": math.inf, "minus": -math.inf, "nan": math.nan}
    put = trial(
        metrics=metrics, seconds=1.25, peak_rss=2**40, peak_device=7, finished="2024-01-01T00:00:00.000+00:00", error=""
    )
    store.add(KEY, [put, failed(1)])
    got, bad = Store(store.path).trials(KEY)
    assert math.isnan(got.metrics.pop("nan")) and math.isnan(put.metrics.pop("nan"))
    assert got == put
    assert bad.status == "failed" and bad.error == "Traceback: no" and bad.metrics == {}
    assert bad.finished.endswith("+00:00")


def test_stored_metrics_are_standard_json(store):
    store.add(KEY, [trial(metrics={"a": math.nan, "b": math.inf})])
    with sqlite3.connect(store.path) as raw:
        (text,) = raw.execute("select metrics from assay_trials").fetchone()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == {"a": "nan", "b": "inf"}


def test_reading_and_checking_leave_no_trace(store, tmp_path):
    store.check()
    assert store.trials(KEY) == () and store.runs() == [] and store.done(KEY) == {}
    store.add(KEY, [])
    assert list(tmp_path.iterdir()) == []
    store.add(KEY, [trial()])
    assert store.path.is_file()
    store.check()


def test_a_trial_is_there_once_and_the_first_success_stays(store):
    store.add(KEY, [failed()])
    assert store.done(KEY) == {("one", 0, "a"): False}
    store.add(KEY, [replace(failed(), error="again")])
    assert store.trials(KEY)[0].error == "again"  # a retry tells what is true now
    store.add(KEY, [trial(metrics={"loss": 1.0})])
    store.add(KEY, [trial(metrics={"loss": 2.0})])
    store.add(KEY, [failed()])
    (only,) = store.trials(KEY)
    assert only.metrics == {"loss": 1.0} and only.error == ""
    store.add(KEY, [trial(metrics={"loss": 3.0})], replace=True)
    assert [t.metrics for t in store.trials(KEY)] == [{"loss": 3.0}]


def test_since_leaves_old_failures_out(store):
    store.add(KEY, [replace(failed(0), finished="2024-01-01T00:00:00.000+00:00")])
    store.add(KEY, [trial(1, finished="2024-01-01T00:00:00.000+00:00"), failed(2)])
    assert set(store.done(KEY, since="2025-01-01")) == {("one", 1, "a"), ("one", 2, "a")}


def test_all_trials_of_a_call_or_none(store):
    with pytest.raises(TypeError):
        store.add(KEY, [trial(0), trial(1, metrics={"loss": "text"})])
    assert store.trials(KEY) == ()


def test_runs_do_not_mix(store):
    others = [
        replace(KEY, **{name: value})
        for name, value in [
            ("claim", "x"),
            ("scale", "smoke"),
            ("workload", "w1"),
            ("code", "c1"),
            ("device", "cuda"),
            ("seed", 1),
        ]
    ]
    for i, key in enumerate([KEY, *others]):
        store.add(key, [trial(metrics={"loss": float(i)})])
    assert [store.trials(k)[0].metrics["loss"] for k in [KEY, *others]] == list(range(7))
    assert len(store.runs()) == 7


def test_what_was_asked_can_be_read_back(store):
    class Frame:
        shape = (3, 2)

    store.describe(KEY, **ABOUT)
    store.add(KEY, [trial(0), failed(1)])
    store.describe(KEY, **{**ABOUT, "replicates": 9, "options": {"data": Frame(), "path": store.path, "x": [Frame()]}})
    (record,) = store.runs()
    assert record.key == KEY and record.title == "toy data" and record.replicates == 9
    assert record.settings == ("one", "two") and record.arms == ("a", "b") and record.skipped == ABOUT["skipped"]
    assert (record.ok, record.failed) == (1, 1)
    assert record.options == {
        "data": "Frame of shape (3, 2)",
        "path": str(store.path),
        "x": ["Frame of shape (3, 2)"],
    }
    assert record.first_used <= record.last_used


def test_the_run_used_last_comes_first(store):
    second = replace(KEY, seed=1)
    store.add(KEY, [trial()])
    store.add(second, [trial()])
    assert [r.key for r in store.runs()] == [second, KEY]


def test_a_run_can_be_loaded_from_its_record(store):
    store.describe(KEY, **ABOUT)
    extra = [trial(0, "b"), trial(0, "a"), trial(0, "zzz"), trial(7, "a"), trial(0, "a", setting="three")]
    store.add(KEY, [trial(1, "a", setting="two"), *extra])
    (record,) = store.runs()
    run = store.load(record, claim=None)
    assert [(t.setting, t.replicate, t.arm) for t in run.trials] == [("one", 0, "a"), ("one", 0, "b"), ("two", 1, "a")]
    assert run.key == KEY and run.replicates == 4 and run.skipped == ABOUT["skipped"]


def test_environments_are_stored_once(store):
    for i in range(20):
        store.add(KEY, [trial(i)])
    Store(store.path).add(KEY, [trial(20)])
    with sqlite3.connect(store.path) as raw:
        assert raw.execute("select count(*) from assay_environments").fetchone() == (1,)
    assert all(t.environment == {"cpu": "x"} for t in store.trials(KEY))


def test_a_store_pickles_as_its_address_and_opens_again_after_close(store):
    store.add(KEY, [trial()])
    assert pickle.loads(pickle.dumps(store)).trials(KEY) == store.trials(KEY)
    store.close()
    assert len(store.trials(KEY)) == 1
    assert repr(store) == f"Store({str(store.path)!r})"


def test_default_location(monkeypatch, tmp_path):
    monkeypatch.setenv("ASSAY_STORE", "sqlite:///here.sqlite")
    assert default_location() == "sqlite:///here.sqlite"
    assert Store().path.name == "here.sqlite"
    monkeypatch.delenv("ASSAY_STORE")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Store().path == tmp_path / "assay" / "trials.sqlite"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store().path == tmp_path / ".local" / "share" / "assay" / "trials.sqlite"


def write_many(url, arms, gate):
    store = Store(url)
    gate.wait()
    for i in range(60):
        for arm in arms:
            store.add(KEY, [trial(i, arm, metrics={"loss": float(os.getpid())})])


def both_at_once(url):
    """Two processes make the store and write 120 trials each, 60 of them the same."""
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(2)
    writers = [context.Process(target=write_many, args=(url, arms, gate)) for arms in (("a", "b"), ("b", "c"))]
    for w in writers:
        w.start()
    for w in writers:
        w.join(60)
    assert [w.exitcode for w in writers] == [0, 0]
    names = [(t.replicate, t.arm) for t in Store(url).trials(KEY)]
    assert len(names) == len(set(names)) == 180
    assert len(Store(url).runs()) == 1


def test_two_processes_write_at_once(tmp_path):
    both_at_once(str(tmp_path / "new" / "trials.sqlite"))
