"""The eigenvalue that a step is divided by: exact, or from a few Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

#: Lanczos estimates from below, which makes steps too long; estimates are raised by this.
SAFETY = 1.05


def loss_floor(loss: float) -> float:
    """Smallest curvature to divide by where the loss has this value: ``1e-4 * eps * min(1, |loss|)``.

    It moves with the unit of the loss: with a fixed floor, iterates would change under ``f -> k f``.
    """
    return float(np.finfo(np.float64).eps) * min(1.0, abs(loss)) * 1e-4 or 1e-300


def guarded_eigenvalue(smallest: float, largest: float, *, guard: bool = True, floor: float = 1e-12) -> float:
    """Curvature to divide by, from the two ends of the spectrum of the Hessian.

    ``largest`` if it exceeds ``1e-3 * max(|smallest|, |largest|)``, else that spectral norm: where the loss is concave
    along all directions, the plain rule would walk uphill. At least ``floor``. Without ``guard`` it is ``largest``,
    kept at least ``floor`` away from zero. The guard is ours.

    Raises
    ------
    FloatingPointError
        An eigenvalue is not finite; or both are zero: the loss is linear there, and no step length follows from it.
    """
    if not np.isfinite(smallest) or not np.isfinite(largest):
        raise FloatingPointError(f"the Hessian has the non-finite eigenvalues {smallest} and {largest}")
    norm = max(abs(smallest), abs(largest))
    if norm == 0:
        raise FloatingPointError("the Hessian is zero where the gradient is not: a linear loss gives no step length")
    if not guard:
        return float(largest if abs(largest) >= floor else np.copysign(floor, largest))
    return float(max(largest if largest > 1e-3 * norm else norm, floor))


def lanczos_extremes(hvp: Callable[[Any], Any], start: Any, steps: int) -> tuple[float, float, Any]:
    """Smallest and largest Ritz value after ``steps`` Hessian-vector products, and the vector of the largest.

    Krylov spaces do not change when a multiple of the identity is added, so no shift is needed to find the
    algebraically largest eigenvalue. Each vector is orthogonalised against all earlier ones (they are few).

    Parameters
    ----------
    hvp
        ``v -> H v``, vectors of shape ``(d,)``: NumPy arrays, or torch tensors of any device and floating dtype.
    start
        First vector, not zero: the last eigenvector, or noise.
    steps
        Products at most; fewer if the space is exhausted.

    Raises
    ------
    ValueError
        ``start`` is zero or not finite.
    FloatingPointError
        A product is not finite.
    """
    norm = _norm(start)
    if not np.isfinite(norm) or norm == 0:
        raise ValueError(f"start must be finite and not zero, got a vector of norm {norm}")
    basis, images = [start / norm], []
    for _ in range(min(steps, len(start))):
        image = hvp(basis[-1])
        size = _norm(image)
        if not np.isfinite(size):
            raise FloatingPointError("a Hessian-vector product is not finite")
        images.append(image)
        rest = image
        for _ in range(2):  # twice is enough
            for b in basis:
                rest = rest - (b @ rest) * b
        left = _norm(rest)
        # What is left of a space that is exhausted is rounding error.
        if left <= 100 * _eps(image) * size:
            break
        basis.append(rest / left)
    small = np.array([[float(b @ image) for image in images] for b in basis[: len(images)]])
    values, vectors = np.linalg.eigh((small + small.T) / 2)
    vector = sum(float(c) * b for c, b in zip(vectors[:, -1], basis))
    return float(values[0]), float(values[-1]), vector


def _norm(v: Any) -> float:
    return float(v @ v) ** 0.5


def _eps(v: Any) -> float:
    """Precision of an array's or a tensor's dtype."""
    if isinstance(v, np.ndarray):
        return float(np.finfo(v.dtype).eps)
    import torch

    return torch.finfo(v.dtype).eps
