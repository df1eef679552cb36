"""The claim at smoke scale: every arm, the runner, own data, and that importing it loads nothing heavy."""

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from assay.bench.claim import Timed
from assay.bench.trial import expected_arms
from assay.claims.stein_thinning import CLAIM
from assay.workloads.samples import Samples

SMOKE = CLAIM.scales["smoke"].options


@pytest.fixture(scope="module")
def results():
    """All arms on one replicate of each setting, by setting and arm."""
    task = Samples(**SMOKE).build(device="cpu", seed=0)
    found = {}
    for setting in task.settings:
        shared = task.prepare(setting, 0)
        for arm in expected_arms(CLAIM.arms, setting):
            found[setting, arm.name] = arm.run(shared, 0)
    return found


def test_all_arms_report_known_metrics(results):
    known = {m.name for m in CLAIM.metrics}
    for (setting, arm), found in results.items():
        metrics = found.metrics if isinstance(found, Timed) else found
        assert isinstance(found, Timed) == (CLAIM.arm(arm).race is not None)
        assert set(metrics) <= known and all(math.isfinite(v) for v in metrics.values()), (setting, arm, metrics)
        if "mmd" in metrics:
            assert metrics["mmd"] > 0 and metrics["unique"] <= 2 * SMOKE["size"] and metrics["mse"] >= 0
    assert {s for s, _ in results} == {"burnin", "temper", "off"}
    assert {a for _, a in results} == {a.name for a in CLAIM.arms}


def test_relations_that_hold_by_construction(results):
    for setting in ("burnin", "temper", "off"):
        mmd = {arm.name: results[setting, arm.name].get("mmd") for arm in CLAIM.arms if arm.race is None
               and (setting, arm.name) in results}  # fmt: skip
        assert mmd["peer"] == pytest.approx(mmd["st"], rel=1e-9)  # the same picks
        assert mmd["skt"] <= mmd["st_swap"] + 1e-12  # one of its candidates
        assert mmd["st_swap"] <= mmd["st"] + 1e-12 and mmd["st_qp"] <= mmd["st"] + 1e-12
        assert mmd["st"] < mmd["standard"] and mmd["skt"] < mmd["kt_biased"] and mmd["skt"] < mmd["goodpoints"]
        smallest = results[setting, "sr_smallest"]
        assert smallest["mmd"] <= mmd["skt"] and 1 <= smallest["smallest"] <= 2 * SMOKE["size"]
    assert results["temper", "peer_time"].metrics["agreement"] == 1


def test_recombination_arm_is_the_method():
    from assay.statistics.stein_thinning import compress

    shared = Samples(**SMOKE).build(device="cpu", seed=0).prepare("temper", 1)
    direct = compress(shared.points, shared.scores, shared.size, "sr", random_state=shared.seed)
    assert CLAIM.arm("sr").run(shared, 1)["mmd"] == pytest.approx(direct.mmd, rel=1e-9)


def test_timed_arms_do_the_work(results):
    greedy, peer = (results["temper", name].call() for name in ("st_time", "peer_time"))
    assert (greedy == peer).all() and greedy.size == 64
    weights = results["temper", "qp_time"].call()
    assert weights.min() >= 0 and weights.sum() == pytest.approx(1)
    assert len(results["temper", "skt_time"].call()) == 16


def test_energy_distance():
    from assay.claims.stein_thinning import _energy

    shared = Samples(points=4000, size=16, scenarios=("temper",)).build(device="cpu", seed=0).prepare("temper", 0)
    many = np.arange(2000)
    wide = _energy(shared, many, np.full(2000, 1 / 2000))
    shared.points = np.random.default_rng(9).multivariate_normal(np.zeros(4), np.cov(shared.reference.T), size=4000)
    right = _energy(shared, many, np.full(2000, 1 / 2000))
    assert abs(right) < 0.01 < wide


def test_runner(tmp_path):
    from assay.bench import runner, verdict

    run = runner.execute(
        CLAIM,
        Samples(),
        scale="smoke",
        jobs=1,
        store=tmp_path / "store.db",
        arms=["skt", "st", "peer", "peer_defaults", "lskt", "sr", "sc", "sr_few", "st_swap"],
    )
    assert len(run.trials) == 9 * 3 * 2 and all(t.status == "ok" for t in run.trials)
    answer = verdict.decide(run)
    assert {d.statement.name for d in answer.decisions} >= {"skt", "lskt", "sr", "fewer"}


def test_own_draws(tmp_path):
    x = 2 * np.random.default_rng(0).normal(size=(800, 3))
    np.savez(tmp_path / "draws.npz", points=x, scores=-x)
    task = Samples(samples=str(tmp_path / "draws.npz"), size=16).build(device="cpu", seed=0)
    shared = task.prepare("own", 2)
    arms = expected_arms(CLAIM.arms, "own")
    assert {"burnin_cut", "st_time", "skt"} <= {a.name for a in arms} and "skt_growth" not in {a.name for a in arms}
    for arm in arms:
        found = arm.run(shared, 2)
        assert isinstance(found, Timed) or set(found) <= {"mmd", "unique", "smallest"}, arm.name


def test_snippet_and_words():
    namespace = {}
    exec(CLAIM.snippet, namespace)
    assert len(namespace["coreset"]) == 32
    assert "--samples" in CLAIM.example
    assert set(CLAIM.scales) == {"smoke", "desk", "paper"}
    assert CLAIM.scales["desk"].replicates >= 5


def test_card_example_runs(capsys):
    card = Path(__file__).parents[2] / "docs" / "methods" / "stein_thinning.md"
    blocks = re.findall(r"^```python\n(.*?)^```", card.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1
    namespace = {}
    exec(blocks[0], namespace)
    assert len(namespace["coreset"]) <= 64 and namespace["coreset"].mmd < 0.05
    np.testing.assert_allclose(namespace["coreset"].expectation(lambda x: x**2), 1, atol=0.1)
    assert capsys.readouterr().out


def test_import_is_light():
    code = (
        "import sys; import assay.claims.stein_thinning;"
        "print([m for m in ('torch', 'sklearn', 'numba', 'pandas', 'arviz', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
