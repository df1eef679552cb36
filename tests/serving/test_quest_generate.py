"""Real ``generate()`` on small random models: what a user does with the cache."""

import copy
from functools import partial

import pytest
import small_models
import torch
from small_models import MODELS, MODES, SMALL, maker, padded, prompt
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay.serving.quest import QuestCache, register_quest_attention

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
DEEP = SMALL | {"num_hidden_layers": 3}
MORE = MODELS | {
    "llama-3": lambda small: LlamaForCausalLM(
        LlamaConfig(**small | {"num_attention_heads": 6, "hidden_size": 96}, num_key_value_heads=2, head_dim=16)
    ),
    "qwen3": lambda small: Qwen3ForCausalLM(
        Qwen3Config(**small | {"num_attention_heads": 8}, num_key_value_heads=1, head_dim=32)
    ),
}
CHUNKED = MODES | {"chunks": {"prefill_chunk_size": 8}}
generate = partial(small_models.generate, attention="quest", new=30)
TIGHT = {"page_size": 4, "token_budget": 16, "dense_layers": (0,)}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_quest_attention()
    register_quest_attention()


@pytest.fixture(scope="module")
def models():
    return maker(MORE, DEEP)


@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "beams") for n in MORE), *(("llama-gqa", m) for m in CHUNKED if m != "beams")]
)
def test_a_budget_above_the_length_equals_dynamic_cache(models, name, mode):
    model, ids = models(name), prompt()
    torch.manual_seed(1)
    expected = generate(model, ids, None, attention="sdpa", **CHUNKED[mode])
    cache = QuestCache(model.config, token_budget=64)
    torch.manual_seed(1)
    assert torch.equal(generate(model, ids, cache, **CHUNKED[mode]), expected)
    assert cache.get_seq_length() == ids.shape[1] + 29
    assert cache.stats()["sparse_steps"] == 0 and cache.stats()["density"] == 1


def test_logits_are_the_same_bits_within_the_budget(models):
    model, (ids, mask) = models("llama-gqa"), padded()
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    out = generate(model, ids, QuestCache(model.config, token_budget=64), **kwargs)
    expected = generate(model, ids, None, attention="sdpa", **kwargs)
    assert torch.equal(out.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, expected.logits, strict=True))


def test_dense_layers_are_the_same_bits(models):
    """With all layers exempt the logits are those of sdpa; with the first ones exempt, their keys are."""
    model, ids = models("llama-gqa"), prompt(2, 40)
    outs, caches = [], []
    for attention, dense in (("sdpa", (0, 1, 2)), ("quest", (0, 1, 2)), ("quest", (0, 1))):
        model.set_attn_implementation(attention)
        cache = QuestCache(model.config, page_size=4, token_budget=8, dense_layers=dense)
        with torch.no_grad():
            model(ids, cache=cache)
            outs.append(model(ids[:, :1], cache=cache).logits)
        caches.append(cache)
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    for layer in (0, 1, 2):  # keys of layer 2 come from layers 0 and 1, which are dense
        assert torch.equal(caches[0].layers[layer].keys, caches[2].layers[layer].keys)
    assert caches[2].stats()["sparse_steps"] == 1


@pytest.mark.parametrize("gqa", ["head", "max", "sum"])
@pytest.mark.parametrize("mode", CHUNKED)
def test_sparse_generation_in_every_mode(models, mode, gqa):
    """Far below the length it runs, repeats by seed, and differs from dense attention."""
    model, ids = models("llama-gqa"), prompt(2, 60)
    outs = []
    for _ in range(2):
        torch.manual_seed(1)
        cache = QuestCache(model.config, gqa=gqa, **TIGHT)
        outs.append(generate(model, ids, cache, **CHUNKED[mode]))
    assert torch.equal(*outs)
    stats = cache.stats()
    assert stats["sparse_steps"] == stats["steps"] == 2 * 29 and stats["missed_steps"] == 0
    torch.manual_seed(1)
    assert not torch.equal(outs[0], generate(model, ids, None, attention="sdpa", **CHUNKED[mode]))


def test_left_padded_rows_select_for_themselves(models):
    """Padding by whole pages moves no page boundary: every row must be as if it were alone."""
    model = models("llama-gqa")
    ids, mask = padded(3, 60, pads=(0, 8, 20))
    out = generate(model, ids, QuestCache(model.config, **TIGHT), attention_mask=mask)
    for row, pad in enumerate((0, 8, 20)):
        alone = generate(model, ids[row : row + 1, pad:], QuestCache(model.config, **TIGHT))
        assert torch.equal(out[row, pad:], alone[0])


