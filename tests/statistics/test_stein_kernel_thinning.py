"""Rounding, halving, splitting, swapping and Compress++."""

import numpy as np
import pytest
from goodpoints import kt, ktc
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist

from assay.statistics import stein_thinning as stein
from assay.statistics.stein_thinning.kernel_thinning import squared_mmd


def gaussian(n, d=2, seed=0, scale=1.0):
    X = scale * np.random.default_rng(seed).normal(size=(n, d))
    return stein.SteinKernel().fit(X, -X)


# --- rounding ---------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=30).filter(lambda w: sum(w) > 1e-3),
    st.integers(1, 200),
    st.integers(0, 9),
)
def test_rounding_counts(weights, size, seed):
    w = np.array(weights) / np.sum(weights)
    sequence = stein.stratified_round(w, size, random_state=seed)
    counts = np.bincount(sequence, minlength=w.size)
    assert sequence.size == size and (np.diff(sequence) >= 0).all()
    # The floor is kept. A residual below 1 overlaps at most two strata, so at most two draws are added.
    assert (counts >= np.floor(w * size - 1e-6)).all()
    assert (counts - w * size < 2).all() and (counts - w * size > -1).all()
    assert (counts[w == 0] == 0).all()


def test_two_draws_from_one_residual_do_happen():
    # The bound of 2 is the right one: stratified (not systematic) resampling can give base + 2.
    w = np.array([0.5, 0.9, 0.6]) / 2
    counts = [np.bincount(stein.stratified_round(w, 2, random_state=s), minlength=3)[1] for s in range(200)]
    assert max(counts) == 2
    assert np.mean(counts) == pytest.approx(0.9, abs=0.12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=40).filter(lambda c: sum(c) > 0))
def test_rounding_keeps_multiples_exactly(counts):
    counts = np.array(counts)
    n = int(counts.sum())
    for w in (counts / n, counts * (1 / n)):
        sequence = stein.stratified_round(w, n, random_state=0)
        assert (np.bincount(sequence, minlength=counts.size) == counts).all()


def test_rounding_bad_input():
    with pytest.raises(ValueError, match="weights must not be negative"):
        stein.stratified_round([1.5, -0.5], 3)
    with pytest.raises(ValueError, match="weights must sum to 1"):
        stein.stratified_round([0.5, 0.6], 3)
    with pytest.raises(ValueError, match="weights must be finite"):
        stein.stratified_round([0.5, np.nan], 3)


# --- halving ----------------------------------------------------------------------------------------------------


def mmd_between(K, a, b):
    signs = np.zeros(len(K))
    signs[a], signs[b] = 1 / len(a), -1 / len(b)
    return np.sqrt(max(0, signs @ K @ signs))


def balance(matrix_of, seed):
    rng = np.random.default_rng([3, seed])
    X = rng.normal(size=(1024, 2))
    K = matrix_of(X)
    a, b = stein.kernel_halve(K, np.arange(1024), random_state=rng)
    assert sorted([*a, *b]) == list(range(1024)) and a.size == b.size == 512
    shuffled = rng.permutation(1024)
    return mmd_between(K, a, b) / mmd_between(K, shuffled[:512], shuffled[512:])


def test_halves_balance_better_than_chance():
    ratios = np.array([balance(lambda X: np.exp(-(cdist(X, X) ** 2) / 4), seed) for seed in range(100)])
    assert (ratios < 0.5).sum() >= 95


def test_halves_balance_the_rougher_stein_kernel_too():
    def stein_matrix(X):
        return stein.SteinKernel(lengthscale=1.5).fit(X, -X).matrix()

    ratios = np.array([balance(stein_matrix, seed) for seed in range(20)])
    assert (ratios < 1).all() and ratios.mean() < 0.5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 29), min_size=2, max_size=80), st.integers(0, 99))
