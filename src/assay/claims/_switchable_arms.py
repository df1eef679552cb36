"""What the claim of switchable compares with a policy: fixed masks, chance, and leaving early."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

    from assay.serving.switchable import Decisions, SwitchableModel
    from assay.serving.switchable.training import Objective

EXHAUSTIVE = 10  # decisions up to which all masks are tried


@dataclass
class Trained:
    """What all arms of a replicate share: a model that stands missing blocks, data, and the policies trained so far.

    ``draw(count, purpose)`` gives the same batch whenever it is asked for one of "validation" or "test"; ``train``
    draws batches for training. ``before`` is the model before it learned to stand missing blocks, and ``plain_steps``
    are those in which it is trained without. ``sizes`` are the options of the workload.
    """

    base: Any
    before: Any
    plain_steps: int
    draw: Callable[[int, str], dict[str, Any]]
    train: Callable[[int, torch.Generator], dict[str, Any]]
    sizes: dict[str, Any]
    base_lr: float
    seed: int
    tasks: tuple[str, ...] = ()
    memo: dict[Any, Any] = field(default_factory=dict)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` gives, which is called once."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    @property
    def tested(self) -> int:
        """Rows for test, and for validation."""
        return self.sizes["tested"]


def small_gpt2(vocabulary: int, positions: int, layers: int, width: int, seed: int) -> Any:
    """A pre-norm decoder with learned positions, 4 heads and no dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        activation_function="relu",  # GPT-2's own is a fifth of a training step on a CPU
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config).eval()


def switched(shared: Trained, candidates: tuple[str, ...]) -> SwitchableModel:
    """The shared model with a new policy; the model itself is not copied, since policies leave it alone."""
    import torch

    from assay.serving import SwitchableConfig, make_switchable

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shared.seed)
        return make_switchable(shared.base, SwitchableConfig(candidates, eps=shared.sizes["eps"])).eval()


def train_model(shared: Trained, steps: int, drop: float) -> None:
    """Train the shared model itself, with blocks missing at random."""
    from assay.serving import SwitchableTrainer

    trainer = SwitchableTrainer(switched(shared, ("attention", "ffn")), shared.train, seed=shared.seed)
    trainer.robustify(
        steps, batch_size=shared.sizes["batch"], lr=shared.base_lr, drop=drop, warmup=min(100, max(1, steps))
    )


def not_robustified(shared: Trained) -> Trained:
    """The same model, trained without missing blocks."""

    def make() -> Trained:
        other = replace(shared, base=copy.deepcopy(shared.before), memo={})
        train_model(other, shared.plain_steps, 0.0)
        return other

    return shared.remember("not robustified", make)


def trained_policy(
    shared: Trained,
    candidates: tuple[str, ...],
    objective: Objective = "barrier",
    weight: float = 1.0,
    baseline: bool = True,
) -> SwitchableModel:
    """A policy after training, the same one for all arms that ask for it."""

    def make() -> SwitchableModel:
        from assay.serving import SwitchableTrainer

        model = switched(shared, candidates)
        SwitchableTrainer(model, shared.train, seed=shared.seed).train_policy(
            shared.sizes["steps"],
            batch_size=shared.sizes["batch"],
            lr=shared.sizes["lr"],
            objective=objective,
            weight=weight,
            baseline=baseline,
        )
        return model

    return shared.remember((candidates, objective, weight, baseline), make)


def measure(
    shared: Trained, model: SwitchableModel, decisions: Decisions | None, purpose: str = "test"
) -> dict[str, float]:
    """Exact match, token accuracy, loss and cost on rows that nothing was trained on.

    Without ``decisions`` the policy decides, and what deciding takes is part of the cost.
    """
    import torch

    batch = shared.draw(shared.tested, purpose)
    labels, ids = batch["labels"], batch["input_ids"]
    with torch.inference_mode():
        chosen = decisions or model.decide(ids, batch.get("attention_mask"), labels=labels)
        logits = model(**inputs(model, batch), decisions=chosen).logits
    decided = decisions is None
    return {**scores(logits, labels, model.encodes), **costs(shared, model, chosen, batch, logits, decided)}


def inputs(model: SwitchableModel, batch: dict[str, Any]) -> dict[str, Any]:
    """What the model reads of a batch, teacher forced."""
    given = {k: v for k, v in batch.items() if k not in ("labels", "task")}
    if model.encodes:
        given["decoder_input_ids"] = model.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return given


