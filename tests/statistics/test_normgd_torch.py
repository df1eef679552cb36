"""NormGD as a torch optimizer: groups, state, schedulers, dtypes, devices, refusals."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from assay.statistics import NormGD

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _skip_cuda(request):
    if request.node.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("no GPU")


def quartic(*params):
    return lambda backward=False: sum((p.double() ** 2).sum() for p in params) ** 2


def vector(*values, dtype=torch.float64, device="cpu"):
    return torch.tensor(values, dtype=dtype, device=device, requires_grad=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("eig", ["power", "exact"])
@pytest.mark.parametrize(("dtype", "rel"), [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_contraction_in_every_dtype(device, eig, dtype, rel):
    a, b = (vector(*v, dtype=dtype, device=device) for v in ([1.0, -0.5], [0.4, 0.2]))
    start = float(quartic(a, b)().detach()) ** 0.25
    optimizer = NormGD([a, b], lr=1.0, eig=eig)
    for _ in range(6):
        loss = optimizer.step(quartic(a, b))
    assert not loss.requires_grad and a.grad is None
    raised = 1.05 if eig == "power" else 1.0
    end = float(quartic(a, b)().detach()) ** 0.25
    assert end == pytest.approx(start * (1 - 1 / (3 * raised)) ** 6, rel=rel)


def test_parameters_of_several_shapes_dtypes_and_strides_are_one_vector():
    flat = vector(*np.linspace(-1, 1, 12))
    weight = torch.linspace(-1, 1, 12, dtype=torch.float64)[:8].reshape(2, 4).t().contiguous().t()
    weight = weight.requires_grad_()
    rest = vector(*np.linspace(-1, 1, 12)[8:])
    assert not weight.is_contiguous()

    def loss(x):
        return (x**4).sum() + (x[0] * x[11]) ** 2

    one, many = NormGD([flat], eig="exact"), NormGD([weight, rest], eig="exact")
    for _ in range(5):
        one.step(lambda: loss(flat))
        many.step(lambda: loss(torch.cat([weight.reshape(-1), rest])))
    joined = torch.cat([weight.reshape(-1), rest])
    torch.testing.assert_close(joined, flat, rtol=1e-12, atol=1e-14)
    low, high = vector(1.0, 2.0, dtype=torch.float32), vector(0.5)
    mixed = NormGD([low, high])
    before = float(quartic(low, high)().detach())
    for _ in range(4):
        mixed.step(quartic(low, high))
    assert low.dtype == torch.float32 and high.dtype == torch.float64
    assert mixed.state[low]["eigenvector"].dtype == torch.float32 and float(quartic(low, high)().detach()) < before / 2


def test_groups_decay_and_maximize():
    # Own eigenvalues for each group: curvatures 2 and 200 are both solved in a step with lr 1.
    p, q = vector(1.0), vector(1.0)
    NormGD([{"params": [p]}, {"params": [q]}], lr=1.0, eig="exact", per_group=True).step(
        lambda: (p * p + 100 * q * q).sum()
    )
    assert abs(p.item()) < 1e-12 and abs(q.item()) < 1e-12
    # One eigenvalue for all, own lr and decay for each group.
    p, q = vector(1.0), vector(1.0)
    NormGD([{"params": [p], "weight_decay": 0.1}, {"params": [q], "lr": 1.0}], eig="exact").step(
        lambda: (p * p + 100 * q * q).sum()
    )
    assert p.item() == pytest.approx(0.95 - 0.5 * 2 / 200) and abs(q.item()) < 1e-12
    p, q = vector(0.3, 0.4), vector(0.3, 0.4)
    NormGD([p], eig="exact", maximize=True).step(lambda: -((p @ p) ** 2))
    NormGD([q], eig="exact").step(lambda: (q @ q) ** 2)
    torch.testing.assert_close(p, q)


def test_frozen_unused_and_added_parameters():
    frozen, unused, used = torch.ones(2).double(), vector(1.0, 1.0), vector(0.5, -0.5)
    optimizer = NormGD([frozen, unused, used], eig="exact", weight_decay=0.5)
    optimizer.step(lambda: (frozen @ used**2) ** 2)  # |x|^4
    assert frozen.tolist() == [1, 1] and unused.tolist() == [1, 1] and unused not in optimizer.state
    assert used[0].item() == pytest.approx(0.5 * 0.75 - 0.5 * 0.5 / 3)
    late = vector(2.0)
    optimizer = NormGD([used])
    optimizer.step(quartic(used))
    optimizer.add_param_group({"params": [late], "lr": 1.0})
    for _ in range(30):
        optimizer.step(quartic(used, late))
    assert float(quartic(used, late)().detach()) < 1e-10 and optimizer.param_groups[1]["eig"] == "power"


def test_state_survives_deepcopy_and_safetensors(tmp_path):
    def fresh(values):
        p = torch.tensor(values, dtype=torch.float32, requires_grad=True)
        return p, NormGD([p], lr=0.7, seed=3), (lambda: (p**4).sum() + (p[0] * p[1]) ** 2)

    p, optimizer, closure = fresh([1.0, 0.5, -0.2])
    for _ in range(3):
        optimizer.step(closure)
    state = copy.deepcopy(optimizer.state_dict())
    own = state["state"][0]
    assert own["step"] == 3 and own["eigenvalue"] > 0
    save_file({"p": p.detach(), "eigenvector": own["eigenvector"]}, tmp_path / "o.safetensors")
    read = load_file(tmp_path / "o.safetensors")
    q, again, closure2 = fresh(read["p"].tolist())
    again.param_groups[0] |= {"lr": 0.1, "seed": 0}  # comes back with the state
    again.load_state_dict(
        {"state": {0: own | {"eigenvector": read["eigenvector"]}}, "param_groups": state["param_groups"]}
    )
    for _ in range(3):
        optimizer.step(closure)
        again.step(closure2)
    assert torch.equal(p, q) and again.param_groups[0]["lr"] == 0.7


def test_schedulers_and_closures():
    p = vector(1.0, 2.0)
    optimizer = NormGD([p], lr=1.0, eig="exact")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    norms = [float(p.detach().norm())]
    for _ in range(4):
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step(quartic(p))
        scheduler.step()
        norms.append(float(p.detach().norm()))
        assert norms[-1] / norms[-2] == pytest.approx(1 - rate / 3)
    asked = []

    def both(backward=True):
        asked.append(backward)
        loss = (p @ p) ** 2
        if backward:
            loss.backward()
        return loss

    optimizer.step(both)
    assert asked == [False]
    q = vector(1.0)
    at_optimum = NormGD([q])
    at_optimum.step(lambda: ((q - 1) ** 4).sum())  # gradient and Hessian are zero: nothing moves
    assert q.item() == 1.0


def test_a_network_in_float32_learns_and_two_runs_agree():
    def run():
        net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        with torch.no_grad():
            for i, p in enumerate(net.parameters()):
                p.copy_(torch.sin(torch.arange(p.numel(), dtype=p.dtype) + i).view_as(p))
        X = torch.linspace(-1, 1, 96).reshape(32, 3)
        y = X.sum(1, keepdim=True) ** 2
        optimizer = NormGD(net.parameters(), lr=1.0)
        return [float(optimizer.step(lambda: ((net(X) - y) ** 2).mean())) for _ in range(60)]

    losses = run()
    assert losses[-1] < losses[0] / 10 and losses == run()


def test_refusals():
    p = torch.ones(2, requires_grad=True)
    for options in ({"lr": 0}, {"lr": np.nan}, {"eig": "all"}, {"power_iters": 0}, {"power_iters": 2.5},
                    {"weight_decay": -1}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            NormGD([p], **options)
    optimizer = NormGD([p])
    with pytest.raises(ValueError, match="lr"):
        optimizer.add_param_group({"params": [vector(1.0)], "lr": -1})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="complex"):
        NormGD([torch.ones(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(RuntimeError, match="closure"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="graph"):
        optimizer.step(lambda: (p.detach() ** 2).sum())
    with pytest.raises(RuntimeError, match="one number"):
        optimizer.step(lambda: p**2)
    with pytest.raises(FloatingPointError, match="not finite"):
        optimizer.step(lambda: (p * np.inf).sum())
    with pytest.raises(FloatingPointError, match="linear loss"):
        optimizer.step(lambda: p.sum())

    def eager():
        loss = (p**4).sum()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="must not call backward"):
        optimizer.step(eager)
    table = torch.nn.Embedding(5, 2, sparse=True)
    with pytest.raises(RuntimeError, match="sparse"):
        NormGD(table.parameters()).step(lambda: (table(torch.tensor([1])) ** 2).sum())
