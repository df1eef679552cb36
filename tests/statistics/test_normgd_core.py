"""NormGD: exact contraction, models, agreement of torch, NumPy and SciPy, scikit-learn's checks, save and load."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from sklearn.utils.estimator_checks import check_estimator

from assay.statistics import NormGD, PolynomialLinkRegressor, SymmetricGaussianMixture, normgd_minimize
from assay.statistics.normgd import PolynomialLink, SymmetricMixture, lanczos_extremes


def power_loss(q, k=1.0):
    def fun(x):
        r = np.linalg.norm(x)
        H = k * q * (r ** (q - 2) * np.eye(x.size) + (q - 2) * r ** (q - 4) * np.outer(x, x))
        return k * r**q, k * q * r ** (q - 2) * x, H

    return fun


@pytest.mark.parametrize("q", [2, 4, 6])
@pytest.mark.parametrize("k", [1.0, 1e-6, 1e6])
def test_contraction_is_exact(q, k):
    x0 = np.array([0.3, -1.0, 0.5])
    found = normgd_minimize(power_loss(q, k), x0, jac=True, hess=True, maxiter=5, gtol=0, xtol=0)
    np.testing.assert_allclose(found.x, x0 * (1 - 0.5 / (q - 1)) ** 5, rtol=1e-10)


@pytest.mark.parametrize("power", [2, 3])
def test_sufficient_statistics_give_the_same_loss(power):
    rng = np.random.default_rng(0)
    X, y, theta = rng.normal(size=(500, 3)), rng.normal(size=500), np.array([0.4, -0.7, 1.1])
    short = PolynomialLink(X, y, power, sufficient_statistics=True)
    for a, b in zip(PolynomialLink(X, y, power)(theta), short(theta)):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_em_is_gradient_descent_and_descends():
    X, t = np.random.default_rng(1).normal(size=(800, 4)), np.full(4, 0.8)
    m = SymmetricMixture(X)
    np.testing.assert_allclose(m.em(t), (np.tanh(X @ t)[:, None] * X).mean(0), rtol=1e-12)
    losses = []
    for _ in range(30):
        losses.append(m(t)[0])
        t = m.em(t)
    assert (np.diff(losses) <= 1e-14).all()


def test_lanczos_finds_both_ends():
    A = np.random.default_rng(2).normal(size=(40, 40))
    A = A + A.T - 5 * np.eye(40)
    low, high, _ = lanczos_extremes(lambda v: A @ v, np.ones(40), 40)
    np.testing.assert_allclose([low, high], np.linalg.eigvalsh(A)[[0, -1]], rtol=1e-8)


def test_torch_equals_numpy_and_scipy_method():
    rng = np.random.default_rng(3)
    X, y, x0 = rng.normal(size=(400, 3)), rng.normal(size=400), np.array([1.0, 0.5, -0.8])
    m = PolynomialLink(X, y, 2)
    p = torch.tensor(x0, requires_grad=True)
    Xt, yt = torch.tensor(X), torch.tensor(y)
    optimizer = NormGD([p], eig="exact")
    for _ in range(12):
        optimizer.step(lambda backward=False: (((Xt @ p) ** 2 - yt) ** 2).mean() / 2)
    found = normgd_minimize(m, x0, jac=True, hess=True, maxiter=12, gtol=0, xtol=0)
    np.testing.assert_allclose(p.detach().numpy(), found.x, rtol=0, atol=1e-10)
    by_scipy = minimize(m.fun_jac, x0, jac=True, hess=lambda t: m(t)[2], method=normgd_minimize)
    lbfgs = minimize(m.fun_jac, by_scipy.x, jac=True, method="L-BFGS-B", options={"ftol": 1e-16, "gtol": 1e-10})
    np.testing.assert_allclose(by_scipy.x, lbfgs.x, atol=1e-6)


def test_bad_input():
    with pytest.raises(ValueError, match="stationary"):
        normgd_minimize(power_loss(2), np.zeros(2), jac=True, hess=True)
    with pytest.raises(ValueError, match="eta"):
        normgd_minimize(power_loss(2), np.ones(2), jac=True, eta=0)
    with pytest.raises(ValueError, match="power"):
        PolynomialLink(np.ones((3, 1)), np.ones(3), 1)
    p = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="graph"):
        NormGD([p]).step(lambda backward=False: (p.detach() ** 2).sum())


@pytest.mark.parametrize(
    "estimator", [PolynomialLinkRegressor(random_state=0), SymmetricGaussianMixture(random_state=0)]
)
def test_estimators(estimator, tmp_path):
    X = np.random.default_rng(4).normal(size=(300, 2))
    estimator.fit(X, X[:, 0] ** 2)
    again = type(estimator).load(estimator.save(tmp_path))
    np.testing.assert_array_equal(again.predict(X), estimator.predict(X))
    assert again.get_params() == estimator.get_params() and again.singular_ == estimator.singular_
    named = pd.DataFrame(X, columns=["a", "b"])
    by_name = type(estimator).load(type(estimator)(random_state=np.random.RandomState(0)).fit(
        named, X[:, 0] ** 2).save(tmp_path / "named"))  # fmt: skip
    assert list(by_name.feature_names_in_) == ["a", "b"] and by_name.random_state is None
    with pytest.raises(ValueError, match="feature names"):
        by_name.predict(named[["b", "a"]])
    other = ({PolynomialLinkRegressor, SymmetricGaussianMixture} - {type(estimator)}).pop()
    with pytest.raises(ValueError, match=type(estimator).__name__):
        other.load(tmp_path)
    check_estimator(type(estimator)(random_state=0))


def test_each_stop_has_its_status():
    """On ``|x|^4`` a step of eta 0.5 is a sixth of the distance, which shrinks by 5/6 a step."""
    loss, x0 = power_loss(4, 1.0), np.array([0.6, 0.8])
    small = normgd_minimize(loss, x0, jac=True, hess=True, gtol=0, xtol=1e-3)
    steps = small.step_norms
    assert small.success and small.status == 1 and small.message == "step at most xtol * (1 + |x|)"
    assert steps[-1] <= 1e-3 * (1 + np.linalg.norm(small.x)) and np.all(steps[:-1] > 1e-3)
    flat = normgd_minimize(loss, x0, jac=True, hess=True, gtol=1e-3, xtol=0)
    assert flat.status == 0 and np.linalg.norm(flat.jac) <= 1e-3
    wide = normgd_minimize(loss, x0, jac=True, hess=True, gtol=0, xtol=0, radius=0.1)
    assert wide.status == 2 and wide.step_norms[-1] <= 0.01 < wide.step_norms[-2]
    assert normgd_minimize(loss, x0, jac=True, hess=True, gtol=0, xtol=0, maxiter=7).status == 3
