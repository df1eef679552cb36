import dataclasses
import math
import time

import numpy as np
import pytest

from assay.bench.claim import Arm, Claim, Metric, Paper, Reported, Scale, Statement
from assay.bench.trial import Run, RunKey, Trial
from assay.bench.verdict import decide

TEN = np.array([-0.4, 0.1, 0.3, -0.2, 0.5, -0.1, 0.25, -0.35, 0.05, -0.15])
METRICS = (Metric("loss", "Loss", "lower", "nat"), Metric("bytes", "Bytes", "lower", "B", counted=True))
LOSS = Statement("quality", "Better", "loss", "m", ("a",))


def make(values, statements=(LOSS,), *, settings=("s",), replicates=None, arms=None, metrics=METRICS, **changes):
    """A run whose trials report ``values[arm] = {metric: by replicate}`` in every setting; ``None`` leaves one out."""
    names = list(dict.fromkeys([*values, *(x for s in statements for x in (s.method, *s.baselines))]))
    specs = arms or tuple(Arm(n, lambda shared, r: {}, "method" if n == "m" else "baseline") for n in names)
    claim = Claim(
        *("c", "Claim", "family", Paper("t", "a"), "?", tuple(statements), metrics, specs),
        *(type("Workload", (), {}), {"smoke": Scale(3)}, "seed", "", ""),
    )
    trials = []
    for setting in settings:
        for arm, table in values.items():
            for r in range(max((len(v) for v in table.values()), default=0)):
                found = {m: v[r] for m, v in table.items() if v[r] is not None}
                if found:
                    trials.append(Trial(setting, r, arm, "ok", found))
    n = replicates or max(t.replicate for t in trials) + 1
    run = Run(
        claim, RunKey("c", "smoke", "w", "x", "cpu", 0), "t", tuple(settings), n, tuple(a.name for a in specs), ()
    )
    return dataclasses.replace(run, trials=tuple(trials), **changes)


def losses(**by_arm):
    return {arm: {"loss": [None if v is None else float(v) for v in values]} for arm, values in by_arm.items()}


@pytest.mark.parametrize(("shift", "answer"), [(-1.0, "holds"), (1.0, "does not hold"), (0.02, "undecided")])
@pytest.mark.parametrize("better", ["lower", "higher"])
def test_superiority_in_both_directions(shift, answer, better):
    metric = Metric("loss", "Loss", better)
    sign = 1 if better == "lower" else -1
    verdict = decide(make(losses(m=sign * (TEN + shift), a=np.zeros(10)), metrics=(metric,)))
    assert verdict.answer == answer
    (decision,) = verdict.decisions
    (comparison,) = decision.comparisons
    assert decision.deciding is comparison and decision.setting == "s"
    assert comparison.effect == pytest.approx(sign * (TEN.mean() + shift))
    assert comparison.low < comparison.effect < comparison.high
    assert comparison.n == 10 and comparison.replicates == tuple(range(10))
    np.testing.assert_allclose(comparison.effects, sign * (TEN + shift))
    assert not verdict.warnings


def test_non_inferiority_holds_for_a_small_certain_loss():
    values = losses(m=0.01 + TEN / 1000, a=np.zeros(10))
    assert decide(make(values)).answer == "does not hold"
    assert decide(make(values, [dataclasses.replace(LOSS, bound=0.02)])).answer == "holds"
    assert decide(make(values, [dataclasses.replace(LOSS, bound=0.01)])).answer == "undecided"


def test_superiority_by_a_margin_on_ratios():
    values = losses(m=0.5 * np.exp(TEN / 10), a=np.ones(10))
    ratio = dataclasses.replace(LOSS, scale="ratio")
    for bound, answer in ((None, "holds"), (0.8, "holds"), (0.5, "undecided"), (0.3, "does not hold")):
        verdict = decide(make(values, [dataclasses.replace(ratio, bound=bound)]))
        assert verdict.answer == answer
    (comparison,) = verdict.decisions[0].comparisons
    assert comparison.effect == pytest.approx(0.5 * np.exp(TEN.mean() / 10))
    np.testing.assert_allclose(comparison.effects, 0.5 * np.exp(TEN / 10))


