"""The body of a function as statements, with the names that each reads and binds, and compiled anew in parts."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import inspect
import linecache
import types
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from hocket.pystate.bytecode import with_nested
from hocket.pystate.layout import attribute_of, in_class
from hocket.pystate.names import SCOPES, bound_names, own_nodes, read_names, surely_bound, used_names
from hocket.pystate.op_lines import Place, SourceSpan, places
from hocket.pystate.places import is_a
from hocket.pystate.tokens import DRAWING

_FUTURE = 0x1FE0000  # flags of code that `from __future__ import` sets
_RESULT = "_hocket_result"
_TAKEN = "_hocket_taken"
_GIVEN = "_hocket_given_{}"
_LOOKING = frozenset(("locals", "vars", "eval", "exec", "dir"))  # at the names of the function
# Methods of generators that write what they are given, which others may read before.
_WRITING = frozenset(("shuffle",))
# Methods of tensors that tell a number which no op computes.
_SIZES = frozenset(("size", "dim", "numel"))


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement of a body."""

    node: ast.stmt
    names: frozenset[str]  # all local names of the function

    @cached_property
    def loads(self) -> frozenset[str]:
        """Local names that it reads."""
        return frozenset(read_names(self.node) & self.names)

    @cached_property
    def stores(self) -> frozenset[str]:
        """Local names that it may bind or delete."""
        return frozenset(bound_names(self.node) & self.names)

    @cached_property
    def deletes(self) -> frozenset[str]:
        return frozenset(n.id for n in ast.walk(self.node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Del))

    @cached_property
    def binds(self) -> frozenset[str]:
        """Names that are bound once it has run."""
        return frozenset((surely_bound(self.node) - self.deletes) & self.names)

    @cached_property
    def captured(self) -> frozenset[str]:
        """Local names that a function within it reads."""
        inner = [n for n in ast.walk(self.node) if isinstance(n, SCOPES)]
        return frozenset({n.id for each in inner for n in ast.walk(each) if isinstance(n, ast.Name)} & self.names)

    @cached_property
    def returns(self) -> bool:
        return any(isinstance(n, ast.Return) for n in own_nodes(self.node))

    @cached_property
    def writes(self) -> bool:
        """True if it writes anything but local names: attributes, items, globals."""
        kinds = (ast.Attribute, ast.Subscript, ast.Name)
        found = [n for n in ast.walk(self.node) if isinstance(n, kinds) and not isinstance(n.ctx, ast.Load)]
        return any(not isinstance(n, ast.Name) or n.id not in self.names for n in found)

    def spans(self, places: Collection[Place]) -> bool:
        """True if one of the places belongs to it."""
        return any(span_of(self.node).covers(each) for each in places)


