import dataclasses
import importlib
import math
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from assay.bench import provenance, registry, runner
from assay.bench.claim import Arm, Claim
from assay.bench.runner import execute, missing_requirement
from assay.bench.store import Store
from assay.bench.threads import ThreadLimit
from assay.bench.worker import load_claim, reference_of
from assay.errors import InputError, StoreError

sys.path.insert(0, str(Path(__file__).parent))
toys = importlib.import_module("toy_claims")
Work = toys.ToyWorkload


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store" / "trials.sqlite"


def names(trials):
    return [(t.setting, t.replicate, t.arm) for t in trials]


def numbers(run):
    return {(t.setting, t.replicate, t.arm): dict(t.metrics) for t in run.trials}


# ---- a run


def test_a_complete_run(store):
    run = execute(toys.PLAIN, Work(), store=store, jobs=1, scale="smoke")
    assert names(run.trials) == [(s, r, a) for s in ("one", "three") for r in range(3) for a in ("method", "baseline")]
    assert run.title == "toy data" and run.settings == ("one", "three") and run.replicates == 3
    assert run.arms == ("method", "baseline") and run.skipped == {} and run.options["nap"] == 0.0
    assert run.key.claim == "toy" and run.key.scale == "smoke" and run.key.device == "cpu" and run.key.seed == 0
    trial = run.trials[0]
    assert trial.status == "ok" and trial.metrics["bytes"] == 64.0 and trial.seconds > 0 and trial.finished
    assert trial.peak_rss > 10 * 2**20 and trial.peak_device == 0
    assert trial.environment["libraries"]["numpy"] == np.__version__
    matrix = np.random.default_rng([0, 0, 3]).normal(size=(60, 60))
    assert trial.metrics["loss"] == pytest.approx(np.linalg.svd(matrix, compute_uv=False).sum() / 60 - 1, rel=1e-12)


def test_what_is_there_is_not_run_again(store, tmp_path):
    work = Work(log=str(tmp_path / "log"))
    first = execute(toys.PLAIN, work, store=store, jobs=1, replicates=2)
    assert len((tmp_path / "log").read_text().splitlines()) == 4  # prepared once a replicate, not once an arm
    again = execute(toys.PLAIN, work, store=store, jobs=1, replicates=2)
    assert again.trials == first.trials
    more = execute(toys.PLAIN, work, store=store, jobs=1, replicates=3)
    assert len((tmp_path / "log").read_text().splitlines()) == 6
    assert [t for t in more.trials if t.replicate < 2] == list(first.trials)
    fewer = execute(toys.PLAIN, work, store=store, jobs=1, replicates=1)
    assert len(fewer.trials) == 4 and Store(store).runs()[0].replicates == 1


def test_another_workload_code_scale_or_seed_starts_anew(store, monkeypatch):
    runs = [
        execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=1),
        execute(toys.PLAIN, Work(limit=5), store=store, jobs=1, replicates=1),
        execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=1, seed=1),
        execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=1, scale="smoke"),
    ]
    monkeypatch.setattr(provenance, "fingerprint", lambda claim: "another version")
    runs.append(execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=1))
    assert len({run.key for run in runs}) == 5 == len(Store(store).runs())
    times = [t.finished for run in runs for t in run.trials]
    assert len(set(times)) > len(runs) and all(len(run.trials) == 4 for run in runs)
    assert runs[2].trials[0].metrics != runs[0].trials[0].metrics


def test_arms_can_be_chosen_and_added(store):
    part = execute(toys.PLAIN, Work(), store=store, jobs=1, arms=["baseline"], replicates=2)
    assert part.arms == ("baseline",) and {t.arm for t in part.trials} == {"baseline"}
    both = execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=2)
    assert [t for t in both.trials if t.arm == "baseline"] == list(part.trials)
    assert execute(toys.PLAIN, Work(), store=store, arms=("baseline", "method"), replicates=2).arms == both.arms


