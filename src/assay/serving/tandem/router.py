"""How long a draft should be: a router that predicts acceptance, and the arithmetic of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from assay._state import load_state, save_state

if TYPE_CHECKING:
    from assay.serving.tandem.model import TandemModel


class Router(nn.Module):
    """Predicts whether the primary would accept the token that was just drafted.

    Two layers and a sigmoid on what the draft's distribution tells: its entropy, its ``top_k`` largest probabilities,
    the probability of the drafted token, and the position in the block.

    Parameters
    ----------
    threshold
        Drafting goes on while the prediction is at least ``tau``; default 0.8 (the paper's).
    top_k
        Largest probabilities that are looked at; default 10.
    hidden
        Units of the hidden layer; default 32.
    """

    def __init__(self, threshold: float = 0.8, top_k: int = 10, hidden: int = 32) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must lie in [0, 1], not {threshold}")
        if top_k < 1 or hidden < 1:
            raise ValueError(f"top_k and hidden must be at least 1, not {top_k} and {hidden}")
        self.threshold, self.top_k, self.hidden = threshold, top_k, hidden
        self.layers = nn.Sequential(nn.Linear(top_k + 3, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def features(self, chances: Tensor, token: Tensor, place: Tensor | int) -> Tensor:
        """What the router sees, ``[..., top_k + 3]``.

        ``chances`` ``[..., vocabulary]`` is the distribution that ``token`` ``[..., 1]`` was drawn from; ``place`` is
        its position in the block, from 0.
        """
        chances = chances.float()
        entropy = torch.special.entr(chances).sum(-1, keepdim=True)
        best = chances.topk(min(self.top_k, chances.shape[-1]), -1).values
        best = nn.functional.pad(best, (0, self.top_k - best.shape[-1]))
        position = torch.as_tensor(place, device=chances.device).float().expand(entropy.shape[:-1]).unsqueeze(-1)
        return torch.cat([entropy, best, chances.gather(-1, token), torch.log1p(position)], -1)

    def forward(self, chances: Tensor, token: Tensor, place: Tensor | int) -> Tensor:
        """Probability of acceptance, ``[...]``."""
        return self.layers(self.features(chances, token, place)).squeeze(-1).sigmoid()

    def save(self, folder: str | Path) -> Path:
        """Write options and weights as JSON and safetensors; :meth:`load` reads them."""
        options = {"threshold": self.threshold, "top_k": self.top_k, "hidden": self.hidden}
        return save_state(folder, "Router", {"options": options}, dict(self.state_dict()))

    @classmethod
    def load(cls, folder: str | Path) -> Router:
        """Read what :meth:`save` wrote."""
        state, tensors = load_state(folder, "Router", torch_tensors=True)
        router = cls(**state["options"])
        router.load_state_dict(tensors)
        return router.eval()


def confident(adaptive: Router | float | None, chances: Tensor, token: Tensor, place: int) -> bool:
    """Whether to go on drafting after ``token``: the rule of a router, of a least probability, or none."""
    if adaptive is None:
        return True
    if isinstance(adaptive, Router):
        return float(adaptive(chances, token, place)) >= adaptive.threshold
    return float(chances.gather(-1, token)) >= adaptive


def fit_router(
    model: TandemModel,
    data: Tensor | Iterable[Tensor],
    router: Router | None = None,
    *,
    draft_length: int = 8,
    label: Literal["soft", "hard"] = "soft",
    steps: int = 200,
    lr: float = 1e-2,
    seed: int = 0,
) -> Router:
    """Train a router on text, both models frozen.

    Parameters
    ----------
    model
        The tandem.
    data
        Tokens ``[batch, tokens]``, or several such tensors.
    router
        What is trained; a new one by default.
    draft_length
        Longest block that it shall judge.
    label
        ``"soft"`` (default): ``1 - TV(p_secondary, p_primary)``, the probability that a sampled token is accepted.
        ``"hard"``: whether both find the same token most likely, for greedy decoding.
    steps, lr
        Steps and learning rate of Adam on binary cross-entropy, all positions at once; defaults 200 and 0.01.
    seed
        Of a new router's weights and of the drafted tokens.

    Returns
    -------
    The router, in evaluation mode.
    """
    if label not in ("soft", "hard"):
        raise ValueError(f"label must be 'soft' or 'hard', not {label!r}")
    draw = torch.Generator().manual_seed(seed)
    if router is None:
        router = Router()
        for parameter in router.parameters():
            with torch.no_grad():
                bound = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.rand(parameter.shape, generator=draw) * 2 * bound - bound)
    seen, labels = [], []
    training = model.training
    model.eval()
    with torch.no_grad():
        for ids in [data] if isinstance(data, Tensor) else data:
            out = model(ids, block_size=draft_length)
            ours, theirs = (x.float().softmax(-1).cpu() for x in (out.logits, out.primary_logits))
            if label == "hard":
                token = ours.argmax(-1, keepdim=True)
                wanted = (token == theirs.argmax(-1, keepdim=True)).float().squeeze(-1)
            else:
                token = torch.multinomial(ours.flatten(0, 1), 1, generator=draw).view(*ours.shape[:2], 1)
                wanted = torch.minimum(ours, theirs).sum(-1)
            place = (torch.arange(ids.shape[1]) % draft_length).expand(ids.shape)
            seen.append(router.features(ours, token, place).flatten(0, 1))
            labels.append(wanted.flatten())
    model.train(training)
    if not seen:
        raise ValueError("data is empty: a router needs tokens to learn from")
    x, y = torch.cat(seen), torch.cat(labels)
    router = router.cpu().train()
    optimizer = torch.optim.Adam(router.parameters(), lr)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(router.layers(x).squeeze(-1), y)
            loss.backward()
            optimizer.step()
    device: Any = next(model.secondary.parameters()).device
    return router.to(device).eval()


def expected_accepted(acceptance: float, draft_length: int) -> float:
    """Mean number of accepted tokens, ``alpha (1 - alpha^gamma) / (1 - alpha)``, if each is accepted independently."""
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must lie in [0, 1], not {acceptance}")
    if acceptance == 1:
        return float(draft_length)
    return acceptance * (1 - acceptance**draft_length) / (1 - acceptance)


def speedup(
    accepted: float, draft_length: float, small_step: float, large_step: float, large_block: float | None = None
) -> float:
    """Modelled speed-up of speculative decoding over the primary alone.

    ``(1 + E[accepted]) t_L(1) / (gamma t_S + t_L(gamma + 1))``, with times in any unit.

    Parameters
    ----------
    accepted
        Mean number of accepted tokens in a round.
    draft_length
        ``gamma``, or its mean.
    small_step, large_step
        Time of one token in the secondary and in the primary.
    large_block
        Time of the primary on ``gamma + 1`` tokens at once; default that of one token (memory-bound decoding).
    """
    block = large_step if large_block is None else large_block
    return (1 + accepted) * large_step / (draft_length * small_step + block)
