"""The losses as modules, in the conventions of lightly (two outputs) and pytorch-metric-learning (labels)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from assay.representation.dhel import losses
from assay.representation.dhel.kernels import Kernel, kernel_config, resolve_kernels
from assay.representation.dhel.losses import Variant, check_number


class _PairLoss(nn.Module):
    """A loss of two views without state: its options, and how it is written to JSON and back."""

    def __init__(self, gather_distributed: bool, chunk_size: int | None, check_finite: bool | None) -> None:
        super().__init__()
        losses.check_chunk(chunk_size)
        self.gather_distributed, self.chunk_size, self.check_finite = gather_distributed, chunk_size, check_finite
        self.options: dict[str, Any] = {}

    def _keywords(self) -> dict[str, Any]:
        shared = ("gather_distributed", "chunk_size", "check_finite")
        return {**self.options, **{name: getattr(self, name) for name in shared}}

    def to_config(self) -> dict[str, Any]:
        """Everything that makes the loss, as JSON values; :meth:`from_config` takes it back.

        Raises
        ------
        TypeError
            A kernel of one's own cannot be written.
        """
        return {"loss": type(self).__name__, **self._keywords()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The loss of a configuration.

        Raises
        ------
        ValueError
            It is of another class.
        """
        options = dict(config)
        if (found := options.pop("loss", None)) != cls.__name__:
            raise ValueError(f"config must be that of a {cls.__name__}, got that of {found!r}")
        return cls(**options)

    def extra_repr(self) -> str:
        """What the printed module shows."""
        return ", ".join(f"{k}={v!r}" for k, v in self._keywords().items() if v is not None and v is not False)


