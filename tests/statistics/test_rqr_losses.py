"""Identities, gradients and population behaviour of the RQR losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from assay.statistics.rqr import (
    IntervalRegressionLoss,
    MeanCentredLoss,
    PinballPairLoss,
    RQRLoss,
    RQROrthogonalLoss,
    SimultaneousQuantileLoss,
    WinklerLoss,
    narrowest_quantile_pair,
    rqr_grad_hess,
    rqr_loss,
)
from assay.statistics.rqr.losses import dependence, rqr

numbers = st.floats(-50, 50, allow_nan=False, width=32)
levels = st.floats(0.05, 0.95)
penalties = st.floats(0, 30)


def by_definition(y, m1, m2, coverage, lam):
    """The loss in its first form: corrected level and a penalty on the width."""
    level, kappa = coverage + 2 * lam, (y - m1) * (y - m2)
    return np.maximum(level * kappa, (level - 1) * kappa) + lam / 2 * (m2 - m1) ** 2


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=20), levels, penalties)
def test_three_forms_of_the_loss_agree(rows, coverage, lam):
    y, m1, m2 = np.array(rows, dtype=np.float64).T
    got = rqr_loss(y, m1, m2, coverage, lam)
    scale = 1e-6 * (1 + np.abs(y) + np.abs(m1) + np.abs(m2)) ** 2 * (1 + lam)
    assert (np.abs(got - by_definition(y, m1, m2, coverage, lam)) <= scale).all()
    s, h = (m1 + m2) / 2, (m2 - m1) / 2
    u = (y - s) ** 2 - h**2
    third = np.maximum(coverage * u, (coverage - 1) * u) + 2 * lam * (y - s) ** 2
    assert (np.abs(got - third) <= scale).all()
    assert (got >= 0).all()
    np.testing.assert_array_equal(got, rqr_loss(y, m2, m1, coverage, lam))


@settings(max_examples=100, deadline=None)
@given(st.tuples(numbers, numbers, numbers), levels, penalties, st.floats(0.1, 10), st.floats(-20, 20))
def test_loss_scales_with_the_square_of_the_unit(row, coverage, lam, b, c):
    y, m1, m2 = np.array(row, dtype=np.float64)[:, None]
    plain = rqr_loss(y, m1, m2, coverage, lam)
    moved = rqr_loss(b * y + c, b * m1 + c, b * m2 + c, coverage, lam)
    np.testing.assert_allclose(moved, b**2 * plain, rtol=1e-6, atol=1e-6 * (1 + lam) * b**2 * 100)


def test_torch_and_numpy_and_both_precisions_agree():
    rng = np.random.default_rng(0)
    y, m1, m2 = rng.normal(size=(3, 1000))
    for lam in (0.0, 0.7, 20.0):
        want = rqr_loss(y, m1, m2, 0.8, lam)
        pred = torch.tensor(np.stack([m1, m2], 1))
        got = RQRLoss(0.8, lam, reduction="none")(pred, torch.tensor(y))
        np.testing.assert_allclose(got, want, rtol=1e-12)
        single = RQRLoss(0.8, lam)(pred.float(), torch.tensor(y).float()).item()
        assert single == pytest.approx(want.mean(), rel=1e-5)
    half = RQRLoss(0.8, 1.0)(pred.bfloat16(), torch.tensor(y).bfloat16())
    assert half.dtype == torch.bfloat16 and abs(half.item() / rqr_loss(y, m1, m2, 0.8, 1.0).mean() - 1) < 0.05


def test_lam_zero_is_plain_rqr_and_swapping_swaps_gradients():
    torch.manual_seed(0)
    pred = torch.randn(50, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(50, dtype=torch.float64)
    kappa = (y - pred[:, 0]) * (y - pred[:, 1])
    torch.testing.assert_close(RQRLoss(0.7)(pred, y), torch.maximum(0.7 * kappa, -0.3 * kappa).mean())
    (g,) = torch.autograd.grad(RQRLoss(0.7, 2.0)(pred, y), pred)
    swapped = pred.detach().flip(1).requires_grad_()
    (gs,) = torch.autograd.grad(RQRLoss(0.7, 2.0)(swapped, y), swapped)
    torch.testing.assert_close(gs.flip(1), g)


@pytest.mark.parametrize("lam", [0.0, 0.3, 5.0])
def test_gradients_have_the_closed_form(lam):
    rng = np.random.default_rng(1)
    y, m1, m2 = rng.normal(size=(3, 200))
    keep = np.abs((y - m1) * (y - m2)) > 1e-3
    y, m1, m2 = y[keep], m1[keep], m2[keep]
    pred = torch.tensor(np.stack([m1, m2], 1), requires_grad=True)
    target = torch.tensor(y)
    loss = RQRLoss(0.8, lam, reduction="none")
    assert torch.autograd.gradcheck(lambda p: loss(p, target), pred, eps=1e-7, atol=1e-5)
    (auto,) = torch.autograd.grad(loss(pred, target).sum(), pred)
    gradient, curvature = rqr_grad_hess(y, m1, m2, 0.8, lam)
    np.testing.assert_allclose(gradient, auto, rtol=1e-9, atol=1e-9)
    a = 0.8 + 2 * lam
    c = np.where((y - m1) * (y - m2) >= 0, a, a - 1)
    np.testing.assert_allclose(gradient[:, 0], -c * (y - m2) - lam * (m2 - m1))
    np.testing.assert_allclose(gradient[:, 1], -c * (y - m1) + lam * (m2 - m1))
    # The diagonal majorises the true Hessian of each smooth piece.
    for ci, di in zip(c, curvature):
        true = np.array([[lam, ci - lam], [ci - lam, lam]])
        assert np.linalg.eigvalsh(np.diag(di) - true).min() > -1e-9 and di.min() > 0


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_minimiser_on_a_sample_has_the_stationary_properties(lam, coverage):
    """Coverage does not depend on lam, and the midpoint follows from the mean inside."""
    rng = np.random.default_rng(3)
    n = 20_001
    y = rng.exponential(size=n)

    def mean_loss(v):
        return rqr_loss(y, np.full(n, v[0] - v[1]), np.full(n, v[0] + v[1]), coverage, lam).mean()

    start = [y.mean(), np.quantile(np.abs(y - y.mean()), coverage)]
    for _ in range(3):
        fit = optimize.minimize(
            mean_loss, start, method="Nelder-Mead", options={"xatol": 1e-12, "fatol": 1e-15, "maxiter": 4000}
        )
        start = fit.x
    s, h = fit.x
    inside = np.abs(y - s) <= abs(h) * (1 + 1e-9)
    assert abs(inside.mean() - coverage) <= 2 / n
    inner = y[inside].mean()
    if lam == 0:
        assert inner == pytest.approx(y.mean(), abs=1e-3)
    else:
        assert s == pytest.approx(y.mean() + coverage / (2 * lam) * (y.mean() - inner), abs=1e-3)


DISTRIBUTIONS = {
    "truncnorm": stats.truncnorm(-0.1, 5),
    "normal": stats.norm(scale=0.1),
    "exponential": stats.expon(),
    "lognormal(1)": stats.lognorm(1.0),
    "lognormal(.5)": stats.lognorm(0.5),
    "gamma(2)": stats.gamma(2),
}
# alpha, equal-tailed, then the width for lam = 0, 0.1, 1, 10, inf
TABLE = {
    "truncnorm": (0.8, 1.5719, 1.7126, 1.6333, 1.5198, 1.4850, 1.4802),
    "normal": (0.8, 0.2563, 0.2563, 0.2563, 0.2563, 0.2563, 0.2563),
    "exponential": (0.8, 2.1972, 2.9130, 2.4726, 2.0205, 1.8997, 1.8836),
    "lognormal(1)": (0.8, 3.3246, 6.5634, 4.3986, 3.1399, 2.8766, 2.8435),
    "lognormal(.5)": (0.8, 1.3711, 1.6088, 1.4698, 1.3281, 1.2955, 1.2914),
    "gamma(2)": (0.9, 4.3885, 5.0379, 4.3814, 3.9008, 3.8486, 3.8487),
}
LAMS = (0.0, 0.1, 1.0, 10.0, 1e6)


def best_width(y: np.ndarray, coverage: float, lam: float) -> float:
    """Width of the constant interval that minimises the mean loss: given s, h is a quantile of |y - s|."""

    def profile(s: float) -> float:
        h = np.quantile(np.abs(y - s), coverage)
        return rqr_loss(y, np.full_like(y, s - h), np.full_like(y, s + h), coverage, lam).mean()

    spread = y.std()
    s = optimize.minimize_scalar(
        profile, bounds=(y.mean() - spread, y.mean() + 5 * spread), method="bounded", options={"xatol": 1e-4 * spread}
    ).x
    return float(2 * np.quantile(np.abs(y - s), coverage))


@pytest.mark.parametrize("name", list(TABLE))
def test_population_widths(name):
    """Minimising the loss on 10^6 evenly spaced quantiles gives the widths known for the population within 1%."""
    coverage, equal, *widths = TABLE[name]
    n = 1_000_000 if name == "exponential" else 100_000
    y = DISTRIBUTIONS[name].ppf((np.arange(n) + 0.5) / n)
    tail = (1 - coverage) / 2
    assert np.quantile(y, 1 - tail) - np.quantile(y, tail) == pytest.approx(equal, rel=0.01)
    for lam, want in zip(LAMS, widths):
        assert best_width(y, coverage, lam) == pytest.approx(want, rel=0.01), lam


def test_official_widths_on_ten_thousand_draws():
    """Widths that the authors' code gives (truncated normal, coverage 0.8): RQR 1.7160, RQR-W(20) 1.4816, WS 1.5753."""
    y = DISTRIBUTIONS["truncnorm"].ppf((np.arange(10_000) + 0.5) / 10_000)
    assert best_width(y, 0.8, 0.0) == pytest.approx(1.7160, rel=0.015)
    assert best_width(y, 0.8, 20.0) == pytest.approx(1.4816, rel=0.015)
    assert np.quantile(y, 0.9) - np.quantile(y, 0.1) == pytest.approx(1.5753, rel=0.015)


