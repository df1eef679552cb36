import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, QuantizedCache, Qwen3NextConfig, T5Config

from assay.serving import KIVICache
from assay.serving.kivi import KIVILayer, cache_bytes, quantize_groups
from assay.serving.kivi.view import PackedView

G, R, D = 8, 16, 16
AXES = [("channel", "token"), ("token", "channel"), ("channel", "channel"), ("token", "token")]


def config(**changes):
    arguments = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "vocab_size": 64,
    }
    return LlamaConfig(**arguments | changes)


def layer(**changes):
    return KIVILayer(**{"group_size": G, "residual_length": R} | changes)


def data(tokens, batch=2, heads=2, seed=0, dtype=torch.float32, dim=D):
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, tokens, dim, generator=g).to(dtype) for _ in range(2))


def feed(target, k, v, sizes):
    seen, start = [], 0
    for n in sizes:
        seen.append(target.update(k[:, :, start : start + n], v[:, :, start : start + n]))
        start += n
    assert start == k.shape[2]
    return seen


def state(target):
    out = [target.keys, target.values]
    for store in (target.key_store, target.value_store):
        out.append(torch.tensor(store.length))
        if store.length and isinstance(store.part, object):
            out += store.part(0, store.length)
    return out


def assert_same_state(a, b):
    for x, y in zip(state(a), state(b), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)


def dense(x):
    return x.dense() if isinstance(x, PackedView) else x


def whole(target):
    """Keys and values that the next token would see besides its own."""
    return tuple(
        torch.cat([store.dequantize(torch.float32), residual], 2) if store.length else residual
        for store, residual in ((target.key_store, target.keys), (target.value_store, target.values))
    )


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_state_depends_on_the_length_alone(key_axis, value_axis, bits):
    k, v = data(3 * R + 5)
    one = layer(k_bits=bits, v_bits=bits, key_axis=key_axis, value_axis=value_axis)
    generator = torch.Generator().manual_seed(1)
    for length in range(1, 3 * R + 6):
        one.update(k[:, :, length - 1 : length], v[:, :, length - 1 : length])
        at_once = copy.deepcopy(layer(k_bits=bits, v_bits=bits, key_axis=key_axis, value_axis=value_axis))
        feed(at_once, k[:, :, :length], v[:, :, :length], [length])
        sizes, left = [], length
        while left:
            sizes.append(min(left, int(torch.randint(1, R + 9, (1,), generator=generator))))
            left -= sizes[-1]
        chunks = layer(k_bits=bits, v_bits=bits, key_axis=key_axis, value_axis=value_axis)
        feed(chunks, k[:, :, :length], v[:, :, :length], sizes)
        assert_same_state(one, at_once)
        assert_same_state(one, chunks)
        for axis, store in ((key_axis, one.key_store), (value_axis, one.value_store)):
            assert store.length == (length - length % R if axis == "channel" else max(0, length - R))
        assert one.keys.shape[2] == length - one.key_store.length
        assert one.values.shape[2] == length - one.value_store.length
        assert one.get_seq_length() == length


def test_what_a_call_sees_is_the_state_before_it_and_the_new_tokens():
    k, v = data(2 * R + 3)
    target = layer()
    first = target.update(k[:, :, :R], v[:, :, :R])
    assert torch.equal(first[0], k[:, :, :R]) and torch.equal(first[1], v[:, :, :R])
    for length in range(R, 2 * R + 3):
        before = whole(target)
        seen = target.update(k[:, :, length : length + 1], v[:, :, length : length + 1])
        for s, b, new in zip(seen, before, (k, v)):
            assert s.shape == (2, 2, length + 1, D)
            assert torch.equal(dense(s), torch.cat([b, new[:, :, length : length + 1]], 2))


def test_a_step_at_the_boundary_sees_a_full_window():
    """R keys and R + 1 values in full precision: quantising comes after the step's attention."""
    k, v = data(2 * R)
    target = layer()
    seen = feed(target, k, v, [R + 1] + [1] * (R - 1))[-1]
    assert torch.equal(dense(seen[0])[:, :, R:], k[:, :, R:])
    assert torch.equal(dense(seen[1])[:, :, R - 1 :], v[:, :, R - 1 :])
    assert target.keys.shape[2] == 0 and target.values.shape[2] == R


