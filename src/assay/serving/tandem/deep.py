"""Deep tandem: one model whose first layers read whole blocks, while the others predict token by token."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from assay.serving.tandem.adapters import check_secondary
from assay.serving.tandem.model import TandemConfig, TandemModel


def deep_tandem(model: Any, layers: int | None = None, config: TandemConfig | None = None) -> TandemModel:
    """Split a model into a tandem: its first layers are the primary, the others the secondary.

    The upper layers see what the lower ones made of all earlier blocks; within the current block they begin from
    embeddings. Both parts train (``freeze_primary`` is set to false), and are meant to be trained from scratch: the
    upper layers of a model that was trained whole have never read embeddings. There is no large model behind it that
    could verify drafts, so generate with ``speculative=False``.

    Parameters
    ----------
    model
        A causal language model of a type in ``assay.serving.tandem.SUPPORTED``. It is copied.
    layers
        How many layers are the primary; default half of them.
    config
        Options of the tandem; ``TandemConfig()`` by default.

    Returns
    -------
    TandemModel
        With projections that begin as the identity.

    Notes
    -----
    Source: "Tandem Transformers for Inference Efficient LLMs" (ICML 2024), appendix; there 8 of 16 layers.
    """
    check_secondary(model)
    total = model.config.num_hidden_layers
    layers = total // 2 if layers is None else layers
    if not 0 < layers < total:
        raise ValueError(f"layers must lie between 1 and {total - 1} of the model's {total}, not {layers}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the upper part is as large as the lower one is the point here
        tandem = TandemModel(
            _part(model, 0, layers),
            _part(model, layers, total),
            replace(config or TandemConfig(), freeze_primary=False),
        )
    with torch.no_grad():
        for linear in tandem.projections.maps:
            nn.init.eye_(linear.weight)
            nn.init.zeros_(linear.bias)
    return tandem


def _part(model: Any, start: int, stop: int) -> Any:
    """A copy of a model with some of its layers, which count from 0 for the cache."""
    part = copy.deepcopy(model)
    part.base_model.layers = nn.ModuleList(list(part.base_model.layers)[start:stop])
    for index, layer in enumerate(part.base_model.layers):
        layer.self_attn.layer_idx = index
    for name in ("layer_types", "no_rope_layers"):
        if getattr(part.config, name, None):
            setattr(part.config, name, list(getattr(part.config, name))[start:stop])
    part.config.num_hidden_layers = stop - start
    return part
