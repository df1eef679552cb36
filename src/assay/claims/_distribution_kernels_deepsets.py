"""DeepSets: a network on every point, the mean over a bag, and a network on the mean. The neural rival of the claim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.workloads.bags import LEVELS, LabelledBags, Task

Float = NDArray[np.float64]

HIDDEN = 64
#: Bags in a step.
BATCH = 32
#: Learning rates, and checkpoints of each run, that the validation bags choose from: 2 x 18 candidates.
RATES = (3e-3, 1e-3)
CHECKPOINTS = 18


class DeepSets:
    """One run: points and numeric labels standardised by the training bags, Adam, steps of 32 bags.

    Parameters
    ----------
    train
        Training bags.
    task
        "clf" (cross-entropy), "reg" (squared error) or "quantile" (pinball losses).
    lr
        Learning rate of Adam.
    seed
        Of the weights and of the order of the bags.
    """

    def __init__(self, train: LabelledBags, task: Task, lr: float, seed: int) -> None:
        import torch
        from torch import nn

        self.task, self._random = task, torch.Generator().manual_seed(seed)
        self._center = train.points.mean(0)
        self._unit = np.where(train.points.std(0) > 0, train.points.std(0), 1.0)
        self.classes = np.unique(train.y) if task == "clf" else np.empty(0)
        self._shift, self._scale = 0.0, 1.0
        if task == "clf":
            self._y = torch.from_numpy(np.searchsorted(self.classes, train.y))
        else:
            self._shift, self._scale = float(train.y.mean()), float(train.y.std()) or 1.0
            self._y = torch.from_numpy((train.y - self._shift) / self._scale).float()
        self._points, self._offsets = self._tensor(train.points), train.offsets
        outputs = {"clf": len(self.classes), "reg": 1, "quantile": len(LEVELS)}[task]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            d = train.points.shape[1]
            self._inner = nn.Sequential(nn.Linear(d, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU())
            self._outer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
        parameters = [*self._inner.parameters(), *self._outer.parameters()]
        self._adam = torch.optim.Adam(parameters, lr=lr)

    def _tensor(self, points: Float) -> Any:
        import torch

        return torch.from_numpy((points - self._center) / self._unit).float()

    def _outputs(self, points: Any, offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> Any:
        """Outputs (len(rows), K) of some bags."""
        import torch

        sizes = offsets[rows + 1] - offsets[rows]
        ends = np.cumsum(sizes)
        take = np.arange(ends[-1]) + np.repeat(offsets[rows] - (ends - sizes), sizes)
        which = torch.from_numpy(np.repeat(np.arange(len(rows)), sizes))
        total = torch.zeros(len(rows), HIDDEN).index_add(0, which, self._inner(points[torch.from_numpy(take)]))
        return self._outer(total / torch.from_numpy(sizes).float()[:, None])

    def _loss(self, out: Any, y: Any) -> Any:
        import torch
        from torch.nn import functional as F

        if self.task == "clf":
            return F.cross_entropy(out, y)
        if self.task == "reg":
            return F.mse_loss(out[:, 0], y)
        q, r = torch.tensor(LEVELS), y[:, None] - out
        return torch.maximum(q * r, (q - 1) * r).mean()

    def train(self, epochs: int, watch: Callable[[int], None] | None = None) -> DeepSets:
        """Make so many passes; ``watch`` gets the number of passes after each."""
        import torch

        n = len(self._y)
        for epoch in range(1, epochs + 1):
            for rows in torch.randperm(n, generator=self._random).split(BATCH):
                self._adam.zero_grad()
                self._loss(self._outputs(self._points, self._offsets, rows.numpy()), self._y[rows]).backward()
                self._adam.step()
            if watch is not None:
                watch(epoch)
        return self

    def outputs(self, bags: LabelledBags) -> Float:
        """Outputs (N, K), in the unit of the labels."""
        import torch

        with torch.no_grad():
            points = self._tensor(bags.points)
            parts = np.array_split(np.arange(len(bags)), -(-len(bags) // 256))
            found = torch.cat([self._outputs(points, bags.offsets, rows) for rows in parts])
        return found.double().numpy() * self._scale + self._shift

    def predict(self, bags: LabelledBags) -> NDArray[Any]:
        """Classes (N,), numbers (N,), or quantiles (N, 3) in increasing order."""
        out = self.outputs(bags)
        if self.task == "clf":
            return self.classes[out.argmax(1)]
        return out[:, 0] if self.task == "reg" else np.sort(out, 1)


def choose_and_fit(
    train: LabelledBags,
    fold: tuple[NDArray[np.int64], NDArray[np.int64]],
    task: Task,
    epochs: int,
    seed: int,
    error: Callable[[NDArray[Any], LabelledBags], float],
) -> DeepSets:
    """Choose learning rate and number of passes on the fold's validation bags, then train on all training bags."""
    inner, held = train.take(fold[0]), train.take(fold[1])
    stops = {max(1, round(epochs * (k + 1) / CHECKPOINTS)) for k in range(CHECKPOINTS)}
    found: list[tuple[float, int, int]] = []
    for rank, lr in enumerate(RATES):
        run = DeepSets(inner, task, lr, seed)

        def watch(epoch: int, run: DeepSets = run, rank: int = rank) -> None:
            if epoch in stops:
                found.append((error(run.predict(held), held), epoch, rank))

        run.train(epochs, watch)
    # Of equal errors, the fewest passes.
    _, passes, rank = min(found)
    return DeepSets(train, task, RATES[rank], seed).train(passes)
