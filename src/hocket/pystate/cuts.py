"""One way to split the body of a step: which statements and which draws come before, and which come after."""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

from hocket.arguments import packed, unpacked
from hocket.pystate.bodies import SCOPES, Body, Statement, is_plain, names_of

# Keyword arguments of the parts.
BEFORE, LIVE = "_hocket_before", "_hocket_live"
# A part returns it after the step's result where no other comes after.
RETURNED = "_hocket_returned"
_DRAWN = "_hocket_drawn_{}"
_UNSURE = "_hocket_unsure_{}"
_CONVERSIONS = (float, int, round, abs, bool)
_PLAIN_CALLS = (*_CONVERSIONS, len, min, max, range)
_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.process_time, time.time_ns, time.perf_counter_ns)


@dataclass(frozen=True)
class StepParts:
    """A step in three parts.

    Attributes:
        before: called with the step's arguments. Returns the values that the middle and the last part need, or the
            step's result and `RETURNED` where the step ends there. None if nothing comes before.
        middle: called with the step's arguments, and `BEFORE` if there is a first part. Returns a tuple: what the last
            part needs, or the step's result and `RETURNED` where the step ends there.
        after: called with the step's arguments, with the second of the first part as `BEFORE` and the tuple of the
            middle as `LIVE`. Returns the step's result.
        lines: of the user's code that is not in the middle.
        code: of the step.
    """

    before: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]] | None
    middle: Callable[..., tuple[Any, ...]]
    after: Callable[..., Any]
    lines: str
    code: CodeType

    def begin(self, batch: Any) -> tuple[Any, tuple[Any, ...]]:
        """Run what comes before: the batch of the middle, and what the last part gets.

        The step's result and `RETURNED` where the step ends there.

        Args:
            batch: the arguments of the step, as `hocket.arguments.packed` makes them.
        """
        if self.before is None:
            return batch, ()
        args, kwargs = unpacked(batch)
        drawn, kept = self.before(*args, **kwargs)
        if is_end(kept):
            return drawn, kept
        return (packed(args, {**kwargs, BEFORE: drawn}) if drawn else batch), kept

    def end(self, batch: Any, kept: tuple[Any, ...], live: tuple[Any, ...]) -> Any:
        """Run the last part with the result of the middle, and return the step's result."""
        if len(live) == 2 and is_end(live[1]):
            return live[0]
        args, kwargs = unpacked(batch)
        return self.after(*args, **{BEFORE: kept, LIVE: live}, **kwargs)

    def bound(self, bind: Callable[[Any], Any]) -> StepParts:
        """The parts as a method's, or with arguments that are given already."""
        before = None if self.before is None else bind(self.before)
        return replace(self, before=before, middle=bind(self.middle), after=bind(self.after))


def is_end(value: Any) -> bool:
    """Return True for `RETURNED`."""
    return type(value) is str and value == RETURNED


