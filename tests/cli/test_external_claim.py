"""docs/adding-a-method.md, followed to the letter: its files, made into an installed package, run as a claim."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOC = Path(__file__).parents[2] / "docs" / "adding-a-method.md"


def files_of(text):
    """The fenced blocks that carry a title, by that title."""
    return dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, flags=re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder as pip leaves it: the modules, and the metadata that holds the entry point."""
    folder = tmp_path_factory.mktemp("site")
    files = files_of(DOC.read_text(encoding="utf-8"))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    import tomllib

    points = tomllib.loads(files["pyproject.toml"])["project"]["entry-points"]["assay.claims"]
    info = folder / "trimmed_mean-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trimmed-mean\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[assay.claims]\n" + "".join(f"{slug} = {target}\n" for slug, target in points.items())
    )
    return folder


def assay(site, *arguments, store=None):
    environment = os.environ | {"PYTHONPATH": str(site), "COLUMNS": "160"}
    if store is not None:
        environment["ASSAY_STORE"] = str(store)
    return subprocess.run(
        [sys.executable, "-m", "assay.cli", *arguments], capture_output=True, text=True, env=environment, cwd=site
    )


def test_it_is_listed_with_where_it_comes_from(site):
    done = assay(site, "list")
    assert done.returncode == 0
    assert re.search(r"trimmed_mean\s+external\s+from trimmed-mean", done.stdout)


def test_its_card_and_its_options(site):
    assert "from trimmed import trimmed_mean" in assay(site, "card", "trimmed-mean").stdout
    shown = assay(site, "run", "trimmed_mean", "--help").stdout
    assert "--outliers" in shown
    assert "Fraction of outliers" in shown


def test_it_runs_and_is_decided(site, tmp_path):
    done = assay(site, "run", "trimmed_mean", "--json", "--quiet", store=tmp_path / "s.sqlite")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["answer"] == "holds"  # a tenth of the data lies at 10: the mean is off by 1
    assert len(answer["trials"]) == 60
    assert answer["comparisons"][0]["effect"] < -0.5


def test_without_outliers_it_does_not_pretend(site, tmp_path):
    done = assay(site, "run", "trimmed_mean", "--outliers", "0", "--json", "--quiet", store=tmp_path / "s.sqlite")
    assert json.loads(done.stdout)["answer"] != "holds"


def test_a_second_run_computes_nothing_and_reports(site, tmp_path):
    store = tmp_path / "s.sqlite"
    first = assay(site, "run", "trimmed_mean", "--scale", "smoke", "--quiet", store=store)
    again = assay(site, "run", "trimmed_mean", "--scale", "smoke", "--quiet", store=store)
    assert first.returncode == again.returncode == 0
    assert first.stdout == again.stdout
    results = assay(site, "results", store=store)
    assert "trimmed_mean" in results.stdout
    report = assay(site, "report", "--out", str(tmp_path / "out"), store=store)
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "out" / "index.html").is_file()
    assert (tmp_path / "out" / "trimmed_mean.html").is_file()
    markdown = assay(site, "report", "trimmed_mean", "--markdown", store=store)
    assert "trimmed" in markdown.stdout


def test_its_own_checks_answer_with_exit_code_2(site, tmp_path):
    store = tmp_path / "s.sqlite"
    done = assay(site, "run", "trimmed_mean", "--outliers", "0.7", store=store)
    assert done.returncode == 2
    assert "--outliers must be in [0, 0.5), not 0.7" in done.stderr
    assert not store.exists()
