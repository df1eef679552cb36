import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from assay.bench.claim import Timed
from assay.claims import _switchable_arms as compared
from assay.claims.switchable import BLOCKS, CLAIM, TRY
from assay.errors import InputError
from assay.serving import Decisions

CARD = Path(__file__).parents[2] / "docs" / "methods" / "switchable.md"
SMOKE = dict(CLAIM.scales["smoke"].options)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def shared():
    return CLAIM.workload(**SMOKE | {"layers": 3, "tested": 40}).build(device="cpu", seed=0).prepare("digits", 0)


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


@pytest.mark.parametrize("name", arms("digits"))
def test_arms_decide_and_are_tested(shared, name):
    found = CLAIM.arm(name).run(shared, 0)
    assert all(np.isfinite(list(found.values())))
    assert 0 <= found["exact"] <= found["tokens"] <= 1 and 0 < found["cost"] <= 1.02
    if name == "full":
        assert found["cost"] == 1 and found["masks"] == 1
    if name != "early-exit":
        assert {f"exact_{t}" for t in shared.tasks} <= set(found)


@pytest.mark.parametrize("name", arms("forward"))
def test_timed_arms_compute_what_they_should(name):
    rows = 2 if name == "time-mixed" else 1
    wide = CLAIM.workload(**SMOKE | {"deep": 4, "timed_rows": rows}).build(device="cpu", seed=0).prepare("forward", 1)
    timed = CLAIM.arm(name).run(wide, 1)
    assert isinstance(timed, Timed)
    chosen = wide.switched.decide(wide.ids)
    assert chosen.attn[0].tolist() == [True, True, False, True] and chosen.ffn[0].tolist() == [True, False, True, False]
    if name == "time-mixed":
        attn, ffn = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1]]), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 1]])
        chosen = Decisions(attn[: len(wide.ids)], ffn[: len(wide.ids)])
        assert len(chosen.buckets()) == 2
    with torch.no_grad():
        expected = wide.switched(wide.ids, decisions=chosen).logits
        whole = wide.switched.model(wide.ids).logits
    torch.testing.assert_close(timed.call(), whole if name == "time-full" else expected, rtol=1e-4, atol=1e-4)
    assert (timed.metrics["cost"] == 1) == (name == "time-full")


def test_the_best_static_mask_is_the_best(shared):
    """All masks of a small model, against a search by hand."""
    import itertools

    model = compared.switched(shared, BLOCKS)
    most = 0.8
    found = compared.best_static(shared, model, most)
    results = {}
    for kept in itertools.product((False, True), repeat=4):
        r = compared.measure(shared, model, compared.mask_of(model, kept, 40), "validation")
        results[kept] = (r["cost"], r["exact"], -r["nll"])
    assert results[found][0] <= most
    assert all(r[1:] <= results[found][1:] for r in results.values() if r[0] <= most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compared, "EXHAUSTIVE", 0)
        greedy = compared.best_static(shared, model, most)
    assert results[greedy][0] <= most


def test_chance_keeps_the_rates(shared):
    from assay.serving import Decisions

    model = compared.switched(shared, BLOCKS)
    draw = torch.Generator().manual_seed(0)
    attn = torch.rand(4000, 3, generator=draw) < torch.tensor([1.0, 0.3, 0.8])
    chosen = compared.by_chance(shared, model, Decisions(attn, attn))
    assert (chosen.attn.float().mean(0) - attn.float().mean(0)).abs().max() < 0.04
    assert not torch.equal(chosen.attn, chosen.ffn) and chosen.attn[:, 0].all()


def test_leaving_early_takes_the_first_confident_layer(shared):
    model = compared.switched(shared, BLOCKS)
    first = compared.measure(shared, model, compared.mask_of(model, (False,) * 4, 40))
    assert compared.leaving_early(shared, model, 0.0)["nll"] == pytest.approx(first["nll"], rel=1e-5)
    whole = compared.measure(shared, model, compared.mask_of(model, (True,) * 4, 40))
    assert compared.leaving_early(shared, model, 1.0)["nll"] == pytest.approx(whole["nll"], rel=1e-5)


def test_test_data_are_those_of_no_training(shared):
    rows = {p: shared.draw(20, p)["input_ids"] for p in ("validation", "test")}
    assert not torch.equal(rows["validation"], rows["test"])
    assert torch.equal(rows["test"], shared.draw(20, "test")["input_ids"])


def test_a_model_that_learned_nothing_is_refused():
    task = CLAIM.workload(**SMOKE | {"base_steps": TRY, "batch": 2, "tested": 8}).build(device="cpu", seed=0)
    with pytest.raises(RuntimeError, match=r"solves 0\.000 of the tasks after 200 steps, less than 0\.95"):
        task.prepare("digits", 0)


