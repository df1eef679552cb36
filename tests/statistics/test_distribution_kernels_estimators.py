"""The estimators as parts of scikit-learn: options, bad input, dtypes, saving, pipelines, and invariants."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import BaseEstimator, TransformerMixin, clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVC
from sklearn.utils.estimator_checks import check_estimator

from assay.statistics import distribution_kernels as dk
from assay.statistics.distribution_kernels import (
    DistributionClassifier,
    DistributionQuantileRegressor,
    DistributionRegressor,
    MeanEmbedding,
    MomentEmbedding,
    SlicedWassersteinEmbedding,
    as_bags,
    bag_distances,
    bag_gram,
    exact_sliced_wasserstein,
    loo_residuals,
    point_gram,
    second_stage_report,
    stability_report,
)

RNG = np.random.default_rng(7)
BAGS = [RNG.standard_normal((m, 2)) * RNG.uniform(0.5, 2) for m in RNG.integers(5, 30, 40)]
SPREAD = np.array([b.std() for b in BAGS])
LABEL = np.where(np.median(SPREAD) < SPREAD, "wide", "narrow")
EMBEDDINGS = [
    SlicedWassersteinEmbedding(7, 9, random_state=0),
    SlicedWassersteinEmbedding(n_quantiles=5, directions="axes"),
    MeanEmbedding(n_components=31, random_state=0),
    MeanEmbedding("energy", n_components=12, approximation="nystroem", random_state=0),
    MeanEmbedding("matern32", n_components=None, random_state=0),
    MomentEmbedding(3, mixed=True),
]


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "embedding",
    # Not the exact mean embedding: its coordinates are those of a basis that repeated bags rotate.
    [SlicedWassersteinEmbedding(), MeanEmbedding(), MeanEmbedding(approximation="nystroem"), MomentEmbedding()],
    ids=str,
)
def test_embeddings_keep_the_contract_of_transformers(embedding):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_estimator(embedding)


@pytest.mark.parametrize("embedding", EMBEDDINGS, ids=str)
def test_embeddings_save_load_and_know_their_names(embedding, tmp_path):
    made = clone(embedding).fit(BAGS)
    vectors = made.transform(BAGS[:7])
    assert np.isfinite(vectors).all() and vectors.shape == (7, len(made.get_feature_names_out()))
    assert np.array_equal(clone(embedding).fit(BAGS).transform(BAGS[:7]), vectors)  # frozen by the seed
    folder = made.save(tmp_path / "e")
    assert {f.suffix for f in folder.iterdir()} == {".json", ".safetensors"}
    assert np.array_equal(type(made).load(folder).transform(BAGS[:7]), vectors)
    with pytest.raises(ValueError, match="holds a"):
        (MomentEmbedding if not isinstance(made, MomentEmbedding) else MeanEmbedding).load(folder)
    with pytest.raises(NotFittedError):
        clone(embedding).transform(BAGS)


@pytest.mark.parametrize("embedding", EMBEDDINGS, ids=str)
def test_dtypes_layouts_and_single_bags_agree(embedding):
    made = clone(embedding).fit(BAGS)
    whole = made.transform(BAGS)
    single = [b.astype(np.float32) for b in BAGS]
    # Roots of small numbers: the distance of exact kernel means from their span is less precise.
    np.testing.assert_allclose(made.transform(single), made.transform([b.astype(float) for b in single]), atol=1e-6)
    np.testing.assert_allclose(made.transform(single), whole, atol=2e-3)
    strided = [np.repeat(b, 2, axis=0)[::2] for b in BAGS] + [np.asfortranarray(BAGS[0])]
    np.testing.assert_allclose(made.transform(strided), np.vstack([whole, whole[:1]]), atol=1e-7)
    np.testing.assert_allclose(made.transform([BAGS[3]]), whole[3:4], atol=1e-7)


def test_axes_give_the_quantiles_of_coordinates():
    vectors = SlicedWassersteinEmbedding(n_quantiles=3, directions="axes", standardize=False).fit_transform(BAGS)
    for bag, found in zip(BAGS, vectors):
        ranks = [int(np.ceil(len(bag) * level)) - 1 for level in (1 / 6, 1 / 2, 5 / 6)]
        np.testing.assert_allclose(found.reshape(2, 3) * np.sqrt(6), np.sort(bag, axis=0)[ranks].T, atol=1e-12)


def test_threads_change_nothing():
    big = [RNG.standard_normal((5000, 3)) for _ in range(30)]
    one, two = (SlicedWassersteinEmbedding(n_jobs=j, random_state=0).fit_transform(big) for j in (1, 2))
    assert np.array_equal(one, two)


def test_moments_are_those_of_numpy():
    found = MomentEmbedding(4, mixed=True, standardize=False, scale_moments=False).fit_transform(BAGS)
    assert found.shape == (40, 2 + 3 + 4 + 5)
    x = BAGS[0] - BAGS[0].mean(0)
    np.testing.assert_allclose(found[0, :2], BAGS[0].mean(0))
    np.testing.assert_allclose(found[0, 2:5], np.cov(BAGS[0].T, bias=True)[[0, 0, 1], [0, 1, 1]])
    np.testing.assert_allclose(found[0, 9:], [np.mean(x[:, 0] ** (4 - k) * x[:, 1] ** k) for k in range(5)])


bags_of_numbers = st.lists(
    st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=6).map(np.array), min_size=3, max_size=5
)


@given(bags_of_numbers, st.floats(-20, 20), st.floats(0.1, 10))
@settings(max_examples=80, deadline=None)
def test_sliced_wasserstein_is_a_metric_that_moves_with_the_data(bags, shift, scale):
    exact = exact_sliced_wasserstein(bags)
    assert (np.diag(exact) == 0).all() and np.array_equal(exact, exact.T)
    assert (exact[0, 2] <= exact[0, 1] + exact[1, 2] + 1e-6).all()
    moved = exact_sliced_wasserstein([scale * b + shift for b in bags])
    np.testing.assert_allclose(moved, scale * exact, rtol=1e-7, atol=1e-6)
    fine = SlicedWassersteinEmbedding(n_quantiles=60, standardize=False)  # 60 holds all sizes: 1 to 6 divide it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_allclose(bag_distances(bags, embedding=fine), exact, atol=1e-5)


@given(bags_of_numbers, st.sampled_from(["gaussian", "laplace", "matern32", "energy"]), st.floats(0.1, 20))
@settings(max_examples=80, deadline=None)
def test_inner_products_are_positive_semidefinite(bags, kernel, scale):
    gram = point_gram(bags, None, kernel, scale)
    assert np.linalg.eigvalsh(gram).min() > -1e-8 * max(1.0, np.abs(gram).max())
    for second in ("gaussian", "laplace", "linear", "polynomial"):
        K = bag_gram(bags, embedding=MeanEmbedding(kernel, scale, None, standardize=False), kernel=second, degree=2)
        assert np.linalg.eigvalsh(K).min() > -1e-7 * np.abs(K).max()


# --- estimators ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "linear", "polynomial"])
def test_second_kernels_learn(kernel):
    model = DistributionRegressor(kernel=kernel, degree=2, lam="cv", random_state=0).fit(BAGS, SPREAD)
    assert model.score(BAGS, SPREAD) > 0.8 and len(model.cv_results_) == 7


@pytest.mark.parametrize(
    "make", [DistributionRegressor, DistributionQuantileRegressor, DistributionClassifier], ids=lambda m: m.__name__
)
def test_seeds_dtypes_and_single_bags(make):
    y = LABEL if make is DistributionClassifier else SPREAD
    model = make(embedding="kme", n_landmarks=20, random_state=3)
    ask = "decision_function" if make is DistributionClassifier else "predict"
    found = getattr(clone(model).fit(BAGS, y), ask)(BAGS)
    assert np.array_equal(getattr(clone(model).fit(BAGS, y), ask)(BAGS), found)
    single = clone(model).fit([b.astype(np.float32) for b in BAGS], y)
    np.testing.assert_allclose(getattr(single, ask)(BAGS), found, atol=5e-3)
    np.testing.assert_allclose(getattr(clone(model).fit(BAGS, y), ask)([BAGS[5]]), found[5:6], atol=1e-9)


def test_weights_of_bags_are_repetitions_and_zero_is_absence():
    weights = RNG.integers(0, 3, 40)
    repeated = np.repeat(np.arange(40), weights)
    for loss in ("square", "pinball"):
        model = DistributionRegressor(loss, tol=1e-10, embedding="moments")
        a = clone(model).fit(BAGS, SPREAD, sample_weight=weights).predict(BAGS)
        b = clone(model).fit([BAGS[i] for i in repeated], SPREAD[repeated]).predict(BAGS)
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_weights_of_points_are_repetitions():
    weights = [RNG.integers(1, 4, len(b)) for b in BAGS]
    repeated = [np.repeat(b, w, axis=0) for b, w in zip(BAGS, weights)]
    # A length scale of its own: the median is that of a random thousand of the points.
    for embedding in (*EMBEDDINGS[:2], MeanEmbedding(length_scale=1.0, random_state=0)):
        model = DistributionRegressor(embedding=embedding)
        a = clone(model).fit(BAGS, SPREAD, point_weights=weights).predict(BAGS, point_weights=weights)
        b = clone(model).fit(repeated, SPREAD).predict(repeated)
        np.testing.assert_allclose(a, b, atol=1e-7)


def test_hinge_gets_probabilities_from_calibration():
    boxed = np.empty(40, dtype=object)
    boxed[:] = BAGS
    wrapped = CalibratedClassifierCV(DistributionClassifier(random_state=0), cv=3).fit(boxed, LABEL)
    p = wrapped.predict_proba(boxed)
    assert p.shape == (40, 2) and (wrapped.predict(boxed) == LABEL).mean() > 0.8


def test_three_classes_one_against_the_rest_and_softmax():
    y = np.digitize(SPREAD, np.quantile(SPREAD, [1 / 3, 2 / 3]))
    for loss in ("hinge", "logistic"):
        model = DistributionClassifier(loss, lam="cv", random_state=0).fit(BAGS, y)
        assert model.decision_function(BAGS).shape == (40, 3) and model.score(BAGS, y) > 0.7
        if loss == "logistic":
            np.testing.assert_allclose(model.predict_proba(BAGS).sum(1), 1.0)


class _Ends(TransformerMixin, BaseEstimator):
    """A transformer of bags from elsewhere."""

    def fit(self, X, y=None):
        return self

    def transform(self, X):
        return np.array([[b.min(), b.max()] for b in X])


def test_other_transformers_and_vectors(tmp_path):
    model = DistributionRegressor(embedding=_Ends()).fit(BAGS, SPREAD)
    plain = DistributionRegressor(embedding="passthrough").fit(_Ends().transform(BAGS), SPREAD)
    np.testing.assert_allclose(model.predict(BAGS), plain.predict(_Ends().transform(BAGS)), atol=1e-12)
    with pytest.raises(TypeError, match="_Ends of another package has no save"):
        model.save(tmp_path / "x")
    plain.save(tmp_path / "y")
    loaded = DistributionRegressor.load(tmp_path / "y")
    assert np.array_equal(loaded.predict(_Ends().transform(BAGS)), plain.predict(_Ends().transform(BAGS)))
    with pytest.raises(ValueError, match="point_weights has no meaning"):
        plain.predict(_Ends().transform(BAGS), point_weights=[[1]] * 40)
    with pytest.raises(ValueError, match="point_weights needs one of this package"):
        model.predict(BAGS, point_weights=[np.ones(len(b)) for b in BAGS])


def test_pipelines_and_cross_validation_over_bags():
    pipe = make_pipeline(MeanEmbedding(random_state=0), SVC(C=100))
    assert (cross_val_predict(pipe, BAGS, LABEL, cv=4) == LABEL).mean() > 0.6
    model = DistributionRegressor(lam="cv", cv=[(np.arange(30), np.arange(30, 40))], random_state=0)
    weights = np.ones(40)
    weights[[3, 35]] = 0
    assert clone(model).fit(BAGS, SPREAD, sample_weight=weights).dual_coef_.shape == (38, 1)


def test_saved_models_are_json_and_arrays(tmp_path):
    model = DistributionClassifier("logistic", embedding=MeanEmbedding(n_components=None), random_state=0)
    folder = model.fit(BAGS, LABEL).save(tmp_path / "m")
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    assert {n.rsplit(".")[-1] for n in names} == {"json", "safetensors"}
    loaded = DistributionClassifier.load(folder)
    assert np.array_equal(loaded.predict_proba(BAGS), model.predict_proba(BAGS)) and loaded.classes_.tolist() == [
        "narrow",
        "wide",
    ]
    assert loaded.get_params()["embedding__n_components"] is None
    clone(loaded).fit(BAGS, LABEL)
    with pytest.raises(ValueError, match="not a 'DistributionRegressor'"):
        DistributionRegressor.load(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["kind"] == "DistributionClassifier"


def test_unfinished_fits_warn():
    with pytest.warns(ConvergenceWarning, match="raise max_iter, tol or lam"):
        DistributionRegressor("pinball", lam=1e-6, max_iter=3).fit(BAGS, SPREAD)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "absolute"}, "loss must be 'square', 'epsilon' or 'pinball', got 'absolute'"),
        ({"quantile": 1.0}, r"quantile must be a number in \(0, 1\), got 1.0"),
        ({"quantile": None}, "quantile must be a number"),
        ({"epsilon": -0.1}, "epsilon must be a number >= 0, got -0.1"),
        ({"embedding": "rff"}, "embedding must be one of"),
        ({"embedding": 3}, "embedding must be a name or have fit and transform, got int"),
        ({"kernel": "rbf"}, "kernel must be one of"),
        ({"length_scale": 0}, "length_scale must be 'median' or 'cv' or a positive number, got 0"),
        ({"length_scale": "mean"}, "length_scale must be"),
        ({"degree": 1.5}, "degree must be an integer >= 1, got 1.5"),
        ({"lam": 0.0}, "lam must be 'cv' or a positive number, got 0.0"),
        ({"lam": None}, "lam must be 'cv' or a positive number, got None"),
        ({"lam": "auto"}, "lam must be"),
        ({"n_landmarks": 0}, "n_landmarks must be an integer >= 1, got 0"),
        ({"cv": 1}, "cv must be an integer >= 2, got 1"),
        ({"tol": 0}, "tol must be a positive number, got 0"),
        ({"max_iter": True}, "max_iter must be an integer >= 1, got True"),
        ({"embedding": SlicedWassersteinEmbedding(n_quantiles=0)}, "n_quantiles must be an integer >= 1, got 0"),
        ({"embedding": SlicedWassersteinEmbedding(directions="x")}, "directions must be 'random' or 'axes'"),
        ({"embedding": MeanEmbedding("energy")}, "the energy kernel has no Fourier features"),
        ({"embedding": MeanEmbedding("rbf")}, "kernel must be one of"),
        ({"embedding": MeanEmbedding(length_scale=-1)}, "length_scale must be 'median' or a positive number, got -1"),
        ({"embedding": MeanEmbedding(approximation="rff")}, "approximation must be"),
        ({"embedding": MomentEmbedding(5)}, "order must be 1, 2, 3 or 4, got 5"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        DistributionRegressor(**options).fit(BAGS, SPREAD)


@pytest.mark.parametrize(
    ("X", "y", "words"),
    [
        ([*BAGS[:2], np.zeros((0, 2))], [1, 2, 3], r"X\[2\] is empty"),
        ([*BAGS[:2], np.full((3, 2), np.inf)], [1, 2, 3], r"X\[2\] holds NaN or infinite"),
        ([*BAGS[:2], np.zeros((3, 1))], [1, 2, 3], r"X\[2\] has 1 coordinates"),
        (BAGS[:1], [1.0], "at least 2 bags are needed"),
        (BAGS[:3], [1.0, 2.0], "inconsistent numbers of samples"),
        (BAGS[:2], [1.0, np.nan], "y contains NaN"),
        (BAGS[:2], ["a", "b"], "y must hold numbers"),
        (BAGS[:2], None, "requires y"),
    ],
)
def test_bad_bags_and_targets(X, y, words):
    with pytest.raises(ValueError, match=words):
        DistributionRegressor().fit(X, y)


def test_more_bad_input():
    with pytest.raises(ValueError, match="y holds a single class, 'a'"):
        DistributionClassifier().fit(BAGS[:3], ["a"] * 3)
    with pytest.raises(ValueError, match="loss must be 'hinge' or 'logistic'"):
        DistributionClassifier("square").fit(BAGS, LABEL)
    for levels, words in (((0.5, 0.1), "increasing"), ((), "increasing"), ((0.0, 0.5), r"numbers in \(0, 1\)")):
        with pytest.raises(ValueError, match=words):
            DistributionQuantileRegressor(levels).fit(BAGS, SPREAD)
    fitted = DistributionRegressor().fit(BAGS, SPREAD)
    with pytest.raises(ValueError, match="X has 3 coordinates a point, but DistributionRegressor was fitted with 2"):
        fitted.predict([np.zeros((4, 3))])
    with pytest.raises(ValueError, match="sample_weight"):
        DistributionRegressor().fit(BAGS, SPREAD, sample_weight=-np.ones(40))
    with pytest.raises(ValueError, match=r"point_weights\[1\] has 1 entries for a bag of"):
        DistributionRegressor().fit(BAGS[:2], SPREAD[:2], point_weights=[np.ones(len(BAGS[0])), [1.0]])
    with pytest.warns(UserWarning, match="1 of 3 bags hold one point"):
        DistributionRegressor().fit([*BAGS[:2], np.zeros((1, 2))], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="at least 2 bags of each class"):
        DistributionClassifier(lam="cv").fit(BAGS[:5], ["a", "a", "a", "a", "b"])
    with pytest.raises(TypeError, match="X must be a list of arrays"):
        as_bags(3)


def test_functions_check_their_arguments():
    for call, words in (
        (lambda: point_gram(BAGS, kernel="rbf"), "kernel must be one of"),
        (lambda: point_gram(BAGS, length_scale=0), "length_scale must be a positive number, got 0"),
        (lambda: point_gram(BAGS, [np.zeros(3)]), "A has 2 coordinates a point, B has 1"),
        (lambda: bag_gram(BAGS, [np.zeros(3)]), "A has 2 coordinates a point, B has 1"),
        (lambda: bag_gram(BAGS, embedding=_Ends()), "an embedding of this package"),
        (lambda: bag_distances(BAGS, embedding=MomentEmbedding().fit([np.zeros((3, 1))])), "was fitted with 1"),
        (lambda: exact_sliced_wasserstein(BAGS), "directions is needed for points with 2 coordinates"),
        (lambda: exact_sliced_wasserstein(BAGS, directions=np.ones((2, 2))), "directions must be unit vectors"),
        (lambda: exact_sliced_wasserstein(BAGS, [np.zeros(2)]), "A has 2 coordinates a point, B has 1"),
        (lambda: loo_residuals(np.eye(2), np.ones(3), 1.0), r"G must be \(N, N\) and y \(N,\)"),
        (lambda: loo_residuals(np.eye(2), [1.0, np.nan], 1.0), "must be finite"),
        (lambda: loo_residuals(np.eye(2), np.ones(2), 0.0), "lam must be a positive number"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_reports_check_their_arguments():
    free = DistributionRegressor(fit_offset=False)
    for model, options, words in (
        (DistributionRegressor(), {}, "without an offset"),
        (clone(free).set_params(n_landmarks=5), {}, "n_landmarks=None"),
        (free, {"delta": 1.0}, r"delta must be a number in \(0, 1\)"),
        (free, {"n_refits": 0}, "n_refits must be an integer >= 1"),
        (free, {"test_bags": BAGS}, "belong together"),
        (free, {"test_bags": BAGS, "test_y": SPREAD[:3]}, "test_y has 3 entries for 40 test bags"),
        (DistributionQuantileRegressor(fit_offset=False), {}, "two classes, or one quantile"),
    ):
        with pytest.raises(ValueError, match=words):
            stability_report(model, BAGS, SPREAD, **{"n_refits": 2, **options})
    with pytest.raises(ValueError, match="test_y holds classes that y does not"):
        stability_report(DistributionClassifier(fit_offset=False), BAGS, LABEL, 1, test_bags=BAGS, test_y=["none"] * 40)
    with pytest.raises(TypeError, match="model must be a DistributionRegressor"):
        stability_report(SVC(), BAGS, SPREAD)
    fitted = SlicedWassersteinEmbedding().fit(BAGS)
    for bags, sizes, words in (
        ([np.zeros((9, 3))], [2], "big_bags have 3 coordinates"),
        (BAGS, [2, 50], "sizes must lie in 1"),
        (BAGS, [], "sizes must lie in 1"),
        (as_bags(BAGS, [np.ones(len(b)) for b in BAGS]), [2], "must not carry weights"),
    ):
        with pytest.raises(ValueError, match=words):
            second_stage_report(fitted, bags, sizes)
    with pytest.raises(TypeError, match="a fitted embedding of this package"):
        second_stage_report(DistributionRegressor(embedding=_Ends()).fit(BAGS, SPREAD), BAGS, [2])
    assert np.isnan(second_stage_report(fitted, BAGS, [3])["slope"])


def test_public_names_are_there():
    for name in dk.__all__:
        assert getattr(dk, name).__doc__
