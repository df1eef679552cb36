"""What path-guided particles are compared with: Langevin dynamics, SVGD, preconditioned gradients, tempered SMC.

All return a :class:`~assay.statistics.pgps.PGPSResult` with equal weights and counted evaluations of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.statistics.pgps.path import Density, LwSPath
from assay.statistics.pgps.sampler import PGPSResult, ess_of, normal_like, systematic
from assay.statistics.pgps.velocity import Velocity

CHUNK = 2**24  # numbers of a kernel matrix that are held at a time


def _result(x: Tensor, evaluations: int) -> PGPSResult:
    if not bool(x.isfinite().all()):
        raise FloatingPointError(
            "particles are not finite: give a smaller step_size, or a density that is finite there"
        )
    return PGPSResult(x, x.new_full((len(x),), 1 / len(x)), math.nan, float(len(x)), (), evaluations)


def _check(x0: Tensor, steps: int, step_size: float) -> None:
    if steps < 0 or not step_size > 0:
        raise ValueError(f"steps must not be negative and step_size positive, not {steps} and {step_size}")
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        raise TypeError(f"x0 must be a floating tensor, not {getattr(x0, 'dtype', type(x0).__name__)}")
    if x0.ndim != 2 or not len(x0):
        raise ValueError(f"x0 must be [n, d] with n at least 1, not {tuple(x0.shape)}")


def minibatches(
    log_prior: Callable[[Tensor], Tensor],
    log_likelihood: Callable[..., Tensor],
    data: Sequence[Tensor],
    batch_size: int,
    *,
    generator: torch.Generator | None = None,
) -> Callable[[Tensor], Tensor]:
    """A log posterior that each call estimates from a minibatch, for :func:`sgld`: its gradient is unbiased.

    ``log_prior(theta) + n / batch_size * log_likelihood(theta, *rows)``, with ``batch_size`` of the ``n`` rows of
    ``data`` drawn without replacement at each call.

    Parameters
    ----------
    log_prior
        Of particles ``[p, d]``, to ``[p]``.
    log_likelihood
        Of particles and rows of each tensor of ``data``: the log likelihood of those rows, summed, ``[p]``.
    data
        Tensors of ``n`` rows each.
    batch_size
        From 1 to ``n``.

    Raises
    ------
    ValueError
        ``data`` is empty or of unequal lengths, or ``batch_size`` is out of its range.
    """
    lengths = {len(part) for part in data}
    if len(lengths) != 1:
        raise ValueError(f"data must be tensors of one length, not of {sorted(lengths)}")
    (n,) = lengths
    if not 1 <= batch_size <= n:
        raise ValueError(f"batch_size must lie in [1, {n}], not {batch_size}")

    def log_prob(theta: Tensor) -> Tensor:
        rows = torch.randperm(n, generator=generator)[:batch_size]
        batch = [part[rows.to(part.device)] for part in data]
        return log_prior(theta) + n / batch_size * log_likelihood(theta, *batch)

    return log_prob


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
    draw = torch.rand(len(x), generator=generator, dtype=torch.float64).to(x).log()
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

    Parameters
    ----------
    log_prob
        As in :class:`~assay.statistics.pgps.PGPS`.
    x0
        Initial particles ``[n, d]``.
    steps, step_size
        Moves, and ``delta``.
    """
    _check(x0, steps, step_size)
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
    """One Langevin chain from ``x0`` ``[d]``: ``burn_in`` states are dropped, ``steps`` after them are the sample.

    Stochastic gradients come from a ``log_prob`` that draws a minibatch at each call, see :func:`minibatches`. The
    default ``burn_in`` of 4000 is that of the paper's comparison (section 5).
    """
    x = x0.reshape(1, -1)
    _check(x, steps, step_size)
    if steps < 1 or burn_in < 0:
        raise ValueError(f"steps must be at least 1 and burn_in not negative, not {steps} and {burn_in}")
    density, kept = Density(log_prob), []
    for i in range(burn_in + steps):
        x = x + step_size * density(x)[1] + math.sqrt(2 * step_size) * normal_like(x, generator)
        if i >= burn_in:
            kept.append(x[0])
    return _result(torch.stack(kept), density.calls)


def svgd(log_prob: Any, x0: Tensor, steps: int, step_size: float) -> PGPSResult:
    """Stein variational gradient descent with a Gaussian kernel.

    ``x_i += delta / n sum_j [k_ij grad ln p(x_j) + k_ij (x_i - x_j) / s2]``, where ``s2`` is the median of all squared
    distances over ``2 ln(n + 1)``, anew in each step. Costs ``n^2 d`` a step; of the kernel matrix at most 2^24 numbers
    are held at a time. Above 4096 particles the median is that of 4096 of them, evenly spaced in their order.
    """
    _check(x0, steps, step_size)
    density, x = Density(log_prob), x0
    n, most = len(x), math.isqrt(CHUNK)
    for _ in range(steps):
        gradient = density(x)[1]
        some = x if n <= most else x[torch.linspace(0, n - 1, most, dtype=torch.float64).long().to(x.device)]
        distances = torch.cdist(some, some).square()
        s2 = (distances.flatten().median() / (2 * math.log(n + 1))).clamp(min=1e-12)
        move = torch.empty_like(x)
        rows = max(1, CHUNK // n)
        for start in range(0, n, rows):
            here = x[start : start + rows]
            near = distances if n <= most else torch.cdist(here, x).square()
            k = torch.exp(-near / (2 * s2))
            move[start : start + rows] = (k @ gradient + (here * k.sum(1, keepdim=True) - k @ x) / s2) / n
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
    ``train_steps`` before each other; then ``x += delta phi(x)``. Defaults are those of the paper's comparison.
    """
    _check(x0, steps, step_size)
    density, x = Density(log_prob), x0
    net = Velocity(x.shape[1], hidden, torch.Generator().manual_seed(seed), x.dtype).to(x.device)
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

    Parameters
    ----------
    path
        From a normalised ``p0`` to the target; :func:`~assay.statistics.pgps.gaussian` makes one.
    x0
        Draws ``[n, d]`` of ``p0``.
    levels, moves, step_size
        Defaults 50, 10 and 0.01.
    """
    _check(x0, moves, step_size)
    if levels < 1:
        raise ValueError(f"levels must be at least 1, not {levels}")
    start = path.p0.calls + path.p1.calls
    x, log_w, evidence = x0, x0.new_zeros(len(x0)), 0.0
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
    if not math.isfinite(evidence) or not bool(x.isfinite().all()):
        raise FloatingPointError("the log evidence is not finite: the density must be finite wherever particles may go")
    return PGPSResult(x, log_w.softmax(0), evidence, ess_of(log_w), (), path.p0.calls + path.p1.calls - start)
