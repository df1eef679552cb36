"""How the claim of DHEL trains and judges encoders: the same for every loss."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from assay.workloads.views import Items, augment

#: Labelled items of the linear probe.
PROBED = 1000


@dataclass(frozen=True)
class Training:
    """What all arms of a replicate share: items, which of them are for what, and how long to train."""

    items: Items
    train: NDArray[np.int64]
    val: NDArray[np.int64]
    test: NDArray[np.int64]
    epochs: int
    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    network: str
    device: str
    seed: int


class Encoder(nn.Module):
    """A body that gives the representation ``h``, and a head that gives what the loss sees."""

    def __init__(self, bodies: list[nn.Module], width: int) -> None:
        super().__init__()
        self.bodies = nn.ModuleList(bodies)
        head = min(width, 128)
        self.head = nn.Sequential(nn.Linear(width, head), nn.BatchNorm1d(head), nn.ReLU(), nn.Linear(head, head // 2))

    def represent(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """``h`` of two views, in one pass where one body serves both, so that they share batch statistics."""
        if len(self.bodies) == 1:
            a, b = self.bodies[0](torch.cat([first, second])).chunk(2)
            return a, b
        return self.bodies[0](first), self.bodies[1](second)

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of two views."""
        a, b = self.head(torch.cat(self.represent(first, second))).chunk(2)
        return a, b


def make_encoder(task: Training) -> Encoder:
    """The encoder for the items, with weights drawn by the seed."""
    items = task.items
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        if items.second is not None:
            widths = dict.fromkeys((items.first.shape[1], items.second.shape[1]))  # one body where they agree
            net = Encoder([_mlp(w, 128, 64) for w in widths], 64)
        elif task.network == "resnet18":
            net = Encoder([ResNet18(items.first.shape[1])], 512)
        elif items.first.shape[-1] <= 8:
            net = Encoder([nn.Sequential(nn.Flatten(), _mlp(items.first[0].size, 128, 64))], 64)
        else:
            net = Encoder([_convolutions(items.first.shape[1])], 256)
    return net.to(task.device)


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs), nn.ReLU())


def _convolutions(channels: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in zip((channels, 16, 32), (16, 32, 64)):
        layers += [nn.Conv2d(i, o, 3, 2, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())


class _Block(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        self.b = nn.Sequential(nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o))
        short: list[nn.Module] = [nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)]
        self.short = nn.Sequential(*(short if stride > 1 or i != o else []))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(self.a(x)) + self.short(x))