def test_views_survive_later_appends():
    k, v = data(6 * R)
    target = layer()
    target.update(k[:, :, : 2 * R], v[:, :, : 2 * R])
    views, copies = [], []
    for t in range(2 * R, 6 * R):
        seen = target.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        views.append(seen)
        copies.append([dense(s).clone() for s in seen])
    for seen, copied in zip(views, copies):
        assert all(torch.equal(dense(s), c) for s, c in zip(seen, copied))


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_no_group_changes_after_it_was_written(key_axis, value_axis):
    k, v = data(5 * R + 3)
    target = layer(key_axis=key_axis, value_axis=value_axis)
    feed(target, k[:, :, : 2 * R + 3], v[:, :, : 2 * R + 3], [2 * R + 3])
    lengths = target.key_store.length, target.value_store.length
    before = [[t.clone() for t in s.part(0, n)] for s, n in zip((target.key_store, target.value_store), lengths)]
    feed(target, k[:, :, 2 * R + 3 :], v[:, :, 2 * R + 3 :], [1] * (3 * R))
    after = [s.part(0, n) for s, n in zip((target.key_store, target.value_store), lengths)]
    for b, a in zip(before, after):
        assert all(torch.equal(x, y) for x, y in zip(b, a))


def test_quantized_cache_of_transformers_fails_the_same_test():
    pytest.importorskip("hqq")
    k, v = data(5 * R + 3, dim=64)
    cache = QuantizedCache("hqq", config(), nbits=2, q_group_size=64, residual_length=R, axis_key=1, axis_value=1)
    cache.update(k[:, :, : 2 * R], v[:, :, : 2 * R], 0)
    target = cache.layers[0]
    before = target._dequantize(target._quantized_keys)[:, :, : 2 * R].clone()
    for t in range(2 * R, 5 * R + 3):
        cache.update(k[:, :, t : t + 1], v[:, :, t : t + 1], 0)
    after = target._dequantize(target._quantized_keys)[:, :, : 2 * R]
    assert not torch.equal(before, after)


def test_decoded_keys_are_really_quantised():
    k, v = data(1 + 200, heads=1, batch=1)
    target = layer()
    feed(target, k, v, [1] * 201)
    keys, values = whole(target)
    n_k, n_v = target.key_store.length, target.value_store.length
    assert n_k == 201 - 201 % R and n_v == 201 - R
    assert ((keys - k)[:, :, :n_k].abs().amax((0, 1, 3)) > 0).all()
    assert ((values - v)[:, :, :n_v].abs().amax((0, 1, 3)) > 0).all()
    assert torch.equal(keys[:, :, n_k:], k[:, :, n_k:]) and torch.equal(values[:, :, n_v:], v[:, :, n_v:])


def test_quantised_part_is_what_the_function_gives():
    k, v = data(2 * R + 1)
    target = layer()
    feed(target, k, v, [2 * R + 1])
    keys, values = whole(target)
    assert torch.equal(keys[:, :, : 2 * R], quantize_groups(k[:, :, : 2 * R], 2, "channel", G).dequantize())
    assert torch.equal(values[:, :, : R + 1], quantize_groups(v[:, :, : R + 1], 2, "token", G).dequantize())


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 128, 160, 301])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_the_closed_form(bits, length, dtype):
    k, v = data(length, dtype=dtype, dim=64)
    cache = KIVICache(config(head_dim=64), k_bits=bits, v_bits=bits, group_size=32, residual_length=32)
    for i in range(2):
        for t in range(0, length, 40):  # several appends: the buffers have spare room
            cache.update(k[:, :, t : t + 40], v[:, :, t : t + 40], i)
    size = dtype.itemsize
    expected = 2 * 2 * 2 * cache_bytes(length, 64, bits=bits, residual_length=32, element_bytes=size)
    got = cache.memory_footprint()
    assert got["total"] == expected == got["packed"] + got["meta"] + got["residual"]
    assert got["dense16"] == 2 * 2 * 2 * 4 * length * 64
    assert got["ratio"] == got["dense16"] / expected
    held = 0
    for one in cache.layers:
        held += one.keys.untyped_storage().nbytes() + one.values.untyped_storage().nbytes()
        for store in (one.key_store, one.value_store):
            parts = [t for t in (store.codes, store.scale, store.zero) if t is not None]
            held += sum(t.untyped_storage().nbytes() for t in parts)
    assert got["allocated"] == held >= expected
    # Spare room: an eighth or R tokens of each store, and the one value that left the window last.
    spare = max(length / 8, 32) * 64 * (bits / 8 + 4 / 32) * 2 + 64 * size
    assert got["allocated"] <= expected + 2 * 2 * 2 * spare


