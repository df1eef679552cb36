"""Boosted trees as plain arrays: one way to predict, and a form that can be saved without pickling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from assay.statistics.rqr.formulas import Array


@numba.njit(cache=True, nogil=True)
def _walk(X, feature, threshold, left, right, value, roots, start):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    out = np.full(X.shape[0], start)
    for root in roots:
        for i in range(X.shape[0]):
            node = root
            while feature[node] >= 0:
                node = left[node] if X[i, feature[node]] <= threshold[node] else right[node]
            out[i] += value[node]
    return out


@dataclass(frozen=True)
class TreeEnsemble:
    """A sum of regression trees: ``start + sum of the values of the leaves``.

    Nodes of all trees stand one after the other. ``feature`` is -1 in leaves; a row goes left where
    ``x[feature] <= threshold``; ``left`` and ``right`` are positions in these arrays; ``roots`` are the first nodes.
    """

    start: float
    roots: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    value: np.ndarray

    def __call__(self, X: Array) -> Array:
        """Predictions (n,) for features (n, p)."""
        return _walk(
            np.ascontiguousarray(X, dtype=np.float64),
            self.feature,
            self.threshold,
            self.left,
            self.right,
            self.value,
            self.roots,
            self.start,
        )

    def tensors(self, prefix: str) -> dict[str, np.ndarray]:
        """Arrays to save."""
        names = ("roots", "feature", "threshold", "left", "right", "value")
        return {f"{prefix}.start": np.array([self.start])} | {f"{prefix}.{n}": getattr(self, n) for n in names}

    @classmethod
    def from_tensors(cls, prefix: str, tensors: Mapping[str, np.ndarray]) -> TreeEnsemble:
        """The inverse of :meth:`tensors`."""
        names = ("roots", "feature", "threshold", "left", "right", "value")
        return cls(float(tensors[f"{prefix}.start"][0]), **{n: tensors[f"{prefix}.{n}"] for n in names})


def _join(start: float, trees: Sequence[tuple[np.ndarray, ...]]) -> TreeEnsemble:
    """One ensemble of trees ``(feature, threshold, left, right, value)`` with positions relative to each tree."""
    sizes = [len(t[0]) for t in trees]
    roots = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64) if trees else np.zeros(0, np.int64)
    shift = np.repeat(roots, sizes)

    def column(i: int, dtype: Any) -> np.ndarray:
        return np.concatenate([t[i] for t in trees]).astype(dtype) if trees else np.zeros(0, dtype)

    return TreeEnsemble(
        float(start),
        roots,
        column(0, np.int32),
        column(1, np.float64),
        column(2, np.int64) + shift,
        column(3, np.int64) + shift,
        column(4, np.float64),
    )


def from_hist_gradient_boosting(model: Any) -> TreeEnsemble:
    """The trees of a fitted ``HistGradientBoostingRegressor`` on numeric features without missing values."""
    trees = []
    for (predictor,) in model._predictors:
        nodes = predictor.nodes
        leaf = nodes["is_leaf"].astype(bool)
        trees.append(
            (
                np.where(leaf, -1, nodes["feature_idx"]),
                nodes["num_threshold"],
                nodes["left"],
                nodes["right"],
                nodes["value"],
            )
        )
    return _join(np.asarray(model._baseline_prediction).item(), trees)


def mean_of(ensembles: Sequence[TreeEnsemble]) -> TreeEnsemble:
    """One ensemble that predicts the mean of several."""
    count = len(ensembles)
    shifts = np.cumsum([0, *(len(e.feature) for e in ensembles)])[:-1]
    return TreeEnsemble(
        sum(e.start for e in ensembles) / count,
        np.concatenate([e.roots + at for e, at in zip(ensembles, shifts)]),
        np.concatenate([e.feature for e in ensembles]),
        np.concatenate([e.threshold for e in ensembles]),
        np.concatenate([e.left + at for e, at in zip(ensembles, shifts)]),
        np.concatenate([e.right + at for e, at in zip(ensembles, shifts)]),
        np.concatenate([e.value for e in ensembles]) / count,
    )


def from_decision_trees(start: float, trees: Sequence[Any], values: Sequence[Array]) -> TreeEnsemble:
    """Fitted ``DecisionTreeRegressor`` trees with their own leaf values, one for each node (used in leaves only)."""
    parts = []
    for tree, value in zip(trees, values):
        t = tree.tree_
        leaf = t.children_left < 0
        parts.append((np.where(leaf, -1, t.feature), t.threshold, t.children_left, t.children_right, value))
    return _join(start, parts)
