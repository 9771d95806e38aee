"""Statements between a step's forward and its backward that may as well run after the update.

Most loops look at their outputs as soon as they have them, and train afterwards::

    loss = criterion(out := model(x), y)                loss = criterion(out := model(x), y)
    hits += (out.argmax(1) == y).sum().item()           loss.backward()
    loss.backward()                               ->    optimizer.step()
    optimizer.step()                                    hits += (out.argmax(1) == y).sum().item()

No graph holds the second line, and what comes before it is only half of a step. But a backward and an update read and
write weights, gradients and the state of optimizers only, as long as no code of the user's runs in them (hooks,
functions of autograd). A statement that has to do with none of these may come after them, if neither binds what the
other reads.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import numpy as np
import torch

from hocket.pystate.apart import FORBIDDEN, Reach, reach_of, writes_in_place
from hocket.pystate.bodies import Body, Statement, names_of, span_of
from hocket.pystate.op_lines import OpLines, SourceSpan, places
from hocket.pystate.places import is_a

_CLIPPING = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
_UPDATING = frozenset(("step", "zero_grad", "update", "unscale_"))
_UPDATERS = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
# Methods of values in the receiver of a backward, and in the arguments of what clips.
_OF_LOSS = frozenset(("mean", "sum", "scale", "parameters"))
_REDUCING = frozenset(("mean", "sum"))
# Methods of tensors that give a value which no graph follows.
_LOOKING = frozenset(("item", "numpy", "tolist", "append", "extend", "update"))
_STAYING = (
    *(ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Raise, ast.Assert, ast.Delete, ast.Global, ast.Nonlocal),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Try, ast.TryStar, ast.Match),
)


@dataclass(frozen=True)
class Sunk:
    """Statements that were moved to the end of the middle."""

    cut: int = 0  # position of the first of them
    # the source of the statements that they have passed, in which no code of the user's may run
    passed: frozenset[SourceSpan] = frozenset()


def sink(body: Body, runs_op: Sequence[bool], lines: OpLines, trained: Collection[int]) -> Sunk | None:
    """Move statements behind the last one that runs an op, where they may come. None if there are none."""
    code = body.function.__code__
    calling = places(lines.calls, code)
    bound = lines.bound.get(code, {})
    end = max((place for place, each in enumerate(runs_op) if each), default=-1) + 1
    passed: list[Statement] = []
    moved: list[Statement] = []
    for place in reversed(range(end)):
        statement = body.statements[place]
        behind = [each for each in body.statements[place + 1 :] if each not in moved]
        if not statement.spans(calling) and _is_passed(statement.node, body):
            passed.insert(0, statement)
        elif (
            _may_sink(statement, body, passed, behind)
            and _are_apart(_reaches(body, place, moved, bound), trained, computes := any(map(_computes, passed)))
            and not (computes and _stores_into(statement.node, body, bound))
        ):
            moved.insert(0, statement)
        else:
            break
    position = {id(each): place for place, each in enumerate(body.statements)}
    while moved and runs_op[position[id(moved[0])]] and not (moved[0].spans(calling) or _looks(moved[0].node)):
        del moved[0]  # ops that a graph may hold
    if not passed or not moved or position[id(passed[-1])] < position[id(moved[0])]:
        return None
    staying = [each for each in body.statements[:end] if each not in moved]
    body.statements = [*staying, *moved, *body.statements[end:]]
    return Sunk(len(staying), frozenset(span_of(each.node) for each in passed))


def _is_passed(node: ast.AST, body: Body) -> bool:
    """True of statements that do nothing but train, or compute one value of others, with means and sums at the most."""
    if isinstance(node, ast.If):
        asks = any(isinstance(each, ast.Call) for each in ast.walk(node.test))
        return not (asks or node.orelse) and all(_is_passed(each, body) for each in node.body)
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    if isinstance(node, ast.Assign) and all(isinstance(each, ast.Name) for each in node.targets):
        return all(map(_reduces, calls)) or (node.value is calls[0] and _trains(calls, body))
    return isinstance(node, ast.Expr) and bool(calls) and node.value is calls[0] and _trains(calls, body)


def _reduces(call: ast.Call) -> bool:
    is_method = isinstance(call.func, ast.Attribute) and call.func.attr in _REDUCING
    return is_method and all(each.arg != "out" for each in call.keywords)


def _trains(calls: Sequence[ast.Call], body: Body) -> bool:
    """True if the first of these calls, which has the others within it, is a backward, an update or a clipping."""
    function = calls[0].func
    if any(body.value_of(function) is each for each in _CLIPPING):
        raises = len(calls[0].args) > 3 or any(each.arg == "error_if_nonfinite" for each in calls[0].keywords)
        return not raises and all(
            isinstance(each.func, ast.Attribute) and each.func.attr in _OF_LOSS for each in calls[1:]
        )
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in _UPDATING:
        return len(calls) == 1 and is_a(body.value_of(function.value), _UPDATERS)
    within = [each.func for each in calls[1:]]
    return function.attr == "backward" and all(isinstance(f, ast.Attribute) and f.attr in _OF_LOSS for f in within)


def _may_sink(statement: Statement, body: Body, passed: Sequence[Statement], behind: Sequence[Statement]) -> bool:
    """True if the statement has the right form, and neither it nor what it would pass binds what the other reads."""
    nodes = list(ast.walk(statement.node))
    if any(isinstance(node, _STAYING) or _is_refused(node, body) for node in nodes):
        return False
    used = names_of(passed, "loads") | names_of(passed, "stores") | names_of(passed, "captured")
    if not (statement.stores.isdisjoint(used) and statement.loads.isdisjoint(names_of(behind, "stores"))):
        return False
    own = set(_paths(statement.node, body))
    return not any(
        one[: len(other)] == other[: len(one)] for each in passed for one in _paths(each.node, body) for other in own
    )


def _paths(node: ast.AST, body: Body) -> Iterator[tuple[str, ...]]:
    """Objects outside of the function that a statement has by their names, such as ``("self", "count")``.

    A method stands for its object. Functions and modules are left out.
    """
    if isinstance(node, (ast.Attribute, ast.Name)):
        value = body.value_of(node)
        names = ast.unparse(node).split(".")
        is_function = is_a(value, BuiltinFunctionType) and is_a(value.__self__, (ModuleType, NoneType))
        if is_function or is_a(value, (ModuleType, FunctionType, type)):
            return
        if value is not None or (isinstance(node, ast.Name) and node.id not in body.names):
            yield tuple(names[:-1] if is_a(value, (MethodType, BuiltinFunctionType)) else names)
            return
    for each in ast.iter_child_nodes(node):
        yield from _paths(each, body)


def _is_refused(node: ast.AST, body: Body) -> bool:
    """True of names that lead elsewhere, and of what may write into a tensor, or an attribute of a model."""
    if isinstance(node, ast.keyword):
        return node.arg == "out"
    if isinstance(node, ast.Attribute) and (node.attr in FORBIDDEN or writes_in_place(node.attr)):
        return not is_a(body.value_of(node), (int, float, str))  # else ``self.step`` is a count
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or isinstance(node.ctx, ast.Load):
        return False
    owner = body.value_of(node.value)
    return owner is None or is_a(owner, (*_UPDATERS, torch.Tensor))


def _computes(statement: Statement) -> bool:
    """True of a statement that reads values, which others may have written. An update reads gradients alone."""
    nodes = list(ast.walk(statement.node))
    return any(isinstance(n, ast.Assign) or (isinstance(n, ast.Attribute) and n.attr == "backward") for n in nodes)


def _are_apart(reaches: Iterator[tuple[Reach | None, bool]], trained: Collection[int], computes: bool) -> bool:
    """True if none of them leads to this memory, and, if what is passed computes, no code that stores gets a tensor."""
    found = list(reaches)
    if not all(reach is not None and reach.is_apart(trained) for reach, _ in found):
        return False
    stores = computes and any(reach.stores for reach, _ in found if reach is not None)
    return not (stores and any(reach.addresses for reach, is_given in found if reach is not None and is_given))


def _stores_into(node: ast.AST, body: Body, bound: dict[str, Reach]) -> bool:
    """True if a statement sets elements of an array from outside that a tensor of the function has for its memory."""
    met = {address for name in bound.keys() & body.names for address in bound[name].addresses}
    for each in ast.walk(node):
        is_written = isinstance(each, ast.Subscript) and not isinstance(each.ctx, ast.Load)
        array: Any = body.value_of(each.value) if is_written else None  # type: ignore[attr-defined]
        if is_a(array, np.ndarray):
            first, last = np.lib.array_utils.byte_bounds(array)
            if any(first <= address < last for address in met):
                return True
    return False


def _reaches(
    body: Body, place: int, moved: Sequence[Statement], bound: dict[str, Reach]
) -> Iterator[tuple[Reach | None, bool]]:
    """Yield the reach of each value that a statement reads by a name, or None where it is not known.

    With each comes False where only a number is read from it: ``loss.item()``.

    Args:
        body: with the statement.
        place: of the statement.
        moved: statements behind it that are moved, too. What they bind anew is not known as it was before.
        bound: of local names, as the step has left them.
    """
    statement = body.statements[place]
    earlier = [each for each in body.statements[:place] if not _is_constant(each.node)]
    met = names_of(earlier, "stores").union(body.parameters) & statement.loads
    is_same = isinstance(statement.node, ast.AugAssign)  # a number stays one, and a tensor the same
    rebound = names_of(moved if is_same else [statement, *moved], "stores")

    def reaches(node: ast.AST, is_given: bool = True) -> Iterator[tuple[Reach | None, bool]]:
        if isinstance(node, (ast.Attribute, ast.Name)):
            value: Any = body.value_of(node)
            if value is not None:
                yield reach_of(value), is_given
                return
        if isinstance(node, ast.Name) and node.id in met:
            reach = bound.get(node.id)
            is_written = not isinstance(node.ctx, ast.Load) and reach is not None and reach.addresses
            yield (None if node.id in rebound or is_written else reach), is_given
        is_given = is_given and not (isinstance(node, ast.Attribute) and node.attr == "item")
        for each in ast.iter_child_nodes(node):
            yield from reaches(each, is_given)

    return reaches(statement.node)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)


def _looks(node: ast.AST) -> bool:
    called = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any(
        (isinstance(f, ast.Attribute) and f.attr in _LOOKING) or (isinstance(f, ast.Name) and f.id in ("int", "float"))
        for f in called
    )
