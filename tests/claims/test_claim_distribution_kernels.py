"""The claim of kernel machines on distributions: arms, the runner, the user's own bags, and the card."""

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
from assay.claims import _distribution_kernels_arms as arms_of
from assay.claims.distribution_kernels import CLAIM, LAMS, BagOptions
from assay.errors import InputError
from assay.workloads.bags import COUNTS, LEARNED, OWN, SIZES, TIMING

CARD = Path(__file__).parents[2] / "docs" / "methods" / "distribution_kernels.md"
SMOKE = dict(CLAIM.scales["smoke"].options)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def task():
    return BagOptions(**SMOKE | {"settings": [*LEARNED[:4], TIMING, *COUNTS, *SIZES]}).build(device="cpu", seed=0)


def arms(setting, timed=False):
    return [a.name for a in CLAIM.arms if setting in a.where and (a.race is not None) == timed]


QUICK = ("sw", "moments_forest", "deepsets", "mean_ridge", "kme_linear", "truth")


@pytest.mark.parametrize(
    ("setting", "name"),
    [(s, a) for s in ("modes", "axis", "spread") for a in arms(s) if s == "modes" or a in QUICK or a.startswith("rate")]
    + [("digits", a) for a in QUICK[:3]],
)
def test_arms_report_what_they_say(task, setting, name):
    found = CLAIM.arm(name).run(task.prepare(setting, 0), 0)
    assert set(found) <= {m.name for m in CLAIM.metrics} and all(map(math.isfinite, found.values()))
    if "error" in found:
        assert 0 <= found["error"] < 2 and ("coverage" in found) == (setting == "spread")
    if "risk" in found:
        assert found["risk"] > 0 and found["lam"] > 0
    if name.startswith("stability"):
        assert found["violations"] == 0 and 0 < found["moved"] < 1 and found["gap"] < found["gap_bound"]
    if name.startswith("rate"):
        assert -0.8 < found["slope"] < -0.2 and found["embedding_error"] > 0


def test_what_is_learned_comes_from_the_bags_for_it(task, monkeypatch):
    """Features of test bags do not depend on other test bags, and DeepSets choose by bags that they have not seen."""
    from assay.claims import _distribution_kernels_deepsets as deep

    split = task.prepare("modes", 0)
    few = dataclasses.replace(split, test=split.test.take(np.arange(5)))
    np.testing.assert_array_equal(arms_of._features(few, 4)[1], arms_of._features(split, 4)[1][:5])
    seen = []

    class Spy(deep.DeepSets):
        def __init__(self, train, *args):
            seen.append(train.points)
            super().__init__(train, *args)

    monkeypatch.setattr(deep, "DeepSets", Spy)
    CLAIM.arm("deepsets").run(split, 0)
    learned, held = (split.train.take(rows).points for rows in arms_of.fold(split))
    assert len(seen) == 3 and all(np.array_equal(s, learned) for s in seen[:2])
    assert np.array_equal(seen[2], split.train.points) and not np.isin(held, learned).any()


def test_arms_do_not_depend_on_those_before(task):
    fresh = BagOptions(**SMOKE).build(device="cpu", seed=0).prepare("modes", 0)
    for name in ("sw", "moments_forest", "deepsets"):
        assert CLAIM.arm(name).run(fresh, 0) == CLAIM.arm(name).run(task.prepare("modes", 0), 0)


@pytest.mark.parametrize("name", ["sw", "kme_linear", "moments_forest", "mean_ridge", "deepsets"])
def test_nothing_is_learned_from_test_labels(task, name, monkeypatch):
    """With other test labels the predictions stay as they are."""
    split = task.prepare("axis", 0)
    seen = []
    monkeypatch.setattr(arms_of, "scores", lambda split, predicted: seen.append(predicted) or {"error": 0.0})
    other = dataclasses.replace(split, test=dataclasses.replace(split.test, y=-split.test.y))
    CLAIM.arm(name).run(split, 0)
    CLAIM.arm(name).run(other, 0)
    assert np.array_equal(seen[0], seen[1])


def test_errors_are_those_of_their_definitions(task):
    split = task.prepare("axis", 0)
    y = split.test.y
    assert arms_of.error(split, y) == 0 and arms_of.error(split, np.full(len(y), y.mean())) == pytest.approx(1)
    split = task.prepare("spread", 0)
    marginal = np.quantile(split.train.y, arms_of.LEVELS)[None].repeat(len(split.test), 0)
    assert arms_of.error(split, marginal) == pytest.approx(1) and arms_of.error(split, split.test.truth) < 0.8
    split = task.prepare("modes", 0)
    assert arms_of.error(split, 1 - split.test.y) == 1
    inner, held = arms_of.fold(split)
    assert len(inner) + len(held) == len(split.train) and 0 <= len(split.train) // 5 - len(held) < 2


