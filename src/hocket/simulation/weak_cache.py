"""Remembering what was worked out about a noun, for as long as that noun lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def remember(make: Callable[..., _Result]) -> Callable[..., _Result]:
    """Call `make` once for the same nouns, and forget its result when one of them is gone.

    "The same" means the very same objects: nouns never change, and to hash or compare two of 100,000 ops would take
    longer than the work it saves. The result must not refer to the nouns, or they would never be gone.
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
