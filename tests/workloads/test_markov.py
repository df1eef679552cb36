"""The in-context Markov language: its rates, its rules and its random state."""

import math

import numpy as np
import pytest

from assay.workloads.markov import PermutationChains


def test_the_permutation_is_followed_as_often_as_stated():
    chains = PermutationChains()
    x, rules = chains.sample_with_rules(2000, 0)
    assert x.shape == (2000, 97) and rules.shape == (2000, 16) and x.dtype == np.int64
    assert np.array_equal(np.sort(rules, 1), np.tile(np.arange(16), (2000, 1)))
    followed = np.take_along_axis(rules, x[:, :-1], 1) == x[:, 1:]
    rate = 0.8 + 0.2 / 16
    error = math.sqrt(rate * (1 - rate) / followed.size)
    assert abs(followed.mean() - rate) < 4 * error
    assert chains.best_accuracy == pytest.approx(rate)
    # at each position, so that no beginning or end differs
    assert np.abs(followed.mean(0) - rate).max() < 5 * math.sqrt(rate * (1 - rate) / 2000)


def test_other_symbols_follow_uniformly_and_chains_start_uniformly():
    x, rules = PermutationChains(symbols=5).sample_with_rules(4000, 1)
    start = np.bincount(x[:, 0], minlength=5) / 4000
    assert np.abs(start - 0.2).max() < 4 * math.sqrt(0.16 / 4000)
    # The distance from pi(x), when it is not 0, is uniform over 1..4.
    distance = (x[:, 1:] - np.take_along_axis(rules, x[:, :-1], 1)) % 5
    counts = np.bincount(distance.ravel(), minlength=5)[1:]
    assert np.abs(counts / counts.sum() - 0.25).max() < 4 * math.sqrt(0.1875 / counts.sum())
    # All images are equally likely.
    table = np.stack([np.bincount(rules[:, s], minlength=5) for s in range(5)]) / 4000
    assert np.abs(table - 0.2).max() < 4.5 * math.sqrt(0.16 / 4000)


def test_entropy_is_the_mean_surprise_of_who_knows():
    chains = PermutationChains()
    x, rules = chains.sample_with_rules(1000, 2)
    followed = np.take_along_axis(rules, x[:, :-1], 1) == x[:, 1:]
    surprise = np.where(followed, -math.log(0.8 + 0.2 / 16), -math.log(0.2 / 16))
    assert surprise.mean() == pytest.approx(chains.entropy, abs=0.02)
    assert chains.entropy == pytest.approx(0.99033, abs=1e-4)


@pytest.mark.parametrize("follow", [0.0, 1.0])
def test_extremes(follow):
    chains = PermutationChains(symbols=4, length=50, follow=follow)
    x, rules = chains.sample_with_rules(500, 3)
    followed = (np.take_along_axis(rules, x[:, :-1], 1) == x[:, 1:]).mean()
    if follow:
        assert followed == 1 and chains.entropy == 0 and chains.best_accuracy == 1
    else:
        assert abs(followed - 0.25) < 0.02 and chains.entropy == pytest.approx(math.log(4))


def test_the_random_state_decides():
    chains = PermutationChains(length=20)
    assert np.array_equal(chains.sample(7, 5), chains.sample(7, 5))
    assert not np.array_equal(chains.sample(7, 5), chains.sample(7, 6))
    draw = np.random.default_rng(5)
    first, second = chains.sample(7, draw), chains.sample(7, draw)
    assert np.array_equal(first, chains.sample(7, 5)) and not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"symbols": 1}, ValueError, "symbols must be at least 2, not 1"),
        ({"length": 1}, ValueError, "length must be at least 2, not 1"),
        ({"length": 9.5}, TypeError, "length must be a whole number, not 9.5"),
        ({"follow": 1.1}, ValueError, r"follow must be a probability in \[0, 1\], not 1.1"),
        ({"follow": math.nan}, ValueError, "not nan"),
    ],
)
def test_bad_options(options, kind, words):
    with pytest.raises(kind, match=words):
        PermutationChains(**options)


def test_bad_count():
    with pytest.raises(ValueError, match="count must be at least 1, not 0"):
        PermutationChains().sample(0, 0)
