"""Steps of NormGD to the statistical radius of singular fits, which should hardly grow with n.

Every arm starts at the same point and is ended by the same watch. Fixed-step gradient descent gets the largest step
that is stable on a pilot sample, Adam the best of four rates there; neither search is counted or timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from assay.bench.claim import Arm, Claim, Growth, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.claims import _normgd_solvers as solvers
from assay.workloads.singular import CONTRASTS, MODELS, REAL, Singular, SingularFits, label

#: Sizes that curves are drawn for, where a run has them.
SIZES = sorted({125 * 2**k for k in range(17)} | {b * 10**k for b in (1, 2, 5) for k in range(2, 8)})
OWN = ("data", "mixture", "loss")
#: Errors below this share of the radius count as this share: a fit at 0 has no ratio.
LEAST_ERROR = 0.01

Shared = tuple[Singular, ...]


def _option(name: str, s: Singular, minimum: float) -> float:
    """What a solver is tuned by."""
    if name in ("gd", "gd_long"):
        return solvers.largest_step(s, overshoot=name == "gd_long")
    if name == "adam":
        return solvers.best_rate(s)
    return {"normgd": 0.5, "normgd1": 1.0, "newton_modified": 1.0, "polyak_oracle": minimum}.get(name, 0.0)


def _final(name: str, model: Any, s: Singular, step: float) -> dict[str, float]:
    """Final error of an arm in statistical radii."""
    from assay.statistics.normgd import normgd_minimize

    found = {}
    if name.startswith("normgd"):
        x = normgd_minimize(model, s.start, jac=True, hess=True, eta=step).x
    elif name == "gd":
        x, taken = solvers.final_descent(s, step)
        found["stopped"] = float(taken)
    else:
        x = solvers.lowest(model, s).x
    return found | {"error": max(s.distance(x) / s.radius, LEAST_ERROR)}


def _arm(name: str, solver: solvers.Solver) -> Callable[[Shared, int], dict[str, float]]:
    def arm(shared: Shared, replicate: int) -> dict[str, float]:
        counts: list[int | None] = []
        found: dict[str, float] = {}
        step = 0.0
        for s in shared:
            model = solvers.model_of(s)
            unknown = name == "polyak_oracle" or not np.isfinite(s.radius)
            minimum = float(solvers.lowest(model, s).fun) if unknown else -np.inf
            if not counts or name == "polyak_oracle":  # the pilot sample is the same for all sizes
                step = _option(name, s, minimum)
            if name in ("gd", "gd_long"):
                count, step = solvers.stable_descent(model, s, step, minimum)
                found["step"] = step
            else:
                count = solvers.steps_of(solver, model, s, step, minimum)
            counts.append(count)
            if len(shared) == 1 and name in ("normgd", "normgd1", "gd", "lbfgs") and np.isfinite(s.radius):
                found |= _final(name, model, s, step)
        found["reached"] = float(np.mean([c is not None for c in counts]))
        if name == "adam":
            found["step"] = step
        done = [c for c in counts if c is not None]
        if len(done) < len(counts):
            return found  # without a count: a run that fails is no fast one
        if len(shared) == 1:
            return found | {"steps": float(max(done[0], 1))}
        x, y = np.log([len(s.X) for s in shared]), np.maximum(np.array(done, dtype=float), 1)
        slope = float(np.polyfit(x, np.log(y), 1)[0])
        rest = y - np.polyval(np.polyfit(x, y, 1), x)
        spread = float(((y - y.mean()) ** 2).sum())
        straight = 1 - float((rest**2).sum()) / spread if spread else 1.0
        return found | {"slope": slope, "growth": slope, "straight": straight}

    return arm


def _timed(name: str, solver: solvers.Solver) -> Callable[[Shared, int], Timed]:
    """Time to the radius at the largest size, on one thread.

    NumPy and SciPy bring a BLAS each. With several threads, the two pools fight over the cores in L-BFGS, and matrices
    of four columns are too small to gain from them.
    """

    def arm(shared: Shared, replicate: int) -> Timed:
        from threadpoolctl import ThreadpoolController

        s = shared[-1]
        model = solvers.model_of(s)
        minimum = float(solvers.lowest(model, s).fun)
        option = _option(name, s, minimum)
        if name == "gd":
            count, option = solvers.stable_descent(model, s, option, minimum)
        else:
            count = solvers.steps_of(solver, model, s, option, minimum)
        if count is None:
            raise RuntimeError(f"{name} did not reach the radius")
        controller = ThreadpoolController()

        def call() -> None:
            with controller.limit(limits=1):
                solvers.steps_of(solver, model, s, option, minimum)

        return Timed(call, {"passes": float(count)})

    return arm


def scikit_em(shared: Shared, replicate: int) -> dict[str, float]:
    """scikit-learn's EM with its stopping rule (1e-3 in the likelihood, at most 100 iterations), from the same start.

    It also fits weights and a variance: the symmetric model is not among its options.
    """
    import warnings

    from sklearn.mixture import GaussianMixture

    if len(shared) > 1:
        return {}
    s = shared[0]
    model = GaussianMixture(2, covariance_type="spherical", weights_init=[0.5, 0.5],
                            means_init=np.stack([s.start, -s.start]), precisions_init=[1.0, 1.0])  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(s.X)
    x = (model.means_[0] - model.means_[1]) / 2
    return {"stopped": float(model.n_iter_), "error": max(s.distance(x) / s.radius, LEAST_ERROR)}


_RUNS: dict[str, tuple[solvers.Solver, Any, str]] = {
    "normgd": (solvers.normgd, "method", "NormGD, eta 0.5"),
    "normgd1": (solvers.normgd, "ablation", "NormGD, eta 1"),
    "gd": (solvers.descent, "baseline", "gradient descent, largest stable step"),
    "gd_long": (solvers.descent, "baseline", "gradient descent, longest step with falling loss"),
    "em": (lambda watch, s, _: solvers.descent(watch, s, 1.0), "baseline", "EM"),
    "newton": (solvers.newton, "baseline", "Newton, raw"),
    "newton_modified": (solvers.newton, "baseline", "Newton, moduli of eigenvalues"),
    "polyak_oracle": (solvers.polyak_oracle, "reference", "Polyak's step, minimum known"),
    "polyak": (solvers.polyak, "baseline", "Polyak's step, best seen"),
    "adam": (solvers.adam, "baseline", "Adam (torch), best of four rates"),
    "trust_exact": (solvers.trust_exact, "baseline", "trust region (SciPy's trust-exact), evaluations"),
    "lbfgs": (solvers.lbfgs, "baseline", "L-BFGS (SciPy), evaluations"),
}
_NEEDS = {"adam": ("torch",), "gd": ("numba", "scipy")}
_LINKS = ("glm2", "glm3")
#: Sizes at which final errors decide: those of the scales.
_EACH = tuple(f"{m}-{label(n)}" for m in MODELS for n in (500, 1000, 2000, 4000, 16000, 64000, 256000))
_GMM = tuple(f"gmm-{label(n)}" for n in SIZES)
_LARGE = tuple(f"{m}-64k" for m in MODELS)
_SIZED = tuple(f"{m}-{label(n)}" for m in MODELS for n in SIZES)
_GMM_DESK = tuple(f"gmm-{n}k" for n in (1, 4, 16, 64))


def _growths() -> tuple[Growth, ...]:
    """Steps of all arms, and time of the timed ones, beside the exponents of the paper's theory."""
    setting, source = "theory without signal, up to constants", "the paper's examples"
    power = {"glm2": "1/2", "glm3": "2/3", "gmm": "1/2"}
    made = []
    for m in (*MODELS, *CONTRASTS):
        sizes = {f"{m}-{label(n)}": float(n) for n in SIZES}
        arms = tuple(n for n in _RUNS if n != "em" or m == "gmm")
        if m not in power:
            made.append(Growth(m, f"Steps to the radius, {m}", "steps", arms, sizes, "rows"))
            continue
        steps = Reported(f"NormGD log n, gradient descent and EM n^({power[m]})", setting, source)
        total = Reported(f"NormGD n log n, gradient descent and EM n^(1 + {power[m]})", setting, source)
        timed = tuple(f"time_{n}" for n in ("normgd1", "gd", *(["em"] if m == "gmm" else []), "lbfgs"))
        made += [
            Growth(m, f"Steps to the radius, {m}", "steps", arms, sizes, "rows", reported=steps),
            Growth(f"{m}-time", f"Time to the radius, {m}", "seconds", timed, sizes, "rows", 4000.0, total),
        ]
    return tuple(made)