def test_touching_the_bound_is_not_good():
    counted = Statement("memory", "", "bytes", "m", ("a",), scale="ratio", bound=0.5)
    values = {"m": {"bytes": [50.0, 40.0]}, "a": {"bytes": [100.0, 100.0]}}
    assert decide(make(values, [counted])).answer == "undecided"
    values["m"]["bytes"] = [50.0, 50.0]
    verdict = decide(make(values, [counted]))
    assert verdict.answer == "does not hold" and "on the bound" in verdict.decisions[0].reason


def test_three_equal_rounded_differences_are_undecided():
    verdict = decide(make(losses(m=[0.91, 0.92, 0.93], a=[0.93, 0.94, 0.95])))
    assert verdict.answer == "undecided"
    assert "no variation over replicates" in verdict.decisions[0].reason
    assert decide(make(losses(m=[-2.0] * 30, a=[0.0] * 30))).answer == "undecided"


def test_nearly_equal_rounded_differences_are_undecided_too():
    """Student's t alone would be sure of these: the lattice guard is not."""
    verdict = decide(make(losses(m=[-2, -2, -1], a=[0, 0, 0])))
    assert verdict.answer == "undecided"
    sure = decide(make(losses(m=[-4.0, -4.0, -5.0], a=[0, 0, 0])))
    assert sure.answer == "holds"


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_replicates_decide_nothing(n):
    verdict = decide(make(losses(m=[-10.0, -11.0][:n], a=[0.0, 0.5][:n])))
    assert verdict.answer == "undecided" and "at least 3" in verdict.decisions[0].reason
    assert verdict.decisions[0].comparisons[0].effect < -9


def test_few_replicates_warn():
    verdict = decide(make(losses(m=TEN[:4] - 9, a=np.zeros(4))))
    assert verdict.answer == "holds"
    assert any("Only 4 replicates" in w and "normal" in w for w in verdict.warnings)


def test_counted_metrics_are_compared_as_they_are():
    less = Statement("memory", "Less", "bytes", "m", ("a",))
    for ours, answer in (([5, 5, 5], "holds"), ([9, 9, 9], "does not hold"), ([5, 9, 5], "undecided"), ([5], "holds")):
        values = {
            "m": {"bytes": [float(v) for v in ours]},
            "a": {"bytes": [8.0] * len(ours)},
        }
        verdict = decide(make(values, [less]))
        assert verdict.answer == answer and not verdict.warnings
        (c,) = verdict.decisions[0].comparisons
        assert (c.low, c.high) == (min(ours) - 8, max(ours) - 8)
    ratio = Statement("memory", "Less", "bytes", "m", ("a",), scale="ratio", bound=0.9)
    (c,) = decide(make({"m": {"bytes": [7.0] * 3}, "a": {"bytes": [10.0] * 3}}, [ratio])).decisions[0].comparisons
    assert c.effect == c.low == c.high == 0.7


def test_every_baseline_must_be_beaten_and_the_strongest_decides():
    both = dataclasses.replace(LOSS, baselines=("a", "b"))
    weak, strong = np.full(10, 5.0), np.full(10, 1.0)
    verdict = decide(make(losses(m=TEN, a=weak, b=strong), [both]))
    assert verdict.answer == "holds" and verdict.decisions[0].deciding.baseline == "b"
    assert "strongest of 2" in verdict.decisions[0].reason
    verdict = decide(make(losses(m=TEN, a=weak, b=np.full(10, -1.0)), [both]))
    assert verdict.answer == "does not hold" and verdict.decisions[0].deciding.baseline == "b"
    assert [c.answer for c in verdict.decisions[0].comparisons] == ["holds", "does not hold"]
    verdict = decide(make(losses(m=TEN, a=weak, b=np.full(10, 0.1)), [both]))
    assert verdict.answer == "undecided" and "against b" in verdict.decisions[0].reason


