"""Values and equalities that the theory of kernel machines on distributions fixes."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.base import clone
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV, KFold
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC, SVR
from sklearn.utils.estimator_checks import check_estimator

from assay.statistics.distribution_kernels import (
    DistributionClassifier,
    DistributionQuantileRegressor,
    DistributionRegressor,
    MeanEmbedding,
    MomentEmbedding,
    SlicedWassersteinEmbedding,
    as_bags,
    bag_distances,
    bag_gram,
    bags_from_frame,
    exact_sliced_wasserstein,
    loo_residuals,
    point_gram,
    second_stage_report,
    stability_report,
)
from assay.statistics.distribution_kernels.selection import Output, solve
from assay.statistics.distribution_kernels.solvers import box_machine, loss_values

RNG = np.random.default_rng(0)
RAGGED = [RNG.standard_normal((m, 3)) * RNG.uniform(0.5, 2) + RNG.standard_normal(3) for m in (30, 7, 50, 20, 12, 41)]


def spread_bags(n, m, seed=0):
    """Bags N(m, v^2), y = m + v (chi2_1 - 1)."""
    rng = np.random.default_rng(seed)
    mean, v = rng.standard_normal(n), rng.uniform(0.3, 1.5, n)
    return mean[:, None] + v[:, None] * rng.standard_normal((n, m)), mean + v * (rng.chisquare(1, n) - 1)


# --- embeddings ------------------------------------------------------------------------------------------------------


def test_one_dimension_is_the_exact_distance():
    a, b = RNG.standard_normal((2, 64))
    u, v = SlicedWassersteinEmbedding(n_quantiles=64, standardize=False).fit([a, b]).transform([a, b])
    assert np.sum((u - v) ** 2) == pytest.approx(np.mean((np.sort(a) - np.sort(b)) ** 2), abs=1e-14)
    assert exact_sliced_wasserstein([a, b])[0, 1] ** 2 == pytest.approx(np.sum((u - v) ** 2), abs=1e-14)


def test_pot_gives_the_same():
    ot = pytest.importorskip("ot")
    bags = RNG.standard_normal((6, 40, 3)) + RNG.standard_normal((6, 1, 3))
    sw = SlicedWassersteinEmbedding(50, 40, standardize=False, random_state=1).fit(bags)
    ours, uneven = bag_distances(bags, embedding=sw), exact_sliced_wasserstein(RAGGED, directions=sw.directions_)
    for i in range(6):
        for j in range(i):
            theirs = ot.sliced_wasserstein_distance(bags[i], bags[j], projections=sw.directions_.T)
            assert ours[i, j] == pytest.approx(theirs, abs=1e-10)
            theirs = ot.sliced_wasserstein_distance(RAGGED[i], RAGGED[j], projections=sw.directions_.T)
            assert uneven[i, j] == pytest.approx(theirs, abs=1e-10)


def test_shift_and_scale():
    a, c = RNG.standard_normal((200, 4)), np.array([1.0, -2.0, 0.5, 3.0])
    sw = SlicedWassersteinEmbedding(20_000, 200, standardize=False, random_state=0).fit([a])
    squared = bag_distances([a, a + c], embedding=sw)[0, 1] ** 2
    assert squared == pytest.approx(np.mean((sw.directions_ @ c) ** 2), rel=1e-10)
    assert squared == pytest.approx(c @ c / 4, rel=0.03)
    b = RNG.exponential(size=(200, 4))
    few = SlicedWassersteinEmbedding(10, 200, standardize=False, random_state=0).fit([a])
    plain, scaled = (bag_distances([f * a, f * b], embedding=few)[0, 1] for f in (1, -3))
    assert scaled == pytest.approx(3 * plain, rel=1e-10)


@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_quantiles_see_only_the_empirical_measure(m, times, q, seed):
    rng = np.random.default_rng(seed)
    bag = rng.standard_normal((m, 2))
    sw = SlicedWassersteinEmbedding(3, q, standardize=False, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = sw.fit_transform([bag])
    again = sw.transform([rng.permutation(np.repeat(bag, times, axis=0))])
    np.testing.assert_allclose(first, again, rtol=0, atol=1e-15 * np.abs(bag).max())
    weights = rng.integers(1, 4, m)
    repeated = sw.transform([np.repeat(bag, weights, axis=0)])
    np.testing.assert_allclose(sw.transform([bag], [weights]), repeated, atol=1e-14)
    levels, projected = (np.arange(q) + 0.5) / q, np.sort(bag @ sw.directions_.T, axis=0)
    ranks = [int(np.argmax((np.arange(m) + 1) / m >= level - 1e-12)) for level in levels]
    np.testing.assert_allclose(first.reshape(3, q), projected[ranks].T / np.sqrt(3 * q), atol=1e-14)


@pytest.mark.parametrize(
    ("embedding", "tight"),
    [
        (SlicedWassersteinEmbedding(20, 16, random_state=0), 0),
        (MeanEmbedding(n_components=51, random_state=0), 1e-12),
        (MomentEmbedding(4, mixed=True), 1e-10),
    ],
)
def test_order_and_repetition_change_nothing(embedding, tight):
    first = embedding.fit(RAGGED).transform(RAGGED)
    shuffled = embedding.transform([RNG.permutation(b) for b in RAGGED])
    repeated = [np.repeat(b, 3, axis=0) for b in RAGGED]
    np.testing.assert_allclose(shuffled, first, rtol=0, atol=tight)
    np.testing.assert_allclose(embedding.transform(repeated), first, atol=1e-10)
    np.testing.assert_allclose(embedding.fit(repeated).transform(RAGGED), first, atol=1e-9)


def test_maximum_mean_discrepancy():
    exact = MeanEmbedding(length_scale=1.0, n_components=None, standardize=False)
    x, y = np.array([[0.3, 1.0]]), np.array([[1.1, -0.5]])
    distance = bag_distances([x, y], embedding=exact)
    assert distance[0, 0] == 0
    assert distance[0, 1] ** 2 == pytest.approx(2 - 2 * np.exp(-np.sum((x - y) ** 2) / 2), abs=1e-14)
    m, n = np.array([1.0, 0.5]), 100_000
    bags = [RNG.standard_normal((n, 2)), RNG.standard_normal((n, 2)) + m]
    found = bag_distances(bags, embedding=MeanEmbedding("gaussian", 1.0, 20_000, standardize=False, random_state=0))
    assert found[0, 1] ** 2 == pytest.approx(2 / 3 * (1 - np.exp(-(m @ m) / 6)), rel=0.02)
    a, b = RNG.standard_normal(40), RNG.exponential(size=30)
    energy = bag_distances([a, b], embedding=MeanEmbedding("energy", n_components=None, standardize=False))
    assert energy[0, 1] == pytest.approx(stats.energy_distance(a, b), rel=1e-9)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "matern32"])
@pytest.mark.parametrize("n_components", [2000, 1999])
def test_random_features_approximate(kernel, n_components):
    bags = [RNG.standard_normal((20, 2)) + RNG.standard_normal(2) for _ in range(30)]
    made = MeanEmbedding(kernel, 1.0, n_components, standardize=False, random_state=3).fit_transform(bags)
    exact = point_gram(bags, None, kernel, 1.0)
    assert made.shape == (30, n_components)
    assert np.abs(made @ made.T - exact).max() < 4 * np.sqrt(np.log(30) / n_components)
    full = MeanEmbedding(kernel, 1.0, 10_000, "nystroem", standardize=False).fit_transform(bags)
    np.testing.assert_allclose(full @ full.T, exact, rtol=1e-6)
    assert np.linalg.eigvalsh(exact).min() > -1e-8


@pytest.mark.parametrize("kernel", ["laplace", "matern32", "gaussian"])
def test_a_point_is_at_no_distance_from_itself(kernel):
    """Far points lose digits in ``|x|^2 + |y|^2 - 2 x'y``, and a square root makes half of the digits of the rest."""
    far = [[[x, -2 * x]] for x in np.random.default_rng(0).normal(0, 1e6, 50)]
    assert (np.diag(point_gram(far, None, kernel, 1.0)) == 1.0).all()


