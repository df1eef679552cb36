"""Training a tandem with the Trainer of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from assay.serving.tandem.model import TandemModel, check_block


def training_arguments(output_dir: str | Path, **overrides: Any) -> TrainingArguments:
    """Arguments with defaults for tandem-tuning pre-trained models.

    AdamW with learning rate 1e-4 (projections: see :class:`TandemTrainer`), weight decay 0.01, cosine to a tenth, 2 %
    warm-up, gradients clipped at 1. The paper does not publish its own; these are ours.
    """
    defaults: dict[str, Any] = {
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": 0.02,
        "max_grad_norm": 1.0,
        "remove_unused_columns": False,
        "report_to": [],
    }
    return TrainingArguments(output_dir=str(output_dir), **defaults | overrides)


class TandemTrainer(Trainer):
    """Trains a :class:`TandemModel` on cross-entropy, then on cross-entropy and distillation from the primary.

    Parameters
    ----------
    model, args, ...
        As for ``transformers.Trainer``. Batches hold ``input_ids`` and, if there is padding, ``attention_mask``;
        ``labels`` default to the tokens.
    distil_after
        Share of the steps after which the second stage begins, with the loss's ``config.distil_weight``; default 0.5.
        1 trains on cross-entropy alone (Tandem-CE), 0 distils from the start.
    projection_lr
        Learning rate of the projections, which start from nothing; default ten times that of the rest.
    block_sizes
        Draw the block size of every batch from these, so that long drafts do not surprise the model; default: always
        ``config.block_size``.
    """

    def __init__(
        self,
        model: TandemModel,
        args: TrainingArguments | None = None,
        *,
        distil_after: float = 0.5,
        projection_lr: float | None = None,
        block_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(model, TandemModel):
            raise TypeError(f"model must be a TandemModel, not {type(model).__name__}")
        if not 0 <= distil_after <= 1:
            raise ValueError(f"distil_after must lie in [0, 1], not {distil_after}")
        for size in block_sizes or ():
            check_block(size, "block_sizes")
        self.tandem = model
        self.distil_after, self.projection_lr, self.block_sizes = distil_after, projection_lr, block_sizes
        super().__init__(model=model, args=args, **kwargs)
        self._draw = torch.Generator().manual_seed(self.args.seed)

    def _weight(self) -> float:
        total = max(1, self.state.max_steps)
        return self.tandem.tandem_config.distil_weight if self.state.global_step >= self.distil_after * total else 0.0

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of the stage that training is in."""
        ids = inputs["input_ids"]
        size = None
        if self.block_sizes and model.training:
            pick = int(torch.randint(len(self.block_sizes), (), generator=self._draw))
            size = self.block_sizes[pick]
        labels = inputs.get("labels")
        out = model(
            ids,
            inputs.get("attention_mask"),
            ids if labels is None else labels,
            block_size=size,
            distil_weight=self._weight() if model.training else 0.0,
        )
        return (out.loss, out) if return_outputs else out.loss

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """AdamW with a learning rate of their own for the projections."""
        if self.optimizer is None:
            fast = self.projection_lr or 10 * self.args.learning_rate
            maps = [p for p in self.tandem.projections.parameters() if p.requires_grad]
            known = {id(p) for p in maps}
            rest = [p for p in self.tandem.parameters() if p.requires_grad and id(p) not in known]
            groups = [{"params": maps, "lr": fast}, {"params": rest, "lr": self.args.learning_rate}]
            self.optimizer = torch.optim.AdamW(groups, weight_decay=self.args.weight_decay)
        return self.optimizer

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Checkpoints hold the tandem as :meth:`TandemModel.save` writes it."""
        trained = not self.tandem.tandem_config.freeze_primary  # then the model that was given is no longer it
        self.tandem.save(output_dir or str(self.args.output_dir), save_primary=trained)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read what :meth:`_save` wrote."""
        inside = (Path(resume_from_checkpoint) / "primary").is_dir()
        saved = TandemModel.load(resume_from_checkpoint, None if inside else self.tandem.primary)
        self.tandem.load_state_dict(saved.state_dict())

    def _load_best_model(self) -> None:
        """Go back to the checkpoint with the best metric."""
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Labels default to the tokens, as in training."""
        if inputs.get("labels") is None:
            inputs = {**inputs, "labels": inputs["input_ids"]}
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
