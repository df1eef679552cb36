"""The cache by itself: what it keeps, what it merges, and what it refuses, against loops over single numbers."""

import copy
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, MistralConfig, T5Config

from assay.serving.cam import CaM, EvictionCache, eviction_attention_forward
from assay.serving.cam.merge import uniform

D = 8
POLICIES = {
    "streaming": {"n_sink": 2},
    "h2o": {"n_recent": 4},
    "scissorhands": {"n_recent": 3},
    "tova": {},
    "h2o with sinks": {"n_recent": 4, "n_sink": 2},
}
MERGES = {
    "none": None,
    "bernoulli": CaM(m=3),
    "bernoulli_current": CaM(m=3, mask="bernoulli_current"),
    "threshold": CaM(m=3, mask="threshold"),
    "max": CaM(m=None, mask="max"),
    "all": CaM(m=3, mask="all"),
    "current": CaM(m=3, statistic="current"),
    "recent": CaM(m=2, targets="recent", clamp=(0.1, 0.9)),
    "no average": CaM(m=1),
    "clamped threshold": CaM(m=3, mask="threshold", clamp=(0.2, 0.7)),
}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def config(**changes):
    arguments = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": D,
        "vocab_size": 64,
    }
    return LlamaConfig(**arguments | changes)


def make(policy="streaming", budget=8, **kwargs):
    return EvictionCache(config(), policy.split()[0], budget, **kwargs)


