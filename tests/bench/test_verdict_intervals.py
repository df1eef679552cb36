import itertools

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.bench import intervals
from assay.bench.intervals import (
    asymmetry,
    float_noise,
    paired_interval,
    resolution,
    t_interval,
    wilcoxon_interval,
    wilcoxon_rank,
)


def test_t_interval_is_scipys():
    x = np.random.default_rng(0).normal(size=9)
    expected = scipy.stats.t.interval(0.95, 8, x.mean(), scipy.stats.sem(x))
    np.testing.assert_allclose(t_interval(x), expected, rtol=1e-12)


@pytest.mark.parametrize("n", [6, 7, 11, 12])
def test_rank_agrees_with_all_sign_patterns(n):
    ranks = np.arange(1, n + 1)
    signs = np.array(list(itertools.product([0, 1], repeat=n)))
    sums = np.sort(signs @ ranks)
    k = wilcoxon_rank(n)
    assert np.mean(sums <= k - 1) <= 0.025 < np.mean(sums <= k)


def test_five_pairs_cannot_prove_anything():
    assert wilcoxon_rank(5) == 0
    with pytest.raises(ValueError, match="5 pairs"):
        wilcoxon_interval(np.arange(5.0))


def test_approximate_rank_is_on_the_safe_side_and_close():
    for n in (200, 300, 401, 550, 800):
        exact, approximate = intervals._exact_rank(n), intervals._normal_rank(n)
        assert exact - 3 <= approximate <= exact


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(-40, 40), min_size=6, max_size=16), st.integers(0, 3))
def test_the_end_excludes_zero_only_where_the_exact_sign_test_does(values, halvings):
    """The proof of the module, for every conditional distribution: P over signs of (low > 0) <= 2.5%."""
    size = np.abs(np.array(values, float)) / 2**halvings
    rng = np.random.default_rng(0)
    n = size.size
    if n <= 10:
        signs = np.array(list(itertools.product([-1.0, 1.0], repeat=n)))
        allowed = 0.025
    else:
        signs = rng.choice([-1.0, 1.0], (2000, n))
        allowed = 0.025 + 4 * np.sqrt(0.025 * 0.975 / 2000)
    low, high = wilcoxon_interval(signs * size)
    assert np.mean(low > 0) <= allowed
    assert np.mean(high < 0) <= allowed


