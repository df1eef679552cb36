"""Embeddings and geometry: losses and diagnostics for torch.

Names are imported on first use, so ``import assay.representation`` is free.
"""

from __future__ import annotations

from assay._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "DHELLoss": "dhel",
        "KCLLoss": "dhel",
        "dhel_loss": "dhel",
        "kcl_loss": "dhel",
        "from_labels": "dhel",
        "embedding_report": "dhel",
    },
)
