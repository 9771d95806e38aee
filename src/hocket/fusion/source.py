"""The steps of a program as the source of one Python function, which costs nothing but the ops.

def run(leaves, tensor):
    v0 = leaves[0]
    v1 = tensor("fc.weight")
    v2 = f2(v0, v1, None)         # torch.nn.functional.linear
    v0 = v1 = None
    return v2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.fusion.stacked import as_type_of, part

FILENAME = "<hocket.fuse: one program>"


class Ref:
    """The value at a place."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


@dataclass
class Step:
    """One op."""

    index: int  # the place of its result
    layer: str  # the name of the layer it belongs to
    op: str  # its name, or the class of a separate block
    call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]  # computes it by one of `backends` on `Stacked` values
    backends: list[str]  # what can compute it, best known first
    args: Any = ()  # its arguments, with `Ref` in place of values
    kwargs: Any = field(default_factory=dict)  # the same
    dead: list[int] = field(default_factory=list)  # places of values that are not needed any more behind it
    used: str = ""  # what computed it last, for the report
    alone: Sequence[Callable[..., Any]] = ()  # what computes it for each model by itself, on plain tensors
    takes_numbers: bool = False  # whether the rule takes numbers that differ between models (`ModelValues`)
    draws: bool = False  # whether it draws random numbers
    orders: tuple[tuple[int, ...], ...] = ()  # of its context, but for a write
    write: tuple[int, ...] | None = None  # the places of all names of its first argument, where it writes over that
    # whether its result has to be a view of its first argument, because one of them is written to
    must_view: bool = False


@dataclass(frozen=True)
class ProgramLayout:
    """Places of a program's values: its inputs, by the leaf of the arguments, tensors by name, and constants."""

    inputs: Sequence[tuple[int, int]]
    tensors: Sequence[tuple[int, str]]
    constants: Sequence[tuple[int, Any]]
    owned: Collection[int]  # inputs of which each model gets its own
    own: Callable[[Any], Any]  # makes them
    output: Any  # the result, with `Ref` in place of values


class ProgramSource:
    """Source that grows step by step."""

    def __init__(self, layout: ProgramLayout, model: int | None = None) -> None:
        self._model = model
        self._output = layout.output
        self._names: dict[str, Any] = {}
        self._steps: dict[int, Step] = {}  # by line
        self._dead: set[int] = set()
        self._lines = ["def run(leaves, tensor):"]
        for place, number in layout.inputs:
            leaf = f"leaves[{number}]"
            is_owned = model is None and place in layout.owned
            self._lines.append(f"    v{place} = {f'{self._name(layout.own)}({leaf})' if is_owned else leaf}")
        self._lines += [f"    v{place} = tensor({name!r})" for place, name in layout.tensors]
        self._lines += [f"    v{place} = {self._name(value)}" for place, value in layout.constants]

    def add(self, step: Step, function: Callable[..., Any], names: Iterable[int] | None = None) -> None:
        """Call a function of a step's arguments. With `names`, it returns the value of these places and the result."""
        args = [self._source(each) for each in step.args]
        args += [f"{name}={self._source(each)}" for name, each in step.kwargs.items()]
        call = f"{self._name(function)}({', '.join(args)})"
        if names is not None:
            left = "".join(f"v{place} = " for place in names if place not in self._dead)
            self._lines.append(f"    pair = {call}")
            self._lines.append(f"    {left}pair[0]")
            call = "pair[1]; pair = None"
        self._lines.append(f"    v{step.index} = {call}")
        self._steps[len(self._lines)] = step
        if step.dead:
            self._lines.append(f"    {' = '.join(f'v{place}' for place in step.dead)} = None")
            self._dead.update(step.dead)

    def function(self) -> Callable[[Any, Callable[[str], Any]], Any]:
        """The function of the leaves of the arguments and of what gives tensors by name."""
        lines = [*self._lines, f"    return {self._source(self._output)}"]
        exec(compile("\n".join(lines), FILENAME, "exec"), self._names)
        return self._names["run"]

    def failed(self, error: BaseException) -> Step | None:
        """The step at which an exception left the function."""
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == FILENAME:
                return self._steps.get(frame.tb_lineno)
            frame = frame.tb_next
        return None

    def _name(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value if self._model is None else part(value, self._model)
        return name

    def _source(self, tree: Any) -> str:
        """Arguments as source: values by their places, numbers as they are, anything else by name."""
        if isinstance(tree, Ref):
            return f"v{tree.place}"
        if type(tree) is tuple:
            return f"({''.join(self._source(each) + ', ' for each in tree)})"
        if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
            items = ", ".join(map(self._source, tree))
            return f"{self._name(as_type_of)}({self._name(tree)}, [{items}])"
        if type(tree) is list:
            return f"[{', '.join(map(self._source, tree))}]"
        if type(tree) is dict:
            return "{" + ", ".join(f"{name!r}: {self._source(each)}" for name, each in tree.items()) + "}"
        if type(tree) is slice:
            return f"slice({self._source(tree.start)}, {self._source(tree.stop)}, {self._source(tree.step)})"
        if tree is None or type(tree) in (bool, int, str):
            return repr(tree)
        return self._name(tree)
