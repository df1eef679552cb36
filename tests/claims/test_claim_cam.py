import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from assay.bench.claim import Timed
from assay.claims.cam import CLAIM, _cache
from assay.errors import InputError

CARD = Path(__file__).parents[2] / "docs" / "methods" / "cam.md"
SMOKE = CLAIM.scales["smoke"].options


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE).build(device="cpu", seed=0)


@pytest.fixture(scope="module")
def shared(task):
    return {setting: task.prepare(setting, 0) for setting in task.settings}


def names(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


def test_arms_that_read(shared):
    found = {name: CLAIM.arm(name).run(shared["text"], 0) for name in names("text")}
    for name, metrics in found.items():
        assert metrics.keys() == {"kl", "nll", "ppl", "top1", "bytes"}, name
        assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
        assert (metrics["kl"] == 0) == (name == "full")
    # Every policy and every mask holds the same number of tokens; half the budget holds about half.
    dim, slots = 2 * 64 * 4, 2 * (12 + 1)
    for name, metrics in found.items():
        policy, _, mask = name.partition("+")
        if name in ("full", "streaming-half"):
            continue
        summed = policy == "h2o" or mask in ("bernoulli", "max")
        drawn = mask in ("bernoulli", "bernoulli-current", "max")
        book = 8 + 4 * summed + 4 * drawn + 50 * (policy == "scissorhands")
        assert metrics["bytes"] == slots * (dim + book) + 2 * 8, name
    assert found["streaming"]["bytes"] < found["full"]["bytes"] == 2 * dim * 24
    assert found["streaming-half"]["bytes"] < 0.6 * found["streaming"]["bytes"]
    # Merging does something, and different masks do different things.
    values = [found[n]["nll"] for n in found if n.startswith("streaming")]
    assert len({round(v, 9) for v in values}) == len(values) == 7


def test_the_same_replicate_gives_the_same_numbers(task):
    arm = CLAIM.arm("streaming+bernoulli")
    assert arm.run(task.prepare("text", 1), 1) == arm.run(task.prepare("text", 1), 1)
    assert task.prepare("text", 0).ids.tolist() != task.prepare("text", 1).ids.tolist()


def test_caches_of_the_arms():
    config = LlamaConfig(num_hidden_layers=1)
    for policy in ("streaming", "h2o", "scissorhands", "tova"):
        for mask in (None, "bernoulli"):
            cache = _cache(config, policy, mask, 32, 16, 5)
            assert cache.options["budget"] == 32 and cache.options["seed"] == 5
            assert (cache.merge.mask, cache.merge.m) == ("bernoulli", 16) if mask else cache.merge is None


def test_arms_that_attend(shared):
    found = {name: CLAIM.arm(name).run(shared["attention"], 0) for name in names("attention")}
    assert found["evict"]["merge_rate"] == 0 and found["merge-all"]["merge_rate"] == 1
    assert all(0 < f["change"] < 1 and 0 < f["change_unscaled"] < 1 for f in found.values())
    assert len({f["change"] for f in found.values()}) == 6
    assert shared["attention"].ids.shape == (2, 64)


@pytest.mark.parametrize("name", names("decode"))
def test_arms_that_decode(shared, name):
    timed = CLAIM.arm(name).run(shared["decode"], 0)
    assert isinstance(timed, Timed) and timed.before is not None
    for _ in range(2):  # before() restores what the call used up
        timed.before()
        timed.call()
    cells = dict(zip(timed.call.__code__.co_freevars, timed.call.__closure__))
    cache = cells["state"].cell_contents["cache"]
    if name == "decode-dense":
        assert cache.get_seq_length() == 16 + 2
    else:
        assert cache.get_seq_length() == 24 + 2 and cache.layers[0].used == 17
        assert (cache.merge is None) == ("+" not in name)


def test_all_statements_can_be_decided():
    for s in CLAIM.statements:
        for setting in s.where:
            assert {s.method, *s.baselines} <= set(names(setting)), s.name
    assert set(CLAIM.scales["desk"].races) == {"decode"} == {a.race for a in CLAIM.arms if a.race}
    fields = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= fields for scale in CLAIM.scales.values())


