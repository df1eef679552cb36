"""Structure of the tandem: who sees whom, what training computes, how projections begin, saving."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from assay.serving import TandemConfig, TandemModel
from assay.serving.tandem import Drafter, StackedProjections, ridge_projection, tandem_loss, tandem_mask
from assay.serving.tandem.adapters import positions_of

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = {
    "vocab_size": 23,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "gemma": (GemmaForCausalLM, GemmaConfig, {"head_dim": 16}),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def make(family="llama", layers=3, hidden=32, seed=0, **more):
    kind, config, own = FAMILIES[family]
    options = BASE | {"num_hidden_layers": layers, "hidden_size": hidden} | own | more
    if family == "smollm3":
        options["no_rope_layers"] = options["no_rope_layers"][:layers]
    torch.manual_seed(seed)
    return kind(config(**options)).eval()


def pair(family="llama", seed=0, **config):
    torch.manual_seed(seed)
    return TandemModel(make("llama", 4, 48, 1), make(family, 2, 32, 2), TandemConfig(**config)).eval()


def twins(family="llama", layers=3):
    """The identity tandem: a copy as secondary, every layer fed with the primary's input of the same layer."""
    primary, secondary = make(family, layers), make(family, layers)
    model = TandemModel(primary, secondary, TandemConfig(layer_map=list(range(layers)))).eval()
    with torch.no_grad():
        for linear in model.projections.maps:
            linear.weight.copy_(torch.eye(len(linear.weight)))
            linear.bias.zero_()
    return model