def test_order_of_widths_on_right_skewed_noise():
    y = stats.expon.ppf((np.arange(20_000) + 0.5) / 20_000)
    shortest = np.quantile(y, 0.8)
    widths = [shortest, best_width(y, 0.8, 1e6), np.quantile(y, 0.9) - np.quantile(y, 0.1), best_width(y, 0.8, 0.0)]
    assert widths == sorted(widths) and len({round(w, 2) for w in widths}) == 4


def test_winkler_is_a_multiple_of_the_pinball_pair():
    torch.manual_seed(1)
    pred, y = torch.randn(100, 2).sort(1).values, torch.randn(100)
    torch.testing.assert_close(WinklerLoss(0.8)(pred, y), PinballPairLoss(0.8)(pred, y) * 2 / 0.2)


def test_mean_centred_loss_fits_mean_and_quantile_of_distance():
    y = torch.tensor(stats.expon.ppf((np.arange(5000) + 0.5) / 5000))
    v = torch.tensor([0.0, 0.5], dtype=torch.float64, requires_grad=True)
    step = torch.optim.Adam([v], lr=0.02)
    for _ in range(1500):
        step.zero_grad()
        MeanCentredLoss(0.8)(v.expand(5000, 2), y).backward()
        step.step()
    assert v[0].item() == pytest.approx(1.0, abs=0.02)
    assert 2 * v[1].item() == pytest.approx(1.8836, rel=0.02)


