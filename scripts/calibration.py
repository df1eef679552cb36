"""Measure how often a verdict errs and how often it finds what is there, by simulation of the rule itself.

    python scripts/calibration.py

writes ``results/calibration.json`` and the tables of ``docs/verdicts.md``. Seeds are fixed: a rerun gives the same
numbers. ``tests/bench/test_calibration.py`` runs the same functions and fails if a rate is too high.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy

from assay.bench.intervals import LEAST, ONE_SIDED, asymmetry, paired_interval, t_interval

ROOT = Path(__file__).resolve().parent.parent
REPLICATES = (3, 5, 10, 20, 50)
RUNS = 40_000
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def alike(draw: Draw) -> Callable[[np.random.Generator, tuple[int, ...]], tuple[np.ndarray, np.ndarray]]:
    """Two arms that draw from the same distribution."""
    return lambda rng, size: (draw(rng, size), draw(rng, size))


def swapped(rng: np.random.Generator, size: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """In each replicate one arm reports 1 and the other 0, and a coin says which: differences of exactly +1 and -1."""
    coin = rng.integers(0, 2, size).astype(float)
    return coin, 1 - coin


# What two identical arms report: exchanging them changes nothing, and no method is better.
VALUES = {
    "normal": alike(lambda rng, size: rng.normal(size=size)),
    "log-normal": alike(lambda rng, size: rng.lognormal(size=size)),
    "log-normal, as ratio": alike(lambda rng, size: rng.lognormal(size=size)),
    "Cauchy": alike(lambda rng, size: rng.standard_cauchy(size)),
    "rounded to 0.5 sd": alike(lambda rng, size: np.round(rng.normal(size=size) * 2) / 2),
    "rounded to 1 sd": alike(lambda rng, size: np.round(rng.normal(size=size))),
    "80% tied, others 1": alike(lambda rng, size: (rng.random(size) < 0.2).astype(float)),
    "80% tied, others normal": alike(lambda rng, size: np.where(rng.random(size) < 0.2, rng.normal(size=size), 0.0)),
    "0 and 1, always apart": swapped,
}

# Paired differences with a standard deviation of 1 about 0, to which an effect is added.
DIFFERENCES: dict[str, Draw] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "heavy-tailed (t, 3 df)": lambda rng, size: rng.standard_t(3, size) / np.sqrt(3),
    "rounded to 0.5 sd": lambda rng, size: np.round(rng.normal(size=size) * 2) / 2,
}

# Paired differences with mean 0 that no proof covers.
UNCOVERED: dict[str, Draw] = {
    "exponential, tail to the good side": lambda rng, size: rng.exponential(size=size) - 1,
    "exponential, tail to the bad side": lambda rng, size: 1 - rng.exponential(size=size),
    "log-normal, tail to the bad side": lambda rng, size: np.exp(0.5) - rng.lognormal(size=size),
    "two clusters, symmetric": lambda rng, size: rng.choice([-1.0, 1.0], size) + 0.05 * rng.normal(size=size),
}

Rule = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]


def verdict_holds(method: np.ndarray, baseline: np.ndarray, ratio: bool = False) -> np.ndarray:
    """What ``decide`` answers for a metric where higher is better and the bound is no difference."""
    found = paired_interval(method, baseline, ratio=ratio)
    return (found.low > (1.0 if ratio else 0.0)) & ~found.flat & (method.shape[-1] >= LEAST)


def plain_t_holds(method: np.ndarray, baseline: np.ndarray, ratio: bool = False) -> np.ndarray:
    """A rule that is too bold: Student's t, whatever the values look like."""
    return t_interval(np.log(method) - np.log(baseline) if ratio else method - baseline)[0] > 0


def bootstrap_holds(method: np.ndarray, baseline: np.ndarray, ratio: bool = False, resamples: int = 400) -> np.ndarray:
    """Another one: the percentile bootstrap of the mean."""
    effects = np.log(method) - np.log(baseline) if ratio else method - baseline
    rng, n = np.random.default_rng(1), effects.shape[-1]
    means = np.stack([effects[:, rng.integers(n, size=n)].mean(-1) for _ in range(resamples)], -1)
    return np.quantile(means, ONE_SIDED, axis=-1) > 0


def false_rate(values: str, n: int, runs: int = RUNS, rule: Rule = verdict_holds, seed: int = 20) -> float:
    """Share of runs in which one of two identical arms is called better."""
    rng = np.random.default_rng([seed, n, list(VALUES).index(values)])
    method, baseline = VALUES[values](rng, (runs, n))
    return float(rule(method, baseline, "ratio" in values).mean())


def power(differences: str, n: int, effect: float, runs: int = RUNS, seed: int = 21) -> float:
    """Share of runs in which an effect, in standard deviations of the differences, is found."""
    rng = np.random.default_rng([seed, n, list(DIFFERENCES).index(differences)])
    noise = DIFFERENCES[differences](rng, (runs, n))
    return float(verdict_holds(noise + effect, np.zeros_like(noise)).mean())


