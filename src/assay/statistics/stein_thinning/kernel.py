"""The Stein kernel, its preconditioners, and the discrepancy that it defines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import cholesky, solve_triangular
from scipy.spatial.distance import pdist

from assay.statistics.stein_thinning import _cores
from assay.statistics.stein_thinning._cores import Float, Index

Metric = Literal["identity", "hessian", "score_cov", "sample_cov"]
_METRICS = ("identity", "hessian", "score_cov", "sample_cov")
_EMPTY = np.empty((0, 0))


def check_points(X: ArrayLike, scores: ArrayLike) -> tuple[Float, Float]:
    """Give points and scores as float64 arrays of one shape ``(n, d)``, or say what is wrong with them."""
    points = as_float(X, "X")
    if points.ndim != 2:
        hint = " Reshape your data, X.reshape(-1, 1) for one coordinate." if points.ndim == 1 else ""
        raise ValueError(f"X must have shape (n, d), got {points.ndim} dimension(s): {points.shape}.{hint}")
    if points.shape[1] == 0:
        raise ValueError(f"X has 0 feature(s) (shape={points.shape}) while a minimum of 1 is required.")
    if points.shape[0] < 2:
        raise ValueError(f"X must have at least 2 points, got n_samples = {points.shape[0]}, shape {points.shape}")
    gradients = as_float(scores, "scores")
    if gradients.shape != points.shape:
        raise ValueError(f"scores must have the shape of X, {points.shape}, got {gradients.shape}")
    return points, gradients


def as_float(values: ArrayLike, name: str) -> Float:
    """Give an array of finite float64 values."""
    if hasattr(values, "toarray") and hasattr(values, "nnz"):
        raise TypeError(f"{name} is a sparse matrix; pass a dense array, {name}.toarray()")
    array = np.asarray(values)
    if array.dtype.kind == "c":
        raise ValueError(f"{name} holds complex numbers. Complex data not supported")
    try:
        array = np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name} must hold numbers: {error}") from error
    if not np.isfinite(array).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise ValueError(f"{name} must be finite, got NaN or inf (first at index {where})")
    return array


class SteinKernel:
    r"""Langevin Stein kernel of a target P over the inverse multiquadric, in whitened coordinates.

    With scores :math:`s = \nabla\log p`, :math:`r^2 = (x-y)^\top M^{-1}(x-y)` and
    :math:`\phi(r^2) = (1 + r^2/\ell^2)^{-1/2}`,

    .. math:: k_P(x, y) = \phi\, s_x^\top M s_y - 2\phi' (s_x-s_y)^\top(x-y) - 2\phi' d - 4\phi'' r^2 .

    It integrates to zero under P, :math:`\int k_P(x, y)\,dP(y) = 0`, so :math:`w^\top K w` is the squared maximum
    mean discrepancy (the kernel Stein discrepancy) between the weighted points and P.

    Parameters
    ----------
    M
        Preconditioner. ``"identity"`` (default; what the paper uses for burn-in and tempering). ``"hessian"``: inverse
        of minus the Hessian of log p at the mode, taken as the input point with the smallest score; ``fit`` needs
        ``hess``. ``"score_cov"``: inverse covariance of the scores of the half of the points that is nearest to that
        mode. ``"sample_cov"``: covariance of these points. Or a symmetric positive definite array ``(d, d)``.
    lengthscale
        :math:`\ell`, in the units of :math:`r`; ``"median"`` (default) takes the median of :math:`r` over the pairs of
        at most 1000 equally spaced points.
    n_jobs
        Threads for building the matrix and for streamed greedy selection. The default of 1 suits worker processes.

    Attributes
    ----------
    n, d : int
        Number of points and of coordinates, after ``fit``.
    M_ : ndarray (d, d)
        The preconditioner.
    lengthscale_ : float
        The length scale.
    free : bool
        Whether this is the gradient-free form (``fit`` got a ``log_ratio``).
    stored : bool
        Whether the matrix is held in memory (8 n^2 bytes, see :meth:`store`); otherwise rows are evaluated anew when
        they are needed, in O(n d) memory, with the same bits.

    Notes
    -----
    With ``M="identity"`` and ``lengthscale="median"`` this is the kernel of the PyPI package *stein-thinning* with
    ``preconditioner="med", standardize=False``. The median leaves out the zero distance of a point to itself, as that
    package does; the code of the paper's authors leaves it in, which moves the median by less than one rank in 500.

    Whitening: with :math:`M^{-1} = LL^\top`, :math:`z = L^\top x / \ell` and :math:`g = \ell L^{-1} s` the kernel is
    :math:`\ell^{-2}` times that of M = I, length scale 1, at (z, g); only this one is compiled.

    Source: Li, Dwivedi, Mackey, "Debiased Distribution Compression", ICML 2024, sections 2 and 5.
    """

    n: int
    d: int
    M_: Float
    lengthscale_: float
    free: bool

    def __init__(
        self, M: Metric | ArrayLike = "identity", lengthscale: Literal["median"] | float = "median", *, n_jobs: int = 1
    ) -> None:
        self.M = M
        self.lengthscale = lengthscale
        self.n_jobs = n_jobs

    def fit(
        self,
        X: ArrayLike,
        scores: ArrayLike,
        hess: ArrayLike | Callable[[Float], ArrayLike] | None = None,
        log_ratio: ArrayLike | None = None,
    ) -> Self:
        """Choose M and the length scale for these points.

        Parameters
        ----------
        X : array (n, d)
            Points. Computation is in float64 whatever the dtype.
        scores : array (n, d)
            Gradient of the log density of P at the points, in the same coordinates.
        hess : array (d, d) or callable
            Hessian of log p at the mode, or a function of a point ``(d,)`` that gives it. For ``M="hessian"`` only.
        log_ratio : array (n,)
            ``log q(x_i) - log p(x_i)`` up to a constant, for gradient-free use: ``scores`` are then those of a
            tractable proxy q, and the kernel is ``(q/p)(x) k_q(x, y) (q/p)(y)``, which still has mean zero under P.

        Raises
        ------
        ValueError
            An argument that cannot be used, named; all points equal; a singular or indefinite preconditioner.
        """
        points, gradients = check_points(X, scores)
        self.n, self.d = points.shape
        self.M_ = self._metric(points, gradients, hess)
        precision = np.linalg.inv(self.M_)
        try:
            root = cholesky((precision + precision.T) / 2, lower=True)
        except np.linalg.LinAlgError:
            raise ValueError(f"M={self._name()} is not positive definite for these points; try M='identity'") from None
        white = points if self._name() == "'identity'" else points @ root
        self.lengthscale_ = self._length(white)
        turned: Float = (
            gradients if white is points else np.asarray(solve_triangular(root, gradients.T, lower=True).T, np.float64)
        )
        factor = np.full(self.n, 1.0 / self.lengthscale_)
        self.free = log_ratio is not None
        if log_ratio is not None:
            log_factor = as_float(log_ratio, "log_ratio")
            if log_factor.shape != (self.n,):
                raise ValueError(f"log_ratio must have shape ({self.n},), got {log_factor.shape}")
            factor *= np.exp(log_factor - log_factor.min())
        self._Z = np.ascontiguousarray(white.T / self.lengthscale_)
        self._G = np.ascontiguousarray(turned.T * self.lengthscale_)
        self._c = factor
        self._K = _EMPTY
        self._diagonal = factor * factor * ((self._G * self._G).sum(axis=0) + self.d)
        if not np.isfinite(self._diagonal).all():
            raise ValueError("scores (or log_ratio) are so large that the kernel overflows float64; rescale X")
        self._X, self._scores = points, gradients
        return self

    def _name(self) -> str:
        return repr(self.M) if isinstance(self.M, str) else "array"

    def _metric(self, points: Float, scores: Float, hess: Any) -> Float:
        d = points.shape[1]
        if not isinstance(self.M, str):
            M = as_float(self.M, "M")
            if M.shape != (d, d) or not np.allclose(M, M.T, rtol=1e-8, atol=0):
                raise ValueError(f"M must be a symmetric array of shape ({d}, {d}), got shape {M.shape}")
            if np.linalg.eigvalsh(M)[0] <= 0:
                raise ValueError("M must be positive definite")
            return M
        if self.M not in _METRICS:
            raise ValueError(f"M must be one of {', '.join(map(repr, _METRICS))} or an array, got {self.M!r}")
        if self.M == "identity":
            return np.eye(d)
        mode = points[int(np.argmin(np.linalg.norm(scores, axis=1)))]
        if self.M == "hessian":
            if hess is None:
                raise ValueError("hess is needed for M='hessian': the Hessian of log p, as an array or a function")
            H = as_float(hess(mode) if callable(hess) else hess, "hess")
            if H.shape != (d, d):
                raise ValueError(f"hess must give an array of shape ({d}, {d}), got {H.shape}")
            if np.linalg.eigvalsh((H + H.T) / 2)[-1] >= 0:
                raise ValueError("hess must be negative definite at the mode, the input point with the smallest score")
            M = np.linalg.inv(-(H + H.T) / 2).astype(np.float64)
        else:
            distance = np.linalg.norm(points - mode, axis=1)
            near = distance <= np.median(distance)
            covariance = np.atleast_2d(np.cov((scores if self.M == "score_cov" else points)[near], rowvar=False))
            if not np.isfinite(covariance).all() or np.linalg.cond(covariance) > 1e14:
                raise ValueError(f"M={self.M!r}: the covariance over the points near the mode is singular")
            M = np.linalg.inv(covariance) if self.M == "score_cov" else covariance
        return (M + M.T) / 2

    def _length(self, white: Float) -> float:
        if isinstance(self.lengthscale, str):
            if self.lengthscale != "median":
                raise ValueError(f"lengthscale must be 'median' or a positive number, got {self.lengthscale!r}")
            n = white.shape[0]
            distances = pdist(white[np.linspace(0, n - 1, 1000, dtype=int)] if n > 1000 else white)
            median = float(np.median(distances))
            if median == 0:  # a sticky chain: more than half of the pairs are repeats of one state
                positive = distances[distances > 0]
                if positive.size == 0:
                    raise ValueError("X: all points are equal (median distance 0), so there is nothing to choose from")
                median = float(np.median(positive))
            return median
        length = float(self.lengthscale)
        if not (np.isfinite(length) and length > 0):
            raise ValueError(f"lengthscale must be 'median' or a positive number, got {self.lengthscale!r}")
        if (white == white[0]).all():
            raise ValueError("X: all points are equal, so there is nothing to choose from")
        return length

    @property
    def stored(self) -> bool:
        """Whether the matrix is held in memory."""
        return self._K.shape[0] > 0

    def store(self) -> Self:
        """Compute the matrix once and keep it: 8 n^2 bytes, against one evaluation of a row at each use."""
        if not self.stored:
            self._K = self.matrix()
        return self

    def fitted_to(self, points: Float, scores: Float) -> bool:
        """Whether :meth:`fit` saw exactly these arrays."""
        known = getattr(self, "_X", None)
        if known is None or known.shape != points.shape:
            return False
        return (known is points or np.array_equal(known, points)) and (
            self._scores is scores or np.array_equal(self._scores, scores)
        )

    def copy(self) -> SteinKernel:
        """Give a shallow copy: to store or fit it leaves this one as it is."""
        return copy.copy(self)

    def diag(self) -> Float:
        r"""Give :math:`k_P(x_i, x_i) = s_i^\top M s_i + d/\ell^2`, shape ``(n,)``."""
        return self._diagonal.copy()

    def row(self, i: int) -> Float:
        """Give ``k(x_i, x_j)`` over all j, shape ``(n,)``."""
        return self.matrix(np.array([range(self.n)[i]]))[0]

    def matrix(self, I: ArrayLike | None = None, J: ArrayLike | None = None) -> Float:  # noqa: E741
        """Give the kernel between the points I and J (all points where left out), shape ``(len(I), len(J))``."""
        rows = None if I is None else np.asarray(I, dtype=np.int64)
        columns = None if J is None else np.asarray(J, dtype=np.int64)
        if self.stored:
            if rows is None:
                return self._K[:, columns] if columns is not None else self._K.copy()
            return self._K[rows] if columns is None else self._K[np.ix_(rows, columns)]
        left = self._gather(rows)
        right = left if columns is rows else self._gather(columns)
        out = np.empty((left[2].size, right[2].size))
        if self.n_jobs > 1 and out.size > 1 << 20:
            with _threads(self.n_jobs):
                _cores.matrix_parallel(*left, *right, out)
        else:
            _cores.matrix(*left, *right, out)
        return out

    def _gather(self, indices: Index | None) -> tuple[Float, Float, Float]:
        if indices is None:
            return self._Z, self._G, self._c
        return (
            np.ascontiguousarray(self._Z[:, indices]),
            np.ascontiguousarray(self._G[:, indices]),
            self._c[indices],
        )

    def parts(self) -> tuple[Float, Float, Float, Float]:
        """``(K, Z, G, c)`` as the compiled loops take them."""
        return self._K, self._Z, self._G, self._c

    def weighted_rows(self, indices: Index, weights: Float) -> Float:
        """``sum_t weights[t] k(x_indices[t], .)``, shape ``(n,)``, in O(n) memory."""
        return _cores.weighted_rows(*self.parts(), np.asarray(indices, np.int64), np.asarray(weights, float), self.n)


class _threads:
    """Numba's threads limited to a number, for a block of code."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> None:
        import numba

        self.before: int = numba.get_num_threads()
        numba.set_num_threads(min(self.count, self.before))

    def __exit__(self, *_: object) -> None:
        import numba

        numba.set_num_threads(self.before)


