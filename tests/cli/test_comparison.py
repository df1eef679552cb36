"""Several methods that a comparison knows run as that comparison: one table instead of three verdicts."""

import json

import pytest

from assay import cli
from assay.bench import registry
from assay.bench.results import card_path
from assay.claims import CLAIMS, COMPARISONS


def test_members_exist_and_a_comparison_is_no_method():
    for slug, (_, _, members) in COMPARISONS.items():
        assert slug not in CLAIMS and set(members) <= set(CLAIMS) and len(members) > 1
        assert registry.load(slug).paper is None
        assert card_path(registry.find(slug)) == f"docs/comparisons/{slug}.md"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["kivi", "quest", "cam"], ["caches"]),
        (["cam", "kivi"], ["caches"]),
        (["kivi"], ["kivi"]),
        (["kivi", "kivi"], ["kivi", "kivi"]),
        (["kivi", "rqr"], ["kivi", "rqr"]),
        (["caches"], ["caches"]),
    ],
)
def test_which_claims_names_ask_for(given, wanted):
    assert cli._chosen(given) == wanted


def test_one_command_prints_one_table(tmp_path, capsys):
    arms = ["full", "kivi-2", "quest-2", "streaming-2"]
    command = ["run", "kivi", "quest", "cam", "--scale", "smoke", "--quiet", "--replicates", "1", "--jobs", "1"]
    command += ["--store", str(tmp_path / "trials.sqlite"), "--arms", *arms, "--report", str(tmp_path / "out")]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    table = text[text.index("race 'decode'") :]
    for name in arms:
        assert sum(line.startswith(f"{name} ") for line in table.splitlines()) == 1
    for column in ("ppl", "kl", "top1", "held", "read", "seconds"):
        assert f" {column}" in table
    assert "On the Pareto front of held and kl" in text and "On the Pareto front of seconds and kl" in text
    assert (tmp_path / "out" / "caches.html").read_text().count('class="plot chart"') == 2
    assert cli.main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["claim"] == "caches"


def test_help_of_a_comparison_shows_its_options(capsys):
    cli.main(["run", "kivi", "quest", "cam", "--help"])
    text = capsys.readouterr().out
    for option in ("--model", "--text", "--haystack", "--timed"):
        assert option in text


def test_the_card_of_a_comparison_has_no_paper(capsys):
    assert cli.main(["card", "caches"]) == 0
    text = capsys.readouterr().out
    assert "Paper" not in text and "kivi-2" in text
