"""Biased samples with exact scores of the right target: embedded scenarios, or the user's own draws.

Used by claims on sampling methods. A *score* is the gradient of the target's log density at a point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from assay.errors import InputError

Float = NDArray[np.float64]

SCENARIOS = ("burnin", "temper", "off", "banana", "logistic")
OWN = "own"
DIMENSION = 4
N_REFERENCE = 2000
LEAST_REPLICATES = 5
_POINTS = ("points", "x", "samples", "draws")
_SCORES = ("scores", "gradients", "gradient", "grad")


@dataclass
class Sample:
    """What the arms of one replicate share.

    Attributes
    ----------
    points, scores : array (n, d)
        Draws in the order in which the sampler made them, and the score of the target at each.
    mean, variance : array (d,) or None
        Of the target; ``None`` where the user gave no reference.
    reference : array (2000 or so, d) or None
        Draws from the target.
    size : int
        How many points a coreset may have.
    seed : int
        For the randomness of the arms.
    memo : dict
        What arms compute once and share (a kernel matrix).
    """

    points: Float
    scores: Float
    mean: Float | None
    variance: Float | None
    reference: Float | None
    size: int
    seed: int
    memo: dict[str, Any] = field(default_factory=dict)


@dataclass
class Samples:
    """Options of the workload.

    Scenarios (target N(0, C) in four dimensions unless said otherwise, C = AA'/4 + 0.3 I, A standard normal from
    seed 0):

    * ``burnin``: a Metropolis-adjusted Langevin chain from (15, 15, 15, 15), proposals
      ``x + 0.05 score(x) + sqrt(0.1) z``, burn-in included;
    * ``temper``: exact draws from N(0, 4 C);
    * ``off``: half of the draws from the target, half from N((2, 0, 0, 0), 0.49 I), mixed in random order;
    * ``banana``: ``temper`` bent by x2 + 0.5 x1^2, as is the target;
    * ``logistic``: stochastic gradient Langevin draws (batches of 32) for the posterior of a logistic regression on
      scikit-learn's breast cancer data (569 x 30, standardised, standard normal prior), with full-data scores.

    The user's own draws come in one ``.npz`` file with arrays ``points`` and ``scores`` (names that also work: ``x``,
    ``samples``, ``draws``; ``gradients``, ``gradient``, ``grad``), in two ``.npy`` or ``.csv`` files, or in an ArviZ
    netCDF file whose group ``gradients`` (or ``scores``) holds, under the name of each variable of ``posterior``, the
    gradient with respect to it. They must be unconstrained, or the gradients must be those of the density in the
    space of the draws.

    Own draws are dealt out to replicates like cards: of N rows, replicate r of K gets rows r, r + K, r + 2K, ..., that
    is K standard thinnings of one chain with different offsets, K the larger of 5 and N // points. So a replicate is
    other data, not only another seed, and all rows are used once.
    """

    samples: str | None = field(
        default=None, metadata={"help": "your draws: .npz with points and scores, .npy, .csv, or an ArviZ .nc file"}
    )
    scores: str | None = field(
        default=None, metadata={"help": "gradients of the target's log density at the draws: .npy or .csv"}
    )
    reference: str | None = field(
        default=None, metadata={"help": "draws from the target itself, to measure errors of means: .npy, .npz or .csv"}
    )
    scenarios: tuple[str, ...] | None = field(
        default=None, metadata={"help": f"embedded scenarios to run: {', '.join(SCENARIOS)}"}
    )
    points: int | None = field(default=None, metadata={"help": "draws a replicate (own draws: at most)"})
    size: int | None = field(default=None, metadata={"help": "points of a coreset, a power of two"})

    def build(self, *, device: str, seed: int) -> SamplesTask:
        """Check the options, read the files, and give the task.

        Raises
        ------
        InputError
            A file that is missing or cannot be used, or an option out of range, with what is expected.
        """
        points = _whole("points", 4096 if self.points is None else self.points, 8)
        size = _whole("size", 64 if self.size is None else self.size, 2)
        if size & (size - 1):
            raise InputError(f"--size must be a power of two (the low-rank method needs that), got {size}")
        if self.samples is None:
            for name in ("scores", "reference"):
                if getattr(self, name) is not None:
                    raise InputError(f"--{name} needs --samples, the draws that it belongs to")
            chosen = ("burnin", "temper", "off") if self.scenarios is None else tuple(self.scenarios)
            unknown = [s for s in chosen if s not in SCENARIOS]
            if unknown or not chosen or len(set(chosen)) < len(chosen):
                given = ", ".join(chosen) or "none"
                raise InputError(f"--scenarios must name some of {', '.join(SCENARIOS)}, each once, got {given}")
            if size > points:
                raise InputError(f"--size {size} exceeds the {points} draws a replicate; give --points at least {size}")
            digest = hashlib.sha256(repr(("embedded", chosen, points, size, seed)).encode()).hexdigest()
            title = f"{points} biased draws in {DIMENSION} dimensions, {size} kept ({', '.join(chosen)})"
            return SamplesTask(chosen, digest, title, None, points, size, seed)
        if self.scenarios is not None:
            raise InputError("--scenarios names embedded data; leave it out with --samples")
        draws, gradients = load_draws(self.samples, self.scores)
        reference = None if self.reference is None else load_reference(self.reference, draws.shape[1])
        rows = draws.shape[0]
        count = max(LEAST_REPLICATES, rows // points)
        least = rows // count
        if least < max(size, 2):
            raise InputError(
                f"--samples has {rows} rows, that is {least} for each of {count} replicates, fewer than --size {size}; "
                f"give at least {count * size} rows, or a smaller --size"
            )
        content = hashlib.sha256(repr((OWN, draws.shape, count, size, seed)).encode())
        for array in (draws, gradients, reference):
            content.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
        title = (
            f"{rows} draws in {draws.shape[1]} dimensions from {Path(self.samples).name}, {least} a replicate, "
            f"{size} kept"
        )
        return SamplesTask((OWN,), content.hexdigest(), title, count, least, size, seed, (draws, gradients, reference))


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InputError(f"--{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


@dataclass
class SamplesTask:
    """Draws that have been checked, cut into settings (scenarios) and replicates."""

    settings: Sequence[str]
    digest: str
    title: str
    limit: int | None
    points: int
    size: int
    seed: int
    own: tuple[Float, Float, Float | None] | None = field(default=None, repr=False)

    def prepare(self, setting: str, replicate: int) -> Sample:
        """Make the draws of a replicate: the same arguments give the same sample."""
        seed = int(np.random.SeedSequence([self.seed, replicate]).generate_state(1)[0])
        if setting == OWN:
            assert self.own is not None and self.limit is not None
            draws, gradients, reference = self.own
            rows = slice(replicate, None, self.limit)
            mean = None if reference is None else reference.mean(axis=0)
            variance = None if reference is None else reference.var(axis=0, ddof=1)
            few = None if reference is None else _spread(reference, N_REFERENCE)
            x, s = np.ascontiguousarray(draws[rows]), np.ascontiguousarray(gradients[rows])
            return Sample(x, s, mean, variance, few, self.size, seed)
        rng = np.random.default_rng([self.seed, replicate, SCENARIOS.index(setting)])
        if setting == "logistic":
            return self._logistic(rng, seed)
        target = Gaussian.default()
        z = {"burnin": _burnin, "off": _off}.get(setting, _temper)(target, self.points, rng)
        reference, scores = target.draw(N_REFERENCE, rng), target.score(z)
        mean, variance = np.zeros(DIMENSION), np.diag(target.covariance).copy()
        if setting == "banana":
            # x2 = z2 + z1^2 / 2 keeps volumes, so s_x = J' s_z with the Jacobian of z(x).
            scores[:, 0] -= z[:, 0] * scores[:, 1]
            first = target.covariance[0, 0]
            mean[1] += first / 2
            variance[1] += first**2 / 2  # Var(z1^2) / 4; third moments of a centred normal are 0
            z, reference = bend(z), bend(reference)
        return Sample(z, scores, mean, variance, reference, self.size, seed)

    def _logistic(self, rng: np.random.Generator, seed: int) -> Sample:
        posterior = self._posterior
        x = posterior.sgld(self.points, rng)
        long = self._long_chain
        reference = _spread(long, N_REFERENCE)
        return Sample(x, posterior.score(x), long.mean(axis=0), long.var(axis=0), reference, self.size, seed)

    @cached_property
    def _posterior(self) -> LogisticPosterior:
        return LogisticPosterior.breast_cancer()

    @cached_property
    def _long_chain(self) -> Float:
        return self._posterior.mala(40_000, np.random.default_rng(self.seed))


# --- embedded scenarios -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaussian:
    """The target N(0, covariance)."""

    covariance: Float

    @classmethod
    def default(cls) -> Gaussian:
        """C = AA'/4 + 0.3 I with A of standard normals from seed 0."""
        A = np.random.default_rng(0).normal(size=(DIMENSION, DIMENSION))
        return cls(A @ A.T / 4 + 0.3 * np.eye(DIMENSION))

    def draw(self, n: int, rng: np.random.Generator) -> Float:
        """Exact draws, shape ``(n, d)``."""
        return rng.normal(size=(n, self.covariance.shape[0])) @ np.linalg.cholesky(self.covariance).T

    def score(self, x: Float) -> Float:
        """Gradient of the log density, of the shape of x."""
        return -x @ np.linalg.inv(self.covariance)


