"""scikit-learn estimators of the two model families."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Self

import numpy as np
from scipy.optimize import minimize
from sklearn.base import BaseEstimator, DensityMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from assay._state import load_state, save_state
from assay.statistics.normgd.minimize import EXACT_UP_TO, normgd_minimize
from assay.statistics.normgd.models import PolynomialLink, SymmetricMixture

SOLVERS = ("normgd", "gd", "lbfgs", "newton")
#: Norm of random starts, in units of the data. Not 1: the first step of L-BFGS has norm 1, and 0 is stationary.
START = 1.7


class _Fit:
    """What both estimators share: checks of options, solvers, random starts, saving."""

    _fitted: tuple[str, ...]
    _array: str

    def _check(self) -> None:
        est: Any = self
        if est.solver not in SOLVERS:
            raise ValueError(f"solver must be one of {SOLVERS}, got {est.solver!r}")
        if est.stop not in ("tolerance", "statistical") or (est.stop == "statistical" and est.solver != "normgd"):
            raise ValueError(
                f"stop must be 'tolerance', or 'statistical' with solver 'normgd', got {est.stop!r} with {est.solver!r}"
            )
        for name in ("max_iter", "n_restarts"):
            value = getattr(est, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0 < est.eta < np.inf:
            raise ValueError(f"eta must be positive and finite, got {est.eta!r}")
        if not est.tol >= 0:
            raise ValueError(f"tol must not be negative, got {est.tol!r}")

    def _solve(self, model: Any, x0: Any) -> tuple[Any, float, int, bool]:
        """Point, loss, iterations and convergence from one start."""
        est: Any = self
        if est.solver == "normgd":
            fused = x0.size <= EXACT_UP_TO
            found = normgd_minimize(
                model if fused else model.fun_jac, x0, jac=True, hess=fused, hessp=None if fused else model.hessp,
                eta=est.eta, maxiter=est.max_iter, tol=est.tol,
                radius=model.radius if est.stop == "statistical" else None,
            )  # fmt: skip
        elif est.solver == "lbfgs":
            options = {"maxiter": est.max_iter, "gtol": est.tol, "ftol": 1e-16}
            found = minimize(model.fun_jac, x0, jac=True, method="L-BFGS-B", options=options)
        else:
            return _descend(model, x0, est.solver == "newton", est.eta, est.max_iter, est.tol)
        # SciPy's L-BFGS reports a failure of its line search where rounding allows no more progress.
        converged = found.status != 1 if est.solver == "lbfgs" else found.success
        return found.x, float(found.fun), int(found.nit), bool(converged)

    def _best(self, model: Any, start_norm: float) -> tuple[Any, float, int]:
        """Best of ``n_restarts`` random starts; iterations summed over them."""
        est: Any = self
        rng, runs = check_random_state(est.random_state), []
        for _ in range(est.n_restarts):
            u = rng.normal(size=model.X.shape[1])
            runs.append(self._solve(model, start_norm * u / np.linalg.norm(u)))
        x, f, _, converged = min(runs, key=lambda run: run[1])
        if not converged:
            warnings.warn(f"{est.solver} did not converge in {est.max_iter} steps", ConvergenceWarning, stacklevel=3)
        return x, f, sum(run[2] for run in runs)

    def save(self, folder: str | Path) -> Path:
        """Write options and fit to ``folder`` as JSON and safetensors; a ``random_state`` that is no int is dropped."""
        est: Any = self
        check_is_fitted(est)
        params = {k: v.item() if isinstance(v, np.generic) else v for k, v in est.get_params().items()}
        if not isinstance(params["random_state"], int):
            params["random_state"] = None
        config = {
            "params": params,
            "fitted": {name: getattr(est, name) for name in (*self._fitted, "n_iter_", "n_features_in_")},
            "feature_names": [str(f) for f in getattr(est, "feature_names_in_", [])] or None,
        }
        return save_state(folder, type(est).__name__, config, {self._array: getattr(est, self._array)})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """A fitted estimator from what :meth:`save` wrote; predictions agree bit for bit."""
        config, tensors = load_state(folder, cls.__name__)
        est = cls(**config["params"])
        for name, value in (config["fitted"] | tensors).items():
            setattr(est, name, value)
        if config["feature_names"]:
            est.feature_names_in_ = np.array(config["feature_names"], dtype=object)  # type: ignore[attr-defined]
        return est


def _descend(model: Any, x: Any, newton: bool, eta: float, max_iter: int, tol: float) -> tuple[Any, float, int, bool]:
    """Gradient descent with a fixed step that is halved for good where the loss rises, or modified Newton."""
    f, g, H = model(x)
    size = eta / max(float(np.abs(np.linalg.eigvalsh(H)).max()), 1e-300)
    for taken in range(1, max_iter + 1):
        if newton:  # eigenvalues by modulus: no attraction by saddles
            values, vectors = np.linalg.eigh(H)
            direction, t = vectors @ ((vectors.T @ g) / np.maximum(np.abs(values), 1e-12)), 1.0
        else:
            direction, t = g, size
        while True:  # halve until the loss does not rise
            new = model(x - t * direction, hessian=newton)
            if new[0] <= f + 1e-15 * abs(f) or t < 1e-20:
                break
            t /= 2
        size = size if newton else t
        x, (f, g, H) = x - t * direction, new
        if np.linalg.norm(g) <= tol or t * np.linalg.norm(direction) <= tol * (1 + np.linalg.norm(x)):
            return x, f, taken, True
    return x, f, max_iter, False


class PolynomialLinkRegressor(_Fit, RegressorMixin, BaseEstimator):
    """Least squares for ``y = (x'coef)^power + noise``; phase retrieval for power 2. No intercept.

    Parameters
    ----------
    power
        Integer, at least 2. For even powers the sign of ``coef_`` is not identified.
    solver
        ``"normgd"``, ``"gd"`` (step ``eta`` over the curvature at the start, halved where the loss rises), ``"lbfgs"``
        (SciPy), ``"newton"`` (eigenvalues by modulus, with halving).
    eta
        Step in units of the inverse curvature, for the first two. Default 0.5, see :func:`normgd_minimize`.
    max_iter, tol
        Steps from a start; tolerance of gradient and step, in units in which X and y have root mean square 1.
    n_restarts
        Random starts, of which the one with the smallest loss is kept: the loss can have several minima. Default 5.
    stop
        ``"tolerance"``, or, for NormGD, ``"statistical"``: also at steps below a tenth of the statistical radius.
    random_state
        Decides the starts.

    Attributes
    ----------
    coef_ : ndarray (d,)
        In units of ``y^(1/power)`` over those of X.
    loss_ : float
        Half the mean squared residual.
    singular_ : bool
        Whether ``|coef_|`` is at most 1.5 ``radius_``, as it is when there is no signal.
    radius_ : float
        ``(2 loss_ d/n)^(1/(2 power)) / rms(X)``: the error to expect without signal, up to a constant.
    n_iter_ : int
        Steps, summed over the starts.
    n_features_in_, feature_names_in_

    Warns
    -----
    ConvergenceWarning
        The best start did not reach ``tol`` in ``max_iter`` steps.

    Notes
    -----
    Model and radius: "Improving Computational Complexity in Statistical Models with Local Curvature Information",
    ICML 2024, the generalised linear model with polynomial link. Starts, scaling and ``singular_`` are ours.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(1000, 3))
    >>> y = (X @ [1.0, 0.5, 0.0]) ** 2 + rng.normal(size=1000)
    >>> model = PolynomialLinkRegressor(power=2, random_state=0).fit(X, y)
    >>> model.singular_, bool(model.score(X, y) > 0.7)
    (False, True)
    """

    _fitted = ("loss_", "radius_", "singular_")
    _array = "coef_"

    def __init__(
        self, power: int = 2, solver: str = "normgd", eta: float = 0.5, max_iter: int = 500, tol: float = 1e-8,
        n_restarts: int = 5, stop: str = "tolerance", random_state: Any = None,
    ) -> None:  # fmt: skip
        self.power, self.solver, self.eta, self.max_iter = power, solver, eta, max_iter
        self.tol, self.n_restarts, self.stop, self.random_state = tol, n_restarts, stop, random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True  # a pure power fits no linear target
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to ``X`` (n, d) and ``y`` (n,), numeric and finite.

        Raises
        ------
        ValueError
            An option is out of range, or the data holds NaN or infinite values.
        """
        self._check()
        if isinstance(self.power, bool) or not isinstance(self.power, int | np.integer) or self.power < 2:
            raise ValueError(f"power must be an integer of at least 2, got {self.power!r}")
        X, y = validate_data(self, X, y, y_numeric=True, dtype=np.float64)
        # Units in which both are about 1, so that far starts do not overflow.
        a, b = (float(np.sqrt((v**2).mean())) or 1.0 for v in (X, y))
        model = PolynomialLink(X / a, y / b, self.power)
        theta, loss, self.n_iter_ = self._best(model, START)
        unit = b ** (1 / self.power) / a
        self.coef_ = theta * unit
        self.loss_ = loss * b**2
        self.radius_ = model.radius(np.zeros_like(theta), loss) * unit
        self.singular_ = bool(np.linalg.norm(self.coef_) <= 1.5 * self.radius_)
        return self

    def predict(self, X: Any) -> Any:
        """``(x'coef_)^power`` for each row, shape (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return (X @ self.coef_) ** self.power


class SymmetricGaussianMixture(_Fit, DensityMixin, BaseEstimator):
    """``N(theta, s^2 I)/2 + N(-theta, s^2 I)/2`` by maximum likelihood; centre the data first.

    Parameters
    ----------
    solver, eta, max_iter, tol, stop, random_state
        As in :class:`PolynomialLinkRegressor`; ``tol`` in units of the data.
    n_restarts
        Random starts, of which the best is kept. Default 3.
    scale
        ``"known"``: s = 1. ``"estimate"``: in turn theta at fixed s, and ``s^2 = (mean |x|^2 - |theta|^2) / d``, which
        is its maximum-likelihood value at a stationary theta, until s changes by less than ``1e-6 s``.
    reg_covar
        Added to an estimated ``s^2``. Default 1e-6, as in scikit-learn's mixtures.

    Attributes
    ----------
    theta_ : ndarray (d,)
        In units of X. Its sign is not identified.
    scale_ : float
        ``s``.
    singular_ : bool
        Whether ``|theta_|`` is at most 1.5 ``radius_``, as it often is when one normal distribution would do.
    radius_ : float
        ``s (d/n)^(1/4)``: the error to expect there, up to a constant.
    n_iter_ : int
        Steps, summed over starts and rounds.
    n_features_in_, feature_names_in_

    Warns
    -----
    ConvergenceWarning
        The best start did not reach ``tol`` in ``max_iter`` steps, or s still moves after ``max_iter`` rounds.

    Notes
    -----
    Model and radius: "Improving Computational Complexity in Statistical Models with Local Curvature Information",
    ICML 2024, the over-specified Gaussian mixture. There s is known; its estimate, starts and ``singular_`` are ours.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(1000, 2)) + rng.choice([-2.0, 2.0], size=(1000, 1))
    >>> model = SymmetricGaussianMixture(random_state=0).fit(X)
    >>> model.singular_, bool(abs(abs(model.theta_) - 2).max() < 0.2)
    (False, True)
    """

    _fitted = ("scale_", "radius_", "singular_")
    _array = "theta_"

    def __init__(
        self, solver: str = "normgd", eta: float = 0.5, max_iter: int = 500, tol: float = 1e-8, n_restarts: int = 3,
        scale: str = "known", reg_covar: float = 1e-6, stop: str = "tolerance", random_state: Any = None,
    ) -> None:  # fmt: skip
        self.solver, self.eta, self.max_iter, self.tol, self.n_restarts = solver, eta, max_iter, tol, n_restarts
        self.scale, self.reg_covar, self.stop, self.random_state = scale, reg_covar, stop, random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit to ``X`` (n, d), numeric and finite; ``y`` is ignored.

        Raises
        ------
        ValueError
            An option is out of range, or the data holds NaN or infinite values.
        """
        self._check()
        if self.scale not in ("known", "estimate"):
            raise ValueError(f"scale must be 'known' or 'estimate', got {self.scale!r}")
        if not 0 <= self.reg_covar < np.inf:
            raise ValueError(f"reg_covar must be finite and not negative, got {self.reg_covar!r}")
        X = validate_data(self, X, dtype=np.float64)
        d, second = X.shape[1], float((X**2).sum(1).mean())
        far = np.sqrt(second) or 1.0
        known = self.scale == "known"
        self.scale_ = 1.0 if known else float(np.sqrt(second / (2 * d) + self.reg_covar)) or 1.0
        model = SymmetricMixture(X, self.scale_)
        self.theta_, _, self.n_iter_ = self._best(model, far)
        for _ in range(0 if known else self.max_iter):
            rest = max(second - float(self.theta_ @ self.theta_), 0.0)
            before, self.scale_ = self.scale_, float(np.sqrt(rest / d + self.reg_covar)) or 1e-6 * far
            model = SymmetricMixture(X, self.scale_)
            if abs(self.scale_ - before) <= 1e-6 * self.scale_:
                break
            if model.fun_jac(self.theta_)[1].any():  # not at 0, where nothing moves
                self.theta_, _, steps, _ = self._solve(model, self.theta_)
                self.n_iter_ += steps
        else:
            if not known:
                warnings.warn(f"s still moves after {self.max_iter} rounds", ConvergenceWarning, stacklevel=2)
        self.radius_ = float(model.radius(np.zeros(d)))
        self.singular_ = bool(np.linalg.norm(self.theta_) <= 1.5 * self.radius_)
        return self

    def score_samples(self, X: Any) -> Any:
        """Log density of each row, shape (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        v, d = self.scale_**2, X.shape[1]
        z = X @ self.theta_ / v
        squares = (X**2).sum(1) + self.theta_ @ self.theta_
        return np.logaddexp(z, -z) - np.log(2) - squares / (2 * v) - d / 2 * np.log(2 * np.pi * v)

    def score(self, X: Any, y: Any = None) -> float:
        """Mean log density."""
        return float(self.score_samples(X).mean())

    def predict_proba(self, X: Any) -> Any:
        """Probabilities of the components at ``theta_`` and ``-theta_``, shape (n, 2)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        p = (1 + np.tanh(X @ self.theta_ / self.scale_**2)) / 2
        return np.stack([p, 1 - p], axis=1)

    def predict(self, X: Any) -> Any:
        """0 for the component at ``theta_``, 1 for the one at ``-theta_``; shape (n,)."""
        return self.predict_proba(X).argmax(axis=1)
