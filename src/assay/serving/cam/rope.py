"""Rotary frequencies of a model, for keys that are rotated once more."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Models whose rotary embedding turns channel i together with channel i + half, by an angle linear in the position.
HALF_SPLIT = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "phi", "phi3", "olmo",
              "olmo2", "starcoder2", "stablelm", "gpt_neox", "granite", "smollm3")  # fmt: skip
FIXED = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


def rotary_frequencies(config: Any) -> Tensor:
    """Angle per position of each pair of channels, float32 ``[rotated channels / 2]``.

    Raises
    ------
    ValueError
        The model has no rotary embedding of the kind that can be turned afterwards.
    """
    name = getattr(config, "model_type", type(config).__name__)
    if name not in HALF_SPLIT:
        raise ValueError(f"pos_shift is known to work for {HALF_SPLIT}, but config is of {name!r}")
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    kind = parameters.get("rope_type", "default")
    if kind not in FIXED:
        raise ValueError(f"pos_shift needs rotary embeddings of a type in {FIXED}, but config has {kind!r}")
    if kind != "default":
        return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0].float()
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(dim * parameters.get("partial_rotary_factor", 1.0))
    return parameters["rope_theta"] ** -(torch.arange(0, rotated, 2).float() / rotated)
