"""RQRRegressor and RQRBoostingRegressor as scikit-learn estimators."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

from assay.statistics import RQRBoostingRegressor, RQRRegressor
from assay.statistics.rqr.boosting import fit_rqr_trees
from assay.statistics.rqr.regressor import selection_objective
from assay.statistics.rqr.trees import TreeEnsemble, from_hist_gradient_boosting, mean_of


@pytest.mark.filterwarnings("ignore::UserWarning")
@parametrize_with_checks(
    [
        RQRRegressor(max_epochs=5, conformal=False),
        RQRRegressor(max_epochs=60, lam=1.0),
        RQRBoostingRegressor(max_iter=10, cv=2),
        RQRBoostingRegressor(max_iter=10, lam=1.0, conformal=False),
    ]
)
def test_sklearn_contract(estimator, check):
    check(estimator)


def skewed(n=2000, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (n, 3))
    return X, np.sin(3 * X[:, 0]) + (1 + 0.5 * X[:, 1]) * rng.exponential(size=n)


def covered(bounds, y):
    return float(((bounds[:, 0] <= y) & (y <= bounds[:, 1])).mean())


QUICK = {
    "network": lambda **kw: RQRRegressor(**{"max_epochs": 40, "random_state": 0, **kw}),
    "trees": lambda **kw: RQRBoostingRegressor(**{"max_iter": 30, "random_state": 0, **kw}),
    "loss trees": lambda **kw: RQRBoostingRegressor(**{"max_iter": 20, "lam": 1.0, "random_state": 0, **kw}),
}


@pytest.mark.parametrize("kind", list(QUICK))
@pytest.mark.parametrize("conformal", [True, "asymmetric", "normalized"])
def test_coverage_on_new_rows(kind, conformal):
    X, y = skewed(4000)
    model = QUICK[kind](conformal=conformal).fit(X[:2000], y[:2000])
    bounds = model.predict_interval(X[2000:])
    # 500 calibration rows: a standard deviation of 0.013, and 0.007 of the 2000 test rows
    assert abs(covered(bounds, y[2000:]) - 0.9) < 0.045
    assert (bounds[:, 0] <= bounds[:, 1]).all()
    inside = model.predict(X[2000:])
    assert inside.shape == (2000,) and np.isfinite(inside).all()
    if conformal is True:
        np.testing.assert_allclose(inside, bounds.mean(1), atol=1e-9)
        assert model.score(X[2000:], y[2000:]) > 0.15


@pytest.mark.parametrize("kind", list(QUICK))
@pytest.mark.parametrize("conformal", [True, False, "normalized"])
def test_save_and_load_bit_for_bit(kind, conformal, tmp_path):
    X, y = skewed(400)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = QUICK[kind](conformal=conformal).fit(frame, y)
    model.save(tmp_path / "m")
    other = type(model).load(tmp_path / "m")
    np.testing.assert_array_equal(other.predict_interval(frame), model.predict_interval(frame))
    np.testing.assert_array_equal(other.predict(frame), model.predict(frame))
    assert other.get_params() == model.get_params() and list(other.feature_names_in_) == ["a", "b", "c"]
    assert json.loads((tmp_path / "m" / "config.json").read_text())["kind"] == type(model).__name__
    pickled = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(pickled.predict_interval(frame), model.predict_interval(frame))
    with pytest.raises(ValueError, match="feature names"):
        other.predict(frame[["b", "a", "c"]])
    with pytest.raises(NotFittedError):
        clone(model).save(tmp_path / "n")


@pytest.mark.parametrize("kind", list(QUICK))
def test_determinism(kind):
    X, y = skewed(300)
    a, b, c = (QUICK[kind](random_state=s).fit(X, y).predict_interval(X) for s in (1, 1, 2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("kind", list(QUICK))
def test_unit_and_origin_of_y_do_not_matter(kind):
    X, y = skewed(400)
    plain = QUICK[kind]().fit(X, y).predict_interval(X)
    moved = QUICK[kind]().fit(X, 1e-4 * y + 3.0).predict_interval(X)
    np.testing.assert_allclose((moved - 3.0) / 1e-4, plain, rtol=1e-2, atol=1e-2 * np.ptp(plain))


@pytest.mark.parametrize("kind", list(QUICK))
def test_constant_y_warns_and_has_no_width(kind):
    X, _ = skewed(60)
    with pytest.warns(UserWarning, match="constant"):
        model = QUICK[kind]().fit(X, np.full(60, 7.0))
    np.testing.assert_allclose(model.predict_interval(X), 7.0)
    np.testing.assert_allclose(model.predict(X), 7.0)


@pytest.mark.parametrize("kind", list(QUICK))
def test_few_calibration_rows_give_infinite_bounds(kind):
    X, y = skewed(20)
    with pytest.warns(UserWarning, match="5 calibration rows"):
        model = QUICK[kind]().fit(X, y)
    bounds = model.predict_interval(X)
    assert np.isneginf(bounds[:, 0]).all() and np.isposinf(bounds[:, 1]).all()
    assert np.isfinite(model.predict(X)).all()


@pytest.mark.parametrize("kind", list(QUICK))
def test_refuses_nan_and_says_where(kind):
    X, y = skewed(60)
    bad = y.copy()
    bad[3] = np.inf
    with pytest.raises(ValueError, match="y contains infinity"):
        QUICK[kind]().fit(X, bad)
    X[0, 0] = np.nan
    with pytest.raises(ValueError, match="X contains NaN"):
        QUICK[kind]().fit(X, y)
    with pytest.raises(NotFittedError):
        QUICK[kind]().predict_interval(X)


BAD_NETWORK = {
    "coverage": 1.0,
    "lam": -1.0,
    "conformal": "sym",
    "validation_fraction": 1.5,
    "calibration_fraction": -0.1,
    "max_epochs": 0,
    "batch_size": 0,
    "gamma": -1.0,
    "target_scale": "log",
    "dropout": 1.0,
    "lr": 0.0,
    "hidden": (0,),
}
BAD_TREES = {
    "coverage": 0.0,
    "lam": math.nan,
    "conformal": "sym",
    "calibration_fraction": 1.0,
    "max_iter": 0,
    "max_leaf_nodes": 1,
    "min_samples_leaf": 0,
    "cv": 1,
    "learning_rate": 0.0,
}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("network", k, v) for k, v in BAD_NETWORK.items()] + [("trees", k, v) for k, v in BAD_TREES.items()],
)
def test_bad_options_name_the_argument(kind, name, value):
    X, y = skewed(60)
    with pytest.raises(ValueError, match=name):
        QUICK[kind](**{name: value}).fit(X, y)


def test_options_that_exclude_each_other():
    X, y = skewed(60)
    with pytest.raises(ValueError, match="auto"):
        RQRRegressor(validation_fraction=0).fit(X, y)
    with pytest.raises(ValueError, match="leave no rows"):
        RQRRegressor(validation_fraction=0.5, calibration_fraction=0.5).fit(X, y)
    with pytest.raises(ValueError, match="'auto', got 'best'"):
        RQRRegressor(lam="best").fit(X, y)
    with pytest.raises(TypeError, match="lam"):
        RQRBoostingRegressor(lam="auto").fit(X, y)


def test_auto_takes_the_penalty_with_the_best_objective():
    X, y = skewed(1500)
    model = RQRRegressor(max_epochs=60, random_state=3).fit(X, y)
    assert model.lam_ in (0.5, 1.0, 5.0, 20.0) and 0.7 < model.coverage_val_ <= 1
    # Trained alone with that penalty it is the same model: members of a stack are independent.
    auto = RQRRegressor(max_epochs=40, dropout=0.0, random_state=3).fit(X, y)
    alone = RQRRegressor(lam=auto.lam_, max_epochs=40, dropout=0.0, random_state=3).fit(X, y)
    width = np.diff(auto.predict_interval(X)).mean()
    assert np.abs(alone.predict_interval(X) - auto.predict_interval(X)).max() < 0.1 * width


def test_raw_coverage_and_order_of_widths():
    """A constant input is the authors' demonstration: widths come out as for the population."""
    rng = np.random.default_rng(0)
    y = rng.exponential(size=10_000)
    X = 1 + 1e-4 * rng.normal(size=(10_000, 1))
    widths = {}
    for lam in (0.0, 100.0):
        model = RQRRegressor(
            0.8,
            lam,
            dropout=0.0,
            max_epochs=300,
            validation_fraction=0,
            conformal=False,
            target_scale="mean_abs",
            random_state=0,
        ).fit(X, y)
        bounds = model.predict_interval(X)
        widths[lam] = float(np.diff(bounds).mean())
        assert covered(bounds, y) == pytest.approx(0.8, abs=0.025)
    assert widths[100.0] == pytest.approx(1.886, rel=0.05) and widths[0.0] == pytest.approx(2.913, rel=0.06)


