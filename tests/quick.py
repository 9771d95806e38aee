"""Tables of tests whose every entry is worth running, and whose quick ones have every name of either axis once."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def covering(names: Iterable[Any], *others: Iterable[Any]) -> list[Any]:
    """All of the table; slow but for the n-th name with the n-th column, round and round.

    Args:
        names: the rows; values, tuples of values, or `pytest.param`; one that is slow is slow in every column.
        others: further axes of the same; a column has one of each.
    """
    rows = [_parts(name) for name in names]
    columns = [_joined(each) for each in itertools.product(*(map(_parts, axis) for axis in others))]
    fast, fast_columns = _not_slow(rows), _not_slow(columns)
    turns = range(max(len(fast), len(fast_columns)) if fast and fast_columns else 0)
    quick = {(fast[n % len(fast)], fast_columns[n % len(fast_columns)]) for n in turns}
    found = []
    for (row, one), (column, other) in itertools.product(enumerate(rows), enumerate(columns)):
        values, marks = _joined((one, other))
        slow = () if (row, column) in quick else (pytest.mark.slow,)
        found.append(pytest.param(*values, marks=(*marks, *slow)))
    return found


def some(values: Iterable[Any], every: int = 2) -> list[Any]:
    """All of a list, as parameters of a test; slow but for every n-th. Entries are those of `covering`."""
    parts = map(_parts, values)
    return [
        pytest.param(*each, marks=(*marks, pytest.mark.slow) if n % every else marks)
        for n, (each, marks) in enumerate(parts)
    ]


def _parts(entry: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The values and the marks of an entry."""
    if isinstance(entry, type(pytest.param())):
        return tuple(entry.values), tuple(entry.marks)
    return (entry if isinstance(entry, tuple) else (entry,)), ()


def _not_slow(entries: list[tuple[tuple[Any, ...], tuple[Any, ...]]]) -> list[int]:
    """The places of those that are not marked slow."""
    return [place for place, (_, marks) in enumerate(entries) if all(mark.name != "slow" for mark in marks)]


def _joined(parts: Iterable[tuple[tuple[Any, ...], tuple[Any, ...]]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    values, marks = zip(*parts, strict=True)
    return sum(values, ()), sum(marks, ())