class MatrixKernel(SteinKernel):
    """A given mean-zero kernel matrix in the place of a :class:`SteinKernel`: symmetric, positive semidefinite."""

    def __init__(self, K: ArrayLike) -> None:
        super().__init__()
        matrix = np.ascontiguousarray(as_float(K, "kernel"))
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
            raise ValueError(f"kernel must be a SteinKernel or a square matrix, got shape {matrix.shape}")
        scale = float(np.abs(matrix).max())
        if np.abs(matrix - matrix.T).max() > 1e-8 * scale or np.diagonal(matrix).min() < 0:
            raise ValueError("kernel must be a symmetric matrix with a diagonal that is not negative")
        self.n, self.d, self.lengthscale_, self.free = matrix.shape[0], 0, 1.0, False
        self._K, self._diagonal = matrix, np.diagonal(matrix).copy()
        self._Z = self._G = np.empty((1, 0))
        self._c = np.empty(0)


def as_kernel(kernel: SteinKernel | ArrayLike) -> SteinKernel:
    """Give a fitted kernel: the one given, or a square matrix in its place."""
    if isinstance(kernel, SteinKernel):
        if not hasattr(kernel, "n"):
            raise ValueError("kernel has not been fitted: call kernel.fit(X, scores) first")
        return kernel
    return MatrixKernel(kernel)


