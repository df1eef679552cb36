"""RQRRegressor: prediction intervals of a network behind the interface of scikit-learn."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from assay._state import load_state, save_state
from assay.statistics.rqr import conformal as cp
from assay.statistics.rqr.formulas import Array, check_coverage, check_lam
from assay.statistics.rqr.losses import dependence, rqr
from assay.statistics.rqr.stack import ModuleStack, Stack, StackedMLP, fit_stack

#: Penalties that ``lam="auto"`` chooses from.
LAM_GRID = (0.5, 1.0, 5.0, 20.0)
_ROWS = 65536  # rows predicted at a time


def selection_objective(bounds: Tensor, y: Tensor, coverage: float, conformal: bool) -> Tensor:
    """What checkpoints and penalties are chosen by, on validation rows; lower is better.

    ``bounds`` (K, n, 2) in any order, ``y`` (n,), both in units in which targets are of order one; gives (K,).

    With ``conformal`` it is the mean width after a conformal correction on these rows: only intervals of equal coverage
    are compared. Else, with ``c`` the empirical coverage, it is the mean width where
    ``|c - coverage| <= 0.025 coverage`` and ``1e6 |c - coverage|`` elsewhere. (The authors use the factor 100. On
    centred targets, a 90% interval is about 3.3 wide, and a model that misses by 0.03 would win.) With too few rows
    for the level it is the Winkler score.
    """
    lower, upper = bounds.amin(-1), bounds.amax(-1)
    n = y.shape[0]
    k = math.ceil((n + 1) * coverage - 1e-9)
    width = (upper - lower).mean(-1)
    if k > n:
        outside = torch.relu(lower - y) + torch.relu(y - upper)
        return width + 2.0 / (1.0 - coverage) * outside.mean(-1)
    if conformal:
        shift = torch.maximum(lower - y, y - upper).kthvalue(k, dim=-1).values
        return torch.relu(upper - lower + 2.0 * shift[:, None]).mean(-1)
    miss = (((y >= lower) & (y <= upper)).to(width.dtype).mean(-1) - coverage).abs()
    return torch.where(miss <= 0.025 * coverage, width, 1e6 * miss)


class RQRRegressor(RegressorMixin, BaseEstimator):
    """Prediction intervals by relaxed quantile regression with a small network.

    A network gives both bounds; RQR-W (see :class:`RQRLoss`) fits them at once, and a split-conformal correction gives
    them finite-sample coverage. On skewed noise the intervals are usually narrower than a pair of quantiles. They are
    not the shortest possible: with a large penalty they are centred at the conditional mean.

    Parameters
    ----------
    coverage
        Share of targets that the intervals should hold, in (0, 1). 0.9 by default. Not the miscoverage level.
    lam
        Penalty of RQR-W >= 0, without unit. "auto" trains with 0.5, 1, 5 and 20 at once and takes the best on
        validation rows (:func:`selection_objective`). 0 is plain RQR, wider than quantile regression on skewed noise.
    hidden
        Widths of the hidden layers; (64, 64) as in the paper.
    dropout
        In [0, 1); the paper tunes over 0.1, 0.2, 0.3.
    lr
        Learning rate of Adam; the paper tunes from 1e-4 to 0.1.
    max_epochs
        Passes over the training rows. The parameters of the best epoch on validation rows are kept.
    batch_size
        Rows in a step: an integer (10000 in the paper), or "full".
    validation_fraction
        Share of rows that chooses epoch and penalty. 0 takes the last epoch, and needs a numeric ``lam``.
    conformal
        True (the same as "symmetric"), "asymmetric", "normalized", or False. See :func:`conformal_correction`.
    calibration_fraction
        Share of rows kept for the correction. Unused with ``conformal=False``.
    gamma
        Weight >= 0 of the HSIC penalty of RQR-O on dependence between width and coverage. 0, the default, is off.
    estimator
        ``estimator(n_features) -> torch.nn.Module`` with outputs (n, 2), in place of the built-in network; ``hidden``
        and ``dropout`` are then unused. Penalties are trained one after the other instead of in a stack, and the bias
        of its last ``nn.Linear`` is set to (-0.5, 0.5).
    target_scale
        "standard" subtracts the mean of the training targets and divides by the mean absolute deviation, so that
        results do not depend on the unit and origin of y. "mean_abs" divides by the mean absolute target, as the
        authors do.
    device
        Torch device that trains; prediction is done on the CPU in float64.
    random_state
        Decides splits, initial weights, dropout.

    Attributes
    ----------
    lam_ : float
        The penalty in use.
    coverage_val_ : float
        Coverage of the uncorrected intervals on the validation rows (NaN without).
    correction_ : ndarray (3,)
        Conformal shifts in the unit of y, see :func:`conformal_correction`.
    n_iter_, n_features_in_, feature_names_in_

    Notes
    -----
    The start differs from the authors' on purpose: the bias of the last layer is (-0.5, 0.5) in units of the scaled
    target. With equal constant outputs the width stays zero, a saddle of the loss.

    Constant targets give a warning and intervals of zero width. ``predict`` is the midpoint of the uncorrected
    interval, which for a large penalty estimates the conditional mean; ``score`` is its R^2.

    Pouplin et al., "Relaxed Quantile Regression: Prediction Intervals for Asymmetric Noise", ICML 2024.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.uniform(-1, 1, (2000, 3))
    >>> y = X[:, 0] + rng.exponential(1 + X[:, 1])
    >>> model = RQRRegressor(coverage=0.9, max_epochs=50, random_state=0).fit(X, y)
    >>> lower, upper = model.predict_interval(X).T
    >>> bool(0.85 < np.mean((lower <= y) & (y <= upper)) < 0.95)
    True
    """

    def __init__(
        self,
        coverage: float = 0.9,
        lam: float | Literal["auto"] = "auto",
        hidden: Sequence[int] = (64, 64),
        dropout: float = 0.1,
        lr: float = 1e-2,
        max_epochs: int = 300,
        batch_size: int | Literal["full"] = 10000,
        validation_fraction: float = 0.1,
        conformal: bool | cp.Method = True,
        calibration_fraction: float = 0.25,
        gamma: float = 0.0,
        estimator: Callable[[int], nn.Module] | None = None,
        target_scale: Literal["standard", "mean_abs"] = "standard",
        device: str = "cpu",
        random_state: Any = None,
    ) -> None:
        self.coverage = coverage
        self.lam = lam
        self.hidden = hidden
        self.dropout = dropout
        self.lr = lr
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.conformal = conformal
        self.calibration_fraction = calibration_fraction
        self.gamma = gamma
        self.estimator = estimator
        self.target_scale = target_scale
        self.device = device
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that a network stopped after a few steps predicts badly."""
        tags = super().__sklearn_tags__()
        steps = self.max_epochs if isinstance(self.max_epochs, int) else 0
        tags.regressor_tags.poor_score = steps < 50
        return tags

    @property
    def _method(self) -> str | None:
        """The conformal method, or None."""
        if self.conformal is False:
            return None
        return "symmetric" if self.conformal is True else str(self.conformal)

    def _check_options(self) -> list[float]:
        """Check what can be checked without data; give the penalties to train with."""
        check_coverage(self.coverage)
        if isinstance(self.lam, str) and self.lam != "auto":
            raise ValueError(f"lam must be a number >= 0 or 'auto', got {self.lam!r}")
        lams = list(LAM_GRID) if self.lam == "auto" else [check_lam(self.lam)]
        if self._method is not None and self._method not in cp.METHODS:
            raise ValueError(f"conformal must be True, False or one of {cp.METHODS}, got {self.conformal!r}")
        for name in ("validation_fraction", "calibration_fraction"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1), got {getattr(self, name)!r}")
        held_out = self.validation_fraction + (self.calibration_fraction if self._method else 0.0)
        if held_out >= 1:
            raise ValueError(f"validation_fraction and calibration_fraction leave no rows to train on: sum {held_out}")
        if not isinstance(self.max_epochs, int | np.integer) or self.max_epochs < 1:
            raise ValueError(f"max_epochs must be an integer >= 1, got {self.max_epochs!r}")
        if self.batch_size != "full" and (not isinstance(self.batch_size, int | np.integer) or self.batch_size < 1):
            raise ValueError(f"batch_size must be an integer >= 1 or 'full', got {self.batch_size!r}")
        if not self.gamma >= 0:
            raise ValueError(f"gamma must be >= 0, got {self.gamma!r}")
        if self.target_scale not in ("standard", "mean_abs"):
            raise ValueError(f"target_scale must be 'standard' or 'mean_abs', got {self.target_scale!r}")
        if self.lam == "auto" and self.validation_fraction == 0:
            raise ValueError("lam='auto' chooses on validation rows: give validation_fraction > 0 or a number for lam")
        return lams

    def fit(self, X: Any, y: ArrayLike) -> RQRRegressor:
        """Train, choose epoch and penalty on validation rows, and calibrate on rows that nothing else has seen.

        Parameters
        ----------
        X
            Features (n, p), finite. Standardised inside.
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
        lams = self._check_options()
        X_, y_ = validate_data(self, X, y, dtype=np.float64, y_numeric=True, ensure_min_samples=2)
        y_ = np.asarray(y_, dtype=np.float64)
        rng = check_random_state(self.random_state)
        n = len(y_)
        order = rng.permutation(n)
        n_cal = int(n * self.calibration_fraction) if self._method else 0
        n_val = int(n * self.validation_fraction)
        cal, val, train = order[:n_cal], order[n_cal : n_cal + n_val], order[n_cal + n_val :]

        self._center, self._scale = X_[train].mean(0), X_[train].std(0)
        self._scale[self._scale <= 1e-12 * np.abs(self._center)] = 1.0
        self._scale[self._scale == 0] = 1.0
        self._y_center = float(y_[train].mean()) if self.target_scale == "standard" else 0.0
        self._y_scale = float(np.abs(y_[train] - self._y_center).mean())
        self.lam_, self.coverage_val_, self.n_iter_ = lams[0], math.nan, 0
        self._layers: list[tuple[Array, Array]] = []
        self.module_: nn.Module | None = None
        self._constant = bool((y_ == y_[0]).all())
        if self._constant:
            warnings.warn("y is constant: intervals have zero width", UserWarning, stacklevel=2)
            self._y_center = float(y_[0])
        else:
            self._y_scale = self._y_scale if self._y_scale > 1e-300 else 1.0
            self._train(X_, y_, train, val, lams, int(rng.randint(2**31 - 1)))
            if n_val:
                bounds = self._raw(X_[val])
                self.coverage_val_ = float(((bounds[:, 0] <= y_[val]) & (y_[val] <= bounds[:, 1])).mean())
        bounds = self._raw(X_[cal])
        self.correction_: Array = np.zeros(3)
        if self._method:
            typical = self._raw(X_[train])
            floor = max(1e-3 * float((typical[:, 1] - typical[:, 0]).mean()), cp.TINY)
            self.correction_ = cp.calibrate(
                y_[cal], bounds[:, 0], bounds[:, 1], float(self.coverage), self._method, floor
            )
        return self

    def _train(self, X: Array, y: Array, train: Array, val: Array, lams: list[float], seed: int) -> None:
        """Train one member for each penalty, and keep the best of them."""
        coverage, conformal = float(self.coverage), self._method is not None

        def tensors(rows: Array) -> tuple[Tensor, Tensor]:
            features = ((X[rows] - self._center) / self._scale).astype(np.float32)
            targets = ((y[rows] - self._y_center) / self._y_scale).astype(np.float32)
            return torch.from_numpy(features).to(self.device), torch.from_numpy(targets).to(self.device)

        Xt, yt = tensors(train)
        Xv, yv = tensors(val)
        penalties = torch.tensor(lams, device=self.device)[:, None]

        def loss(out: Tensor, target: Tensor, _: Any) -> Tensor:
            target = target.expand(out.shape[:-1])
            value = rqr(out, target, coverage, penalties).mean(-1)
            return value + self.gamma * dependence(out, target) if self.gamma else value

        def objective(net: Any) -> Tensor:
            return selection_objective(net(Xv), yv, coverage, conformal)

        batch = None if self.batch_size == "full" else int(self.batch_size)
        options: dict[str, Any] = {
            "epochs": int(self.max_epochs),
            "batch_size": batch,
            "seed": seed,
            "objective": objective if len(val) else None,
        }
        if self.estimator is None:
            # One seed for all: penalties are compared from the same start.
            net: Stack = StackedMLP(
                X.shape[1],
                self.hidden,
                seeds=[seed] * len(lams),
                dropout=self.dropout,
                lr=self.lr,
                device=self.device,
            )
            fitted = fit_stack(net, Xt, yt, loss, **options)
        else:
            with torch.random.fork_rng():  # modules draw weights and dropout from the global generator
                net = ModuleStack([self._module(X.shape[1], seed).to(self.device) for _ in lams], lr=self.lr)
                fitted = fit_stack(net, Xt, yt, loss, **options)
        objectives = np.where(np.isnan(fitted.objective), np.inf, fitted.objective)
        best = int(np.argmin(objectives))
        self.lam_, self.n_iter_ = float(lams[best]), int(fitted.epoch[best]) + 1
        if isinstance(net, StackedMLP):
            self._layers = [(w.astype(np.float64), b.astype(np.float64)) for w, b in net.member(best)]
            finite = all(np.isfinite(w).all() and np.isfinite(b).all() for w, b in self._layers)
        else:
            module: nn.Module = net.modules[best].double().cpu().eval()  # type: ignore[attr-defined]
            finite = all(bool(torch.isfinite(p).all()) for p in module.parameters())
            self.module_ = module
        if not finite:
            raise FloatingPointError("training diverged: take a smaller lr")

    def _module(self, n_in: int, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = self.estimator(n_in)  # type: ignore[misc]
        if not isinstance(module, nn.Module):
            raise TypeError(f"estimator({n_in}) must give a torch.nn.Module, got {type(module).__name__}")
        linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
        if linear and linear[-1].out_features == 2 and linear[-1].bias is not None:
            with torch.no_grad():
                linear[-1].bias.copy_(torch.tensor([-0.5, 0.5]))
        return module

    def _raw(self, X: Array) -> Array:
        """Sorted uncorrected bounds (n, 2) in the unit of y, from checked features."""
        out = np.empty((len(X), 2))
        if self._constant:
            out[:] = self._y_center
            return out
        for start in range(0, len(X), _ROWS):
            h: Any = (X[start : start + _ROWS] - self._center) / self._scale
            if self.module_ is not None:
                with torch.no_grad():
                    h = self.module_(torch.from_numpy(h)).numpy()
            else:
                for i, (w, b) in enumerate(self._layers):
                    h = h @ w + b
                    if i < len(self._layers) - 1:
                        np.maximum(h, 0.0, out=h)
            out[start : start + _ROWS] = np.sort(h, axis=1) * self._y_scale + self._y_center
        return out

    def _checked(self, X: Any) -> Array:
        check_is_fitted(self, "correction_")
        return validate_data(self, X, dtype=np.float64, reset=False)

    def predict(self, X: Any) -> Array:
        """Midpoint of the uncorrected interval, shape (n,), in the unit of y."""
        return self._raw(self._checked(X)).mean(axis=1)

    def predict_interval(self, X: Any) -> Array:
        """Lower and upper bounds, shape (n, 2), in the unit of y.

        Warns
        -----
        UserWarning
            The (negative) correction left some intervals empty; both of their bounds are the midpoint.
        """
        bounds = self._raw(self._checked(X))
        if self._method is None:
            return bounds
        return cp.corrected(bounds, self.correction_, self._method)

    def save(self, folder: str | Path) -> Path:
        """Write options, scalers, correction and weights to ``folder``; see :meth:`load`.

        A network of ``estimator`` cannot be rebuilt from JSON: save its ``state_dict`` (``module_``) yourself.
        """
        check_is_fitted(self, "correction_")
        if self.estimator is not None:
            raise TypeError("a model with its own estimator cannot be saved: save module_.state_dict() instead")
        params = self.get_params(deep=False)
        params["hidden"] = [int(h) for h in self.hidden]
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        config = {
            "params": {k: v.item() if isinstance(v, np.generic) else v for k, v in params.items()},
            "fitted": {
                "lam_": self.lam_,
                "coverage_val_": self.coverage_val_,
                "n_iter_": self.n_iter_,
                "n_features_in_": self.n_features_in_,
                "_y_center": self._y_center,
                "_y_scale": self._y_scale,
                "_constant": self._constant,
            },
            "feature_names": [str(f) for f in getattr(self, "feature_names_in_", [])] or None,
        }
        tensors = {"center": self._center, "scale": self._scale, "correction": self.correction_}
        for i, (w, b) in enumerate(self._layers):
            tensors[f"weight.{i}"], tensors[f"bias.{i}"] = w, b
        return save_state(folder, "RQRRegressor", config, tensors)

    @classmethod
    def load(cls, folder: str | Path) -> RQRRegressor:
        """A fitted model from what :meth:`save` wrote; predictions agree bit for bit."""
        config, tensors = load_state(folder, "RQRRegressor")
        params = {**config["params"], "hidden": tuple(config["params"]["hidden"])}
        model = cls(**params)
        for name, value in config["fitted"].items():
            setattr(model, name, value)
        if config["feature_names"]:
            model.feature_names_in_ = np.array(config["feature_names"], dtype=object)
        model.module_ = None
        model._center, model._scale, model.correction_ = tensors["center"], tensors["scale"], tensors["correction"]
        count = sum(name.startswith("weight.") for name in tensors)
        model._layers = [(tensors[f"weight.{i}"], tensors[f"bias.{i}"]) for i in range(count)]
        return model
