r"""The programs of an array: made while the plain models run for the first time, kept while their world stands still.

    first call of a kind    model 0, model 1, ... run as they are, recorded and watched --> output
                            \--graphs of all models, merged--> program
    later calls             program

A *world* is the state that the forwards read: attributes, closures, globals, containers of the models' own. When it
changes, the next call is a first one again. When it changes back, its programs are used again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import own_options
from hocket.fusion.gradients import ASKED
from hocket.fusion.kinds import CallSpec, Kind
from hocket.fusion.known_functions import LAYOUT, NOTHING
from hocket.fusion.one_by_one import one_by_one
from hocket.fusion.program import FusedProgram, Settings
from hocket.fusion.questions import TOO_MANY, Questions
from hocket.fusion.record import recorded
from hocket.fusion.shared_objects import attributes_of
from hocket.fusion.stacked import unwatched
from hocket.fusion.store import Store
from hocket.fusion.traced import RecordedForward, Traced, merged
from hocket.fusion.watching import ForwardWatch
from hocket.heap import collections_held
from hocket.pystate.guards import Guards

V = TypeVar("V")
_NOTHING: Any = object()


class Bounded(dict[Any, V]):
    """At most `size` items: one more pushes out the one that was put in or asked for longest ago."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def get(self, key: Any, default: Any = None) -> Any:
        """The value of a key, which is the last one that was used now, or the default."""
        value = self.pop(key, _NOTHING)  # a key of a call takes as long to hash as a small op
        if value is _NOTHING:
            return default
        super().__setitem__(key, value)
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self.size:
            del self[next(iter(self))]


MAX_PROGRAMS = 256
MAX_WORLDS = 4
MAX_ATTEMPTS = 3
# Calls that a world has to last, and how often in a row one may not, before models are not recorded any more.
SHORT_CALLS = 3
MAX_SHORT = 6
MAX_NUMBERS = 16  # recordings in a row for other plain numbers among the arguments
# Names by which code finds out that it is recorded.
BETRAYING = frozenset(
    ("_get_current_function_mode_stack", "_get_current_function_mode", "_len_torch_function_stack", "getprofile")
)
CANNOT = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)


@dataclass(frozen=True)
class Unfused:
    """Stands for a program where there is none."""

    reason: str  # why there is none
    is_final: bool = True  # whether it is not worth another try


class World:
    """Calls and programs made in one state of all that the forwards read."""

    def __init__(self) -> None:
        # what is known of kinds of calls; `hocket.fusion.calls` keeps it here
        self.calls: Bounded[Any] = Bounded(MAX_PROGRAMS)
        self.num_calls = 0  # how many were made
        self.sees_layout = False  # whether some forwards have asked how their tensors lie in memory
        self._guards: Guards | None = None
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._num_copying = 0  # how many programs `_versions` has tensors of, those that are gone included
        self._questions: Bounded[Questions] = Bounded(MAX_PROGRAMS)
        self._looks: Bounded[int] = Bounded(MAX_PROGRAMS)
        self._programs: Bounded[FusedProgram | Unfused] = Bounded(MAX_PROGRAMS)
        self._attempts: Bounded[int] = Bounded(MAX_PROGRAMS)

    def holds(self) -> bool:
        """True if the state is this one, and there is room for what comes."""
        if self._versions and not self._is_as_copied():
            return False
        return self._guards is None or self._guards.hold()

    def renew(self) -> bool:
        """True if the state is this one after all: objects may have been exchanged for equal ones."""
        return self._is_as_copied() and self._guards is not None and self._guards.renew()

    def _is_as_copied(self) -> bool:
        """True if no tensor that programs have copies of is written. A world with copies for too many ones is over."""
        if self._num_copying > MAX_PROGRAMS:
            return False
        return all(tensor._version == version for tensor, version in self._versions.values())

    def changed(self) -> str:
        """The first change of state."""
        changes = [] if self._guards is None else self._guards.changes()
        return str(changes[0]) if changes else "something that the forward reads"

    def guard(self, guards: Guards, copied: list[Tensor]) -> None:
        """Let what is made from now on depend on this state, too, and on the contents of copied tensors."""
        self._guards = guards
        self._num_copying += bool(copied)
        self._versions |= {id(tensor): (tensor, tensor._version) for tensor in copied if not tensor.is_inference()}

    @property
    def asks(self) -> bool:
        """True if some forwards have looked at values."""
        return bool(self._questions)

    def answered(self, kind: Kind, values: list[Any]) -> Kind:
        """A kind of call with the answers that forwards would get from these leaves, as far as these are known."""
        questions = self._questions.get(kind.key(LAYOUT))
        return kind if questions is None else kind.answered(questions.answers(values))

    def questions(self, kind: Kind, store: Store) -> Questions:
        """The questions that forwards ask in calls of a kind, which is without answers."""
        key = kind.key(LAYOUT)
        found = self._questions[key] = self._questions.get(key) or Questions(store)
        return found

    def find(self, kind: Kind) -> FusedProgram | Unfused | None:
        """The program for calls of a kind, or the reason why there is none, or None if the kind is new."""
        looks = self._looks.get(kind.key(NOTHING))
        return None if looks is None else self._programs.get(kind.key(looks))

    def keep(self, kind: Kind, looks: int, found: FusedProgram | Unfused) -> None:
        """Remember what came of recording a kind."""
        base = kind.key(NOTHING)
        if isinstance(found, Unfused):
            self._attempts[base] = self._attempts.get(base, 0) + 1
            if not found.is_final and self._attempts[base] < MAX_ATTEMPTS:
                return
        self._looks[base] = max(looks, self._looks.get(base, NOTHING))
        self.sees_layout |= looks >= LAYOUT
        self._programs[kind.key(self._looks[base])] = found

    def programs(self) -> list[FusedProgram]:
        """Those that are kept, the one that was used last first."""
        return [each for each in reversed(self._programs.values()) if isinstance(each, FusedProgram)]


