import gc
import sys
import time
import types

import numpy as np
import pytest
import scipy.stats

from assay.bench.race import RaceResult, fit_exponent, race


def test_calls_are_interleaved_and_every_order_occurs_mirrored():
    log = []

    def call(name):
        def run():
            log.append(name)
            time.sleep(0.0012)

        return run

    result = race({n: call(n) for n in "abc"}, rounds=6, warmup=2)
    assert result.loops == {"a": 1, "b": 1, "c": 1}
    assert log[:12] == list("abcabcaabbcc")  # two warm-ups, and two calls to calibrate
    rounds = ["".join(log[12 + i : 15 + i]) for i in range(0, 18, 3)]
    assert all(sorted(r) == list("abc") for r in rounds)
    assert rounds[1::2] == [r[::-1] for r in rounds[0::2]]
    log.clear()
    race({n: call(n) for n in "abc"}, rounds=6, warmup=2)
    assert ["".join(log[12 + i : 15 + i]) for i in range(0, 18, 3)] == rounds


def test_ratio_of_sleeps_is_found():
    result = race({"slow": lambda: time.sleep(0.04), "fast": lambda: time.sleep(0.01)}, rounds=5)
    ratio = result.ratio("slow", "fast")
    assert 1.8 < ratio.value < 5 and ratio.low <= ratio.value <= ratio.high
    assert ratio == result.ratio("slow", "fast")
    assert result.median("slow") > 0.04
    low, high = result.quartiles("slow")
    assert 0.04 < low <= result.median("slow") <= high


def test_short_calls_are_repeated_until_a_clock_can_see_them():
    calls = [0]

    def tick():
        calls[0] += 1

    result = race({"tick": tick}, rounds=3)
    assert result.loops["tick"] > 1000
    assert calls[0] > 3 * result.loops["tick"]
    assert result.seconds["tick"].shape == (3,) and result.median("tick") < 1e-5


def test_before_runs_ahead_of_every_call_and_is_not_timed():
    state = {"ready": 0, "calls": 0}

    def before():
        state["ready"] += 1
        time.sleep(0.03)

    def call():
        assert state["ready"] == 1
        state["ready"] = 0
        state["calls"] += 1
        time.sleep(0.0012)

    result = race({"x": call}, before={"x": before}, rounds=4)
    assert state["calls"] == 7 and result.median("x") < 0.015


def test_short_calls_with_before_are_repeated_too():
    stack = []
    result = race({"pop": stack.pop}, before={"pop": lambda: stack.append(1)}, rounds=2)
    assert result.loops["pop"] > 100 and not stack


def test_collector_is_off_while_timing_and_back_on_after():
    seen = set()

    def call():
        seen.add(gc.isenabled())
        time.sleep(0.0012)

    race({"x": call}, rounds=2, warmup=0)
    assert seen == {False} and gc.isenabled()

    def broken():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        race({"x": broken}, warmup=0)
    assert gc.isenabled()
    gc.disable()
    try:
        race({"x": lambda: time.sleep(0.0012)}, rounds=1)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_synchronize_is_called_around_every_measurement(monkeypatch):
    waits = []
    race({"x": lambda: time.sleep(0.0012)}, rounds=3, warmup=1, synchronize=lambda: waits.append(1))
    assert len(waits) == 2 * 6
    cuda = types.SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, synchronize=lambda: waits.append(2)
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    race({"x": lambda: time.sleep(0.0012)}, rounds=3, warmup=1)
    assert waits.count(2) == 12
    cuda.is_initialized = lambda: False
    race({"x": lambda: time.sleep(0.0012)}, rounds=3, warmup=1)
    assert waits.count(2) == 12


def test_interval_of_the_ratio_covers_at_about_its_level():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        drift = np.exp(0.2 * rng.normal(size=11))  # slow rounds are slow for both
        a, b = (drift * np.exp(0.05 * rng.normal(size=11)) for _ in range(2))
        ratio = RaceResult({"a": 2 * a, "b": b}, {}).ratio("a", "b")
        hits += ratio.low <= 2 <= ratio.high
    assert hits >= 180


def test_two_rounds_give_no_interval():
    ratio = RaceResult({"a": np.array([1.0, 3.0]), "b": np.array([1.0, 1.0])}, {}).ratio("a", "b")
    assert ratio.value == 2 and np.isnan(ratio.low) and np.isnan(ratio.high)


def test_bad_races_are_refused():
    with pytest.raises(ValueError, match="calls is empty"):
        race({})
    with pytest.raises(ValueError, match="rounds"):
        race({"x": int}, rounds=0)
    with pytest.raises(ValueError, match="warmup"):
        race({"x": int}, warmup=-1)
    with pytest.raises(ValueError, match="'y'"):
        race({"x": int}, before={"y": int})


def test_exponent_is_scipys_slope_with_its_interval():
    rng = np.random.default_rng(0)
    sizes = np.array([100, 200, 400, 800, 1600])
    seconds = 3e-6 * sizes**1.7 * np.exp(0.1 * rng.normal(size=5))
    slope, low, high = fit_exponent(sizes, seconds)
    line = scipy.stats.linregress(np.log(sizes), np.log(seconds))
    half = scipy.stats.t.ppf(0.975, 3) * line.stderr
    np.testing.assert_allclose([slope, low, high], [line.slope, line.slope - half, line.slope + half])
    assert low < 1.7 < high
    np.testing.assert_allclose(fit_exponent([1, 2, 4], [5, 20, 80]), 2.0)


@pytest.mark.parametrize(
    ("sizes", "seconds", "told"),
    [
        ([1, 2], [1, 2], "three different"),
        ([1, 2, 3], [1, 2], "one length"),
        ([1, 2, -3], [1, 2, 3], "sizes must be positive"),
        ([1, 2, 3], [1, 2, np.nan], "seconds must be positive"),
    ],
)
def test_bad_growth_data_are_refused(sizes, seconds, told):
    with pytest.raises(ValueError, match=told):
        fit_exponent(sizes, seconds)


@pytest.mark.cuda
def test_cuda_is_waited_for():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    x = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    result = race({"matmul": lambda: x @ x}, rounds=3)
    assert result.median("matmul") > 2 * 8192**3 / 2e15  # no device does more than 2 PFLOP/s in float32
