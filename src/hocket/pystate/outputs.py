"""Calls of a step that only show something, made calls of a `hocket.sink` where they stand between ops.

A planned step prints nothing between its ops, but a sink is called after them, with the numbers of that step. So a
statement becomes a function of what it shows, which is evaluated where it stands::

    print(f"D {loss.item():.4f}, {name}")    ->    show(loss.item(), name)

    show = hocket.sink(lambda value_0, value_1: print(f"D {value_0:.4f}, {value_1}"))

Text is made by the function. Made between the ops, it would hold numbers that are not known before the last op has run.
"""

from __future__ import annotations

import ast
import logging
import math
import re
import string
from typing import Any

import torch

from hocket.pystate.bodies import Body
from hocket.pystate.places import is_a
from hocket.sinks import Sink

_VALUE = "_hocket_value_{}"
_NUMBER = "_hocket_number"
_WHOLE = "_hocket_whole"
_LEVELS = frozenset(("debug", "info", "warning", "error", "critical", "log"))
_OF_THE_MOMENT = frozenset(("exc_info", "stack_info", "stacklevel"))
# A field of ``"%5d" % number``, with its kind. Some kinds raise unless they get a whole number, or one that can be one.
_FIELD = re.compile(r"%(?:\(.*?\))?[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+)?)?[hlL]?(.)", re.DOTALL)
_WHOLE_KINDS = frozenset("diouxXc")
_FUNCTIONS = (print, *(getattr(logging, level) for level in _LEVELS))
_ROWS = frozenset(("writerow", "writerows"))
# Methods that show or keep something, by the module and the name of the class. Where the step reads what they have
# kept, the watch sees that it has changed.
_METHODS = {
    ("collections", "deque"): frozenset(("append", "appendleft", "extend")),
    ("_io", "_IOBase"): frozenset(("write", "writelines", "flush")),
    ("_csv", "writer"): _ROWS,
    ("csv", "DictWriter"): _ROWS,
    ("logging", "Logger"): _LEVELS,
    ("logging", "LoggerAdapter"): _LEVELS,
    ("tqdm.std", "tqdm"): frozenset(("update", "set_postfix", "set_postfix_str", "set_description", "write")),
    ("torch.utils.tensorboard.writer", "SummaryWriter"): frozenset(("add_scalar", "add_scalars", "add_text")),
    ("tensorboardX.writer", "SummaryWriter"): frozenset(("add_scalar", "add_scalars", "add_text")),
    ("wandb.sdk.wandb_run", "Run"): frozenset(("log",)),
}


def sink_for(body: Body, node: ast.Expr) -> ast.stmt | None:
    """A call of a sink in place of a statement that only shows something, or None. `body.given` gets the sink."""
    if not isinstance(node.value, ast.Call) or not shows(body, node.value):
        return None
    values: list[ast.expr] = []
    call = _Called(body, values).of(node.value)
    names = [_VALUE.format(place) for place in range(len(values))]
    function = body.function_of(names, ast.copy_location(ast.Expr(call), node))
    body.given |= {_NUMBER: _number, _WHOLE: _whole}
    may_raise = body.value_of(call.func) is not print or any(each.arg == "file" for each in call.keywords)
    return ast.Expr(ast.Call(body.give(Sink(function, may_raise=may_raise)), values, []))


