import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from assay.bench.claim import Timed
from assay.claims import quest
from assay.claims._quest_policies import PolicyLayer, policy_attention, policy_cache
from assay.claims.quest import CLAIM
from assay.errors import InputError
from assay.serving.quest import QuestLayer, quest_attention_forward

CARD = Path(__file__).parents[2] / "docs" / "methods" / "quest.md"
SMOKE = CLAIM.scales["smoke"].options


@pytest.fixture(scope="module")
def task():
    return CLAIM.workload(**SMOKE | {"longest": 2048, "budget": 512}).build(device="cpu", seed=0)


@pytest.fixture(scope="module")
def shared(task):
    return {setting: task.prepare(setting, 0) for setting in task.settings}


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


# -- arms --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", arms("retrieval"))
def test_arms_that_retrieve(shared, name):
    found = CLAIM.arm(name).run(shared["retrieval"], 0)
    assert found.keys() == {"exact", "tokens", "nll", "read", "held"}
    assert all(torch.isfinite(torch.tensor(v)) for v in found.values())
    assert shared["retrieval"].model.config._attn_implementation == "sdpa"
    if name == "full":
        assert found["read"] == found["held"] == 1
        return
    assert 0.5 < found["read"] < 1  # one of two layers is dense
    if name.startswith("quest"):
        assert found["held"] == pytest.approx(1 + 1 / 32, rel=0.02)
    else:
        assert found["held"] == (1 if name.startswith(("oracle", "random")) else found["read"])


@pytest.mark.parametrize("name", arms("text"))
def test_arms_that_predict(shared, name):
    found = CLAIM.arm(name).run(shared["text"], 0)
    assert found.keys() == {"nll", "ppl", "kl", "top1", "read", "held"}
    if name == "full":
        assert abs(found["kl"]) < 1e-5 and found["top1"] == 1
    else:
        assert found["kl"] > 1e-4


def test_a_budget_above_the_context_is_the_full_cache(shared):
    full = quest._retrieves(quest._full)(shared["retrieval"], 0)
    found = quest._retrieves(quest._quest(1024))(shared["retrieval"], 0)
    assert found["nll"] == full["nll"] and found["read"] == 1
    for policy in ("h2o", "tova", "streaming", "oracle", "random"):
        same = quest._retrieves(quest._policy(policy, 1024))(shared["retrieval"], 0)
        assert same["nll"] == pytest.approx(full["nll"], abs=1e-4) and same["read"] == 1


def test_no_arm_leaves_the_shared_prefill_changed(shared):
    before = [x.clone() for pair in shared["retrieval"].layers for x in pair]
    for name in arms("retrieval"):
        CLAIM.arm(name).run(shared["retrieval"], 0)
    assert all(torch.equal(a, b) for a, b in zip(before, (x for p in shared["retrieval"].layers for x in p)))


@pytest.mark.parametrize("setting", ["1k", "2k"])
@pytest.mark.parametrize("name", arms("32k"))
def test_timed_arms(shared, name, setting):
    timed = CLAIM.arm(name).run(shared[setting], 0)
    assert isinstance(timed, Timed)
    for _ in range(2):  # before() restores what the call used up
        if timed.before is not None:
            timed.before()
        timed.call()
    tokens = 1024 * int(setting[0])
    if "quest" in name:
        # 512 tokens, all of the last page since the length is a multiple of it, and the metadata of all pages
        assert timed.metrics["read"] == (512 + tokens / 16) / tokens
        step = inspect.getclosurevars(timed.call).nonlocals["step"]
        layer = inspect.getclosurevars(step).nonlocals["layer"]
        assert layer.get_seq_length() == tokens and layer.counts()["sparse"] == 3
    elif "kivi" in name:
        assert 0.1 < timed.metrics["read"] < 0.4
    else:
        assert timed.metrics["read"] == 1


