"""RQRBoostingRegressor: prediction intervals of boosted trees."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.model_selection import KFold
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from assay._state import load_state, save_state
from assay.statistics.rqr import conformal as cp
from assay.statistics.rqr.formulas import Array, check_coverage, check_lam
from assay.statistics.rqr.trees import TreeEnsemble, from_decision_trees, from_hist_gradient_boosting, mean_of


def fit_mean_centred(
    X: Array, y: Array, coverage: float, *, cv: int = 3, seed: int = 0, **options: Any
) -> tuple[TreeEnsemble, TreeEnsemble]:
    """Trees for the conditional mean ``s`` and for the half width ``h``, the ``coverage`` quantile of ``|y - s|``.

    ``s`` is the mean of ``cv`` models, each fitted without one fold. The residuals that ``h`` is fitted to are those of
    each fold from the model that has not seen it: residuals of rows that trained ``s`` are too small. (One more model
    on all rows, in place of the mean, costs more and predicts worse.) ``options`` go to all
    ``HistGradientBoostingRegressor``.
    """
    common = {"early_stopping": False, "random_state": seed, **options}
    out_of_fold, models = np.empty_like(y), []
    everything = np.arange(len(y))
    folds = min(cv, len(y))
    splits = KFold(folds, shuffle=True, random_state=seed).split(X) if folds > 1 else [(everything, everything)]
    for train, test in splits:
        model = HistGradientBoostingRegressor(loss="squared_error", **common).fit(X[train], y[train])
        out_of_fold[test] = model.predict(X[test])
        models.append(from_hist_gradient_boosting(model))
    half = HistGradientBoostingRegressor(loss="quantile", quantile=coverage, **common).fit(X, np.abs(y - out_of_fold))
    return mean_of(models), from_hist_gradient_boosting(half)


def fit_rqr_trees(
    X: Array,
    y: Array,
    coverage: float,
    lam: float,
    *,
    learning_rate: float = 0.1,
    max_iter: int = 200,
    max_leaf_nodes: int = 31,
    min_samples_leaf: int = 20,
    seed: int = 0,
) -> tuple[TreeEnsemble, TreeEnsemble]:
    """Trees for the midpoint ``s`` and for ``q = log h`` that minimise the RQR-W loss with a finite penalty.

    With ``u = (y-s)^2 - h^2`` and ``c = coverage`` where ``u >= 0``, else ``coverage - 1``, the loss is
    ``max(coverage u, (coverage-1) u) + 2 lam (y-s)^2``; its derivatives are ``-2 (c + 2 lam)(y - s)`` in ``s`` and
    ``-2 c h^2`` in ``q``. In turn, a least-squares tree is fitted to the negative gradient of each, and its leaves
    get one Newton step with the curvatures ``2 (|c| + 2 lam)`` and ``4 |c| h^2 + 1e-6``. ``y`` should be centred and
    of order one. ``X`` is used in float32.
    """
    s = np.full(len(y), y.mean())
    q = np.full(len(y), math.log(max(float(np.quantile(np.abs(y - y.mean()), coverage)), 1e-12)))
    starts = (float(s[0]), float(q[0]))
    limit = 4.0 * math.exp(starts[1])
    made: tuple[list[Any], list[Any]] = ([], [])
    values: tuple[list[Array], list[Array]] = ([], [])
    for _ in range(max_iter):
        for part in (0, 1):
            h2 = np.exp(2.0 * q)
            c = np.where((y - s) ** 2 >= h2, coverage, coverage - 1.0)
            if part == 0:
                down, curvature = 2.0 * (c + 2.0 * lam) * (y - s), 2.0 * (np.abs(c) + 2.0 * lam)
            else:
                down, curvature = 2.0 * c * h2, 4.0 * np.abs(c) * h2 + 1e-6
            tree = DecisionTreeRegressor(
                max_leaf_nodes=max_leaf_nodes, min_samples_leaf=min_samples_leaf, random_state=seed
            ).fit(X, down)
            leaf = tree.apply(X)
            nodes = tree.tree_.node_count
            step = np.bincount(leaf, down, nodes) / np.maximum(np.bincount(leaf, curvature, nodes), 1e-300)
            step = learning_rate * np.clip(step, *((-limit, limit) if part == 0 else (-1.0, 1.0)))
            made[part].append(tree)
            values[part].append(step)
            if part == 0:
                s += step[leaf]
            else:
                q += step[leaf]
    return from_decision_trees(starts[0], made[0], values[0]), from_decision_trees(starts[1], made[1], values[1])


class RQRBoostingRegressor(RegressorMixin, BaseEstimator):
    """Prediction intervals ``s(x) - h(x), s(x) + h(x)`` of boosted trees.

    With ``lam=inf``, the default, it is the limit of RQR-W for a large penalty: ``s`` is the conditional mean, ``h``
    the ``coverage`` quantile of the distance from it, both by scikit-learn's histogram gradient boosting. With a finite
    ``lam`` it boosts the RQR-W loss itself on plain regression trees, which is slower.

    Parameters
    ----------
    coverage
        Share of targets that the intervals should hold, in (0, 1). Not the miscoverage level.
    lam
        Penalty >= 0, or ``inf``. 0 is plain RQR, wider than quantile regression on skewed noise.
    learning_rate, max_iter, max_leaf_nodes, min_samples_leaf
        As in ``HistGradientBoostingRegressor``, with the same defaults but for ``max_iter``, 200.
    cv
        With ``lam=inf``: ``s`` is the mean of so many models, each without one fold, and ``h`` is fitted to the
        residuals of each fold from the model that has not seen it. 3 by default: it takes hardly longer than two
        quantile models.
    conformal
        True (the same as "symmetric"), "asymmetric", "normalized", or False. See :func:`conformal_correction`.
    calibration_fraction
        Share of rows kept for the correction. Unused with ``conformal=False``.
    random_state
        Decides calibration rows and folds.

    Attributes
    ----------
    correction_ : ndarray (3,)
        Conformal shifts in the unit of y.
    midpoint_, halfwidth_ : TreeEnsemble
        The trees; with a finite ``lam`` the second holds the logarithm. In units of the scaled target.
    n_iter_, n_features_in_, feature_names_in_

    Notes
    -----
    ``predict`` is the midpoint of the uncorrected interval. No early stopping; choose ``max_iter`` by
    cross-validation where the data is small. With a finite ``lam`` the trees see their own residuals: many iterations
    on few rows make uncorrected intervals far too narrow (the correction repairs the coverage, not the width).

    Pouplin et al., ICML 2024, for the loss. The limit follows from the identity
    ``RQR-W = RQR + 2 lam (y - midpoint)^2``.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (1000, 3))
    >>> y = X[:, 0] + rng.exponential(1 + X[:, 1])
    >>> model = RQRBoostingRegressor(coverage=0.9, max_iter=30, random_state=0).fit(X, y)
    >>> model.predict_interval(X[:5]).shape
    (5, 2)
    """

    def __init__(
        self,
        coverage: float = 0.9,
        lam: float = math.inf,
        learning_rate: float = 0.1,
        max_iter: int = 200,
        max_leaf_nodes: int = 31,
        min_samples_leaf: int = 20,
        cv: int = 3,
        conformal: bool | cp.Method = True,
        calibration_fraction: float = 0.25,
        random_state: Any = None,
    ) -> None:
        self.coverage = coverage
        self.lam = lam
        self.learning_rate = learning_rate
        self.max_iter = max_iter
        self.max_leaf_nodes = max_leaf_nodes
        self.min_samples_leaf = min_samples_leaf
        self.cv = cv
        self.conformal = conformal
        self.calibration_fraction = calibration_fraction
        self.random_state = random_state

    @property
    def _method(self) -> str | None:
        if self.conformal is False:
            return None
        return "symmetric" if self.conformal is True else str(self.conformal)

    def _check_options(self) -> None:
        check_coverage(self.coverage)
        check_lam(self.lam, infinite=True)
        if self._method is not None and self._method not in cp.METHODS:
            raise ValueError(f"conformal must be True, False or one of {cp.METHODS}, got {self.conformal!r}")
        if not 0 <= self.calibration_fraction < 1:
            raise ValueError(f"calibration_fraction must lie in [0, 1), got {self.calibration_fraction!r}")
        for name, least in (("max_iter", 1), ("max_leaf_nodes", 2), ("min_samples_leaf", 1), ("cv", 2)):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate!r}")

    def fit(self, X: Any, y: ArrayLike) -> RQRBoostingRegressor:
        """Fit midpoint and half width, and calibrate on rows that they have not seen.

        Parameters
        ----------
        X
            Features (n, p), numeric and finite.
        y
            Targets (n,), finite, in any unit.

        Raises
        ------
        ValueError, TypeError
            An option is out of range, or the data holds NaN or infinite values.

        Warns
        -----
        UserWarning
            y is constant; or the calibration rows are too few for the level, and bounds become infinite.
        """
        self._check_options()
        X_, y_ = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        y_ = np.asarray(y_, dtype=np.float64)
        rng = check_random_state(self.random_state)
        order = rng.permutation(len(y_))
        n_cal = int(len(y_) * self.calibration_fraction) if self._method else 0
        cal, train = order[:n_cal], order[n_cal:]
        seed = int(rng.randint(2**31 - 1))
        if (y_ == y_[0]).all():
            warnings.warn("y is constant: intervals have zero width", UserWarning, stacklevel=2)
        self._center = float(y_[train].mean())
        spread = float(np.abs(y_[train] - self._center).mean())
        self._scale = spread if spread > 1e-300 else 1.0
        target = (y_[train] - self._center) / self._scale
        options: dict[str, Any] = {
            "learning_rate": float(self.learning_rate),
            "max_iter": int(self.max_iter),
            "max_leaf_nodes": int(self.max_leaf_nodes),
            "min_samples_leaf": int(self.min_samples_leaf),
        }
        self._log = not math.isinf(self.lam)
        if self._log:
            features = X_[train].astype(np.float32)
            self.midpoint_, self.halfwidth_ = fit_rqr_trees(
                features, target, float(self.coverage), float(self.lam), seed=seed, **options
            )
        else:
            self.midpoint_, self.halfwidth_ = fit_mean_centred(
                X_[train], target, float(self.coverage), cv=int(self.cv), seed=seed, **options
            )
        self.n_iter_ = int(self.max_iter)
        self.correction_: Array = np.zeros(3)
        if self._method:
            bounds, typical = self._raw(X_[cal]), self._raw(X_[train])
            floor = max(1e-3 * float((typical[:, 1] - typical[:, 0]).mean()), cp.TINY)
            self.correction_ = cp.calibrate(
                y_[cal], bounds[:, 0], bounds[:, 1], float(self.coverage), self._method, floor
            )
        return self

    def _raw(self, X: Array) -> Array:
        """Uncorrected bounds (n, 2) in the unit of y, from checked features."""
        features = X.astype(np.float32) if self._log else X
        s, h = self.midpoint_(features), self.halfwidth_(features)
        h = np.exp(h) if self._log else np.maximum(h, 0.0)
        return np.stack([s - h, s + h], axis=1) * self._scale + self._center

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self, "correction_")
        return validate_data(self, X, dtype=np.float64, reset=False)

    def predict(self, X: Any) -> Array:
        """Midpoint of the uncorrected interval, shape (n,), in the unit of y."""
        X_ = self._checked(X)
        return self.midpoint_(X_.astype(np.float32) if self._log else X_) * self._scale + self._center

    def predict_interval(self, X: Any) -> Array:
        """Lower and upper bounds, shape (n, 2), in the unit of y.

        Warns
        -----
        UserWarning
            The (negative) correction left some intervals empty; both of their bounds are the midpoint.
        """
        bounds = self._raw(self._checked(X))
        return bounds if self._method is None else cp.corrected(bounds, self.correction_, self._method)

    def save(self, folder: str | Path) -> Path:
        """Write options, trees and correction to ``folder``; see :meth:`load`."""
        check_is_fitted(self, "correction_")
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        config = {
            "params": {k: v.item() if isinstance(v, np.generic) else v for k, v in params.items()},
            "fitted": {
                "n_features_in_": self.n_features_in_,
                "n_iter_": self.n_iter_,
                "_center": self._center,
                "_scale": self._scale,
                "_log": self._log,
            },
            "feature_names": [str(f) for f in getattr(self, "feature_names_in_", [])] or None,
        }
        tensors = {"correction": self.correction_}
        tensors |= self.midpoint_.tensors("midpoint") | self.halfwidth_.tensors("halfwidth")
        return save_state(folder, "RQRBoostingRegressor", config, tensors)

    @classmethod
    def load(cls, folder: str | Path) -> RQRBoostingRegressor:
        """A fitted model from what :meth:`save` wrote; predictions agree bit for bit."""
        config, tensors = load_state(folder, "RQRBoostingRegressor")
        model = cls(**config["params"])
        for name, value in config["fitted"].items():
            setattr(model, name, value)
        if config["feature_names"]:
            model.feature_names_in_ = np.array(config["feature_names"], dtype=object)
        model.correction_ = tensors["correction"]
        model.midpoint_ = TreeEnsemble.from_tensors("midpoint", tensors)
        model.halfwidth_ = TreeEnsemble.from_tensors("halfwidth", tensors)
        return model
