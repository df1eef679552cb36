"""KIVI: the key-value cache of a language model in 2 or 4 bits, without calibration (ICML 2024)."""

from __future__ import annotations

from assay.serving.kivi.attention import kivi_attention_forward, packed_attention, register_kivi_attention
from assay.serving.kivi.cache import KIVICache, KIVILayer, cache_bytes
from assay.serving.kivi.quantize import QuantizedTensor, pack_codes, quantize_groups, unpack_codes

__all__ = [
    "KIVICache",
    "KIVILayer",
    "QuantizedTensor",
    "cache_bytes",
    "kivi_attention_forward",
    "pack_codes",
    "packed_attention",
    "quantize_groups",
    "register_kivi_attention",
    "unpack_codes",
]
