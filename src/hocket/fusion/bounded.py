"""A dictionary that keeps what was used last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["Bounded"]

V = TypeVar("V")


class Bounded(Generic[V]):
    """At most `size` items: one more pushes out the one that was put in or asked for longest ago.

    Example:
        >>> kept = Bounded(2)
        >>> kept["a"], kept["b"] = 1, 2
        >>> kept.get("a")
        1
        >>> kept["c"] = 3
        >>> list(kept)
        ['c', 'a']
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._items: dict[Any, V] = {}

    def get(self, key: Any) -> V | None:
        """The value of a key, or None."""
        if key not in self._items:
            return None
        self._items[key] = value = self._items.pop(key)
        return value

    def __setitem__(self, key: Any, value: V) -> None:
        self._items.pop(key, None)
        self._items[key] = value
        if len(self._items) > self.size:
            del self._items[next(iter(self._items))]

    def __contains__(self, key: Any) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        """Keys, the one that was used last first."""
        return reversed(self._items)

    def __reduce__(self) -> Any:
        """A copy begins empty: what was traced and timed belongs to one array."""
        return type(self), (self.size,)