def check_weights(weights: ArrayLike, n: int, *, negative: bool = False) -> Float:
    """Give weights ``(n,)`` that sum to 1 (to 1e-6), and are not negative unless that is allowed."""
    w = as_float(weights, "weights")
    if w.shape != (n,):
        raise ValueError(f"weights must have shape ({n},), got {w.shape}")
    if not negative and w.min() < 0:
        raise ValueError(f"weights must not be negative, got {w.min():.3g} at index {int(w.argmin())}")
    if abs(w.sum() - 1) > 1e-6:
        raise ValueError(f"weights must sum to 1, got a sum of {w.sum():.9g}")
    return w


def check_count(value: Any, name: str, low: int, high: int | None = None) -> int:
    """Give an integer between ``low`` and ``high``."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} must be {bounds}, got {value}")
    return int(value)


def check_random_state(random_state: int | np.random.Generator | np.random.RandomState | None) -> np.random.Generator:
    """Give a generator; a seed, a generator, a legacy ``RandomState`` or ``None`` for fresh entropy."""
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(0, 2**32, size=4, dtype=np.uint64))
    return np.random.default_rng(random_state)


def ksd(
    X: ArrayLike,
    scores: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    indices: ArrayLike | None = None,
    kernel: SteinKernel | None = None,
) -> float:
    r"""Kernel Stein discrepancy :math:`\sqrt{w^\top K w}` of weighted points from the target P.

    Parameters
    ----------
    X, scores : array (n, d)
        Points, and gradients of the log density of P there.
    weights : array (n,), or (m,) with ``indices``
        Sum to 1; negative values are allowed. Equal weights by default.
    indices : array (m,)
        Rows that the weights belong to; repeats are allowed. All rows by default.
    kernel
        A :class:`SteinKernel`. It is fitted to all of ``X`` unless that has been done. Discrepancies can only be
        compared under one kernel, that is one fit.

    Returns
    -------
    float
        Unitless, at least 0. O(n m) kernel entries, O(n) memory.
    """
    points, gradients = check_points(X, scores)
    fitted = fit_kernel(kernel, points, gradients)
    rows = check_indices(indices, fitted.n)
    w = np.full(rows.size, 1 / rows.size) if weights is None else check_weights(weights, rows.size, negative=True)
    return discrepancy(fitted, rows, w)


def check_indices(indices: ArrayLike | None, n: int) -> Index:
    """Give row numbers of an array of n rows."""
    if indices is None:
        return np.arange(n)
    rows = np.asarray(indices)
    if rows.ndim != 1 or rows.size == 0 or rows.dtype.kind not in "iu":
        raise ValueError(f"indices must be one dimension of integers, got shape {rows.shape} of {rows.dtype}")
    if rows.min() < 0 or rows.max() >= n:
        raise ValueError(f"indices must lie between 0 and {n - 1}, got {rows.min()} to {rows.max()}")
    return rows.astype(np.int64)


def fit_kernel(kernel: SteinKernel | None, points: Float, scores: Float) -> SteinKernel:
    """Give a kernel that is fitted to these points; the caller's own is left as it is."""
    if kernel is None:
        return SteinKernel().fit(points, scores)
    if not isinstance(kernel, SteinKernel):
        raise TypeError(f"kernel must be a SteinKernel, got {type(kernel).__name__}")
    return kernel if kernel.fitted_to(points, scores) else kernel.copy().fit(points, scores)


def discrepancy(kernel: SteinKernel, indices: Index, weights: NDArray[np.float64]) -> float:
    """``sqrt(w'Kw)`` of weights on some points; rounding below zero is clamped."""
    support, inverse = np.unique(indices, return_inverse=True)
    w = np.bincount(inverse, weights=weights, minlength=support.size).astype(np.float64)
    if kernel.stored:
        products = kernel.weighted_rows(support, w)[support]
    else:
        rows = np.arange(support.size)
        products = _cores.weighted_rows(_EMPTY, *kernel._gather(support), rows, w, rows.size)
    return float(np.sqrt(max(0.0, float(w @ products))))
