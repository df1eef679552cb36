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
from assay.workloads.densities import GaussianMixture, eight_dimensions, far_modes, negligible_mode
from assay.workloads.named import load_named

CARD = Path(__file__).parents[2] / "docs" / "methods" / "pgps.md"
SMOKE = dict(CLAIM.scales["smoke"].options) | {"only": None}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE).build(device="cpu", seed=0)


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


@pytest.mark.parametrize(("setting", "name"), [(s, a) for s in SETUPS for a in arms(s)])
def test_arms_sample(task, setting, name):
    if CLAIM.arm(name).requires:
        pytest.importorskip("blackjax")
    found = CLAIM.arm(name).run(task.prepare(setting, 0), 0)
    assert all(np.isfinite(list(found.values())))
    assert found["error"] >= 0 and found["evaluations"] > 0 and 0 < found.get("ess", 1.0) <= 1 + 1e-9


@pytest.mark.parametrize("name", arms("n500"))
def test_timed_arms_run(task, name):
    if CLAIM.arm(name).requires:
        pytest.importorskip("blackjax")
    shared = dataclasses.replace(task.prepare("n500", 0), particles=125)
    timed = CLAIM.arm(name).run(shared, 0)
    assert isinstance(timed, Timed)
    found = timed.call()
    assert len(found[0] if isinstance(found, tuple) else found.particles) == 125


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


def test_evaluations_are_counted_for_each_arm_alone(task):
    """Of the target's score: an iteration of Langevin dynamics is one, an arm that ran before does not add to it."""
    shared = task.prepare("far", 0)
    assert CLAIM.arm("langevin").run(shared, 0)["evaluations"] == 125 * 14
    assert CLAIM.arm("langevin").run(shared, 0)["evaluations"] == 125 * 14
    assert CLAIM.arm("smc").run(shared, 0)["evaluations"] == 125 * (1 + 2 * 11)


@pytest.mark.parametrize("setting", SETUPS)
def test_baselines_have_no_fewer_evaluations_than_the_method(setting):
    """At desk scale, where PGPS takes as many steps as its path asks for."""
    desk = CLAIM.workload(**CLAIM.scales["desk"].options).build(device="cpu", seed=0)
    shared = desk.prepare(setting, 0)
    used = CLAIM.arm("pgps").run(shared, 0)["evaluations"]
    for name in ("langevin", "smc"):
        assert CLAIM.arm(name).run(shared, 0)["evaluations"] >= used
    from assay.claims._pgps_peers import LEVELS, moves_for

    assert LEVELS[setting] * (1 + moves_for(setting, shared.iterations)) * 1000 >= used


def test_densities_in_jax_are_those_in_torch():
    jax = pytest.importorskip("jax")
    from assay.claims._pgps_peers import log_densities, parameters

    start, target = log_densities()
    for mixture in (far_modes(), negligible_mode(), eight_dimensions(1)):
        x = torch.randn(20, mixture.dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with jax.enable_x64(True):
            given = parameters(mixture)
            found = np.array([float(target(row, given)) for row in x.numpy()])
            begun = np.array([float(start(row, given)) for row in x.numpy()])
        assert np.allclose(found, mixture.log_prob(x))
        plain = torch.distributions.Normal(0.0, mixture.start).log_prob(x).sum(1)
        assert np.allclose(begun, plain, rtol=1e-6)


def test_blackjax_finds_the_far_mode():
    """With a budget that is enough, on another path to the same answer; its evidence is near 0 (of 1)."""
    pytest.importorskip("blackjax")
    from assay.claims._pgps_peers import tempered_smc

    mixture = far_modes()
    x0 = 3 * torch.randn(500, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points, weights, evidence, count = tempered_smc(mixture, x0.numpy(), moves=20, step_size=0.5, seed=0)
    assert mixture.masses(points, weights)[1] == pytest.approx(0.5, abs=0.1) and abs(evidence) < 0.2
    assert count % (21 * 500) == 0 and 18 <= count // (21 * 500) <= 24


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
    smoke = CLAIM.scales["smoke"].options  # its default of --only is of no matter
    task = CLAIM.workload(**smoke | {"target": f"{module}:normal", "dim": 2, "start": 2.0}).build(device="cpu", seed=0)
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
        ({"target": None, "dim": None, "only": "near"}, "--only must be one of far, negligible, eight, not 'near'"),
        ({"target": None, "dim": None, "particles": 3}, "--particles must be at least 10"),
        ({"target": None, "dim": None, "most": 5}, "--most must be at least 125, or 0 for no timed runs, not 5"),
        ({"target": None, "dim": None, "train_steps": 0}, "--train-steps must be at least 1"),
    ],
)
def test_options_that_cannot_be_used(module, options, message):
    with pytest.raises(InputError, match=message):
        CLAIM.workload(**SMOKE | {"dim": 2} | options).build(device="cpu", seed=0)


def test_a_density_is_found_by_its_name(module):
    assert load_named(f"{module}:normal", "--target", "m:f")(torch.zeros(3, 2)).shape == (3,)


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_the_claim_is_consistent():
    everywhere = {a.name: a.where for a in CLAIM.arms}
    for s in CLAIM.statements:
        for where in s.where:
            assert all(where in everywhere[arm] for arm in (s.method, *s.baselines))
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(
        set(scale.options) <= names and set(scale.races) == {"run", "training", "iteration"}
        for scale in CLAIM.scales.values()
    )


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
    here = {s.name for s in CLAIM.statements if not s.where or "far" in s.where}
    assert {d.statement.name for d in verdict.decisions} >= here
