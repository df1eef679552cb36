"""The claim of RQR: arms run, report what they say, and answer the user's own table."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from assay.bench.claim import Timed
from assay.claims.rqr import CLAIM, Intervals
from assay.errors import InputError

ROOT = Path(__file__).parents[2]
PLAIN = [a for a in CLAIM.arms if a.race is None]


@pytest.fixture(scope="module")
def split():
    task = Intervals(**CLAIM.scales["smoke"].options).build(device="cpu", seed=0)
    return task.prepare("exponential", 0)


@pytest.mark.parametrize("arm", PLAIN, ids=lambda a: a.name)
def test_every_arm_reports_sensible_intervals(split, arm):
    if arm.name == "mapie":
        pytest.importorskip("mapie")
    found = arm.run(split, 0)
    assert set(found) <= {m.name for m in CLAIM.metrics} and all(map(math.isfinite, found.values()))
    # 90 calibration and 150 test rows
    assert 0.75 < found["coverage"] <= 1.0 and found["excess"] == pytest.approx(found["coverage"] - 0.9)
    assert 0.7 < found["over_shortest"] < 6 and found["winkler"] >= found["width"]
    if arm.name != "mapie":
        assert 0.3 < found["coverage_raw"] <= 1 and found["relative_raw"] == pytest.approx(
            found["coverage_raw"] / 0.9 - 1
        )
    if arm.name.startswith("rqr") and arm.name != "rqr_trees":
        expected = {"rqr": {0.0}, "rqr_w1": {1.0}, "rqr_w5": {5.0}, "rqr_w": {0.5, 1.0, 5.0, 20.0}}[arm.name]
        assert found["lam"] in expected
    for name, value in found.items():
        assert value == pytest.approx(arm.run(split, 0)[name], rel=1e-6)
        break


def test_arms_do_not_depend_on_those_before(split):
    """An interrupted run resumes with some arms only: the result must not change."""
    fresh = Intervals(**CLAIM.scales["smoke"].options).build(device="cpu", seed=0).prepare("exponential", 0)
    assert CLAIM.arm("qr").run(fresh, 0) == CLAIM.arm("qr").run(split, 0)


def test_nothing_is_learned_from_test_rows(split):
    """With other test targets the bounds, and so the widths, stay as they are."""
    import dataclasses

    other = dataclasses.replace(split, test=dataclasses.replace(split.test, y=split.test.y + 100.0), cache={})
    for name in ("rqr_w", "sqrn", "hgb"):
        a, b = CLAIM.arm(name).run(split, 0), CLAIM.arm(name).run(other, 0)
        assert a["width"] == b["width"] and a["width_raw"] == b["width_raw"] and b["coverage"] == 0.0


@pytest.mark.parametrize("arm", [a for a in CLAIM.arms if a.race], ids=lambda a: a.name)
def test_timed_arms_give_a_call(split, arm):
    if arm.name == "fit_mapie":
        pytest.importorskip("mapie")
    import torch

    before = torch.get_num_threads()
    timed = arm.run(split, 0)
    assert isinstance(timed, Timed)
    timed.call()
    assert torch.get_num_threads() == before


def test_smoke_run_through_the_runner(tmp_path):
    api = pytest.importorskip("assay.bench.api")
    result = api.run("rqr", scale="smoke", arms=["rqr_w", "qr"], jobs=1, store=tmp_path / "s.sqlite", progress=False)
    assert {(t.arm, t.replicate, t.status) for t in result.run.trials} == {
        (a, r, "ok") for a in ("rqr_w", "qr") for r in (0, 1)
    }
    answers = {d.statement.name: d.answer for d in result.verdict.decisions}
    assert set(answers) >= {"coverage", "width"}


def test_own_table_through_the_runner(tmp_path):
    api = pytest.importorskip("assay.bench.api")
    rng = np.random.default_rng(0)
    data = pd.DataFrame({"size": rng.uniform(1, 3, 400), "town": rng.choice(["a", "b"], 400)})
    data["price"] = data["size"] * (1 + rng.exponential(size=400))
    data.to_csv(tmp_path / "prices.csv", index=False)
    got = {}
    for name, source in (("frame", data), ("file", tmp_path / "prices.csv")):
        result = api.run(
            "rqr",
            scale="smoke",
            arms=["rqr_w", "qr"],
            jobs=1,
            replicates=1,
            store=tmp_path / f"{name}.sqlite",
            progress=False,
            data=source,
            target="price",
            rows=400,
        )
        (width,) = [t.metrics["width"] for t in result.run.trials if t.arm == "qr"]
        got[name] = width
        assert result.run.settings == ("data",)
    assert got["frame"] == pytest.approx(got["file"], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"coverage": 1.0}, "coverage"),
        ({"epochs": 0}, "epochs"),
        ({"settings": ["exponential"], "rows": 80}, "100 rows are needed"),
        ({"settings": ["exponential"], "rows": 500, "coverage": 0.99}, "1000 rows are needed"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        Intervals(**options).build(device="cpu", seed=0)


def test_options_change_the_digest():
    digests = {
        Intervals(settings=["exponential"], **o).build(device="cpu", seed=0).digest
        for o in ({}, {"coverage": 0.8}, {"epochs": 10}, {"rows": 1000})
    }
    assert len(digests) == 4


def test_importing_the_claim_loads_nothing_heavy():
    code = (
        "import sys, assay.claims.rqr; print([m for m in ('torch', 'sklearn', 'pandas', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_runs():
    scope: dict = {}
    exec(CLAIM.snippet, scope)
    assert scope["lower"].shape == (5,) and (scope["lower"] < scope["upper"]).all()


def test_card_example_runs():
    card = (ROOT / "docs" / "methods" / "rqr.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", card, re.S)
    assert blocks and card.count("<!-- results:begin -->") == card.count("<!-- results:end -->") == 1
    for block in blocks:
        exec(block, {})