def bend(z: Float) -> Float:
    """Add half the square of the first coordinate to the second."""
    x = z.copy()
    x[:, 1] += z[:, 0] ** 2 / 2
    return x


def _temper(target: Gaussian, n: int, rng: np.random.Generator) -> Float:
    return 2 * target.draw(n, rng)


def _off(target: Gaussian, n: int, rng: np.random.Generator) -> Float:
    x = target.draw(n, rng)
    wrong = rng.permutation(n)[: n // 2]
    x[wrong] = [2.0, 0.0, 0.0, 0.0] + 0.7 * rng.normal(size=(n // 2, DIMENSION))
    return x


def _burnin(target: Gaussian, n: int, rng: np.random.Generator) -> Float:
    precision = np.linalg.inv(target.covariance)
    return _mala(
        np.full(DIMENSION, 15.0),
        lambda x: (-float(x @ precision @ x) / 2, -(precision @ x)),
        0.05,
        np.eye(DIMENSION),
        n,
        rng,
    )


def _mala(
    start: Float,
    log_density: Callable[[Float], tuple[float, Float]],
    step: float,
    root: Float,
    n: int,
    rng: np.random.Generator,
) -> Float:
    """Metropolis-adjusted Langevin: proposals ``x + step M score + sqrt(2 step) root z`` with ``M = root root'``."""
    x = start
    value, gradient = log_density(x)
    metric = root @ root.T
    inverse = np.linalg.inv(metric)
    noise = np.sqrt(2 * step) * (rng.normal(size=(n, x.size)) @ root.T)
    uniforms = np.log(rng.random(n))
    out = np.empty((n, x.size))
    for i in range(n):
        y = x + step * (metric @ gradient) + noise[i]
        new_value, new_gradient = log_density(y)
        back = x - y - step * (metric @ new_gradient)
        odds = new_value - value + (noise[i] @ inverse @ noise[i] - back @ inverse @ back) / (4 * step)
        if uniforms[i] < odds:
            x, value, gradient = y, new_value, new_gradient
        out[i] = x
    return out


@dataclass(frozen=True)
class LogisticPosterior:
    """Posterior of a logistic regression without intercept: features ``(N, d)``, labels -1 or 1, prior N(0, I)."""

    features: Float
    labels: Float

    @classmethod
    def breast_cancer(cls) -> LogisticPosterior:
        """Scikit-learn's embedded breast cancer data, standardised."""
        try:
            from sklearn.datasets import load_breast_cancer
        except ImportError:
            raise InputError("--scenarios logistic needs scikit-learn: pip install scikit-learn") from None
        features, labels = load_breast_cancer(return_X_y=True)
        return cls((features - features.mean(axis=0)) / features.std(axis=0), 2.0 * labels - 1.0)

    def score(self, x: Float) -> Float:
        """Full-data gradients of the log posterior, shape ``(n, d)``."""
        margin = x @ self.features.T * self.labels
        return (self.labels * _sigmoid(-margin)) @ self.features - x

    def log_density(self, x: Float) -> tuple[float, Float]:
        """Log posterior of one point up to a constant, and its gradient."""
        margin = self.features @ x * self.labels
        value = -float(np.logaddexp(0, -margin).sum() + x @ x / 2)
        return value, (self.labels * _sigmoid(-margin)) @ self.features - x

    def mode(self) -> tuple[Float, Float]:
        """Mode by Newton's method, and minus the Hessian there."""
        d = self.features.shape[1]
        x, hessian = np.zeros(d), np.eye(d)
        for _ in range(50):
            p = _sigmoid(self.features @ x)
            hessian = (self.features.T * (p * (1 - p))) @ self.features + np.eye(d)
            move = np.linalg.solve(hessian, self.log_density(x)[1])
            x = x + move
            if np.abs(move).max() < 1e-10:
                break
        return x, hessian

    def sgld(self, n: int, rng: np.random.Generator, *, batch: int = 32, step: float = 2e-3, thin: int = 10) -> Float:
        """Stochastic gradient Langevin draws from the prior's mean on; biased by the noise of the batches."""
        rows, d = self.features.shape
        x, out = np.zeros(d), np.empty((n, d))
        for i in range(n):
            chosen = rng.integers(rows, size=(thin, batch))
            noise = np.sqrt(step) * rng.normal(size=(thin, d))
            for k in range(thin):
                F, y = self.features[chosen[k]], self.labels[chosen[k]]
                gradient = (rows / batch) * ((y * _sigmoid(-(F @ x) * y)) @ F) - x
                x = x + step / 2 * gradient + noise[k]
            out[i] = x
        return out

    def mala(self, n: int, rng: np.random.Generator) -> Float:
        """A chain that starts at the mode and is preconditioned by the Hessian there: the reference."""
        mode, hessian = self.mode()
        return _mala(mode, self.log_density, 0.35, np.linalg.cholesky(np.linalg.inv(hessian)), n, rng)


def _sigmoid(t: Float) -> Float:
    return 1 / (1 + np.exp(np.minimum(-t, 700.0)))


def _spread(x: Float, n: int) -> Float:
    """At most n rows, equally spaced."""
    return x if x.shape[0] <= n else x[np.linspace(0, x.shape[0] - 1, n).astype(int)]


# --- the user's files ---------------------------------------------------------------------------------------------


def load_draws(samples: str | Path, scores: str | Path | None = None) -> tuple[Float, Float]:
    """Read draws and scores, both ``(n, d)``; see :class:`Samples` for the formats.

    Raises
    ------
    InputError
        A file that is missing, of another format, without what is expected, not finite, with one row, of shapes that
        do not agree, or with points that are all equal.
    """
    path = _existing("samples", samples)
    kind = path.suffix.lower()
    gradients: NDArray[Any] | None
    if kind in (".nc", ".nc4", ".h5", ".hdf5"):
        points, gradients = _read_netcdf(path)
    elif kind == ".npz":
        held = _read_npz("samples", path)
        points = _pick("samples", path, held, _POINTS)
        gradients = None if scores is not None else _pick("samples", path, held, _SCORES)
    else:
        points, gradients = _read_table("samples", path), None
    if scores is not None:
        second = _existing("scores", scores)
        if second.suffix.lower() == ".npz":
            gradients = _pick("scores", second, _read_npz("scores", second), _SCORES)
        else:
            gradients = _read_table("scores", second)
    if gradients is None:
        raise InputError(
            f"--samples {path} has no gradients: give --scores FILE as well (gradients of the log density at each row)"
        )
    x, s = _clean("samples", points), _clean("scores", gradients)
    if s.shape != x.shape:
        raise InputError(f"--scores has shape {s.shape}, but --samples has shape {x.shape}; must be equal")
    if (x == x[0]).all():
        raise InputError(f"--samples {path}: all {x.shape[0]} points are equal")
    return x, s


def load_reference(path: str | Path, dimension: int) -> Float:
    """Read draws from the target, ``(n, dimension)``."""
    file = _existing("reference", path)
    if file.suffix.lower() == ".npz":
        values = _pick("reference", file, _read_npz("reference", file), ("reference", *_POINTS))
    else:
        values = _read_table("reference", file)
    reference = _clean("reference", values)
    if reference.shape[1] != dimension:
        raise InputError(f"--reference has {reference.shape[1]} columns, but --samples has {dimension}")
    if (reference.var(axis=0) == 0).any():
        raise InputError("--reference: some column has no variance")
    return reference


def _existing(name: str, given: str | Path) -> Path:
    path = Path(given).expanduser()
    if not path.is_file():
        raise InputError(f"--{name} {given}: no such file")
    return path


def _read_npz(name: str, path: Path) -> Mapping[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except Exception as error:  # a damaged archive raises one of many
        raise InputError(f"--{name} {path} is not a NumPy .npz file of plain arrays: {error}") from None


def _pick(name: str, path: Path, held: Mapping[str, NDArray[Any]], names: Sequence[str]) -> NDArray[Any]:
    for key in names:
        if key in held:
            return held[key]
    raise InputError(f"--{name} {path} holds {sorted(held)}; expected an array named {' or '.join(names)}")


def _read_table(name: str, path: Path) -> NDArray[Any]:
    kind = path.suffix.lower()
    if kind == ".npy":
        try:
            return np.asarray(np.load(path, allow_pickle=False))
        except Exception as error:
            raise InputError(f"--{name} {path} is not a NumPy .npy file of a plain array: {error}") from None
    if kind in (".csv", ".txt", ".tsv"):
        import pandas as pd

        separator = "\t" if kind == ".tsv" else ","
        try:
            frame = pd.read_csv(path, sep=separator, header=None, comment="#", skipinitialspace=True, low_memory=False)
            first = pd.to_numeric(frame.iloc[0], errors="coerce")
            if first.isna().any() and frame.shape[0] > 1:  # a line of names
                frame = frame.iloc[1:]
            return frame.apply(pd.to_numeric).to_numpy(dtype=np.float64)
        except (ValueError, TypeError, UnicodeDecodeError) as error:
            raise InputError(f"--{name} {path} is not a table of numbers separated by commas: {error}") from None
    raise InputError(f"--{name} {path}: unknown format {kind or '(none)'!r}; expected .npz, .npy, .csv or .nc")


def _read_netcdf(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        import xarray
    except ImportError:
        raise InputError("--samples in netCDF needs xarray and h5netcdf: pip install arviz h5netcdf") from None
    groups = {}
    for group in ("posterior", "gradients", "scores"):
        try:
            with xarray.open_dataset(path, group=group) as data:
                groups[group] = data.load()
        except (OSError, ValueError, KeyError):  # no such group, or no netCDF file at all
            continue
    if "posterior" not in groups or len(groups) < 2:
        raise InputError(
            f"--samples {path} must be an ArviZ netCDF file with the groups posterior and gradients, found: "
            f"{', '.join(groups) or 'neither'}"
        )
    names = list(groups["posterior"].data_vars)
    gradients = groups.get("gradients", groups.get("scores"))
    assert gradients is not None
    found = []
    for data in (groups["posterior"], gradients):
        columns = []
        for name in names:
            if name not in data.data_vars or not {"chain", "draw"} <= set(data[name].dims):
                raise InputError(
                    f"--samples {path}: variable {name!r} must be in both groups with dimensions chain and draw"
                )
            values = np.asarray(data[name].transpose("chain", "draw", ...).values)
            columns.append(values.reshape(values.shape[0] * values.shape[1], -1))
        if len({c.shape[0] for c in columns}) != 1:
            raise InputError(f"--samples {path}: the variables have different numbers of draws")
        found.append(np.concatenate(columns, axis=1))
    return found[0], found[1]


def _clean(name: str, values: NDArray[Any]) -> Float:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"--{name} must hold numbers, got an array of {values.dtype}") from None
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise InputError(f"--{name} must have shape (rows, coordinates), got {array.shape}")
    if array.shape[0] < 2:
        raise InputError(f"--{name} has {array.shape[0]} row(s); at least 2 are needed")
    if not np.isfinite(array).all():
        row, column = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise InputError(f"--{name} has NaN or infinite values, first in row {row}, column {column} (from 0)")
    return np.ascontiguousarray(array)
