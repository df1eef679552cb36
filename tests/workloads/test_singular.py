"""Singular samples, a user's table, and a user's loss."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from assay.errors import InputError
from assay.workloads.named import load_named
from assay.workloads.singular import SingularFits, draw, label, pilot


def build(**options):
    return SingularFits(**options).build(device="cpu", seed=0)


@pytest.mark.parametrize(("name", "radius"), [("glm2", 0.01**0.25), ("glm3", 0.01 ** (1 / 6)), ("gmm", 0.01**0.25)])
def test_samples_without_signal(name, radius):
    s = draw(name, 400, 4, 3)
    assert s.radius == pytest.approx(radius) and np.linalg.norm(s.start) == pytest.approx(1.7)
    assert s.X.shape == (400, 4) and s.y.shape == (400,) and not s.truth.any()
    np.testing.assert_array_equal(s.X, draw(name, 400, 4, 3).X)
    assert not np.array_equal(s.X, draw(name, 400, 4, 4).X)


def test_samples_with_signal_and_distance_up_to_the_sign():
    s = draw("strong2", 4000, 4, 0)
    assert np.linalg.norm(s.truth) == pytest.approx(1) and s.radius == pytest.approx((4 / 4000) ** 0.5)
    assert s.distance(-s.truth) == 0
    assert np.mean((s.y - (s.X @ s.truth) ** 2) ** 2) == pytest.approx(1, rel=0.1)
    assert np.linalg.norm(draw("middle2", 1024, 4, 0).truth) == pytest.approx(0.5)
    cubic = draw("glm3", 400, 4, 0)
    assert cubic.distance(np.ones(4)) == 2


def test_settings_and_sizes():
    task = build(sizes=[2000, 500], models=["glm2", "gmm"])
    assert task.settings == ("glm2", "gmm", "glm2-500", "glm2-2k", "gmm-500", "gmm-2k")
    assert [len(s.X) for s in task.prepare("gmm", 1)] == [500, 2000]
    (s,) = task.prepare("glm2-2k", 0)
    assert len(s.X) == 2000 and label(1500) == "1500"
    assert len(pilot(s).X) == 4000


def test_digest_follows_what_changes_a_number(tmp_path):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(50, 3)), columns=list("abc"))
    digests = [build(**o).digest for o in ({}, {"d": 3}, {"sizes": [10, 20]}, {"models": ["glm2"]},
                                           {"data": frame}, {"data": frame, "target": "a"},
                                           {"data": frame, "target": "a", "power": 3})]  # fmt: skip
    assert len(set(digests)) == len(digests)


def test_own_table(tmp_path):
    frame = pd.DataFrame(np.random.default_rng(0).normal(3, 2, size=(50, 3)), columns=list("abc"))
    frame.to_csv(tmp_path / "t.csv", index=False)
    (s,) = build(data=tmp_path / "t.csv").prepare("mixture", 0)
    assert s.power == 0 and s.X.shape == (50, 3) and np.isnan(s.radius) and pilot(s) is s
    np.testing.assert_allclose(s.X.mean(0), 0, atol=1e-6)
    np.testing.assert_allclose(s.X.std(0), 1, rtol=1e-6)
    (s,) = build(data=frame, target="c", power=3).prepare("data", 1)
    assert s.power == 3 and s.X.shape == (50, 2) and np.mean(s.y**2) == pytest.approx(1)


def test_tables_of_scikit_learn():
    task = build(models=["glm2", "iris"], sizes=[100, 200])
    assert task.settings == ("glm2", "iris", "glm2-100", "glm2-200")
    (s,), (other,) = task.prepare("iris", 0), task.prepare("iris", 1)
    assert s.X.shape == (150, 4) and s.power == 0 and np.isnan(s.radius) and pilot(s) is s
    np.testing.assert_array_equal(s.X, other.X)
    assert np.linalg.norm(s.start) == pytest.approx(1.7) and not np.array_equal(s.start, other.start)


def test_own_loss(tmp_path, monkeypatch):
    (tmp_path / "singular_own.py").write_text(
        "def loss(x):\n    return (x @ x) ** 2\nnumber = 3\n"
        "def three(x):\n    a, b, c = x\n    return a * b * c\n"
        "def many(x):\n    return x\ndef cut(x):\n    return (x @ x).item()\ndef bad(x):\n    return (x @ x) / 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (s,) = build(loss="singular_own:loss", d=2).prepare("loss", 0)
    assert s.loss is load_named("singular_own:loss", "--loss", "m:f") and s.start.shape == (2,)
    for wrong, words in (
        ("singular_own", "module:callable"),
        ("singular_own:number", "no function"),
        ("nowhere_x:f", "nowhere_x"),
        ("singular_own:three", "fails on a float64 vector of --d 4"),
        ("singular_own:many", "one finite number"),
        ("singular_own:cut", "one finite number"),
        ("singular_own:bad", "one finite number"),
    ):
        with pytest.raises(InputError, match=words):
            build(loss=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": [100]}, "sizes"),
        ({"sizes": [100, 100]}, "sizes"),
        ({"sizes": [3, 100]}, "sizes"),
        ({"models": ["tree"]}, "tree"),
        ({"d": 0}, "--d"),
        ({"target": "a"}, "target"),
        ({"data": pd.DataFrame({"a": [1.0, 2]}), "loss": "a:b"}, "not both"),
        ({"data": pd.DataFrame({"a": [1.0, 2, 4], "b": [1.0, 1, 1]})}, "constant"),
        ({"data": pd.DataFrame({"a": [1.0, 2, 4], "b": [1.0, 1, 2]}), "target": "b", "power": 1}, "power"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        build(**options)