class Body:
    """The body of a function."""

    def __init__(self, function: types.FunctionType, owner: Any, node: ast.FunctionDef) -> None:
        self.function, self.owner, self._node = function, owner, node
        code = function.__code__
        self.names = frozenset((*code.co_varnames, *code.co_cellvars))
        num_stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        self.parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + num_stars]
        body = node.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]  # its documentation
        targets = [each.target for inner in body for each in ast.walk(inner) if isinstance(each, ast.comprehension)]
        own = {n.id for each in targets for n in ast.walk(each) if isinstance(n, ast.Name)}
        # Names of comprehensions and of lambdas, which may hide others of the same name.
        self._hidden = own | {n.arg for inner in body for n in ast.walk(inner) if isinstance(n, ast.arg)}
        self._declared = [each for each in body if isinstance(each, (ast.Global, ast.Nonlocal))]
        self.statements = [Statement(each, self.names) for each in body if each not in self._declared]
        self.given: dict[str, Any] = {}  # values that parts find by names of ours
        self._parsed = code, function.__defaults__, function.__kwdefaults__

    def is_current(self) -> bool:
        """True if the function has not been given other code or defaults, as notebooks do that reload modules."""
        own = self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__
        return all(one is other for one, other in zip(own, self._parsed, strict=True))

    def name_result(self) -> None:
        """Bind the value of the last statement, a `return`, to a name first, so that the two can be divided."""
        node = self.statements[-1].node
        assert isinstance(node, ast.Return)
        self.names |= {_RESULT}
        assert node.value is not None
        bound = ast.copy_location(ast.Assign([ast.Name(_RESULT, ast.Store())], node.value), node)
        returned = ast.copy_location(ast.Return(ast.Name(_RESULT, ast.Load())), node)
        self.statements[-1:] = [Statement(bound, self.names), Statement(returned, self.names)]

    def divide_branch(self, places: Collection[Place]) -> None:
        """Divide the last statement that runs ops, an `if`, behind those in its body.

        ``if last: optimizer.step(); scheduler.step()`` becomes ``taken = not not last``, and two branches on that.
        """
        positions = [n for n, s in enumerate(self.statements) if s.spans(places) or self.updates(s)]
        node = self.statements[positions[-1]].node if positions else None
        if not isinstance(node, ast.If):
            return
        within = [Statement(each, self.names) for each in node.body]
        end = max((n + 1 for n, s in enumerate(within) if s.spans(places) or self.updates(s)), default=len(within))
        if end == len(within):
            return
        self.names |= {_TAKEN}
        test = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node.test))
        asked = ast.copy_location(ast.Assign([ast.Name(_TAKEN, ast.Store())], test), node.test)
        first = ast.If(ast.Name(_TAKEN, ast.Load()), node.body[:end], node.orelse)
        _place_at(first, node.body[0], (node.orelse or node.body[:end])[-1])
        second = ast.If(ast.Name(_TAKEN, ast.Load()), node.body[end:], [])
        _place_at(second, node.body[end], node.body[-1])
        self.statements[positions[-1] : positions[-1] + 1] = [
            Statement(each, self.names) for each in (asked, first, second)
        ]

    def compiled(self, statements: Sequence[ast.stmt], further: Sequence[str]) -> types.FunctionType:
        """A function of these statements with further keyword arguments."""
        arguments = self._node.args
        used = {name for each in statements for name in used_names(each)}
        given = {name: value for name, value in self.given.items() if name in used}
        further = [*further, *given]
        made = ast.arguments(
            arguments.posonlyargs,
            arguments.args,
            arguments.vararg,
            [*arguments.kwonlyargs, *map(ast.arg, further)],
            [*arguments.kw_defaults, *(None for _ in further)],
            arguments.kwarg,
            arguments.defaults,
        )
        last = statements[-1] if statements else ast.Pass()
        declared = [type(each)([n for n in each.names if n in used]) for each in self._declared]
        body = [*(each for each in declared if each.names), *(statements or [last])]
        function = _function(self.function, ast.FunctionDef(self._node.name, made, body, []))
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **given} or None
        return function

    def function_of(self, names: Sequence[str], statement: ast.stmt) -> types.FunctionType:
        """A function with these parameters that runs one statement, which sees what the function sees from outside."""
        own = {} if self.owner is None else {self.parameters[0]: self.owner}
        arguments = ast.arguments(
            [], list(map(ast.arg, names)), None, list(map(ast.arg, own)), [None for _ in own], None, []
        )
        function = _function(self.function, ast.FunctionDef(self._node.name, arguments, [statement], []))
        function.__defaults__, function.__kwdefaults__ = None, own or None
        return function

    def give(self, value: Any) -> ast.Name:
        """A name by which the parts find a value."""
        name = _GIVEN.format(len(self.given))
        self.given[name] = value
        return ast.Name(name, ast.Load())

    def draw_of(self, call: ast.Call) -> str:
        """Return ``draw`` for a call that draws random numbers, ``fetch`` for `next`, and an empty text otherwise."""
        called = self.value_of(call.func)
        if called is next:
            return "fetch"
        owner = getattr(called, "__self__", None)
        return "draw" if issubclass(type(owner), DRAWING) and called.__name__ not in _WRITING else ""

    def updates(self, statement: Statement) -> bool:
        """Return True for a statement that calls the `step` of an optimizer, perhaps in every fourth step only."""
        calls = [n.func for n in ast.walk(statement.node) if isinstance(n, ast.Call)]
        return any(
            isinstance(f, ast.Attribute) and f.attr == "step" and is_a(self.value_of(f.value), torch.optim.Optimizer)
            for f in calls
        )

    def called(self, node: ast.expr) -> Any:
        """Return what a call finds by ``trainer.train``, or by ``super().train``."""
        owner = node.value if isinstance(node, ast.Attribute) else None
        if not (isinstance(owner, ast.Call) and isinstance(owner.func, ast.Name) and owner.func.id == "super"):
            return self.value_of(node)
        kind = self.value_of(ast.Name("__class__", ast.Load()))
        kinds = type.mro(type(self.owner))
        if owner.args or owner.keywords or kind not in kinds:
            return None
        tables = (vars(each) for each in kinds[kinds.index(kind) + 1 :])
        found = next((table[node.attr] for table in tables if node.attr in table), None)  # type: ignore[attr-defined]
        return types.MethodType(found, self.owner) if isinstance(found, types.FunctionType) else None

    def value_of(self, node: ast.expr) -> Any:
        """Return the value of a name or an attribute outside of the function, or None if it is not known."""
        if isinstance(node, ast.Attribute):
            owner = self.value_of(node.value)
            return None if owner is None else attribute_of(owner, node.attr)
        if not isinstance(node, ast.Name) or node.id in self._hidden:
            return None
        code = self.function.__code__
        if node.id in code.co_freevars:
            cell = (self.function.__closure__ or ())[code.co_freevars.index(node.id)]
            try:
                return cell.cell_contents
            except ValueError:
                return None
        if node.id in self.names:
            return self.owner if self.owner is not None and self.parameters[:1] == (node.id,) else None
        return self.function.__globals__.get(node.id, getattr(builtins, node.id, None))


