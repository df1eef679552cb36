"""Values, gradients, invariances and bad input of DHEL, KCL and the losses that they are compared with."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.representation.dhel import (
    IMQ,
    AlignUniformLoss,
    DCLLoss,
    DHELLoss,
    Gaussian,
    InfoNCELoss,
    KCLLoss,
    LogKernel,
    NTXentLoss,
    Riesz,
    dhel_loss,
    kcl_loss,
    ntxent_loss,
    simplex,
)

F64 = torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
LOSSES = [
    *(DHELLoss(variant=v) for v in ("official", "paper", "single")),
    *(KCLLoss(variant=v) for v in ("official", "paper", "single")),
    KCLLoss("log"),
    KCLLoss("imq"),
    KCLLoss("riesz", t=-1.0),
    KCLLoss("gaussian_riesz", t=1.0),
    InfoNCELoss(),
    NTXentLoss(),
    DCLLoss(),
    AlignUniformLoss(),
]
each_loss = pytest.mark.parametrize("loss", LOSSES, ids=repr)
TINY_U = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)
TINY_V = torch.tensor([[0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]], dtype=F64)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def device_of(name):
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return name


def literal(loss, u, v):
    """The definitions with Python loops over items."""
    u, v = (x / x.norm(dim=1, keepdim=True) for x in (u, v))
    m, o = len(u), loss.options
    items = range(m)

    def mean(values):
        return sum(values) / len(values)

    if isinstance(loss, KCLLoss):

        def energy(x):
            return mean([o["energy_kernel"]((x[i] - x[j]).square().sum()) for i, j in itertools.combinations(items, 2)])

        pull = mean([o["align_kernel"]((u[i] - v[i]).square().sum()) for i in items])
        full = -2 * pull + o["gamma"] * (energy(u) + energy(v))
        return {"official": full, "paper": full / 2, "single": -pull + o["gamma"] * energy(u)}[o["variant"]]
    if isinstance(loss, AlignUniformLoss):

        def spread(x):
            each = [torch.exp(-o["t"] * (x[i] - x[j]).square().sum()) for i, j in itertools.combinations(items, 2)]
            return mean(each).log()

        return mean([(u[i] - v[i]).norm() ** o["alpha"] for i in items]) + o["lam"] / 2 * (spread(u) + spread(v))
    tau = o["temperature"]

    def logs(x, y, skip, also=()):
        rows = []
        for i in items:
            terms = [(x[i] @ y[j] / tau).exp() for j in items if not (skip and i == j)]
            terms += [(x[i] @ z[j] / tau).exp() for z in also for j in items if j != i]
            rows.append(sum(terms).log())
        return mean(rows)

    pull = -mean([u[i] @ v[i] for i in items]) / tau
    if isinstance(loss, DHELLoss):
        w = loss.energy_weight
        return pull + w * (logs(u, u, True) + (0 if o["variant"] == "single" else logs(v, v, True)))
    if isinstance(loss, InfoNCELoss):
        return pull + (logs(u, v, False) + logs(v, u, False)) / 2
    skip = isinstance(loss, DCLLoss)
    return pull + (logs(u, v, skip, (u,)) + logs(v, u, skip, (v,))) / 2


@each_loss
@pytest.mark.parametrize("m", [2, 7])
def test_value_and_gradient_are_those_of_the_definition(loss, m):
    u, v = randn(m, 4).requires_grad_(), randn(m, 4, seed=1).requires_grad_()
    got, want = loss(u, v), literal(loss, u, v)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    for a, b in zip(torch.autograd.grad(got, (u, v)), torch.autograd.grad(want, (u, v))):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@each_loss
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_gradcheck(loss, chunk):
    u, v = randn(5, 3).requires_grad_(), randn(5, 3, seed=1).requires_grad_()
    options = loss._keywords() | {"chunk_size": chunk}
    assert torch.autograd.gradcheck(type(loss)(**options), (u, v))


def test_tiny_values():
    assert dhel_loss(TINY_U, TINY_V, 1.0).item() == pytest.approx(0.4495588607, abs=5e-9)
    assert dhel_loss(TINY_U, TINY_V, 1.0, "single").item() == pytest.approx(-0.4267764815, abs=5e-9)
    assert kcl_loss(TINY_U, TINY_V).item() == pytest.approx(1.2321911250, abs=1e-7)


def test_tiny_values_by_hand():
    """The same by exact arithmetic, since the literals above carry about eight digits."""
    e = math.exp
    pull = -(0.6 + 1 + 1) / 3
    energy_u = (2 * math.log(e(0) + e(-1)) + math.log(2 * e(0))) / 3
    energy_v = (math.log(e(0.8) + e(-0.6)) + math.log(e(0.8) + e(0)) + math.log(e(-0.6) + e(0))) / 3
    assert dhel_loss(TINY_U, TINY_V, 1.0).item() == pytest.approx(pull + energy_u + energy_v, abs=1e-12)
    k = lambda c: e(-2 * (2 - 2 * c))  # noqa: E731
    want = -2 * (k(0.6) + 2) / 3 + 16 * ((2 * k(0) + k(-1)) + (k(0.8) + k(-0.6) + k(0))) / 3
    assert kcl_loss(TINY_U, TINY_V).item() == pytest.approx(want, abs=1e-12)


def test_half_the_energy_weight_is_the_symmetric_form_of_the_paper():
    u, v = randn(9, 4), randn(9, 4, seed=1)
    symmetric = 0.5 * (dhel_loss(u, v, variant="single") + dhel_loss(v, u, variant="single"))
    torch.testing.assert_close(dhel_loss(u, v, energy_weight=0.5), symmetric, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(dhel_loss(u, v, variant="paper"), symmetric, rtol=1e-13, atol=1e-13)
    assert abs(dhel_loss(u, v) - symmetric) > 0.1
    torch.testing.assert_close(kcl_loss(u, v), 2 * kcl_loss(u, v, variant="paper"))
    torch.testing.assert_close(DCLLoss()(u, u), dhel_loss(u, u, variant="paper") + math.log(2))


def test_official_log_kernel_is_ours_with_half_the_gamma():
    u, v = randn(9, 4), randn(9, 4, seed=1)
    half = lambda r2: -0.5 * torch.log1p(2 * r2)  # noqa: E731
    official = kcl_loss(u, v, energy_kernel=half, align_kernel=LogKernel(2.0), gamma=16.0)
    torch.testing.assert_close(official, kcl_loss(u, v, "log", gamma=8.0))


@pytest.mark.parametrize("kernel", [Gaussian(1.5), LogKernel(3.0), IMQ(0.7), Riesz(1.5), Riesz(-0.5)])
def test_slopes_of_kernels_are_their_derivatives(kernel):
    r2 = torch.linspace(0.01, 4, 50, dtype=F64).requires_grad_()
    value = kernel(r2)
    (want,) = torch.autograd.grad(value.sum(), r2)
    got, slope = kernel.value_and_slope(r2.detach().clone())
    torch.testing.assert_close(got, value.detach())
    torch.testing.assert_close(slope, want)
    u, v = randn(6, 3).requires_grad_(), randn(6, 3, seed=1)
    own = [kcl_loss(u, v, k, Gaussian(), chunk_size=4) for k in (kernel, lambda r: kernel(r))]
    grads = [torch.autograd.grad(x, u)[0] for x in own]
    torch.testing.assert_close(own[0], own[1])
    torch.testing.assert_close(grads[0], grads[1])


def test_riesz_energy_of_equal_points_has_no_infinite_gradient():
    u = randn(4, 3)
    u[1] = u[0]
    u.requires_grad_()
    for options in ({"energy_kernel": "gaussian_riesz", "t": 1.0}, {"energy_kernel": "riesz", "t": -0.5}):
        (grad,) = torch.autograd.grad(kcl_loss(u, u, **options), u)
        assert torch.isfinite(grad).all()


def test_two_items_have_the_energy_of_their_cosine():
    u, v = randn(2, 5), randn(2, 5, seed=1)
    a, b = torch.nn.functional.normalize(u), torch.nn.functional.normalize(v)
    want = -(a * b).sum(1).mean() / 0.3 + a[0] @ a[1] / 0.3 + b[0] @ b[1] / 0.3
    torch.testing.assert_close(dhel_loss(u, v), want, rtol=1e-13, atol=1e-13)


def test_pull_is_decoupled():
    """The positive's gradient is -u_i/(tau M) in DHEL whatever the batch, and (1 - p_i) of that in NT-Xent."""
    tau, m = 0.3, 6
    u = torch.nn.functional.normalize(randn(m, 4))
    v = torch.nn.functional.normalize(randn(m, 4, seed=1)).requires_grad_()
    (full,) = torch.autograd.grad(dhel_loss(u, v, tau), v)
    (push,) = torch.autograd.grad(dhel_loss(v, v.detach().flip(0), tau, "single", check_finite=True), v)
    # energy of v alone, from the single variant with v as the anchor, whose own pull is known
    own = v.detach().flip(0)
    tangent = lambda g: g - (g * v.detach()).sum(1, keepdim=True) * v.detach()  # noqa: E731
    energy = push - tangent(-own / (tau * m))
    torch.testing.assert_close(full - energy, tangent(-u / (tau * m)), rtol=1e-10, atol=1e-12)

    z = torch.cat([u, v.detach()])
    logits = z @ z.T / tau
    logits.fill_diagonal_(-torch.inf)
    p = logits.softmax(1)
    i = 2
    for anchor, partner in ((i, i + m), (i + m, i)):
        w = z[partner].clone().requires_grad_()
        row = z[anchor] @ torch.cat([z[:partner], w[None], z[partner + 1 :]]).T / tau
        row = torch.cat([row[:anchor], row[anchor + 1 :]])
        (g,) = torch.autograd.grad(torch.logsumexp(row, 0) - z[anchor] @ w / tau, w)
        torch.testing.assert_close(g, -(1 - p[anchor, partner]) * z[anchor] / tau)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(2, 6), st.integers(0, 10**6), st.sampled_from(LOSSES))
