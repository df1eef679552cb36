"""Path-guided particles: the path and its derivatives, velocities with known answers, weights, modes, baselines."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from assay.statistics import PGPS, LwSPath, PGPSResult
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
    layer = p.random_layer(12, x, w, torch.Generator().manual_seed(0))
    velocity, divergence, left = p.fit_least_squares(layer, x, score, change, w, 0.0)
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
        layer = p.random_layer(8, x + t * m, w, torch.Generator().manual_seed(1))
        velocity, _, _ = p.fit_least_squares(layer, x + t * m, score, change, w, 1e-4)
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
        right(PGPS(SETUP, 1, 1000, p0_scale=3.0, alpha=1.0, beta=0.8, weights=False, seed=s).run()) for s in range(6)
    ]
    assert np.mean(plain) < 0.30, "least squares without weights moves about half of the mass that it should"
    draw = torch.Generator().manual_seed(0)
    lost = p.langevin(SETUP, 3 * torch.randn(1000, 1, generator=draw, dtype=torch.float64), 650, 1e-2, generator=draw)
    assert right(lost) < 0.12


def test_weights_are_not_over_fitted():
    """In eight dimensions, 520 columns for 1000 particles: with a ridge of 1e-4 the log evidence is off by -1.0."""
    means = torch.zeros(4, 8, dtype=torch.float64)
    means[range(4), range(4)] = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)

    def log_prob(x):
        z = ((x[:, None] - means) / 0.15).square().sum(-1)
        return torch.logsumexp(-0.5 * z, 1) - math.log(4) - 8 * math.log(0.15) - 4 * math.log(2 * math.pi)

    found = [PGPS(log_prob, 8, 1000, alpha=0.0, beta=1.0, seed=s).run().log_evidence for s in range(3)]
    assert abs(np.mean(found)) < 0.7


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
    assert result.n_score_evals == 2 * 200 * len(result.trace), "two for each particle and step"


def test_without_a_velocity_it_is_annealed_importance_sampling():
    target = normal(1.0, 0.5)
    values = [
        PGPS(
            lambda x: target(x) + 1.3, 1, 500, training_free=True, langevin_steps=5, alpha=0.0, beta=1.0, dt_max=0.005,
            seed=s,
        ).run().log_evidence
        for s in range(8)
    ]  # fmt: skip
    error = np.std(values, ddof=1) / 8**0.5
    assert error < 0.02 and abs(np.mean(values) - 1.3) < 3 * error


def test_the_exact_velocity_leaves_all_weights_equal(monkeypatch):
    exact = lambda layer, x, score, change, w, ridge: (torch.full_like(x, 2.0), torch.zeros_like(change), 0.0)  # noqa: E731
    monkeypatch.setattr(p.sampler, "fit_least_squares", exact)
    result = PGPS(normal(2.0, 1.0), 1, 300, alpha=0.0, beta=1.0, langevin_steps=1, seed=0).run()
    assert result.ess == pytest.approx(300, rel=1e-9)
    assert all(s.ess == pytest.approx(300, rel=1e-9) for s in result.trace)


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


def test_the_order_of_particles_does_not_matter_to_least_squares(monkeypatch):
    """With the same hidden units, without resampling."""
    layer = p.random_layer(16, 3 * cloud(60, 1), torch.full((60,), 1 / 60).double(), torch.Generator().manual_seed(2))
    monkeypatch.setattr(p.sampler, "random_layer", lambda *_: layer)
    x0, order = 3 * cloud(60, 1), torch.randperm(60, generator=torch.Generator().manual_seed(0))
    a, b = (PGPS(SETUP, 1, 60, hidden=16, ess_threshold=0.0, p0_scale=3.0, seed=0).run(x) for x in (x0, x0[order]))
    assert_close(a.particles[order], b.particles, rtol=1e-6, atol=1e-6)
    assert_close(a.weights[order], b.weights, rtol=1e-5, atol=1e-9)


@given(
    psi=st.floats(0.05, 1.0), dt_max=st.floats(0.02, 0.5), hidden=st.integers(1, 20), scale=st.floats(0.5, 3.0),
    shift=st.floats(-3, 3), moves=st.integers(0, 2), weighted=st.booleans(),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_invariants_of_a_run(psi, dt_max, hidden, scale, shift, moves, weighted):
    result = PGPS(
        normal(shift, 1.0), 1, 40, psi=psi, dt_max=dt_max, hidden=hidden, p0_scale=scale, langevin_steps=moves,
        weights=weighted, seed=0,
    ).run()  # fmt: skip
    assert result.particles.isfinite().all() and float(result.weights.sum()) == pytest.approx(1.0)
    assert (result.weights >= 0).all() and 1 - 1e-9 <= result.ess <= 40 + 1e-6
    assert result.trace[-1].t == 1.0 and all(0 < s.dt <= dt_max + 1e-12 for s in result.trace)
    assert result.n_score_evals == 2 * 40 * len(result.trace) * (1 + moves)


def test_langevin_moves_at_multiples_of_time():
    count = []

    class Path(LwSPath):
        def evaluate(self, t, x):
            count.append(t)
            return super().evaluate(t, x)

    path = Path(p.gaussian(1.0, 1), normal(0.5, 1.0))
    PGPS(None, 1, 20, path=path, hidden=4, langevin_steps=3, langevin_every=0.25, dt_max=0.1, psi=9.0, seed=0).run()
    moved = [t for t in dict.fromkeys(count) if count.count(t) >= 3]
    assert moved == pytest.approx([0.3, 0.5, 0.8, 1.0])


def test_a_path_of_ones_own_begins_at_its_own_start():
    path = LwSPath(p.gaussian(0.5, 1, torch.tensor([7.0])), normal(6.0, 0.5), 0.0, 1.0)
    assert float(PGPS(None, 1, 500, path=path, seed=0).init().particles.mean()) == pytest.approx(7.0, abs=0.1)
    with pytest.raises(ValueError, match=r"x0 must be given, draws \[n, 1\] of the p0 of your path"):
        PGPS(None, 1, 500, path=LwSPath(normal(0.0, 1.0), normal(6.0, 0.5))).run()
    with pytest.raises(TypeError, match="path must be 'lws' or an object with evaluate"):
        PGPS(None, 1, 500, path=lambda t, x: x)


def test_the_learning_rate_may_follow_the_loss():
    """A rate of (nearly) nothing leaves the network where it was; first_train_steps is never less than train_steps."""
    seen = []
    options = {"p0_scale": 3.0, "solver": "adam", "train_steps": 3, "first_train_steps": 5, "dt_max": 0.5, "psi": 9.0}
    sampler = PGPS(SETUP, 1, 50, **options, lr=lambda loss: seen.append(loss) or 1e-12, seed=0)
    before = [v.clone() for v in sampler.net.parameters()]
    result = sampler.run()
    assert len(seen) == 5 + 3 * (len(result.trace) - 1)
    for old, new in zip(before, sampler.net.parameters()):
        assert_close(old, new.detach(), rtol=0, atol=1e-9)
    assert PGPS(SETUP, 1, 200, train_steps=2000).first_train_steps == 2000


def test_a_center_is_a_translation():
    """A target, its start and the particles moved by one vector give particles moved by it."""
    shift = torch.tensor([4.0], dtype=torch.float64)
    a = PGPS(SETUP, 1, 200, p0_scale=3.0, seed=0).run()
    b = PGPS(lambda x: SETUP(x - shift), 1, 200, p0_scale=3.0, center=shift, seed=0).run()
    assert_close(a.particles + shift, b.particles, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("solver", ["lstsq", "adam"])
def test_float32_and_devices(solver, device):
    """float32 from the same particles gives the means and the evidence of float64, on every device."""
    found = []
    x0 = cloud(400, 3)
    for dtype, where in ((torch.float64, "cpu"), (torch.float32, device)):
        sampler = PGPS(
            normal(1.0, 0.5, 3), 3, 400, hidden=16, dtype=dtype, device=where, solver=solver, train_steps=20,
            first_train_steps=20, langevin_steps=2, final_langevin=20, seed=0,
        )  # fmt: skip
        result = sampler.run(x0)
        assert result.particles.shape == (400, 3) and result.particles.dtype == dtype
        assert result.particles.device.type == torch.device(where).type
        found.append((result.weights[:, None] * result.particles).sum(0).double().cpu())
        assert result.log_evidence == pytest.approx(0.0, abs=0.3)
    assert_close(found[0], found[1], rtol=0, atol=0.03)


@pytest.mark.parametrize("device", DEVICES)
def test_baselines_on_devices(device):
    x0 = cloud(50, 2).to(device)
    path = LwSPath(p.gaussian(1.0, 2), normal(1.0, 0.5, 2))
    target = normal(1.0, 0.5, 2)
    for result in (
        p.langevin(target, x0, 5, 0.01), p.langevin(target, x0, 5, 0.01, adjusted=True), p.svgd(target, x0, 5, 0.1),
        p.pfg(target, x0, 2, 0.1, first_steps=2), p.tempered_smc(path, x0, levels=3, moves=2),
        p.sgld(target, x0[0], 5, 0.01, burn_in=1),
    ):  # fmt: skip
        assert result.particles.device == result.weights.device == x0.device
        assert float(result.weights.sum()) == pytest.approx(1.0)


def test_two_particles_and_rows_that_are_not_contiguous():
    x0 = cloud(4, 6)[::2, ::3]
    assert not x0.is_contiguous()
    a, b = (PGPS(normal(1.0, 0.5, 2), 2, 2, hidden=1, seed=0).run(x) for x in (x0, x0.contiguous()))
    assert a.particles.shape == (2, 2) and torch.equal(a.particles, b.particles)


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
        patch.setattr(p.baselines, "CHUNK", 900)
        assert_close(p.svgd(normal(0.5, 1.0, 2), x, 4, 0.2).particles, whole)
        seen, plain = [], torch.cdist
        patch.setattr(torch, "cdist", lambda a, b: seen.append(len(a) * len(b)) or plain(a, b))
        patch.setattr(p.baselines, "CHUNK", 64)  # the median is that of eight particles
        near = p.svgd(normal(0.5, 1.0, 2), x, 4, 0.2).particles
        assert max(seen) <= 64 and not torch.equal(near, whole) and float((near - whole).abs().max()) < 0.5


def test_minibatches_are_unbiased():
    draw = torch.Generator().manual_seed(0)
    data, theta = torch.randn(12, generator=draw, dtype=torch.float64), torch.tensor([[0.3], [1.0]]).double()

    def likelihood(theta, rows):
        return -0.5 * (rows - theta).square().sum(1)

    prior = normal(0.0, 1.0)
    log_prob = p.minibatches(prior, likelihood, [data], 4, generator=draw)
    mean = torch.stack([p.Density(log_prob)(theta)[1] for _ in range(1000)]).mean(0)
    exact = p.Density(lambda t: prior(t) + likelihood(t, data))(theta)[1]
    assert_close(mean, exact, rtol=0, atol=4 * 6 / 1000**0.5)
    with pytest.raises(ValueError, match=r"batch_size must lie in \[1, 12\], not 13"):
        p.minibatches(prior, likelihood, [data], 13)
    with pytest.raises(ValueError, match="data must be tensors of one length"):
        p.minibatches(prior, likelihood, [data, data[:3]], 2)


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
        ({"ridge": -1.0}, "ridge must not be negative, not -1.0"),
        ({"dtype": torch.int64}, "dtype must be a floating dtype"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"dt_max": math.nan}, "dt_max must be positive"),
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
    with pytest.raises(ValueError, match=r"x0 must be \[n, d\] with n at least 1, not \(0, 1\)"):
        p.svgd(SETUP, cloud(0, 1), 3, 0.1)
    with pytest.raises(TypeError, match=r"x0 must be a floating tensor, not torch\.int64"):
        p.langevin(SETUP, torch.zeros(3, 1, dtype=torch.int64), 3, 0.1)
    with pytest.raises(ValueError, match=r"center must be a point \[2\] of finite numbers, not of shape \(3,\)"):
        PGPS(normal(0.0, 1.0, 2), 2, center=[0.0, 0.0, 1.0])

    class Wrong:
        def logp_and_grad(self, x):
            return x.sum(-1), x[:, :1]

    with pytest.raises(ValueError, match=r"must give gradients \(7, 3\)"):
        p.Density(Wrong())(cloud())
    with pytest.warns(UserWarning, match="stopped at t ="), pytest.MonkeyPatch.context() as patch:
        patch.setattr(p.sampler, "MOST_STEPS", 2)
        PGPS(SETUP, 1, 50, p0_scale=3.0, hidden=8, seed=0).run()


def test_what_is_not_finite_says_when():
    """NaN never passes: at later particles, after moves that diverge, in a loss, in a baseline."""

    def edge(x):
        return normal(3.0, 0.5)(x) + torch.where(x[:, 0] > 0.8, math.nan, 0.0) * x[:, 0]

    x0 = 0.1 * cloud(100, 1)
    for solver in ("lstsq", "adam"):
        with pytest.raises(FloatingPointError, match=r"not finite at t = 0\.\d+; give a smaller psi"):
            PGPS(edge, 1, 100, p0_scale=0.1, hidden=8, solver=solver, train_steps=50, seed=0, weights=False).run(x0)
    with pytest.raises(FloatingPointError, match=r"after Langevin moves at t = .*smaller langevin_step_size, not 50"):
        PGPS(normal(0.0, 0.1), 1, 50, hidden=4, final_langevin=200, langevin_step_size=50.0, seed=0).run()
    with pytest.raises(FloatingPointError, match="give a smaller step_size"):
        p.langevin(normal(0.0, 0.1), cloud(5, 1), 300, 50.0)
