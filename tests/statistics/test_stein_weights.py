"""Pivoted Cholesky, mirror descent, low-rank debiasing, recombination, simplex weights, Cholesky thinning."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from assay.statistics import stein_thinning as stein
from assay.statistics.stein_thinning import _cores, cholesky, debias
from assay.statistics.stein_thinning.cholesky import constant_weights
from assay.statistics.stein_thinning.rounding import frequencies

COVARIANCE = (lambda A: A @ A.T / 4 + 0.3 * np.eye(4))(np.random.default_rng(0).normal(size=(4, 4)))


def scenario(name, n, seed=0):
    """Points of three wrong kinds for the target N(0, COVARIANCE), with their scores."""
    rng = np.random.default_rng([11, seed])
    root, precision = np.linalg.cholesky(COVARIANCE), np.linalg.inv(COVARIANCE)
    X = rng.normal(size=(n, 4)) @ root.T
    if name == "temper":
        X = 2 * X
    elif name == "off":
        X[::2] = [2, 0, 0, 0] + 0.7 * rng.normal(size=(n // 2, 4))
    else:  # a Metropolis-adjusted Langevin chain from far out
        x = np.full(4, 15.0)
        for i in range(n):
            y = x - 0.05 * precision @ x + np.sqrt(0.1) * rng.normal(size=4)
            there, back = y - x + 0.05 * precision @ x, x - y + 0.05 * precision @ y
            accept = (x @ precision @ x - y @ precision @ y) / 2 + (there @ there - back @ back) / 0.2
            if np.log(rng.random()) < accept:
                x = y
            X[i] = x
    return X, -X @ precision


def kernel_of(name="temper", n=300, seed=0):
    return stein.SteinKernel().fit(*scenario(name, n, seed))


def value(K, w):
    return float(w @ K @ w)


# --- Cholesky ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_full_rank_reproduces_the_matrix(shift):
    kernel = kernel_of(n=120)
    w = np.random.default_rng(0).dirichlet(np.ones(120))
    F, pivots = stein.rp_cholesky(kernel, 120, weights=w, shift=shift, random_state=0)
    A = np.sqrt(w)[:, None] * (kernel.matrix() + shift) * np.sqrt(w)
    np.testing.assert_allclose(F @ F.T, A, atol=1e-6 * A.max())
    assert np.unique(pivots).size == pivots.size
    G, _ = stein.rp_cholesky(kernel, 120, random_state=0)
    np.testing.assert_allclose(G @ G.T, kernel.matrix(), atol=1e-6 * kernel.diag().max())


def test_rank_k_is_exact_after_k_pivots():
    B = np.random.default_rng(0).normal(size=(50, 6))
    F, pivots = stein.rp_cholesky(B @ B.T, 20, random_state=1)
    assert F.shape == (50, 6) and pivots.size == 6
    np.testing.assert_allclose(F @ F.T, B @ B.T, atol=1e-9)


def test_zero_weight_points_are_never_pivots():
    kernel = kernel_of(n=80)
    w = np.zeros(80)
    w[::3] = 1 / 27
    for seed in range(20):
        F, pivots = stein.rp_cholesky(kernel, 40, weights=w, random_state=seed)
        assert (pivots % 3 == 0).all() and (F[w == 0] == 0).all() and pivots.size == 27
    G, _ = stein.rp_cholesky(kernel.copy().store(), 40, weights=w, random_state=19)
    assert (F == G).all()


def test_cholesky_does_not_depend_on_the_unit():
    X, S = scenario("temper", 60)
    a, pivots = stein.rp_cholesky(stein.SteinKernel().fit(X, S), 60, random_state=0)
    b, same = stein.rp_cholesky(stein.SteinKernel().fit(X * 2**20, S / 2**20), 60, random_state=0)
    assert (pivots == same).all() and np.allclose(b * 2**20, a)


def test_pivots_follow_the_diagonal():
    K = np.diag([1.0, 3.0])
    first = [stein.rp_cholesky(K, 1, random_state=s)[1][0] for s in range(2000)]
    assert np.mean(first) == pytest.approx(0.75, abs=0.04)


# --- mirror descent and debiasing -------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000))
def test_mirror_descent_reaches_the_optimum(seed):
    rng = np.random.default_rng(seed)
    B = rng.normal(size=(3, 3))
    K = B @ B.T + 0.3 * np.eye(3)
    step = 1 / (8 * K.diagonal().max())
    w = stein.amd_simplex(K, np.ones(3) / 3, n_iterations=10_000, step=step, min_step=step)
    optimum = stein.simplex_qp(K)
    assert value(K, w) == pytest.approx(value(K, optimum), abs=1e-6)
    assert ((K @ w) >= value(K, w) - 1e-6).all()
    assert np.abs((K @ w)[w > 1e-3] - value(K, w)).max() < 1e-5


def test_mirror_descent_restarts_and_forced_steps():
    K = np.diag([1.0, 2.0, 4.0])
    w = stein.amd_simplex(lambda v: K @ v, np.ones(3) / 3, n_iterations=500, step=50.0, min_step=1e-3)
    np.testing.assert_allclose(w, np.array([4, 2, 1]) / 7, atol=1e-4)
    start = np.array([0.5, 0.5, 0.0])
    assert (stein.amd_simplex(K, start, n_iterations=0, step=1.0, min_step=1.0) == start).all()
    assert stein.amd_simplex(K, start, n_iterations=50, step=0.1, min_step=0.01)[2] == 0
    # Exponents of any size neither overflow nor vanish.
    with np.errstate(over="raise"):
        assert np.isfinite(stein.amd_simplex(1e6 * K, start, n_iterations=5, step=1e3, min_step=1e4)).all()


@pytest.mark.parametrize("name", ["burnin", "temper", "off"])
def test_debiasing_beats_uniform_weights(name):
    kernel = kernel_of(name, 1024).store()
    K = kernel.matrix()
    w = stein.low_rank_debias(kernel, 32, random_state=0)
    assert w.min() >= 0 and w.sum() == pytest.approx(1)
    assert value(K, w) < 0.05 * value(K, np.full(1024, 1 / 1024))
    again = stein.low_rank_debias(kernel_of(name, 1024), 32, random_state=0)
    assert (w == again).all()


@pytest.mark.parametrize(
    "name, low_rank, greedy", [("burnin", 0.031, 0.0105), ("temper", 0.0037, 0.0025), ("off", 0.022, 0.0052)]
)
def test_debiased_discrepancy_at_full_size(name, low_rank, greedy):
    # Measured once with an independent implementation; chains differ by seed, so a factor of 2 for one chain.
    X, S = scenario(name, 4096)
    kernel = stein.SteinKernel().fit(X, S).store()
    w = stein.low_rank_debias(kernel, 64, random_state=0)
    assert 0.5 * low_rank < stein.ksd(X, S, w, kernel=kernel) < 2 * low_rank
    picks = stein.stein_thin(kernel, 4096)
    assert 0.5 * greedy < stein.ksd(X, S, indices=picks, kernel=kernel) < 2 * greedy


def test_debiasing_with_a_full_rank_surrogate_approaches_the_quadratic_program():
    kernel = kernel_of(n=150).store()
    K = kernel.matrix()
    w = stein.low_rank_debias(kernel, 150, n_iterations=4000, rounds=1, random_state=0)
    best = value(K, stein.simplex_qp(K))
    assert best <= value(K, w) + 1e-12 and value(K, w) < 1.02 * best


# --- recombination ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(0, 12), st.integers(0, 10_000))
def test_recombination_keeps_moments(n, k, seed):
    rng = np.random.default_rng(seed)
    moments = rng.normal(size=(n, k)) * 10.0 ** rng.integers(-3, 4, size=k)
    weights = rng.dirichlet(np.full(n, 0.3))
    result = stein.recombine(moments, weights)
    assert (result >= 0).all() and result.sum() == pytest.approx(1, abs=1e-8)
    assert (result > 0).sum() <= k + 1
    size = np.abs(moments).max(axis=0, initial=1e-300)
    assert (np.abs(moments.T @ result - moments.T @ weights) <= 1e-8 * size).all()
    if n <= k + 1:
        assert (result == weights).all()


def test_recombination_with_dependent_moments_and_repeats():
    rng = np.random.default_rng(0)
    base = np.repeat(rng.normal(size=(30, 2)), 10, axis=0)
    moments = np.column_stack([base, base[:, 0] + base[:, 1], np.zeros(300)])
    result = stein.recombine(moments, np.full(300, 1 / 300))
    np.testing.assert_allclose(moments.T @ result, moments.mean(axis=0), atol=1e-8)
    assert (result > 0).sum() <= 5


def test_recombination_of_a_kernel_factor():
    kernel = kernel_of("off", 1000)
    w = frequencies(stein.stein_thin(kernel, 1000), 1000)
    F, _ = stein.rp_cholesky(kernel, 31, weights=w, random_state=0)
    support = np.flatnonzero(w)
    result = stein.recombine(F[support] / np.sqrt(w[support])[:, None], w[support])
    before, after = F[support].T @ np.sqrt(w[support]), F[support].T @ (result / np.sqrt(w[support]))
    np.testing.assert_allclose(after, before, atol=1e-8 * np.sqrt(kernel.diag().max()))
    assert (result > 0).sum() <= 32


# --- weights on a support ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 25), st.integers(0, 10_000), st.booleans())
def test_quadratic_program(m, seed, repeat):
    rng = np.random.default_rng(seed)
    B = rng.normal(size=(m, m + 2))
    K = B @ B.T
    if repeat and m > 3:
        K[:, 1], K[1, :] = K[:, 0], K[0, :]
        K[1, 1] = K[0, 0]
        K[0, 1] = K[1, 0] = K[0, 0]
    start = rng.dirichlet(np.ones(m))
    w = stein.simplex_qp(K, start)
    assert w.min() >= 0 and w.sum() == pytest.approx(1)
    assert value(K, w) <= value(K, start) + 1e-12
    gradient, level = K @ w, value(K, w)
    scale = K.diagonal().max()
    assert (gradient >= level - 1e-7 * scale).all()
    assert np.abs(gradient[w > 1e-8] - level).max() < 1e-7 * scale


def test_quadratic_program_against_scipy():
    K = kernel_of("off", 20).matrix()
    answer = minimize(
        lambda w: value(K, w), np.full(20, 0.05), jac=lambda w: 2 * K @ w, method="SLSQP", bounds=[(0, 1)] * 20,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(20)},
        options={"ftol": 1e-14, "maxiter": 1000},
    )  # fmt: skip
    assert value(K, stein.simplex_qp(K)) == pytest.approx(answer.fun, rel=1e-5)


def random_weights(rng, n, m, negative):
    w = np.zeros(n)
    values = rng.dirichlet(np.ones(m))
    if negative and m > 1:
        values[0] -= 0.3
        values[1] += 0.3
    w[rng.choice(n, m, replace=False)] = values
    return w


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 15), st.integers(0, 10_000), st.booleans())
def test_line_search_swap_never_hurts(m, seed, negative):
    kernel = kernel_of("off", 60, seed % 7)
    K = kernel.matrix()
    w = random_weights(np.random.default_rng(seed), 60, m, negative)
    swapped = stein.swap_line_search(kernel, w, negative=negative)
    assert value(K, swapped) <= value(K, w) + 1e-12
    assert (swapped != 0).sum() <= m and swapped.sum() == pytest.approx(1)
    assert negative or swapped.min() >= 0
    same = stein.swap_line_search(kernel.copy().store(), w, negative=negative)
    np.testing.assert_allclose(same, swapped, rtol=1e-12, atol=1e-15)


def test_line_search_swap_finds_the_best_single_exchange():
    K = kernel_of("off", 30).matrix()
    w = np.zeros(30)
    w[[4, 9]] = 0.5
    # Removing 4 leaves the unit mass at 9; try every replacement with every step of a fine grid.
    swapped = stein.swap_line_search(K, w)
    grid = np.linspace(0, 1, 2001)

    def along(i, j):
        return ((1 - grid) ** 2 * K[i, i] + 2 * grid * (1 - grid) * K[i, j] + grid**2 * K[j, j]).min()

    first = min(range(30), key=lambda j: along(9, j) if j != 9 else np.inf)
    second = min(along(first, j) for j in range(30) if j != first)
    assert value(K, swapped) == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("clamp", [True, False])
def test_line_search_swap_keeps_its_books(clamp):
    kernel = kernel_of("off", 60)
    w = random_weights(np.random.default_rng(0), 60, 9, not clamp)
    after, products = _cores.swap_line_search(*kernel.parts(), kernel.diag(), w, clamp)
    assert after.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(products, kernel.matrix() @ after, rtol=1e-9, atol=1e-12)


def test_the_surrogate_has_the_diagonal_of_the_kernel(monkeypatch):
    kernel = kernel_of(n=90)
    seen = []
    real = debias.amd_simplex

    def spy(product, weights, **options):
        eye = np.eye(weights.size)
        seen.append((np.array([product(e)[i] for i, e in enumerate(eye)]), options))
        return real(product, weights, **options)

    monkeypatch.setattr(debias, "amd_simplex", spy)
    stein.low_rank_debias(kernel, 5, random_state=0)
    assert len(seen) == 3
    np.testing.assert_allclose(seen[0][0], kernel.diag(), rtol=1e-9)
    assert set(np.round(seen[2][0], 9)) <= set(np.round(kernel.diag(), 9))
    assert seen[0][1]["n_iterations"] == 67  # the ceiling of 7 sqrt(90)
    assert seen[0][1]["step"] == seen[0][1]["min_step"] == pytest.approx(1 / (8 * kernel.diag().max()))
    assert seen[1][1]["step"] > seen[1][1]["min_step"]


def test_cholesky_thinning_shifts_by_the_largest_diagonal_entries(monkeypatch):
    kernel = kernel_of(n=50)
    w = np.zeros(50)
    w[::2] = 1 / 25
    seen = {}
    real = cholesky.rp_cholesky

    def spy(*arguments, **options):
        seen.update(options)
        return real(*arguments, **options)

    monkeypatch.setattr(cholesky, "rp_cholesky", spy)
    stein.cholesky_thin(kernel, w, 4, random_state=0)
    assert seen["shift"] == pytest.approx(np.sort(kernel.diag()[::2])[-4:].mean())


@pytest.mark.parametrize("name", ["burnin", "temper", "off"])
@pytest.mark.parametrize("m", [1, 2, 28])
def test_recombination_and_cholesky_thinning(name, m):
    kernel = kernel_of(name, 400).store()
    K = kernel.matrix()
    w = frequencies(stein.stein_thin(kernel, 400), 400)
    for swap in (True, False):
        simplex = stein.recombination_thin(kernel, w, m, swap=swap, random_state=0)
        assert simplex.min() >= 0 and simplex.sum() == pytest.approx(1) and (simplex > 0).sum() <= m
        signed = stein.cholesky_thin(kernel, w, m, swap=swap, random_state=0)
        assert signed.sum() == pytest.approx(1) and (signed != 0).sum() <= m
        support = np.flatnonzero(signed)
        # On the support K v is constant; constants beat simplex weights beat equal weights.
        levels = K[np.ix_(support, support)] @ signed[support]
        assert np.ptp(levels) < 1e-6 * max(abs(levels).max(), 1e-6 * K.max())
        simplex_there = stein.simplex_qp(K[np.ix_(support, support)])
        equal = np.full(support.size, 1 / support.size)
        on = K[np.ix_(support, support)]
        assert value(K, signed) <= value(on, simplex_there) + 1e-9
        assert value(on, simplex_there) <= value(on, equal) + 1e-12


def test_few_heavy_points_need_no_recombination():
    kernel = kernel_of(n=50)
    w = np.zeros(50)
    w[[3, 8]] = [0.25, 0.75]
    kept = stein.recombination_thin(kernel, w, 5, swap=False)
    assert set(np.flatnonzero(kept)) <= {3, 8}
    signed = stein.cholesky_thin(kernel, w, 5, swap=False)
    assert set(np.flatnonzero(signed)) <= {3, 8}


def test_repeated_points_do_not_break_the_solves():
    X, S = scenario("temper", 60)
    X, S = np.repeat(X, 4, axis=0), np.repeat(S, 4, axis=0)
    kernel = stein.SteinKernel().fit(X, S)
    w = np.full(240, 1 / 240)
    support = np.arange(40)  # ten distinct points, four times each
    signed = constant_weights(kernel, support)
    assert np.isfinite(signed).all() and signed.sum() == pytest.approx(1)
    assert np.isfinite(stein.recombination_thin(kernel, w, 20, random_state=0)).all()
    assert np.isfinite(stein.cholesky_thin(kernel, w, 20, random_state=0)).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda K: stein.rp_cholesky(K, 0), "rank must be at least 1"),
        (lambda K: stein.rp_cholesky(K, 2, weights=np.ones(5)), r"weights must have shape \(4,\)"),
        (lambda K: stein.rp_cholesky(K, 2, shift=-1), "shift must be"),
        (lambda K: stein.amd_simplex(K, np.ones(4) / 4, n_iterations=3, step=0, min_step=1), "step must be"),
        (lambda K: stein.amd_simplex(K, np.ones(4) / 4, n_iterations=3, step=1, min_step=np.nan), "min_step must be"),
        (lambda K: stein.amd_simplex(K, np.ones(4), n_iterations=3, step=1, min_step=1), "sum to 1"),
        (lambda K: stein.low_rank_debias(K, 2, rounds=0), "rounds must be at least 1"),
        (lambda K: stein.recombine(np.ones(4), np.ones(4) / 4), r"moments must have shape \(n, k\)"),
        (lambda K: stein.recombine(np.ones((4, 1)), [0.5, 0.5, 0.5, -0.5]), "must not be negative"),
        (lambda K: stein.recombination_thin(K, np.ones(4) / 4, 0), "n_points must be at least 1"),
        (lambda K: stein.cholesky_thin(K, np.ones(4) / 4, 0), "n_points must be at least 1"),
        (lambda K: stein.simplex_qp(K[:2]), "square matrix"),
        (lambda K: stein.swap_line_search(K, [2.0, -1.0, 0, 0]), "must not be negative"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.eye(4))