def test_a_prompt_does_not_stay_alive_behind_the_window():
    k, v = data(10 * R + 3)
    target = layer()
    target.update(k, v)
    assert target.keys.untyped_storage().nbytes() == 2 * 2 * 3 * D * 4
    assert target.values.untyped_storage().nbytes() == 2 * 2 * R * D * 4


def test_ratio_at_4096_tokens():
    k, v = data(4096, batch=1, heads=1, dtype=torch.bfloat16, dim=64)
    cache = KIVICache(config(head_dim=64, num_hidden_layers=1), residual_length=32)
    cache.update(k, v, 0)
    footprint = cache.memory_footprint()
    assert footprint["total"] == cache_bytes(4096, 64, residual_length=32)
    assert 5.2 < footprint["ratio"] < 5.35
    assert KIVICache(config()).memory_footprint()["ratio"] == 1.0


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_crop_and_append_again_inside_the_window(key_axis, value_axis):
    k, v = data(3 * R)
    target = layer(key_axis=key_axis, value_axis=value_axis)
    length = 2 * R + 7
    feed(target, k[:, :, :length], v[:, :, :length], [length])
    expected = copy.deepcopy(state(target))
    target.crop(-5)
    assert target.get_seq_length() == length - 5
    feed(target, k[:, :, length - 5 : length], v[:, :, length - 5 : length], [5])
    assert all(torch.equal(a, b) for a, b in zip(state(target), expected, strict=True))
    target.crop(0)
    assert all(torch.equal(a, b) for a, b in zip(state(target), expected, strict=True))


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
@pytest.mark.parametrize("removed", [1, 7, R, R + 1, 2 * R, 2 * R + 7, 2 * R + 8, 3 * R + 7])
def test_crop_into_quantised_tokens_keeps_the_rest(key_axis, value_axis, removed):
    k, v = data(4 * R)
    target = layer(key_axis=key_axis, value_axis=value_axis)
    length = 3 * R + 7
    feed(target, k[:, :, :length], v[:, :, :length], [length])
    before = whole(target)
    target.crop(-removed)
    left = length - removed
    assert target.get_seq_length() == left
    for now, then in zip(whole(target), before):
        torch.testing.assert_close(now, then[:, :, :left], rtol=0, atol=0)
    # It goes on as usual, and the counts come back to the formula.
    for t in range(left, 4 * R):
        target.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
    assert target.get_seq_length() == 4 * R
    assert target.keys.shape[2] == (0 if key_axis == "channel" else R)
    assert target.values.shape[2] == (0 if value_axis == "channel" else R)


def test_recording_the_past_defers_quantising_to_crop():
    k, v = data(4 * R)
    plain, speculative = layer(), layer()
    for one in (plain, speculative):
        feed(one, k[:, :, :R], v[:, :, :R], [R])
    speculative.activate_past_recording()
    junk, _ = data(4, seed=9)
    for t in range(R, 4 * R, 3):
        chunk = k[:, :, t : t + 3], v[:, :, t : t + 3]
        speculative.update(torch.cat([chunk[0], junk], 2), torch.cat([chunk[1], junk], 2))
        speculative.crop(-4)
        plain.update(*chunk)
        assert_same_state(plain, speculative)
    speculative.update(junk, junk)
    length = speculative.keys.shape[2]
    assert length >= 4  # nothing was quantised yet
    speculative.crop(0)
    assert speculative.value_store.length == speculative.get_seq_length() - R


@pytest.mark.parametrize("tokens", [5, 2 * R + 5])
def test_batch_operations_equal_slicing(tokens):
    k, v = data(tokens + 2 * R, batch=3)
    index = torch.tensor([2, 0, 0])
    operations = {
        "reorder_cache": (lambda c: c.reorder_cache(index), index),
        "batch_select_indices": (lambda c: c.batch_select_indices(torch.tensor([2, 1])), torch.tensor([2, 1])),
        "batch_repeat_interleave": (lambda c: c.batch_repeat_interleave(2), torch.arange(3).repeat_interleave(2)),
    }
    for change, rows in operations.values():
        cache, exact = KIVICache(config(), group_size=G, residual_length=R), DynamicCache(config=config())
        for c in (cache, exact):
            for i in range(2):
                c.update(k[:, :, :tokens], v[:, :, :tokens], i)
            change(c)
        expected = layer()
        expected.update(k[rows][:, :, :tokens], v[rows][:, :, :tokens])
        assert_same_state(cache.layers[1], expected)
        assert torch.equal(exact.layers[1].keys, k[rows][:, :, :tokens])
        for t in range(tokens, tokens + 2 * R):  # and after flushes as well
            new = k[rows][:, :, t : t + 1], v[rows][:, :, t : t + 1]
            cache.update(*new, 1)
            expected.update(*new)
        assert_same_state(cache.layers[1], expected)