def test_blocks_of_the_exact_gram_do_not_show():
    bags = [RNG.standard_normal((m, 2)) for m in (500, 30, 1300, 2, 700)]
    weights = [RNG.uniform(0, 1, len(b)) for b in bags]
    plain, weighted = point_gram(bags), point_gram(as_bags(bags, weights))
    for i, a in enumerate(bags):
        for j, b in enumerate(bags):
            k = np.exp(-((a[:, None] - b) ** 2).sum(-1) / 2)
            assert plain[i, j] == pytest.approx(k.mean(), rel=1e-9)
            w, v = weights[i] / weights[i].sum(), weights[j] / weights[j].sum()
            assert weighted[i, j] == pytest.approx(w @ k @ v, rel=1e-9)
    np.testing.assert_allclose(point_gram(bags, bags), plain, rtol=1e-9)


# --- machines --------------------------------------------------------------------------------------------------------

ONE_POINT = MeanEmbedding(length_scale=1.0, n_components=None, standardize=False)


@pytest.mark.filterwarnings("ignore:.*hold one point")
def test_bags_of_one_point_are_an_ordinary_kernel_machine():
    X, new = RNG.standard_normal((60, 2)), RNG.standard_normal((20, 2))
    y, label = np.sin(2 * X[:, 0]) + X[:, 1], np.where(X[:, 0] * X[:, 1] > 0, "p", "n")
    lam, n = 1e-2, 60
    options = {"embedding": ONE_POINT, "kernel": "linear", "lam": lam, "tol": 1e-10}
    ours = DistributionRegressor(fit_offset=False, **options).fit(X[:, None], y).predict(new[:, None])
    theirs = KernelRidge(alpha=lam * n, kernel="rbf", gamma=0.5).fit(X, y).predict(new)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    svc = SVC(C=1 / (2 * lam * n), gamma=0.5, tol=1e-10).fit(X, label)
    model = DistributionClassifier(**options).fit(X[:, None], label)
    np.testing.assert_allclose(model.decision_function(new[:, None]), svc.decision_function(new), atol=1e-6)
    assert (model.predict(new[:, None]) == svc.predict(new)).all()
    svr = SVR(C=1 / (2 * lam * n), gamma=0.5, epsilon=0.1, tol=1e-10).fit(X, y)
    model = DistributionRegressor("epsilon", epsilon=0.1, **options).fit(X[:, None], y)
    np.testing.assert_allclose(model.predict(new[:, None]), svr.predict(new), atol=1e-6)
    # half of the absolute loss
    svr = SVR(C=1 / (4 * lam * n), gamma=0.5, epsilon=0.0, tol=1e-10).fit(X, y)
    model = DistributionRegressor("pinball", quantile=0.5, **options).fit(X[:, None], y)
    np.testing.assert_allclose(model.predict(new[:, None]), svr.predict(new), atol=1e-6)


