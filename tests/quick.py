"""Tables of tests whose every entry is worth running, and whose quick ones have every name of either axis once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def covering(names: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """All pairs; slow but for those of the n-th name and the n-th of the others, round and round."""
    found = []
    columns = [_marked(other) for other in others]
    rows = [_marked(name) for name in names]
    for number in range(max(len(rows), len(columns))):
        rows[number % len(rows)][2].add(number % len(columns))
    for values, marks, quick in rows:
        for number, (also, more, _) in enumerate(columns):
            slow = [] if number in quick else [pytest.mark.slow]
            found.append(pytest.param(*values, *also, marks=[*marks, *more, *slow]))
    return found


def _marked(entry: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], set[int]]:
    """The values of an entry, its marks, and the quick ones of its columns."""
    if isinstance(entry, type(pytest.param())):
        return tuple(entry.values), tuple(entry.marks), set()
    return (entry if isinstance(entry, tuple) else (entry,)), (), set()
