"""Switchable decision: blocks and tokens of a transformer that a policy switches off for each input.

::

    model = make_switchable(gpt2, SwitchableConfig(candidates=("attention", "ffn")))
    trainer = SwitchableTrainer(model, rows)
    trainer.robustify(1000)                    # let the model stand missing blocks
    trainer.train_policy(500)                  # then learn which, quality first
    model.generate(prompts, max_new_tokens=50) # what is switched off is not computed

Source: "Switchable Decision: Dynamic Neural Generation Networks" (ICML 2024).
"""

from assay.serving.switchable.decisions import Decisions, flops, relative_cost
from assay.serving.switchable.layers import SUPPORTED
from assay.serving.switchable.model import SwitchableConfig, SwitchableModel, make_switchable, token_loss
from assay.serving.switchable.policy import Policy, barrier_direction, log_probability
from assay.serving.switchable.training import PolicyLog, SwitchableTrainer

__all__ = [
    "SUPPORTED",
    "Decisions",
    "Policy",
    "PolicyLog",
    "SwitchableConfig",
    "SwitchableModel",
    "SwitchableTrainer",
    "barrier_direction",
    "flops",
    "log_probability",
    "make_switchable",
    "relative_cost",
    "token_loss",
]
