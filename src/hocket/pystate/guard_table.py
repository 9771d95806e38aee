"""The guard table where there is no compiler: the same questions as ``native/guards.cpp``, asked in Python."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hocket.pystate.places import ABSENT, are_like, is_a, kind_of, same


class PythonTable:
    """Python version of the native `GuardTable`. Methods that add a group return its number."""

    def __init__(self) -> None:
        self._tests: list[Callable[[], bool]] = []
        self._dicts: dict[int, _Dict] = {}

    def __len__(self) -> int:
        return len(self._tests)

    def add_dict(
        self, table: Mapping[Any, Any], keys: list[Any], values: list[Any], kinds: list[int], whole: bool, ordered: bool
    ) -> int:
        made = self._dicts[len(self._tests)] = _Dict(table, keys, values, kinds, whole)
        return self.add_test(made.holds)

    def add_class(self, kind: type, keys: list[str], values: list[Any], kinds: list[int]) -> int:
        return self.add_dict(vars(kind), keys, values, kinds, False, False)

    def add_cell(self, cell: types.CellType, value: Any, kind: int) -> int:
        test = _test(value, kind)

        def holds() -> bool:
            try:
                return test(cell.cell_contents)
            except ValueError:
                return kind == 5  # unbound

        return self.add_test(holds)

    def add_list(self, items: list[Any], values: Sequence[Any], kinds: list[int]) -> int:
        tests = [_test(value, kind) for value, kind in zip(values, kinds, strict=True)]

        def holds() -> bool:
            return list.__len__(items) == len(tests) and all(
                test(item) for test, item in zip(tests, list.__iter__(items), strict=True)
            )

        return self.add_test(holds)

    def add_slot(self, owner: Any, name: str, value: Any, kind: int) -> int:
        test = _test(value, kind)

        def holds() -> bool:
            try:
                return test(object.__getattribute__(owner, name))
            except AttributeError:
                return kind == 5

        return self.add_test(holds)

    def add_type(self, owner: Any) -> int:
        expected = (type(owner), vars(type)["__mro__"].__get__(owner) if is_a(owner, type) else None)

        def holds() -> bool:
            kind, bases = expected
            return type(owner) is kind and (bases is None or vars(type)["__mro__"].__get__(owner) is bases)

        return self.add_test(holds)

    def add_function(self, function: types.FunctionType) -> int:
        parts = (function.__code__, function.__defaults__, function.__kwdefaults__)
        return self.add_test(
            lambda: all(
                now is then
                for now, then in zip(
                    (function.__code__, function.__defaults__, function.__kwdefaults__), parts, strict=True
                )
            )
        )

    def add_tensor(self, tensor: torch.Tensor) -> int:
        expected = (_meta(tensor), _hooks(tensor))
        return self.add_test(lambda: (_meta(tensor), _hooks(tensor)) == expected)

    def add_buffer(self, owner: Any) -> int:
        content = memoryview(owner).tobytes()
        return self.add_test(lambda: memoryview(owner).tobytes() == content)

    def add_set(self, members: Any) -> int:
        content = frozenset(members)
        return self.add_test(lambda: members == content)

    def add_test(self, test: Callable[[], bool]) -> int:
        self._tests.append(test)
        return len(self._tests) - 1

    def finish(self) -> None:
        """Nothing: every question is asked each time."""

    def check(self) -> int:
        return next((number for number, test in enumerate(self._tests) if not test()), -1)

    def accept(self, number: int) -> None:
        made = self._dicts[number]
        self._dicts[number] = again = made.renewed()
        self._tests[number] = again.holds


class _Dict:
    def __init__(
        self, table: Mapping[Any, Any], keys: list[Any], values: list[Any], kinds: list[int], whole: bool
    ) -> None:
        self.table, self.keys, self.kinds, self.whole, self.size = table, keys, kinds, whole, len(table)
        self.tests = [_test(value, kind) for value, kind in zip(values, kinds, strict=True)]

    def renewed(self) -> _Dict:
        return _Dict(self.table, self.keys, [self.table.get(key) for key in self.keys], self.kinds, self.whole)

    def holds(self) -> bool:
        table = self.table
        if len(table) != self.size or (self.whole and list(table) != self.keys):
            return False
        return all(key in table and test(table[key]) for key, test in zip(self.keys, self.tests, strict=True))


def _test(value: Any, kind: int) -> Callable[[Any], bool]:
    if kind == 1:
        return lambda now: same(now, value)
    if kind == 2:
        return lambda now: type(now) is type(value)
    if kind == 3:
        expected = _meta(value)
        return lambda now: is_a(now, torch.Tensor) and _meta(now) == expected
    if kind == 4:
        return lambda now: are_like(value, now)
    if kind == 5:
        return lambda now: now is ABSENT
    return lambda now: now is value


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (kind_of(tensor), tensor.stride() if tensor.layout is torch.strided else ())


def _hooks(tensor: torch.Tensor) -> tuple[int, ...]:
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tuple(id(hook) for table in tables for hook in (table or {}).values())
