"""The pure functions: bounds, selection, attention over pages."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

from assay.serving.quest import build_metadata, covered_mass, cpu, page_attention, page_scores, select_pages
from assay.serving.quest.pages import visible_pages


@pytest.fixture(params=["torch", "compiled"])
def path(request, monkeypatch):
    """Both ways of computing: plain PyTorch always, the compiled loops where numba is."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "numba", None)
    else:
        pytest.importorskip("numba")
    return request.param


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def literal_scores(query, keys, size):
    """The definition, page by page: ``sum_c max(q_c M_c, q_c m_c)`` for one query per head."""
    group = query.shape[1] // keys.shape[1]
    k = keys.repeat_interleave(group, 1)
    out = []
    for page in k.split(size, 2):
        high, low = page.amax(2, keepdim=True), page.amin(2, keepdim=True)
        out.append(torch.maximum(query * high, query * low).sum(-1).amax(-1))
    return torch.stack(out, -1)


def true_scores(query, keys, size):
    """Largest product of the query with a key of the page."""
    products = query @ keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).transpose(2, 3)
    return torch.stack([p.amax((2, 3)) for p in products.split(size, 3)], -1)


shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 3, 8]), st.integers(1, 3), st.integers(1, 40)
)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 17), st.sampled_from([4, 16]), st.integers(0, 10**6))
def test_score_bounds_every_product(shape, size, dim, seed):
    batch, kv_heads, group, n, tokens = shape
    q = randn(batch, kv_heads * group, n, dim, seed=seed, dtype=torch.float64)
    k = randn(batch, kv_heads, tokens, dim, seed=seed + 1, dtype=torch.float64) * 5
    scores = page_scores(q, build_metadata(k, size))
    assert scores.shape == (batch, kv_heads * group, -(-tokens // size))
    assert (scores >= true_scores(q, k, size) - 1e-9).all()
    if n == 1:
        torch.testing.assert_close(scores, literal_scores(q, k, size), rtol=0, atol=1e-9)


def test_one_token_pages_are_exact():
    q, k = randn(2, 6, 1, 16), randn(2, 2, 23, 16, seed=1)
    torch.testing.assert_close(page_scores(q, build_metadata(k, 1)), true_scores(q, k, 1), rtol=0, atol=1e-5)


def test_matrix_product_equals_the_literal_sum():
    q, k = randn(2, 6, 1, 64), randn(2, 2, 100, 64, seed=1)
    # Relative: scores are near 100, where neighbouring float32 are 7.6e-6 apart. In float64, 1e-9 holds (above).
    torch.testing.assert_close(page_scores(q, build_metadata(k, 16)), literal_scores(q, k, 16), rtol=1e-5, atol=0)


def test_flipping_a_channel_changes_nothing():
    q, k = randn(2, 6, 1, 64), randn(2, 2, 100, 64, seed=1)
    before = page_scores(q, build_metadata(k, 16))
    for c in (0, 7, 63):
        q[..., c] *= -1
        k[..., c] *= -1
        torch.testing.assert_close(page_scores(q, build_metadata(k, 16)), before, rtol=0, atol=1e-5)


def test_half_precision_does_not_overflow():
    q = torch.full((1, 1, 1, 128), 60.0, dtype=torch.float16)
    k = torch.full((1, 1, 32, 128), 60.0, dtype=torch.float16)  # 128 * 3,600 is far above 65,504
    scores = page_scores(q, build_metadata(k, 16))
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.full((1, 1, 2), 128 * 3600.0))


def test_groups():
    q, k = randn(2, 6, 3, 16), randn(2, 2, 50, 16, seed=1)
    meta = build_metadata(k, 8)
    head = page_scores(q, meta)
    grouped = head.view(2, 2, 3, -1)
    torch.testing.assert_close(page_scores(q, meta, "max"), grouped.amax(2), rtol=0, atol=0)
    torch.testing.assert_close(page_scores(q, meta, "sum"), grouped.sum(2), rtol=0, atol=1e-5)
    per_query = torch.stack([page_scores(q[:, :, i : i + 1], meta) for i in range(3)])
    torch.testing.assert_close(head, per_query.amax(0), rtol=0, atol=1e-5)


def test_one_query_head_per_key_head_makes_groups_equal():
    q, meta = randn(2, 3, 1, 16), build_metadata(randn(2, 3, 50, 16, seed=1), 8)
    assert torch.equal(page_scores(q, meta, "head"), page_scores(q, meta, "max"))
    assert torch.equal(page_scores(q, meta, "head"), page_scores(q, meta, "sum"))


def brute_force(scores, count, visible, force_last):
    pages = len(scores)
    key = [(float("-inf") if not visible[i] else scores[i]) for i in range(pages)]
    if force_last:
        key[-1] = float("inf")
    return sorted(sorted(range(pages), key=lambda i: (-key[i], i))[:count])


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 2.0, 1e30]), min_size=1, max_size=12),
    st.data(),
)
def test_selection_equals_brute_force_with_ties(scores, data):
    count = data.draw(st.integers(1, len(scores)))
    visible = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    force = data.draw(st.booleans())
    got = select_pages(torch.tensor([[scores]]), count, visible=torch.tensor([[visible]]), force_last=force)
    assert got.flatten().tolist() == brute_force(scores, count, visible, force)