def test_what_goes_wrong_is_recorded_and_the_others_go_on(store, tmp_path):
    switch = tmp_path / "switch"
    switch.touch()
    run = execute(toys.TRICKY, Work(switch=str(switch)), store=store, jobs=1, scale="smoke")
    told = {(t.setting, t.replicate, t.arm): t for t in run.trials}
    assert len(told) == 2 * 3 * 4 + 3
    assert told["one", 0, "flaky"].status == "failed" and told["one", 0, "flaky"].metrics == {}
    assert "ZeroDivisionError: the switch is on" in told["one", 0, "flaky"].error
    assert "in flaky" in told["one", 0, "flaky"].error and "worker.py" not in told["one", 0, "flaky"].error
    assert "'loss' as 'low'; expected a number" in told["one", 0, "wordy"].error
    assert "'lozz', which is not a metric of tricky" in told["one", 1, "wordy"].error
    assert "must return {metric: number}, not NoneType" in told["one", 2, "wordy"].error
    assert math.isnan(told["one", 0, "not_finite"].metrics["loss"]) and told["one", 0, "not_finite"].status == "ok"
    assert told["one", 1, "not_finite"].metrics["loss"] == math.inf and ("three", 1, "not_finite") not in told
    assert all(t.status == "ok" for t in run.trials if t.arm in ("method", "baseline"))
    assert run.skipped == {
        "absent": "needs no-such-thing>=2: pip install 'no-such-thing>=2'",
        "old": f"needs numpy<1 (found {np.__version__}): pip install 'numpy<1'",
    }
    switch.unlink()
    again = execute(toys.TRICKY, Work(switch=str(switch)), store=store, jobs=1, scale="smoke")
    assert [t.metrics for t in again.trials if t.arm == "flaky"] == [{"loss": 1.0}] * 6
    assert again.select("one", "method") == run.select("one", "method")


def test_a_preparation_that_raises_fails_its_arms(store):
    run = execute(toys.PLAIN, Work(fail_prepare=1), store=store, jobs=1, replicates=3)
    assert {(t.replicate, t.status) for t in run.trials} == {(0, "ok"), (1, "failed"), (2, "ok")}
    assert all("RuntimeError: no such luck" in t.error for t in run.trials if t.replicate == 1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_input_refused_by_the_preparation_ends_the_run_and_writes_nothing(store, jobs):
    with pytest.raises(InputError, match="shorter than the context"):
        execute(toys.PLAIN, Work(refuse=0, settings=("one",)), store=store, jobs=jobs, replicates=1 if jobs == 1 else 2)
    assert jobs == 2 or not store.parent.exists()  # the other worker may have finished its replicate


def test_replicates_default_to_what_there_is(store):
    assert execute(toys.PLAIN, Work(limit=2), store=store, jobs=1).replicates == 2
    assert execute(toys.PLAIN, Work(limit=20), store=store, jobs=1, scale="smoke").replicates == 3


def test_progress(store):
    told = []
    execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=2, progress=lambda *a: told.append(a))
    assert told[0] == (0, 8, "starting") and told[-1] == (8, 8, "three, seed 1: baseline")
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    told.clear()
    execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=3, progress=lambda *a: told.append(a))
    assert told[0] == (8, 12, "starting") and told[-1][:2] == (12, 12)
    told.clear()
    execute(toys.PLAIN, Work(), store=store, jobs=1, replicates=3, progress=lambda *a: told.append(a))
    assert told == []


# ---- races


def test_races(store, tmp_path):
    run = execute(toys.RACING, Work(), store=store, jobs=1, scale="smoke", replicates=2)
    timed = run.select("one", "slow")[0].metrics
    assert set(timed) == {"bytes", "seconds", "seconds_low", "seconds_high"} and timed["bytes"] == 2.0
    assert 0.005 <= timed["seconds_low"] <= timed["seconds"] <= timed["seconds_high"]
    assert run.select("one", "fast")[0].metrics["seconds"] < timed["seconds"]
    assert len(run.trials) == 2 * 2 * 4 and all(t.status == "ok" for t in run.trials)
    assert run.select("one", "fast")[0].peak_rss > 0

    # An arm of a race that is run again takes the others with it, also those that were not asked for.
    again = execute(toys.RACING, Work(), store=store, jobs=1, scale="smoke", replicates=2)
    assert again.trials == run.trials
    part = execute(toys.RACING, Work(), store=store, jobs=1, scale="smoke", replicates=3, arms=["slow"])
    assert {t.arm for t in part.trials} == {"slow"}
    whole = execute(toys.RACING, Work(), store=store, jobs=1, scale="smoke", replicates=3)
    assert whole.select("one", "slow")[2].finished > part.select("one", "slow")[2].finished
    assert whole.select("one", "slow")[1] == run.select("one", "slow")[1]


