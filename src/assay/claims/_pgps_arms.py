"""What the arms of the claim on PGPS do, and what those of a replicate share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from assay.bench.claim import Timed

if TYPE_CHECKING:
    import torch

    from assay.workloads.densities import GaussianMixture


class Counted:
    """A log density that counts the rows at which it is evaluated, each with its gradient."""

    def __init__(self, log_prob: Any) -> None:
        self.log_prob, self.rows = log_prob, 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Values at rows ``[n, d]``."""
        self.rows += len(x)
        return self.log_prob(x)


@dataclass(frozen=True)
class Target:
    """What all arms of a replicate share: a density, where particles start, and how many there are."""

    mixture: GaussianMixture | None
    log_prob: Counted
    dim: int
    start: float
    particles: int
    adam_particles: int
    train_steps: int
    iterations: int
    seed: int
    setting: str

    def x0(self, count: int | None = None) -> torch.Tensor:
        """Draws of the start, ``[n, d]``; the same ones for every arm with as many particles."""
        import torch

        draw = torch.Generator().manual_seed(10 * self.seed)
        return self.start * torch.randn(count or self.particles, self.dim, generator=draw, dtype=torch.float64)


def known(shared: Target) -> GaussianMixture:
    """The mixture of an embedded setting."""
    assert shared.mixture is not None
    return shared.mixture


PATHS = {"A": (0.0, 1.0), "B": (1.0, 0.8)}  # the paper's labels; its C and D are these with Langevin moves


def _path_of(shared: Target, path: str) -> tuple[float, float]:
    """``alpha, beta``: the paper's for one dimension, and (0, 0.5) for eight, where it shrinks the target only."""
    return (0.0, 0.5) if path == "B" and shared.setting == "eight" else PATHS[path]


def _errors(shared: Target, result: Any) -> dict[str, float]:
    """How far the masses of the modes are from the truth, and what it took."""
    found = {"evaluations": float(shared.log_prob.rows), "ess": result.ess / len(result.particles)}
    if math.isfinite(result.log_evidence):
        found["log_evidence"] = result.log_evidence
    if shared.mixture is None:
        return found
    if math.isfinite(result.log_evidence):
        found["evidence_error"] = abs(result.log_evidence)
    return found | _masses(shared, result.particles.numpy(), result.weights.numpy())


def _masses(shared: Target, points: Any, weights: Any) -> dict[str, float]:
    if shared.setting == "eight":  # as the paper counts it
        masses = known(shared).masses_within(points, weights, 1.0)
    else:
        masses = known(shared).masses(points, weights)
    gap = [m - w for m, w in zip(masses, known(shared).weights)]
    error = math.sqrt(sum(g * g for g in gap)) if shared.setting == "eight" else abs(gap[-1])
    return {"error": error, "mass": masses[-1]}


def _fresh(shared: Target) -> Target:
    """The same with its own count of evaluations."""
    return replace(shared, log_prob=Counted(shared.log_prob.log_prob))


def pgps_arm(path: str, **options: Any) -> Callable[[Target, int], dict[str, float]]:
    def run(shared: Target, replicate: int) -> dict[str, float]:
        shared = _fresh(shared)
        return _errors(shared, _sampler(shared, path, **options).run(shared.x0(options.get("n_particles"))))

    return run


