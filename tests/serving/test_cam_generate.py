"""Real ``generate()`` on small random models, and the report on attention outputs."""

import copy
from functools import partial

import numpy as np
import pytest
import small_models
import torch
from small_models import MODELS, MODES, SMALL, maker, padded, prompt
from transformers import (
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from assay.serving.cam import CaM, EvictionCache, perturbation_report, register_eviction_attention

pytestmark = pytest.mark.filterwarnings("ignore")
generate = partial(small_models.generate, attention="evict", new=24)
POLICIES = {"streaming": {}, "h2o": {}, "scissorhands": {"n_recent": 4}, "tova": {}}


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_eviction_attention()
    register_eviction_attention()


@pytest.fixture(scope="module")
def models():
    return maker()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_cache_that_is_never_full(models, name, policy):
    """With as many heads for keys as for queries bit for bit; grouped heads are summed in another order."""
    model, (ids, mask) = models(name), padded()
    kwargs = {"return_dict_in_generate": True, "output_logits": True, "attention_mask": mask}
    expected = generate(model, ids, None, attention="eager", **kwargs)
    cache = EvictionCache(model.config, policy, 60, merge=CaM())
    out = generate(model, ids, cache, **kwargs)
    assert torch.equal(out.sequences, expected.sequences)
    for a, b in zip(out.logits, expected.logits, strict=True):
        if name in ("llama", "gpt-neox"):
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_generate(models, mode):
    """A cache that is never full gives what DynamicCache gives; a small one goes on for three times its budget."""
    model, ids = models("llama-gqa"), prompt()
    torch.manual_seed(1)
    expected = generate(model, ids, None, attention="eager", **MODES[mode])
    torch.manual_seed(1)
    assert torch.equal(
        generate(model, ids, EvictionCache(model.config, "h2o", 60, merge=CaM()), **MODES[mode]), expected
    )
    for policy, options in POLICIES.items():
        cache = EvictionCache(model.config, policy, 12, merge=CaM(m=4), **options)
        out = generate(model, ids, cache, new=36, **MODES[mode])
        assert out.shape == (expected.shape[0], 57)
        assert cache.get_seq_length() == 56 and all(layer.keys.shape[2] == 13 for layer in cache.layers)


def test_positions_are_those_of_the_text(models):
    """After evictions a model is told positions by the tokens seen, not by the tokens held."""
    model, ids = models("llama-gqa"), prompt(1, 40)
    model.set_attn_implementation("evict")
    told = []
    hook = model.model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, out: told.append(kwargs["position_ids"]), with_kwargs=True
    )
    cache = EvictionCache(model.config, budget=8, merge=CaM(m=2))
    with torch.no_grad():
        model(ids[:, :20], cache=cache)
        for t in range(20, 40):
            model(ids[:, t : t + 1], cache=cache)
    hook.remove()
    assert torch.cat(told, 1)[0].tolist() == list(range(40))