def data(tokens, batch=2, kv_heads=2, group=2, seed=0, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(batch, kv_heads * group, tokens, D, generator=g)
    k, v = (torch.randn(batch, kv_heads, tokens, D, generator=g) for _ in range(2))
    return tuple(x.to(device, dtype) for x in (q, k, v))


def feed(cache, q, k, v, sizes, mask=None):
    """Run attention through the cache in calls of these sizes; outputs ``[batch, tokens, heads, dim]``."""
    module, out, start = types.SimpleNamespace(is_causal=True), [], 0
    for n in sizes:
        part = slice(start, start + n)
        keys, values = cache.update(k[:, :, part], v[:, :, part], 0)
        columns = None if mask is None else mask[:, :, part, : start + n]
        out.append(eviction_attention_forward(module, q[:, :, part], keys, values, columns)[0])
        start += n
    assert start == k.shape[2]
    return torch.cat(out, 1)


def reference(q, k, v, sizes, policy, budget, cam, n_sink, n_recent, seed=0, prefill_scores="full"):
    """One row and key-value head in NumPy: ``q [group, tokens, D]``. Kept positions, values and outputs."""
    q, k, v = (x.double().numpy() for x in (q, k, v))
    m = None if cam is None else cam.m or n_recent
    pos, val, acc, lows, out = [], [], [], [], []
    for n in sizes:
        first = len(out)
        pos += range(first, first + n)
        val += [v[p].copy() for p in range(first, first + n)]
        acc += [0.0] * n
        lows += [[] for _ in range(n)]
        for p in range(first, first + n):
            visible = [s for s in range(len(pos)) if pos[s] <= p]
            logits = q[:, p] @ np.stack([k[pos[s]] for s in visible]).T / np.sqrt(D)
            w = np.exp(logits - logits.max(-1, keepdims=True))
            w /= w.sum(-1, keepdims=True)
            out.append(w @ np.stack([val[s] for s in visible]))
            a = w.mean(0)
            counts = n == 1 or prefill_scores == "full" or (prefill_scores == "last" and p == first + n - 1)
            for s, weight in zip(visible, a):
                if counts:
                    acc[s] += weight
                    lows[s].append(weight < 1 / len(visible))
            current = np.zeros(len(pos))
            current[visible] = a
        seen = len(out)
        if len(pos) <= budget:
            continue
        left = budget - budget // 2 if policy == "scissorhands" else budget
        free = [s for s in range(len(pos)) if pos[s] >= n_sink and pos[s] < seen - n_recent]
        rank = {
            "streaming": pos,
            "h2o": acc,
            "tova": current,
            "scissorhands": [-sum(x[-400:]) for x in lows],
        }[policy]
        victims = sorted((rank[s], pos[s], s) for s in free)[: len(pos) - left]
        victims = [s for _, _, s in victims]
        gone = set()
        for i in sorted(victims, key=pos.__getitem__):
            alive = [s for s in range(len(pos)) if s not in gone and s != i]
            targets = [s for s in alive if pos[s] > pos[i]]
            if cam is not None and (n == 1 or cam.merge_prefill):
                if cam.targets == "recent":
                    targets = [s for s in targets if pos[s] >= seen - n_recent]
                targets = targets[:m]
                stat = {"cumulative": acc, "current": current, None: current}[cam.uses]
                over = {
                    "bernoulli": targets,
                    "bernoulli_current": [s for s in alive if pos[s] >= seen - n_recent],
                }.get(cam.mask, alive)
                if targets:
                    ref = (max if cam.mask == "max" else np.mean)([stat[s] for s in over])
                    p = min(max(stat[i] / ref if ref > 0 else 0, cam.clamp[0]), cam.clamp[1])
                    if cam.mask == "threshold":
                        p = cam.clamp[int(stat[i] > ref)]
                    if cam.mask == "all":
                        p = 1.0
                    if (yield pos[i], p):
                        for s in targets:
                            val[s] = val[s] + val[i] / len(targets)
            gone.add(i)
        keep = [s for s in range(len(pos)) if s not in gone]
        pos, val, acc, lows = ([x[s] for s in keep] for x in (pos, val, acc, lows))
    return pos, val, acc, np.stack(out, 0)


def run_reference(row, head, seed, *args, **kwargs):
    """Drive :func:`reference` with the random numbers of the part."""
    steps, answer = reference(*args, **kwargs), None
    try:
        while True:
            position, p = steps.send(answer)
            u = uniform(seed, 0, torch.tensor([row]), 2, torch.tensor([[position]]))[0, head]
            answer = float(u) < p
    except StopIteration as stop:
        return stop.value


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [[1] * 40, [20] + [1] * 20, [5, 9, 1, 1, 7, *[1] * 17]])
def test_against_a_loop(policy, merge, sizes):
    """Kept tokens, merged values, summed scores and outputs, step by step in NumPy, for each row and head."""
    options, cam = POLICIES[policy], MERGES[merge]
    if merge == "max" and policy == "tova":
        options = {"n_recent": 3}
    if merge in ("bernoulli_current", "recent") and policy == "tova":
        options = {"n_recent": 2}
    cache = make(policy, merge=cam, seed=5, **options)
    q, k, v = data(40)
    out = feed(cache, q, k, v, sizes)
    layer = cache.layers[0]
    n_recent = {"streaming": 6, "scissorhands": 3, "h2o": 4, "tova": options.get("n_recent", 0)}[policy.split()[0]]
    for row in range(2):
        for head in range(2):
            pos, val, acc, expected = run_reference(
                row, head, 5, q[row, 2 * head : 2 * head + 2], k[row, head], v[row, head], sizes,
                policy.split()[0], 8, cam, options.get("n_sink", 0), n_recent,
            )  # fmt: skip
            held = layer.positions[row, head, : layer.used]
            slots = held.argsort()[(held < 0).sum() :]
            assert held[slots].tolist() == pos
            np.testing.assert_allclose(layer.values[row, head, slots], np.stack(val), rtol=0, atol=2e-5)
            assert torch.equal(layer.keys[row, head, slots], k[row, head, pos])  # bit for bit
            if layer.scores is not None:
                np.testing.assert_allclose(layer.scores[row, head, slots], acc, rtol=0, atol=2e-5)
            np.testing.assert_allclose(out[row, :, 2 * head : 2 * head + 2], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("prefill_scores", ["full", "last", "none"])
@pytest.mark.parametrize("policy", ["h2o", "scissorhands", "tova"])
def test_scores_of_a_prompt(policy, prefill_scores):
    sizes, options = [20, *[1] * 10, 6, *[1] * 4], POLICIES[policy]
    cache = make(policy, merge=CaM(m=2, merge_prefill=True), prefill_scores=prefill_scores, **options)
    q, k, v = data(40)
    feed(cache, q, k, v, sizes)
    layer = cache.layers[0]
    for row in range(2):
        pos, val, acc, _ = run_reference(
            row, 1, 0, q[row, 2:], k[row, 1], v[row, 1], sizes, policy, 8, CaM(m=2, merge_prefill=True), 0,
            options.get("n_recent", 0), prefill_scores=prefill_scores,
        )  # fmt: skip
        held = layer.positions[row, 1, : layer.used]
        slots = held.argsort()[(held < 0).sum() :]
        assert held[slots].tolist() == pos
        np.testing.assert_allclose(layer.values[row, 1, slots], np.stack(val), rtol=0, atol=2e-5)
        np.testing.assert_allclose(layer.scores[row, 1, slots], acc, rtol=0, atol=2e-5)


def test_streaming_keeps_the_first_and_the_last():
    cache = make(n_sink=3)
    q, k, v = data(30)
    for t in range(30):
        part = slice(t, t + 1)
        feed(cache, q[:, :, part], k[:, :, part], v[:, :, part], [1])
        held = cache.positions(0)[0, 0]
        expected = list(range(min(3, t + 1))) + list(range(max(3, t + 1 - 5), t + 1))
        assert held[held >= 0].tolist() == expected
        assert cache.get_seq_length() == t + 1 and cache.get_mask_sizes(4, 0) == (t + 5, 0)


def test_memory_stays_constant():
    cache = make("h2o", merge=CaM(m=4))
    q, k, v = data(60)
    feed(cache, q[:, :, :20], k[:, :, :20], v[:, :, :20], [20])
    layer, sizes = cache.layers[0], set()
    for t in range(20, 60):
        part = slice(t, t + 1)
        feed(cache, q[:, :, part], k[:, :, part], v[:, :, part], [1])
        sizes.add(tuple(tuple(getattr(layer, n).shape) for n in ("keys", "values", "positions", "scores")))
        pointers = layer.keys.data_ptr(), layer.values.data_ptr()
    assert sizes == {((2, 2, 9, D), (2, 2, 9, D), (2, 2, 9), (2, 2, 9))}
    feed(cache, *(x[:, :, :1] for x in (q, k, v)), [1])
    assert pointers == (layer.keys.data_ptr(), layer.values.data_ptr())  # written in place
    memory = cache.memory_footprint()
    assert memory["kv"] == 2 * 2 * 9 * D * 2 * 4 and memory["dense"] == 2 * 2 * 61 * D * 2 * 4
    assert memory["book"] == 2 * 2 * 9 * (8 + 4 + 4) + 16 and memory["allocated"] == memory["total"]


def test_values_are_conserved_and_keys_untouched():
    """With M = 1 the sum of the values held is the sum of all that came."""
    cache = make(merge=CaM(m=3, mask="all"), n_sink=2)
    q, k, v = data(25)
    feed(cache, q, k, v, [1] * 25)
    layer = cache.layers[0]
    held = layer.positions[:, :, : layer.used] >= 0
    torch.testing.assert_close((layer.values[:, :, : layer.used] * held[..., None]).sum(2), v.sum(2), rtol=0, atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_mask_that_never_fires_is_the_policy_alone(policy):
    q, k, v = data(40)
    kwargs = POLICIES[policy]
    plain, never = make(policy, **kwargs), make(policy, merge=CaM(m=3, clamp=(0, 0)), **kwargs)
    assert torch.equal(feed(plain, q, k, v, [12] + [1] * 28), feed(never, q, k, v, [12] + [1] * 28))
    for name in ("keys", "values", "positions"):
        assert torch.equal(getattr(plain.layers[0], name), getattr(never.layers[0], name))


def test_merging_changes_outputs_but_not_the_keys_that_streaming_keeps():
    q, k, v = data(40)
    plain, merged = make(), make(merge=CaM(m=3))
    assert not torch.equal(feed(plain, q, k, v, [1] * 40), feed(merged, q, k, v, [1] * 40))
    assert torch.equal(plain.layers[0].keys, merged.layers[0].keys)
    assert torch.equal(plain.positions(0), merged.positions(0))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(policy, dtype):
    """Scores stay in float32; float64 agrees with float32, half precision runs and stays in its dtype."""
    q, k, v = data(40, dtype=dtype)
    cache = make(policy, merge=CaM(m=3), **POLICIES[policy])
    out = feed(cache, q, k, v, [10] + [1] * 30)
    assert out.dtype == dtype and cache.layers[0].values.dtype == dtype and out.isfinite().all()
    assert cache.layers[0].scores.dtype == torch.float32
    if dtype == torch.float64:
        single = make(policy, merge=CaM(m=3), **POLICIES[policy])
        torch.testing.assert_close(feed(single, *data(40), [10] + [1] * 30).double(), out, rtol=0, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_devices_and_offloading(device):
    q, k, v = data(40, device=device)
    caches = [make("scissorhands", merge=CaM(m=3), n_recent=3) for _ in range(2)]
    start = (x[:, :, :30] for x in (q, k, v))
    feed(caches[0], *start, [10] + [1] * 20)
    feed(caches[1], *(x[:, :, :30] for x in (q, k, v)), [10] + [1] * 20)
    caches[1].layers[0].offload()
    assert caches[1].layers[0].low.device.type == "cpu"
    caches[1].layers[0].prefetch()
    rest = [x[:, :, 30:] for x in (q, k, v)]
    assert torch.equal(feed(caches[0], *rest, [1] * 10), feed(caches[1], *rest, [1] * 10))


def test_non_contiguous_input_and_no_aliasing():
    """What the user holds does not change when values merge."""
    q, k, v = data(40)
    wide = [torch.stack([x, x], -1).reshape(*x.shape[:3], 2 * D)[..., ::2] for x in (k, v)]
    before = v.clone()
    a, b = make(merge=CaM(m=3, mask="all")), make(merge=CaM(m=3, mask="all"))
    out = feed(a, q, k, v, [8] + [1] * 32)
    assert torch.equal(out, feed(b, q, *wide, [8] + [1] * 32))
    assert torch.equal(v, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_do_not_depend_on_their_batch(policy):
    """Row b gives what it gives alone, with padding or without."""
    q, k, v = data(40, batch=3)
    sizes = [12] + [1] * 28
    options = {"merge": CaM(m=3), "seed": 3, **POLICIES[policy]}
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].repeat(3, 1, 1, 1)
    pads = (0, 3, 9)
    for row, pad in enumerate(pads):
        mask[row, :, :, :pad] = False
    for padded in (False, True):
        out = feed(make(policy, **options), q, k, v, sizes, mask if padded else None)
        for row, pad in enumerate(pads if padded else (0, 0, 0)):
            alone = [x[row : row + 1, :, pad:] for x in (q, k, v)]
            single = feed(make(policy, first_row=row, **options), *alone, [12 - pad] + [1] * 28)
            torch.testing.assert_close(out[row, pad:], single[0], rtol=0, atol=1e-5)
    different = feed(make(policy, **options | {"seed": 4}), q, k, v, sizes)
    assert not torch.allclose(different, feed(make(policy, **options), q, k, v, sizes))


def test_additive_masks_are_understood():
    q, k, v = data(30)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :4] = False
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    outs = [feed(make("h2o", merge=CaM(m=3)), q, k, v, [10] + [1] * 20, m) for m in (mask, additive)]
    torch.testing.assert_close(outs[0][0], outs[1][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(outs[0][1, 4:], outs[1][1, 4:], rtol=0, atol=1e-6)


def test_weights_in_chunks_of_queries(monkeypatch):
    import assay.serving.cam.attention as attention

    q, k, v = data(60)
    for policy, options in POLICIES.items():
        monkeypatch.setattr(attention, "WEIGHTS", 2**26)
        whole = make(policy, merge=CaM(m=3), **options)
        out = feed(whole, q, k, v, [50] + [1] * 10)
        monkeypatch.setattr(attention, "WEIGHTS", 2 * 4 * 50 * 7)
        parts = make(policy, merge=CaM(m=3), **options)
        torch.testing.assert_close(feed(parts, q, k, v, [50] + [1] * 10), out, rtol=0, atol=1e-5)
        assert torch.equal(whole.positions(0), parts.positions(0))


def test_low_counts_forget_after_400_queries():
    q, k, v = data(900, batch=1, seed=2)
    cache = make("scissorhands", budget=1000, n_recent=3)
    feed(cache, q, k, v, [450] + [1] * 450)
    layer = cache.layers[0]
    weights = (q.view(1, 2, 2, 900, D) @ k.unsqueeze(2).transpose(-1, -2) / D**0.5).masked_fill(
        ~torch.ones(900, 900, dtype=torch.bool).tril(), -torch.inf
    )
    mean = weights.softmax(-1).mean(2)
    below = (mean < 1 / torch.arange(1, 901)[:, None]) & torch.ones(900, 900, dtype=torch.bool).tril()
    counted = torch.tensor([bin(x).count("1") for x in range(256)])[layer.low[:, :, :900].long()].sum(-1)
    assert (counted - below[:, :, 500:].sum(2)).abs().max() <= 1  # rounding may flip one comparison


def test_ratios_are_of_the_prompt():
    q, k, v = data(45)
    cache = make(budget=0.5, n_sink=0.1)
    feed(cache, q, k, v, [40] + [1] * 5)
    layer = cache.layers[0]
    assert (layer.budget, layer.n_sink, layer.n_recent) == (20, 4, 16)
    assert cache.positions(0)[0, 0].tolist() == [-1, 0, 1, 2, 3, *range(29, 45)]


def test_a_policy_of_ones_own():
    """A function that ranks; the opposite of streaming keeps the oldest."""
    q, k, v = data(30)
    seen = []

    def newest_first(state):
        seen.append(state)
        return -state.positions

    cache = EvictionCache(config(), newest_first, 8, n_recent=1)
    feed(cache, q, k, v, [1] * 30)
    assert cache.positions(0)[0, 0].tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 29]
    assert seen[0].scores.shape == seen[0].current.shape == seen[0].positions.shape == (2, 2, 9)
    for wrong in (lambda s: s.positions[..., :2], lambda s: s.current * torch.nan, lambda s: None):
        with pytest.raises(ValueError, match="policy"):
            feed(EvictionCache(config(), wrong, 8), q, k, v, [1] * 30)


def test_beams_and_batches():
    q, k, v = data(40, batch=3)
    options = {"merge": CaM(m=3), "n_recent": 4}
    cache = make("h2o", **options)
    feed(cache, *(x[:, :, :20] for x in (q, k, v)), [10] + [1] * 10)
    before = copy.deepcopy(cache)
    rest = [x[:, :, 20:] for x in (q, k, v)]
    chosen = torch.tensor([2, 0])
    some = copy.deepcopy(before)
    some.batch_select_indices(chosen)
    whole = feed(cache, *rest, [1] * 20)
    assert torch.equal(feed(some, *(x[chosen] for x in rest), [1] * 20), whole[chosen])
    beams = copy.deepcopy(before)
    beams.reorder_cache(torch.tensor([1, 1, 0]))
    assert beams.layers[0].rows.tolist() == [0, 1, 2]
    again = feed(beams, *(x[[1, 1, 0]] for x in rest), [1] * 20)
    assert not torch.equal(again[0], again[1])  # two beams of the same text draw their own masks
    torch.testing.assert_close(again[1], whole[1], rtol=0, atol=0)
    twice = copy.deepcopy(before)
    twice.batch_repeat_interleave(2)
    assert twice.layers[0].rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(twice.layers[0].values[::2], before.layers[0].values)


def test_saved_and_loaded(tmp_path):
    q, k, v = data(40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    mask[1, :, :, :5] = False
    for policy, options in POLICIES.items():
        cache = make(policy, merge=CaM(m=3, clamp=(0.1, 0.9)), seed=7, **options)
        feed(cache, *(x[:, :, :25] for x in (q, k, v)), [10] + [1] * 15, mask[..., :25, :25])
        cache.save(tmp_path / policy)
        loaded = EvictionCache.load(tmp_path / policy, config())
        module = types.SimpleNamespace(is_causal=True)
        for t in range(25, 40):
            part = slice(t, t + 1)
            outs = [
                eviction_attention_forward(
                    module, q[:, :, part], *c.update(k[:, :, part], v[:, :, part], 0), mask[:, :, part, : t + 1]
                )[0]
                for c in (cache, loaded)
            ]
            assert torch.equal(*outs)
    with pytest.raises(ValueError, match="1 layers, but config is of a model with 3"):
        EvictionCache.load(tmp_path / "tova", config(num_hidden_layers=3))
    with pytest.raises(ValueError, match="policy is a function"):
        EvictionCache(config(), lambda s: s.positions, 8).save(tmp_path / "x")
    empty = EvictionCache(config(), "h2o", 0.5)
    empty.save(tmp_path / "empty")
    assert EvictionCache.load(tmp_path / "empty", config()).get_seq_length() == 0


def test_crop():
    q, k, v = data(20)
    cache = make("streaming", 30)
    feed(cache, q, k, v, [20])
    cache.crop(0)
    cache.crop(-5)
    assert cache.get_seq_length() == 15 and cache.positions(0)[0, 0].tolist() == list(range(15))
    with pytest.raises(ValueError, match="cannot remove 16 tokens of 15"):
        cache.crop(-16)
    with pytest.raises(ValueError, match="0 or negative"):
        cache.crop(3)
    full = make()
    feed(full, q, k, v, [20])
    with pytest.raises(RuntimeError, match="tokens were evicted"):
        full.crop(-1)
    scored = make("h2o", 30)
    feed(scored, q, k, v, [20])
    with pytest.raises(RuntimeError, match="scores of this cache"):
        scored.crop(-1)
    assert not full.is_croppable and not full.is_compileable
    with pytest.raises(ValueError, match=r"assisted generation.*'streaming'"):
        full.activate_past_recording()


def test_reset():
    q, k, v = data(30)
    cache = make("h2o", merge=CaM(m=3))
    first = feed(cache, q, k, v, [10] + [1] * 20)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.memory_footprint()["total"] == 0
    assert torch.equal(feed(cache, q, k, v, [10] + [1] * 20), first)


def test_attention_that_does_not_report():
    """Two updates without the weights in between: silent non-eviction is the worst failure."""
    _, k, v = data(2)
    cache = make()
    cache.update(k[:, :, :1], v[:, :, :1], 0)
    with pytest.raises(RuntimeError, match=r"model.set_attn_implementation\('evict'\)"):
        cache.update(k[:, :, 1:], v[:, :, 1:], 0)
    other = config()
    other._attn_implementation = "sdpa"
    with pytest.raises(RuntimeError, match="'sdpa' does not report its weights"):
        EvictionCache(other, budget=8).update(k, v, 0)
    other._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' has no weights"):
        EvictionCache(other, budget=8)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"budget": None}, ValueError, "budget is missing"),
        ({"policy": "lru"}, ValueError, "policy must be one of .* not 'lru'"),
        ({"budget": 1}, ValueError, "budget must be at least 2, not 1"),
        ({"budget": True}, ValueError, "budget must be a number, not True"),
        ({"budget": 1.5}, ValueError, r"budget as a float is a ratio of the prompt in \(0, 1\], not 1.5"),
        ({"budget": float("nan")}, ValueError, "budget as a float"),
        ({"n_sink": -1}, ValueError, "n_sink must be at least 0, not -1"),
        ({"n_sink": 6, "n_recent": 3}, ValueError, "budget of 8 tokens is too small for n_sink=6 and n_recent=3"),
        ({"n_sink": 2, "n_recent": 3}, ValueError, r"2 \+ 3 is less than budget=8"),
        ({"policy": "scissorhands"}, ValueError, r"\(4 after an eviction\) is too small"),
        ({"merge": CaM(m=8)}, ValueError, "budget must be larger than m=8 of merge, not 8"),
        ({"merge": "cam"}, TypeError, "merge must be a CaM or None, not str"),
        ({"prefill_scores": "all"}, ValueError, "prefill_scores must be one of"),
        ({"seed": 0.5}, ValueError, "seed must be an integer"),
    ],
)
def test_bad_arguments(kwargs, error, message):
    with pytest.raises(error, match=message):
        EvictionCache(config(), **{"budget": 8} | kwargs)