def test_selection_is_optimal_among_all_subsets():
    scores = randn(1, 1, 7)
    for count in range(1, 8):
        got = select_pages(scores, count, force_last=False).flatten().tolist()
        best = max(itertools.combinations(range(7), count), key=lambda c: sum(scores[0, 0, list(c)].tolist()))
        assert got == list(best)


def test_selection_leaves_the_scores_alone_and_forces_the_last():
    scores = torch.arange(8.0).flip(0)[None, None]
    copy = scores.clone()
    assert select_pages(scores, 3).flatten().tolist() == [0, 1, 7]
    assert select_pages(scores, 3, force_last=False).flatten().tolist() == [0, 1, 2]
    assert torch.equal(scores, copy)


def masked_reference(q, k, v, pages, size, mask=None):
    """Dense attention with everything outside the selected pages masked."""
    batch, heads, n, _ = q.shape
    tokens = k.shape[2]
    keep = torch.zeros(batch, pages.shape[1], -(-tokens // size), dtype=torch.bool).scatter_(2, pages, True)
    keep = keep.repeat_interleave(size, 2)[..., :tokens].repeat_interleave(heads // pages.shape[1], 1)
    keep = keep[:, :, None].expand(batch, heads, n, tokens)
    if mask is not None:
        keep = keep & mask if mask.dtype == torch.bool else torch.where(keep, mask.to(q.dtype), float("-inf"))
    k, v = (x.to(q.dtype).repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    return sdpa(q, k, v, attn_mask=keep)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "size"), [(48, 16), (53, 16), (41, 5), (19, 1), (70, 9)])
def test_attention_equals_masked_dense(path, group, shared, tokens, size):
    heads = 2 * group
    total = -(-tokens // size)
    for n in (1, 3):
        q, k, v = randn(2, heads, n, 32), randn(2, 2, tokens, 32, seed=1), randn(2, 2, tokens, 24, seed=2)
        scores = randn(2, 2 if shared else heads, total, seed=3)
        mask = torch.ones(2, 1, n, tokens, dtype=torch.bool).tril(tokens - n)
        mask[1, ..., : tokens // 3] = False
        per_head = mask.expand(2, heads, n, tokens).clone()
        per_head[:, ::2, :, tokens - 4] = False
        additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        for count in (1, max(1, total // 2), total):
            pages = select_pages(scores, count)
            for m in (None, mask, per_head, additive):
                out = page_attention(q, k, v, pages, size, m)
                torch.testing.assert_close(out, masked_reference(q, k, v, pages, size, m), rtol=0, atol=1e-5)


def test_all_pages_equal_dense_attention(path):
    q, k, v = randn(2, 4, 1, 32), randn(2, 2, 61, 32, seed=1), randn(2, 2, 61, 32, seed=2)
    pages = torch.arange(4).expand(2, 2, 4)
    dense = sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    torch.testing.assert_close(page_attention(q, k, v, pages, 16), dense, rtol=0, atol=1e-5)


def test_spare_tokens_do_not_matter(path):
    q, k, v = randn(1, 4, 1, 32), randn(1, 2, 64, 32, seed=1), randn(1, 2, 64, 32, seed=2)
    pages = torch.tensor([1, 3]).expand(1, 2, 2)
    whole = page_attention(q, k[:, :, :50], v[:, :, :50], pages, 16)
    torch.testing.assert_close(page_attention(q, k, v, pages, 16, length=50), whole, rtol=0, atol=1e-6)


def test_a_query_that_may_attend_to_nothing_gives_zero(path):
    q, k, v = randn(2, 4, 1, 32), randn(2, 2, 48, 32, seed=1), randn(2, 2, 48, 32, seed=2)
    mask = torch.ones(2, 1, 1, 48, dtype=torch.bool)
    mask[0] = False
    out = page_attention(q, k, v, torch.tensor([0, 2]).expand(2, 2, 2), 16, mask)
    assert (out[0] == 0).all() and (out[1] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(path, dtype):
    q, k, v = (randn(2, h, t, 32, seed=s, dtype=dtype) for h, t, s in ((4, 1, 0), (2, 80, 1), (2, 80, 2)))
    pages = torch.tensor([0, 2, 4]).expand(2, 4, 3)
    out = page_attention(q, k, v, pages, 16)
    assert out.dtype == dtype
    expected = masked_reference(q.double(), k, v, pages, 16)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-2)


def test_scaling_dropout_and_gradients():
    q, k, v = randn(1, 2, 1, 16), randn(1, 2, 48, 16, seed=1), randn(1, 2, 48, 16, seed=2)
    pages = torch.tensor([0, 2]).expand(1, 2, 2)
    out = page_attention(q, k, v, pages, 16, scaling=0.5)
    torch.testing.assert_close(out, page_attention(q * 2, k, v, pages, 16), rtol=0, atol=1e-6)
    assert not torch.allclose(page_attention(q, k, v, pages, 16, dropout=0.5), page_attention(q, k, v, pages, 16))
    q.requires_grad_()
    page_attention(q, k, v, pages, 16).sum().backward()
    assert q.grad.abs().sum() > 0


def test_threads_agree(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 0)
    q, k, v = randn(2, 6, 1, 32), randn(2, 3, 64, 32, seed=1), randn(2, 3, 64, 32, seed=2)
    pages = select_pages(randn(2, 6, 4, seed=3), 2)
    one = page_attention(q, k, v, pages, 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert torch.equal(page_attention(q, k, v, pages, 16), one)


def test_more_pages_cover_more_and_the_bound_lies_between_oracle_and_chance():
    """Recall grows with the budget; oracle >= Quest >= random on average."""
    means = {"oracle": [], "quest": [], "random": []}
    for seed in range(20):
        # Keys in a few clusters, in runs, as text has them: bounds that say something.
        centre = randn(12, 32, seed=seed) * 1.5
        k = (centre.repeat_interleave(16, 0) + randn(192, 32, seed=seed + 100))[None, None].expand(1, 2, -1, -1)
        q = randn(1, 4, 1, 32, seed=seed + 200) * 1.5
        scores = {
            "oracle": true_scores(q, k, 16),
            "quest": page_scores(q, build_metadata(k, 16)),
            "random": randn(1, 4, 12, seed=seed + 300),
        }
        for name, s in scores.items():
            masses = [covered_mass(q, k, select_pages(s, c, force_last=False), 16) for c in range(1, 13)]
            assert all((b >= a - 1e-6).all() for a, b in itertools.pairwise(masses))
            torch.testing.assert_close(masses[-1], torch.ones_like(masses[-1]))
            means[name].append(masses[2].mean())
    oracle, quest, chance = (float(torch.stack(means[n]).mean()) for n in ("oracle", "quest", "random"))
    assert oracle >= quest > chance + 0.1


def test_equal_keys_in_a_page_make_the_bound_exact():
    k = randn(1, 2, 10, 16, seed=1).repeat_interleave(8, 2)
    q = randn(1, 6, 1, 16)
    scores, exact = page_scores(q, build_metadata(k, 8)), true_scores(q, k, 8)
    torch.testing.assert_close(scores, exact, rtol=0, atol=1e-5)
    for count in range(1, 11):
        assert torch.equal(select_pages(scores, count, force_last=False), select_pages(exact, count, force_last=False))


def test_visible_pages():
    mask = torch.zeros(2, 1, 2, 10, dtype=torch.bool)
    mask[0, 0, 1, 5] = True
    mask[1, 0, 0, 9] = True
    expected = torch.tensor([[[False, True, False]], [[False, False, True]]])
    assert torch.equal(visible_pages(mask, 4, 3), expected)
    assert torch.equal(visible_pages(torch.where(mask, 0.0, torch.finfo(torch.float32).min), 4, 3), expected)
    assert torch.equal(visible_pages(mask.expand(2, 6, 2, 10), 4, 3), expected.expand(2, 3, 3))
    assert torch.equal(visible_pages(mask.expand(2, 6, 2, 10), 4, 6), expected.expand(2, 6, 3))


def test_metadata_of_pages():
    k = randn(2, 3, 21, 5)
    meta = build_metadata(k.transpose(2, 3).contiguous().transpose(2, 3), 8)  # not contiguous
    assert meta.shape == (2, 3, 3, 10)
    for p in range(3):
        page = k[:, :, 8 * p : 8 * p + 8]
        assert torch.equal(meta[:, :, p], torch.cat([page.amax(2), page.amin(2)], -1))
    assert build_metadata(k[:, :, :0], 8).shape == (2, 3, 0, 10)
    assert torch.isfinite(meta).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build_metadata(torch.ones(2, 3, 4), 16), r"keys must have shape .* not \(2, 3, 4\)"),
        (lambda: build_metadata(torch.ones(1, 1, 4, 2), 0), "page_size must be at least 1, not 0"),
        (lambda: page_scores(torch.ones(1, 3, 1, 4), torch.ones(1, 2, 5, 8)), "query has 3 heads, .* 2 key-value"),
        (lambda: page_scores(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 5, 4)), r"2 \* 4 channels .* not 4"),
        (lambda: page_scores(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 5, 8), "mean"), "gqa must be one of .* 'mean'"),
        (lambda: select_pages(torch.ones(1, 1, 5), 6), "count must be from 1 to the 5 pages, not 6"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    q, k, v = randn(2, 6, 1, 32), randn(2, 2, 90, 32, seed=1), randn(2, 2, 90, 32, seed=2)
    pages = select_pages(page_scores(q, build_metadata(k, 16)), 3)
    there = select_pages(page_scores(q.cuda(), build_metadata(k.cuda(), 16)), 3)
    assert torch.equal(pages, there.cpu())
    out = page_attention(q.cuda(), k.cuda(), v.cuda(), there, 16)
    torch.testing.assert_close(out.cpu(), page_attention(q, k, v, pages, 16), rtol=0, atol=1e-4)