class Programs:
    """Records models, and keeps what was made of them."""

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._templates = store.templates
        # some model has code of the user's, which may look around. Layers of torch's own do not.
        self.has_own_code = any(map(has_own_code, self._templates))
        # Layers of torch's own are compared by their options, but for those that rules take for each model.
        rates = list(map(own_options, self._templates))
        self._has_one_graph = not self.has_own_code and all(own == rates[0] for own in rates)
        self._watch = ForwardWatch(self._templates[0].forward, self._templates)
        self._worlds: list[World] = [World()]
        self._num_short = 0
        self._last: Any = None  # what was recorded last: in which world, at which call of it, for which arguments
        self._num_numbers = 0
        self.given_up = ""  # why models are not recorded any more; empty where they are
        # Tensors that no op has given, from where no walk comes. What such a cache lets go of is forgotten here, too.
        self._met: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    def asks_leaves(self) -> bool:
        """True if the forwards ask their parameters for gradients and the like."""
        return self.has_own_code and self._watch.names(ASKED)

    def asks_who_watches(self) -> bool:
        """True if the forwards ask whether they are recorded."""
        return self.has_own_code and self._watch.names(BETRAYING)

    def made(self) -> list[FusedProgram]:
        """The programs of the world at hand, the one that was used last first."""
        return self._worlds[0].programs()

    def world(self) -> World:
        current = self._worlds[0]
        if not current.holds():
            current = self._other(current)
        current.num_calls += 1
        return current

    def _other(self, current: World) -> World:
        for other in self._worlds[1:]:
            if other.holds():
                break
        else:
            if current.renew():
                return current
            self._num_short = self._num_short + 1 if current.num_calls <= SHORT_CALLS else 0
            if self._num_short >= MAX_SHORT and not self.given_up:
                self.given_up = f"{current.changed()} changes from call to call; hand it over as an argument, a tensor"
            other = World()
            self._worlds.append(other)
        self._worlds.remove(other)
        self._worlds.insert(0, other)
        del self._worlds[MAX_WORLDS:]
        return other

    def record(self, world: World, kind: Kind, values: list[Any]) -> tuple[Any, Kind]:
        """Run the plain models, record them and make a program.

        Returns the output, `Stacked` where models differ, and the kind with the answers that the forwards have got.
        """
        store, traces = self._store, list[RecordedForward]()
        separate, originals = frozenset(store.separate_index), store.originals.known(values)

        def call(watched: Callable[[], AbstractContextManager[frozenset[int]]]) -> Any:
            def one(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if traces and self._has_one_graph:
                    return model(*args, **kwargs)
                with watched() as known:
                    traces.append(recorded(model, args, kwargs, separate, known.union(self._met), originals))
                return traces[-1].out

            return one_by_one(store, kind.call.spec, values, one)

        self._look_at_numbers(world, kind.call)
        if self.asks_who_watches():
            world.keep(kind, LAYOUT, Unfused("the forward asks who watches it"))
            return one_by_one(store, kind.call.spec, values), kind

        with collections_held():  # of the many objects that a walk makes, none is garbage yet
            seen = self._watch.run(call) if self.has_own_code else None
        result = call(lambda: nullcontext(frozenset())) if seen is None else seen.result
        looks = max(each.looks for each in traces)
        for each in traces:
            self._met.update({id(tensor): tensor for tensor in each.unknown})
        if own := [each.reason for each in traces if each.reason]:
            world.keep(kind, looks, Unfused(own[0], not any(each.may_pass for each in traces)))
        elif seen is not None and seen.reason:
            world.keep(kind, looks, Unfused(seen.reason, not seen.may_pass))
        else:
            kind = self._learnt(world, kind, traces)
            if kind.answers == TOO_MANY:
                world.keep(kind, looks, Unfused("the forward looks at values, and goes another way in each call"))
                return result, kind
            graphs = [each.traced for each in traces if each.traced is not None]
            found = self._made(graphs)
            world.keep(kind, looks, found)
            if seen is not None and isinstance(found, FusedProgram):
                world.guard(self._watch.guards(seen.state), _copied_constants(graphs))
        return result, kind

    def _look_at_numbers(self, world: World, call: CallSpec) -> None:
        """Give up where a plain number is another one in each call, which would be recorded each time."""
        before, self._last = self._last, (world, world.num_calls, call)
        is_like = before is not None and before[0] is world and world.num_calls - before[1] <= SHORT_CALLS
        is_other = is_like and before[2].spec == call.spec and before[2].constants != call.constants
        self._num_numbers = self._num_numbers + 1 if is_other else 0
        if self._num_numbers >= MAX_NUMBERS:
            self.given_up = "a number among its arguments changes from call to call; hand it over as a tensor"

    def _learnt(self, world: World, kind: Kind, traces: Sequence[RecordedForward]) -> Kind:
        """The kind with the answers to all looks at values, which are questions from now on."""
        asked = [each.asked for each in traces]
        if not any(asked):
            return kind
        plain = kind.answered(())
        return plain.answered(world.questions(plain, self._store).learn(asked))

    def checked(self, kind: Kind, values: list[Any]) -> Any:
        """Run the plain models, and look only whether they reach a part of the models that were fused."""
        store = self._store
        known = store.originals.known(values) if self.has_own_code and not self.asks_who_watches() else {}
        if not known:
            return one_by_one(store, kind.call.spec, values, asks_leaves=self.asks_leaves())
        separate = frozenset(store.separate_index)

        def one(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return recorded(model, args, kwargs, separate, frozenset(self._met), known).out

        return one_by_one(store, kind.call.spec, values, one)

    def _made(self, graphs: list[Traced]) -> FusedProgram | Unfused:
        try:
            with unwatched():
                return FusedProgram(self._store, self._settings, merged(graphs))
        except InputError as error:
            # The other models may have read a cache that the first one has filled.
            return Unfused(f"{error}{self._hint()}", is_final=False)
        except CANNOT as error:
            return Unfused(str(error))

    def _hint(self) -> str:
        """Attributes in which models differ, which may be why their graphs do."""
        known = dict(attributes_of(self._templates[0]))
        for index, template in enumerate(self._templates[1:], 1):
            for path, value in attributes_of(template):
                if isinstance(value, (bool, int, float, str)) and known.get(path) != value:
                    return f" ({path}: {known.get(path)!r} in model 0, {value!r} in model {index})"
        return ""


def _copied_constants(graphs: list[Traced]) -> list[Tensor]:
    """The constants that are not one object for all models, so that a program has copies of them."""
    columns = zip(*(list(graph.constants.values()) for graph in graphs), strict=True)
    return [each for column in columns if any(each is not column[0] for each in column) for each in column]


def has_own_code(model: nn.Module) -> bool:
    """True if a layer of a model is of the user's, or has a forward of its own."""
    return any(
        not type(layer).__module__.startswith("torch.nn.modules.") or "forward" in vars(layer)
        for layer in model.modules()
    )
