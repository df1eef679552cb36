"""What path-guided particles are compared with: Langevin dynamics, SVGD, preconditioned gradients, tempered SMC.

All return a :class:`~assay.statistics.pgps.PGPSResult` with equal weights and counted evaluations of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.statistics.pgps.path import Density, LwSPath
from assay.statistics.pgps.sampler import PGPSResult, ess_of, normal_like, systematic
from assay.statistics.pgps.velocity import Velocity

CHUNK = 2**24  # numbers of a kernel matrix that are held at a time


def _result(x: Tensor, evaluations: int) -> PGPSResult:
    return PGPSResult(x, torch.full((len(x),), 1 / len(x), dtype=x.dtype), math.nan, float(len(x)), (), evaluations)


def _check(steps: int, step_size: float) -> None:
    if steps < 0 or not step_size > 0:
        raise ValueError(f"steps must not be negative and step_size positive, not {steps} and {step_size}")


def _move(
    evaluate: Callable[[Tensor], tuple[Tensor, ...]],
    state: tuple[Tensor, Tensor, Tensor],
    step_size: float,
    adjusted: bool,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One Langevin move of ``(x, ln p, grad ln p)``; ``evaluate`` gives the last two. Adjusted: by Metropolis."""
    x, value, score = state
    y = x + step_size * score + math.sqrt(2 * step_size) * normal_like(x, generator)
    value_y, score_y = evaluate(y)[:2]
    if not adjusted:
        return y, value_y, score_y
    there = (y - x - step_size * score).square().sum(-1)
    back = (x - y - step_size * score_y).square().sum(-1)
    draw = torch.rand(len(x), generator=generator, dtype=x.dtype).to(x.device).log()
    taken = draw < value_y - value + (there - back) / (4 * step_size)
    rows = taken[:, None]
    return torch.where(rows, y, x), torch.where(taken, value_y, value), torch.where(rows, score_y, score)


def langevin(
    log_prob: Any,
    x0: Tensor,
    steps: int,
    step_size: float,
    *,
    adjusted: bool = False,
    generator: torch.Generator | None = None,
) -> PGPSResult:
    """Langevin dynamics of all particles at once: ``x += delta grad ln p + sqrt(2 delta) N(0, I)``.

    With ``adjusted`` each move is accepted by Metropolis (MALA), otherwise the bias of the step remains (ULA).
    """
    _check(steps, step_size)
    density = Density(log_prob)
    state = (x0, *density(x0))
    for _ in range(steps):
        state = _move(density, state, step_size, adjusted, generator)
    return _result(state[0], density.calls)


def sgld(
    log_prob: Any,
    x0: Tensor,
    steps: int,
    step_size: float,
    *,
    burn_in: int = 4000,
    generator: torch.Generator | None = None,
) -> PGPSResult:
    """One Langevin chain from ``x0`` ``[d]``: ``burn_in`` states are dropped, ``steps`` after them are the sample."""
    _check(steps, step_size)
    density, x, kept = Density(log_prob), x0.reshape(1, -1), []
    for i in range(burn_in + steps):
        x = x + step_size * density(x)[1] + math.sqrt(2 * step_size) * normal_like(x, generator)
        if i >= burn_in:
            kept.append(x[0])
    return _result(torch.stack(kept), density.calls)


def svgd(log_prob: Any, x0: Tensor, steps: int, step_size: float) -> PGPSResult:
    """Stein variational gradient descent with a Gaussian kernel.

    ``x_i += delta / n sum_j [k_ij grad ln p(x_j) + k_ij (x_i - x_j) / s2]``, where ``s2`` is the median of all squared
    distances over ``2 ln(n + 1)``, anew in each step. Costs ``n^2 d`` a step.
    """
    _check(steps, step_size)
    density, x = Density(log_prob), x0
    n = len(x)
    for _ in range(steps):
        gradient = density(x)[1]
        distances = torch.cdist(x, x).square()
        s2 = (distances.flatten().median() / (2 * math.log(n + 1))).clamp(min=1e-12)
        move = torch.empty_like(x)
        rows = max(1, CHUNK // n)
        for start in range(0, n, rows):
            k = torch.exp(-distances[start : start + rows] / (2 * s2))
            repulsion = (x[start : start + rows] * k.sum(1, keepdim=True) - k @ x) / s2
            move[start : start + rows] = (k @ gradient + repulsion) / n
        x = x + step_size * move
    return _result(x, density.calls)


def pfg(
    log_prob: Any,
    x0: Tensor,
    steps: int,
    step_size: float,
    *,
    hidden: int = 64,
    lr: float = 1e-3,
    first_steps: int = 1000,
    train_steps: int = 5,
    seed: int = 0,
) -> PGPSResult:
    """Preconditioned functional gradient flow: a network is trained to be the direction that particles move in.

    Loss ``mean [|phi|^2 - grad ln p . phi - div phi]``, ``first_steps`` of Adam before the first move and
    ``train_steps`` before each other; then ``x += delta phi(x)``.
    """
    _check(steps, step_size)
    density, x = Density(log_prob), x0
    net = Velocity(x.shape[1], hidden, torch.Generator().manual_seed(seed), x.dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr)
    for i in range(steps):
        score = density(x)[1]
        for _ in range(train_steps if i else first_steps):
            velocity, divergence = net(x)
            loss = (velocity.square().sum(-1) - (score * velocity).sum(-1) - divergence).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            x = x + step_size * net(x)[0]
    return _result(x, density.calls)


def tempered_smc(
    path: LwSPath,
    x0: Tensor,
    *,
    levels: int = 50,
    moves: int = 10,
    step_size: float = 1e-2,
    adjusted: bool = False,
    ess_threshold: float = 0.5,
    generator: torch.Generator | None = None,
) -> PGPSResult:
    """Sequential Monte Carlo along the same path: reweight to the next level, resample, move by Langevin.

    Weights are multiplied by ``p_{t+h}(x) / p_t(x)``; particles are resampled systematically when the effective sample
    size falls below ``ess_threshold`` of them; then ``moves`` Langevin moves (MALA with ``adjusted``) at the new level.
    """
    _check(moves, step_size)
    if levels < 1:
        raise ValueError(f"levels must be at least 1, not {levels}")
    start = path.p0.calls + path.p1.calls
    x, log_w, evidence = x0, torch.zeros(len(x0), dtype=x0.dtype), 0.0
    value = path.evaluate(0.0, x)[0]
    for level in range(1, levels + 1):
        t = level / levels
        new, score, _ = path.evaluate(t, x)
        old = log_w.logsumexp(0)
        log_w = log_w + new - value
        evidence += float(log_w.logsumexp(0) - old)
        if ess_of(log_w) < ess_threshold * len(x):
            picked = systematic(log_w.softmax(0), generator)
            x, new, score = x[picked], new[picked], score[picked]
            log_w = torch.zeros_like(log_w)
        for _ in range(moves):
            x, new, score = _move(partial(path.evaluate, t), (x, new, score), step_size, adjusted, generator)
        value = new
    if not math.isfinite(evidence):
        raise FloatingPointError("the log evidence is not finite: the density must be finite wherever particles may go")
    return PGPSResult(x, log_w.softmax(0), evidence, ess_of(log_w), (), path.p0.calls + path.p1.calls - start)
