"""Losses of the two model families with gradient and Hessian from one chunked pass over the data.

The polynomial link and the over-specified mixture are the examples of the paper; radii are those of its theory.
"""

from __future__ import annotations

from itertools import combinations_with_replacement
from math import factorial

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]
ROWS = 8192  # rows of a chunk: with d = 4, chunk and temporaries fit the second-level cache


def _data(X: ArrayLike) -> Float:
    """X as (n, d), stored by columns: products along rows of a chunk then have long inner loops, also for small d."""
    X = np.asfortranarray(X, dtype=np.float64)
    if X.ndim != 2 or 0 in X.shape or not np.isfinite(X).all():
        raise ValueError(f"X must be a finite matrix (n, d) that is not empty, got shape {X.shape}")
    return X


class PolynomialLink:
    """``f(theta) = mean(((x'theta)^p - y)^2) / 2``; ``model(theta)`` gives ``(f, gradient, Hessian)``.

    Parameters
    ----------
    X, y
        Shapes ``(n, d)`` and ``(n,)``.
    power
        ``p``, an integer of at least 2.
    sufficient_statistics
        Replace the data by means of products of monomials of degree p, once; each evaluation then costs
        ``O(D^2 + D d^2)`` with ``D = binom(d + p - 1, p)``, independent of n. Power 2 up to d = 12, 3 up to d = 6.

    Raises
    ------
    ValueError
        ``power`` is no such integer, X is not a finite matrix, y does not fit it, or the statistics would be too many.

    Notes
    -----
    With ``z = x'theta`` and ``r = z^p - y``: gradient ``mean(p r z^(p-1) x)``, Hessian
    ``mean((p^2 z^(2p-2) + p (p-1) r z^(p-2)) x x')``. ``theta = 0`` is stationary. Far starts overflow in ``z^(2p)``:
    scale X and y to about 1. One of the paper's two examples; X of one chunk stays in the cache.
    """

    def __init__(self, X: ArrayLike, y: ArrayLike, power: int = 2, *, sufficient_statistics: bool = False) -> None:
        if isinstance(power, bool) or not isinstance(power, (int, np.integer)) or power < 2:
            raise ValueError(f"power must be an integer of at least 2, got {power!r}")
        self.X, self.y, self.power = _data(X), np.ascontiguousarray(y, dtype=np.float64), int(power)
        if self.y.shape != self.X.shape[:1] or not np.isfinite(self.y).all():
            raise ValueError(f"y must be finite with shape {self.X.shape[:1]}, got shape {self.y.shape}")
        self._scale = float(np.sqrt((self.X**2).mean())) or 1.0
        self._statistics: tuple[Float, Float, float, NDArray[np.int64], Float] | None = None
        if sufficient_statistics:
            d = self.X.shape[1]
            if d > {2: 12, 3: 6}.get(self.power, 0):
                raise ValueError(f"sufficient_statistics need power 2 and d <= 12 or 3 and d <= 6, got {power} and {d}")
            self._statistics = self._compress()

    def __call__(self, theta: Float, hessian: bool = True) -> tuple[float, Float, Float | None]:
        """Loss, gradient ``(d,)`` and Hessian ``(d, d)`` (``None`` without ``hessian``)."""
        if self._statistics is not None:
            return self._from_statistics(theta, hessian)
        n, d = self.X.shape
        p, loss, grad, H = self.power, 0.0, np.zeros(d), np.zeros((d, d))
        for i in range(0, n, ROWS):
            x = self.X[i : i + ROWS]
            z = x @ theta
            low = None if p == 2 else z if p == 3 else z ** (p - 2)
            slope = z if low is None else low * z
            rest = slope * z - self.y[i : i + ROWS]
            loss += float(rest @ rest)
            grad += (rest * slope) @ x
            if hessian:
                weight = p * p * (slope * slope)
                weight += (p * (p - 1)) * (rest if low is None else rest * low)
                H += (x.T * weight) @ x
        return loss / (2 * n), grad * (p / n), H / n if hessian else None

    def fun_jac(self, theta: Float) -> tuple[float, Float]:
        """Loss and gradient in one pass, for ``scipy.optimize.minimize(jac=True)``."""
        f, g, _ = self(theta, hessian=False)
        return f, g

    def hessp(self, theta: Float, v: Float) -> Float:
        """The Hessian times ``v``, shape ``(d,)``, in ``O(n d)`` operations."""
        if self._statistics is not None:
            H = self._from_statistics(theta, True)[2]
            assert H is not None
            return H @ v
        n, p, out = len(self.X), self.power, np.zeros(theta.size)
        for i in range(0, n, ROWS):
            x = self.X[i : i + ROWS]
            z = x @ theta
            rest = z**p - self.y[i : i + ROWS]
            out += ((p * p * z ** (2 * p - 2) + p * (p - 1) * rest * z ** (p - 2)) * (x @ v)) @ x
        return out / n

    def radius(self, theta: Float, loss: float) -> float:
        """Error to expect of a fit at ``theta`` with this loss, up to a constant, in units of ``theta``.

        With ``e = sqrt(2 loss) * sqrt(d/n)`` and the root mean square ``a`` of X it is ``e^(1/p) / a`` near 0, where
        the fit is singular, and ``e / (a^p |theta|^(p-1))`` where that is smaller: the radius of a regular fit.
        """
        n, d = self.X.shape
        noise, norm = float(np.sqrt(max(2 * loss, 0.0) * d / n)), self._scale * float(np.linalg.norm(theta))
        singular = noise ** (1 / self.power)
        return (singular if norm <= singular else noise / norm ** (self.power - 1)) / self._scale

    def polynomial(self) -> tuple[Float, Float, NDArray[np.int64], Float]:
        """The loss as a polynomial: ``M, b, powers, ways`` of ``c'Mc / 2 - b'c``, but for a constant.

        ``c_a = ways_a * prod_j theta_j^powers_aj`` are the D monomials of degree p. Needs ``sufficient_statistics``.
        """
        if self._statistics is None:
            raise ValueError("polynomial() needs sufficient_statistics=True")
        M, b, _, powers, ways = self._statistics
        return M, b, powers, ways

    def _compress(self) -> tuple[Float, Float, float, NDArray[np.int64], Float]:
        n, d = self.X.shape
        index = list(combinations_with_replacement(range(d), self.power))
        powers = np.array([np.bincount(a, minlength=d) for a in index])
        ways = np.array([factorial(self.power) / np.prod([factorial(int(k)) for k in a]) for a in powers])
        M, b = np.zeros((len(index), len(index))), np.zeros(len(index))
        for i in range(0, n, ROWS):
            x = self.X[i : i + ROWS]
            features = np.stack([np.prod(x[:, list(a)], axis=1) for a in index], axis=1)
            M += features.T @ features
            b += features.T @ self.y[i : i + ROWS]
        return M / n, b / n, float(self.y @ self.y) / n, powers, ways

    def _from_statistics(self, theta: Float, hessian: bool) -> tuple[float, Float, Float | None]:
        assert self._statistics is not None
        M, b, yy, powers, ways = self._statistics
        d = theta.size

        def monomials(lower: tuple[int, ...]) -> Float:
            """Derivative of all monomials along the given coordinates."""
            left, factor = powers.copy(), ways.copy()
            for j in lower:
                factor = factor * left[:, j]
                left[:, j] = np.maximum(left[:, j] - 1, 0)
            return factor * np.prod(theta**left, axis=1)

        c = monomials(())
        J = np.stack([monomials((j,)) for j in range(d)], axis=1)
        Mc = M @ c
        rest = Mc - b
        H = None
        if hessian:
            H = J.T @ M @ J
            for j in range(d):
                for k in range(j + 1):
                    more = rest @ monomials((j, k))
                    H[j, k] += more
                    if j != k:
                        H[k, j] += more
        return float(c @ Mc - 2 * (b @ c) + yy) / 2, J.T @ rest, H


