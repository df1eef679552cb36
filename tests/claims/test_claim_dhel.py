"""The claim of DHEL: arms run, report what they say, and learn from the user's own items."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from assay.bench.claim import Timed
from assay.claims.dhel import CLAIM, SIZES, TwoViews
from assay.errors import InputError
from assay.workloads.views import augment, load_images, load_pairs

CARD = Path(__file__).parents[2] / "docs" / "methods" / "dhel.md"
SMOKE = dict(CLAIM.scales["smoke"].options)
QUALITY = [a for a in CLAIM.arms if a.race is None]


def prepared(setting, **options):
    return TwoViews(**SMOKE | options).build(device="cpu", seed=0).prepare(setting, 0)


@pytest.fixture(scope="module")
def digits():
    return prepared("digits", items=128)


@pytest.mark.parametrize("arm", QUALITY, ids=lambda a: a.name)
def test_every_arm_trains_and_is_judged(digits, arm):
    if arm.name == "ntxent":
        pytest.importorskip("pytorch_metric_learning")
    found = arm.run(digits, 0)
    assert set(found) <= {m.name for m in CLAIM.metrics} and all(map(math.isfinite, found.values()))
    assert 0.5 < found["quality"] <= 1 and 1 <= found["rank"] <= 32 and 0 <= found["wasserstein_uniformity"] <= 1
    assert 0 <= found["quality_range"] <= 1 and 0 < found["alignment"] < 4


@pytest.mark.parametrize("arm", QUALITY, ids=lambda a: a.name)
def test_every_arm_reaches_its_known_minimum(arm):
    found = arm.run(prepared("theory"), 0)
    assert abs(found["gap"]) < 1e-6 and found["off_simplex"] < 1e-3 and found["partner"] > 0.999
    assert set(found) <= {m.name for m in CLAIM.metrics}
    if arm.name == "kcl":
        assert found["spread"] < 1e-12
    assert (found["bias"] < 0.2) == (arm.name == "kcl" or (arm.name == "align_uniform" and found["bias"] < 0.2))


def test_arms_do_not_depend_on_those_before(digits):
    first = CLAIM.arm("dhel").run(prepared("digits", items=128), 0)
    CLAIM.arm("dcl").run(digits, 0)
    again = CLAIM.arm("dhel").run(digits, 0)
    assert {k: v for k, v in first.items() if k != "cpu"} == {k: v for k, v in again.items() if k != "cpu"}


@pytest.mark.parametrize("arm", [a for a in CLAIM.arms if a.race], ids=lambda a: a.name)
def test_timed_arms_give_a_call(arm):
    if "pml" in arm.name:
        pytest.importorskip("pytorch_metric_learning")
    threads = torch.get_num_threads()
    timed = arm.run(prepared("m16"), 0)
    assert isinstance(timed, Timed)
    timed.call()
    assert torch.get_num_threads() == threads


def test_timed_forms_are_the_same_losses():
    from assay.claims.dhel import _timed_loss

    shared = prepared("m32")
    assert SIZES["m32"] == len(shared.u)
    for ours, other in (("kcl", "kcl-pdist"), ("ntxent", "pml-ntxent"), ("ntxent", "pml-supcon")):
        if "pml" in other:
            pytest.importorskip("pytorch_metric_learning")
        torch.testing.assert_close(_timed_loss(ours)(shared.u, shared.v), _timed_loss(other)(shared.u, shared.v))


def test_smoke_run_through_the_runner(tmp_path):
    api = pytest.importorskip("assay.bench.api")
    arms = ["dhel", "dcl"]
    result = api.run("dhel", scale="smoke", arms=arms, jobs=1, store=tmp_path / "s.sqlite", progress=False, items=128)
    assert all(t.status == "ok" for t in result.run.trials) and len(result.run.trials) == 2 * 2 * 2
    gaps = [t.metrics["gap"] for t in result.run.trials if "gap" in t.metrics]
    assert len(gaps) == 4 and max(gaps) < 1e-3


# --- the user's own items ---------------------------------------------------------------------------------------------


def write_pairs(path, n=150, labels=True, **more):
    """Paired rows of three kinds; ``labels`` may be an array instead of the kinds' names."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(3, size=n)
    base = rng.normal(size=(3, 6))[kinds] + 0.5 * rng.normal(size=(n, 6))
    held = {"view0": base + 0.1 * rng.normal(size=base.shape), "view1": base @ rng.normal(size=(6, 4))}
    if labels is True:
        held["labels"] = np.array(["a", "b", "c"])[kinds]
    elif labels is not False:
        held["labels"] = labels
    np.savez(path, **held | more)
    return path


