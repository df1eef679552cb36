"""The policy that decides what runs, and the direction in which it learns."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Policy(nn.Module):
    """Probabilities that blocks and tokens run, from the output of the first layer.

    Blocks: mean of the first layer's states over the tokens, LayerNorm, linear to ``hidden``, tanh, linear, sigmoid.
    Tokens: LayerNorm, linear to one, sigmoid, for each token. The last linear maps start at zero with a bias of +2, so
    that everything runs with probability 0.88 and training starts near the full model.

    Parameters
    ----------
    width
        Hidden size of the model.
    blocks
        Blocks to decide on.
    hidden
        Hidden units.
    tokens
        Whether tokens are decided on.
    """

    def __init__(self, width: int, blocks: int, hidden: int = 64, tokens: bool = False) -> None:
        super().__init__()
        self.width, self.hidden, self.count = width, hidden, blocks
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, hidden)
        self.last = nn.Linear(hidden, blocks)
        self.token_norm = nn.LayerNorm(width) if tokens else None
        self.token = nn.Linear(width, 1) if tokens else None
        for linear in (self.last, self.token):
            if linear is not None:
                nn.init.zeros_(linear.weight)
                nn.init.constant_(linear.bias, 2.0)

    def flops(self, tokens: int) -> int:
        """Operations of deciding for a sequence of that many tokens."""
        blocks = 2 * self.width * self.hidden + 2 * self.hidden * self.count
        return blocks + (0 if self.token is None else 2 * self.width * tokens)

    def forward(self, states: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits ``[batch, blocks]`` and ``[batch, tokens]`` (``None`` if tokens are not decided on).

        ``states`` ``[batch, tokens, width]``; ``mask`` ``[batch, tokens]`` is zero for padding.
        """
        states = states.to(self.first.weight.dtype)
        if mask is None:
            mean = states.mean(1)
        else:
            weight = mask[..., None].to(states.dtype)
            mean = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        blocks = self.last(torch.tanh(self.first(self.norm(mean))))
        if self.token is None or self.token_norm is None:
            return blocks, None
        return blocks, self.token(self.token_norm(states)).squeeze(-1)


def log_probability(logits: Tensor, taken: Tensor, free: Tensor | None = None) -> Tensor:
    """``sum log Bernoulli(taken; sigmoid(logits))`` over all but the first axis; ``free`` masks what was decided."""
    log = -nn.functional.binary_cross_entropy_with_logits(logits, taken.to(logits.dtype), reduction="none")
    if free is not None:
        log = log * free
    return log.flatten(1).sum(1)


def barrier_direction(
    g_cost: Tensor,
    g_quality: Tensor,
    slack: float,
    alpha: float = 1.0,
    beta: float = 1.0,
    lambda_max: float = 50.0,
) -> tuple[Tensor, float]:
    """Direction that lowers a cost while a quality loss is kept below its limit (dynamic barrier gradient descent).

    ::

        phi    = min(alpha slack, beta |g_q|^2)  if slack > 0,  else  alpha slack
        lambda = clip((phi - <g_c, g_q>) / |g_q|^2, 0, lambda_max)
        v      = g_c + lambda g_q

    Of all directions, ``v`` is the one closest to ``g_c`` with ``<v, g_q> >= phi``: a violated constraint must get
    better, and a satisfied one may get worse no faster than its slack allows.

    Parameters
    ----------
    g_cost, g_quality
        Gradients of cost and quality loss, of one shape.
    slack
        Quality loss minus its limit: positive where the constraint is violated.
    alpha, beta
        Defaults 1.
    lambda_max
        Largest multiplier, default 50: ``lambda`` explodes where ``g_quality`` is near zero.

    Returns
    -------
    ``(v, lambda)``; an optimiser descends along ``v``.
    """
    if g_cost.shape != g_quality.shape:
        raise ValueError(
            f"g_cost and g_quality must have one shape, not {tuple(g_cost.shape)}, {tuple(g_quality.shape)}"
        )
    square = float((g_quality * g_quality).sum())
    if not math.isfinite(square + float(g_cost.abs().sum()) + slack):
        raise ValueError(f"g_cost, g_quality and slack must be finite, but a sum of them is not (slack {slack})")
    phi = min(alpha * slack, beta * square) if slack > 0 else alpha * slack
    weight = (phi - float((g_cost * g_quality).sum())) / (square + 1e-12)
    weight = min(max(weight, 0.0), lambda_max)
    return g_cost + weight * g_quality, weight
