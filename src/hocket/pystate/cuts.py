"""One way to split the body of a step: which statements and which draws come before, and which come after."""

from __future__ import annotations

import ast
import copy
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from hocket.pystate.bodies import Body, Statement, is_plain, names_of
from hocket.pystate.exchange import Exchange
from hocket.pystate.names import SCOPES, bound_names
from hocket.pystate.op_lines import Place
from hocket.pystate.places import is_a
from hocket.pystate.repeats import may_change
from hocket.pystate.step_parts import BEFORE, LIVE, RETURNED, StepParts

_DRAWN = "_hocket_drawn_{}"
_UNSURE = "_hocket_unsure_{}"
_CONVERSIONS = (float, int, round, abs, bool)
_PLAIN_CALLS = (*_CONVERSIONS, len, min, max, range)
_CLOCKS = (time.time, time.perf_counter, time.monotonic, time.process_time, time.time_ns, time.perf_counter_ns)

_NO_CODE = (ast.expr_context, ast.boolop, ast.unaryop, ast.cmpop, ast.keyword, ast.arguments, ast.arg)
_SAFE = (
    *(ast.Expr, ast.Assign, ast.AnnAssign, ast.If, ast.Pass, ast.Return),
    *(ast.Name, ast.Constant, ast.Attribute, ast.Call, ast.Lambda, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.UnaryOp),
    *(ast.BoolOp, ast.Compare, ast.IfExp, ast.List, ast.Tuple, ast.Dict),
)


