import dataclasses

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from assay.bench.claim import Timed
from assay.claims import caches
from assay.claims.caches import CLAIM
from assay.errors import InputError

SMOKE = CLAIM.scales["smoke"].options


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE | {"prompt": 610}).build(device="cpu", seed=0)


@pytest.fixture(scope="module")
def shared(task):
    return {setting: task.prepare(setting, 0) for setting in task.settings}


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


@pytest.mark.parametrize("name", arms("text"))
def test_arms_decode_and_can_be_repeated(shared, name):
    timed = CLAIM.arm(name).run(shared["text"], 0)
    assert isinstance(timed, Timed) and timed.per == SMOKE["timed"]
    wanted = {"nll", "ppl", "kl", "top1", "held", "read"} - ({"read"} if name.startswith("quanto") else set())
    assert timed.metrics.keys() == wanted
    assert all(torch.isfinite(torch.tensor(v)) for v in timed.metrics.values())
    timed.before()
    timed.call()
    timed.before()
    timed.call()
    assert shared["text"].model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", arms("retrieval"))
def test_arms_find(shared, name):
    found = CLAIM.arm(name).run(shared["retrieval"], 0)
    assert found.keys() == {"nll", "exact"} and found["nll"] > 0


def test_the_full_cache_is_the_reference(shared):
    full = CLAIM.arm("full").run(shared["text"], 0).metrics
    assert abs(full["kl"]) < 1e-5 and full["top1"] == full["held"] == full["read"] == 1


@pytest.mark.parametrize("bits", caches.BITS)
def test_budgets_are_equal(shared, bits):
    """Keys and values of what forgets take at most KIVI's bytes, and less than a token less; Quest reads as much."""
    reading = shared["text"]
    kivi = CLAIM.arm(f"kivi-{bits}").run(reading, 0).metrics["held"]
    tokens = reading.prompt.shape[1]
    assert 0 <= kivi - reading.budgets[bits] / tokens < 1 / tokens
    for name in caches.POLICIES:
        held = CLAIM.arm(f"{name}-{bits}").run(reading, 0).metrics["held"]
        assert reading.budgets[bits] / tokens < held < 1.1 * kivi, name
    many = dataclasses.replace(reading, layers=reading.layers, budgets={bits: 500})
    quest = CLAIM.arm(f"quest-{bits}").run(many, 0).metrics["read"]
    assert 0.9 * 500 / tokens < quest <= 1.05 * 500 / tokens


def test_a_copy_leaves_the_original_alone(shared):
    for name in ("full", "kivi-2", "quest-2", "h2o-2", "quanto-2"):
        timed = CLAIM.arm(name).run(shared["text"], 0)
        first = timed.metrics
        timed.before()
        timed.call()
        assert CLAIM.arm(name).run(shared["text"], 0).metrics == first


def test_statements_name_arms_of_their_setting():
    for s in CLAIM.statements:
        for arm in (s.method, *s.baselines):
            assert set(s.where) <= set(CLAIM.arm(arm).where)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timed": 99}, "--timed must be from 1 to the --continuation of 4, not 99"),
        ({"timed": -1}, "--timed must be from 1"),
        ({"prompt": 100}, "--prompt and --haystack must be at least 240 tokens"),
        ({"haystack": 100}, "--prompt and --haystack must be at least 240 tokens"),
        ({"haystack": 10}, "--haystack must be at least 64"),
        ({"dtype": "int8"}, "--dtype must be one of"),
    ],
)
def test_options_that_cannot_be_used(options, message):
    with pytest.raises(InputError, match=message):
        CLAIM.workload(**SMOKE | options).build(device="cpu", seed=0)


def test_a_model_that_a_cache_cannot_serve_is_named(tmp_path):
    config = GPT2Config(n_embd=36, n_layer=2, n_head=2, vocab_size=64)  # heads of 18 channels: no groups of 32
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    task = CLAIM.workload(**SMOKE).build(device="cpu", seed=0)
    base = dataclasses.replace(task, folder=tmp_path)
    with pytest.raises(InputError, match="--model 'mine'"):
        caches._check_model(base, "mine")


def test_digest_changes_with_the_options(task):
    other = CLAIM.workload(**SMOKE | {"prompt": 600, "timed": 2}).build(device="cpu", seed=0)
    assert other.digest != task.digest


def save_model(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=64, vocab_size=128
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_own_model_and_text_in_one_command(tmp_path, capsys):
    from assay import cli

    save_model(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 40)
    command = ["run", "kivi", "quest", "cam", "--model", str(tmp_path / "model"), "--text", str(text)]
    command += ["--prompt", "600", "--haystack", "400", "--continuation", "4", "--timed", "1", "--replicates", "1"]
    command += ["--store", str(tmp_path / "store.sqlite"), "--quiet", "--jobs", "1", "--report", str(tmp_path / "out")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "failed" not in said and str(text) in said
    assert sum(line.startswith("h2o-2 ") for line in said[said.index("race 'decode'") :].splitlines()) == 1
    assert "On the Pareto front of held and kl" in said
    assert (tmp_path / "out" / "caches.html").is_file()
