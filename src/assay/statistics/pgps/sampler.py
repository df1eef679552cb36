"""Path-guided particle-based sampling: particles that an ODE carries from a simple density to the target."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from assay._state import load_state, save_state
from assay.statistics.pgps.path import Gaussian, LwSPath, as_center, gaussian
from assay.statistics.pgps.velocity import Velocity, fit_adam, fit_least_squares, random_layer, residual

MOST_STEPS = 2000
ADVICE = "give a smaller psi, or a density that is finite wherever particles may go"


@dataclass(frozen=True)
class Step:
    """What happened in one step: its end ``t``, its length, the loss, effective sample size and evaluations so far."""

    t: float
    dt: float
    loss: float
    ess: float
    evaluations: int


@dataclass(frozen=True)
class PGPSState:
    """Particles on their way; see :meth:`PGPS.step`.

    Attributes
    ----------
    t
        Time, 0 at the start and 1 at the target.
    particles, log_weights
        ``[n, d]`` and ``[n]``.
    log_evidence
        Log of the normalising constant of ``p_t`` so far.
    trace
        One :class:`Step` for each step.
    known
        ``ln p_t``, its gradient and its derivative in ``t`` at the particles, where they have been evaluated already.
    """

    t: float
    particles: Tensor
    log_weights: Tensor
    log_evidence: float
    trace: tuple[Step, ...] = ()
    known: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class PGPSResult:
    """Particles at the target.

    Attributes
    ----------
    particles
        ``[n, d]``.
    weights
        ``[n]``, summing to one; use them in every expectation. Equal without residual weights.
    log_evidence
        Log of the target's normalising constant (relative to the normalised ``p0``); NaN without weights.
    ess
        Effective sample size ``1 / sum w^2`` at the end.
    trace
        One :class:`Step` for each step.
    n_score_evals
        Evaluations of a log density with its gradient, both ends of the path and all particles counted.
    """

    particles: Tensor
    weights: Tensor
    log_evidence: float
    ess: float
    trace: tuple[Step, ...] = field(default=(), repr=False)
    n_score_evals: int = 0

    def resample(self, generator: torch.Generator | None = None) -> Tensor:
        """Particles ``[n, d]`` of equal weight, by systematic resampling."""
        return self.particles[systematic(self.weights, generator)]

    def save(self, folder: str | Path) -> Path:
        """Write particles, weights and numbers as safetensors and JSON; :meth:`load` reads them."""
        config = {
            "log_evidence": self.log_evidence,
            "ess": self.ess,
            "n_score_evals": self.n_score_evals,
            "trace": [[s.t, s.dt, s.loss, s.ess, s.evaluations] for s in self.trace],
        }
        return save_state(folder, "PGPSResult", config, {"particles": self.particles, "weights": self.weights})

    @classmethod
    def load(cls, folder: str | Path) -> PGPSResult:
        """Read what :meth:`save` wrote."""
        state, tensors = load_state(folder, "PGPSResult", torch_tensors=True)
        trace = tuple(Step(t, dt, loss, ess, int(count)) for t, dt, loss, ess, count in state["trace"])
        return cls(**tensors, **state | {"trace": trace})


def systematic(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Indices ``[n]`` of a systematic resample: index ``i`` appears ``n w_i`` times, rounded up or down."""
    n = len(weights)
    places = (torch.arange(n, dtype=torch.float64) + torch.rand((), generator=generator, dtype=torch.float64)) / n
    return torch.searchsorted(weights.cpu().double().cumsum(0), places).clamp(max=n - 1).to(weights.device)


