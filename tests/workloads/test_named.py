"""Functions that a user names as ``module:callable``."""

import sys

import pytest

from assay.errors import InputError
from assay.workloads.named import load_named, source_of


def test_a_function_is_found_and_its_code_is_known(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "named_own.py"
    module.write_text("def f(x):\n    return 2 * x\n")
    try:
        assert load_named("named_own:f", "--loss", "m:f")(3) == 6
        before = source_of("named_own:f")
        module.write_text("def f(x):\n    return 3 * x\n")
        assert source_of("named_own:f") != before, "an edited function is another one"
    finally:
        sys.modules.pop("named_own", None)
    assert source_of("sys:exit") == "", "a built-in module has no file"


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("f", "--loss 'f' must have the form module:callable, e.g. mymodel:loss"),
        (":f", "must have the form"),
        ("math:", "must have the form"),
        ("no_such_module_here:f", "--loss 'no_such_module_here:f': No module named"),
        ("math:nothing", "module 'math' has no function 'nothing'"),
        ("math:pi", "module 'math' has no function 'pi'"),
    ],
)
def test_what_is_no_function_is_refused(reference, message):
    with pytest.raises(InputError, match=message):
        load_named(reference, "--loss", "mymodel:loss")
