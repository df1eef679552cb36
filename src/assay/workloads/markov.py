"""Sequences whose rule must be read from the context: chains that follow a permutation drawn for each of them."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PermutationChains:
    """An in-context Markov language.

    For each sequence a permutation ``pi`` of the symbols is drawn. The first symbol is uniform; the next one is
    ``pi(x_t)`` with probability ``follow``, and uniform over all symbols otherwise. Knowing what follows a symbol means
    finding in the context what followed it before, an induction task that needs several layers of attention. Once it is
    known, saying it needs none.

    Parameters
    ----------
    symbols
        Size of the vocabulary, at least 2.
    length
        Symbols of a sequence, at least 2.
    follow
        Probability in ``[0, 1]`` with which the permutation is followed.

    Raises
    ------
    ValueError
        A parameter lies outside its range.
    TypeError
        A size is no integer.
    """

    symbols: int = 16
    length: int = 97
    follow: float = 0.8

    def __post_init__(self) -> None:
        for name in ("symbols", "length"):
            if _whole(name, getattr(self, name)) < 2:
                raise ValueError(f"{name} must be at least 2, not {getattr(self, name)}")
        if not 0 <= self.follow <= 1:
            raise ValueError(f"follow must be a probability in [0, 1], not {self.follow}")

    def sample(self, count: int, random_state: int | np.random.Generator) -> NDArray[np.int64]:
        """Sequences ``[count, length]`` of symbols from 0 on; the same random state gives the same ones."""
        return self.sample_with_rules(count, random_state)[0]

    def sample_with_rules(
        self, count: int, random_state: int | np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences ``[count, length]`` and their permutations ``[count, symbols]``: ``pi(s)`` at place ``s``."""
        if _whole("count", count) < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        draw = np.random.default_rng(random_state)
        rules = draw.permuted(np.tile(np.arange(self.symbols), (count, 1)), axis=1)
        follows = draw.random((self.length, count)) < self.follow
        x = draw.integers(self.symbols, size=(self.length, count))
        rows = np.arange(count)
        for t in range(1, self.length):
            x[t] = np.where(follows[t], rules[rows, x[t - 1]], x[t])
        return np.ascontiguousarray(x.T), rules

    @property
    def best_accuracy(self) -> float:
        """Share of next symbols that who knows the permutation predicts: ``follow + (1 - follow) / symbols``."""
        return self.follow + (1 - self.follow) / self.symbols

    @property
    def entropy(self) -> float:
        """Entropy of the next symbol for who knows the permutation, in nat: the least cross-entropy on average."""
        other = (1 - self.follow) / self.symbols
        rest = (self.symbols - 1) * other * math.log(other) if other else 0.0
        return -(self.best_accuracy * math.log(self.best_accuracy) + rest)


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {value!r}") from None