def normal_like(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal draws of the shape, dtype and device of ``x``, drawn on the CPU in float64."""
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


def ess_of(log_weights: Tensor) -> float:
    """``1 / sum w^2`` of the normalised weights."""
    return float(1 / log_weights.softmax(0).square().sum())


class PGPS:
    r"""Samples an unnormalised density with particles that follow a path of densities (PGPS).

    Particles begin at ``p0 = N(0, p0_scale^2 I)`` and follow ``dx/dt = phi_t(x)`` along a path ``p_t`` to the target.
    At every time the velocity is fitted to the continuity equation in a form without normalising constants::

        r(x, phi) = d/dt ln p_t + grad ln p_t . phi + div phi        should not depend on x

    by least squares of ``r - E[d/dt ln p_t]`` over the particles. The time step keeps the mean displacement below
    ``psi``.

    Parameters
    ----------
    log_prob
        The unnormalised log density: a function of tensors ``[n, d] -> [n]``, or an object with ``logp_and_grad``.
    dim
        Dimension ``d``.
    n_particles
        Default 1000.
    path
        ``"lws"``: :class:`LwSPath` from the Gaussian with ``alpha`` and ``beta``; or a path of your own, an object with
        ``evaluate(t, x)`` like that of :class:`LwSPath` (then ``alpha``, ``beta``, ``p0_scale`` and ``center`` are not
        used, and particles begin at draws of its ``p0`` if that is a :class:`Gaussian`, otherwise at your ``x0``).
    alpha, beta, p0_scale, center
        Of the path and its start; defaults 0.2, 0.5, 1 and the origin.
    hidden
        Units of the velocity's hidden layer; default 64.
    solver
        ``"lstsq"`` (default, ours): the second layer is solved exactly, at random first layers, once for each step.
        ``"adam"`` (the paper's): the whole network is trained, ``train_steps`` for each step.
    weights
        Residual weights (ours; default true): along the flow ``d log w = (r - E[d/dt ln p_t]) dt``, so that a velocity
        that is not exact gives weights instead of a bias. With ``weights=False`` and ``solver="adam"`` the method is
        the paper's. ``solver="lstsq"`` without weights moves too little mass.
    psi, dt_max
        Largest mean displacement in a step and largest step; defaults 0.1 and 0.02 (the paper's).
    train_steps, lr, tol
        Of Adam: most steps for each time, learning rate, and the loss (mean squared residual) below which it stops;
        defaults 300, 0.01 and 0.01 (the paper has 100 to 20,000, 0.001 to 0.1, and 0.01 or 0.1). ``lr`` may be a
        function of the loss: ``lambda loss: 0.1 if loss > 100 else 0.01`` is the paper's for eight dimensions.
    first_train_steps
        Most steps of Adam before particles move for the first time; default 1000, or ``train_steps`` if that is more.
    ridge
        Of the least squares, whose columns have unit size; default 0.01. With much less of it the regression fits the
        noise of the particles that the weights are then computed at, and both masses and evidence are biased.
    langevin_steps, langevin_step_size
        Unadjusted Langevin moves at ``p_t`` after each step; defaults 0 and 0.01 (the paper's for one dimension is 10
        of 0.01).
    langevin_every
        Make them only after steps in which ``t`` has passed another multiple of this; default 0: after each step. (The
        paper makes 100 for each 0.01 of ``t``, or 300 for each 0.1.)
    final_langevin
        The same at the end, at the target.
    training_free
        No velocity at all: steps of ``dt_max`` and Langevin moves. With ``weights=False`` this is the paper's tf-PGPS,
        with weights annealed importance sampling.
    ess_threshold
        Resample when the effective sample size falls below this share of the particles; default 0.5.
    dtype
        Floating dtype of particles and network; default float64. The least squares are solved in float64 always.
    device
        Where particles and network are; default the CPU. Random numbers are drawn on the CPU, the same everywhere.
    seed
        Of everything random. A sampler with a seed gives the same result each time it runs.

    Raises
    ------
    ValueError
        A parameter is out of its range.
    FloatingPointError
        While running: a loss, a particle or a weight is not finite; the message names the time.

    Warns
    -----
    UserWarning
        The least squares are under-determined (``2 n <= hidden * dim``), or a run stops short after 2000 steps.

    Notes
    -----
    Weights and log evidence are integrated by Euler's rule: their bias is of the order of ``dt``. Weights that belong
    to a velocity fitted to the same particles are only right up to its over-fitting; see ``ridge``.

    Source: "Path-Guided Particle-based Sampling" (ICML 2024), its algorithm and its training-free variant.
    Neither a small loss nor many effective particles prove that mass has reached every mode; compare mode masses
    between seeds.
    """

    def __init__(
        self,
        log_prob: Any,
        dim: int,
        n_particles: int = 1000,
        *,
        path: Any = "lws",
        alpha: float = 0.2,
        beta: float = 0.5,
        p0_scale: float = 1.0,
        center: Any = None,
        hidden: int = 64,
        solver: Literal["lstsq", "adam"] = "lstsq",
        weights: bool = True,
        psi: float = 0.1,
        dt_max: float = 0.02,
        train_steps: int = 300,
        first_train_steps: int = 1000,
        lr: float | Callable[[float], float] = 1e-2,
        tol: float = 1e-2,
        ridge: float = 1e-2,
        langevin_steps: int = 0,
        langevin_step_size: float = 1e-2,
        langevin_every: float = 0.0,
        final_langevin: int = 0,
        training_free: bool = False,
        ess_threshold: float = 0.5,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str | None = None,
        seed: int | None = None,
    ) -> None:
        for name, value, least in (
            ("dim", dim, 1),
            ("n_particles", n_particles, 2),
            ("hidden", hidden, 1),
            ("train_steps", train_steps, 1),
            ("first_train_steps", first_train_steps, 1),
            ("langevin_steps", langevin_steps, 0),
            ("final_langevin", final_langevin, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
        for name, size in (
            ("p0_scale", p0_scale), ("psi", psi), ("dt_max", dt_max), ("lr", 1.0 if callable(lr) else lr),
            ("langevin_step_size", langevin_step_size),
        ):  # fmt: skip
            if not 0 < size < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {size}")
        for name, size in (("ridge", ridge), ("tol", tol), ("langevin_every", langevin_every)):
            if not size >= 0:
                raise ValueError(f"{name} must not be negative, not {size}")
        if solver not in ("lstsq", "adam"):
            raise ValueError(f"solver must be 'lstsq' or 'adam', not {solver!r}")
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating dtype of torch, not {dtype}")
        if not 0 <= ess_threshold <= 1:
            raise ValueError(f"ess_threshold must lie in [0, 1], not {ess_threshold}")
        if training_free and not langevin_steps:
            raise ValueError("training_free needs langevin_steps: nothing else would move the particles")
        if solver == "lstsq" and not training_free and 2 * n_particles <= hidden * dim:
            warnings.warn(
                f"{n_particles} particles for a regression of {hidden * dim + dim} columns; give more particles or "
                "fewer hidden units, or solver='adam'",
                stacklevel=2,
            )
        if isinstance(path, str):
            if path != "lws":
                raise ValueError(f"path must be 'lws' or a path object, not {path!r}")
            middle = None if center is None else as_center(center, dim)
            path = LwSPath(gaussian(p0_scale, dim, middle), log_prob, alpha, beta, middle)
        elif not callable(getattr(path, "evaluate", None)):
            raise TypeError(f"path must be 'lws' or an object with evaluate(t, x), not {path!r}")
        self.path, self.dim, self.n_particles = path, int(dim), int(n_particles)
        self.hidden, self.solver, self.weighted = int(hidden), solver, weights
        self.psi, self.dt_max, self.train_steps, self.lr, self.tol = psi, dt_max, train_steps, lr, tol
        self.first_train_steps, self.langevin_every = max(first_train_steps, train_steps), langevin_every
        self.device = torch.device("cpu" if device is None else device)
        self.ridge, self.training_free, self.ess_threshold, self.dtype = ridge, training_free, ess_threshold, dtype
        self.langevin_steps, self.langevin_step_size = langevin_steps, langevin_step_size
        self.final_langevin, self.seed = final_langevin, seed
        self._start()

    def _start(self) -> None:
        self.generator = torch.Generator()
        if self.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.seed)
        self.net = Velocity(self.dim, self.hidden, self.generator, self.dtype).to(self.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1.0 if callable(self.lr) else self.lr)
        self._count = self._calls()

    def _calls(self) -> int:
        return sum(d.calls for d in (getattr(self.path, "p0", None), getattr(self.path, "p1", None)) if d is not None)

    def init(self, x0: Tensor | None = None) -> PGPSState:
        """Particles at ``t = 0``: draws of ``p0``, or ``x0`` ``[n, d]``, which should be.

        Raises
        ------
        ValueError
            ``x0`` has another dimension or is missing, or the log density is not finite at some particles.
        """
        self._start()
        if x0 is None:
            start = getattr(getattr(self.path, "p0", None), "log_prob", None)
            if not isinstance(start, Gaussian) or start.dim != self.dim:
                raise ValueError(f"x0 must be given, draws [n, {self.dim}] of the p0 of your path")
            x0 = start.sample(self.n_particles, self.generator, self.dtype)
        x0 = torch.as_tensor(x0, dtype=self.dtype, device=self.device)
        if x0.ndim != 2 or x0.shape[1] != self.dim or len(x0) < 2:
            raise ValueError(f"x0 must be [n, {self.dim}] with at least two rows, not {tuple(x0.shape)}")
        known = value, score, change = self.path.evaluate(0.0, x0)
        finite = value.isfinite() & score.isfinite().all(-1) & change.isfinite()
        if not bool(finite.all()):
            raise ValueError(
                f"log_prob or its gradient is not finite at {int((~finite).sum())} of {len(x0)} initial particles"
            )
        return PGPSState(0.0, x0, torch.zeros_like(value), 0.0, known=known)

    def step(self, state: PGPSState) -> PGPSState:
        """Fit the velocity, move the particles, update the weights, resample where few are left, make Langevin moves.

        By Adam the network goes on from where the last step left it: step one run at a time.
        """
        x, log_w, t = state.particles, state.log_weights, state.t
        w = log_w.softmax(0)
        dt, loss, evidence = min(self.dt_max, 1 - t), math.nan, state.log_evidence
        _, score, change = self.path.evaluate(t, x) if state.known is None else state.known
        if not bool(score.isfinite().all() and change.isfinite().all()):
            raise FloatingPointError(f"the density of the path or its gradient is not finite at t = {t:.4f}; {ADVICE}")
        if self.training_free:
            velocity, divergence = torch.zeros_like(x), torch.zeros_like(change)
        elif self.solver == "lstsq":
            layer = random_layer(self.hidden, x, w, self.generator)
            velocity, divergence, loss = fit_least_squares(layer, x, score, change, w, self.ridge)
        else:
            steps = self.train_steps if state.trace else self.first_train_steps
            lr = self.lr if callable(self.lr) else None
            loss = fit_adam(self.net, self.optimizer, x, score, change, w, steps, self.tol, lr)
            with torch.no_grad():
                velocity, divergence = self.net(x)
        if not self.training_free:
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss of the velocity is {loss} at t = {t:.4f}")
            speed = float((w * velocity.norm(dim=-1)).sum())
            dt = min(dt, self.psi / speed) if speed > 0 else dt
        mean = (w * change).sum()
        evidence += dt * float(mean)
        if self.weighted:
            log_w = log_w + dt * (residual(score, change, velocity, divergence) - mean)
            log_w = log_w - log_w.logsumexp(0) + math.log(len(x))
        x = x + dt * velocity
        begun, t = t, 1.0 if 1 - t - dt < 1e-12 else t + dt
        if not bool(x.isfinite().all() and log_w.isfinite().all() and math.isfinite(evidence)):
            raise FloatingPointError(f"particles or weights are not finite after the step to t = {t:.4f}; {ADVICE}")
        ess = ess_of(log_w)
        if self.weighted and ess < self.ess_threshold * len(x):
            x, log_w = x[systematic(log_w.softmax(0), self.generator)], torch.zeros_like(log_w)
        every = self.langevin_every
        if not every or t == 1 or math.floor(t / every + 1e-9) > math.floor(begun / every + 1e-9):
            x = self._langevin(t, x, self.langevin_steps)
        step = Step(t, dt, loss, ess, self._calls() - self._count)
        return PGPSState(t, x, log_w, evidence, (*state.trace, step))

    def _langevin(self, t: float, x: Tensor, steps: int) -> Tensor:
        delta = self.langevin_step_size
        for _ in range(steps):
            x = x + delta * self.path.evaluate(t, x)[1] + math.sqrt(2 * delta) * normal_like(x, self.generator)
        if steps and not bool(x.isfinite().all()):
            raise FloatingPointError(
                f"particles are not finite after Langevin moves at t = {t:.4f}: give a smaller langevin_step_size, not "
                f"{delta}"
            )
        return x

    def run(self, x0: Tensor | None = None, *, callback: Callable[[PGPSState], object] | None = None) -> PGPSResult:
        """Carry the particles to the target.

        Parameters
        ----------
        x0
            Initial particles ``[n, d]`` instead of draws of ``p0``.
        callback
            Called with the state after each step.

        Raises
        ------
        FloatingPointError
            Something is not finite; the message names the time.
        """
        state = self.init(x0)
        while state.t < 1:
            if len(state.trace) >= MOST_STEPS:
                warnings.warn(
                    f"stopped at t = {state.t:.3f} after {MOST_STEPS} steps: the velocity is large against psi = "
                    f"{self.psi}; the particles are not at the target",
                    stacklevel=2,
                )
                break
            state = self.step(state)
            if callback is not None:
                callback(state)
        state = replace(state, particles=self._langevin(state.t, state.particles, self.final_langevin))
        return PGPSResult(
            particles=state.particles,
            weights=state.log_weights.softmax(0),
            log_evidence=state.log_evidence if self.weighted else math.nan,
            ess=ess_of(state.log_weights),
            trace=state.trace,
            n_score_evals=self._calls() - self._count,
        )
