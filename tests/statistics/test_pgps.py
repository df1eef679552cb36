"""Path-guided particles: the path and its derivatives, velocities with known answers, weights, modes, baselines."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import check_estimator
from torch.testing import assert_close

from assay.statistics import PGPS, LwSPath, PGPSBayesianMLPClassifier, PGPSResult
from assay.statistics import pgps as p

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def mixture(weights, means, sd=1.0):
    w, m = (torch.tensor(x, dtype=torch.float64) for x in (weights, means))

    def log_prob(x):
        z = (x[:, None, 0] - m) / sd
        return torch.logsumexp(w.log() - 0.5 * z.square() - math.log(sd) - 0.5 * math.log(2 * math.pi), 1)

    return log_prob


def normal(mean, sd, dim=1):
    def log_prob(x):
        return -0.5 * ((x - mean) / sd).square().sum(-1) - dim * math.log(sd) - dim * 0.5 * math.log(2 * math.pi)

    return log_prob


def cloud(n=7, dim=3, seed=0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def right(result):
    return float((result.weights * (result.particles[:, 0] > 5)).sum())


SETUP = mixture([0.5, 0.5], [0.0, 8.0])


# -- the path ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 1.0), (1.0, 0.8), (0.2, 0.5), (0.0, 0.1)])
def test_the_ends_of_the_path(alpha, beta, device):
    target, x = normal(1.5, 0.7, 3), cloud().to(device)
    path = LwSPath(p.gaussian(2.0, 3), target, alpha, beta)
    value, score, _ = path.evaluate(0.0, x)
    assert_close(value, normal(0.0, 2.0, 3)(x))
    assert_close(score, -x / 4)
    value, score, _ = path.evaluate(1.0, x)
    assert_close(value, target(x))
    assert_close(score, -(x - 1.5) / 0.49)


@given(t=st.floats(0.01, 0.99), alpha=st.floats(0, 1), beta=st.floats(0.1, 1), centred=st.booleans())
@settings(max_examples=25, deadline=None)
def test_derivatives_of_the_path(t, alpha, beta, centred):
    center = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64) if centred else None
    path = LwSPath(p.gaussian(1.5, 3), normal(0.5, 1.2, 3), alpha, beta, center)
    x = cloud()
    _, score, change = path.evaluate(t, x)
    h = 1e-5
    assert_close(change, (path.logp(t + h, x) - path.logp(t - h, x)) / (2 * h), rtol=1e-6, atol=1e-6)
    for i in range(3):
        e = torch.zeros(3, dtype=torch.float64)
        e[i] = h
        assert_close(score[:, i], (path.logp(t, x + e) - path.logp(t, x - e)) / (2 * h), rtol=1e-6, atol=1e-6)


def test_a_scaled_target_changes_no_velocity_and_moves_the_evidence():
    results = [PGPS(lambda x, c=c: SETUP(x) + c, 1, 300, p0_scale=3.0, seed=1).run() for c in (0.0, math.log(7.0))]
    assert_close(results[0].particles, results[1].particles, rtol=1e-6, atol=1e-6)
    assert_close(results[0].weights, results[1].weights, rtol=1e-5, atol=1e-9)
    assert results[1].log_evidence - results[0].log_evidence == pytest.approx(math.log(7.0), abs=1e-6)


# -- the velocity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 3, 8])
def test_the_divergence_is_the_trace_of_the_jacobian(dim):
    net = p.Velocity(dim, 10, torch.Generator().manual_seed(dim))
    x = cloud(5, dim)
    _, divergence = net(x)
    for row, found in zip(x, divergence):
        jacobian = torch.autograd.functional.jacobian(lambda r: net(r[None])[0][0], row)
        assert_close(found, jacobian.trace())


def test_least_squares_solves_its_normal_equations():
    """No other second layer at the same first layer has a smaller (penalised) loss: the gradient is zero."""
    x = cloud(200, 2, 3)
    score, change = -x, x.square().sum(-1)
    w = torch.full((200,), 1 / 200, dtype=torch.float64)
    velocity, divergence, left = p.fit_least_squares(12, x, score, change, w, 0.0, torch.Generator().manual_seed(0))
    assert left < 0.05
    r = p.residual(score, change, velocity, divergence) - change.mean()
    assert abs(float((w * r) @ (score * velocity).sum(-1) + (w * r) @ divergence)) < 1e-6, "orthogonal to the fit"


def test_a_shifted_gaussian_moves_at_constant_speed():
    """From N(0, 1) to N(m, 1) along the plain path: the velocity is m, exactly, for every t."""
    m = 2.0
    path = LwSPath(p.gaussian(1.0, 1), normal(m, 1.0), 0.0, 1.0)
    x = cloud(4000, 1)
    for t in (0.0, 0.3, 0.9):
        _, score, change = path.evaluate(t, x + t * m)
        exact = p.residual(score, change, torch.full_like(x, m), torch.zeros(4000, dtype=torch.float64))
        assert_close(exact, exact.mean().expand(4000), rtol=0, atol=1e-9)
        w = torch.full((4000,), 1 / 4000, dtype=torch.float64)
        velocity, _, _ = p.fit_least_squares(8, x + t * m, score, change, w, 1e-4, torch.Generator().manual_seed(1))
        assert float((velocity - m).square().mean().sqrt()) < 1e-3, "but for c/p(x), which no residual tells"
    result = PGPS(normal(m, 1.0), 1, 2000, alpha=0.0, beta=1.0, seed=0).run()
    mean = float((result.weights[:, None] * result.particles).sum())
    sd = float((result.weights[:, None] * (result.particles - mean).square()).sum()) ** 0.5
    assert mean == pytest.approx(m, abs=4 / 2000**0.5) and sd == pytest.approx(1.0, abs=4 / 2000**0.5)
    assert result.ess > 1900


def test_a_scaled_gaussian_moves_by_its_closed_form():
    s, t = 0.5, 0.4
    path = LwSPath(p.gaussian(1.0, 1), normal(0.0, s), 0.0, 1.0)
    q, slope = 1 - t + t / s**2, 1 / s**2 - 1
    x = cloud(500, 1) / q**0.5
    _, score, change = path.evaluate(t, x)
    factor = -slope / (2 * q)
    exact = p.residual(score, change, factor * x, torch.full((500,), factor, dtype=torch.float64))
    assert_close(exact, exact.mean().expand(500), rtol=0, atol=1e-9)


def test_the_exact_velocity_in_one_dimension_has_no_residual_and_finds_the_far_mode():
    """phi = -(1/p) int_{-inf}^x p (d/dt ln p - E) on a grid, followed by Euler steps of 0.02."""
    path = LwSPath(p.gaussian(3.0, 1), SETUP, 0.0, 1.0)
    grid = torch.linspace(-16, 24, 8001, dtype=torch.float64)[:, None]
    h = float(grid[1] - grid[0])
    x = 3 * cloud(2000, 1, 5)
    for step in range(50):
        value, score, change = path.evaluate(step * 0.02, grid)
        density = (value - value.max()).exp()
        density = density / density.sum() / h
        change = change - (density * change).sum() * h
        flux = (density * change).cumsum(0) * h - density * change * h / 2
        phi = torch.where(density > 1e-12, -flux / density.clamp(min=1e-12), torch.zeros_like(flux))
        if step == 20:
            inside = density > 1e-4
            divergence = torch.gradient(phi, spacing=h)[0]
            left = change + score[:, 0] * phi + divergence
            assert left[inside].abs().max() < 0.02 * change[inside].abs().max()
        place = ((x[:, 0] - grid[0]) / h).clamp(0, 7999)
        low = place.long()
        share = place - low
        x = x + 0.02 * ((1 - share) * phi[low] + share * phi[low + 1])[:, None]
    assert 0.44 <= float((x > 5).double().mean()) <= 0.53


# -- the sampler -------------------------------------------------------------------------------------------------------


def test_two_far_modes_with_weights_and_without():
    found = [right(PGPS(SETUP, 1, 1000, p0_scale=3.0, alpha=1.0, beta=0.8, seed=s).run()) for s in range(6)]
    assert 0.44 <= np.mean(found) <= 0.54
    plain = [
        right(PGPS(SETUP, 1, 1000, p0_scale=3.0, alpha=1.0, beta=0.8, weights=False, seed=s).run()) for s in range(3)
    ]
    assert np.mean(plain) < 0.30, "least squares without weights moves about half of the mass that it should"
    draw = torch.Generator().manual_seed(0)
    lost = p.langevin(SETUP, 3 * torch.randn(1000, 1, generator=draw, dtype=torch.float64), 650, 1e-2, generator=draw)
    assert right(lost) < 0.12


def test_the_papers_mode_runs():
    result = PGPS(
        SETUP, 1, 200, p0_scale=3.0, alpha=1.0, beta=0.8, solver="adam", weights=False, train_steps=20, seed=0
    ).run()
    assert math.isnan(result.log_evidence) and result.ess == pytest.approx(200)
    assert right(result) > 0.08


def test_steps_end_at_one_and_are_short_enough():
    psi = 0.05
    states = []
    result = PGPS(SETUP, 1, 200, p0_scale=3.0, psi=psi, seed=0, ess_threshold=0.0).run(callback=states.append)
    assert result.trace[-1].t == 1 and all(s.t < 1 for s in result.trace[:-1])
    assert all(0 < s.dt <= 0.02 + 1e-12 for s in result.trace)
    assert sum(s.dt for s in result.trace) == pytest.approx(1.0)
    for before, state in pairwise(states):
        w = before.log_weights.softmax(0)
        assert float((w * (state.particles - before.particles).norm(dim=-1)).sum()) <= psi + 1e-9
    assert result.n_score_evals == result.trace[-1].evaluations
    assert result.n_score_evals == 2 * 200 * len(result.trace) + 2 * 200, "two for each particle and step, and a check"


def test_without_a_velocity_it_is_annealed_importance_sampling():
    target = normal(1.0, 0.5)
    values = [
        PGPS(
            lambda x: target(x) + 1.3, 1, 500, training_free=True, langevin_steps=5, alpha=0.0, beta=1.0, seed=s
        ).run().log_evidence
        for s in range(8)
    ]  # fmt: skip
    error = np.std(values) / 8**0.5
    assert abs(np.mean(values) - 1.3) < 3 * error + 0.02


def test_training_free_at_one_level_is_langevin():
    """With the path's last level alone, the moves are those of Langevin dynamics at the target."""
    target, x0 = normal(1.0, 0.5), cloud(50, 1)
    sampler = PGPS(
        target, 1, 50, training_free=True, weights=False, dt_max=1.0, langevin_steps=7, alpha=0.0, beta=1.0, seed=3
    )
    result = sampler.run(x0)
    draw = torch.Generator().manual_seed(3)
    p.Velocity(1, 64, draw)  # the sampler draws its network first
    assert_close(result.particles, p.langevin(target, x0, 7, 1e-2, generator=draw).particles)