def test_sqr_loss_and_narrowest_pair():
    y, level = torch.tensor([1.0, 2.0]), torch.tensor([0.1, 0.9])
    out = torch.tensor([0.0, 0.0])
    torch.testing.assert_close(SimultaneousQuantileLoss("none")(out, y, level), torch.tensor([0.1, 1.8]))
    torch.testing.assert_close(SimultaneousQuantileLoss()(out[:, None], y, level), torch.tensor(0.95))
    q = torch.linspace(0, 0.1, 10, dtype=torch.float64)
    both = torch.as_tensor(stats.expon.ppf(torch.cat([q, q + 0.8999])))
    torch.testing.assert_close(narrowest_quantile_pair(both[None])[0], torch.stack([both[0], both[10]]))
    with pytest.raises(ValueError, match="20"):
        narrowest_quantile_pair(both[:-1])
    with pytest.raises(ValueError, match="level"):
        SimultaneousQuantileLoss()(out, y, level + 0.5)


def test_interval_regression_loss_by_hand():
    pred = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 1.0], [0.0, 1.0]])
    y = torch.tensor([0.5, 1.0, 5.0, -5.0])
    want = 4.0 / 2.001 + 2.0 * 4 / (0.9 * 0.1) * (0.9 - 0.5) ** 2
    assert IntervalRegressionLoss(0.9, 2.0)(pred, y).item() == pytest.approx(want, rel=1e-5)
    assert IntervalRegressionLoss(0.9, 0.0)(pred.expand(3, 4, 2), y.expand(3, 4)).item() == pytest.approx(4.0 / 2.001)


@pytest.mark.parametrize("penalty", ["hsic", "corr"])
def test_orthogonal_penalty_sees_dependence(penalty):
    rng = np.random.default_rng(0)
    half = torch.tensor(rng.choice([0.5, 1.5], 400))
    y = torch.tensor(rng.uniform(-1.5, 1.5, 400))
    dependent = torch.stack([-half, half], 1)
    free = torch.tensor(rng.choice([0.5, 1.5], 400))
    independent = torch.stack([y - free, y + free], 1)
    independent[::5] += 10.0  # a fifth of the targets missed, at either length
    strong, weak = (dependence(p, y, penalty, scale=1.0).item() for p in (dependent, independent))
    assert strong > 3 * weak
    # tr(LHKH) and Pearson's r as they are defined
    v = 0.5 * (1 + torch.tanh(50 * torch.minimum(y + half, half - y)))
    if penalty == "corr":
        want = abs(np.corrcoef(v, 2 * half)[0, 1])
    else:
        m = 400
        h = np.eye(m) - 1 / m
        k = np.exp(-(np.subtract.outer(v.numpy(), v.numpy()) ** 2))
        g = np.exp(-(np.subtract.outer(2 * half.numpy(), 2 * half.numpy()) ** 2))
        want = np.sqrt(np.trace(g @ h @ k @ h) / (m - 1) ** 2)
    assert strong == pytest.approx(want, rel=1e-6)
    pred = dependent.clone().requires_grad_()
    total = RQROrthogonalLoss(0.8, 0.5, penalty, scale=1.0)(pred, y)
    assert total.item() == pytest.approx(rqr(dependent, y, 0.8).mean().item() + 0.5 * strong, rel=1e-9)
    (grad,) = torch.autograd.grad(total, pred)
    assert torch.isfinite(grad).all()


