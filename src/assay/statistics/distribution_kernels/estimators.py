"""Regression, classification and quantiles from bags, as scikit-learn estimators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import assert_all_finite, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets

from assay.statistics.distribution_kernels.bags import Array, bag_weights, check_number
from assay.statistics.distribution_kernels.kernels import Kernel
from assay.statistics.distribution_kernels.machine import Machine
from assay.statistics.distribution_kernels.selection import Output
from assay.statistics.distribution_kernels.solvers import loss_values


def _numbers(y: Any) -> Array:
    """Targets of a regression, checked."""
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    try:
        return np.asarray(y, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"y must hold numbers: {error}") from error


class DistributionRegressor(RegressorMixin, Machine):
    """Regression from bags: ``f(S) = sum_j a_j K(Phi(S_j), Phi(S)) + b``.

    Minimises ``(1/N) sum_i l(y_i, f(Phi(S_i))) + lam |f|^2`` over the space of the second-level kernel K, where
    ``Phi`` embeds a bag (its empirical distribution) in a Hilbert space.

    Parameters
    ----------
    loss
        "square" ``(y - f)^2``; "epsilon" ``max(0, |y - f| - epsilon)``; "pinball" ``max(q (y - f), (q - 1)(y - f))``.
    quantile
        q of the pinball loss, in (0, 1).
    epsilon
        Half width >= 0 of the insensitive tube, in the unit of y.
    embedding
        "sw" (:class:`SlicedWassersteinEmbedding`), "kme" (:class:`MeanEmbedding`), "moments"
        (:class:`MomentEmbedding`), one of them with options, or any transformer that takes what ``fit`` gets.
        "passthrough": rows of X are vectors (bags that have been embedded).
    kernel
        K: "gaussian" ``exp(-|u - v|^2/(2 g^2))``, "laplace" ``exp(-|u - v|/g)``, "linear", or "polynomial"
        ``(1 + <u, v>)^degree``.
    length_scale
        g > 0; "median": the median distance of the training bags; "cv": that times 0.1, 0.3, 1, 3 or 10, chosen by
        cross-validation.
    degree
        Of the polynomial.
    lam
        Penalty > 0; "cv" chooses among 1, 0.1, ..., 1e-6 (divided by the standard deviation of y for "epsilon" and
        "pinball", whose losses grow with y and not with its square). In scikit-learn's terms ``alpha = lam N`` for
        KernelRidge and ``C = 1/(2 lam N)`` for SVR.
    fit_offset
        Add an offset b that is not penalised. The theory's learner has none.
    n_landmarks
        Nystrom's approximation: f lies in the span of so many of the training bags, drawn at random. For N of ten
        thousand and more; memory and time are then of the order N n_landmarks. ``None``: all bags.
    cv
        Number of folds, of whole bags; or a splitter of scikit-learn, or pairs of training and validation rows.
    tol
        Largest violation of the optimality conditions, relative to the spread of y.
    max_iter
        Steps of the solver of "epsilon" and "pinball".
    random_state
        Decides random features, projections, landmarks and folds.

    Attributes
    ----------
    embedding_ : the fitted embedding
    dual_coef_ : ndarray (N or n_landmarks, 1)
    offset_ : ndarray (1,)
    length_scale_, lam_ : float
        In use.
    cv_results_ : list of dict
        ``{"length_scale", "lam", "risk"}`` of every pair that was tried.
    n_iter_ : int
        Steps of the solver; the most of several.
    n_features_in_ : int
        Coordinates of a point, or the number of columns of a table.

    Notes
    -----
    A table (2-d array, data frame) is read as a bag of exchangeable numbers a row, which is not what generic features
    are: the order of columns does not matter to the model.

    With "cv", the embedding's scales are those of all training bags; they see no labels.

    Source: Fiedler, Massiani, Solowjow, Trimpe, "On Statistical Learning Theory for Distributional Inputs", ICML 2024.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> spread = rng.uniform(0.5, 2, 100)
    >>> bags = [s * rng.standard_normal((rng.integers(50, 150), 2)) for s in spread]
    >>> model = DistributionRegressor(random_state=0).fit(bags[:80], spread[:80])
    >>> bool(model.score(bags[80:], spread[80:]) > 0.8)
    True
    """

    def __init__(
        self,
        loss: Literal["square", "epsilon", "pinball"] = "square",
        quantile: float = 0.5,
        epsilon: float = 0.1,
        embedding: Any = "sw",
        kernel: Kernel = "gaussian",
        length_scale: float | Literal["median", "cv"] = "median",
        degree: int = 3,
        lam: float | Literal["cv"] = 1e-3,
        fit_offset: bool = True,
        n_landmarks: int | None = None,
        cv: Any = 5,
        tol: float = 1e-4,
        max_iter: int = 1_000_000,
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.quantile = quantile
        self.epsilon = epsilon
        self.embedding = embedding
        self.kernel = kernel
        self.length_scale = length_scale
        self.degree = degree
        self.lam = lam
        self.fit_offset = fit_offset
        self.n_landmarks = n_landmarks
        self.cv = cv
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that tables of features are not what this is for."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, point_weights: Any = None) -> Self:
        """Learn from bags.

        Parameters
        ----------
        X
            N bags: a list or object array of arrays (M_i, d), an array (N, M, d), a table (N, M) whose rows are bags of
            numbers, or :class:`Bags`.
        y
            Targets (N,), finite.
        sample_weight
            Weights (N,) >= 0 of bags: twice the weight is the same as the bag twice.
        point_weights
            For each bag an array (M_i,) of weights of its points.

        Raises
        ------
        ValueError
            An option is out of range; a bag is empty, holds NaN or has other coordinates; fewer than 2 bags.
        """
        if self.loss not in ("square", "epsilon", "pinball"):
            raise ValueError(f"loss must be 'square', 'epsilon' or 'pinball', got {self.loss!r}")
        check_number("quantile", self.quantile, 0.0, 1.0, "a number in (0, 1)")
        check_number("epsilon", self.epsilon, -np.nextafter(0, 1), np.inf, "a number >= 0")
        return self._fit(X, y, sample_weight, point_weights)

    def _targets(self, y: Any) -> Array:
        return _numbers(y)

    def _outputs(self, y: Array) -> list[Output]:
        return [Output(self.loss, y, float(self.quantile), float(self.epsilon))]

    def predict(self, X: Any, point_weights: Any = None) -> Array:
        """``f(S)`` of each bag, (N,); the bags may have other sizes than those of ``fit``."""
        return self._decide(X, point_weights)[:, 0]


class DistributionQuantileRegressor(RegressorMixin, Machine):
    """Conditional quantiles of a number given a bag, by the pinball loss.

    One machine for each level on the same kernel; their values are sorted, so that quantiles never cross.

    Parameters
    ----------
    quantiles
        Levels in (0, 1), increasing.
    embedding, kernel, length_scale, degree, lam, fit_offset, n_landmarks, cv, tol, max_iter, random_state
        As in :class:`DistributionRegressor`; "cv" compares pinball losses, averaged over levels.

    Attributes
    ----------
    dual_coef_ : ndarray (N or n_landmarks, number of levels)
    offset_ : ndarray (number of levels,)
    embedding_, length_scale_, lam_, cv_results_, n_features_in_
        As in :class:`DistributionRegressor`.

    Notes
    -----
    Levels hold on average over bags, without a guarantee for finite samples. For one, embed the bags and wrap the
    model: ``ConformalIntervalRegressor(DistributionQuantileRegressor(embedding="passthrough"), coverage=0.9)`` on
    ``SlicedWassersteinEmbedding().fit_transform(bags)``.
    """

    def __init__(
        self,
        quantiles: Sequence[float] = (0.05, 0.5, 0.95),
        embedding: Any = "sw",
        kernel: Kernel = "gaussian",
        length_scale: float | Literal["median", "cv"] = "median",
        degree: int = 3,
        lam: float | Literal["cv"] = 1e-3,
        fit_offset: bool = True,
        n_landmarks: int | None = None,
        cv: Any = 5,
        tol: float = 1e-4,
        max_iter: int = 1_000_000,
        random_state: Any = None,
    ) -> None:
        self.quantiles = quantiles
        self.embedding = embedding
        self.kernel = kernel
        self.length_scale = length_scale
        self.degree = degree
        self.lam = lam
        self.fit_offset = fit_offset
        self.n_landmarks = n_landmarks
        self.cv = cv
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that tables of features are not what this is for."""
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, point_weights: Any = None) -> Self:
        """Learn from bags; parameters and errors as in :meth:`DistributionRegressor.fit`."""
        levels = list(self.quantiles)
        for q in levels:
            check_number("quantiles", q, 0.0, 1.0, "numbers in (0, 1)")
        if not levels or sorted(set(levels)) != levels:
            raise ValueError(f"quantiles must be increasing levels, got {self.quantiles!r}")
        return self._fit(X, y, sample_weight, point_weights)

    def _targets(self, y: Any) -> Array:
        return _numbers(y)

    def _outputs(self, y: Array) -> list[Output]:
        return [Output("pinball", y, float(q)) for q in self.quantiles]

    def predict_quantiles(self, X: Any, point_weights: Any = None) -> Array:
        """Quantiles (N, number of levels), increasing in each row."""
        return np.sort(self._decide(X, point_weights), axis=1)

    def predict_interval(self, X: Any, point_weights: Any = None) -> Array:
        """The lowest and the highest of the levels, (N, 2)."""
        return self.predict_quantiles(X, point_weights)[:, [0, -1]]

    def predict(self, X: Any, point_weights: Any = None) -> Array:
        """The quantile whose level is nearest to 1/2, (N,)."""
        middle = int(np.argmin(np.abs(np.asarray(self.quantiles) - 0.5)))
        return self.predict_quantiles(X, point_weights)[:, middle]

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Minus the pinball loss, averaged over levels and bags: higher is better, 0 is perfect."""
        found = self.predict_quantiles(X)
        weights = bag_weights(sample_weight, len(found))
        each = [loss_values("pinball", _numbers(y), found[:, k], quantile=q) for k, q in enumerate(self.quantiles)]
        return -float(np.mean([weights @ e for e in each]) / weights.sum())


def _logistic(model: Any) -> bool:
    if model.loss != "logistic":
        raise AttributeError(
            f"predict_proba needs loss='logistic', not {model.loss!r}; or wrap the model in CalibratedClassifierCV"
        )
    return True


class DistributionClassifier(ClassifierMixin, Machine):
    """Classes of bags, by a support vector machine or logistic regression on embedded distributions.

    Parameters
    ----------
    loss
        "hinge" (with more than two classes one machine for each, against the rest), or "logistic" (softmax), which has
        probabilities.
    embedding, kernel, length_scale, degree, lam, fit_offset, n_landmarks, cv, tol, max_iter, random_state
        As in :class:`DistributionRegressor`. "cv" compares the shares of wrong classes for "hinge", log losses for
        "logistic". In scikit-learn's terms ``C = 1/(2 lam N)``.

    Attributes
    ----------
    classes_ : ndarray (number of classes,)
    dual_coef_ : ndarray (N or n_landmarks, K), K = 1 for two classes
    offset_ : ndarray (K,)
    embedding_, length_scale_, lam_, cv_results_, n_features_in_
        As in :class:`DistributionRegressor`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> label = rng.integers(2, size=100)
    >>> bags = [rng.laplace(size=200) if k else rng.normal(0, 2**0.5, 200) for k in label]  # equal mean and variance
    >>> model = DistributionClassifier(random_state=0).fit(bags[:80], label[:80])
    >>> bool(model.score(bags[80:], label[80:]) > 0.8)
    True
    """

    def __init__(
        self,
        loss: Literal["hinge", "logistic"] = "hinge",
        embedding: Any = "sw",
        kernel: Kernel = "gaussian",
        length_scale: float | Literal["median", "cv"] = "median",
        degree: int = 3,
        lam: float | Literal["cv"] = 1e-3,
        fit_offset: bool = True,
        n_landmarks: int | None = None,
        cv: Any = 5,
        tol: float = 1e-4,
        max_iter: int = 1_000_000,
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.embedding = embedding
        self.kernel = kernel
        self.length_scale = length_scale
        self.degree = degree
        self.lam = lam
        self.fit_offset = fit_offset
        self.n_landmarks = n_landmarks
        self.cv = cv
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that tables of features are not what this is for."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None, point_weights: Any = None) -> Self:
        """Learn from bags.

        Parameters
        ----------
        X, sample_weight, point_weights
            As in :meth:`DistributionRegressor.fit`.
        y
            Labels (N,) of at least two classes, numbers or strings.

        Raises
        ------
        ValueError
            As in :meth:`DistributionRegressor.fit`, and where y holds a single class.
        """
        if self.loss not in ("hinge", "logistic"):
            raise ValueError(f"loss must be 'hinge' or 'logistic', got {self.loss!r}")
        return self._fit(X, y, sample_weight, point_weights)

    def _targets(self, y: Any) -> NDArray[Any]:
        y = column_or_1d(y, warn=True)
        if y.dtype.kind == "f":
            assert_all_finite(y, input_name="y")
        check_classification_targets(y)
        return y

    def _outputs(self, y: NDArray[Any]) -> list[Output]:
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y holds a single class, {self.classes_[:1].tolist()[0]!r}: at least two are needed")
        if self.loss == "logistic":
            return [Output("logistic", codes)]
        positive = [1] if len(self.classes_) == 2 else range(len(self.classes_))
        return [Output("hinge", np.where(codes == k, 1.0, -1.0)) for k in positive]

    def decision_function(self, X: Any, point_weights: Any = None) -> Array:
        """``f(S)``: (N,) for two classes, positive for the second; (N, number of classes) for more."""
        f = self._decide(X, point_weights)
        return f[:, 0] if f.shape[1] == 1 else f

    def predict(self, X: Any, point_weights: Any = None) -> NDArray[Any]:
        """The class of each bag, (N,)."""
        f = self.decision_function(X, point_weights)
        return self.classes_[(f > 0).astype(int) if f.ndim == 1 else np.argmax(f, axis=1)]

    @available_if(_logistic)
    def predict_proba(self, X: Any, point_weights: Any = None) -> Array:
        """Probabilities (N, number of classes) of the logistic model."""
        f = self.decision_function(X, point_weights)
        if f.ndim == 1:
            p = expit(f)
            return np.column_stack([1.0 - p, p])
        return softmax(f, axis=1)

    def _write(self, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        config["classes"] = self.classes_.tolist()
        config["classes_dtype"] = self.classes_.dtype.str if self.classes_.dtype.kind != "O" else "O"

    def _restore(self, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        self.classes_ = np.array(config["classes"], dtype=config["classes_dtype"])
