"""A cache of results about a graph or plan that lives as long as the object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def remember(make: Callable[..., _Result]) -> Callable[..., _Result]:
    """Cache the results of `make` for as long as its arguments live.

    Arguments are the same if they are the same objects: they never change, and to hash or compare two graphs of 100,000
    ops would take longer than the work it saves. A result must not refer to the arguments, which would keep them alive.
    """
    found: dict[tuple[int, ...], tuple[list[weakref.ref[Any]], _Result]] = {}

    def remembering(*nouns: Any) -> _Result:
        key = tuple(map(id, nouns))
        entry = found.get(key)
        if entry is None:
            result = make(*nouns)
            found[key] = entry = [weakref.ref(noun, lambda _: found.pop(key, None)) for noun in nouns], result
        return entry[1]

    return remembering