def test_timed_arms_use_the_threads_of_the_workload(shared, monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    timed = CLAIM.arm("attend-dense").run(dataclasses.replace(shared["1k"], threads=3), 0)
    timed.call()
    assert set_to == [3, torch.get_num_threads()]


def test_timed_arms_compute_the_same(shared):
    """With the budget of the whole context all of them are dense attention (KIVI but for its error)."""
    context = dataclasses.replace(shared["1k"], budget=1024)
    dense = CLAIM.arm("attend-dense").run(context, 0).call()[0]
    simulated = CLAIM.arm("attend-simulated").run(context, 0).call().transpose(1, 2)
    torch.testing.assert_close(simulated, dense, rtol=0, atol=1e-5)
    kivi = CLAIM.arm("attend-kivi2").run(context, 0).call().transpose(1, 2)
    assert torch.corrcoef(torch.stack([kivi.flatten(), dense.flatten()]))[0, 1] > 0.8


def test_the_simulation_is_quest_by_mask(shared):
    context = shared["2k"]
    simulated = CLAIM.arm("attend-simulated").run(context, 0).call()
    layer = QuestLayer(token_budget=context.budget)
    layer.update(context.keys[:, :, :-1], context.values[:, :, :-1])
    keys, values = layer.update(context.keys[:, :, -1:], context.values[:, :, -1:])
    out, _ = quest_attention_forward(torch.nn.Identity(), context.query, keys, values, None)
    torch.testing.assert_close(simulated.transpose(1, 2), out, rtol=0, atol=1e-5)


# -- policies ----------------------------------------------------------------------------------------------------------


def policy_step(layer, query, key):
    keys, values = layer.update(key, key)
    return layer.attend(query, keys, values, 1.0)


def test_streaming_sees_sinks_and_recent_tokens():
    layer = PolicyLayer("streaming", 8, 4, 0)
    keys = torch.randn(1, 2, 20, 4, generator=torch.Generator().manual_seed(0))
    layer.update(keys[:, :, :19], keys[:, :, :19])
    query = torch.ones(1, 4, 1, 4)
    out = policy_step(layer, query, keys[:, :, 19:])
    seen = [0, 1, 2, 3, 16, 17, 18, 19]
    k = keys[:, :, seen].repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, k, k, scale=1.0)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("policy", ["h2o", "tova"])
def test_eviction_is_for_good_and_by_attention(policy):
    layer = PolicyLayer(policy, 6, 4, 0)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 1, 30, 8, generator=draw)
    layer.update(keys[:, :, :20], keys[:, :, :20])
    alive = torch.ones(2, 3, 20, dtype=torch.bool)
    mass = torch.zeros(2, 3, 20)
    for t in range(20, 30):
        query = torch.randn(2, 3, 1, 8, generator=draw)
        out = policy_step(layer, query, keys[:, :, t : t + 1])
        alive = torch.cat([alive, torch.ones(2, 3, 1, dtype=torch.bool)], 2)
        k = keys[:, :, : t + 1].expand(2, 3, -1, -1)
        weights = (query @ k.transpose(2, 3))[:, :, 0].masked_fill(~alive, float("-inf")).softmax(-1)
        torch.testing.assert_close(out, weights[:, :, None] @ k)
        mass = torch.cat([mass, torch.zeros(2, 3, 1)], 2) + weights
        for b in range(2):
            for h in range(3):
                recent = set(range(t + 1 - 3, t + 1)) if policy == "h2o" else set()
                rank = mass if policy == "h2o" else weights
                others = [i for i in range(t + 1) if alive[b, h, i] and i not in recent]
                others.sort(key=lambda i: -rank[b, h, i].item())
                alive[b, h] = False
                alive[b, h, list(recent) + others[: 6 - len(recent)]] = True
        assert torch.equal(layer.kept, alive)
        assert (layer.kept.sum(-1) == 6).all()


def test_oracle_reads_the_pages_of_the_largest_products():
    layer = PolicyLayer("oracle", 8, 4, 0)
    keys = torch.randn(1, 1, 22, 4, generator=torch.Generator().manual_seed(0))
    layer.update(keys[:, :, :21], keys[:, :, :21])
    query = torch.randn(1, 2, 1, 4, generator=torch.Generator().manual_seed(1))
    out = policy_step(layer, query, keys[:, :, 21:])
    for h in range(2):
        products = (query[0, h] @ keys[0, 0].T)[0]
        best = max(range(5), key=lambda p: products[4 * p : 4 * p + 4].max().item())
        k = keys[:, :, [*range(4 * best, 4 * best + 4), 20, 21]]
        expected = torch.nn.functional.scaled_dot_product_attention(query[:, h : h + 1], k, k, scale=1.0)
        torch.testing.assert_close(out[:, h : h + 1], expected)


def test_policies_refuse_what_they_do_not_compute():
    config = LlamaConfig(hidden_size=32, num_hidden_layers=3, num_attention_heads=2)
    cache = policy_cache(config, "tova", 32, dense_layers=(0,))
    assert [type(x).__name__ for x in cache.layers] == ["DynamicLayer", "PolicyLayer", "PolicyLayer"]
    ones = torch.ones(1, 2, 4, 16)
    cache.update(ones, ones, 1)
    keys, values = cache.update(ones[:, :, :2], ones[:, :, :2], 1)
    with pytest.raises(ValueError, match="single tokens without padding"):
        policy_attention(torch.nn.Identity(), ones[:, :, :2], keys, values, None)


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_all_statements_can_be_decided():
    everywhere = {a.name: set(a.where) for a in CLAIM.arms}
    settings = {"retrieval", "text", *quest.SIZES}
    for s in CLAIM.statements:
        assert set(s.where) <= settings
        for where in s.where:
            assert all(where in everywhere[arm] for arm in (s.method, *s.baselines))
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= names and set(scale.races) == {"attention"} for scale in CLAIM.scales.values())
    desk = CLAIM.workload(**SMOKE | {"longest": 32768}).build(device="cpu", seed=0)
    assert set(desk.settings) == settings