def parsed(function: types.FunctionType, owner: Any) -> Body | None:
    """The body of a function. None where there is no source of what runs."""
    code = function.__code__
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        return None
    nodes, codes = _source(code.co_filename, tuple(linecache.getlines(code.co_filename)))
    place = code.co_name, code.co_firstlineno
    found = nodes.get(place, [])
    if not found or not any(_is_same(each, code) for each in codes.get(place, ())):
        return None
    if len(found) > 1:  # lambdas of one line
        own = places({(code, offset) for offset in range(0, len(code.co_code), 2)}, code)
        found = sorted(found, key=lambda node: sum(span_of(node.body[0]).covers(each) for each in own))
    node = copy.deepcopy(found[-1])
    if any(isinstance(n, ast.Name) and n.id in _LOOKING for n in ast.walk(node)):
        return None
    if any(isinstance(n, (ast.Global, ast.Nonlocal)) for each in node.body for n in list(ast.walk(each))[1:]):
        return None
    _mangle(node, code.co_qualname.split("."))
    if any(map(_is_private, ast.walk(node))):
        return None  # what it becomes depends on the class
    node.decorator_list, node.returns = [], None
    return Body(function, owner, node)


@functools.lru_cache(maxsize=32)
def _source(
    file: str, lines: tuple[str, ...]
) -> tuple[dict[tuple[str, int], list[ast.FunctionDef]], dict[tuple[str, int], list[types.CodeType]]]:
    """The functions of a file by name and first line, as source and compiled. Outer ones come first."""
    try:
        tree = ast.parse("".join(lines))
        compiled = compile(tree, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}, {}
    codes: dict[tuple[str, int], list[types.CodeType]] = {}
    for code in with_nested(compiled):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    nodes: dict[tuple[str, int], list[ast.FunctionDef]] = {}
    for each in ast.walk(tree):
        if isinstance(each, (ast.FunctionDef, ast.Lambda)):
            node = _named(each)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            nodes.setdefault((node.name, first), []).append(node)
    return nodes, codes


def _named(node: ast.FunctionDef | ast.Lambda) -> ast.FunctionDef:
    if isinstance(node, ast.FunctionDef):
        return node
    returned = ast.copy_location(ast.Return(node.body), node.body)
    return ast.copy_location(ast.FunctionDef("<lambda>", node.args, [returned], []), node)


