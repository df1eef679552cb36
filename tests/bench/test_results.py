"""Committed results: what is written can be read again, diffs are small, and documentation cannot go stale unseen."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import sample_runs as samples

from assay.bench import api, provenance, registry, report, results
from assay.errors import InputError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def known(monkeypatch):
    """The sample claims as if they were ours, with sources whose fingerprint can be changed."""
    claims = {run.claim.slug: run.claim for run, _ in (samples.cache_run(3), samples.interval_run(3))}
    claims = {
        s: replace(c, snippet=f"import numpy\nfrom assay.{c.family} import Part\nPart()") for s, c in claims.items()
    }
    code = {"cache": "77aa" * 16, "widths": "2c" * 32}

    def load(slug):
        if slug not in claims:
            raise InputError(f"{slug} is unknown")
        return claims[slug]

    entries = {s: registry.Entry(s, c.family, c.title, f"assay.claims.{s}:CLAIM") for s, c in claims.items()}
    entries["theirs"] = registry.Entry("theirs", "external", "from elsewhere", "elsewhere:CLAIM")
    monkeypatch.setattr(registry, "load", load)
    monkeypatch.setattr(registry, "entries", lambda: entries)
    monkeypatch.setattr(provenance, "fingerprint", lambda claim: code[claim.slug])
    return code


def test_what_is_exported_makes_the_same_page_again(tmp_path):
    for make in (samples.cache_run, samples.interval_run, samples.empty_run):
        run, verdict = make()
        path = results.export(run, verdict, tmp_path / "results")
        assert path == tmp_path / "results" / f"{run.claim.slug}.json"
        again, same = results.restore(json.loads(path.read_text(encoding="utf-8")))
        assert results.dump(results.to_result(again, same)) + "\n" == path.read_text(encoding="utf-8")
        pages = [
            report.write_report([pair], tmp_path / str(i)) for i, pair in enumerate([(run, verdict), (again, same)])
        ]
        tables = [p.with_name(f"{run.claim.slug}.html").read_text() for p in pages]
        head = [t[t.index('aria-labelledby="statements"') : t.index('<h2 id="arms">')] for t in tables]
        for comparisons in (d.comparisons for d in same.decisions):
            for c in comparisons:
                assert c.n == len(c.effects)
        assert head[0].count("<tr") == head[1].count("<tr")
        assert [x for x in head[0].split("\n") if "<td" in x] == [x for x in head[1].split("\n") if "<td" in x]


def test_json_is_strict_in_one_order_and_a_trial_takes_a_line(tmp_path):
    run, verdict = samples.cache_run()
    text = results.export(run, verdict, tmp_path).read_text(encoding="utf-8")

    def refuse(name):
        raise AssertionError(name)

    data = json.loads(text, parse_constant=refuse)
    assert list(data)[:4] == ["schema", "slug", "title", "family"]
    lines = [line for line in text.splitlines() if '"replicate": ' in line]
    assert len(lines) == len(run.trials)
    assert text.endswith("}\n")
    shuffled = replace(run, trials=tuple(reversed(run.trials)))
    assert results.export(shuffled, verdict, tmp_path).read_text(encoding="utf-8") == text
    assert data["environments"] == [samples.ENVIRONMENT]
    assert data["date"] == "2026-11-30"


def test_one_changed_number_changes_one_line_of_trials(tmp_path):
    run, verdict = samples.cache_run()
    first, *rest = run.trials
    changed = replace(first, metrics=dict(first.metrics, nll=3.14159265358979))
    a = results.export(run, verdict, tmp_path / "a").read_text().splitlines()
    b = results.export(replace(run, trials=(changed, *rest)), verdict, tmp_path / "b").read_text().splitlines()
    differing = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    assert len(differing) == 1
    assert '"nll": 3.141593' in differing[0][1]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (1 / 3, 0.3333333),
        (123456789.0, 123456800.0),
        (math.nan, None),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (0, 0.0),
    ],
)
def test_rounding(value, kept):
    assert results.rounded(value) == kept
    back = results._number(kept)
    assert (math.isnan(back) and math.isnan(value)) or back == pytest.approx(value, rel=1e-6)


def test_failures_keep_their_last_line_and_no_folders_of_this_machine(tmp_path):
    run, verdict = samples.cache_run()
    text = results.export(run, verdict, tmp_path).read_text()
    assert "RuntimeError: group size 32 < 64" in text and "arm.py" not in text
    again, _ = results.restore(json.loads(text))
    assert {t.status for t in again.trials if t.arm == "per_token" and t.replicate == 1} == {"failed"}


def test_options_and_machines_of_any_kind_become_json(tmp_path):
    run, verdict = samples.cache_run(3)
    other = dict(samples.ENVIRONMENT, cpu="Apple M3", memory_gib=math.nan)
    trials = tuple(replace(t, environment=other, peak_device=2**21) if t.replicate else t for t in run.trials)
    run = replace(run, trials=trials, options={"data": Path("a/b.csv"), "columns": ("x", 1), "flag": True})
    data = json.loads(results.export(run, verdict, tmp_path).read_text())
    assert data["workload"]["options"] == {"data": "a/b.csv", "columns": ["x", 1], "flag": True}
    assert [e["cpu"] for e in data["environments"]] == [samples.ENVIRONMENT["cpu"], "Apple M3"]
    again, _ = results.restore(data)
    assert {t.environment["cpu"] for t in again.trials if t.replicate} == {"Apple M3"}
    assert {t.peak_device for t in again.trials if t.replicate} == {2**21}


def test_results_are_read_by_slug_and_bad_files_are_named(tmp_path):
    for make in (samples.interval_run, samples.cache_run):
        results.export(*make(3), tmp_path)
    assert [r["slug"] for r in results.load_results(tmp_path)] == ["cache", "widths"]
    assert results.load_results(tmp_path / "nowhere") == []
    (tmp_path / "calibration.json").write_text('{"runs": 40000}')
    assert len(results.load_results(tmp_path)) == 2
    good = json.loads((tmp_path / "cache.json").read_text())
    for bad in (
        "{",
        "[]",
        '{"schema": 1, "slug": "cache"}',
        json.dumps(good | {"schema": 2}),
        json.dumps(good | {"trials": [{}]}),
    ):
        (tmp_path / "cache.json").write_text(bad)
        with pytest.raises(InputError, match=r"cache\.json"):
            results.load_results(tmp_path)


def test_a_result_is_stale_when_its_sources_changed_or_went_away(known, tmp_path):
    results.export(*samples.cache_run(3), tmp_path)
    (result,) = results.load_results(tmp_path)
    assert not results.is_stale(result)
    assert "tale" not in results.results_markdown([result])
    known["cache"] = "00" * 32
    assert results.is_stale(result)
    text = results.results_markdown([result])
    assert "| cache | Would a 2-bit cache hurt my language model? | ✓ holds (stale) |" in text
    assert "**Stale:**" in text and "make results CLAIM=cache" in text
    assert results.is_stale(dict(result, slug="gone"))


def test_real_fingerprints_decide_staleness(tmp_path, monkeypatch):
    run, verdict = samples.cache_run(3)
    monkeypatch.setattr(registry, "load", lambda slug: run.claim)
    now = replace(run, key=replace(run.key, code=provenance.fingerprint(run.claim)))
    results.export(now, verdict, tmp_path)
    (result,) = results.load_results(tmp_path)
    assert not results.is_stale(result)
    assert results.is_stale(dict(result, code="0" * 64))


def test_measured_and_reported_numbers_have_tables_of_their_own(known, tmp_path):
    run, verdict = samples.cache_run()
    results.export(run, verdict, tmp_path)
    text = results.results_markdown(results.load_results(tmp_path))
    c = verdict.decisions[0].deciding
    effect, low, high = (f"{v:.4f}".replace("-", "−") for v in (c.effect, c.low, c.high))
    row = f"| 512 tokens | {effect} nat | {low} to {high} | < 0.02 nat | ✓ holds | DynamicCache (16 bit) (strongest) |"
    assert row in text
    blocks = [b for b in text.split("\n\n") if b.startswith("|")]
    assert sum("+0.011 nat" in b for b in blocks) == 1
    assert not any("+0.011 nat" in b and f"{effect} nat" in b for b in blocks)
    for b in blocks:
        assert len({line.count(" | ") for line in b.splitlines() if not line.startswith("|-")}) == 1
    for said in (
        "Command: `assay run cache",
        "AMD EPYC",
        "torch 2.13.0",
        "2026-11-30",
        "f664a4b0c0ff",
        "hqq>=0.2",
        "1 of 8 trials",
    ):
        assert said in text
    assert "(does not decide)" in text


def test_nothing_measured_is_said(known, tmp_path):
    assert "Nothing has been measured yet." in results.results_markdown([])
    run, verdict = samples.empty_run()
    text = results.result_markdown(json.loads(results.dump(results.to_result(run, verdict))))
    assert "? undecided: not asked: it is about 32,768 tokens" in text


def test_methods_table_has_our_methods_only(known, tmp_path):
    results.export(*samples.cache_run(3), tmp_path)
    table = results.methods_table(results.load_results(tmp_path))
    assert "| [cache](docs/methods/cache.md) | serving | Two-bit caches | `from assay.serving import Part` |" in table
    assert "[✓ holds](RESULTS.md#cache) |" in table
    assert "| `from assay.statistics import Part` | not measured yet |" in table
    assert "theirs" not in table
    with pytest.raises(ValueError, match="imports nothing from assay"):
        results.import_line(replace(samples.cache_claim(), snippet="print(1)"))


def test_blocks_are_replaced_between_their_marks_only():
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n"
    new = results.replace_block(text, "x", "new\n")
    assert new == "a\n<!-- x:begin -->\n\nnew\n\n<!-- x:end -->\nb\n"
    assert results.replace_block(new, "x", "new") == new
    for bad in ("a", "<!-- x:end --><!-- x:begin -->", text + text, "<!-- x:begin -->"):
        with pytest.raises(ValueError, match="x:begin"):
            results.replace_block(bad, "x", "new")


@pytest.fixture
def repository(tmp_path):
    cards = tmp_path / "docs" / "methods"
    cards.mkdir(parents=True)
    for slug in ("cache", "widths"):
        (cards / f"{slug}.md").write_text(f"# {slug}\n\n<!-- results:begin -->\n<!-- results:end -->\n\nMore.\n")
    (tmp_path / "README.md").write_text("# us\n\n<!-- methods:begin -->\n<!-- methods:end -->\n")
    results.export(*samples.cache_run(3), tmp_path / "results")
    return tmp_path


def _script(name):
    spec = importlib.util.spec_from_file_location(f"script_{name}", ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generate_writes_and_check_finds_what_is_out_of_date(known, repository, monkeypatch, capsys):
    generate = _script("generate")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["generate.py", "--root", str(repository), *arguments])
        status = generate.main()
        return status, capsys.readouterr()

    before = {p: p.read_bytes() for p in repository.rglob("*.md")}
    status, said = call("--check")
    assert status == 1 and "+| Method | Family |" in said.out and "4 out of date" in said.err
    assert {p: p.read_bytes() for p in repository.rglob("*.md")} == before
    status, said = call()
    assert status == 0 and said.out.count("wrote") == 4
    assert "wrote README.md" in said.out and "wrote docs/methods/widths.md" in said.out
    assert call()[1].out == ""
    assert call("--check")[0] == 0
    assert (
        "Not measured yet; `make results CLAIM=widths` does it." in (repository / "docs/methods/widths.md").read_text()
    )
    card = (repository / "docs/methods/cache.md").read_text()
    assert "0.0" in card and card.endswith("More.\n") and "The paper’s number" in card
    # A source changes: what was generated is out of date, and says why when it is made again.
    known["cache"] = "00" * 32
    status, said = call("--check")
    assert status == 1 and "+**Stale:**" in said.out
    (repository / "README.md").write_text("# no marks\n")
    status, said = call("--check")
    assert status == 1 and "README.md: needs one <!-- methods:begin -->" in said.err
    (repository / "docs/methods/cache.md").unlink()
    (repository / "README.md").write_bytes(before[repository / "README.md"])
    status, said = call()
    assert status == 1 and "docs/methods/cache.md: No such file" in said.err


def test_measure_runs_exports_and_says_how_far_it_is(known, tmp_path, monkeypatch):
    calls, lines = [], []

    def run(slug, *, scale, store):
        calls.append((slug, scale, store))
        return api.Result(*(samples.cache_run(3) if slug == "cache" else samples.interval_run(3)))

    monkeypatch.setattr(api, "run", run)
    paths = results.measure([], tmp_path, scale="smoke", say=lines.append)
    assert [p.name for p in paths] == ["cache.json", "widths.json"]
    assert [(slug, scale) for slug, scale, _ in calls] == [("cache", "smoke"), ("widths", "smoke")]
    store = Path(calls[0][2])
    assert store == Path(calls[1][2]) and not store.parent.exists()
    assert lines[0] == "[1/2] cache, scale smoke" and "holds" in lines[1] and str(paths[0]) in lines[1]
    results.measure(["WIDTHS"], tmp_path, store="team.sqlite", say=lines.append)
    assert calls[-1] == ("widths", "desk", "team.sqlite")
    with pytest.raises(InputError, match="did you mean 'cache'"):
        results.measure(["cach"], tmp_path)


def test_results_script_reports_bad_input_in_a_line(monkeypatch, capsys):
    script = _script("results")
    monkeypatch.setattr(sys, "argv", ["results.py", "no_such_claim"])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("results.py: SLUG 'no_such_claim'")


@pytest.mark.parametrize("name", ["results", "generate"])
def test_scripts_explain_themselves(name):
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / f"{name}.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "results/" in done.stdout
