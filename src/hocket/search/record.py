"""What a search did: every epoch of every trial, in which slot and when, and how its groups trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Epoch", "Record"]


@dataclass(frozen=True)
class Epoch:
    """One trial in one slot for one epoch: a bar in the timeline of slots; seconds since the search began."""

    number: int
    group: int
    kind: str
    slot: int
    epoch: int
    start_s: float
    end_s: float
    value: float | None


@dataclass
class Record:
    """What a search did."""

    epochs: list[Epoch] = field(default_factory=list)  # every trial's epochs, in the order in which they ended
    # for each group the values that its trials agree on, and why they trained one at a time, if they did
    groups: list[tuple[tuple[Any, ...], str]] = field(default_factory=list)
    searches: int = 0  # how many fused models were made; each is captured and planned once, with a runner that does so
    split: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # the names of the fusible and the infusible parameters