def test_orthogonal_penalty_is_off_where_coverage_does_not_vary():
    y = torch.zeros(50)
    pred = torch.tensor([-1.0, 1.0]).expand(50, 2)
    assert dependence(pred, y).item() == 0.0
    assert dependence(pred[:1], y[:1]).item() == 0.0
    batched = dependence(torch.randn(3, 50, 2), torch.randn(3, 50))
    assert batched.shape == (3,)


def test_clipping_bounds_the_weight_of_an_outlier():
    y = torch.cat([torch.linspace(-1, 1, 999), torch.tensor([1e4])])
    pred = torch.tensor([-0.8, 0.8]).expand(1000, 2)
    plain, clipped = RQRLoss(0.9)(pred, y), RQRLoss(0.9, clip_quantile=0.998)(pred, y)
    assert plain > 1e4 and clipped < 1
    with pytest.raises(ValueError, match="clip_quantile"):
        RQRLoss(clip_quantile=1.5)


@pytest.mark.parametrize("loss", [RQRLoss(), PinballPairLoss(), WinklerLoss(), MeanCentredLoss()])
def test_shapes(loss):
    torch.manual_seed(0)
    pred, y = torch.randn(7, 2), torch.randn(7)
    torch.testing.assert_close(loss(pred, y[:, None]), loss(pred, y))
    strided = torch.randn(2, 7).T
    torch.testing.assert_close(loss(strided, y), loss(strided.contiguous(), y))
    assert loss(pred[:1], y[:1]).ndim == 0
    with pytest.raises(ValueError, match=r"\(7, 1\)"):
        loss(pred, torch.randn(1, 7))
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\), got \(7, 3\)"):
        loss(torch.randn(7, 3), y)
    with pytest.raises(ValueError, match="empty"):
        loss(torch.randn(0, 2), torch.randn(0))


def test_reductions():
    pred, y = torch.randn(7, 2), torch.randn(7)
    each = RQRLoss(reduction="none")(pred, y)
    torch.testing.assert_close(RQRLoss(reduction="sum")(pred, y), each.sum())
    torch.testing.assert_close(RQRLoss()(pred, y), each.mean())
    assert "coverage=0.9" in repr(RQRLoss())


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: RQRLoss(1.0), ValueError, "coverage"),
        (lambda: RQRLoss(0.0), ValueError, "coverage"),
        (lambda: RQRLoss("0.9"), TypeError, "coverage"),
        (lambda: RQRLoss(True), TypeError, "coverage"),
        (lambda: RQRLoss(0.9, -1.0), ValueError, "lam"),
        (lambda: RQRLoss(0.9, float("inf")), ValueError, "lam"),
        (lambda: RQRLoss(0.9, float("nan")), ValueError, "lam"),
        (lambda: RQRLoss(0.9, "auto"), TypeError, "lam"),
        (lambda: RQRLoss(reduction="avg"), ValueError, "reduction"),
        (lambda: RQROrthogonalLoss(gamma=-1), ValueError, "gamma"),
        (lambda: RQROrthogonalLoss(penalty="x"), ValueError, "penalty"),
        (lambda: RQROrthogonalLoss()(torch.zeros(2), torch.zeros(())), ValueError, "pred"),
        (lambda: IntervalRegressionLoss()(torch.zeros(2), torch.zeros(())), ValueError, "pred"),
        (lambda: rqr_loss([1.0, np.nan], [0.0, 0.0], [1.0, 1.0]), ValueError, "y holds NaN"),
        (lambda: rqr_loss([1.0], [[0.0]], [1.0]), ValueError, "lower must have shape"),
        (lambda: rqr_loss([], [], []), ValueError, "y is empty"),
        (lambda: rqr_loss(["a"], [0.0], [1.0]), TypeError, "y must hold numbers"),
        (lambda: rqr_loss([1], [0, 1], [1]), ValueError, "one length"),
    ],
)
def test_bad_input(make, error, words):
    with pytest.raises(error, match=words):
        make()