class BodyCut:
    """One way to split a body: at which statement it ends, and which draws go to the front.

    Args:
        body: of the function.
        cut: position of the first statement after the middle.
        runs_op: of each statement, whether it does.
        takes_all: all that stands before the first op goes to the front.
        drawn: by line how many draws one step has made there.
    """

    def __init__(
        self, body: Body, cut: int, runs_op: Sequence[bool], drawn: Mapping[int, int], takes_all: bool = False
    ) -> None:
        self.body = body
        self.drawn = drawn
        self.runs_op = runs_op
        self.takes_all = takes_all
        self.middle, self.after = body.statements[:cut], body.statements[cut:]
        self.names: list[str] = []  # of what is drawn
        self.moved: dict[str, ast.Assign] = {}  # name in the front -> what the middle does with what it stands for
        self.unsure: set[str] = set()  # names that the front may have left unbound
        self.drawing: list[ast.expr | ast.stmt] = []
        self.front: list[ast.stmt] = []  # what comes before
        self.early: set[str] = set()  # names that nothing but the front binds
        self.nodes: list[ast.stmt] = []  # the middle, with names in place of draws

    def parts(self) -> StepParts | None:
        if not self._hoist() or not (self.drawing or self._is_worth_it()):
            return None
        passed = names_of(self.after, "loads") & names_of(self.middle, "stores")
        if names_of(self.middle, "captured") & names_of(self.after, "stores"):
            return None  # a function of the middle would see another variable
        early, live = sorted(passed & self.early), passed - self.early
        sure, unsure = sorted(live & self._bound()), sorted(live - self._bound())
        names = [*self.names, *self._passed_on(live)]
        if any(isinstance(n, ast.Name) and n.id in self.unsure for each in self.nodes for n in ast.walk(each)):
            return None
        before = None
        if self.drawing or early:
            result = _tuple([_tuple(list(map(_load, names))), _tuple(list(map(_load, early)))])
            before = self.body.compiled([*self.front, ast.Return(result)], ())
        given = [_unpack(names, BEFORE)] if names else []
        kept = [_UNSURE.format(name) for name in unsure]
        returned = ast.Return(_tuple([*map(_load, sure), *map(_load, kept)]))
        nodes = [_Early().visit(node) for node in self.nodes]
        made = [*given, *nodes, *map(_kept_if_bound, unsure, kept), returned]
        middle = self.body.compiled(made, (BEFORE,) if names else ())
        taken = [_unpack(each, source) for each, source in ((early, BEFORE), ([*sure, *kept], LIVE)) if each]
        bound = list(map(_bound_if_kept, unsure, kept))
        after = self.body.compiled([*taken, *bound, *(s.node for s in self.after)], (BEFORE, LIVE))
        return StepParts(before, middle, after, self._lines(), self.body.function.__code__)

    def _is_worth_it(self) -> bool:
        """True if more comes after than a result."""
        return any(not _is_result(statement.node) for statement in self.after)

    def _hoist(self) -> bool:
        """Move draws to the front. False where one of them cannot be."""
        ready = set(self.body.parameters)  # local names that the front can read
        plain = True  # all statements so far are in the front, too
        called = passed_op = returned = False
        attributes_set: set[str] = set()
        stored = [name for s in self.middle for name in s.stores]
        for statement, runs_op in zip(self.middle, self.runs_op, strict=False):
            node = copy.deepcopy(statement.node)
            is_first = self.takes_all and plain and not (runs_op or is_plain(node, self.body))
            if is_first and statement.loads - statement.stores <= ready:
                self._move(statement, node, ready, stored)
                continue
            if self._is_clock(statement) and not any(self.runs_op[: self.middle.index(statement) + 1]):
                self._move(statement, node, ready, stored)
                continue
            num_drawn = sum(count for line, count in self.drawn.items() if statement.spans({line}))
            found = [call for call in self._draws(node) if not self._is_late(call, ready, called, attributes_set)]
            found = [] if passed_op or returned else found
            remaining = [n for n in ast.walk(node) if isinstance(n, ast.Call) and self.body.draw_of(n)]
            if num_drawn > len(found) or len(remaining) > len(found):
                # Within a loop, in a branch, or by a function of the user's: as a whole, or not at all.
                if runs_op or statement.returns or not statement.loads - statement.stores <= ready:
                    return False
                if passed_op or returned or (not plain and not self._only_draws(statement, attributes_set)):
                    return False  # what stands before it may raise, or end the step
                self._move(statement, node, ready, stored)
                continue
            for call in found:
                self._draw(node, call)
            if plain and is_plain(node, self.body) and statement.loads <= ready:
                self.front.append(node)
                ready |= statement.stores
                self.early |= self._bound_once(statement, stored)
            else:
                plain, passed_op = False, passed_op or runs_op
                ready -= statement.stores
                attributes_set |= statement.attributes_set
                called = called or any(isinstance(n, ast.Call) for n in ast.walk(node))
            returned = returned or statement.returns
            self.nodes.append(node)
        return True

    def _is_late(self, call: ast.Call, ready: set[str], called: bool, attributes_set: set[str]) -> bool:
        """True of a draw that is given what is not there yet, or a fetch before which something is called.

        A fetch may raise, and then what stands before it has to have been done.
        """
        loads = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} & self.body.names
        attributes = {n.attr for n in ast.walk(call) if isinstance(n, ast.Attribute)}
        return (
            not loads <= ready or bool(attributes & attributes_set) or (called and self.body.draw_of(call) == "fetch")
        )

    def _move(self, statement: Statement, node: ast.stmt, ready: set[str], stored: Sequence[str]) -> None:
        """Move a whole statement to the first part. In its place the middle binds the names that it bound."""
        self.front.append(_Early().visit(node))
        self.drawing.append(node)
        sure = statement.stores & (ready | statement.binds)
        self.unsure |= statement.stores - sure
        for name in sorted(sure):
            kept = _DRAWN.format(f"{name}_{len(self.moved)}")
            self.front.append(ast.copy_location(ast.Assign([ast.Name(kept, ast.Store())], _load(name)), node))
            self.moved[kept] = ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], _load(kept)), node)
            self.nodes.append(self.moved[kept])
        ready |= statement.stores & statement.binds
        self.early |= self._bound_once(statement, stored)

    def _passed_on(self, live: set[str]) -> list[str]:
        """Drop moved statements whose names the middle does not read, and return the names of the rest."""
        kept_of = {node: kept for kept, node in self.moved.items()}
        read, nodes = set(live), []
        for node in reversed(self.nodes):
            if node not in kept_of:
                read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            elif node.targets[0].id in read:  # type: ignore[attr-defined]
                read.discard(node.targets[0].id)  # type: ignore[attr-defined]  # what was bound before is not read
            else:
                continue
            nodes.append(node)
        self.nodes = nodes[::-1]
        return [kept_of[node] for node in self.nodes if node in kept_of]

    def _only_draws(self, statement: Statement, attributes_set: set[str]) -> bool:
        """Return True for ``lam = random.random() if alpha > 0 else 1.0``, which may be moved ahead of earlier code."""
        calls = [n for n in ast.walk(statement.node) if isinstance(n, ast.Call)]
        attributes = {n.attr for n in ast.walk(statement.node) if isinstance(n, ast.Attribute)}
        return (
            isinstance(statement.node, ast.Assign)
            and all(
                self.body.draw_of(n) == "draw" or _is_one_of(self.body.value_of(n.func), _PLAIN_CALLS) for n in calls
            )
            and not attributes & attributes_set
            and not statement.attributes_set
        )

    def _is_clock(self, statement: Statement) -> bool:
        """Return True for ``start = time.perf_counter()``."""
        node = statement.node
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or statement.attributes_set:
            return False
        return _is_one_of(self.body.value_of(node.value.func), _CLOCKS)

    def _bound_once(self, statement: Statement, stored: Sequence[str]) -> set[str]:
        names = statement.stores & statement.binds
        return {name for name in names if stored.count(name) == 1 and name not in self.body.parameters}

    def _draws(self, statement: ast.stmt) -> Iterator[ast.Call]:
        """Draws that the statement makes in any case, in order."""
        for root in _roots(statement):
            yield from _in_any_case(root, lambda n: isinstance(n, ast.Call) and self._is_drawing(n))

    def _is_drawing(self, call: ast.Call) -> bool:
        """Return True for a draw, a fetch, and ``float(draw)`` or ``draw.item()``, which want a plain number."""
        if self.body.draw_of(call):
            return True
        if isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args:
            drawn: ast.expr | None = call.func.value
        elif call.args and _is_one_of(self.body.value_of(call.func), _CONVERSIONS):
            drawn = call.args[0] if all(isinstance(each, ast.Constant) for each in call.args[1:]) else None
        else:
            return False
        return isinstance(drawn, ast.Call) and not call.keywords and self.body.draw_of(drawn) == "draw"

    def _draw(self, statement: ast.stmt, call: ast.Call) -> None:
        name = _DRAWN.format(len(self.names))
        self.names.append(name)
        self.drawing.append(call)
        self.front.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], call), call))
        _Exchange(call, ast.copy_location(_load(name), call)).visit(statement)

    def _bound(self) -> set[str]:
        """Local names that have a value after the middle."""
        found = set(self.body.parameters)
        for statement in self.middle:
            found = (found - statement.deletes) | statement.binds
        return found

    def _lines(self) -> str:
        lines = sorted({each.lineno for each in self.drawing} | {s.node.lineno for s in self.after})
        return f"{Path(self.body.function.__code__.co_filename).name}:{', '.join(map(str, lines))}"