def test_reset_offload_and_prefetch():
    k, v = data(2 * R + 3)
    target = layer()
    target.offload()
    target.update(k, v)
    expected = copy.deepcopy(target)
    target.offload()
    target.prefetch()
    assert_same_state(target, expected)
    target.reset()
    assert target.get_seq_length() == 0 and target.memory()["allocated"] == 0
    target.update(k, v)
    assert_same_state(target, expected)
    assert target.get_max_length() == -1 and target.get_mask_sizes(4) == (2 * R + 7, 0)
    assert not target.is_compileable and target.is_croppable and not target.is_sliding


def test_early_initialization():
    cache = KIVICache(config(), group_size=G, residual_length=R)
    cache.early_initialization(2, 2, D, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0
    k, v = data(R)
    assert cache.update(k, v, 0)[0] is k


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    k, v = data(2 * R + 3, dtype=dtype)
    target = layer(k_bits=8, v_bits=8)
    target.update(k[:, :, :-1], v[:, :, :-1])
    seen = target.update(k[:, :, -1:], v[:, :, -1:])
    assert all(s.dtype == dtype and dense(s).dtype == dtype for s in seen)
    assert (dense(seen[0]).float() - k.float()).abs().max() < 0.05


def test_non_contiguous_input():
    k, v = data(2 * R + 3)
    strided = k.transpose(1, 2).contiguous().transpose(1, 2), v.transpose(1, 2).contiguous().transpose(1, 2)
    a, b = layer(), layer()
    a.update(k, v)
    b.update(*strided)
    assert_same_state(a, b)


def padded(lengths, tokens):
    return (torch.arange(tokens) >= tokens - torch.tensor(lengths)[:, None]).long()


def test_padding_is_left_out_of_the_groups():
    k, v = data(2 * R)
    mask = padded([2 * R, R + 3], 2 * R)
    spoiled = torch.where(mask[:, None, :, None].bool(), k, torch.full_like(k, 50.0))
    with_mask, without = (
        KIVICache(config(), group_size=G, residual_length=R),
        KIVICache(config(), group_size=G, residual_length=R),
    )
    with_mask.set_padding(mask)
    for c in (with_mask, without):
        c.update(spoiled, v, 0)
    real = mask[:, None, :, None].bool()
    errors = [((whole(c.layers[0])[0] - k) * real).abs().max() for c in (with_mask, without)]
    assert errors[0] < 1.5 and errors[1] > 4
    # The row without padding is as it would be alone, and the other as if padding repeated its first real token.
    assert torch.equal(whole(with_mask.layers[0])[0][:1], whole(without.layers[0])[0][:1])
    first = 2 * R - (R + 3)
    repeated = k.clone()
    repeated[1, :, :first] = k[1, :, first : first + 1]
    expected = layer()
    expected.update(repeated, v)
    assert torch.equal(whole(with_mask.layers[0])[0][:, :, first:], whole(expected)[0][:, :, first:])
    # A block that is all padding is left as it is, the state is the same in chunks, and a reorder takes rows along.
    chunks = KIVICache(config(), group_size=G, residual_length=R)
    chunks.set_padding(mask)
    for t in range(0, 2 * R, 5):
        chunks.update(spoiled[:, :, t : t + 5], v[:, :, t : t + 5], 0)
    assert_same_state(chunks.layers[0], with_mask.layers[0])
    chunks.reorder_cache(torch.tensor([1, 0]))
    assert chunks.layers[0].first_real.tolist() == [first, 0]


def test_padding_for_an_expanded_batch():
    k, v = data(2 * R, batch=4)
    cache = KIVICache(config(), group_size=G, residual_length=R)
    cache.set_padding(padded([2 * R, 5], 2 * R))
    cache.update(k, v, 0)
    assert cache.layers[0].first_real.tolist() == [0, 0, 2 * R - 5, 2 * R - 5]
    other = KIVICache(config(), group_size=G, residual_length=R)
    other.set_padding(padded([1, 2, 3], 4))
    with pytest.raises(ValueError, match="mask of 3 rows, but keys of a batch of 4"):
        other.update(k, v, 0)


def test_padding_errors():
    cache = KIVICache(config(), group_size=G, residual_length=R)
    with pytest.raises(ValueError, match="shape"):
        cache.set_padding(torch.ones(3))
    with pytest.raises(ValueError, match="left-padded"):
        cache.set_padding(torch.tensor([[1, 1, 0]]))
    with pytest.raises(ValueError, match="left-padded"):
        cache.set_padding(torch.tensor([[0, 0, 0]]))
    cache.update(*data(3), 0)
    with pytest.raises(ValueError, match="holds 3 tokens"):
        cache.set_padding(torch.tensor([[1, 1, 1]]))


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_simulation_sees_what_packing_gives(key_axis, value_axis):
    k, v = data(3 * R + 5)
    options = {"key_axis": key_axis, "value_axis": value_axis}
    packed, simulated = layer(**options), layer(simulate=True, **options)
    for a, b in zip(*(feed(x, k, v, [R + 5] + [1] * (2 * R)) for x in (packed, simulated))):
        assert all(not isinstance(s, PackedView) for s in b)
        assert all(torch.equal(dense(x), y) for x, y in zip(a, b))
    for one in (packed, simulated):
        one.crop(-R - 3)
    assert all(torch.equal(a, b) for a, b in zip(whole(packed), whole(simulated)))


@pytest.mark.parametrize("pad", ["edge", "zero"])
@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_simulation_without_a_window_quantises_every_token(pad, bits, key_axis, value_axis):
    k, v = data(2 * R + 3)
    target = layer(
        k_bits=bits, v_bits=bits, residual_length=0, simulate=True, pad=pad, key_axis=key_axis, value_axis=value_axis
    )
    feed(target, k, v, [R, 3, 1, R - 1])
    new_k, new_v = data(4, seed=3)
    seen = target.update(new_k, new_v)
    for s, x, new, axis in zip(seen, (k, v), (new_k, new_v), (key_axis, value_axis)):
        expected = quantize_groups(x, bits, axis, G, pad=pad).dequantize()
        assert torch.equal(s, torch.cat([expected, new], 2))
    target.reorder_cache(torch.tensor([1, 0]))
    assert target.memory()["meta"] == 0 and target.memory()["packed"] > 0


def test_save_and_load(tmp_path):
    k, v = data(2 * R + 3)
    for options in ({}, {"simulate": True, "k_bits": 3}, {"skip_layers": [0]}):
        cache = KIVICache(config(), group_size=G, residual_length=R, **options)
        cache.set_padding(padded([2 * R + 2, 5], 2 * R + 2))
        for i in range(2):
            cache.update(k[:, :, :-1], v[:, :, :-1], i)
        cache.save(tmp_path / "cache")
        loaded = KIVICache.load(tmp_path / "cache", config())
        assert loaded.options == cache.options and loaded.skip_layers == cache.skip_layers
        assert loaded.get_seq_length() == 2 * R + 2
        for i in range(2):
            a, b = (c.update(k[:, :, -1:], v[:, :, -1:], i) for c in (cache, loaded))
            assert all(torch.equal(dense(x), dense(y)) for x, y in zip(a, b))
    with pytest.raises(ValueError, match="2 layers, but config is of a model with 3"):
        KIVICache.load(tmp_path / "cache", config(num_hidden_layers=3))
    empty = KIVICache(config(), group_size=G, residual_length=R)
    empty.save(tmp_path / "empty")
    assert KIVICache.load(tmp_path / "empty", config()).get_seq_length() == 0
    with pytest.raises(FileNotFoundError):
        KIVICache.load(tmp_path / "nothing", config())


def test_other_layers_keep_their_class(tmp_path):
    mixed = MistralConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=D,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
    )
    with pytest.warns(UserWarning, match="sliding_attention"):
        cache = KIVICache(mixed, group_size=G, residual_length=R)
    assert [type(x).__name__ for x in cache.layers] == ["DynamicSlidingWindowLayer", "KIVILayer"]
    k, v = data(2 * R)
    for i in range(2):
        cache.update(k, v, i)
    assert cache.get_seq_length() == cache.get_seq_length(1) == 2 * R
    footprint = cache.memory_footprint()
    assert footprint["other"] == 2 * 2 * 2 * 7 * D * 4
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        cache.save(tmp_path)
    linear = Qwen3NextConfig(
        num_hidden_layers=2, head_dim=32, layer_types=["linear_attention", "full_attention"], hidden_size=64
    )
    with pytest.warns(UserWarning, match="linear_attention"):
        cache = KIVICache(linear)
    assert [type(x).__name__ for x in cache.layers] == ["LinearAttentionLayer", "KIVILayer"]
    assert cache.get_seq_length() == 0 == cache.get_seq_length(0)


