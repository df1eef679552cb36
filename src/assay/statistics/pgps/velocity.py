"""The velocity that carries particles along a path of densities: a small network, fitted anew at every time."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Velocity(nn.Module):
    """``phi(x) = W2 sigmoid(W1 x + b1) + b2``, with its divergence in closed form.

    With ``h = sigmoid(W1 x + b1)`` and ``g = h (1 - h)``: ``div phi = sum_k g_k (W1 W2)_kk``.

    Parameters
    ----------
    dim, hidden
        Dimension and number of hidden units.
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
                    p.copy_((torch.rand(p.shape, generator=generator, dtype=dtype) * 2 - 1) * bound)

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
) -> float:
    """Adam on ``mean (r - mean change)^2`` with fixed particles, until it is below ``tolerance``; gives the loss."""
    target = (weights * change).sum()
    loss_value = float("inf")
    for _ in range(steps):
        velocity, divergence = net(x)
        loss = (weights * (residual(score, change, velocity, divergence) - target).square()).sum()
        loss_value = loss.item()
        if loss_value < tolerance:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return loss_value


def fit_least_squares(
    hidden: int, x: Tensor, score: Tensor, change: Tensor, weights: Tensor, ridge: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, float]:
    """Velocities and divergences of the network whose second layer solves the loss exactly, at random first layers.

    The loss is quadratic in the second layer. Hidden units get a direction uniform on the sphere, a slope log-uniform
    in ``[0.3, 4] / sd`` and a random particle as centre. Column ``(i, k)`` of the regression is ``score_i h_k + g_k
    W1_ki``, that of bias ``i`` is ``score_i``; columns have unit weighted root mean square, and ``ridge`` is added to
    the normal equations.

    Returns
    -------
    Velocity ``[n, d]``, divergence ``[n]`` and the mean squared residual over that of no motion.
    """
    n, d = x.shape
    device, dtype = x.device, x.dtype

    def rand(*shape: int, normal: bool = False) -> Tensor:
        draw = torch.randn if normal else torch.rand
        return draw(*shape, generator=generator, dtype=dtype).to(device)

    mean = (weights[:, None] * x).sum(0)
    spread = (weights[:, None] * (x - mean).square()).sum(0).sqrt().clamp(min=1e-12)
    direction = rand(hidden, d, normal=True)
    direction = direction / direction.norm(dim=1, keepdim=True)
    low, high = (torch.log(torch.tensor(v, dtype=dtype)) for v in (0.3, 4.0))
    slope = torch.exp(low.to(device) + (high - low).to(device) * rand(hidden))
    w1 = direction * slope[:, None] / spread
    centres = x[(rand(hidden) * n).long().clamp(max=n - 1)]
    h = torch.sigmoid(x @ w1.T - (centres * w1).sum(-1))
    g = h * (1 - h)
    columns = [score[:, i : i + 1] * h + g * w1[:, i] for i in range(d)] + [score]
    a = torch.cat(columns, 1)
    root = weights.sqrt()[:, None]
    scale = (root * a).norm(dim=0).clamp(min=1e-300)
    a = a / scale
    b = change - (weights * change).sum()
    left = root * a
    gram = left.T @ left
    gram.diagonal().add_(ridge)
    u = torch.cholesky_solve((left.T @ (root * -b[:, None])), torch.linalg.cholesky(gram)).squeeze(1) / scale
    w2 = u[: d * hidden].view(d, hidden)
    velocity = h @ w2.T + u[d * hidden :]
    divergence = g @ (w1 * w2.T).sum(-1)
    left_over = residual(score, change, velocity, divergence) - (weights * change).sum()
    size = (weights * b.square()).sum().clamp(min=1e-300)
    return velocity, divergence, float((weights * left_over.square()).sum() / size)
