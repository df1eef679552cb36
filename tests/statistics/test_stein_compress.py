"""The front door: all methods, invariants, determinism, storage, warnings, errors, save and load, rates."""

import json
import subprocess
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.statistics import stein_thinning as stein

METHODS = stein.METHODS


def tempered(n, d=3, seed=0, scale=2.0):
    X = scale * np.random.default_rng([5, seed]).normal(size=(n, d))
    return X, -X


def check(coreset, X, S, m):
    method = coreset.method
    assert coreset.weights.sum() == pytest.approx(1) and coreset.n_input == len(X)
    assert (np.diff(coreset.indices) >= 0).all() and coreset.indices.min() >= 0 and coreset.indices.max() < len(X)
    assert (coreset.points == X[coreset.indices]).all() and len(coreset) <= m
    assert coreset.info["n_unique"] == np.unique(coreset.indices).size
    if method in ("skt", "lskt", "st"):
        assert len(coreset) == m and (coreset.weights == 1 / m).all()
    else:
        assert (np.diff(coreset.indices) > 0).all()
    if method not in ("sc", "lsc"):
        assert coreset.weights.min() >= 0
    assert coreset.mmd == pytest.approx(stein.ksd(X, S, coreset.weights, indices=coreset.indices), rel=1e-6)
    assert coreset.mmd == pytest.approx(stein.ksd(X, S, coreset.dense_weights()), rel=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_each_method(method):
    X, S = tempered(500)
    coreset = stein.compress(X, S, 16, method, random_state=0)
    check(coreset, X, S, 16)
    uniform = stein.ksd(X, S)
    assert coreset.mmd < 0.5 * uniform
    baseline = stein.compress(X, S, 16, "st").mmd
    assert coreset.mmd <= baseline + 1e-12
    again = stein.compress(X, S, 16, method, random_state=np.random.default_rng(0))
    assert (again.indices == coreset.indices).all() and (again.weights == coreset.weights).all()


@pytest.mark.parametrize("method", METHODS)
def test_stored_and_streamed_agree(method):
    X, S = tempered(300)
    stored = stein.compress(X, S, 16, method, random_state=3)
    streamed = stein.compress(X, S, 16, method, random_state=3, max_matrix_bytes=0)
    fitted = stein.SteinKernel().fit(X, S)
    kept = stein.compress(X, S, 16, method, random_state=3, kernel=fitted.copy().store())
    assert (stored.indices == streamed.indices).all() and (stored.indices == kept.indices).all()
    assert (stored.weights == streamed.weights).all() and (stored.weights == kept.weights).all()
    stein.compress(X, S, 16, method, random_state=3, kernel=fitted)
    assert not fitted.stored  # the caller's kernel is left alone


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(METHODS), st.integers(2, 70), st.integers(1, 3), st.integers(0, 10_000), st.data())
def test_any_small_problem(method, n, d, seed, data):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)).round(1)  # repeats occur
    S = -X + rng.normal(size=(n, d)).round(1)
    if np.unique(X, axis=0).shape[0] == 1:
        return
    m = data.draw(st.integers(1, n))
    if method == "lskt":
        m = 1 << (m.bit_length() - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        coreset = stein.compress(X, S, m, method, random_state=seed)
        check(coreset, X, S, m)
        if method in ("skt", "lskt", "st"):
            assert coreset.mmd**2 <= stein.compress(X, S, m, "st").mmd ** 2 + 1e-12


@pytest.mark.parametrize("n, m", [(2, 1), (3, 1), (4, 2), (5, 2), (16, 4), (17, 4), (100, 10), (4096, 64)])
def test_default_sizes(n, m):
    X, S = tempered(n, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(stein.compress(X, S, method="st")) == m
        power = len(stein.compress(X, S, method="lskt", rank=2, random_state=0))
    assert power & (power - 1) == 0 and power**2 >= n > (power / 2) ** 2


def test_float32_is_computed_in_float64():
    X, S = tempered(300)
    X32, S32 = X.astype(np.float32), S.astype(np.float32)
    a = stein.compress(X32, S32, random_state=0)
    b = stein.compress(X32.astype(float), S32.astype(float), random_state=0)
    assert (a.indices == b.indices).all() and a.mmd == b.mmd and a.points.dtype == np.float64


def test_rank_and_kernel_options():
    X, S = tempered(400)
    assert stein.compress(X, S, method="lskt", random_state=0).info["rank"] == 11  # ceil(400 ** 0.4)
    assert stein.compress(X, S, 20, "lsr", random_state=0).info["rank"] == 20
    assert stein.compress(X, S, 20, "lsr", rank=5, random_state=0).info["rank"] == 5
    kernel = stein.SteinKernel("sample_cov", 1.5)
    assert stein.compress(X, S, kernel=kernel, random_state=0).info["lengthscale"] == 1.5
    # Target N(0, I) through a proxy N(0, 1.2 I) whose gradients are known.
    squares = (X**2).sum(axis=1)
    free = stein.SteinKernel().fit(X, -X / 1.2, log_ratio=squares / 2 - squares / 2.4)
    coreset = stein.compress(X, -X / 1.2, 20, "sr", kernel=free, random_state=0)
    assert coreset.expectation(lambda p: (p**2).mean(axis=1)) == pytest.approx(1, abs=0.2)


def test_regularised_stein_thinning():
    X, S = tempered(300)
    log_p = -(X**2).sum(axis=1) / 2
    plain = stein.compress(X, S, 20, "st")
    regular = stein.compress(X, S, 20, "st", log_density=log_p, laplacian=np.full(300, -3.0), entropy=0.05)
    assert log_p[regular.indices].mean() > log_p[plain.indices].mean()


def test_expectation_and_resample():
    X, S = tempered(2000)
    coreset = stein.compress(X, S, 40, "sr", random_state=0)
    assert coreset.expectation(lambda p: p[:, 0] ** 2) == pytest.approx(1, abs=0.25)
    assert coreset.expectation(X[:, 0] ** 2) == pytest.approx(coreset.expectation(lambda p: p[:, 0] ** 2))
    outer = coreset.expectation(lambda p: p[:, :, None] * p[:, None])
    np.testing.assert_allclose(outer, np.eye(3), atol=0.25)
    rows = coreset.resample(500, random_state=0)
    assert rows.size == 500 and set(rows) <= set(coreset.indices)
    counts = np.bincount(rows, minlength=2000) - 500 * coreset.dense_weights()
    assert (counts > -1).all() and (counts < 2).all()
    with pytest.raises(ValueError, match="one value for each of"):
        coreset.expectation(lambda p: 1.0)
    with pytest.raises(ValueError, match="array of 2000 rows"):
        coreset.expectation(np.zeros(3))
    with pytest.raises(ValueError, match="value of f must be finite"):
        coreset.expectation(lambda p: p[:, 0] * np.nan)
    signed = stein.Coreset(np.array([0, 1]), np.array([1.5, -0.5]), X[:2], 0.1, 2000, "sc")
    with pytest.raises(ValueError, match="may be negative"):
        signed.resample(3)


def test_save_and_load(tmp_path):
    X, S = tempered(300)
    for method in METHODS:
        coreset = stein.compress(X, S, 16, method, random_state=0)
        coreset.save(tmp_path / method)
        loaded = stein.Coreset.load(tmp_path / method)
        assert (loaded.indices == coreset.indices).all() and (loaded.weights == coreset.weights).all()
        assert (loaded.points == coreset.points).all() and loaded.info == coreset.info
        assert (loaded.mmd, loaded.n_input, loaded.method) == (coreset.mmd, 300, method)
        assert loaded.expectation(X) == pytest.approx(coreset.expectation(X))
    config = json.loads((tmp_path / "skt" / "config.json").read_text())
    assert config["kind"] == "Coreset"
    with pytest.raises(FileNotFoundError):
        stein.Coreset.load(tmp_path / "none")


# --- warnings ---------------------------------------------------------------------------------------------------


def test_no_warning_on_good_input():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for method in METHODS:
            stein.compress(*tempered(1024, 4), 32, method, random_state=0)


def test_warns_where_the_input_does_not_cover_the_target():
    X = 1 + np.abs(np.random.default_rng(0).normal(size=(500, 2)))
    for method in ("skt", "lsr", "st"):
        with pytest.warns(UserWarning, match="do not cover the target"):
            stein.compress(X, -X, 16, method, random_state=0)


def test_warns_of_few_distinct_points():
    X = np.concatenate([np.zeros((1, 1)), np.full((99, 1), 40.0) + np.arange(99)[:, None]])
    with pytest.warns(UserWarning, match="distinct points for n_points=20"):
        stein.compress(X, -X, 20, random_state=0)


def test_warns_of_far_modes():
    rng = np.random.default_rng(0)
    X = np.concatenate([rng.normal(-8, 1, (300, 2)), rng.normal(8, 1, (300, 2))])
    with pytest.warns(UserWarning, match="two clusters"):
        stein.compress(X, -(np.abs(X) - 8) * np.sign(X), 20, random_state=0)


# --- rates ------------------------------------------------------------------------------------------------------


def test_discrepancy_falls_like_the_root_of_n():
    # Exact draws from N(0, 4 C): Stein kernel thinning at m = sqrt(n) gains on n^-0.45, greedy thinning on n^-0.35.
    A = np.random.default_rng(0).normal(size=(4, 4))
    C = A @ A.T / 4 + 0.3 * np.eye(4)
    root, precision = np.linalg.cholesky(C), np.linalg.inv(C)
    logs = {"skt": [], "st": []}
    for n in (1024, 4096):
        for method, values in logs.items():
            found = []
            for seed in range(3):
                X = 2 * np.random.default_rng([n, seed]).normal(size=(n, 4)) @ root.T
                found.append(stein.compress(X, -X @ precision, method=method, random_state=seed).mmd)
            values.append(np.mean(np.log(found)))
    slopes = {method: (b - a) / np.log(4) for method, (a, b) in logs.items()}
    assert slopes["skt"] <= -0.45
    assert -0.55 < slopes["st"] < -0.3


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"method": "kt"}, ValueError, "method must be one of skt"),
        ({"n_points": 0}, ValueError, "n_points must be between 1 and 50"),
        ({"n_points": 51}, ValueError, "n_points must be between 1 and 50"),
        ({"n_points": "all"}, ValueError, "n_points must be 'sqrt'"),
        ({"n_points": 2.5}, TypeError, "n_points must be an integer"),
        ({"n_points": 6, "method": "lskt"}, ValueError, "power of two"),
        ({"rank": 0, "method": "lsr"}, ValueError, "rank must be between"),
        ({"rank": "full"}, ValueError, "rank must be 'auto'"),
        ({"delta": 1.0}, ValueError, "delta must lie"),
        ({"kernel": "imq"}, TypeError, "kernel must be a SteinKernel"),
        ({"log_density": np.zeros(50)}, ValueError, "method='st' only"),
        ({"scores": np.zeros((50, 2))}, ValueError, "scores must have the shape of X"),
        ({"X": np.zeros((50, 3))}, ValueError, "all points are equal"),
        ({"random_state": "seed"}, (TypeError, ValueError), "."),
    ],
)
def test_bad_input(options, error, message):
    X, S = tempered(50)
    arguments = {"X": X, "scores": S} | options
    with pytest.raises(error, match=message):
        stein.compress(**arguments)


def test_import_is_light():
    code = (
        "import sys; from assay.statistics import stein_thinning; stein_thinning.compress;"
        "print([m for m in ('torch', 'sklearn', 'arviz', 'jax', 'xarray', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        stein.nothing  # noqa: B018


def test_docstring_example():
    import doctest

    from assay.statistics.stein_thinning import coreset

    result = doctest.testmod(coreset)
    assert result.attempted > 0 and result.failed == 0