def test_the_seed_decides_and_the_order_of_particles_does_not():
    runs = [PGPS(SETUP, 1, 100, p0_scale=3.0, seed=s).run() for s in (4, 4, 5)]
    assert torch.equal(runs[0].particles, runs[1].particles)
    assert not torch.equal(runs[0].particles, runs[2].particles)
    x0, order = 3 * cloud(60, 1), torch.randperm(60, generator=torch.Generator().manual_seed(0))
    options = {"solver": "adam", "weights": False, "train_steps": 5, "p0_scale": 3.0, "seed": 0}
    a, b = (PGPS(SETUP, 1, 60, **options).run(x) for x in (x0, x0[order]))
    assert_close(a.particles[order], b.particles, rtol=1e-6, atol=1e-6)


def test_a_center_is_a_translation():
    """A target, its start and the particles moved by one vector give particles moved by it."""
    shift = torch.tensor([4.0], dtype=torch.float64)
    a = PGPS(SETUP, 1, 200, p0_scale=3.0, seed=0).run()
    b = PGPS(lambda x: SETUP(x - shift), 1, 200, p0_scale=3.0, center=shift, seed=0).run()
    assert_close(a.particles + shift, b.particles, rtol=1e-6, atol=1e-6)


def test_many_dimensions_and_float32():
    result = PGPS(
        normal(1.0, 0.5, 5), 5, 400, hidden=16, dtype=torch.float32, solver="adam", train_steps=5, seed=0
    ).run()
    assert result.particles.shape == (400, 5) and result.particles.dtype == torch.float32