def test_a_tie_between_interval_ends_goes_to_the_worse_effect():
    both = Statement("memory", "Less", "bytes", "m", ("a", "b"))
    values = {"m": {"bytes": [4.0, 4.0]}, "a": {"bytes": [5.0, 9.0]}, "b": {"bytes": [5.0, 6.0]}}
    assert decide(make(values, [both])).decisions[0].deciding.baseline == "b"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
@pytest.mark.parametrize("arm", ["m", "a"])
def test_a_number_that_is_none_never_holds(bad, arm):
    values = {"m": list(TEN - 9), "a": [0.0] * 10}
    values[arm][3] = bad
    verdict = decide(make(losses(**{k: [np.nan if v is None else v for v in x] for k, x in values.items()})))
    assert verdict.answer == "undecided"
    reason = verdict.decisions[0].reason
    assert repr(arm) in reason and "1 of 10 replicates (3)" in reason and "not a finite number" in reason
    comparison = verdict.decisions[0].comparisons[0]
    assert comparison.n == 9 and comparison.high < 0  # what the others say is shown


def test_missing_trials_and_metrics_are_named():
    verdict = decide(make(losses(m=TEN - 9, a=[0.0] * 8 + [None, None])))
    assert verdict.answer == "undecided"
    assert "arm 'a' has no trial in 2 of 10 replicates (8, 9)" in verdict.decisions[0].reason
    values = losses(m=TEN - 9)
    values["a"] = {"bytes": [1.0] * 10}
    verdict = decide(make(values))
    assert "arm 'a' did not report 'loss' in 10 of 10 replicates (0, 1, 2, 3, 4, 5, …)" in verdict.decisions[0].reason
    assert verdict.decisions[0].deciding is None


def failed(run, arm, replicates, error):
    trials = tuple(
        dataclasses.replace(t, status="failed", metrics={}, error=error)
        if t.arm == arm and t.replicate in replicates
        else t
        for t in run.trials
    )
    return dataclasses.replace(run, trials=trials)


TRACE = """Traceback (most recent call last):
  File "x.py", line 3, in run
    raise ValueError("out of cheese")
ValueError: out of cheese
  and crackers
"""


def test_failed_trials_are_undecided_and_warned_of():
    run = failed(make(losses(m=TEN - 9, a=np.zeros(10))), "m", {2, 5}, TRACE)
    verdict = decide(run)
    assert verdict.answer == "undecided"
    assert "arm 'm' failed in 2 of 10 replicates (2, 5)" in verdict.decisions[0].reason
    assert any(
        "2 of 10 trials of arm 'm' failed" in w and w.endswith("ValueError: out of cheese") for w in verdict.warnings
    )


def test_a_complete_baseline_still_refutes():
    both = dataclasses.replace(LOSS, baselines=("a", "b"))
    run = failed(make(losses(m=TEN, a=np.full(10, -9.0), b=np.full(10, 9.0)), [both]), "b", {0}, "")
    verdict = decide(run)
    assert verdict.answer == "does not hold" and verdict.decisions[0].deciding.baseline == "a"
    incomplete = failed(run, "a", {0}, "")
    assert decide(incomplete).answer == "undecided"


def test_skipped_baseline_is_named_with_its_remedy():
    both = dataclasses.replace(LOSS, baselines=("a", "peer"))
    values = losses(m=TEN - 9, a=np.zeros(10))
    verdict = decide(make(values, [both], skipped={"peer": "pip install peer"}))
    assert verdict.answer == "undecided"
    assert "arm 'peer' was skipped: pip install peer" in verdict.decisions[0].reason
    assert any("baseline is missing" in w and "pip install peer" in w for w in verdict.warnings)
    assert verdict.decisions[0].deciding.baseline == "a"
    verdict = decide(make(losses(m=TEN + 9, a=np.zeros(10)), [both], skipped={"peer": "pip install peer"}))
    assert verdict.answer == "does not hold"


