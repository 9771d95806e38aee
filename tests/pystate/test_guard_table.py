"""The guard table in Python answers as the native one does, and a schedule works on it alone."""

from __future__ import annotations

import collections
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket import native
from hocket.pystate.guard_table import PythonTable
from hocket.pystate.guards import EQUAL, IDENTITY, NONE_THERE, NUMBER, TENSOR, TREE_OF_NUMBERS
from hocket.pystate.places import ABSENT
from support.steps import update

pytestmark = pytest.mark.skipif(not native.available(), reason="the native core cannot be built here")


def _function(value: int = 1) -> int:
    return value


def _stats(loss: float, num: int) -> dict[str, Any]:
    return {"loss": loss, "of": [num, torch.ones(2)], "name": "a", "size": torch.Size([2]), "double": np.float64(loss)}


class Things:
    """Everything that a table can guard, with a group for each."""

    def __init__(self) -> None:
        self.kind = type("Kind", (), {"next_id": 3, "other": "a"})
        self.marker = object()
        self.table: dict[str, Any] = {"a": 1, "b": 2.0, "c": self.marker}
        self.counted = {"a": 1, "t": torch.ones(2)}
        self.whole = {"x": 1, "y": 2}
        self.ordered = collections.OrderedDict(x=1, y=2)
        self.cell = types.CellType(5)
        self.items = [1, "two"]
        self.slot = types.SimpleNamespace(value=1)
        self.function = types.FunctionType(_function.__code__, {}, argdefs=(1,))
        self.tensor = nn.Parameter(torch.ones(3))
        self.bytes = bytearray(b"abc")
        self.members = {1, 2}
        self.answer = True
        self.object = type("First", (), {})()
        self.derived = type("Derived", (type("Base", (), {}),), {})
        self.slots = Slots()
        self.empty = types.CellType()
        self.holder = {"stats": _stats(0.5, 1)}
        self.zeros = [0.0, 0j, np.float32(0.0), np.float64(0.0), (1, 0.0), float("nan"), np.float32("nan")]

    def fill(self, table: Any) -> None:
        table.add_dict(self.table, ["a", "b", "c"], [1, 2.0, self.marker], [EQUAL, EQUAL, IDENTITY], False, False)
        table.add_dict(self.counted, ["a", "t"], [1, self.counted["t"]], [NUMBER, TENSOR], False, False)
        table.add_dict(self.whole, ["x", "y"], [1, 2], [EQUAL, EQUAL], True, False)
        table.add_dict(self.ordered, ["x", "y"], [1, 2], [EQUAL, EQUAL], True, True)
        table.add_class(self.kind, ["next_id"], [3], [EQUAL])
        table.add_cell(self.cell, 5, EQUAL)
        table.add_list(self.items, [1, "two"], [EQUAL, EQUAL])
        table.add_slot(self.slot, "value", 1, EQUAL)
        table.add_function(self.function)
        table.add_tensor(self.tensor)
        table.add_buffer(self.bytes)
        table.add_set(self.members)
        table.add_test(lambda: self.answer)
        table.add_type(self.object)
        table.add_type(self.derived)
        table.add_slot(self.slots, "later", ABSENT, NONE_THERE)
        table.add_cell(self.empty, ABSENT, NONE_THERE)
        table.add_list(self.zeros, list(self.zeros), [EQUAL] * len(self.zeros))
        table.add_dict(self.holder, ["stats"], [self.holder["stats"]], [TREE_OF_NUMBERS], False, False)

    @property
    def stats(self) -> dict[str, Any]:
        return self.holder["stats"]


class Slots:
    __slots__ = ("later",)


def _zero(place: int, value: Any) -> Any:
    return lambda things: things.zeros.__setitem__(place, value)


def _moved(things: Things) -> None:
    things.ordered.move_to_end("x")


def _written(things: Things) -> None:
    things.bytes[0] = 0


def _unbound(things: Things) -> None:
    del things.cell.cell_contents


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(2)


