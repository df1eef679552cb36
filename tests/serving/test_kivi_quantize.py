import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.serving.kivi import pack_codes, quantize_groups, unpack_codes
from assay.serving.kivi.store import PackedStore

BITS = (1, 2, 3, 4, 8)
PACKED = (2, 4, 8)
AXES = ("channel", "token")


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unpacked(q):
    return unpack_codes(q.codes, q.bits, q.axis) if q.bits in PACKED else q.codes


def test_closed_form():
    exact = quantize_groups(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), 2, "token", 4)
    assert unpacked(exact).tolist() == [[0, 1, 2, 3]]
    assert torch.equal(exact.dequantize(), torch.tensor([[0.0, 1.0, 2.0, 3.0]]))
    q = quantize_groups(torch.tensor([[0.0, 0.4, 0.6, 3.0]]), 2, "token", 4)
    assert q.scale.item() == 1.0 and q.zero.item() == 0.0
    assert unpacked(q).tolist() == [[0, 0, 1, 3]]


def test_channel_axis_means_groups_along_tokens():
    x = torch.tensor([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0], [3.0, 103.0]])
    assert torch.equal(quantize_groups(x, 2, "channel", 4).dequantize(), x)
    q = quantize_groups(x, 2, "channel", 4)
    assert q.scale.shape == (1, 2) and q.zero.tolist() == [[0.0, 100.0]]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("meta", [torch.float16, torch.bfloat16, torch.float32])
def test_error_bound(bits, axis, meta):
    x = randn(2, 3, 64, 32, seed=bits) * 3 + 1
    q = quantize_groups(x, bits, axis, 32, meta_dtype=meta)
    dim, shape = (-2, (-2, (2, 32))) if axis == "channel" else (-1, (-1, (1, 32)))
    groups = x.unflatten(*shape)
    back = q.dequantize().unflatten(*shape)
    scale, zero = q.scale.float().unsqueeze(dim), q.zero.float().unsqueeze(dim)
    # Half a step, plus what rounding z and q_max * s to the storage type can take away at the ends of a group.
    ends = torch.finfo(meta).eps * (zero.abs() + (2**bits - 1) * scale) + 1e-6
    assert ((groups - back).abs() <= scale / 2 + ends).all()
    for extreme in (groups.amin(dim, keepdim=True), groups.amax(dim, keepdim=True)):
        at = groups == extreme
        assert ((groups - back).abs() <= ends)[at].all()


@given(
    st.integers(0, 2**31 - 1),
    st.sampled_from(BITS),
    st.sampled_from(AXES),
    st.floats(1e-2, 1e3),
    st.floats(-1e3, 1e3),
)
@settings(max_examples=60, deadline=None)
def test_error_bound_everywhere(seed, bits, axis, spread, centre):
    x = randn(1, 1, 32, 32, seed=seed) * spread + centre
    q = quantize_groups(x, bits, axis, 16, meta_dtype=torch.float32)
    shape = (-2, (2, 16)) if axis == "channel" else (-1, (2, 16))
    dim = shape[0]
    error = (x - q.dequantize()).abs().unflatten(*shape)
    ends = 4e-7 * x.abs().max()
    assert (error <= q.scale.unsqueeze(dim) / 2 * (1 + 1e-5) + ends).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", AXES)
def test_constants_are_exact(bits, axis):
    for value in (0.0, -2.5, 1024.0):
        q = quantize_groups(torch.full((1, 1, 32, 32), value), bits, axis, 32)
        assert torch.equal(q.dequantize(), torch.full((1, 1, 32, 32), value))
        assert (q.codes == 0).all() and (q.scale == 0).all()


def test_range_below_the_smallest_float16_scale_gives_no_nan():
    x = randn(1, 1, 32, 32) * 1e-9
    assert torch.isfinite(quantize_groups(x, 2, "channel").dequantize()).all()


