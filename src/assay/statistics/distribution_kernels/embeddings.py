"""From a bag to a vector: kernel mean, sliced Wasserstein and moment embeddings as scikit-learn transformers."""

from __future__ import annotations

from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from assay._state import load_state, save_state
from assay.statistics.distribution_kernels.bags import Array, Bags, bag_weights, check_positive, check_whole, read_bags
from assay.statistics.distribution_kernels.points import (
    POINT_KERNELS,
    PointKernel,
    fourier_means,
    frequencies,
    point_gram,
    point_scale,
    self_products,
    spread,
)
from assay.statistics.distribution_kernels.transport import random_directions, sliced_quantiles


class _Embedding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """What the three share: reading bags, scaling points, saving. Subclasses give ``_learn`` and ``_vectors``."""

    standardize: bool
    random_state: Any
    _tensors: tuple[str, ...] = ()
    _values: tuple[str, ...] = ()

    def _check(self) -> None:
        raise NotImplementedError

    def _learn(self, bags: Bags, weights: Array, rng: np.random.Generator) -> None:
        raise NotImplementedError

    def _vectors(self, bags: Bags) -> Array:
        raise NotImplementedError

    def fit(self, X: Any, y: object = None, sample_weight: Any = None, point_weights: Any = None) -> Self:
        """Learn scales from bags, and draw what is random.

        Parameters
        ----------
        X
            Bags: a list or object array of arrays (M_i, d), an array (N, M, d), a table (N, M) whose rows are bags of
            numbers, or :class:`Bags`.
        y
            Ignored.
        sample_weight
            Weights (N,) of bags.
        point_weights
            For each bag an array (M_i,) of weights of its points.

        Raises
        ------
        ValueError
            An option is out of range; or a bag is empty, holds NaN, or has another number of coordinates.

        Warns
        -----
        UserWarning
            Bags hold a single point.
        """
        self._check()
        return self._fit_bags(read_bags(self, X, point_weights, reset=True), sample_weight)

    def _fit_bags(self, bags: Bags, sample_weight: Any = None) -> Self:
        """:meth:`fit` without the reading."""
        weights = bag_weights(sample_weight, len(bags))
        if (weights == 0).any():
            bags, weights = bags[np.flatnonzero(weights)], weights[weights > 0]
        self._dim = bags.dim
        self.center_, self.scale_ = np.zeros(bags.dim), np.ones(bags.dim)
        if self.standardize:
            self.center_, self.scale_ = spread(bags, weights)
        seed = check_random_state(self.random_state).randint(2**31 - 1)
        self._learn(self._scaled(bags), weights, np.random.default_rng(seed))
        return self

    def transform(self, X: Any, point_weights: Any = None) -> Array:
        """Embed bags.

        Parameters
        ----------
        X, point_weights
            As in :meth:`fit`; the bags may be others, of other sizes.

        Returns
        -------
        Array (N, p), float64.
        """
        check_is_fitted(self)
        return self._embed(read_bags(self, X, point_weights, reset=False))

    def _embed(self, bags: Bags) -> Array:
        """:meth:`transform` without the reading."""
        return self._vectors(self._scaled(bags))

    def _scaled(self, bags: Bags) -> Bags:
        if not self.standardize:
            return bags
        return Bags((bags.points - self.center_) / self.scale_, bags.offsets, bags.weights)

    @property
    def _n_features_out(self) -> int:
        return self._width

    def save(self, folder: str | Path) -> Path:
        """Write options and everything that was learned or drawn to ``folder``; see :meth:`load`."""
        check_is_fitted(self)
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        fitted = {name: getattr(self, name) for name in (*self._values, "_dim", "_width")}
        fitted["_rows"] = getattr(self, "_rows", False)
        fitted["n_features_in_"] = getattr(self, "n_features_in_", self._dim)
        fitted["feature_names"] = [str(f) for f in getattr(self, "feature_names_in_", [])] or None
        config = {"params": {k: v.item() if isinstance(v, np.generic) else v for k, v in params.items()}}
        names = ("center_", "scale_", *self._tensors)
        tensors = {n: getattr(self, n) for n in names if getattr(self, n, None) is not None}
        return save_state(folder, type(self).__name__, config | {"fitted": fitted}, tensors)

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """A fitted embedding from what :meth:`save` wrote; it gives the same vectors bit for bit."""
        config, tensors = load_state(folder, cls.__name__)
        made = cls(**config["params"])
        names = config["fitted"].pop("feature_names")
        if names:
            made.feature_names_in_ = np.array(names, dtype=object)
        for name, value in config["fitted"].items():
            setattr(made, name, value)
        for name in ("center_", "scale_", *cls._tensors):
            setattr(made, name, tensors.get(name))
        return made


