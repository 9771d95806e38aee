"""Watches ordinary steps: which Python state does a step write, and does it ask the world outside?

A captured step runs ops instead of the user's Python. So that nothing is lost, the state that the step can reach is
compared before and after each watched step. The user's step is called no more often than the user calls it. The first
steps are different: modules are imported, optimizers make their state. A step counts once it runs no code for the first
time.

A step may write everything that its graph can write: models, gradients, optimizers, and tensors in place. It may also
bind places to another tensor each time (a moving average, a hidden state), count them on, or set them to a plain value:
these become outputs of the graph. And it may append to lists. Anything else, and any look at the world outside (a
clock, a file, a random generator that is not torch's), is a *finding*: the step stays eager.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from hocket.pystate.appended import AppendedList
from hocket.pystate.batches import batch_findings, held_by, kinds_in, reads_out_of_sight
from hocket.pystate.changes import Change, containers_at, differences
from hocket.pystate.executed import ExecutedCode, outer_hook
from hocket.pystate.findings import finding, line_about
from hocket.pystate.kinds import reachable
from hocket.pystate.places import (
    ABSENT,
    Place,
    are_like,
    is_a,
    is_empty,
    is_number,
    is_plain,
    keeps_graph,
    same,
)
from hocket.pystate.tokens import DRAWING, GENERATORS, generator_of
from hocket.pystate.walk import Reachable, restored

# Numbers in a container that are read anew, one by one.
MAX_NUMBERS = 100
# A step that still runs new code after this number of calls is not watched any longer.
MAX_WATCHED = 6


@dataclass(frozen=True)
class Watched:
    """Result of watching one step."""

    result: Any  # what it returned
    findings: tuple[str, ...]  # what it writes or asks that its graph could not, in words
    settled: bool  # it ran no code for the first time
    before: Reachable | None  # what it could reach at its beginning (None in the first step) and at its end
    after: Reachable


class PurityWatch:
    """Watches steps of one schedule, and remembers what they showed."""

    def __init__(self, step: Callable[..., Any], roots: Iterable[Any], divided: tuple[CodeType, ...] = ()) -> None:
        self.step = step
        self.roots = tuple(roots)
        self.executed = ExecutedCode(divided)  # the code that ran
        self.num_watched = 0  # steps that were watched
        self.rebound: dict[Any, Place] = {}  # places that the step binds another tensor to
        self.moving: dict[Any, Place] = {}  # places whose number changes, within a step or between steps
        self.written: dict[Any, Place] = {}  # places that the step sets to plain values
        # leaves of the batch, counted among those that are no tensors, whose number changes between batches
        self.live_leaves: set[int] = set()
        self.appended: dict[int, AppendedList] = {}  # lists that the step appends to, by identity
        self.owned: frozenset[int] = frozenset()  # addresses of the lists and dicts that the step that runs has found
        self.generators: dict[int, Any] = {}  # of Python's and numpy's, those that the step has drawn from
        # of torch's on the host, those that have moved in a step. A recording sees which ops draw from them.
        self.torch_generators: dict[int, torch.Generator] = {}
        self._last: Reachable | None = None
        self._numbers_set: dict[Any, Any] = {}
        self._looks_at_lists = False

    def look(self) -> Reachable:
        """Walk over the state that the step can reach now."""
        return reachable(self.step, self.roots, self.executed)

    @property
    def outputs(self) -> tuple[Place, ...]:
        """The places that a graph of the step has to write or read anew."""
        return tuple(self._outputs.values())

    @property
    def _outputs(self) -> dict[Any, Place]:
        return {**self.rebound, **self.moving, **self.written}

    def run(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        by: Callable[[Callable[[Any], Any], Any], Any] | None = None,
    ) -> Watched:
        """Run and watch one ordinary step.

        Args:
            step: makes it.
            batch: of the step.
            by: calls the step that it is given with the batch. The code that it runs besides is not watched.

        Raises:
            CaptureError: the step cannot be watched. It was not run.
            Exception: whatever the step raises.
        """
        outer_hook()  # or the step cannot be watched
        for kind in kinds_in(batch):
            self.executed.persistent[id(kind)] = kind  # its class attributes are read by its code, and are guarded
        before, last = self.look() if self.num_watched else None, self._last
        if before is not None and self._last is not None:
            self.note_between(differences(self._last, before), self._last, before)
            self.owned = frozenset(owner for owner, kind in before.groups if kind in ("list", "dict"))
        leaves, spec = tree_flatten(batch)
        held = list(map(held_by, leaves))

        def watched(batch: Any) -> Any:
            with self.executed.watching():
                return step(batch)

        functools.update_wrapper(watched, step)  # whose lines a reason names
        result = watched(batch) if by is None else by(watched, batch)
        self.num_watched += 1
        after = self._last = self.look()
        settled = before is not None and self.executed.num_new == 0
        if before is not None and last is not None:
            self.executed.restored.update(restored(last, before, after))
        findings: list[str] = []
        if before is not None:
            findings = [f"it asks {asked}: do that outside the step" for asked in self.executed.world]
            findings += self._findings(before, after, settled)
        findings += list(after.opaque)
        findings += batch_findings(batch, leaves, spec, held, self.executed.refuses_arrays)
        if asked := reads_out_of_sight(batch, self.executed.codes):
            findings.append(f"it calls {asked} of its batch, which reads what cannot be seen: call it outside the step")
        return Watched(result, tuple(dict.fromkeys(findings)), settled, before, after)

    def note_moving(self, changes: Iterable[Change], before: Reachable) -> list[Change]:
        """Numbers and tensors that changed since `before` are read anew from now on. Return the other changes."""
        containers, numbers = containers_at(before, self.rebound), self.executed.follows_numbers
        others = []
        for change in changes:
            is_number_moved = is_number(change.then) and type(change.then) is type(change.now)
            if id(change.place.owner) in containers and are_like(change.then, change.now, numbers=numbers, spent=False):
                continue  # it is read by the place of its container
            if change.place.is_writable and is_number_moved and numbers:
                self.moving[change.place.identity] = change.place
            elif _is_rebinding(change, numbers):
                self.rebound[change.place.identity] = change.place
            else:
                others.append(change)
        return others

    def note_between(self, changes: Iterable[Change], before: Reachable, after: Reachable) -> list[Change]:
        """As `note_moving`, of changes that others have made. Lists that have grown are not looked at from now on.

        Should the step read one, see `look_at_lists`.
        """
        others = []
        for change in self.note_moving(changes, before):
            found = None if self._looks_at_lists else _appended(change, before, after)
            if found is None:
                others.append(change)
            else:
                self.appended.setdefault(id(found.target), replace(found, by_others=True))
        return others

    def look_at_lists(self) -> bool:
        """The step reads a list that only grows. Return True if others let it grow: it is guarded from now on."""
        read = [key for key, each in self.appended.items() if each.by_others]
        for key in read:
            del self.appended[key]
        self._looks_at_lists = True
        return bool(read)

    def _findings(self, before: Reachable, after: Reachable, settled: bool) -> Iterator[str]:
        for change in self.note_moving(differences(before, after), before):
            if change.place.kind == "setting" and is_a(generator_of(change.place.owner), GENERATORS):
                continue  # it is a change of its state, too
            owner = change.place.owner
            if change.place.kind == "state" and is_a(owner, torch.Generator) and owner.device.type == "cpu":
                self.torch_generators[id(owner)] = owner
                continue
            if (found := _appended(change, before, after)) is not None:
                self.appended[id(change.place.owner)] = found
            elif self._counts(change):
                yield self._finding(change)
            elif _is_output(change) and (change.then is not ABSENT or change.place.identity in self._outputs):
                self.written[change.place.identity] = replace(change.place, is_whole=True)
            elif settled or not (change.then is None or change.then is ABSENT):
                yield self._finding(change)

    def _counts(self, change: Change) -> bool:
        """Return whether a number that cannot be followed was set to another value by an earlier step."""
        if self.executed.follows_numbers or not (is_number(change.then) and is_number(change.now)):
            return False
        return self._numbers_set.setdefault(change.place.identity, change.now) != change.now

    def _finding(self, change: Change) -> str:
        kind, owner = change.place.kind, generator_of(change.place.owner)
        line = line_about(change.place, self.executed.codes)
        if kind == "state":
            if is_a(owner, DRAWING):
                self.generators[id(owner)] = owner
            return finding("draws" if is_a(owner, GENERATORS) else "advances", change, line)
        if kind == "tensor":
            return finding("marks a tensor", change, line)
        if kind == "buffer" or is_a(change.now, np.ndarray):
            return finding("writes an array", change, line)
        are_numbers = is_number(change.then) and is_number(change.now)
        if self.executed.strict and are_numbers:
            strict, _, line = next(iter(self.executed.strict)).rpartition(" at ")
            return finding("hands on", f"{change}, and hands numbers to {strict}", line)
        if is_a(change.now, torch.Tensor) and change.now.grad_fn is not None:
            return finding("keeps a graph", change.place.name, line)
        if kind == "length" or change.then is ABSENT or change.now is ABSENT:
            return finding("grows", change, line)
        if are_numbers:
            return finding("counts", change, line)
        is_container = type(change.then) is type(change.now) and is_a(change.now, (tuple, list, dict))
        return finding("refills" if is_container else "exchanges", change, line)


def _appended(change: Change, before: Reachable, after: Reachable) -> AppendedList | None:
    """The list that has only grown at its end, if every place that holds it can hold a stand-in while recording."""
    target = change.place.owner
    if change.place.kind != "length" or type(target) is not list:
        return None
    then, now = before.groups[id(target), "list"].values, after.groups[id(target), "list"].values
    if len(now) < len(then) or not all(map(same, then, now)):
        return None
    holders = [
        group.place(position)
        for group in after.groups.values()
        for position, value in enumerate(group.values)
        if value is target
    ]
    return AppendedList(target, tuple(holders)) if holders and all(place.is_writable for place in holders) else None


def _is_rebinding(change: Change, numbers: bool) -> bool:
    """Return whether tensors replaced others of their kind, without a graph of autograd that could still be used.

    With such a graph only where a hook makes it anew before it is read: pruned and normed weights. With `numbers`, also
    whether a tuple, list or dict of numbers replaced another one.
    """
    if not (change.place.is_writable and are_like(change.then, change.now, numbers=numbers, spent=False)):
        return False
    if is_empty(change.now):
        return True  # made anew in each step
    leaves = tree_flatten(change.now)[0]
    found = [leaf for leaf in leaves if is_a(leaf, torch.Tensor)]
    if not found and not (len(leaves) <= MAX_NUMBERS and any(map(is_number, leaves))):
        return False
    return not any(keeps_graph(leaf, change.place) for leaf in found)


def _is_output(change: Change) -> bool:
    """Return whether a graph could put the new value there: a plain one, or a tensor where there was none."""
    if not change.place.is_writable or not is_plain(change.then):
        return False
    if is_a(change.now, torch.Tensor):
        return type(change.now) is torch.Tensor and not change.now.requires_grad
    return is_plain(change.now)
