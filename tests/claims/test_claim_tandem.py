import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from assay.bench.claim import Timed
from assay.claims import _tandem_models as models
from assay.claims.tandem import CLAIM, TRY
from assay.errors import InputError

CARD = Path(__file__).parents[2] / "docs" / "methods" / "tandem.md"
SMOKE = dict(CLAIM.scales["smoke"].options)
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def duel():
    return CLAIM.workload(**SMOKE | {"windows": 6}).build(device="cpu", seed=0).prepare("chains", 0)


def arms(setting):
    return [a.name for a in CLAIM.arms if setting in a.where]


@pytest.mark.parametrize("name", arms("chains"))
def test_arms_train_test_and_decode(duel, name):
    found = CLAIM.arm(name).run(duel, 0)
    assert all(np.isfinite(list(found.values())))
    if name == "primary":
        assert found["agreement"] == 1 and found["tv"] < 1e-6 and found["alone"] == 1
        return
    if name == "mid-size":  # no drafter; two of three layers
        assert found["alone"] == pytest.approx(2 / 3)
        return
    if name == "tandem-distil":
        assert found["alone"] == pytest.approx(found["cost_ratio"] + 0.5)
    assert found["identical"] == 1 and 0 < found["cost_ratio"] < 1
    assert 0 <= found["accepted"] <= found["drafted"] <= 8
    expected = (1 + found["accepted"]) / (found["drafted"] * found["cost_ratio"] + 1)
    assert found["modelled"] == pytest.approx(expected)
    assert ("prefix" in found) == name.endswith("-4")


@pytest.mark.parametrize("name", arms("decode"))
def test_arms_that_are_timed_say_the_same(name):
    loops = CLAIM.workload(**SMOKE | {"timed": 13}).build(device="cpu", seed=0).prepare("decode", 1)
    timed = CLAIM.arm(name).run(loops, 1)
    assert isinstance(timed, Timed) and timed.per == 13
    plain = loops.primary.generate(
        loops.prompt, attention_mask=torch.ones_like(loops.prompt), max_new_tokens=13, min_new_tokens=13,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(timed.call(), plain)


def test_all_drafts_of_the_race_are_accepted():
    from assay.serving.tandem import drafting

    loops = CLAIM.workload(**SMOKE).build(device="cpu", seed=0).prepare("decode", 0)
    options = {"do_sample": False, "max_new_tokens": 21, "pad_token_id": 0, **models.seen(loops.prompt)}
    with drafting(loops.tandem, 4) as made:
        loops.primary.generate(loops.prompt, assistant_model=loops.tandem.secondary, **options)
    assert made[0].rounds == [(4, 4)] * 4
    loops.secondary.generation_config.num_assistant_tokens = 4
    loops.secondary.generation_config.num_assistant_tokens_schedule = "constant"
    loops.secondary.generation_config.assistant_confidence_threshold = 0.0
    with models.assisting(loops.primary) as made:
        loops.primary.generate(loops.prompt, assistant_model=loops.secondary, **options)
    assert all(drafted == accepted for drafted, accepted in made[0].rounds) and made[0].rounds[0] == (4, 4)


def test_drafters_are_trained_on_the_same_batches_from_the_same_start(duel):
    first, second = list(duel.batches(2)), list(duel.batches(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    for kind in ("small-ce", "tandem-ce"):
        fresh = models.untrained(duel, kind)
        weights = (fresh.secondary if kind.startswith("tandem") else fresh).state_dict()
        assert all(torch.equal(v, duel.secondary.state_dict()[k]) for k, v in weights.items())
    assert models.drafter(duel, "tandem-ce") is models.drafter(duel, "tandem-ce"), "trained once"
    ours, theirs = models.drafter(duel, "small-ce").state_dict(), duel.secondary.state_dict()
    assert any(not torch.equal(ours[k], theirs[k]) for k in theirs)


def test_quality_in_closed_form(duel):
    """Of predictions that are always the next token: accuracy 1, and the agreement of the large model with the text."""
    ids = duel.held
    sure = torch.nn.functional.one_hot(torch.roll(ids, -1, 1), 16).float() * 100
    found = models.quality(duel, sure, 4)
    half = ids.shape[1] // 2
    right = models.reference(duel).argmax(-1)[:, half:-1] == ids[:, half + 1 :]
    assert found["accuracy"] == 1 and found["ce"] == pytest.approx(0, abs=1e-6)
    assert found["agreement"] == pytest.approx(right.float().mean().item())
    start = -half % 4
    blocks = right[:, start:][:, : (right.shape[1] - start) // 4 * 4].reshape(-1, 4).float()
    assert found["agree_3"] == pytest.approx(blocks[:, 2].mean().item())
    assert found["prefix"] == pytest.approx(blocks.cumprod(1).sum(1).mean().item())


def test_a_large_model_that_learned_nothing_is_refused():
    task = CLAIM.workload(**SMOKE | {"primary_steps": TRY}).build(device="cpu", seed=0)
    assert task.least == 0.7 and CLAIM.workload(**SMOKE).build(device="cpu", seed=0).least == 0
    task = dataclasses.replace(task, primary_steps=1, length=20)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="has not found the rule"):
        patch.setattr(models, "EXTRA_STEPS", 1)
        patch.setattr(models, "MOST_EXTRA", 1)
        task.prepare("chains", 0)


# -- the user's own pair -----------------------------------------------------------------------------------------------


def save_model(folder, hidden, layers, kind=LlamaForCausalLM, size=128, shift=0):
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    if kind is LlamaForCausalLM:
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=2, vocab_size=size
        )
    else:
        config = GPT2Config(n_embd=hidden, n_layer=layers, n_head=2, vocab_size=size)
    kind(config).save_pretrained(folder)
    vocabulary = {chr(i): i - 30 + shift for i in range(32, 127)} | {"[UNK]": 0}
    tokenizer = Tokenizer(kinds.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    text = root / "text.txt"
    text.write_text("the cat sat on the mat and the dog sat on the log. " * 60)
    return {
        "primary": save_model(root / "large", 48, 3),
        "secondary": save_model(root / "small", 16, 1),
        "text": str(text),
        "length": 32,
        **{k: SMOKE[k] for k in ("steps", "batch", "windows", "prompts", "new_tokens", "timed")},
    }


def test_an_own_pair(pair):
    task = CLAIM.workload(**pair).build(device="cpu", seed=0)
    assert task.settings == ("text", "decode") and "windows of 32 tokens" in task.title
    duel = task.prepare("text", 0)
    assert not any(p.requires_grad for p in duel.primary.parameters())
    for name in ("small-distil", "tandem-distil", "router"):
        found = CLAIM.arm(name).run(duel, 0)
        assert found["identical"] == 1
    assert task.prepare("text", 1).seed != duel.seed


def test_the_digest_follows_the_whole_text(pair, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(Path(pair["text"]).read_text()[:-3] + "fog")
    digests = {
        CLAIM.workload(**pair | change).build(device="cpu", seed=0).digest
        for change in ({}, {"text": str(other)}, {"steps": 4}, {"lr": 0.1}, {"block_size": 3})
    }
    assert len(digests) == 5


def test_windows_for_test_are_not_trained_on(pair):
    windows = CLAIM.workload(**pair).build(device="cpu", seed=0).windows
    random = np.random.default_rng(0)
    assert windows.draw(5, random).shape == (5, 32)
    held = windows.held(100, random)
    assert len(held) == len(windows.end) // 32 and len(np.unique(held, axis=0)) <= len(held)
    total = len(windows.train) + len(windows.end)
    assert len(windows.end) == int(0.1 * total)


def test_the_first_layers_of_a_model_make_a_small_one():
    from assay.workloads.pairs import first_layers

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, vocab_size=50
    )
    model = LlamaForCausalLM(config).eval()
    small = first_layers(model, 2)
    ids = torch.randint(50, (1, 7))
    hidden = model(ids, output_hidden_states=True).hidden_states[2]
    expected = model.lm_head(model.model.norm(hidden))
    torch.testing.assert_close(small(ids).logits, expected)
    assert not small.base_model.embed_tokens.weight.requires_grad and small.base_model.norm.weight.requires_grad
    with pytest.raises(ValueError, match="layers must be from 1 to 2"):
        first_layers(model, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"secondary": None}, "--secondary is missing"),
        ({"primary": None}, "--primary is missing"),
        ({"primary": "/nowhere"}, "--primary"),
        ({"text": "/nowhere.txt"}, "--text '/nowhere.txt' is no file"),
        ({"length": 2000}, "is too short: its last tenth is for test"),
        ({"length": 4}, "--length must be at least 16"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"new_tokens": -1}, "--new-tokens must be at least 1"),
        ({"lr": 0.0}, "--lr must be positive, not 0.0"),
    ],
)
def test_options_that_cannot_be_used(pair, change, message):
    with pytest.raises(InputError, match=message):
        CLAIM.workload(**pair | change).build(device="cpu", seed=0)


