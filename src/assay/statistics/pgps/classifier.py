"""A small Bayesian neural network whose posterior is sampled by path-guided particles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

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

    def fit(self, X: Any, y: Any) -> PGPSBayesianMLPClassifier:
        """Sample the posterior given rows ``X`` and labels ``y``."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        if not self.prior_var > 0:
            raise ValueError(f"prior_var must be positive, not {self.prior_var}")
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y holds one class, and a classifier needs at least two")
        self._mean, self._scale = X.mean(0), np.where(X.std(0) > 0, X.std(0), 1.0)
        rows, wanted = self._rows(X), torch.from_numpy(labels)
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
            lr=self.lr,
            tol=1e-2,
            langevin_steps=self.langevin_steps,
            langevin_step_size=self.langevin_step_size,
            final_langevin=self.final_langevin,
            seed=None if seed is None else int(seed),
        )
        self.result_: PGPSResult = sampler.run()
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
