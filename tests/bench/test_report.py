"""The page of a claim: complete, well-formed, escaped, and honest about whose number is whose."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import sample_runs as samples

from assay.bench import report, wording
from assay.bench.verdict import Verdict
from assay.errors import InputError

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps what the tests ask about."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.stack, self.problems, self.elements, self.text = [], [], [], []
        self.svgs, self.headings = [], []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is not closed" for tag, _ in self.stack]

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.elements.append((tag, attrs))
        if tag == "svg" and not any(t == "svg" for t, _ in self.stack):
            self.svgs.append({"attrs": attrs, "title": "", "desc": ""})
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.stack.append((tag, attrs))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.stack or self.stack[-1][0] != tag:
            self.problems.append(f"</{tag}> at {self.getpos()} closes {self.stack[-1:]}")
        else:
            self.stack.pop()

    def handle_data(self, data):
        inside = [t for t, _ in self.stack]
        if "style" in inside:
            return
        self.text.append((data, [(t, a.get("class", ""), a.get("aria-labelledby", "")) for t, a in self.stack]))
        if "svg" in inside and inside[-1] in ("title", "desc"):
            self.svgs[-1][inside[-1]] += data

    def all(self, tag):
        return [a for t, a in self.elements if t == tag]


RUNS = {
    "cache": samples.cache_run,
    "widths": samples.interval_run,
    "empty": samples.empty_run,
    "hostile": samples.hostile_run,
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    out = {}
    for name, make in RUNS.items():
        index = report.write_report([make()], folder / name)
        (page,) = [p for p in index.parent.iterdir() if p != index]
        out[name] = page.read_text(encoding="utf-8")
        out[f"{name} index"] = index.read_text(encoding="utf-8")
    return out


EVERY = [f"{name}{part}" for name in RUNS for part in ("", " index")]


@pytest.mark.parametrize("name", EVERY)
def test_pages_are_well_formed_and_complete_in_themselves(pages, name):
    page = Page(pages[name])
    assert page.problems == []
    assert page.all("html")[0]["lang"] == "en"
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:])), page.headings
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attrs in page.elements:
        for target in attrs.get("aria-labelledby", "").split():
            assert target in ids
        if attrs.get("href", "").startswith("#"):
            assert attrs["href"][1:] in ids
        assert "src" not in attrs
        assert not any(a.startswith("on") for a in attrs)
        assert not re.search(r"url\(|@import", attrs.get("style", ""))
    assert not {"script", "img", "iframe", "object"} & {t for t, _ in page.elements}
    assert all(a["href"] == "data:," for a in page.all("link"))
    assert not re.search(r"url\(|@import", re.search(r"<style>(.*?)</style>", pages[name], re.S).group(1))
    assert all("scope" in a for a in page.all("th"))
    assert next(a for a in page.all("a") if a.get("class") == "skip")["href"] == "#main"


@pytest.mark.parametrize("name", EVERY)
def test_scrolling_boxes_can_be_reached_and_have_a_name(pages, name):
    boxes = [a for _, a in Page(pages[name]).elements if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in boxes)
    tables = len(Page(pages[name]).all("table"))
    assert tables == len(boxes)


def test_every_picture_has_a_text_that_states_its_numbers(pages):
    run, verdict = samples.cache_run()
    svgs = Page(pages["cache"]).svgs
    assert len(svgs) == len(run.claim.statements)
    for svg, statement in zip(svgs, run.claim.statements):
        assert svg["attrs"]["role"] == "img"
        assert statement.text in svg["title"]
        for d in (d for d in verdict.decisions if d.statement == statement):
            assert d.setting in svg["desc"]
            for c in d.comparisons:
                assert wording.arm_label(run.claim, c.baseline) in svg["desc"]
                if math.isfinite(c.effect):
                    assert wording.effect(c, statement, run.claim.metric(statement.metric)) in svg["desc"]
                    assert wording.interval(c, run.claim.metric(statement.metric)) in svg["desc"]
                    assert f"n = {c.n}" in svg["desc"]
                else:
                    assert "no effect could be computed" in svg["desc"]
    assert "The paper reported +0.011 nat (Llama-2-7B, WikiText-2)" in svgs[0]["desc"]
    assert "is of another kind and is not on this axis" in svgs[1]["desc"]


def test_the_answer_is_told_in_words_and_by_a_symbol(pages):
    for name, answer, symbol in (
        ("cache", "holds", "✓"),
        ("widths", "does not hold", "✗"),
        ("empty", "undecided", "?"),
    ):
        for page in (Page(pages[name]), Page(pages[f"{name} index"])):
            words = [d.strip() for d, _ in page.text]
            assert answer in words and symbol in words


def test_each_comparison_is_a_row_with_all_its_numbers(pages):
    run, verdict = samples.cache_run()
    rows = [unescape(row) for row in re.findall(r"<tr.*?</tr>", pages["cache"], re.S)]
    for d in verdict.decisions:
        metric = run.claim.metric(d.statement.metric)
        for c in d.comparisons:
            want = [wording.arm_label(run.claim, c.baseline), wording.effect(c, d.statement, metric)]
            want += [
                wording.interval(c, metric),
                wording.bound(d.statement, metric),
                f">{c.n}<",
                c.reason,
            ]
            assert any(all(w in row for w in want) for row in rows), want


def test_the_papers_numbers_never_stand_in_a_table_with_measured_ones(pages):
    page = Page(pages["cache"])
    for text in ("+0.011 nat", "2.6× less peak memory"):
        places = [path for data, path in page.text if text in data]
        tables = [path for path in places if any(t == "table" for t, _, _ in path)]
        assert len(tables) == 1
        assert all(any(labelled == "reported" for _, _, labelled in path) for path in tables)
        others = [path[-1] for path in places if path not in tables]
        assert all(tag in ("desc", "li") for tag, _, _ in others)
    section = re.search(r'<section aria-labelledby="reported">.*?</section>', pages["cache"], re.S).group(0)
    assert "Not measured here" in section
    assert not re.search(r"\d to \d", section)


def test_the_papers_number_is_marked_on_the_axis_only_where_it_is_the_same_quantity(pages):
    first, second, _ = re.findall(r"<figure>.*?</figure>", pages["cache"], re.S)
    assert 'class="diamond"' in first and "paper: +0.011 nat" in first
    assert 'class="diamond"' not in second and "key-paper" not in second


def test_markup_in_names_is_text(pages, tmp_path):
    for name in ("hostile", "hostile index"):
        assert "<script" not in pages[name].lower()
        assert "&lt;script&gt;" in pages[name]
        assert not [a for a in Page(pages[name]).all("a") if a["href"].startswith("javascript")]
    run, verdict = samples.hostile_run()
    assert "<script" not in report.verdict_html(run, verdict).lower()
    markdown = re.sub(r"```.*?```|`[^`]*`", "", report.to_markdown(run, verdict), flags=re.S)
    assert "&lt;script" in markdown and "<script" not in markdown.lower()
    report.write_report([(run, verdict)], tmp_path / "a" / "b")
    assert {p.name for p in tmp_path.rglob("*.html")} == {"index.html", "script-alert-x-script.html"}
    assert {p.parent for p in tmp_path.rglob("*.html")} == {tmp_path / "a" / "b"}


def test_runs_of_one_claim_get_a_page_each_and_index_is_not_taken(tmp_path):
    run, verdict = samples.cache_run(3)
    clash = replace(run, claim=replace(run.claim, slug="index"))
    index = report.write_report([(run, verdict), (run, verdict), (clash, verdict)], tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"index.html", "cache.html", "cache-2.html", "index-2.html"}
    links = [a["href"] for a in Page(index.read_text()).all("a")]
    assert {"cache.html", "cache-2.html", "index-2.html"} <= set(links)
    assert "3 claims: 3 holds." in index.read_text()


def test_no_results_make_an_index_that_says_so(tmp_path):
    page = Page(report.write_report([], tmp_path).read_text())
    assert page.problems == []
    assert any("No claim has been run yet." in d for d, _ in page.text)


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    target = tmp_path / "report"
    target.write_text("mine")
    with pytest.raises(InputError, match=r"cannot be written to '.*report'"):
        report.write_report([samples.cache_run(3)], target)
    assert target.read_text() == "mine"


def test_failures_skips_and_provenance_are_on_the_page(pages):
    text = "".join(d for d, _ in Page(pages["cache"]).text)
    assert "RuntimeError: group size 32 < 64" in text and 'File "arm.py", line 3' in text
    assert "pip install 'hqq>=0.2'" in text
    assert "assay run cache --text 'my book.txt' --scale desk --replicates 8 --device cpu --seed 0" in text
    for what in ("AMD EPYC", "torch 2.13.0", "f664a4b0c0ff", "2026-11-30", "900 MiB", "small models have fewer heads"):
        assert what in text
    assert "94 of 112 finished" in text


def test_failed_trials_that_end_alike_are_told_once():
    trace = 'Traceback (most recent call last):\n  File "a.py", line {}, in f\n    f()\nOSError: full\n'
    run, _ = samples.cache_run(3)
    trials = tuple(
        replace(t, status="failed", metrics={}, error=trace.format(t.replicate)) if t.arm == "full" else t
        for t in run.trials
        if t.arm != "per_token"
    )
    found = report.failures(replace(run, trials=trials))
    assert [(f.label, f.setting, f.last, f.more) for f in found] == [
        ("DynamicCache (16 bit)", s, "OSError: full", 2) for s in run.settings
    ]
    assert found[0].error == trace.format(0)


def test_arm_tables_give_median_mean_and_quartiles_and_name_what_is_missing():
    run, _ = samples.cache_run()
    first, race, *_ = report.arm_tables(run)
    assert first.title == "512 tokens" and race.title == "512 tokens, race: decode"
    assert [m.name for m in first.metrics] == ["nll", "bytes"]
    assert [m.name for m in race.metrics] == ["seconds"]
    row = next(r for r in first.rows if r.label == "DynamicCache (16 bit)")
    values = [t.metrics["nll"] for t in run.select("512 tokens", "full").values()]
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    assert row.cells[0].value == f"{middle:.2f}"
    assert row.cells[0].spread == f"mean {np.mean(values):.2f}; {low:.2f} to {high:.2f}"
    assert row.cells[1] == report.Cell("11,520", "the same in all")
    failing = next(r for r in first.rows if r.role == "ablation")
    assert (failing.n, failing.failed) == (7, 1)
    assert "hqq" not in str(race)


def test_metrics_that_are_not_finite_are_counted_not_averaged():
    run, _ = samples.interval_run(4)
    table = next(t for t in report.arm_tables(run) if t.title == "constant column")
    assert table.rows[0].cells[0] == report.Cell("–", "4 not finite")
    trials = tuple(
        replace(t, metrics={"width": math.inf if t.replicate == 0 else 2.0, "extra": 1.0}) for t in run.trials
    )
    table = report.arm_tables(replace(run, trials=trials))[0]
    assert table.rows[0].cells[0] == report.Cell("2.000", "the same in all; 1 not finite")
    assert [m.name for m in table.metrics] == ["width", "extra"]


def test_trials_of_two_machines_are_told_apart():
    run, verdict = samples.cache_run(3)
    other = dict(samples.ENVIRONMENT, cpu="Apple M3", dirty=True)
    trials = tuple(replace(t, environment=other) if t.replicate == 2 else t for t in run.trials)
    text = report.to_markdown(replace(run, trials=trials), verdict)
    assert "Machine and versions of 24 of 36 trials" in text
    assert "Apple M3" in text and "with uncommitted changes" in text


def test_markdown_has_whole_tables_and_the_same_numbers():
    for name, make in RUNS.items():
        run, verdict = make()
        lines = report.to_markdown(run, verdict).splitlines()
        for i, line in enumerate(lines):
            if line.startswith("|---") or line.startswith("|--:"):
                width, rest = lines[i - 1].count(" | "), lines[i + 1 :]
                for row in rest[: next(k for k, x in enumerate(rest) if not x.startswith("|"))]:
                    assert row.count(" | ") == width, (name, row)
    run, verdict = samples.cache_run()
    text = report.to_markdown(run, verdict)
    c = verdict.decisions[0].deciding
    effect, low, high = (f"{v:.4f}".replace("-", "−") for v in (c.effect, c.low, c.high))
    assert (
        f"| 512 tokens | DynamicCache (16 bit) (strongest) | {effect} nat | {low} to {high} | < 0.02 nat | 8 | holds |"
        in text
    )
    assert (
        "| Perplexity stays within 0.02 nat per token of the full cache | +0.011 nat | Llama-2-7B, WikiText-2 |" in text
    )
    assert "1 failed" in text and "hqq>=0.2" in text


def test_the_notebook_fragment_holds_the_deciding_rows():
    run, verdict = samples.cache_run()
    text = report.verdict_html(run, verdict)
    page = Page(text)
    assert page.problems == []
    assert "id=" not in text and "<html" not in text
    # Its styles must not reach the notebook's own tables.
    rules = re.findall(r"([^{}]+)\{", re.search(r"<style>(.*?)</style>", text, re.S).group(1))
    assert rules and all(s.strip().startswith(".assay-verdict") for rule in rules for s in rule.split(","))
    assert text.count("<tr>") == 1 + len(verdict.decisions)
    strongest, other = verdict.decisions[0].comparisons
    assert f"{strongest.effect:.4f} nat" in text and f"{other.effect:.3f} nat".replace("-", "−") not in text
    # A statement against a baseline that is missing is not told by the answer of the one that is there.
    assert text.count("undecided</td>") == 2


def test_plot_has_a_panel_for_each_decision_and_leaves_nothing_open():
    before = plt.get_fignums()
    run, verdict = samples.cache_run()
    figure = report.plot(run, verdict)
    assert len(figure.axes) == len(verdict.decisions)
    panel = figure.axes[0]
    statement = run.claim.statements[0]
    assert any(set(line.get_xdata()) == {statement.limit} for line in panel.lines)
    assert any(list(line.get_xdata()) == [0.011] for line in panel.lines)
    assert next(t.get_text() for t in panel.get_yticklabels()) == "DynamicCache (16 bit)"
    assert statement.text in panel.get_title(loc="left").replace("\n", " ")
    empty = report.plot(*samples.empty_run())
    assert "No effect" in empty.axes[0].texts[0].get_text()
    figure.canvas.draw()
    assert plt.get_fignums() == before


def test_plot_draws_intervals_at_their_numbers():
    run, verdict = samples.interval_run()
    figure = report.plot(run, Verdict(verdict.answer, verdict.decisions[:1]))
    (c, _) = verdict.decisions[0].comparisons
    drawn = [tuple(line.get_xdata()) for line in figure.axes[0].lines]
    assert (c.low, c.high) in drawn and (c.effect,) in drawn
    assert figure.axes[0].get_xscale() == "log"


def _luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("block", [0, 1], ids=["light", "dark"])
def test_contrast_is_aa_in_both_schemes(block):
    css = Path(report.__file__).with_name("templates").joinpath("style.css").read_text()
    body = re.findall(r":root \{(.*?)\}", css, re.S)[block]
    colours = dict(re.findall(r"--(\w+(?:-\w+)?): (#[0-9a-f]{6})(?=;)", body))
    colours |= {k: "#" + "".join(2 * c for c in v[1:]) for k, v in re.findall(r"--(\w+): (#[0-9a-f]{3})(?=;)", body)}
    pairs = [(f, b) for f in ("ink", "soft", "link", "holds", "fails", "open", "reported") for b in ("paper", "raised")]
    pairs += [(f, f"{k}-tint") for k in ("holds", "fails", "open") for f in ("ink", k)]
    for front, back in pairs:
        a, b = sorted((_luminance(colours[front]), _luminance(colours[back])))
        assert (b + 0.05) / (a + 0.05) >= 4.5, (front, back)