@pytest.mark.parametrize("offset", [True, False])
def test_squared_error_is_at_its_minimum(offset):
    """The offset that minimises is not the mean of y, in general: the gradients in b and a vanish."""
    bags, y = RNG.standard_normal((40, 9, 2)), RNG.standard_normal(40) + 3
    model = DistributionRegressor(lam=1e-2, fit_offset=offset, random_state=0).fit(bags, y)
    residual = y - model.predict(bags)
    np.testing.assert_allclose(model.dual_coef_[:, 0] * 1e-2 * 40, residual, atol=1e-9)
    assert (abs(residual.sum()) < 1e-9) == offset


@pytest.mark.parametrize("offset", [True, False])
def test_leave_one_out_is_that_of_refits(offset):
    G, y = rbf_kernel(RNG.standard_normal((15, 2))), RNG.standard_normal(15)
    lam = 0.01
    for i, found in enumerate(loo_residuals(G, y, lam, fit_offset=offset)):
        rows = np.delete(np.arange(15), i)
        H = G[np.ix_(rows, rows)] + lam * 15 * np.eye(14)
        one, target = np.linalg.solve(H, np.ones(14)), np.linalg.solve(H, y[rows])
        b = target.sum() / one.sum() if offset else 0.0
        assert found == pytest.approx(y[i] - G[i, rows] @ (target - b * one) - b, abs=1e-8)


