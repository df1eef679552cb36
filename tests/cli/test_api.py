"""``assay.run`` and what it returns."""

import pandas as pd
import pytest

import assay
from assay.bench.claim import Arm, Claim, Metric, Paper, Scale, Statement
from assay.errors import InputError


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    store = tmp_path_factory.mktemp("api") / "s.sqlite"
    return assay.run("rqr", scale="smoke", replicates=2, arms=["rqr_w", "qr"], store=store, jobs=1, progress=False)


def test_the_result_has_verdict_table_trials_and_pictures(result, tmp_path):
    assert result.verdict.answer in ("holds", "does not hold", "undecided")
    assert {"statement", "effect", "low", "high", "n", "answer", "paper"} <= set(result.table.columns)
    assert set(result.trials["replicate"]) == {0, 1}
    assert result.plot().axes
    assert "<table" in result._repr_html_()
    assert result.report(tmp_path / "out").is_file()
    assert "rqr" in result.to_markdown()
    assert result.verdict.answer in str(result)


def test_a_data_frame_is_a_workload(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    frame = pd.DataFrame(x, columns=["a", "b"]).assign(price=x[:, 0] + rng.exponential(size=400))
    seen = []
    result = assay.run(
        "rqr",
        data=frame,
        target="price",
        replicates=1,
        scale="smoke",
        arms=["qr"],
        store=tmp_path / "s.sqlite",
        jobs=1,
        progress=lambda done, total, label: seen.append((done, total)),
    )
    assert len(result.trials) == 1
    assert seen[-1] == (1, 1)


def test_claims_lists_them():
    assert {"rqr", "kivi", "stein_thinning"} <= set(assay.list_claims())


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(InputError, match="did you mean 'rqr'"):
        assay.run("rqrs")
    with pytest.raises(InputError, match="did you mean 'target'"):
        assay.run("rqr", targte="price")
    with pytest.raises(InputError, match="scale"):
        assay.run("rqr", scale="huge")
    with pytest.raises(AttributeError):
        _ = assay.nothing
    with pytest.raises(AttributeError):
        _ = assay.statistics.nothing


def claim(**changes):
    given = dict(
        slug="x",
        title="X",
        family="external",
        paper=Paper("P", "A"),
        question="?",
        statements=(Statement("s", "s", "m", "a", ("b",)),),
        metrics=(Metric("m", "m", "lower"),),
        arms=(Arm("a", print, "method"), Arm("b", print, "baseline")),
        workload=object,
        scales={"desk": Scale(3)},
        unit="seed",
        snippet="",
        example="",
    )
    return Claim(**given | changes)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"arms": (Arm("a", print, "method"),)}, "unknown arm 'b'"),
        ({"arms": (Arm("a", print, "method"), Arm("a", print, "baseline"))}, "names an arm twice"),
        ({"metrics": (Metric("n", "n", "lower"),)}, "unknown metric 'm'"),
        ({"metrics": (Metric("m", "m", None),)}, "no better direction"),
    ],
)
def test_a_claim_that_contradicts_itself_is_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        claim(**changes)


def test_a_statement_needs_one_other_side():
    with pytest.raises(ValueError, match="either baselines or a constant"):
        Statement("s", "s", "m", "a")
    with pytest.raises(ValueError, match="must be positive"):
        Statement("s", "s", "m", "a", ("b",), scale="ratio", bound=0.0)


def test_a_million_rows_with_one_replicate_work(tmp_path):
    import numpy as np

    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(1_000_000, 3)), columns=["a", "b", "price"])
    options = dict(data=frame, target="price", scale="smoke", replicates=1, arms=["qr"], jobs=1, progress=False)
    result = assay.run("rqr", store=tmp_path / "s.sqlite", **options)
    assert [t.status for t in result.run.trials] == ["ok"]
    assert result.verdict.answer == "undecided"  # one replicate decides nothing
