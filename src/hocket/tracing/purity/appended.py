"""Lists that a step appends to and does not read: ``losses.append(loss.item())``.

A graph has no lists, but what is appended is a result of the step like any other, so a planned step can append it
itself, when its ops are done. That is sound only if the step does nothing else with the list. While the step is traced,
every place that holds the list holds an `_AppendOnly` in its stead: it notes what is appended, and refuses to be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hocket.errors import CaptureError
from hocket.tracing.purity.places import Place, describe

__all__ = ["AppendedList", "standing_in"]


@dataclass(frozen=True, eq=False)
class AppendedList:
    """A list that a step appends to.

    Attributes:
        target: the user's own.
        places: all that hold it, of those that the step can reach.
    """

    target: Any
    places: tuple[Place, ...]

    @property
    def name(self) -> str:
        return describe(self.places[0].path)

    def content(self) -> list[Any]:
        """A copy of what is in it."""
        return list(self.target)

    def restore(self, content: list[Any]) -> None:
        """Put `content` in place of what is in it."""
        self.target[:] = content


@dataclass
class _AppendOnly:
    """Stands for a list during a trace."""

    name: str
    added: list[Any] = field(default_factory=list)

    def append(self, value: Any) -> None:
        self.added.append(value)

    def extend(self, values: Any) -> None:
        self.added.extend(values)

    def __iadd__(self, values: Any) -> _AppendOnly:  # type: ignore[misc]  # all other arithmetic is refused
        self.added.extend(values)
        return self

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"the step appends to {self.name} and reads it, too: return what is to be kept, and keep it outside the "
            "step"
        )

    __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __bool__ = __reversed__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __repr__ = _refuse
    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        self._refuse()


@contextmanager
def standing_in(appended: Sequence[AppendedList]) -> Iterator[list[list[Any]]]:
    """While this lasts, the lists cannot be read; what is appended to each is in the lists that are given."""
    stand_ins = [_AppendOnly(each.name) for each in appended]
    before = [each.content() for each in appended]
    try:
        for each, stand_in in zip(appended, stand_ins, strict=True):
            for place in each.places:
                place.set(stand_in)
        yield [stand_in.added for stand_in in stand_ins]
    finally:
        for each in appended:
            for place in each.places:
                place.set(each.target)
    for each, content in zip(appended, before, strict=True):
        if len(each.target) != len(content):
            each.restore(content)
            raise CaptureError(f"the step appends to {each.name} by a name that cannot be followed (a bound method?)")
