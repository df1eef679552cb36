"""Path-guided particles in other people's tools: ArviZ, Stein thinning, PyMC, JAX, scikit-learn."""

import math

import numpy as np
import pytest
import torch
from sklearn.utils.estimator_checks import check_estimator
from torch.testing import assert_close

from assay.statistics import PGPS, PGPSBayesianMLPClassifier
from assay.statistics import pgps as p


def normal(mean, sd, dim=1):
    def log_prob(x):
        return -0.5 * ((x - mean) / sd).square().sum(-1) - dim * math.log(sd) - dim * 0.5 * math.log(2 * math.pi)

    return log_prob


def cloud(n=7, dim=3, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_results_go_to_arviz():
    arviz = pytest.importorskip("arviz")
    result = PGPS(normal(1.0, 0.5, 2), 2, 200, hidden=16, seed=0).run()
    data = p.to_arviz(result, ["a", "b"])
    assert data.posterior["a"].shape == (1, 200) and data.posterior.attrs["ess"] == result.ess
    assert float(arviz.summary(data, kind="stats")["mean"]["a"]) == pytest.approx(1.0, abs=0.15)
    assert data.sample_stats["weight"].shape == (1, 200)
    assert p.to_arviz(result).posterior["x"].shape == (1, 200, 2)
    with pytest.raises(ValueError, match="names must name the 2 columns"):
        p.to_arviz(result, ["a"])


def test_particles_go_to_stein_thinning():
    from assay.statistics.stein_thinning import compress, torch_score

    target = normal(1.0, 0.5, 2)
    points = PGPS(target, 2, 256, hidden=16, seed=0).run().resample(torch.Generator().manual_seed(0)).numpy()
    chosen = compress(points, torch_score(target)(points), 16, random_state=0)
    few = points[chosen.indices]
    assert len(few) == 16 and np.abs(few.mean(0) - 1.0).max() < 0.2


def test_densities_from_elsewhere():
    target = normal(1.0, 0.5, 2)
    rows = p.from_rows(lambda r: float(target(torch.as_tensor(r)[None])[0]), lambda r: -(r - 1.0) / 0.25)
    a, b = (PGPS(log_prob, 2, 60, hidden=8, seed=0).run().particles for log_prob in (target, rows))
    assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_densities_from_jax():
    """A JAX density gives what the same torch density gives, in float64 without its being switched on."""
    jax = pytest.importorskip("jax")
    density = p.from_jax(lambda x: -2.0 * jax.numpy.sum((x - 1.0) ** 2))
    value, gradient = density.logp_and_grad(cloud(4, 2))
    assert_close(value, -2 * (cloud(4, 2) - 1).square().sum(-1), rtol=1e-12, atol=1e-12)
    assert_close(gradient, 4 * (1 - cloud(4, 2)), rtol=1e-12, atol=1e-12)
    assert not jax.config.jax_enable_x64, "it is nobody else's business"
    a, b = (PGPS(d, 2, 200, hidden=8, seed=0).run() for d in (density, lambda x: -2 * (x - 1).square().sum(-1)))
    assert_close(a.particles, b.particles, rtol=1e-7, atol=1e-7)
    assert a.log_evidence == pytest.approx(math.log(math.pi / 2), abs=0.15)


@pytest.fixture(scope="module")
def model():
    """A normal mean with its conjugate prior, and a scale that is positive."""
    pm = pytest.importorskip("pymc")
    data = np.random.default_rng(0).normal(1.0, 2.0, 30)
    with pm.Model() as model:
        beta = pm.Normal("beta", 0.0, 3.0, shape=2)
        sigma = pm.HalfNormal("sigma", 1.0)
        pm.Deterministic("total", beta.sum())
        pm.Normal("y", beta[0], 2.0, observed=data)
        pm.Normal("z", 0.0, sigma, observed=np.array([0.5, -0.7, 0.2]))
    return model, data


def test_densities_from_pymc(model):
    model, _ = model
    density = p.from_pymc(model)
    assert density.dim == 3 and density.names == ("beta[0]", "beta[1]", "sigma_log__")
    assert density.start.tolist() == [0.0, 0.0, 0.0]
    x = cloud(5, 3)
    value, gradient = density.logp_and_grad(x)
    logp = model.compile_logp()
    expected = [float(logp({"beta": row[:2], "sigma_log__": row[2]})) for row in x.numpy()]
    assert_close(value, torch.tensor(expected, dtype=torch.float64))
    for i in range(3):
        e = torch.zeros(3).double()
        e[i] = 1e-5
        slope = (density.logp_and_grad(x + e)[0] - density.logp_and_grad(x - e)[0]) / 2e-5
        assert_close(gradient[:, i], slope, rtol=1e-5, atol=1e-5)
    own = density.constrain(x.numpy())
    assert set(own) == {"beta", "sigma", "total"} and own["beta"].shape == (5, 2)
    assert np.allclose(own["sigma"], np.exp(x[:, 2].numpy())) and np.allclose(own["total"], x[:, :2].sum(1).numpy())


def test_a_pymc_model_is_sampled(model):
    """The posterior of beta[0] is known; draws are in the model's own units under its own names."""
    arviz = pytest.importorskip("arviz")
    model, data = model
    density = p.from_pymc(model)
    result = PGPS(
        density, 3, 500, p0_scale=2.0, center=density.start, hidden=16, langevin_steps=5, final_langevin=50, seed=0
    ).run()
    table = p.to_arviz(result, density)
    variance = 1 / (1 / 9 + len(data) / 4)
    found = arviz.summary(table, var_names=["beta", "sigma"], kind="stats")
    assert float(found["mean"]["beta[0]"]) == pytest.approx(variance * data.sum() / 4, abs=4 * (variance / 250) ** 0.5)
    assert float(found["sd"]["beta[1]"]) == pytest.approx(3.0, rel=0.15)
    assert (table.posterior["sigma"] > 0).all() and table.posterior["total"].shape == (1, 500)
    assert set(table.unconstrained_posterior.data_vars) == {"beta[0]", "beta[1]", "sigma_log__"}
    assert np.allclose(np.log(table.posterior["sigma"]), table.unconstrained_posterior["sigma_log__"])


def test_a_pymc_model_with_discrete_variables_has_no_gradient():
    pm = pytest.importorskip("pymc")
    with pm.Model() as model:
        pm.Poisson("count", 3.0)
        pm.Normal("x")
    with pytest.raises(ValueError, match=r"continuous free variables only, not \['count'\]"):
        p.from_pymc(model)


LIGHT = {"hidden": 4, "n_particles": 12, "velocity_hidden": 8, "train_steps": 2, "dt_max": 0.1, "final_langevin": 150}


def test_the_classifier_is_a_scikit_learn_estimator():
    check_estimator(PGPSBayesianMLPClassifier(**LIGHT, langevin_step_size=3e-3, random_state=0))


def test_the_classifier_learns_and_is_calibrated_by_its_particles():
    from sklearn.datasets import load_wine
    from sklearn.model_selection import train_test_split

    x, y = load_wine(return_X_y=True)
    train, test, y_train, y_test = train_test_split(x, y, test_size=0.5, random_state=0)
    model = PGPSBayesianMLPClassifier(hidden=8, n_particles=20, dt_max=0.1, train_steps=5, random_state=0)
    model.fit(train, y_train)
    assert model.score(test, y_test) > 0.9
    proba = model.predict_proba(test)
    assert_close(torch.from_numpy(proba.sum(1)), torch.ones(len(test), dtype=torch.float64))
    with pytest.raises(ValueError, match="prior_var must be positive"):
        PGPSBayesianMLPClassifier(prior_var=0).fit(train, y_train)


@pytest.mark.parametrize("names", [None, ["low", "mid", "high"]])
def test_the_classifier_is_saved(tmp_path, names):
    pandas = pytest.importorskip("pandas")
    x = cloud(60, 2).numpy()
    y = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    rows = x if names is None else pandas.DataFrame(x, columns=["a", "b"])
    model = PGPSBayesianMLPClassifier(**LIGHT, random_state=np.int64(3)).fit(
        rows, y if names is None else np.array(names)[y]
    )
    again = PGPSBayesianMLPClassifier.load(model.save(tmp_path))
    assert np.array_equal(again.predict_proba(rows), model.predict_proba(rows))
    assert np.array_equal(again.predict(rows), model.predict(rows)) and again.classes_.dtype == model.classes_.dtype
    assert again.get_params() == model.get_params()
    with pytest.raises(TypeError, match="random_state must be an integer or None to be saved"):
        PGPSBayesianMLPClassifier(**LIGHT, random_state=np.random.RandomState(0)).fit(x, y).save(tmp_path)


def test_the_logits_are_those_of_torch():
    from torch import nn

    from assay.statistics.pgps.classifier import mlp_logits

    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).double()
    theta = torch.cat([v.flatten() for v in net.parameters()])[None]
    assert_close(mlp_logits(theta, cloud(5, 3), 4, 2)[0], net(cloud(5, 3)))
