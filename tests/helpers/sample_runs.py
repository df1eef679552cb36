"""Runs made by hand for the tests of report and results: what every part of a page has to cope with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from assay.bench.claim import Arm, Claim, Frontier, Growth, Metric, Paper, Race, Reported, Scale, Statement
from assay.bench.trial import Run, RunKey, Trial
from assay.bench.verdict import Verdict, decide

ENVIRONMENT = {
    "platform": "Linux-6.1-x86_64",
    "cpu": "AMD EPYC 9354 32-Core Processor",
    "cores": 2,
    "memory_gib": 15.6,
    "python": "3.11.9",
    "gpu": "",
    "libraries": {"numpy": "2.3.1", "scipy": "1.16.0", "torch": "2.13.0"},
    "assay": "0.1.0",
    "commit": "f664a4b0c0ffee00000000000000000000000000",
    "dirty": False,
}


@dataclass
class NoOptions:
    text: str | None = None

    def build(self, *, device, seed):
        raise NotImplementedError


def nothing(shared, replicate):
    return {}


def cache_claim() -> Claim:
    """Three statements of three kinds (margin, count, race), two settings, a baseline that is not installed."""
    return Claim(
        slug="cache",
        title="Two-bit caches",
        family="serving",
        paper=Paper(
            "A cache in two bits", "A. Author, B. Writer and C. Scribe", "ICML 2024", "https://example.org/paper"
        ),
        question="Would a 2-bit cache hurt my language model?",
        statements=(
            Statement(
                "quality",
                "Perplexity stays within 0.02 nat per token of the full cache",
                "nll",
                "two_bit",
                ("full", "quanto"),
                bound=0.02,
                reported=Reported("+0.011 nat", "Llama-2-7B, WikiText-2", "Table 3", 0.011),
            ),
            Statement(
                "memory",
                "A token takes at most 0.35 of the bytes of a 16-bit cache",
                "bytes",
                "two_bit",
                ("full",),
                scale="ratio",
                bound=0.35,
                reported=Reported("2.6× less peak memory, model included", "Llama-2-7B, A100", "Figure 4"),
            ),
            Statement(
                "speed",
                "Decoding takes less time than with the other quantised caches",
                "seconds",
                "two_bit_timed",
                ("quanto_timed", "hqq_timed"),
                scale="ratio",
                decides=False,
            ),
        ),
        metrics=(
            Metric("nll", "Negative log-likelihood", "lower", "nat"),
            Metric("bytes", "Bytes held per token", "lower", "B", counted=True),
            Metric("seconds", "Time of a step", "lower", "s"),
        ),
        arms=(
            Arm("two_bit", nothing, "method", "KIVI, 2 bit"),
            Arm("per_token", nothing, "ablation", "2 bit, keys per token"),
            Arm("full", nothing, "baseline", "DynamicCache (16 bit)"),
            Arm("quanto", nothing, "baseline", "QuantizedCache, optimum-quanto 2 bit", requires=("optimum-quanto",)),
            Arm("two_bit_timed", nothing, "method", "KIVI, 2 bit", race="decode"),
            Arm("quanto_timed", nothing, "baseline", "QuantizedCache, optimum-quanto 2 bit", race="decode"),
            Arm("hqq_timed", nothing, "baseline", "QuantizedCache, hqq 2 bit", race="decode", requires=("hqq>=0.2",)),
        ),
        workload=NoOptions,
        scales={"desk": Scale(8, races={"decode": Race(7, 1)})},
        unit="document",
        snippet="from assay.serving import KIVICache\ncache = KIVICache()",
        example="assay run cache --text my.txt",
        notes=(
            "At 135 million parameters the loss is larger than at 7 billion: small models have fewer heads to spare.",
        ),
    )


def cache_run(replicates: int = 8) -> tuple[Run, Verdict]:
    claim = cache_claim()
    rng = np.random.default_rng(3)
    settings = ("512 tokens", "4,096 tokens")
    trials, failed = (
        [],
        'Traceback (most recent call last):\n  File "arm.py", line 3, in run\nRuntimeError: group size 32 < 64',
    )
    for setting in settings:
        for r in range(replicates):
            base = 2.9 + rng.normal(0, 0.2)
            values = {
                "two_bit": {"nll": base + rng.normal(0.006, 0.004), "bytes": 3168.0},
                "per_token": {"nll": base + rng.normal(0.31, 0.05), "bytes": 3168.0},
                "full": {"nll": base, "bytes": 11520.0},
                "quanto": {"nll": base + rng.normal(0.24, 0.03), "bytes": 3600.0},
                "two_bit_timed": {"seconds": 0.041 * math.exp(rng.normal(0, 0.06))},
                "quanto_timed": {"seconds": 0.062 * math.exp(rng.normal(0, 0.06))},
            }
            for arm, metrics in values.items():
                bad = arm == "per_token" and r == 1
                if "seconds" in metrics:
                    metrics |= {"seconds_low": metrics["seconds"] * 0.97, "seconds_high": metrics["seconds"] * 1.04}
                trials.append(
                    Trial(
                        setting,
                        r,
                        arm,
                        "failed" if bad else "ok",
                        {} if bad else metrics,
                        failed if bad else "",
                        seconds=1.25,
                        peak_rss=900 * 2**20,
                        finished=f"2026-11-30T2{r % 3}:15:00+00:00",
                        environment=ENVIRONMENT,
                    )
                )
    run = Run(
        claim,
        RunKey("cache", "desk", "9d1f" * 16, "77aa" * 16, "cpu", 0),
        "SmolLM2-135M on 8 documents of English prose",
        settings,
        replicates,
        tuple(a.name for a in claim.arms),
        tuple(trials),
        {"hqq_timed": "needs hqq>=0.2, which is not installed; pip install 'hqq>=0.2'"},
        {"text": "my book.txt"},
    )
    return run, decide(run)


def interval_run(replicates: int = 12, slug: str = "widths") -> tuple[Run, Verdict]:
    """One statement over seven data sets, whose effects are of different size; one setting cannot be computed."""
    baselines = ("cqr", "lightgbm")
    statement = Statement(
        "width",
        "Intervals are narrower at the same coverage",
        "width",
        "relaxed",
        baselines,
        scale="ratio",
        reported=Reported("0.93×", "mean of ten UCI sets", "Table 2", 0.93),
    )
    coverage = Statement("coverage", "Coverage is at least 0.88", "coverage", "relaxed", constant=0.88)
    metrics = (Metric("width", "Interval width", "lower"), Metric("coverage", "Coverage", "higher"))
    claim = replace(
        cache_claim(),
        slug=slug,
        title="Relaxed quantile regression",
        family="statistics",
        question="Would relaxed quantiles give me narrower prediction intervals?",
        statements=(statement, coverage),
        metrics=metrics,
        unit="seed",
        notes=(),
        arms=(
            Arm("relaxed", nothing, "method", "RQR"),
            Arm("cqr", nothing, "baseline", "Conformalised quantile regression"),
            Arm(
                "lightgbm",
                nothing,
                "baseline",
                "Gradient boosting with two pinball losses, calibrated on a held-out tenth",
            ),
        ),
        scales={"desk": Scale(replicates)},
    )
    settings = ("exponential", "normal", "401ksubs", "concrete", "wine", "heavy tails", "constant column")
    rng = np.random.default_rng(5)
    trials = []
    for i, setting in enumerate(settings):
        for r in range(replicates):
            spread = 0.9 if setting == "heavy tails" else 0.04
            for arm, centre in (("relaxed", 0.86 + 0.03 * i), ("cqr", 1.0), ("lightgbm", 1.02)):
                width = centre * 3 * math.exp(rng.normal(0, spread if arm == "relaxed" else 0.02))
                values = {"width": math.nan if i == 6 else width, "coverage": 0.9 + rng.normal(0, 0.008)}
                trials.append(Trial(setting, r, arm, "ok", values, seconds=0.1, environment=ENVIRONMENT))
    key = RunKey(slug, "desk", "1b" * 32, "2c" * 32, "cpu", 7)
    run = Run(claim, key, "seven tables", settings, replicates, tuple(a.name for a in claim.arms), tuple(trials))
    return run, decide(run)


def hostile_run() -> tuple[Run, Verdict]:
    """Every string that users or authors choose carries markup."""
    bad = '<script>alert("x")</script>'
    run, _ = cache_run(3)
    claim = replace(
        run.claim,
        slug=f"../{bad}",
        title=bad,
        question=bad,
        unit=bad,
        notes=(bad,),
        paper=Paper(bad, bad, bad, "javascript:alert(1)"),
        statements=tuple(replace(s, text=bad, reported=Reported(bad, bad, bad, 0.01)) for s in run.claim.statements),
        metrics=tuple(replace(m, label=bad, unit=bad) for m in run.claim.metrics),
        arms=tuple(replace(a, label=bad) for a in run.claim.arms),
    )
    trials = tuple(
        replace(
            t,
            setting=bad,
            replicate=t.replicate,
            error=bad * (t.status == "failed"),
            environment={"cpu": bad, "libraries": {bad: bad}, "commit": bad},
        )
        for t in run.trials
    )
    run = replace(
        run, claim=claim, title=bad, settings=(bad,), trials=trials, skipped={"hqq_timed": bad}, options={bad: bad}
    )
    verdict = decide(run)
    return run, replace(verdict, warnings=(*verdict.warnings, bad))


def empty_run() -> tuple[Run, Verdict]:
    """Nothing has been run, and one statement is about a setting that the task does not have."""
    run, _ = cache_run(3)
    first, *rest = run.claim.statements
    claim = replace(run.claim, statements=(replace(first, where=("32,768 tokens",)), *rest))
    run = replace(run, claim=claim, trials=(), skipped={})
    return run, decide(run)


SIZES = {"1k": 1024.0, "2k": 2048.0, "4k": 4096.0, "8k": 8192.0}


def curves_run(power=1.0, settings=tuple(SIZES), closeness=None):
    """Three arms; "fast" is flat up to 2k, then grows as the square root; "close" has no error at all."""
    growth = Growth(
        "time", "Time against length", "seconds", ("plain", "fast"), SIZES, "tokens", 2048.0,
        Reported("exponent 1", "on paper", "section 9"),
    )  # fmt: skip
    claim = Claim(
        slug="curves",
        title="Curves",
        family="serving",
        paper=None,
        question="How does it grow?",
        statements=(Statement("faster", "It is faster", "seconds", "fast", ("plain",), scale="ratio"),),
        metrics=(
            Metric("seconds", "time", "lower", "s"),
            Metric("error", "error", "lower"),
            Metric("n", "count", None),
        ),
        arms=tuple(Arm(a, nothing, r) for a, r in (("plain", "baseline"), ("fast", "method"), ("close", "reference"))),
        workload=NoOptions,
        scales={"desk": Scale(3)},
        unit="seed",
        snippet="from assay import run",
        example="",
        growths=(growth,),
        frontiers=(Frontier("plane", "Time against error", "seconds", "error", settings[-1]),),
    )
    errors = closeness or {"plain": 0.02, "fast": 0.5, "close": 0.0}
    trials = []
    for setting in settings:
        size = SIZES[setting]
        times = {"plain": 1e-6 * size**power, "fast": 2e-5 * max(size, 2048.0) ** 0.5, "close": 1e-3 * size}
        for arm, seconds in times.items():
            for r, noise in enumerate((0.5, 1.0, 1.7)):  # the median replicate has no noise
                metrics = {"seconds": seconds * noise, "error": errors[arm]}
                trials.append(Trial(setting, r, arm, "ok", metrics, finished="2026-12-01", environment={"cpu": "one"}))
    key = RunKey("curves", "desk", "data", "code", "cpu", 0)
    return Run(claim, key, "numbers", tuple(settings), 3, ("plain", "fast", "close"), tuple(trials))
