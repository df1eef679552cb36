"""Regularised kernel machines with a given kernel matrix: squared error, hinge, epsilon-insensitive, pinball, logistic.

All minimise ``sum_i w_i l(y_i, f_i) / sum_i w_i + lam |f|^2`` over ``f = G a`` (plus an unpenalised offset b).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import ArrayLike
from scipy.linalg import cho_factor, cho_solve, eigh
from sklearn.exceptions import ConvergenceWarning

from assay.statistics.distribution_kernels.bags import Array, check_positive

_OPTIONS: Any = {"cache": True, "nogil": True, "error_model": "numpy"}


def loss_values(loss: str, y: Array, f: Array, *, quantile: float = 0.5, epsilon: float = 0.1) -> Array:
    """``l(y, f)``; y is -1 or 1 for hinge and logistic."""
    if loss == "square":
        return (y - f) ** 2
    if loss == "hinge":
        return np.maximum(0.0, 1.0 - y * f)
    if loss == "logistic":
        return np.logaddexp(0.0, -y * f)
    if loss == "pinball":
        return np.maximum(quantile * (y - f), (quantile - 1.0) * (y - f))
    return np.maximum(0.0, np.abs(y - f) - epsilon)


# --- squared error ---------------------------------------------------------------------------------------------------


def ridge_path(G: Array, y: Array, lams: Sequence[float], weights: Array, offset: bool) -> list[tuple[Array, float]]:
    """Coefficients and offset for each lam.

    ``a = H^-1 (y - b)`` with ``H = G + lam (sum w) diag(1/w)``, and ``b = 1'H^-1 y / 1'H^-1 1``, which sets the sum of
    a to zero as the optimum in b asks for. One eigendecomposition serves all lams; a single one takes Cholesky's.
    """
    root = np.sqrt(weights)
    scaled = G * root[:, None] * root
    total = float(weights.sum())
    targets = np.column_stack([y, np.ones_like(y)]) * root[:, None]
    if len(lams) > 1:
        values, vectors = eigh(scaled)
        rotated = vectors.T @ targets
    out = []
    for lam in lams:
        if len(lams) > 1:
            solved = vectors @ (rotated / (np.maximum(values, 0.0) + lam * total)[:, None])
        else:
            scaled[np.diag_indices_from(scaled)] += lam * total
            solved = cho_solve(cho_factor(scaled, lower=True, overwrite_a=True), targets)
        solved *= root[:, None]
        b = float(solved[:, 0].sum() / solved[:, 1].sum()) if offset else 0.0
        out.append((solved[:, 0] - b * solved[:, 1], b))
    return out


def loo_residuals(G: ArrayLike, y: ArrayLike, lam: float, *, fit_offset: bool = False) -> Array:
    """Leave-one-out residuals of kernel ridge regression without refitting.

    ``e_i = a_i / (C^-1)_ii`` with C the matrix of the linear system: ``G + lam N I``, bordered by ones with an offset.
    Exactly what N fits without one row each give, whose penalty ``lam N`` stays the same (the row is taken out of the
    sum, and the factor 1/N is kept).

    Parameters
    ----------
    G
        Kernel matrix (N, N).
    y
        Targets (N,).
    lam
        Penalty > 0.
    fit_offset
        With an unpenalised offset.

    Returns
    -------
    Array (N,): ``y_i - f^(-i)(x_i)``.
    """
    gram, targets = np.asarray(G, np.float64), np.asarray(y, np.float64)
    n = len(targets)
    if gram.shape != (n, n) or targets.ndim != 1:
        raise ValueError(f"G must be (N, N) and y (N,), got {gram.shape} and {targets.shape}")
    if not (np.isfinite(gram).all() and np.isfinite(targets).all()):
        raise ValueError("G and y must be finite")
    check_positive("lam", lam)
    system = gram + lam * n * np.eye(n)
    if fit_offset:
        system = np.block([[system, np.ones((n, 1))], [np.ones((1, n)), np.zeros((1, 1))]])
        targets = np.append(targets, 0.0)
    inverse = np.linalg.inv(system)
    return (inverse @ targets)[:n] / np.diag(inverse)[:n]


# --- hinge, epsilon-insensitive, pinball -----------------------------------------------------------------------------


@njit(**_OPTIONS)
def _box_qp(
    G: Array, lin: Array, row: Any, lo: Array, hi: Array, equality: bool, tol: float, most: int, a: Array, f: Array
) -> tuple[int, float, float]:  # pragma: no cover
    """Minimise ``a'Ga/2 - lin'a`` over ``lo <= a <= hi`` (and, with ``equality``, ``sum a = 0``), in place.

    Variable v belongs to row ``row[v]`` of G (the epsilon-insensitive loss has two a row), and ``f = G a``. With the
    equality, pairs are moved: the one whose gradient is steepest, and the partner with which the objective falls most
    (second-order working sets, as in LIBSVM). Without, the variable with which it falls most is moved to its optimum.
    Gives the steps taken and the largest violation of optimality; and the offset.
    """
    n = len(lin)
    steps = 0
    violation = np.inf
    b = 0.0
    while True:
        if equality:
            best, worst, i = -np.inf, np.inf, -1
            for v in range(n):
                d = lin[v] - f[row[v]]
                if a[v] < hi[v] and d > best:
                    best = d
                    i = v
                if a[v] > lo[v] and d < worst:
                    worst = d
            violation = best - worst
            b = 0.5 * (best + worst)
            if violation <= tol or steps >= most:
                break
            ri = row[i]
            gain, j, step = -1.0, -1, 0.0
            for v in range(n):
                if a[v] > lo[v]:
                    gap = best - (lin[v] - f[row[v]])
                    if gap > 0:
                        rv = row[v]
                        curve = max(G[ri, ri] + G[rv, rv] - 2.0 * G[ri, rv], 1e-12)
                        if gap * gap / curve > gain:
                            gain = gap * gap / curve
                            j = v
                            step = gap / curve
            step = min(step, hi[i] - a[i], a[j] - lo[j])
            # The bound is reached exactly, not up to rounding: variables at bounds must be known as such.
            a[i] = hi[i] if step == hi[i] - a[i] else a[i] + step
            a[j] = lo[j] if step == a[j] - lo[j] else a[j] - step
            rj = row[j]
            for k in range(len(f)):
                f[k] += step * (G[ri, k] - G[rj, k])
        else:
            violation, gain, i, step = 0.0, -1.0, -1, 0.0
            for v in range(n):
                d = lin[v] - f[row[v]]
                if (d > 0 and a[v] < hi[v]) or (d < 0 and a[v] > lo[v]):
                    violation = max(violation, abs(d))
                    curve = max(G[row[v], row[v]], 1e-12)
                    move = min(max(a[v] + d / curve, lo[v]), hi[v]) - a[v]
                    fall = move * (d - 0.5 * curve * move)
                    if fall > gain:
                        gain, i, step = fall, v, move
            if violation <= tol or steps >= most:
                break
            a[i] = min(max(a[i] + step, lo[i]), hi[i])
            ri = row[i]
            for k in range(len(f)):
                f[k] += step * G[ri, k]
        steps += 1
    return steps, violation, b


def box_machine(
    G: Array,
    y: Array,
    loss: str,
    lam: float,
    weights: Array,
    offset: bool,
    *,
    quantile: float = 0.5,
    epsilon: float = 0.1,
    tol: float = 1e-4,
    max_iter: int = 1_000_000,
    start: Array | None = None,
) -> tuple[Array, float, int]:
    """Coefficients, offset and steps for hinge (y = -1 or 1), epsilon-insensitive or pinball loss, by their dual.

    With ``C_i = w_i / (2 lam sum w)``, the dual is ``min a'Ga/2 - y'a`` over a box: for pinball
    ``[(quantile - 1) C_i, quantile C_i]``; for hinge ``[0, C_i]`` times ``y_i``; epsilon-insensitive adds
    ``epsilon |a_i|``, and the box is ``[-C_i, C_i]``. An offset adds ``sum a = 0``.

    ``tol`` is the largest violation of the optimality conditions, in units of y. ``start`` are coefficients of a fit
    with another lam, scaled to this one.
    """
    n = len(y)
    C = weights / (2.0 * lam * weights.sum())
    row = np.arange(n)
    if loss == "epsilon":
        row = np.concatenate([row, row])
        lin = np.concatenate([y - epsilon, y + epsilon])
        lo, hi = np.concatenate([np.zeros(n), -C]), np.concatenate([C, np.zeros(n)])
    elif loss == "pinball":
        lin, lo, hi = y.astype(np.float64), (quantile - 1.0) * C, quantile * C
    else:
        lin, lo, hi = y.astype(np.float64), np.minimum(y * C, 0.0), np.maximum(y * C, 0.0)
    a = np.zeros(len(lin))
    if start is not None:
        begin = np.concatenate([np.maximum(start, 0.0), np.minimum(start, 0.0)]) if loss == "epsilon" else start
        clipped = np.clip(begin, lo, hi)
        # Moving to the bounds by more than rounding would break the sum.
        if not offset or np.abs(clipped - begin).max() <= 1e-12 * C.max():
            a = clipped
    G = np.ascontiguousarray(G)
    f = G @ (a[:n] + a[n:] if loss == "epsilon" else a)
    steps, violation, b = _box_qp(G, lin, row, lo, hi, offset, tol, max_iter, a, f)
    if violation > tol:
        warnings.warn(
            f"{loss}: {max_iter} steps leave a violation of {violation:.1e} > {tol:.1e}; raise max_iter, tol or lam",
            ConvergenceWarning,
            stacklevel=2,
        )
    return (a[:n] + a[n:] if loss == "epsilon" else a), (b if offset else 0.0), steps


# --- logistic, and everything on explicit features -------------------------------------------------------------------


def logistic_machine(
    Z: Array, y: Any, lam: float, weights: Array, offset: bool, tol: float, max_iter: int = 10_000
) -> tuple[Array, Array, int]:
    """Linear logistic regression on features Z (N, r) with ``G = ZZ'``: weights (r, K), offsets (K,) and iterations.

    K is 1 for two classes, else the number of classes (softmax).
    """
    from sklearn.linear_model import LogisticRegression

    C = 1.0 / (2.0 * lam * weights.sum())
    model = LogisticRegression(C=C, fit_intercept=offset, tol=tol, max_iter=max_iter)
    model.fit(Z, y, sample_weight=weights)
    offsets = np.broadcast_to(np.asarray(model.intercept_, np.float64), len(model.coef_))
    return model.coef_.T.copy(), offsets.copy(), int(np.max(model.n_iter_))


def _smooth_abs(r: Array, width: float) -> tuple[Array, Array]:
    """``|r|`` with a parabola where it is below ``width``, and its derivative."""
    size = np.abs(r)
    near = size < width
    return np.where(near, r**2 / (2 * width) + width / 2, size), np.where(near, r / width, np.sign(r))


def linear_machine(
    Z: Array,
    y: Array,
    loss: str,
    lam: float,
    weights: Array,
    offset: bool,
    *,
    quantile: float = 0.5,
    epsilon: float = 0.1,
    width: float = 1e-3,
) -> tuple[Array, float, int]:
    """The machines on explicit features Z (N, r), for more bags than a kernel matrix has room for.

    Squared error by the normal equations; the others by L-BFGS on losses whose corners are rounded over ``width`` times
    the spread of y (1 for hinge), in three steps from a hundred times that.
    """
    share = weights / weights.sum()
    if loss == "square":
        center = share @ Z if offset else np.zeros(Z.shape[1])
        middle = float(share @ y) if offset else 0.0
        away = Z - center
        system = (away * share[:, None]).T @ away
        system[np.diag_indices_from(system)] += lam
        w = cho_solve(cho_factor(system), (away * share[:, None]).T @ (y - middle))
        return w, (middle - float(center @ w) if offset else 0.0), 1
    from scipy.optimize import minimize

    unit = 1.0 if loss == "hinge" else float(np.sqrt(share @ (y - share @ y) ** 2)) or 1.0

    def value(f: Array, rounded: float) -> tuple[Array, Array]:
        if loss == "hinge":
            size, slope = _smooth_abs(1.0 - y * f, rounded)
            return 0.5 * (size + 1.0 - y * f), -0.5 * y * (slope + 1.0)
        r = y - f
        if loss == "pinball":
            size, slope = _smooth_abs(r, rounded)
            return 0.5 * size + (quantile - 0.5) * r, -0.5 * slope - (quantile - 0.5)
        above, up = _smooth_abs(r - epsilon, rounded)
        below, down = _smooth_abs(-r - epsilon, rounded)
        return 0.5 * (above + below) - epsilon, -0.5 * (up - down)

    def objective(wb: Array, rounded: float) -> tuple[float, Array]:
        w, b = wb[:-1], wb[-1]
        each, slope = value(Z @ w + b, rounded)
        slope = slope * share
        return float(share @ each + lam * (w @ w)), np.append(Z.T @ slope + 2 * lam * w, slope.sum() if offset else 0.0)

    wb, steps = np.zeros(Z.shape[1] + 1), 0
    for factor in (100.0, 10.0, 1.0):
        found = minimize(
            objective,
            wb,
            args=(factor * width * unit,),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "maxfun": 4000, "ftol": 1e-11, "gtol": 1e-8 * unit},
        )
        wb, steps = found.x, steps + int(found.nit)
    return wb[:-1], float(wb[-1]), steps
