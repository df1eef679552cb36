"""Tree models that the claim of RQR compares, and its races of training times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from assay.bench.claim import Timed
from assay.workloads.tabular import Split


def quantile_trees(quantile: float, seed: int, iterations: int = 100) -> Any:
    """A quantile model of histogram gradient boosting."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    return HistGradientBoostingRegressor(
        loss="quantile", quantile=quantile, max_iter=iterations, early_stopping=False, random_state=seed
    )


def _on_one_core(call: Callable[[], object]) -> Timed:
    """Time on one core: threads of small fits wait for each other, for seconds where a machine is busy."""
    import torch
    from threadpoolctl import threadpool_limits

    def limited() -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with threadpool_limits(1):
                call()
        finally:
            torch.set_num_threads(threads)

    return Timed(limited)


def timed_fit(make: Callable[[float, int], Any]) -> Callable[[Split, int], Timed]:
    """Fitting what ``make(coverage, iterations)`` gives."""

    def arm(split: Split, replicate: int) -> Timed:
        coverage, iterations = split.options["coverage"], max(1, split.options["epochs"] // 2)
        X, y = (np.concatenate([split.train.X, split.val.X]), np.concatenate([split.train.y, split.val.y]))
        return _on_one_core(lambda: make(coverage, iterations).fit(X, y))

    return arm


def mean_centred_trees(coverage: float, iterations: int) -> Any:
    """RQRBoostingRegressor in the limit of a large penalty, without correction."""
    from assay.statistics.rqr import RQRBoostingRegressor

    return RQRBoostingRegressor(coverage, max_iter=iterations, conformal=False, random_state=0)


def pair_of_trees(coverage: float, iterations: int) -> Any:
    """Two quantile models behind one ``fit``."""
    models = [quantile_trees(0.5 * (1 + sign * coverage), 0, iterations) for sign in (-1, 1)]

    class Pair:
        def fit(self, X: np.ndarray, y: np.ndarray) -> None:
            for model in models:
                model.fit(X, y)

    return Pair()


def mapie(coverage: float, iterations: int, seed: int = 0) -> Any:
    """Conformalised quantile regression of MAPIE: three quantile models, asymmetric correction, its defaults."""
    from mapie.regression import ConformalizedQuantileRegressor

    return ConformalizedQuantileRegressor(quantile_trees(0.5, seed, iterations), confidence_level=coverage)


_MODELS, _ROWS, _EPOCHS, _HIDDEN = 20, 2000, 5, (64, 64)


def _race_data() -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(0)
    X = torch.randn(_ROWS, 5, generator=generator)
    return X, X[:, 0] + torch.empty(_ROWS).exponential_(generator=generator)


def time_stack(split: Split, replicate: int) -> Timed:
    """Twenty networks on 2000 rows, five epochs, as one stack."""
    from assay.statistics.rqr import StackedMLP, fit_stack
    from assay.statistics.rqr.losses import rqr

    X, y = _race_data()

    def loss(out: Any, target: Any, _: Any) -> Any:
        return rqr(out, target.expand(out.shape[:-1]), 0.9, 1.0).mean(-1)

    def call() -> None:
        net = StackedMLP(5, _HIDDEN, seeds=range(_MODELS), dropout=0.1, lr=0.01)
        fit_stack(net, X, y, loss, epochs=_EPOCHS)

    return _on_one_core(call)


def time_loop(split: Split, replicate: int) -> Timed:
    """The same networks with torch modules and torch's Adam, one after the other."""
    import torch
    from torch import nn

    from assay.statistics.rqr import RQRLoss

    X, y = _race_data()
    loss = RQRLoss(0.9, 1.0)

    def network() -> nn.Module:
        sizes, layers = (5, *_HIDDEN), []
        for i, o in zip(sizes, _HIDDEN):
            layers += [nn.Linear(i, o), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], 2))

    def call() -> None:
        for _ in range(_MODELS):
            net = network()
            step = torch.optim.Adam(net.parameters(), lr=0.01)
            for _ in range(_EPOCHS):
                step.zero_grad()
                loss(net(X), y).backward()
                step.step()

    return _on_one_core(call)
