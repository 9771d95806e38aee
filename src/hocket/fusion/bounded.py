"""A dictionary that keeps what was used last."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["Bounded"]

V = TypeVar("V")
_NOTHING: Any = object()


class Bounded(dict[Any, V]):
    """At most `size` items: one more pushes out the one that was put in or asked for longest ago.

    Example:
        >>> kept = Bounded(2)
        >>> kept["a"], kept["b"] = 1, 2
        >>> kept.get("a")
        1
        >>> kept["c"] = 3
        >>> list(kept)
        ['a', 'c']
    """

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

    def __reduce__(self) -> Any:
        """A copy begins empty: what was traced and timed belongs to one array."""
        return type(self), (self.size,)