def test_streaming_equals_a_window_with_sinks(models):
    """One layer: keys depend on the token alone, so a mask on the full attention gives the same logits."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 1}, num_key_value_heads=2)).eval()
    ids = prompt(2, 40)
    q, k = torch.arange(40)[:, None], torch.arange(40)
    # The new token attends to the whole cache of 12 and to itself, and only then one leaves.
    mask = ((k < 4) | (k > q - 9)) & (k <= q)
    model.set_attn_implementation("eager")
    additive = torch.zeros(2, 1, 40, 40).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        expected = model(ids, attention_mask=additive).logits
        model.set_attn_implementation("evict")
        cache = EvictionCache(model.config, budget=12)
        out = torch.cat([model(ids[:, t : t + 1], cache=cache).logits for t in range(40)], 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt-neox"])
def test_positions_inside_the_cache(models, name):
    """One layer: with pos_shift a step is that of a text made of the tokens held."""
    torch.manual_seed(0)
    small = SMALL | {"num_hidden_layers": 1}
    model = (
        LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, head_dim=32))
        if name == "llama-gqa"
        else GPTNeoXForCausalLM(GPTNeoXConfig(**small))
    ).eval()
    ids = prompt(2, 40)
    model.set_attn_implementation("evict")
    cache = EvictionCache(model.config, budget=12, pos_shift=True)
    plain = EvictionCache(model.config, budget=12)
    with torch.no_grad():
        for c in (cache, plain):
            model(ids[:, :20], cache=c)
        for t in range(20, 37):
            out = model(ids[:, t : t + 1], cache=cache).logits[:, -1]
            other = model(ids[:, t : t + 1], cache=plain).logits[:, -1]
            held = torch.cat([ids[:, :4], ids[:, t - 8 : t + 1]], 1)
            expected = model(held).logits[:, -1]
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
            assert (other - expected).abs().max() > 1e-3
        chunk = model(ids[:, 37:], cache=cache).logits[:, -1]
        held = torch.cat([ids[:, :4], ids[:, 37 - 8 :]], 1)
        torch.testing.assert_close(chunk, model(held).logits[:, -1], rtol=0, atol=1e-4)


def test_scores_equal_the_columns_of_eager_attention(models):
    model, ids = models("llama-gqa"), prompt(2, 30)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
        model.set_attn_implementation("evict")
        cache = EvictionCache(model.config, "h2o", 40)
        model(ids[:, :20], cache=cache)
        for t in range(20, 30):
            model(ids[:, t : t + 1], cache=cache)
    for layer, weights in zip(cache.layers, attentions):
        torch.testing.assert_close(
            layer.scores[:, :, :30], weights.view(2, 2, 2, 30, 30).mean(2).sum(2), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_grouped_heads_equal_repeated_ones(models, policy):
    """A model with its key and value projections repeated for every query head keeps and computes the same."""
    model = models("llama-gqa")
    twin = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=4, head_dim=32)).eval()
    state = dict(model.state_dict())
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 32, -1).repeat_interleave(2, 0).flatten(0, 1)
    # Each query head decides alone there, so the two heads of a group must ask the same.
    for name in list(state):
        if "q_proj" in name:
            state[name] = state[name].view(2, 2, 32, -1)[:, :1].expand(-1, 2, -1, -1).reshape(128, -1)
    twin.load_state_dict(state)
    grouped = copy.deepcopy(model)
    grouped.load_state_dict({n: state[n] if "q_proj" in n else t for n, t in model.state_dict().items()})
    ids = prompt(2, 50)
    outs = []
    for m in (grouped, twin):
        m.set_attn_implementation("evict")
        cache = EvictionCache(m.config, policy, 16, merge=CaM(m=4, mask="threshold"), **POLICIES[policy])
        with torch.no_grad():
            outs.append([m(ids[:, :20], cache=cache).logits] + [m(ids[:, t : t + 1], cache=cache).logits
                                                                 for t in range(20, 50)])  # fmt: skip
    torch.testing.assert_close(torch.cat(outs[0], 1), torch.cat(outs[1], 1), rtol=0, atol=1e-3)


@pytest.mark.parametrize("policy", POLICIES)
def test_left_padded_batch(models, policy):
    """Each row as if it were alone, random masks included."""
    model, (ids, mask) = models("llama-gqa"), padded()
    options = {"merge": CaM(m=4), **POLICIES[policy]}
    out = generate(model, ids, EvictionCache(model.config, policy, 12, **options), attention_mask=mask)
    for row, pad in enumerate((0, 7, 20)):
        cache = EvictionCache(model.config, policy, 12, first_row=row, **options)
        assert torch.equal(out[row, pad:], generate(model, ids[row : row + 1, pad:], cache)[0])


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_prefill(models, chunk):
    """A cache that is never full does not see the chunks; a streaming one keeps the same tokens."""
    model, ids = models("llama-gqa"), prompt(2, 40)
    whole = generate(model, ids, EvictionCache(model.config, "h2o", 90, merge=CaM()))
    cache = EvictionCache(model.config, "h2o", 90, merge=CaM())
    assert torch.equal(whole, generate(model, ids, cache, prefill_chunk_size=chunk))
    small = EvictionCache(model.config, "streaming", 16)
    generate(model, ids, small, prefill_chunk_size=chunk)
    assert small.positions(1)[0, 0].tolist() == [-1, 0, 1, 2, 3, *range(63 - 12, 63)]


def test_assisted_generation_is_refused_by_name(models):
    model, ids = models("llama-gqa"), prompt(1)
    for assistant in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": copy.deepcopy(model)}):
        with pytest.raises(ValueError, match=r"assisted generation takes back tokens .*'h2o'"):
            generate(model, ids, EvictionCache(model.config, "h2o", 12), **assistant)


def test_other_attention_is_refused(models):
    model, ids = models("llama-gqa"), prompt(1)
    with pytest.raises(RuntimeError, match=r"'sdpa' does not report .*set_attn_implementation\('evict'\)"):
        generate(model, ids, EvictionCache(model.config, "h2o", 12), attention="sdpa")


def test_other_caches_work_with_this_attention(models):
    model, (ids, mask) = models("llama"), padded()
    expected = generate(model, ids, None, attention="eager", attention_mask=mask)
    assert torch.equal(generate(model, ids, DynamicCache(config=model.config), attention_mask=mask), expected)
    assert torch.equal(generate(model, ids, prefill_chunk_size=6), generate(model, ids, None, attention="eager"))


def test_seeds(models):
    model, ids = models("llama-gqa"), prompt()
    outs = [
        generate(model, ids, EvictionCache(model.config, budget=10, merge=CaM(m=4), seed=seed), new=40)
        for seed in (0, 0, 1)
    ]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])


def test_save_in_the_middle_and_go_on(models, tmp_path):
    model, ids = models("qwen3"), prompt(2, 30)
    model.set_attn_implementation("evict")
    cache = EvictionCache(model.config, "scissorhands", 16, merge=CaM(m=4), n_recent=4)
    with torch.no_grad():
        model(ids, cache=cache)
        cache.save(tmp_path)
        loaded = EvictionCache.load(tmp_path, model.config)
        for t in range(20):
            assert torch.equal(
                model(ids[:, t : t + 1], cache=cache).logits, model(ids[:, t : t + 1], cache=loaded).logits
            )


def test_low_precision_models(models):
    for dtype in (torch.bfloat16, torch.float16):
        model = copy.deepcopy(models("llama-gqa")).to(dtype)
        for policy, options in POLICIES.items():
            cache = EvictionCache(model.config, policy, 12, merge=CaM(m=4), **options)
            assert generate(model, prompt(2, 30), cache, new=20).shape == (2, 50)
            assert cache.layers[0].values.dtype == dtype and cache.layers[0].scores.dtype == torch.float32


# -- the report on attention outputs -----------------------------------------------------------------------------------


def test_perturbation_report_against_a_loop(models):
    """One layer, every victim, head and step by brute force from the weights: drop, merge, softmax over the rest."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 1}, num_key_value_heads=2)).eval()
    ids = prompt(1, 40)
    victims, window, steps, m = [6, 9, 13], 12, 5, 4
    variants = {mask: CaM(m=m, mask=mask) for mask in ("bernoulli", "bernoulli_current", "threshold", "max", "all")}
    model.set_attn_implementation("sdpa")
    report = perturbation_report(model, ids, variants, window=window, victims=victims, steps=steps)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("eager")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        weights = model(ids, cache=cache, output_attentions=True).attentions[0][0].double().numpy()
    values = cache.layers[0].values[0].double().numpy()
    sums = {name: np.zeros(3) for name in ("evict", *variants)}
    for i in victims:
        t = i + window
        recent, targets = range(i + 1, t + 1), range(i + 1, i + 1 + m)
        kept = [0, 1, 2, 3, *recent]
        for head in range(4):
            group = weights[head // 2 * 2 : head // 2 * 2 + 2].mean(0)
            cum, cur = group[: t + 1].sum(0), group[t]
            p = {
                "evict": 0.0,
                "bernoulli": min(1, cum[i] / cum[targets].mean()),
                "bernoulli_current": min(1, cur[i] / cur[recent].mean()),
                "threshold": float(cur[i] > cur[kept].mean()),
                "max": min(1, cum[i] / cum[kept].max()),
                "all": 1.0,
            }
            v = values[head // 2]
            merged = v.copy()
            merged[targets] += v[i] / m
            for s in range(t + 1, t + 1 + steps):
                a = weights[head, s]
                rest = np.arange(40) != i
                change = {
                    real: [
                        np.linalg.norm(a[rest] @ x[rest] / (a[rest].sum() if real else 1) - a @ v) for x in (v, merged)
                    ]
                    for real in (True, False)
                }
                for name in sums:
                    sums[name] += [(1 - p[name]) * change[r][0] + p[name] * change[r][1] for r in (True, False)] + [
                        p[name]
                    ]
    count = len(victims) * 4 * steps
    for row in report.itertuples():
        expected = sums[row.variant]
        np.testing.assert_allclose(row.relative, expected[0] / sums["evict"][0], rtol=1e-5)
        np.testing.assert_allclose(row.relative_unscaled, expected[1] / sums["evict"][1], rtol=1e-5)
        np.testing.assert_allclose(row.merge_rate, expected[2] / count, rtol=1e-5, atol=1e-12)
    assert report.relative.iloc[0] == 1 and (report.norm > 0).all()


def test_perturbation_report_refuses_short_texts(models):
    model = models("llama-gqa")
    with pytest.raises(ValueError, match="for a text of 40 tokens"):
        perturbation_report(model, prompt(1, 40))
    with pytest.raises(ValueError, match="victims must lie from n_sink=4"):
        perturbation_report(model, prompt(1, 100), victims=[2])
    with pytest.raises(ValueError, match=r"'x' has m=40, which is beyond window=28"):
        perturbation_report(model, prompt(1, 100), {"x": CaM(m=40)})
    with pytest.raises(ValueError, match="ids must have shape"):
        perturbation_report(model, prompt(1, 100)[0])
    report = perturbation_report(model, prompt(2, 80))
    assert set(report.variant) == {"evict", "bernoulli", "bernoulli_current", "threshold", "max", "all"}
    assert report.document.tolist() == [0] * 6 + [1] * 6


def test_models_with_windows_in_some_layers(tmp_path):
    """Sliding layers keep transformers' own cache and window; the others evict."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SMALL,
        num_key_value_heads=2,
        head_dim=32,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=16,
        use_sliding_window=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    ids, mask = padded()
    never_full = EvictionCache(model.config, "h2o", 60, merge=CaM())
    expected = generate(model, ids, None, attention="eager", attention_mask=mask)
    assert torch.equal(generate(model, ids, never_full, attention_mask=mask), expected)
    cache = EvictionCache(model.config, "h2o", 12, merge=CaM(m=4))
    assert generate(model, ids, cache, attention_mask=mask).shape == (3, 49)
    memory = cache.memory_footprint()
    assert memory["other"] == 3 * 2 * 15 * 32 * 2 * 4 and memory["total"] > memory["other"]
    with pytest.raises(ValueError, match="layer 1 is a DynamicSlidingWindowLayer, which save"):
        cache.save(tmp_path)
    report = perturbation_report(model, prompt(1, 80))
    assert (report.relative[report.variant != "evict"] != 1).all()


@pytest.mark.parametrize("kind", ["llama3", "linear", "yarn"])
def test_positions_inside_the_cache_with_scaled_frequencies(kind):
    torch.manual_seed(0)
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    small = SMALL | {"num_hidden_layers": 1, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, rope_parameters=rope)).eval()
    model.set_attn_implementation("evict")
    ids = prompt(1, 40)
    cache = EvictionCache(model.config, budget=12, pos_shift=True)
    with torch.no_grad():
        for t in range(40):
            out = model(ids[:, t : t + 1], cache=cache).logits[:, -1]
        held = torch.cat([ids[:, :4], ids[:, 39 - 8 :]], 1)
        torch.testing.assert_close(out, model(held).logits[:, -1], rtol=0, atol=1e-4)


def test_positions_inside_the_cache_need_a_known_rotation():
    from transformers import CohereConfig

    with pytest.raises(ValueError, match=r"pos_shift is known to work for .* but config is of 'cohere'"):
        EvictionCache(CohereConfig(num_hidden_layers=1), budget=8, pos_shift=True)
