"""All plain state that a step can reach, narrowed by the names of the code that ran.

The walk starts at the step, its models and optimizers, and the globals of the executed code, and follows closures,
defaults, attributes, containers, classes, hooks and partials. Nothing of the user's is called on the way: no property,
no ``__getattr__``, no ``__len__`` of a class of his. What cannot be looked into is named in `Reachable.opaque`.

Left out, because a captured step handles it itself: gradients, the optimizer's state, the numbers of its parameter
groups, and which tensor a buffer is. Left out by trust: the insides of torch, numpy and Python's own library, but for
their switches and random generators.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hocket.pystate.executed import ExecutedCode
from hocket.pystate.kinds import Kinds
from hocket.pystate.torch_kinds import HOOK_TABLES
from hocket.pystate.walk import MAX_VALUES, Reachable

__all__ = ["HOOK_TABLES", "Reachable", "reachable"]


def reachable(step: Any, roots: Iterable[Any], executed: ExecutedCode) -> Reachable:
    """Walk everything that `step` can reach.

    Args:
        step: what the user calls.
        roots: models and optimizers.
        executed: the code that ran. User functions that the walk meets are added to it.
    """
    while True:
        known = len(executed.codes)
        walk = Kinds(executed)
        walk.start(step, roots)
        # A function that the walk met may name attributes of objects that lie behind it.
        if len(executed.codes) == known or walk.found.num_values > MAX_VALUES:
            return walk.found
