"""Running language models cheaper: parts for ``transformers``.

Names are imported on first use, so ``import assay.serving`` is free.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "CacheState": "cam",
        "CaM": "cam",
        "EvictionCache": "cam",
        "perturbation_report": "cam",
        "register_eviction_attention": "cam",
        "KIVICache": "kivi",
        "KIVILayer": "kivi",
        "QuantizedTensor": "kivi",
        "quantize_groups": "kivi",
        "register_kivi_attention": "kivi",
        "QuestCache": "quest",
        "QuestLayer": "quest",
        "register_quest_attention": "quest",
        "Decisions": "switchable",
        "SwitchableConfig": "switchable",
        "SwitchableModel": "switchable",
        "SwitchableTrainer": "switchable",
        "barrier_direction": "switchable",
        "make_switchable": "switchable",
        "Router": "tandem",
        "TandemCandidateGenerator": "tandem",
        "TandemConfig": "tandem",
        "TandemModel": "tandem",
        "TandemTrainer": "tandem",
        "deep_tandem": "tandem",
        "fit_router": "tandem",
    },
)
