"""The page docs/examples/bags_to_interval.md runs, and its interval holds."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "examples" / "bags_to_interval.md"


def test_the_interval_of_the_page_is_finite_and_holds(capsys):
    pytest.importorskip("torch")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert 10 <= len([line for line in block.splitlines() if line.strip()]) <= 30
    scope: dict = {}
    exec(block, scope)
    lower, upper, spread = scope["lower"], scope["upper"], scope["spread"][1000:]
    assert np.isfinite(lower).all() and np.isfinite(upper).all() and (lower < upper).all()
    # 400 calibration and 500 test bags: three standard errors of both together
    assert abs(scope["coverage"] - 0.9) < 3 * np.sqrt(0.09 / 400 + 0.09 / 500)
    # wide where the bag is wide, and narrower than an interval that knows nothing of the bag
    assert np.corrcoef(upper - lower, spread)[0, 1] > 0.5
    low, high = np.quantile(scope["y"], [0.05, 0.95])
    assert np.mean(upper - lower) < 0.9 * (high - low)
    assert "%" in capsys.readouterr().out
