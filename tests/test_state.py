"""How parts save and load, and names that are imported on first use."""

import math

import numpy as np
import pytest

import assay.serving
import assay.statistics
from assay._state import CONFIG, TENSORS, load_state, save_state


def test_arrays_and_configuration_come_back(tmp_path):
    config = {"alpha": 0.5, "top": math.inf, "names": ["a"], "none": None}
    save_state(tmp_path / "x", "Thing", config, {"w": np.arange(6.0).reshape(2, 3).T, "i": np.array([1, 2])})
    found, tensors = load_state(tmp_path / "x", "Thing")
    assert found == config
    assert (tensors["w"] == np.arange(6.0).reshape(2, 3).T).all() and tensors["i"].dtype == np.int64


def test_torch_tensors_come_back_with_their_dtype(tmp_path):
    torch = pytest.importorskip("torch")
    w = torch.randn(3, 4, dtype=torch.bfloat16).T
    save_state(tmp_path, "Thing", {}, {"w": w})
    _, tensors = load_state(tmp_path, "Thing", torch_tensors=True)
    assert tensors["w"].dtype == torch.bfloat16 and torch.equal(tensors["w"], w)


def test_what_cannot_be_loaded_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match=CONFIG):
        load_state(tmp_path, "Thing")
    save_state(tmp_path, "Thing", {}, {"w": np.zeros(2)})
    with pytest.raises(ValueError, match="holds a 'Thing', not a 'Other'"):
        load_state(tmp_path, "Other")
    (tmp_path / TENSORS).write_bytes(b"no tensors")
    with pytest.raises(ValueError, match="damaged"):
        load_state(tmp_path, "Thing")
    (tmp_path / CONFIG).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_state(tmp_path, "Thing")


@pytest.mark.parametrize("family", [assay.serving, assay.statistics])
def test_every_public_name_of_a_family_exists(family):
    for name in family.__all__:
        assert getattr(family, name) is not None
    assert set(family.__all__) <= set(dir(family))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = family.no_such_name
