"""Bags from lists, arrays, padded arrays and data frames."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.statistics.distribution_kernels import Bags, as_bags, bags_from_frame, bags_from_padded
from assay.statistics.distribution_kernels.bags import are_rows, bag_weights


@pytest.fixture
def ragged():
    rng = np.random.default_rng(0)
    return [rng.standard_normal((m, 2)) for m in (3, 1, 5, 2)]


def same(a, b):
    weights = (a.weights is None and b.weights is None) or np.array_equal(a.weights, b.weights)
    return np.array_equal(a.points, b.points) and np.array_equal(a.offsets, b.offsets) and weights


def test_all_forms_give_the_same_bags(ragged):
    bags = as_bags(ragged)
    assert len(bags) == 4 and bags.dim == 2 and bags.sizes.tolist() == [3, 1, 5, 2]
    boxed = np.empty(4, dtype=object)
    boxed[:] = ragged
    for form in (
        tuple(ragged),
        boxed,
        [b.tolist() for b in ragged],
        list(bags),
        bags,
        [pd.DataFrame(b) for b in ragged],
    ):
        assert same(as_bags(form), bags)
    padded, mask = np.full((4, 5, 2), np.nan), np.zeros((4, 5), bool)
    for i, b in enumerate(ragged):
        padded[i, : len(b)], mask[i, : len(b)] = b, True
    assert same(bags_from_padded(padded, mask), bags) and same(bags_from_padded(padded, mask.astype(int)), bags)
    rows = pd.DataFrame(np.concatenate(ragged), columns=["a", "b"])
    rows["id"], rows["label"] = np.repeat(["z", "y", "x", "w"], bags.sizes), np.repeat([4, 3, 2, 1], bags.sizes)
    frame = bags_from_frame(rows, "id", label="label")
    assert same(frame.bags, bags) and frame.y.tolist() == [4, 3, 2, 1] and frame.ids.tolist() == list("zyxw")
    mixed = rows.iloc[[0, 3, 4, 1, 9, 5, 6, 2, 7, 8, 10]]  # bags interleaved, points in their order
    found = bags_from_frame(mixed, "id", ["a", "b"])
    assert found.ids.tolist() == ["z", "y", "x", "w"] and same(found.bags, bags)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.data())
def test_indexing_is_that_of_a_list(sizes, data):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((m, 2)) for m in sizes]
    weights = [rng.uniform(0.1, 1, m) for m in sizes]
    bags = as_bags(arrays, weights)
    rows = data.draw(st.lists(st.integers(-len(sizes), len(sizes) - 1), min_size=1, max_size=6))
    assert same(bags[rows], as_bags([arrays[r] for r in rows], [weights[r] for r in rows]))
    assert same(as_bags([bags[r] for r in rows]), bags[np.array(rows)])
    mask = np.zeros(len(sizes), bool)
    mask[rows] = True
    assert same(bags[mask], bags[np.flatnonzero(mask)]) and same(bags[:], bags)
    with pytest.raises(IndexError):
        bags[len(sizes)]


def test_means_and_tables(ragged):
    weights = [np.arange(1.0, len(b) + 1) for b in ragged]
    weighted = as_bags(ragged, weights)
    expected = [np.average(b, 0, w) for b, w in zip(ragged, weights)]
    np.testing.assert_allclose(weighted.means(weighted.points), expected, rtol=1e-14)
    cube = np.random.default_rng(0).standard_normal((4, 3, 2))
    assert same(as_bags(cube), as_bags(list(cube))) and same(as_bags(cube[:, :, 0]), as_bags(list(cube[:, :, 0])))
    assert are_rows(np.zeros((3, 2))) and are_rows([[1, 2], [3, 4]]) and are_rows([1.0, 2.0])
    for form in ([np.zeros(2), np.zeros(2)], [[1, 2], [3]], [[[1, 2]], [[3, 4]]], np.zeros((2, 2, 2)), []):
        assert not are_rows(form)


@pytest.mark.parametrize(
    ("bags", "words"),
    [
        ([], "holds no bag"),
        ([np.zeros((2, 2)), np.zeros((0, 2))], r"X\[1\] is empty"),
        ([np.zeros((2, 2)), np.zeros((2, 3))], r"X\[1\] has 3 coordinates, X\[0\] has 2"),
        ([np.zeros((2, 2)), np.array([[1, np.nan]])], r"X\[1\] holds NaN"),
        ([np.zeros((2, 2, 2))], r"X\[0\] must have the shape"),
        ([np.array(["a"])], r"X\[0\] must hold numbers"),
        ([np.array([1j])], r"X\[0\] holds complex"),
        (np.zeros(3), "must be a list of bags"),
        (np.zeros((0, 3)), "0 bags"),
        (np.array([[1.0, 2], [3, np.inf]]), r"X\[1\] holds NaN"),
        ([Bags(np.zeros((1, 1)), np.array([0, 1])), Bags(np.zeros((1, 2)), np.array([0, 1]))], r"X\[1\] has 2"),
    ],
)
def test_bad_bags(bags, words):
    with pytest.raises(ValueError, match=words):
        as_bags(bags)


def test_bad_weights_and_masks(ragged):
    ones = [np.ones(3), np.ones(1), np.ones(5), np.ones(2)]
    for i, part, words in (
        (0, np.ones(2), "has 2 entries"),
        (0, np.zeros(3), "must be finite"),
        (1, -np.ones(1), "must be finite"),
        (2, np.full(5, np.nan), "must be finite"),
    ):
        with pytest.raises(ValueError, match=rf"point_weights\[{i}\] {words}"):
            as_bags(ragged, [part if k == i else w for k, w in enumerate(ones)])
    with pytest.raises(ValueError, match="mask is true where"):
        bags_from_padded(np.zeros((2, 3)), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"values\[1\] is empty"):
        bags_from_padded(np.zeros((2, 3)), [[1, 1, 1], [0, 0, 0]])
    for weights in (np.ones(3), np.array([1, -1]), np.zeros(2), np.array([1, np.nan])):
        with pytest.raises(ValueError, match="sample_weight"):
            bag_weights(weights, 2)


@pytest.mark.parametrize(
    ("change", "arguments", "words"),
    [
        ({}, {"bag": "no"}, "'no' is not a column"),
        ({"id": ["a", None, "b"]}, {"bag": "id"}, "ids are missing in column 'id', first in row 1"),
        ({"x": [1, np.nan, 3]}, {"bag": "id"}, "bag 'a' holds NaN or infinite values in column 'x'"),
        ({"y": [0, 1, 1]}, {"bag": "id", "label": "y"}, "bag 'a' has several labels"),
        ({"y": [0, 0, None]}, {"bag": "id", "label": "y"}, "bag 'b' has rows without a label"),
        ({"x": list("pqr")}, {"bag": "id", "features": ["x"]}, "feature 'x' must hold numbers"),
        ({"w": [0, 0, 1]}, {"bag": "id", "weight": "w"}, r"point_weights\[0\]"),
    ],
)
def test_bad_frames(change, arguments, words):
    data = pd.DataFrame({"id": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [0, 0, 1], **change})
    with pytest.raises(ValueError, match=words):
        bags_from_frame(data, **arguments)