CLAIM = Claim(
    slug="normgd",
    title="Normalized gradient descent (NormGD)",
    family="statistics",
    paper=Paper(
        title="Improving Computational Complexity in Statistical Models with Local Curvature Information",
        authors="Ren, Zhuo, Sanghavi, Ho and co-authors",
    ),
    question="Would steps divided by the largest curvature fit a singular model in far fewer passes over the data?",
    statements=(
        Statement("flat", "NormGD's steps to the radius grow with an exponent below 0.30", "slope", "normgd",
                  constant=0.30, bound=0.0, where=MODELS,
                  reported=Reported("order log n", "theory, no signal", "abstract")),
        Statement("steep", "those of gradient descent grow with an exponent above 0.35", "growth", "gd",
                  constant=0.35, bound=0.0, where=_LINKS),
        Statement("steep EM", "for the mixture, those of EM (gradient descent with step 1) grow so", "growth", "em",
                  constant=0.35, bound=0.0, where=("gmm",)),
        Statement("steep mixture", "for the mixture, those of gradient descent with the largest stable step grow so",
                  "growth", "gd", constant=0.35, bound=0.0, where=("gmm",), decides=False),
        Statement("straight", "NormGD's steps are linear in log n: R^2 of a seed's counts above 0.95 on average",
                  "straight", "normgd", constant=0.95, where=MODELS, decides=False),
        Statement("time", "at the largest size NormGD (eta 1) reaches the radius in less time than gradient descent",
                  "seconds", "time_normgd1", baselines=("time_gd",), scale="ratio", where=_LINKS),
        Statement("time EM", "and, for the mixture, in less time than EM", "seconds", "time_normgd1",
                  baselines=("time_em",), scale="ratio", where=("gmm",)),
        Statement("time mixture", "and than gradient descent with the largest stable step", "seconds", "time_normgd1",
                  baselines=("time_gd",), scale="ratio", where=("gmm",), decides=False),
        Statement("error", "NormGD's final error is at most 1.25 times that of gradient descent and of the MLE",
                  "error", "normgd", baselines=("gd", "lbfgs"), scale="ratio", bound=1.25, where=_EACH),
        Statement("error back", "and at 64000 rows the MLE's is at most 1.25 times that of NormGD", "error", "lbfgs",
                  baselines=("normgd",), scale="ratio", bound=1.25, where=_LARGE),
        Statement("error of descent", "and gradient descent's is at most 1.25 times that of NormGD", "error", "gd",
                  baselines=("normgd",), scale="ratio", bound=1.25, where=_LARGE),
        Statement("ten times", "for p = 3 NormGD (eta 1) takes at most a tenth of the time of gradient descent",
                  "seconds", "time_normgd1", baselines=("time_gd",), scale="ratio", bound=0.1, where=("glm3",),
                  decides=False),
        Statement("L-BFGS", "NormGD (eta 1) takes at most 1.2 times as long as L-BFGS", "seconds", "time_normgd1",
                  baselines=("time_lbfgs",), scale="ratio", bound=1.2, where=MODELS, decides=False),
        Statement("scikit-learn", "scikit-learn's EM with its defaults stops at a larger error", "error", "normgd",
                  baselines=("em_sklearn",), scale="ratio", where=_GMM_DESK, decides=False),
        Statement("real", "on tables NormGD fits a symmetric mixture in fewer steps than gradient descent and EM",
                  "steps", "normgd", baselines=("gd", "em"), scale="ratio",
                  where=(*REAL, "mixture"), decides=False),
        Statement("own", "on your own fit NormGD needs fewer steps than gradient descent", "steps", "normgd",
                  baselines=("gd",), scale="ratio", where=OWN),
    ),
    metrics=(
        Metric("steps", "steps to 1.5 statistical radii", "lower"),
        Metric("slope", "exponent of steps in n", "lower"),
        Metric("growth", "exponent of steps in n (larger is what is claimed)", "higher"),
        Metric("straight", "R^2 of steps on log n", "higher"),
        Metric("error", "final error in statistical radii", "lower"),
        Metric("reached", "share of runs that reach the radius", "higher"),
        Metric("step", "step size or rate from the pilot sample", None),
        Metric("stopped", "iterations after which it stops by itself", None),
        Metric("passes", "evaluations in the timed call", None),
        Metric("seconds", "time to 1.5 statistical radii", "lower", "s"),
        Metric("seconds_low", "its lower quartile", None, "s"),
        Metric("seconds_high", "its upper quartile", None, "s"),
    ),
    arms=(
        *(Arm(name, _arm(name, run), role, text, _NEEDS.get(name, ("scipy",)),
              where=("gmm", *_GMM, *REAL, "mixture") if name == "em" else ())
          for name, (run, role, text) in _RUNS.items()),
        Arm("em_sklearn", scikit_em, "baseline", "EM (scikit-learn, its stopping rule)", ("scikit-learn",), where=_GMM),
        *(Arm(f"time_{name}", _timed(name, run), role, text, ("scipy",), "fit",
              ("gmm", *_GMM) if name == "em" else (*MODELS, *CONTRASTS, *OWN, *_SIZED))
          for name, (run, role, text) in _RUNS.items() if name in ("normgd1", "gd", "em", "lbfgs")),
    ),
    workload=SingularFits,
    scales={
        "smoke": Scale(2, {"sizes": [500, 2000], "models": ["glm2"]}, {"fit": Race(1)}),
        "desk": Scale(8, {"models": [*MODELS, *REAL]}, {"fit": Race(3)}),
        "paper": Scale(20, {"sizes": [1000, 4000, 16000, 64000, 256000], "models": [*MODELS, *CONTRASTS, *REAL]},
                       {"fit": Race(7)}),
    },
    unit="seed",
    snippet="""\
import numpy as np
from assay.statistics import PolynomialLinkRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(2000, 4))
model = PolynomialLinkRegressor(power=2, random_state=0).fit(X, rng.normal(size=2000))
print(model.coef_, model.singular_, model.radius_)
""",
    example="assay run normgd --data table.csv --target y --power 2",
    growths=_growths(),
    notes=(
        "L-BFGS needs about as few evaluations as NormGD with eta 1, and each is cheaper: it reads no Hessian.",
        "Newton's method and SciPy's trust region take as many steps as NormGD with eta 1. Without signal the truth 0 "
        "is stationary, so that raw Newton, which also runs into saddles, is helped by it.",
        "Final errors are compared with the optimum next to the common start; a sample's loss can have several.",
        "Exponents are fitted to each seed's counts at all sizes. Over such sizes log n itself has one above 0.",
        "For the mixture the largest stable step jumps from the common start into the radius in most samples, at every "
        "n: an accident of the start's norm of 1.7. What decides there is EM, which is descent with step 1.",
        "Gradient descent passes the truth 0, where the loss is flat, and crawls on to the optimum for up to millions "
        "of steps. Its final error is taken there: cut short, it can be smaller than that of the optimum, which is no "
        "better fit.",
        "On tables the truth is unknown: a run ends when the loss has fallen to a millionth of its way to the minimum, "
        "which L-BFGS finds. Such fits need not be singular.",
        "Longer steps than the stable one descend, too, but by jumps past the optimum: at small n one of them can land "
        "within the radius, depending on the norm of the start (arm gd_long).",
    ),
)  # fmt: skip
