"""What tells whether embeddings are aligned, spread over the sphere, or collapsed into few directions.

All take NumPy arrays or torch tensors with rows as embeddings, ``(n, d)``, and give plain numbers. All but the ranks
normalise rows first. Errors: ``TypeError`` and ``ValueError`` as for the losses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from assay.representation.dhel.losses import check_number
from assay.representation.dhel.views import check_rows, unit_rows

Rows = Tensor | ArrayLike


def alignment(u: Rows, v: Rows, alpha: float = 2.0) -> float:
    """``mean_i |u_i - v_i|^alpha`` of paired unit rows: 0 is perfect, 2 (for alpha = 2) is chance.

    Wang and Isola, "Understanding contrastive representation learning through alignment and uniformity", ICML 2020.
    """
    alpha = check_number("alpha", alpha)
    a, b = _unit("u", u, least=1), _unit("v", v, least=1)
    if a.shape != b.shape:
        raise ValueError(f"u and v must have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return float(((a - b).square().sum(1) ** (0.5 * alpha)).mean())


def uniformity(z: Rows, t: float = 2.0) -> float:
    """``log mean_{i<j} exp(-t |z_i - z_j|^2)`` of unit rows; lower is more uniform, 0 is full collapse.

    The least that many points can have is the logarithm of :func:`uniform_gaussian_energy`. Computed in blocks.
    Wang and Isola, ICML 2020.
    """
    t = check_number("t", t)
    x = _unit("z", z, least=2)
    n = x.shape[0]
    rows = max(1, (1 << 20) // n)
    sums = []
    for start in range(0, n, rows):
        scores = 2.0 * t * (x[start : start + rows] @ x.T - 1.0)
        scores.diagonal(start).fill_(-torch.inf)
        sums.append(torch.logsumexp(scores.flatten(), 0))
    return float(torch.logsumexp(torch.stack(sums), 0)) - math.log(n * (n - 1))


def wasserstein_uniformity(z: Rows, max_pairs: int = 50_000, seed: int = 0) -> float:
    """Distance W1 between the cosines ``z_i.z_j`` and those of independent uniform points on the sphere; 0 is uniform.

    Two uniform points in ``d`` dimensions have a cosine distributed as ``2 B - 1`` with ``B ~ Beta((d-1)/2, (d-1)/2)``.
    The sorted cosines of the ``K`` pairs are compared with its quantiles at ``(k - 1/2) / K``. A cloud that is one
    point has about 1.

    Parameters
    ----------
    z
        Embeddings ``(n, d)``, ``n >= 2`` and ``d >= 2``.
    max_pairs
        With more pairs than this, so many are drawn at random.
    seed
        Of that draw.

    Notes
    -----
    Koromilas et al., ICML 2024. The authors' code samples the reference numerically for 128 dimensions only.
    """
    from scipy.stats import beta

    if isinstance(max_pairs, bool) or not isinstance(max_pairs, int) or max_pairs < 1:
        raise ValueError(f"max_pairs must be an int of at least 1, got {max_pairs!r}")
    x = _unit("z", z, least=2)
    if (d := x.shape[1]) < 2:
        raise ValueError("z must have at least 2 columns: there is no uniform law of cosines in one dimension")
    cosines = np.sort(_cosines(x, max_pairs, seed))
    levels = (np.arange(cosines.size) + 0.5) / cosines.size
    shape = 0.5 * (d - 1)
    return float(np.abs(cosines - (2.0 * beta.ppf(levels, shape, shape) - 1.0)).mean())


def similarity_variance(z: Rows, max_pairs: int = 50_000, seed: int = 0) -> float:
    """Variance of the cosines ``z_i.z_j``, ``i < j``; ``1/d`` on the uniform law, and not small under collapse alone.

    With more than ``max_pairs`` pairs, so many are drawn with ``seed``.
    """
    return float(np.var(_cosines(_unit("z", z, least=2), max_pairs, seed)))


def effective_rank(z: Rows) -> float:
    """Effective rank of the embeddings as they are, neither normalised nor centred: between 1 and ``min(n, d)``.

    ``exp(-sum p log p)`` with ``p_k = s_k / sum s + 1e-7`` and the singular values ``s``. Garrido et al., "RankMe",
    ICML 2023. It rises with repulsion alone: it is no measure of quality by itself.
    """
    s = torch.linalg.svdvals(_rows("z", z, least=1).double())
    if not float(s.sum()) > 0:
        raise ValueError("z has only zero rows; it has no rank")
    p = s / s.sum() + 1e-7
    return float(torch.exp(-(p * p.log()).sum()))


def numeric_rank(z: Rows, tol: float = 1e-5) -> int:
    """Number of eigenvalues of the covariance matrix that exceed ``tol`` (in squared units of ``z``)."""
    tol = check_number("tol", tol, least=0.0)
    x = _rows("z", z, least=2).double()
    return int((torch.linalg.eigvalsh(torch.cov(x.T).reshape(x.shape[1], x.shape[1])) > tol).sum())


def embedding_report(u: Rows, v: Rows | None = None) -> dict[str, float]:
    """All diagnostics of embeddings, or of two views of the same items, without training anything.

    Parameters
    ----------
    u
        Embeddings ``(n, d)``.
    v
        Those of a second view, if there is one: adds ``alignment`` and ``retrieval``, the share of rows of ``u`` whose
        nearest row of ``v`` is their own partner.

    Returns
    -------
    ``uniformity``, ``wasserstein_uniformity``, ``similarity_variance``, ``effective_rank`` (of unit rows) and
    ``numeric_rank`` of ``u``, and the two of the pair.
    """
    x = _unit("u", u, least=2)
    found = {
        "uniformity": uniformity(x),
        "wasserstein_uniformity": wasserstein_uniformity(x),
        "similarity_variance": similarity_variance(x),
        "effective_rank": effective_rank(x),
        "numeric_rank": float(numeric_rank(x)),
    }
    if v is not None:
        found["alignment"] = alignment(u, v)
        y = _unit("v", v, least=2)
        rows = max(1, (1 << 20) // len(x))
        nearest = torch.cat([(part @ y.T).argmax(1) for part in x.split(rows)])
        found["retrieval"] = float((nearest == torch.arange(len(x), device=nearest.device)).double().mean())
    return found


def _rows(name: str, given: Any, least: int) -> Tensor:
    """Finite floating rows ``(n, d)`` without gradient."""
    if isinstance(given, Tensor):
        x = given.detach()
    else:
        array = np.asarray(given)
        if array.dtype.kind not in "fiu":
            raise TypeError(f"{name} must hold numbers, got {array.dtype}")
        x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32 if array.dtype == np.float32 else np.float64))
    if not x.is_floating_point():
        x = x.double()
    if x.ndim != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} must have shape (n, d), got {tuple(x.shape)}")
    if x.shape[0] < least:
        raise ValueError(f"{name} has {x.shape[0]} row(s); at least {least} are needed")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"{name} holds NaN or infinity")
    return x


def _unit(name: str, given: Any, least: int) -> Tensor:
    x = _rows(name, given, least)
    check_rows(name, x)
    return unit_rows(x)


def _cosines(x: Tensor, most: int, seed: int) -> NDArray[np.float64]:
    """Cosines of all pairs, or of ``most`` random ones."""
    n = x.shape[0]
    if n * (n - 1) // 2 <= most:
        i, j = np.triu_indices(n, 1)
    else:
        rng = np.random.default_rng(seed)
        i, j = rng.integers(n, size=most), rng.integers(n - 1, size=most)
        j = j + (j >= i)
    a, b = (x[torch.from_numpy(k).to(x.device)].double() for k in (i, j))
    cosines: NDArray[np.float64] = (a * b).sum(1).clamp(-1.0, 1.0).cpu().numpy()
    return cosines
