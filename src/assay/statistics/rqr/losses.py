"""Interval losses for any torch network.

Every loss takes ``pred`` of shape (..., 2) and ``target`` of shape (...) or (..., 1), and is batched: all axes but the
last of ``pred`` index samples. The functions give one value per sample (or, for losses of a whole batch, one value per
leading index); the modules reduce.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from assay.statistics.rqr.formulas import check_coverage, check_lam

Reduction = Literal["mean", "sum", "none"]


def _aligned(pred: Tensor, target: Tensor, last: int = 2) -> Tensor:
    """The target in the shape ``pred.shape[:-1]``; never by broadcasting (n,) with (n, 1)."""
    if pred.ndim < 1 or pred.shape[-1] != last:
        raise ValueError(f"pred must have shape (..., {last}), got {tuple(pred.shape)}")
    want = pred.shape[:-1]
    if target.shape == want:
        out = target
    elif target.shape == (*want, 1):
        out = target.squeeze(-1)
    else:
        raise ValueError(
            f"target must have shape {tuple(want)} or {(*want, 1)} for pred of shape {tuple(pred.shape)}, "
            f"got {tuple(target.shape)}"
        )
    if pred.numel() == 0:
        raise ValueError("pred and target are empty")
    return out


def _reduce(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss


def _check_reduction(reduction: str) -> str:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return reduction


def rqr(pred: Tensor, target: Tensor, coverage: float, lam: float | Tensor = 0.0) -> Tensor:
    """RQR-W loss of each sample: ``max(coverage k, (coverage-1) k) + 2 lam (y - midpoint)^2``, ``k = (y-m1)(y-m2)``.

    Equal to ``max(a k, (a-1) k) + lam/2 (m2-m1)^2`` with the corrected level ``a = coverage + 2 lam``, in a form that
    loses no digits when ``lam`` is large. ``lam`` may be a tensor that broadcasts to the samples (one penalty for each
    model of a stack). ``pred`` is (..., 2), the result (...).
    """
    y = _aligned(pred, target)
    m1, m2 = pred[..., 0], pred[..., 1]
    kappa = (y - m1) * (y - m2)
    return torch.maximum(coverage * kappa, (coverage - 1.0) * kappa) + 2.0 * lam * (y - 0.5 * (m1 + m2)) ** 2


def pinball(pred: Tensor, target: Tensor, level: float | Tensor) -> Tensor:
    """Pinball loss ``max(q r, (q-1) r)``, ``r = target - pred``, of each element."""
    r = target - pred
    return torch.maximum(level * r, (level - 1.0) * r)


def pinball_pair(pred: Tensor, target: Tensor, coverage: float) -> Tensor:
    """Pinball losses at ``(1-coverage)/2`` and ``(1+coverage)/2``, summed, of each sample."""
    y = _aligned(pred, target)
    tail = 0.5 * (1.0 - coverage)
    return pinball(pred[..., 0], y, tail) + pinball(pred[..., 1], y, 1.0 - tail)


def winkler(pred: Tensor, target: Tensor, coverage: float) -> Tensor:
    """Winkler (interval) score: width plus ``2/(1-coverage)`` times the distance of a target outside."""
    y = _aligned(pred, target)
    lower, upper = pred[..., 0], pred[..., 1]
    return (upper - lower) + (2.0 / (1.0 - coverage)) * (torch.relu(lower - y) + torch.relu(y - upper))


def mean_centred(pred: Tensor, target: Tensor, coverage: float) -> Tensor:
    """``(y-m)^2`` plus the pinball loss of ``h`` as the ``coverage`` quantile of ``|y-m|``; ``pred`` holds (m, h).

    No gradient flows from the second term into ``m``: it is the limit ``lam -> infinity`` of RQR-W.
    """
    y = _aligned(pred, target)
    m, h = pred[..., 0], pred[..., 1]
    return (y - m) ** 2 + pinball(h, (y - m).abs().detach(), coverage)


def interval_regression(
    pred: Tensor, target: Tensor, coverage: float, lam: float | Tensor, softness: float = 160.0
) -> Tensor:
    """Quality-driven loss of a batch: mean width of the intervals that hold their target, plus a coverage penalty.

    ``sum(k w)/(sum k + 0.001) + lam n/(coverage (1-coverage)) relu(coverage - mean soft)^2`` with the indicator ``k``
    and ``soft = sigmoid(softness (upper-y)) sigmoid(softness (y-lower))``. The samples are the last axis of the target:
    ``pred`` (..., n, 2) gives (...).
    """
    y = _aligned(pred, target)
    lower, upper = pred[..., 0], pred[..., 1]
    inside = ((y >= lower) & (y <= upper)).to(pred.dtype)
    soft = torch.sigmoid(softness * (upper - y)) * torch.sigmoid(softness * (y - lower))
    captured = (inside * (upper - lower)).sum(-1) / (inside.sum(-1) + 0.001)
    short = torch.relu(coverage - soft.mean(-1))
    return captured + lam * y.shape[-1] / (coverage * (1.0 - coverage)) * short**2


def dependence(
    pred: Tensor,
    target: Tensor,
    penalty: Literal["hsic", "corr"] = "hsic",
    *,
    scale: float = 100.0,
    max_rows: int = 512,
) -> Tensor:
    """Dependence between interval length and smoothed coverage over the last axis of samples.

    ``v = (1 + tanh(50 min(y-lower, upper-y)))/2`` and ``l = upper - lower``, with targets and bounds multiplied by
    ``scale`` first. ``"corr"``: ``|Pearson correlation(v, l)|``; ``"hsic"``: ``sqrt(tr(L H K H))/(m-1)`` with Gaussian
    kernels ``exp(-(difference)^2)`` over the first ``max_rows`` samples. 0 where ``max v - min v <= 0.05``.
    ``pred`` (..., n, 2) gives (...).
    """
    y = _aligned(pred, target) * scale
    bounds = pred * scale
    lower, upper = bounds.amin(-1), bounds.amax(-1)
    v = 0.5 * (1.0 + torch.tanh(50.0 * torch.minimum(y - lower, upper - y)))
    length = upper - lower
    if penalty == "hsic":
        v, length = v[..., :max_rows], length[..., :max_rows]
    m = v.shape[-1]
    spread = v.detach().amax(-1) - v.detach().amin(-1) > 0.05
    if m < 2:
        return torch.zeros_like(v[..., 0])
    if penalty == "corr":
        vc, lc = v - v.mean(-1, keepdim=True), length - length.mean(-1, keepdim=True)
        norm = (vc.square().sum(-1) * lc.square().sum(-1)).clamp_min(1e-12).sqrt()
        value = ((vc * lc).sum(-1) / norm).abs()
    else:
        k = torch.exp(-((v[..., :, None] - v[..., None, :]) ** 2))
        g = torch.exp(-((length[..., :, None] - length[..., None, :]) ** 2))
        # Centring one factor is enough: tr(L H K H) = sum(L * (H K H)), H symmetric and idempotent.
        k = k - k.mean(-1, keepdim=True)
        k = k - k.mean(-2, keepdim=True)
        value = ((g * k).sum((-1, -2)) / (m - 1) ** 2).clamp_min(1e-12).sqrt()
    return torch.where(spread, value, torch.zeros_like(value))


def narrowest_quantile_pair(quantiles: Tensor, steps: int = 10) -> Tensor:
    """Of ``steps`` candidate intervals of each sample, the narrowest.

    Parameters
    ----------
    quantiles
        Shape (..., 2 steps): lower quantiles at ``linspace(0, 1 - coverage, steps)``, then those ``coverage`` higher.
    steps
        Number of candidates.

    Returns
    -------
    Shape (..., 2): lower and upper bound. The choice uses predictions only, never targets. It favours widths that came
    out too small by chance, so it under-covers until it is corrected conformally.
    """
    if quantiles.shape[-1] != 2 * steps:
        raise ValueError(f"quantiles must have shape (..., {2 * steps}), got {tuple(quantiles.shape)}")
    low, high = quantiles[..., :steps], quantiles[..., steps:]
    best = (high - low).argmin(-1, keepdim=True)
    return torch.cat([low.gather(-1, best), high.gather(-1, best)], -1)


class RQRLoss(nn.Module):
    """Relaxed quantile regression for a network with two outputs, the bounds of an interval.

    ``max(a k, (a-1) k) + lam/2 (m2-m1)^2`` with ``k = (y-m1)(y-m2)`` and ``a = coverage + 2 lam``. The loss fixes the
    coverage, not the quantiles that the bounds are. It equals plain RQR plus ``2 lam (y - midpoint)^2``: with a large
    ``lam`` the interval is centred at the conditional mean, which on skewed noise is narrower than the equal-tailed
    one. It is in general not the shortest interval, and with ``lam=0`` it is wider than the equal-tailed one.

    Parameters
    ----------
    coverage
        Share of targets inside, in (0, 1). Default 0.9.
    lam
        Penalty >= 0, without unit: the best intervals do not change when targets are rescaled.
    reduction
        "mean" (as in the paper), "sum" or "none".
    clip_quantile
        If given (0.999, say), samples whose ``|k|`` exceeds this quantile of the batch are weighted down to it. For
        heavy tails; off by default.

    Notes
    -----
    The loss is quadratic in ``y``: divide targets by a scale, or the learning rate means nothing. Do not start a
    network with equal constant outputs: ``m1 = m2`` is a saddle, at which the gradient keeps the width at zero. Give
    the last layer the bias ``(-0.5, 0.5)``, as :class:`RQRRegressor` does. The outputs may come out swapped; sort them
    when predicting, never inside the loss.

    Pouplin et al., ICML 2024, sections 3 and 4.

    Examples
    --------
    >>> import torch
    >>> loss = RQRLoss(coverage=0.9, lam=1.0)
    >>> round(loss(torch.tensor([[0.0, 2.0]]), torch.tensor([3.0])).item(), 3)
    10.7
    """

    def __init__(
        self,
        coverage: float = 0.9,
        lam: float = 0.0,
        reduction: Reduction = "mean",
        clip_quantile: float | None = None,
    ) -> None:
        super().__init__()
        self.coverage, self.lam = check_coverage(coverage), check_lam(lam)
        self.reduction = _check_reduction(reduction)
        if clip_quantile is not None and not 0 < clip_quantile < 1:
            raise ValueError(f"clip_quantile must be None or lie in (0, 1), got {clip_quantile!r}")
        self.clip_quantile = clip_quantile

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., 2), ``target`` (...) or (..., 1)."""
        loss = rqr(pred, target, self.coverage, self.lam)
        if self.clip_quantile is not None:
            y = _aligned(pred, target)
            size = ((y - pred[..., 0]) * (y - pred[..., 1])).detach().abs()
            limit = torch.quantile(size.flatten().double(), self.clip_quantile).to(size.dtype)
            loss = loss * torch.where(size > limit, limit / size, torch.ones_like(size))
        return _reduce(loss, self.reduction)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return f"coverage={self.coverage}, lam={self.lam}, reduction={self.reduction!r}"


