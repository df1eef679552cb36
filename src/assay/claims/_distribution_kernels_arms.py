"""Arms that learn from bags. Each chooses among 35 or 36 candidates on the same fifth of the training bags."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.workloads.bags import LEVELS, BagSplit, LabelledBags, every

#: Multiples of the default length scale of the point kernel, where the second kernel has none.
POINT_SCALES = (1.0, 0.3, 3.0, 0.1, 10.0)


def fold(split: BagSplit) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to learn from and, every fifth of the training bags (of each class), to choose by."""
    held = every(5, split.train.y, split.task)
    return np.flatnonzero(~held), np.flatnonzero(held)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the part's warnings of bags of one point, which small parts of a user's bags are meant to have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# --- what is measured ------------------------------------------------------------------------------------------------


def _pinball(y: NDArray[Any], quantiles: NDArray[Any]) -> float:
    """Mean over bags and levels."""
    r, q = y[:, None] - quantiles, np.asarray(LEVELS)
    return float(np.maximum(q * r, (q - 1) * r).mean())


def error(split: BagSplit, predicted: NDArray[Any], bags: LabelledBags | None = None) -> float:
    """Share of wrong classes; 1 - R^2; or the pinball loss over that of the quantiles of all training labels."""
    bags = split.test if bags is None else bags
    if split.task == "clf":
        return float((predicted != bags.y).mean())
    if split.task == "reg":
        return float(((predicted - bags.y) ** 2).mean() / bags.y.var())
    marginal = np.quantile(split.train.y, LEVELS)[None].repeat(len(bags), 0)
    return _pinball(bags.y, predicted) / _pinball(bags.y, marginal)


def scores(split: BagSplit, predicted: NDArray[Any]) -> dict[str, float]:
    """Metrics of predictions for the test bags."""
    found = {"error": error(split, predicted)}
    if split.task == "quantile":
        y = split.test.y
        found["coverage"] = float(((predicted[:, 0] <= y) & (y <= predicted[:, -1])).mean())
    return found


def _risk(split: BagSplit, model: Any) -> float:
    """Mean loss of a kernel machine on the test bags: the one that it was fitted by."""
    bags, y = split.test.arrays(), split.test.y
    if split.task == "reg":
        return float(((model.predict(bags) - y) ** 2).mean())
    if split.task == "quantile":
        return _pinball(y, model.predict_quantiles(bags))
    f = model.decision_function(bags)
    right = y == model.classes_[1] if f.ndim == 1 else y[:, None] == model.classes_
    margin = np.where(right, f, -f)
    loss = np.logaddexp(0.0, -margin) if model.loss == "logistic" else np.maximum(0.0, 1.0 - margin)
    return float(loss.mean())


# --- kernel machines -------------------------------------------------------------------------------------------------


def machine(split: BagSplit, embedding: Any, kernel: str = "gaussian", loss: str | None = None) -> Any:
    """A kernel machine for the split's task; lam and the length scale of a Gaussian kernel chosen from 7 x 5 values."""
    from assay.statistics import distribution_kernels as dk

    made: Any = {
        "clf": dk.DistributionClassifier,
        "reg": dk.DistributionRegressor,
        "quantile": dk.DistributionQuantileRegressor,
    }[split.task]
    options: dict[str, Any] = {"quantiles": LEVELS} if split.task == "quantile" else {}
    if loss is not None:
        options["loss"] = loss
    model = made(
        embedding=embedding,
        kernel=kernel,
        length_scale="cv" if kernel == "gaussian" else "median",
        lam="cv",
        cv=[fold(split)],
        n_landmarks=split.options["landmarks"],
        random_state=split.seed,
        **options,
    )
    with quiet():
        return model.fit(split.train.arrays(), split.train.y)


def _judged(split: BagSplit, model: Any) -> dict[str, float]:
    bags = split.test.arrays()
    predicted = model.predict_quantiles(bags) if split.task == "quantile" else model.predict(bags)
    return {**scores(split, predicted), "risk": _risk(split, model), "lam": model.lam_}


def _embedding(name: str, seed: int) -> Any:
    from assay.statistics import distribution_kernels as dk

    return {
        "sw": lambda: dk.SlicedWassersteinEmbedding(random_state=seed),
        "kme": lambda: dk.MeanEmbedding(random_state=seed),
        "moments": lambda: dk.MomentEmbedding(4),
        "moments_mixed": lambda: dk.MomentEmbedding(4, mixed=True),
    }[name]()


def kernel_arm(
    name: str, *, bags: float = 1.0, points: float = 1.0, loss: str | None = None
) -> Callable[[BagSplit, int], dict[str, float]]:
    """Arm with a Gaussian kernel on an embedding, on a share of the training bags and of the points of all bags."""

    def arm(split: BagSplit, replicate: int) -> dict[str, float]:
        part = split if bags == points == 1.0 else split.smaller(bags, points)
        return _judged(part, machine(part, _embedding(name, part.seed), loss=loss))

    return arm


