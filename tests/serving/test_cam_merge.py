"""The algebra of merging: identities of the paper, the sampled mask, and the numbers that it is drawn with."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.serving.cam import (
    CaM,
    eviction_change,
    eviction_change_unscaled,
    merge_change,
    merge_change_unscaled,
    merge_probability,
    merge_targets,
    merge_values,
)
from assay.serving.cam.merge import uniform

MASKS = ("bernoulli", "bernoulli_current", "threshold", "max", "all")


def attention(n=12, dim=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, generator=g, dtype=torch.float64).softmax(0), torch.randn(n, dim, generator=g).double()


def merged(values, victim, m, positions=None):
    """Values after an unconditional merge, as the part does it."""
    n = values.shape[0]
    positions = torch.arange(n)[None, None] if positions is None else positions
    victim = torch.tensor([[victim]])
    slots, taken = merge_targets(positions, victim, m)
    out = values.clone()[None, None]
    merge_values(out, victim, slots, taken, torch.ones(1, 1, dtype=torch.bool))
    return out[0, 0], slots[0, 0][taken[0, 0]]


def test_one_target_with_the_right_ratio_cancels_exactly():
    """Without renormalisation, V_j + (A_i / A_j) V_i leaves the output of the step as it is."""
    a, v = attention()
    for i in range(11):
        j = i + 1
        after = v.clone()
        after[j] += a[i] / a[j] * v[i]
        keep = torch.arange(12) != i
        torch.testing.assert_close(a[keep] @ after[keep], a @ v, rtol=0, atol=1e-6)
        # ... which is what merge_change_unscaled says: the mean weight of the target, times the ratio, minus A_i
        assert merge_change_unscaled(a[i], v[i], a[j] * (a[i] / a[j])).abs().max() < 1e-12


@pytest.mark.parametrize("m", [1, 3, 5, 30])
def test_average_merge_identity(m):
    a, v = attention()
    keep = torch.arange(12) != 2
    after, targets = merged(v, 2, m)
    change = a[keep] @ after[keep] - a @ v
    torch.testing.assert_close(change, (a[targets].mean() - a[2]) * v[2], rtol=0, atol=1e-12)
    torch.testing.assert_close(change, merge_change_unscaled(a[2], v[2], a[targets].mean()), rtol=0, atol=1e-12)
    torch.testing.assert_close(a[keep] @ v[keep] - a @ v, eviction_change_unscaled(a[2], v[2]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identities_of_a_real_cache(dtype):
    """With the softmax of the remaining tokens; even a perfectly matched merge inflates the output."""
    a, v = (x.to(dtype) for x in attention(seed=3))
    o = a @ v
    keep = torch.arange(12) != 4
    scaled = a[keep] / a[keep].sum()
    torch.testing.assert_close(scaled @ v[keep] - o, eviction_change(a[4], v[4], o), rtol=0, atol=1e-5)
    after, targets = merged(v, 4, 3)
    mean = a[targets].mean()
    torch.testing.assert_close(scaled @ after[keep] - o, merge_change(a[4], v[4], o, mean), rtol=0, atol=1e-5)
    torch.testing.assert_close(merge_change(a[4], v[4], o, a[4]), a[4] * o / (1 - a[4]), rtol=0, atol=1e-5)


def test_average_merge_beats_eviction_below_twice_the_weight():
    """In the paper's accounting: |avg - A_i| < A_i iff 0 < avg < 2 A_i."""
    v = torch.ones(4)
    for mean, better in ((0.01, True), (0.19, True), (0.21, False)):
        evict = eviction_change_unscaled(torch.tensor(0.1), v).norm()
        assert (merge_change_unscaled(torch.tensor(0.1), v, torch.tensor(mean)).norm() < evict) == better


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 20), st.integers(1, 25), st.integers(0, 10**6))
def test_the_sum_of_values_is_conserved(n, m, seed):
    g = torch.Generator().manual_seed(seed)
    values = torch.randn(n, 5, generator=g).double()
    order = torch.randperm(n, generator=g)
    victim = int(torch.randint(n, (), generator=g))
    after, targets = merged(values, victim, m, order[None, None])
    place = order.tolist()
    expected = sorted(p for p in place if p > place[victim])[:m]
    assert [place[t] for t in targets.tolist()] == expected
    if not expected:  # nobody follows: nothing is merged, and nothing lost elsewhere
        assert torch.equal(after, values)
        return
    keep = torch.arange(n) != victim
    torch.testing.assert_close(after[keep].sum(0), values.sum(0), rtol=0, atol=1e-12)
    untouched = [s for s in range(n) if s not in targets.tolist()]
    assert torch.equal(after[untouched], values[untouched])


def test_targets_skip_empty_slots_and_respect_the_recent_window():
    positions = torch.tensor([[[7, -1, 3, 9, 0, 5, -1, 8]]])
    slots, taken = merge_targets(positions, torch.tensor([[2]]), 3)
    assert positions[0, 0, slots[0, 0]].tolist() == [5, 7, 8] and taken.all()
    slots, taken = merge_targets(positions, torch.tensor([[2]]), 3, start=8)
    assert positions[0, 0, slots[0, 0][taken[0, 0]]].tolist() == [8, 9]