def test_selection_objective():
    y = torch.linspace(0, 1, 101)
    narrow = torch.tensor([0.05, 0.94]).expand(101, 2)  # covers 90 of 101
    wide = torch.tensor([-1.0, 2.0]).expand(101, 2)
    off = torch.tensor([0.4, 0.6]).expand(101, 2)
    both = torch.stack([narrow.flip(-1), wide, off])
    raw = selection_objective(both, y, 0.9, conformal=False)
    assert raw[0].item() == pytest.approx(0.89) and raw[1] > 1e4 and raw[2] > raw[1]
    fair = selection_objective(both, y, 0.9, conformal=True)
    # k = ceil(102*0.9) = 92: all are corrected to intervals around 0.5 that hold 92 rows or more
    assert fair[0].item() == pytest.approx(0.93, abs=0.03) and fair[2].item() == pytest.approx(0.92, abs=0.02)
    few = selection_objective(both[:, :5], y[:5], 0.9, conformal=True)
    assert few[0].item() == pytest.approx(0.89 + 20 * (0.05 + 0.04 + 0.03 + 0.02 + 0.01) / 5, rel=1e-4)


class Net(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n_in, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x):
        return self.body(x)


def test_own_network(tmp_path):
    X, y = skewed(600)
    before = torch.random.get_rng_state()
    model = RQRRegressor(estimator=Net, max_epochs=30, lam="auto", random_state=0).fit(X, y)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(model.module_, Net) and 0.85 < covered(model.predict_interval(X), y) < 0.97
    again = RQRRegressor(estimator=Net, max_epochs=30, lam="auto", random_state=0).fit(X, y)
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
    with pytest.raises(TypeError, match="state_dict"):
        model.save(tmp_path)
    with pytest.raises(TypeError, match="estimator"):
        RQRRegressor(estimator=lambda n: n).fit(X, y)
    with pytest.raises(ValueError, match=r"\(\.\.\., 2\)"):
        RQRRegressor(estimator=lambda n: nn.Linear(n, 3), max_epochs=2).fit(X, y)


