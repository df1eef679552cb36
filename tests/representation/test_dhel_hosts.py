"""Where the losses are used: several processes, pytorch-metric-learning, and large batches."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from assay.bench.memory import peak_memory
from assay.representation.dhel import (
    AlignUniformLoss,
    DCLLoss,
    DHELLoss,
    InfoNCELoss,
    KCLLoss,
    NTXentLoss,
    from_labels,
)

LOSSES = [
    DHELLoss(),
    DHELLoss(variant="single"),
    KCLLoss(),
    KCLLoss("gaussian_riesz", t=1.0),
    InfoNCELoss(),
    NTXentLoss(),
    DCLLoss(),
    AlignUniformLoss(),
    AlignUniformLoss(alpha=1.0),
]

WORKER = """
import json, sys
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from assay.representation import dhel

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
given = torch.load(f"{folder}/given.pt", weights_only=True)
found = []
for config in json.loads(sys.argv[3]):
    net = torch.nn.Linear(5, 4, dtype=torch.float64)
    net.load_state_dict({"weight": given["weight"], "bias": given["bias"]})
    model = DistributedDataParallel(net)
    loss = getattr(dhel, config["loss"]).from_config(config)
    half = slice(3 * rank, 3 * rank + 3)
    out = model(torch.cat([given["x"][half], given["y"][half]]))
    value = loss(*out.chunk(2))
    value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    found.append((total / 2, net.weight.grad, net.bias.grad))
torch.save(found, f"{folder}/found{rank}.pt")
one = torch.ones(1, 4)
if rank == 0 or rank == 1:  # one item on each of two ranks is a batch of two
    loss = dhel.DHELLoss(gather_distributed=True)
    assert torch.isfinite(loss(one * (rank + 1) + torch.eye(4)[rank], one))
try:
    loss(torch.rand(2 + rank, 4), torch.rand(2 + rank, 4))
except ValueError as error:
    assert "one shape" in str(error)
else:
    raise AssertionError("different sizes were not refused")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("chunk", [None, 2])
def test_two_processes_have_the_gradient_of_one(tmp_path, chunk):
    import json

    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64)
        for name, shape in {"x": (6, 5), "y": (6, 5), "weight": (4, 5), "bias": (4,)}.items()
    }
    torch.save(given, tmp_path / "given.pt")
    shared = {"gather_distributed": True, "chunk_size": chunk}
    configs = json.dumps([loss.to_config() | shared for loss in LOSSES])
    command = [sys.executable, "-c", WORKER]
    ranks = [
        subprocess.Popen([*command, str(r), str(tmp_path), configs], stderr=subprocess.PIPE, text=True) for r in (0, 1)
    ]
    errors = [r.communicate(timeout=120)[1] for r in ranks]
    assert [r.returncode for r in ranks] == [0, 0], errors
    both = [torch.load(tmp_path / f"found{r}.pt", weights_only=True) for r in (0, 1)]
    for loss, first, second in zip(LOSSES, *both):
        weight, bias = given["weight"].clone().requires_grad_(), given["bias"].clone().requires_grad_()
        value = loss(given["x"] @ weight.T + bias, given["y"] @ weight.T + bias)
        want = (value.detach(), *torch.autograd.grad(value, (weight, bias)))
        for a, b, c in zip(first, second, want):
            torch.testing.assert_close(a, c, rtol=1e-10, atol=1e-12, msg=f"{loss}")
            assert torch.equal(a, b)


def test_gathering_without_processes_is_plain():
    u, v = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(DHELLoss(gather_distributed=True)(u, v), DHELLoss()(u, v))