# -- the user's own model ----------------------------------------------------------------------------------------------


def save_model(folder, kind):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=3, n_head=2, vocab_size=128, n_positions=64, eos_token_id=1)
        )
    elif kind == "bart":
        sizes = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (
            ("layers", 2), ("attention_heads", 2), ("ffn_dim", 32),
        )}  # fmt: skip
        model = BartForConditionalGeneration(BartConfig(vocab_size=128, d_model=16, **sizes, eos_token_id=2))
    else:
        model = BertModel(BertConfig(vocab_size=128, hidden_size=16, num_hidden_layers=2, num_attention_heads=2))
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i - 29 for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"source": f"say {w}: ", "target": w} for w in ("one", "two", "three", "four") for _ in range(10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_an_own_model(tmp_path, pairs, kind):
    options = {"model": save_model(tmp_path, kind), "data": pairs, "steps": 4, "base_steps": 4, "batch": 8}
    task = CLAIM.workload(**options).build(device="cpu", seed=0)
    assert task.settings == ("data", "forward") and "40 pairs" in task.title
    shared = task.prepare("data", 0)
    for name in ("full", "policy", "static", "early-exit", "random"):
        found = CLAIM.arm(name).run(shared, 0)
        assert all(np.isfinite(list(found.values()))) and 0 < found["cost"] < 1.1
    again = CLAIM.workload(**options | {"base_steps": 0}).build(device="cpu", seed=0)
    assert again.digest != task.digest and again.prepare("data", 1).seed != shared.seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, "--data is missing"),
        ({"model": None}, "--model is missing"),
        ({"data": "/nowhere.jsonl"}, "--data '/nowhere.jsonl' is no file"),
        ({"model": "/nowhere"}, "--model"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"base_steps": -1}, "--base-steps must be at least 0"),
        ({"eps": -0.1}, "--eps must be at least 0, not -0.1"),
        ({"eps": float("nan")}, "--eps must be at least 0, not nan"),
        ({"lr": 0.0}, "--lr must be positive"),
        ({"lr": -1.0}, "--lr must be at least 0"),
        ({"drop": 1.5}, "--drop must be at most 1, not 1.5"),
        ({"layers": 1}, "--layers must be at least 2"),
        ({"width": 30}, "--width must be a multiple of 4"),
    ],
)
def test_options_that_cannot_be_used(tmp_path, pairs, change, message):
    with pytest.raises(InputError, match=message):
        CLAIM.workload(**{"model": "somewhere", "data": pairs} | change).build(device="cpu", seed=0)


def test_a_type_of_model_that_is_not_supported(tmp_path, pairs):
    with pytest.raises(InputError, match="is of type 'bert'; supported are llama"):
        CLAIM.workload(model=save_model(tmp_path, "bert"), data=pairs).build(device="cpu", seed=0)


def test_rows_that_a_model_cannot_read(tmp_path, pairs):
    folder = save_model(tmp_path / "a", "gpt2")
    long = tmp_path / "long.jsonl"
    long.write_text("\n".join(json.dumps({"source": "x" * 60, "target": "y" * 60}) for _ in range(10)))
    with pytest.raises(InputError, match=r"makes rows of 121 tokens, and .* has 64 positions"):
        CLAIM.workload(model=folder, data=str(long)).build(device="cpu", seed=0)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    for change, message in (({"n_layer": 1}, "has a stack of one layer"), ({"vocab_size": 50}, "knows 50 tokens")):
        (tmp_path / "a" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match=message):
            CLAIM.workload(model=folder, data=pairs).build(device="cpu", seed=0)


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_the_claim_is_consistent():
    everywhere = {a.name: a.where for a in CLAIM.arms}
    for s in CLAIM.statements:
        for where in s.where:
            assert all(where in everywhere[arm] for arm in (s.method, *s.baselines))
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= names and set(scale.races) == {"forward"} for scale in CLAIM.scales.values())
    digests = {
        CLAIM.workload(**SMOKE | c).build(device="cpu", seed=0).digest for c in ({}, {"eps": 0.1}, {"steps": 21})
    }
    assert len(digests) == 3


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.switchable; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert "tensor(" in capsys.readouterr().out
    (example,) = re.findall(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert "tensor(" in capsys.readouterr().out


def test_through_the_runner(tmp_path):
    from assay.bench.runner import execute
    from assay.bench.verdict import decide

    done = execute(CLAIM, CLAIM.workload(), scale="smoke", jobs=1, store=str(tmp_path / "store.sqlite"))
    failed = [t for t in done.trials if t.status != "ok"]
    assert not failed, failed[0].error
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}