def test_save_and_load(tmp_path):
    result = PGPS(SETUP, 1, 50, p0_scale=3.0, hidden=16, seed=0).run()
    result.save(tmp_path)
    again = PGPSResult.load(tmp_path)
    assert torch.equal(again.particles, result.particles) and torch.equal(again.weights, result.weights)
    assert again.trace == result.trace and again.log_evidence == result.log_evidence and again.ess == result.ess


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=20), st.integers(0, 99))
def test_systematic_resampling_rounds_up_or_down(values, seed):
    w = torch.tensor(values, dtype=torch.float64)
    w = w / w.sum()
    count = p.systematic(w, torch.Generator().manual_seed(seed)).bincount(minlength=len(w))
    assert count.sum() == len(w)
    assert ((count - len(w) * w).abs() < 1 + 1e-9).all()


# -- baselines ---------------------------------------------------------------------------------------------------------


def test_one_particle_of_svgd_climbs():
    x = torch.tensor([[3.0]], dtype=torch.float64)
    result = p.svgd(normal(1.0, 1.0), x, 5, 0.1)
    expected = x
    for _ in range(5):
        expected = expected - 0.1 * (expected - 1.0)
    assert_close(result.particles, expected)


def test_svgd_in_chunks_is_svgd():
    x = cloud(30, 2)
    whole = p.svgd(normal(0.5, 1.0, 2), x, 4, 0.2).particles
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(p.baselines, "CHUNK", 60)
        assert_close(p.svgd(normal(0.5, 1.0, 2), x, 4, 0.2).particles, whole)