class SymmetricMixture:
    """Negative mean log likelihood of ``N(theta, s^2 I)/2 + N(-theta, s^2 I)/2``, without constants.

    ``f = |theta|^2 / (2 s^2) - mean(log cosh(x'theta / s^2))``; ``model(theta)`` gives ``(f, gradient, Hessian)``. A
    step of EM is a step of gradient descent of size ``s^2``. ``theta = 0`` is always stationary.

    Parameters
    ----------
    X
        Shape ``(n, d)``, finite, centred.
    scale
        ``s``, positive, in units of X. Default 1.

    Raises
    ------
    ValueError
        ``scale`` is not positive, or X is not a finite matrix.
    """

    def __init__(self, X: ArrayLike, scale: float = 1.0) -> None:
        if not (np.isfinite(scale) and scale > 0):
            raise ValueError(f"scale must be positive, got {scale}")
        self.X, self.scale = _data(X), float(scale)

    def __call__(self, theta: Float, hessian: bool = True) -> tuple[float, Float, Float | None]:
        """Loss, gradient ``(d,)`` and Hessian ``(d, d)`` (``None`` without ``hessian``)."""
        n, d = self.X.shape
        v, loss, mean, gram = self.scale**2, 0.0, np.zeros(d), np.zeros((d, d))
        for i in range(0, n, ROWS):
            x = self.X[i : i + ROWS]
            z = (x @ theta) / v
            t = np.tanh(z)
            a = np.abs(z)
            loss += float((a + np.log1p(np.exp(-2 * a))).sum())
            mean += t @ x
            if hessian:
                gram += (x.T * (1 - t * t)) @ x
        f = float(theta @ theta) / (2 * v) - loss / n + np.log(2.0)
        return f, (theta - mean / n) / v, np.eye(d) / v - gram / (n * v * v) if hessian else None

    def fun_jac(self, theta: Float) -> tuple[float, Float]:
        """Loss and gradient in one pass."""
        f, g, _ = self(theta, hessian=False)
        return f, g

    def hessp(self, theta: Float, v: Float) -> Float:
        """The Hessian times ``v``, shape ``(d,)``, in ``O(n d)`` operations."""
        n, s2, out = len(self.X), self.scale**2, np.zeros(theta.size)
        for i in range(0, n, ROWS):
            x = self.X[i : i + ROWS]
            t = np.tanh((x @ theta) / s2)
            out += ((1 - t * t) * (x @ v)) @ x
        return v / s2 - out / (n * s2 * s2)

    def radius(self, theta: Float, loss: float = 0.0) -> float:
        """Error to expect of a fit at ``theta``, up to a constant, in units of ``theta``; ``loss`` is not used.

        ``s (d/n)^(1/4)`` near 0, where the fit is singular; ``s sqrt(d/n) max(1, s / |theta|)`` where that is smaller.
        """
        n, d = self.X.shape
        noise, norm = float(np.sqrt(d / n)), float(np.linalg.norm(theta)) / self.scale
        return self.scale * min(noise**0.5, noise * max(1.0, 1 / norm) if norm else np.inf)

    def em(self, theta: Float) -> Float:
        """One step of expectation maximisation: ``mean(tanh(x'theta / s^2) x)``."""
        return theta - self.scale**2 * self(theta, hessian=False)[1]