def test_invariances(m, d, seed, loss):
    u, v = randn(m, d, seed=seed), randn(m, d, seed=seed + 1)
    value = loss(u, v)
    rotation = torch.linalg.qr(randn(d, d, seed=seed + 2)).Q
    order = torch.randperm(m, generator=torch.Generator().manual_seed(seed))
    scales = randn(m, 1, seed=seed + 3).exp()
    same = [loss(u @ rotation, v @ rotation), loss(u[order], v[order]), loss(u * scales, v * scales.flip(0))]
    if loss.options.get("variant") != "single":
        same.append(loss(v, u))
    for other in same:
        torch.testing.assert_close(other, value, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(1, 50), st.integers(0, 10**6), st.sampled_from(LOSSES))
def test_chunks_change_nothing(m, chunk, seed, loss):
    u, v = randn(m, 4, seed=seed).requires_grad_(), randn(m, 4, seed=seed + 1).requires_grad_()
    whole, parts = (type(loss)(**loss._keywords() | {"chunk_size": c})(u, v) for c in (m * 4, chunk))
    torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-10)
    for a, b in zip(torch.autograd.grad(parts, (u, v)), torch.autograd.grad(whole, (u, v))):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@each_loss
def test_minimum_is_no_larger_nearby(loss):
    best = simplex(5, 8)
    least = loss(best, best).item()
    for seed in range(20):
        for size in (1e-3, 0.1, 1.0):
            u, v = best + size * randn(5, 8, seed=seed), best + size * randn(5, 8, seed=seed + 50)
            assert loss(u, v).item() > least - 1e-12