class DHELLoss(_PairLoss):
    """Decoupled hyperspherical energy loss; :func:`dhel_loss` has the formula.

    Parameters
    ----------
    temperature
        ``tau > 0``; 0.3 is the default of the authors' code.
    variant
        "official" (each view's energy counts once, as in the authors' code), "paper" (a half, as in the paper's
        symmetric form) or "single" (the energy of the first view only).
    energy_weight
        Weight of the energies, in place of the variant's.
    gather_distributed, chunk_size, check_finite
        See :mod:`assay.representation.dhel.losses`.

    Examples
    --------
    >>> import torch
    >>> u = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    >>> v = torch.tensor([[0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    >>> round(DHELLoss(temperature=1.0)(u, v).item(), 4)
    0.4496
    """

    def __init__(
        self,
        temperature: float = 0.3,
        variant: Variant = "official",
        energy_weight: float | None = None,
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        losses.dhel_weight(variant, energy_weight)
        tau = check_number("temperature", temperature)
        self.options = {"temperature": tau, "variant": variant, "energy_weight": energy_weight}

    @property
    def energy_weight(self) -> float:
        """Weight of the energy of each view, whichever way it was set: half in the paper, 1 in the authors' code."""
        return losses.dhel_weight(self.options["variant"], self.options["energy_weight"])

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.dhel_loss(out0, out1, **self._keywords())


class KCLLoss(_PairLoss):
    """Kernel contrastive loss; :func:`kcl_loss` has the formula and the kernels.

    Parameters
    ----------
    energy_kernel
        "gaussian", "log", "imq", "riesz", "gaussian_riesz", a kernel object, or any callable of squared distances.
    align_kernel
        ``None``: the same.
    t
        Parameter of kernels that are given by name.
    gamma
        Weight of the energy, ``>= 0``; 16 in the authors' code.
    variant
        "official", "paper" or "single".
    gather_distributed, chunk_size, check_finite
        See :mod:`assay.representation.dhel.losses`.
    """

    def __init__(
        self,
        energy_kernel: str | Kernel | Mapping[str, Any] = "gaussian",
        align_kernel: str | Kernel | Mapping[str, Any] | None = None,
        t: float = 2.0,
        gamma: float = 16.0,
        variant: Variant = "official",
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        losses.check_variant(variant)
        aligned, energy = resolve_kernels(energy_kernel, align_kernel, t)
        self.options = {
            "energy_kernel": energy,
            "align_kernel": aligned,
            "gamma": check_number("gamma", gamma, least=0.0),
            "variant": variant,
        }

    def to_config(self) -> dict[str, Any]:
        """As for every loss; kernels are written with their parameters."""
        kernels = {k: kernel_config(self.options[k]) for k in ("energy_kernel", "align_kernel")}
        return super().to_config() | kernels

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.kcl_loss(out0, out1, **self._keywords())


class InfoNCELoss(_PairLoss):
    """InfoNCE between views, for comparison; see :func:`info_nce_loss`."""

    def __init__(
        self,
        temperature: float = 0.3,
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        self.options = {"temperature": check_number("temperature", temperature)}

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.info_nce_loss(out0, out1, **self._keywords())


class NTXentLoss(_PairLoss):
    """NT-Xent of SimCLR, for comparison; see :func:`ntxent_loss`."""

    def __init__(
        self,
        temperature: float = 0.3,
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        self.options = {"temperature": check_number("temperature", temperature)}

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.ntxent_loss(out0, out1, **self._keywords())


class DCLLoss(_PairLoss):
    """Decoupled contrastive loss, for comparison; see :func:`dcl_loss`."""

    def __init__(
        self,
        temperature: float = 0.3,
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        self.options = {"temperature": check_number("temperature", temperature)}

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.dcl_loss(out0, out1, **self._keywords())


class AlignUniformLoss(_PairLoss):
    """Alignment and uniformity, for comparison; see :func:`align_uniform_loss`."""

    def __init__(
        self,
        lam: float = 1.0,
        t: float = 2.0,
        alpha: float = 2.0,
        gather_distributed: bool = False,
        chunk_size: int | None = None,
        check_finite: bool | None = None,
    ) -> None:
        super().__init__(gather_distributed, chunk_size, check_finite)
        self.options = {
            "lam": check_number("lam", lam, least=0.0),
            "t": check_number("t", t),
            "alpha": check_number("alpha", alpha),
        }

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Loss of two views ``(M, d)``, a scalar."""
        return losses.align_uniform_loss(out0, out1, **self._keywords())


def from_labels(loss: nn.Module) -> nn.Module:
    """A loss of two views, called as the losses of pytorch-metric-learning are.

    The result takes ``(embeddings, labels, indices_tuple=None, ref_emb=None, ref_labels=None)``. Without ``ref_emb``,
    each label must belong to exactly two rows, which are a pair; the earlier one is the first view. With it, each label
    must belong to one row of ``embeddings`` and one of ``ref_emb``. ``SelfSupervisedLoss`` of that package accepts only
    its own losses; with this call, labels ``torch.arange(M).repeat(2)`` do the same.

    Raises
    ------
    ValueError
        When called: labels do not come in pairs, or a miner's ``indices_tuple`` is given (there is nothing to mine).
    """
    if not isinstance(loss, nn.Module):
        raise TypeError(f"loss must be a module of two views, got {type(loss).__name__}")
    return _Labelled(loss)


class _Labelled(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Loss of labelled rows ``(n, d)``, a scalar."""
        if indices_tuple is not None:
            raise ValueError("indices_tuple must be None: every row is compared with every other, nothing is mined")
        if (ref_emb is None) != (ref_labels is None):
            raise ValueError("ref_emb and ref_labels must be given together")
        order = _order("labels", labels, embeddings)
        if ref_emb is None or ref_labels is None:
            found = labels.to(embeddings.device)[order]
            if len(found) % 2 or bool((found[::2] != found[1::2]).any()) or bool((found[1:-1:2] == found[2::2]).any()):
                raise ValueError("labels must come in pairs: each must belong to exactly two rows")
            value: Tensor = self.loss(embeddings[order[::2]], embeddings[order[1::2]])
            return value
        ref_order = _order("ref_labels", ref_labels, ref_emb)
        left, right = labels.to(embeddings.device)[order], ref_labels.to(embeddings.device)[ref_order]
        if left.shape != right.shape or bool((left != right).any()) or bool((left[1:] == left[:-1]).any()):
            raise ValueError("labels must come in pairs: each must belong to one row of embeddings and one of ref_emb")
        value = self.loss(embeddings[order], ref_emb[ref_order])
        return value


def _order(name: str, labels: Any, rows: Any) -> Tensor:
    """Rows by label, earlier ones first."""
    if not isinstance(labels, Tensor) or not isinstance(rows, Tensor):
        raise TypeError(f"{name} and its rows must be torch tensors, got {type(labels).__name__}")
    if rows.ndim != 2 or labels.shape != rows.shape[:1]:
        raise ValueError(f"{name} must have shape (n,) for rows (n, d), got {tuple(labels.shape)}, {tuple(rows.shape)}")
    return torch.argsort(labels.to(rows.device), stable=True)
