"""NormGD for functions of a NumPy vector, callable by itself and as ``scipy.optimize.minimize(method=...)``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult, OptimizeWarning

from assay.statistics.normgd.eigenvalue import SAFETY, guarded_eigenvalue, lanczos_extremes, loss_floor

Float = NDArray[np.float64]
#: Largest dimension at which ``eig="auto"`` decomposes the Hessian.
EXACT_UP_TO = 64
_MESSAGES = (
    "gradient at most gtol",
    "step at most xtol * (1 + |x|)",
    "step at most a tenth of the statistical radius",
    "maxiter reached",
    "stopped by the callback",
)
_SMALL_GRADIENT, _SMALL_STEP, _RADIUS, _MAXITER, _CALLBACK = range(5)


def normgd_minimize(
    fun: Callable[..., Any],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    jac: Callable[..., Any] | bool | None = None,
    hess: Callable[..., Any] | bool | None = None,
    hessp: Callable[..., Any] | None = None,
    *,
    eta: float = 0.5,
    eig: Literal["auto", "exact", "power"] = "auto",
    power_iters: int = 3,
    guard: bool = True,
    gtol: float | None = None,
    xtol: float | None = None,
    tol: float | None = None,
    radius: float | Callable[[Float, float], float] | None = None,
    maxiter: int = 500,
    seed: int = 0,
    callback: Callable[..., Any] | None = None,
    bounds: Any = None,
    constraints: Any = (),
    disp: bool = False,
    **unknown: Any,
) -> OptimizeResult:
    """Minimise ``fun`` by ``x <- x - eta / lambda_max(H(x)) * grad(x)``, in float64.

    Also ``scipy.optimize.minimize(fun, x0, method=normgd_minimize, jac=..., options={"eta": 1.0})``.

    Parameters
    ----------
    fun
        ``fun(x, *args) -> float``. With ``jac=True`` it returns ``(f, gradient)``, with ``hess=True`` as well
        ``(f, gradient, Hessian)``: one pass over the data for all three.
    x0
        Start, shape ``(d,)``, not stationary.
    args
        Further arguments of ``fun``, ``jac``, ``hess`` and ``hessp``.
    jac
        Gradient, shape ``(d,)``. Required: differences of ``fun`` are too rough where everything vanishes.
    hess, hessp
        ``hess(x, *args) -> (d, d)`` or ``hessp(x, v, *args) -> (d,)``. Without both, products are central differences
        of gradients.
    eta
        Step in units of the inverse curvature, positive. On ``|x - x*|^q`` a step multiplies the distance by
        ``1 - eta / (q - 1)``, so that values in (0, 2) are stable for every ``q >= 2``; 0.5 is a careful default
        (ours), 1 the fast one.
    eig
        ``"exact"`` decomposes the Hessian, ``"power"`` makes ``power_iters`` Lanczos products (20 at first) that start
        at the last eigenvector, and raises the estimate by 5%; ``"auto"`` is exact where there is a Hessian of at most
        64 rows.
    power_iters
        Products of a step, at least 1. Default 3.
    guard
        Divide by the spectral norm where the largest eigenvalue is not clearly positive, see
        :func:`guarded_eigenvalue`.
    gtol, xtol, tol
        Stop at ``|gradient| <= gtol`` or ``|step| <= xtol * (1 + |x|)``. Each is ``tol`` where it is not given, and
        1e-10 without either.
    radius
        Statistical radius, a number or ``radius(x, f)`` (see ``PolynomialLink.radius``): stop as well at
        ``|step| <= 0.1 * radius``. What lies below is noise of the sample.
    maxiter
        Steps at most. Default 500.
    seed
        Of the noise in the starts of the Lanczos runs.
    callback
        ``callback(x)``, or ``callback(intermediate_result=...)`` with ``x`` and ``fun``, after each step; what returns
        true or raises ``StopIteration`` ends the run.
    bounds, constraints
        Refused.
    disp
        Print the message at the end.

    Returns
    -------
    OptimizeResult
        With ``x, fun, jac, nit, nfev, njev, nhev, success, status, message``, and the histories ``lam_max`` and
        ``step_norms``, one value a step. ``nhev`` counts Hessians and products with them. ``status`` 0, 1 and 2 (small
        gradient, small step, radius) are a success; 3 is ``maxiter``, 4 the callback.

    Raises
    ------
    ValueError
        Bad options, bounds or constraints, shapes that do not fit, or a start with zero gradient.
    FloatingPointError
        A loss, gradient or curvature that is not finite, or a Hessian that is zero where the gradient is not; the
        message holds the iterate.

    Warns
    -----
    OptimizeWarning
        An option is unknown; it is ignored, as by SciPy's own methods.

    Notes
    -----
    Source: "Improving Computational Complexity in Statistical Models with Local Curvature Information", ICML 2024,
    the NormGD algorithm. Guard, defaults and the Lanczos estimate are ours.

    Examples
    --------
    >>> import numpy as np
    >>> found = normgd_minimize(lambda x: ((x @ x) ** 2, 4 * (x @ x) * x), np.ones(3), jac=True, eta=1.0)
    >>> bool(found.success and np.linalg.norm(found.x) < 1e-3)
    True
    """
    x = np.array(x0, dtype=np.float64)
    if x.ndim != 1 or x.size == 0 or not np.isfinite(x).all():
        raise ValueError(f"x0 must be a finite vector, got shape {x.shape}")
    if not (np.isfinite(eta) and eta > 0):
        raise ValueError(f"eta must be positive, got {eta}")
    if eig not in ("auto", "exact", "power"):
        raise ValueError(f"eig must be 'auto', 'exact' or 'power', got {eig!r}")
    if power_iters < 1 or maxiter < 1:
        raise ValueError(f"power_iters and maxiter must be at least 1, got {power_iters} and {maxiter}")
    gtol, xtol = ((1e-10 if tol is None else tol) if given is None else given for given in (gtol, xtol))
    if not (gtol >= 0 and xtol >= 0):
        raise ValueError(f"gtol and xtol must not be negative, got {gtol} and {xtol}")
    for name, given in (("bounds", bounds), ("constraints", constraints)):
        if given is not None and np.size(given):
            raise ValueError(f"{name} are not supported: NormGD is for unconstrained problems")
    if unknown:
        warnings.warn(f"unknown options: {', '.join(unknown)}", OptimizeWarning, stacklevel=2)
    loss = _Loss(fun, args, jac, hess, hessp)
    has_hessian = loss.hess is not None
    if eig == "exact" and not has_hessian:
        raise ValueError("eig='exact' needs hess")
    exact = eig == "exact" or (eig == "auto" and has_hessian and x.size <= EXACT_UP_TO)
    report = _reporter(callback)
    rng = np.random.default_rng(seed)
    vector: Float | None = None
    lams: list[float] = []
    steps: list[float] = []
    f, g, H = loss(x)
    if not g.any():
        raise ValueError("stationary start: the gradient at x0 is zero, start somewhere else")
    status = _SMALL_GRADIENT if np.linalg.norm(g) <= gtol else _MAXITER
    while status == _MAXITER and len(lams) < maxiter:
        try:
            if exact:
                values = np.linalg.eigvalsh(loss.hessian(x, H))
                lam = guarded_eigenvalue(float(values[0]), float(values[-1]), guard=guard, floor=loss_floor(f))
            else:
                noise = rng.normal(size=x.size)
                # A little noise lets another direction take over as the largest.
                start = noise if vector is None else vector + 0.01 * noise / np.linalg.norm(noise)
                low, high, vector = lanczos_extremes(loss.product(x, H), start, power_iters if lams else 20)
                lam = SAFETY * guarded_eigenvalue(low, high, guard=guard, floor=loss_floor(f))
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}, at x = {x}") from error
        step = (eta / lam) * g
        x = x - step
        lams.append(lam)
        steps.append(float(np.linalg.norm(step)))
        f, g, H = loss(x)
        if report(x, f):
            status = _CALLBACK
        elif np.linalg.norm(g) <= gtol:
            status = _SMALL_GRADIENT
        elif steps[-1] <= xtol * (1 + np.linalg.norm(x)):
            status = _SMALL_STEP
        elif radius is not None and steps[-1] <= 0.1 * (radius(x, f) if callable(radius) else radius):
            status = _RADIUS
    if disp:
        print(f"NormGD: {_MESSAGES[status]} after {len(lams)} steps, loss {f}")
    return OptimizeResult(
        x=x, fun=f, jac=g, nit=len(lams), **loss.counts, success=status <= _RADIUS, status=status,
        message=_MESSAGES[status], lam_max=np.array(lams), step_norms=np.array(steps),
    )  # fmt: skip


class _Loss:
    """The user's callables behind one interface, with counts and checks."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], jac: Any, hess: Any, hessp: Any) -> None:
        if hess is True and jac is not True:
            raise ValueError("hess=True needs jac=True: fun then returns (f, gradient, Hessian)")
        if jac is not True and not callable(jac):
            raise ValueError(f"jac must be a callable or True, got {jac!r}: NormGD needs the gradient")
        if hess not in (None, True, False) and not callable(hess):
            raise ValueError(f"hess must be a callable or True, got {hess!r}; without it, gradients are differenced")
        self.fun, self.args, self.jac, self.hess, self.hessp = fun, args, jac, hess or None, hessp
        self.counts = {"nfev": 0, "njev": 0, "nhev": 0}

    def __call__(self, x: Float) -> tuple[float, Float, Any]:
        """Loss, gradient, and the Hessian where it comes with them."""
        self.counts["nfev"] += 1
        out = self.fun(x, *self.args)
        f = float(np.asarray(out[0] if self.jac is True else out).item())
        g = self.gradient(x, out)
        if not np.isfinite(f) or not np.isfinite(g).all():
            raise FloatingPointError(f"loss {f} or gradient is not finite at x = {x}")
        if self.hess is not True:
            return f, g, None
        self.counts["nhev"] += 1
        return f, g, out[2]

    def gradient(self, x: Float, out: Any = None) -> Float:
        """Gradient, taken from what ``fun`` returned where it is there."""
        self.counts["njev"] += 1
        if self.jac is not True:
            out = (None, self.jac(x, *self.args))
        elif out is None:
            out = self.fun(x, *self.args)
        g = np.array(out[1], dtype=np.float64)
        if g.shape != x.shape:
            raise ValueError(f"the gradient must have shape {x.shape}, got {g.shape}")
        return g

    def hessian(self, x: Float, H: Any) -> Float:
        """The Hessian, which may have come with the loss."""
        if H is None:
            assert callable(self.hess)
            self.counts["nhev"] += 1
            H = self.hess(x, *self.args)
        H = np.asarray(H, dtype=np.float64)
        if H.shape != (x.size, x.size):
            raise ValueError(f"the Hessian must have shape {(x.size, x.size)}, got {H.shape}")
        if not np.isfinite(H).all():
            raise FloatingPointError("the Hessian is not finite")
        return H

    def product(self, x: Float, H: Any) -> Callable[[Float], Float]:
        """``v -> H(x) v`` by the cheapest way that was given."""
        if self.hess is not None and self.hessp is None:
            matrix = self.hessian(x, H)
            return lambda v: matrix @ v
        h = 6e-6 * (1 + float(np.linalg.norm(x)))  # cube root of the float64 precision

        def times(v: Float) -> Float:
            self.counts["nhev"] += 1
            if self.hessp is None:
                return (self.gradient(x + h * v) - self.gradient(x - h * v)) / (2 * h)
            Hv = np.asarray(self.hessp(x, v, *self.args), dtype=np.float64)
            if Hv.shape != x.shape:
                raise ValueError(f"hessp must give shape {x.shape}, got {Hv.shape}")
            return Hv

        return times


def _reporter(callback: Callable[..., Any] | None) -> Callable[[Float, float], bool]:
    """Call ``callback`` by SciPy's conventions; whether it asks to stop."""
    if callback is None:
        return lambda x, f: False
    try:
        by_name = set(inspect.signature(callback).parameters) == {"intermediate_result"}
    except (TypeError, ValueError):
        by_name = False

    def report(x: Float, f: float) -> bool:
        try:
            if by_name:
                return bool(callback(intermediate_result=OptimizeResult(x=x.copy(), fun=f)))
            return bool(callback(x.copy()))
        except StopIteration:
            return True

    return report