@each_loss
@pytest.mark.parametrize("device", DEVICES)
def test_precisions_and_devices_agree(loss, device):
    device = device_of(device)
    u, v = randn(20, 8), randn(20, 8, seed=1)
    want = loss(u, v)
    for dtype, tolerance in ((F64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 2e-2)):
        got = loss(u.to(device, dtype).requires_grad_(), v.to(device, dtype))
        assert got.dtype == (F64 if dtype == F64 else torch.float32) and got.ndim == 0
        assert got.item() == pytest.approx(want.item(), rel=tolerance, abs=tolerance * 10)
    mixed = loss(u.float(), v)
    assert mixed.dtype == F64


@each_loss
def test_half_precision_at_a_small_temperature(loss):
    options = loss._keywords() | ({"temperature": 0.02} if "temperature" in loss.options else {})
    loss = type(loss)(**options)
    u = randn(16, 8).half().requires_grad_()
    v = (u.detach() + 0.1 * randn(16, 8, seed=1)).half()
    got, want = loss(u, v), loss(u.float(), v.float())
    assert torch.isfinite(got) and got.item() == pytest.approx(want.item(), abs=1e-2)
    got.backward()
    assert u.grad.dtype == torch.float16 and torch.isfinite(u.grad).all()


@each_loss
def test_autocast_computes_in_full_precision(loss):
    u, v = randn(16, 8, dtype=torch.float32), randn(16, 8, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = loss(u, v)
    assert inside.dtype == torch.float32 and inside.item() == loss(u, v).item()


@pytest.mark.parametrize("temperature", [0.001, 0.024, 0.026, 10.0])
def test_extreme_temperatures_keep_their_digits(temperature):
    """Below 0.025 the row maximum is needed, above it is not."""
    u, v = randn(30, 50, dtype=torch.float32), randn(30, 50, seed=1, dtype=torch.float32)
    for function in (dhel_loss, ntxent_loss):
        single, double = function(u, v, temperature), function(u.double(), v.double(), temperature)
        assert torch.isfinite(double) and single.item() == pytest.approx(double.item(), rel=1e-5)
    a, b = (torch.nn.functional.normalize(x.double()) for x in (u, v))
    energies = [torch.logsumexp((x @ x.T / temperature).fill_diagonal_(-torch.inf), 1).mean() for x in (a, b)]
    want = sum(energies) - (a * b).sum(1).mean() / temperature
    torch.testing.assert_close(dhel_loss(u.double(), v.double(), temperature), want, rtol=1e-12, atol=1e-12)


def test_rows_of_any_length_and_layout():
    u, v = randn(6, 4), randn(6, 4, seed=1)
    for scale in (1e-300, 1e300):
        torch.testing.assert_close(dhel_loss(u * scale, v), dhel_loss(u, v))
    tiny = (u * 1e-40).float()  # subnormal in float32
    assert torch.isfinite(dhel_loss(tiny, v.float()))
    torch.testing.assert_close(dhel_loss(randn(4, 6).T, v), dhel_loss(randn(4, 6).T.contiguous(), v))


def test_identical_and_duplicate_views_are_finite():
    u = randn(1, 4).expand(5, 4).clone().requires_grad_()
    for loss in LOSSES:
        (grad,) = torch.autograd.grad(loss(u, u), u)
        assert torch.isfinite(grad).all(), loss


@each_loss
def test_config_round_trip(loss):
    made = type(loss).from_config(json.loads(json.dumps(loss.to_config())))
    u, v = randn(6, 4), randn(6, 4, seed=1)
    assert torch.equal(made(u, v), loss(u, v)) and repr(made) == repr(loss)
    assert not list(loss.parameters()) and not loss.state_dict()


def test_configs_that_cannot_be():
    with pytest.raises(TypeError, match="kernel of one's own"):
        KCLLoss(lambda r2: -r2).to_config()
    with pytest.raises(ValueError, match="DHELLoss"):
        DHELLoss.from_config(KCLLoss().to_config())
    assert KCLLoss().to_config()["energy_kernel"] == {"name": "gaussian", "t": 2.0}
    assert "temperature=0.3" in repr(DHELLoss()) and "variant='official'" in repr(DHELLoss())


ONE, BAD = torch.ones(1, 3), torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: dhel_loss(ONE, ONE), ValueError, "at least 2 items per view"),
        (lambda: dhel_loss(torch.ones(0, 3), torch.ones(0, 3)), ValueError, "0 item"),
        (lambda: dhel_loss(torch.ones(2, 3), torch.ones(3, 3)), ValueError, r"got \(2, 3\) and \(3, 3\)"),
        (lambda: dhel_loss(torch.ones(2), torch.ones(2)), ValueError, "shape"),
        (lambda: dhel_loss(torch.ones(2, 0), torch.ones(2, 0)), ValueError, "shape"),
        (lambda: dhel_loss(torch.ones(2, 3).long(), torch.ones(2, 3)), TypeError, "floating"),
        (lambda: dhel_loss([[1.0]], torch.ones(2, 3)), TypeError, "out0 must be a torch tensor, got list"),
        (lambda: kcl_loss(BAD, BAD + 1), ValueError, "out0: row 1 is zero"),
        (lambda: kcl_loss(BAD + 1, BAD / 0), ValueError, "out1: row 0 holds NaN"),
        (lambda: DHELLoss(0.0), ValueError, "temperature must be positive"),
        (lambda: DHELLoss(float("nan")), ValueError, "temperature"),
        (lambda: DHELLoss("0.3"), TypeError, "temperature"),
        (lambda: NTXentLoss(-1.0), ValueError, "temperature"),
        (lambda: DHELLoss(variant="C"), ValueError, "variant must be one of official"),
        (lambda: DHELLoss(energy_weight=-1.0), ValueError, "energy_weight"),
        (lambda: DHELLoss(chunk_size=0), ValueError, "chunk_size"),
        (lambda: DHELLoss(chunk_size=2.5), TypeError, "chunk_size"),
        (lambda: KCLLoss(gamma=-1.0), ValueError, "gamma"),
        (lambda: KCLLoss(t=0.0), ValueError, "t must be positive"),
        (lambda: KCLLoss("riesz", t=0.0), ValueError, "s must not be 0"),
        (lambda: KCLLoss("riesz", t=1.0), ValueError, "s = 1 > 0"),
        (lambda: KCLLoss("gaussian", Riesz(1.0)), ValueError, "align_kernel"),
        (lambda: KCLLoss("cosine"), ValueError, "energy_kernel must be one of gaussian"),
        (lambda: KCLLoss("gaussian", "gaussian_riesz"), ValueError, "align_kernel"),
        (lambda: KCLLoss(3.0), TypeError, "energy_kernel"),
        (lambda: KCLLoss(lambda r2: 1.0), TypeError, "same shape"),
        (lambda: KCLLoss(torch.nn.Linear(2, 2)), ValueError, "trainable"),
        (lambda: KCLLoss({"name": "cubic"}), ValueError, "energy_kernel must name"),
        (lambda: Gaussian(-1.0), ValueError, "t must be positive"),
        (lambda: IMQ("2"), TypeError, "c must be a number"),
        (lambda: AlignUniformLoss(lam=-1.0), ValueError, "lam"),
        (lambda: AlignUniformLoss(alpha=0.0), ValueError, "alpha"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_unchecked_rows_pass():
    assert dhel_loss(BAD, BAD + 1, check_finite=False).isfinite()
