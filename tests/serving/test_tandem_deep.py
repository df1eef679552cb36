"""The deep tandem: halves of one model, of which the lower one reads blocks."""

import copy

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from assay.serving import TandemConfig, TandemModel, deep_tandem

pytestmark = pytest.mark.filterwarnings("ignore")


def llama(layers):
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def tokens():
    return torch.randint(1, 23, (2, 11), generator=torch.Generator().manual_seed(0))


def test_in_one_block_the_upper_half_reads_embeddings():
    whole = llama(4)
    model = deep_tandem(whole).eval()
    assert [m.config.num_hidden_layers for m in (model.primary, model.secondary)] == [2, 2]
    assert not model.tandem_config.freeze_primary and model.projections.sources == [2, 2]
    upper = copy.deepcopy(whole)
    upper.model.layers = upper.model.layers[2:]
    with torch.no_grad():
        assert_close(model(tokens(), block_size=100).logits, upper(input_ids=tokens(), use_cache=False).logits)


@torch.no_grad()
def test_the_upper_half_reads_earlier_blocks_from_the_lower_one():
    """With blocks of one token its first layer sees states of all earlier tokens, and its own embedding."""
    whole = llama(4)
    model = deep_tandem(whole, 1, TandemConfig(block_size=1)).eval()
    below, own = model.read(tokens()).hidden_states[1], whole.model.embed_tokens(tokens())
    first = model.secondary.model.layers[0]
    out = []
    handle = first.register_forward_hook(lambda _, __, states: out.append(states))
    model(tokens())
    for t in (0, 1, 7):
        states = torch.cat([below[:, :t], own[:, t : t + 1]], 1)
        rotation = whole.model.rotary_emb(states, position_ids=torch.arange(t + 1)[None])
        first(states, attention_mask=None, position_embeddings=rotation)
        assert_close(out[0][:, t], out[-1][:, t], rtol=1e-4, atol=1e-5)
    handle.remove()


def test_it_generates_saves_and_learns(tmp_path):
    model = deep_tandem(llama(3), 2).eval()
    ids = tokens()
    said = model.generate(ids, speculative=False, draft_length=2, max_new_tokens=6)
    assert said.shape == (2, 17)
    model.save(tmp_path, save_primary=True)
    again = TandemModel.load(tmp_path)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(again.generate(ids, speculative=False, draft_length=2, max_new_tokens=6), said)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = model(ids, labels=ids, distil_weight=0.0).loss
        optimiser.zero_grad()
        loss.backward()
        assert model.primary.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0, "the lower half learns as well"
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_both_halves_need_a_layer():
    for layers in (0, 4, -1):
        with pytest.raises(ValueError, match="layers must lie between 1 and 3 of the model's 4"):
            deep_tandem(llama(4), layers)
    with pytest.raises(ValueError, match="not 0"):
        deep_tandem(llama(1))