def test_beams_follow_their_pages(models):
    """A beam search must agree with one that recomputes what every beam would see."""
    model, ids = models("llama-gqa"), prompt(1, 60)
    out = generate(model, ids, QuestCache(model.config, **TIGHT), num_beams=4, num_return_sequences=4)
    assert len({tuple(row.tolist()) for row in out}) == 4
    # Feed the best beam token by token: its score is the one that the search reported.
    kwargs = {"num_beams": 4, "return_dict_in_generate": True, "output_scores": True}
    found = generate(model, ids, QuestCache(model.config, **TIGHT), **kwargs)
    cache = QuestCache(model.config, **TIGHT)
    with torch.no_grad():
        logits = [model(ids, cache=cache).logits[:, -1]]
        for t in range(60, 89):
            logits.append(model(found.sequences[:, t : t + 1], cache=cache).logits[:, -1])
    log_probs = torch.stack(logits, 1).log_softmax(-1).gather(2, found.sequences[:, 60:, None]).sum()
    assert (log_probs / 30).item() == pytest.approx(found.sequences_scores[0].item(), abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_chunked_prefill_is_dense(models, chunk):
    model, ids = models("llama-gqa"), prompt(2, 60)
    whole = generate(model, ids, QuestCache(model.config, **TIGHT))
    cache = QuestCache(model.config, **TIGHT)
    chunked = generate(model, ids, cache, prefill_chunk_size=chunk)
    if chunk > 1:  # chunks of one token are decoding steps, there is no telling them apart
        assert torch.equal(whole, chunked)
    else:
        assert cache.stats()["sparse_steps"] > 2 * 29


def test_assisted_generation(models):
    """Verification of several tokens is dense by default, and never wrong about what a token may see."""
    model, ids = models("llama-gqa"), prompt(1, 60)
    dense = generate(model, ids, None, attention="sdpa")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight += 0.3 * torch.randn(
            64, 64, generator=torch.Generator().manual_seed(2)
        )
    for assistant in (
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": other},
        {"assistant_model": copy.deepcopy(model)},
    ):
        roomy = QuestCache(model.config, token_budget=128)
        assert torch.equal(generate(model, ids, roomy, **assistant), dense)
        for options in ({}, {"max_query_len": 8}):
            cache = QuestCache(model.config, **TIGHT, **options)
            out = generate(model, ids, cache, **assistant)
            assert out.shape == (1, 90)
            _, _, meta = cache.layers[1].paged()
            assert meta.shape[2] == -(-cache.get_seq_length() // 4)


def test_assisted_steps_are_sparse_on_request(models):
    model, ids = models("llama-gqa"), prompt(1, 60)
    cache = QuestCache(model.config, **TIGHT, max_query_len=8)
    generate(model, ids, cache, assistant_model=copy.deepcopy(model))
    assert cache.stats()["sparse_steps"] > 0 and cache.stats()["missed_steps"] == 0


def test_other_attention_warns_and_is_counted(models):
    model, ids = models("llama-gqa"), prompt(2, 60)
    expected = generate(model, ids, None, attention="sdpa")
    cache = QuestCache(model.config, **TIGHT)
    with pytest.warns(UserWarning, match="saves nothing with attention implementation 'sdpa'"):
        assert torch.equal(generate(model, ids, cache, attention="sdpa"), expected)
    assert cache.stats()["missed_steps"] == cache.stats()["steps"] == 2 * 29


def test_quest_attention_with_another_cache_is_sdpa(models):
    model, ids = models("llama-gqa"), prompt(2, 60)
    assert torch.equal(generate(model, ids), generate(model, ids, None, attention="sdpa"))


def test_low_precision_model():
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = MODELS["llama-gqa"](DEEP).eval().to(dtype)
        cache = QuestCache(model.config, **TIGHT)
        out = generate(model, prompt(2, 40), cache, new=20)
        assert out.shape == (2, 60) and cache.layers[1].keys.dtype == dtype
        assert torch.equal(
            generate(model, prompt(2, 40), QuestCache(model.config, token_budget=64), new=8),
            generate(model, prompt(2, 40), None, attention="sdpa", new=8),
        )


def test_compiled_loops_and_torch_agree_in_a_model(models, monkeypatch):
    pytest.importorskip("numba")
    from assay.serving.quest import cpu

    model, ids = models("llama-gqa"), prompt(2, 60)
    model.set_attn_implementation("quest")
    logits = []
    for _ in range(2):
        cache = QuestCache(model.config, **TIGHT)
        with torch.no_grad():
            model(ids, cache=cache)
            logits.append(torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(8)], 1))
        monkeypatch.setattr(cpu, "numba", None)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-4)


def test_save_in_the_middle_and_go_on(models, tmp_path):
    model, ids = models("qwen3"), prompt(2, 50)
    model.set_attn_implementation("quest")
    cache = QuestCache(model.config, **TIGHT)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.save(tmp_path)
        loaded = QuestCache.load(tmp_path, model.config)
        for t in range(5):
            nxt = ids[:, t : t + 1]
            assert torch.equal(model(nxt, cache=cache).logits, model(nxt, cache=loaded).logits)


def test_a_cache_can_be_reset_and_copied(models):
    model, ids = models("llama-gqa"), prompt()
    cache = QuestCache(model.config, **TIGHT)
    first = generate(model, ids, cache)
    again = copy.deepcopy(cache)
    cache.reset()
    assert torch.equal(generate(model, ids, cache), first)
    assert again.get_seq_length() == 50 and again.stats()["steps"] == 2 * 29


def test_attention_weights_on_request(models):
    model, ids = models("llama-gqa"), prompt(1, 40)
    model.set_attn_implementation("quest")
    with pytest.warns(UserWarning, match="computes no weights"), torch.no_grad():
        out = model(ids, output_attentions=True)
    assert out.attentions[0].shape == (1, 4, 40, 40)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        torch.testing.assert_close(out.logits, model(ids).logits, rtol=0, atol=1e-3)


def test_sliding_layers_and_softcap_are_named():
    options = SMALL | {"num_hidden_layers": 4}
    with torch.random.fork_rng():
        model = Gemma2ForCausalLM(Gemma2Config(**options, num_key_value_heads=2, head_dim=32, sliding_window=8)).eval()
    with pytest.warns(UserWarning, match="layers \\['sliding_attention'\\] of 'gemma2' keep their own cache"):
        cache = QuestCache(model.config, **TIGHT)
    model.set_attn_implementation("quest")
    with pytest.raises(ValueError, match="'softcap', which Gemma2Attention uses"), torch.no_grad():
        model(prompt(1, 40), cache=cache)