def _is_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether the source file still matches the code that runs."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    return same and _plain(one.co_consts) == _plain(other.co_consts)


def _place_at(node: ast.stmt, first: ast.stmt, last: ast.stmt) -> None:
    """Give a node that was made the place in the source of what it holds."""
    node.lineno, node.col_offset = first.lineno, first.col_offset
    node.end_lineno, node.end_col_offset = last.end_lineno, last.end_col_offset


def span_of(node: ast.stmt) -> SourceSpan:
    """Return where a statement stands in the source."""
    return SourceSpan(node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0)


def names_of(statements: Iterable[Statement], what: str) -> set[str]:
    """The names that any of the statements ``loads``, ``stores`` or has ``captured``."""
    return set().union(*(getattr(statement, what) for statement in statements))


def is_plain(node: ast.stmt, body: Body) -> bool:
    """Return True for statements that may run twice: ``name = self.optimizer``, ``x, y = batch``, ``n = len(x)``."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return True
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(each, ast.Name) for each in targets) and is_pure(node.value, body)


def is_pure(node: ast.expr, body: Body) -> bool:
    """Return True for expressions that run no code of the user's: names, attributes, items, sizes."""
    if isinstance(node, (ast.Constant, ast.Name)):
        return True
    if isinstance(node, ast.Attribute):
        owner = body.value_of(node.value)
        if owner is not None and isinstance(in_class(type(owner), node.attr), property):
            return False
        return is_pure(node.value, body)
    if isinstance(node, ast.Tuple):
        return all(is_pure(each, body) for each in node.elts)
    if isinstance(node, ast.Subscript):
        return is_pure(node.value, body) and is_pure(node.slice, body)
    if isinstance(node, ast.Call) and not node.keywords:
        is_size = isinstance(node.func, ast.Attribute) and node.func.attr in _SIZES and is_pure(node.func.value, body)
        is_length = isinstance(node.func, ast.Name) and body.value_of(node.func) is len
        return (is_size or is_length) and all(is_pure(each, body) for each in node.args)
    return False


def _function(function: types.FunctionType, node: ast.FunctionDef) -> types.FunctionType:
    """A function with the closure, the globals and the defaults of another one."""
    code = function.__code__
    node.lineno = node.end_lineno = code.co_firstlineno
    free = [ast.arg(name) for name in code.co_freevars]
    outer = ast.FunctionDef("outer", ast.arguments([], free, None, [], [], None, []), [node], [])
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(outer, node)], []))
    compiled = compile(module, code.co_filename, "exec", code.co_flags & _FUTURE, dont_inherit=True)
    of_outer = next(each for each in compiled.co_consts if isinstance(each, types.CodeType))
    found = next(e for e in of_outer.co_consts if isinstance(e, types.CodeType) and e.co_name == node.name)
    found = found.replace(co_qualname=code.co_qualname)
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    made = types.FunctionType(
        found,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[n] for n in found.co_freevars),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__module__, made.__qualname__, made.__doc__ = function.__module__, function.__qualname__, function.__doc__
    return made


def _plain(constants: Sequence[Any]) -> list[str]:
    """Constants but for code and documentation, as text, which tells 1 from True."""
    return [repr(each) for each in constants if not isinstance(each, types.CodeType)]


def _mangle(node: ast.AST, path: Sequence[str]) -> None:
    """Name private attributes (``self.__count``) as the class does that the function stands in."""
    classes = [name for name, next_name in pairwise(path) if "<locals>" not in (name, next_name)]
    for each in ast.walk(node):
        if classes and isinstance(each, ast.Attribute) and _is_private(each):
            each.attr = f"_{classes[-1].lstrip('_')}{each.attr}"


def _is_private(node: ast.AST) -> bool:
    names = [getattr(node, key, None) for key in ("attr", "id", "arg", "name")]
    return any(isinstance(name, str) and name.startswith("__") and not name.endswith("__") for name in names)