@pytest.mark.parametrize("loss", ["hinge", "logistic", "pinball", "epsilon", "square"])
def test_stability_and_norm_hold_in_every_problem(loss):
    worst = 0.0
    for seed in range(20):  # five losses: 100 problems
        rng = np.random.default_rng(seed)
        n = int(rng.integers(8, 30))
        bags, lam = rng.standard_normal((n, 6, 2)) + rng.standard_normal((n, 1, 2)), 10 ** rng.uniform(-4, 0)
        options = {"lam": lam, "fit_offset": False, "random_state": 0, "length_scale": 1.0}
        if loss in ("hinge", "logistic"):
            y = np.arange(n) % 2
            model = DistributionClassifier(loss, **options)
        else:
            y = rng.standard_normal(n)
            model = DistributionRegressor(loss, quantile=rng.uniform(0.1, 0.9), **options)
        found = stability_report(model, bags, y, 4, test_bags=bags, test_y=y, random_state=0)
        assert found["violations"] == 0 and found["norm"] <= found["norm_limit"] * (1 + 1e-6)
        assert found["gap"] == pytest.approx(0, abs=1e-9) and found["gap_bound"] > 0
        worst = max(worst, found["max_norm_diff"] / found["norm_bound"])
    assert worst > 0.02  # a bound that is never approached would not notice a wrong factor


def test_a_large_penalty_leaves_the_offset():
    bags, y = spread_bags(40, 20)
    model = DistributionRegressor(lam=1e9).fit(bags, y)
    np.testing.assert_allclose(model.predict(bags), y.mean(), atol=1e-6)
    none = DistributionRegressor("pinball", lam=1e9, fit_offset=False).fit(bags, y)
    assert np.abs(none.predict(bags)).max() < 1e-6


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.8])
def test_the_offset_puts_the_share_of_targets_below(quantile):
    bags, y = spread_bags(100, 30)
    model = DistributionRegressor("pinball", quantile, lam=1e-1, tol=1e-8, random_state=0).fit(bags, y)
    residual = y - model.predict(bags)
    assert (residual < -1e-5).mean() <= quantile <= (residual < 1e-5).mean()
    narrow = DistributionRegressor("pinball", quantile, lam=1e-5, random_state=0).fit(bags, y).predict(bags)
    assert np.mean(np.abs(y - narrow)) < np.mean(np.abs(residual))


def test_logistic_regression_is_that_of_its_features():
    bags = np.concatenate([RNG.standard_normal((40, 20, 1)), RNG.exponential(size=(20, 20, 1)) - 1])
    for y in (np.repeat([0, 1], [40, 20]), np.repeat(["a", "b", "c"], 20)):
        lam = 1e-3
        model = DistributionClassifier("logistic", kernel="linear", lam=lam, tol=1e-9, random_state=0).fit(bags, y)
        Z = model.embedding_.transform(bags)
        theirs = LogisticRegression(C=1 / (2 * lam * 60), tol=1e-9, max_iter=10_000).fit(Z, y)
        np.testing.assert_allclose(model.predict_proba(bags), theirs.predict_proba(Z), atol=1e-4)
        assert (model.classes_ == np.unique(y)).all()
    with pytest.raises(AttributeError, match="predict_proba") as refused:
        _ = DistributionClassifier().predict_proba
    assert "loss='logistic'" in str(refused.value.__cause__) and not hasattr(DistributionClassifier(), "predict_proba")


def test_coverage_on_spread():
    bags, y = spread_bags(300, 100)
    test, truth = spread_bags(1000, 100, 1)
    model = DistributionQuantileRegressor((0.05, 0.5, 0.95), lam="cv", random_state=0).fit(bags, y)
    low, high = model.predict_interval(test).T
    assert abs(np.mean((low <= truth) & (truth <= high)) - 0.9) < 3 * np.sqrt(0.09 / 1000) + 0.03
    assert (np.diff(model.predict_quantiles(test), axis=1) >= 0).all() and model.score(test, truth) > -0.5


def test_all_inputs_predict_the_same():
    import pandas as pd

    bags, y = RNG.standard_normal((20, 6, 2)), RNG.standard_normal(20)
    rows = pd.DataFrame(bags.reshape(-1, 2), columns=["a", "b"]).assign(id=np.repeat(np.arange(20), 6))
    model = DistributionRegressor(random_state=0)
    first = model.fit(bags, y).predict(bags)
    for form in (list(bags), bags_from_frame(rows, "id").bags, as_bags(bags)):
        assert np.array_equal(clone(model).fit(form, y).predict(form), first)


