"""Solvers of the NormGD claim: each runs until the fit is at the radius, and counts evaluations of the loss.

All of them see the loss through one :class:`Watch`, which ends them, so that none does work that another is spared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from assay.workloads.singular import Singular, pilot

#: Evaluations after which a run counts as failed.
CAP = 5000
#: Where the truth is unknown, a run ends when the loss has fallen to this share of its way to the minimum.
GAP = 1e-6


class Hit(Exception):
    """Ends a solver at the radius."""


class TorchLoss:
    """A user's torch loss as ``(f, gradient, Hessian)`` of a NumPy vector."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        self.loss = loss

    def __call__(self, x: Any, hessian: bool = True) -> tuple[float, Any, Any]:
        """Loss, gradient and Hessian (``None`` without ``hessian``)."""
        import torch

        at = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        f = self.loss(at)
        (g,) = torch.autograd.grad(f, at, create_graph=hessian)
        H = None
        if hessian:
            rows = [torch.autograd.grad(part, at, retain_graph=True)[0] for part in g] if g.requires_grad else []
            H = torch.stack(rows).numpy() if rows else np.zeros((at.numel(), at.numel()))
        return float(f.detach()), g.detach().numpy(), H

    def fun_jac(self, x: Any) -> tuple[float, Any]:
        """Loss and gradient."""
        f, g, _ = self(x, hessian=False)
        return f, g


def model_of(s: Singular) -> Any:
    """The loss of a fit."""
    from assay.statistics.normgd import PolynomialLink, SymmetricMixture

    if s.loss is not None:
        return TorchLoss(s.loss)
    return PolynomialLink(s.X, s.y, s.power) if s.power else SymmetricMixture(s.X)


def lowest(model: Any, s: Singular) -> Any:
    """SciPy's result of L-BFGS from the common start, run to the end: the maximum-likelihood fit next to it."""
    from scipy.optimize import minimize

    return minimize(model.fun_jac, s.start, jac=True, method="L-BFGS-B", options={"ftol": 1e-16, "gtol": 1e-12})


class Watch:
    """Counts evaluations, and raises :class:`Hit` where ``x`` is within 1.5 radii (before the loss is computed).

    Where the truth is unknown, it is the loss that says so (after it was computed), for every solver alike.
    """

    def __init__(self, model: Any, s: Singular, minimum: float) -> None:
        self.model, self.s, self.count = model, s, 0
        self.known = np.isfinite(s.radius)
        self.target = -np.inf if self.known else minimum + GAP * (model.fun_jac(s.start)[0] - minimum)

    def __call__(self, x: Any, hessian: bool = True) -> tuple[float, Any, Any]:
        """The loss with derivatives."""
        self.count += 1
        if self.known and self.s.distance(x) <= 1.5 * self.s.radius:
            raise Hit
        if self.count > CAP:
            raise RuntimeError(f"the radius was not reached in {CAP} evaluations")
        found: tuple[float, Any, Any] = self.model(x, hessian=hessian)
        if found[0] <= self.target:
            raise Hit
        return found

    def fun_jac(self, x: Any) -> tuple[float, Any]:
        """The loss with its gradient."""
        f, g, _ = self(x, hessian=False)
        return f, g


Solver = Callable[[Watch, Singular, float], None]


def steps_of(solver: Solver, model: Any, s: Singular, option: float, minimum: float) -> int | None:
    """Evaluations after that of the start until the radius is reached; ``None`` if it never is."""
    watch = Watch(model, s, minimum)
    try:
        solver(watch, s, option)
    except Hit:
        return watch.count - 1
    except (FloatingPointError, RuntimeError, np.linalg.LinAlgError):
        return None
    return None


def normgd(watch: Watch, s: Singular, eta: float) -> None:
    """NormGD with the exact largest eigenvalue."""
    from assay.statistics.normgd import normgd_minimize

    normgd_minimize(watch, s.start, jac=True, hess=True, eta=eta, tol=0, maxiter=CAP)


def lbfgs(watch: Watch, s: Singular, _: float) -> None:
    """SciPy's L-BFGS-B, which stops only at the radius."""
    from scipy.optimize import minimize

    minimize(watch.fun_jac, s.start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 0})


def descent(watch: Watch, s: Singular, step: float) -> None:
    """Gradient descent with a fixed step."""
    x = s.start
    while True:
        x = x - step * watch.fun_jac(x)[1]
        if not np.isfinite(x).all() or np.abs(x).max() > 1e3:
            raise FloatingPointError("gradient descent diverged")


def newton(watch: Watch, s: Singular, modified: float) -> None:
    """Newton's method; with ``modified`` the moduli of the eigenvalues, so that saddles do not attract it."""
    x = s.start
    while watch.count < 300:
        _, g, H = watch(x)
        if modified:
            values, vectors = np.linalg.eigh(H)
            x = x - vectors @ ((vectors.T @ g) / np.maximum(np.abs(values), 1e-12))
        else:
            x = x - np.linalg.solve(H, g)


def polyak_oracle(watch: Watch, s: Singular, minimum: float) -> None:
    """Polyak's step with the true minimum of the sample's loss, which nobody has."""
    x = s.start
    while True:
        f, g = watch.fun_jac(x)
        x = x - (max(f - minimum, 0.0) / (g @ g)) * g
        if f <= minimum:
            raise RuntimeError("the minimum lies outside the radius")