def test_skipped_layers_stay_exact():
    cache = KIVICache(config(), group_size=G, residual_length=R, skip_layers=[0])
    k, v = data(2 * R)
    for i in range(2):
        cache.update(k, v, i)
    assert type(cache.layers[0]).__name__ == "DynamicLayer" and torch.equal(cache.layers[0].keys, k)
    assert cache.memory_footprint()["other"] == k.nbytes + v.nbytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_bits": 5}, "k_bits must be one of"),
        ({"v_bits": 3}, "v_bits=3 is not packed.*simulate"),
        ({"residual_length": 20}, "20 is none of 8"),
        ({"residual_length": 0}, "residual_length must be at least 1, not 0"),
        ({"key_axis": "head"}, "k_axis must be"),
        ({"meta_dtype": torch.int8}, "meta_dtype"),
        ({"pad": "wrap"}, "pad"),
        ({"skip_layers": [7]}, r"skip_layers must lie in 0 .. 1, not \(7,\)"),
    ],
)
def test_bad_options(changes, message):
    with pytest.raises(ValueError, match=message):
        KIVICache(config(), **{"group_size": G, "residual_length": R} | changes)


def test_models_that_cannot_work_are_named():
    with pytest.raises(ValueError, match=r"'t5', an encoder-decoder"):
        KIVICache(T5Config())
    with pytest.raises(ValueError, match=r"'llama'.*indexed_attention"):
        indexed = config()
        indexed.layer_types = ["full_attention", "indexed_attention"]
        KIVICache(indexed)
    with pytest.raises(ValueError, match="nothing to quantise"):
        windowed = config()
        windowed.layer_types = ["sliding_attention"] * 2
        windowed.sliding_window = 8
        KIVICache(windowed)
    with pytest.raises(ValueError, match="'flex_attention' cannot work"):
        flex = config()
        flex._attn_implementation_internal = "flex_attention"
        KIVICache(flex)
    cache = KIVICache(config(), group_size=G, residual_length=R)
    cache.decoder_config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="set_attn_implementation"):
        cache.update(*data(3), 0)


