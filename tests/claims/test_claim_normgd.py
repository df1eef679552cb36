"""The claim of NormGD: solvers, counts, tuning, timing, and a user's own fit."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from assay.bench.claim import Timed
from assay.claims import _normgd_solvers as solvers
from assay.claims.normgd import CLAIM, SIZES, scikit_em
from assay.workloads.singular import SingularFits, draw

ROOT = Path(__file__).parents[2]
PLAIN = [a for a in CLAIM.arms if a.race is None and a.name != "em_sklearn"]


@pytest.fixture(scope="module")
def task():
    return SingularFits(sizes=[500, 2000], models=["glm2", "glm3", "gmm"]).build(device="cpu", seed=0)


@pytest.mark.parametrize("arm", PLAIN, ids=lambda a: a.name)
def test_every_arm_counts_at_each_size_and_over_all(task, arm):
    for setting in ("gmm", "gmm-2k", "glm2-500"):
        if arm.where and setting not in arm.where:
            continue
        found = arm.run(task.prepare(setting, 0), 0)
        assert set(found) <= {m.name for m in CLAIM.metrics} and all(map(math.isfinite, found.values()))
        assert found["reached"] == 1
        if setting == "gmm":
            assert found["slope"] == found["growth"] and found["straight"] <= 1 and "steps" not in found
        else:
            assert 1 <= found["steps"] <= solvers.CAP and "slope" not in found
        assert found == arm.run(task.prepare(setting, 0), 0)


def test_counts_of_eight_seeds_are_those_of_the_theory():
    """Medians at 1k, 4k and 16k rows: 9/11/13 (p = 2) and 11/13/15 (p = 3) for eta 0.5; 4/5/6 and 5/6/7 for eta 1."""
    expected = {
        ("glm2", 0.5): (9, 11, 13),
        ("glm3", 0.5): (11, 13, 15),
        ("glm2", 1.0): (4, 5, 6),
        ("glm3", 1.0): (5, 6, 7),
    }
    for (name, eta), counts in expected.items():
        for n, count in zip((1000, 4000, 16000), counts):
            samples = [draw(name, n, 4, seed) for seed in range(8)]
            got = [solvers.steps_of(solvers.normgd, solvers.model_of(s), s, eta, -np.inf) for s in samples]
            assert abs(np.median(got) - count) <= 1


def median_count(solver, option, name, n, seeds):
    """Median of steps from a start of norm 1; a sample whose optimum lies outside the radius never gets there."""
    counts = []
    for seed in range(seeds):
        s = draw(name, n, 4, seed)
        s = dataclasses.replace(s, start=s.start / 1.7)
        counts.append(solvers.steps_of(solver, solvers.model_of(s), s, option, -np.inf) or np.inf)
    return np.median(counts)


def test_counts_from_norm_one():
    """Eta 0.5 from norm 1, at 1k, 4k, 16k and 64k rows: those of an independent prototype within one step."""
    expected = {"glm2": (6, 8, 10, 12), "glm3": (5, 8, 10, 12), "gmm": (4, 6, 7.5)}
    for name, counts in expected.items():
        for n, count in zip((1000, 4000, 16000, 64000), counts):
            assert abs(median_count(solvers.normgd, 0.5, name, n, 8) - count) <= 1, (name, n)


@pytest.mark.parametrize(
    ("name", "step", "counts"),
    [("glm2", 0.02, (24.5, 55, 107, 228.5)), ("glm3", 0.002, (18.5, 48.5, 132, 344.5)), ("gmm", 1.0, (4, 8, 14))],
)
def test_gradient_descent_from_norm_one_takes_the_known_number_of_steps(name, step, counts):
    """A given step (for the mixture that of EM) from norm 1: within 15% of an independent prototype."""
    for n, count in zip((1000, 4000, 16000, 64000), counts):
        got = median_count(solvers.descent, step, name, n, 8 if n == 64000 else 24)
        assert got == pytest.approx(count, rel=0.15, abs=1), n


def test_watch_ends_all_solvers_before_the_loss_is_computed():
    s = draw("glm2", 500, 4, 0)
    seen = []

    class Model:
        def __call__(self, x, hessian=True):
            seen.append(x)
            return solvers.model_of(s)(x, hessian)

    for solver, option in ((solvers.normgd, 1.0), (solvers.lbfgs, 0.0), (solvers.descent, 0.02)):
        seen.clear()
        count = solvers.steps_of(solver, Model(), s, option, -np.inf)
        # The start is evaluated, the point of the hit is not.
        assert len(seen) == count and all(s.distance(x) > 1.5 * s.radius for x in seen)


def test_a_run_that_fails_has_no_count():
    s = draw("glm2", 500, 4, 0)
    model = solvers.model_of(s)
    assert solvers.steps_of(solvers.descent, model, s, 10.0, -np.inf) is None
    far = dataclasses.replace(s, radius=1e-9)
    assert solvers.steps_of(solvers.newton, model, far, 0.0, -np.inf) is None
    count, step = solvers.stable_descent(model, s, 1.0, -np.inf)
    assert count is not None and step < 1.0


@pytest.mark.parametrize("name", ["glm2", "glm3", "gmm"])
def test_pilot_step_is_the_largest_stable_one(name):
    s = draw(name, 500, 4, 1)
    step = solvers.largest_step(s)
    trial = solvers.pilot(s)
    model = solvers.model_of(trial)
    f = model(trial.start)[0]
    assert solvers._is_stable(model, trial.start, f, step, False)
    assert not solvers._is_stable(model, trial.start, f, step * 2**0.25, False)
    assert solvers.largest_step(s, overshoot=True) >= step
    assert not np.array_equal(trial.X, draw(name, 4000, 4, 1).X)  # no arm is measured on it
    assert step == solvers.largest_step(draw(name, 1000, 4, 1))  # the same at all sizes


@pytest.mark.parametrize("name", ["glm2", "glm3", "gmm", "strong2"])
def test_final_errors_of_gradient_descent_are_those_of_the_optimum(name):
    """Compiled descent on the polynomial is plain descent, and run to its end it is at L-BFGS's optimum."""
    s = draw(name, 1000, 4, 1)
    model, step = solvers.model_of(s), solvers.largest_step(s)
    x, taken = solvers.final_descent(s, step)
    assert np.linalg.norm(model.fun_jac(x)[1]) < 2e-9 and 10 < taken < 20_000_000
    assert s.distance(x) == pytest.approx(s.distance(solvers.lowest(model, s).x), rel=1e-4)
    if s.power:
        y, moved = s.start.copy(), s.start.copy()
        short = type(model)(s.X, s.y, s.power, sufficient_statistics=True)
        assert solvers._polynomial_descent()(*short.polynomial(), moved, step, 0.0, 20) == 20
        for _ in range(20):
            y = y - step * model.fun_jac(y)[1]
        np.testing.assert_allclose(moved, y, rtol=1e-9)


