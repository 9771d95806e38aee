"""The guard table where there is no compiler: the same questions as ``native/guards.cpp``, asked in Python."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from hocket.pystate.places import ABSENT, are_like, is_a, kind_of, same

# Ways to compare a value, with the numbers of native/guarded.h.
IDENTITY, EQUAL, NUMBER, TENSOR, TREE, NONE_THERE, TREE_OF_NUMBERS = range(7)


class PythonTable:
    """Python version of the native `GuardTable`. Methods that add a group return its number."""

    def __init__(self) -> None:
        self._tests: list[Callable[[], bool]] = []
        self._again: dict[int, Callable[[], Callable[[], bool]]] = {}

    def __len__(self) -> int:
        return len(self._tests)

    def add_dict(
        self, table: Mapping[Any, Any], keys: list[Any], values: list[Any], kinds: list[int], whole: bool, ordered: bool
    ) -> int:
        def asked(values: list[Any]) -> Callable[[], bool]:
            size, tests = len(table), _tests(values, kinds)

            def holds() -> bool:
                if len(table) != size or (whole and list(table) != keys):
                    return False
                return all(key in table and test(table[key]) for key, test in zip(keys, tests, strict=True))

            return holds

        self._again[len(self)] = lambda: asked([table.get(key) for key in keys])
        return self.add_test(asked(values))

    def add_class(self, kind: type, keys: list[str], values: list[Any], kinds: list[int]) -> int:
        return self.add_dict(vars(kind), keys, values, kinds, False, False)

    def add_cell(self, cell: types.CellType, value: Any, kind: int) -> int:
        return self._add_one(lambda: cell.cell_contents, ValueError, value, kind)

    def add_list(self, items: list[Any], values: Sequence[Any], kinds: list[int]) -> int:
        tests = _tests(values, kinds)
        return self.add_test(
            lambda: (
                list.__len__(items) == len(tests)
                and all(test(item) for test, item in zip(tests, list.__iter__(items), strict=True))
            )
        )

    def add_slot(self, owner: Any, name: str, value: Any, kind: int) -> int:
        return self._add_one(lambda: object.__getattribute__(owner, name), AttributeError, value, kind)

    def add_type(self, owner: Any) -> int:
        bases = vars(type)["__mro__"].__get__
        return self._add_parts(lambda: (type(owner), bases(owner) if is_a(owner, type) else None))

    def add_function(self, function: types.FunctionType) -> int:
        return self._add_parts(lambda: (function.__code__, function.__defaults__, function.__kwdefaults__))

    def add_tensor(self, tensor: torch.Tensor) -> int:
        return self._add_equal(lambda: (_meta(tensor), _hooks(tensor)))

    def add_buffer(self, owner: Any) -> int:
        return self._add_equal(lambda: memoryview(owner).tobytes())

    def add_set(self, members: Any) -> int:
        return self._add_equal(lambda: frozenset(members))

    def add_test(self, test: Callable[[], bool]) -> int:
        self._tests.append(test)
        return len(self._tests) - 1

    def check(self) -> int:
        return next((number for number, test in enumerate(self._tests) if not test()), -1)

    def accept(self, number: int) -> None:
        self._tests[number] = self._again[number]()

    def _add_one(self, read: Callable[[], Any], error: type[Exception], value: Any, kind: int) -> int:
        """A value at one place, which raises `error` where it is empty."""
        test = _test(value, kind)

        def holds() -> bool:
            try:
                return test(read())
            except error:
                return kind == NONE_THERE

        return self.add_test(holds)

    def _add_parts(self, read: Callable[[], tuple[Any, ...]]) -> int:
        parts = read()
        return self.add_test(lambda: all(now is then for now, then in zip(read(), parts, strict=True)))

    def _add_equal(self, read: Callable[[], Any]) -> int:
        content = read()
        return self.add_test(lambda: read() == content)


def _tests(values: Sequence[Any], kinds: Sequence[int]) -> list[Callable[[Any], bool]]:
    return [_test(value, kind) for value, kind in zip(values, kinds, strict=True)]


def _test(value: Any, kind: int) -> Callable[[Any], bool]:
    if kind == EQUAL:
        return lambda now: same(now, value)
    if kind == NUMBER:
        return lambda now: type(now) is type(value)
    if kind == TENSOR:
        expected = _meta(value)
        return lambda now: is_a(now, torch.Tensor) and _meta(now) == expected
    if kind in (TREE, TREE_OF_NUMBERS):
        kept = _kept(value)
        return lambda now: are_like(kept, now, numbers=kind == TREE_OF_NUMBERS)
    if kind == NONE_THERE:
        return lambda now: now is ABSENT
    return lambda now: now is value


def _kept(value: Any) -> Any:
    """The tree with lists and dicts of its own: others may write those that are guarded."""
    if is_a(value, dict):
        made = copy(value)
        made.update({key: _kept(each) for key, each in value.items()})
        return made
    if is_a(value, list):
        return [_kept(each) for each in value]
    return tuple(map(_kept, value)) if type(value) is tuple else value


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (kind_of(tensor), tensor.stride() if tensor.layout is torch.strided else ())


def _hooks(tensor: torch.Tensor) -> tuple[int, ...]:
    tables = (tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None))
    return tuple(id(hook) for table in tables for hook in (table or {}).values())