def _is_one_of(value: Any, known: Iterable[Any]) -> bool:
    return any(value is each for each in known)


def _is_result(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Return):
        return isinstance(node, ast.Pass)
    value = node.value
    while isinstance(value, (ast.Attribute, ast.Call)) and not (isinstance(value, ast.Call) and value.args):
        value = value.func if isinstance(value, ast.Call) else value.value  # loss.detach()
    return value is None or isinstance(value, (ast.Name, ast.Constant))


class _Early(ast.NodeTransformer):
    """Makes ``return (x, RETURNED)`` of the function's own ``return x``."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        if not isinstance(node, ast.Return):
            return self.generic_visit(node)
        found = _tuple([node.value or ast.Constant(None), ast.Constant(RETURNED)])
        return ast.copy_location(ast.Return(ast.copy_location(found, node)), node)


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _roots(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement that are evaluated first, and in any case."""
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)):
        return [] if statement.value is None else [statement.value]
    if isinstance(statement, ast.If):
        return [statement.test]
    return [statement.iter] if isinstance(statement, ast.For) else []


def _in_any_case(node: ast.AST, wanted: Callable[[ast.AST], bool]) -> Iterator[Any]:
    """The wanted nodes of an expression that are evaluated whatever values it meets, without what is within them."""
    if wanted(node):
        yield node
        return
    inner: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.BoolOp):
        inner = node.values[:1]
    elif isinstance(node, ast.IfExp):
        inner = [node.test]
    elif isinstance(node, ast.Compare):
        inner = [node.left, *node.comparators[:1]]
    elif isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        inner = [node.generators[0].iter]
    elif isinstance(node, ast.Lambda):
        inner = []
    for each in inner:
        yield from _in_any_case(each, wanted)


def _load(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _tuple(elements: list[Any]) -> ast.Tuple:
    return ast.Tuple(elements, ast.Load())


def _unpack(names: Sequence[str], source: str) -> ast.stmt:
    return ast.Assign([ast.Tuple([ast.Name(name, ast.Store()) for name in names], ast.Store())], _load(source))


def _kept_if_bound(name: str, kept: str) -> ast.stmt:
    """``try: kept = (name,)``, and ``kept = ()`` where the name is not bound."""
    store = ast.Name(kept, ast.Store())
    unbound = ast.ExceptHandler(_load("NameError"), None, [ast.Assign([store], _tuple([]))])
    return ast.Try([ast.Assign([store], _tuple([_load(name)]))], [unbound], [], [])


def _bound_if_kept(name: str, kept: str) -> ast.stmt:
    """``for name in kept: pass``: binds the name if it was bound."""
    return ast.For(ast.Name(name, ast.Store()), _load(kept), [ast.Pass()], [])
