"""Kernel machines on distributions: what the theory promises of any convex loss, and whether they beat other features.

The paper is pure theory: it proves that kernel machines learn from distributions that are seen through samples, and
reports no numbers. Its consequences are measured here (risk falls with bags and with points, stability, the error of
the second stage), and, as a statement of our own, whether such machines beat moments where shape decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from assay.bench.claim import Arm, Claim, Growth, Metric, Paper, Race, Scale, Statement, Timed
from assay.claims._distribution_kernels_arms import deep_sets, forest, kernel_arm, linear_mean, mean_ridge, quiet, truth
from assay.errors import InputError
from assay.workloads.bags import COUNTS, GENERATORS, LEARNED, OWN, SIZES, TIMING, BagSplit, BagsWorkload

LEARN = (*LEARNED, OWN)
#: Bags and points that the smaller parts of the learning curve have: a third and a fifth.
FEWER_BAGS, FEWER_POINTS = 1 / 3, 1 / 5
#: Penalties and training bags of the stability statement, its refits, and the error probability of its bound.
LAMS, STABLE_BAGS, REFITS, DELTA = (1e-1, 1e-2, 1e-3), 200, 20, 0.1
#: Bags that stand in for distributions in the second stage, their points, and the sizes of the samples from them.
BIG_BAGS, BIG_POINTS, DRAWN = 50, 2560, (10, 40, 160, 640)
#: Bags of which all pairs are compared: by the package, and by the embedding.
FEW_PAIRED, PAIRED = 20, 200
#: Bags whose exact kernel means are affordable in the curve over bag sizes.
EXACT = tuple(name for name, m in SIZES.items() if m <= 512)


@dataclass
class BagOptions(BagsWorkload):
    """Bags, and how much work is spent on them."""

    epochs: int | None = field(default=None, metadata={"help": "Passes over the training bags for DeepSets, at most."})
    trees: int | None = field(
        default=None,
        metadata={"help": "Trees of a forest while settings are compared; six times as many are then judged."},
    )
    landmarks: int | None = field(
        default=None,
        metadata={"help": "Nystrom landmarks of the kernel machines, for ten thousand bags and more; none by default."},
    )

    def options(self) -> dict[str, Any]:
        """What arms read."""
        for name in ("epochs", "trees", "landmarks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be positive, got {value}")
        return {"epochs": self.epochs or 200, "trees": self.trees or 50, "landmarks": self.landmarks}


# --- theory ----------------------------------------------------------------------------------------------------------


def _stability(lam: float) -> Callable[[BagSplit, int], dict[str, float]]:
    """Arm that refits a machine without single bags and compares with both bounds.

    Hinge loss; of more than two classes, the most frequent against the rest; for numbers, the pinball loss at 1/2.
    """

    def arm(split: BagSplit, replicate: int) -> dict[str, float]:
        from assay.statistics import distribution_kernels as dk

        options = {"lam": lam, "fit_offset": False, "random_state": split.seed}
        train = split.train.take(np.arange(min(STABLE_BAGS, len(split.train))))
        y, test_y = train.y, split.test.y
        model: Any = dk.DistributionClassifier("hinge", **options)
        if split.task != "clf":
            model = dk.DistributionRegressor("pinball", quantile=0.5, **options)
            center, unit = y.mean(), y.std()
            y, test_y = (y - center) / unit, (test_y - center) / unit
        elif len(np.unique(y)) > 2:
            names, counts = np.unique(y, return_counts=True)
            y, test_y = (np.where(part == names[counts.argmax()], 1, 0) for part in (y, test_y))
        with quiet():
            found = dk.stability_report(
                model,
                train.arrays(),
                y,
                REFITS,
                test_bags=split.test.arrays(),
                test_y=test_y,
                delta=DELTA,
                random_state=split.seed,
            )
        return {
            "violations": found["violations"] + float(found["gap"] > found["gap_bound"]),
            "moved": found["max_sup_diff"] / found["bound"],
            "gap": found["gap"],
            "gap_bound": found["gap_bound"],
            "vacuous": found["vacuous"],
        }

    return arm


def _second_stage(name: str) -> Callable[[BagSplit, int], dict[str, float]]:
    """Arm that embeds samples of 10 to 640 points and compares with the embedding of the 2560 that they are from."""

    def arm(split: BagSplit, replicate: int) -> dict[str, float]:
        from assay.statistics import distribution_kernels as dk

        made: Any = {"sw": dk.SlicedWassersteinEmbedding, "kme": dk.MeanEmbedding}[name]
        big = GENERATORS[split.setting](BIG_BAGS, BIG_POINTS, np.random.default_rng([split.seed, 1]))
        embedding = made(random_state=split.seed).fit(split.train.arrays())
        found = dk.second_stage_report(embedding, big.arrays(), DRAWN, random_state=split.seed)
        return {"slope": found["slope"], "embedding_error": float(found["error"][-1])}

    return arm


# --- time ------------------------------------------------------------------------------------------------------------


def _on_one_core(call: Callable[[], object], **more: Any) -> Timed:
    """Time on one core: threads of small matrix products wait for each other where a machine is busy."""
    from threadpoolctl import ThreadpoolController

    controller = ThreadpoolController()

    def alone() -> object:
        with controller.limit(limits=1):
            return call()

    return Timed(alone, **more)


def _directions(split: BagSplit, bags: Any) -> Any:
    from assay.statistics.distribution_kernels import SlicedWassersteinEmbedding

    size = int(split.train.sizes[0])
    return SlicedWassersteinEmbedding(50, size, standardize=False, random_state=split.seed).fit(bags)


def pairs_time(split: BagSplit, replicate: int) -> Timed:
    """Sliced Wasserstein distances of all pairs of (at most) 200 bags, from the bags; the time of one pair."""
    from assay.statistics.distribution_kernels import bag_distances

    bags = split.train.arrays()[:PAIRED]
    embedding = _directions(split, bags)
    return _on_one_core(lambda: bag_distances(bags, embedding=embedding), per=len(bags) * (len(bags) - 1) // 2)


def pairs_numpy_time(split: BagSplit, replicate: int) -> Timed:
    """The same by hand: project, sort, and SciPy's distances. What a user who knows the embedding would write."""
    from scipy.spatial.distance import pdist

    bags = split.train.arrays()[:PAIRED]
    theta = _directions(split, bags).directions_
    cube = np.stack(bags)

    def call() -> Any:
        vectors = np.sort(cube @ theta.T, axis=1).reshape(len(cube), -1)
        return pdist(vectors) / np.sqrt(vectors.shape[1])

    return _on_one_core(call, per=len(bags) * (len(bags) - 1) // 2)


def pairs_pot_time(split: BagSplit, replicate: int) -> Timed:
    """POT, one call a pair, with the same directions, on 20 of the bags; the time of one pair."""
    import os

    os.environ.setdefault("POT_BACKEND_DISABLE_PYTORCH", "1")  # POT would load torch to look at arrays of NumPy
    import ot

    from assay.statistics.distribution_kernels import bag_distances

    bags = split.train.arrays()[:FEW_PAIRED]
    embedding = _directions(split, bags)
    directions = np.ascontiguousarray(embedding.directions_.T)
    i, j = np.triu_indices(len(bags), 1)

    def call() -> Any:
        return [ot.sliced_wasserstein_distance(bags[a], bags[b], projections=directions) for a, b in zip(i, j)]

    away = float(np.abs(bag_distances(bags, embedding=embedding)[i, j] - call()).max())
    return _on_one_core(call, metrics={"disagreement": away}, per=len(i))


def features_time(split: BagSplit, replicate: int) -> Timed:
    """Random features of kernel means, 500 numbers a bag."""
    from assay.statistics.distribution_kernels import MeanEmbedding

    bags = split.train.arrays()
    embedding = MeanEmbedding(length_scale=1.0, standardize=False, random_state=split.seed).fit(bags)
    return _on_one_core(lambda: embedding.transform(bags))


def features_peer_time(split: BagSplit, replicate: int) -> Timed:
    """Scikit-learn's RBFSampler with 500 features of all points, and their means over bags."""
    from sklearn.kernel_approximation import RBFSampler

    train = split.train
    sampler = RBFSampler(gamma=0.5, n_components=500, random_state=split.seed).fit(train.points)
    sizes = train.sizes[:, None]
    return _on_one_core(lambda: np.add.reduceat(sampler.transform(train.points), train.offsets[:-1], axis=0) / sizes)


def _fit_time(name: str) -> Callable[[BagSplit, int], Timed]:
    """Arm that times ``DistributionRegressor().fit``: scales, embedding, kernel matrix and solution."""

    def arm(split: BagSplit, replicate: int) -> Timed:
        from assay.statistics import distribution_kernels as dk

        embedding: Any = {
            "sw": lambda: dk.SlicedWassersteinEmbedding(random_state=split.seed),
            "kme": lambda: dk.MeanEmbedding(random_state=split.seed),
            "exact": lambda: dk.MeanEmbedding(n_components=None, random_state=split.seed),
        }[name]()
        model = dk.DistributionRegressor(embedding=embedding, random_state=split.seed)
        bags, y = split.train.arrays(), split.train.y
        return _on_one_core(lambda: model.fit(bags, y))

    return arm


# --- the claim -------------------------------------------------------------------------------------------------------

_TORCH, _SKLEARN, _POT = ("torch",), ("scikit-learn",), ("POT>=0.9",)
_SHAPE = ("modes", OWN)
_MOMENTS = ("moments", "moments_mixed")


def _learned(name: str, text: str, baseline: str, **more: Any) -> Statement:
    return Statement(name, text, "risk", "sw", (baseline,), **more)


CLAIM = Claim(
    slug="distribution_kernels",
    title="Kernel machines on distributions",
    family="statistics",
    paper=Paper(
        title="On Statistical Learning Theory for Distributional Inputs",
        authors="Christian Fiedler, Pierre-François Massiani, Friedrich Solowjow, Sebastian Trimpe",
    ),
    question="My inputs are bags of points, not vectors: would a kernel machine on whole distributions beat averages?",
    statements=(
        _learned(
            "learns",
            "with three times the bags and five times the points the risk is lower (hinge, squared and pinball loss)",
            "sw_small",
        ),
        Statement(
            "learns_logistic",
            "the same holds for the logistic loss",
            "risk",
            "logistic",
            ("logistic_small",),
            where=("modes",),
        ),
        *(
            Statement(
                f"stable_{lam:g}",
                f"no refit without a bag moves f by more than kappa² L/(lam N), and no generalisation gap exceeds its "
                f"bound (lam = {lam:g})",
                "violations",
                f"stability_{lam:g}",
                constant=0.0,
                bound=0.5,
            )
            for lam in LAMS
        ),
        *(
            Statement(
                f"rate_{name}",
                f"the error of {text} from M points falls at least like M^-0.4 (theory: M^-0.5)",
                "slope",
                f"rate_{name}",
                constant=0.0,
                bound=-0.40,
                where=("modes",),
            )
            for name, text in (("sw", "sliced Wasserstein embeddings"), ("kme", "kernel means"))
        ),
        Statement(
            "shape",
            "where shape decides, sliced Wasserstein makes at least 0.03 less error than moments up to order four",
            "error",
            "sw",
            _MOMENTS,
            bound=-0.03,
            where=_SHAPE,
        ),
        Statement(
            "shape_kme",
            "kernel means make at least 0.03 less error than moments up to order four",
            "error",
            "kme",
            _MOMENTS,
            bound=-0.03,
            where=_SHAPE,
            decides=False,
        ),
        Statement(
            "everyone",
            "sliced Wasserstein makes less error than every other kind of model here",
            "error",
            "sw",
            (*_MOMENTS, "moments_forest", "mean_ridge", "deepsets"),
            decides=False,
        ),
        Statement(
            "geometric",
            "on a geometric label, sliced Wasserstein makes less error than kernel means from few bags of few points",
            "error",
            "sw_small",
            ("kme_small",),
            decides=False,
        ),
        _learned("bags", "three times the bags alone lower the risk", "sw_few_bags", decides=False),
        _learned("points", "five times the points alone lower the risk", "sw_few_points", decides=False),
        Statement(
            "rate_gap",
            "the rate M^-0.4 also holds for two clusters with a gap, where theory guarantees M^-0.25 only",
            "slope",
            "rate_sw",
            constant=0.0,
            bound=-0.40,
            where=("axis",),
            decides=False,
        ),
        Statement(
            "pairs",
            "on one core, a sliced Wasserstein distance takes a hundredth of the time of POT's (all pairs of 200 bags)",
            "seconds",
            "pairs",
            ("pairs_pot",),
            scale="ratio",
            bound=0.01,
            decides=False,
        ),
        Statement(
            "features",
            "on one core, random features of kernel means take a third of the time of RBFSampler and means",
            "seconds",
            "features",
            ("features_sampler",),
            scale="ratio",
            bound=1 / 3,
            decides=False,
        ),
    ),
    metrics=(
        Metric("error", "Error (wrong classes; 1 − R²; pinball loss over that of no features)", "lower"),
        Metric("risk", "Risk (mean loss that is learned)", "lower"),
        Metric("coverage", "Share between the 5% and 95% quantiles", None),
        Metric("lam", "Penalty chosen", None),
        Metric("violations", "Bounds exceeded", "lower", counted=True),
        Metric("moved", "Largest move of f over its bound", None),
        Metric("gap", "Generalisation gap", None),
        Metric("gap_bound", "Bound on the gap (error probability 0.1)", None),
        Metric("vacuous", "The bound promises no more than f = 0 does", None),
        Metric("slope", "Exponent of the embedding error in M", "lower"),
        Metric("embedding_error", "Embedding error at M = 640", "lower"),
        Metric("disagreement", "Largest difference of distances", None),
        Metric("seconds", "Time", "lower", "s"),
        Metric("seconds_low", "Time, lower quartile", None, "s"),
        Metric("seconds_high", "Time, upper quartile", None, "s"),
    ),
    arms=(
        Arm("sw", kernel_arm("sw"), "method", "Sliced Wasserstein, Gaussian kernel", where=LEARN),
        Arm("kme", kernel_arm("kme"), "method", "Kernel means, Gaussian kernel", where=LEARN),
        Arm("kme_linear", linear_mean, "ablation", "Kernel means, linear kernel", where=LEARN),
        Arm("moments", kernel_arm("moments"), "baseline", "Moments (each coordinate), Gaussian kernel", where=LEARN),
        Arm("moments_mixed", kernel_arm("moments_mixed"), "baseline", "All moments, Gaussian kernel", where=LEARN),
        Arm("moments_forest", forest, "baseline", "All moments, trees", requires=_SKLEARN, where=LEARN),
        Arm("mean_ridge", mean_ridge, "baseline", "Means, ridge", requires=_SKLEARN, where=LEARN),
        Arm("deepsets", deep_sets, "baseline", "DeepSets", requires=_TORCH, where=LEARN),
        Arm("truth", truth, "reference", "Quantiles given the distribution", where=("spread",)),
        Arm(
            "sw_small",
            kernel_arm("sw", bags=FEWER_BAGS, points=FEWER_POINTS),
            "ablation",
            "a third of the bags, a fifth of the points",
            where=LEARN,
        ),
        Arm("sw_few_bags", kernel_arm("sw", bags=FEWER_BAGS), "ablation", "a third of the bags", where=LEARN),
        Arm("sw_few_points", kernel_arm("sw", points=FEWER_POINTS), "ablation", "a fifth of the points", where=LEARN),
        Arm(
            "kme_small",
            kernel_arm("kme", bags=FEWER_BAGS, points=FEWER_POINTS),
            "ablation",
            "Kernel means, a third of the bags, a fifth of the points",
            where=("axis",),
        ),
        Arm("logistic", kernel_arm("sw", loss="logistic"), "method", "Logistic loss", where=("modes",)),
        Arm(
            "logistic_small",
            kernel_arm("sw", loss="logistic", bags=FEWER_BAGS, points=FEWER_POINTS),
            "ablation",
            "Logistic loss, a third of the bags, a fifth of the points",
            where=("modes",),
        ),
        *(
            Arm(f"stability_{lam:g}", _stability(lam), "method", f"Stability, lam = {lam:g}", where=_SHAPE)
            for lam in LAMS
        ),
        Arm("rate_sw", _second_stage("sw"), "method", "Sliced Wasserstein from M points", where=("modes", "axis")),
        Arm("rate_kme", _second_stage("kme"), "method", "Kernel means from M points", where=("modes", "axis")),
        Arm("pairs", pairs_time, "method", "A distance of SW vectors", race="pairs", where=(TIMING,)),
        Arm(
            "pairs_pot",
            pairs_pot_time,
            "baseline",
            "A distance by POT",
            requires=_POT,
            race="pairs",
            where=(TIMING,),
        ),
        Arm(
            "pairs_numpy",
            pairs_numpy_time,
            "reference",
            "A distance, sorted by hand",
            race="pairs",
            where=(TIMING,),
        ),
        Arm("features", features_time, "method", "500 random features", race="features", where=(TIMING,)),
        Arm(
            "features_sampler",
            features_peer_time,
            "baseline",
            "RBFSampler and means",
            requires=_SKLEARN,
            race="features",
            where=(TIMING,),
        ),
        Arm("fit_sw", _fit_time("sw"), "method", "Fit, sliced Wasserstein", race="fit", where=(*COUNTS, *SIZES)),
        Arm("fit_kme", _fit_time("kme"), "method", "Fit, random features", race="fit", where=(*COUNTS, *SIZES)),
        Arm("fit_exact", _fit_time("exact"), "ablation", "Fit, exact kernel means", race="fit", where=EXACT),
    ),
    workload=BagOptions,
    scales={
        "smoke": Scale(
            2,
            {
                "train_bags": 40,
                "test_bags": 60,
                "points": 30,
                "epochs": 5,
                "trees": 5,
                "settings": ["modes", TIMING, "bags100", "points64"],
            },
            {"pairs": Race(1, 1), "features": Race(1, 1), "fit": Race(1, 1)},
        ),
        "desk": Scale(8, {}, {"pairs": Race(3, 1), "features": Race(5, 1), "fit": Race(2, 1)}),
        # The paper has no experiments. This is the size at which its users work: flow cytometry, aerosols, patches.
        "paper": Scale(
            10,
            {"train_bags": 10_000, "test_bags": 5000, "points": 1000, "landmarks": 1000},
            {"pairs": Race(5, 1), "features": Race(5, 1), "fit": Race(5, 1)},
        ),
    },
    unit="seed",
    growths=(
        Growth(
            "bags",
            "Time of a fit on one core against the number of bags (of 100 points)",
            "seconds",
            ("fit_sw", "fit_kme"),
            {name: float(n) for name, n in COUNTS.items()},
            "bags",
        ),
        Growth(
            "points",
            "Time of a fit on one core against the points of a bag (16 bags)",
            "seconds",
            ("fit_sw", "fit_kme", "fit_exact"),
            {name: float(m) for name, m in SIZES.items()},
            "points a bag",
        ),
    ),
    snippet="""\
import numpy as np
from assay.statistics import DistributionClassifier

rng = np.random.default_rng(0)
label = rng.integers(2, size=100)
bags = [rng.laplace(size=200) if k else rng.normal(0, 2**0.5, 150) for k in label]  # equal means and variances
model = DistributionClassifier(lam="cv", random_state=0).fit(bags[:80], label[:80])
print(model.score(bags[80:], label[80:]))
""",
    example="assay run distribution_kernels --bags cells.parquet --bag patient --label outcome",
    notes=(
        "The paper proves bounds and reports no numbers. The constants of the bounds that are checked here are derived "
        "in the documentation of stability_report; the statement about moments is ours.",
        "The generalisation bound holds in every run and is vacuous for every penalty that anybody would use: it then "
        "promises no more than the loss of the constant 0. See the metric 'vacuous'.",
        "The bounds want a kernel that does not depend on the data. The stability arms fix the median length scale of "
        "all training bags beforehand.",
        "Test bags have as many points as training bags. Bags of 20 points differ more by chance than by the label of "
        "'modes': nothing learns much from them.",
        "Every arm chooses among 35 or 36 candidates on the same fifth of the training bags: penalties and length "
        "scales, penalties, sizes of leaves and features, or learning rates and passes.",
        "A pair's time is that of one among all pairs: POT is called on 20 bags, the embedding makes all distances of "
        "200. 'Sorted by hand' is what is left of the ratio once a user knows that the embedding exists.",
    ),
)
