"""DHEL and kernel contrastive losses: known minima, no bias in the batch size, less collapse, as good downstream."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.bench.claim import Arm, Claim, Growth, Metric, Paper, Race, Reported, Scale, Statement, Timed
from assay.claims._options import filled
from assay.errors import InputError
from assay.workloads.views import Items, load_images, load_pairs, mnist_digits, small_digits

if TYPE_CHECKING:
    from assay.claims._dhel_training import Training

SIZES = {f"m{m}": m for m in (16, 32, 64, 128, 256, 1024)}
NETWORKS = ("small", "resnet18")


# --- workload ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Theory:
    """What all arms of a replicate share where no encoder is trained."""

    seed: int
    batches: int


@dataclass(frozen=True)
class Outputs:
    """Two views as an encoder may give them, for timing."""

    u: Any
    v: Any


@dataclass(frozen=True)
class ViewTask:
    """Exact statements, encoders trained on items, and a race over batch sizes."""

    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    seed: int
    items: Items
    options: dict[str, Any]

    def prepare(self, setting: str, replicate: int) -> Theory | Training | Outputs:
        """The share of one seed. Items are dealt to training, validation and test once for all seeds."""
        seed = 1000 * self.seed + replicate
        if setting == "theory":
            return Theory(seed, self.options["batches_drawn"])
        if setting in SIZES:
            import torch

            generator = torch.Generator().manual_seed(seed)
            u, v = torch.randn(2, SIZES[setting], 128, generator=generator).unbind()
            device = self.options["device"]
            return Outputs(u.to(device).requires_grad_(), v.to(device).requires_grad_())
        from assay.claims._dhel_training import Training

        o, n = self.options, len(self.items)
        order = np.random.RandomState(0).permutation(n)
        test, val = n // 5, n // 10
        return Training(
            self.items,
            train=order[test + val :][: o["items"]],
            val=order[test : test + val],
            test=order[:test],
            epochs=o["epochs"],
            batches=(o["small_batch"], o["batch"]),
            temperatures=o["temperatures"],
            network=o["network"],
            device=o["device"],
            seed=seed,
        )


@dataclass(frozen=True)
class TwoViews:
    """Items to learn from, and how long."""

    images: str | None = field(
        default=None,
        metadata={"help": "Folder of your images; its sub-folders, if any, are classes. [default: MNIST digits]"},
    )
    size: int = field(default=32, metadata={"help": "Pixels a side to which --images are resized."})
    pairs: str | None = field(
        default=None, metadata={"help": "Your paired rows: .npz with view0 and view1 (n, features), maybe labels."}
    )
    items: int | None = field(default=None, metadata={"help": "Items to train on, at most seven tenths of all."})
    epochs: int | None = field(default=None, metadata={"help": "Passes over them, for every loss."})
    batch: int | None = field(default=None, metadata={"help": "Items of a batch."})
    small_batch: int | None = field(default=None, metadata={"help": "Items of a small batch, for comparison."})
    temperatures: list[float] | None = field(
        default=None, metadata={"help": "Temperatures that each loss with one may choose from."}
    )
    network: str | None = field(default=None, metadata={"help": "Encoder of images: small or resnet18."})
    batches_drawn: int | None = field(default=None, metadata={"help": "Random batches that a bias is measured on."})
    largest: int | None = field(default=None, metadata={"help": "Largest batch of the timed losses."})
    tiny: bool | None = field(default=None, metadata={"help": "Embedded digits of 8 x 8 pixels instead of MNIST."})

    def build(self, *, device: str, seed: int) -> ViewTask:
        """Read and check the items.

        Raises
        ------
        InputError
            A file or an option cannot be used.
        """
        found: dict[str, Any] = filled(
            self,
            {"items": 3000, "epochs": 4, "batch": 128, "small_batch": 32, "batches_drawn": 2000},
            {"batch": 2, "small_batch": 2, "batches_drawn": 2},
        )
        temperatures = (0.1, 0.3, 1.0) if self.temperatures is None else tuple(self.temperatures)
        if not temperatures or not all(math.isfinite(t) and t > 0 for t in temperatures):
            raise InputError(f"--temperatures must be positive numbers, not {list(temperatures)}")
        network = self.network or "small"
        if network not in NETWORKS:
            raise InputError(f"--network must be one of {', '.join(NETWORKS)}, not {network!r}")
        if found["small_batch"] > found["batch"]:
            raise InputError(f"--small-batch must be at most --batch = {found['batch']}, not {found['small_batch']}")
        if self.images is not None and self.pairs is not None:
            raise InputError("--images and --pairs exclude each other")
        own = self.images is not None or self.pairs is not None
        if self.pairs is not None:
            items = load_pairs(self.pairs)
        elif self.images is not None:
            items = load_images(self.images, self.size)
        else:
            items = small_digits() if self.tiny else mnist_digits()
        n = len(items)
        there = n - n // 5 - n // 10
        found["items"] = min(found["items"], there)
        if n < 100 or found["items"] < found["batch"]:
            raise InputError(
                f"{items.title}: {found['items']} of {n} items are for training, and a batch has {found['batch']}; at "
                "least 100 items and one batch are needed, give more items or a smaller --batch"
            )
        options = found | {"temperatures": temperatures, "network": network, "device": device}
        largest = filled(self, {"largest": 1024}, {"largest": min(SIZES.values())})["largest"]
        timed = tuple(name for name, m in SIZES.items() if m <= largest)
        known = repr((timed, sorted((k, v) for k, v in options.items() if k != "device"), items.digest, seed))
        settings = ("own",) if own else ("theory", "digits", *timed)
        title = f"{items.title}, {found['items']:,} for training, {found['epochs']} epochs"
        digest = hashlib.sha256(known.encode()).hexdigest()[:16]
        return ViewTask(settings, digest, title, None, seed, items, options)


# --- arms -------------------------------------------------------------------------------------------------------------


def _losses() -> dict[str, Any]:
    """The losses of the exact statements, by arm; temperature 0.3."""
    from assay.representation.dhel import AlignUniformLoss, DCLLoss, DHELLoss, KCLLoss, NTXentLoss

    return {
        "dhel": DHELLoss(),
        "dhel_paper": DHELLoss(variant="paper"),
        "kcl": KCLLoss(),
        "ntxent": NTXentLoss(),
        "dcl": DCLLoss(),
        "align_uniform": AlignUniformLoss(),
    }


def _exact(arm: str, shared: Theory) -> dict[str, float]:
    """How far descent ends from the known minimum, and how the mean loss moves with the batch size."""
    import torch

    from assay.representation.dhel import batch_size_bias, minimum_value

    loss, m, d = _losses()[arm], 8, 16
    generator = torch.Generator().manual_seed(shared.seed)
    u, v = (torch.randn(m, d, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    descent = torch.optim.LBFGS(
        [u, v], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def closure() -> Any:
        descent.zero_grad()
        value = loss(u, v)
        value.backward()
        return value

    descent.step(closure)
    x, y = (torch.nn.functional.normalize(z.detach()) for z in (u, v))
    off = (x @ x.T + 1 / (m - 1)).fill_diagonal_(0.0).abs().max()
    gap = float(loss(x, y)) - minimum_value(loss, m, d)

    # All batches of 2 to 7 of eight items: their mean against the eight as one batch.
    with torch.no_grad():
        a, b = (torch.randn(8, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        means = {
            k: float(np.mean([float(loss(a[list(c)], b[list(c)])) for c in itertools.combinations(range(8), k)]))
            for k in range(2, 9)
        }
    spread = max(abs(means[k] - means[8]) for k in range(2, 8)) if arm == "kcl" else None

    # Anisotropic embeddings, as encoders give them.
    scales = torch.linspace(0.3, 2.0, 8, dtype=torch.float64)
    base = torch.randn(2000, 8, generator=generator, dtype=torch.float64) * scales
    first, second = (base + 0.3 * torch.randn(2000, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    (row,) = batch_size_bias(loss, first, second, (4,), shared.batches, seed=shared.seed)
    found = {"gap": gap, "off_simplex": float(off), "partner": float((x * y).sum(1).min())}
    found["bias"] = abs(row.whole - row.mean)
    return found if spread is None else found | {"spread": spread}


def _both(arm: str) -> Callable[[Any, int], dict[str, float]]:
    """An arm: exact statements where they are asked for, encoders elsewhere."""

    def run(shared: Any, replicate: int) -> dict[str, float]:
        if isinstance(shared, Theory):
            return _exact(arm, shared)
        from assay.claims._dhel_training import losses_of, over_grid

        return over_grid(shared, losses_of(arm, shared.temperatures))

    return run


def _timed(name: str) -> Callable[[Outputs, int], Timed]:
    """Forward and backward pass of a loss on one thread, 128 dimensions, temperature 0.3."""

    def run(shared: Outputs, replicate: int) -> Timed:
        import torch

        loss = _timed_loss(name)

        def call() -> None:
            granted = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                torch.autograd.grad(loss(shared.u, shared.v), (shared.u, shared.v))
            finally:
                torch.set_num_threads(granted)

        return Timed(call)

    return run


def _timed_loss(name: str) -> Callable[[Any, Any], Any]:
    import torch

    if name in ("dhel", "kcl", "ntxent"):
        loss: Callable[[Any, Any], Any] = _losses()[name]
        return loss
    if name == "kcl-pdist":

        def by_pdist(u: Any, v: Any) -> Any:
            """The Gaussian kernel loss with its energy by torch.pdist, as in the authors' code."""
            u, v = torch.nn.functional.normalize(u), torch.nn.functional.normalize(v)
            energy = sum(torch.exp(-2 * torch.pdist(x).square()).mean() for x in (u, v))
            return 16 * energy - 2 * torch.exp(-2 * (u - v).square().sum(1)).mean()

        return by_pdist
    from pytorch_metric_learning import losses

    kind = {"pml-ntxent": losses.NTXentLoss, "pml-supcon": losses.SupConLoss}[name]
    packaged: Callable[[Any, Any], Any] = losses.SelfSupervisedLoss(kind(temperature=0.3))
    return packaged


