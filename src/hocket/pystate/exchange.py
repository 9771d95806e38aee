"""Statements of a middle that no graph holds, exchanged for others that do the same and can be recorded.

What only shows something is called after the ops (`hocket.pystate.outputs`). ``float(loss)`` becomes a number that is
known when the ops have run, as ``loss.item()`` is. ``rates[step]`` is looked up anew where the step counts. Functions
of the user's that are called between the ops, and the `forward` of modules, have others in their place that hold these
statements.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from hocket.pystate.bodies import Body, parsed
from hocket.pystate.code_names import TENSOR_TYPES
from hocket.pystate.layout import in_class
from hocket.pystate.names import SCOPES
from hocket.pystate.origins import origin
from hocket.pystate.outputs import sink_for
from hocket.pystate.places import Followed, is_a

_READING = frozenset(("tolist", "item"))  # methods of arrays that give numbers of Python's own
_TENSOR_TYPES = tuple(vars(torch)[name] for name in TENSOR_TYPES)
_WHOLE = (torch.int64, torch.int32)
_OF_NUMPY = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool)


class Exchange(ast.NodeTransformer):
    """Statements of a function, and of functions that these call, in which some are exchanged for others.

    Args:
        body: of the function. What the statements name, its `given` has.
        statements: of the body.
        within: code of the functions that call it.
    """

    def __init__(self, body: Body, statements: Iterable[ast.stmt], within: tuple[CodeType, ...] = ()) -> None:
        self.body, self.within = body, (*within, body.function.__code__)
        self.codes: list[CodeType] = []  # of called functions that others take the place of
        self.asks: list[Callable[[], bool]] = []  # each asks whether the function still calls such a function
        self.lines: set[tuple[str, int]] = set()  # of statements that run after the ops, each with its file
        self.is_other = False  # any of them differs
        self.nodes: list[ast.stmt] = [self.visit(each) for each in statements]

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, SCOPES):
            return node
        made = sink_for(self.body, node, self.asks) if isinstance(node, ast.Expr) else None
        if made is not None:
            self.is_other = True
            self.lines.add((self.body.function.__code__.co_filename, node.lineno))  # type: ignore[attr-defined]
            made.value.args = [self.visit(value) for value in made.value.args]  # type: ignore[attr-defined]
            return ast.fix_missing_locations(ast.copy_location(made, node))
        self.generic_visit(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _READING:
            self._read_directly(node.func.value, node.func.attr)
        if isinstance(node, ast.Call) and (other := self._other_for(node)) is not None:
            node.func, self.is_other = ast.copy_location(self.body.give(other), node.func), True
        elif isinstance(node, ast.Call):
            self._exchange_called(node)
        elif isinstance(node, ast.Subscript) and self._looks_up(node):
            self.is_other = True
            return ast.copy_location(ast.Call(self.body.give(_item), [node.value, node.slice], []), node)
        return node

    def _read_directly(self, node: ast.expr, method: str) -> None:
        """Let ``x.numpy().tolist()`` ask the tensor, whose numbers are followed."""
        if not isinstance(node, ast.Call) or node.args or node.keywords:
            return
        if isinstance(node.func, ast.Attribute) and node.func.attr == "numpy":
            node.args = [node.func.value, ast.Constant(method)]
            node.func, self.is_other = self.body.give(_to_read), True

    def _other_for(self, node: ast.Call) -> Callable[..., Any] | None:
        """The function that takes the place of one of Python's that makes a plain number of any."""
        called = self.body.value_of(node.func)
        if called is float or called is int:
            return as_float if called is float else _as_int
        if any(called is each for each in _TENSOR_TYPES):
            return partial(_tensor_of, called)
        is_choice = any(called is each for each in (max, min)) and len(node.args) > 1 and not node.keywords
        return partial(_chosen, called) if is_choice else None

    def _looks_up(self, node: ast.Subscript) -> bool:
        """True of an item of a list, a tuple or an array from outside, by what is no constant."""
        is_read = isinstance(node.ctx, ast.Load) and not isinstance(node.slice, (ast.Constant, ast.Slice, ast.Tuple))
        return is_read and is_a(self.body.value_of(node.value), (list, tuple, np.ndarray))

    def _exchange_called(self, node: ast.Call) -> None:
        asked = node.func
        called = self.body.called(asked)
        module = called if is_a(called, torch.nn.Module) else None
        called = called if module is None else _forward_of(module)
        function = called.__func__ if isinstance(called, MethodType) else called
        if not isinstance(function, FunctionType) or function.__code__ in self.within:
            return
        code = function.__code__
        owner = called.__self__ if isinstance(called, MethodType) else None
        body = parsed(function, owner) if _is_opened(code.co_filename) else None
        if body is None:
            return
        exchange = Exchange(body, [each.node for each in body.statements], self.within)
        if exchange.is_other:
            self.is_other = True
            made: Any = body.compiled(exchange.nodes, ())
            made = made if owner is None else MethodType(made, owner)
            node.func = ast.copy_location(self.body.give(made if module is None else _Through(module, made)), asked)
            self.lines |= exchange.lines
            self.codes += [code, *exchange.codes]
            self.asks += [lambda: self._is_still(asked, module, called), body.is_current, *exchange.asks]

    def _is_still(self, asked: ast.expr, module: Any, called: Any) -> bool:
        now = self.body.called(asked)
        return bool(now == called) if module is None else now is module and bool(_forward_of(module) == called)


