"""Real ``generate()`` on small random models: what a user does with the cache."""

import copy

import pytest
import torch
from small_models import MODELS, MODES, SMALL, generate, maker, prompt
from transformers import (
    DynamicCache,
)

from assay.serving import KIVICache
from assay.serving.kivi import register_kivi_attention
from assay.serving.kivi.store import PackedStore

pytestmark = pytest.mark.filterwarnings("ignore")
ATTENTION = ["sdpa", "eager", "kivi"]
OPTIONS = {"group_size": 16, "residual_length": 16}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_kivi_attention()
    register_kivi_attention()


@pytest.fixture(scope="module")
def models():
    return maker()


@pytest.fixture
def lossless(monkeypatch):
    """Storage that loses nothing: what is left is the plumbing, which must agree with DynamicCache exactly."""

    class Exact(PackedStore):
        def append(self, x):
            self.codes = x if self.codes is None else torch.cat([self.codes[:, :, : self.length], x], 2)
            self.scale = self.zero = self.codes[:, :, :0]
            self.length += x.shape[2]

        def part(self, start, stop):
            return self.codes[:, :, start:stop], self.scale, self.zero

        def dequantize(self, dtype, start=0, stop=None):
            return self.codes[:, :, start : self.length if stop is None else stop]

    import assay.serving.kivi.attention as attention
    import assay.serving.kivi.cache as cache

    monkeypatch.setattr(cache, "PackedStore", Exact)
    monkeypatch.setattr(attention.cpu, "available", lambda store, axis: False)
    monkeypatch.setattr(
        attention,
        "_channel_logits",
        lambda q, store, a, b, out: out.copy_(q @ store.dequantize(q.dtype, a, b).transpose(2, 3)),
    )
    monkeypatch.setattr(attention, "_token_mix", lambda p, store, a, b: p @ store.dequantize(p.dtype, a, b))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize(
    ("name", "mode"), [*((n, "beams") for n in MODELS), *(("llama-gqa", m) for m in MODES if m != "beams")]
)
def test_plumbing_equals_dynamic_cache(models, lossless, name, mode, attention):
    model, ids = models(name), prompt()
    torch.manual_seed(1)
    expected = generate(model, ids, None, "eager" if attention == "eager" else "sdpa", **MODES[mode])
    cache = KIVICache(model.config, **OPTIONS)
    torch.manual_seed(1)
    out = generate(model, ids, cache, attention, **MODES[mode])
    assert torch.equal(out, expected)
    assert cache.get_seq_length() == ids.shape[1] + 39
    assert cache.layers[0].key_store.length > 16


@pytest.mark.parametrize("attention", ATTENTION)
def test_left_padded_batch(models, lossless, attention):
    model = models("llama-gqa")
    ids = prompt(3, 25)
    mask = torch.ones_like(ids)
    for row, pad in enumerate((0, 7, 20)):
        ids[row, :pad], mask[row, :pad] = 0, 0
    cache = KIVICache(model.config, **OPTIONS)
    out = generate(model, ids, cache, attention, attention_mask=mask)
    assert torch.equal(out, generate(model, ids, None, "sdpa", attention_mask=mask))
    for row, pad in enumerate((0, 7, 20)):  # and each row as if it were alone
        alone = generate(model, ids[row : row + 1, pad:], KIVICache(model.config, **OPTIONS), attention)
        assert torch.equal(out[row, pad:], alone[0])


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("bits", [2, 8])
def test_attentions_agree_on_quantised_data(models, attention, bits):
    """Same cache, other attention: the same logits, step by step, up to codes that rounding noise flips."""
    model = models("llama-gqa")
    ids = prompt(2, 70)
    logits = {}
    for name in ("sdpa", attention):
        model.set_attn_implementation(name)
        cache = KIVICache(model.config, k_bits=bits, v_bits=bits, **OPTIONS)
        with torch.no_grad():
            steps = [model(ids[:, :30], cache=cache).logits]
            steps += [model(ids[:, t : t + 1], cache=cache).logits for t in range(30, 60)]
            steps += [model(ids[:, 60:], cache=cache).logits]
        logits[name] = torch.cat(steps, 1)
    torch.testing.assert_close(logits[attention], logits["sdpa"], rtol=0, atol=5e-3)


def test_quantising_does_change_the_logits(models):
    model = models("llama-gqa")
    model.set_attn_implementation("sdpa")
    ids = prompt(1, 64)
    with torch.no_grad():
        exact = model(ids).logits
        errors = []
        for bits in (2, 4, 8):
            cache = KIVICache(model.config, k_bits=bits, v_bits=bits, **OPTIONS)
            prefill = model(ids[:, :48], cache=cache).logits
            torch.testing.assert_close(prefill, exact[:, :48], rtol=1e-4, atol=1e-4)  # the prompt itself is exact
            errors.append((model(ids[:, 48:], cache=cache).logits - exact[:, 48:]).abs().mean().item())
    assert errors[0] > 3 * errors[1] > 3 * errors[2] > 0


