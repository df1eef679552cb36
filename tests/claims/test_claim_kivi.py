import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from assay.bench.claim import Timed
from assay.claims import kivi
from assay.claims.kivi import CLAIM
from assay.errors import InputError
from assay.serving.kivi import KIVICache, cache_bytes

CARD = Path(__file__).parents[2] / "docs" / "methods" / "kivi.md"
SMOKE = CLAIM.scales["smoke"].options


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE).build(device="cpu", seed=0)


@pytest.fixture(scope="module")
def shared(task):
    return {setting: task.prepare(setting, 0) for setting in task.settings}


def run(name, shared):
    arm = CLAIM.arm(name)
    for requirement in arm.requires:
        pytest.importorskip("optimum.quanto" if "quanto" in requirement else requirement)
    return arm.run(shared[arm.where[0]], 0)


@pytest.mark.parametrize("name", [a.name for a in CLAIM.arms if a.where == ("text",)])
def test_arms_that_predict(shared, name):
    found = run(name, shared)
    assert found.keys() == {"kl", "nll", "ppl", "top1"}
    assert all(torch.isfinite(torch.tensor(v)) for v in found.values())
    if name == "fp":
        assert found["kl"] == 0 and found["top1"] == 1
    else:
        assert found["kl"] > 1e-4


def test_order_on_synthetic_keys(task):
    """Keys with large channels: groups along tokens win for keys, and more bits win."""
    kl = {}
    for name in ("fake2-kT-vT", "fake2-kC-vC", "fake2-kT-vC", "fake2-kC-vT", "kivi2", "kivi4"):
        kl[name] = sum(CLAIM.arm(name).run(task.prepare("text", r), r)["kl"] for r in range(4)) / 4
    assert kl["kivi4"] < kl["kivi2"] / 4
    assert max(kl["fake2-kC-vT"], kl["fake2-kC-vC"]) < min(kl["fake2-kT-vT"], kl["fake2-kT-vC"]) / 2
    assert kl["fake2-kC-vT"] == min(v for k, v in kl.items() if k.startswith("fake"))


@pytest.mark.parametrize("name", [a.name for a in CLAIM.arms if a.where == ("decode",)])
def test_arms_that_decode(shared, name):
    timed = run(name, shared)
    assert isinstance(timed, Timed) and timed.before is not None
    length, dim = 256, 64
    expected = {
        "decode-fp": 4 * dim,
        "decode-kivi2": cache_bytes(length, dim) / length,
        "decode-kivi4": cache_bytes(length, dim, bits=4) / length,
        "decode-quanto2": 2 * dim * (2 / 8 + 4 / 32),  # no window while it holds a prompt only
        "decode-hqq2": 2 * dim * (2 / 8 + 4 / 32),
    }
    assert timed.metrics["bytes"] == expected[name]
    for _ in range(2):  # before() restores what the call used up
        timed.before()
        timed.call()
    cells = dict(zip(timed.call.__code__.co_freevars, timed.call.__closure__))
    assert cells["state"].cell_contents["cache"].get_seq_length() == length + 4


def test_decoding_runs_through_the_packed_path(shared, monkeypatch):
    import assay.serving.kivi.attention as attention

    seen = []
    real = attention.packed_attention
    monkeypatch.setattr(attention, "packed_attention", lambda *a, **k: seen.append(1) or real(*a, **k))
    timed = run("decode-kivi2", shared)
    timed.before()
    timed.call()
    assert len(seen) == 4


def test_all_statements_can_be_decided():
    text = {a.name for a in CLAIM.arms if "text" in a.where}
    decode = {a.name for a in CLAIM.arms if "decode" in a.where}
    for s in CLAIM.statements:
        assert {s.method, *s.baselines} <= (text if s.where == ("text",) else decode)
    assert {a.race for a in CLAIM.arms if a.name in decode} == set(CLAIM.scales["desk"].races) == {"decode"}
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= names for scale in CLAIM.scales.values())


def test_options_change_the_digest():
    digests = {
        CLAIM.workload(**SMOKE | c).build(device="cpu", seed=0).digest for c in ({}, {"length": 300}, {"batch": 2})
    }
    assert len(digests) == 3
    for name in ("length", "tokens", "layers", "batch"):
        with pytest.raises(InputError, match=f"--{name} must be at least 1, not -3"):
            CLAIM.workload(**SMOKE | {name: -3}).build(device="cpu", seed=0)


def save_model(folder, model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_own_model_and_text(tmp_path):
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
    )
    save_model(tmp_path / "model", LlamaForCausalLM(config))
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join('{"text": "%s"}' % (c * 200) for c in "abcdef"))
    options = SMOKE | {"model": str(tmp_path / "model"), "text": str(text)}
    task = CLAIM.workload(**options).build(device="cpu", seed=0)
    assert task.limit == 6
    assert CLAIM.arm("kivi2").run(task.prepare("text", 1), 1)["nll"] > 0
    decoding = task.prepare("decode", 1)
    assert len(decoding.layers) == 1 and decoding.layers[0][0].shape == (1, 1, 256, 32)
    timed = CLAIM.arm("decode-kivi2").run(decoding, 1)
    timed.before()
    timed.call()


def test_models_that_kivi_cannot_serve_are_named(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("x" * 500)
    odd = GPTNeoXConfig(hidden_size=40, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    save_model(tmp_path / "odd", GPTNeoXForCausalLM(odd))
    with pytest.raises(InputError, match=r"odd': quantising values per token .* 20 is none of 32"):
        CLAIM.workload(**SMOKE | {"model": str(tmp_path / "odd"), "text": str(text)}).build(device="cpu", seed=0)


def test_counting_bytes_of_nested_tensors():
    t = torch.zeros(4, 4)
    assert kivi._tensor_bytes({"a": [t, (t, 3)], "b": None}) == 128
    cache = KIVICache(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2))
    assert kivi._bytes(cache) == 0


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.kivi; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert float(capsys.readouterr().out) > 1
    (example,) = re.findall(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out


def test_through_the_runner(tmp_path):
    from assay.bench.runner import execute
    from assay.bench.verdict import decide

    done = execute(CLAIM, CLAIM.workload(), scale="smoke", jobs=1, store=str(tmp_path / "store.sqlite"))
    failed = [t for t in done.trials if t.status != "ok"]
    assert not failed, failed[0].error
    assert {(t.setting, t.replicate, t.arm) for t in done.trials} == {
        (a.where[0], r, a.name) for a in CLAIM.arms for r in range(2) if a.name not in done.skipped
    }
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}
