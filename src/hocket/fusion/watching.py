"""Watches forwards while they are recorded: a graph stands for what a forward reads as it was, and writes nothing else.

    state before --forward, recorded--> state after         the same: the graph holds while the state is this one
                                        something changed:  what it was, in words

Source of both: `hocket.pystate`, which watches training steps in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import CaptureError
from hocket.pystate.changes import Change, differences, in_words
from hocket.pystate.findings import line_about
from hocket.pystate.guards import Guards
from hocket.pystate.places import ABSENT
from hocket.pystate.walk import Reachable
from hocket.pystate.watch import PurityWatch

# Python and C functions whose effect on torch's generators no walk can see.
_SEEDING = frozenset(("manual_seed", "manual_seed_all", "set_rng_state", "fork_rng"))


@dataclass(frozen=True)
class Seen:
    """One watched call of the models."""

    result: Any  # what it gave
    state: Reachable  # the state that it can read, which is as it was before unless there is a reason
    reason: str  # what a graph of it would lose, in words; empty if nothing
    may_pass: bool  # whether another call may have no such reason: caches are filled, all code has run


class ForwardWatch:
    """Watches the forwards of some models, or a loss function that has no roots but itself."""

    def __init__(self, function: Callable[..., Any], roots: Sequence[nn.Module] = ()) -> None:
        self._watch = PurityWatch(function, roots)

    def names(self, names: frozenset[str]) -> bool:
        """True if code of the user's, as far as it is known, names any of these."""
        if not self._watch.executed.codes:
            self._watch.look()
        return not names.isdisjoint(self._watch.executed.user_names)

    def run(self, call: Callable[[Callable[[], AbstractContextManager[frozenset[int]]]], Any]) -> Seen:
        """Run and watch a call of all models. The first one runs new code, whose names are known for the others.

        `call` gets a context for each model, which gives the addresses of known tensors.
        """
        executed, numbers, asked = self._watch.executed, list[int](), dict[str, None]()
        looks = [self._watch.look()]
        names = [frozenset(executed.names)]
        known = [_tensors_in(looks[0])]
        unwatched: list[str] = []

        @contextmanager
        def one() -> Iterator[frozenset[int]]:
            if len(looks) == 1 and numbers:
                looks.append(self._watch.look())
                names.append(frozenset(executed.names))
                known[0] = _tensors_in(looks[1])
            with ExitStack() as stack:
                try:
                    stack.enter_context(executed.watching())
                except CaptureError as error:
                    unwatched.append(str(error))
                yield known[0]
            numbers.append(executed.num_new_of_user)
            asked.update(executed.world)

        result = call(one)
        executed.persistent.clear()  # objects of one call, such as its inputs
        looks.append(self._watch.look())
        state = looks[-1]
        if unwatched:
            return Seen(result, state, unwatched[0], True)
        if any(numbers[1:] or numbers):
            return Seen(result, state, "it runs code for the first time", True)
        if seeding := sorted(_SEEDING & executed.user_names):
            return Seen(result, state, f"it calls {seeding[0]}: seed outside of the forward", False)
        if asked:
            return Seen(result, state, f"it asks {in_words(asked)}: do that outside of the forward", False)
        for number, (before, after) in enumerate(pairwise(looks)):
            for change in differences(before, after):
                if _is_about_names(change, before, names[number]) or change.place.owner is torch.autograd.Function:
                    continue  # its name was not known to count; or it is what records
                if (change.then is ABSENT or change.then is None) and number + 2 < len(looks):
                    continue  # the first model has put it into a cache
                line = line_about(change.place, executed.codes)
                return Seen(result, state, f"it changes {change}" + (f" ({line})" if line else ""), True)
        return Seen(result, state, in_words(state.opaque), False)

    def guards(self, state: Reachable) -> Guards:
        """The condition under which a graph stands for the forwards that were recorded in this state."""
        return Guards(state, self._watch)


def _is_about_names(change: Change, before: Reachable, names: frozenset[str]) -> bool:
    """True if an attribute is new because its name has come up since."""
    group = before.groups.get((id(change.place.owner), change.place.kind))
    by_name = group is not None and group.counts is not None
    return by_name and change.then is ABSENT and change.place.key not in names


def _tensors_in(state: Reachable) -> frozenset[int]:
    return frozenset(
        id(value)
        for group in state.groups.values()
        for value in (group.owner, *group.values)
        if isinstance(value, Tensor)
    )