def linear_mean(split: BagSplit, replicate: int) -> dict[str, float]:
    """Kernel means and a linear second kernel; 7 penalties and 5 length scales of the point kernel."""
    from assay.statistics.distribution_kernels import MeanEmbedding

    with quiet():
        default = MeanEmbedding(random_state=split.seed).fit(split.train.arrays()).length_scale_
    fits = [
        machine(split, MeanEmbedding(length_scale=k * default, random_state=split.seed), "linear") for k in POINT_SCALES
    ]
    return _judged(split, min(fits, key=lambda m: min(e["risk"] for e in m.cv_results_)))


# --- features of a bag, and models of scikit-learn -------------------------------------------------------------------


def _features(split: BagSplit, order: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Standardised moments of training and test bags."""
    from assay.statistics.distribution_kernels import MomentEmbedding

    embedding = MomentEmbedding(order, mixed=True)
    with quiet():
        return embedding.fit_transform(split.train.arrays()), embedding.transform(split.test.arrays())


def _best(split: BagSplit, X: NDArray[Any], makes: Iterable[Callable[[], Any]]) -> Callable[[], Any]:
    """The maker of the model with the least error on the fold; the first of equal ones."""
    inner, held = fold(split)
    y, bags = split.train.y, split.train.take(held)
    return min(makes, key=lambda make: error(split, make().fit(X[inner], y[inner]).predict(X[held]), bags))


class _Levels:
    """One model of scikit-learn for each quantile level; predictions in increasing order."""

    def __init__(self, make: Callable[[float], Any]) -> None:
        self.models = [make(q) for q in LEVELS]

    def fit(self, X: NDArray[Any], y: NDArray[Any]) -> _Levels:
        for model in self.models:
            model.fit(X, y)
        return self

    def predict(self, X: NDArray[Any]) -> NDArray[Any]:
        return np.sort(np.stack([m.predict(X) for m in self.models], 1), 1)


def mean_ridge(split: BagSplit, replicate: int) -> dict[str, float]:
    """A linear model on the mean of a bag, as bags are mostly reduced; 35 penalties."""
    from sklearn.linear_model import QuantileRegressor, Ridge, RidgeClassifier

    X, new = _features(split, 1)

    def make(alpha: float) -> Callable[[], Any]:
        if split.task == "quantile":
            return lambda: _Levels(lambda q: QuantileRegressor(quantile=q, alpha=alpha / 1000, solver="highs"))
        return lambda: Ridge(alpha) if split.task == "reg" else RidgeClassifier(alpha)

    chosen = _best(split, X, [make(a) for a in np.logspace(4, -4, 35)])
    return scores(split, chosen().fit(X, split.train.y).predict(new))


def forest(split: BagSplit, replicate: int) -> dict[str, float]:
    """A random forest on all moments up to order four; boosted trees where quantiles are asked for. 35 candidates."""
    from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier, RandomForestRegressor

    X, new = _features(split, 4)
    if split.task == "quantile":
        # Stages of one fit are candidates, too: 5 fits of 7 stages.
        inner, held = fold(split)
        stages = (15, 30, 50, 75, 100, 150, 200)
        settings = [(depth, rate) for depth, rate in ((3, 0.1), (2, 0.1), (3, 0.03), (2, 0.03), (1, 0.1))]

        def trees(depth: int, rate: float, count: int) -> _Levels:
            return _Levels(
                lambda q: GradientBoostingRegressor(
                    loss="quantile",
                    alpha=q,
                    max_depth=depth,
                    learning_rate=rate,
                    n_estimators=count,
                    min_samples_leaf=5,
                    random_state=split.seed,
                )
            )

        found = []
        for rank, (depth, rate) in enumerate(settings):
            fitted = trees(depth, rate, stages[-1]).fit(X[inner], split.train.y[inner])
            each = np.stack([list(m.staged_predict(X[held])) for m in fitted.models], -1)
            bags = split.train.take(held)
            found += [(error(split, np.sort(each[s - 1], 1), bags), rank, s) for s in stages]
        _, rank, stage = min(found)
        return scores(split, trees(*settings[rank], stage).fit(X, split.train.y).predict(new))
    kind: Any = RandomForestClassifier if split.task == "clf" else RandomForestRegressor

    def make(features: Any, leaf: int, trees: int) -> Callable[[], Any]:
        return lambda: kind(trees, max_features=features, min_samples_leaf=leaf, random_state=split.seed)

    shares = ("sqrt", 1.0, 0.33, 0.6, 1)
    grid = [(share, leaf) for share in shares for leaf in (1, 2, 3, 5, 8, 12, 20)]
    small = {make(*g, split.options["trees"]): g for g in grid}
    chosen = small[_best(split, X, small)]
    return scores(split, make(*chosen, 6 * split.options["trees"])().fit(X, split.train.y).predict(new))


def deep_sets(split: BagSplit, replicate: int) -> dict[str, float]:
    """DeepSets; 2 learning rates and 18 numbers of passes."""
    from assay.claims._distribution_kernels_deepsets import choose_and_fit

    model = choose_and_fit(
        split.train,
        fold(split),
        split.task,
        split.options["epochs"],
        split.seed,
        lambda predicted, bags: error(split, predicted, bags),
    )
    return scores(split, model.predict(split.test))


def truth(split: BagSplit, replicate: int) -> dict[str, float]:
    """The quantiles of the label given the distribution that the bag is from."""
    assert split.test.truth is not None
    return scores(split, split.test.truth)