def test_options_are_checked_and_change_the_digest():
    changes = ({}, {"longest": 2048}, {"budget": 512}, {"heads": 8}, {"haystack": 200}, {"head_dim": 32})
    assert len({CLAIM.workload(**SMOKE | c).build(device="cpu", seed=0).digest for c in changes}) == len(changes)
    for change, message in (
        ({"longest": 500}, "--longest must be at least 1024 tokens, not 500"),
        ({"budget": 16}, "--budget must be at least 32, not 16"),
        ({"attention_threads": -2}, "--attention-threads must be at least 1, not -2"),
        ({"heads": -1}, "--heads must be at least 1, not -1"),
        ({"kv_heads": 3}, "--heads 4 must be a multiple of --kv-heads 3"),
    ):
        with pytest.raises(InputError, match=message):
            CLAIM.workload(**SMOKE | change).build(device="cpu", seed=0)


def save_model(folder, layers):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, vocab_size=128
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(32, 127)} | {"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)


def test_models_that_quest_cannot_serve_are_named(tmp_path):
    save_model(tmp_path, 1)
    with pytest.raises(InputError, match="has one layer"):
        CLAIM.workload(**SMOKE | {"model": str(tmp_path)}).build(device="cpu", seed=0)


def test_own_model_text_and_questions(tmp_path):
    save_model(tmp_path / "model", 4)
    text, qa = tmp_path / "text.jsonl", tmp_path / "qa.jsonl"
    text.write_text("\n".join(json.dumps({"text": c * 400}) for c in "abc"))
    rows = [{"context": f"The key is {c}. " * 20, "question": " Which key? ", "answer": c * 2} for c in "xyz"]
    qa.write_text("\n".join(map(json.dumps, rows)))
    options = {"model": str(tmp_path / "model"), "text": str(text), "qa": str(qa)}
    task = CLAIM.workload(**SMOKE | options).build(device="cpu", seed=0)
    assert task.limit == 3 and "3 questions" in task.title
    hidden = task.prepare("retrieval", 1)
    assert hidden.answer.tolist() == [ord("y"), ord("y")]
    found = CLAIM.arm("quest-64").run(hidden, 1)
    assert found["nll"] > 0 and 0.5 < found["read"] < 0.9  # two dense layers of four
    assert CLAIM.arm("quest-128").run(task.prepare("text", 2), 2)["nll"] > 0


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.quest; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert 0 < float(capsys.readouterr().out) < 1
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
        (setting, r, a.name) for a in CLAIM.arms for r in range(2) for setting in done.settings if setting in a.where
    }
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}


@pytest.mark.slow
def test_passkeys_of_the_embedded_model():
    """Six pass keys in 800 tokens, seed 0, pages chosen as the authors' accuracy code does.

    The numbers come from an independent prototype, which left the layout of the prompt open: the layout was chosen
    among six by its Quest rows. The other rows took no part in that. Exact answers may differ by one prompt.
    """
    pytest.importorskip("gguf")
    task = CLAIM.workload(**dict(CLAIM.scales["desk"].options)).build(device="cpu", seed=0)
    makes = {
        "eval-64": (quest._quest(64, force_last=False, parity="eval"), 3, 1.087),
        "eval-128": (quest._quest(128, force_last=False, parity="eval"), 5, 0.395),
        "oracle-64": (quest._policy("oracle", 64), 6, 0.012),
        "streaming-128": (quest._policy("streaming", 128), 0, 3.25),
    }
    right, nll = dict.fromkeys(makes, 0.0), dict.fromkeys(makes, 0.0)
    for replicate in range(6):
        hidden = task.prepare("retrieval", replicate)
        for name, (make, *_) in makes.items():
            found = quest._retrieves(make)(hidden, replicate)
            right[name] += found["exact"]
            nll[name] += found["nll"] / 6
    for name, (_, exact, mean) in makes.items():
        assert abs(right[name] - exact) <= 1, (name, right[name])
        assert nll[name] == pytest.approx(mean, abs=0.02, rel=0.1), name