def _sampler(shared: Target, path: str, **options: Any) -> Any:
    import warnings

    from assay.statistics import PGPS

    if path == "D":
        moves = {"langevin_steps": 10}
        if shared.setting == "eight":
            moves = {"langevin_steps": 2, "final_langevin": 100}
        options = moves | {"langevin_step_size": _move(shared)} | options
    alpha, beta = _path_of(shared, "B" if path == "D" else path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few particles for the regression: the smallest timed arms
        return PGPS(
            shared.log_prob,
            shared.dim,
            **{"n_particles": shared.particles} | options,
            alpha=alpha,
            beta=beta,
            p0_scale=shared.start,
            seed=10 * shared.seed + 3,
        )


def by_adam(shared: Target, replicate: int) -> dict[str, float]:
    """The paper's mode: a network trained by Adam at each time, particles of equal weight."""
    return pgps_arm("B", n_particles=shared.adam_particles, **_by_adam(shared))(shared, replicate)


def _by_adam(shared: Target) -> dict[str, Any]:
    """As many as 1000 steps of training before the first move, fewer where training is short (at smoke scale)."""
    first = min(1000, 10 * shared.train_steps)
    return {"solver": "adam", "weights": False, "train_steps": shared.train_steps, "first_train_steps": first}


def langevin_arm(adjusted: bool) -> Callable[[Target, int], dict[str, float]]:
    def run(shared: Target, replicate: int) -> dict[str, float]:
        import torch

        from assay.statistics.pgps import langevin

        shared, draw = _fresh(shared), torch.Generator().manual_seed(10 * shared.seed + 1)
        step = _tuned(shared) if adjusted else _move(shared)
        return _errors(
            shared,
            langevin(shared.log_prob, shared.x0(), shared.iterations, step, adjusted=adjusted, generator=draw),
        )

    return run


def svgd_arm(shared: Target, replicate: int) -> dict[str, float]:
    from assay.statistics.pgps import svgd

    shared = _fresh(shared)
    count = min(500, shared.particles)
    steps = math.ceil(shared.iterations * shared.particles / count)  # as many evaluations as Langevin dynamics
    return _errors(shared, svgd(shared.log_prob, shared.x0(count), steps, _flow(shared)[0]))


def pfg_arm(shared: Target, replicate: int) -> dict[str, float]:
    from assay.statistics.pgps import pfg

    shared = _fresh(shared)
    return _errors(shared, pfg(shared.log_prob, shared.x0(), **_trained(shared), lr=1e-2, seed=10 * shared.seed + 4))


def _trained(shared: Target) -> dict[str, Any]:
    """PFG's moves, as many as Langevin's, and 1000 first training steps (fewer where iterations are few)."""
    return {"steps": shared.iterations, "step_size": _flow(shared)[1], "first_steps": min(1000, 2 * shared.iterations)}


def _levels(shared: Target) -> int:
    """Levels of tempered SMC, of 10 moves and a reweighting each: 60 for 650 iterations elsewhere."""
    return math.ceil(shared.iterations / 11)


def smc_arm(path: str, adjusted: bool) -> Callable[[Target, int], dict[str, float]]:
    def run(shared: Target, replicate: int) -> dict[str, float]:
        from assay.statistics.pgps import tempered_smc

        shared = _fresh(shared)
        step = _tuned(shared) if adjusted else _move(shared)
        options: dict[str, Any] = {
            "levels": _levels(shared),
            "step_size": step,
            "adjusted": adjusted,
            "generator": _draw(shared),
        }
        return _errors(shared, tempered_smc(_path(shared, path), shared.x0(), **options))

    return run


def _path(shared: Target, path: str) -> Any:
    from assay.statistics import LwSPath
    from assay.statistics.pgps import gaussian

    return LwSPath(gaussian(shared.start, shared.dim), shared.log_prob, *_path_of(shared, path))


def _move(shared: Target) -> float:
    """The step of unadjusted Langevin moves: of Langevin dynamics, of PGPS, of tempered SMC on the same path."""
    return 1e-3 if shared.setting == "eight" else 1e-2


def _flow(shared: Target) -> tuple[float, float]:
    """Steps of SVGD and of PFG: larger ones diverge on the narrow modes of 'eight', smaller ones change nothing."""
    return (0.02, 0.005) if shared.setting == "eight" else (0.1, 0.05)


def _tuned(shared: Target) -> float:
    """The step of adjusted moves: the best for tempered SMC of four tried on other seeds.

    With a user's own target nothing is tuned.
    """
    return _move(shared) if shared.mixture is None else 1e-2 if shared.setting == "eight" else 0.5


def blackjax_smc(shared: Target, replicate: int) -> dict[str, float]:
    """The package's own annealing: its levels are chosen by the effective sample size, moves by the budget."""
    from assay.claims._pgps_peers import tempered_smc

    points, weights, evidence, count = tempered_smc(known(shared), shared.x0().numpy(), **_blackjax(shared))
    found = {"evaluations": float(count), "ess": float(1 / (weights**2).sum()) / len(points)}
    found |= {"log_evidence": evidence, "evidence_error": abs(evidence)}
    return found | _masses(shared, points, weights)


def _blackjax(shared: Target) -> dict[str, Any]:
    from assay.claims._pgps_peers import moves_for

    moves = moves_for(shared.setting, shared.iterations)
    return {"moves": moves, "step_size": _tuned(shared), "seed": 10 * shared.seed + 5}


def blackjax_nuts(shared: Target, replicate: int) -> dict[str, float]:
    """What is used for one mode: ten chains from draws of the start, as many evaluations as Langevin dynamics."""
    from assay.claims._pgps_peers import CHAINS, nuts_chains

    budget = shared.iterations * shared.particles
    x0 = shared.x0()[:CHAINS].numpy()
    points, weights, count = nuts_chains(known(shared), x0, evaluations=budget, seed=10 * shared.seed + 6)
    return {"evaluations": float(count)} | _masses(shared, points, weights)


def _draw(shared: Target) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(10 * shared.seed + 2)


def timed_arm(kind: str) -> Callable[[Target, int], Timed]:
    """A whole run of each sampler on the first target; BlackJAX after compilation, which ``Timed`` does not see."""

    def run(shared: Target, replicate: int) -> Timed:
        from assay.statistics.pgps import svgd, tempered_smc

        x0 = shared.x0()
        if kind in ("lstsq", "adam"):
            sampler = _sampler(shared, "B", **(_by_adam(shared) if kind == "adam" else {}))
            if kind == "lstsq":
                sampler.run(x0)  # so that no race has to warm up, which takes long with Adam
            return Timed(lambda: sampler.run(x0))
        if kind == "smc":
            path = _path(shared, "A")
            return Timed(lambda: tempered_smc(path, x0, levels=_levels(shared), generator=_draw(shared)))
        if kind == "blackjax":
            from assay.claims import _pgps_peers as peers

            options, rows = _blackjax(shared) | {"timed": True}, x0.numpy()
            peers.tempered_smc(known(shared), rows, **options)
            return Timed(lambda: peers.tempered_smc(known(shared), rows, **options))
        return Timed(lambda: svgd(shared.log_prob, x0, shared.iterations // 13, 0.1))  # of what it is given elsewhere

    return run


def iteration_arm(kind: str) -> Callable[[Target, int], Timed]:
    """The same for one iteration: the time of a run over how often each particle's score is evaluated in it."""

    def run(shared: Target, replicate: int) -> Timed:
        from assay.claims import _pgps_peers as peers

        shared = _fresh(shared)
        x0, options = shared.x0(), _blackjax(shared) | {"timed": True}
        if kind == "blackjax":
            count = peers.tempered_smc(known(shared), x0.numpy(), **options)[-1]
            call: Callable[[], object] = lambda: peers.tempered_smc(known(shared), x0.numpy(), **options)  # noqa: E731
            return Timed(call, per=count // len(x0))
        sampler = _sampler(shared, "D")
        sampler.run(x0)
        return Timed(lambda: sampler.run(x0), per=shared.log_prob.rows // len(x0))

    return run
