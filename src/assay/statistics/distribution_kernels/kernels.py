"""The second kernel, between embedded bags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from assay.statistics.distribution_kernels.bags import Array, Bags, as_bags, check_positive, check_whole
from assay.statistics.distribution_kernels.embeddings import (
    MeanEmbedding,
    MomentEmbedding,
    SlicedWassersteinEmbedding,
    _Embedding,
)
from assay.statistics.distribution_kernels.points import pair_weights, point_gram, self_products, weighted_median

Kernel = Literal["gaussian", "laplace", "linear", "polynomial"]
KERNELS = ("gaussian", "laplace", "linear", "polynomial")
#: Bags from which the length scale is taken.
_SCALE_BAGS = 1000


@dataclass(frozen=True, eq=False)
class Embedded:
    """Embedded bags: vectors (N, p), or, for exact kernel means, the scaled bags themselves; and squared norms (N,)."""

    vectors: Array | None
    bags: Bags | None
    norms: Array
    kernel: str = ""
    scale: float = 1.0

    def __len__(self) -> int:
        return len(self.norms)

    def inner(self, other: Embedded) -> Array:
        """Inner products (N, N')."""
        if self.vectors is not None:
            assert other.vectors is not None
            return self.vectors @ other.vectors.T
        assert self.bags is not None
        return point_gram(self.bags, None if other is self else other.bags, self.kernel, self.scale)  # type: ignore[arg-type]

    def take(self, rows: Any) -> Embedded:
        """Some of the bags."""
        vectors = None if self.vectors is None else self.vectors[rows]
        return Embedded(
            vectors, None if self.bags is None else self.bags[rows], self.norms[rows], self.kernel, self.scale
        )


def embedded(vectors: Array, center: Array) -> Embedded:
    """From vectors, less a common shift: distances do not see it, and suffer less from cancellation."""
    moved = vectors - center
    return Embedded(moved, None, np.einsum("ij,ij->i", moved, moved))


def embed(embedding: _Embedding, bags: Bags, center: Array | None = None) -> Embedded:
    """Embed with one of our embeddings; exact kernel means keep the points."""
    if isinstance(embedding, MeanEmbedding) and embedding._exact:
        scaled, scale = embedding._scaled(bags), embedding.length_scale_
        return Embedded(None, scaled, self_products(scaled, embedding.kernel, scale), embedding.kernel, scale)
    vectors = embedding._embed(bags)
    return embedded(vectors, np.zeros(vectors.shape[1]) if center is None else center)


def squared_distances(a: Embedded, b: Embedded, inner: Array | None = None) -> Array:
    """Squared distances (N, N'), never negative; zero on the diagonal where b is a."""
    out = (a.inner(b) if inner is None else inner.copy()) * -2.0
    out += a.norms[:, None]
    out += b.norms
    np.maximum(out, 0.0, out=out)
    if a is b:
        np.fill_diagonal(out, 0.0)
    return out


def median_scale(a: Embedded, weights: Array) -> float:
    """Median distance of (the first 1000) different bags, where a pair counts by the product of its weights."""
    part = a if len(a) <= _SCALE_BAGS else a.take(np.arange(_SCALE_BAGS))
    distances = np.sqrt(squared_distances(part, part)[np.triu_indices(len(part), 1)])
    # Equal bags have the distance zero up to rounding, and would count as different.
    distances[distances <= 1e-7 * np.sqrt(part.norms.max(initial=0.0))] = 0.0
    return weighted_median(distances, pair_weights(weights[: len(part)]))


def apply_kernel(
    a: Embedded, b: Embedded, kernel: str, scale: float, degree: int = 3, inner: Array | None = None
) -> Array:
    """Second-level kernel (N, N') of embedded bags.

    "linear" ``<u, v>``; "gaussian" ``exp(-|u - v|^2/(2 g^2))``; "laplace" ``exp(-|u - v|/g)``; "polynomial"
    ``(1 + <u, v>)^degree``. The middle two are positive definite since the distance is that of a Hilbert space.
    """
    if kernel == "linear":
        return a.inner(b) if inner is None else inner.copy()
    if kernel == "polynomial":
        return (1.0 + (a.inner(b) if inner is None else inner)) ** degree
    out = squared_distances(a, b, inner)
    if kernel == "gaussian":
        out *= -0.5 / scale**2
    else:
        np.sqrt(out, out=out)
        out *= -1.0 / scale
    return np.exp(out, out=out)


def check_kernel(kernel: Any, length_scale: Any, degree: Any, *, named: tuple[str, ...] = ("median",)) -> None:
    """Raise ValueError for options of the second kernel that are out of range."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {KERNELS}, got {kernel!r}")
    check_positive("length_scale", length_scale, *named)
    check_whole("degree", degree, 1)


EMBEDDINGS: dict[str, type[_Embedding]] = {
    "sw": SlicedWassersteinEmbedding,
    "kme": MeanEmbedding,
    "moments": MomentEmbedding,
}


def make_embedding(embedding: Any, random_state: Any) -> Any:
    """An unfitted embedding from its short name, or a clone of a given one."""
    if isinstance(embedding, str):
        if embedding not in EMBEDDINGS:
            raise ValueError(
                f"embedding must be one of {(*EMBEDDINGS, 'passthrough')} or a transformer, got {embedding!r}"
            )
        return EMBEDDINGS[embedding](random_state=random_state)
    if not (hasattr(embedding, "fit") and hasattr(embedding, "transform")):
        raise ValueError(f"embedding must be a name or have fit and transform, got {type(embedding).__name__}")
    return clone(embedding)


def _pair(A: Any, B: Any, embedding: Any, random_state: Any) -> tuple[Embedded, Embedded]:
    """Both sides embedded; what is not fitted yet is fitted to A."""
    a = as_bags(A, name="A")
    b = a if B is None else as_bags(B, name="B")
    if a.dim != b.dim:
        raise ValueError(f"A has {a.dim} coordinates a point, B has {b.dim}")
    if not isinstance(embedding, str | _Embedding):
        raise ValueError(f"embedding must be one of {tuple(EMBEDDINGS)} or an embedding of this package")
    fitted = embedding if isinstance(embedding, _Embedding) else make_embedding(embedding, random_state)
    try:
        check_is_fitted(fitted)
    except NotFittedError:
        fitted = clone(fitted)
        fitted._check()
        fitted._fit_bags(a)
    if fitted._dim != a.dim:
        raise ValueError(f"A has {a.dim} coordinates a point, the embedding was fitted with {fitted._dim}")
    left = embed(fitted, a)
    return left, left if b is a else embed(fitted, b)


def bag_gram(
    A: Any,
    B: Any = None,
    embedding: Any = "sw",
    kernel: Kernel = "gaussian",
    length_scale: float | Literal["median"] = "median",
    *,
    degree: int = 3,
    random_state: Any = None,
) -> Array:
    """Kernel matrix between bags, for any machine that takes a precomputed kernel.

    Parameters
    ----------
    A, B
        Bags (:func:`as_bags`); B is A by default.
    embedding
        "sw", "kme" or "moments" with their defaults, or an embedding; one that is not fitted is fitted to A.
        ``MeanEmbedding(n_components=None)`` is computed exactly.
    kernel, length_scale, degree
        Kernel between embedded bags, see :func:`apply_kernel`; "median" is the median distance of the bags of A.
    random_state
        For an embedding that is given by name.

    Returns
    -------
    Array (N_A, N_B), positive semidefinite where B is A.
    """
    check_kernel(kernel, length_scale, degree)
    a, b = _pair(A, B, embedding, random_state)
    scale = length_scale
    if scale == "median":
        scale = median_scale(a, np.ones(len(a))) if kernel in ("gaussian", "laplace") else 1.0
    return apply_kernel(a, b, kernel, float(scale), degree)


def bag_distances(A: Any, B: Any = None, embedding: Any = "sw", *, random_state: Any = None) -> Array:
    """Distances ``|Phi(S) - Phi(T)|`` of embedded bags (N_A, N_B): sliced Wasserstein, or maximum mean discrepancy.

    Parameters are those of :func:`bag_gram`. By default embeddings standardise; give one with ``standardize=False`` for
    distances in the units of the data.
    """
    a, b = _pair(A, B, embedding, random_state)
    if a.vectors is not None and b.vectors is not None:
        center = a.vectors.mean(0)
        left = embedded(a.vectors, center)
        a, b = left, left if b is a else embedded(b.vectors, center)
    return np.sqrt(squared_distances(a, b))
