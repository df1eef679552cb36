"""Sequence tasks over digits that differ in how much work they need: copy, reverse, sort, running sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RULES: dict[str, Callable[[NDArray[np.int64]], NDArray[np.int64]]] = {
    "copy": lambda x: x,
    "reverse": lambda x: x[:, ::-1],
    "sort": lambda x: np.sort(x, 1),
    "addmod": lambda x: np.cumsum(x, 1) % 10,
}
IGNORED = -100


@dataclass(frozen=True)
class DigitTasks:
    """Sequences ``[task] x_1 .. x_n [sep] y_1 .. y_n`` where ``y`` is what the task makes of the digits ``x``.

    Digits are 0 to 9, the tasks the symbols from 10 on, the separator the one after them. The easy tasks can be done by
    less of a model than the hard ones.

    Parameters
    ----------
    tasks
        Names from :data:`RULES`.
    digits
        ``n``.

    Raises
    ------
    ValueError
        A task is unknown or named twice, or there are no digits.
    """

    tasks: tuple[str, ...] = ("copy", "reverse", "sort")
    digits: int = 8

    def __post_init__(self) -> None:
        if not self.tasks or len(set(self.tasks)) < len(self.tasks) or not set(self.tasks) <= set(RULES):
            raise ValueError(f"tasks must be different ones of {', '.join(RULES)}, not {self.tasks}")
        if self.digits < 1:
            raise ValueError(f"digits must be at least 1, not {self.digits}")

    @property
    def vocabulary(self) -> int:
        """Number of symbols."""
        return 11 + len(self.tasks)

    @property
    def prompt(self) -> int:
        """Symbols before the first that is predicted."""
        return self.digits + 2

    @property
    def length(self) -> int:
        """Symbols of a sequence."""
        return 2 * self.digits + 2

    def sample(
        self, count: int, random_state: int | np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sequences ``[count, length]``, labels (-100 in the prompt), and the number of each row's task."""
        draw = np.random.default_rng(random_state)
        x = draw.integers(10, size=(count, self.digits))
        task = draw.integers(len(self.tasks), size=count)
        y = np.empty_like(x)
        for i, name in enumerate(self.tasks):
            y[task == i] = RULES[name](x[task == i])
        separator = np.full((count, 1), 10 + len(self.tasks))
        ids = np.concatenate([10 + task[:, None], x, separator, y], 1)
        labels = ids.copy()
        labels[:, : self.prompt] = IGNORED
        return ids, labels, task