def test_an_arm_that_raises_leaves_the_race(store, tmp_path):
    switch = tmp_path / "switch"
    switch.touch()
    run = execute(toys.RACING, Work(switch=str(switch)), store=store, jobs=1, scale="smoke", replicates=1)
    assert "ZeroDivisionError" in run.select("one", "slow")[0].error
    assert run.select("one", "fast")[0].metrics["seconds"] > 0


# ---- bad input: a clear message, nothing written


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": "dessk"}, "scale 'dessk' is unknown; did you mean 'desk'"),
        ({"scale": "paper"}, "scale 'paper' is unknown; there are: smoke, desk"),
        ({"arms": ["methd"]}, "arm of toy: 'methd' is unknown; did you mean 'method'"),
        ({"arms": "nothing like it"}, "there are: method, baseline"),
        ({"arms": []}, "arms is empty; toy has: method, baseline"),
        ({"replicates": 0}, "replicates must be a whole number of at least 1, not 0"),
        ({"replicates": 2.5}, "not 2.5"),
        ({"replicates": True}, "not True"),
        ({"replicates": 9}, r"replicates is 9, but there are only 8 \(seed\) in toy data; give 8 at most"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"jobs": 0}, "jobs must be"),
        ({"threads": 0}, "threads must be"),
        ({"device": "gpu"}, "device of toy: 'gpu' is unknown"),
        ({"device": "cpu:3"}, "device 'cpu:3' is unknown; expected 'cpu'"),
        ({"executor": "rai"}, "executor 'rai' is unknown; did you mean 'ray'"),
        ({"executor": "ray://head:10001"}, "Ray Client, .* give host:port"),
        ({"workload": object()}, "must be a ToyWorkload, not object"),
        ({"workload": Work(bad="yes")}, "bad is 'yes'"),
    ],
)
def test_bad_input(store, options, words):
    options = {"workload": Work(limit=8), **options}
    with pytest.raises(InputError, match=words):
        execute(toys.PLAIN, store=store, **options)
    assert not store.parent.exists()


