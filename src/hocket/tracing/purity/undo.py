"""What a trace has written that watched steps did not: found and put back.

A trace runs the user's Python once more. A branch that no watched step took (on the batch, say) may write there, or
advance a generator of random numbers; the step that follows writes again. So the state that the step can reach is
compared around the trace, and put back as it was.
"""

from __future__ import annotations

import collections
import functools
import io
import random
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch

from hocket.tracing.purity.places import Group
from hocket.tracing.purity.reachable import Reachable
from hocket.tracing.purity.watch import Change, PurityWatch, differences

__all__ = ["Before"]


class Before:
    """The state that a step can reach, as it is before a trace.

    Args:
        watch: knows how to look, and what a trace puts back itself.

    Example:
        >>> before = Before(watch)  # doctest: +SKIP
        >>> capture_step(...)  # doctest: +SKIP
        >>> changes = before.undo()  # doctest: +SKIP
    """

    def __init__(self, watch: PurityWatch) -> None:
        self._watch = watch
        self._found: Reachable = watch.look()
        self._again: dict[tuple[int, str], Callable[[], object]] = {}
        for key, group in self._found.groups.items():
            found = _restorer(group)
            if found is not None:
                self._again[key] = found

    def undo(self) -> tuple[list[Change], list[Change]]:
        """Put back what has changed since: all changes that there were, and those that could not be put back."""
        changes = [change for change in differences(self._found, self._watch.look()) if self._counts(change)]
        touched = {id(change.place.owner) for change in changes}
        for key, group in self._found.groups.items():
            if key[0] in touched:
                self._again.get(key, lambda group=group: _put_back(group))()
        if not changes:
            return [], []
        return changes, [change for change in differences(self._found, self._watch.look()) if self._counts(change)]

    def _counts(self, change: Change) -> bool:
        watch, identity = self._watch, change.place.identity
        return (
            identity not in watch.moving
            and identity not in watch.rebound
            and id(change.place.owner) not in watch.appended
        )


def _restorer(group: Group) -> Callable[[], object] | None:
    """What puts back state that the group's own values do not hold."""
    owner: Any = group.owner
    if group.kind == "set" and isinstance(owner, set):
        return functools.partial(_refill, owner, list(owner))
    if group.kind == "buffer" and isinstance(owner, np.ndarray):
        content = owner.copy()
        return lambda: np.copyto(owner, content)
    if group.kind == "state":
        return next(_of_state(owner), None)
    return None


def _of_state(owner: Any) -> Iterator[Callable[[], object]]:
    if owner is random or isinstance(owner, random.Random):
        state = owner.getstate()
        yield lambda: owner.setstate(state)
    elif isinstance(owner, np.random.Generator):
        bits = owner.bit_generator.state
        yield lambda: setattr(owner.bit_generator, "state", bits)
    elif owner is np.random or isinstance(owner, (np.random.RandomState, torch.Generator)):
        found: Any = owner.get_state()
        yield lambda: owner.set_state(found)
    elif isinstance(owner, io.IOBase):
        if not owner.closed and owner.seekable():
            place = owner.tell()
            yield lambda: owner.seek(place)
    elif hasattr(owner, "cache_clear"):
        yield owner.cache_clear  # it may hold tensors of the trace
    elif hasattr(owner, "__setstate__") and len(reduced := owner.__reduce__()) == 3:
        yield lambda: owner.__setstate__(reduced[2])


def _refill(owner: set[Any], members: list[Any]) -> None:
    owner.clear()
    owner.update(members)


def _put_back(group: Group) -> None:
    owner = group.owner
    if group.kind == "list":
        owner[:] = group.values
    elif isinstance(owner, collections.deque):
        owner.clear()
        owner.extend(group.values)
    elif isinstance(owner, dict):
        if group.counts is None:
            owner.clear()
        else:
            for key in set(filter(group.counts, owner)).difference(group.keys):
                del owner[key]
        owner.update(zip(group.keys, group.values, strict=True))
    elif isinstance(owner, ContextVar) and group.values[0] is not None:
        owner.set(group.values[0])
    elif isinstance(owner, np.ndarray):  # of objects
        for position, value in enumerate(group.values):
            owner.flat[position] = value
    elif group.kind == "cell":
        owner.cell_contents = group.values[0]
    elif group.kind in ("slots", "class", "function"):
        for name, value in zip(group.keys, group.values, strict=True):
            setattr(owner, name, value)
    elif isinstance(owner, (bytearray, memoryview)):
        owner[:] = group.values[0]
