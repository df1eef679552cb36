"""Conformal correction and metrics."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from assay.statistics import ConformalIntervalRegressor, RQRBoostingRegressor
from assay.statistics.rqr import apply_correction, conformal_correction, interval_report, winkler_score


class Band(BaseEstimator):
    """x_0 -+ half, whatever the data."""

    def __init__(self, half=0.5, coverage=0.9):
        self.half = half
        self.coverage = coverage

    def fit(self, X, y):
        self.columns_ = list(getattr(X, "columns", []))
        return self

    def predict(self, X):
        return np.asarray(X)[:, 0]

    def predict_interval(self, X):
        m = np.asarray(X)[:, 0]
        return np.stack([m - self.half, m + self.half], 1)


@pytest.mark.parametrize("method", ["symmetric", "asymmetric", "normalized"])
@pytest.mark.parametrize("n_cal", [19, 50])
def test_mean_coverage_over_repetitions(method, n_cal):
    """Any base model: coverage averages to [alpha, alpha + 1/(n_cal+1)] within three standard errors."""
    rng = np.random.default_rng(5)
    alpha, hits, test = 0.8, [], 200
    for _ in range(500):
        x = rng.uniform(0.2, 2, n_cal + test)
        y = x * rng.exponential(size=n_cal + test)
        low, high = x - 0.3 * x**2, x + 0.1
        c = conformal_correction(y[:n_cal], low[:n_cal], high[:n_cal], alpha, method)
        lo, hi, _ = apply_correction(low[n_cal:], high[n_cal:], c, method)
        hits.append(((lo <= y[n_cal:]) & (y[n_cal:] <= hi)).mean())
    mean, se = np.mean(hits), np.std(hits) / math.sqrt(500)
    # Two scores at 0.9 each: rounding up happens twice.
    slack = (2 if method == "asymmetric" else 1) / (n_cal + 1)
    assert alpha - 3 * se <= mean
    assert mean <= alpha + slack + 3 * se or method == "asymmetric"
    if method == "asymmetric":
        assert mean <= 0.9 + 3 * se


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.floats(0.05, 0.95), st.integers(0, 10**6))
def test_symmetric_correction_covers_at_least_k_of_its_own_rows(n, coverage, seed):
    rng = np.random.default_rng(seed)
    y, centre, half = rng.normal(size=n), rng.normal(size=n), rng.uniform(0, 1, n)
    k = math.ceil((n + 1) * coverage - 1e-9)
    if k > n:
        with pytest.warns(UserWarning, match="too few"):
            c = conformal_correction(y, centre - half, centre + half, coverage)
        assert np.isposinf(c[:2]).all()
        lo, hi, empty = apply_correction(centre - half, centre + half, c)
        assert np.isneginf(lo).all() and np.isposinf(hi).all() and not empty
        return
    c = conformal_correction(y, centre - half, centre + half, coverage)
    score = np.maximum((centre - half) - y, y - (centre + half))
    assert (score <= c[0]).sum() == k  # scores are continuous: exactly k of them
    lo, hi, empty = apply_correction(centre - half, centre + half, c)
    assert (lo <= hi).all() and empty == (half + c[0] < 0).sum()


def test_five_rows_at_ninety_percent_are_too_few():
    with pytest.warns(UserWarning, match="5 calibration rows"):
        c = conformal_correction(np.arange(5.0), np.zeros(5), np.ones(5), 0.9)
    assert np.isposinf(c[:2]).all()
    # 9 rows are just enough, by exact arithmetic: the largest score
    c = conformal_correction(np.arange(9.0), np.zeros(9), np.ones(9), 0.9)
    assert c.tolist()[:2] == [7.0, 7.0]


def test_empty_intervals_become_their_midpoint_and_are_counted():
    lo, hi, empty = apply_correction([0.0, 0.0], [1.0, 10.0], [-2.0, -2.0, 0.0])
    assert lo.tolist() == [0.5, 2.0] and hi.tolist() == [0.5, 8.0] and empty == 1


def test_normalized_shift_is_in_proportion_to_the_width_above_the_floor():
    c = conformal_correction([2.0, 30.0, 0.5], [0.0, 0.0, 0.0], [1.0, 10.0, 1.0], 0.6, "normalized", floor=0.05)
    lo, hi, _ = apply_correction([0.0, 0.0, 0.0], [2.0, 20.0, 0.0], c, "normalized")
    assert c[0] == pytest.approx(4.0)
    np.testing.assert_allclose(hi, [2 + 4.0, 20 + 40.0, 0.2])
    np.testing.assert_allclose(lo, [-4.0, -40.0, -0.2])


def test_asymmetric_moves_each_bound_by_its_own_score():
    y = np.arange(1.0, 100.0)
    c = conformal_correction(y, np.full(99, 50.0), np.full(99, 50.0), 0.8, "asymmetric")
    lo, hi, _ = apply_correction([50.0], [50.0], c, "asymmetric")
    assert (lo[0], hi[0]) == (10.0, 90.0)


def test_wrapper_split_and_prefit():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(2000, 2))
    y = X[:, 0] + rng.exponential(size=2000)
    model = ConformalIntervalRegressor(Band(), random_state=0).fit(X[:1000], y[:1000])
    assert model.n_features_in_ == 2 and model.coverage_ == 0.9
    bounds = model.predict_interval(X[1000:])
    assert 0.87 < ((bounds[:, 0] <= y[1000:]) & (y[1000:] <= bounds[:, 1])).mean() < 0.94
    np.testing.assert_array_equal(model.predict(X), X[:, 0])
    again = ConformalIntervalRegressor(Band(), random_state=0).fit(X[:1000], y[:1000])
    np.testing.assert_array_equal(again.correction_, model.correction_)
    prefit = ConformalIntervalRegressor(Band(), cv="prefit", coverage=0.5).fit(X[:11], y[:11])
    assert prefit.correction_[0] == np.sort(np.maximum(X[:11, 0] - 0.5 - y[:11], y[:11] - X[:11, 0] - 0.5))[5]
    frame = pd.DataFrame(X, columns=["a", "b"])
    framed = ConformalIntervalRegressor(Band(), random_state=0).fit(frame[:1000], y[:1000])
    assert framed.estimator_.columns_ == ["a", "b"]
    np.testing.assert_array_equal(framed.correction_, model.correction_)


def test_wrapper_round_trip(tmp_path):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    y = X[:, 0] + rng.exponential(size=300)
    base = RQRBoostingRegressor(max_iter=5, conformal=False, random_state=0)
    model = ConformalIntervalRegressor(base, "normalized", random_state=1).fit(X, y)
    model.save(tmp_path)
    other = ConformalIntervalRegressor.load(tmp_path, RQRBoostingRegressor)
    np.testing.assert_array_equal(other.predict_interval(X), model.predict_interval(X))
    with pytest.raises(TypeError, match="Band has no save"):
        ConformalIntervalRegressor(Band()).fit(X, y).save(tmp_path)
    with pytest.raises(NotFittedError):
        ConformalIntervalRegressor(Band()).predict_interval(X)


class Wrong(Band):
    def predict_interval(self, X):
        return np.zeros((len(X), 3))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (ConformalIntervalRegressor(), TypeError, "predict_interval"),
        (ConformalIntervalRegressor(Band(), method="x"), ValueError, "method"),
        (ConformalIntervalRegressor(Band(), cv=5), ValueError, "cv"),
        (ConformalIntervalRegressor(Band(), coverage=2), ValueError, "coverage"),
        (ConformalIntervalRegressor(Band(coverage=None)), ValueError, "coverage is None"),
        (ConformalIntervalRegressor(Band(), calibration_fraction=1.0), ValueError, "calibration_fraction"),
        (ConformalIntervalRegressor(Wrong()), ValueError, "must give"),
    ],
)
def test_wrapper_bad_options(model, error, words):
    with pytest.raises(error, match=words):
        model.fit(np.ones((30, 2)), np.arange(30.0))


def test_wrapper_refuses_nan():
    X, y = np.ones((30, 2)), np.arange(30.0)
    X[3, 1] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        ConformalIntervalRegressor(Band()).fit(X, y)


def test_report_by_hand():
    y = np.array([0.0, 1.0, 2.0, 3.0])
    low, high = np.array([-1.0, 0.0, 3.0, 0.0]), np.array([1.0, 2.0, 4.0, 10.0])
    r = interval_report(y, low, high, groups=["a", "a", "b", "b"], X=y[:, None], coverage=0.8, strata=2)
    assert r["coverage"] == 0.75 and r["mean_width"] == 3.75 and r["median_width"] == 2.0
    assert r["winkler"] == winkler_score(y, low, high, 0.8) == pytest.approx((2 + 2 + 1 + 10 + 10 * 1) / 4)
    assert r["coverage_by_group"] == {"a": 1.0, "b": 0.5}
    assert r["coverage_by_width"] == [0.5, 1.0] and r["worst_stratum_coverage"] == 0.5
    assert r["worst_slice_coverage"] == 0.5 and r["worst_slice"] == (0, 1)
    assert r["coverage_se"] == pytest.approx(math.sqrt(0.75 * 0.25 / 4)) and r["infinite"] == 0
    infinite = interval_report(y, [-np.inf] * 4, [np.inf] * 4)
    assert infinite["coverage"] == 1 and infinite["infinite"] == 1 and infinite["mean_width"] == math.inf
    assert infinite["hsic"] == 0.0


def test_hsic_sees_width_that_goes_with_coverage():
    rng = np.random.default_rng(0)
    half = rng.choice([0.5, 1.5], 1000)
    y = rng.uniform(-1.5, 1.5, 1000)
    dependent = interval_report(y, -half, half)["hsic"]
    free = interval_report(rng.permutation(y), -np.full(1000, 1.0) - rng.uniform(0, 1e-3, 1000), np.ones(1000))["hsic"]
    assert dependent > 3 * free


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: interval_report([1.0], [2.0], [1.0]), "lower exceeds upper in 1 of 1"),
        (lambda: interval_report([1.0], [np.nan], [1.0]), "lower holds NaN"),
        (lambda: interval_report([1.0, 2.0], [1.0], [1.0]), "lower must have the shape"),
        (lambda: interval_report([1.0], [0.0], [1.0], coverage=1.2), "coverage"),
        (lambda: interval_report([1.0], [0.0], [1.0], strata=0), "strata"),
        (lambda: interval_report([1.0], [0.0], [1.0], X=[1.0]), "X must be numeric"),
        (lambda: interval_report([1.0], [0.0], [1.0], groups=[[1]]), "groups"),
        (lambda: conformal_correction([1.0], [0.0], [1.0], method="x"), "method"),
        (lambda: conformal_correction([1.0], [0.0], [1.0], floor=0.0), "floor"),
        (lambda: conformal_correction([1.0], [0.0, 1.0], [1.0]), "length"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()