class RQROrthogonalLoss(nn.Module):
    """RQR with a penalty on the dependence between interval length and coverage (RQR-O), for conditional coverage.

    ``mean RQR loss + gamma R``, see :func:`dependence` for ``R``. Targets should be of order one: the smoothing of the
    coverage has a fixed width in their unit.

    Parameters
    ----------
    coverage
        Share of targets inside, in (0, 1).
    gamma
        Weight >= 0 of the penalty. The authors' runs use 0.01 to 1; 0.1 on most data sets.
    penalty
        "hsic" (the authors' choice; the first 512 rows of a batch, so shuffle) or "corr".

    Notes
    -----
    In the authors' code the network is also given ``coverage`` as an input; append a column to the features to do so.
    Pouplin et al., ICML 2024, section 4, after Feldman et al., "Improving conditional coverage via orthogonal quantile
    regression", NeurIPS 2021.
    """

    def __init__(
        self,
        coverage: float = 0.9,
        gamma: float = 0.1,
        penalty: Literal["hsic", "corr"] = "hsic",
        *,
        scale: float = 100.0,
    ) -> None:
        super().__init__()
        self.coverage = check_coverage(coverage)
        if not gamma >= 0:
            raise ValueError(f"gamma must be >= 0, got {gamma!r}")
        if penalty not in ("hsic", "corr"):
            raise ValueError(f"penalty must be 'hsic' or 'corr', got {penalty!r}")
        self.gamma, self.penalty, self.scale = float(gamma), penalty, float(scale)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., n, 2), ``target`` (..., n): a scalar, the mean over leading axes."""
        if pred.ndim < 2:
            raise ValueError(f"pred must have shape (..., n, 2), got {tuple(pred.shape)}")
        loss = rqr(pred, target, self.coverage).mean(-1)
        penalty = dependence(pred, target, self.penalty, scale=self.scale)
        return (loss + self.gamma * penalty).mean()


class PinballPairLoss(nn.Module):
    """Pinball losses of the two equal-tailed quantiles: ordinary quantile regression with two heads.

    ``pred`` (..., 2) holds the quantiles at ``(1-coverage)/2`` and ``(1+coverage)/2``.
    """

    def __init__(self, coverage: float = 0.9, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.coverage, self.reduction = check_coverage(coverage), _check_reduction(reduction)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., 2), ``target`` (...) or (..., 1)."""
        return _reduce(pinball_pair(pred, target, self.coverage), self.reduction)