def _aligned(logits: Any, labels: Any, encodes: bool) -> tuple[Any, Any, Any]:
    ours, wanted = (logits, labels) if encodes else (logits[:, :-1], labels[:, 1:])
    return ours, wanted, wanted != -100


def right_rows(logits: Any, labels: Any, encodes: bool) -> Any:
    """Rows whose every target is the likeliest token: what greedy decoding gets right to the last one."""
    ours, wanted, counted = _aligned(logits, labels, encodes)
    return ((ours.argmax(-1) == wanted) | ~counted).all(1)


def scores(logits: Any, labels: Any, encodes: bool) -> dict[str, float]:
    """Exact match, token accuracy and loss."""
    import torch

    ours, wanted, counted = _aligned(logits, labels, encodes)
    right = (ours.argmax(-1) == wanted)[counted]
    nll = torch.nn.functional.cross_entropy(ours[counted].float(), wanted[counted])
    exact = right_rows(logits, labels, encodes)
    return {"exact": exact.float().mean().item(), "tokens": right.float().mean().item(), "nll": nll.item()}


def costs(
    shared: Trained, model: SwitchableModel, chosen: Decisions, batch: Any, logits: Any, decided: bool
) -> dict[str, float]:
    """Mean cost, how many masks of blocks there are, and both by task."""
    import torch

    labels, cost = batch["labels"], price(model, chosen, batch, decided)
    blocks = torch.cat([chosen.attn, chosen.ffn], 1)
    found = {"cost": cost.mean().item(), "masks": float(len(blocks.unique(dim=0)))}
    right = right_rows(logits, labels, model.encodes).cpu()
    for i, name in enumerate(shared.tasks):
        rows = batch["task"].cpu() == i
        found |= {f"exact_{name}": right[rows].float().mean().item(), f"cost_{name}": cost[rows].mean().item()}
    return found


def price(model: SwitchableModel, chosen: Decisions, batch: Any, decided: bool) -> Any:
    """Operations over those of the whole model, ``[batch]``, with those of the policy if it decided."""
    from assay.serving.switchable import relative_cost

    inputs = batch["input_ids"].shape[1]
    outputs = batch["labels"].shape[1] if model.encodes else 0
    return relative_cost(model.config, inputs, outputs, chosen, model.policy.flops(inputs) if decided else 0)


def free_blocks(model: SwitchableModel) -> list[tuple[str, int]]:
    """The blocks that a mask may leave out."""
    return [(name, i) for name in ("attn", "ffn") for i in model._slots[name]]


def mask_of(model: SwitchableModel, kept: tuple[bool, ...], batch: int) -> Decisions:
    """The decisions of a static mask over :func:`free_blocks`."""
    from assay.serving import Decisions

    parts = {"attn": [True] * model.layers, "ffn": [True] * model.layers}
    for (name, i), keep in zip(free_blocks(model), kept):
        parts[name][i] = keep
    return Decisions.static(parts["attn"], parts["ffn"], batch, model.device)


def best_static(shared: Trained, model: SwitchableModel, most: float) -> tuple[bool, ...]:
    """The mask of at most that cost with the best exact match on validation data (of equal ones the least loss).

    All masks are tried where there are at most ten decisions; otherwise blocks are left out one after the other, always
    the one that is missed least.
    """
    count = len(free_blocks(model))
    rows = len(shared.draw(shared.tested, "validation")["input_ids"])

    def tried(kept: tuple[bool, ...]) -> tuple[float, float, float]:
        found = measure(shared, model, mask_of(model, kept, rows), "validation")
        return found["cost"], found["exact"], -found["nll"]

    if count <= EXHAUSTIVE:
        results = {kept: tried(kept) for kept in itertools.product((False, True), repeat=count)}
        allowed = {k: r for k, r in results.items() if r[0] <= most} or {(False,) * count: (0.0, 0.0, 0.0)}
        return max(allowed, key=lambda k: allowed[k][1:])
    kept = (True,) * count
    while any(kept) and tried(kept)[0] > most:
        ones = [i for i in range(count) if kept[i]]
        fewer = {i: (*kept[:i], False, *kept[i + 1 :]) for i in ones}
        best = max(ones, key=lambda i: tried(fewer[i])[1:])
        kept = fewer[best]
    return kept