def tokens(batch=2, length=11, seed=0):
    return torch.randint(1, 23, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_block_is_the_plain_secondary(family, device):
    """Exactly, but for the order of sums: in float64 the difference is that of rounding."""
    model, ids = pair(family).to(device).double(), tokens().to(device)
    for size in (11, 50):
        assert_close(model(ids, block_size=size).logits, model.secondary(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_identity_tandem_is_the_primary_for_every_block(family, size):
    model, ids = twins(family), tokens()
    out = model(ids, block_size=size)
    assert_close(out.logits, model.primary(ids).logits, rtol=1e-5, atol=1e-5)
    assert_close(out.primary_logits, model.primary(ids).logits)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_logits_depend_on_the_primary_before_their_block_and_nowhere_else(size):
    model, ids, length = pair(block_size=size), tokens(1, 9), 9
    states = {}
    read = model.read

    def capture(*args, **kwargs):
        out = read(*args, **kwargs)
        for source in set(model.projections.sources):
            states[source] = out.hidden_states[source].detach().requires_grad_()
        out.hidden_states = {**dict(enumerate(out.hidden_states)), **states}
        return out

    model.read = capture
    logits = model(ids).logits
    for t in range(length):
        gradient = torch.autograd.grad(logits[0, t].sum(), list(states.values()), retain_graph=True)[0][0]
        felt = gradient.abs().sum(-1) > 0
        start = t // size * size
        assert felt.tolist() == [s < start for s in range(length)]


def test_a_token_changes_nothing_before_it_nor_primary_states_that_are_used_in_its_block():
    model, ids = pair(block_size=3), tokens(1, 9)
    other = ids.clone()
    other[0, 4] = (ids[0, 4] + 1) % 23
    a, b = model(ids).logits, model(other).logits
    assert torch.equal(a[:, :4], b[:, :4])
    assert not torch.allclose(a[:, 4:6], b[:, 4:6]), "its own block sees it through the secondary"
    assert not torch.allclose(a[:, 6:], b[:, 6:]), "later blocks see it through the primary"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("layer_map", ["last", "uniform"])
def test_the_parallel_pass_is_step_by_step_inference(size, layer_map, device):
    model, ids = pair(layer_map=layer_map).to(device), tokens().to(device)
    expected = model(ids, block_size=size).logits
    hidden = model.read(ids).hidden_states
    drafter, found = Drafter(model), []
    with torch.no_grad():
        for t in range(ids.shape[1]):
            if t % size == 0:
                states = {s: hidden[s][:, drafter.read :] for s in range(len(hidden))}
                drafter.absorb(states, t - drafter.read)
            found.append(drafter.step(ids[:, t : t + 1]))
    assert_close(torch.stack(found, 1), expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_padding_on_either_side_changes_nothing(size):
    model, ids = pair(block_size=size), tokens(1, 8)
    alone = model(ids, labels=ids)
    for left, right in ((3, 0), (0, 2), (1, 4)):
        padded = torch.cat([ids.new_zeros(1, left), ids, ids.new_zeros(1, right)], 1)
        mask = torch.cat([ids.new_zeros(1, left), torch.ones_like(ids), ids.new_zeros(1, right)], 1)
        out = model(padded, mask, padded)
        assert_close(out.logits[:, left : left + 8], alone.logits, rtol=1e-4, atol=1e-5)
        if not left:  # a pad on the left predicts the first token, which has no predictor without it
            assert_close(out.loss, alone.loss, rtol=1e-4, atol=1e-5)


@given(
    length=st.integers(1, 12),
    size=st.integers(1, 14),
    left=st.integers(0, 5),
)
def test_the_mask_is_its_definition(length, size, left):
    real = torch.tensor([[False] * left + [True] * length])
    allow = tandem_mask(positions_of(real), size, real)[0, 0]
    n = left + length
    assert allow.shape == (n, 2 * n)
    for i in range(n):
        for j in range(n):
            t, s = i - left, j - left
            if t < 0 or s < 0:
                assert not allow[i, j] and bool(allow[i, n + j]) == (i == j)
                continue
            k = t // size * size
            assert bool(allow[i, j]) == (s < k)
            assert bool(allow[i, n + j]) == (k <= s <= t)
    assert (allow.sum(-1) >= 1).all()


def test_distillation_without_weight_is_cross_entropy_and_the_primary_gets_no_gradient():
    model, ids = pair(), tokens()
    model.train()
    out = model(ids, labels=ids, distil_weight=0.0)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert_close(out.loss, expected)
    model(ids, labels=ids, distil_weight=0.5).loss.backward()
    assert all(p.grad is None for p in model.primary.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.projections.parameters())
    assert any(p.grad is not None for p in model.secondary.parameters())
    assert not model.primary.training and model.secondary.training


def test_the_loss_in_closed_form():
    ours, theirs = torch.randn(1, 4, 5), torch.randn(1, 4, 5)
    labels = torch.tensor([[3, 1, -100, 2]])
    p, q = theirs.softmax(-1), ours.log_softmax(-1)
    kept = [0, 2]  # position 1 has no label
    ce = -(q[0, 0, 1] + q[0, 2, 2]) / 2
    kl = sum((p[0, t] * (p[0, t].log() - q[0, t])).sum() for t in kept) / 2
    assert_close(tandem_loss(ours, labels, theirs, 0.25), 0.75 * ce + 0.25 * kl)
    assert tandem_loss(ours, torch.full((1, 4), -100)) == 0
    with pytest.raises(ValueError, match="primary_logits are missing"):
        tandem_loss(ours, labels, None, 0.5)


def test_an_unfrozen_primary_trains():
    model, ids = pair(freeze_primary=False), tokens()
    model(ids, labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.primary.parameters())


def test_ridge_initialisation_begins_below_random_and_solves_its_normal_equations():
    model = pair()
    ids = tokens(64, 24)
    model.initialise(ids, init="random")
    torch.manual_seed(0)
    random = model(ids, labels=ids, distil_weight=0.0).loss
    model.initialise(ids)
    assert model(ids, labels=ids, distil_weight=0.0).loss < random
    x, y = torch.randn(200, 5), torch.randn(200, 3)
    weight, bias = ridge_projection(x, y, 0.7)
    a = x.double().requires_grad_(False)
    w, b = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = ((a @ w.T + b - y) ** 2).sum() + 0.7 * (w**2).sum()
    assert all(g.abs().max() < 1e-8 for g in torch.autograd.grad(loss, (w, b)))


def test_layer_maps():
    assert TandemConfig().sources(6, 3) == [6, 6, 6]
    assert TandemConfig(layer_map="uniform").sources(6, 3) == [2, 4, 6]
    assert TandemConfig(layer_map=[0, 5, 1]).sources(6, 3) == [0, 5, 1]


def test_projections_of_one_source_are_one_product():
    stacked = StackedProjections(4, 3, [2, 0, 2])
    hidden = {0: torch.randn(2, 5, 4), 2: torch.randn(2, 5, 4)}
    for y, source, linear in zip(stacked(hidden), stacked.sources, stacked.maps):
        assert_close(y, linear(hidden[source]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, ids = pair().to(dtype), tokens()
    out = model(ids, labels=ids)
    assert out.logits.dtype == dtype and torch.isfinite(out.loss)
    if dtype == torch.float64:
        assert_close(out.logits.float(), pair()(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inside", [True, False])
def test_save_and_load(tmp_path, inside):
    model, ids = pair(layer_map=[1, 4], block_size=3).initialise(tokens(8, 20)), tokens()
    model.save(tmp_path, save_primary=inside)
    again = TandemModel.load(tmp_path, None if inside else model.primary)
    assert again.tandem_config == TandemConfig(layer_map=[1, 4], block_size=3)
    assert torch.equal(again(ids).logits, model(ids).logits)
    if not inside:
        with pytest.raises(ValueError, match="does not say where its primary is"):
            TandemModel.load(tmp_path)


def test_bad_input():
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, not 0"):
        TandemConfig(block_size=0)
    with pytest.raises(ValueError, match="layer_map must be 'last', 'uniform' or a list"):
        TandemConfig(layer_map="first")
    with pytest.raises(ValueError, match=r"distil_weight must lie in \[0, 1\], not 2"):
        TandemConfig(distil_weight=2)
    with pytest.raises(ValueError, match="a primary layer from 0 to 4 for each of the 2"):
        pair(layer_map=[1])
    with pytest.raises(ValueError, match=r"share a vocabulary, but have \[23, 24\]"):
        TandemModel(make(layers=4), make(layers=1, vocab_size=24))
    small = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=23))
    with pytest.raises(NotImplementedError, match=r"'gpt2'.*supported are llama, mistral, qwen2"):
        TandemModel(make(), small)
    with pytest.raises(NotImplementedError, match="sliding window"):
        TandemModel(make(layers=4), make("mistral", 1, sliding_window=4))
    with pytest.warns(UserWarning, match="drafting with it can save no time"):
        TandemModel(make(layers=1), make(layers=2))
    model = pair()
    with pytest.raises(ValueError, match=r"input_ids must be \[batch, tokens\]"):
        model(torch.ones(3, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        model(torch.ones(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="init must be 'ridge' or 'random'"):
        model.initialise(tokens(), init="zeros")
    with pytest.raises(ValueError, match="fewer than two tokens"):
        model.initialise([])
    with pytest.raises(ValueError, match="block_size must be an integer of at least 1, not 0"):
        model(tokens(), block_size=0)
    with torch.no_grad():
        model.primary.model.embed_tokens.weight[3, 0] = float("nan")
    with pytest.raises(ValueError, match="states of the primary must be finite"):
        model.initialise(tokens())


def test_a_gpt2_primary_can_feed_a_llama():
    primary = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=4, n_head=2, vocab_size=23)).eval()
    model = TandemModel(primary, make(layers=1)).eval()
    ids = tokens()
    assert_close(model(ids, block_size=20).logits, model.secondary(ids).logits, rtol=1e-5, atol=1e-5)
    assert torch.isfinite(model(ids, labels=ids).loss)
