"""Split-conformal correction: from any intervals to intervals with finite-sample coverage."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, check_X_y

from assay._state import load_state, save_state
from assay.statistics.rqr.formulas import Array, check_coverage, check_vectors

Method = Literal["symmetric", "asymmetric", "normalized"]
TINY = float(np.finfo(np.float64).tiny)
METHODS = ("symmetric", "asymmetric", "normalized")


def order_statistic(scores: Array, level: float) -> float:
    """The ``ceil((n+1) level)``-th smallest score; ``inf`` where there is no such score (never the largest instead)."""
    k = math.ceil((len(scores) + 1) * level - 1e-9)  # 100 * 0.07 is 7.000000000000001
    return math.inf if k > len(scores) else float(np.partition(scores, k - 1)[k - 1])


def _half(lower: Array, upper: Array, floor: float) -> Array:
    return np.maximum(0.5 * (upper - lower), floor)


def conformal_correction(
    y: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    coverage: float = 0.9,
    method: Method = "symmetric",
    *,
    floor: float = TINY,
) -> Array:
    """How far to move the bounds so that new exchangeable targets lie inside with probability >= ``coverage``.

    Parameters
    ----------
    y, lower, upper
        Calibration targets and their intervals, shape (n,). Rows must not have been used to make the intervals.
    coverage
        In (0, 1).
    method
        - "symmetric": the ``ceil((n+1) coverage)``-th smallest of ``max(lower-y, y-upper)`` moves both bounds;
        - "asymmetric": each bound has its own score at level ``(1+coverage)/2``: wider, and valid on each side;
        - "normalized": scores are divided by the half width, so that wide intervals move further.
    floor
        With "normalized", half widths below it count as ``floor``. Fix it before seeing the calibration rows.

    Returns
    -------
    Shape (3,): the shift of the lower bound, that of the upper bound, and ``floor``. The shifts are ``inf`` where
    n is too small for the level: fewer than ``coverage/(1-coverage)`` rows (9 at 0.9) cannot give a guarantee with
    finite bounds. A ``UserWarning`` says so.

    Raises
    ------
    ValueError
        Shapes differ or are not (n,), NaN or infinite values, ``coverage`` outside (0, 1), unknown ``method``.

    Notes
    -----
    Romano, Patterson, Candès, "Conformalized quantile regression", NeurIPS 2019.
    """
    coverage = check_coverage(coverage)
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    y_, low, high = check_vectors(y=y, lower=lower, upper=upper)
    if not floor > 0:
        raise ValueError(f"floor must be positive, got {floor!r}")
    return calibrate(y_, low, high, coverage, method, floor)


def calibrate(y: Array, low: Array, high: Array, coverage: float, method: str, floor: float = TINY) -> Array:
    """:func:`conformal_correction` without checks; n = 0 gives infinite shifts."""
    if method == "asymmetric":
        shifts = [order_statistic(s, 0.5 * (1.0 + coverage)) for s in (low - y, y - high)]
    else:
        scores = np.maximum(low - y, y - high)
        if method == "normalized":
            # The floor also holds when the interval is widened: only then is the score the same function of (x, y).
            scores = scores / _half(low, high, floor)
        shifts = [order_statistic(scores, coverage)] * 2
    if any(map(math.isinf, shifts)):
        warnings.warn(
            f"{len(y)} calibration rows are too few for coverage={coverage} ({method}): bounds become infinite. "
            "Give more calibration rows or a lower coverage.",
            UserWarning,
            stacklevel=3,
        )
    return np.array([*shifts, floor])


def apply_correction(
    lower: ArrayLike, upper: ArrayLike, correction: ArrayLike, method: Method = "symmetric"
) -> tuple[Array, Array, int]:
    """Move bounds by what :func:`conformal_correction` gave, with the same ``method``.

    A negative shift may leave nothing between the bounds. Such an interval is empty; both bounds are then its midpoint.

    Returns
    -------
    ``(lower, upper, number of empty intervals)``.
    """
    low, high = np.asarray(lower, dtype=np.float64), np.asarray(upper, dtype=np.float64)
    down, up, floor = (float(v) for v in np.asarray(correction, dtype=np.float64))
    unit = _half(low, high, floor) if method == "normalized" else 1.0
    low, high = low - down * unit, high + up * unit
    empty = low > high
    middle = 0.5 * (low[empty] + high[empty])
    low[empty] = high[empty] = middle
    return low, high, int(empty.sum())


def corrected(bounds: Array, correction: Array, method: str) -> Array:
    """:func:`apply_correction` for bounds of shape (n, 2), with a warning that counts empty intervals."""
    low, high, empty = apply_correction(bounds[:, 0], bounds[:, 1], correction, method)  # type: ignore[arg-type]
    if empty:
        warnings.warn(
            f"{empty} of {len(low)} intervals are empty after the correction; both of their bounds are the midpoint",
            UserWarning,
            stacklevel=3,
        )
    return np.stack([low, high], axis=1)


class ConformalIntervalRegressor(RegressorMixin, BaseEstimator):
    """Conformal coverage for any regressor that has ``predict_interval``.

    Parameters
    ----------
    base
        Estimator with ``fit(X, y)`` and ``predict_interval(X) -> (n, 2)``.
    method
        "symmetric", "asymmetric" or "normalized", see :func:`conformal_correction`.
    cv
        "split": fit a clone of ``base`` on a random part of the data and calibrate on the rest;
        "prefit": take ``base`` as it is, and use all of the data that ``fit`` gets for calibration.
    coverage
        In (0, 1); ``None`` takes ``base.coverage``.
    calibration_fraction
        Share of rows for calibration with "split", default 0.25.
    random_state
        Decides the split.

    Attributes
    ----------
    estimator_ : the fitted base
    correction_ : ndarray (3,), see :func:`conformal_correction`
    coverage_ : float
    n_features_in_ : int

    Notes
    -----
    Coverage holds on average over data sets and over ``x``, not at each ``x``, and only if new data is exchangeable
    with the calibration rows.
    """

    def __init__(
        self,
        base: Any = None,
        method: Method = "symmetric",
        cv: Literal["split", "prefit"] = "split",
        coverage: float | None = None,
        calibration_fraction: float = 0.25,
        random_state: Any = None,
    ) -> None:
        self.base = base
        self.method = method
        self.cv = cv
        self.coverage = coverage
        self.calibration_fraction = calibration_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: ArrayLike) -> ConformalIntervalRegressor:
        """Fit (unless prefit) and calibrate.

        Raises
        ------
        TypeError
            ``base`` has no ``predict_interval``.
        ValueError
            An option is out of range, or X or y holds NaN.
        """
        if not hasattr(self.base, "predict_interval"):
            raise TypeError(f"base must have predict_interval(X), got {type(self.base).__name__}")
        if self.method not in METHODS:
            raise ValueError(f"method must be one of {METHODS}, got {self.method!r}")
        if self.cv not in ("split", "prefit"):
            raise ValueError(f"cv must be 'split' or 'prefit', got {self.cv!r}")
        coverage = self.coverage if self.coverage is not None else getattr(self.base, "coverage", None)
        if coverage is None:
            raise ValueError("coverage is None and base has no attribute coverage: give one")
        self.coverage_ = check_coverage(coverage)
        # A data frame is only checked, not converted: the base may want its column names.
        checked, targets = check_X_y(X, y, y_numeric=True, ensure_min_samples=1 if self.cv == "prefit" else 2)
        targets = targets.astype(np.float64)
        n = len(targets)
        if self.cv == "prefit":
            self.estimator_, rows = self.base, np.arange(n)
        else:
            if not 0 < self.calibration_fraction < 1:
                raise ValueError(f"calibration_fraction must lie in (0, 1), got {self.calibration_fraction!r}")
            order = check_random_state(self.random_state).permutation(n)
            cut = min(max(1, int(n * self.calibration_fraction)), n - 1)
            rows, train = order[:cut], order[cut:]
            self.estimator_ = clone(self.base).fit(_take(X, train), targets[train])
        bounds = np.asarray(self.estimator_.predict_interval(_take(X, rows)), dtype=np.float64)
        if bounds.shape != (len(rows), 2) or np.isnan(bounds).any():
            raise ValueError(f"base.predict_interval must give ({len(rows)}, 2) without NaN, got {bounds.shape}")
        self.correction_ = calibrate(targets[rows], bounds[:, 0], bounds[:, 1], self.coverage_, self.method)
        self.n_features_in_ = checked.shape[1]
        return self

    def predict_interval(self, X: Any) -> Array:
        """Lower and upper bounds, shape (n, 2), in the unit of ``y``."""
        check_is_fitted(self, "correction_")
        bounds = np.asarray(self.estimator_.predict_interval(X), dtype=np.float64)
        return corrected(bounds, self.correction_, self.method)

    def predict(self, X: Any) -> Array:
        """What the base predicts, shape (n,)."""
        check_is_fitted(self, "correction_")
        return np.asarray(self.estimator_.predict(X))

    def save(self, folder: str | Path) -> Path:
        """Write the correction and, in the subfolder ``base``, the fitted base, which must have ``save`` itself."""
        check_is_fitted(self, "correction_")
        if not hasattr(self.estimator_, "save"):
            raise TypeError(f"{type(self.estimator_).__name__} has no save(folder): the base cannot be saved")
        self.estimator_.save(Path(folder) / "base")
        config = {"method": self.method, "cv": self.cv, "coverage": self.coverage_, "n_features": self.n_features_in_}
        return save_state(folder, "ConformalIntervalRegressor", config, {"correction": self.correction_})

    @classmethod
    def load(cls, folder: str | Path, base: type) -> ConformalIntervalRegressor:
        """Read what :meth:`save` wrote. ``base`` is the class of the base, which must have ``load`` itself."""
        config, tensors = load_state(folder, "ConformalIntervalRegressor")
        fitted = base.load(Path(folder) / "base")  # type: ignore[attr-defined]
        model = cls(fitted, config["method"], config["cv"], config["coverage"])
        model.estimator_, model.coverage_ = fitted, config["coverage"]
        model.correction_, model.n_features_in_ = tensors["correction"], config["n_features"]
        return model


def _take(X: Any, rows: Any) -> Any:
    return X.iloc[rows] if hasattr(X, "iloc") else np.asarray(X)[rows]