@pytest.mark.parametrize(
    "model",
    [
        DistributionRegressor(),
        DistributionRegressor("epsilon", tol=1e-10),
        DistributionClassifier(tol=1e-10),
        DistributionClassifier("logistic"),
        DistributionQuantileRegressor(tol=1e-10),
    ],
    ids=str,
)
def test_check_estimator(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(model)


@pytest.mark.parametrize("loss", ["square", "epsilon", "pinball", "hinge"])
@pytest.mark.parametrize("offset", [True, False])
def test_features_of_all_bags_give_the_machine(loss, offset):
    """The solver on explicit features, with every bag a landmark, reaches the objective of the one on the kernel."""
    rng = np.random.default_rng(0)
    G, lam, w = rbf_kernel(rng.standard_normal((60, 2))), 1e-3, rng.uniform(0.5, 2, 60)
    y = rng.standard_normal(60) if loss != "hinge" else np.where(np.arange(60) % 2, 1.0, -1.0)
    output, values = [Output(loss, y, 0.3, 0.1)], []
    for among in (None, G):
        ((coef, b, _),) = solve(G, among, output, [lam], w, fit_offset=offset, tol=1e-9, max_iter=10**6)
        f = G @ coef[:, 0] + b[0]
        each = loss_values(loss, y, f, quantile=0.3, epsilon=0.1)
        values.append(w @ each / w.sum() + lam * coef[:, 0] @ G @ coef[:, 0])
    assert values[0] - 1e-7 <= values[1] <= values[0] + 1e-3


def test_landmarks_are_few_and_good():
    bags, y = spread_bags(300, 50)
    model = DistributionRegressor(lam=1e-3, n_landmarks=60, random_state=0).fit(bags, y)
    assert model.dual_coef_.shape == (60, 1)
    test, truth = spread_bags(300, 50, 1)
    exact = DistributionRegressor(lam=1e-3, random_state=0).fit(bags, y)
    assert model.score(test, truth) > exact.score(test, truth) - 0.03


def test_model_selection_over_bags():
    label = np.array([0, 1] * 30)
    bags = [RNG.laplace(size=RNG.integers(50, 90)) if k else RNG.normal(0, 2**0.5, 70) for k in label]
    boxed = np.empty(60, dtype=object)
    boxed[:] = bags
    model = DistributionClassifier(embedding=SlicedWassersteinEmbedding(random_state=0), random_state=0)
    grid = {"lam": [1e-2, 1e-5], "embedding__n_quantiles": [8, 64]}
    found = [
        GridSearchCV(model, grid, cv=KFold(3)).fit(form, label).best_score_ for form in (bags, boxed, as_bags(bags))
    ]
    assert found[0] == found[1] == found[2] > 0.6
    inside = DistributionClassifier(lam="cv", length_scale="cv", random_state=0).fit(bags, label)
    assert len(inside.cv_results_) == 35 and inside.lam_ == min(inside.cv_results_, key=lambda e: e["risk"])["lam"]
    pipe = make_pipeline(MeanEmbedding(random_state=0), SVC()).fit(bags, label)
    assert GridSearchCV(pipe, {"svc__C": [1, 10]}, cv=3).fit(bags, label).best_score_ > 0.5


@pytest.mark.parametrize(
    "model",
    [
        DistributionRegressor(embedding="kme", random_state=0),
        DistributionRegressor(embedding=MeanEmbedding(n_components=None), random_state=0),
        DistributionQuantileRegressor(embedding="moments", n_landmarks=10),
        DistributionClassifier("logistic", embedding=SlicedWassersteinEmbedding(5, 8, random_state=0)),
    ],
    ids=str,
)
def test_save_and_load(model, tmp_path):
    bags = [RNG.standard_normal((m, 2)) for m in RNG.integers(5, 15, 20)]
    y = np.array(["x", "y"] * 10) if isinstance(model, DistributionClassifier) else RNG.standard_normal(20)
    found = model.fit(bags, y).predict(bags)
    model.save(tmp_path / "m")
    loaded = type(model).load(tmp_path / "m")
    assert np.array_equal(loaded.predict(bags), found) and loaded.n_iter_ == model.n_iter_


def test_conformal_intervals_on_embedded_bags():
    torch = pytest.importorskip("torch")
    from assay.statistics.rqr import ConformalIntervalRegressor, RQRRegressor

    torch.manual_seed(0)
    bags, y = spread_bags(400, 50)
    test, truth = spread_bags(500, 50, 1)
    embedding = SlicedWassersteinEmbedding(n_quantiles=16, random_state=0)
    X, new = embedding.fit_transform(bags), embedding.transform(test)
    kernel = DistributionQuantileRegressor((0.05, 0.95), embedding="passthrough", lam=1e-3)
    for model in (
        RQRRegressor(0.9, max_epochs=30, random_state=0),
        ConformalIntervalRegressor(kernel, coverage=0.9, random_state=0),
    ):
        low, high = model.fit(X, y).predict_interval(new).T
        assert 0.82 < np.mean((low <= truth) & (truth <= high)) <= 0.98


def test_second_stage():
    rng = np.random.default_rng(0)
    big = [rng.standard_normal((2560, 1)) * rng.uniform(0.5, 1.5) for _ in range(12)]
    y = np.array([b.std() for b in big])
    for embedding in ("kme", MeanEmbedding(n_components=None, standardize=False, length_scale=1.0)):
        if embedding != "kme":
            small = [b[:300] for b in big]
            report = second_stage_report(DistributionRegressor(embedding=embedding).fit(small, y), small, [10, 40])
        else:
            model = DistributionRegressor(embedding=embedding, random_state=0).fit(big, y)
            report = second_stage_report(model, big, [10, 40, 160], n_draws=3, random_state=0)
            assert -0.65 < report["slope"] < -0.4
        assert report["violations"] == 0 and (report["rms"] < report["rms_bound"]).all()
    sw = second_stage_report(SlicedWassersteinEmbedding().fit(big), big, [10, 40, 160], random_state=0)
    assert -0.65 < sw["slope"] < -0.4 and np.isnan(sw["rms_bound"]).all()


def test_the_solver_is_at_the_optimum_of_its_dual():
    """Against a general solver, for all losses, weights and both kinds of offset."""
    from scipy.optimize import minimize

    for loss in ("hinge", "pinball", "epsilon"):
        for offset in (True, False):
            rng = np.random.default_rng(3)
            G = rbf_kernel(rng.standard_normal((8, 2)))
            y, w = np.where(np.arange(8) % 2, 1.0, -1.0), rng.uniform(0.5, 2, 8)
            y = y if loss == "hinge" else rng.standard_normal(8)
            a, _, _ = box_machine(G, y, loss, 0.05, w, offset, quantile=0.3, epsilon=0.2, tol=1e-10)
            C = w / (2 * 0.05 * w.sum())
            low, high = {"hinge": (np.minimum(y * C, 0), np.maximum(y * C, 0)), "pinball": (-0.7 * C, 0.3 * C)}.get(
                loss, (-C, C)
            )
            eps = 0.2 if loss == "epsilon" else 0.0

            def dual(v, G=G, y=y, eps=eps):
                p, n = v[:8], v[8:]
                return 0.5 * (p - n) @ G @ (p - n) - y @ (p - n) + eps * (p + n).sum()

            bounds = [(0, h) for h in np.maximum(high, 0)] + [(0, -b) for b in np.minimum(low, 0)]
            constraints = {"type": "eq", "fun": lambda v: (v[:8] - v[8:]).sum()} if offset else ()
            best = minimize(
                dual,
                np.zeros(16),
                bounds=bounds,
                constraints=constraints,
                method="SLSQP",
                options={"ftol": 1e-14, "maxiter": 1000},
            )
            mine = dual(np.concatenate([np.maximum(a, 0), np.maximum(-a, 0)]))
            assert mine <= best.fun + 1e-7 and abs(mine - best.fun) < 1e-4


def test_bag_gram_feeds_any_machine():
    gram = bag_gram(RAGGED, random_state=0)
    assert np.allclose(np.diag(gram), 1) and np.linalg.eigvalsh(gram).min() > -1e-8
