r"""Priorities in two levels: how critical an op's layer path is, and which task of the layer the op does.

TurboDL's Algorithm 1: a layer path has a priority by its rank in its block; activation gradients have that of their
path, weight gradients `alpha` less, bias gradients `beta` less. With two layer paths and the usual alpha and beta::

    priority   2    activation gradients of the critical path, and all that lies outside of blocks
               1    activation gradients of the other path
               0    weight gradients of the critical path        = 2 - alpha
              -1    weight gradients of the other path           = 1 - alpha,  bias gradients 2 - beta
              -2                                                               bias gradients 1 - beta

A weight gradient never comes before an activation gradient of a less critical path, whatever alpha is, unless that is
asked for (`above`): somebody waits for the one, and nobody in this step for the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import InputError

# What a stream of a layer path is for: activation gradients (and forwards), weight gradients, bias gradients.
TASKS = ("activation", "weight", "bias")


@dataclass(frozen=True)
class Priorities:
    """The two-level scheme for a graph whose blocks have up to `num_paths` layer paths.

    Attributes:
        num_paths: layer paths, at least 1.
        alpha: how much less a weight gradient has than its path; `num_paths` when None.
        beta: how much less a bias gradient has than its path; one more than alpha when None.
        above: weight and bias gradients may come before activation gradients of less critical paths.

    Example:
        >>> priorities = Priorities(num_paths=2)
        >>> [priorities.of(task, rank) for task in TASKS for rank in (0, 1)]
        [2, 1, 0, -1, -1, -2]
    """

    num_paths: int
    alpha: int | None = None
    beta: int | None = None
    above: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InputError(f"priorities: expected {name} to be a whole number >= 0, got {value!r}")

    def of(self, task: str, rank: int) -> int:
        """The priority of a task of the path of that rank (0: the critical one); higher runs first."""
        path = self.num_paths - min(rank, self.num_paths - 1)
        if task == "activation":
            return path
        alpha = self.num_paths if self.alpha is None else self.alpha
        beta = alpha + 1 if self.beta is None else self.beta
        found = path - (alpha if task == "weight" else beta)
        return found if self.above else min(found, 0)
