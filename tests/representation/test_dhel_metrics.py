"""Diagnostics of embeddings, and what is known about the losses exactly."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.representation.dhel import (
    IMQ,
    AlignUniformLoss,
    DCLLoss,
    DHELLoss,
    Gaussian,
    InfoNCELoss,
    KCLLoss,
    LogKernel,
    NTXentLoss,
    Riesz,
    alignment,
    batch_size_bias,
    cross_polytope,
    effective_rank,
    embedding_report,
    minimum_value,
    numeric_rank,
    similarity_variance,
    simplex,
    uniform_gaussian_energy,
    uniformity,
    wasserstein_uniformity,
)

LOSSES = [
    *(DHELLoss(variant=v) for v in ("official", "paper", "single")),
    *(KCLLoss(variant=v) for v in ("official", "paper", "single")),
    KCLLoss(IMQ(1.0)),
    KCLLoss("log"),
    KCLLoss("riesz", t=-1.0),
    KCLLoss("gaussian_riesz", t=1.0),
    InfoNCELoss(0.5),
    NTXentLoss(0.2),
    DCLLoss(1.0),
    AlignUniformLoss(2.0, 3.0),
]


def sphere(n, d, seed=0):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


# --- minima -----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 9), st.integers(0, 4))
def test_simplex(m, extra):
    points = simplex(m, m - 1 + extra)
    want = torch.full((m, m), -1.0 / (m - 1), dtype=torch.float64).fill_diagonal_(1.0)
    torch.testing.assert_close(points @ points.T, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize(("m", "d"), [(5, 8), (2, 1), (2, 4), (9, 8)])
def test_closed_forms_are_the_values_on_the_simplex(loss, m, d):
    points = simplex(m, d)
    assert minimum_value(loss, m, d) == pytest.approx(loss(points, points).item(), abs=1e-10)


def test_known_minima():
    assert minimum_value(DHELLoss(), 5, 8) == pytest.approx(-2.2274112778, abs=1e-10)
    assert minimum_value(KCLLoss(), 5, 8) == pytest.approx(-1.7843856960, abs=1e-10)
    assert minimum_value(KCLLoss(), 5, 8) == pytest.approx(-2 + 32 * math.exp(-4 * 5 / 4), abs=1e-12)
    assert minimum_value(NTXentLoss(1.0), 5, 8) == pytest.approx(-1 + math.log(math.e + 8 * math.exp(-0.25)), abs=1e-12)


@pytest.mark.parametrize("kernel", [Gaussian(), IMQ(), LogKernel(), Riesz(-1.0)])
def test_cross_polytope_is_a_minimum_of_kcl(kernel):
    loss, points = KCLLoss(kernel), cross_polytope(3)
    least = loss(points, points).item()
    assert minimum_value(loss, 6, 3) == pytest.approx(least, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        u = points + torch.randn(6, 3, dtype=torch.float64, generator=generator)
        assert loss(u, u).item() > least


@pytest.mark.parametrize(
    "loss",
    [DHELLoss(), DHELLoss(variant="paper"), KCLLoss(), NTXentLoss(), DCLLoss(), InfoNCELoss(), AlignUniformLoss()],
    ids=repr,
)
def test_descent_reaches_the_closed_form(loss):
    generator = torch.Generator().manual_seed(1)
    u, v = (torch.randn(4, 6, dtype=torch.float64, generator=generator).requires_grad_() for _ in "uv")
    step = torch.optim.LBFGS(
        [u, v], max_iter=400, tolerance_grad=1e-12, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def closure():
        step.zero_grad()
        value = loss(u, v)
        value.backward()
        return value

    step.step(closure)
    assert loss(u, v).item() == pytest.approx(minimum_value(loss, 4, 6), abs=1e-6)


def test_sizes_without_a_known_minimum():
    with pytest.raises(ValueError, match=r"M = 7, d = 3"):
        minimum_value(KCLLoss(), 7, 3)
    with pytest.raises(ValueError, match=r"M = 6, d = 3"):
        minimum_value(DHELLoss(), 6, 3)
    with pytest.raises(ValueError, match="s = -3"):
        minimum_value(KCLLoss("riesz", t=-3.0), 3, 3)
    with pytest.raises(TypeError, match="Linear"):
        minimum_value(torch.nn.Linear(1, 1), 3, 3)
    with pytest.raises(ValueError, match="simplex"):
        simplex(6, 4)
    with pytest.raises(ValueError, match="d must"):
        cross_polytope(0)


# --- batch size -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [k for k in LOSSES if isinstance(k, KCLLoss)], ids=repr)
@pytest.mark.parametrize("m", [2, 3, 4, 5])
def test_kcl_averages_over_all_batches_to_the_whole(loss, m):
    u, v = torch.tensor(sphere(6, 3)), torch.tensor(sphere(6, 3, 1))
    batches = [list(b) for b in itertools.combinations(range(6), m)]
    mean = sum(loss(u[b], v[b]).item() for b in batches) / len(batches)
    assert mean == pytest.approx(loss(u, v).item(), abs=1e-11 * max(1, abs(mean)))


def test_logarithmic_losses_do_not():
    u, v = torch.tensor(sphere(6, 3)), torch.tensor(sphere(6, 3, 1))
    batches = [list(b) for b in itertools.combinations(range(6), 3)]
    mean = sum(DHELLoss()(u[b], v[b]).item() for b in batches) / len(batches) - 2 * math.log(2)
    assert mean < DHELLoss()(u, v).item() - 2 * math.log(5) - 0.1


def test_batch_size_table():
    rng = np.random.default_rng(0)
    base = rng.normal(size=(500, 8)) * np.linspace(0.3, 2, 8)
    u, v = (torch.tensor(base + 0.3 * rng.normal(size=(500, 8))) for _ in "uv")
    rows = batch_size_bias(KCLLoss(), u, v, (2, 16, 64), 300, seed=1)
    assert [r.size for r in rows] == [2, 16, 64]
    # three intervals of 95% each; 4 half widths is never missed by a right mean
    assert all(abs(r.mean - r.whole) < 2 * (r.high - r.low) and r.offset == 0 for r in rows)
    assert rows == batch_size_bias(KCLLoss(), u, v, (2, 16, 64), 300, seed=1)
    for loss, offset in (
        (DHELLoss(), 2 * math.log(3)),
        (DHELLoss(variant="paper"), math.log(3)),
        (DHELLoss(variant="single"), math.log(3)),
        (InfoNCELoss(), math.log(4)),
        (NTXentLoss(), math.log(7)),
        (DCLLoss(), math.log(6)),
    ):
        small, large = batch_size_bias(loss, u, v, (4, 128), 200)
        assert small.offset == pytest.approx(offset)
        if not isinstance(loss, (InfoNCELoss, NTXentLoss)):  # their positive is a term that does not average out
            assert small.high < large.low <= large.whole + 0.05
    with pytest.raises(ValueError, match="sizes"):
        batch_size_bias(KCLLoss(), u, v, (1,))
    with pytest.raises(ValueError, match="n_batches"):
        batch_size_bias(KCLLoss(), u, v, (2,), 1)
    with pytest.raises(TypeError, match="loss"):
        batch_size_bias(torch.nn.CosineEmbeddingLoss(), u, v)


# --- metrics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("d", "want"), [(3, 0.124958), (64, 0.0207494), (128, 0.0194963)])
def test_uniform_energy(d, want):
    assert uniform_gaussian_energy(d) == pytest.approx(want, rel=1e-5)
    x = sphere(4000, d)
    assert math.exp(uniformity(x)) == pytest.approx(want, rel=0.02)
    pairs = np.exp(-2 * ((sphere(200_000, d, 1) - sphere(200_000, d, 2)) ** 2).sum(1))
    assert pairs.mean() == pytest.approx(want, abs=4 * pairs.std() / 200_000**0.5)


def test_uniform_and_collapsed_clouds():
    x = sphere(4000, 128)
    assert wasserstein_uniformity(x) < 2e-3
    assert wasserstein_uniformity(np.ones((50, 128))) == pytest.approx(1.0, abs=1e-9)
    assert uniformity(np.ones((50, 4))) == pytest.approx(0.0, abs=1e-9)
    assert similarity_variance(x) == pytest.approx(1 / 128, rel=0.05)
    assert wasserstein_uniformity(x) == wasserstein_uniformity(torch.tensor(x)) != wasserstein_uniformity(x, seed=1)
    assert wasserstein_uniformity(sphere(3000, 2)) < 0.01  # both d = 2 and 3, whose densities are at their edges
    assert wasserstein_uniformity(sphere(3000, 3)) < 0.01


def test_metrics_are_their_definitions():
    u, v = sphere(40, 5), sphere(40, 5, 1)
    i, j = np.triu_indices(40, 1)
    r2 = ((u[i] - u[j]) ** 2).sum(1)
    assert uniformity(3 * u, t=1.5) == pytest.approx(np.log(np.exp(-1.5 * r2).mean()), abs=1e-12)
    assert alignment(u, v) == pytest.approx(((u - v) ** 2).sum(1).mean(), abs=1e-12)
    assert alignment(u, v, alpha=1) == pytest.approx(np.sqrt(((u - v) ** 2).sum(1)).mean(), abs=1e-12)
    assert similarity_variance(u) == pytest.approx(np.var(1 - r2 / 2), abs=1e-12)


def test_uniformity_does_not_depend_on_blocks():
    x = sphere(2500, 6)  # several blocks
    gram = np.exp(-2 * (2 - 2 * x @ x.T))
    want = math.log((gram.sum() - np.trace(gram)) / (2500 * 2499))
    assert uniformity(x) == pytest.approx(want, abs=1e-10)
    assert uniformity(x.astype(np.float32)) == pytest.approx(want, abs=1e-5)


def test_ranks():
    for k in (1, 3, 8):
        assert effective_rank(torch.eye(k, 10)) == pytest.approx(k, abs=1e-4)
    ones = np.outer(np.arange(1, 6), [1.0, 2.0, 3.0])
    assert effective_rank(ones) == pytest.approx(1, abs=1e-4) and numeric_rank(ones) == 1
    rng = np.random.default_rng(0)
    low = rng.normal(size=(100, 3)) @ rng.normal(size=(3, 10))
    assert numeric_rank(low) == 3 and numeric_rank(rng.normal(size=(100, 10))) == 10
    assert numeric_rank(low + 5) == 3  # centred


def test_report():
    u, v = sphere(60, 5), sphere(60, 5, 1)
    found = embedding_report(u, u + 0.01 * v)
    assert found["retrieval"] == 1 and found["alignment"] < 1e-3 and found["numeric_rank"] == 5
    assert found["effective_rank"] == effective_rank(u) and set(embedding_report(u)) < set(found)
    assert embedding_report(u.astype(np.float32))["uniformity"] == pytest.approx(found["uniformity"], abs=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: uniformity([[1.0, 0.0]]), ValueError, "at least 2"),
        (lambda: uniformity([1.0, 0.0]), ValueError, "shape"),
        (lambda: uniformity([["a"]]), TypeError, "numbers"),
        (lambda: uniformity([[np.nan, 1.0], [1.0, 0.0]]), ValueError, "NaN"),
        (lambda: uniformity([[0.0, 0.0], [1.0, 0.0]]), ValueError, "row 0 is zero"),
        (lambda: uniformity(np.eye(2), t=0), ValueError, "t must"),
        (lambda: alignment(np.eye(2), np.eye(3)), ValueError, "one shape"),
        (lambda: alignment(np.eye(2), np.eye(2), alpha=0), ValueError, "alpha"),
        (lambda: wasserstein_uniformity(np.ones((3, 1))), ValueError, "2 columns"),
        (lambda: wasserstein_uniformity(np.eye(3), max_pairs=0), ValueError, "max_pairs"),
        (lambda: effective_rank(np.zeros((2, 2))), ValueError, "zero"),
        (lambda: numeric_rank(np.eye(3), tol=-1.0), ValueError, "tol"),
        (lambda: uniform_gaussian_energy(0), ValueError, "d must"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()
