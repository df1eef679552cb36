"""Small models whose blocks can be switched off, and decisions about them."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from assay.serving import Decisions, SwitchableConfig, make_switchable

ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
SMALL = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, **ENDS}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
GPT2 = {"vocab_size": 31, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
BART = {
    "vocab_size": 31,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.3,
    "dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": 31,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "initializer_factor": 3.0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, **HEADS)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, **HEADS, head_dim=16)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(**GPT2, **ENDS, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "bart": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**T5)),
}
CAUSAL = ("llama", "qwen3", "gpt2")


def plain(name, seed=0):
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def switched(name, seed=0, **options):
    candidates = ("attention", "ffn") if name == "t5" else ("attention", "ffn", "token")
    torch.manual_seed(seed + 100)
    return make_switchable(plain(name, seed), SwitchableConfig(**{"candidates": candidates} | options)).eval()


def tokens(batch=4, length=10, seed=0):
    return torch.randint(3, 31, (batch, length), generator=torch.Generator().manual_seed(seed))


def arguments(name, batch=4, seed=0, pad=False):
    ids = tokens(batch, 10, seed)
    given = {"input_ids": ids}
    if pad:
        mask = torch.ones_like(ids)
        for row in range(batch):
            mask[row, : row % 4] = 0
        if name not in CAUSAL:
            mask = mask.flip(1)
        given["attention_mask"] = mask
    if name not in CAUSAL:
        given["decoder_input_ids"] = tokens(batch, 6, seed + 1)
    return given


def drawn(model, batch=4, length=10, seed=0, drop_tokens=False, mask=None):
    draw = torch.Generator().manual_seed(seed)
    attn, ffn = (torch.rand(batch, model.layers, generator=draw) < 0.5 for _ in range(2))
    keep = None
    if drop_tokens:
        keep = torch.rand(batch, length, generator=draw) < 0.6
        keep[:, -1] = keep[:, 0] = True
        if mask is not None:
            first = mask.long().argmax(1)
            last = length - 1 - mask.flip(1).long().argmax(1)
            keep[torch.arange(batch), first] = keep[torch.arange(batch), last] = True
            keep &= mask.bool()
    return Decisions(attn, ffn, keep)
