import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from assay.serving.kivi import KIVILayer, attention, cpu, kivi_attention_forward, packed_attention
from assay.serving.kivi.view import PackedView

G, R = 32, 64
AXES = [("channel", "token"), ("token", "channel"), ("channel", "channel"), ("token", "token")]


@pytest.fixture(params=["torch", "compiled"])
def path(request, monkeypatch):
    """Both ways of computing: plain PyTorch always, the compiled loops where numba is."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "numba", None)
    else:
        pytest.importorskip("numba")
    return request.param


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def seen(length, new=1, *, batch=2, heads=2, dim=64, dtype=torch.float32, **options):
    """Keys and values as attention sees them when ``new`` tokens come after ``length``."""
    layer = KIVILayer(**{"group_size": G, "residual_length": R} | options)
    k, v = (randn(batch, heads, length + new, dim, seed=s, dtype=dtype) for s in (1, 2))
    layer.update(k[:, :, :length], v[:, :, :length])
    return layer.update(k[:, :, length:], v[:, :, length:])


def dense(x):
    return x.dense() if isinstance(x, PackedView) else x


def reference(q, k, v, mask=None):
    k, v = (dense(x).to(q.dtype).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return sdpa(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("factor", [1, 3, 8])
@pytest.mark.parametrize("length", [R - 2, R - 1, R, R + 1, 2 * R, 3 * R, 5 * R + 17])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_equals_attention_on_dequantised_tensors(path, factor, length, bits):
    for queries in (1, 3):
        k, v = seen(length, queries, k_bits=bits, v_bits=bits)
        q = randn(2, 2 * factor, queries, 64)
        mask = torch.ones(2, 1, queries, length + queries).tril(length).bool()
        mask[1, :, :, :5] = False
        for m in (None, mask, torch.where(mask, 0.0, torch.finfo(torch.float32).min)):
            torch.testing.assert_close(packed_attention(q, k, v, m), reference(q, k, v, m), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
@pytest.mark.parametrize(("dim", "group"), [(64, 64), (80, 16), (128, 32)])
def test_axes_and_head_dimensions(path, key_axis, value_axis, dim, group):
    for bits in (2, 8):
        k, v = seen(
            3 * R + 5, dim=dim, group_size=group, k_bits=bits, v_bits=bits, key_axis=key_axis, value_axis=value_axis
        )
        q = randn(2, 6, 1, dim)
        torch.testing.assert_close(packed_attention(q, k, v), reference(q, k, v), rtol=0, atol=1e-5)


def test_chunks_and_spare_room_do_not_matter(path, monkeypatch):
    layer = KIVILayer(group_size=G, residual_length=R)
    k, v = randn(1, 2, 600, 64, seed=1), randn(1, 2, 600, 64, seed=2)
    for t in range(0, 600, 50):  # buffers grow, so that their used part is not contiguous
        views = layer.update(k[:, :, t : t + 50], v[:, :, t : t + 50])
    q = randn(1, 4, 2, 64)
    expected = reference(q, *views)
    for chunk in (1, 2**14, 2**20):
        monkeypatch.setattr(attention, "CHUNK_CPU", chunk)
        torch.testing.assert_close(packed_attention(q, *views), expected, rtol=0, atol=1e-5)


def test_float32_statistics_in_the_store(path):
    layer = KIVILayer(group_size=G, residual_length=R)
    k, v = randn(1, 1, 2 * R, 64), randn(1, 1, 2 * R, 64)
    v[0, 0, 3] *= 1e6
    layer.update(k, v)
    views = layer.update(k[:, :, :1], v[:, :, :1])
    q = randn(1, 1, 1, 64)
    torch.testing.assert_close(packed_attention(q, *views), reference(q, *views), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(path, dtype):
    k, v = seen(3 * R, dtype=dtype)
    q = randn(2, 4, 1, 64, dtype=dtype)
    out = packed_attention(q, k, v)
    assert out.dtype == dtype
    expected = reference(q.float(), k, v)
    tolerance = 1e-5 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=tolerance)


def test_threads_agree(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(cpu, "PARALLEL_BYTES", 0)
    k, v = seen(3 * R + 5, heads=3)
    q = randn(2, 6, 1, 64)
    one = packed_attention(q, k, v)
    for threads in (2, 4, 1000):
        monkeypatch.setattr(torch, "get_num_threads", lambda n=threads: n)
        torch.testing.assert_close(packed_attention(q, k, v), one, rtol=0, atol=1e-6)


def test_a_row_that_may_attend_to_nothing_gives_zero(path):
    k, v = seen(3 * R)
    mask = torch.ones(2, 1, 1, 3 * R + 1, dtype=torch.bool)
    mask[0] = False
    out = packed_attention(randn(2, 4, 1, 64), k, v, mask)
    assert (out[0] == 0).all() and (out[1] != 0).any()


class Module(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 3


@pytest.mark.parametrize("queries", [1, 5, attention.DENSE_QUERIES + 4])
@pytest.mark.parametrize("length", [10, 3 * R])
def test_registered_function(path, queries, length):
    k, v = seen(length, queries)
    q = randn(2, 6, queries, 64)
    causal = torch.ones(queries, length + queries).tril(length).bool()[None, None]
    expected = reference(q, k, v, causal).transpose(1, 2)
    # With a mask as the models make it; without one, causal is aligned to the last token.
    for mask in (causal.expand(2, 1, -1, -1), None):
        if mask is None and not isinstance(k, PackedView):
            continue  # transformers' own sdpa, which aligns to the first token
        out, weights = kivi_attention_forward(Module(), q, k, v, mask, scaling=64**-0.5)
        assert weights is None
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    if isinstance(k, PackedView):
        everything, _ = kivi_attention_forward(Module(), q, k, v, None, is_causal=False)
        torch.testing.assert_close(everything, reference(q, k, v).transpose(1, 2), rtol=0, atol=1e-5)


def test_scaling_and_dropout():
    k, v = seen(3 * R)
    q = randn(2, 4, 1, 64)
    out = packed_attention(q, k, v, scaling=0.5)
    torch.testing.assert_close(out, reference(q * 0.5 * 8, k, v), rtol=0, atol=1e-5)
    dropped = packed_attention(q, k, v, dropout=0.5)
    assert not torch.allclose(dropped, packed_attention(q, k, v))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_it_does_not_compute_is_named(name):
    k, v = seen(3 * R)
    with pytest.raises(ValueError, match=f"'{name}', which Module uses"):
        kivi_attention_forward(Module(), randn(2, 4, 1, 64), k, v, None, **{name: torch.ones(1)})


def test_views_act_as_tensors():
    k, v = seen(3 * R)
    assert k.shape == (2, 2, 3 * R + 1, 64) and k.dtype == torch.float32 and k.device.type == "cpu"
    for result in (k + 0, k.transpose(1, 2).transpose(1, 2), k.clone(), torch.cat([k, k], 2)[:, :, : 3 * R + 1]):
        assert type(result) is torch.Tensor and torch.equal(result, k.dense())
    assert torch.equal(torch.where(k > 0, k, -k), k.dense().abs())
    assert "packed=192" in repr(k)
    v = torch.empty_like(k)
    assert type(v) is torch.Tensor


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("key_axis", "value_axis"), AXES)
def test_on_a_gpu(key_axis, value_axis):
    layer = KIVILayer(group_size=G, residual_length=R, key_axis=key_axis, value_axis=value_axis)
    k, v = (randn(2, 2, 3 * R + 6, 64, seed=s).cuda() for s in (1, 2))
    layer.update(k[:, :, :-1], v[:, :, :-1])
    views = layer.update(k[:, :, -1:], v[:, :, -1:])
    q = randn(2, 6, 1, 64).cuda()
    torch.testing.assert_close(packed_attention(q, *views), reference(q, *views), rtol=0, atol=1e-4)