class BodyCut:
    """One way to split a body: at which statement it ends, and which draws go to the front.

    Args:
        body: of the function.
        cut: position of the first statement after the middle.
        runs_op: of each statement, whether it does.
        unseen: where functions are called by what is no call (see `OpLines`).
        takes_all: all that stands before the first op goes to the front.
    """

    def __init__(
        self, body: Body, cut: int, runs_op: Sequence[bool], unseen: Collection[Place], takes_all: bool = False
    ) -> None:
        self.body = body
        self.unseen = unseen
        self.leaves_draws = False
        self.runs_op = runs_op
        self.takes_all = takes_all
        self.middle, self.after = body.statements[:cut], body.statements[cut:]
        self.names: list[str] = []  # of what is drawn
        self.moved: dict[str, ast.stmt] = {}  # name in the front -> what the middle does with what it stands for
        self.unsure: set[str] = set()  # names that the front may have left unbound
        self.drawing: list[ast.expr | ast.stmt] = []
        self.front: list[ast.stmt] = []  # what comes before
        self.early: set[str] = set()  # names that nothing but the front binds
        self.nodes: list[ast.stmt] = []  # the middle, with names in place of draws

    def parts(self) -> StepParts | None:
        self._hoist()
        other = Exchange(self.body, self.nodes)
        self.nodes = other.nodes
        if not (self.drawing or other.is_other) and all(_is_result(statement.node) for statement in self.after):
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
            before = self.body.compiled([*self.front, *_written(f"return {_tuple(names)}, {_tuple(early)}")], ())
        given = _written(f"{_tuple(names)} = {BEFORE}" if names else "")
        kept_of = {name: _UNSURE.format(name) for name in unsure}
        keeping = "".join(f"try: {k} = ({n},)\nexcept NameError: {k} = ()\n" for n, k in kept_of.items())
        live_names = [*sure, *kept_of.values()]
        nodes = [_Early().visit(node) for node in self.nodes]
        made = [*given, *nodes, *_written(f"{keeping}return {_tuple(live_names)}")]
        middle = self.body.compiled(made, (BEFORE,) if names else ())
        taken = [f"{_tuple(each)} = {source}\n" for each, source in ((early, BEFORE), (live_names, LIVE)) if each]
        taken += [f"for {n} in {k}: pass\n" for n, k in kept_of.items()]  # binds a name that was bound
        after = self.body.compiled([*_written("".join(taken)), *(s.node for s in self.after)], (BEFORE, LIVE))
        return StepParts(
            before,
            middle,
            after,
            self._lines(other.lines),
            (self.body.function.__code__, *other.codes),
            leaves_draws=self.leaves_draws,
            is_exchanged=other.is_other,
            asks=(*other.asks, self.body.is_current),
        )

    def _hoist(self) -> None:
        """Move draws to the front, until one is met that cannot be, or code that could draw itself."""
        ready = set(self.body.parameters)  # local names that the front can read
        plain = True  # all statements so far are in the front, too
        clean = True  # what is not in the front has called and written nothing that a draw could meet
        called = passed_op = returned = False
        stored = [name for s in self.middle for name in s.stores]
        for statement, runs_op in zip(self.middle, self.runs_op, strict=False):
            node = copy.deepcopy(statement.node)
            is_seen = not statement.spans(self.unseen)
            is_pure = is_seen and is_plain(node, self.body)
            is_first = self.takes_all and plain and not (runs_op or is_pure)
            can_move = statement.loads - statement.stores <= ready
            clean = clean and (is_seen or (is_first and can_move))
            found = list(self._draws(node, ready, called)) if clean and not (returned or passed_op) else []
            # In a branch: as a whole.
            is_drawing = clean and not (returned or runs_op) and self._only_draws(statement, len(found))
            if can_move and (is_first or is_drawing or (self._is_clock(statement) and not passed_op)):
                self._move(statement, node, ready, stored)
                continue
            for call in found:
                self._draw(node, call)
            if any(self.body.draw_of(call) == "fetch" for call in found):
                self._keep_before(statement)
            left = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
            if plain and is_pure and statement.loads <= ready:
                self.front.append(node)
                ready |= statement.stores
                self.early |= self._bound_once(statement, stored)
            else:
                plain, called = False, called or bool(left)
                ready -= statement.stores
                clean = clean and not statement.writes and all(map(self._draws_nothing, left)) and _never_raises(node)
            self.leaves_draws = self.leaves_draws or any(map(self.body.draw_of, left))
            returned, passed_op = returned or statement.returns, passed_op or runs_op
            self.nodes.append(node)

    def _draws_nothing(self, call: ast.Call) -> bool:
        """True of calls of torch's kernels, of ``len`` and the like, and of ``optimizer.zero_grad()``.

        Not of all functions of torch's: `tree_map` calls the function that it is given.
        """
        function = call.func
        if isinstance(function, ast.Attribute):
            owner = self.body.value_of(function.value)
            if isinstance(owner, ModuleType):
                is_kernel = owner is torch and isinstance(self.body.value_of(function), BuiltinFunctionType)
                return is_kernel or owner is torch.nn.functional
            return function.attr == "zero_grad" and is_a(owner, torch.optim.Optimizer)
        return _is_one_of(self.body.value_of(function), _PLAIN_CALLS)

    def _move(self, statement: Statement, node: ast.stmt, ready: set[str], stored: Sequence[str]) -> None:
        """Move a whole statement to the first part. In its place the middle binds the names that it bound."""
        self._keep_before(statement)
        self.front.append(_Early().visit(node))
        self.drawing.append(node)
        sure = statement.stores & (ready | statement.binds)
        self.unsure |= statement.stores - sure
        self.front[len(self.front) :], self.nodes[len(self.nodes) :] = self._kept(sure, node)
        ready |= statement.stores & statement.binds
        self.early |= self._bound_once(statement, stored)

    def _keep_before(self, statement: Statement) -> None:
        """Let the middle not repeat earlier statements of the front whose values a moved one may change."""
        for node in [each for each in self.nodes if each in self.front and may_change(self.body, statement, each)]:
            place, own = self.front.index(node) + 1, self.nodes.index(node)
            self.front[place:place], self.nodes[own : own + 1] = self._kept(bound_names(node), node)

    def _kept(self, names: Collection[str], node: ast.stmt) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Statements that keep the values of local names behind a statement of the front, and those that bind them."""
        keeping: list[ast.stmt] = []
        binding: list[ast.stmt] = []
        for name in sorted(names):
            kept = _DRAWN.format(f"{name}_{len(self.moved)}")
            keep, self.moved[kept] = (ast.copy_location(n, node) for n in _written(f"{kept} = {name}; {name} = {kept}"))
            keeping.append(keep)
            binding.append(self.moved[kept])
        return keeping, binding

    def _passed_on(self, live: set[str]) -> list[str]:
        """Drop statements of the front whose names the middle does not read, and return the names of moved ones."""
        kept_of = {node: kept for kept, node in self.moved.items()}
        read, nodes = set(live), []
        for node in reversed(self.nodes):
            if node in self.front and bound_names(node) <= self.early and bound_names(node).isdisjoint(read):
                continue
            if node not in kept_of:
                read |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            elif node.targets[0].id in read:  # type: ignore[attr-defined]
                read.discard(node.targets[0].id)  # type: ignore[attr-defined]  # what was bound before is not read
            else:
                continue
            nodes.append(node)
        self.nodes = nodes[::-1]
        return [kept_of[node] for node in self.nodes if node in kept_of]

    def _only_draws(self, statement: Statement, num_found: int) -> bool:
        """Return True for ``lam = random.random() if alpha > 0 else 1.0``, with more draws than those in any case."""
        calls = [n for n in ast.walk(statement.node) if isinstance(n, ast.Call)]
        drawn = [n for n in calls if self.body.draw_of(n) == "draw"]
        return (
            isinstance(statement.node, ast.Assign)
            and len(drawn) > num_found
            and all(
                n in drawn or self._is_drawing(n) or _is_one_of(self.body.value_of(n.func), _PLAIN_CALLS) for n in calls
            )
            and not statement.writes
        )

    def _is_clock(self, statement: Statement) -> bool:
        """Return True for ``start = time.perf_counter()``."""
        node = statement.node
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call) or statement.writes:
            return False
        return _is_one_of(self.body.value_of(node.value.func), _CLOCKS)

    def _bound_once(self, statement: Statement, stored: Sequence[str]) -> set[str]:
        names = statement.stores & statement.binds
        return {name for name in names if stored.count(name) == 1 and name not in self.body.parameters}

    def _draws(self, statement: ast.stmt, ready: set[str], called: bool) -> Iterator[ast.Call]:
        """Draws that the statement makes in any case, in order, up to one that has to stay where it is.

        That is one that is given what is not there yet, comes after a call that could draw itself, or fetches after any
        call: a fetch may raise, and then what stands before it has to have been done.
        """
        for root in _roots(statement):
            for call, is_sure in _calls_in_order(root, self._is_drawing):
                is_fetch = self.body.draw_of(call) == "fetch"
                if is_sure and self._is_drawing(call):
                    loads = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} & self.body.names
                    if not loads <= ready or (called and is_fetch):
                        return
                    yield call
                elif self._draws_nothing(call):
                    called = True
                else:
                    return

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
        _Exchange(call, ast.copy_location(ast.Name(name, ast.Load()), call)).visit(statement)

    def _bound(self) -> set[str]:
        """Local names that have a value after the middle."""
        found = set(self.body.parameters)
        for statement in self.middle:
            found = (found - statement.deletes) | statement.binds
        return found

    def _lines(self, further: Collection[tuple[str, int]]) -> str:
        """Return the lines that run as Python by their files, those in `further`, too."""
        own = self.body.function.__code__.co_filename
        found = {(own, each.lineno) for each in self.drawing} | {(own, s.node.lineno) for s in self.after} | {*further}
        by_file = itertools.groupby(sorted(found), key=lambda place: Path(place[0]).name)
        return "; ".join(f"{file}:{', '.join(str(line) for _, line in places)}" for file, places in by_file)


def _never_raises(node: ast.stmt) -> bool:
    """Return False if a statement may raise, other than by a call, or go on elsewhere.

    Draws behind it are made then that eager does not make.
    """
    return all(isinstance(each, _SAFE) for each in ast.walk(node) if not isinstance(each, _NO_CODE))


def _is_one_of(value: Any, known: Iterable[Any]) -> bool:
    return any(value is each for each in known)


def _is_result(node: ast.stmt) -> bool:
    if not isinstance(node, ast.Return):
        return isinstance(node, ast.Pass)
    value = node.value
    while isinstance(value, (ast.Attribute, ast.Call)) and not (isinstance(value, ast.Call) and value.args):
        if isinstance(value, ast.Attribute) and value.attr in ("numpy", "tolist"):
            return False
        value = value.func if isinstance(value, ast.Call) else value.value  # loss.detach()
    return value is None or isinstance(value, (ast.Name, ast.Constant))


class _Early(ast.NodeTransformer):
    """Makes ``return (x, RETURNED)`` of the function's own ``return x``."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        if not isinstance(node, ast.Return):
            return self.generic_visit(node)
        found = ast.Tuple([node.value or ast.Constant(None), ast.Constant(RETURNED)], ast.Load())
        return ast.copy_location(ast.Return(ast.copy_location(found, node)), node)


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.expr, new: ast.expr) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


