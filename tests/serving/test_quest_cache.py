"""The cache: storage, metadata, what a step reads, and the attention function that reads it."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, Qwen3NextConfig, T5Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from assay.serving.quest import (
    QuestCache,
    QuestLayer,
    build_metadata,
    covered_mass,
    page_scores,
    quest_attention_forward,
    read_fraction,
    select_pages,
)

S, D = 4, 16


def config(**changes):
    arguments = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "vocab_size": 64,
    }
    return LlamaConfig(**arguments | changes)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(**changes):
    return QuestLayer(**{"page_size": S, "token_budget": 4 * S} | changes)


def filled(tokens, batch=2, heads=2, seed=0, dtype=torch.float32, **changes):
    target = layer(**changes)
    target.update(
        randn(batch, heads, tokens, D, seed=seed, dtype=dtype),
        randn(batch, heads, tokens, D, seed=seed + 1, dtype=dtype),
    )
    return target


def step(target, n=1, seed=5):
    shape = (*target.keys.shape[:2], n, D)
    return target.update(randn(*shape, seed=seed, dtype=target.dtype), randn(*shape, seed=seed + 1, dtype=target.dtype))


def assert_metadata_is_right(target):
    _, _, meta = target.paged()
    assert torch.equal(meta, build_metadata(target.keys, target.page_size))


class Module(torch.nn.Module):
    is_causal = True

    def __init__(self, groups=2):
        super().__init__()
        self.num_key_value_groups = groups


# -- storage -----------------------------------------------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(0, 11)),
        st.tuples(st.just("crop"), st.integers(0, 9)),
        st.tuples(st.just("reorder"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
        st.tuples(st.just("repeat"), st.integers(1, 2)),
        st.tuples(st.just("select"), st.just([1, 0])),
    ),
    max_size=14,
)


@settings(max_examples=80, deadline=None)
@given(operations, st.sampled_from([1, 3, 4]))
def test_tokens_and_metadata_after_any_mix_of_operations(todo, size):
    target = QuestLayer(page_size=size, token_budget=4 * size)
    target.update(randn(2, 2, 5, D), randn(2, 2, 5, D, seed=1))
    k, v = randn(2, 2, 5, D), randn(2, 2, 5, D, seed=1)
    for seed, (what, how) in enumerate(todo):
        rows = k.shape[0]
        if what == "update":
            new = randn(rows, 2, how, D, seed=seed + 10), randn(rows, 2, how, D, seed=seed + 50)
            seen = target.update(*new)
            k, v = torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)
            assert torch.equal(seen[0], k if k.shape[2] > how else new[0]) and torch.equal(seen[1], v)
        elif what == "crop":
            how = min(how, k.shape[2])
            target.crop(-how)
            k, v = k[:, :, : k.shape[2] - how], v[:, :, : v.shape[2] - how]
        elif what == "repeat":
            if rows > 4:
                continue
            target.batch_repeat_interleave(how)
            k, v = k.repeat_interleave(how, 0), v.repeat_interleave(how, 0)
        else:
            index = torch.tensor(how)
            target.reorder_cache(index) if what == "reorder" else target.batch_select_indices(index)
            k, v = k[index], v[index]
        assert torch.equal(target.keys, k) and torch.equal(target.values, v)
        assert target.get_seq_length() == k.shape[2] and target.get_mask_sizes(2) == (k.shape[2] + 2, 0)
        assert_metadata_is_right(target)


def test_buffers_grow_by_an_eighth_and_rarely():
    target = filled(1)
    grown = 0
    for t in range(400):
        before = target._key.data_ptr()
        step(target, seed=t)
        grown += target._key.data_ptr() != before
        assert target._key.shape[2] <= (target.pages + max(1, target.pages / 8)) * S
    assert grown < 40
    assert_metadata_is_right(target)


def test_spare_tokens_are_finite_also_after_a_crop():
    target = filled(9)
    target.update(torch.full((2, 2, 3, D), float("inf")), torch.full((2, 2, 3, D), float("nan")))
    target.crop(-3)
    key, value, meta = target.paged()
    assert torch.isfinite(key).all() and torch.isfinite(value).all() and torch.isfinite(meta).all()


def test_keys_do_not_hold_the_layer():
    target = filled(9)
    step(target)
    ref = weakref.ref(target)
    gc.disable()
    try:
        del target
        assert ref() is None  # no cycle: memory comes back at once
    finally:
        gc.enable()


def test_a_copy_is_independent():
    target = filled(30)
    other = copy.deepcopy(target)
    step(other)
    assert target.get_seq_length() == 30 and other.get_seq_length() == 31
    assert torch.equal(target.keys, filled(30).keys)
    assert_metadata_is_right(other)


def test_offload_and_reset():
    target = filled(30)
    target.offload()
    target.prefetch()
    assert_metadata_is_right(target)
    target.reset()
    assert target.get_seq_length() == 0 and target.get_max_length() == -1
    target.offload()
    target.crop(-1)
    step_shape = (1, 3, 7, 8)
    target.update(torch.ones(step_shape), torch.ones(step_shape))  # another batch and model
    assert target.keys.shape == step_shape


def test_gradient_flows_in_the_first_call():
    k = randn(1, 2, 6, D).requires_grad_()
    target = layer()
    seen, _ = target.update(k, k)
    seen.sum().backward()
    assert torch.equal(k.grad, torch.ones_like(k))
    assert not step(target)[0].requires_grad


# -- what a step reads -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [5, 15, 16, 17, 20, 21, 63])
def test_number_of_pages(tokens):
    pages = -(-tokens // S)
    kernel = filled(tokens)
    assert kernel.force_last and kernel.pages_to_read(1) == (4 if pages > 4 else None)
    assert kernel.pages_to_read(2) is None
    evaluation = filled(tokens, parity="eval")
    count = min(max(3, min(4 * S, tokens) // S), pages)
    assert not evaluation.force_last and evaluation.pages_to_read(1) == (count if count < pages else None)
    assert filled(tokens, max_query_len=3).pages_to_read(3) == kernel.pages_to_read(1)


def attend(target, q, new, mask=None, **kwargs):
    k, v = step(target, new)
    module = Module(q.shape[1] // k.shape[1])
    out, weights = quest_attention_forward(module, q, k, v, mask, scaling=D**-0.5, **kwargs)
    assert weights is None
    return out, k, v


def expected(target, q, mask=None):
    """The definition, from the tokens alone: score, select, mask, dense attention."""
    k, v, n = target.keys, target.values, q.shape[2]
    tokens, group = k.shape[2], q.shape[1] // k.shape[1]
    causal = torch.ones(n, tokens, dtype=torch.bool).tril(tokens - n)[None, None]
    mask = causal if mask is None else mask
    scores = page_scores(q, build_metadata(k, S), target.gqa)
    whole = torch.nn.functional.pad(mask.any(2), (0, -tokens % S)).unflatten(2, (-1, S)).any(3)
    pages = select_pages(scores, target.pages_to_read(n), visible=whole, force_last=target.force_last)
    keep = torch.zeros(*scores.shape, dtype=torch.bool).scatter_(2, pages, True).repeat_interleave(S, 2)[..., :tokens]
    keep = keep.repeat_interleave(q.shape[1] // keep.shape[1], 1)[:, :, None] & mask
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=D**-0.5)
    return out.transpose(1, 2), pages


@pytest.mark.parametrize("gqa", ["head", "max", "sum"])
@pytest.mark.parametrize("heads", [2, 6, 16])
@pytest.mark.parametrize("options", [{}, {"force_last": False}, {"parity": "eval"}])
def test_sparse_step_equals_the_definition(gqa, heads, options):
    for tokens in (40, 41, 43):
        target = filled(tokens - 1, gqa=gqa, **options)
        q = randn(2, heads, 1, D, seed=9)
        out, *_ = attend(target, q, 1)
        torch.testing.assert_close(out, expected(target, q)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("gqa", ["head", "max"])
def test_padding(gqa):
    target = filled(42, gqa=gqa)
    q = randn(2, 4, 1, D, seed=9)
    mask = torch.ones(2, 1, 1, 43, dtype=torch.bool)
    mask[1, ..., :29] = False  # fewer visible tokens than the budget
    mask[0, ..., :3] = False
    out, *_ = attend(target, q, 1, mask)
    reference, pages = expected(target, q, mask)
    torch.testing.assert_close(out, reference, rtol=0, atol=1e-5)
    assert (pages[1] >= 7).all()  # no page that is all padding
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    target.crop(-1)
    torch.testing.assert_close(attend(target, q, 1, additive)[0], reference, rtol=0, atol=1e-5)


def test_several_queries_share_a_selection_and_stay_causal():
    for n in (2, 5):
        target = filled(40, max_query_len=5)
        q = randn(2, 4, n, D, seed=9)
        out, k, _ = attend(target, q, n)
        torch.testing.assert_close(out, expected(target, q)[0], rtol=0, atol=1e-5)
        causal = torch.ones(2, 1, n, k.shape[2], dtype=torch.bool).tril(k.shape[2] - n)
        target.crop(-n)
        torch.testing.assert_close(attend(target, q, n, causal)[0], out, rtol=0, atol=1e-6)
    assert target.counts()["sparse"] == 2


@pytest.mark.parametrize("n", [2, 7])
def test_longer_queries_are_dense_and_causal(n):
    target = filled(40)
    q = randn(2, 4, n, D, seed=9)
    k, v = step(target, n)
    mask = torch.ones(2, 1, n, 40 + n, dtype=torch.bool).tril(40)
    for m in (mask, None):
        out, _ = quest_attention_forward(Module(), q, k, v, m, scaling=D**-0.5)
        dense, _ = sdpa_attention_forward(Module(), q, k, v, mask, scaling=D**-0.5)
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-6)
    assert target.counts()["steps"] == 0


@pytest.mark.parametrize("heads", [2, 6, 16])
@pytest.mark.parametrize("tokens", [1, 13, 16])
def test_within_the_budget_it_is_dense_bit_for_bit(heads, tokens):
    target = filled(tokens - 1) if tokens > 1 else layer()
    q = randn(2, heads, 1, D, seed=9)
    if tokens > 1:
        out, k, v = attend(target, q, 1)
    else:
        k, v = target.update(randn(2, 2, 1, D), randn(2, 2, 1, D))
        out, _ = quest_attention_forward(Module(heads // 2), q, k, v, None, scaling=D**-0.5)
    dense, _ = sdpa_attention_forward(Module(heads // 2), q, k.contiguous(), v.contiguous(), None, scaling=D**-0.5)
    assert torch.equal(out, dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    target = filled(60, dtype=dtype)
    q = randn(2, 4, 1, D, seed=9, dtype=dtype)
    out, *_ = attend(target, q, 1)
    assert out.dtype == dtype and target.paged()[2].dtype == dtype
    exact = filled(0)
    exact.update(target.keys.float(), target.values.float())
    reference = expected(exact, q.float())[0]
    torch.testing.assert_close(out.float(), reference, rtol=0, atol=1e-5 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("gqa", ["head", "max"])
@pytest.mark.parametrize("force_last", [True, False])
def test_tokens_read_over_a_hundred_steps(gqa, force_last):
    target = filled(5, gqa=gqa, force_last=force_last)
    total = 0.0
    for t in range(100):
        q = randn(2, 4, 1, D, seed=t)
        attend(target, q, 1)
        tokens = 6 + t
        if target.pages_to_read(1) is None:
            total += tokens
            continue
        pages = expected(target, q)[1]
        last = (pages[..., -1] == target.pages - 1).float().mean().item()
        total += 4 * S - last * (-tokens % S)
        if force_last:
            assert last == 1
            assert 4 * S - (-tokens % S) == min(tokens, 3 * S + (tokens - 1) % S + 1)
    counts = target.counts()
    assert counts["tokens_read"] == pytest.approx(total, rel=1e-6)
    assert counts["tokens_total"] == sum(range(6, 106))
    assert counts["steps"] == 100 and counts["sparse"] == counts["possible"] == 106 - 17


def test_recall_is_the_covered_mass_and_grows_with_the_budget():
    recalls = []
    for pages in (2, 4, 8, 11):
        target = filled(44, token_budget=pages * S, track_recall=True)
        q = randn(2, 4, 1, D, seed=9)
        attend(target, q, 1)
        chosen = expected(target, q)[1]
        mass = covered_mass(q, target.keys, chosen, S, scaling=D**-0.5)
        recalls.append(target.counts()["recall"])
        assert recalls[-1] == pytest.approx(mass.mean().item(), rel=1e-5)
    assert all(b > a for a, b in itertools.pairwise(recalls)) and recalls[-1] < 1


def test_a_wrapped_or_stale_key_is_dense_and_counted():
    target = filled(40)
    q = randn(2, 4, 1, D, seed=9)
    k, v = step(target)
    dense, _ = sdpa_attention_forward(Module(), q, k, v, None, scaling=D**-0.5)
    assert torch.equal(quest_attention_forward(Module(), q, k.clone(), v, None, scaling=D**-0.5)[0], dense)
    assert target.counts()["possible"] - target.counts()["sparse"] == 1
    step(target)
    assert torch.equal(quest_attention_forward(Module(), q, k, v, None, scaling=D**-0.5)[0], dense)
    assert target.counts()["sparse"] == 0


def test_weights_on_request_are_dense():
    target = filled(40)
    q = randn(2, 4, 3, D, seed=9)
    k, v = step(target, 3)
    mask = torch.ones(2, 1, 3, 43, dtype=torch.bool).tril(40)
    dense, _ = sdpa_attention_forward(Module(), q, k, v, mask, scaling=D**-0.5)
    for m in (mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min), None):
        with pytest.warns(UserWarning, match="computes no weights"):
            out, weights = quest_attention_forward(Module(), q, k, v, m, scaling=D**-0.5, output_attentions=True)
        assert weights.shape == (2, 4, 3, 43)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)
    with pytest.warns(UserWarning):  # keys that do not come from a paged layer
        out, _ = quest_attention_forward(Module(), q, k.clone(), v, None, scaling=D**-0.5, output_attentions=True)
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-5)


def test_what_it_does_not_compute_is_named():
    target = filled(40)
    k, v = step(target)
    for name in ("softcap", "s_aux", "sliding_window"):
        with pytest.raises(ValueError, match=f"'{name}', which Module uses"):
            quest_attention_forward(Module(), randn(2, 4, 1, D), k, v, None, **{name: torch.ones(1)})


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_layers_of_a_model():
    cache = QuestCache(config(num_hidden_layers=4))
    assert [type(x).__name__ for x in cache.layers] == ["DynamicLayer"] * 2 + ["QuestLayer"] * 2
    assert cache.layers[2].token_budget == 1024 and cache.layers[2].page_size == 16 and cache.layers[2].gqa == "head"
    assert not cache.is_compileable and cache.get_max_length() == -1
    assert [type(x).__name__ for x in QuestCache(config(), dense_layers=(1, 9)).layers] == [
        "QuestLayer",
        "DynamicLayer",
        "QuestLayer",
    ]
    only_dense = QuestCache(config(num_hidden_layers=1))
    only_dense.update(torch.ones(1, 2, 3, D), torch.ones(1, 2, 3, D), 0)
    assert only_dense.get_seq_length() == 3 and only_dense.stats()["density"] == 1


def test_statistics():
    cache = QuestCache(config(), page_size=S, token_budget=2 * S)
    for index in range(3):
        cache.update(randn(1, 2, 40, D), randn(1, 2, 40, D), index)
    k, v = [cache.update(randn(1, 2, 1, D), randn(1, 2, 1, D), index) for index in range(3)][2]
    missed = cache.stats()
    assert missed["missed_steps"] == missed["steps"] == 1 and missed["density"] == 1
    quest_attention_forward(Module(), randn(1, 4, 1, D), k, v, None)
    stats = cache.stats()
    assert stats["sparse_steps"] == 1 and stats["missed_steps"] == 0 and stats["recall"] != stats["recall"]
    assert stats["tokens_read"] == S + 1 and stats["tokens_total"] == 41
    assert stats["density"] == pytest.approx((S + 1 + 11 + 2 * 41) / (3 * 41))
    assert stats["metadata_bytes"] == 11 * 2 * D * 2 * 4
    assert stats["bytes"] == 3 * 41 * 2 * D * 2 * 4 + stats["metadata_bytes"] <= stats["allocated_bytes"]
    cache.clear_stats()
    assert cache.stats()["steps"] == 0
    assert cache.get_seq_length() == 41 and cache.get_seq_length(0) == 41


def test_closed_form_of_the_traffic():
    assert read_fraction(32768, 2048) == 1 / 8
    assert read_fraction(65536, 4096) == 1 / 8  # the paper's example
    assert read_fraction(8192, 2048) == 1 / 16 + 1 / 4
    assert read_fraction(2048, 2048) == 1


def test_save_and_load(tmp_path):
    cache = QuestCache(config(), page_size=S, token_budget=2 * S, gqa="max", dense_layers=[0])
    for index in range(3):
        cache.update(randn(1, 2, 37, D, seed=index), randn(1, 2, 37, D, seed=index + 5), index)
    cache.save(tmp_path)
    loaded = QuestCache.load(tmp_path, config())
    assert loaded.options == cache.options and loaded.dense_layers == (0,)
    q = randn(1, 4, 1, D, seed=9)
    outs = []
    for c in (cache, loaded):
        k, v = c.update(randn(1, 2, 1, D, seed=7), randn(1, 2, 1, D, seed=8), 2)
        outs.append(quest_attention_forward(Module(), q, k, v, None)[0])
        assert c.layers[2].counts()["sparse"] == 1
        assert torch.equal(c.layers[0].keys, cache.layers[0].keys)
    assert torch.equal(*outs)
    with pytest.raises(ValueError, match="3 layers, but config is of a model with 2"):
        QuestCache.load(tmp_path, config(num_hidden_layers=2))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        QuestCache.load(tmp_path / "no", config())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size must be at least 1, not 0"),
        ({"token_budget": 31}, "token_budget must hold at least two pages of 16 tokens, 32, not 31"),
        ({"gqa": "mean"}, "gqa must be one of"),
        ({"max_query_len": 0}, "max_query_len must be at least 1, not 0"),
        ({"parity": "kernel"}, "parity must be None or 'eval', not 'kernel'"),
        ({"dense_layers": (-1,)}, "dense_layers must not be negative"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ValueError, match=message):
        QuestCache(config(), **changes)


def test_models_that_cannot_work_are_named():
    with pytest.raises(ValueError, match=r"'t5', an encoder-decoder"):
        QuestCache(T5Config())
    with pytest.raises(ValueError, match=r"all .*sliding_attention.*: nothing to select"):
        QuestCache(MistralConfig(sliding_window=8))
    bad = config()
    bad.num_key_value_heads = 3
    with pytest.raises(ValueError, match="4 attention heads, which is no multiple of 3"):
        QuestCache(bad)
    with pytest.warns(UserWarning, match="keep their own cache"):
        cache = QuestCache(Qwen3NextConfig(num_hidden_layers=4), dense_layers=())
    assert isinstance(cache.layers[3], QuestLayer) and not isinstance(cache.layers[0], QuestLayer)
    with pytest.raises(ValueError, match="layer 0 is a LinearAttentionLayer, which save"):
        cache.save("nowhere")


def test_bad_tensors():
    target = layer()
    with pytest.raises(ValueError, match=r"keys must have shape .* not \(2, 3, 4\)"):
        target.update(torch.ones(2, 3, 4), torch.ones(2, 3, 4))
    target = filled(6)
    with pytest.raises(ValueError, match=r"\[batch, kv_heads\] = \[2, 2\], but keys of shape \[3, 2, 1, 16\]"):
        target.update(torch.ones(3, 2, 1, D), torch.ones(3, 2, 1, D))
    with pytest.raises(ValueError, match="must be 0 or negative, not 2"):
        target.crop(2)
    with pytest.raises(ValueError, match="cannot remove 7 tokens of 6"):
        target.crop(-7)