class MeanEmbedding(_Embedding):
    """Kernel mean embedding: the mean of ``k(., x)`` over the points of a bag.

    ``<Phi(S), Phi(T)>`` is the mean of ``k(x, y)`` over x in S and y in T, and ``|Phi(S) - Phi(T)|`` the maximum mean
    discrepancy (its biased V-statistic). Two bags have the same vector only if they hold the same points in the same
    shares, for every kernel here.

    Parameters
    ----------
    kernel
        "gaussian", "laplace", "matern32" or "energy", see :func:`point_gram`. All are functions of Euclidean distance.
    length_scale
        s > 0, in units of the standardised coordinates; "median" is half of the median distance of 1000 points.
    n_components
        Length of the vectors; 500 by default. ``None``: exact, at the cost of all pairs of points.
    approximation
        "fourier": means of ``cos(w'x)`` and ``sin(w'x)`` for ``n_components / 2`` random w (an odd one out is
        ``cos(w'x + b)`` with a random phase); not for "energy". Errors of inner products are of the order
        ``n_components**-0.5``, for all bags alike. "nystroem": means of
        ``K_ZZ^(-1/2) k(Z, x)`` for ``n_components`` of the training points, for any kernel.
    standardize
        Divide each coordinate by its standard deviation over the training points (every bag counts the same).
    random_state
        Decides w, Z and the points of the median.

    Attributes
    ----------
    length_scale_ : float
    center_, scale_ : ndarray (d,)
        What standardises the points.
    frequencies_ : ndarray (d, ceil(n_components / 2)), with "fourier"
    n_features_in_ : int
        Coordinates of a point, or the number of columns of a table.

    Notes
    -----
    The exact embedding lives in a function space. ``transform`` gives its coordinates in the span of the N training
    bags and, in one more column, the distance from that span. Inner products among training bags and between those and
    new ones are exact (up to 1e-7 of the largest), those between new bags are not, unless they lie in the span. The
    estimators of this package use exact inner products throughout.

    The error from seeing M points only is ``E|Phi(S) - Phi(P)|^2 = (E k(x, x) - |Phi(P)|^2)/M``, at most 1/M for
    kernels that are bounded by 1.

    Source: Fiedler et al., "On Statistical Learning Theory for Distributional Inputs", ICML 2024, with random features
    of Rahimi and Recht, "Random Features for Large-Scale Kernel Machines", NeurIPS 2007.
    """

    _tensors = ("frequencies_", "landmarks_", "normalizer_", "_points", "_offsets", "_share")
    _values = ("length_scale_", "phase_")

    def __init__(
        self,
        kernel: PointKernel = "gaussian",
        length_scale: float | Literal["median"] = "median",
        n_components: int | None = 500,
        approximation: Literal["fourier", "nystroem"] = "fourier",
        standardize: bool = True,
        random_state: Any = None,
    ) -> None:
        self.kernel = kernel
        self.length_scale = length_scale
        self.n_components = n_components
        self.approximation = approximation
        self.standardize = standardize
        self.random_state = random_state

    def _check(self) -> None:
        if self.kernel not in POINT_KERNELS:
            raise ValueError(f"kernel must be one of {POINT_KERNELS}, got {self.kernel!r}")
        check_positive("length_scale", self.length_scale, "median")
        if self.approximation not in ("fourier", "nystroem"):
            raise ValueError(f"approximation must be 'fourier' or 'nystroem', got {self.approximation!r}")
        if self.n_components is None:
            return
        check_whole("n_components", self.n_components, 1)
        if self.approximation == "fourier" and self.kernel == "energy":
            raise ValueError(
                "the energy kernel has no Fourier features: take approximation='nystroem' or n_components=None"
            )

    @property
    def _exact(self) -> bool:
        return self.n_components is None

    def _learn(self, bags: Bags, weights: Array, rng: np.random.Generator) -> None:
        self.phase_ = 0.0
        self.length_scale_ = (
            point_scale(bags, weights, rng) if self.length_scale == "median" else float(self.length_scale)
        )
        scale = self.length_scale_
        if self._exact:
            self._points, self._offsets, self._share = bags.points, bags.offsets, bags.weights
            self.normalizer_ = inverse_root(point_gram(bags, None, self.kernel, scale))
            self._width = self.normalizer_.shape[1] + 1
        elif self.approximation == "fourier":
            assert self.n_components is not None
            self.frequencies_ = frequencies(self.kernel, scale, bags.dim, (self.n_components + 1) // 2, rng)
            self.phase_ = float(rng.uniform(0, 2 * np.pi))
            self._width = int(self.n_components)
        else:
            mass = bags.shares() * np.repeat(weights, bags.sizes)
            distinct, which = np.unique(bags.points, axis=0, return_inverse=True)
            mass = np.bincount(which.reshape(-1), mass).astype(np.float64)
            count = min(self.n_components or 0, int((mass > 0).sum()))
            self.landmarks_ = distinct[rng.choice(len(distinct), count, replace=False, p=mass / mass.sum())]
            self.normalizer_ = symmetric_inverse_root(point_gram(self.landmarks_[:, None], None, self.kernel, scale))
            self._width = self.normalizer_.shape[1]

    def _vectors(self, bags: Bags) -> Array:
        scale = self.length_scale_
        if self._exact:
            train = Bags(self._points, self._offsets, self._share)
            inside = point_gram(bags, train, self.kernel, scale) @ self.normalizer_
            rest = self_products(bags, self.kernel, scale) - (inside**2).sum(1)
            return np.column_stack([inside, np.sqrt(np.maximum(rest, 0.0))])
        if self.approximation == "fourier":
            n = self.frequencies_.shape[1]
            out = np.empty((len(bags), 2 * n))
            fourier_means(bags.points, bags.offsets, bags.shares(), self.frequencies_, out)
            if self._width < 2 * n:
                out[:, n - 1] = np.cos(self.phase_) * out[:, n - 1] - np.sin(self.phase_) * out[:, -1]
                out = out[:, :-1]
            return out * np.sqrt(2.0 / self._width)
        return point_gram(bags, self.landmarks_[:, None], self.kernel, scale) @ self.normalizer_


def inverse_root(gram: Array, rcond: float | None = None) -> Array:
    """A matrix (n, r) with ``gram @ R @ R.T @ gram = gram``, r the numerical rank of the (n, n) Gram matrix."""
    from scipy.linalg import eigh

    values, vectors = eigh(gram)
    least = (len(gram) * np.finfo(float).eps if rcond is None else rcond) * values[-1]
    keep = values > max(least, np.finfo(float).tiny)
    # In the layout that a saved one is read in: products then agree to the last bit.
    return np.ascontiguousarray(vectors[:, keep] / np.sqrt(values[keep]))


def symmetric_inverse_root(gram: Array, rcond: float = 1e-10) -> Array:
    """``gram^(-1/2)`` (n, n) on the eigenvectors whose eigenvalues exceed ``rcond`` times the largest, else zero.

    Unlike eigenvectors it has no sign to choose, so that features are the same on every machine; and what is left out
    would be rounding error, divided by a small root.
    """
    from scipy.linalg import eigh

    values, vectors = eigh(gram)
    keep = values > max(rcond * values[-1], np.finfo(float).tiny)
    return np.ascontiguousarray((vectors[:, keep] / np.sqrt(values[keep])) @ vectors[:, keep].T)


class SlicedWassersteinEmbedding(_Embedding):
    """Sliced Wasserstein embedding: quantiles of random projections.

    The vector of a bag holds, for L directions and Q levels ``(j - 1/2)/Q``, the quantile of the bag's projections,
    divided by ``sqrt(L Q)``. The distance of two vectors estimates the sliced 2-Wasserstein distance SW_2 of the bags,
    with which Gaussian kernels are positive definite since it is a distance of a Hilbert space.

    Parameters
    ----------
    n_projections
        L; 50 by default. In one dimension there is one direction.
    n_quantiles
        Q; 64 by default. With Q = M for bags of M points, distances are those of sliced Wasserstein for the directions
        drawn, exactly. Bags of any sizes share the grid.
    directions
        "random" (uniform on the sphere), or "axes": the quantiles of each coordinate.
    standardize
        Divide each coordinate by its standard deviation over the training points (every bag counts the same), since
        distances are those of the coordinates' units. With ``False``, distances are SW_2 in the units of the data.
    n_jobs
        Threads.
    random_state
        Decides the directions. They are drawn once, in ``fit``.

    Attributes
    ----------
    directions_ : ndarray (L, d)
    center_, scale_ : ndarray (d,)
    n_features_in_ : int

    Notes
    -----
    Quantiles are those of the empirical distribution, without interpolation (:func:`sliced_quantiles`): a bag and the
    same bag with every point three times have the same vector.

    Source: Fiedler et al., "On Statistical Learning Theory for Distributional Inputs", ICML 2024; the embedding goes
    back to Kolouri et al., "Sliced Wasserstein Kernels for Probability Distributions", CVPR 2016, and Meunier et al.,
    "Distribution Regression with Sliced Wasserstein Kernels", ICML 2022.
    """

    _tensors = ("directions_",)

    def __init__(
        self,
        n_projections: int = 50,
        n_quantiles: int = 64,
        directions: Literal["random", "axes"] = "random",
        standardize: bool = True,
        n_jobs: int = 1,
        random_state: Any = None,
    ) -> None:
        self.n_projections = n_projections
        self.n_quantiles = n_quantiles
        self.directions = directions
        self.standardize = standardize
        self.n_jobs = n_jobs
        self.random_state = random_state

    def _check(self) -> None:
        check_whole("n_projections", self.n_projections, 1)
        check_whole("n_quantiles", self.n_quantiles, 1)
        check_whole("n_jobs", self.n_jobs, 1)
        if self.directions not in ("random", "axes"):
            raise ValueError(f"directions must be 'random' or 'axes', got {self.directions!r}")

    def _learn(self, bags: Bags, weights: Array, rng: np.random.Generator) -> None:
        axes = self.directions == "axes"
        self.directions_ = np.eye(bags.dim) if axes else random_directions(self.n_projections, bags.dim, rng)
        self._width = len(self.directions_) * self.n_quantiles

    def _vectors(self, bags: Bags) -> Array:
        return sliced_quantiles(bags, self.directions_, self.n_quantiles, self.n_jobs)


class MomentEmbedding(_Embedding):
    """Moments of a bag: what distributions are usually reduced to, and the baseline of the other embeddings.

    Parameters
    ----------
    order
        1: the mean (d numbers); 2: also the covariance; 3, 4: also central moments up to that order.
    mixed
        Take third and fourth moments of all products of coordinates (``binom(d + 3, 4)`` of order four), not only of
        each coordinate by itself.
    standardize
        Divide each coordinate by its standard deviation over the training points.
    scale_moments
        Centre each moment and divide it by its standard deviation over the training bags, so that kernels see all of
        them.
    random_state
        Unused; all embeddings have it.

    Attributes
    ----------
    center_, scale_ : ndarray (d,)
    moment_center_, moment_scale_ : ndarray (p,)
    n_features_in_ : int
    """

    _tensors = ("moment_center_", "moment_scale_")

    def __init__(
        self,
        order: int = 4,
        mixed: bool = False,
        standardize: bool = True,
        scale_moments: bool = True,
        random_state: Any = None,
    ) -> None:
        self.order = order
        self.mixed = mixed
        self.standardize = standardize
        self.scale_moments = scale_moments
        self.random_state = random_state

    def _check(self) -> None:
        if self.order not in (1, 2, 3, 4):
            raise ValueError(f"order must be 1, 2, 3 or 4, got {self.order!r}")

    def _learn(self, bags: Bags, weights: Array, rng: np.random.Generator) -> None:
        raw = self._raw(bags)
        self._width = raw.shape[1]
        self.moment_center_, self.moment_scale_ = np.zeros(self._width), np.ones(self._width)
        if self.scale_moments:
            one_each = Bags(raw, np.arange(len(raw) + 1, dtype=np.int64))
            self.moment_center_, self.moment_scale_ = spread(one_each, weights)

    def _vectors(self, bags: Bags) -> Array:
        return (self._raw(bags) - self.moment_center_) / self.moment_scale_

    def _raw(self, bags: Bags) -> Array:
        means = bags.means(bags.points)
        if self.order == 1:
            return means
        away = bags.points - np.repeat(means, bags.sizes, axis=0)
        columns = [means]
        for degree in range(2, self.order + 1):
            if degree == 2 or self.mixed:
                chosen = combinations_with_replacement(range(bags.dim), degree)
                columns += [bags.means(np.prod(away[:, list(c)], axis=1))[:, None] for c in chosen]
            else:
                columns.append(bags.means(away**degree))
        return np.hstack(columns)
