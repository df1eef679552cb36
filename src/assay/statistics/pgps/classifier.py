"""A small Bayesian neural network whose posterior is sampled by path-guided particles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from assay._state import load_state, save_state
from assay.statistics.pgps.sampler import PGPS, PGPSResult


def mlp_logits(theta: Tensor, x: Tensor, hidden: int, classes: int) -> Tensor:
    """Logits ``[particles, rows, classes]`` of networks with one sigmoid layer, one for each row of ``theta``.

    A row holds ``W1 [hidden, d]``, ``b1 [hidden]``, ``W2 [classes, hidden]``, ``b2 [classes]``, one after the other.
    """
    d = x.shape[1]
    sizes = [hidden * d, hidden, classes * hidden, classes]
    w1, b1, w2, b2 = theta.split(sizes, 1)
    h = torch.sigmoid(torch.einsum("phd,nd->pnh", w1.view(-1, hidden, d), x) + b1[:, None])
    return torch.einsum("pch,pnh->pnc", w2.view(-1, classes, hidden), h) + b2[:, None]


class PGPSBayesianMLPClassifier(ClassifierMixin, BaseEstimator):
    """Classifier that averages networks drawn from a posterior by :class:`~assay.statistics.pgps.PGPS`.

    One hidden layer of sigmoid units, softmax output, prior ``N(0, prior_var I)``; inputs are standardised.

    Parameters
    ----------
    hidden
        Units of the network; default 32.
    prior_var
        Variance of the prior; default 0.5. (Both are the paper's.)
    n_particles
        Networks; default 50.
    velocity_hidden, train_steps, lr
        Of the velocity and its training by Adam; defaults 128, 100 and 1e-3.
    dt_max
        Time step; default 0.02.
    langevin_steps, langevin_step_size, final_langevin
        Langevin moves at each time and at the end; defaults 6, 1e-3 and 100.
    alpha, beta
        Of the path; defaults 0.2 and 0.8.
    random_state
        Seed.
    device
        Where networks are sampled; default the CPU.

    Attributes
    ----------
    classes_, n_features_in_
        As everywhere in scikit-learn.
    result_
        The particles.
    """

    def __init__(
        self,
        hidden: int = 32,
        prior_var: float = 0.5,
        n_particles: int = 50,
        *,
        velocity_hidden: int = 128,
        train_steps: int = 100,
        lr: float = 1e-3,
        dt_max: float = 0.02,
        langevin_steps: int = 6,
        langevin_step_size: float = 1e-3,
        final_langevin: int = 100,
        alpha: float = 0.2,
        beta: float = 0.8,
        random_state: int | None = None,
        device: str | None = None,
    ) -> None:
        self.hidden = hidden
        self.prior_var = prior_var
        self.n_particles = n_particles
        self.velocity_hidden = velocity_hidden
        self.train_steps = train_steps
        self.lr = lr
        self.dt_max = dt_max
        self.langevin_steps = langevin_steps
        self.langevin_step_size = langevin_step_size
        self.final_langevin = final_langevin
        self.alpha = alpha
        self.beta = beta
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> PGPSBayesianMLPClassifier:
        """Sample the posterior given rows ``X`` ``[n, d]`` and labels ``y`` ``[n]``.

        Raises
        ------
        ValueError
            A parameter is out of its range, or ``y`` holds one class.
        FloatingPointError
            Langevin moves diverge: ``langevin_step_size`` is too large for so many rows.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        if not self.prior_var > 0:
            raise ValueError(f"prior_var must be positive, not {self.prior_var}")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y holds one class, and a classifier needs at least two")
        self._mean, self._scale = X.mean(0), np.where(X.std(0) > 0, X.std(0), 1.0)
        device = torch.device(self.device or "cpu")
        rows, wanted = self._rows(X).to(device), torch.from_numpy(labels).to(device)
        classes = len(self.classes_)
        dim = self.hidden * (rows.shape[1] + 1) + classes * (self.hidden + 1)

        def log_posterior(theta: Tensor) -> Tensor:
            logits = mlp_logits(theta, rows, self.hidden, classes)
            chosen = logits.log_softmax(-1)[:, torch.arange(len(rows)), wanted]
            return chosen.sum(1) - theta.square().sum(1) / (2 * self.prior_var)

        seed = self.random_state
        if seed is not None and not isinstance(seed, int | np.integer):
            seed = int(seed.randint(2**31))
        sampler = PGPS(
            log_posterior,
            dim,
            self.n_particles,
            alpha=self.alpha,
            beta=self.beta,
            p0_scale=float(self.prior_var) ** 0.5,
            hidden=self.velocity_hidden,
            solver="adam",
            weights=False,
            psi=1e5,
            dt_max=self.dt_max,
            train_steps=self.train_steps,
            first_train_steps=self.train_steps,
            lr=self.lr,
            tol=1e-2,
            langevin_steps=self.langevin_steps,
            langevin_step_size=self.langevin_step_size,
            final_langevin=self.final_langevin,
            device=device,
            seed=None if seed is None else int(seed),
        )
        found = sampler.run()
        self.result_: PGPSResult = replace(found, particles=found.particles.cpu(), weights=found.weights.cpu())
        return self

    def save(self, folder: str | Path) -> Path:
        """Write the fitted classifier to a folder, as safetensors and JSON; :meth:`load` reads it.

        Raises
        ------
        TypeError
            Classes or ``random_state`` are of a kind that JSON does not hold.
        """
        check_is_fitted(self)
        parameters = self.get_params()
        seed = parameters["random_state"]
        parameters["random_state"] = int(seed) if isinstance(seed, np.integer) else seed
        if not (seed is None or isinstance(seed, int | np.integer)):
            raise TypeError(f"random_state must be an integer or None to be saved, not {type(seed).__name__}")
        if self.classes_.dtype.kind not in "biufU" and not all(isinstance(c, str) for c in self.classes_):
            raise TypeError(f"classes must be numbers or strings to be saved, not {self.classes_.dtype}")
        config = {
            "parameters": parameters,
            "classes": self.classes_.tolist(),
            "classes_dtype": self.classes_.dtype.str,
            "feature_names": getattr(self, "feature_names_in_", np.array([])).tolist(),
            "log_evidence": self.result_.log_evidence,
            "n_score_evals": self.result_.n_score_evals,
        }
        numbers = {"mean": torch.from_numpy(self._mean), "scale": torch.from_numpy(self._scale)}
        particles = {"particles": self.result_.particles, "weights": self.result_.weights}
        return save_state(folder, type(self).__name__, config, numbers | particles)

    @classmethod
    def load(cls, folder: str | Path) -> PGPSBayesianMLPClassifier:
        """Read what :meth:`save` wrote; predictions are identical. The trace of the sampler is not kept."""
        config, tensors = load_state(folder, cls.__name__, torch_tensors=True)
        self = cls(**config["parameters"])
        self.classes_ = np.array(config["classes"], dtype=np.dtype(config["classes_dtype"]))
        self._mean, self._scale = tensors["mean"].numpy(), tensors["scale"].numpy()
        self.n_features_in_ = len(self._mean)
        if config["feature_names"]:
            self.feature_names_in_ = np.array(config["feature_names"], dtype=object)
        weights = tensors["weights"]
        ess = float(1 / weights.square().sum())
        evidence, count = config["log_evidence"], config["n_score_evals"]
        self.result_ = PGPSResult(tensors["particles"], weights, evidence, ess, (), count)
        return self

    def _rows(self, X: Any) -> Tensor:
        return torch.from_numpy((X - self._mean) / self._scale)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Mean over the networks of the class probabilities, ``[rows, classes]``."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        logits = mlp_logits(self.result_.particles, self._rows(X), self.hidden, len(self.classes_))
        return torch.einsum("p,pnc->nc", self.result_.weights, logits.softmax(-1)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class of each row."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(1)]