class ResNet18(nn.Sequential):
    """ResNet-18 for small images: a 3 x 3 stem without pooling; 512 numbers."""

    def __init__(self, channels: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        for i, o, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
            layers += [_Block(i, o, stride), _Block(o, o, 1)]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train(task: Training, loss: Callable[[Tensor, Tensor], Tensor], batch: int) -> Encoder:
    """Adam at 1e-3 with a cosine to 0; batches and views do not depend on the loss."""
    net = make_encoder(task).train()
    data = [torch.from_numpy(x[task.train]).to(task.device) for x in _given(task.items)]
    generator = torch.Generator().manual_seed(task.seed)
    steps = task.epochs * (len(task.train) // batch)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3, weight_decay=1e-6)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(task.epochs):
        order = torch.randperm(len(task.train), generator=generator)
        for rows in order.split(batch):
            if len(rows) < batch:
                continue
            chosen = [x[rows.to(x.device)] for x in data]
            if len(chosen) == 1:
                chosen = [augment(chosen[0], generator), augment(chosen[0], generator)]
            value = loss(*net(*chosen))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
    return net.eval()


def _given(items: Items) -> list[NDArray[np.float32]]:
    return [items.first] if items.second is None else [items.first, items.second]


@torch.no_grad()
def embed(task: Training, net: Encoder, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    """Representation ``h``, and outputs of two views: items as they are and, for images, a random view of each."""
    parts = []
    generator = torch.Generator().manual_seed(task.seed + 1)
    for part in np.array_split(rows, max(1, len(rows) // 1000)):
        chosen = [torch.from_numpy(x[part]).to(task.device) for x in _given(task.items)]
        second = augment(chosen[0], generator) if len(chosen) == 1 else chosen[1]
        h, g = net.represent(chosen[0], second)
        parts.append((h, net.head(h), net.head(g)))
    a, b, c = (torch.cat(p).cpu() for p in zip(*parts))
    return a, b, c


def judge(task: Training, net: Encoder) -> dict[str, float]:
    """Scores of a trained encoder; those of ``val`` are for choosing only.

    ``quality`` is the accuracy of a linear probe on ``h``, or where there are no labels the share of test items whose
    nearest second view is their own.
    """
    from assay.representation.dhel import effective_rank, embedding_report

    test_h, test_u, test_v = embed(task, net, task.test)
    report = embedding_report(test_u, test_v)
    unit = torch.nn.functional.normalize(test_u, dim=1)
    found = {name: report[name] for name in ("alignment", "wasserstein_uniformity", "retrieval")}
    found["rank"] = effective_rank(unit)
    labels = task.items.labels
    if labels is None:
        _, val_u, val_v = embed(task, net, task.val)
        return found | {"quality": found["retrieval"], "val": embedding_report(val_u, val_v)["retrieval"]}
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train_h, train_u, _ = embed(task, net, task.train)
    val_h = embed(task, net, task.val)[0]
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    probe.fit(train_h[:PROBED].numpy(), labels[task.train[:PROBED]])
    found["quality"] = float(probe.score(test_h.numpy(), labels[task.test]))
    found["val"] = float(probe.score(val_h.numpy(), labels[task.val]))
    nearest = KNeighborsClassifier(5, metric="cosine", algorithm="brute")
    nearest.fit(train_u.numpy(), labels[task.train])
    return found | {"knn": float(nearest.score(test_u.numpy(), labels[task.test]))}


def over_grid(task: Training, grid: list[Callable[[Tensor, Tensor], Tensor]]) -> dict[str, float]:
    """Train with every loss of a grid at every batch size, and sum up.

    ``quality`` and ``quality_small`` are the test scores at the largest and smallest batch, of the loss that the
    validation items choose there; ``*_range`` are largest less smallest over the whole grid; the others are means over
    the grid, so that no arm is chosen by them.
    """
    start = time.process_time()
    cells: dict[int, list[dict[str, float]]] = {}
    for batch in task.batches:
        cells[batch] = [judge(task, train(task, loss, batch)) for loss in grid]
    every = [cell for row in cells.values() for cell in row]

    def chosen(batch: int) -> dict[str, float]:
        return max(cells[batch], key=lambda cell: cell["val"])

    found = {"quality": chosen(max(cells))["quality"], "quality_small": chosen(min(cells))["quality"]}
    for name in ("quality", "knn"):
        if all(name in cell for cell in every):
            values = [cell[name] for cell in every]
            found |= {f"{name}_mean": float(np.mean(values)), f"{name}_range": max(values) - min(values)}
    for name in ("rank", "wasserstein_uniformity", "alignment"):
        found[name] = float(np.mean([cell[name] for cell in every]))
    return found | {"cpu": time.process_time() - start}


def losses_of(arm: str, temperatures: tuple[float, ...]) -> list[Any]:
    """The grid of losses of an arm: one a temperature, or as many weights."""
    from assay.representation.dhel import AlignUniformLoss, DCLLoss, DHELLoss, KCLLoss

    if arm == "ntxent":
        from pytorch_metric_learning import losses

        # With one positive an anchor SupConLoss is NTXentLoss, whose own form takes memory of the batch's cube.
        return [losses.SelfSupervisedLoss(losses.SupConLoss(temperature=t)) for t in temperatures]
    if arm == "kcl":
        return [KCLLoss(gamma=g) for g in (4.0, 8.0, 16.0)]
    if arm == "align_uniform":
        return [AlignUniformLoss(lam=lam) for lam in (0.3, 1.0, 3.0)]
    made = {
        "dhel": lambda t: DHELLoss(t),
        "dhel_paper": lambda t: DHELLoss(t, "paper"),
        "dcl": lambda t: DCLLoss(t),
    }[arm]
    return [made(t) for t in temperatures]