def test_orthogonal_penalty_in_the_regressor():
    X, y = skewed(500)
    plain = RQRRegressor(lam=0.0, max_epochs=10, random_state=0).fit(X, y).predict_interval(X)
    penalised = RQRRegressor(lam=0.0, gamma=1.0, max_epochs=10, random_state=0).fit(X, y).predict_interval(X)
    assert np.isfinite(penalised).all() and not np.allclose(plain, penalised)


def test_no_validation_and_minibatches():
    X, y = skewed(500)
    model = RQRRegressor(lam=1.0, validation_fraction=0, batch_size=64, max_epochs=10, random_state=0).fit(X, y)
    assert model.n_iter_ == 10 and math.isnan(model.coverage_val_)
    full = RQRRegressor(lam=1.0, batch_size="full", max_epochs=10, random_state=0).fit(X, y)
    assert np.isfinite(full.predict_interval(X)).all()


def test_divergence_is_an_error():
    X, y = skewed(100)
    with pytest.raises(FloatingPointError, match="lr"):
        RQRRegressor(lam=1.0, lr=1e30, max_epochs=5).fit(X, y)


def test_in_pipelines_and_searches():
    X, y = skewed(300)
    pipe = make_pipeline(StandardScaler(), RQRRegressor(max_epochs=5, lam=1.0, random_state=0))
    search = GridSearchCV(pipe, {"rqrregressor__lam": [0.5, 5.0]}, cv=2).fit(X, y)
    assert search.best_params_["rqrregressor__lam"] in (0.5, 5.0)


def test_trees_as_arrays_predict_like_scikit_learn():
    X, y = skewed(800)
    model = HistGradientBoostingRegressor(max_iter=40).fit(X, y)
    trees = from_hist_gradient_boosting(model)
    np.testing.assert_array_equal(trees(X), model.predict(X))
    other = HistGradientBoostingRegressor(max_iter=7, max_depth=2).fit(X[:300], y[:300])
    both = mean_of([trees, from_hist_gradient_boosting(other)])
    np.testing.assert_allclose(both(X), (model.predict(X) + other.predict(X)) / 2, rtol=1e-12)
    back = TreeEnsemble.from_tensors("t", trees.tensors("t"))
    np.testing.assert_array_equal(back(np.asfortranarray(X[::2])), model.predict(X[::2]))


def test_loss_trees_reach_the_constant_optimum():
    """Without informative features, the finite-penalty trees must find the interval of the population."""
    rng = np.random.default_rng(0)
    y = rng.exponential(size=20_000) - 1.0
    X = np.zeros((20_000, 1), dtype=np.float32)
    for lam, width in ((0.0, 2.9130), (1.0, 2.0205), (10.0, 1.8997)):
        s, q = fit_rqr_trees(X, y, 0.8, lam, max_iter=300)
        assert 2 * math.exp(q(X[:1])[0]) == pytest.approx(width, rel=0.04), lam
        inside = np.abs(y - s(X[:1])[0]) <= math.exp(q(X[:1])[0])
        assert inside.mean() == pytest.approx(0.8, abs=0.01)


def test_half_widths_come_from_residuals_out_of_fold():
    """Residuals of the rows that trained the mean would be too small; raw coverage shows it."""
    X, y = skewed(2000)
    model = RQRBoostingRegressor(conformal=False, max_iter=100, random_state=0).fit(X[:1000], y[:1000])
    assert covered(model.predict_interval(X[1000:]), y[1000:]) > 0.82
