"""NormGD as a torch optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from assay.statistics.normgd.eigenvalue import SAFETY, guarded_eigenvalue, lanczos_extremes, loss_floor

_HOW = "def closure(backward=False): return loss(model(x), y)"
#: Options that hold for the whole optimizer. They live in the groups so that ``state_dict`` keeps them.
_SHARED = ("eig", "power_iters", "guard", "per_group", "maximize", "seed")


class NormGD(torch.optim.Optimizer):
    """Gradient descent with the step ``lr / lambda_max(Hessian)``, for losses of the full batch.

    ``p <- p - lr / lambda_max * gradient``, with one ``lambda_max`` for all parameters (or one for each group). It
    comes from Hessian-vector products by double backward, about two gradients each.

    Parameters
    ----------
    params
        Parameters or groups, real and dense; several devices and floating dtypes may be mixed.
    lr
        Step in units of the inverse curvature, positive; of a group. On ``|p|^q`` a step multiplies the distance by
        ``1 - lr / (q - 1)``, so that values in (0, 2) are stable for every ``q >= 2``. Default 0.5 (ours); 1 is fast.
    eig
        ``"power"``: ``power_iters`` Lanczos products (20 at first), started at the last eigenvector, and the estimate
        raised by 5%. ``"exact"``: the whole Hessian, d products, and its eigenvalues.
    power_iters
        Products of a step, at least 1. Default 3.
    guard
        Divide by the spectral norm where the largest eigenvalue is not clearly positive, see
        :func:`guarded_eigenvalue`.
    weight_decay
        Decoupled, of a group: each step also multiplies parameters by ``1 - lr * weight_decay``.
    per_group
        One eigenvalue for each parameter group instead of one for all.
    maximize
        Ascend.
    seed
        Of the noise in the starts of the Lanczos runs.

    Notes
    -----
    ``step(closure)`` needs a closure that returns the loss *with its graph*: it must not call ``backward()``. One with
    an argument ``backward`` is called with ``backward=False``. ``p.grad`` is neither read nor written. The state of
    each parameter holds ``step``, ``eigenvalue`` and, with ``"power"``, its part of the ``eigenvector``.

    With minibatches the curvature of a batch is noise near a singular optimum: the theory is for the full batch.

    Source: "Improving Computational Complexity in Statistical Models with Local Curvature Information", ICML 2024,
    the NormGD algorithm. Guard, defaults and the Lanczos estimate are ours.

    Examples
    --------
    >>> import torch
    >>> p = torch.ones(3, requires_grad=True)
    >>> optimizer = NormGD([p], lr=1.0)
    >>> for _ in range(20):
    ...     loss = optimizer.step(lambda: (p @ p) ** 2)
    >>> bool(p.norm() < 1e-2)
    True
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.5,
        eig: Literal["power", "exact"] = "power",
        power_iters: int = 3,
        guard: bool = True,
        weight_decay: float = 0.0,
        per_group: bool = False,
        maximize: bool = False,
        seed: int = 0,
    ) -> None:
        if eig not in ("power", "exact"):
            raise ValueError(f"eig must be 'power' or 'exact', got {eig!r}")
        if isinstance(power_iters, bool) or not isinstance(power_iters, int) or power_iters < 1:
            raise ValueError(f"power_iters must be an integer of at least 1, got {power_iters!r}")
        options = (eig, power_iters, guard, per_group, maximize, seed)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay} | dict(zip(_SHARED, options)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as every torch optimizer does; options other than lr and weight_decay are those of the first.

        Raises
        ------
        ValueError
            ``lr`` is not positive, or ``weight_decay`` negative.
        TypeError
            A parameter is complex.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        problem: Exception | None = None
        if not 0 < float(group["lr"]) < float("inf"):
            problem = ValueError(f"lr must be positive and finite, got {group['lr']}")
        elif not 0 <= group["weight_decay"] < float("inf"):
            problem = ValueError(f"weight_decay must be finite and not negative, got {group['weight_decay']}")
        elif any(torch.is_complex(p) for p in group["params"]):
            problem = TypeError("params must be real, got a complex one: optimise torch.view_as_real of it")
        if problem is not None:
            self.param_groups.pop()
            raise problem
        group |= {name: self.param_groups[0][name] for name in _SHARED}

    def step(self, closure: Callable[..., Any] | None = None) -> Any:
        """Take a step.

        Parameters
        ----------
        closure
            ``closure()`` or ``closure(backward=False)`` computes the loss, one number, and returns it with its graph.

        Returns
        -------
        Tensor
            The loss before the step, detached.

        Raises
        ------
        RuntimeError
            There is no closure; or its loss has no graph (any more), or not one element; or a gradient is sparse.
        FloatingPointError
            The loss, the gradient or the curvature is not finite, or the Hessian is zero where the gradient is not.
        """
        if closure is None:
            raise RuntimeError(f"NormGD needs a closure: {_HOW}")
        with torch.enable_grad():
            loss = closure(backward=False) if _takes_backward(closure) else closure()
            if not torch.is_tensor(loss) or not loss.requires_grad or loss.numel() != 1:
                raise RuntimeError(
                    f"the closure must return the loss, one number, with its graph, without backward() or no_grad(): "
                    f"{_HOW}"
                )
            members = [[(p, g) for p in g["params"] if p.requires_grad] for g in self.param_groups]
            blocks = members if self.param_groups[0]["per_group"] else [list(chain(*members))]
            updates = [update for block in blocks if block for update in self._updates(loss, block)]
        with torch.no_grad():
            for p, gradient, group, lam in updates:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(gradient * (group["lr"] / lam))
        return loss.detach()

    def _updates(
        self, loss: Any, block: list[tuple[Any, dict[str, Any]]]
    ) -> list[tuple[Any, Any, dict[str, Any], float]]:
        """Parameter, gradient, group and eigenvalue, of the parameters in the block that the loss depends on."""
        options = block[0][1]
        objective = (-loss if options["maximize"] else loss).reshape(())
        try:
            found = torch.autograd.grad(objective, [p for p, _ in block], create_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "second time" in str(error):
                raise RuntimeError(f"the closure must not call backward(): {_HOW}") from error
            raise
        used = [(p, g, group) for (p, group), g in zip(block, found) if g is not None]
        if not used:
            return []
        if any(g.layout != torch.strided for _, g, _ in used):
            raise RuntimeError("NormGD does not take sparse gradients: build the embedding with sparse=False")
        params = [p for p, _, _ in used]
        device, dtype = params[0].device, torch.float32
        for p in params:
            dtype = torch.promote_types(dtype, p.dtype)

        def flat(parts: Any) -> torch.Tensor:
            return torch.cat([t.reshape(-1).to(device, dtype) for t in parts])

        gradient = flat(g for _, g, _ in used)
        value = float(loss.detach())
        if not torch.isfinite(loss).all() or not torch.isfinite(gradient).all():
            raise FloatingPointError(f"loss {value} or its gradient is not finite")
        if not gradient.any():
            return []

        def hvp(v: torch.Tensor) -> torch.Tensor:
            if not gradient.requires_grad:
                return torch.zeros_like(v)
            out = torch.autograd.grad(gradient, params, v, retain_graph=True, allow_unused=True)
            return flat(torch.zeros_like(p) if o is None else o for p, o in zip(params, out))

        states = [self.state[p] for p in params]
        step = max(s.get("step", 0) for s in states)
        if options["eig"] == "exact":
            H = torch.stack([hvp(row) for row in torch.eye(gradient.numel(), dtype=dtype, device=device)])
            if not torch.isfinite(H).all():
                raise FloatingPointError("the Hessian is not finite")
            values = torch.linalg.eigvalsh((H + H.T) / 2)
            low, high, raise_by, vector = float(values[0]), float(values[-1]), 1.0, None
        else:
            draw = torch.Generator(device).manual_seed(options["seed"] + 1_000_003 * step)
            start = torch.randn(gradient.numel(), generator=draw, device=device, dtype=dtype)
            products = 20
            if all("eigenvector" in s for s in states):
                # A little noise lets another direction take over as the largest.
                last = flat(s["eigenvector"] for s in states)
                start, products = last + 0.01 * last.norm() / start.norm() * start, options["power_iters"]
            low, high, vector = lanczos_extremes(hvp, start, products)
            raise_by = SAFETY
        lam = raise_by * guarded_eigenvalue(low, high, guard=options["guard"], floor=loss_floor(value))
        at = 0
        for p, state in zip(params, states):
            state["step"], state["eigenvalue"] = step + 1, lam
            if vector is not None:
                state["eigenvector"] = vector[at : at + p.numel()].view(p.shape).to(p, copy=True)
                at += p.numel()
        return [(p, g.detach(), group, lam) for p, g, group in used]


def _takes_backward(closure: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(closure).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "backward" or p.kind is p.VAR_KEYWORD for p in parameters)
