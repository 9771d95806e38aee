"""A number that is looked up in a set or a dict: later steps have to find the answer, and not the number."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.steps import update
from support.twins import Program, ran

ONE = (1,)


class Tens(set[int]):
    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key % 10 == 0


class Marked:
    """Its own attribute ``marks`` is hidden by a property of the same name."""

    def __init__(self, marks: Any) -> None:
        vars(self)["marks"] = {31, 61}
        self._marks = marks

    @property
    def marks(self) -> Any:
        return self._marks


def by_local_names(state: Any) -> bool:
    number, marks = state.n, state.marks
    return number not in marks


def by_a_quotient(state: Any) -> bool:
    tenth = state.n // 10
    return tenth in state.marks


def by_a_longer_pair(state: Any) -> bool:
    number = (state.n + 0,)
    return number + ONE in state.pairs


def by_keys(state: Any) -> bool:
    keys = state.marks.keys()
    return state.n in keys


def by_attribute(state: Any) -> bool:
    return state.n in state.marks


def counting(asks: Any, make_marks: Any, states: list[Any]) -> Callable[[], Program]:
    """A step that is another one where its number is among the marks; others add to these at call 50."""

    def make() -> Program:
        model, marks = nn.Linear(4, 3), make_marks()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pairs = {(mark, 1) for mark in marks}
        state = SimpleNamespace(n=0, hits=0, marks=marks, pairs=pairs, marked=Marked(marks))
        states.append(state)

        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long))
            if asks(state):
                loss = loss * 2
                state.hits += 1
            state.n += 1
            return update(optimizer, loss).detach()

        def between(number: int) -> None:
            if number == 50 and isinstance(marks, set):
                marks.add(55)

        return Program(step, model, optimizer, between, lambda: state.hits)

    return make


# The expression in the step, the source of the marks, and true if the expression is followed.
LOOKUPS = {
    "a set": (by_attribute, lambda: {30, 60}, True),
    "a dict": (by_attribute, lambda: {30: "a", 60: "b"}, True),
    "a Counter": (by_attribute, lambda: Counter([30, 60, 60]), True),
    "an OrderedDict": (by_attribute, lambda: OrderedDict({30: 1}), True),
    "a set of floats": (by_attribute, lambda: {30.0, 60.5}, True),
    "a set of its own class": (by_attribute, lambda: Tens({1}), True),
    "local names": (by_local_names, lambda: {30, 60}, True),
    "a quotient": (by_a_quotient, lambda: {3, 6}, True),
    "a sum": (lambda state: state.n + 1 in state.marks, lambda: {30, 60}, True),
    "a sum of three": (lambda state: state.n + 1 + 1 in state.marks, lambda: {30, 60}, False),
    "a longer pair": (by_a_longer_pair, lambda: {30, 60}, False),
    "a property": (lambda state: state.n in state.marked.marks, lambda: {30, 60}, False),
    "a pair": (lambda state: (state.n, 1) in state.pairs, lambda: {30, 60}, False),
    "keys": (by_keys, lambda: {30: 1}, False),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_steps_with_lookups_end_where_eager_steps_end(name):
    asks, make, is_followed = LOOKUPS[name]
    states: list[Any] = []
    fast = ran(counting(asks, make, states), lambda number: torch.randn(6, 4), 80)
    assert states[0].hits > 0
    assert (fast.verdict == "planned") == is_followed, fast.why