def test_pairs_that_do_not_fit(pair, tmp_path):
    cases = {
        "has a vocabulary of 128 and --secondary .* one of 130": save_model(tmp_path / "a", 16, 1, size=130),
        "number their tokens differently": save_model(tmp_path / "b", 16, 1, shift=1),
        "--secondary .*'gpt2'.*supported are llama": save_model(tmp_path / "c", 16, 1, GPT2LMHeadModel),
    }
    for message, folder in cases.items():
        with pytest.raises(InputError, match=message):
            CLAIM.workload(**pair | {"secondary": folder}).build(device="cpu", seed=0)
    with pytest.raises(InputError, match="--text is for --primary and --secondary"):
        CLAIM.workload(**SMOKE | {"text": pair["text"]}).build(device="cpu", seed=0)


# -- the claim ---------------------------------------------------------------------------------------------------------


def test_the_claim_is_consistent():
    everywhere = {a.name: a.where for a in CLAIM.arms}
    for s in CLAIM.statements:
        for where in s.where:
            assert all(where in everywhere[arm] for arm in (s.method, *s.baselines))
    names = {f.name for f in dataclasses.fields(CLAIM.workload)}
    assert all(set(scale.options) <= names and set(scale.races) == {"decode"} for scale in CLAIM.scales.values())


def test_importing_the_claim_is_cheap():
    code = "import sys, assay.claims.tandem; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_snippet_and_card_example_run(capsys):
    exec(CLAIM.snippet, {})
    assert capsys.readouterr().out.strip() == "True"
    (example,) = re.findall(r"```python\n(.*?)```", CARD.read_text(encoding="utf-8"), re.DOTALL)
    exec(example, {})
    assert capsys.readouterr().out.strip() == "True"


def test_through_the_runner(tmp_path):
    from assay.bench.runner import execute
    from assay.bench.verdict import decide

    done = execute(CLAIM, CLAIM.workload(), scale="smoke", jobs=1, store=str(tmp_path / "store.sqlite"))
    failed = [t for t in done.trials if t.status != "ok"]
    assert not failed, failed[0].error
    verdict = decide(done)
    assert {d.statement.name for d in verdict.decisions} == {s.name for s in CLAIM.statements}
    assert {d.answer for d in verdict.decisions if d.statement.name.startswith("lossless")} == {"holds"}