def by_chance(shared: Trained, model: SwitchableModel, chosen: Decisions) -> Decisions:
    """Every block kept at random as often as in given decisions."""
    import torch

    from assay.serving import Decisions

    draw = torch.Generator().manual_seed(shared.seed)

    def random(gates: torch.Tensor) -> torch.Tensor:
        share = gates.float().mean(0, keepdim=True).cpu()
        return (torch.rand(gates.shape, generator=draw) < share).to(gates.device)

    return Decisions(random(chosen.attn), random(chosen.ffn), chosen.tokens)


def leaving_early(shared: Trained, model: SwitchableModel, most: float) -> dict[str, float]:
    """Each row leaves after the first layers whose prediction of the whole answer is confident enough.

    Layers are whole; the final norm and head read every layer. The threshold is the one that costs as much as is
    allowed on validation data. The row's least confidence over its targets decides, which decoding could only know at
    the end: a bound in its favour. The head was not trained to read the layers before the last, as it would not be for
    a user who only adds a threshold: that is against it.
    """
    import torch

    from assay.serving.switchable.decisions import sizes

    def run(purpose: str) -> tuple[list[Any], Any, list[float]]:
        batch = shared.draw(shared.tested, purpose)
        rows, outs, prices = len(batch["labels"]), [], []
        with torch.inference_mode():
            for depth in range(sizes(model.config)["encoder"] + 1, model.layers + 1):  # an encoder runs as a whole
                chosen = mask_of(model, tuple(i < depth for _, i in free_blocks(model)), rows)
                outs.append(model(**inputs(model, batch), decisions=chosen).logits)
                prices.append(price(model, chosen, batch, False).mean().item())
        return outs, batch["labels"], prices

    def confidence(outs: list[Any], labels: Any) -> torch.Tensor:
        """By level and row; nobody stays after the last level."""
        levels = []
        for logits in outs[:-1]:
            ours, _, counted = _aligned(logits, labels, model.encodes)
            levels.append(ours.softmax(-1).amax(-1).masked_fill(~counted, 1.0).amin(1).cpu())
        return torch.stack([*levels, torch.full_like(levels[0], torch.inf)])

    def depth_at(sure: torch.Tensor, threshold: float) -> torch.Tensor:
        return (sure >= threshold).long().argmax(0)  # the first level that is sure enough

    outs, labels, prices = run("validation")
    table, sure = torch.tensor(prices), confidence(outs, labels)
    tried = {t: table[depth_at(sure, t)].mean().item() for t in np.linspace(0.0, 1.0, 51)}
    allowed = [t for t, cost in tried.items() if cost <= most] or [0.0]
    outs, labels, prices = run("test")
    depth = depth_at(confidence(outs, labels), max(allowed))
    final = torch.stack(outs)[depth.to(outs[0].device), torch.arange(len(depth), device=outs[0].device)]
    return {**scores(final, labels, model.encodes), "cost": torch.tensor(prices)[depth].mean().item()}


def prune(model: Any, chosen: Any) -> Any:
    """The model with the blocks that the first row leaves out really taken away: what pruning by hand would give."""
    import torch

    class Less(torch.nn.Module):
        """A GPT-2 layer without one or both of its blocks."""

        def __init__(self, layer: Any, attn: bool, ffn: bool) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleDict()
            if attn:
                self.parts.update({"ln_1": layer.ln_1, "attn": layer.attn})
            if ffn:
                self.parts.update({"ln_2": layer.ln_2, "mlp": layer.mlp})

        def forward(self, h: torch.Tensor, cache: Any = None, mask: Any = None, *_: Any, **kw: Any) -> torch.Tensor:
            kw.pop("encoder_attention_mask", None)
            if "attn" in self.parts:
                h = h + self.parts["attn"](self.parts["ln_1"](h), cache=cache, attention_mask=mask, **kw)[0]
            return h + self.parts["mlp"](self.parts["ln_2"](h)) if "mlp" in self.parts else h

    small = copy.deepcopy(model.model)
    layers, attn, ffn = list(small.base_model.h), chosen.attn[0].tolist(), chosen.ffn[0].tolist()
    kept = [Less(x, i == 0 or a, i == 0 or f) for i, (x, a, f) in enumerate(zip(layers, attn, ffn))]
    small.base_model.h = torch.nn.ModuleList(layer for layer in kept if len(layer.parts))
    return small