def _roots(statement: ast.stmt) -> list[ast.expr]:
    """The expressions of a statement that are evaluated first, and in any case."""
    if isinstance(statement, ast.AugAssign) and not isinstance(statement.target, ast.Name):
        return []
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Return)):
        return [] if statement.value is None else [statement.value]
    if isinstance(statement, ast.If):
        return [statement.test]
    return [statement.iter] if isinstance(statement, ast.For) else []


def _calls_in_order(node: ast.AST, is_whole: Callable[[ast.Call], bool]) -> Iterator[tuple[ast.Call, bool]]:
    """The calls of an expression in their order, each with False if made for certain values only, or many times."""
    if isinstance(node, ast.Call) and is_whole(node):
        yield node, True
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
    elif isinstance(node, (ast.Lambda, ast.Dict)):  # a dict takes its keys and values in turns
        inner = []
    inner = list(inner)
    for each in inner:
        yield from _calls_in_order(each, is_whole)
    seen = {n for each in inner for n in ast.walk(each)}
    yield from ((n, False) for n in ast.walk(node) if isinstance(n, ast.Call) and n not in seen)


def _tuple(names: Iterable[str]) -> str:
    """The text of a tuple of names."""
    return f"({''.join(f'{name}, ' for name in names)})"


def _written(text: str) -> list[ast.stmt]:
    """The statements of a text, which stand nowhere in the source of the step."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for name in node._attributes:
            delattr(node, name)
    return tree.body