@pytest.mark.parametrize("n", [6, 50, 301])
def test_selection_without_pairs_is_exact(n):
    rng = np.random.default_rng(n)
    samples = [
        rng.normal(size=n),
        rng.standard_cauchy(n),
        np.round(rng.normal(size=n)),
        np.zeros(n),
        np.where(rng.random(n) < 0.8, 0.0, 0.1),
        rng.normal(size=n) * 1e-3 + 1e6,
        np.round(rng.normal(size=n), 1) / 10,
    ]
    i, j = np.triu_indices(n)
    for x in map(np.sort, samples):
        walsh = np.sort((x[i] + x[j]) / 2)
        for k in {1, 2, wilcoxon_rank(n), walsh.size // 2, walsh.size}:
            assert intervals._walsh_select(x, k) == walsh[k - 1]


def test_large_samples_take_the_path_without_pairs(monkeypatch):
    x = np.random.default_rng(1).normal(size=(3, 60))
    expected = wilcoxon_interval(x)
    monkeypatch.setattr(intervals, "_ALL_PAIRS_UP_TO", 10)
    np.testing.assert_array_equal(wilcoxon_interval(x), expected)


def test_hull_contains_both_and_many_rows_equal_one():
    rng = np.random.default_rng(2)
    a, b = rng.lognormal(size=(40, 12)), rng.lognormal(size=(40, 12))
    found = paired_interval(a, b)
    for r in range(40):
        alone = paired_interval(a[r], b[r])
        assert (alone.effect, alone.low, alone.high) == (found.effect[r], found.low[r], found.high[r])
        t, w = t_interval(a[r] - b[r]), wilcoxon_interval(a[r] - b[r])
        assert alone.low == min(t[0], w[0]) and alone.high == max(t[1], w[1])


def test_ratio_is_geometric_and_turns_around_exactly():
    rng = np.random.default_rng(3)
    a, b = rng.lognormal(size=8), rng.lognormal(size=8)
    one, other = paired_interval(a, b, ratio=True), paired_interval(b, a, ratio=True)
    assert one.effect == pytest.approx(scipy.stats.gmean(a / b))
    assert one.low == pytest.approx(1 / other.high) and one.high == pytest.approx(1 / other.low)


def test_fewer_than_three_have_no_ends():
    found = paired_interval(np.array([1.0, 2.0]), np.array([0.0, 0.5]))
    assert found.effect == 1.25 and np.isnan(found.low) and np.isnan(found.high)


@pytest.mark.parametrize("step", [0.5, 0.01, 1e-3, 3.0, 1 / 128])
@pytest.mark.parametrize("offset", [0.0, 0.123456789])
def test_lattice_is_found_even_where_the_arms_are_offset(step, offset):
    a, b = np.array([3, 7, 8, 20]) * step, np.array([1, 3, 9, 10]) * step + offset
    assert resolution(a, b) == pytest.approx(step)
    constant = np.full(4, 0.8765432)
    assert resolution(a, constant) == pytest.approx(step)


def test_continuous_values_are_no_lattice():
    rng = np.random.default_rng(4)
    for n in (3, 4, 5):
        a, b = rng.normal(size=(20_000, n)), rng.normal(size=(20_000, n))
        assert np.mean(resolution(a, b) > 0) < 1e-3
        assert np.mean(resolution(a + 1e6, b + 1e6) > 0.02) < 1e-3


def test_lattice_widens_a_small_sample_by_half_a_step():
    a, b = np.array([5.0, 6.0, 6.0]), np.zeros(3)
    low, high = t_interval(a - b)
    found = paired_interval(a, b)
    assert found.low == low - 0.5 and found.high == high + 0.5
    ratio = paired_interval(a, np.ones(3), ratio=True)
    log_low, _ = t_interval(np.log(a))
    assert ratio.low == pytest.approx(np.exp(log_low - 0.5))  # the smallest value is 1: a step is all of it


def test_flat_means_equal_up_to_float_noise():
    three = np.array([0.1, 0.2, 0.3])
    assert paired_interval(three + 0.1, three).flat  # 0.1 is not exact, so that these differ in the last place
    assert not paired_interval(three + np.array([0.1, 0.1, 0.1001]), three).flat
    single = three.astype(np.float32).astype(float)
    above = (three.astype(np.float32) + np.float32(0.1)).astype(float)
    assert paired_interval(above, single).flat
    assert paired_interval(3 * three, three, ratio=True).flat
    assert float_noise(np.array([1e6, 0.1]), np.zeros(2)) < 1e-9  # 0.1 is no float32
    assert 1e-7 < float_noise(np.array([1.0, 0.5]), np.zeros(2)) < 1e-6


def test_triples_statistic_agrees_with_counting():
    # the p-value must move with the share of leaning triples that a plain count finds
    rng = np.random.default_rng(5)
    for x in (rng.normal(size=14), np.round(rng.exponential(size=14), 1), rng.exponential(size=14)):
        s = np.sort(x)
        n = s.size
        lean = {t: np.sign(s[t[0]] + s[t[2]] - 2 * s[t[1]]) for t in itertools.combinations(range(n), 3)}
        total = sum(lean.values())
        without = np.array([sum(v for t, v in lean.items() if i not in t) for i in range(n)]) / 286
        error = np.sqrt((n - 1) / n * np.square(without - without.mean()).sum())
        assert asymmetry(x) == pytest.approx(2 * scipy.stats.t.sf(abs(total / 364) / error, n - 1), rel=1e-9)


def test_asymmetry_has_nothing_to_say_of_few_or_tied_values():
    assert asymmetry(np.array([1.0, 2.0, 30.0])) == 1.0
    assert asymmetry(np.r_[np.zeros(11), 1.0, 5.0, 9.0]) == 1.0
    assert asymmetry(np.arange(20.0)) == 1.0
    assert asymmetry(np.random.default_rng(0).exponential(size=5000)) < 1e-6
    assert asymmetry(2.0 ** np.arange(12)) == 0.0  # every triple leans the same way