# Changes, and the group that must detect each; -1: none.
CHANGES: dict[str, tuple[Any, int]] = {
    "nothing": (lambda t: None, -1),
    "the same value again": (lambda t: t.table.update(a=1), -1),
    "a value": (lambda t: t.table.update(a=2), 0),
    "the type of a value": (lambda t: t.table.update(a=1.0), 0),
    "another object": (lambda t: t.table.update(c=object()), 0),
    "a name that no guard is about": (lambda t: t.table.update(new=1), 0),
    "a number that moves": (lambda t: t.counted.update(a=7), -1),
    "a number that becomes a string": (lambda t: t.counted.update(a="7"), 1),
    "a tensor of the same kind": (lambda t: t.counted.update(t=torch.zeros(2)), -1),
    "a tensor of another shape": (lambda t: t.counted.update(t=torch.zeros(3)), 1),
    "a name that is gone": (lambda t: t.whole.pop("y"), 2),
    "an order": (_moved, 3),
    "a class attribute": (lambda t: setattr(t.kind, "next_id", 4), 4),
    "an attribute that the class did not have": (lambda t: setattr(t.kind, "new", 4), 4),
    "a cell": (lambda t: setattr(t.cell, "cell_contents", 6), 5),
    "a cell that is empty": (_unbound, 5),
    "a longer list": (lambda t: t.items.append(1), 6),
    "an item": (lambda t: t.items.__setitem__(1, "three"), 6),
    "a slot": (lambda t: setattr(t.slot, "value", 2), 7),
    "a default": (lambda t: setattr(t.function, "__defaults__", (2,)), 8),
    "requires_grad": (lambda t: t.tensor.requires_grad_(False), 9),
    "a hook": (lambda t: t.tensor.register_hook(lambda grad: grad), 9),
    "bytes": (_written, 10),
    "a member": (lambda t: t.members.add(3), 11),
    "a test": (lambda t: setattr(t, "answer", False), 12),
    "a lazily negated tensor": (lambda t: t.counted.update(t=torch._neg_view(torch.ones(2))), 1),
    "a tensor of inference mode": (lambda t: t.counted.update(t=_inferred()), 1),
    "the class of an object": (lambda t: setattr(t.object, "__class__", type("Second", (), {})), 13),
    "the bases of a class": (lambda t: setattr(t.derived, "__bases__", (type("Other", (), {}),)), 14),
    "a slot that was empty": (lambda t: setattr(t.slots, "later", None), 15),
    "a cell that was empty": (lambda t: setattr(t.empty, "cell_contents", None), 16),
    "zero of the other sign": (_zero(0, -0.0), 17),
    "complex zero of the other sign": (_zero(1, complex(0.0, -0.0)), 17),
    "numpy's zero of the other sign": (_zero(2, np.float32(-0.0)), 17),
    "numpy's double zero of the other sign": (_zero(3, np.float64(-0.0)), 17),
    "zero of the other sign in a tuple": (_zero(4, (1, -0.0)), 17),
    "True for 1 in a tuple": (_zero(4, (True, 0.0)), 17),
    "NaN again": (_zero(5, float("nan")), -1),
    "numpy's NaN again": (_zero(6, np.float32("nan")), -1),
    "another tree of such numbers": (lambda t: t.holder.update(stats=_stats(0.25, 2)), -1),
    "a number in a tree": (lambda t: t.stats.update(loss=0.7), -1),
    "numpy's number in a tree": (lambda t: t.stats.update(double=np.float64(0.7)), -1),
    "the type of a number in a tree": (lambda t: t.stats.update(loss=1), 18),
    "the type of a number within a list in a tree": (lambda t: t.stats["of"].__setitem__(0, 1.0), 18),
    "a text in a tree": (lambda t: t.stats.update(name="b"), 18),
    "a size in a tree": (lambda t: t.stats.update(size=torch.Size([3])), 18),
    "a key in a tree": (lambda t: t.stats.update(more=1.0), 18),
    "a key of a tree that is gone": (lambda t: t.stats.pop("loss"), 18),
    "the order of a tree": (lambda t: t.stats.update(loss=t.stats.pop("loss")), 18),
    "a tree that is written after it has come": (
        lambda t: (t.holder.update(stats={**t.stats}), t.stats.pop("name")),
        18,
    ),
    "a tree that is no dict": (lambda t: t.holder.update(stats=[0.5]), 18),
    "no tree": (lambda t: t.holder.clear(), 18),
}


def test_a_tree_that_is_written_later_is_looked_at_again():
    things, table = Things(), native.load().GuardTable()
    things.fill(table)
    things.holder["stats"] = _stats(0.1, 3)
    assert table.check() == -1
    things.stats["more"] = 1.0  # the dict that holds it has not changed
    assert table.check() == 18


tables = pytest.mark.parametrize("make", [PythonTable, lambda: native.load().GuardTable()], ids=["python", "native"])


@tables
@pytest.mark.parametrize("change", CHANGES)
def test_both_tables_say_which_group_changed(change, make):
    things, table = Things(), make()
    things.fill(table)
    assert table.check() == -1
    act, expected = CHANGES[change]
    act(things)
    assert table.check() == expected
    if expected in (0, 4):  # a dict or a class: what it holds now may be what to expect
        table.accept(expected)
        assert table.check() == -1


@tables
def test_what_a_step_has_written_before_the_table_was_made_counts(make):
    things, table = Things(), make()
    things.table.update(a=2)
    things.fill(table)
    assert table.check() == 0


def test_a_schedule_works_without_a_compiler(monkeypatch):
    monkeypatch.setattr(native, "available", lambda: native.build.Availability(False, "there is no compiler"))
    model, other = nn.Linear(3, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean())

    options: dict[str, Any] = {"guard": False, "planner": "serial", "executor": "python", "cache": False}
    with hocket.schedule(step, model, optimizer, **options) as fast:
        for _ in range(60):
            other.register_forward_hook(lambda *args: None).remove()  # moves torch's number of the next hook
            fast(torch.ones(4, 3))
        assert fast.verdict == "planned", fast.why