@pytest.mark.parametrize("labels", [True, False])
def test_own_pairs_through_the_runner(tmp_path, labels):
    api = pytest.importorskip("assay.bench.api")
    file = write_pairs(tmp_path / "pairs.npz", labels=labels)
    result = api.run(
        "dhel",
        scale="smoke",
        arms=["dhel", "dcl"],
        jobs=1,
        replicates=1,
        store=tmp_path / "s.sqlite",
        progress=False,
        pairs=str(file),
        epochs=20,
        batch=32,
    )
    assert result.run.settings == ("own",)
    for trial in result.run.trials:
        assert trial.status == "ok", trial.error
        assert trial.metrics["quality"] > (0.5 if labels else 0.15)
        assert ("knn_mean" in trial.metrics) == labels


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_own_images(tmp_path, mode):
    rng = np.random.default_rng(0)
    for i in range(120):
        folder = tmp_path / "pictures" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        value = rng.integers(0, 120, (20, 24, 3)) + 120 * (i % 2)
        Image.fromarray(value.astype(np.uint8)).convert(mode).save(folder / f"{i}.png")
    task = TwoViews(**SMOKE | {"images": str(tmp_path / "pictures"), "size": 16}).build(device="cpu", seed=0)
    assert task.settings == ("own",) and "120 images" in task.title
    shared = task.prepare("own", 0)
    assert shared.items.first.shape == (120, 3 if mode == "RGB" else 1, 16, 16)
    assert CLAIM.arm("dhel").run(shared, 0)["quality"] > 0.6


def test_resnet_gives_512_numbers():
    from assay.claims._dhel_training import ResNet18

    with torch.no_grad():
        assert ResNet18(3).eval()(torch.rand(2, 3, 8, 8)).shape == (2, 512)
    assert sum(p.numel() for p in ResNet18(3).parameters()) == pytest.approx(11.17e6, rel=0.01)


@pytest.mark.parametrize("channels", [1, 3])
def test_views_differ_and_the_generator_decides(channels):
    images = torch.rand(6, channels, 14, 14)
    one, two, again = (augment(images, torch.Generator().manual_seed(s)) for s in (0, 1, 0))
    assert one.shape == images.shape and torch.equal(one, again) and not torch.allclose(one, two)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: load_pairs(p / "none.npz"), "no such file"),
        (lambda p: load_pairs(_text(p / "x.npz")), "not a NumPy"),
        (lambda p: load_pairs(write_pairs(p / "o.npz", view0=np.array([{}], dtype=object))), "not a NumPy"),
        (lambda p: load_pairs(_saved(p / "a.npz", view0=np.ones((3, 2)))), "expected view0 and view1"),
        (lambda p: load_pairs(write_pairs(p / "b.npz", view1=np.ones((3, 2)))), "rows are pairs"),
        (lambda p: load_pairs(write_pairs(p / "c.npz", view1=np.ones(150))), "shape"),
        (lambda p: load_pairs(write_pairs(p / "d.npz", view1=np.full((150, 2), np.nan))), "in row 0"),
        (lambda p: load_pairs(write_pairs(p / "e.npz", labels=np.zeros(3, int))), "labels must be"),
        (lambda p: load_pairs(write_pairs(p / "f.npz", labels=np.zeros(150, int))), "all labels are the same"),
        (lambda p: load_images(p / "none", 16), "no such folder"),
        (lambda p: load_images(p, 16), "no image"),
        (lambda p: load_images(p, 4), "--size"),
        (lambda p: load_images(_text(p / "broken.png").parent, 16), "cannot be read"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, make, words):
    with pytest.raises(InputError, match=words):
        make(tmp_path)


def _text(path):
    path.write_text("no such thing")
    return path


def _saved(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "--epochs"),
        ({"small_batch": 1}, "--small-batch"),
        ({"small_batch": 128}, "--small-batch must be at most --batch"),
        ({"temperatures": [0.0]}, "--temperatures"),
        ({"temperatures": []}, "--temperatures"),
        ({"network": "vit"}, "--network"),
        ({"items": 32}, "smaller --batch"),
        ({"largest": 8}, "--largest"),
        ({"images": "a", "pairs": "b"}, "exclude"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        TwoViews(**SMOKE | options).build(device="cpu", seed=0)


def test_options_change_the_digest():
    options = ({}, {"epochs": 2}, {"temperatures": [0.1]}, {"batch": 32}, {"items": 300}, {"largest": 32})
    assert len({TwoViews(**SMOKE | o).build(device="cpu", seed=0).digest for o in options}) == len(options)


def test_importing_the_claim_loads_nothing_heavy():
    code = "import sys, assay.claims.dhel; print([m for m in ('torch', 'sklearn', 'PIL') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_run():
    exec(CLAIM.snippet, {})
    text = CARD.read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert examples and "<!-- results:begin -->" in text
    for code in examples:
        exec(code, {})