@pytest.mark.parametrize("bits", BITS)
def test_invariances(bits):
    x = randn(2, 3, 64, 64, seed=1)
    meta = {"meta_dtype": torch.float32}
    factor, shift = 2.0 ** torch.randint(-3, 4, (64,)), torch.randint(-4, 5, (64,)).float()
    per_channel = quantize_groups(x, bits, "channel", **meta).dequantize()
    torch.testing.assert_close(
        quantize_groups(x * factor, bits, "channel", **meta).dequantize(), per_channel * factor, rtol=0, atol=0
    )
    moved = quantize_groups(x + shift, bits, "channel", **meta).dequantize() - shift
    assert ((moved - per_channel).abs() < 1e-4).float().mean() > 0.999  # but for ties of rounding
    per_token = quantize_groups(x, bits, "token", **meta).dequantize()
    torch.testing.assert_close(
        quantize_groups(x * factor[:, None], bits, "token", **meta).dequantize(),
        per_token * factor[:, None],
        rtol=0,
        atol=0,
    )
    moved = quantize_groups(x + shift[:, None], bits, "token", **meta).dequantize() - shift[:, None]
    assert ((moved - per_token).abs() < 1e-4).float().mean() > 0.999
    # The other axis has neither: this is what tells the directions apart.
    assert not torch.allclose(quantize_groups(x * factor, bits, "token", **meta).dequantize(), per_token * factor)
    assert not torch.allclose(
        quantize_groups(x * factor[:, None], bits, "channel", **meta).dequantize(), per_channel * factor[:, None]
    )


@pytest.mark.parametrize("axis", AXES)
def test_permuting_rows_and_heads(axis):
    x = randn(3, 4, 32, 32)
    rows, heads = [2, 0, 1], [3, 1, 0, 2]
    whole = quantize_groups(x, 2, axis).dequantize()
    assert torch.equal(quantize_groups(x[rows][:, heads], 2, axis).dequantize(), whole[rows][:, heads])


@pytest.mark.parametrize("bits", PACKED)
@pytest.mark.parametrize("axis", AXES)
def test_pack_round_trip(bits, axis):
    codes = torch.randint(0, 2**bits, (2, 3, 5, 32, 48), generator=torch.Generator().manual_seed(bits)).byte()
    packed = pack_codes(codes, bits, axis)
    assert packed.numel() * 8 == codes.numel() * bits
    assert torch.equal(unpack_codes(packed, bits, axis), codes)


@pytest.mark.parametrize("bits", PACKED)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("group", [32, 64])
def test_nbytes_is_the_closed_form(bits, axis, group):
    q = quantize_groups(randn(2, 3, 128, 64), bits, axis, group)
    elements = 2 * 3 * 128 * 64
    assert q.nbytes == elements * (bits / 8 + 4 / group)
    assert q.nbytes * 8 / elements == bits + 32 / group
    assert q.nbytes == sum(t.numel() * t.element_size() for t in (q.codes, q.scale, q.zero))


def test_bits_per_element_of_the_paper_settings():
    def bits(b, g):
        return quantize_groups(randn(1, 1, 64, 64), b, "channel", g).nbytes * 8 / 4096

    assert (bits(2, 32), bits(4, 32), bits(2, 64)) == (3.0, 5.0, 2.5)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", BITS)
def test_cat_equals_quantising_at_once(axis, bits):
    x = randn(1, 2, 96, 32)
    parts = quantize_groups(x[:, :, :32], bits, axis).cat(quantize_groups(x[:, :, 32:], bits, axis))
    whole = quantize_groups(x, bits, axis)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.scale, whole.scale)
    assert parts.shape == whole.shape and torch.equal(parts.dequantize(), whole.dequantize())


def test_padding_of_the_last_group():
    x = randn(1, 1, 40, 32) + 5
    edge = quantize_groups(x, 2, "channel", pad="edge").dequantize()
    zero = quantize_groups(x, 2, "channel", pad="zero").dequantize()
    assert edge.shape == zero.shape == x.shape
    assert torch.equal(edge[:, :, :32], zero[:, :, :32])
    by_hand = torch.cat([x[:, :, 32:], x[:, :, -1:].expand(1, 1, 24, 32)], 2)
    assert torch.equal(edge[:, :, 32:], quantize_groups(by_hand, 2, "channel").dequantize()[:, :, :8])
    # Zeros widen the range of values around 5: the error is larger.
    assert (zero - x)[:, :, 32:].abs().mean() > 2 * (edge - x)[:, :, 32:].abs().mean()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("axis", AXES)
