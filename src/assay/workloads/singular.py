"""Samples on which fits are singular: polynomial links without signal, a mixture with one component too many.

A user's own table, or a loss of one's own, takes their place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import InputError
from assay.workloads.named import load_named, source_of

Float = NDArray[np.float64]
#: Without signal, in the order of their seeds; then two fits that are (nearly) regular, for contrast.
MODELS = ("glm2", "glm3", "gmm")
CONTRASTS = ("middle2", "strong2")
#: Tables of scikit-learn, to whose standardised columns a symmetric mixture is fitted; the truth is unknown.
REAL = ("iris", "breast_cancer")
#: Rows of the pilot sample on which baselines are tuned.
PILOT_ROWS = 4000


@dataclass(frozen=True)
class Singular:
    """One fit. ``power`` is 0 for the mixture; ``start`` is the common start of all arms.

    ``radius`` is the statistical radius, NaN where the truth is unknown (a user's table or loss).
    """

    model: str
    power: int
    X: Float
    y: Float
    start: Float
    truth: Float
    radius: float
    seed: int = 0
    loss: Callable[[Any], Any] | None = None

    def distance(self, x: Float) -> float:
        """Distance to the truth; up to the sign where that is not identified (even powers, the mixture)."""
        d = float(np.linalg.norm(x - self.truth))
        return d if self.power % 2 else min(d, float(np.linalg.norm(x + self.truth)))


def label(size: int) -> str:
    """Name of a size: 1k for 1000; sizes that are no multiple as they are."""
    return f"{size // 1000}k" if size % 1000 == 0 else str(size)


def draw(model: str, n: int, d: int, seed: int, *, pilot: bool = False) -> Singular:
    """Standard normal features (or data) and noise; the start has norm 1.7 and a random direction.

    Radii: ``(d/n)^(1/(2p))`` without signal, ``(d/n)^(1/4)`` for the mixture. ``strong2`` has a signal of norm 1,
    ``middle2`` of norm ``n^(-1/10)``; their radius is ``(d/n)^(1/2) / norm``, that of a regular fit.
    """
    rng = np.random.default_rng([seed, n, (MODELS + CONTRASTS).index(model), int(pilot)])
    X, y, u, v = rng.normal(size=(n, d)), rng.normal(size=n), rng.normal(size=d), rng.normal(size=d)
    power = {"glm3": 3, "gmm": 0}.get(model, 2)
    norm = {"strong2": 1.0, "middle2": float(n) ** -0.1}.get(model, 0.0)
    truth = norm * v / np.linalg.norm(v)
    radius = np.sqrt(d / n) / norm if norm else (d / n) ** (1 / (2 * (power or 2)))
    if power:
        y = (X @ truth) ** power + y
    return Singular(model, power, X, y, 1.7 * u / np.linalg.norm(u), truth, float(radius), seed)


def pilot(s: Singular) -> Singular:
    """A sample of the same law that no arm is measured on; a table or a user's loss is its own pilot."""
    if s.model in ("data", "mixture", "loss", *REAL):
        return s
    return draw(s.model, PILOT_ROWS, s.X.shape[1], s.seed, pilot=True)


def load_table(name: str, seed: int) -> Singular:
    """One of :data:`REAL`; the random start has norm 1.7."""
    from sklearn import datasets

    X = np.asarray(getattr(datasets, f"load_{name}")().data, dtype=np.float64)
    X = (X - X.mean(0)) / X.std(0)
    d = X.shape[1]
    return Singular(name, 0, X, np.zeros(len(X)), _start(d, seed), np.zeros(d), float("nan"), seed)


def _start(d: int, seed: int) -> Float:
    u = np.random.default_rng(seed).normal(size=d)
    return 1.7 * u / np.linalg.norm(u)


def _check_loss(loss: Callable[[Any], Any], reference: str, d: int) -> None:
    """Call a user's loss once.

    Raises
    ------
    InputError
        It fails on a float64 vector of d numbers, or gives no finite number with a graph.
    """
    import torch

    at = torch.tensor(_start(d, 0), requires_grad=True)
    try:
        value = loss(at)
    except Exception as error:
        raise InputError(f"--loss {reference!r} fails on a float64 vector of --d {d} numbers: {error}") from error
    if not torch.is_tensor(value) or value.numel() != 1 or not value.requires_grad or not torch.isfinite(value).all():
        raise InputError(f"--loss {reference!r} must give one finite number, as a torch tensor with graph, got {value}")


@dataclass(frozen=True)
class SingularTask:
    """Settings: each model with all sizes at once ("glm2") and at each size ("glm2-1k"), and tables ("iris").

    Or, instead of all of them, the user's own fit: "data" (with a target), "mixture" or "loss".
    """

    settings: tuple[str, ...]
    digest: str
    title: str
    limit: int | None
    sizes: tuple[int, ...]
    d: int
    seed: int
    own: Singular | None = None

    def prepare(self, setting: str, replicate: int) -> tuple[Singular, ...]:
        """The samples of a setting, smallest first."""
        seed = 1000 * self.seed + replicate
        if self.own is not None:
            return (replace(self.own, start=_start(self.d, seed), seed=seed),)
        if setting in REAL:
            return (load_table(setting, seed),)
        model, _, size = setting.partition("-")
        sizes = [n for n in self.sizes if not size or label(n) == size]
        return tuple(draw(model, n, self.d, seed) for n in sizes)


@dataclass(frozen=True)
class SingularFits:
    """Sizes and dimension of the samples, or a fit of one's own."""

    data: Path | Any | None = field(
        default=None, metadata={"help": "your table (CSV or parquet); without target, a mixture is fitted"}
    )
    target: str | None = field(default=None, metadata={"help": "column to predict by (x'theta)^power"})
    power: int = field(default=2, metadata={"help": "power of the link, with data and target"})
    loss: str | None = field(
        default=None, metadata={"help": "your loss as module:callable, torch vector [d] to scalar"}
    )
    sizes: list[int] | None = field(default=None, metadata={"help": "rows of the samples, at least two sizes"})
    models: list[str] | None = field(
        default=None, metadata={"help": "of glm2, glm3, gmm, middle2, strong2, iris, breast_cancer"}
    )
    d: int = field(default=4, metadata={"help": "dimension, also of your loss"})

    def build(self, *, device: str, seed: int) -> SingularTask:
        """Check the options."""
        if self.d < 1:
            raise InputError(f"--d must be at least 1, got {self.d}")
        if self.data is not None and self.loss is not None:
            raise InputError("give data or loss, not both")
        if self.target is not None and self.data is None:
            raise InputError("target names a column of data: give data, too")
        if self.data is not None:
            return self._table(seed)
        if self.loss is not None:
            return self._loss(self.loss, seed)
        sizes = tuple(sorted(self.sizes or (1000, 4000, 16000, 64000)))
        models = tuple(self.models or MODELS)
        if len(set(sizes)) < 2 or len(set(sizes)) != len(sizes) or sizes[0] <= self.d:
            raise InputError(f"--sizes needs at least two different sizes above --d {self.d}, got {list(sizes)}")
        known = MODELS + CONTRASTS + REAL
        if unknown := set(models) - set(known):
            raise InputError(f"--models must be of {', '.join(known)}, not {', '.join(sorted(unknown))}")
        settings = (*models, *(f"{m}-{label(n)}" for m in models if m not in REAL for n in sizes))
        title = f"singular fits in {self.d} dimensions, {sizes[0]} to {sizes[-1]} rows ({', '.join(models)})"
        return SingularTask(settings, _digest(sizes, models, self.d, seed), title, None, sizes, self.d, seed)

    def _table(self, seed: int) -> SingularTask:
        from assay.workloads.tabular import make_table, read_frame

        if isinstance(self.power, bool) or self.power < 2:
            raise InputError(f"power must be an integer of at least 2, got {self.power}")
        frame = read_frame(self.data)
        if self.target is None:  # every column is a coordinate of the mixture; the table needs a target all the same
            table = make_table(frame.assign(__row__=np.arange(len(frame), dtype=float)), "__row__")
            power, y = 0, np.zeros(len(table.X))
        else:
            table = make_table(frame, self.target)
            power, y = self.power, np.asarray(table.y, dtype=np.float64)
        X = np.asarray(table.X, dtype=np.float64)
        spread = X.std(0)
        if len(X) <= X.shape[1] or (spread == 0).any():
            raise InputError(f"data needs more rows than columns and no constant column, got {X.shape}")
        X = (X - X.mean(0)) / spread
        y = y / (float(np.sqrt((y**2).mean())) or 1.0)
        d, name = X.shape[1], Path(self.data).name if isinstance(self.data, str | Path) else "a data frame"
        setting = "data" if power else "mixture"
        own = Singular(setting, power, X, y, np.ones(d), np.zeros(d), float("nan"))
        digest = _digest(X.tobytes(), y.tobytes(), power, seed)
        what = f"polynomial link of power {power}" if power else "symmetric mixture"
        return SingularTask(
            (setting,), digest, f"{name}: {what}, {len(X)} rows, {d} columns", None, (len(X),), d, seed, own
        )

    def _loss(self, reference: str, seed: int) -> SingularTask:
        loss = load_named(reference, "--loss", "mymodel:loss")
        _check_loss(loss, reference, self.d)
        own = Singular(
            "loss", 1, np.zeros((1, self.d)), np.zeros(1), np.ones(self.d), np.zeros(self.d), float("nan"), 0, loss
        )
        title = f"{reference} in {self.d} dimensions"
        return SingularTask(
            ("loss",), _digest(reference, source_of(reference), self.d, seed), title, None, (1,), self.d, seed, own
        )


def _digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
