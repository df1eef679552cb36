"""A tensor that is held packed and turns dense when something computes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from assay.serving.kivi.store import PackedStore


class PackedView(Tensor):
    """Keys or values ``[batch, kv_heads, tokens, head_dim]`` as one attention call sees them: packed, then dense.

    It looks like a dense tensor of that shape. The attention that :func:`register_kivi_attention` registers computes on
    ``store`` and ``residual`` directly. Any other operation gets a dense copy, which lives as long as that operation
    needs it: every attention implementation works, at the price of that temporary.
    """

    store: PackedStore
    residual: Tensor

    # Results of operations are plain tensors, never views.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[PackedView], store: PackedStore, residual: Tensor) -> PackedView:  # noqa: D102
        batch, heads, tokens, dim = residual.shape
        view = torch.Tensor._make_wrapper_subclass(
            cls, (batch, heads, store.length + tokens, dim), dtype=residual.dtype, device=residual.device
        )
        view.store, view.residual = store.snapshot(), residual
        return view

    def dense(self) -> Tensor:
        """The whole as a plain tensor."""
        return torch.cat([self.store.dequantize(self.residual.dtype), self.residual], -2)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedView(shape={tuple(self.shape)}, dtype={self.dtype}, packed={self.store.length})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(PackedView, PackedView.dense, (args, kwargs or {}))
        return func(*args, **kwargs)