@pytest.mark.parametrize("attention", ATTENTION)
def test_below_the_window_nothing_is_lost(models, attention):
    """l < R: tokens and logits are those of DynamicCache, bit for bit."""
    model = models("llama-gqa")
    ids = prompt(2, 9)
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "new": 23}
    cache = KIVICache(model.config, group_size=16, residual_length=32)
    out = generate(model, ids, cache, attention, **kwargs)
    expected = generate(model, ids, None, "eager" if attention == "eager" else "sdpa", **kwargs)
    assert cache.get_seq_length() == 31 and cache.layers[0].key_store.length == 0
    assert torch.equal(out.sequences, expected.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, expected.logits, strict=True))


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("chunk", [1, 7, 16, 30])
def test_chunked_prefill(models, lossless, attention, chunk):
    model, ids = models("llama-gqa"), prompt(2, 60)
    whole = generate(model, ids, KIVICache(model.config, **OPTIONS), attention)
    chunked = generate(model, ids, KIVICache(model.config, **OPTIONS), attention, prefill_chunk_size=chunk)
    assert torch.equal(whole, chunked)


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("exact", [True, False])
def test_assisted_generation(models, attention, exact, request):
    """Any assistant leaves greedy output as it is: with exact storage always, quantised where no flush intervenes."""
    if exact:
        request.getfixturevalue("lossless")
    model, ids = models("llama-gqa"), prompt(1, 21)
    options = OPTIONS if exact else {"group_size": 16, "residual_length": 64}
    plain = generate(model, ids, KIVICache(model.config, **options), attention)
    assistants = {"assistant_model": copy.deepcopy(models("llama-gqa"))}, {"prompt_lookup_num_tokens": 4}
    other = copy.deepcopy(models("llama-gqa"))
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight += 0.3 * torch.randn(
            64, 64, generator=torch.Generator().manual_seed(2)
        )
    for assistant in (*assistants, {"assistant_model": other}):
        cache = KIVICache(model.config, **options)
        out = generate(model, ids, cache, attention, **assistant)
        assert torch.equal(out, plain)
        assert cache.layers[0].record_past


def test_assistant_that_is_quantised_itself(models, lossless):
    """The cache also serves as one that is cropped again and again while several calls go unverified."""
    model = models("llama")
    model.set_attn_implementation("sdpa")
    ids = prompt(1, 60)
    cache, exact = KIVICache(model.config, **OPTIONS), DynamicCache(config=model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        for c in (cache, exact):
            model(ids[:, :20], cache=c)
        for start in range(20, 56, 4):
            for t in range(start, start + 5):
                a = model(ids[:, t : t + 1], cache=cache).logits
                b = model(ids[:, t : t + 1], cache=exact).logits
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
            cache.crop(-1)
            exact.crop(-1)
    assert cache.get_seq_length() == exact.get_seq_length() == 56


def test_beams_of_a_quantised_cache(models):
    model, ids = models("llama-gqa"), prompt(1, 40)
    cache = KIVICache(model.config, k_bits=8, v_bits=8, **OPTIONS)
    out = generate(model, ids, cache, "kivi", new=24, num_beams=4, num_return_sequences=4)
    assert len({tuple(row.tolist()) for row in out}) == 4
    assert torch.equal(out[0], generate(model, ids, None, "sdpa", new=24, num_beams=4)[0])


def test_low_precision_model():
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        model = MODELS["llama-gqa"](SMALL).eval().to(dtype)
        results = []
        for attention in ATTENTION:
            cache = KIVICache(model.config, **OPTIONS)
            results.append(generate(model, prompt(2, 40), cache, attention, new=20))
            assert cache.layers[0].keys.dtype == dtype and cache.layers[0].key_store.scale.dtype == torch.float16
        assert results[0].shape == results[2].shape == (2, 60)


def test_padding_option_in_generate(models):
    model, ids = models("llama-gqa"), prompt(2, 40)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    cache = KIVICache(model.config, **OPTIONS)
    cache.set_padding(mask)
    out = generate(model, ids, cache, "kivi", attention_mask=mask, num_beams=2)
    assert cache.layers[0].first_real.shape == (4,)
    assert out.shape == (2, 80)


def test_save_in_the_middle_and_go_on(models, tmp_path):
    model = models("qwen3")
    for attention in ATTENTION:
        model.set_attn_implementation(attention)
        ids = prompt(2, 50)
        cache = KIVICache(model.config, **OPTIONS)
        with torch.no_grad():
            model(ids, cache=cache)
            cache.save(tmp_path / attention)
            loaded = KIVICache.load(tmp_path / attention, model.config)
            nxt = prompt(2, 3, seed=1)
            assert torch.equal(model(nxt, cache=cache).logits, model(nxt, cache=loaded).logits)


@pytest.mark.parametrize("attention", ATTENTION)
def test_beside_sliding_windows(lossless, attention):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    types = ["sliding_attention", "full_attention"]
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL, num_key_value_heads=2, layer_types=types, use_sliding_window=True, sliding_window=8)
    model = Qwen2ForCausalLM(config).eval()
    out = generate(model, prompt(), KIVICache(config, **OPTIONS), attention)
    assert torch.equal(out, generate(model, prompt(), None, "sdpa"))


def test_two_runs_agree_and_a_cache_can_be_reset(models):
    model, ids = models("llama-gqa"), prompt()
    cache = KIVICache(model.config, **OPTIONS)
    first = generate(model, ids, cache, "kivi")
    cache.reset()
    assert torch.equal(generate(model, ids, cache, "kivi"), first)


def test_attention_that_models_need_but_kivi_lacks_is_named():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    model = Gemma2ForCausalLM(Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=32, sliding_window=8)).eval()
    model.set_attn_implementation("kivi")
    cache = KIVICache(model.config, **OPTIONS)
    with pytest.raises(ValueError, match="'softcap', which Gemma2Attention uses"), torch.no_grad():
        model(prompt(1, 40), cache=cache)
    out = generate(model, prompt(1, 40), KIVICache(model.config, **OPTIONS), "eager", new=8)
    assert out.shape == (1, 48)