def test_executor_without_its_library(store, monkeypatch):
    monkeypatch.setattr(runner.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs ray, which is not installed: pip install 'assay\[ray\]'"):
        execute(toys.PLAIN, Work(), store=store, executor="ray")


def test_a_store_that_cannot_be_used_is_found_out_before_work_begins(tmp_path):
    (tmp_path / "file").write_text("not a database, not even close to one")
    with pytest.raises(StoreError):
        execute(toys.PLAIN, Work(log=str(tmp_path / "log")), store=tmp_path / "file", jobs=1)
    assert not (tmp_path / "log").exists()


def test_devices(monkeypatch):
    both = dataclasses.replace(toys.PLAIN, devices=("cpu", "cuda"))
    monkeypatch.setattr(runner, "_cuda_count", lambda: 2)
    assert runner._device(both, None) == "cuda" and runner._device(toys.PLAIN, None) == "cpu"
    assert runner._device(both, "cuda:1") == "cuda:1" and runner._device(both, "cpu") == "cpu"
    for bad in ("cuda:2", "cuda:x"):
        with pytest.raises(InputError, match="this machine has cuda:0 to cuda:1"):
            runner._device(both, bad)
    monkeypatch.setattr(runner, "_cuda_count", lambda: 0)
    assert runner._device(both, None) == "cpu"
    with pytest.raises(InputError, match="no CUDA device"):
        runner._device(both, "cuda")
    monkeypatch.undo()
    assert isinstance(runner._cuda_count(), int)


def test_requirements():
    assert missing_requirement(()) == "" and missing_requirement(("numpy", "numpy>=1")) == ""
    assert missing_requirement(("nope",)) == "needs nope: pip install nope"
    assert missing_requirement(("nope", "numpy<1")).endswith("pip install nope 'numpy<1'")


# ---- how workers find a claim


def test_references(monkeypatch):
    assert reference_of(toys.PLAIN) == "toy_claims:PLAIN"
    assert load_claim("toy_claims:RACING") is toys.RACING
    with pytest.raises(InputError, match="does not name a Claim"):
        load_claim("toy_claims:LOSS")
    assert reference_of(dataclasses.replace(toys.PLAIN)) is None
    entry = registry.Entry("toy", "external", "", "toy_claims:PLAIN")
    monkeypatch.setattr(registry, "entries", lambda: {"toy": entry})
    assert reference_of(toys.PLAIN) == "toy" and load_claim("toy") is toys.PLAIN


def test_a_claim_that_no_module_holds(store):
    loose = dataclasses.replace(toys.PLAIN)
    assert len(execute(loose, Work(), store=store, jobs=1, replicates=1).trials) == 4
    with pytest.raises(InputError, match="jobs=1"):
        execute(loose, Work(), store=store, jobs=2, replicates=3)


# ---- where numbers come from


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package outside of assay, with a claim that imports its own modules in several ways."""
    root = tmp_path / "site" / "stranger"
    (root / "deep").mkdir(parents=True)
    files = {
        "__init__.py": "",
        "claim.py": (
            "import toy_claims, dataclasses\nfrom . import near\nfrom .deep.far import thing\n"
            "def run(shared, replicate):\n    import stranger.inside\n    from assay.statistics import quick\n"
            "ARM = dataclasses.replace(toy_claims.PLAIN.arms[0], run=run)\n"
            "CLAIM = dataclasses.replace(toy_claims.PLAIN, arms=(ARM, toy_claims.PLAIN.arms[1]))\n"
        ),
        "near.py": "from .deep import other\n",
        "deep/__init__.py": "TABLE = {'quick': 'lazy'}\n",
        "deep/far.py": "thing = 1\n",
        "deep/other.py": "",
        "deep/lazy.py": "",
        "inside.py": "def f():\n    from stranger.deep import quick\n",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    monkeypatch.syspath_prepend(root.parent)
    yield root
    for name in [n for n in sys.modules if n.partition(".")[0] == "stranger"]:
        del sys.modules[name]


def test_fingerprint_covers_what_is_imported_and_nothing_else(package):
    claim = importlib.import_module("stranger.claim").CLAIM
    assert provenance.module_of(claim) == "stranger.claim"
    covered = {name for name in provenance.sources(claim) if name.startswith("stranger")}
    assert covered == {
        "stranger",
        "stranger.claim",
        "stranger.near",
        "stranger.deep",
        "stranger.deep.far",
        "stranger.deep.other",
        "stranger.deep.lazy",
        "stranger.inside",
    }
    before = provenance.fingerprint(claim)
    assert before == provenance.fingerprint(claim) and len(before) == 64
    (package / "unrelated.py").write_text("x = 1")
    assert provenance.fingerprint(claim) == before
    for name in ("claim.py", "near.py", "deep/far.py", "deep/other.py", "deep/lazy.py", "inside.py"):
        with (package / name).open("a") as file:
            file.write("# changed\n")
        after = provenance.fingerprint(claim)
        assert after != before, name
        before = after


def test_fingerprint_of_our_own_claims():
    for slug in ("rqr", "kivi", "stein_thinning"):
        try:
            claim = registry.load(slug)
        except InputError:
            pytest.skip(f"{slug} is not there yet")
        covered = set(provenance.sources(claim))
        assert f"assay.claims.{slug}" in covered and any(n.startswith(f"assay.{claim.family}.{slug}") for n in covered)
        assert not any(n.startswith(("assay.bench", "assay.cli")) for n in covered)
        assert f"assay.{claim.family}" not in covered and "assay" not in covered
        assert any(n.startswith("assay.workloads") for n in covered)


def test_a_part_that_is_a_folder_is_covered_whole(tmp_path, monkeypatch):
    import assay

    folder = tmp_path / "toys" / "toy"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "maths.py"):
        (folder / name).write_text("")
    monkeypatch.setattr(assay, "__path__", [*assay.__path__, str(tmp_path)])
    assert {"assay.toys.toy", "assay.toys.toy.maths"} <= set(provenance.sources(toys.PLAIN))


def test_a_worker_refuses_other_code_or_data(store, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(provenance, "fingerprint", lambda claim: "an older version")
        with pytest.raises(InputError, match=r"the code has fingerprint .* expected an older ve"):
            execute(toys.PLAIN, Work(), store=store, jobs=2)
    monkeypatch.setattr(
        toys.ToyTask, "digest", property(lambda self: "x" * 64, lambda self, value: None), raising=False
    )
    with pytest.raises(InputError, match=r"the data have digest .* expected xxxxxxxxxxxx"):
        execute(toys.PLAIN, Work(), store=store, jobs=2)


def test_environment_imports_nothing(tmp_path):
    import subprocess

    code = (
        "import sys, json; from assay.bench.provenance import environment; e = environment(); json.dumps(e);"
        "print(e['libraries']['torch'], e['python'], e['commit'], 'torch' in sys.modules, 'sklearn' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[-2:] == ["False", "False"] and out[1] == ".".join(map(str, sys.version_info[:3]))


def test_environment_where_little_is_known(monkeypatch):
    import types

    def refuse(*args, **kwargs):
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", refuse)
        patch.setattr(os, "sysconf", refuse)
        assert isinstance(provenance._cpu(), str) and provenance._memory() is None
    cuda = types.SimpleNamespace(is_initialized=lambda: True, get_device_name=lambda: "H200")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert provenance.environment()["gpu"] == "H200"
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())
    assert provenance.environment()["gpu"] == ""


def test_commit_is_that_of_our_checkout_only(monkeypatch, tmp_path):
    import assay

    root = Path(assay.__file__).parents[2]
    if (root / ".git").exists() and shutil.which("git"):
        assert len(provenance._commit.__wrapped__()["commit"]) == 40
    monkeypatch.setattr(assay, "__file__", str(tmp_path / "site-packages" / "assay" / "__init__.py"))
    assert provenance._commit.__wrapped__() == {"commit": "", "dirty": False}


# ---- threads


def test_threads_are_limited_and_restored():
    threadpoolctl = importlib.import_module("threadpoolctl")
    torch = importlib.import_module("torch")
    numba = importlib.import_module("numba")
    np.linalg.svd(np.eye(3))
    before = torch.get_num_threads(), numba.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(2)
    try:
        with ThreadLimit(1) as limit:
            limit.refresh()
            assert {pool["num_threads"] for pool in threadpoolctl.threadpool_info()} == {1}
            assert torch.get_num_threads() == 1 and numba.get_num_threads() == 1
            assert os.environ["OMP_NUM_THREADS"] == "1"
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before[0])
    assert (torch.get_num_threads(), numba.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == before


# ---- cost


@pytest.mark.parametrize(("jobs", "trials"), [(1, 2_000), (2, 10_000)])
def test_many_trials_cost_little(store, jobs, trials):
    work = Work(nap=0.0, settings=("one",))
    start = time.perf_counter()
    run = execute(toys.TRIVIAL, work, store=store, replicates=trials // 2, jobs=jobs)
    took = time.perf_counter() - start
    assert len(run.trials) == trials and all(t.status == "ok" for t in run.trials)
    print(f"jobs={jobs}: {1e3 * took / trials:.2f} ms a trial")
    assert took / trials < 0.005
    start = time.perf_counter()
    assert execute(toys.TRIVIAL, work, store=store, replicates=trials // 2, jobs=jobs).trials == run.trials
    assert time.perf_counter() - start < 5


def test_claims_are_data():
    assert isinstance(toys.PLAIN, Claim) and isinstance(toys.PLAIN.arms[0], Arm)
