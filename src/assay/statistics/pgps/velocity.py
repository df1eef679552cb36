"""The velocity that carries particles along a path of densities: a small network, fitted anew at every time."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

SLOPES = (0.3, 4.0)  # of random hidden units, in units of 1 / sd of the particles


class Velocity(nn.Module):
    """``phi(x) = W2 sigmoid(W1 x + b1) + b2``, with its divergence in closed form.

    With ``h = sigmoid(W1 x + b1)`` and ``g = h (1 - h)``: ``div phi = sum_k g_k (W1 W2)_kk``.

    Parameters
    ----------
    dim, hidden
        Dimension and number of hidden units.
    generator
        Of the initial weights, which are uniform in ``+-1/sqrt(inputs)`` (as torch draws them).
    dtype
        Default float64.
    """

    def __init__(
        self, dim: int, hidden: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.first = nn.Linear(dim, hidden, dtype=dtype)
        self.second = nn.Linear(hidden, dim, dtype=dtype)
        with torch.no_grad():
            for linear in (self.first, self.second):
                bound = linear.in_features**-0.5
                for p in linear.parameters():
                    p.copy_((torch.rand(p.shape, generator=generator, dtype=torch.float64) * 2 - 1) * bound)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Velocities ``[n, d]`` and divergences ``[n]`` at rows ``[n, d]``."""
        h = torch.sigmoid(self.first(x))
        trace = (self.first.weight * self.second.weight.T).sum(-1)
        return self.second(h), (h * (1 - h)) @ trace


def residual(score: Tensor, change: Tensor, velocity: Tensor, divergence: Tensor) -> Tensor:
    """``r = d/dt ln p_t + grad ln p_t . phi + div phi``, ``[n]``: constant where ``phi`` moves ``p_t`` as it should."""
    return change + (score * velocity).sum(-1) + divergence


def fit_adam(
    net: Velocity,
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    score: Tensor,
    change: Tensor,
    weights: Tensor,
    steps: int,
    tolerance: float,
    lr: Callable[[float], float] | None = None,
) -> float:
    """Adam on ``mean (r - mean change)^2`` with fixed particles, until it is below ``tolerance``; gives the loss.

    ``lr`` may give the learning rate from the loss, before each step.
    """
    target = (weights * change).sum()
    loss_value = float("inf")
    for _ in range(steps):
        velocity, divergence = net(x)
        loss = (weights * (residual(score, change, velocity, divergence) - target).square()).sum()
        loss_value = loss.item()
        if loss_value < tolerance:
            break
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr(loss_value)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return loss_value


def random_layer(hidden: int, x: Tensor, weights: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Weights ``[hidden, d]`` and biases ``[hidden]`` of random sigmoid units among particles ``x`` ``[n, d]``.

    Units get a direction uniform on the sphere, a slope log-uniform in ``[0.3, 4] / sd`` and a random particle as
    centre.
    """
    n, d = x.shape

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(x)

    mean = (weights[:, None] * x).sum(0)
    spread = (weights[:, None] * (x - mean).square()).sum(0).sqrt().clamp(min=1e-12)
    direction = torch.randn(hidden, d, generator=generator, dtype=torch.float64).to(x)
    direction = direction / direction.norm(dim=1, keepdim=True)
    low, high = (math.log(slope) for slope in SLOPES)
    first = direction * torch.exp(low + (high - low) * rand(hidden))[:, None] / spread
    centres = x[(rand(hidden) * n).long().clamp(max=n - 1)]
    return first, -(centres * first).sum(-1)


def fit_least_squares(
    layer: tuple[Tensor, Tensor], x: Tensor, score: Tensor, change: Tensor, weights: Tensor, ridge: float
) -> tuple[Tensor, Tensor, float]:
    """Velocities and divergences of the network whose second layer solves the loss exactly, for a given first layer.

    The loss is quadratic in the second layer. Column ``(i, k)`` of the regression is ``score_i h_k + g_k W1_ki``, that
    of bias ``i`` is ``score_i``; columns have unit weighted root mean square, and ``ridge`` is added to the normal
    equations, which are solved in float64.

    Parameters
    ----------
    layer
        First layer: weights ``[hidden, d]`` and biases ``[hidden]``, as of :func:`random_layer`.
    x, score, change, weights
        Particles ``[n, d]``, ``grad ln p_t`` ``[n, d]``, ``d/dt ln p_t`` ``[n]``, and weights ``[n]`` that sum to one.
    ridge
        Not negative.

    Returns
    -------
    Velocity ``[n, d]``, divergence ``[n]`` and the mean squared residual over that of no motion.
    """
    first, bias = layer
    hidden, d = first.shape
    h = torch.sigmoid(x @ first.T + bias)
    g = h * (1 - h)
    a = torch.cat([score[:, i : i + 1] * h + g * first[:, i] for i in range(d)] + [score], 1).double()
    root = weights.double().sqrt()[:, None]
    left = root * a
    scale = left.norm(dim=0).clamp(min=1e-300)
    left = left / scale
    b = change - (weights * change).sum()
    gram = left.T @ left
    gram.diagonal().add_(ridge)
    right = left.T @ (root * -b[:, None])
    solution = (torch.cholesky_solve(right, torch.linalg.cholesky(gram)).squeeze(1) / scale).to(x.dtype)
    second = solution[: d * hidden].view(d, hidden)
    velocity = h @ second.T + solution[d * hidden :]
    divergence = g @ (first * second.T).sum(-1)
    left_over = residual(score, change, velocity, divergence) - (weights * change).sum()
    size = (weights * b.square()).sum().clamp(min=1e-300 if x.dtype == torch.float64 else 1e-30)
    return velocity, divergence, float((weights * left_over.square()).sum() / size)