def test_options_change_the_digest_and_are_checked():
    changes = ({}, {"budget": 14}, {"m": 5}, {"documents": 3}, {"attended": 70}, {"continuation": 13}, {"tokens": 3})
    digests = {CLAIM.workload(**SMOKE | c).build(device="cpu", seed=0).digest for c in changes}
    assert len(digests) == len(changes)
    for change, message in (
        ({"m": 0}, None),
        ({"m": -3}, "--m must be at least 1, not -3"),
        ({"budget": 8}, "--budget must be at least 12 and more than --m 4, not 8"),
        ({"m": 12}, "--budget must be at least 12 and more than --m 12, not 12"),
        ({"attended": 40}, "--attended must be at least 64"),
        ({"held": 4}, "--held must be at least 12"),
        ({"documents": 1000}, "--documents 1000 are more than the 256 there are"),
        ({"choices": "q.jsonl"}, "--choices needs a model with a tokenizer"),
    ):
        if message:
            with pytest.raises(InputError, match=message):
                CLAIM.workload(**SMOKE | change).build(device="cpu", seed=0)


def save_model(folder, model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
}


def test_own_model_text_and_questions(tmp_path):
    save_model(tmp_path / "model", LlamaForCausalLM(LlamaConfig(**SHAPE)))
    text, choices = tmp_path / "text.jsonl", tmp_path / "q.jsonl"
    text.write_text("\n".join(json.dumps({"text": c * 200}) for c in "abcdef"))
    choices.write_text(
        "\n".join(json.dumps({"context": c * 20, "choices": ["yes", "no", "n"], "answer": 1}) for c in "xy")
    )
    options = SMOKE | {"model": str(tmp_path / "model"), "text": str(text), "choices": str(choices)}
    task = CLAIM.workload(**options).build(device="cpu", seed=0)
    assert task.settings == ("text", "attention", "choices", "decode")
    assert task.limit == 2  # three batches of documents, two questions
    assert CLAIM.arm("h2o+bernoulli").run(task.prepare("text", 1), 1)["nll"] > 0
    question = task.prepare("choices", 1)
    assert question.context.shape == (1, 20) and question.answer == 1
    for name in names("choices"):
        found = CLAIM.arm(name).run(question, 1)
        assert found.keys() == {"nll", "accuracy"} and found["accuracy"] in (0, 1) and found["nll"] > 0
    timed = CLAIM.arm("decode-h2o+bernoulli").run(task.prepare("decode", 0), 0)
    timed.before()
    timed.call()
    with pytest.raises(InputError, match=r"--choices .*absent.* is no file"):
        CLAIM.workload(**options | {"choices": str(tmp_path / "absent")}).build(device="cpu", seed=0)


def test_models_with_windows_are_served_or_named(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 500)
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    save_model(tmp_path / "sliding", sliding)
    with pytest.raises(InputError, match="full"):
        CLAIM.workload(**SMOKE | {"model": str(tmp_path / "sliding"), "text": str(text)}).build(device="cpu", seed=0)


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.cam; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert float(capsys.readouterr().out) > 1
    (example,) = re.findall(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert "ratio" in capsys.readouterr().out


def test_through_the_runner(tmp_path):
    from assay.bench.runner import execute
    from assay.bench.verdict import decide

    done = execute(CLAIM, CLAIM.workload(), scale="smoke", jobs=1, store=str(tmp_path / "store.sqlite"))
    failed = [t for t in done.trials if t.status != "ok"]
    assert not failed, failed[0].error
    expected = {(s, r, a.name) for a in CLAIM.arms for s in a.where if s != "choices" for r in range(2)}
    assert {(t.setting, t.replicate, t.arm) for t in done.trials} == expected
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}