@pytest.mark.parametrize("adjusted", [False, True])
def test_langevin_and_smc_sample_a_gaussian(adjusted):
    draw = torch.Generator().manual_seed(0)
    target = normal(1.0, 0.5)
    a = p.langevin(target, cloud(2000, 1), 200, 0.02, adjusted=adjusted, generator=draw)
    path = LwSPath(p.gaussian(1.0, 1), lambda x: target(x) + 0.7, 0.0, 1.0)
    b = p.tempered_smc(path, cloud(2000, 1, 1), levels=20, moves=5, step_size=0.02, adjusted=adjusted, generator=draw)
    for result in (a, b):
        mean = float((result.weights[:, None] * result.particles).sum())
        sd = float((result.weights[:, None] * (result.particles - mean).square()).sum()) ** 0.5
        assert mean == pytest.approx(1.0, abs=0.06) and sd == pytest.approx(0.5, abs=0.05)
    assert b.log_evidence == pytest.approx(0.7, abs=0.08)
    assert a.n_score_evals == 2000 * 201 and b.n_score_evals == 2 * 2000 * (1 + 20 * 6)


def test_other_baselines():
    draw = torch.Generator().manual_seed(0)
    chain = p.sgld(normal(1.0, 0.5), torch.zeros(1, dtype=torch.float64), 3000, 0.02, burn_in=200, generator=draw)
    assert len(chain.particles) == 3000 and float(chain.particles.mean()) == pytest.approx(1.0, abs=0.15)
    flow = p.pfg(normal(1.0, 0.5), cloud(200, 1), 60, 0.05, lr=1e-2, first_steps=200)
    assert float(flow.particles.mean()) == pytest.approx(1.0, abs=0.2)


