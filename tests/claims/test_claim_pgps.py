import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from assay.bench.claim import Timed
from assay.claims.pgps import CLAIM, SETUPS
from assay.errors import InputError
from assay.workloads.densities import GaussianMixture, eight_dimensions, far_modes, load_density, negligible_mode

CARD = Path(__file__).parents[2] / "docs" / "methods" / "pgps.md"
SMOKE = dict(CLAIM.scales["smoke"].options)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE).build(device="cpu", seed=0)


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


@pytest.mark.parametrize(("setting", "name"), [(s, a) for s in SETUPS for a in arms(s)])
def test_arms_sample(task, setting, name):
    found = CLAIM.arm(name).run(task.prepare(setting, 0), 0)
    assert all(np.isfinite(list(found.values())))
    assert found["error"] >= 0 and found["evaluations"] > 0 and 0 < found["ess"] <= 1 + 1e-9


@pytest.mark.parametrize("name", arms("n500"))
def test_timed_arms_run(task, name):
    shared = dataclasses.replace(task.prepare("n500", 0), particles=30)
    timed = CLAIM.arm(name).run(shared, 0)
    assert isinstance(timed, Timed) and len(timed.call().particles) == 30


def test_all_arms_start_from_the_same_particles(task):
    shared = task.prepare("far", 0)
    assert torch.equal(shared.x0(), shared.x0()) and shared.x0(20).shape == (20, 1)
    assert not torch.equal(task.prepare("far", 1).x0(), shared.x0())


def test_targets_are_normalised_mixtures():
    grid = torch.linspace(-30, 40, 20001, dtype=torch.float64)[:, None]
    for target in (far_modes(), negligible_mode()):
        assert float(torch.trapezoid(target.log_prob(grid).exp(), grid[:, 0])) == pytest.approx(1.0, abs=1e-6)
    eight = eight_dimensions(3)
    assert eight.dim == 8 and sum(eight.weights) == pytest.approx(1) and eight_dimensions(3) == eight
    draw = np.random.default_rng(0)
    j = draw.choice(4, size=20000, p=eight.weights)
    points = np.array(eight.means)[j] + 0.15 * draw.normal(size=(20000, 8))
    masses = eight.masses(points, np.full(20000, 1 / 20000))
    assert np.abs(np.array(masses) - eight.weights).max() < 0.015
    two = GaussianMixture((0.3, 0.7), ((0.0, 0.0), (3.0, 4.0)), 1.0, 1.0)
    value = two.log_prob(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    expected = np.log((0.7 + 0.3 * np.exp(-12.5)) / (2 * np.pi))
    assert float(value) == pytest.approx(expected)


# -- the user's own density --------------------------------------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "mydensity.py").write_text(
        "def normal(x):\n    return -0.5 * x.square().sum(-1)\n"
        "def wrong(x):\n    return x\n"
        "def empty(x):\n    return x.sum(-1) * float('nan')\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "mydensity"
    sys.modules.pop("mydensity", None)


def test_an_own_density(module):
    task = CLAIM.workload(**SMOKE | {"target": f"{module}:normal", "dim": 2, "start": 2.0}).build(device="cpu", seed=0)
    assert task.settings == ("own",)
    shared = task.prepare("own", 0)
    for name in ("pgps", "langevin", "smc"):
        found = CLAIM.arm(name).run(shared, 0)
        assert "error" not in found and found["evaluations"] > 0
    evidence = CLAIM.arm("smc").run(dataclasses.replace(shared, particles=2000), 0)["log_evidence"]
    assert evidence == pytest.approx(np.log(2 * np.pi), abs=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "mydensity"}, "must have the form module:callable"),
        ({"target": "nowhere:f"}, "No module named 'nowhere'"),
        ({"target": "mydensity:missing"}, "has no function 'missing'"),
        ({"target": "mydensity:number"}, "has no function 'number'"),
        ({"target": "mydensity:wrong"}, "fails on rows"),
        ({"target": "mydensity:empty"}, "is not finite at draws"),
        ({"target": "mydensity:normal", "dim": None}, "--dim must be the dimension"),
        ({"target": "mydensity:normal", "start": -1.0}, "--start must be positive"),
        ({"target": None}, "--dim is for --target"),
        ({"target": None, "dim": None, "particles": 3}, "--particles must be at least 10"),
        ({"target": None, "dim": None, "train_steps": 0}, "--train-steps must be at least 1"),
    ],
)
def test_options_that_cannot_be_used(module, options, message):
    with pytest.raises(InputError, match=message):
        CLAIM.workload(**SMOKE | {"dim": 2} | options).build(device="cpu", seed=0)


def test_a_density_is_found_by_its_name(module):
    assert load_density(f"{module}:normal")(torch.zeros(3, 2)).shape == (3,)


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_the_claim_is_consistent():
    everywhere = {a.name: a.where for a in CLAIM.arms}
    for s in CLAIM.statements:
        for where in s.where:
            assert all(where in everywhere[arm] for arm in (s.method, *s.baselines))
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= names and set(scale.races) == {"run"} for scale in CLAIM.scales.values())


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.pgps; print([m for m in ('torch', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert 0.4 < float(capsys.readouterr().out) < 0.6
    (example,) = re.findall(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert 0.4 < float(capsys.readouterr().out) < 0.6


def test_through_the_runner(tmp_path):
    from assay.bench.runner import execute
    from assay.bench.verdict import decide

    done = execute(CLAIM, CLAIM.workload(), scale="smoke", jobs=1, store=str(tmp_path / "store.sqlite"))
    failed = [t for t in done.trials if t.status != "ok"]
    assert not failed, failed[0].error
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}