def test_dtypes(dtype, axis):
    x = randn(1, 2, 32, 32).to(torch.bfloat16)
    q = quantize_groups(x.to(dtype), 4, axis)
    assert q.dequantize().dtype == dtype
    assert torch.equal(q.codes, quantize_groups(x.float(), 4, axis).codes)
    assert q.dequantize(torch.float32).dtype == torch.float32


def test_float16_range_is_taken_in_float32():
    x = torch.full((1, 1, 32, 32), -4e4, dtype=torch.float16)
    x[:, :, 0] = 4e4  # max - min overflows float16
    q = quantize_groups(x, 2, "channel")
    assert torch.isfinite(q.dequantize()).all()
    assert (q.dequantize().float() - x.float()).abs().max() < 100


def test_large_values_keep_float32_and_leave_other_groups_alone():
    x = randn(1, 1, 64, 32)
    alone = quantize_groups(x[:, :, :32], 2, "channel")
    x[:, :, 40] = 1e6
    q = quantize_groups(x, 2, "channel")
    assert q.scale.dtype == q.zero.dtype == torch.float32
    assert torch.equal(q.dequantize()[:, :, :32], alone.dequantize())
    assert (q.dequantize()[:, :, 40] - 1e6).abs().max() < 1
    both = alone.cat(quantize_groups(x[:, :, 32:], 2, "channel"))
    assert both.scale.dtype == torch.float32 and torch.equal(both.dequantize(), q.dequantize())
    store = PackedStore(2, "channel", 32, torch.float16)
    store.append(x[:, :, :32])
    store.append(x[:, :, 32:])
    assert torch.equal(store.dequantize(torch.float32), q.dequantize())


def test_non_contiguous_and_empty_and_gradient():
    x = randn(2, 64, 3, 32).transpose(1, 2)
    assert torch.equal(
        quantize_groups(x, 2, "channel").dequantize(), quantize_groups(x.contiguous(), 2, "channel").dequantize()
    )
    for axis in AXES:
        q = quantize_groups(torch.empty(1, 2, 0, 32), 2, axis)
        assert q.dequantize().shape == (1, 2, 0, 32) and q.nbytes == 0
    assert not quantize_groups(x.clone().requires_grad_(), 2, "token").dequantize().requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"bits": True}, "bits must be one of"),
        ({"axis": "row"}, "axis must be 'channel' or 'token', not 'row'"),
        ({"group_size": 0}, "group_size must be a positive integer"),
        ({"group_size": 3}, "group_size must be a multiple of 4"),
        ({"meta_dtype": torch.int8}, "meta_dtype"),
        ({"pad": "wrap"}, "pad must be"),
        ({"x": torch.zeros(4)}, "shape"),
        ({"x": torch.tensor([[float("nan")] * 32])}, "finite"),
        ({"x": torch.tensor([[float("inf")] * 32])}, "finite"),
        ({"x": torch.zeros(2, 80), "axis": "token"}, r"80 is none of 32.*\[8, 10, 16, 20, 40, 80\]"),
        ({"x": torch.zeros(2, 9), "axis": "token", "group_size": 9}, "multiple of 4 at 2 bits"),
    ],
)
def test_bad_input(change, message):
    arguments = {"x": torch.zeros(32, 32), "bits": 2, "axis": "channel", "group_size": 32} | change
    with pytest.raises(ValueError, match=message):
        quantize_groups(**arguments)


def test_bad_types_and_bad_cat():
    with pytest.raises(TypeError, match="floating"):
        quantize_groups(torch.zeros(32, 32, dtype=torch.int64), 2, "channel")
    with pytest.raises(TypeError, match="list"):
        quantize_groups([[1.0]], 2, "channel")
    a = quantize_groups(randn(32, 32), 2, "channel")
    with pytest.raises(ValueError, match="bits"):
        a.cat(quantize_groups(randn(32, 32), 4, "channel"))
    with pytest.raises(ValueError, match="shape"):
        a.cat(quantize_groups(randn(32, 64), 2, "channel"))
    with pytest.raises(ValueError, match="padded"):
        quantize_groups(randn(20, 32), 2, "channel").cat(a)
