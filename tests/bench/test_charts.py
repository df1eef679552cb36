"""Growth curves and Pareto fronts: their numbers, their words, their pictures, and their way through results."""

import dataclasses
import json
import math
import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_runs import SIZES, curves_run

from assay.bench import charts, report, results
from assay.bench.claim import Metric, Timed
from assay.bench.verdict import decide


def test_exponents_are_those_of_the_medians_from_the_size_that_is_asked_for():
    plain, fast = charts.growth_series(curves_run(1.3), curves_run().claim.growths[0])
    assert plain.exponent[0] == pytest.approx(1.3) and fast.exponent[0] == pytest.approx(0.5)
    assert [s for s, _ in fast.points] == sorted(SIZES.values())
    assert fast.points[0][1] == fast.points[1][1], "what lies below the first fitted size is shown all the same"


def test_too_few_sizes_have_no_exponent_and_missing_arms_no_curve():
    run = curves_run(settings=("1k", "2k", "4k"))
    head, rows = charts.growth_table(run, run.claim.growths[0])
    assert head == ["time (s)", "1k", "2k", "4k", "Exponent", "95% interval"]
    assert [row[-2:] for row in rows] == [["–", "–"]] * 2
    gone = dataclasses.replace(run, trials=())
    assert charts.growth_table(gone, run.claim.growths[0])[1] == []
    assert charts.growth_chart(gone, run.claim.growths[0]) is None
    assert charts.frontier_chart(gone, run.claim.frontiers[0]) is None
    assert charts.front_sentence(gone, run.claim.frontiers[0]) == ""


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_the_front_is_what_nothing_dominates(points):
    front = charts.pareto(points)
    assert any(front)
    for (x, y), kept in zip(points, front):
        better = [(a, b) for a, b in points if a <= x and b <= y and (a, b) != (x, y)]
        assert kept == (not better)


def test_a_metric_where_more_is_better_turns_the_front_round():
    run = curves_run()
    claim = dataclasses.replace(
        run.claim,
        metrics=(run.claim.metrics[0], Metric("error", "score", "higher"), run.claim.metrics[2]),
    )
    points = charts.frontier_points(dataclasses.replace(run, claim=claim), claim.frontiers[0])
    assert {p.arm for p in points if p.front} == {"fast"}, "fastest, and of the largest score"
    points = charts.frontier_points(run, run.claim.frontiers[0])
    assert {p.arm: p.front for p in points} == {"plain": True, "fast": True, "close": True}


def test_the_sentence_goes_from_cheap_to_dear():
    run = curves_run()
    found = charts.front_sentence(run, run.claim.frontiers[0])
    assert found == "On the Pareto front of seconds and error: fast; plain; close."


def svg(page):
    found = re.findall(r'<svg class="plot chart".*?</svg>', page, re.S)
    return [ET.fromstring(text) for text in found]


def test_the_page_draws_both_within_the_picture(tmp_path):
    run = curves_run()
    report.write_report([(run, decide(run))], tmp_path)
    page = (tmp_path / "curves.html").read_text()
    pictures = svg(page)
    assert len(pictures) == 2
    for picture in pictures:
        height = float(picture.get("height"))
        for e in picture.iter():
            for name in ("x", "x1", "x2"):
                if e.get(name) and e.get(name).endswith("%"):
                    assert 0 <= float(e.get(name)[:-1]) <= 100
            for name in ("y", "y1", "y2"):
                if e.get(name):
                    assert 0 <= float(e.get(name)) <= height
        letters = [e.text for e in picture.iter() if (e.get("class") or "").startswith("letter")]
        assert len(letters) == len(set(letters)) >= 2
    assert "exponent 0.50" in page and "The paper reported: exponent 1 (on paper; section 9)" in page
    assert "The claim is from" not in page, "a comparison has no paper"
    zero = [e for e in pictures[1].iter() if e.text == "≈0"]
    assert len(zero) == 1


def test_the_longer_curve_rises_to_the_right_and_the_front_falls():
    run = curves_run()
    growth = charts.growth_chart(run, run.claim.growths[0])
    assert all(x1 < x2 and y1 >= y2 for x1, y1, x2, y2, _ in growth.lines)
    front = charts.frontier_chart(run, run.claim.frontiers[0])
    assert all(x1 <= x2 and y1 <= y2 for x1, y1, x2, y2, _ in front.lines)


def test_letters_do_not_cover_each_other():
    same = {"plain": 0.3, "fast": 0.3, "close": 0.3}
    run = curves_run(closeness=same)
    trials = tuple(dataclasses.replace(t, metrics={"seconds": 1.0, "error": 0.3}) for t in run.trials)
    chart = charts.frontier_chart(dataclasses.replace(run, trials=trials), run.claim.frontiers[0])
    places = sorted(m.x for m in chart.marks)
    assert all(b - a > 2.5 for a, b in pairwise(places))
    assert all(p.strong for p in chart.marks), "equal arms stand side by side on the front"


def test_what_is_not_finite_is_left_out():
    run = curves_run()
    trials = [dataclasses.replace(t, metrics={"seconds": math.nan, "error": math.inf}) for t in run.trials]
    assert charts.frontier_points(dataclasses.replace(run, trials=tuple(trials)), run.claim.frontiers[0]) == []


def test_curves_survive_the_way_through_results():
    run = curves_run()
    text = results.dump(results.to_result(run, decide(run)))
    restored, verdict = results.restore(json.loads(text))
    assert restored.claim.growths == curves_run().claim.growths and restored.claim.frontiers == run.claim.frontiers
    assert restored.claim.paper is None
    written = report.to_markdown(restored, verdict)
    assert report.curves_markdown(restored, "##") == report.curves_markdown(run, "##")
    assert "| fast | 0.000905 | 0.000905 | 0.00128 | 0.00181 | 0.50 |" in written
    page = results.result_markdown(json.loads(text))
    assert "All arms, 8k" in page and "On the Pareto front" in page


def test_claims_with_unknown_names_are_refused():
    claim = curves_run().claim
    with pytest.raises(ValueError, match="growth 'time' of 'curves' names unknown 'slow'"):
        dataclasses.replace(claim, growths=(dataclasses.replace(claim.growths[0], arms=("slow",)),))
    with pytest.raises(ValueError, match="frontier 'plane' of 'curves': 'n' is no metric with a direction"):
        dataclasses.replace(claim, frontiers=(dataclasses.replace(claim.frontiers[0], y="n"),))


def test_a_timed_call_has_at_least_one_unit():
    with pytest.raises(ValueError, match="per must be at least 1, not 0"):
        Timed(lambda: None, per=0)