def test_arms_that_were_not_asked_for():
    run = make(losses(m=TEN - 9, a=np.zeros(10)))
    verdict = decide(dataclasses.replace(run, arms=("m",)))
    assert verdict.answer == "undecided" and "arm 'a' was not run (--arms)" in verdict.decisions[0].reason
    verdict = decide(dataclasses.replace(run, arms=("a",)))
    assert verdict.answer == "undecided" and any("The method is missing" in w for w in verdict.warnings)


def test_ratio_of_a_value_that_is_not_positive():
    ratio = dataclasses.replace(LOSS, scale="ratio")
    values = losses(m=np.full(10, 0.1) + TEN / 100, a=np.ones(10))
    assert decide(make(values, [ratio])).answer == "holds"
    values["m"]["loss"][0] = 0.0
    verdict = decide(make(values, [ratio]))
    assert verdict.answer == "undecided" and "not positive" in verdict.decisions[0].reason


def test_constant_takes_the_place_of_baselines():
    constant = Statement("coverage", "", "loss", "m", constant=1.0)
    verdict = decide(make(losses(m=TEN), [constant]))
    assert verdict.answer == "holds"
    (c,) = verdict.decisions[0].comparisons
    assert c.baseline is None and c.effect == pytest.approx(TEN.mean() - 1)
    assert verdict.table()["baseline"].tolist() == ["constant 1"]
    impossible = dataclasses.replace(constant, constant=-1.0, scale="ratio")
    assert "no ratio" in decide(make(losses(m=TEN + 9), [impossible])).decisions[0].reason


def test_settings_of_statements_and_arms():
    arms = tuple(
        Arm(n, lambda shared, r: {}, "baseline", where=where) for n, where in (("m", ()), ("a", ("s",)), ("b", ("t",)))
    )
    statement = dataclasses.replace(LOSS, baselines=("a", "b"))
    run = make(losses(m=TEN - 9, a=np.zeros(10), b=np.zeros(10)), [statement], settings=("s", "t"), arms=arms)
    decisions = decide(run).decisions
    assert [(d.setting, [c.baseline for c in d.comparisons]) for d in decisions] == [("s", ["a"]), ("t", ["b"])]
    only = dataclasses.replace(statement, where=("t",))
    run = make(losses(m=TEN - 9, a=np.zeros(10), b=np.zeros(10)), [only], settings=("s", "t"), arms=arms)
    assert [d.setting for d in decide(run).decisions] == ["t"]


def test_all_settings_and_statements_must_hold():
    values = losses(m=TEN - 9, a=np.zeros(10))
    run = make(values, settings=("s", "t"))
    assert decide(run).answer == "holds"
    worse = tuple(
        dataclasses.replace(t, metrics={"loss": t.metrics["loss"] + 18}) if (t.arm, t.setting) == ("m", "t") else t
        for t in run.trials
    )
    assert decide(dataclasses.replace(run, trials=worse)).answer == "does not hold"
    aside = dataclasses.replace(LOSS, name="aside", bound=-100.0, decides=False)
    verdict = decide(make(values, [LOSS, aside]))
    assert verdict.answer == "holds" and [d.answer for d in verdict.decisions] == ["holds", "does not hold"]


def test_a_statement_about_other_settings_takes_no_part():
    other = dataclasses.replace(LOSS, name="elsewhere", where=("moon",))
    values = losses(m=TEN - 9, a=np.zeros(10))
    verdict = decide(make(values, [LOSS, other]))
    assert verdict.answer == "holds"
    assert [(d.setting, d.answer) for d in verdict.decisions] == [("s", "holds"), ("", "undecided")]
    assert any("'elsewhere' takes no part" in w and "moon" in w for w in verdict.warnings)
    assert decide(make(values, [other])).answer == "undecided"
    assert len(verdict.table()) == 2


