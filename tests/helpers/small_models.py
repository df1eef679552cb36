"""Small random language models, prompts, and the modes of ``generate()``: what every cache is tried on."""

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # sharp enough that greedy decoding has no near ties
}
MODELS = {
    "llama": lambda small: LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=4)),
    "llama-gqa": lambda small: LlamaForCausalLM(LlamaConfig(**small, num_key_value_heads=2, head_dim=32)),
    "qwen3": lambda small: Qwen3ForCausalLM(Qwen3Config(**small, num_key_value_heads=1, head_dim=32)),
    "gpt-neox": lambda small: GPTNeoXForCausalLM(GPTNeoXConfig(**small)),
    "gemma": lambda small: GemmaForCausalLM(GemmaConfig(**small, num_key_value_heads=1, head_dim=32)),
}
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


def maker(models=MODELS, small=SMALL):
    """A function from a name to its model, the same each time."""
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            made[name] = models[name](small).eval()
        return made[name]

    return get


def prompt(batch=2, tokens=21, seed=0):
    return torch.randint(1, 97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded(batch=3, tokens=25, pads=(0, 7, 20)):
    ids = prompt(batch, tokens)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    return ids, mask


def generate(model, ids, cache=None, attention="sdpa", new=40, **kwargs):
    """Greedy by default, of an exact length."""
    model.set_attn_implementation(attention)
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    kwargs.setdefault("do_sample", False)
    return model.generate(ids, cache=cache, max_new_tokens=new, min_new_tokens=new, **kwargs)
