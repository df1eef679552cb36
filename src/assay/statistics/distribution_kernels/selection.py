"""Fit several outputs on one kernel matrix, and choose penalty and length scale by cross-validation over bags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import KFold, StratifiedKFold, check_cv

from assay.statistics.distribution_kernels.bags import Array
from assay.statistics.distribution_kernels.embeddings import inverse_root
from assay.statistics.distribution_kernels.solvers import (
    box_machine,
    linear_machine,
    logistic_machine,
    loss_values,
    ridge_path,
)

#: What "cv" chooses from: penalties (largest first, so that ties go to the smoother), and multiples of the median.
LAM_GRID = tuple(10.0**-k for k in range(7))
SCALE_GRID = (1.0, 0.3, 3.0, 0.1, 10.0)
#: Optimality that is enough to compare settings, in units of y.
_ROUGH = 1e-3


class Output(NamedTuple):
    """One function that is learned: its loss, targets, and the level of a pinball loss or width of an insensitive one.

    Targets are numbers, -1 and 1 for "hinge", and class numbers for "logistic", which gives a column for each class
    (one, if there are two).
    """

    loss: str
    y: NDArray[Any]
    quantile: float = 0.5
    epsilon: float = 0.0


class Fitted(NamedTuple):
    """Coefficients of the basis (m, K) and offsets (K,), ``f = G coef + offset``; and the most steps of a solver."""

    coef: Array
    offset: Array
    n_iter: int


def solve(
    G: Array,
    among: Array | None,
    outputs: Sequence[Output],
    lams: Sequence[float],
    weights: Array,
    *,
    fit_offset: bool,
    tol: float,
    max_iter: int,
) -> list[Fitted]:
    """Fit all outputs for each lam.

    Parameters
    ----------
    G
        Kernel (n, m) between training bags and the basis: all training bags in the same order, or landmarks.
    among
        Kernel (m, m) between landmarks; ``None`` where the basis is the training bags.
    outputs
        What is learned.
    lams
        Penalties, the largest first: each fit starts from the one before.
    weights
        Of bags, (n,).
    fit_offset, tol, max_iter
        See :func:`box_machine`; ``tol`` is in units of y.
    """
    root = Z = None
    if among is not None:
        root = inverse_root(among, 1e-12)
    elif outputs[0].loss == "logistic":
        root = inverse_root(G)
    if root is not None:
        Z = G @ root
    a: Array
    b: Any
    columns: list[list[Array]] = [[] for _ in lams]
    offsets: list[list[Any]] = [[] for _ in lams]
    most = [1] * len(lams)
    for o in outputs:
        path = ridge_path(G, o.y, lams, weights, fit_offset) if Z is None and o.loss == "square" else []
        start = None
        for i, lam in enumerate(lams):
            if Z is not None and root is not None:
                if o.loss == "logistic":
                    w, b, steps = logistic_machine(Z, o.y, lam, weights, fit_offset, tol)
                else:
                    w, b, steps = linear_machine(
                        Z, o.y, o.loss, lam, weights, fit_offset, quantile=o.quantile, epsilon=o.epsilon
                    )
                a = root @ w
            elif o.loss == "square":
                (a, b), steps = path[i], 1
            else:
                a, b, steps = box_machine(
                    G,
                    o.y,
                    o.loss,
                    lam,
                    weights,
                    fit_offset,
                    quantile=o.quantile,
                    epsilon=o.epsilon,
                    tol=tol,
                    max_iter=max_iter,
                    start=None if start is None else start * (lams[i - 1] / lam),
                )
                start = a
            columns[i].append(a.reshape(len(a), -1))
            offsets[i].append(np.atleast_1d(b))
            most[i] = max(most[i], steps)
    return [Fitted(np.hstack(c), np.concatenate(b), n) for c, b, n in zip(columns, offsets, most)]


def risk(outputs: Sequence[Output], f: Array, weights: Array, rows: Any = slice(None)) -> float:
    """What is compared: the share of wrong classes for hinge, else the mean loss, of decisions f (n, K)."""
    first = outputs[0]
    share = weights / weights.sum()
    if first.loss == "hinge":
        if len(outputs) == 1:
            return float(share @ (first.y[rows] * f[:, 0] <= 0))
        right = np.argmax(np.column_stack([o.y[rows] for o in outputs]), 1)
        return float(share @ (np.argmax(f, 1) != right))
    if first.loss == "logistic":
        y = first.y[rows]
        if f.shape[1] == 1:
            return float(share @ np.logaddexp(0.0, np.where(y == 1, -f[:, 0], f[:, 0])))
        top = f.max(1)
        return float(share @ (top + np.log(np.exp(f - top[:, None]).sum(1)) - f[np.arange(len(f)), y]))
    each = [
        loss_values(o.loss, o.y[rows], f[:, k], quantile=o.quantile, epsilon=o.epsilon) for k, o in enumerate(outputs)
    ]
    return float(np.mean([share @ e for e in each]))


def folds_of(cv: Any, outputs: Sequence[Output], n: int, seed: int) -> list[tuple[Any, Any]]:
    """Rows for training and validation: from a number of folds, a splitter of scikit-learn, or as given.

    A number gives shuffled folds, over which classes are spread evenly.
    """
    codes = None
    if outputs[0].loss == "logistic":
        codes = outputs[0].y
    elif outputs[0].loss == "hinge":
        codes = np.argmax(np.column_stack([o.y for o in outputs]), 1) if len(outputs) > 1 else outputs[0].y
    if not isinstance(cv, int | np.integer):
        return list(check_cv(cv).split(np.zeros(n), np.zeros(n) if codes is None else codes))
    if codes is None:
        return list(KFold(min(cv, n), shuffle=True, random_state=seed).split(np.zeros(n)))
    least = int(np.unique(codes, return_counts=True)[1].min())
    if least < 2:
        raise ValueError("cross-validation needs at least 2 bags of each class; give numbers instead of 'cv'")
    splitter = StratifiedKFold(min(cv, least), shuffle=True, random_state=seed)
    return list(splitter.split(np.zeros(n), codes))


def choose(
    kernel: Callable[[float], tuple[Array, Array | None]],
    scales: Sequence[float],
    lams: Sequence[float],
    outputs: Sequence[Output],
    weights: Array,
    folds: Sequence[tuple[Any, Any]],
    *,
    fit_offset: bool,
    unit: float,
    max_iter: int,
) -> list[dict[str, float]]:
    """Cross-validated risk of every length scale and lam; folds hold whole bags.

    ``kernel(scale)`` gives ``(G, among)`` as in :func:`solve`.

    Returns
    -------
    A list of ``{"length_scale", "lam", "risk"}``, in the order of the grids.
    """
    found = []
    for scale in scales:
        G, among = kernel(scale)
        total, held = np.zeros(len(lams)), 0.0
        for train, val in folds:
            held += weights[val].sum()
            inner = G[np.ix_(train, train)] if among is None else G[train]
            across = G[np.ix_(val, train)] if among is None else G[val]
            part = [o._replace(y=o.y[train]) for o in outputs]
            fits = solve(
                inner,
                among,
                part,
                lams,
                weights[train],
                fit_offset=fit_offset,
                tol=_ROUGH * unit,
                max_iter=max_iter,
            )
            for i, fit in enumerate(fits):
                f = across @ fit.coef + fit.offset
                total[i] += weights[val].sum() * risk(outputs, f, weights[val], val)
        found += [
            {"length_scale": float(scale), "lam": float(lam), "risk": float(t / held)} for lam, t in zip(lams, total)
        ]
    return found


def best(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The entry of least risk; the first of several."""
    return min(found, key=lambda e: e["risk"])