def test_models_that_cannot_be_served():
    with pytest.raises(ValueError, match="encoder-decoder"):
        EvictionCache(T5Config(), budget=8)
    with pytest.raises(ValueError, match="nothing to evict"):
        EvictionCache(MistralConfig(sliding_window=16), budget=8)
    with pytest.warns(UserWarning, match="keep their own cache"):
        mixed = EvictionCache(
            config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4), budget=8
        )
    with pytest.raises(ValueError, match="layer 1 is a DynamicSlidingWindowLayer"):
        mixed.positions(1)
    with pytest.raises(ValueError, match="pos_shift needs rotary embeddings of a type"):
        EvictionCache(
            config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), budget=8, pos_shift=True
        )
    with pytest.raises(ValueError, match="empty"):
        make().positions(0)


def test_bad_tensors():
    q, k, v = data(5)
    cache = make()
    feed(cache, q, k, v, [5])
    with pytest.raises(ValueError, match=r"\[2, 2\], but keys of shape \[1, 2, 5, 8\]"):
        cache.update(k[:1], v[:1], 0)
    with pytest.raises(ValueError, match="keys must have shape"):
        make().update(k[0], v[0], 0)
    for size in (0.05, 0.2):
        with pytest.raises(ValueError, match="a prompt of 5 tokens"):
            make(budget=size, n_sink=4).update(k, v, 0)
    with pytest.raises(ValueError, match="n_recent is 0"):
        make("tova", merge=CaM(m=None)).update(k, v, 0)
    module = types.SimpleNamespace(is_causal=True)
    keys, values = make().update(k, v, 0)
    with pytest.raises(ValueError, match="does not compute 'softcap'"):
        eviction_attention_forward(module, q, keys, values, None, softcap=5.0)
    with pytest.raises(ValueError, match="attention_mask must have shape"):
        eviction_attention_forward(module, q, keys, values, torch.ones(2, 4, 5, 5, dtype=torch.bool))


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(list(POLICIES)),
    mask=st.sampled_from([None, "bernoulli", "bernoulli_current", "threshold", "max", "all"]),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    pad=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_invariants(policy, mask, sizes, pad, seed):
    """Whatever comes in whatever chunks: the budget, sinks and recent tokens are kept, and keys are those that came."""
    cam = CaM(m=3, mask=mask, merge_prefill=bool(seed % 2)) if mask else None
    cache = make(policy, merge=cam, seed=seed, **POLICIES[policy])
    total = sum(sizes)
    q, k, v = data(total, seed=seed)
    pad = min(pad, sizes[0] - 1)
    columns = torch.ones(total, total, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    columns[1, :, :, :pad] = False
    out = feed(cache, q, k, v, sizes, columns)
    assert out.isfinite().all()
    layer = cache.layers[0]
    assert cache.get_seq_length() == total and layer.used <= 9
    for row, first in ((0, 0), (1, pad)):
        for head in range(2):
            held = layer.positions[row, head, : layer.used]
            kept = held[held >= 0].tolist()
            assert len(set(kept)) == len(kept) <= 8 and min(kept) >= first and max(kept) < total
            if "scissorhands" not in policy:
                assert len(kept) == min(8, total - first)
            assert set(range(first, min(first + layer.n_sink, total))) <= set(kept)
            assert set(range(max(first, total - layer.n_recent), total)) <= set(kept)
            assert torch.equal(layer.keys[row, head, : layer.used][held >= 0], k[row, head, held[held >= 0]])
    if layer.scores is not None:
        assert (layer.scores[:, :, : layer.used] >= 0).all()


def test_early_initialisation():
    """Shapes may be told before the first token; ratios are then of the prompt all the same."""
    cache = make(budget=0.5, n_sink=2)
    cache.early_initialization(2, 2, D, torch.float32, torch.device("cpu"))
    feed(cache, *data(20), [20])
    assert cache.layers[0].budget == 10
