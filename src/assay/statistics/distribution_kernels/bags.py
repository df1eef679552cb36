"""Bags of points: the one representation inside, and everything that users have instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Bags:
    """N bags in one array, without padding. Indexing gives bags again, so that scikit-learn can split them.

    Attributes
    ----------
    points : array (P, d)
        The points of all bags, one bag after the other, float64.
    offsets : array (N + 1,)
        Bag i holds ``points[offsets[i]:offsets[i + 1]]``, at least one point.
    weights : array (P,) or None
        Weight of each point in its bag; those of a bag sum to 1. ``None``: all points of a bag weigh the same.
    """

    points: Array
    offsets: Index
    weights: Array | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: Any) -> Bags:
        if isinstance(rows, int | np.integer):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"bag {rows} of {len(self)}")
            rows = [int(rows) % len(self)]
        wanted = np.arange(len(self))[rows]
        sizes = self.sizes[wanted]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        # Index of each point that is kept: its place in the new bag, from where the old bag starts.
        take = np.arange(offsets[-1]) + np.repeat(self.offsets[wanted] - offsets[:-1], sizes)
        return Bags(self.points[take], offsets, None if self.weights is None else self.weights[take])

    def __iter__(self) -> Iterator[Bags]:
        return (self[i] for i in range(len(self)))

    @property
    def sizes(self) -> Index:
        """Points in each bag, shape (N,)."""
        return np.diff(self.offsets)

    @property
    def dim(self) -> int:
        """Coordinates of a point."""
        return self.points.shape[1]

    def shares(self) -> Array:
        """Weight of each point in its bag, also where all are equal, shape (P,)."""
        if self.weights is not None:
            return self.weights
        sizes = self.sizes
        return np.repeat(1.0 / sizes, sizes)

    def means(self, values: Array) -> Array:
        """Weighted means over bags: values (P, ...) of points to (N, ...)."""
        if self.weights is None:
            total = np.add.reduceat(values, self.offsets[:-1], axis=0)
            return total / self.sizes.reshape(-1, *[1] * (values.ndim - 1))
        weighted = values * self.weights.reshape(-1, *[1] * (values.ndim - 1))
        return np.add.reduceat(weighted, self.offsets[:-1], axis=0)

    def arrays(self) -> list[Array]:
        """The bags as a list of arrays (M_i, d)."""
        return np.split(self.points, self.offsets[1:-1])


class FrameBags(NamedTuple):
    """What :func:`bags_from_frame` gives: the bags, a label each (``None`` without ``label``), and their ids."""

    bags: Bags
    y: NDArray[Any] | None
    ids: NDArray[Any]


def are_rows(X: Any) -> bool:
    """Whether X is a table (array (N, M), data frame, list of equally long lists of numbers): each row is a bag.

    Lists of *arrays* are bags, also where all have the same length.
    """
    if isinstance(X, Bags):
        return False
    if isinstance(X, list | tuple):
        if not X:
            return False
        first = X[0]
        if not isinstance(first, list | tuple):
            return not isinstance(first, Bags) and np.ndim(first) == 0
        deep = any(isinstance(entry, list | tuple) or np.ndim(entry) > 0 for row in X for entry in row[:1])
        return not deep and len({len(row) for row in X}) == 1
    if isinstance(X, np.ndarray) and X.dtype == object and X.ndim == 1 and len(X):
        return np.ndim(X[0]) == 0 and not isinstance(X[0], Bags)
    return getattr(X, "ndim", 2) != 3


def as_bags(X: Any, point_weights: Any = None, *, name: str = "X") -> Bags:
    """Bags from whatever a user has.

    Parameters
    ----------
    X
        A list, tuple or object array of arrays (M_i, d) or (M_i,); an array (N, M, d); an array (N, M), each row a bag
        of M numbers; or :class:`Bags`. Everything becomes float64.
    point_weights
        ``None``, or for each bag an array (M_i,) of weights >= 0 with a positive sum. They are divided by that sum.
    name
        What errors call X.

    Raises
    ------
    ValueError
        Naming the bag: it is empty, holds NaN or infinite values, or has another number of coordinates than the first.
    TypeError
        X is nothing of the above.
    """
    if isinstance(X, Bags):
        bags = X
    elif isinstance(X, list | tuple) and len(X) and all(isinstance(b, Bags) for b in X):
        bags = _joined(X, name)
    else:
        bags = _read(X, name)
    if point_weights is None:
        return bags
    return Bags(bags.points, bags.offsets, _weights(bags, point_weights))


def _joined(parts: Sequence[Bags], name: str) -> Bags:
    """One object of several; weights are kept where any has them."""
    dims = [b.dim for b in parts]
    for i, d in enumerate(dims):
        if d != dims[0]:
            raise ValueError(f"{name}[{i}] has {d} coordinates, {name}[0] has {dims[0]}: all bags need the same")
    weights = None
    if any(b.weights is not None for b in parts):
        weights = np.concatenate([b.shares() for b in parts])
    sizes = np.concatenate([b.sizes for b in parts])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Bags(np.concatenate([b.points for b in parts]), offsets, weights)


def _read(X: Any, name: str) -> Bags:
    if isinstance(X, np.ndarray) and X.dtype != object:
        if X.ndim not in (2, 3):
            raise ValueError(f"{name} must be a list of bags, an array (N, M, d) or (N, M); got an array {X.shape}")
        n, m = X.shape[:2]
        if n == 0 or m == 0:
            raise ValueError(f"{name} has {n} bags of {m} points: there is nothing to learn from")
        points = _floats(X.reshape(n * m, -1), name)
        bad = ~np.isfinite(points).all(1)
        if bad.any():
            raise ValueError(f"{name}[{int(np.argmax(bad)) // m}] holds NaN or infinite values")
        return Bags(points, np.arange(n + 1, dtype=np.int64) * m)
    if not isinstance(X, list | tuple | np.ndarray):
        raise TypeError(
            f"{name} must be a list of arrays (M_i, d), an array (N, M, d) or (N, M), or Bags; got {type(X).__name__}"
        )
    if len(X) == 0:
        raise ValueError(f"{name} holds no bag")
    parts: list[Array] = []
    for i, entry in enumerate(X):
        if isinstance(entry, Bags):
            raise TypeError(f"{name}[{i}] is Bags, others are not: give a list of either")
        part = _floats(entry, f"{name}[{i}]")
        part = part[:, None] if part.ndim == 1 else part
        if part.ndim != 2:
            raise ValueError(f"{name}[{i}] must have the shape (M, d) or (M,), got {part.shape}")
        if len(part) == 0 or part.shape[1] == 0:
            raise ValueError(f"{name}[{i}] is empty, shape {part.shape}: a bag needs at least one point")
        if parts and part.shape[1] != parts[0].shape[1]:
            raise ValueError(
                f"{name}[{i}] has {part.shape[1]} coordinates, {name}[0] has {parts[0].shape[1]}: all need the same"
            )
        if not np.isfinite(part).all():
            raise ValueError(f"{name}[{i}] holds NaN or infinite values")
        parts.append(part)
    offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
    return Bags(np.concatenate(parts), offsets)


def _floats(values: Any, name: str) -> Array:
    array = np.asarray(values)
    if array.dtype.kind == "c":
        raise ValueError(f"{name} holds complex numbers; real ones are expected")
    try:
        return array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers: {error}") from error


def _weights(bags: Bags, given: Any) -> Array:
    if len(given) != len(bags):
        raise ValueError(f"point_weights must give an array for each of {len(bags)} bags, got {len(given)}")
    parts = []
    for i, (entry, size) in enumerate(zip(given, bags.sizes)):
        part = _floats(entry, f"point_weights[{i}]").reshape(-1)
        if len(part) != size:
            raise ValueError(f"point_weights[{i}] has {len(part)} entries for a bag of {size} points")
        total = part.sum()
        if not (part >= 0).all() or not 0 < total < np.inf:
            raise ValueError(f"point_weights[{i}] must be finite, >= 0 and not all zero")
        parts.append(part / total)
    return np.concatenate(parts)


def bags_from_padded(values: ArrayLike, mask: ArrayLike) -> Bags:
    """Bags from an array (N, M, d) or (N, M) of which only some entries are points.

    Parameters
    ----------
    values
        Points, padded with anything (NaN too) to the same number.
    mask
        Booleans (N, M), or 0 and 1: true where there is a point.

    Raises
    ------
    ValueError
        Shapes do not fit, the mask holds other values, or a bag is empty or holds NaN where the mask is true.
    """
    array, there = np.asarray(values), np.asarray(mask)
    if array.ndim not in (2, 3) or there.shape != array.shape[:2]:
        raise ValueError(
            f"values must be (N, M, d) or (N, M) and mask (N, M); got {array.shape} and {there.shape}; "
            "mask is true where there is a point"
        )
    if there.dtype != bool:
        if not np.isin(there, (0, 1)).all():
            raise ValueError("mask must hold booleans, or 0 and 1")
        there = there.astype(bool)
    return as_bags([row[keep] for row, keep in zip(array, there)], name="values")


def bags_from_frame(
    frame: pd.DataFrame,
    bag: str,
    features: Sequence[str] | None = None,
    label: str | None = None,
    *,
    weight: str | None = None,
) -> FrameBags:
    """Bags from a data frame with one point a row and a column that tells which bag it belongs to.

    Parameters
    ----------
    frame
        Rows of one bag need not be neighbours. Bags are given in the order in which they first appear.
    bag
        Column of bag ids.
    features
        Columns of coordinates; all numeric ones but ``bag``, ``label`` and ``weight`` by default.
    label
        Column of labels, which must be the same in all rows of a bag.
    weight
        Column of weights of points within their bag, >= 0.

    Returns
    -------
    :class:`FrameBags`: ``(bags, y, ids)``.

    Raises
    ------
    ValueError
        A column is missing, an id, coordinate or label is missing or not finite, or a label differs within a bag.
    """
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"frame must be a pandas DataFrame, got {type(frame).__name__}")
    special = [c for c in (bag, label, weight) if c is not None]
    for column in [*special, *(features or ())]:
        if column not in frame.columns:
            raise ValueError(f"{column!r} is not a column of frame; there are {', '.join(map(str, frame.columns))}")
    if len(frame) == 0:
        raise ValueError("frame has no rows")
    if features is None:
        features = [c for c in frame.select_dtypes("number").columns if c not in special]
    if not features:
        raise ValueError("frame has no numeric column besides bag, label and weight: name the features")
    codes, ids = pd.factorize(frame[bag])
    if (codes < 0).any():
        raise ValueError(f"bag ids are missing in column {bag!r}, first in row {int(np.argmax(codes < 0))}")
    order = np.argsort(codes, kind="stable")
    points = np.empty((len(frame), len(features)))
    for k, column in enumerate(features):
        values = frame[column]
        if not pd.api.types.is_numeric_dtype(values):
            raise ValueError(f"feature {column!r} must hold numbers, it has dtype {values.dtype}")
        points[:, k] = values.to_numpy(np.float64, na_value=np.nan)[order]
    bad = ~np.isfinite(points)
    if bad.any():
        row, k = np.argwhere(bad)[0]
        raise ValueError(f"bag {ids[codes[order[row]]]!r} holds NaN or infinite values in column {features[k]!r}")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(codes))]).astype(np.int64)
    bags = Bags(points, offsets)
    if weight is not None:
        shares = frame[weight].to_numpy(np.float64, na_value=np.nan)[order]
        bags = Bags(points, offsets, _weights(bags, np.split(shares, offsets[1:-1])))
    y: NDArray[Any] | None = None
    if label is not None:
        labels = frame[label].iloc[order]
        if labels.isna().any():
            row = int(np.argmax(labels.isna().to_numpy()))
            raise ValueError(f"bag {ids[codes[order[row]]]!r} has rows without a label in column {label!r}")
        given = labels.to_numpy()
        y = given[offsets[:-1]]
        differs = given != np.repeat(y, bags.sizes)
        if differs.any():
            row = int(np.argmax(differs))
            raise ValueError(
                f"bag {ids[codes[order[row]]]!r} has several labels in column {label!r}: a label belongs to a bag"
            )
    return FrameBags(bags, y, np.asarray(ids))


def read_bags(estimator: Any, X: Any, point_weights: Any = None, *, reset: bool, rows_only: bool = False) -> Bags:
    """Bags for an estimator, with the checks of scikit-learn: ``n_features_in_``, feature names, number of coordinates.

    ``n_features_in_`` is the number of coordinates of a point, or the number of columns where each row is a bag
    (``rows_only``: a vector).
    """
    from sklearn.utils.validation import check_array, validate_data

    if rows_only or are_rows(X):
        if not rows_only and not reset and not estimator._rows:
            table = check_array(X, dtype=np.float64)
        else:
            table = validate_data(estimator, X, dtype=np.float64, reset=reset)
        table = np.asarray(table, np.float64)
        n, m = table.shape
        bags = Bags(table.reshape(-1, 1), np.arange(n + 1, dtype=np.int64) * m)
        if rows_only:
            bags = Bags(table, np.arange(n + 1, dtype=np.int64))
        elif point_weights is not None:
            bags = as_bags(bags, point_weights)
        rows = True
    else:
        bags, rows = as_bags(X, point_weights), False
        if reset:
            estimator.n_features_in_ = bags.dim
            if hasattr(estimator, "feature_names_in_"):
                del estimator.feature_names_in_
    if reset:
        estimator._rows, estimator._dim = rows, bags.dim
        single = int((bags.sizes == 1).sum())
        if single and not rows_only:
            warnings.warn(
                f"{single} of {len(bags)} bags hold one point, which says little about a distribution",
                UserWarning,
                stacklevel=3,
            )
    elif bags.dim != estimator._dim:
        raise ValueError(
            f"X has {bags.dim} coordinates a point, but {type(estimator).__name__} was fitted with {estimator._dim}"
        )
    return bags


def check_whole(name: str, value: Any, least: int) -> None:
    """Raise ValueError unless ``value`` is an integer of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float, expected: str, words: tuple[str, ...] = ()) -> None:
    """Raise ValueError unless ``value`` is a number strictly between ``low`` and ``high``, or one of ``words``."""
    if isinstance(value, str) and value in words:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not low < float(value) < high:
        raise ValueError(f"{name} must be {' or '.join([*map(repr, words), expected])}, got {value!r}")


def check_positive(name: str, value: Any, *words: str) -> None:
    """Raise ValueError unless ``value`` is a finite number > 0, or one of ``words``."""
    check_number(name, value, 0.0, np.inf, "a positive number", words)


def bag_weights(sample_weight: Any, n: int) -> Array:
    """Weights of bags, shape (n,), with mean 1 over those that are positive."""
    if sample_weight is None:
        return np.ones(n)
    weights = np.asarray(sample_weight, dtype=np.float64)
    if weights.shape != (n,):
        raise ValueError(f"sample_weight must have the shape ({n},), got {weights.shape}")
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.any():
        raise ValueError("sample_weight must be finite, >= 0 and not all zero")
    return weights / weights[weights > 0].mean()