_PEER, _TORCH = ("pytorch-metric-learning>=2.5",), ("torch", "scikit-learn")
_ITEMS, _SMALL = ("digits", "own"), ("m16", "m32", "m64", "m128")
_DECIDED = ("theory", *_ITEMS)


def _arms() -> tuple[Arm, ...]:
    roles: dict[str, tuple[Any, str]] = {
        "dhel": ("method", "DHEL, energy weight 1 (authors' code)"),
        "dhel_paper": ("ablation", "DHEL, energy weight 1/2 (paper)"),
        "kcl": ("method", "KCL, Gaussian kernel"),
        "ntxent": ("baseline", "NT-Xent (pytorch-metric-learning)"),
        "dcl": ("baseline", "DCL"),
        "align_uniform": ("baseline", "alignment and uniformity"),
    }
    arms = [
        Arm(name, _both(name), role, label, (*_TORCH, *(_PEER if name == "ntxent" else ())), where=_DECIDED)
        for name, (role, label) in roles.items()
    ]
    timed: dict[str, tuple[Any, str, tuple[str, ...]]] = {
        "dhel": ("method", "DHEL", tuple(SIZES)),
        "kcl": ("method", "KCL", tuple(SIZES)),
        "ntxent": ("reference", "NT-Xent of assay", tuple(SIZES)),
        "kcl-pdist": ("reference", "KCL by torch.pdist", tuple(SIZES)),
        "pml-ntxent": ("baseline", "NTXentLoss (pytorch-metric-learning)", _SMALL),
        "pml-supcon": ("baseline", "SupConLoss, one positive (pytorch-metric-learning)", tuple(SIZES)),
    }
    for name, (role, label, where) in timed.items():
        needs = ("torch", *(_PEER if name.startswith("pml") else ()))
        arms.append(Arm(f"time-{name}", _timed(name), role, label, needs, "step", where))
    return tuple(arms)