class _Through:
    """Calls a module, which calls another function for its `forward`."""

    def __init__(self, module: torch.nn.Module, forward: MethodType) -> None:
        self.module, self.forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self.module)
        own["forward"] = self.forward
        try:
            return self.module(*args, **kwargs)
        finally:
            own.pop("forward", None)  # another thread may have called the module, too


def _forward_of(module: torch.nn.Module) -> Any:
    """The method that a call of a module runs besides hooks. None where it is no method of its class."""
    is_usual = in_class(type(module), "__call__") is torch.nn.Module.__call__ and "forward" not in vars(module)
    function = in_class(type(module), "forward")
    has_code = isinstance(function, FunctionType) and module._compiled_call_impl is None
    return MethodType(function, module) if is_usual and has_code else None


def _tensor_of(kind: Any, *data: Any) -> Any:
    """As ``torch.FloatTensor(data)``, which would ask the numbers of a list for their values."""
    value: Any = data[0] if len(data) == 1 else None
    if is_a(value, list) and any(is_a(each, Followed) for each in value):
        return torch.tensor(value, dtype=torch.get_default_dtype() if kind is torch.Tensor else kind.dtype)
    return kind(*data)


def as_float(*values: Any) -> Any:
    """As `float`, which gives a number of Python's own for one that is followed."""
    value: Any = values[0] if len(values) == 1 else None
    if is_a(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = value.item()
    is_followed = is_a(value, Followed) and hasattr(type(value), "as_float")
    return value.as_float() if is_followed else float(*values)


def _as_int(*values: Any, **options: Any) -> Any:
    """As `int`, likewise for whole numbers."""
    value: Any = values[0] if len(values) == 1 and not options else None
    if type(value) is torch.Tensor and value.numel() == 1 and value.dtype in _WHOLE:
        value = value.item()
    return value.as_int() if is_a(value, Followed) and hasattr(type(value), "as_int") else int(*values, **options)


def _to_read(value: Any, method: str) -> Any:
    """As ``value.numpy()``, of which Python's own numbers are read. A tensor gives the same ones."""
    is_plain = type(value) is torch.Tensor and not value.requires_grad and value.device.type == "cpu"
    is_plain = is_plain and value.dtype in _OF_NUMPY and (method == "tolist" or value.numel() == 1)
    return value if is_plain else value.numpy()


def _chosen(function: Callable[..., Any], *values: Any) -> Any:
    """As `max` and `min`, which compare numbers that are not known before the last op has run."""
    late = next((each for each in values if is_a(each, Followed) and hasattr(type(each), "chosen")), None)
    return function(*values) if late is None else late.chosen(function, values)


def _item(table: Any, key: Any) -> Any:
    """As ``table[key]``, which is looked up anew in each step where the key is followed."""
    is_plain = type(table) in (list, tuple, np.ndarray)
    return key.item_of(table) if is_plain and is_a(key, Followed) and hasattr(type(key), "item_of") else table[key]


# Where functions of the user are wrapped.
_WRAPPING = (torch.utils._contextlib.__file__, torch.optim.Optimizer.step.__code__.co_filename)


def _is_opened(file: str) -> bool:
    """True of files of the user's, and of what ``@torch.no_grad()`` or an optimizer makes of a function."""
    return origin(file) == "user" or file in _WRAPPING
