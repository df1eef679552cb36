"""The same as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.validation import validate_data

from assay.statistics.stein_thinning.coreset import Coreset, Method, compress
from assay.statistics.stein_thinning.kernel import Metric, SteinKernel


class SteinCompressor(BaseEstimator):
    """Choose and weight the rows of X that represent a target distribution.

    Parameters
    ----------
    n_points, method, rank, delta, max_matrix_bytes
        As in :func:`compress`.
    M, lengthscale, n_jobs
        As in :class:`SteinKernel`.
    score_function
        ``(n, d)`` to ``(n, d)``: the gradient of the target's log density, used where ``fit`` gets no ``scores``.
    random_state
        Seed, generator, legacy ``RandomState`` or ``None``.

    Attributes
    ----------
    indices_ : ndarray (m,)
        Rows of X, sorted; equal-weight methods may repeat a row.
    weights_ : ndarray (m,)
        Their weights, sum 1.
    mmd_ : float
        Kernel Stein discrepancy of the result.
    coreset_ : Coreset
        All of that with ``expectation``, ``resample`` and ``save``.
    n_features_in_ : int
        Number of coordinates.

    Notes
    -----
    ``scores`` is metadata: ``SteinCompressor().set_fit_request(scores=True)`` routes it through meta-estimators.
    The result has fewer rows than X, so this is no transformer.
    """

    indices_: NDArray[np.int64]
    weights_: NDArray[np.float64]
    mmd_: float
    coreset_: Coreset

    def __init__(
        self,
        n_points: int | Literal["sqrt"] = "sqrt",
        method: Method = "skt",
        *,
        M: Metric | ArrayLike = "identity",
        lengthscale: Literal["median"] | float = "median",
        rank: int | Literal["auto"] = "auto",
        delta: float = 0.5,
        score_function: Callable[[NDArray[np.float64]], ArrayLike] | None = None,
        max_matrix_bytes: float = 2e9,
        n_jobs: int = 1,
        random_state: int | np.random.Generator | np.random.RandomState | None = None,
    ) -> None:
        self.n_points = n_points
        self.method = method
        self.M = M
        self.lengthscale = lengthscale
        self.rank = rank
        self.delta = delta
        self.score_function = score_function
        self.max_matrix_bytes = max_matrix_bytes
        self.n_jobs = n_jobs
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: object = None, scores: ArrayLike | None = None) -> Self:
        """Compress X.

        Parameters
        ----------
        X : array (n, d)
            Points.
        y
            Ignored.
        scores : array (n, d)
            Gradient of the target's log density at the rows of X.

        Raises
        ------
        ValueError
            Neither ``scores`` nor ``score_function`` is given, or an argument cannot be used.
        """
        points = np.asarray(validate_data(self, X, dtype=np.float64, ensure_min_samples=2), np.float64)
        if scores is None:
            if self.score_function is None:
                raise ValueError("scores is needed: pass fit(X, scores=...) or SteinCompressor(score_function=...)")
            scores = self.score_function(points)
        self.coreset_ = compress(
            points,
            scores,
            self.n_points,
            self.method,
            rank=self.rank,
            kernel=SteinKernel(self.M, self.lengthscale, n_jobs=self.n_jobs),
            delta=self.delta,
            max_matrix_bytes=self.max_matrix_bytes,
            random_state=self.random_state,
        )
        self.indices_, self.weights_, self.mmd_ = self.coreset_.indices, self.coreset_.weights, self.coreset_.mmd
        return self
