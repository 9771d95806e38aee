"""The events of a plan one by one, and all but one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hocket.checking import Events


def all_but_one(events: Events) -> Iterator[Events]:
    """For each event all the others."""
    for field in ("waits", "carried"):
        table = getattr(events, field)
        for dst, sources in table.items():
            for src in sources:
                yield replace(events, **{field: {**table, dst: tuple(other for other in sources if other != src)}})
