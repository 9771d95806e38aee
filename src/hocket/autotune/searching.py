"""The state of a search for one variant: the steps that its tuner asks for, one at a time, and when it is repeated."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from hocket.autotune.candidate import Item
from hocket.autotune.decision import Decision
from hocket.autotune.runner import InexactError


@dataclass
class PlanSearch:
    """A search that has no decision yet."""

    begin: Callable[[], Generator[Item, Any, Decision]]  # starts the tuner. It raises if the step may not be captured.
    spent_s: float = 0.0  # time of the calls that belong to it
    num_calls: int = 0  # how many these were
    is_look: bool = False  # it is a look at a decision that stands
    _tuner: Generator[Item, Any, Decision] | None = None
    _item: Item | None = None

    @property
    def item(self) -> Item:
        """The step that the tuner asks for. The first call starts the tuner."""
        if self._tuner is None:
            self._tuner = self.begin()
            self._item = next(self._tuner)
        assert self._item is not None
        return self._item

    def answer(self, outcome: Any) -> Decision | None:
        """Send what the item showed, or raise it in the tuner if it is an error. Return the decision once it stands."""
        assert self._tuner is not None
        try:
            if isinstance(outcome, InexactError):
                self._item = self._tuner.throw(outcome)
            else:
                self._item = self._tuner.send(outcome)
        except StopIteration as end:
            return end.value
        return None


class RefusedCalls:
    """Calls in a row that a refusal makes eager, which is doubted once they are `many`: its cause may have been rare.

    `growth` is the factor of that number from one time to the next.
    """

    def __init__(self, many: int, growth: int) -> None:
        self._num, self._many, self._growth = 0, many, growth

    def are_many(self, is_one: bool = True) -> bool:
        """Add a call, made so or not. Return True, and begin anew, if it is the last of many."""
        self._num = self._num + 1 if is_one else 0
        if self._num < self._many:
            return False
        self._num, self._many = 0, self._growth * self._many
        return True
