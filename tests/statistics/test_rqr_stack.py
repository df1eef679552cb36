"""The stacked trainer does for each member what torch does for one network."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from assay.statistics.rqr import StackedMLP, fit_stack
from assay.statistics.rqr.losses import rqr
from assay.statistics.rqr.stack import ModuleStack, flush_denormals

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, no_gpu])]


def data(n=200, p=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(n, p, generator=g, dtype=dtype)
    return X, X[:, 0] + torch.randn(n, generator=g, dtype=dtype).exp()


def loss(out, y, _):
    return rqr(out, y.expand(out.shape[:-1]), 0.9, 1.0).mean(-1)


def as_module(net: StackedMLP, k: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for w, b in net.member(k):
        linear = nn.Linear(*w.shape, dtype=net.flat.dtype)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(w.T))
            linear.bias.copy_(torch.tensor(b))
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.parametrize("hidden", [(), (8,), (8, 5), (6, 7, 4)])
@pytest.mark.parametrize("device", DEVICES)
def test_training_equals_torch_adam_on_each_member(hidden, device):
    X, y = data()
    net = StackedMLP(3, hidden, seeds=[1, 2, 3], lr=[0.01, 0.02, 0.03], dtype=torch.float64, device=device)
    modules = [as_module(net, k) for k in range(3)]
    fit_stack(net, X.to(device), y.to(device), loss, epochs=20)
    for module, lr, k in zip(modules, [0.01, 0.02, 0.03], range(3)):
        step = torch.optim.Adam(module.parameters(), lr=lr)
        for _ in range(20):
            step.zero_grad()
            rqr(module(X), y, 0.9, 1.0).mean().backward()
            step.step()
        torch.testing.assert_close(module(X), net(X.to(device))[k].cpu(), rtol=1e-7, atol=1e-9)


def test_members_do_not_see_each_other():
    X, y = data(dtype=torch.float32)
    together = StackedMLP(3, seeds=[5, 6], dropout=0.0)
    fit_stack(together, X, y, loss, epochs=30, batch_size=64, seed=9)
    alone = StackedMLP(3, seeds=[6], dropout=0.0)
    fit_stack(alone, X, y, loss, epochs=30, batch_size=64, seed=9)
    torch.testing.assert_close(together(X)[1], alone(X)[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rates", [0.3, (0.0, 0.2, 0.5)])
def test_dropout_gradient_and_rate(rates):
    """With the masks of one step fixed, the written-out gradient is that of autograd; units drop at the asked rate."""
    X, _ = data(n=500)
    net = StackedMLP(3, (40, 30), seeds=[1, 2, 3], dropout=rates, dtype=torch.float64)
    out = net.train_forward(X, torch.Generator().manual_seed(0))
    masks = []
    h = X.expand(3, -1, -1)
    for (w, b), kept in zip(list(zip(net.weights, net.biases))[:-1], net._inputs[1:]):
        z = torch.relu(torch.baddbmm(b, h, w))
        masks.append(torch.where(z > 0, kept / z.clamp_min(1e-300), 0.0))
        h = kept
    for k, p in enumerate(net.dropout):
        active = masks[0][k][net._inputs[0][k] @ net.weights[0][k] + net.biases[0][k] > 0]
        assert (active == 0).double().mean().item() == pytest.approx(p, abs=0.02)
        assert active.max().item() == pytest.approx(1 / (1 - p))
    seed_grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    net.backward(seed_grad)
    flat = net.flat.clone().requires_grad_()
    weights, biases = net._views(flat, list(zip(net.sizes[:-1], net.sizes[1:])))
    h = X.expand(3, -1, -1)
    for i in range(2):
        h = torch.relu(torch.baddbmm(biases[i], h, weights[i])) * masks[i]
    (torch.baddbmm(biases[2], h, weights[2]) * seed_grad).sum().backward()
    torch.testing.assert_close(flat.grad, net.grad)
    evaluated = net(X)
    torch.testing.assert_close(evaluated, net(X))


def test_masks_differ_between_members_layers_and_steps():
    X, _ = data(n=100)
    net = StackedMLP(3, (16, 16), seeds=[1, 1], dropout=0.5, dtype=torch.float64)
    g = torch.Generator().manual_seed(0)
    a = net.train_forward(X, g).clone()
    b = net.train_forward(X, g).clone()
    assert not torch.equal(a[0], a[1]) and not torch.equal(a, b)
    # Over many draws a unit is dropped half of the time wherever it is.
    kept = sum((net.train_forward(X, g), (net._inputs[1] > 0).double())[1] for _ in range(200))
    possible = (X @ net.weights[0][0] + net.biases[0][0] > 0).double()
    rate = (kept[0] / 200)[possible > 0]
    assert abs(rate.mean().item() - 0.5) < 0.01 and rate.std().item() < 0.06


def test_same_seed_same_fit_and_batches_cover_all_rows():
    X, y = data(n=103, dtype=torch.float32)
    fits = []
    for _ in range(2):
        net = StackedMLP(3, seeds=[0, 1], dropout=0.2)
        fit_stack(net, X, y, loss, epochs=5, batch_size=20, seed=4)
        fits.append(net.flat.clone())
    torch.testing.assert_close(fits[0], fits[1], rtol=0, atol=0)
    seen = []
    net = StackedMLP(3, seeds=[0])

    def draw(Xb, yb, generator):
        seen.append(yb)
        return Xb, yb, None

    fit_stack(net, X, y, loss, epochs=1, batch_size=20, draw=draw)
    assert [len(s) for s in seen] == [20] * 5 + [3]
    torch.testing.assert_close(torch.cat(seen).sort().values, y.sort().values)


def test_objective_gives_each_member_its_best_epoch():
    X, y = data(dtype=torch.float32)
    net = StackedMLP(3, seeds=[0, 1])
    states, values = [], iter([[3.0, 1.0], [math.nan, 2.0], [1.0, math.nan], [2.0, 0.5]])

    def objective(stack):
        states.append(stack.flat.clone())
        return torch.tensor(next(values))

    fitted = fit_stack(net, X, y, loss, epochs=4, objective=objective)
    assert fitted.epoch.tolist() == [2, 3] and fitted.objective.tolist() == [1.0, 0.5]
    assert torch.equal(net.flat[0], states[2][0]) and torch.equal(net.flat[1], states[3][1])


def test_modules_train_like_the_stack():
    X, y = data()
    net = StackedMLP(3, (8, 5), seeds=[1, 2], dtype=torch.float64)
    other = ModuleStack([as_module(net, 0), as_module(net, 1)], lr=0.01)
    kept = []

    def objective(stack):
        kept.append(stack(X).clone())
        return torch.tensor([float(len(kept)), -float(len(kept))])

    fit_stack(other, X, y, loss, epochs=10, objective=objective)
    fit_stack(net, X, y, loss, epochs=10)
    torch.testing.assert_close(other(X)[1], net(X)[1], rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(other(X)[0], kept[0][0])
    with pytest.raises(ValueError, match="parameters"):
        ModuleStack([nn.ReLU()])


def test_levels_as_an_input_fit_quantiles():
    """Simultaneous quantiles through ``draw``: the fitted levels come out near those of the exponential."""
    g = torch.Generator().manual_seed(0)
    y = torch.empty(2000).exponential_(generator=g)
    X = torch.ones(2000, 1)

    def draw(Xb, yb, generator):
        q = torch.rand(len(yb), generator=generator)
        return torch.cat([Xb, q[:, None]], 1), yb, q

    def pinball(out, yb, q):
        r = yb - out[..., 0]
        return torch.maximum(q * r, (q - 1) * r).mean(-1)

    net = StackedMLP(2, (32, 32), 1, seeds=[0], out_bias=(0.0,))
    fit_stack(net, X, y, pinball, epochs=300, draw=draw)
    levels = torch.tensor([0.1, 0.5, 0.9])
    got = net(torch.stack([torch.ones(3), levels], 1))[0, :, 0]
    torch.testing.assert_close(got, -torch.log1p(-levels), rtol=0.1, atol=0.06)


@pytest.mark.parametrize("before", [False, True])
def test_flush_mode_is_set_back(before):
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    torch.set_flush_denormal(before)
    try:
        with flush_denormals():
            assert (tiny * 0.5).item() == 0
        assert ((tiny * 0.5).item() == 0) is before
        with pytest.raises(KeyError), flush_denormals():
            raise KeyError
        assert ((tiny * 0.5).item() == 0) is before
    finally:
        torch.set_flush_denormal(False)


def test_divergence_is_an_error():
    X, y = data(dtype=torch.float32)

    def broken(out, yb, _):
        return (out * math.nan).sum((-1, -2))

    with pytest.raises(FloatingPointError, match="lr"):
        fit_stack(StackedMLP(3, seeds=[0, 1]), X, y, broken, epochs=1)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StackedMLP(3, (0,)), "positive"),
        (lambda: StackedMLP(3, seeds=[]), "seeds"),
        (lambda: StackedMLP(3, out_bias=(0.0,)), "out_bias"),
        (lambda: StackedMLP(3, dropout=1.0), "dropout"),
        (lambda: StackedMLP(3, dropout=[0.1, 0.1]), "dropout"),
        (lambda: StackedMLP(3, lr=-1.0), "lr"),
        (lambda: fit_stack(StackedMLP(3), torch.zeros(0, 3), torch.zeros(0), loss), "n > 0"),
        (lambda: fit_stack(StackedMLP(3), torch.zeros(4, 3), torch.zeros(4, 1), loss), "y"),
        (lambda: fit_stack(StackedMLP(3), torch.zeros(4, 3), torch.zeros(4), loss, epochs=0), "epochs"),
        (lambda: fit_stack(StackedMLP(3), torch.zeros(4, 3), torch.zeros(4), loss, batch_size=0), "batch_size"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_start_is_orthogonal_and_reproducible():
    net = StackedMLP(5, (64, 64), seeds=[7, 7, 8])
    w = net.weights[1][0].double()
    torch.testing.assert_close(w.T @ w, torch.eye(64, dtype=torch.float64), atol=1e-5, rtol=0)
    assert torch.equal(net.flat[0], net.flat[1]) and not torch.equal(net.flat[0], net.flat[2])
    assert net.member(0)[-1][1].tolist() == [-0.5, 0.5] and not np.any(net.member(0)[0][1])
