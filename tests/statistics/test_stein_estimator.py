"""SteinCompressor as a scikit-learn estimator."""

import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.metadata_routing import get_routing_for_object

from assay.statistics.stein_thinning import SteinCompressor, compress


class StandardNormalScore:
    """The score of N(0, I). An object, since the name of a test must not hold a function's address."""

    def __call__(self, X):
        return -X

    def __repr__(self):
        return "standard_normal_score"


@pytest.mark.filterwarnings("ignore::UserWarning")  # the checks' toy data are no draws of a normal
@parametrize_with_checks([SteinCompressor(score_function=StandardNormalScore())])
def test_sklearn_checks(estimator, check):
    check(estimator)


def test_fit_with_scores():
    X = 2 * np.random.default_rng(0).normal(size=(200, 3))
    model = SteinCompressor(20, "sr", random_state=0).fit(X, scores=-X)
    direct = compress(X, -X, 20, "sr", random_state=0)
    assert (model.indices_ == direct.indices).all() and (model.weights_ == direct.weights).all()
    assert model.mmd_ == direct.mmd and model.coreset_.method == "sr" and model.n_features_in_ == 3
    function = clone(model).set_params(score_function=StandardNormalScore()).fit(X)
    assert (function.indices_ == model.indices_).all()
    legacy = SteinCompressor(random_state=np.random.RandomState(0)).fit(X, scores=-X)
    assert (legacy.indices_ == SteinCompressor(random_state=np.random.RandomState(0)).fit(X, scores=-X).indices_).all()


def test_scores_are_needed():
    with pytest.raises(ValueError, match="scores is needed"):
        SteinCompressor().fit(np.random.default_rng(0).normal(size=(10, 2)))


def test_scores_can_be_routed():
    with sklearn.config_context(enable_metadata_routing=True):
        model = SteinCompressor().set_fit_request(scores=True)
        assert get_routing_for_object(model).fit.requests["scores"] is True
