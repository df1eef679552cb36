"""A small language model that attends to the hidden states of a large one for all earlier blocks of tokens."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from assay._state import load_state, save_state
from assay.serving._saved import reference, saved_model
from assay.serving.tandem.adapters import (
    StackedProjections,
    call,
    check_secondary,
    keys_values,
    positions_of,
    prepended,
)

if TYPE_CHECKING:
    from assay.serving.tandem.router import Router

LayerMap = Literal["last", "uniform"] | Sequence[int]
RIDGE_TOKENS = 16384


@dataclass(frozen=True)
class TandemConfig:
    """Options of a :class:`TandemModel`.

    Attributes
    ----------
    block_size
        Tokens in a block, ``gamma``, in training and for the loss; default 2 (the paper's). Any other can be used when
        generating.
    layer_map
        Which primary layer feeds secondary layer ``i``: ``"last"`` (default: the last one, after the final norm, for
        every ``i``), ``"uniform"`` (``round((i + 1) L_primary / L_secondary)``), or a list with a layer number (0: the
        embeddings) for each layer of the secondary. The paper leaves the map free.
    freeze_primary
        Leave the primary alone, default true (best in the paper). If false, whatever of it requires a gradient trains,
        low-rank adapters for example.
    distil_weight
        ``lambda`` of the loss ``(1 - lambda) CE + lambda KL(p_primary || p_secondary)`` of the second stage of
        training; default 0.5 (the paper's). 0 is plain cross-entropy.
    """

    block_size: int = 2
    layer_map: LayerMap = "last"
    freeze_primary: bool = True
    distil_weight: float = 0.5

    def __post_init__(self) -> None:
        check_block(self.block_size, "block_size")
        if isinstance(self.layer_map, str) and self.layer_map not in ("last", "uniform"):
            raise ValueError(f"layer_map must be 'last', 'uniform' or a list of layers, not {self.layer_map!r}")
        if not 0 <= self.distil_weight <= 1:
            raise ValueError(f"distil_weight must lie in [0, 1], not {self.distil_weight}")

    def sources(self, primary_layers: int, secondary_layers: int) -> list[int]:
        """The primary layer that feeds each secondary layer."""
        if self.layer_map == "last":
            return [primary_layers] * secondary_layers
        if self.layer_map == "uniform":
            return [round((i + 1) * primary_layers / secondary_layers) for i in range(secondary_layers)]
        sources = [int(i) for i in self.layer_map]
        if len(sources) != secondary_layers or not all(0 <= s <= primary_layers for s in sources):
            raise ValueError(
                f"layer_map must name a primary layer from 0 to {primary_layers} for each of the {secondary_layers} "
                f"secondary layers, not {sources}"
            )
        return sources


def check_block(size: Any, name: str) -> None:
    """Raise ``ValueError`` unless a size is an integer of at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"{name} must be an integer of at least 1, not {size!r}")


@dataclass
class TandemOutput(ModelOutput):
    """What :meth:`TandemModel.forward` returns; logits are ``[batch, tokens, vocabulary]``."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    primary_logits: Tensor | None = None


def tandem_mask(positions: Tensor, block_size: int, real: Tensor | None = None) -> Tensor:
    """Who sees whom in the parallel pass, ``[batch, 1, tokens, 2 tokens]``, true: attend.

    The first ``tokens`` columns are projected primary states, the others the secondary's own. With ``k(t) = gamma *
    floor(t / gamma)``, the first position of the block of ``t``, token ``t`` sees projected states at positions
    ``s < k(t)`` and own states at ``k(t) <= s <= t``.

    Parameters
    ----------
    positions
        ``[batch, tokens]``: position in the text of every token. Blocks are counted from position 0, so that padding on
        the left moves none.
    block_size
        ``gamma``.
    real
        ``[batch, tokens]``, false for padding, which sees and is seen by itself alone.
    """
    check_block(block_size, "block_size")
    start = positions // block_size * block_size
    s, k, t = positions[:, None, :], start[:, :, None], positions[:, :, None]
    big = s < k
    own = (s >= k) & (s <= t)
    if real is not None:
        big = big & real[:, None, :] & real[:, :, None]
        own = own & real[:, None, :] & real[:, :, None]
        own = own | torch.eye(positions.shape[1], dtype=torch.bool, device=positions.device)
    return torch.cat([big, own], -1)[:, None]


def tandem_loss(
    logits: Tensor, labels: Tensor, primary_logits: Tensor | None = None, distil_weight: float = 0.0
) -> Tensor:
    """``(1 - lambda) CE(labels) + lambda KL(p_primary || p_secondary)``, means over tokens that have a label.

    Parameters
    ----------
    logits, primary_logits
        ``[batch, tokens, vocabulary]``: predictions of the *next* token.
    labels
        ``[batch, tokens]``: the tokens themselves (they are shifted here); -100 is left out.
    distil_weight
        ``lambda``. With 0 ``primary_logits`` are not looked at.
    """
    targets = labels[:, 1:].reshape(-1)
    kept = targets != -100
    ours = logits[:, :-1].reshape(-1, logits.shape[-1])[kept].float()
    if not len(ours):
        return logits.sum() * 0.0
    loss = nn.functional.cross_entropy(ours, targets[kept])
    if not distil_weight:
        return loss
    if primary_logits is None:
        raise ValueError("primary_logits are missing: distil_weight is not 0")
    theirs = primary_logits[:, :-1].reshape(-1, logits.shape[-1])[kept].float().log_softmax(-1)
    kl = nn.functional.kl_div(ours.log_softmax(-1), theirs, reduction="batchmean", log_target=True)
    return (1 - distil_weight) * loss + distil_weight * kl


def ridge_projection(x: Tensor, y: Tensor, ridge: float = 0.1) -> tuple[Tensor, Tensor]:
    """Weight ``[d_y, d_x]`` and bias ``[d_y]`` that minimise ``sum |W x + b - y|^2 + ridge |W|^2``.

    ``x`` is ``[tokens, d_x]`` and ``y`` ``[tokens, d_y]``; both are centred, so that the bias is free. In float64.
    """
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    a, b = x - mean_x, y - mean_y
    gram = a.T @ a + ridge * torch.eye(a.shape[1], dtype=a.dtype, device=a.device)
    weight = torch.linalg.solve(gram, a.T @ b).T
    return weight, mean_y - weight @ mean_x


class TandemModel(nn.Module):
    """A small model (secondary) that reads the states of a large one (primary) for earlier blocks.

    For position ``t`` in a block that begins at ``k``, layer ``i`` of the secondary attends to::

        P_i x_s^{l(i)}   for s < k          projected states of the primary, for all earlier blocks
        y_s^{i}          for k <= s <= t    its own states, in the current block

    The projected vectors take the place of the secondary's own states: they go through its norms, its key and value
    projections and its rotary positions. The primary runs once for each block, over all its tokens at once.

    Parameters
    ----------
    primary, secondary
        Causal language models of ``transformers`` with the same vocabulary. The primary may be of any type that returns
        hidden states; the secondary one of ``assay.serving.tandem.SUPPORTED``.
    config
        Options; ``TandemConfig()`` by default.

    Attributes
    ----------
    tandem_config
        The options. (Not ``config``, which ``transformers.Trainer`` takes for a model's and writes to.)
    projections
        The maps ``P_i`` (:class:`~assay.serving.tandem.StackedProjections`): random until :meth:`initialise` or
        training changes them.

    Raises
    ------
    ValueError
        The vocabularies have different sizes, or the layer map does not fit.
    NotImplementedError
        The secondary's type is not supported.

    Notes
    -----
    Source: "Tandem Transformers for Inference Efficient LLMs" (ICML 2024). The paper does not publish its map of
    layers, nor its initialisation of the projections; those here are ours.
    """

    def __init__(self, primary: Any, secondary: Any, config: TandemConfig | None = None) -> None:
        super().__init__()
        self.tandem_config = config or TandemConfig()
        check_secondary(secondary)
        vocabulary = [m.config.get_text_config(decoder=True).vocab_size for m in (primary, secondary)]
        if vocabulary[0] != vocabulary[1]:
            raise ValueError(f"primary and secondary must share a vocabulary, but have {vocabulary} tokens")
        large, small = (sum(p.numel() for p in m.parameters()) for m in (primary, secondary))
        if small >= large:
            warnings.warn(
                f"secondary has {small:,} parameters and primary {large:,}: drafting with it can save no time",
                stacklevel=2,
            )
        self.primary, self.secondary = primary, secondary
        big = primary.config.get_text_config(decoder=True)
        sources = self.tandem_config.sources(big.num_hidden_layers, secondary.config.num_hidden_layers)
        self.projections = StackedProjections(big.hidden_size, secondary.config.hidden_size, sources)
        where = next(secondary.parameters())
        self.projections.to(device=where.device, dtype=where.dtype)
        if self.tandem_config.freeze_primary:
            primary.requires_grad_(False)
            primary.eval()

    def train(self, mode: bool = True) -> TandemModel:
        """Switch to training; a frozen primary stays in evaluation, so that its dropout never runs."""
        super().train(mode)
        if self.tandem_config.freeze_primary:
            self.primary.eval()
        return self

    def read(self, ids: Tensor, mask: Tensor | None = None, cache: Any = None, **kwargs: Any) -> Any:
        """The primary's output with hidden states for tokens ``[batch, tokens]``."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.tandem_config.freeze_primary):
            return call(self.primary, ids, cache, attention_mask=mask, output_hidden_states=True, **kwargs)

    def project(self, hidden_states: Any, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of every secondary layer, from the primary's hidden states by layer number."""
        states = {source: hidden_states[source] for source in set(self.projections.sources)}
        dtype = self.projections.maps[0].weight.dtype
        return keys_values(self.secondary, self.projections({k: v.to(dtype) for k, v in states.items()}), positions)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        block_size: int | None = None,
        distil_weight: float | None = None,
    ) -> TandemOutput:
        """All positions in parallel, with one pass of each model.

        Parameters
        ----------
        input_ids
            ``[batch, tokens]``.
        attention_mask
            ``[batch, tokens]``, 0 for padding, on either side.
        labels
            ``[batch, tokens]``, usually ``input_ids``; -100 is left out of the loss.
        block_size, distil_weight
            Instead of those of the configuration.

        Returns
        -------
        TandemOutput
            ``loss`` (with labels), ``logits`` of the secondary and ``primary_logits``.
        """
        if input_ids.ndim != 2 or not input_ids.shape[1]:
            raise ValueError(f"input_ids must be [batch, tokens] with at least one token, not {tuple(input_ids.shape)}")
        size = self.tandem_config.block_size if block_size is None else block_size
        weight = self.tandem_config.distil_weight if distil_weight is None else distil_weight
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        positions = positions_of(mask)
        large = self.read(input_ids, attention_mask, position_ids=positions)
        context = self.project(large.hidden_states, positions)
        allow = tandem_mask(positions, size, None if attention_mask is None else mask.bool())
        dtype = context[0][0].dtype
        bias = torch.zeros(allow.shape, dtype=dtype, device=allow.device)
        bias.masked_fill_(~allow, torch.finfo(dtype).min)
        small = call(self.secondary, input_ids, prepended(context), attention_mask=bias, position_ids=positions)
        loss = None
        if labels is not None:
            if attention_mask is not None:
                labels = labels.masked_fill(~mask.bool(), -100)
            loss = tandem_loss(small.logits, labels, large.logits, weight)
        return TandemOutput(loss=loss, logits=small.logits, primary_logits=large.logits)

    @torch.no_grad()
    def initialise(
        self, batches: Tensor | Iterable[Tensor], *, init: Literal["ridge", "random"] = "ridge", ridge: float = 0.1
    ) -> TandemModel:
        """Set the projections so that training starts close to the plain secondary instead of destroying it.

        Parameters
        ----------
        batches
            Tokens ``[batch, tokens]``, or several such tensors; about 16,000 tokens are used.
        init
            ``"ridge"``: regress the secondary's own states on those of the primary
            (:func:`~assay.serving.tandem.ridge_projection`). ``"random"``: weights from N(0, 0.02^2), no bias.
        ridge
            Penalty on the weights; default 0.1.

        Returns
        -------
        The model itself.
        """
        if init not in ("ridge", "random"):
            raise ValueError(f"init must be 'ridge' or 'random', not {init!r}")
        if init == "random":
            self.projections.randomise()
            return self
        training = self.training
        self.eval()
        large: dict[int, list[Tensor]] = {source: [] for source in set(self.projections.sources)}
        small: list[list[Tensor]] = [[] for _ in self.projections.sources]
        tokens = 0
        for ids in [batches] if isinstance(batches, Tensor) else batches:
            theirs = self.read(ids).hidden_states
            ours = call(self.secondary, ids, output_hidden_states=True).hidden_states
            for source, kept in large.items():
                kept.append(theirs[source].flatten(0, 1))
            for i, kept in enumerate(small):
                kept.append(ours[i].flatten(0, 1))
            tokens += ids.numel()
            if tokens >= RIDGE_TOKENS:
                break
        if tokens < 2:
            raise ValueError("batches hold fewer than two tokens, from which nothing can be regressed")
        for name, kept_by in (("primary", large.values()), ("secondary", small)):
            if not all(bool(torch.isfinite(states).all()) for kept in kept_by for states in kept):
                raise ValueError(f"hidden states of the {name} must be finite, but hold infinities or NaN")
        for linear, source, kept in zip(self.projections.maps, self.projections.sources, small):
            weight, bias = ridge_projection(torch.cat(large[source]), torch.cat(kept), ridge)
            linear.weight.copy_(weight)
            linear.bias.copy_(bias)
        return self.train(training)

    def generate(
        self,
        inputs: Tensor,
        *,
        speculative: bool = True,
        draft_length: int = 4,
        adaptive: Router | float | None = None,
        free_token: bool = False,
        **generate_kwargs: Any,
    ) -> Any:
        """Generate with both models.

        Parameters
        ----------
        inputs
            Tokens ``[batch, tokens]``.
        speculative
            True (default): the secondary drafts and the primary verifies; the output is that of the primary alone,
            token for token when greedy and in distribution when sampled. One sequence at a time. False: the
            secondary's own tokens, with the primary's states of all earlier blocks; batches and left padding work.
        draft_length
            Most tokens that are drafted at a time (or the block length, if not speculative); default 4.
        adaptive
            Stop drafting early: a :class:`~assay.serving.tandem.Router`, or a float, the probability of the drafted
            token below which drafting stops. Default: never.
        free_token
            Not speculative only: take the primary's prediction at the end of a block as first token of the next.
        **generate_kwargs
            As for ``transformers``: all of it for speculative generation; ``max_new_tokens``, ``do_sample``,
            ``temperature``, ``top_k``, ``top_p``, ``eos_token_id``, ``pad_token_id``, ``attention_mask``, ``generator``
            otherwise, where ``eos_token_id`` and ``pad_token_id`` default to those of the primary's generation config.
        """
        from assay.serving.tandem import speculate

        check_block(draft_length, "draft_length")
        if speculative:
            if free_token:
                raise ValueError("free_token is for speculative=False: verification always adds the primary's token")
            return speculate.generate(self, inputs, draft_length, adaptive, generate_kwargs)
        if adaptive is not None:
            raise ValueError("adaptive is for speculative=True: without verification a block has a fixed length")
        return speculate.generate_alone(self, inputs, draft_length, free_token, **generate_kwargs)

    def save(self, folder: str | Path, *, save_primary: bool = False) -> Path:
        """Write the projections, the secondary and the options as safetensors and JSON; :meth:`load` reads them.

        The primary is kept by reference (the name or folder that it was loaded from), unless ``save_primary``.
        """
        folder = Path(folder)
        tensors = {f"projections.{k}": v for k, v in self.projections.state_dict().items()}
        options = asdict(self.tandem_config)
        if not isinstance(self.tandem_config.layer_map, str):
            options["layer_map"] = list(self.tandem_config.layer_map)
        state = {"options": options, "primary": reference(self.primary)}
        written = save_state(folder, "TandemModel", state, tensors)
        self.secondary.save_pretrained(folder / "secondary")
        if save_primary:
            self.primary.save_pretrained(folder / "primary")
        return written

    @classmethod
    def load(cls, folder: str | Path, primary: Any = None) -> TandemModel:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        folder
            As given to :meth:`save`.
        primary
            The large model. By default the one in the folder, else that of the name or path it had when saved, which
            must be on this machine.

        Raises
        ------
        FileNotFoundError, ValueError
            The folder holds no tandem, or its primary cannot be found.
        """
        from transformers import AutoModelForCausalLM

        folder = Path(folder)
        state, tensors = load_state(folder, "TandemModel", torch_tensors=True)
        loader: Any = AutoModelForCausalLM
        if primary is None:
            primary = saved_model(folder, "primary", state["primary"], loader)
        secondary_folder = folder / "secondary"
        dtype = json.loads((secondary_folder / "config.json").read_text()).get("dtype") or "float32"
        secondary = loader.from_pretrained(secondary_folder, local_files_only=True, dtype=getattr(torch, dtype))
        model = cls(primary, secondary, TandemConfig(**state["options"]))
        model.projections.load_state_dict({k.removeprefix("projections."): v for k, v in tensors.items()})
        return model.eval()
