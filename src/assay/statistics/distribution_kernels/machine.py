"""What the three estimators share: embedding, kernel, choice of lam and length scale, prediction, saving."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array, check_consistent_length, check_random_state
from sklearn.utils.validation import check_is_fitted

from assay._state import load_state, save_state
from assay.statistics.distribution_kernels.bags import Array, Bags, bag_weights, check_positive, check_whole, read_bags
from assay.statistics.distribution_kernels.embeddings import _Embedding
from assay.statistics.distribution_kernels.kernels import (
    EMBEDDINGS,
    Embedded,
    Kernel,
    apply_kernel,
    check_kernel,
    embed,
    embedded,
    make_embedding,
    median_scale,
)
from assay.statistics.distribution_kernels.selection import (
    LAM_GRID,
    SCALE_GRID,
    Fitted,
    Output,
    best,
    choose,
    folds_of,
    solve,
)

#: Bags that are embedded and compared at once in prediction.
_ROWS = 2048


class Machine(BaseEstimator):
    """What the three estimators share: embedding, kernel, choice of lam and length scale, prediction, saving."""

    embedding: Any
    kernel: Kernel
    length_scale: Any
    degree: int
    lam: Any
    fit_offset: bool
    n_landmarks: int | None
    cv: Any
    tol: float
    max_iter: int
    random_state: Any
    _saved: tuple[str, ...] = ()

    def _check(self) -> None:
        check_kernel(self.kernel, self.length_scale, self.degree, named=("median", "cv"))
        check_positive("lam", self.lam, "cv")
        if self.n_landmarks is not None:
            check_whole("n_landmarks", self.n_landmarks, 1)
        if not (hasattr(self.cv, "split") or hasattr(self.cv, "__iter__")):
            check_whole("cv", self.cv, 2)
        check_whole("max_iter", self.max_iter, 1)
        check_positive("tol", self.tol)

    @property
    def _through(self) -> bool:
        return isinstance(self.embedding, str) and self.embedding == "passthrough"

    def _read(self, X: Any, point_weights: Any, *, reset: bool) -> Bags:
        """Bags; with "passthrough" or a transformer of another package, bags of one vector each."""
        if self._through or isinstance(self.embedding_, _Embedding):
            if self._through and point_weights is not None:
                raise ValueError("point_weights has no meaning with embedding='passthrough', whose rows are vectors")
            return read_bags(self, X, point_weights, reset=reset, rows_only=self._through)
        if point_weights is not None:
            raise ValueError("point_weights needs one of this package's embeddings")
        vectors = self.embedding_.fit_transform(X) if reset else self.embedding_.transform(X)
        vectors = check_array(vectors, dtype=np.float64, input_name="embedding.transform(X)")
        return Bags(vectors, np.arange(len(vectors) + 1, dtype=np.int64))

    def _embed(self, bags: Bags) -> Embedded:
        if isinstance(self.embedding_, _Embedding):
            return embed(self.embedding_, bags, self._center)
        return embedded(bags.points, np.zeros(bags.dim) if self._center is None else self._center)

    def _targets(self, y: Any) -> NDArray[Any]:
        """Y as an array (N,), checked."""
        raise NotImplementedError

    def _outputs(self, y: NDArray[Any]) -> list[Output]:
        """What is learned from checked targets."""
        raise NotImplementedError

    def _fit(self, X: Any, y: Any, sample_weight: Any, point_weights: Any) -> Self:
        self._check()
        rng = check_random_state(self.random_state)
        seed = int(rng.randint(2**31 - 1))
        self.embedding_: Any = "passthrough" if self._through else make_embedding(self.embedding, seed)
        if isinstance(self.embedding_, _Embedding):
            self.embedding_._check()
        bags = self._read(X, point_weights, reset=True)
        if y is None:
            raise ValueError(f"This {type(self).__name__} estimator requires y to be passed, but the target y is None.")
        y = self._targets(y)
        check_consistent_length(bags.offsets[1:], y)
        weights = bag_weights(sample_weight, len(y))
        keep, n = np.flatnonzero(weights), len(y)
        if len(keep) < n:
            bags, y, weights = bags[keep], y[keep], weights[keep]
        if len(y) < 2:
            raise ValueError(f"X has {len(y)} sample (bag) of positive weight: at least 2 bags are needed")
        outputs = self._outputs(y)
        if isinstance(self.embedding_, _Embedding):
            self.embedding_._fit_bags(bags, weights)
        distances = self.kernel in ("gaussian", "laplace")
        self._center: Array | None = None
        data = self._embed(bags)
        if distances and data.vectors is not None:
            self._center = weights @ data.vectors / weights.sum()
            data = embedded(data.vectors, self._center)
        self.basis_ = data
        if self.n_landmarks is not None and self.n_landmarks < len(y):
            self.basis_ = data.take(np.sort(rng.choice(len(y), self.n_landmarks, replace=False)))
        inner = data.inner(self.basis_)
        median = median_scale(data, weights) if distances else 1.0
        scales: tuple[Any, ...] = (median,) if self.length_scale == "median" else (self.length_scale,)
        if self.length_scale == "cv":
            scales = tuple(m * median for m in SCALE_GRID) if distances else (1.0,)
        unit = 1.0
        if outputs[0].loss in ("square", "epsilon", "pinball"):
            unit = float(np.sqrt(np.cov(outputs[0].y, aweights=weights, ddof=0))) or 1.0
        lams: tuple[float, ...] = (self.lam,)
        if self.lam == "cv":
            # These losses grow with y, the penalty with its square: the grid has to go along.
            lams = tuple(lam / unit for lam in LAM_GRID) if outputs[0].loss in ("epsilon", "pinball") else LAM_GRID

        def kernel(scale: float) -> tuple[Array, Array | None]:
            G = apply_kernel(data, self.basis_, self.kernel, scale, self.degree, inner)
            if self.basis_ is data:
                return G, None
            return G, apply_kernel(self.basis_, self.basis_, self.kernel, scale, self.degree)

        self.cv_results_: list[dict[str, float]] = []
        if len(scales) > 1 or len(lams) > 1:
            with warnings.catch_warnings():
                # Fits with a tiny penalty may not be finished; if one is chosen, the fit on all bags will tell.
                warnings.simplefilter("ignore", ConvergenceWarning)
                self.cv_results_ = choose(
                    kernel,
                    scales,
                    lams,
                    outputs,
                    weights,
                    self._folds(outputs, keep, n, seed),
                    fit_offset=self.fit_offset,
                    unit=unit,
                    max_iter=min(self.max_iter, 100_000),
                )
            chosen = best(self.cv_results_)
            scales, lams = (chosen["length_scale"],), (chosen["lam"],)
        self.length_scale_, self.lam_ = float(scales[0]), float(lams[0])
        self._set(
            solve(
                *kernel(self.length_scale_),
                outputs,
                [self.lam_],
                weights,
                fit_offset=self.fit_offset,
                tol=self.tol * unit,
                max_iter=self.max_iter,
            )[0]
        )
        return self

    def _folds(self, outputs: list[Output], keep: NDArray[np.int64], n: int, seed: int) -> list[tuple[Any, Any]]:
        """Folds of the bags in use; those that a user gives count bags without weight, too."""
        if isinstance(self.cv, int | np.integer):
            return folds_of(self.cv, outputs, len(keep), seed)
        place = np.full(n, -1)
        place[keep] = np.arange(len(keep))
        whole = outputs
        if len(keep) < n:
            whole = []
            for o in outputs:
                y = np.zeros(n, dtype=o.y.dtype)
                y[keep] = o.y
                whole.append(o._replace(y=y))
        parts = [(place[train], place[val]) for train, val in folds_of(self.cv, whole, n, seed)]
        return [(train[train >= 0], val[val >= 0]) for train, val in parts]

    def _set(self, fitted: Fitted) -> None:
        self.dual_coef_, self.offset_, self.n_iter_ = fitted

    def _decide(self, X: Any, point_weights: Any) -> Array:
        """``f(S)`` for each bag and output, (N, K)."""
        check_is_fitted(self, "dual_coef_")
        return self._values(self._read(X, point_weights, reset=False))

    def _values(self, bags: Bags) -> Array:
        out = np.empty((len(bags), len(self.offset_)))
        for lo in range(0, len(bags), _ROWS):
            data = self._embed(bags[lo : lo + _ROWS])
            G = apply_kernel(data, self.basis_, self.kernel, self.length_scale_, self.degree)
            out[lo : lo + _ROWS] = G @ self.dual_coef_ + self.offset_
        return out

    # --- saving ---

    def save(self, folder: str | Path) -> Path:
        """Write options, coefficients and what the kernel needs to ``folder``, and the embedding to a subfolder.

        Raises
        ------
        TypeError
            ``embedding`` is a transformer of another package, which cannot be written as JSON and arrays.
        """
        check_is_fitted(self, "dual_coef_")
        if not self._through and not isinstance(self.embedding_, _Embedding):
            raise TypeError(
                f"a model with the embedding {type(self.embedding_).__name__} of another package has no save"
            )
        params = self.get_params(deep=False)
        if not isinstance(params["random_state"], int | None):
            params["random_state"] = None
        if not isinstance(params["embedding"], str):
            params["embedding"] = None  # rebuilt from the subfolder
        params = {k: v.item() if isinstance(v, np.generic) else v for k, v in params.items()}
        fitted = {
            n: getattr(self, n)
            for n in ("length_scale_", "lam_", "n_features_in_", "cv_results_", "n_iter_", "_rows", "_dim")
        }
        names = [str(f) for f in getattr(self, "feature_names_in_", [])] or None
        config: dict[str, Any] = {"params": params, "fitted": fitted, "feature_names": names}
        basis = self.basis_
        tensors: dict[str, Any] = {"coef": self.dual_coef_, "offset": self.offset_, "norms": basis.norms}
        if basis.vectors is not None:
            tensors["vectors"] = basis.vectors
        if basis.bags is not None:
            config["kernel"] = [basis.kernel, basis.scale]
            tensors |= {"points": basis.bags.points, "offsets": basis.bags.offsets}
            if basis.bags.weights is not None:
                tensors["weights"] = basis.bags.weights
        if self._center is not None:
            tensors["center"] = self._center
        self._write(config, tensors)
        if isinstance(self.embedding_, _Embedding):
            config["embedding"] = type(self.embedding_).__name__
            self.embedding_.save(Path(folder) / "embedding")
        return save_state(folder, type(self).__name__, config, tensors)

    def _write(self, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Add what a subclass has learned besides."""

    def _restore(self, config: dict[str, Any], tensors: dict[str, Any]) -> None:
        """Read what :meth:`_write` added."""

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """A fitted model from what :meth:`save` wrote; predictions agree bit for bit."""
        config, tensors = load_state(folder, cls.__name__)
        model = cls(**config["params"])
        for name, value in config["fitted"].items():
            setattr(model, name, value)
        if config["feature_names"]:
            model.feature_names_in_ = np.array(config["feature_names"], dtype=object)
        model.embedding_ = "passthrough"
        if "embedding" in config:
            kind = {c.__name__: c for c in EMBEDDINGS.values()}[config["embedding"]]
            model.embedding_ = kind.load(Path(folder) / "embedding")
            if model.embedding is None:
                model.embedding = kind(**model.embedding_.get_params())
        model.dual_coef_, model.offset_, model._center = tensors["coef"], tensors["offset"], tensors.get("center")
        bags = None
        if "points" in tensors:
            bags = Bags(tensors["points"], tensors["offsets"], tensors.get("weights"))
        kernel, scale = config.get("kernel", ["", 1.0])
        model.basis_ = Embedded(tensors.get("vectors"), bags, tensors["norms"], kernel, scale)
        model._restore(config, tensors)
        return model