def probability(statistic, victim, positions=None, m=3, **kwargs):
    statistic = torch.as_tensor(statistic, dtype=torch.float32)[None, None]
    positions = torch.arange(statistic.shape[-1])[None, None] if positions is None else positions
    victim = torch.tensor([[victim]])
    slots, taken = merge_targets(positions, victim, m)
    return float(merge_probability(statistic, positions, victim, slots, taken, **kwargs))


def test_denominators_of_the_masks():
    s = [0.5, 0.1, 0.2, 0.1, 0.3, 0.2]
    assert probability(s, 1, mask="bernoulli") == pytest.approx(0.1 / 0.2)
    assert probability(s, 1, mask="bernoulli_current", recent=3) == pytest.approx(0.1 / 0.2)
    assert probability(s, 1, mask="max") == pytest.approx(0.1 / 0.5)
    assert probability(s, 1, mask="threshold") == 0
    assert probability(s, 4, mask="threshold") == 1  # 0.3 against the mean 0.22 of the others
    assert probability(s, 1, mask="all") == 1
    assert probability(s, 1, mask="bernoulli", clamp=(0.6, 1)) == 0.6
    assert probability(s, 1, mask="bernoulli", clamp=(0, 0.25)) == 0.25


def test_edges_of_the_probability():
    assert probability([0.1, 0.4, 0.2, 0.3, 0.1], 1) == 1  # at least the mean of the targets
    assert probability([0.1, 0.0, 0.2, 0.3, 0.1], 1) == 0
    assert probability([0.1, 0.2, 0.0, 0.0, 0.0], 1) == 0  # the mean is 0: no NaN, no merge
    assert probability([0.1, 0.0, 0.0, 0.0, 0.0], 1) == 0
    for mask in MASKS:  # nothing follows the newest token
        assert probability([0.1, 0.2, 0.3], 2, mask=mask) == 0


@pytest.mark.parametrize("n", [3, 7, 33, 1000, 4097])
def test_uniform_attention_never_passes_the_threshold(n):
    assert probability([1 / n] * n, 0, mask="threshold") == 0
    assert probability((torch.ones(n) / n).softmax(0), 1, mask="threshold") == 0


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_frequency_of_the_mask(p):
    """Within four standard deviations, over tokens, heads, rows, layers and seeds."""
    n = 4000
    target = [1.0, p, 1.0, 1.0, 1.0]
    assert probability(target, 1) == pytest.approx(p)
    for draw in (
        lambda: uniform(0, 0, torch.zeros(1, dtype=torch.long), 1, torch.arange(n)[:, None]),
        lambda: uniform(1, 3, torch.arange(n), 1, torch.tensor([[5]])),
        lambda: uniform(2, 1, torch.zeros(1, dtype=torch.long), n, torch.tensor([[5]])),
        lambda: torch.stack([uniform(0, k, torch.arange(1), 1, torch.tensor([[9]])) for k in range(400)]),
        lambda: torch.stack([uniform(k, 0, torch.arange(1), 1, torch.tensor([[9]])) for k in range(400)]),
    ):
        u = draw().flatten()
        assert u.min() >= 0 and u.max() < 1 and len(u.unique()) == len(u) >= 400
        assert abs((u < p).double().mean() - p) < 4 * math.sqrt(p * (1 - p) / len(u))


def test_random_numbers_are_uncorrelated_between_coordinates():
    u = uniform(0, 0, torch.arange(60), 60, torch.zeros(60, 60, dtype=torch.long)).numpy()
    v = uniform(0, 1, torch.arange(60), 60, torch.zeros(60, 60, dtype=torch.long)).numpy()
    bound = 4 / math.sqrt(3600)
    assert abs(np.corrcoef(u.ravel(), v.ravel())[0, 1]) < bound
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < bound
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < bound
    assert abs(np.corrcoef(u.ravel(), u.T.ravel())[0, 1]) < bound + 0.02  # row and head are not interchangeable
    assert not np.array_equal(u, u.T)


def test_a_nan_of_a_value_that_is_not_merged_stays_where_it_is():
    values = torch.ones(1, 1, 4, 2)
    values[0, 0, 0] = torch.nan
    slots, taken = merge_targets(torch.arange(4)[None, None], torch.tensor([[0]]), 2)
    merge_values(values, torch.tensor([[0]]), slots, taken, torch.zeros(1, 1, dtype=torch.bool))
    assert torch.equal(values[0, 0, 1:], torch.ones(3, 2))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"m": 0}, "m must be a positive integer or None, not 0"),
        ({"m": 2.5}, "m must be a positive"),
        ({"m": True}, "m must be a positive"),
        ({"mask": "maximum"}, "mask must be one of .* not 'maximum'"),
        ({"statistic": "mean"}, "statistic must be one of"),
        ({"targets": "all"}, "targets must be one of"),
        ({"clamp": (0.5, 0.2)}, "clamp must be"),
        ({"clamp": (0, math.nan)}, "clamp must be"),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        CaM(**kwargs)


def test_the_statistic_of_a_mask_can_be_overridden():
    assert CaM().uses == "cumulative" and CaM(mask="threshold").uses == "current" and CaM(mask="all").uses is None
    assert CaM(statistic="current").uses == "current"