def polyak(watch: Watch, s: Singular, _: float) -> None:
    """Polyak's step with a target a gap below the best loss seen.

    The gap halves after a step without progress, and doubles after one that makes up half of it.
    """
    x, best = s.start, np.inf
    gap = None
    while True:
        f, g = watch.fun_jac(x)
        if gap is None:
            gap = abs(f) / 2
        elif f >= best:
            gap /= 2
        elif f <= best - gap / 2:
            gap *= 2
        best = min(best, f)
        x = x - ((f - best + gap) / (g @ g)) * g


def adam(watch: Watch, s: Singular, rate: float) -> None:
    """Adam of torch, with its usual moments."""
    import torch

    x = torch.tensor(s.start, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=rate)
    while True:
        x.grad = torch.from_numpy(np.asarray(watch.fun_jac(x.detach().numpy().copy())[1]))
        optimizer.step()


def trust_exact(watch: Watch, s: Singular, _: float) -> None:
    """SciPy's trust region with Hessians; counted are points at which the loss is computed."""
    from scipy.optimize import minimize

    def hess(x: Any) -> Any:
        return watch.model(x)[2]

    minimize(watch.fun_jac, s.start, jac=True, hess=hess, method="trust-exact", options={"gtol": 0, "maxiter": CAP})


def largest_step(s: Singular, *, overshoot: bool = False) -> float:
    """Largest step, on a grid of ratio 2^(1/4), that is stable on the pilot sample.

    Stable: in each of 100 steps the loss falls and ``step * lambda_max(H) <= 2``, the limit of linear stability. With
    ``overshoot`` the loss alone decides: larger steps then jump past the optimum, and where they land hangs on the
    norm of the start. The search begins at 16 times the inverse curvature at the start and goes down.
    """
    trial = pilot(s)
    model = model_of(trial)
    f0, _, H = model(trial.start)
    step = 16 / float(np.abs(np.linalg.eigvalsh(H)).max())
    for _ in range(100):
        if _is_stable(model, trial.start, f0, step, overshoot):
            return step
        step /= 2**0.25
    raise RuntimeError("no stable step was found on the pilot sample")


def _is_stable(model: Any, x: Any, f: float, step: float, overshoot: bool) -> bool:
    for _ in range(100):
        with np.errstate(all="ignore"):
            _, g, H = model(x, hessian=not overshoot)
            if not overshoot and step * np.linalg.eigvalsh(H)[-1] > 2:
                return False
            x = x - step * g
            after = model.fun_jac(x)[0]
        if not after <= f + 1e-12 * abs(f):
            return False
        f = after
    return True


def best_rate(s: Singular) -> float:
    """Adam's learning rate of 0.3, 0.1, 0.03 and 0.01 that needs the fewest steps on the pilot sample."""
    trial = pilot(s)
    model = model_of(trial)
    minimum = float(lowest(model, trial).fun)
    counts = {r: steps_of(adam, model, trial, r, minimum) or CAP for r in (0.3, 0.1, 0.03, 0.01)}
    return min(counts, key=lambda r: counts[r])


def stable_descent(model: Any, s: Singular, step: float, minimum: float) -> tuple[int | None, float]:
    """Steps of gradient descent, and the step: halved where it diverges on this sample, at no cost to the count."""
    for _ in range(8):
        count = steps_of(descent, model, s, step, minimum)
        if count is not None:
            return count, step
        step /= 2
    return None, step


def final_descent(s: Singular, step: float) -> tuple[Any, int]:
    """Where gradient descent ends (gradient 1e-9, or 2e7 steps; 3000 where each reads all rows), and its steps.

    Millions of steps are needed near a singular optimum. For p = 2 and 3 in few dimensions the loss is a polynomial
    whose coefficients are means over the rows: the same gradient, at a cost without n, in compiled code.
    """
    from assay.statistics.normgd import PolynomialLink

    if s.X.shape[1] <= {2: 12, 3: 6}.get(s.power, 0):
        x = s.start.copy()
        model = PolynomialLink(s.X, s.y, s.power, sufficient_statistics=True)
        return x, _polynomial_descent()(*model.polynomial(), x, step, 1e-9, 20_000_000)
    x, loss, most = s.start, model_of(s), 3000
    for t in range(1, most + 1):
        gradient = loss.fun_jac(x)[1]
        if np.linalg.norm(gradient) <= 1e-9:
            return x, t
        x = x - step * gradient
    return x, most


@cache
def _polynomial_descent() -> Callable[..., int]:
    """Compiled gradient descent on ``c'Mc / 2 - b'c`` with ``c_a = ways_a * prod_j x_j^powers_aj``; changes ``x``."""
    import numba

    def descend(M: Any, b: Any, powers: Any, ways: Any, x: Any, step: float, least: float, most: int) -> int:
        D, d = powers.shape
        top = powers.max()
        pw, c, g = np.ones((d, top + 1)), np.empty(D), np.empty(d)
        for t in range(1, most + 1):
            for j in range(d):
                for k in range(1, top + 1):
                    pw[j, k] = pw[j, k - 1] * x[j]
            for a in range(D):
                c[a] = ways[a]
                for j in range(d):
                    c[a] *= pw[j, powers[a, j]]
            g[:] = 0.0
            for a in range(D):
                rest = -b[a]
                for k in range(D):
                    rest += M[a, k] * c[k]
                for j in range(d):
                    if powers[a, j] > 0:
                        slope = rest * ways[a] * powers[a, j]
                        for k in range(d):
                            slope *= pw[k, powers[a, k] - (1 if k == j else 0)]
                        g[j] += slope
            size = 0.0
            for j in range(d):
                x[j] -= step * g[j]
                size += g[j] * g[j]
            if size <= least * least:
                return t
        return most

    compiled: Callable[..., int] = numba.njit(fastmath={"contract", "reassoc"})(descend)
    return compiled