def test_scikit_stops_by_itself(task):
    assert scikit_em(task.prepare("gmm", 0), 0) == {}
    found = scikit_em(task.prepare("gmm-2k", 0), 0)
    assert 1 <= found["stopped"] <= 100 and found["error"] > 0


@pytest.mark.parametrize("arm", [a for a in CLAIM.arms if a.race], ids=lambda a: a.name)
def test_timed_arms_give_a_call_that_repeats(task, arm):
    timed = arm.run(task.prepare("gmm", 0), 0)
    assert isinstance(timed, Timed) and timed.metrics["passes"] >= 1
    timed.call()
    timed.call()


def test_own_table_and_loss_through_the_runner(tmp_path, monkeypatch):
    api = pytest.importorskip("assay.bench.api")
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(400, 3)), columns=list("abc"))
    frame["y"] = (frame["a"] + frame["b"]) ** 2 + rng.normal(size=400)
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "normgd_own_loss.py").write_text("def loss(x):\n    return (x @ x) ** 2 + 0.1 * (x**4).sum()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cases = {
        "data": {"data": tmp_path / "t.csv", "target": "y"},
        "mixture": {"data": frame[["a", "b", "c"]]},
        "loss": {"loss": "normgd_own_loss:loss", "d": 3},
    }
    for name, options in cases.items():
        arms = {"normgd", "gd", "lbfgs"} | ({"em"} if name == "mixture" else set())
        options |= {"arms": sorted(arms), "store": tmp_path / f"{name}.sqlite"}
        result = api.run("normgd", scale="smoke", jobs=1, progress=False, **options)
        assert {t.status for t in result.run.trials} == {"ok"}
        steps = {t.arm: t.metrics["steps"] for t in result.run.trials}
        assert set(steps) == arms and result.run.settings == (name,)
    assert steps["normgd"] < steps["gd"]


def test_smoke_run_through_the_runner(tmp_path):
    api = pytest.importorskip("assay.bench.api")
    result = api.run("normgd", scale="smoke", jobs=1, store=tmp_path / "s.sqlite", progress=False)
    assert {t.status for t in result.run.trials} == {"ok"}
    assert {"flat", "steep", "error", "time"} <= {d.statement.name for d in result.verdict.decisions}


def test_curves_hold_the_sizes_of_every_scale():
    for scale in CLAIM.scales.values():
        assert set(scale.options.get("sizes", (1000, 4000, 16000, 64000))) <= set(SIZES)


def test_importing_the_claim_loads_nothing_heavy():
    code = "import sys, assay.claims.normgd; print([m for m in ('torch', 'sklearn', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_examples_run():
    scope: dict = {}
    exec(CLAIM.snippet, scope)
    assert scope["model"].singular_
    card = (ROOT / "docs" / "methods" / "normgd.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert blocks and card.count("<!-- results:begin -->") == card.count("<!-- results:end -->") == 1
    for block in blocks:
        exec(block, {})
