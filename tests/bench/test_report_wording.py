"""Numbers and answers in words, and where they come to lie on an axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.bench import plots, wording
from assay.bench.claim import Arm, Claim, Metric, Paper, Reported, Scale, Statement
from assay.bench.trial import Run, RunKey, error_line
from assay.bench.verdict import Comparison, Decision, Verdict

METRIC = Metric("loss", "Loss", "lower", "nat")
PLAIN = Statement("s", "It is lower", "loss", "ours", ("theirs",))
RATIO = replace(PLAIN, scale="ratio", bound=0.85)


def a_claim(*statements, race=None):
    return Claim(
        "x", "X", "fam", Paper("t", "a"), "Is it?", statements, (METRIC,),
        (Arm("ours", print, "method", "Ours", race=race), Arm("theirs", print, "baseline", race=race)),
        object, {}, "seed", "", "",
    )  # fmt: skip


def a_comparison(effect, low, high, effects=(), baseline="theirs", answer="holds"):
    return Comparison(
        baseline, answer, "why", len(effects), effect, low, high, tuple(range(len(effects))), tuple(effects)
    )


def a_decision(*comparisons, statement=PLAIN, deciding=0, setting="here"):
    return Decision(statement, setting, comparisons[deciding].answer, "why", comparisons, comparisons[deciding])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.23456, "1.235"),
        (-0.00123456, "−0.001235"),
        (123456.7, "123,457"),
        (1e-7, "1.000e−7"),
        (3e15, "3.000e15"),
        (math.nan, "–"),
        (None, "–"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
    ],
)
def test_number(value, text):
    assert wording.number(value) == text


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((0.52131, 0.4812, 0.5634), ["0.521", "0.481", "0.563"]),
        ((1234.5, 1200.2, 1301.7), ["1,234", "1,200", "1,302"]),
        ((-0.00001, -0.02, 0.02), ["0.000", "−0.020", "0.020"]),
        ((2.0, 2.0, 2.0), ["2.000", "2.000", "2.000"]),
        ((1.0, math.nan, math.nan), ["1.000", "–", "–"]),
        ((1e-9, 0.0, 2e-9), ["1.000e−9", "0", "2.000e−9"]),
        ((math.nan, math.nan, math.nan), ["–", "–", "–"]),
        ((1.0, -math.inf, 2.0), ["1.0", "−∞", "2.0"]),
    ],
)
def test_numbers_that_stand_together_share_their_decimals(values, texts):
    assert wording.together(*values) == texts


@given(st.floats(-1e9, 1e9), st.floats(1e-4, 1e6))
def test_the_printed_interval_is_within_a_twentieth_of_its_length_of_the_true_one(centre, half):
    low, high = centre - half, centre + half
    texts = wording.together(centre, low, high)
    for text, value in zip(texts, (centre, low, high)):
        assert abs(float(text.replace(",", "").replace("−", "-")) - value) <= 0.1 * half + 1e-12


def test_effects_intervals_and_bounds_carry_their_unit():
    c = a_comparison(-0.0123, -0.0205, -0.0041)
    assert wording.effect(c, PLAIN, METRIC) == "−0.012 nat"
    assert wording.interval(c, METRIC) == "−0.021 to −0.004"
    assert wording.bound(PLAIN, METRIC) == "< 0 nat"
    assert wording.bound(RATIO, METRIC) == "< 0.85×"
    assert wording.bound(RATIO, replace(METRIC, better="higher")) == "> 0.85×"
    counted = replace(METRIC, counted=True)
    assert wording.effect(a_comparison(0.275, 0.275, 0.275), RATIO, counted) == "0.275×"
    assert wording.interval(a_comparison(0.275, 0.275, 0.275), counted) == "exact"
    assert wording.interval(a_comparison(0.3, 0.25, 0.35), counted) == "range 0.2500 to 0.3500"
    assert wording.interval(a_comparison(0.275, 0.275, 0.275)) == "0.2750 to 0.2750"
    assert wording.interval(a_comparison(0.275, 0.275, 0.275), METRIC) == "0.2750 to 0.2750"
    nothing = a_comparison(math.nan, math.nan, math.nan)
    assert wording.effect(nothing, PLAIN, METRIC) == wording.interval(nothing, METRIC) == "–"
    constant = replace(PLAIN, baselines=(), constant=0.9)
    assert wording.against(a_comparison(1, 1, 1, baseline=None), constant, a_claim(constant)) == "the constant 0.9"
    assert wording.against(None, PLAIN, a_claim(PLAIN)) == "–"
    assert "minus that of the baseline" in wording.formula(PLAIN, a_claim(PLAIN))
    assert wording.formula(constant, a_claim(constant)) == "Loss (nat) of Ours, minus the constant 0.9"
    assert wording.arm_label(a_claim(PLAIN), "stranger") == "stranger"


def test_summary_counts_what_decides():
    other = replace(PLAIN, name="t")
    third = replace(PLAIN, name="u", decides=False)
    good, bad, unknown = (a_comparison(0, 0, 0, answer=a) for a in wording.SYMBOLS)
    say = lambda *d: wording.summary(Verdict("undecided", tuple(d)))  # noqa: E731
    assert say() == "Nothing was decided."
    assert say(a_decision(good)) == "The one statement holds."
    assert say(a_decision(bad)) == "The one statement does not hold."
    assert say(a_decision(good), a_decision(good, setting="there")) == "The one statement holds in both settings."
    assert say(a_decision(good), a_decision(good, statement=other)) == "Both statements hold."
    assert say(a_decision(good), a_decision(bad, statement=third)) == "The one statement holds."
    text = say(a_decision(good), a_decision(bad, statement=other), a_decision(unknown, setting="there"))
    assert text == "Of 3 decisions (2 statements in 2 settings), 1 holds, 1 does not hold and 1 is undecided."


def test_the_command_repeats_the_run():
    claim = a_claim(PLAIN)
    key = RunKey("x", "desk", "w", "c", "cuda:1", 7)
    options = {"data_file": "a b.csv", "target": None, "scores": [1, 2], "fast": True, "exact": False}
    run = Run(claim, key, "t", ("here",), 5, ("ours", "theirs"), (), options=options)
    assert wording.command(run) == (
        "assay run x --data-file 'a b.csv' --scores 1 --scores 2 --fast "
        "--scale desk --replicates 5 --device cuda:1 --seed 7"
    )
    assert "--arms ours" in wording.command(replace(run, arms=("ours",)))
    frame = replace(run, options={"data": np.zeros((2, 2))})
    assert wording.command(frame).startswith("assay run x --data '<ndarray>' --scale")


def test_the_command_leaves_out_what_the_scale_sets_anyway():
    @dataclass
    class Work:
        tokens: int | None = None
        settings: tuple = ("a", "b")
        alpha: float = 0.1

    scaled = replace(a_claim(PLAIN), workload=Work, scales={"desk": Scale(5, {"tokens": 512})})
    key = RunKey("x", "desk", "w", "c", "cpu", 0)
    run = Run(scaled, key, "t", ("here",), 5, ("ours", "theirs"), (), options={})
    say = lambda **o: wording.command(replace(run, options=o)).removeprefix("assay run x ").split(" --scale")[0]  # noqa: E731
    assert say(tokens=512, settings=["a", "b"], alpha=0.1).startswith("--scale")
    assert say(tokens=1024, settings=["a"], alpha=0.2) == "--tokens 1024 --settings a --alpha 0.2"


def test_the_line_of_a_traceback_that_says_what_went_wrong():
    frames = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n    ~^^\n'
    assert error_line(frames + "ValueError: first\nsecond line") == "ValueError: first"
    assert error_line("just this") == "just this"
    assert error_line(" ") == "no message"


def test_machines_in_words():
    e = {
        "cpu": "C",
        "cores": 1,
        "memory_gib": 16.0,
        "gpu": "H200",
        "platform": "Linux",
        "python": "3.11",
        "commit": "ab" * 20,
    }
    assert wording.machine(e) == "C, 1 core, 16 GiB, H200, Linux"
    assert wording.versions(e) == "Python 3.11"
    assert wording.commit(e) == "abababababab"
    assert wording.machine({}) == wording.versions({}) == wording.commit({}) == ""


def test_markdown_text_stays_text():
    assert wording.markdown_text("a|b *c* _d_ e_f\n`g` [h](i) <b> 1 < 2 &lt; R&D") == (
        r"a\|b \*c\* \_d\_ e_f \`g\` \[h\](i) &lt;b> 1 < 2 &amp;lt; R&D"
    )
    assert wording.markdown_code("a`b\nc") == "`a'b c`"


effects = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30)


@given(effects, st.booleans(), st.floats(-5, 5))
def test_everything_that_decides_lies_on_the_axis(values, ratio, bound):
    statement = replace(RATIO if ratio else PLAIN, bound=math.exp(bound) if ratio else bound)
    if ratio:
        values = [math.exp(v / 100) for v in values]
    mean, sd = float(np.mean(values)), float(np.std(values))
    c = a_comparison(mean, max(mean - sd, min(values)), mean + sd, values)
    axis = plots.make_axis([a_decision(c, statement=statement)])
    for v in (c.effect, c.low, c.high, statement.limit, statement.neutral):
        assert axis.holds(v)
        assert 0 < axis.at(v) < 100
    for percent in (4.0, 37.5, axis.at(c.effect)):
        assert axis.at(axis.value(percent)) == pytest.approx(percent, abs=0.011)
    assert axis.at(axis.low) < axis.at(axis.high)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 8
    slack = 1e-6 * axis.length() * max(axis.high, 1.0)
    assert all(axis.low - slack <= t <= axis.high + slack for t in ticks)


def test_one_wild_effect_does_not_squeeze_the_others():
    values = [*np.linspace(-0.5, -0.1, 40), 5000.0]
    c = a_comparison(-0.3, -0.4, -0.2, values)
    picture = plots.draw([a_decision(c)], a_claim(PLAIN))
    (row,) = picture.groups[0].rows
    assert row.high - row.low > 8
    assert row.beyond == (0, 1)
    assert len(row.dots) == 40


def test_a_baseline_that_is_far_off_is_named_at_the_edge():
    near, far = a_comparison(-0.3, -0.4, -0.2, [-0.3, -0.35]), a_comparison(-90, -99, -80, [-90, -91], answer="holds")
    rows = plots.draw([a_decision(near, far)], a_claim(PLAIN)).groups[0].rows
    assert rows[0].effect is not None and rows[0].high - rows[0].low > 8
    assert rows[1].effect is None and rows[1].side == -1
    assert rows[1].text == "effect −90 nat, beyond the axis"


def test_the_papers_number_keeps_its_place_or_its_side():
    c = a_comparison(-0.3, -0.4, -0.2, [-0.3, -0.35])
    inside, outside, unlike = (
        plots.draw([a_decision(c, statement=s)], a_claim(s))
        for s in (replace(PLAIN, reported=Reported("r", "s", "t", v)) for v in (-0.35, 1e6, None))
    )
    assert not inside.paper_off and 0 < inside.paper < 100
    assert outside.paper_off and outside.paper == 96
    assert unlike.paper is None
    assert plots.paper_value(replace(RATIO, reported=Reported("r", "s", "t", -1.0))) is None


def test_dots_in_one_spot_are_stacked_and_many_become_quantiles():
    c = a_comparison(0.05, 0.0, 0.1, [0.0] * 9 + [0.15])
    (row,) = plots.draw([a_decision(c)], a_claim(PLAIN)).groups[0].rows
    assert len(set(row.dots)) == 10
    assert max(abs(dy) for _, dy in row.dots) <= 12
    many = a_comparison(0.0, -0.1, 0.1, np.random.default_rng(0).normal(size=5000))
    picture = plots.draw([a_decision(many)], a_claim(PLAIN))
    assert len(picture.groups[0].rows[0].dots) == plots.MOST_DOTS
    assert picture.dots_label == "150 of 5,000 effects"
    equal = plots.draw([a_decision(a_comparison(0.5, 0.5, 0.5, [0.5] * 6))], a_claim(PLAIN))
    assert equal.groups[0].rows[0].dots == () and equal.dots_label == ""


def test_the_shaded_side_is_the_good_one():
    c = a_comparison(-0.3, -0.4, -0.2)
    lower = plots.draw([a_decision(c)], a_claim(PLAIN))
    assert lower.good == (0.0, lower.bound)
    claim = replace(a_claim(PLAIN), metrics=(replace(METRIC, better="higher"),))
    higher = plots.draw([a_decision(c)], claim)
    assert higher.good == (higher.bound, 100.0)


def test_races_are_bars_and_settings_of_one_size_share_an_axis():
    c = a_comparison(0.5, 0.45, 0.55, [0.5, 0.51])
    assert plots.draw([a_decision(c, statement=RATIO)], a_claim(RATIO, race="r")).bars
    assert not plots.draw([a_decision(c, statement=RATIO)], a_claim(RATIO)).bars
    alike = [a_decision(c, setting="a"), a_decision(c, setting="b")]
    (one,) = plots.pictures(alike, a_claim(PLAIN))
    assert [g.heading for g in one.groups] == ["a", "b"]
    wild = a_decision(a_comparison(500, 450, 550, [500, 510]), setting="c")
    two = plots.pictures([alike[0], wild], a_claim(PLAIN))
    assert [p.heading for p in two] == ["a", "c"]


def test_no_number_is_no_picture():
    nothing = a_decision(a_comparison(math.nan, math.nan, math.nan, answer="undecided"))
    assert plots.draw([nothing], a_claim(PLAIN)) is None
    assert plots.pictures([nothing], a_claim(PLAIN)) == []
    low_is_zero = a_decision(a_comparison(0.5, 0.0, 0.9, [0.5, 0.0]), statement=RATIO)
    (row,) = plots.draw([low_is_zero], a_claim(RATIO)).groups[0].rows
    assert row.effect is not None and row.low is None


@pytest.mark.parametrize(
    ("unit", "several"),
    [("seed", "seeds"), ("data set", "data sets"), ("batch of documents", "batches of documents"), ("mass", "masses")],
)
def test_plurals_of_what_a_replicate_is(unit, several):
    assert wording.units(unit) == wording.units(unit, 0) == several
    assert wording.units(unit, 1) == unit
