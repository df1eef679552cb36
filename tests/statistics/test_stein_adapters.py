"""Bridges to ArviZ (both generations), PyMC, BridgeStan, JAX and torch."""

import sys
import types

import numpy as np
import pytest

from assay.statistics import stein_thinning as stein

arviz = pytest.importorskip("arviz")
xarray = pytest.importorskip("xarray")


def draws(seed=0):
    rng = np.random.default_rng(seed)
    return {"mu": rng.normal(size=(2, 60)), "beta": rng.normal(size=(2, 60, 3)), "A": rng.normal(size=(2, 60, 2, 2))}


def inference_data():
    posterior = draws()
    return arviz.from_dict(posterior=posterior)


def data_tree():
    data = inference_data()
    return xarray.DataTree.from_dict({"posterior": data.posterior.copy()})


@pytest.mark.parametrize("make", [inference_data, data_tree, lambda: inference_data().posterior])
def test_from_arviz(make):
    result = stein.from_arviz(make(), lambda X: -X, ["beta", "mu"])
    raw = draws()
    wanted = np.column_stack([raw["beta"].reshape(120, 3), raw["mu"].reshape(120)])
    assert (result.points == wanted).all() and (result.scores == -wanted).all()  # chain after chain
    assert result.names == ("beta[0]", "beta[1]", "beta[2]", "mu")
    assert (result.n_chains, result.n_draws) == (2, 60)
    everything = stein.from_arviz(make(), np.zeros((120, 8)))
    assert everything.points.shape == (120, 8) and everything.names[-1] in ("A[1, 1]", "beta[2]", "mu")


def test_order_of_dimensions_does_not_matter():
    posterior = inference_data().posterior
    turned = posterior.transpose("draw", ..., "chain")
    a, b = (stein.from_arviz(p, lambda X: -X, ["beta"]) for p in (posterior, turned))
    assert (a.points == b.points).all()


def test_gradients_in_a_group():
    posterior = draws()
    gradients = {name: -values for name, values in posterior.items()}
    data = arviz.from_dict(posterior=posterior)
    data.add_groups({"gradients": arviz.from_dict(posterior=gradients).posterior})
    for source in (data, xarray.DataTree.from_dict({"posterior": data.posterior, "gradients": data.gradients})):
        result = stein.from_arviz(source, "gradients")
        assert (result.scores == -result.points).all()
    with pytest.raises(ValueError, match="names the group 'nothing'"):
        stein.from_arviz(data, "nothing")


@pytest.mark.parametrize("make", [inference_data, data_tree, lambda: inference_data().posterior])
def test_to_arviz(make):
    data = make()
    result = stein.from_arviz(data, lambda X: -X, ["mu", "beta"])
    coreset = stein.compress(result.points, result.scores, 10, "sr", random_state=0)
    small = stein.to_arviz(coreset, data)
    if not isinstance(data, xarray.Dataset):
        assert type(small) is type(data)
    posterior = small["posterior"]
    assert posterior["beta"].dims[:2] == ("chain", "draw")
    assert dict(posterior.sizes)["chain"] == 1 and dict(posterior.sizes)["draw"] == len(coreset)
    np.testing.assert_array_equal(np.asarray(posterior["mu"])[0], coreset.points[:, 0])
    np.testing.assert_array_equal(np.asarray(posterior["beta"])[0], coreset.points[:, 1:])
    np.testing.assert_array_equal(np.asarray(small["sample_stats"]["weight"])[0], coreset.weights)
    assert np.asarray(posterior["A"]).shape == (1, len(coreset), 2, 2)


def test_arviz_files(tmp_path):
    data = inference_data()
    result = stein.from_arviz(data, lambda X: -X)
    coreset = stein.compress(result.points, result.scores, random_state=0)
    small = stein.to_arviz(coreset, data)
    small.to_netcdf(str(tmp_path / "small.nc"))
    back = arviz.from_netcdf(str(tmp_path / "small.nc"))
    assert dict(back.posterior.sizes)["draw"] == len(coreset)
    assert arviz.summary(back, var_names=["mu"], kind="stats").shape[0] == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda d: stein.from_arviz(d, lambda X: -X, ["gamma"]), r"var_names \['gamma'\] not in the posterior"),
        (lambda d: stein.from_arviz(d, lambda X: -X, []), "not in the posterior"),
        (lambda d: stein.from_arviz(d, lambda X: -X[:3]), "scores must have the shape of X"),
        (lambda d: stein.from_arviz({}, lambda X: -X), "group 'posterior'"),
        (lambda d: stein.from_arviz(d.posterior.isel(chain=0), lambda X: -X), "dimensions chain and draw"),
        (lambda d: stein.to_arviz(stein.compress(np.eye(5), -np.eye(5), 2, "st"), d), "5 draws"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_arviz_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(inference_data())


class Named:
    def __init__(self, name):
        self.name = name


def pymc_like(discrete=False):
    """What is used of a pymc.Model: value variables, a start, and a compiled gradient of a point."""
    mu, sigma = Named("mu"), Named("sigma_log__")
    model = types.SimpleNamespace(continuous_value_vars=[mu, sigma], value_vars=[mu, sigma])
    if discrete:
        model.value_vars = [mu, sigma, Named("k")]
    model.initial_point = lambda: {"mu": np.zeros(2), "sigma_log__": np.array(0.0)}
    model.compile_dlogp = lambda: lambda point: np.concatenate([-point["mu"], -2 * np.atleast_1d(point["sigma_log__"])])
    return model


def test_pymc_score():
    score = stein.pymc_score(pymc_like())
    X = np.random.default_rng(0).normal(size=(5, 3))
    np.testing.assert_array_equal(score(X), X * [-1, -1, -2])
    with pytest.raises(ValueError, match=r"points must have shape \(n, 3\)"):
        score(X[:, :2])
    with pytest.raises(ValueError, match="discrete variables"):
        stein.pymc_score(pymc_like(discrete=True))


def test_bridgestan_score():
    model = types.SimpleNamespace(
        param_unc_num=lambda: 2, log_density_gradient=lambda x: (-(x @ x) / 2, -np.asarray(x))
    )
    X = np.random.default_rng(0).normal(size=(4, 2))
    np.testing.assert_array_equal(stein.cmdstan_score(model)(X), -X)
    with pytest.raises(TypeError, match=r"bridgestan\.StanModel"):
        stein.cmdstan_score(object())


def test_torch_score():
    torch = pytest.importorskip("torch")
    score = stein.torch_score(lambda x: -(x**2).sum(dim=1) / 2, batch_size=3)
    X = np.random.default_rng(0).normal(size=(10, 2))
    np.testing.assert_allclose(score(X), -X)
    with pytest.raises(ValueError, match="logdensity must map"):
        stein.torch_score(lambda x: torch.tensor(0.0))(X)


def test_jax_score(monkeypatch):
    X = np.random.default_rng(0).normal(size=(6, 2))
    try:
        import jax  # noqa: F401
    except ImportError:  # a stand-in with the three functions that are used
        fake = types.ModuleType("jax")

        def grad(f):
            eye = 1e-6 * np.eye(2)
            return lambda x: np.array([(f(x + e) - f(x - e)) / 2e-6 for e in eye])

        fake.jit, fake.grad = (lambda f: f), grad
        fake.vmap = lambda f: lambda rows: np.stack([f(x) for x in rows])
        monkeypatch.setitem(sys.modules, "jax", fake)
    np.testing.assert_allclose(stein.jax_score(lambda x: -(x @ x) / 2)(X), -X, atol=1e-5)
