"""What the theory promises, and what a model does: stability, generalisation gap, and the error from finite bags."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from assay.statistics.distribution_kernels.bags import Array, Bags, as_bags, check_number, check_whole
from assay.statistics.distribution_kernels.embeddings import MeanEmbedding, _Embedding
from assay.statistics.distribution_kernels.kernels import Embedded, apply_kernel, embed
from assay.statistics.distribution_kernels.machine import Machine
from assay.statistics.distribution_kernels.points import point_gram
from assay.statistics.distribution_kernels.selection import Output, solve
from assay.statistics.distribution_kernels.solvers import loo_residuals, loss_values


def stability_report(
    model: Any,
    bags: Any,
    y: Any,
    n_refits: int = 50,
    *,
    test_bags: Any = None,
    test_y: Any = None,
    delta: float = 0.05,
    random_state: Any = None,
) -> dict[str, float]:
    """Refit without single bags, and compare with the bound on stability and the generalisation bound that follows.

    For a loss that is convex and L-Lipschitz in f, ``K <= kappa^2`` and ``l(y, 0) <= B0``, and f without an offset:

    * ``|f| <= sqrt(B0/lam)``, since f is no worse than zero;
    * the objective is ``2 lam`` strongly convex, so that leaving out bag i and dividing by N - 1 moves f by at most
      ``kappa L/(lam N)`` in norm, and ``kappa^2 L/(lam N)`` everywhere (half of it, where the factor 1/N is kept);
    * with ``beta = kappa^2 L^2/(2 lam N)`` and losses in ``[0, Bl]``, ``Bl = B0 + L kappa sqrt(B0/lam)``: with
      probability 1 - delta, the risk exceeds the training loss by at most
      ``2 beta + (4 N beta + Bl) sqrt(log(1/delta)/(2N))``.

    Samples of distributions are as good as distributions here: the pairs (bag, label) are drawn independently.

    Parameters
    ----------
    model
        :class:`DistributionRegressor` or :class:`DistributionClassifier` (two classes) with ``fit_offset=False``;
        fitted or not, a clone is fitted. Its embedding, length scale and lam are then frozen: the bounds hold for those
        that do not depend on the data, and a median or a cross-validation of *all* bags voids them, strictly.
    bags, y
        Training bags and targets.
    n_refits
        Bags that are left out, one at a time; at most N.
    test_bags, test_y
        Bags for the generalisation gap, and on which functions are compared, besides the training bags.
    delta
        In (0, 1).
    random_state
        Decides which bags are left out.

    Returns
    -------
    A dict: ``max_sup_diff`` (largest ``|f - f^(-i)|`` over refits and bags) with its ``bound``; ``max_norm_diff`` with
    ``norm_bound``; ``violations`` (refits in which either exceeds its bound); ``norm`` and ``norm_limit`` of f;
    ``train_risk``, ``test_risk`` (mean losses), ``gap`` (their difference) and ``gap_bound``; ``loo_risk``, the mean
    loss of each left-out bag by the fit without it (of all bags for "square", in closed form); ``zero_risk``, the bound
    B0 on the loss of f = 0, and ``vacuous``: 1 where ``train_risk + gap_bound`` promises no less than that;
    ``lipschitz``, ``kappa``, ``lam``, ``n_refits``. Without test bags ``test_risk`` and ``gap`` are NaN.

    Raises
    ------
    ValueError
        The model has an offset, landmarks, several outputs, or an embedding of another package.
    """
    if not isinstance(model, Machine):
        raise TypeError(f"model must be a DistributionRegressor or DistributionClassifier, got {type(model).__name__}")
    if model.fit_offset:
        raise ValueError("the bounds are about machines without an offset: give a model with fit_offset=False")
    if model.n_landmarks is not None:
        raise ValueError("the bounds are about the exact machine: give a model with n_landmarks=None")
    check_number("delta", delta, 0.0, 1.0, "a number in (0, 1)")
    check_whole("n_refits", n_refits, 1)
    if (test_bags is None) != (test_y is None):
        raise ValueError("test_bags and test_y belong together: give both or neither")
    fitted = clone(model).fit(bags, y)
    targets = fitted._targets(y)
    outputs = fitted._outputs(targets)
    if len(outputs) > 1 or fitted.dual_coef_.shape[1] > 1:
        raise ValueError("the bounds are about one function: two classes, or one quantile")
    output, n, lam = outputs[0], len(targets), fitted.lam_
    data = fitted.basis_

    def kernel(a: Embedded, b: Embedded) -> Array:
        return apply_kernel(a, b, fitted.kernel, fitted.length_scale_, fitted.degree)

    def fit(rows: Any) -> Array:
        part = [output._replace(y=output.y[rows])]
        found = solve(
            G[np.ix_(rows, rows)],
            None,
            part,
            [lam],
            np.ones(len(rows)),
            fit_offset=False,
            tol=1e-8 * unit,
            max_iter=fitted.max_iter,
        )
        return found[0].coef[:, 0]

    G = kernel(data, data)
    unit = float(np.std(output.y)) or 1.0
    sides = [G]
    largest = float(np.diag(G).max())
    if test_bags is not None:
        test = fitted._embed(fitted._read(test_bags, None, reset=False))
        sides.append(kernel(test, data))
        if fitted.kernel in ("linear", "polynomial"):
            squares = test.norms if fitted.kernel == "linear" else (1.0 + test.norms) ** fitted.degree
            largest = max(largest, float(squares.max()))
    seen = np.vstack(sides)
    kappa = 1.0 if fitted.kernel in ("gaussian", "laplace") else math.sqrt(largest)
    zero, slope = _constants(output, lam, kappa)

    everyone = np.arange(n)
    a = fit(everyone)
    rng = check_random_state(random_state)
    left_out = rng.permutation(n)[: min(n_refits, n)]
    sup, norms, losses = [], [], []
    for i in left_out:
        rows = np.delete(everyone, i)
        without = np.zeros(n)
        without[rows] = fit(rows)
        moved = a - without
        sup.append(float(np.abs(seen @ moved).max()))
        norms.append(math.sqrt(max(float(moved @ G @ moved), 0.0)))
        losses.append(_mean_loss(output, np.array([i]), np.array([G[i] @ without])))
    norm_bound = kappa * slope / (lam * n)
    train_risk = _mean_loss(output, everyone, G @ a)
    test_risk = math.nan
    if test_bags is not None:
        given = fitted._targets(test_y)
        if len(given) != len(seen) - n:
            raise ValueError(f"test_y has {len(given)} entries for {len(seen) - n} test bags")
        if hasattr(fitted, "classes_"):
            if not np.isin(given, fitted.classes_).all():
                raise ValueError("test_y holds classes that y does not")
            positive = given == fitted.classes_[1]
            given = positive.astype(int) if output.loss == "logistic" else np.where(positive, 1.0, -1.0)
        test_risk = _mean_loss(output._replace(y=given), np.arange(len(given)), seen[n:] @ a)
    loo = float(np.mean(losses))
    if output.loss == "square":
        loo = float(np.mean(loo_residuals(G, output.y, lam) ** 2))
    beta = kappa**2 * slope**2 / (2.0 * lam * n)
    limit = zero + slope * kappa * math.sqrt(zero / lam)
    gap_bound = 2.0 * beta + (4.0 * n * beta + limit) * math.sqrt(math.log(1.0 / delta) / (2.0 * n))
    over = 1.0 + 1e-6  # the solver's tolerance
    broken = [s > kappa * norm_bound * over or m > norm_bound * over for s, m in zip(sup, norms)]
    return {
        "max_sup_diff": max(sup),
        "bound": kappa * norm_bound,
        "max_norm_diff": max(norms),
        "norm_bound": norm_bound,
        "violations": float(sum(broken)),
        "norm": math.sqrt(max(float(a @ G @ a), 0.0)),
        "norm_limit": math.sqrt(zero / lam),
        "train_risk": train_risk,
        "test_risk": test_risk,
        "gap": test_risk - train_risk,
        "gap_bound": gap_bound,
        "loo_risk": loo,
        "zero_risk": zero,
        "vacuous": float(train_risk + gap_bound >= zero),
        "lipschitz": slope,
        "kappa": kappa,
        "lam": lam,
        "n_refits": float(len(left_out)),
    }


def _constants(output: Output, lam: float, kappa: float) -> tuple[float, float]:
    """``B0`` (largest loss of f = 0) and the Lipschitz constant of the loss on the values that f can take."""
    if output.loss == "hinge":
        return 1.0, 1.0
    if output.loss == "logistic":
        return math.log(2.0), 1.0
    zero = float(loss_values(output.loss, output.y, np.zeros(len(output.y)), **_shape(output)).max())
    if output.loss == "square":
        # |l'| = 2 |y - f|, with |y| <= b and |f| <= kappa b / sqrt(lam).
        b = math.sqrt(zero)
        return zero, 2.0 * b * (1.0 + kappa / math.sqrt(lam))
    return zero, (max(output.quantile, 1.0 - output.quantile) if output.loss == "pinball" else 1.0)


def _shape(output: Output) -> dict[str, float]:
    return {"quantile": output.quantile, "epsilon": output.epsilon}


def _mean_loss(output: Output, rows: Any, f: Array) -> float:
    y = output.y[rows]
    if output.loss == "logistic":
        y = np.where(y == 1, 1.0, -1.0)
    return float(loss_values(output.loss, y, f, **_shape(output)).mean())


def second_stage_report(
    model: Any, big_bags: Any, sizes: Sequence[int], *, n_draws: int = 1, random_state: Any = None
) -> dict[str, Any]:
    """How far embeddings and predictions are from those of whole distributions, when only M points are seen.

    Large bags stand in for the distributions P; S are M of their points, drawn without replacement. For kernels that
    are bounded by 1, ``E |Phi(S) - Phi(P)|^2 <= 1/M`` for mean embeddings. For sliced Wasserstein the rate is M^-1/2
    for projections with light tails and connected support, and M^-1/4 in general. With a Gaussian second-level kernel,
    ``|f(S) - f(P)| <= |f| sqrt(2 - 2 exp(-|Phi(S) - Phi(P)|^2/(2 g^2)))``.

    Parameters
    ----------
    model
        A fitted embedding of this package, or a fitted estimator that uses one.
    big_bags
        Bags of many points, more than the largest of ``sizes``.
    sizes
        Bag sizes M, increasing; at least two for the slope.
    n_draws
        Samples of each size from each bag.
    random_state
        Decides the draws.

    Returns
    -------
    A dict of arrays over ``sizes``: ``error``, the mean of ``|Phi(S) - Phi(P)|``, its ``rms``, and
    ``rms_bound = M^-1/2`` (mean embeddings with a bounded kernel; else NaN); ``slope`` of log error on log M (NaN for
    one size). With an estimator also ``prediction_error``, the mean of ``|f(S) - f(P)|``, ``prediction_bound``, the
    mean of its bound (NaN for other kernels), and ``violations``, how often a bag exceeds its bound.
    """
    machine = isinstance(model, Machine)
    embedding = getattr(model, "embedding_", None) if machine else model
    check_is_fitted(model)
    if not isinstance(embedding, _Embedding):
        raise TypeError("model must be a fitted embedding of this package, or a fitted estimator that uses one")
    bags = as_bags(big_bags, name="big_bags")
    if bags.dim != embedding._dim:
        raise ValueError(f"big_bags have {bags.dim} coordinates a point, the model was fitted with {embedding._dim}")
    if bags.weights is not None:
        raise ValueError("big_bags must not carry weights of points")
    counts = [int(m) for m in sizes]
    least = int(bags.sizes.min())
    if not counts or min(counts) < 1 or max(counts) >= least:
        raise ValueError(f"sizes must lie in 1 .. {least - 1}, below the smallest of big_bags; got {list(sizes)}")
    check_whole("n_draws", n_draws, 1)
    rng = check_random_state(random_state)
    whole = model._embed(bags) if machine else embed(embedding, bags)
    bounded = isinstance(embedding, MeanEmbedding) and embedding.kernel != "energy"
    report: dict[str, Any] = {"sizes": np.array(counts), "error": [], "rms": []}
    report["rms_bound"] = np.array([m**-0.5 if bounded else math.nan for m in counts])
    if machine:
        report |= {"prediction_error": [], "prediction_bound": [], "violations": 0}
        norm = _norm(model)
        reference = model._values(bags)
    for m in counts:
        distances, differences, bounds = [], [], []
        for _ in range(n_draws):
            part = _draw(bags, m, rng)
            some = model._embed(part) if machine else embed(embedding, part)
            apart = _paired_distances(some, whole)
            distances.append(apart)
            if machine:
                differences.append(np.abs(model._values(part) - reference))
                reach = np.full(len(apart), math.nan)
                if model.kernel == "gaussian":
                    reach = np.sqrt(-2.0 * np.expm1(-0.5 * (apart / model.length_scale_) ** 2))
                bounds.append(reach[:, None] * norm)
        all_distances = np.concatenate(distances)
        report["error"].append(float(all_distances.mean()))
        report["rms"].append(float(np.sqrt((all_distances**2).mean())))
        if machine:
            difference, bound = np.concatenate(differences), np.concatenate(bounds)
            report["prediction_error"].append(float(difference.mean()))
            report["prediction_bound"].append(float(bound.mean()))
            report["violations"] += int((difference > bound + 1e-9 * norm.max()).sum())
    report = {k: np.array(v) if isinstance(v, list) else v for k, v in report.items()}
    report["slope"] = math.nan
    if len(set(counts)) > 1:
        report["slope"] = float(np.polyfit(np.log(counts), np.log(report["error"]), 1)[0])
    return report


def _norm(model: Any) -> Array:
    """``|f|`` of each output (K,)."""
    G = apply_kernel(model.basis_, model.basis_, model.kernel, model.length_scale_, model.degree)
    return np.sqrt(np.maximum(np.einsum("ik,ij,jk->k", model.dual_coef_, G, model.dual_coef_, optimize=True), 0.0))


def _draw(bags: Bags, m: int, rng: np.random.RandomState) -> Bags:
    """M points of each bag, without replacement."""
    rows = [lo + rng.choice(hi - lo, m, replace=False) for lo, hi in zip(bags.offsets[:-1], bags.offsets[1:])]
    return Bags(bags.points[np.concatenate(rows)], np.arange(len(bags) + 1, dtype=np.int64) * m)


def _paired_distances(a: Embedded, b: Embedded) -> Array:
    """``|a_i - b_i|``, (N,)."""
    if a.vectors is not None and b.vectors is not None:
        return np.sqrt(((a.vectors - b.vectors) ** 2).sum(1))
    assert a.bags is not None and b.bags is not None
    inner = [point_gram(a.bags[i], b.bags[i], a.kernel, a.scale)[0, 0] for i in range(len(a))]  # type: ignore[arg-type]
    return np.sqrt(np.maximum(a.norms + b.norms - 2.0 * np.array(inner), 0.0))