class _Called:
    """Finds what a call shows.

    Args:
        body: of the function with the call.
        values: gets the expressions to evaluate where the call stands, in order.
    """

    def __init__(self, body: Body, values: list[ast.expr]) -> None:
        self.body, self.values = body, values

    def of(self, call: ast.Call) -> ast.Call:
        """The call, of the values by names."""
        given = [each if each.arg == "file" else ast.keyword(each.arg, self.text(each.value)) for each in call.keywords]
        return ast.Call(call.func, [self.text(each) for each in call.args], given)

    def text(self, node: ast.expr) -> ast.expr:
        """The expression with what it makes text of by names, or a name in its place."""
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.JoinedStr):
            return ast.JoinedStr([self.text(each) for each in node.values])
        if isinstance(node, ast.FormattedValue):
            value = self.text(node.value) if node.conversion != -1 else self.value(node.value, _NUMBER)
            return ast.FormattedValue(value, node.conversion, node.format_spec and self.text(node.format_spec))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _has_text(node):
            return ast.BinOp(self.text(node.left), node.op, self.text(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
            return self._percent(node, node.left.value, node.right)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and self.body.value_of(node.func) is round and len(node.args) == 1:
            return ast.Call(node.func, [self.value(node.args[0], of=_WHOLE)], node.keywords)
        if isinstance(node, ast.Call) and self.body.value_of(node.func) in (str, round) and not node.keywords:
            return ast.Call(node.func, [self.text(each) for each in node.args], [])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_text(node.func.value):
            of = _NUMBER if node.func.attr == "format" and _is_simple(node.func.value.value) else ""  # type: ignore[attr-defined]
            given = [ast.keyword(each.arg, self.value(each.value, of)) for each in node.keywords]
            return ast.Call(node.func, [self.value(each, of) for each in node.args], given)
        if isinstance(node, (ast.List, ast.Tuple)):
            return type(node)([self.text(each) for each in node.elts], ast.Load())
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return ast.Dict(node.keys, [self.text(each) for each in node.values])
        return self.value(node)

    def _percent(self, node: ast.BinOp, text: str, right: ast.expr) -> ast.expr:
        kinds = [kind for kind in _FIELD.findall(text) if kind != "%"]
        values = right.elts if isinstance(right, ast.Tuple) else [right]
        of = "" if {*kinds} & {*"sra"} else _NUMBER
        each_of = [of for _ in values]
        if {*kinds} & _WHOLE_KINDS:
            if len(kinds) != len(values):
                return self.value(node)
            each_of = [_WHOLE if kind in _WHOLE_KINDS else of for kind in kinds]
        found = list(map(self.value, values, each_of))
        return ast.BinOp(node.left, node.op, ast.Tuple(found, ast.Load()) if isinstance(right, ast.Tuple) else found[0])

    def value(self, node: ast.expr, of: str = "") -> ast.expr:
        """A name in place of an expression, or of what a function makes `of` it."""
        if isinstance(node, ast.Starred):
            return ast.Starred(self.value(node.value), ast.Load())
        name = ast.Name(_VALUE.format(len(self.values)), ast.Load())
        self.values.append(ast.Call(ast.Name(of, ast.Load()), [node], []) if of else node)
        return name


def shows(body: Body, call: ast.Call) -> bool:
    """True of calls whose effect is not read by any step, as far as it is known."""
    function = body.value_of(call.func)
    file = next((each.value for each in call.keywords if each.arg == "file"), None)
    if file is not None and body.value_of(file) is None:
        return False
    logs = getattr(function, "__name__", "") in _LEVELS
    if logs and any(each.arg is None or each.arg in _OF_THE_MOMENT for each in call.keywords):
        return False
    if any(function is each for each in _FUNCTIONS):
        return True
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = body.value_of(call.func.value)
    kinds = [(kind.__module__, kind.__name__) for kind in type.mro(type(owner))]
    return any(call.func.attr in _METHODS.get(kind, ()) for kind in kinds)


def _number(value: Any) -> Any:
    """The number that a tensor of one element is shown as in text."""
    return value.item() if is_a(value, torch.Tensor) and type(value) is torch.Tensor and value.dim() == 0 else value


def _whole(value: Any) -> Any:
    """The value, which a step checks where a whole number is made of it: a later one may raise there."""
    if isinstance(value, float):
        math.isfinite(value)
    return value


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _has_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _has_text(node.left) or _has_text(node.right)
    return isinstance(node, ast.JoinedStr) or _is_text(node)


def _is_simple(text: str) -> bool:
    """True if all that is formatted are values themselves, in their own format."""
    try:
        fields = [(name or "", conversion) for _, name, _, conversion in string.Formatter().parse(text)]
    except ValueError:
        return False
    return not any(conversion or "." in name or "[" in name for name, conversion in fields)