def test_asymmetric_differences_warn():
    rng = np.random.default_rng(0)
    verdict = decide(make(losses(m=rng.exponential(size=60), a=np.zeros(60))))
    assert any("asymmetric" in w and "against a" in w for w in verdict.warnings)
    verdict = decide(make(losses(m=rng.normal(size=60), a=np.zeros(60))))
    assert not verdict.warnings


def test_environments_that_differ_are_named():
    run = make(losses(m=TEN - 9, a=np.zeros(10)))
    here = {"cpu": "fast", "commit": "1", "gpu": "", "libraries": {"numpy": "2.0"}}
    there = {"cpu": "fast", "commit": "2", "gpu": "H200", "libraries": {"numpy": "2.1"}}

    def mixed(second):
        trials = [dataclasses.replace(t, environment=second if t.replicate > 5 else here) for t in run.trials]
        return decide(dataclasses.replace(run, trials=tuple(trials))).warnings

    assert mixed(here) == ()
    (warning,) = mixed(there)
    assert "libraries numpy (2.0 / 2.1)" in warning and "commit" not in warning and "gpu" not in warning


def test_trials_beyond_the_replicates_are_not_looked_at():
    run = make(losses(m=[*(TEN - 9), 1e9], a=np.zeros(11)))
    verdict = decide(dataclasses.replace(run, replicates=10))
    assert verdict.answer == "holds" and verdict.decisions[0].deciding.n == 10


def test_an_empty_run_is_undecided():
    run = dataclasses.replace(make(losses(m=TEN, a=TEN)), trials=())
    verdict = decide(run)
    assert verdict.answer == "undecided" and verdict.decisions[0].deciding is None
    assert decide(dataclasses.replace(run, settings=())).answer == "undecided"
    assert decide(dataclasses.replace(run, replicates=0)).answer == "undecided"


def test_effects_beyond_floating_point_are_undecided():
    verdict = decide(make(losses(m=np.full(6, -1.7e308), a=np.full(6, 1.7e308))))
    assert verdict.answer == "undecided" and "too large" in verdict.decisions[0].reason


def test_table_keeps_what_the_paper_said_apart():
    told = dataclasses.replace(LOSS, baselines=("a", "b"), reported=Reported("0.3 nat lower", "7B", "Table 1", -0.3))
    values = losses(m=TEN - 9, a=np.zeros(10), b=np.zeros(10))
    table = decide(
        make(values, [told, dataclasses.replace(LOSS, name="r", scale="ratio")], settings=("s", "t"))
    ).table()
    assert list(table.columns) == [
        *("statement", "setting", "method", "baseline", "metric", "unit", "effect", "low", "high", "limit", "n"),
        *("answer", "reason", "paper", "reported_setting"),
    ]
    assert len(table) == 6
    first = table.iloc[0]
    assert (first.paper, first.reported_setting, first.unit, first.limit) == ("0.3 nat lower", "7B", "nat", 0.0)
    assert table.iloc[-1].unit == "×" and table.iloc[-1].paper == ""
    assert table["effect"].dtype == float and not (table["effect"] == -0.3).any()


def test_ten_thousand_replicates_take_well_under_a_second():
    rng = np.random.default_rng(0)
    both = dataclasses.replace(LOSS, baselines=("a", "b"))
    run = make(
        losses(m=rng.normal(size=10_000), a=rng.normal(1, 1, 10_000), b=np.round(rng.normal(2, 1, 10_000))), [both]
    )
    decide(run)
    start = time.perf_counter()
    assert decide(run).answer == "holds"
    assert time.perf_counter() - start < 1.0