# -- hosts -------------------------------------------------------------------------------------------------------------


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

    class Function:
        def set_extra_values(self, values):
            pass

        def __call__(self, row):
            return float(target(torch.as_tensor(row)[None])[0]), -(row - 1.0) / 0.25

    class Variable:
        name = "x"

    class Model:
        continuous_value_vars = (Variable,)

        def logp_dlogp_function(self, ravel_inputs):
            assert ravel_inputs
            return Function()

        def initial_point(self):
            return {"x": np.zeros(2)}

    density, dim = p.from_pymc(Model())
    assert dim == 2
    assert_close(PGPS(density, dim, 60, hidden=8, seed=0).run().particles, a, rtol=1e-6, atol=1e-6)


def test_densities_from_jax():
    jax = pytest.importorskip("jax")
    density = p.from_jax(lambda x: -0.5 * jax.numpy.sum((x - 1.0) ** 2))
    value, gradient = density.logp_and_grad(cloud(4, 2))
    assert_close(value, -0.5 * (cloud(4, 2) - 1).square().sum(-1), rtol=1e-5, atol=1e-5)
    assert_close(gradient, 1 - cloud(4, 2), rtol=1e-5, atol=1e-5)


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


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim must be an integer of at least 1"),
        ({"n_particles": 1}, "n_particles must be an integer of at least 2"),
        ({"alpha": 1.5}, r"alpha must lie in \[0, 1\], not 1.5"),
        ({"beta": 0.0}, r"beta must lie in \(0, 1\], not 0.0"),
        ({"psi": 0.0}, "psi must be positive"),
        ({"solver": "exact"}, "solver must be 'lstsq' or 'adam'"),
        ({"path": "straight"}, "path must be 'lws' or a path object"),
        ({"ess_threshold": 2.0}, "ess_threshold must lie"),
        ({"training_free": True}, "training_free needs langevin_steps"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        PGPS(SETUP, **{"dim": 1} | options)


def test_other_bad_input():
    with pytest.raises(TypeError, match="log_p1 must be a function"):
        PGPS("density", 1)
    with pytest.raises(ValueError, match=r"must return one value for each row, shape \(10,\), not \(10, 1\)"):
        PGPS(lambda x: x, 1, 10, hidden=2).run()
    with pytest.raises(ValueError, match="not finite at 10 of 10 initial particles"):
        PGPS(lambda x: x[:, 0] * math.nan, 1, 10, hidden=2).run()
    with pytest.raises(ValueError, match=r"x0 must be \[n, 2\]"):
        PGPS(normal(0.0, 1.0, 2), 2, 10, hidden=2).run(cloud(5, 3))
    with pytest.warns(UserWarning, match="give more particles or fewer hidden units"):
        PGPS(SETUP, 1, 10, hidden=64)
    with pytest.raises(ValueError, match="levels must be at least 1"):
        p.tempered_smc(LwSPath(p.gaussian(1.0, 1), SETUP), cloud(5, 1), levels=0)
    with pytest.raises(ValueError, match="step_size positive"):
        p.langevin(SETUP, cloud(5, 1), 3, 0.0)

    class Wrong:
        def logp_and_grad(self, x):
            return x.sum(-1), x[:, :1]

    with pytest.raises(ValueError, match=r"must give gradients \(7, 3\)"):
        p.Density(Wrong())(cloud())
    with pytest.warns(UserWarning, match="stopped at t ="), pytest.MonkeyPatch.context() as patch:
        patch.setattr(p.sampler, "MOST_STEPS", 2)
        PGPS(SETUP, 1, 50, p0_scale=3.0, hidden=8, seed=0).run()
