"""NormGD against closed forms, SciPy's conventions, the report, estimators, errors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import OptimizeWarning, minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression

from assay.statistics import (
    PolynomialLinkRegressor,
    SymmetricGaussianMixture,
    normgd_minimize,
    singularity_report,
)
from assay.statistics.normgd import PolynomialLink, SymmetricMixture, guarded_eigenvalue, lanczos_extremes


def fits(power: int, n: int, seed: int = 0, d: int = 4):
    rng = np.random.default_rng(seed)
    X, y, u = rng.normal(size=(n, d)), rng.normal(size=n), rng.normal(size=d)
    model = PolynomialLink(X, y, power) if power else SymmetricMixture(X)
    return model, 1.7 * u / np.linalg.norm(u)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0, 2, 3]), st.sampled_from([1e-8, 0.03, 700.0, 1e9]))
def test_iterates_ignore_the_scale_of_the_loss_and_follow_rotation_and_shift(seed, power, k):
    model, x0 = fits(power, 200, seed, 3)
    rng = np.random.default_rng(seed)
    Q, shift = np.linalg.qr(rng.normal(size=(3, 3)))[0], rng.normal(size=3)

    def run(fun, start):
        return normgd_minimize(fun, start, jac=True, hess=True, gtol=0, xtol=0, maxiter=6).x

    plain = run(model, x0)
    np.testing.assert_allclose(run(lambda x: tuple(k * part for part in model(x)), x0), plain, rtol=1e-7, atol=1e-9)

    def moved(z):
        f, g, H = model(Q.T @ (z - shift))
        return f, Q @ g, Q @ H @ Q.T

    np.testing.assert_allclose(Q.T @ (run(moved, Q @ x0 + shift) - shift), plain, rtol=1e-7, atol=1e-8)


def test_on_a_quadratic_it_is_descent_with_eta_over_the_largest_eigenvalue():
    A = np.diag([1.0, 4.0, 9.0])
    x = x0 = np.array([1.0, -2.0, 0.5])
    for _ in range(7):
        x = x - 0.5 / 9 * (A @ x)
    found = normgd_minimize(lambda z: (z @ A @ z / 2, A @ z, A), x0, jac=True, hess=True, gtol=0, xtol=0, maxiter=7)
    np.testing.assert_allclose(found.x, x, rtol=1e-12)


@pytest.mark.parametrize("power", [0, 2, 3])
def test_derivatives_match_differences_to_a_millionth(power):
    model, theta = fits(power, 300, 5)
    _, g, H = model(theta)
    h = 1e-5
    eye = np.eye(4)
    numeric = np.array([(model(theta + h * e)[0] - model(theta - h * e)[0]) / (2 * h) for e in eye])
    np.testing.assert_allclose(g, numeric, rtol=1e-6, atol=1e-6)
    numeric = np.array([(model(theta + h * e)[1] - model(theta - h * e)[1]) / (2 * h) for e in eye])
    np.testing.assert_allclose(H, numeric, rtol=1e-6, atol=1e-6)


def test_power_and_exact_eigenvalue_agree_after_warm_up():
    model, x0 = fits(2, 2000, 1, 12)
    options = {"jac": True, "hess": True, "gtol": 0, "xtol": 0, "maxiter": 8}
    exact = normgd_minimize(model, x0, eig="exact", **options)
    A = np.random.default_rng(1).normal(size=(50, 50))
    A = A @ A.T / 50 + 3 * np.outer(np.ones(50), np.ones(50)) / 50
    vector = lanczos_extremes(lambda v: A @ v, np.random.default_rng(2).normal(size=50), 20)[2]
    _, high, _ = lanczos_extremes(lambda v: A @ v, vector, 3)
    assert high == pytest.approx(np.linalg.eigvalsh(A)[-1], rel=0.02)
    power = normgd_minimize(model, x0, eig="power", **options)
    assert power.nit == exact.nit and power.lam_max[0] == pytest.approx(1.05 * exact.lam_max[0], rel=0.02)
    by_products = normgd_minimize(
        model.fun_jac, x0, jac=True, hessp=lambda t, v: model(t)[2] @ v, gtol=0, xtol=0, maxiter=8
    )
    np.testing.assert_allclose(by_products.x, power.x, rtol=1e-6)
    by_differences = normgd_minimize(model.fun_jac, x0, jac=True, gtol=0, xtol=0, maxiter=8)
    np.testing.assert_allclose(by_differences.x, power.x, rtol=1e-3)


def test_the_guard_and_its_steps_descend():
    assert guarded_eigenvalue(-5, 1) == 1 and guarded_eigenvalue(-1, -1) == 1
    assert guarded_eigenvalue(-5, 1e-9) == 5 and guarded_eigenvalue(-1, -1, guard=False) == -1
    with pytest.raises(FloatingPointError):
        guarded_eigenvalue(np.nan, 1)
    for H in (np.diag([-5.0, 1.0]), -np.eye(2)):
        x = np.array([0.3, 0.4])
        found = normgd_minimize(lambda z, A=H: (z @ A @ z / 2, A @ z, A), x, jac=True, hess=True, maxiter=1)
        assert found.fun < x @ H @ x / 2

    def concave(z):
        return -(z @ z) / 2, -z, -np.eye(2)

    uphill = normgd_minimize(concave, x, jac=True, hess=True, guard=False, maxiter=1)
    assert uphill.fun > -(x @ x) / 2


def test_the_guard_saves_random_starts_with_a_strong_signal():
    """Without it many of 40 starts walk uphill from where the loss is concave; with it none does."""
    rng = np.random.default_rng(0)
    X, truth = rng.normal(size=(1000, 4)), np.array([0.5, -0.5, 0.5, -0.5])
    model = PolynomialLink(X, (X @ truth) ** 2 + rng.normal(size=1000))
    fails = {True: 0, False: 0}
    for _ in range(40):
        u = rng.normal(size=4)
        for guard in fails:
            try:
                x = normgd_minimize(model, 0.3 * u / np.linalg.norm(u), jac=True, hess=True, guard=guard).x
                fails[guard] += min(np.linalg.norm(x - truth), np.linalg.norm(x + truth)) > 0.3
            except FloatingPointError:
                fails[guard] += 1
    assert fails[True] == 0 and fails[False] > 4


@pytest.mark.parametrize(("power", "odd"), [(2, 3), (3, 15)])
def test_population_loss(power, odd):
    theta = np.array([0.6, -0.5])
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(1_000_000, 2)), rng.normal(size=1_000_000)
    expected = (1 + odd * (theta @ theta) ** power) / 2
    assert PolynomialLink(X, y, power)(theta, hessian=False)[0] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("power", [2, 3])
def test_contraction_before_the_plateau(power):
    model, x0 = fits(power, 100_000, 2)
    norms = [1.7]
    normgd_minimize(
        model, x0, jac=True, hess=True, maxiter=4, gtol=0, xtol=0, callback=lambda x: norms.append(np.linalg.norm(x))
    )
    ratios = np.array(norms[1:]) / norms[:-1]
    assert np.abs(ratios - (1 - 0.5 / (2 * power - 1))).max() < 0.02


@pytest.mark.parametrize("power", [0, 2, 3])
def test_the_plateau_is_the_local_optimum(power):
    model, x0 = fits(power, 4000, 3)
    found = normgd_minimize(model, x0, jac=True, hess=True, maxiter=3000, gtol=1e-13, xtol=1e-13)
    best = minimize(model.fun_jac, found.x * 1.01, jac=True, method="L-BFGS-B", options={"ftol": 1e-18, "gtol": 1e-13})
    np.testing.assert_allclose(found.x, best.x, rtol=0, atol=1e-6)


def test_logistic_regression():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(500, 3))
    y = (rng.uniform(size=500) < 1 / (1 + np.exp(-X @ [1.0, -0.5, 0.2]))).astype(float)

    def loss(t):
        z = X @ t
        p = 1 / (1 + np.exp(-z))
        return np.logaddexp(0, z).mean() - (y * z).mean(), X.T @ (p - y) / 500, (X.T * (p * (1 - p))) @ X / 500

    found = normgd_minimize(loss, np.zeros(3), jac=True, hess=True, eta=1.0, gtol=1e-12)
    peer = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10, max_iter=1000).fit(X, y)
    np.testing.assert_allclose(found.x, peer.coef_[0], atol=1e-5)
    assert found.success and found.nit < 60


def test_report_reads_the_exponent_and_warns_about_mixed_degrees():
    model, x0 = fits(2, 50_000, 4)
    path = [x0]
    normgd_minimize(model, x0, jac=True, hess=True, maxiter=9, gtol=0, xtol=0, callback=lambda x: path.append(x))
    report = singularity_report(lambda t: model(t)[2], path[-1], path=np.array(path), n=50_000)
    assert report["exponent"] == pytest.approx(2, abs=0.3) and report["singular"]
    assert report["radius"] == pytest.approx((4 / 50_000) ** 0.25, rel=0.5)
    path = [x0]  # the same from the whole path, whose end lies in the noise
    found = normgd_minimize(model, x0, jac=True, hess=True, callback=lambda x: path.append(x))
    whole = singularity_report(lambda t: model(t)[2], found.x, path=np.array(path), n=50_000)
    assert len(path) > 60 and whole["exponent"] == pytest.approx(2, abs=0.3) and whole["singular"]
    strong = PolynomialLink(model.X, (model.X @ [1.0, 0, 0, 0]) ** 2 + model.y, 2)
    path = [x0]
    found = normgd_minimize(strong, x0, jac=True, hess=True, callback=lambda x: path.append(x))
    calm = singularity_report(lambda t: strong(t)[2], found.x, path=np.array(path), n=50_000)
    assert not calm["singular"] and calm["radius"] == pytest.approx((4 / 50_000) ** 0.5)
    regular = singularity_report(lambda t: np.eye(2), np.zeros(2), n=200)
    assert regular["rank"] == 2 and not regular["singular"] and regular["radius"] == pytest.approx(0.1)
    assert singularity_report(lambda t: np.diag([1.0, 0.0]), np.zeros(2))["condition"] == np.inf

    def mixed(t):
        return np.diag([1.0, 12 * t[1] ** 2])

    with pytest.warns(UserWarning, match="different rates"):
        singularity_report(
            mixed, np.array([0.0, 0.01]), path=np.array([[1.0, 1.0], [0.5, 0.3], [0.2, 0.1], [0.1, 0.01]])
        )
    for theta, hess, error in (([np.nan], lambda t: np.eye(1), ValueError), ([0.0], lambda t: np.eye(2), ValueError),
                               ([0.0], lambda t: np.full((1, 1), np.nan), FloatingPointError)):  # fmt: skip
        with pytest.raises(error):
            singularity_report(hess, theta)
    with pytest.raises(ValueError, match="path"):
        singularity_report(lambda t: np.eye(1), [0.0], path=np.zeros((3, 2)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eta": -1.0}, "eta"),
        ({"eig": "all"}, "eig"),
        ({"power_iters": 0}, "power_iters"),
        ({"jac": None}, "gradient"),
        ({"jac": None, "hess": True}, "jac=True"),
        ({"eig": "exact"}, "hess"),
        ({"bounds": [(0, 1)]}, "bounds"),
        ({"constraints": [{"type": "eq"}]}, "constraints"),
        ({"hess": "2-point"}, "hess"),
        ({"gtol": -1}, "gtol"),
        ({"maxiter": 0}, "maxiter"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        normgd_minimize(lambda x: (x @ x, 2 * x), np.ones(2), **({"jac": True} | options))


def test_scipys_conventions():
    """Through scipy.optimize.minimize: tol, maxiter, both callbacks, StopIteration, args, unknown options, disp."""
    model, x0 = fits(2, 400, 6)

    def fun(x, k):
        f, g = model.fun_jac(x)
        return k * f, k * g

    options = {"eta": 1.0, "maxiter": 4}
    hess = {"hess": lambda x, k: k * model(x)[2]}
    seen, named = [], []
    found = minimize(
        fun, x0, args=(3.0,), jac=True, method=normgd_minimize, options=options, callback=seen.append, **hess
    )
    assert found.nit == len(seen) == len(found.lam_max) == len(found.step_norms) == 4
    assert not found.success and found.status == 3 and found.nhev == 4 and found.nfev == found.njev == 5
    assert found.fun == pytest.approx(3 * model.fun_jac(found.x)[0]) and "maxiter" in found.message
    np.testing.assert_array_equal(seen[-1], found.x)

    def stop(intermediate_result):
        named.append(intermediate_result.fun)
        if len(named) == 2:
            raise StopIteration

    stopped = minimize(fun, x0, args=(3.0,), jac=True, method=normgd_minimize, callback=stop, **hess)
    assert stopped.nit == 2 and stopped.status == 4 and named[1] == stopped.fun < named[0]
    rough, fine = (minimize(fun, x0, (1.0,), normgd_minimize, True, tol=tol, **hess) for tol in (1e-2, 1e-8))
    assert rough.success and fine.success and rough.nit < fine.nit
    assert np.linalg.norm(fine.jac) <= 1e-8 or fine.step_norms[-1] <= 1e-8 * (1 + np.linalg.norm(fine.x))
    with pytest.raises(ValueError, match="bounds"):
        minimize(fun, x0, (1.0,), normgd_minimize, True, bounds=[(0, 1)] * 4)
    with pytest.warns(OptimizeWarning, match="learning_rate"):
        minimize(fun, x0, (1.0,), normgd_minimize, True, options={"learning_rate": 1, "maxiter": 1}, **hess)
    assert (
        minimize(fun, list(x0), (1.0,), normgd_minimize, True, **hess).nit
        == minimize(
            lambda x: fun(x, 1.0)[0],
            x0,
            jac=lambda x: fun(x, 1.0)[1],
            method=normgd_minimize,
            hess=lambda x: model(x)[2],
        ).nit
    )


def test_statistical_stop_ends_at_the_radius():
    for power in (0, 2, 3):
        model, x0 = fits(power, 20_000, 7)
        full = normgd_minimize(model, x0, jac=True, hess=True)
        early = normgd_minimize(model, x0, jac=True, hess=True, radius=model.radius)
        assert early.status == 2 and early.success and early.nit < full.nit / 4
        assert np.linalg.norm(early.x) < 3 * model.radius(0 * x0, early.fun)
        number = normgd_minimize(model, x0, jac=True, hess=True, radius=model.radius(0 * x0, early.fun))
        assert abs(number.nit - early.nit) <= 2
        assert model.radius(0 * x0, 0.5) == pytest.approx((4 / 20_000) ** (1 / (2 * (power or 2))), rel=0.02)
        # with signal the radius is that of a regular fit
        assert model.radius(np.array([1.0, 0, 0, 0]), 0.5) == pytest.approx((4 / 20_000) ** 0.5, rel=0.05)


@pytest.mark.parametrize("power", [0, 2, 3, 4])
def test_products_are_those_of_the_hessian(power):
    model, theta = fits(power, 300, 8)
    v = np.array([0.3, -1.0, 0.2, 0.7])
    np.testing.assert_allclose(model.hessp(theta, v), model(theta)[2] @ v, rtol=1e-10)
    if power in (2, 3):
        short = PolynomialLink(model.X, model.y, power, sufficient_statistics=True)
        np.testing.assert_allclose(short.hessp(theta, v), model.hessp(theta, v), rtol=1e-9)
        M, b, powers, ways = short.polynomial()
        c = ways * np.prod(theta**powers, axis=1)
        assert c @ M @ c / 2 - b @ c + model.y @ model.y / 600 == pytest.approx(model(theta)[0])
    else:
        with pytest.raises((ValueError, AttributeError)):
            model.polynomial()


def test_lanczos_in_large_dimension_with_negative_curvature():
    values = np.concatenate([np.linspace(-4, -1, 5000), np.linspace(0, 0.5, 4999), [2.0]])
    rng = np.random.default_rng(0)
    low, high, vector = lanczos_extremes(lambda v: values * v, rng.normal(size=10_000), 40)
    assert high == pytest.approx(2, rel=0.02) and low == pytest.approx(-4, rel=0.02)
    for _ in range(10):  # warm starts of three products sharpen it
        _, high, vector = lanczos_extremes(lambda v: values * v, vector + 0.001 * rng.normal(size=10_000), 3)
    assert high == pytest.approx(2, rel=0.02) and abs(vector[-1]) > 0.9
    assert lanczos_extremes(lambda v: 0 * v, np.ones(5), 3)[:2] == (0, 0)


def test_a_hessian_of_zero_is_refused_and_far_fits_use_products():
    with pytest.raises(FloatingPointError, match="linear loss"):
        normgd_minimize(lambda x: (x.sum(), np.ones(2), np.zeros((2, 2))), np.ones(2), jac=True, hess=True)
    with pytest.raises(FloatingPointError, match="linear loss"):
        normgd_minimize(lambda x: (x.sum(), np.ones(2)), np.ones(2), jac=True, hessp=lambda x, v: 0 * v)
    with pytest.raises(ValueError, match="hessp must give"):
        normgd_minimize(lambda x: (x @ x, 2 * x), np.ones(2), jac=True, hessp=lambda x, v: np.ones(3))
    rng = np.random.default_rng(0)
    X, theta = rng.normal(size=(3000, 80)), np.full(80, 0.2)
    y = (X @ theta) ** 2
    model = PolynomialLinkRegressor(random_state=0, n_restarts=2, max_iter=2000).fit(X, y)
    np.testing.assert_allclose(np.abs(model.coef_), theta, atol=1e-4)


def test_bad_values():
    with pytest.raises(ValueError, match="x0"):
        normgd_minimize(lambda x: (1.0, x), [[1.0]], jac=True)
    with pytest.raises(FloatingPointError, match="x ="):
        normgd_minimize(lambda x: (np.nan, x), np.ones(2), jac=True)
    with pytest.raises(FloatingPointError, match="Hessian"):
        normgd_minimize(lambda x: (1.0, x, np.full((2, 2), np.nan)), np.ones(2), jac=True, hess=True)
    with pytest.raises(ValueError, match="gradient must have shape"):
        normgd_minimize(lambda x: (1.0, np.ones(3)), np.ones(2), jac=True)
    with pytest.raises(ValueError, match="Hessian must have shape"):
        normgd_minimize(lambda x: (1.0, x), np.ones(2), jac=True, hess=lambda x: np.eye(3))
    for make in (lambda: PolynomialLink(np.ones((0, 2)), []), lambda: PolynomialLink(np.ones((3, 1)), np.ones(2)),
                 lambda: SymmetricMixture([[np.nan]]), lambda: SymmetricMixture(np.ones((2, 2)), 0),
                 lambda: PolynomialLink(np.ones((3, 20)), np.ones(3), sufficient_statistics=True)):  # fmt: skip
        with pytest.raises(ValueError):
            make()
    with pytest.raises(ValueError, match="not zero"):
        lanczos_extremes(lambda v: v, np.zeros(2), 3)
    with pytest.raises(FloatingPointError):
        lanczos_extremes(lambda v: v * np.nan, np.ones(2), 3)


@pytest.mark.parametrize("solver", ["normgd", "gd", "lbfgs", "newton"])
def test_solvers_of_the_estimators_agree(solver):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(800, 2))
    y = (X @ [1.0, -0.5]) ** 2 + 0.1 * rng.normal(size=800)
    model = PolynomialLinkRegressor(solver=solver, max_iter=3000, random_state=0).fit(X, y)
    np.testing.assert_allclose(model.coef_ * np.sign(model.coef_[0]), [1.0, -0.5], atol=0.03)
    assert not model.singular_ and model.score(X, y) > 0.95
    Z = np.concatenate([X[:400] + 2, X[400:] - 2]) * 0.5
    mixture = SymmetricGaussianMixture(solver=solver, scale="estimate", random_state=0).fit(Z)
    np.testing.assert_allclose(np.abs(mixture.theta_), [1, 1], atol=0.1)
    assert mixture.scale_ == pytest.approx(0.5, abs=0.05) and np.isfinite(mixture.score(Z))
    assert (mixture.predict(Z)[:400] == mixture.predict(Z)[0]).mean() > 0.95


def test_estimators_refuse_bad_options():
    X, y = np.ones((4, 1)) * [[1], [2], [3], [4]], np.arange(4.0)
    for options, words in (({"power": 1}, "power"), ({"power": 2.5}, "power"), ({"solver": "x"}, "solver"),
                           ({"eta": 0}, "eta"), ({"max_iter": 0}, "max_iter"), ({"n_restarts": 1.5}, "n_restarts"),
                           ({"tol": -1}, "tol"), ({"stop": "late"}, "stop"),
                           ({"stop": "statistical", "solver": "gd"}, "stop")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            PolynomialLinkRegressor(**options).fit(X, y)
    with pytest.raises(ValueError, match="scale"):
        SymmetricGaussianMixture(scale="free").fit(X)
    with pytest.raises(ValueError, match="reg_covar"):
        SymmetricGaussianMixture(reg_covar=-1).fit(X)


def test_estimators_without_signal_stop_early_and_warn():
    rng = np.random.default_rng(1)
    X, y = rng.normal(size=(4000, 3)), rng.normal(size=4000)
    for make, data in ((PolynomialLinkRegressor, (X, y)), (SymmetricGaussianMixture, (X,))):
        full, early = (make(stop=stop, random_state=0).fit(*data) for stop in ("tolerance", "statistical"))
        assert full.singular_ and early.singular_ and early.n_iter_ < full.n_iter_ / 3
        assert full.radius_ == pytest.approx((3 / 4000) ** 0.25, rel=0.05)
        with pytest.warns(ConvergenceWarning, match="2 steps"):
            make(max_iter=2, random_state=0).fit(*data)


def test_the_regressor_follows_the_units_of_its_data():
    rng = np.random.default_rng(2)
    X = rng.normal(size=(500, 2))
    y = (X @ [1.0, -2.0]) ** 3 + rng.normal(size=500)
    one = PolynomialLinkRegressor(3, random_state=0).fit(X, y)
    other = PolynomialLinkRegressor(3, random_state=0).fit(1e4 * X, 1e-6 * y)
    np.testing.assert_allclose(other.coef_, one.coef_ * 1e-6, rtol=1e-6)
    assert other.radius_ == pytest.approx(1e-6 * one.radius_, rel=1e-6)
    assert other.loss_ == pytest.approx(1e-12 * one.loss_, rel=1e-6)
