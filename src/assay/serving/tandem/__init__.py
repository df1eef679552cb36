"""Tandem: a small language model that reads a large one's states of earlier blocks; alone, or as a lossless drafter.

::

    tandem = TandemModel(primary, secondary, TandemConfig(block_size=2)).initialise(tokens)
    TandemTrainer(tandem, training_arguments("out", max_steps=1000), train_dataset=data).train()
    tandem.generate(prompt, draft_length=4, max_new_tokens=100)       # exactly what the primary would say

Source: "Tandem Transformers for Inference Efficient LLMs" (ICML 2024).
"""

from assay.serving.tandem.adapters import SUPPORTED, StackedProjections
from assay.serving.tandem.deep import deep_tandem
from assay.serving.tandem.model import (
    TandemConfig,
    TandemModel,
    TandemOutput,
    ridge_projection,
    tandem_loss,
    tandem_mask,
)
from assay.serving.tandem.router import Router, expected_accepted, fit_router, speedup
from assay.serving.tandem.speculate import Drafter, TandemCandidateGenerator, drafting
from assay.serving.tandem.training import TandemTrainer, training_arguments

__all__ = [
    "SUPPORTED",
    "Drafter",
    "Router",
    "StackedProjections",
    "TandemCandidateGenerator",
    "TandemConfig",
    "TandemModel",
    "TandemOutput",
    "TandemTrainer",
    "deep_tandem",
    "drafting",
    "expected_accepted",
    "fit_router",
    "ridge_projection",
    "speedup",
    "tandem_loss",
    "tandem_mask",
    "training_arguments",
]