def uncovered_rate(differences: str, n: int, runs: int = RUNS, seed: int = 22) -> float:
    """Share of runs that call a mean difference of zero better, where the differences are outside of the proof."""
    rng = np.random.default_rng([seed, n, list(UNCOVERED).index(differences)])
    d = UNCOVERED[differences](rng, (runs, n))
    return float(verdict_holds(d, np.zeros_like(d)).mean())


def warned_rate(draw: Draw, n: int, below: float, runs: int = 2000, seed: int = 23) -> float:
    """Share of runs that warn of asymmetric differences."""
    rng = np.random.default_rng([seed, n])
    return float(np.mean([asymmetry(d) < below for d in draw(rng, (runs, n))]))


def measure(runs: int = RUNS) -> dict[str, object]:
    """All tables, as rows of name to rates by number of replicates."""
    from assay.bench.verdict import ASYMMETRIC_BELOW

    def by_n(rate: Callable[[int], float], least: int = 0) -> dict[str, float]:
        return {str(n): rate(n) for n in REPLICATES if n >= least}

    few = min(runs, 5_000)
    symmetric = {name: lambda rng, size, f=f: np.subtract(*f(rng, size)) for name, f in VALUES.items()}
    return {
        "runs": runs,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "identical": {v: by_n(lambda n, v=v: false_rate(v, n, runs)) for v in VALUES},
        "naive": {
            "percentile bootstrap, normal": by_n(lambda n: false_rate("normal", n, few, bootstrap_holds)),
            "plain t, 0 and 1, always apart": by_n(
                lambda n: false_rate("0 and 1, always apart", n, runs, plain_t_holds)
            ),
        },
        "power": {
            f"{d}, {e:g} sd": by_n(lambda n, d=d, e=e: power(d, n, e, runs)) for d in DIFFERENCES for e in (0.5, 1, 2)
        },
        "uncovered": {d: by_n(lambda n, d=d: uncovered_rate(d, n, runs)) for d in UNCOVERED},
        "warned": {
            name: by_n(lambda n, draw=draw: warned_rate(draw, n, ASYMMETRIC_BELOW), least=10)
            for name, draw in {**symmetric, **UNCOVERED}.items()
            if name != "log-normal, as ratio"
        },
    }


def table(rows: dict[str, dict[str, float]], head: str) -> str:
    """Rates as a Markdown table."""
    columns = list(next(iter(rows.values())))
    lines = [f"| {head} | " + " | ".join(f"n = {n}" for n in columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    lines += [f"| {name} | " + " | ".join(f"{100 * r[n]:.1f}%" for n in columns) + " |" for name, r in rows.items()]
    return "\n".join(lines)


def document(found: dict) -> str:
    """The part of ``docs/verdicts.md`` between the markers."""
    rows = {head: table(found[key], head) for key, head in HEADS.items()}
    error = 100 * np.sqrt(ONE_SIDED * (1 - ONE_SIDED) / found["runs"])
    return "\n\n".join(
        [
            f"Measured by `scripts/calibration.py`: {found['runs']:,} simulated runs a cell (standard error at 2.5%: "
            f"{error:.2f} points; fewer runs for the bootstrap and the warnings), NumPy {found['numpy']}, "
            f"SciPy {found['scipy']}.",
            "**Two identical arms: how often one is called better.** The rule must stay at 2.5% in every cell.",
            rows[HEADS["identical"]],
            "**The same for two rules that assay does not use**, to show that the test can fail.",
            rows[HEADS["naive"]],
            "**Power: how often a true effect is found.** Effects in standard deviations of the paired differences.",
            rows[HEADS["power"]],
            "**Outside of the guarantee: mean difference zero, called better.** Asymmetric differences, and symmetric "
            "ones in two clusters with fewer than six replicates.",
            rows[HEADS["uncovered"]],
            "**How often asymmetry is warned of** (from ten replicates on): rarely for the symmetric differences of "
            "identical arms, and for asymmetric ones as soon as it can be seen.",
            rows[HEADS["warned"]],
        ]
    )


HEADS = {
    "identical": "values of each arm",
    "naive": "rule, values of each arm",
    "power": "differences, effect",
    "uncovered": "differences",
    "warned": "values or differences",
}
BEGIN, END = "<!-- calibration:begin -->", "<!-- calibration:end -->"


def embed(text: str, found: dict) -> str:
    """The document with its measured part replaced."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"the document lacks the markers {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{document(found)}\n\n{END}{after}"


def main() -> None:
    """Measure, write both files, and print the tables."""
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else RUNS)
    out, page = ROOT / "results" / "calibration.json", ROOT / "docs" / "verdicts.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page.write_text(embed(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    print(document(found))


if __name__ == "__main__":
    main()