_CHARTS = "a third party's replication, ResNet-18, 200 epochs, linear evaluation, read off charts to 0.3 points"

CLAIM = Claim(
    slug="dhel",
    title="DHEL and kernel contrastive losses",
    family="representation",
    paper=Paper(
        title="Bridging Mini-Batch and Asymptotic Analysis in Contrastive Learning: From InfoNCE to Kernel-Based "
        "Losses",
        authors="Panagiotis Koromilas, Giorgos Bouritsas, Theodoros Giannakopoulos, Mihalis Nicolaou, Yannis Panagakis",
        url="https://arxiv.org/abs/2405.18045",
    ),
    question="Would another contrastive loss keep my embeddings from collapsing, and make them more useful?",
    statements=(
        Statement(
            "minimum",
            "DHEL descends to the regular simplex, its known minimum (within 0.001)",
            metric="gap",
            method="dhel",
            constant=0.0,
            bound=1e-3,
            where=("theory",),
        ),
        Statement(
            "minimum of KCL",
            "KCL descends to the same configuration (within 0.001)",
            metric="gap",
            method="kcl",
            constant=0.0,
            bound=1e-3,
            where=("theory",),
        ),
        Statement(
            "unbiased",
            "KCL's mean over all batches of 2 to 7 of eight items is its value on the eight (within 1e-9)",
            metric="spread",
            method="kcl",
            constant=0.0,
            bound=1e-9,
            where=("theory",),
        ),
        Statement(
            "less bias",
            "With batches of 4 its mean is nearer to the value on all 2,000 items than those of the others are",
            metric="bias",
            method="kcl",
            baselines=("ntxent", "dcl", "dhel", "align_uniform"),
            where=("theory",),
            decides=False,
        ),
        Statement(
            "rank",
            "DHEL's embeddings collapse less: a higher effective rank",
            metric="rank",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
        ),
        Statement(
            "uniformity",
            "and cosines that are nearer to those of the uniform law",
            metric="wasserstein_uniformity",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
        ),
        Statement(
            "accuracy",
            "Better downstream, each with its best temperature",
            metric="quality",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
            reported=Reported(
                "88.6 (DHEL), 88.6 (DCL), 88.5 (SimCLR) on CIFAR-10; 60.9, 61.0, 59.4 on CIFAR-100; batch 512",
                _CHARTS,
                "independent replication; the paper's own tables are not quoted here",
            ),
        ),
        Statement(
            "small batch",
            "Better downstream with small batches, too",
            metric="quality_small",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
            reported=Reported(
                "86.0 (DHEL), 87.0 (DCL), 86.4 (SimCLR) on CIFAR-10; 56.3, 59.0, 55.7 on CIFAR-100; batch 32",
                _CHARTS,
                "independent replication; the paper's own tables are not quoted here",
            ),
        ),
        Statement(
            "robust",
            "Accuracy depends less on temperature and batch size",
            metric="quality_range",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
        ),
        Statement(
            "robust neighbours",
            "The accuracy of nearest neighbours depends less on them",
            metric="knn_range",
            method="dhel",
            baselines=("ntxent", "dcl"),
            where=_ITEMS,
            decides=False,
        ),
        Statement(
            "no loss",
            "Downstream at most one point worse",
            metric="quality",
            method="dhel",
            baselines=("ntxent", "dcl"),
            bound=-0.01,
            where=_ITEMS,
            decides=False,
        ),
        Statement(
            "decoupling alone",
            "The higher rank does not come from the weight: it is there with the paper's weight of 1/2",
            metric="rank",
            method="dhel_paper",
            baselines=("dcl",),
            where=_ITEMS,
            decides=False,
        ),
        Statement(
            "accuracy of KCL",
            "KCL is better downstream, with its best weight",
            metric="quality",
            method="kcl",
            baselines=("ntxent", "dcl", "align_uniform"),
            where=_ITEMS,
            decides=False,
        ),
        Statement(
            "speed",
            "A step of DHEL takes at most 1/1.8 of the time of the package's NT-Xent",
            metric="seconds",
            method="time-dhel",
            baselines=("time-pml-ntxent", "time-pml-supcon"),
            scale="ratio",
            bound=1 / 1.8,
            where=("m64", "m128", "m256", "m1024"),
            decides=False,
        ),
        Statement(
            "speed of half the products",
            "and of an NT-Xent that is computed in the same way",
            metric="seconds",
            method="time-dhel",
            baselines=("time-ntxent",),
            scale="ratio",
            bound=1 / 1.8,
            where=("m256", "m1024"),
            decides=False,
        ),
        Statement(
            "speed of KCL",
            "A step of KCL takes at most half the time of its form with torch.pdist",
            metric="seconds",
            method="time-kcl",
            baselines=("time-kcl-pdist",),
            scale="ratio",
            bound=0.5,
            where=("m256", "m1024"),
            decides=False,
        ),
    ),
    metrics=(
        Metric("gap", "loss above its known minimum", "lower", "nat"),
        Metric("off_simplex", "largest deviation of a cosine from -1/(M-1)", None),
        Metric("partner", "least cosine of a positive pair", None),
        Metric("spread", "largest change of the exact mean with the batch size", "lower"),
        Metric("bias", "mean over batches of 4 against the value on all items, absolute", "lower", "nat"),
        Metric("quality", "linear-probe accuracy (retrieval of the partner without labels)", "higher"),
        Metric("quality_small", "the same with the small batch", "higher"),
        Metric("quality_mean", "its mean over temperatures and batch sizes", "higher"),
        Metric("quality_range", "its range over temperatures and batch sizes", "lower"),
        Metric("knn_mean", "accuracy of 5 nearest neighbours, mean over temperatures and batch sizes", "higher"),
        Metric("knn_range", "its range", "lower"),
        Metric("rank", "effective rank, mean over temperatures and batch sizes", "higher"),
        Metric("wasserstein_uniformity", "distance of cosines from the uniform law, mean", "lower"),
        Metric("alignment", "mean squared distance of positives, mean", None),
        Metric("cpu", "CPU time of training and judging", "lower", "s"),
        Metric("seconds", "time of a forward and backward pass of the loss", "lower", "s"),
        Metric("seconds_low", "its lower quartile", None, "s"),
        Metric("seconds_high", "its upper quartile", None, "s"),
    ),
    arms=_arms(),
    workload=TwoViews,
    scales={
        "smoke": Scale(
            2,
            {
                "tiny": True,
                "items": 400,
                "epochs": 1,
                "batch": 64,
                "small_batch": 32,
                "temperatures": [0.3],
                "batches_drawn": 50,
                "largest": 64,
            },
            {"step": Race(rounds=1, warmup=0)},
        ),
        "desk": Scale(5, {"items": 3000, "epochs": 4}, {"step": Race(rounds=5, warmup=1)}),
        # Needs --images with CIFAR-10 or CIFAR-100 as a folder, and a GPU; the paper's epochs are not known here.
        "paper": Scale(
            3,
            {
                "items": 50_000,
                "epochs": 200,
                "batch": 512,
                "small_batch": 32,
                "temperatures": [0.07, 0.1, 0.2, 0.3, 0.5, 1.0],
                "network": "resnet18",
            },
            {"step": Race(rounds=20, warmup=3)},
        ),
    },
    unit="seed",
    growths=(
        Growth(
            "step",
            "Time of a step of the loss against the batch size",
            "seconds",
            ("time-dhel", "time-kcl", "time-ntxent", "time-pml-supcon", "time-pml-ntxent"),
            {name: float(m) for name, m in SIZES.items()},
            "items per view",
        ),
    ),
    snippet="""\
import torch
from assay.representation import DHELLoss, embedding_report

net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
loss, step = DHELLoss(temperature=0.3), torch.optim.Adam(net.parameters(), 1e-3)
x = torch.randn(256, 20)
for _ in range(20):
    value = loss(net(x + 0.1 * torch.randn_like(x)), net(x + 0.1 * torch.randn_like(x)))  # two views of each row
    step.zero_grad(); value.backward(); step.step()
print(embedding_report(net(x))["effective_rank"])
""",
    example="assay run dhel --pairs my-pairs.npz --epochs 20",
    devices=("cpu", "cuda"),
    notes=(
        "The authors' code gives the energy twice the weight of the paper's symmetric loss. Both are arms; where only "
        "the former differs from DCL, what differs is the weight, not the decoupling.",
        "Effective rank rises with repulsion alone. It is no quality: look at the accuracies beside it.",
        "Every arm chooses among three losses on validation items: three temperatures, or three weights of its "
        "repulsion (KCL 4, 8, 16; alignment and uniformity 0.3, 1, 3). Ranks and ranges are over all of them.",
        "NT-Xent is trained as the package's SupConLoss with one positive, which is the same loss; its NTXentLoss "
        "compares every positive with every negative pair, and takes memory of the cube of the batch.",
    ),
)
