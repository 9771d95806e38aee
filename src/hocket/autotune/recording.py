"""The recorded step of a search: an ordinary step that leaves a graph behind, and what has to hold for that graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hocket.autotune.candidate import TunerConfig
from hocket.pystate.changes import Change, containers_at, differences, in_words, named
from hocket.pystate.executed import NamesKnown
from hocket.pystate.guards import A_TENSOR, Guards
from hocket.pystate.origins import step_line
from hocket.pystate.places import ABSENT, shown
from hocket.pystate.walk import Reachable
from hocket.pystate.watch import PurityWatch, Watched
from hocket.tracing.captured import Captured, alone, captured_from
from hocket.tracing.reasons import Reason
from hocket.tracing.recording.record import record_step
from hocket.tracing.recording.trace import Recorded, Trace
from hocket.tracing.signature import signature_of
from hocket.tracing.sources import Entry
from hocket.tracing.state import Inventory, inventory, leaf_of
from hocket.tracing.variants import in_form

# Tensors outside of models and optimizers that may get gradients, and those that may stand at one place, one after the
# other. A step that has another one each time stays eager.
MAX_LEAVES = 1000
MAX_SUCCESSORS = 3


@dataclass(frozen=True)
class RecordedForm:
    """Result of a recorded step."""

    result: Any  # return value of the step
    guards: Guards | None  # conditions on Python's state under which the same would happen again
    captured: Captured | None = None  # the step as a graph, or None if it cannot be one
    reason: str = ""  # why not, in words
    # False where the step did something for the first time, so that it has to be recorded once more
    is_settled: bool = True
    is_idle: bool = False  # no op ran, as while a memory to learn from is not full


def recorded_form(config: TunerConfig, batch: Any, form: str) -> RecordedForm:
    """Make one ordinary step in this form and record it."""
    leaves = tuple(config.leaves.values())
    places = inventory(config.model, config.optimizer, leaves=leaves)
    if config.is_region:
        return _recorded_region(config, batch, signature_of(places, batch))
    recorder = StepRecorder(config.watch, places, config.model, config.optimizer, leaves)
    with alone(), in_form(places, form):
        seen = config.watch.run(config.step, batch, by=recorder)
    found = _judged(config, seen, recorder)
    if found.is_settled:
        config.watch.executed.met_before.clear()  # a list of its activations, say
    return found


class StepRecorder:
    """Records a watched step: `PurityWatch.run` calls it with the step and the batch."""

    recorded: Recorded
    signature: tuple[Any, ...]
    known: set[Any]  # places and lists that the recording follows, by identity
    names: NamesKnown  # before the step

    def __init__(
        self, watch: PurityWatch, places: Inventory, model: Any, optimizer: Any, leaves: Sequence[Entry]
    ) -> None:
        self._watch = watch
        self._places = places
        self._trained = (model, optimizer)
        self._leaves = leaves

    def __call__(self, step: Callable[[Any], Any], batch: Any) -> Any:
        watch = self._watch
        further = watch.outputs
        self.names = watch.executed.names_now()
        self.known = {*(place.identity for place in further), *watch.appended, *watch.torch_generators}
        self.signature = signature_of(self._places, batch)
        generators = tuple(watch.torch_generators.values())
        self.recorded = record_step(
            step,
            inventory(*self._trained, further, watch.executed.follows_numbers, self._leaves, generators),
            batch,
            appended=tuple(watch.appended.values()),
            live_leaves=frozenset(watch.live_leaves),
            settles=bool(watch.executed.strict),
            owned=watch.owned,
            arrays=not watch.executed.refuses_arrays,
        )
        return self.recorded.result

    def knows(self, change: Change) -> bool:
        """True if the recording follows the place of a change, or the list that it is in."""
        return change.place.identity in self.known or id(change.place.owner) in self.known


def _recorded_region(config: TunerConfig, batch: Any, signature: tuple[Any, ...]) -> RecordedForm:
    """A region has no Python state, so that there is nothing to guard and nothing that is done for the first time."""
    live = frozenset(config.watch.live_leaves)
    with alone():
        found = record_step(config.step, inventory(config.model, config.optimizer), batch, live_leaves=live)
    if found.trace is None:
        return RecordedForm(found.result, None, reason=f"it could not be captured: {found.reason}")
    return RecordedForm(found.result, None, captured_from(found.trace, signature, config.step, found.batch))


def _judged(config: TunerConfig, seen: Watched, recorder: StepRecorder) -> RecordedForm:
    assert seen.before is not None, "steps were watched before"
    watch: PurityWatch = config.watch
    recorded = recorder.recorded
    trace = recorded.trace
    are_new = _note_leaves(config.leaves, recorded.leaves, seen)
    are_new |= not recorder.known.issuperset(watch.torch_generators)
    guards = Guards(seen.before, watch, {} if trace is None else _effects(trace))
    if seen.findings:
        return RecordedForm(seen.result, guards, reason=in_words(seen.findings))
    if trace is None:
        are_read = recorded.reason is not None and recorded.reason.kind == "reads an appended list"
        if are_read and watch.look_at_lists():
            return RecordedForm(seen.result, guards, is_settled=False, reason=str(recorded.reason))
        reason = recorded.reason or Reason("trains unseen", shown(recorded.leaves[0]), step_line(config.step))
        return RecordedForm(
            seen.result,
            guards,
            reason=f"it could not be captured: {reason}",
            is_settled=not recorded.makes_state and not are_new and reason.kind != "goes on after an error",
            is_idle=reason.kind == "runs no ops",
        )
    if watch.executed.reads_text:
        trace.tape.settle_text()
    containers = containers_at(seen.before, watch.rebound)
    unseen = [
        change
        for change in differences(seen.before, seen.after)
        if not recorder.knows(change) and id(change.place.owner) not in containers
    ]
    if not seen.settled:
        # Torch's own code ran for the first time, and its names count from now on: what they name is not new.
        unseen = [
            change for change in unseen if change.then is not ABSENT or _was_looked_at(change, seen, recorder.names)
        ]
    if kept := [change for change in _kept(recorded, seen) if not recorder.knows(change)]:
        unseen += kept
        watch.note_moving(kept, seen.before)  # so that it is followed from now on
    if unseen or watch.executed.num_new_of_user:
        what = f"changes {named(unseen)}" if unseen else f"runs {watch.executed.newest} for the first time"
        why = f"it did something new in each recorded step: the last one {what}; make it once, outside the step"
        return RecordedForm(seen.result, guards, is_settled=False, reason=why)
    trace.places.twins.extend(_pinned(trace.places, seen.before, watch.rebound))
    return RecordedForm(seen.result, guards, captured_from(trace, recorder.signature, config.step, recorded.batch))


def _kept(recorded: Recorded, seen: Watched) -> Iterator[Change]:
    """Places that hold what stood for a number, also where the step has found the same number there."""
    values = {id(holder): set(map(id, found)) for holder, found in recorded.kept}
    assert seen.before is not None
    for key, group in seen.after.groups.items():
        then = seen.before.groups.get(key)
        if id(group.owner) not in values or then is None or len(then.values) != len(group.values):
            continue  # a change that is seen
        for position, (old, new) in enumerate(zip(then.values, group.values, strict=True)):
            if id(new) in values[id(group.owner)]:
                yield Change(group.place(position), old, new)


def _pinned(places: Inventory, before: Reachable, rebound: Container[Any]) -> Iterator[tuple[Entry, Entry]]:
    """Pair places with the tensors that have to stay there, since the step reaches these elsewhere, too.

    Others may exchange a buffer or a rate, and leave the one of before in a closure.
    """
    own = {id(state) for each in places.optimizers for state in each.state.values()}
    own |= {id(entry.table) for entry in places.tensors}
    exchangeable = {id(entry.get()): entry for entry in places.tensors if entry.kind in ("buffer", "state", "group")}
    for group in before.groups.values():
        for position, value in enumerate(group.values if id(group.owner) not in own else ()):
            entry = exchangeable.get(id(value))
            if entry is not None and group.place(position).identity not in rebound:
                yield entry, Entry("object", entry.name, {"tensor": value}, "tensor")


def _note_leaves(known: dict[int, Entry], found: Sequence[torch.Tensor], seen: Watched) -> bool:
    """Add the tensors that got gradients in a recorded step. False if there are none, or more than may be."""
    names = Counter(entry.name for entry in known.values())
    new = {id(tensor): leaf_of(tensor, _name_of(tensor, seen)) for tensor in found}
    if len(known) + len(new) > MAX_LEAVES or any(names[leaf.name] > MAX_SUCCESSORS for leaf in new.values()):
        return False
    known |= new
    return bool(new)


def _name_of(tensor: torch.Tensor, seen: Watched) -> str:
    """The name by which the step reaches a tensor."""
    for group in seen.after.groups.values():
        for position, value in enumerate(group.values):
            if value is tensor:
                return group.place(position).name
    return shown(tensor)


def _was_looked_at(change: Change, seen: Watched, names: NamesKnown) -> bool:
    """True if what is new at a place would have been seen there before the step."""
    place = change.place
    assert seen.before is not None
    group = seen.before.groups.get((id(place.owner), place.kind))
    return group is not None and (group.whole or names.count(place.owner, place.key))


def _effects(trace: Trace) -> dict[Any, Any]:
    made: dict[Entry, Any] = {entry: A_TENSOR for entry in trace.rebound if entry in trace.places.plain}
    return {_identity(entry): value for entry, value in {**trace.effects, **made}.items()}


def _identity(entry: Entry) -> Any:
    return entry.table.place.identity
