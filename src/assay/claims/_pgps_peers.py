"""Samplers of BlackJAX on the mixtures of the claim on PGPS, compiled once for each shape in a process.

The parameters of a mixture are arguments of the compiled functions, so that seeds with other masses compile nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from assay.workloads.densities import GaussianMixture

CHAINS = 10  # of NUTS
QUICK = {"xla_backend_optimization_level": 0}  # compiles in half the time; for what is not timed
TARGET_ESS = 0.99  # of adaptive tempered SMC: many small levels
# Levels that it then takes on each target, at least; they vary by one between seeds. Moves are as many as the budget of
# evaluations allows.
LEVELS = {"far": 20, "negligible": 32, "eight": 74}


def log_densities() -> tuple[Any, Any]:
    """Log density of the start and of the mixture at a point ``[d]``, given parameters (see :func:`parameters`)."""
    import jax
    import jax.numpy as jnp

    def start(x: Any, given: Any) -> Any:
        constant = x.size * (jnp.log(given["start"]) + 0.5 * math.log(2 * math.pi))
        return -0.5 * jnp.sum((x / given["start"]) ** 2) - constant

    def target(x: Any, given: Any) -> Any:
        constant = x.size * (jnp.log(given["sd"]) + 0.5 * math.log(2 * math.pi))
        squares = jnp.sum(((x - given["means"]) / given["sd"]) ** 2, -1)
        return jax.nn.logsumexp(given["log_weights"] - 0.5 * squares) - constant

    return start, target


def parameters(mixture: GaussianMixture) -> dict[str, Any]:
    """What the compiled functions need of a mixture."""
    return {
        "log_weights": np.log(np.array(mixture.weights)),
        "means": np.array(mixture.means),
        "sd": np.array(float(mixture.sd)),
        "start": np.array(float(mixture.start)),
    }


def moves_for(setting: str, evaluations: int) -> int:
    """Moves of each level of adaptive SMC, so that every particle's score is evaluated that often at least."""
    return max(1, math.ceil(evaluations / LEVELS.get(setting, LEVELS["far"])) - 1)


@cache
def _smc(moves: int, step_size: float, timed: bool) -> Any:
    import jax
    import jax.numpy as jnp
    from blackjax import adaptive_tempered_smc, mala
    from blackjax.smc import resampling

    start, target = log_densities()

    def run(x0: Any, key: Any, given: Any) -> Any:
        sampler = adaptive_tempered_smc(
            lambda x: start(x, given),
            lambda x: target(x, given) - start(x, given),
            mala.build_kernel(),
            mala.init,
            {"step_size": jnp.array([step_size])},
            resampling.systematic,
            TARGET_ESS,
            num_mcmc_steps=moves,
        )

        def level(carry: Any) -> Any:
            state, key, evidence, levels = carry
            key, own = jax.random.split(key)
            state, info = sampler.step(own, state)
            return state, key, evidence + info.log_likelihood_increment, levels + 1

        zero = jnp.zeros((), x0.dtype)
        first = sampler.init(x0)._replace(tempering_param=zero)
        last, _, evidence, levels = jax.lax.while_loop(
            lambda carry: carry[0].tempering_param < 1, level, (first, key, zero, 0)
        )
        return last.particles, last.weights, evidence, levels

    return jax.jit(run, compiler_options=None if timed else QUICK)


def tempered_smc(
    mixture: GaussianMixture, x0: np.ndarray, *, moves: int, step_size: float, seed: int, timed: bool = False
) -> tuple[np.ndarray, np.ndarray, float, int]:
    """Adaptive tempered SMC of BlackJAX with MALA moves, from draws ``[n, d]`` of the start, in float64.

    ``timed`` compiles with all optimisations, which takes twice the time.

    Returns
    -------
    Particles, weights, log evidence, and evaluations of a gradient (values of the likelihood besides, two for each
    particle and level, are not counted).
    """
    import jax

    with jax.enable_x64(True):
        found = _smc(moves, step_size, timed)(x0, jax.random.key(seed), parameters(mixture))
        particles, weights, evidence, levels = (np.asarray(v) for v in found)
    return particles, weights, float(evidence), int(levels) * (moves + 1) * len(x0)


@cache
def _nuts(warmup: int, draws: int) -> Any:
    import jax
    from blackjax import nuts, window_adaptation

    _, target = log_densities()

    def chain(x0: Any, key: Any, given: Any) -> Any:
        first, second = jax.random.split(key)

        def log_density(x: Any) -> Any:
            return target(x, given)

        adapted, adaptation = window_adaptation(nuts, log_density).run(first, x0, warmup)
        step = nuts(log_density, **adapted.parameters).step

        def one(state: Any, key: Any) -> Any:
            state, info = step(key, state)
            return state, (state.position, info.num_integration_steps)

        _, (positions, steps) = jax.lax.scan(one, adapted.state, jax.random.split(second, draws))
        return positions, steps.sum() + adaptation.info.num_integration_steps.sum()

    return jax.jit(jax.vmap(chain, (0, 0, None)), compiler_options=QUICK)


def nuts_chains(
    mixture: GaussianMixture, x0: np.ndarray, *, evaluations: int, seed: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """NUTS of BlackJAX: a chain from each row of ``x0``, each with window adaptation, draws of all taken together.

    A fifth of the steps adapt (at most 1000 a chain). Numbers of steps are set as if each took 2.4 evaluations, a
    little less than they do in one dimension; what they do take is counted.

    Returns
    -------
    Draws ``[chains * draws, d]``, equal weights, and evaluations of a gradient.
    """
    import jax

    steps = max(20, math.ceil(evaluations / (2.4 * len(x0))))
    warmup = min(1000, max(10, steps // 5))
    with jax.enable_x64(True):
        keys = jax.random.split(jax.random.key(seed), len(x0))
        positions, count = _nuts(warmup, steps - warmup)(x0, keys, parameters(mixture))
        points = np.asarray(positions).reshape(-1, x0.shape[1])
        return points, np.full(len(points), 1 / len(points)), int(np.asarray(count).sum())
