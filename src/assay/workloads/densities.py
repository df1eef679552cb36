"""Targets with far modes whose masses are known."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GaussianMixture:
    """``sum_j w_j N(mean_j, sd^2 I)`` with a Gaussian ``N(0, start^2 I)`` to begin from.

    ``weights`` ``[k]``, ``means`` ``[k, d]``. Normalised: the log of its constant is 0.
    """

    weights: tuple[float, ...]
    means: tuple[tuple[float, ...], ...]
    sd: float
    start: float

    @property
    def dim(self) -> int:
        """Dimension."""
        return len(self.means[0])

    def log_prob(self, x: Tensor) -> Tensor:
        """Log density of rows ``[n, d]``."""
        import torch

        weights = torch.as_tensor(self.weights, dtype=x.dtype, device=x.device)
        means = torch.as_tensor(self.means, dtype=x.dtype, device=x.device)
        squares = ((x[:, None] - means) / self.sd).square().sum(-1)
        constant = self.dim * (math.log(self.sd) + 0.5 * math.log(2 * math.pi))
        return torch.logsumexp(weights.log() - 0.5 * squares - constant, 1)

    def masses(self, points: Any, weights: Any) -> list[float]:
        """Weighted share of points whose nearest mean is each of the means."""
        x, w, means = np.asarray(points), np.asarray(weights), np.asarray(self.means)
        nearest = ((x[:, None] - means) ** 2).sum(-1).argmin(1)
        return [float(w[nearest == j].sum()) for j in range(len(means))]

    def masses_within(self, points: Any, weights: Any, radius: float) -> list[float]:
        """Weighted share of points that lie nearer than ``radius`` to each of the means."""
        x, w, means = np.asarray(points), np.asarray(weights), np.asarray(self.means)
        near = ((x[:, None] - means) ** 2).sum(-1) < radius**2
        return [float(w[near[:, j]].sum()) for j in range(len(means))]


def far_modes() -> GaussianMixture:
    """Two equal modes at 0 and 8, begun from ``N(0, 9)``: the far one is beyond the start's reach."""
    return GaussianMixture((0.5, 0.5), ((0.0,), (8.0,)), 1.0, 3.0)


def negligible_mode() -> GaussianMixture:
    """A mode of mass 0.001 at -5 and the rest at 5, begun from ``N(0, 4)``, as far from one as from the other."""
    return GaussianMixture((0.001, 0.999), ((-5.0,), (5.0,)), 1.0, 2.0)


def eight_dimensions(seed: int) -> GaussianMixture:
    """Four narrow modes at ``e1, -e2, e3, -e4`` in eight dimensions; weights are the softmax of normal draws."""
    draws = np.random.default_rng(seed).normal(size=4)
    weights = np.exp(draws) / np.exp(draws).sum()
    means = np.zeros((4, 8))
    means[np.arange(4), np.arange(4)] = [1, -1, 1, -1]
    return GaussianMixture(tuple(weights.tolist()), tuple(map(tuple, means.tolist())), 0.15, 1.0)
