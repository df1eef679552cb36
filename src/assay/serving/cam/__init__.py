"""CaM: a cache of bounded size that merges the values of the tokens that leave it (ICML 2024)."""

from __future__ import annotations

from assay.serving.cam.attention import eviction_attention_forward, register_eviction_attention
from assay.serving.cam.cache import EvictionCache
from assay.serving.cam.layer import EvictionLayer
from assay.serving.cam.merge import CaM, merge_probability, merge_targets, merge_values
from assay.serving.cam.perturbation import (
    eviction_change,
    eviction_change_unscaled,
    merge_change,
    merge_change_unscaled,
    perturbation_report,
)
from assay.serving.cam.policies import CacheState

__all__ = [
    "CaM",
    "CacheState",
    "EvictionCache",
    "EvictionLayer",
    "eviction_attention_forward",
    "eviction_change",
    "eviction_change_unscaled",
    "merge_change",
    "merge_change_unscaled",
    "merge_probability",
    "merge_targets",
    "merge_values",
    "perturbation_report",
    "register_eviction_attention",
]
