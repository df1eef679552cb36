"""Training: a model that stands missing blocks, a policy under a constraint on quality, and both together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from assay.serving.switchable.decisions import Decisions
from assay.serving.switchable.model import Quality, SwitchableModel, token_loss
from assay.serving.switchable.policy import barrier_direction

Batch = dict[str, Tensor]
Draw = Callable[[int, torch.Generator], Batch]
Objective = Literal["barrier", "weighted", "quality"]


@dataclass
class PolicyLog:
    """What happened while a policy was trained, a value for each step.

    ``loss`` and ``cost`` are means over the sampled decisions, ``ema`` the moving average that is held against
    ``limit``, ``multiplier`` the lambda of the barrier, ``masks`` how many different layer decisions the thresholded
    policy made in the batch: 1 means that it has collapsed to a static mask.
    """

    limit: float = math.nan
    loss: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    ema: list[float] = field(default_factory=list)
    multiplier: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)


class SwitchableTrainer:
    """Trains a :class:`SwitchableModel` in up to three phases.

    Parameters
    ----------
    model
        What is trained.
    data
        A function ``(count, generator) -> batch``, or rows (dicts of tensors of one length), from which batches are
        drawn. A batch has ``input_ids`` and ``labels`` (-100: not predicted), and ``attention_mask`` with padding.
    quality
        Loss of each row under given decisions, ``[batch]``: ``"loss"`` (default) is the teacher-forced loss of the
        labels; or a function ``(model, batch, decisions)``, such as 1 minus the accuracy of generated text.
    seed
        Of batches and sampled decisions.
    progress
        Called with ``(step, steps, phase)``.
    """

    def __init__(
        self,
        model: SwitchableModel,
        data: Draw | Sequence[Batch],
        *,
        quality: Literal["loss"] | Quality = "loss",
        seed: int = 0,
        progress: Callable[[int, int, str], None] | None = None,
    ) -> None:
        if not isinstance(model, SwitchableModel):
            raise TypeError(f"model must be a SwitchableModel, not {type(model).__name__}")
        if not callable(data) and not len(data):
            raise ValueError("data is empty: training needs rows")
        if not (quality == "loss" or callable(quality)):
            raise ValueError(f"quality must be 'loss' or a function, not {quality!r}")
        self.model, self.data, self.progress = model, data, progress
        self.quality: Quality = token_loss if isinstance(quality, str) else quality
        self.generator = torch.Generator().manual_seed(seed)

    def _batch(self, count: int) -> Batch:
        if callable(self.data):
            batch = self.data(count, self.generator)
        else:
            picks = torch.randint(len(self.data), (count,), generator=self.generator).tolist()
            rows = [self.data[i] for i in picks]
            batch = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
        return {name: value.to(self.model.device) for name, value in batch.items()}

    def _tell(self, step: int, steps: int, phase: str) -> None:
        if self.progress is not None:
            self.progress(step + 1, steps, phase)

    def robustify(
        self,
        steps: int,
        *,
        batch_size: int = 128,
        lr: float = 2e-3,
        drop: float = 0.25,
        undropped: float = 0.3,
        warmup: int = 100,
        final_lr: float = 0.05,
        weight_decay: float = 0.01,
        clip: float = 1.0,
    ) -> list[float]:
        """Train the model with blocks left out at random, so that it stands missing ones; gives the losses.

        Each candidate block of a row is left out with probability ``drop``, which rises from 0 over the first third of
        the steps; a share ``undropped`` of the rows keeps everything. Also trains a model from scratch. AdamW with
        ``warmup`` steps and a cosine to ``final_lr`` of the rate.
        """
        for name, value in (("drop", drop), ("undropped", undropped)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], not {value}")
        self._check(steps=steps, batch_size=batch_size)
        model = self.model.model
        model.requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: _cosine(s, steps, warmup, final_lr))
        losses = []
        self.model.train()
        for step in range(steps):
            batch = self._batch(batch_size)
            chosen = self._random(batch, drop * min(1.0, 3 * (step + 1) / steps), undropped)
            loss = token_loss(self.model, batch, chosen).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            self._tell(step, steps, "robustify")
        self.model.eval()
        return losses

    def _random(self, batch: Batch, drop: float, undropped: float) -> Decisions:
        ids, rows = batch["input_ids"], len(batch["input_ids"])
        whole = torch.rand(rows, 1, generator=self.generator) < undropped
        blocks = torch.rand(rows, self.model.policy.count, generator=self.generator) >= drop
        tokens = None
        if "token" in self.model.options.candidates:
            tokens = (torch.rand(ids.shape, generator=self.generator) >= drop) | whole
            tokens = tokens.to(ids.device)
        mask = batch.get("attention_mask")
        kept = self.model.protected(ids, mask, batch.get("labels"))
        real = torch.ones_like(kept) if mask is None else mask.bool()
        return self.model._from((blocks | whole).to(ids.device), tokens, kept, real)

    @torch.no_grad()
    def full_loss(self, batches: int = 8, batch_size: int = 128) -> float:
        """The quality loss of the full model on training data: what the constraint is measured from."""
        self.model.eval()
        total = 0.0
        for _ in range(batches):
            batch = self._batch(batch_size)
            everything = Decisions.full(len(batch["input_ids"]), self.model.layers, self.model.device)
            total += self.quality(self.model, batch, everything).mean().item()
        return total / batches

    def train_policy(
        self,
        steps: int,
        *,
        batch_size: int = 128,
        lr: float = 2e-3,
        objective: Objective = "barrier",
        weight: float = 1.0,
        baseline: bool = True,
        smoothing: float = 0.9,
    ) -> PolicyLog:
        """Train the policy by policy gradient; the model is frozen.

        For each batch decisions ``u`` are drawn, and ``u'`` are those that the policy finds likelier than not. With
        ``A_q = q(u) - q(u')`` and ``A_c = c(u) - c(u')``, the gradients of quality loss and cost are ``E[A_q grad log
        pi(u)]`` and ``E[A_c grad log pi(u)]``.

        Parameters
        ----------
        steps, batch_size, lr
            Of Adam; the rate is 0.002 by default.
        objective
            ``"barrier"`` (default): :func:`~assay.serving.switchable.barrier_direction` with the limit ``full loss +
            eps``. ``"weighted"``: quality loss plus ``weight`` times cost. ``"quality"``: quality loss alone.
        baseline
            Subtract what the thresholded decisions give (self-critical); without, gradients are noisier.
        smoothing
            Of the moving average of the sampled loss.
        """
        self._check(objective, steps=steps, batch_size=batch_size)
        optimizer = torch.optim.Adam(self.model.policy.parameters(), lr)
        log = PolicyLog(limit=self.full_loss(batch_size=batch_size) + self.model.options.eps)
        for step in range(steps):
            self._policy_step(self._batch(batch_size), optimizer, log, objective, weight, baseline, smoothing)
            self._tell(step, steps, "policy")
        return log

    def train_joint(
        self,
        steps: int,
        *,
        batch_size: int = 128,
        lr: float = 2e-3,
        model_lr: float | None = None,
        objective: Objective = "barrier",
        weight: float = 1.0,
        smoothing: float = 0.9,
        clip: float = 1.0,
    ) -> PolicyLog:
        """Train both: the policy as in :meth:`train_policy`, the model on its loss under sampled decisions.

        ``model_lr`` is a tenth of ``lr`` by default.
        """
        self._check(objective, steps=steps, batch_size=batch_size)
        policy = torch.optim.Adam(self.model.policy.parameters(), lr)
        log = PolicyLog(limit=self.full_loss(batch_size=batch_size) + self.model.options.eps)
        weights = list(self.model.model.requires_grad_(True).parameters())
        optimizer = torch.optim.AdamW(weights, lr / 10 if model_lr is None else model_lr)
        for step in range(steps):
            batch = self._batch(batch_size)
            chosen = self._policy_step(batch, policy, log, objective, weight, True, smoothing)
            self.model.train()
            loss = token_loss(self.model, batch, chosen).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights, clip)
            optimizer.step()
            self.model.eval()
            self._tell(step, steps, "joint")
        return log

    def _check(self, objective: str = "barrier", **counts: int) -> None:
        for name, count in counts.items():
            if count < (name != "steps"):
                raise ValueError(f"{name} must be at least {int(name != 'steps')}, not {count}")
        if objective not in ("barrier", "weighted", "quality"):
            raise ValueError(f"objective must be 'barrier', 'weighted' or 'quality', not {objective!r}")

    def _policy_step(
        self,
        batch: Batch,
        optimizer: Any,
        log: PolicyLog,
        objective: str,
        weight: float,
        baseline: bool,
        smoothing: float,
    ) -> Decisions:
        model, ids = self.model, batch["input_ids"]
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        kept = model.protected(ids, mask, labels)
        model.eval()
        with torch.no_grad():
            states = model.first_layer(ids, mask)
        view = model.view(ids, mask, labels)
        chosen, chance = model.choose(states, kept, mask, True, self.generator, view)
        likely, _ = model.choose(states, kept, mask, view=view)
        with torch.no_grad():
            q, q0 = self._losses(batch, chosen, likely, states)
            c, c0 = (self._cost(batch, d).to(ids.device) for d in (chosen, likely))
        if not baseline:
            q0, c0 = torch.zeros_like(q0), torch.zeros_like(c0)
        parameters = list(model.policy.parameters())
        gradients = []
        for advantage in (q - q0, c - c0):
            found = torch.autograd.grad(
                (advantage.to(chance.dtype) * chance).mean(), parameters, retain_graph=True, allow_unused=True
            )
            flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
            gradients.append(torch.cat([g.flatten() for g in flat]))
        g_q, g_c = gradients
        mean = float(q.mean())
        if not math.isfinite(mean):
            raise FloatingPointError(
                f"the quality loss is {mean} at step {len(log.loss)}; a policy cannot learn from it"
            )
        o = model.options
        before = log.ema[-1] if log.ema else log.limit - o.eps  # it starts at the full model's loss
        log.ema.append(smoothing * before + (1 - smoothing) * mean)
        if objective == "barrier":
            direction, multiplier = barrier_direction(g_c, g_q, log.ema[-1] - log.limit, o.alpha, o.beta, o.lambda_max)
        elif objective == "weighted":
            direction, multiplier = g_q + weight * g_c, 1.0
        else:
            direction, multiplier = g_q, 1.0
        direction = direction / max(1.0, float(direction.norm()))
        at = 0
        for p in parameters:
            p.grad = direction[at : at + p.numel()].view_as(p).clone()
            at += p.numel()
        optimizer.step()
        blocks = torch.cat([likely.attn, likely.ffn, likely.crossed], 1)
        log.loss.append(mean)
        log.cost.append(float(c.mean()))
        log.multiplier.append(multiplier)
        log.entropy.append(float(-chance.detach().mean()))
        log.masks.append(len(blocks.unique(dim=0)))
        return chosen

    def _losses(self, batch: Batch, chosen: Decisions, likely: Decisions, states: Tensor) -> tuple[Tensor, Tensor]:
        """Quality losses of both decisions; the plain loss in one pass of twice the rows from the known first layer."""
        if self.quality is not token_loss:
            return self.quality(self.model, batch, chosen), self.quality(self.model, batch, likely)
        twice = {name: torch.cat([value, value]) for name, value in batch.items()}
        both = Decisions(
            torch.cat([chosen.attn, likely.attn]),
            torch.cat([chosen.ffn, likely.ffn]),
            None if chosen.tokens is None or likely.tokens is None else torch.cat([chosen.tokens, likely.tokens]),
            None if chosen.cross is None or likely.cross is None else torch.cat([chosen.cross, likely.cross]),
        )
        loss = token_loss(self.model, twice, both, torch.cat([states, states]))
        return loss[: len(states)], loss[len(states) :]

    def _cost(self, batch: Batch, decisions: Decisions) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        outputs = labels.shape[1] if self.model.encodes else 0
        return self.model.cost(decisions, ids.shape[1], outputs)


def _cosine(step: int, steps: int, warmup: int, final: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    share = (step - warmup) / max(1, steps - warmup)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
