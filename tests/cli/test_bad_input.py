"""Bad input on the command line: a clear message, exit code 2, nothing written."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pandas as pd
import pytest

from assay.cli import main


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An empty home and an empty store of one's own, and a terminal width that does not fold messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASSAY_STORE", str(tmp_path / "store" / "trials.sqlite"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def refused(capsys, *arguments, says=()):
    """The command exits with 2, says all of that on standard error and nothing on standard output."""
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for word in says:
        assert word in err, err
    return err


def nothing_written(home):
    assert not (home / "store").exists()


def table(home, name="t.csv", n=60, **columns):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=n), "b": rng.normal(size=n), "price": rng.exponential(size=n)})
    frame = frame.assign(**columns)
    frame.to_csv(home / name, index=False)
    return str(home / name)


@pytest.mark.parametrize("slug, near", [("kiwi", "kivi"), ("stein-thining", "stein_thinning"), ("rqrr", "rqr")])
def test_unknown_slug_suggests_the_nearest(capsys, home, slug, near):
    refused(capsys, "run", slug, says=[repr(slug), f"did you mean {near!r}?"])
    refused(capsys, "card", slug, says=[repr(slug), f"did you mean {near!r}?"])
    nothing_written(home)


def test_unknown_slug_with_no_near_one_shows_how_to_find_them(capsys):
    refused(capsys, "run", "zzzzzz", says=["`assay list`"])


def test_unknown_option_is_named(capsys, home):
    refused(capsys, "run", "rqr", "--dat", "x.csv", says=["--dat", "--data"])
    nothing_written(home)


@pytest.mark.parametrize(
    "arguments, word",
    [
        (["--scale", "huge"], "--scale"),
        (["--replicates", "0"], "replicates"),
        (["--replicates", "many"], "--replicates"),
        (["--seed", "-1"], "seed"),
        (["--arms", "qrr"], "'qr'"),
        (["--device", "tpu"], "device"),
        (["--executor", "rey"], "'ray'"),
        (["--jobs", "0"], "jobs"),
    ],
)
def test_bad_common_options(capsys, home, arguments, word):
    refused(capsys, "run", "rqr", *arguments, says=[word])
    nothing_written(home)


def test_missing_file(capsys, home):
    refused(capsys, "run", "rqr", "--data", "nowhere.csv", "--target", "price", says=["nowhere.csv"])
    refused(capsys, "run", "stein_thinning", "--samples", "nowhere.npz", says=["nowhere.npz"])
    refused(capsys, "run", "kivi", "--model", "/nowhere/model", says=["/nowhere/model"])
    nothing_written(home)


def test_missing_text_file(capsys, home):
    refused(capsys, "run", "kivi", "--text", "nowhere.txt", says=["nowhere.txt"])
    nothing_written(home)


def test_empty_csv(capsys, home):
    (home / "empty.csv").write_text("")
    refused(capsys, "run", "rqr", "--data", "empty.csv", "--target", "price", says=["empty.csv", "empty"])
    (home / "head.csv").write_text("a,price\n")
    refused(capsys, "run", "rqr", "--data", "head.csv", "--target", "price", says=["head.csv"])
    nothing_written(home)


def test_target_absent_suggests_the_nearest(capsys, home):
    refused(capsys, "run", "rqr", "--data", table(home), "--target", "prize", says=["'prize'", "'price'"])
    refused(capsys, "run", "rqr", "--data", table(home), says=["target"])
    nothing_written(home)


def test_target_constant_or_text(capsys, home):
    constant = table(home, price=1.0)
    refused(capsys, "run", "rqr", "--data", constant, "--target", "price", says=["price", "constant"])
    text = table(home, price="cheap")
    refused(capsys, "run", "rqr", "--data", text, "--target", "price", says=["price", "must hold numbers", "cheap"])
    nothing_written(home)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("column", ["a", "price"])
def test_nan_and_infinity_are_named(capsys, home, column, bad):
    values = np.random.default_rng(1).normal(size=60)
    values[7] = bad
    path = table(home, **{column: values})
    refused(capsys, "run", "rqr", "--data", path, "--target", "price", says=[column])
    nothing_written(home)


def test_one_row(capsys, home):
    refused(capsys, "run", "rqr", "--data", table(home, n=1), "--target", "price", says=["1 row"])
    nothing_written(home)


def test_scores_of_the_wrong_shape(capsys, home):
    np.savez(home / "d.npz", points=np.zeros((50, 2)), scores=np.zeros((50, 3)))
    refused(capsys, "run", "stein_thinning", "--samples", "d.npz", says=["(50, 2)", "(50, 3)"])
    nothing_written(home)


def test_a_pickle_is_not_opened(capsys, home):
    np.savez(home / "d.npz", points=np.array([{"a": 1}], dtype=object), scores=np.zeros((1, 1)))
    refused(capsys, "run", "stein_thinning", "--samples", "d.npz", says=["d.npz"])
    nothing_written(home)


def tiny_model(folder, **changes):
    from transformers import LlamaConfig

    sizes = dict(vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    LlamaConfig(**sizes, **changes).save_pretrained(folder)
    weights(folder)
    return folder


def weights(folder):
    from safetensors.numpy import save_file

    save_file({"nothing": np.zeros(1)}, folder / "model.safetensors")


def test_model_without_config_or_tokenizer(capsys, home):
    (home / "m").mkdir()
    refused(capsys, "run", "kivi", "--model", str(home / "m"), says=["config.json"])
    tiny_model(home / "n")
    refused(capsys, "run", "kivi", "--model", str(home / "n"), says=["tokenizer"])
    nothing_written(home)


def test_model_whose_attention_no_cache_can_quantise(capsys, home):
    (home / "m").mkdir()
    (home / "m" / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    weights(home / "m")
    refused(capsys, "run", "kivi", "--model", str(home / "m"), says=["mamba"])
    nothing_written(home)


def test_text_shorter_than_the_context(capsys, home):
    (home / "short.txt").write_text("Too short to say anything. ")
    refused(capsys, "run", "kivi", "--text", "short.txt", says=["short.txt", "tokens"])
    nothing_written(home)


# ---- the store


def run_rqr(*more, arms=("rqr_w", "qr")):
    return main(["run", "rqr", "--scale", "smoke", "--quiet", "--jobs", "1", *more, "--arms", *arms])


def test_store_that_is_no_database(capsys, home):
    (home / "s.sqlite").write_text("not a database, but a letter " * 100)
    before = (home / "s.sqlite").read_bytes()
    refused(capsys, "run", "rqr", "--store", "s.sqlite", says=["s.sqlite", "not an SQLite database"])
    refused(capsys, "results", "--store", "s.sqlite", says=["s.sqlite"])
    assert (home / "s.sqlite").read_bytes() == before


def test_store_of_a_newer_schema(capsys, home):
    assert run_rqr("--store", "s.sqlite") == 0
    with sqlite3.connect(home / "s.sqlite") as connection:
        connection.execute("UPDATE assay_meta SET value = '99' WHERE key = 'schema'")
    connection.close()
    capsys.readouterr()
    refused(capsys, "results", "--store", "s.sqlite", says=["99", "pip install -U assay"])


def test_store_without_runs(capsys, home):
    refused(capsys, "results", says=["no runs", "assay run"])
    refused(capsys, "report", "rqr", says=["no run of rqr", "assay run rqr"])
    nothing_written(home)


def test_store_in_a_place_that_cannot_be(capsys, home):
    (home / "file").write_text("")
    refused(capsys, "run", "rqr", "--scale", "smoke", "--store", "file/s.sqlite", says=["file/s.sqlite"])


def test_store_of_another_kind(capsys, home):
    refused(capsys, "run", "rqr", "--store", "mysql://a@b/c", says=["mysql", "postgresql"])
    nothing_written(home)


# ---- what is not an error


def test_a_missing_peer_is_skipped_by_name_with_the_line_that_installs_it(capsys, home, monkeypatch):
    import importlib.metadata as metadata

    version = metadata.version

    def without_mapie(name):
        if name.lower() == "mapie":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_mapie)
    assert run_rqr(arms=("qr", "mapie")) == 0
    out = capsys.readouterr().out
    assert "pip install mapie" in out.replace("'", "")


def test_json_is_json_and_progress_stays_off_it(capsys, home):
    assert run_rqr("--json") == 0
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    assert answer["claim"] == "rqr"
    assert answer["answer"] in ("holds", "does not hold", "undecided")
    assert {"effect", "low", "high", "paper"} <= set(answer["comparisons"][0])


def test_ctrl_c_keeps_finished_trials_and_exits_with_130(home):
    store = home / "c.sqlite"
    command = [sys.executable, "-m", "assay.cli", "run", "rqr", "--quiet", "--jobs", "1", "--store", str(store)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    # A shell's background jobs ignore Ctrl-C, and so would what they start.
    interruptible = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=interruptible)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and trials(store) < 3:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command resumes" in err
    assert trials(store) >= 3


def trials(store):
    if not store.exists():
        return 0
    try:
        with sqlite3.connect(store, timeout=5) as connection:
            return connection.execute("SELECT count(*) FROM assay_trials").fetchone()[0]
    except sqlite3.OperationalError:
        return 0