@pytest.mark.parametrize(
    ("setting", "name"), [(s, a) for s in (TIMING, "bags100", "points64") for a in arms(s, timed=True)]
)
def test_timed_arms_give_a_call(task, setting, name):
    if name == "pairs_pot":
        pytest.importorskip("ot")
    timed = CLAIM.arm(name).run(task.prepare(setting, 0), 0)
    assert isinstance(timed, Timed) and timed.call() is not None
    if name == "pairs_pot":
        assert timed.metrics["disagreement"] < 1e-10


def test_the_timed_ways_agree(task):
    from scipy.spatial.distance import squareform

    split = task.prepare(TIMING, 0)
    ours, by_hand = (CLAIM.arm(n).run(split, 0).call() for n in ("pairs", "pairs_numpy"))
    np.testing.assert_allclose(ours, squareform(by_hand), atol=1e-7)


def test_smoke_run_through_the_runner(tmp_path):
    api = pytest.importorskip("assay.bench.api")
    result = api.run(
        "distribution_kernels",
        scale="smoke",
        arms=["sw", "sw_small", "moments", "moments_mixed", *(f"stability_{lam:g}" for lam in LAMS)],
        jobs=1,
        store=tmp_path / "s.sqlite",
        progress=False,
    )
    assert result.run.trials and {t.status for t in result.run.trials} == {"ok"}
    answers = {d.statement.name: d.answer for d in result.verdict.decisions}
    assert all(answers[f"stable_{lam:g}"] == "holds" for lam in LAMS)  # counted: two replicates are enough
    assert answers["learns"] == "undecided" and set(answers) == {s.name for s in CLAIM.statements}


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        x = rng.normal(size=(rng.integers(1, 20), 2)) * (1 + i % 3)
        rows.append(
            pd.DataFrame(x, columns=["a", "b"]).assign(id=f"p{i}", kind="xyz"[i % 3], size=1.5 + i % 3 + i / 60)
        )
    return pd.concat(rows, ignore_index=True)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("csv", {"bag": "id", "label": "kind", "features": ["a", "b"]}),
        ("parquet", {"bag": "id", "label": "size", "features": ["a", "b"]}),
        ("npz", {"task": "quantile"}),
    ],
)
def test_own_bags_through_the_runner(tmp_path, frame, kind, options):
    api = pytest.importorskip("assay.bench.api")
    path = tmp_path / f"cells.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    else:
        labels = frame.groupby("id", sort=False)["size"].first().to_numpy()
        np.savez(path, points=frame[["a", "b"]].to_numpy(), bag=frame["id"].to_numpy(str), y=labels)
    names = arms(OWN) if kind == "csv" else ["sw", "sw_small", "moments", "mean_ridge", "deepsets", "stability_0.1"]
    result = api.run(
        "distribution_kernels",
        scale="smoke",
        arms=names,
        jobs=1,
        replicates=1,
        store=tmp_path / "s.sqlite",
        progress=False,
        bags=path,
        **options,
    )
    assert result.run.settings == (OWN,) and {t.arm for t in result.run.trials} == set(names)
    assert {t.status for t in result.run.trials} == {"ok"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be positive, got 0"),
        ({"trees": -1}, "trees must be positive, got -1"),
        ({"landmarks": 0}, "landmarks must be positive, got 0"),
        ({"bags": "none.csv", "bag": "a", "label": "b"}, "bags: there is no file"),
        ({"bags": "none.txt.zip", "bag": "a", "label": "b"}, "bags: there is no file"),
        ({"settings": ["nodes"]}, "did you mean 'modes'"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        BagOptions(**options).build(device="cpu", seed=0)


def test_options_change_the_digest():
    digests = {
        BagOptions(settings=["modes"], **o).build(device="cpu", seed=0).digest
        for o in ({}, {"epochs": 7}, {"landmarks": 9}, {"trees": 3}, {"train_bags": 50})
    }
    assert len(digests) == 5


def test_importing_the_claim_loads_nothing_heavy():
    code = (
        "import sys, assay.claims.distribution_kernels; "
        "print([m for m in ('torch', 'sklearn', 'pandas', 'scipy', 'numba', 'ot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_runs():
    scope: dict = {}
    exec(CLAIM.snippet, scope)
    assert scope["model"].score(scope["bags"][80:], scope["label"][80:]) >= 0.7


def test_card_example_runs():
    card = CARD.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert blocks and card.count("<!-- results:begin -->") == card.count("<!-- results:end -->") == 1
    for block in blocks:
        exec(block, {})
