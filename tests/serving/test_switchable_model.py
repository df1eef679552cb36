"""Blocks and tokens that are switched off: identity, masks against real skipping, caches, costs, saving."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from switchable_models import CAUSAL, GPT2, HEADS, MODELS, SMALL, arguments, drawn, plain, switched, tokens
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from assay.serving import Decisions, SwitchableConfig, SwitchableModel, make_switchable
from assay.serving.switchable import flops, relative_cost

pytestmark = pytest.mark.filterwarnings("ignore")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]

# -- identity ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_everything_on_is_the_original_bit_for_bit(name, pad, device):
    model, original = switched(name).to(device), plain(name).to(device)
    given = {k: v.to(device) for k, v in arguments(name, pad=pad).items()}
    expected = original(**given).logits
    everything = Decisions.full(4, model.layers, device)
    for mode in ("mask", "bucket"):
        assert torch.equal(model(**given, decisions=everything, mode=mode).logits, expected)
    with model.full():
        assert torch.equal(model(**given).logits, expected)
    assert torch.equal(model.model(**given).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_everything_on_generates_the_same(name):
    model, original, ids = switched(name), plain(name), tokens(3)
    everything = Decisions.full(3, model.layers)
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 3}):
        expected = original.generate(ids, max_new_tokens=12, **options)
        assert torch.equal(model.generate(ids, decisions=everything, max_new_tokens=12, **options), expected)
        with model.full():
            assert torch.equal(model.generate(ids, max_new_tokens=12, **options), expected)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_but_the_first_layers_runs(name):
    """Everything off is the first layer of each stack, then the final norm and the head."""
    model, original = switched(name), plain(name)
    for stack, attribute in (
        [(original.base_model, "layers")]
        if name in ("llama", "qwen3")
        else [(original.base_model, "h")]
        if name == "gpt2"
        else [(original.base_model.encoder, "layers"), (original.base_model.decoder, "layers")]
        if name == "bart"
        else [(original.encoder, "block"), (original.decoder, "block")]
    ):
        setattr(stack, attribute, getattr(stack, attribute)[:1])
        if hasattr(stack, "config") and hasattr(stack.config, "num_hidden_layers") and name in ("llama", "qwen3"):
            stack.config.num_hidden_layers = 1
    given = arguments(name)
    off = torch.zeros(4, model.layers, dtype=torch.bool)
    for mode in ("mask", "bucket"):
        out = model(**given, decisions=Decisions(off, off), mode=mode).logits
        assert_close(out, original(**given).logits, rtol=1e-5, atol=1e-5)


# -- masks are real skipping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("drop_tokens", [False, True])
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_masking_equals_buckets(name, pad, drop_tokens, use_cache):
    """With a cache attention is computed for all rows and dropped, without one for the rows that need it."""
    if name == "t5" and drop_tokens:
        pytest.skip("tokens of a T5 cannot be dropped")
    model = switched(name)
    given = arguments(name, pad=pad) | {"use_cache": use_cache}
    mask = given.get("attention_mask")
    for seed in range(4):
        chosen = drawn(model, seed=seed, drop_tokens=drop_tokens, mask=mask)
        a = model(**given, decisions=chosen, mode="mask").logits
        b = model(**given, decisions=chosen, mode="bucket").logits
        real = slice(None) if mask is None or name not in CAUSAL else mask.bool()
        assert_close(a[real], b[real], rtol=1e-5, atol=2e-5)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_masking_equals_buckets_for_any_decisions(seed, rows):
    model = switched("gpt2")
    chosen = drawn(model, rows, seed=seed, drop_tokens=True)
    ids = tokens(rows, seed=seed)
    a, b = (model(ids, decisions=chosen, mode=mode).logits for mode in ("mask", "bucket"))
    assert_close(a, b, rtol=1e-5, atol=2e-5)
    for row in range(rows):  # rows do not feel each other
        alone = model(ids[row : row + 1], decisions=chosen.rows(slice(row, row + 1)), mode="bucket").logits
        assert_close(alone[0], b[row], rtol=1e-5, atol=2e-5)


def test_what_is_skipped_is_not_computed():
    model, ids = switched("llama"), tokens(1)
    ran = []
    for i, layer in enumerate(model.model.base_model.layers):
        for block in ("self_attn", "mlp"):
            getattr(layer, block).register_forward_hook(lambda *_, i=i, block=block: ran.append((i, block)))
    attn, ffn = [True, False, True, False], [True, True, False, False]
    model(ids, decisions=Decisions.static(attn, ffn), mode="bucket")
    assert ran == [(0, "self_attn"), (0, "mlp"), (1, "mlp"), (2, "self_attn")]
    ran.clear()
    model.generate(ids, decisions=Decisions.static(attn, ffn), max_new_tokens=3, do_sample=False)
    assert ran == [(0, "self_attn"), (0, "mlp"), (1, "mlp"), (2, "self_attn")] * 3


@pytest.mark.parametrize("name", MODELS)
def test_one_pass_computes_blocks_for_the_rows_that_need_them(name):
    """Without a cache, and with gradients as well; rows of what a block reads tell how many it was computed for."""
    model, given = switched(name).double(), arguments(name) | {"use_cache": False}
    chosen = drawn(model, seed=3)
    mlps = [m for n, m in model.model.named_modules() if n.endswith((".mlp", ".fc1", ".DenseReluDense"))]
    assert len(mlps) == model.layers
    computed = {}
    for i, mlp in enumerate(mlps):
        mlp.register_forward_hook(lambda _, x, __, i=i: computed.update({i: len(x[0])}))
    loss = model(**given, decisions=chosen).logits.square().mean()
    wanted = chosen.ffn.sum(0).tolist()
    for first in (0, 3) if model.encodes else (0,):
        wanted[first] = 4
    assert [computed.get(i, 0) for i in range(model.layers)] == wanted and min(wanted) < 4
    ours = torch.autograd.grad(loss, list(model.model.parameters()), allow_unused=True)
    loss = model(**given | {"use_cache": True}, decisions=chosen).logits.square().mean()
    theirs = torch.autograd.grad(loss, list(model.model.parameters()), allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):  # a block that no row needs has no gradient, or one of zeros
        if a is not None or (b is not None and bool(b.any())):
            assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_a_dropped_token_is_seen_by_none(name):
    model = switched(name)
    given = arguments(name, 1)
    keep = torch.ones(1, 10, dtype=torch.bool)
    keep[0, 4] = False
    ones = torch.ones(1, model.layers, dtype=torch.bool)
    chosen = Decisions(ones, ones, keep)
    states = model.first_layer(given["input_ids"])
    changed = states.clone()
    changed[0, 4] += 1.0
    outs = [model(**given, decisions=chosen, first=x).logits for x in (states, changed)]
    others = [i for i in range(outs[0].shape[1]) if name == "bart" or i != 4]
    assert torch.equal(outs[0][:, others], outs[1][:, others])
    whole = Decisions(ones, ones, torch.ones_like(keep))
    assert torch.equal(model(**given, decisions=whole).logits, model(**given, decisions=Decisions(ones, ones)).logits)
    assert not torch.equal(model(**given, decisions=whole, first=changed).logits[:, others], outs[0][:, others])


# -- generation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_tokens", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_decoding_with_a_cache_is_the_teacher_forced_pass(name, drop_tokens):
    if name == "t5" and drop_tokens:
        pytest.skip("tokens of a T5 cannot be dropped")
    model, ids = switched(name), tokens(4)
    for seed in range(3):
        chosen = drawn(model, seed=seed, drop_tokens=drop_tokens)
        out = model.generate(ids, decisions=chosen, max_new_tokens=6, min_new_tokens=6, do_sample=False)
        if name in CAUSAL:
            keep = chosen.tokens
            if keep is not None:
                keep = torch.cat([keep, keep.new_ones(4, 6)], 1)
            again = model(out, decisions=Decisions(chosen.attn, chosen.ffn, keep)).logits
            found = again[:, 9:-1].argmax(-1)
            assert torch.equal(found, out[:, 10:])
        else:
            logits = model(ids, decoder_input_ids=out, decisions=chosen).logits
            stop = {"bart": 2, "t5": 1}[name]
            logits[..., stop] = -torch.inf  # generate() may not stop before six tokens
            assert torch.equal(logits[:, :-1].argmax(-1), out[:, 1:])


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_is_row_by_row(name):
    model, ids = switched(name), tokens(4)
    chosen = drawn(model, seed=5, drop_tokens=name != "t5")
    options = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False}
    together = model.generate(ids, decisions=chosen, **options)
    for row in range(4):
        alone = model.generate(ids[row : row + 1], decisions=chosen.rows(slice(row, row + 1)), **options)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_padding_on_the_left_changes_nothing(name):
    model, ids = switched(name), tokens(2)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), ids], 1)
    mask = (torch.arange(13) >= 3).long().expand(2, -1)
    chosen = drawn(model, 2, seed=3, drop_tokens=True)
    wide = Decisions(chosen.attn, chosen.ffn, torch.cat([torch.zeros(2, 3, dtype=torch.bool), chosen.tokens], 1))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    a = model.generate(ids, decisions=chosen, **options)
    b = model.generate(padded, attention_mask=mask, decisions=wide, **options)
    assert torch.equal(a, b[:, 3:])
    with torch.no_grad():
        model.policy.last.weight.normal_()
        model.policy.token.weight.normal_(std=3)
    x, y = model.decide(ids), model.decide(padded, mask)
    assert torch.equal(x.attn, y.attn) and torch.equal(x.tokens, y.tokens[:, 3:])
    assert not y.tokens[:, :3].any()


@pytest.mark.parametrize("mode", ["sampled", "beams", "several"])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_other_modes_of_generate(name, mode):
    model, ids = switched(name), tokens(4)
    chosen = drawn(model, seed=2, drop_tokens=True)
    options = {
        "sampled": {"do_sample": True, "top_k": 5},
        "beams": {"num_beams": 3, "do_sample": False},
        "several": {"do_sample": True, "num_return_sequences": 2},
    }[mode]
    outs = []
    for _ in range(2):
        torch.manual_seed(4)
        outs.append(model.generate(ids, decisions=chosen, max_new_tokens=8, **options))
    assert torch.equal(*outs) and len(outs[0]) == (8 if mode == "several" else 4)
    if name == "llama":
        repeats = 2 if mode == "several" else 1
        assert torch.equal(outs[0][:, :10], ids.repeat_interleave(repeats, 0))


def test_positions_do_not_move_when_layers_are_skipped():
    model, ids = switched("llama"), tokens(2)
    seen = []
    model.model.base_model.rotary_emb.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(kwargs["position_ids"].clone()), with_kwargs=True
    )
    half = Decisions.static([True, False, True, False], [True] * 4, 2)
    model.generate(ids, decisions=half, max_new_tokens=4, do_sample=False)
    assert [p.flatten()[-1].item() for p in seen] == [9, 10, 11, 12]


# -- deciding ----------------------------------------------------------------------------------------------------------


def test_a_new_policy_keeps_everything_and_samples_most():
    model, ids = switched("gpt2"), tokens(64)
    chosen = model.decide(ids)
    assert chosen.attn.all() and chosen.ffn.all() and chosen.tokens.all()
    draw = torch.Generator().manual_seed(0)
    drawn_ = model.decide(ids, sample=True, generator=draw)
    share = drawn_.attn[:, 1:].float().mean()
    assert share == pytest.approx(0.88, abs=0.07)
    assert drawn_.attn[:, 0].all() and drawn_.ffn[:, 0].all(), "the first layer always runs"
    again = model.decide(ids, sample=True, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn_.attn, again.attn) and torch.equal(drawn_.tokens, again.tokens)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["mask", "bucket"])
def test_deciding_within_a_pass_is_deciding_before_it(name, mode):
    model = switched(name)
    with torch.no_grad():
        model.policy.last.bias.zero_()
        model.policy.last.weight.normal_()
    given = arguments(name)
    chosen = model.decide(given["input_ids"])
    assert len(chosen.buckets()) > 1, "rows differ"
    out = model(**given, mode=mode)
    expected = model(**given, decisions=chosen, mode=mode)
    assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert torch.equal(model.last_decisions.attn, chosen.attn)
    one = {k: v[:1] for k, v in given.items()}
    assert_close(model(**one, mode=mode).logits, expected.logits[:1], rtol=1e-5, atol=2e-5)


def test_protected_tokens_stay():
    config = SwitchableConfig(special_tokens=(7,))
    model = make_switchable(plain("gpt2"), config).eval()
    with torch.no_grad():
        model.policy.token.bias.fill_(-9.0)
    ids = torch.tensor([[5, 7, 9, 11, 12, 7, 3, 4]])
    assert model.decide(ids).tokens[0].nonzero().flatten().tolist() == [0, 1, 5, 7]
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1]])
    assert model.decide(ids, mask).tokens[0].nonzero().flatten().tolist() == [1, 5, 7]
    labels = torch.tensor([[-100] * 5 + [7, 3, 4]])
    assert model.decide(ids, labels=labels).tokens[0].nonzero().flatten().tolist() == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize("candidates", [("attention",), ("ffn",), ("token",), ("attention", "token")])
def test_only_candidates_are_switched(candidates):
    model = make_switchable(plain("llama"), SwitchableConfig(candidates=candidates)).eval()
    with torch.no_grad():
        for linear in (model.policy.last, model.policy.token):
            if linear is not None:
                linear.bias.fill_(-9.0)
    chosen = model.decide(tokens(2))
    assert bool(chosen.attn[:, 1:].all()) == ("attention" not in candidates)
    assert bool(chosen.ffn[:, 1:].all()) == ("ffn" not in candidates)
    assert (chosen.tokens is None) == ("token" not in candidates)
    assert chosen.attn[:, 0].all()


def test_cross_attention_can_be_split():
    model = make_switchable(plain("bart"), SwitchableConfig(("attention",), split_cross=True)).eval()
    with torch.no_grad():
        model.policy.last.bias.copy_(torch.tensor([9.0] * 4 + [-9.0] * 2))
    chosen = model.decide(tokens(2))
    assert chosen.attn.all() and chosen.cross.tolist() == [[True, True, True, True, False, False]] * 2
    given = arguments("bart")
    chosen = model.decide(given["input_ids"])
    a, b = (model(**given, decisions=chosen, mode=mode).logits for mode in ("mask", "bucket"))
    assert_close(a, b, rtol=1e-5, atol=1e-5)
    whole = Decisions(chosen.attn, chosen.ffn)
    assert not torch.allclose(a, model(**given, decisions=whole).logits)


# -- costs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_torch_counts(name):
    model = switched(name)
    model.model.set_attn_implementation("eager")  # whose products are counted as they are
    given = arguments(name, 1)
    for seed in range(4):
        chosen = drawn(model, 1, seed=seed, drop_tokens=name != "t5")
        chosen.attn[:, 0] = chosen.ffn[:, 0] = True
        if name not in CAUSAL:
            chosen.attn[:, 3] = chosen.ffn[:, 3] = True
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(**given, decisions=chosen, mode="bucket")
        outputs = 0 if name in CAUSAL else 6
        assert flops(model.config, 10, outputs, chosen).item() == pytest.approx(counter.get_total_flops(), rel=0.01)


@given(seed=st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_more_decisions_cost_more(seed):
    config = plain("bart").config
    draw = torch.Generator().manual_seed(seed)
    attn, ffn = (torch.rand(1, 6, generator=draw) < 0.5 for _ in range(2))
    keep = torch.rand(1, 9, generator=draw) < 0.5
    cost = flops(config, 9, 5, Decisions(attn, ffn, keep)).item()
    for x, name in ((attn, "attn"), (ffn, "ffn"), (keep, "tokens")):
        for i in (~x[0]).nonzero().flatten().tolist():
            more = x.clone()
            more[0, i] = True
            parts = {"attn": attn, "ffn": ffn, "tokens": keep} | {name: more}
            assert flops(config, 9, 5, Decisions(**parts)).item() >= cost
    assert relative_cost(config, 9, 5, Decisions.full(2, 6)).tolist() == [1.0, 1.0]


def test_the_policy_is_counted():
    model = switched("gpt2")
    everything = Decisions.full(1, 4)
    assert model.cost(everything, 10).item() == pytest.approx(
        1 + model.policy.flops(10) / flops(model.config, 10).item()
    )


# -- saving, dtypes, errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bart"])
def test_save_and_load(tmp_path, name, inside):
    model, ids = switched(name, hidden=16, eps=0.1), tokens(6)
    with torch.no_grad():
        model.policy.last.weight.normal_()
        model.policy.last.bias.zero_()
    model.save(tmp_path, save_model=inside)
    again = SwitchableModel.load(tmp_path, None if inside else plain(name))
    a, b = model.decide(ids), again.decide(ids)
    assert torch.equal(a.attn, b.attn) and torch.equal(a.ffn, b.ffn) and torch.equal(a.tokens, b.tokens)
    assert again.options == model.options
    if not inside:
        with pytest.raises(ValueError, match="does not say where its model is"):
            SwitchableModel.load(tmp_path)


def test_installing_twice_is_installing_once():
    model = plain("gpt2")
    make_switchable(model, SwitchableConfig(("attention",)))
    again = make_switchable(model, SwitchableConfig(("ffn",)))
    ids = tokens()
    assert torch.equal(again(ids, decisions=Decisions.full(4, 4)).logits, plain("gpt2")(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype):
    model, ids = switched("llama").to(dtype), tokens()
    model.policy.float()
    chosen = drawn(model, drop_tokens=True)
    a, b = (model(ids, decisions=chosen, mode=mode).logits for mode in ("mask", "bucket"))
    assert a.dtype == dtype
    assert_close(a, b, rtol=0.05, atol=0.3 if dtype == torch.bfloat16 else 1e-9)
    assert torch.isfinite(model(ids).logits).all()


def test_labels_give_the_same_loss_in_both_modes():
    for name in ("gpt2", "bart"):
        model, given = switched(name), arguments(name)
        given.pop("decoder_input_ids", None)
        labels = tokens(4, 10 if name == "gpt2" else 6, 9)
        labels[:, :2] = -100
        chosen = drawn(model, seed=1, drop_tokens=True)
        losses = [model(**given, labels=labels, decisions=chosen, mode=mode).loss for mode in ("mask", "bucket")]
        assert_close(*losses, rtol=1e-5, atol=1e-5)


def test_bad_input():
    with pytest.raises(ValueError, match="candidates must be some of"):
        SwitchableConfig(candidates=())
    with pytest.raises(ValueError, match="eps must not be negative, but -1 came"):
        SwitchableConfig(eps=-1)
    with pytest.raises(ValueError, match="hidden must be at least 1, not 0"):
        SwitchableConfig(hidden=0)
    with pytest.raises(NotImplementedError, match="'bert' are not supported; supported are llama"):
        make_switchable(BertLMHeadModel(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)))
    with pytest.raises(NotImplementedError, match="tokens of a T5 cannot be dropped"):
        make_switchable(plain("t5"))
    with pytest.raises(ValueError, match="fewer than two layers"):
        make_switchable(GPT2LMHeadModel(GPT2Config(**GPT2 | {"n_layer": 1})))
    with pytest.raises(ValueError, match="min_layers=4 leaves no block"):
        make_switchable(plain("gpt2"), SwitchableConfig(("ffn",), min_layers=4))
    with pytest.raises(NotImplementedError, match="GPT-2 with cross-attention"):
        make_switchable(GPT2LMHeadModel(GPT2Config(**GPT2, add_cross_attention=True)))
    model, ids = switched("gpt2"), tokens()
    with pytest.raises(ValueError, match="mode must be 'mask' or 'bucket'"):
        model(ids, mode="fast")
    with pytest.raises(ValueError, match="decisions must be Decisions, 'sample' or None"):
        model(ids, decisions="all")
    with pytest.raises(ValueError, match=r"about 4 rows and 4 layers, not \(2, 4\)"):
        model(ids, decisions=Decisions.full(2, 4))
    with pytest.raises(ValueError, match="decisions are about 12 tokens, but input_ids hold 10"):
        ones = torch.ones(4, 4, dtype=torch.bool)
        model(ids, decisions=Decisions(ones, ones, torch.ones(4, 12, dtype=torch.bool)))
    with pytest.raises(ValueError, match="at least one token"):
        model.generate(ids[:, :0])
    with pytest.raises(ValueError, match="assisted generation"):
        model.generate(ids[:1], assistant_model=plain("gpt2"))
    with pytest.raises(ValueError, match=r"both be \[batch, layers\]"):
        Decisions(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="tokens must be"):
        Decisions(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3, 5))
    with pytest.raises(ValueError, match="cross must be"):
        Decisions(torch.ones(2, 3), torch.ones(2, 3), cross=torch.ones(2, 4))
    with pytest.raises(ValueError, match="about 5 layers, but the model has 4"):
        flops(model.config, 4, 0, Decisions.full(1, 5))


def test_a_copy_has_layers_of_its_own():
    import copy

    model, ids = switched("gpt2"), tokens()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.model.base_model.h.parameters():
            p.zero_()
    chosen = drawn(model)
    assert not torch.allclose(model(ids, decisions=chosen).logits, other(ids, decisions=chosen).logits)
    assert torch.equal(model(ids, decisions=chosen).logits, switched("gpt2")(ids, decisions=chosen).logits)
    assert type(other.model.base_model.h[0]).__name__ == "GPT2Block"


def test_the_first_layer_runs_and_is_counted_whatever_is_decided():
    model, ids = switched("gpt2"), tokens(1)
    off, on = torch.zeros(1, 4, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.bool)
    on[:, 0] = True
    for mode in ("mask", "bucket"):
        a, b = (model(ids, decisions=Decisions(x, x), mode=mode).logits for x in (off, on))
        assert torch.equal(a, b)
    assert model.cost(Decisions(off, off), 10) == model.cost(Decisions(on, on), 10)


def test_padding_is_never_kept():
    model, given = switched("llama"), arguments("llama", pad=True)
    chosen = drawn(model, drop_tokens=True, mask=given["attention_mask"])
    careless = Decisions(chosen.attn, chosen.ffn, chosen.tokens | ~given["attention_mask"].bool())
    real = given["attention_mask"].bool()
    for mode in ("mask", "bucket"):
        a, b = (model(**given, decisions=d, mode=mode).logits[real] for d in (chosen, careless))
        assert torch.equal(a, b)


def test_sliding_windows_keep_all_tokens():
    from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sliding = MistralForCausalLM(MistralConfig(**SMALL, **HEADS, sliding_window=4)).eval()
    with pytest.raises(NotImplementedError, match="tokens cannot be dropped from a model with sliding windows"):
        make_switchable(sliding)
    model = make_switchable(sliding, SwitchableConfig(("attention", "ffn"))).eval()
    ids = tokens()
    chosen = drawn(model)
    a, b = (model(ids, decisions=chosen, mode=mode).logits for mode in ("mask", "bucket"))
    assert_close(a, b, rtol=1e-5, atol=2e-5)
    for kind, config in (
        (MistralForCausalLM, MistralConfig(**SMALL, **HEADS, sliding_window=None)),
        (Qwen2ForCausalLM, Qwen2Config(**SMALL, **HEADS)),
    ):
        model = make_switchable(kind(config).eval()).eval()
        chosen = drawn(model, drop_tokens=True)
        a, b = (model(ids, decisions=chosen, mode=mode).logits for mode in ("mask", "bucket"))
        assert_close(a, b, rtol=1e-5, atol=2e-5)


def test_what_a_tokenizer_returns_can_be_passed_on():
    model, given = switched("llama"), arguments("llama", pad=True)
    chosen = drawn(model)
    a = model.generate(**given, decisions=chosen, max_new_tokens=4, do_sample=False)
    b = model.generate(
        given["input_ids"], attention_mask=given["attention_mask"], decisions=chosen, max_new_tokens=4, do_sample=False
    )
    assert torch.equal(a, b)


def test_the_policy_does_not_look_at_padding():
    model, ids = switched("llama"), tokens(3)
    with torch.no_grad():
        model.policy.last.weight.normal_(std=4.0)
        model.policy.last.bias.zero_()
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    other = ids.clone()
    other[:, :4] = 30
    a, b = model.decide(ids, mask), model.decide(other, mask)
    assert torch.equal(a.attn, b.attn) and torch.equal(a.ffn, b.ffn)
    alone = model.decide(ids[:, 4:])
    assert torch.equal(a.attn, alone.attn) and torch.equal(a.ffn, alone.ffn)


def test_more_bad_input():
    model, ids = switched("gpt2"), tokens()
    for options, message in (
        ({"return_dict_in_generate": True}, "return_dict_in_generate is not supported"),
        ({"cache": object()}, "a cache cannot be given"),
        (
            {"decisions": drawn(model, drop_tokens=True), "cache_implementation": "static"},
            "cache_implementation must be",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **options)
    with pytest.raises(ValueError, match="not None"):
        model.generate()
    with pytest.raises(ValueError, match="input_ids hold no rows"):
        model(ids[:0], decisions=Decisions.full(0, 4))