# --- pytorch-metric-learning ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_ntxent_is_that_of_the_package(temperature):
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    u, v = torch.randn(12, 8, dtype=torch.float64, requires_grad=True), torch.randn(12, 8, dtype=torch.float64)
    want = NTXentLoss(temperature)(u, v)
    for peer in (losses.NTXentLoss(temperature=temperature), losses.SupConLoss(temperature=temperature)):
        got = losses.SelfSupervisedLoss(peer)(u, v)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        (a,), (b,) = torch.autograd.grad(got, u), torch.autograd.grad(want, u, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_call_with_labels():
    u, v = torch.randn(6, 4), torch.randn(6, 4)
    loss = from_labels(DHELLoss())
    want = DHELLoss()(u, v)
    labels = torch.tensor([30, 10, 20, 50, 0, 40])
    torch.testing.assert_close(loss(torch.cat([u, v]), labels.repeat(2)), want)
    shuffled = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(loss(u, labels, None, v[shuffled], labels[shuffled]), want)
    single = from_labels(DHELLoss(variant="single"))  # the earlier row of a pair is the first view
    torch.testing.assert_close(single(torch.cat([u, v]), labels.repeat(2)), DHELLoss(variant="single")(u, v))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.eye(4), torch.tensor([0, 0, 1, 2])), "pairs"),
        ((torch.eye(4), torch.tensor([0, 0, 0, 0])), "pairs"),
        ((torch.eye(3), torch.tensor([0, 0, 1])), "pairs"),
        ((torch.eye(4), torch.tensor([0, 0, 1])), "labels must have shape"),
        ((torch.eye(4), torch.tensor([0, 0, 1, 1]), (1, 2, 3)), "indices_tuple"),
        ((torch.eye(2), torch.tensor([0, 1]), None, torch.eye(2)), "together"),
        ((torch.eye(2), torch.tensor([0, 1]), None, torch.eye(2), torch.tensor([0, 2])), "one row of embeddings"),
        ((torch.eye(2), torch.tensor([0, 0]), None, torch.eye(2), torch.tensor([0, 0])), "one row of embeddings"),
    ],
)
def test_labels_that_are_no_pairs(arguments, words):
    with pytest.raises(ValueError, match=words):
        from_labels(DHELLoss())(*arguments)


def test_wrong_types():
    with pytest.raises(TypeError, match="module"):
        from_labels(lambda u, v: 0)
    with pytest.raises(TypeError, match="tensors"):
        from_labels(DHELLoss())(torch.eye(2), [0, 0])


def test_inside_multiple_losses_of_the_package():
    losses = pytest.importorskip("pytorch_metric_learning.losses")
    both = losses.MultipleLosses([from_labels(DHELLoss()), losses.NTXentLoss(temperature=0.3)], weights=[1.0, 0.5])
    embeddings = torch.randn(8, 4, requires_grad=True)
    labels = torch.arange(4).repeat(2)
    value = both(embeddings, labels)
    want = DHELLoss()(*embeddings.chunk(2)) + 0.5 * NTXentLoss(0.3)(*embeddings.chunk(2))
    torch.testing.assert_close(value, want)
    value.backward()
    assert embeddings.grad.abs().sum() > 0


def test_trainer_of_the_package_lowers_the_loss():
    pytest.importorskip("pytorch_metric_learning")
    from pytorch_metric_learning.trainers import MetricLossOnly

    torch.manual_seed(0)
    x = torch.randn(64, 1, 6)
    data = [(row + 0.1 * torch.randn(6), i) for i, row in enumerate(x[:, 0]) for _ in range(2)]
    net, loss = torch.nn.Linear(6, 4), from_labels(DHELLoss())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)

    def value():
        with torch.no_grad():
            rows = net(torch.stack([r for r, _ in data]))
            return loss(rows, torch.tensor([i for _, i in data])).item()

    before = value()
    trainer = MetricLossOnly(
        models={"trunk": net},
        optimizers={"trunk_optimizer": optimizer},
        batch_size=32,
        loss_funcs={"metric_loss": loss},
        dataset=data,
        sampler=torch.utils.data.SequentialSampler(data),
        dataloader_num_workers=0,
        iterations_per_epoch=4,
    )
    trainer.train(num_epochs=5)
    assert value() < before - 0.05


def test_a_training_loop_of_two_outputs():
    torch.manual_seed(0)
    x = torch.randn(64, 10)
    for loss in (DHELLoss(), KCLLoss(gamma=4.0)):
        net = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
        step, values = torch.optim.Adam(net.parameters(), 1e-2), []
        for _ in range(60):
            value = loss(net(x + 0.1 * torch.randn_like(x)), net(x + 0.1 * torch.randn_like(x)))
            step.zero_grad()
            value.backward()
            step.step()
            values.append(value.item())
        assert values[-1] < values[0] - 0.3


def _large(chunk):
    import torch

    from assay.representation.dhel import dhel_loss

    torch.set_num_threads(1)
    u = torch.randn(6144, 32, requires_grad=True)
    dhel_loss(u, torch.randn(6144, 32), chunk_size=chunk).backward()


def test_memory_is_a_block_and_not_the_gram_matrix():
    """6144 items: one Gram matrix has 151 MB."""
    base = peak_memory(_warm).rss
    chunked, whole = (peak_memory(_large, c).rss - base for c in (None, 6144))
    assert whole > 140e6 and chunked < 45e6


def _warm():
    import torch

    from assay.representation.dhel import dhel_loss

    torch.set_num_threads(1)
    u = torch.randn(64, 32, requires_grad=True)
    dhel_loss(u, torch.randn(64, 32)).backward()