def test_halves_partition_the_sequence(sequence, seed):
    sequence = np.array(sequence[: len(sequence) // 2 * 2])
    kernel = gaussian(30)
    a, b = stein.kernel_halve(kernel, sequence, random_state=seed)
    assert a.size == b.size
    assert sorted([*a, *b]) == sorted(sequence)
    pairs = sequence.reshape(-1, 2)
    assert all({x, y} == {p, q} for x, y, (p, q) in zip(a, b, pairs))  # one of each pair in each half, in order
    c, d = stein.kernel_halve(kernel.copy().store(), sequence, random_state=seed)
    assert (a == c).all() and (b == d).all()


@pytest.mark.parametrize("seed", range(5))
def test_halves_of_goodpoints(seed):
    # goodpoints takes log(2 n / delta) where this function takes log(2 / delta).
    n = 300
    K = gaussian(n, 3, seed).matrix()
    uniforms = np.random.default_rng(seed).random(n // 2)
    theirs = np.empty((2, n // 2), dtype=np.int64)
    ktc.halve_K(K, 0.5, uniforms, theirs)
    ours = stein.kernel_halve(K, np.arange(n), delta=0.5 / n, random_state=seed)
    assert (ours[0] == theirs[0]).all() and (ours[1] == theirs[1]).all()


def test_identical_points_are_halved_without_warning():
    K = np.ones((8, 8))
    with np.errstate(all="raise"):
        a, b = stein.kernel_halve(K, np.arange(8), random_state=0)
    assert a.size == b.size == 4


def test_split_partitions():
    kernel = gaussian(64)
    sequence = np.arange(64)
    parts = stein.kernel_split(kernel, sequence, 3, random_state=0)
    assert len(parts) == 8 and {p.size for p in parts} == {8}
    assert sorted(np.concatenate(parts)) == list(range(64))
    assert (stein.kernel_split(kernel, sequence, 0)[0] == sequence).all()


# --- swapping ---------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_swap_never_hurts(seed, m):
    kernel = gaussian(60, 2, seed % 17)
    start = np.random.default_rng(seed).integers(0, 60, size=m)
    swapped = stein.kernel_swap(kernel, [start])
    thinned = stein.stein_thin(kernel, m)
    bound = min(squared_mmd(kernel, start), squared_mmd(kernel, thinned))
    assert squared_mmd(kernel, swapped) <= bound + 1e-12
    assert (swapped == stein.kernel_swap(kernel.copy().store(), [start])).all()


@pytest.mark.parametrize("seed", range(5))
def test_refinement_of_goodpoints(seed):
    K = gaussian(200, 3, seed).matrix()
    start = np.random.default_rng(seed).choice(200, size=15, replace=False)
    theirs = kt.refine_K(K, start, mean0=True)
    ours = stein.kernel_swap(K, [start], baseline=start)
    assert (ours == np.sort(theirs)).all()


def test_kernel_thin_and_thin_of_goodpoints():
    # Same pieces, but goodpoints compares with standard thinning and refines one candidate: ours is never worse
    # than Stein thinning, and close to theirs.
    ours, theirs = [], []
    for seed in range(10):
        kernel = gaussian(256, 2, seed)
        K = kernel.matrix()
        a = stein.kernel_thin(kernel, np.arange(256), 16, random_state=seed)
        b = kt.thin_K(K, K, 4, delta=0.5, seed=seed, mean0=True)
        ours.append(squared_mmd(kernel, a))
        theirs.append(squared_mmd(kernel, np.asarray(b)))
        assert ours[-1] <= squared_mmd(kernel, stein.stein_thin(kernel, 16)) + 1e-12
    assert np.mean(ours) < 1.1 * np.mean(theirs)


# --- Compress++ -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0, 1, 2, 3, 5, 6])
def test_compress_pp_sizes(power):
    kernel = gaussian(100)
    sequence = np.sort(np.random.default_rng(power).integers(0, 100, size=4**power))
    result = stein.compress_pp(kernel, sequence, random_state=0)
    assert result.size == 2**power and (np.diff(result) >= 0).all()
    assert (result == stein.compress_pp(kernel.copy().store(), sequence, random_state=0)).all()
    thinned = stein.stein_thin(kernel, 2**power)
    assert squared_mmd(kernel, result) <= squared_mmd(kernel, thinned) + 1e-12


def test_compress_pp_halves_what_it_should(monkeypatch):
    # N = 4^6, g = 4: the outermost level joins four pieces of 512, that is 2^(g+1) sqrt(N) = 2048 points, unhalved.
    from assay.statistics.stein_thinning import kernel_thinning

    calls = []
    real = kernel_thinning.kernel_halve

    def spy(kernel, sequence, **options):
        halves = real(kernel, sequence, **options)
        calls.append((sequence, halves))
        return halves

    monkeypatch.setattr(kernel_thinning, "kernel_halve", spy)
    kernel = gaussian(4096)
    kept = []
    for seed in range(4):
        calls.clear()
        stein.compress_pp(kernel, np.arange(4096), random_state=seed)
        sizes = [len(sequence) for sequence, _ in calls]
        assert sizes[:4] == [1024] * 4
        assert sizes[4:] == [2048] + [1024] * 2 + [512] * 4 + [256] * 8 + [128] * 16
        joined = calls[4][0]
        for i, (_, (a, b)) in enumerate(calls[:4]):
            piece = joined[512 * i : 512 * (i + 1)]
            kept.append(0 if (piece == a).all() else 1)
            assert kept[-1] == 0 or (piece == b).all()
    assert 0 < sum(kept) < 16  # either half is kept, by chance


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda K: stein.kernel_halve(K, np.arange(5)), "even length"),
        (lambda K: stein.kernel_halve(K, np.arange(4), delta=0), "delta must lie"),
        (lambda K: stein.kernel_halve(K, [0, 99]), "between 0 and 15"),
        (lambda K: stein.kernel_split(K, np.arange(6), 2), "divides"),
        (lambda K: stein.kernel_swap(K, [np.arange(3), np.arange(4)]), "one length"),
        (lambda K: stein.kernel_swap(K, []), "one length"),
        (lambda K: stein.kernel_thin(K, np.arange(12), 4), r"n_points \* 2\*\*t"),
        (lambda K: stein.compress_pp(K, np.arange(8)), r"4\*\*p"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.eye(16))