class WinklerLoss(nn.Module):
    """Winkler (interval) score as a loss: ``width + 2/(1-coverage) * distance outside``.

    ``2/(1-coverage)`` times the pinball pair loss. As in the usual form of the score, ``pred`` is (lower, upper) in
    this order; crossed bounds give a negative width and pay for it outside.
    """

    def __init__(self, coverage: float = 0.9, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.coverage, self.reduction = check_coverage(coverage), _check_reduction(reduction)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., 2), ``target`` (...) or (..., 1)."""
        return _reduce(winkler(pred, target, self.coverage), self.reduction)


class MeanCentredLoss(nn.Module):
    """The limit of RQR-W for a large penalty: a mean by squared error, and a quantile of the distance from it.

    ``pred`` (..., 2) holds ``(m, h)``; the interval is ``m - h, m + h``. See :func:`mean_centred`.
    """

    def __init__(self, coverage: float = 0.9, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.coverage, self.reduction = check_coverage(coverage), _check_reduction(reduction)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., 2), ``target`` (...) or (..., 1)."""
        return _reduce(mean_centred(pred, target, self.coverage), self.reduction)


class IntervalRegressionLoss(nn.Module):
    """Quality-driven interval regression (IR): mean captured width and a penalty for missing coverage.

    See :func:`interval_regression`. A whole batch enters, so the batch should have at least a few hundred rows.

    Parameters
    ----------
    coverage
        Share of targets inside, in (0, 1).
    lam
        Weight >= 0 of the penalty; 15 is the default of Pearce et al., "High-quality prediction intervals for deep
        learning", ICML 2018, from where the loss is.
    softness
        Steepness of the smoothed indicator, in 1/target unit; 160 there, for targets of order one.
    """

    def __init__(self, coverage: float = 0.9, lam: float = 15.0, softness: float = 160.0) -> None:
        super().__init__()
        self.coverage, self.lam, self.softness = check_coverage(coverage), check_lam(lam), float(softness)

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        """``pred`` (..., n, 2), ``target`` (..., n): a scalar, the mean over leading axes."""
        if pred.ndim < 2:
            raise ValueError(f"pred must have shape (..., n, 2), got {tuple(pred.shape)}")
        return interval_regression(pred, target, self.coverage, self.lam, self.softness).mean()


class SimultaneousQuantileLoss(nn.Module):
    """Simultaneous quantile regression (SQR): one output, trained at random levels that the network gets as an input.

    ``pred`` (...) or (..., 1) is the network's output for features with the level appended, ``target`` and ``level``
    have shape (...). Draw new levels from U(0, 1) at every step. Tagasovska and Lopez-Paz, "Single-model uncertainties
    for deep learning", NeurIPS 2019.
    """

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.reduction = _check_reduction(reduction)

    def forward(self, pred: Tensor, target: Tensor, level: Tensor) -> Tensor:
        """Pinball loss of each sample at its own level."""
        y = _aligned(pred.reshape(*level.shape, 1), target, last=1)
        if bool(((level < 0) | (level > 1)).any()):
            raise ValueError("level must lie in [0, 1]")
        return _reduce(pinball(pred.reshape(level.shape), y, level), self.reduction)
