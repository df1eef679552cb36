"""The error of a verdict, by simulation. It can fail: the last tests show rules that do."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from assay.bench.claim import Arm, Claim, Metric, Paper, Scale, Statement
from assay.bench.trial import Run, RunKey, Trial
from assay.bench.verdict import ASYMMETRIC_BELOW, decide

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("assay_scripts_calibration", ROOT / "scripts" / "calibration.py")
calibration = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(calibration)

RUNS = 20_000
ALLOWED = 0.025 + 4 * np.sqrt(0.025 * 0.975 / RUNS)


def test_identical_arms_hold_in_at_most_one_of_forty_runs():
    rows = {
        values: {str(n): calibration.false_rate(values, n, RUNS, seed=30) for n in calibration.REPLICATES}
        for values in calibration.VALUES
    }
    print("\n" + calibration.table(rows, "values of each arm"))
    assert calibration.REPLICATES == (3, 5, 10, 20, 50)
    assert {(v, n): rate for v, row in rows.items() for n, rate in row.items() if rate > ALLOWED} == {}


@pytest.mark.parametrize("values", calibration.VALUES)
@pytest.mark.parametrize("n", [3, 5, 10])
def test_the_simulated_rule_is_what_decide_does(values, n):
    """The same runs, trial by trial through decide(); shifted, so that all three answers occur."""
    rng = np.random.default_rng([7, n])
    ratio = "ratio" in values
    method, baseline = calibration.VALUES[values](rng, (60, n))
    method = method * np.exp(rng.normal(size=(60, 1))) if ratio else method + 2 * rng.normal(size=(60, 1)).round(1)
    statement = Statement("s", "", "x", "m", ("b",), scale="ratio" if ratio else "difference")
    arms = (Arm("m", lambda shared, r: {}, "method"), Arm("b", lambda shared, r: {}, "baseline"))
    claim = Claim(
        *("c", "", "f", Paper("", ""), "", (statement,), (Metric("x", "", "higher"),), arms),
        *(type("Workload", (), {}), {"smoke": Scale(n)}, "seed", "", ""),
    )
    answers = []
    for a, b in zip(method, baseline):
        trials = [Trial("", r, arm, "ok", {"x": float(v[r])}) for arm, v in (("m", a), ("b", b)) for r in range(n)]
        run = Run(claim, RunKey("c", "", "", "", "", 0), "", ("here",), n, ("m", "b"), ())
        trials = tuple(Trial("here", t.replicate, t.arm, "ok", t.metrics) for t in trials)
        answers.append(decide(Run(**{**vars(run), "trials": trials})).answer)
    np.testing.assert_array_equal(np.array(answers) == "holds", calibration.verdict_holds(method, baseline, ratio))
    if n > 3:
        assert set(answers) == {"holds", "does not hold", "undecided"}


def test_power_grows_with_effect_and_replicates():
    rate = {(n, e): calibration.power("normal", n, e, 5000) for n in (5, 10, 20) for e in (0.5, 1, 2)}
    print(rate)
    assert rate[20, 0.5] > 0.45 and rate[10, 1] > 0.7 and rate[5, 2] > 0.85
    assert all(rate[n, 0.5] < rate[n, 1] < rate[n, 2] for n in (5, 10, 20))


def test_asymmetric_differences_err_and_are_warned_of():
    name = "exponential, tail to the bad side"
    rate = {n: calibration.uncovered_rate(name, n, 5000) for n in (5, 20, 50)}
    print(rate)
    assert rate[20] > 0.04  # docs/verdicts.md says so; no gate
    assert calibration.warned_rate(calibration.UNCOVERED[name], 50, ASYMMETRIC_BELOW, 500) > 0.85


@pytest.mark.parametrize("n", [10, 20, 50])
def test_symmetric_differences_rarely_warn(n):
    for name, draw in calibration.VALUES.items():
        rate = calibration.warned_rate(
            lambda rng, size, draw=draw: np.subtract(*draw(rng, size)), n, ASYMMETRIC_BELOW, 600
        )
        assert rate < 0.045, name


def test_the_bar_can_be_missed():
    assert calibration.false_rate("normal", 3, 5000, calibration.bootstrap_holds) > 0.1
    assert calibration.false_rate("normal", 10, 5000, calibration.bootstrap_holds) > ALLOWED
    # three equal differences: Student's t is certain, with an interval of no width
    assert calibration.false_rate("0 and 1, always apart", 3, RUNS, calibration.plain_t_holds) > 0.1
    assert calibration.false_rate("0 and 1, always apart", 3, RUNS) == 0


def test_the_document_shows_what_was_measured():
    found = json.loads((ROOT / "results" / "calibration.json").read_text())
    page = (ROOT / "docs" / "verdicts.md").read_text()
    assert calibration.embed(page, found) == page
    assert set(found["identical"]) == set(calibration.VALUES)
    allowed = 0.025 + 4 * np.sqrt(0.025 * 0.975 / found["runs"])
    assert max(rate for row in found["identical"].values() for rate in row.values()) <= allowed
    if found["numpy"] == np.__version__:
        for values, n in (("normal", 3), ("rounded to 0.5 sd", 10)):
            assert calibration.false_rate(values, n, found["runs"]) == pytest.approx(
                found["identical"][values][str(n)], abs=2 / found["runs"]
            )
    with pytest.raises(ValueError, match="markers"):
        calibration.embed("nothing", found)
