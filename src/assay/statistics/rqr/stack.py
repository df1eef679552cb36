"""Training many small networks at once, as one stacked model.

A network of two hidden layers of 64 is so small that Python and memory traffic, not arithmetic, set its training time.
:class:`StackedMLP` holds the parameters of K networks in one array and moves all of them with one batched matrix
product a layer; forward and backward passes are written out and reuse their buffers, and the dropout masks are windows
of a bank of random bits. Member k never sees the others: it does what it would do alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

#: ``loss(out (K, b, n_out), y (b,) or (K, b), extra) -> (K,)``, the mean loss of each member.
Loss = Callable[[Tensor, Tensor, Any], Tensor]


class Stack(Protocol):
    """What :func:`fit_stack` trains."""

    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (K, n, n_out) without dropout and without gradient."""
        ...

    def train_forward(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Outputs (K, b, n_out) with dropout; remembers what :meth:`backward` needs."""
        ...

    def backward(self, grad: Tensor) -> None:
        """Take the gradient with respect to the last outputs, (K, b, n_out)."""
        ...

    def step(self) -> None:
        """One step of Adam for every member."""
        ...

    def keep(self, members: Tensor) -> None:
        """Remember the parameters of some members (bool (K,)) as their best."""
        ...

    def restore(self) -> None:
        """Go back to the best parameters."""
        ...


class StackedMLP:
    """K multilayer perceptrons of one shape, ``Linear-ReLU-Dropout-...-Linear``, in one array.

    Weights are orthogonal and biases zero at the start, but for the bias of the last layer, which is ``out_bias``.

    Parameters
    ----------
    n_in, hidden, n_out
        Widths of the input, of each hidden layer, of the output. ``hidden=()`` is a linear model.
    seeds
        One integer a member; decides its initial weights. The length is K.
    out_bias
        Bias of the last layer, n_out values. For interval losses take ``(-0.5, 0.5)``, never equal values.
    dropout, lr
        Numbers, or one for each member.
    dtype, device
        Of parameters and inputs.

    Attributes
    ----------
    flat
        All parameters, (K, P).
    weights, biases
        Views into ``flat``: for each layer (K, fan_in, fan_out) and (K, 1, fan_out).
    """

    def __init__(
        self,
        n_in: int,
        hidden: Sequence[int] = (64, 64),
        n_out: int = 2,
        *,
        seeds: Sequence[int] = (0,),
        out_bias: Sequence[float] = (-0.5, 0.5),
        dropout: float | Sequence[float] = 0.0,
        lr: float | Sequence[float] = 1e-2,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.sizes = [int(n_in), *(int(h) for h in hidden), int(n_out)]
        if min(self.sizes) < 1:
            raise ValueError(f"n_in, hidden and n_out must be positive, got {self.sizes}")
        if not len(seeds):
            raise ValueError("seeds is empty: a stack needs at least one member")
        if len(out_bias) != n_out:
            raise ValueError(f"out_bias must hold n_out={n_out} values, got {len(out_bias)}")
        self.members = len(seeds)
        self.dropout = self._each("dropout", dropout)
        if not all(0 <= p < 1 for p in self.dropout):
            raise ValueError(f"dropout must lie in [0, 1), got {dropout!r}")
        rates = self._each("lr", lr)
        if not all(0 < r < math.inf for r in rates):
            raise ValueError(f"lr must be positive, got {lr!r}")
        shapes = list(zip(self.sizes[:-1], self.sizes[1:]))
        self.flat = torch.zeros(self.members, sum(i * o + o for i, o in shapes), dtype=dtype)
        for row, seed in zip(self.flat, seeds):
            generator = torch.Generator().manual_seed(int(seed))
            at = 0
            for i, o in shapes:
                w = nn.init.orthogonal_(torch.empty(o, i), generator=generator)
                row[at : at + i * o] = w.T.reshape(-1)
                at += i * o + o
            row[-n_out:] = torch.as_tensor(out_bias)
        self.flat = self.flat.to(device)
        self.grad, self.best = torch.zeros_like(self.flat), self.flat.clone()
        self.weights, self.biases = self._views(self.flat, shapes)
        self._grad_w, self._grad_b = self._views(self.grad, shapes)
        self._lr = torch.tensor(rates, dtype=dtype, device=device)[:, None]
        self._mean, self._square, self._steps = torch.zeros_like(self.flat), torch.zeros_like(self.flat), 0
        self._buffers: list[Tensor] = []
        self._scratch: list[Tensor] = []
        self._inputs: list[Tensor] = []
        self._banks: dict[float, Tensor] = {}
        self._drawn = 0

    def _each(self, name: str, value: float | Sequence[float]) -> list[float]:
        values = list(value) if isinstance(value, Sequence) else [float(value)] * self.members
        if len(values) != self.members:
            raise ValueError(f"{name} must be a number or {self.members} numbers, one a member; got {len(values)}")
        return [float(v) for v in values]

    def _views(self, flat: Tensor, shapes: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        weights, biases, at = [], [], 0
        for i, o in shapes:
            weights.append(flat[:, at : at + i * o].view(-1, i, o))
            biases.append(flat[:, at + i * o : at + i * o + o].view(-1, 1, o))
            at += i * o + o
        return weights, biases

    def member(self, k: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Weights (fan_in, fan_out) and biases (fan_out,) of member ``k`` as NumPy arrays, layer by layer."""
        return [
            (w[k].detach().cpu().numpy().copy(), b[k, 0].detach().cpu().numpy().copy())
            for w, b in zip(self.weights, self.biases)
        ]

    @torch.no_grad()
    def __call__(self, X: Tensor) -> Tensor:
        """Outputs for ``X`` of shape (n, n_in), or (K, n, n_in) with own inputs for each member: (K, n, n_out)."""
        h = X if X.ndim == 3 else X.expand(self.members, *X.shape)
        for w, b in zip(self.weights[:-1], self.biases[:-1]):
            h = torch.baddbmm(b, h, w).relu_()
        # A product with two columns is several times faster the other way round.
        out = torch.baddbmm(
            self.biases[-1].transpose(1, 2), self.weights[-1].transpose(1, 2).contiguous(), h.transpose(1, 2)
        )
        return out.transpose(1, 2)

    def _drop(self, h: Tensor, generator: torch.Generator) -> None:
        """Multiply activations (K, b, width) by masks, each a window at a random place of the bank of its rate."""
        size = h.shape[1] * h.shape[2]
        longest = max(self.sizes[1:-1]) * h.shape[1]
        if self._drawn % 16 == 0:  # counted in layers: with two of them the bits are renewed every 8 steps
            self._banks.clear()
        self._drawn += 1
        starts = torch.randint(0, 3 * longest // 16 + 1, (self.members,), generator=generator).tolist()
        for k, p in enumerate(self.dropout):
            if p == 0:
                continue
            bank = self._banks.get(p)
            if bank is None or bank.numel() < 4 * longest:
                bank = torch.empty(4 * longest, dtype=h.dtype)
                bank.bernoulli_(1.0 - p, generator=generator).div_(1.0 - p)
                bank = self._banks[p] = bank.to(h.device)
            at = 16 * starts[k]
            h[k].mul_(bank[at : at + size].view(h.shape[1], h.shape[2]))

    @torch.no_grad()
    def train_forward(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Outputs (K, b, n_out) with dropout."""
        rows = X.shape[-2]
        if not self._buffers or self._buffers[0].shape[1] < rows:
            self._buffers = [X.new_empty(self.members, rows, width) for width in self.sizes[1:-1]]
            self._scratch = [X.new_empty(self.members * rows * max(self.sizes[1:])) for _ in range(2)]
        h = X if X.ndim == 3 else X.expand(self.members, *X.shape)
        self._inputs = [h]
        for i, (w, b) in enumerate(zip(self.weights[:-1], self.biases[:-1])):
            out = self._buffers[i][:, :rows]
            torch.baddbmm(b, h, w, out=out).relu_()
            if any(self.dropout):
                self._drop(out, generator)
            self._inputs.append(h := out)
        out = torch.baddbmm(
            self.biases[-1].transpose(1, 2), self.weights[-1].transpose(1, 2).contiguous(), h.transpose(1, 2)
        )
        return out.transpose(1, 2)

    @torch.no_grad()
    def backward(self, grad: Tensor) -> None:
        """Gradients of all parameters, into ``grad``, from that of the last outputs (K, b, n_out)."""
        rows = grad.shape[1]
        g = grad.transpose(1, 2).contiguous()
        self._grad_w[-1].copy_(torch.bmm(g, self._inputs[-1]).transpose(1, 2))
        self._grad_b[-1].copy_(g.sum(-1)[:, None])
        if len(self.weights) == 1:
            return
        scale = (1.0 / (1.0 - torch.tensor(self.dropout, dtype=grad.dtype, device=grad.device)))[:, None, None]
        d = g.transpose(1, 2)
        for i in range(len(self.weights) - 2, -1, -1):
            h, width = self._inputs[i + 1], self.sizes[i + 1]
            back = (self.weights[i + 1] * scale).transpose(1, 2)
            # Two buffers in turn: the product reads the one that was written for the layer above.
            new = self._scratch[i % 2][: self.members * rows * width].view(self.members, rows, width)
            torch.bmm(d, back, out=new)
            # h > 0 where the unit was on and not dropped.
            d = torch.ops.aten.threshold_backward.grad_input(new, h, 0, grad_input=new)
            x = self._inputs[i]
            self._grad_w[i].copy_(torch.bmm(x.transpose(1, 2), d))
            self._grad_b[i].copy_(d.sum(1, keepdim=True))

    @torch.no_grad()
    def step(self) -> None:
        """Adam (0.9, 0.999, 1e-8), as in torch, with a rate for each member."""
        self._steps += 1
        self._mean.lerp_(self.grad, 0.1)
        self._square.mul_(0.999).addcmul_(self.grad, self.grad, value=0.001)
        size = (self._square / (1.0 - 0.999**self._steps)).sqrt_().add_(1e-8)
        self.flat.sub_((self._mean / size).mul_(self._lr / (1.0 - 0.9**self._steps)))

    def keep(self, members: Tensor) -> None:
        """Remember the parameters of some members (bool (K,)) as their best."""
        self.best[members] = self.flat[members]

    def restore(self) -> None:
        """Go back to the best parameters."""
        self.flat.copy_(self.best)


class ModuleStack:
    """Any torch modules behind the interface of :class:`StackedMLP`, one after the other: correct, and not fast."""

    def __init__(self, modules: Sequence[nn.Module], lr: float = 1e-2) -> None:
        self.modules = list(modules)
        self.members = len(self.modules)
        parameters = [p for m in self.modules for p in m.parameters() if p.requires_grad]
        if not parameters:
            raise ValueError("estimator gives a module without parameters: there is nothing to train")
        self._optimizer = torch.optim.Adam(parameters, lr=lr)
        self._best = [self._state(m) for m in self.modules]

    @staticmethod
    def _state(module: nn.Module) -> dict[str, Tensor]:
        return {k: v.detach().clone() for k, v in module.state_dict().items()}

    @torch.no_grad()
    def __call__(self, X: Tensor) -> Tensor:
        """Outputs (K, n, n_out)."""
        return torch.stack([m.eval()(X) for m in self.modules])

    def train_forward(self, X: Tensor, generator: torch.Generator) -> Tensor:
        """Outputs (K, b, n_out) in training mode."""
        self._out = torch.stack([m.train()(X) for m in self.modules])
        return self._out.detach()

    def backward(self, grad: Tensor) -> None:
        """Gradients of all parameters."""
        self._optimizer.zero_grad(set_to_none=True)
        self._out.backward(grad)

    def step(self) -> None:
        """One step of Adam."""
        self._optimizer.step()

    def keep(self, members: Tensor) -> None:
        """Remember the state of some members (bool (K,)) as their best."""
        for k in members.nonzero().flatten().tolist():
            self._best[k] = self._state(self.modules[k])

    def restore(self) -> None:
        """Go back to the best states."""
        for module, state in zip(self.modules, self._best):
            module.load_state_dict(state)


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """Treat denormal numbers as zero inside, and set the mode of this thread back afterwards.

    A fit that saturates makes denormal gradients, which cost a CPU many times the time of normal numbers.
    """
    tiny = torch.tensor([torch.finfo(torch.float32).tiny])
    was_on = bool((tiny * 0.5 == 0).item())
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)


@dataclass(frozen=True)
class StackFit:
    """What :func:`fit_stack` gives: the trained stack, and for each member its best objective and the epoch of it.

    Without an objective the last epoch counts, and ``objective`` is NaN.
    """

    net: Any
    objective: np.ndarray
    epoch: np.ndarray


def fit_stack(
    net: Stack,
    X: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    epochs: int = 300,
    batch_size: int | None = None,
    seed: int = 0,
    draw: Callable[[Tensor, Tensor, torch.Generator], tuple[Tensor, Tensor, Any]] | None = None,
    objective: Callable[[Any], Tensor] | None = None,
) -> StackFit:
    """Train all members of a stack on the same rows, and give each its best parameters.

    Parameters
    ----------
    net
        The stack, changed in place.
    X, y
        Features (n, p) and targets (n,), of the dtype and on the device of the stack.
    loss
        ``loss(out, y, extra) -> (K,)``: the mean loss of each member, from outputs (K, b, n_out) and targets (b,).
        Gradients go by autograd from there to the outputs.
    epochs, batch_size
        Passes over the data, and rows in a step; ``None`` takes all rows. Members share the order of the rows.
    seed
        Decides the order of the rows, dropout and what ``draw`` draws.
    draw
        ``draw(X, y, generator) -> (X, y, extra)``, called at every step: random levels as an additional input, say.
    objective
        ``objective(net) -> (K,)``, computed after every epoch, lower is better; each member gets back the parameters of
        its best epoch. Without it the last epoch counts.

    Raises
    ------
    FloatingPointError
        Every member came to parameters (or, with ``objective``, only to values) that are not finite.
    """
    if X.ndim != 2 or y.shape != X.shape[:1] or not len(X):
        raise ValueError(f"X must have shape (n, p) and y (n,), n > 0; got {tuple(X.shape)} and {tuple(y.shape)}")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    n = len(X)
    size = n if batch_size is None else min(int(batch_size), n)
    if size < 1:
        raise ValueError(f"batch_size must be at least 1 or None, got {batch_size}")
    generator = torch.Generator().manual_seed(int(seed))
    members = int(getattr(net, "members"))  # noqa: B009 - not part of the protocol's methods
    best, epoch_of = torch.full((members,), math.inf), torch.full((members,), epochs - 1)
    with flush_denormals():
        for epoch in range(epochs):
            order = None if size == n else torch.randperm(n, generator=generator).to(X.device)
            for start in range(0, n, size):
                rows = slice(None) if order is None else order[start : start + size]
                Xb, yb, extra = X[rows], y[rows], None
                if draw is not None:
                    Xb, yb, extra = draw(Xb, yb, generator)
                out = net.train_forward(Xb, generator).requires_grad_()
                with torch.enable_grad():
                    (grad,) = torch.autograd.grad(loss(out, yb, extra).sum(), out)
                net.backward(grad)
                net.step()
            if objective is not None:
                value = objective(net).detach().cpu().double()
                better = value < best  # NaN is never better
                if bool(better.any()):
                    net.keep(better)
                    best[better] = value[better].to(best.dtype)
                    epoch_of[better] = epoch
        if objective is not None:
            net.restore()
    lost = isinstance(net, StackedMLP) and not bool(torch.isfinite(net.flat).all(dim=1).any())
    if lost or (objective is not None and bool(torch.isinf(best).all())):
        raise FloatingPointError("training diverged in every member: take a smaller lr, or check the scale of y")
    return StackFit(net, best.numpy() if objective is not None else np.full(members, math.nan), epoch_of.numpy())