def test_bad_calls():
    target = layer()
    target.update(*data(R))
    with pytest.raises(ValueError, match=r"\[2, 2\], but keys of shape \[3, 2, 1, 16\]"):
        target.update(*data(1, batch=3))
    with pytest.raises(ValueError, match="0 or negative"):
        target.crop(3)
    with pytest.raises(ValueError, match=f"cannot remove {R + 1} tokens of {R}"):
        target.crop(-R - 1)
    with pytest.raises(ValueError, match="shape"):
        layer().update(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match=r"values with axis 'token'.*20 is none of 8"):
        layer().update(*data(4, dim=20))
    bad = data(R)
    bad[0][0, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="finite"):
        layer().update(*bad)


def test_the_cost_of_a_flush_does_not_grow(monkeypatch):
    """A step quantises one value, every R-th step one block of keys: counted, not timed."""
    import assay.serving.kivi.store as store

    counted = []
    real = store.quantize_groups
    monkeypatch.setattr(store, "quantize_groups", lambda x, *a, **k: counted.append(x.shape[2]) or real(x, *a, **k))
    for length in (4 * R, 64 * R):
        k, v = data(length + 2 * R, batch=1, heads=1)
        target = layer()
        target.update(k[:, :, :length], v[:, :, :length])
        counted.clear()
        for t in range(length, length + 2 * R):
            target.update(k[:, :, t : t + 1], v[:, :, t : t + 1])
        assert sum(counted) == 4 * R and max(counted) == R
