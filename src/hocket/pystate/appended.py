"""Lists that a step appends to and does not read: ``losses.append(loss.item())``.

A graph has no lists, but what is appended is a result of the step like any other, so a planned step can append it
itself, when its ops are done. That is sound only if the step does nothing else with the list. While the step is
recorded, every place that holds the list holds a `_Recorded` list in its stead: it passes on whatever is done with it,
notes what is appended, and whether it is used for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hocket.pystate.places import Place, describe


@dataclass(frozen=True, eq=False)
class AppendedList:
    """A list that a step appends to."""

    target: Any  # the user's own
    places: tuple[Place, ...]  # all that hold it, of those that the step can reach
    by_others: bool = False  # it has grown between steps

    @property
    def name(self) -> str:
        return describe(self.places[0].path)

    def content(self) -> list[Any]:
        """A copy of what is in it."""
        return list(self.target)

    def restore(self, content: list[Any]) -> None:
        """Put `content` in place of what is in it."""
        self.target[:] = content


class _Recorded(list[Any]):
    """Stands for a list while a step is recorded."""

    def __init__(self, target: list[Any], note: Callable[[], None]) -> None:
        super().__init__(target)
        self._target = target
        self._note = note
        self._added: list[Any] = []

    def append(self, value: Any) -> None:
        self._target.append(value)
        self._added.append(value)
        list.append(self, value)

    def extend(self, values: Any) -> None:
        for value in values:
            self.append(value)

    def __iadd__(self, values: Any) -> _Recorded:  # type: ignore[misc]
        self.extend(values)
        return self


def _passed_on(name: str) -> Any:
    def use(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._note()
        result = getattr(self._target, name)(*args, **kwargs)
        list.__setitem__(self, slice(None), self._target)
        return self if result is self._target else result

    return use


for _name in set(vars(list)) - set(vars(_Recorded)) - {"__new__", "__getattribute__", "__class_getitem__", "__hash__"}:
    setattr(_Recorded, _name, _passed_on(_name))
for _name in ("__radd__", "__reduce_ex__"):  # what a list does not define itself
    setattr(_Recorded, _name, _passed_on(_name) if hasattr(list, _name) else lambda self, other: other + self._target)


@contextmanager
def recorded_lists(appended: Sequence[AppendedList], note: Callable[[str], None]) -> Iterator[list[list[Any]]]:
    """While the block lasts, what is appended to each list is in the lists given. Other uses are noted, by its name."""
    stand_ins = [_Recorded(each.target, partial(note, each.name)) for each in appended]
    sizes = [len(each.target) for each in appended]
    added = [each._added for each in stand_ins]
    for each, stand_in in zip(appended, stand_ins, strict=True):
        for place in each.places:
            if place.get() is each.target:  # the user may have let go of it
                place.set(stand_in)
    try:
        yield added
    finally:
        for each, stand_in, size in zip(appended, stand_ins, sizes, strict=True):
            for place in each.places:
                if place.get() is stand_in:
                    place.set(each.target)
            if len(each.target) != size + len(stand_in._added):  # by a name that cannot be followed, a bound method
                note(each.name)
