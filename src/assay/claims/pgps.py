"""Do path-guided particles find far modes and their masses where Langevin dynamics and SVGD do not (ICML 2024)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

from assay.bench.claim import Arm, Claim, Growth, Metric, Paper, Race, Reported, Scale, Statement
from assay.claims._pgps_arms import (
    Counted,
    Target,
    blackjax_nuts,
    blackjax_smc,
    by_adam,
    iteration_arm,
    langevin_arm,
    pfg_arm,
    pgps_arm,
    smc_arm,
    svgd_arm,
    timed_arm,
)
from assay.errors import InputError

EXAMPLE = "mymodel:log_posterior"
PAPER = Paper(
    title="Path-Guided Particle-based Sampling",
    authors="Mingzhou Fan, Ruida Zhou, Chao Tian, Xiaoning Qian",
    venue="ICML 2024",
    url="https://proceedings.mlr.press/v235/fan24i.html",
)
SETUPS = ("far", "negligible", "eight")
COUNTS = (125, 250, 500, 1000, 2000)  # particles of the timed arms
RACE = tuple(f"n{n}" for n in COUNTS)


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PGPSTask:
    """Three targets with known masses (or a user's own), and a race over the number of particles."""

    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    seed: int
    sizes: dict[str, int]
    target: str | None = None
    dim: int = 1
    start: float = 1.0

    def prepare(self, setting: str, replicate: int) -> Target:
        """The density of a setting."""
        from assay.workloads import densities
        from assay.workloads.named import load_named

        seed = 1000 * self.seed + replicate
        known = dict(self.sizes)
        if setting == "own":
            log_prob = load_named(str(self.target), "--target", EXAMPLE)
            return Target(None, Counted(log_prob), self.dim, self.start, **known, seed=seed, setting=setting)
        if setting in RACE:
            known["particles"] = int(setting[1:])
        mixture = (
            densities.eight_dimensions(seed)
            if setting == "eight"
            else densities.negligible_mode()
            if setting == "negligible"
            else densities.far_modes()
        )
        counted = Counted(mixture.log_prob)
        return Target(mixture, counted, mixture.dim, mixture.start, **known, seed=seed, setting=setting)


@dataclass(frozen=True)
class Densities:
    """Targets, and the numbers of particles."""

    target: str | None = field(
        default=None,
        metadata={"help": "your log density as module:callable, torch rows [n, d] to [n] [default: three]"},
    )
    dim: int | None = field(default=None, metadata={"help": "dimension of --target"})
    start: float | None = field(
        default=None, metadata={"help": "standard deviation of the start of --target [default: 1]"}
    )
    particles: int | None = field(default=None, metadata={"help": "particles of every arm but Adam's"})
    adam_particles: int | None = field(default=None, metadata={"help": "particles of the arm that trains by Adam"})
    train_steps: int | None = field(default=None, metadata={"help": "steps of Adam for each time step"})
    most: int | None = field(
        default=None, metadata={"help": "largest number of particles of the timed runs; 0 for none"}
    )
    iterations: int | None = field(
        default=None, metadata={"help": "iterations of Langevin dynamics and SVGD; moves of tempered SMC follow"}
    )
    only: str | None = field(
        default=None,
        metadata={"help": f"one of the embedded targets: {', '.join(SETUPS)} [default: all, smoke: far]"},
    )

    def build(self, *, device: str, seed: int) -> PGPSTask:
        """Check everything that can be checked before sampling.

        Raises
        ------
        InputError
            An option cannot be used.
        """
        defaults = {"particles": 1000, "adam_particles": 500, "train_steps": 300, "iterations": 650}
        given = {name: getattr(self, name) for name in defaults}
        sizes = {name: default if given[name] is None else given[name] for name, default in defaults.items()}
        for name, value in sizes.items():
            least = 1 if name == "train_steps" else 13 if name == "iterations" else 10
            if value < least:
                raise InputError(f"--{name.replace('_', '-')} must be at least {least}, not {value}")
        most = COUNTS[-1] if self.most is None else self.most
        if most and most < COUNTS[0]:
            raise InputError(f"--most must be at least {COUNTS[0]}, or 0 for no timed runs, not {most}")
        if self.target is None:
            for name in ("dim", "start"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name} is for --target; the embedded targets have their own")
            if self.only is not None and self.only not in SETUPS:
                raise InputError(f"--only must be one of {', '.join(SETUPS)}, not {self.only!r}")
            chosen = SETUPS if self.only is None else (self.only,)
            settings = (*chosen, *(f"n{n}" for n in COUNTS if n <= most))
            digest = hashlib.sha256(repr((sorted(sizes.items()), seed, most, chosen)).encode()).hexdigest()[:16]
            count = "three mixtures" if self.only is None else f"the mixture {self.only!r}"
            title = f"{count} with far modes, {sizes['particles']} particles"
            return PGPSTask(settings, digest, title, None, seed, sizes)
        from assay.workloads.named import source_of

        if self.dim is None or self.dim < 1:
            raise InputError(f"--dim must be the dimension of --target, at least 1, not {self.dim}")
        start = 1.0 if self.start is None else self.start
        if not start > 0:
            raise InputError(f"--start must be positive, not {start}")
        _try(self.target, self.dim, start)
        code = source_of(self.target)  # a density that was edited is another one
        known = repr((sorted(sizes.items()), seed, self.target, self.dim, start, code))
        digest = hashlib.sha256(known.encode()).hexdigest()
        title = f"{self.target} in {self.dim} dimensions, {sizes['particles']} particles"
        return PGPSTask(("own",), digest[:16], title, None, seed, sizes, self.target, self.dim, start)


def _try(target: str, dim: int, start: float) -> None:
    """Call a user's density once, on draws of the start."""
    import torch

    from assay.statistics.pgps import Density
    from assay.workloads.named import load_named

    x = start * torch.randn(16, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    try:
        value, gradient = Density(load_named(target, "--target", EXAMPLE))(x)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--target {target!r} fails on rows [16, {dim}]: {type(error).__name__}: {error}") from error
    if not bool(value.isfinite().all() and gradient.isfinite().all()):
        raise InputError(f"--target {target!r} or its gradient is not finite at draws of N(0, {start:g}^2 I)")


# --- arms -------------------------------------------------------------------------------------------------------------

EVERY = (*SETUPS, "own")


def _arms() -> tuple[Arm, ...]:
    free = {"training_free": True, "langevin_steps": 10, "weights": False}
    here: dict[str, Any] = {"where": EVERY}
    race: dict[str, Any] = {"race": "run"}
    jax: dict[str, Any] = {"requires": ("blackjax",)}
    train: dict[str, Any] = {"race": "training", "where": ("n500",)}
    once: dict[str, Any] = {"race": "iteration", "where": ("n1000",)}
    return (
        Arm("pgps", pgps_arm("D"), "method", "PGPS, least squares, Langevin moves", **here),
        Arm("pgps-A", pgps_arm("A"), "ablation", "PGPS, least squares, plain path", **here),
        Arm("pgps-B", pgps_arm("B"), "ablation", "PGPS, least squares, shrunk path", **here),
        Arm("pgps-plain", pgps_arm("B", weights=False), "ablation", "the same without weights", **here),
        Arm("pgps-adam", by_adam, "method", "PGPS by Adam, as in the paper", where=("far",)),
        Arm("pgps-free", pgps_arm("D", **free), "ablation", "training-free PGPS", **here),
        Arm("langevin", langevin_arm(False), "baseline", "Langevin dynamics", **here),
        Arm("mala", langevin_arm(True), "baseline", "adjusted Langevin (MALA)", **here),
        Arm("svgd", svgd_arm, "baseline", "SVGD", **here),
        Arm("pfg", pfg_arm, "baseline", "preconditioned functional gradient", **here),
        Arm("smc", smc_arm("B", False), "baseline", "tempered SMC on the same path, same moves", **here),
        Arm("smc-mala", smc_arm("A", True), "baseline", "tempered SMC, plain path, adjusted moves", **here),
        Arm("blackjax-smc", blackjax_smc, "baseline", "BlackJAX, adaptive tempered SMC", where=SETUPS, **jax),
        Arm("blackjax-nuts", blackjax_nuts, "reference", "BlackJAX, NUTS, ten chains", where=SETUPS, **jax),
        Arm("time-lstsq", timed_arm("lstsq"), "method", "PGPS, least squares", where=RACE, **race),
        Arm("time-smc", timed_arm("smc"), "baseline", "tempered SMC", where=RACE, **race),
        Arm("time-blackjax", timed_arm("blackjax"), "baseline", "BlackJAX, tempered SMC", where=RACE, **race, **jax),
        Arm("time-svgd", timed_arm("svgd"), "baseline", "SVGD, 50 iterations", where=RACE, **race),
        Arm("training-lstsq", timed_arm("lstsq"), "method", "PGPS, least squares, 500 particles", **train),
        Arm("training-adam", timed_arm("adam"), "reference", "PGPS by Adam, 500 particles", **train),
        Arm("iteration-pgps", iteration_arm("pgps"), "method", "PGPS with Langevin moves, an iteration", **once),
        Arm("iteration-blackjax", iteration_arm("blackjax"), "baseline", "BlackJAX SMC, an iteration", **once, **jax),
    )


CLAIM = Claim(
    slug="pgps",
    title="PGPS: particles guided along a path of densities",
    family="statistics",
    paper=PAPER,
    question="Would particles on a path find the modes of my density, and how much mass each has?",
    statements=(
        Statement(
            name="modes",
            text="The masses of far modes are closer to the truth than with Langevin dynamics, SVGD or PFG",
            metric="error",
            method="pgps",
            baselines=("langevin", "mala", "svgd", "pfg"),
            where=SETUPS,
            reported=Reported(
                "error of the weights in 8 dimensions 0.3314 by Langevin dynamics; below it for all settings of PGPS",
                "the setting 'eight', 1,000 particles",
                "section 5, weight recovery",
            ),
        ),
        Statement(
            name="modes-adam",
            text="So they are with the paper's own training by Adam, on the first target",
            metric="error",
            method="pgps-adam",
            baselines=("langevin", "svgd"),
            where=("far",),
        ),
        Statement(
            name="smc",
            text="They are closer than with tempered sequential Monte Carlo",
            metric="error",
            method="pgps",
            baselines=("smc", "smc-mala", "blackjax-smc"),
            where=SETUPS,
            decides=False,
        ),
        Statement(
            name="weights",
            text="Residual weights remove the bias of an inexact velocity",
            metric="error",
            method="pgps-B",
            baselines=("pgps-plain",),
            where=("far",),
            decides=False,
        ),
        Statement(
            name="speed",
            text="Solving for the velocity takes less than a fiftieth of the time of training it, 500 particles",
            metric="seconds",
            method="training-lstsq",
            baselines=("training-adam",),
            scale="ratio",
            bound=0.02,
            where=("n500",),
            decides=False,
        ),
        Statement(
            name="iteration",
            text="An iteration takes at most twice the time of one of BlackJAX's compiled tempered SMC, 1000 particles",
            metric="seconds",
            method="iteration-pgps",
            baselines=("iteration-blackjax",),
            scale="ratio",
            bound=2.0,
            where=("n1000",),
            decides=False,
        ),
    ),
    metrics=(
        Metric("error", "error of the modes' masses", "lower"),
        Metric("mass", "mass of the last mode", None),
        Metric("evidence_error", "error of the log evidence", "lower", "nat"),
        Metric("log_evidence", "log evidence", None, "nat"),
        Metric("ess", "effective sample size, of the particles", "higher"),
        Metric("evaluations", "evaluations of the target's score", "lower"),
        Metric("seconds", "time of a run", "lower", "s"),
    ),
    arms=_arms(),
    workload=Densities,
    scales={
        "smoke": Scale(
            2,
            {"particles": 125, "adam_particles": 20, "train_steps": 1, "iterations": 13, "most": 0, "only": "far"},
            {
                "run": Race(rounds=1, warmup=0),
                "training": Race(rounds=1, warmup=0),
                "iteration": Race(rounds=1, warmup=0),
            },
        ),
        "desk": Scale(
            6,
            {"particles": 1000, "adam_particles": 500, "train_steps": 300, "iterations": 650},
            {
                "run": Race(rounds=1, warmup=1),
                "training": Race(rounds=1, warmup=0),
                "iteration": Race(rounds=5, warmup=1),
            },
        ),
        "paper": Scale(
            10,
            {"particles": 5000, "adam_particles": 5000, "train_steps": 1000, "iterations": 4000},
            {
                "run": Race(rounds=5, warmup=1),
                "training": Race(rounds=3, warmup=0),
                "iteration": Race(rounds=5, warmup=1),
            },
        ),
    },
    unit="seed",
    snippet="""\
import torch
from assay.statistics import PGPS

def log_prob(x):                                  # unnormalised, rows [n, d] -> [n]
    return torch.logaddexp(-0.5 * x[:, 0] ** 2, -0.5 * (x[:, 0] - 8) ** 2)

result = PGPS(log_prob, dim=1, n_particles=1000, p0_scale=3.0, langevin_steps=10, seed=0).run()
far = result.weights[result.particles[:, 0] > 5].sum()
print(round(float(far), 2))                       # about a half
""",
    example="assay run pgps --target mymodel:log_posterior --dim 8 --start 2",
    growths=(
        Growth(
            name="particles",
            text="Time of a run against the number of particles",
            metric="seconds",
            arms=("time-lstsq", "time-smc", "time-blackjax", "time-svgd"),
            sizes={f"n{n}": float(n) for n in COUNTS},
            size_label="particles",
        ),
    ),
    notes=(
        "'far': half the mass at 8, which N(0, 9) hardly reaches; 'negligible': a thousandth at -5, as far from the "
        "start as the rest at 5; 'eight': four narrow modes in eight dimensions, whose masses are drawn anew for each "
        "seed.",
        "Langevin dynamics, MALA and PFG make 650 iterations, tempered SMC 60 levels of 10 moves and a weighting: no "
        "fewer evaluations of the target's score than PGPS with Langevin moves makes (for each particle 594 on 'far', "
        "about 650 on 'negligible', 307 on 'eight'). BlackJAX's SMC chooses its levels itself and gets moves for as "
        "many evaluations; its NUTS gets as many in ten chains with adaptation. SVGD has half the particles and twice "
        "the steps. SGLD is left out, since nothing here has minibatches.",
        "Steps: unadjusted moves have 0.01 (0.001 on 'eight') in all arms, the paper's. Adjusted moves (MALA, the last "
        "two SMC) have 0.5 (0.01), the best for tempered SMC of those tried on other seeds; PGPS was not tuned so.",
        "The residual weights and the least-squares velocity are ours. The paper's own mode trains a network by Adam "
        "and has particles of equal weight.",
        "The neural-network experiments of the paper are not repeated: the published code sums gradients over calls "
        "and applies softmax twice, so that a correct implementation cannot meet its numbers.",
    ),
)
