"""Statements of a middle that no graph holds, exchanged for others that do the same and can be recorded.

What only shows something is called after the ops (`hocket.pystate.outputs`). ``float(loss)`` becomes a number that is
known when the ops have run, as ``loss.item()`` is. Functions of the user's that are called between the ops have others
in their place that hold these statements.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from hocket.pystate.bodies import Body, parsed
from hocket.pystate.names import SCOPES
from hocket.pystate.origins import origin
from hocket.pystate.outputs import sink_for
from hocket.pystate.places import is_a


@dataclass(frozen=True)
class OtherStatements:
    """Statements in which some were exchanged.

    Attributes:
        nodes: the statements. What they name, `Body.given` has.
        codes: of called functions that others take the place of.
        asks: each asks whether the function still calls such a function.
        lines: of statements that run after the ops, each with its file.
        are_others: any of them differs.
    """

    nodes: list[ast.stmt]
    codes: tuple[CodeType, ...]
    asks: tuple[Callable[[], bool], ...]
    lines: frozenset[tuple[str, int]]
    are_others: bool


def exchanged(body: Body, nodes: Iterable[ast.stmt]) -> OtherStatements:
    """Exchange what can be, in statements of the body and in functions that these call."""
    exchange = _Exchanging(body, (body.function.__code__,))
    made = [exchange.visit(node) for node in nodes]
    return OtherStatements(
        made, tuple(exchange.codes), tuple(exchange.asks), frozenset(exchange.lines), exchange.is_other
    )


class _Exchanging(ast.NodeTransformer):
    """Exchanges statements of one function.

    Args:
        body: of the function.
        within: its code, and that of the functions that call it.
    """

    def __init__(self, body: Body, within: tuple[CodeType, ...]) -> None:
        self.body, self.within = body, within
        self.codes: list[CodeType] = []
        self.asks: list[Callable[[], bool]] = []
        self.lines: set[tuple[str, int]] = set()
        self.is_other = False

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        made = sink_for(self.body, node, self.asks) if isinstance(node, ast.Expr) else None
        if made is not None:
            self.is_other = True
            self.lines.add((self.body.function.__code__.co_filename, node.lineno))  # type: ignore[attr-defined]
            return ast.fix_missing_locations(ast.copy_location(made, node))
        self.generic_visit(node)
        if isinstance(node, ast.Call) and self.body.value_of(node.func) is float:
            node.func, self.is_other = ast.copy_location(self.body.give(_as_float), node.func), True
        elif isinstance(node, ast.Call):
            self._exchange_called(node)
        return node

    def _exchange_called(self, node: ast.Call) -> None:
        asked = node.func
        called = self.body.called(asked)
        function = called.__func__ if isinstance(called, MethodType) else called
        if not isinstance(function, FunctionType) or function.__code__ in self.within:
            return
        code = function.__code__
        owner = called.__self__ if isinstance(called, MethodType) else None
        body = parsed(function, owner) if _is_opened(code.co_filename) else None
        if body is None:
            return
        exchange = _Exchanging(body, (*self.within, code))
        nodes = [exchange.visit(statement.node) for statement in body.statements]
        if exchange.is_other:
            self.is_other = True
            made = body.compiled(nodes, ())
            node.func = ast.copy_location(self.body.give(made if owner is None else MethodType(made, owner)), asked)
            self.lines |= exchange.lines
            self.codes += [code, *exchange.codes]
            self.asks += [lambda: bool(self.body.called(asked) == called), body.is_current, *exchange.asks]


def _as_float(*values: Any) -> Any:
    """As `float`, which gives a number of Python's own for one that is followed."""
    value: Any = values[0] if len(values) == 1 else None
    if is_a(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    is_followed = value.__class__ in (int, float) and type(value) is not value.__class__
    return value * 1.0 if is_followed else float(*values)


def _is_opened(file: str) -> bool:
    """True of files of the user's, and of what ``@torch.no_grad()`` makes of a function."""
    return origin(file) == "user" or file == torch.utils._contextlib.__file__
