"""Calls of a step that only show something, made calls of a `hocket.sink` where they stand between ops.

A planned step prints nothing between its ops, but a sink is called after them, with the numbers of that step. So a
statement becomes a function of what it shows, which is evaluated where it stands::

    print(f"D {loss.item():.4f}, {name}")    ->    show(loss.item(), name)

    show = hocket.sink(lambda value_0, value_1: print(f"D {value_0:.4f}, {value_1}"))

Text is made by the function. Made between the ops, it would hold numbers that are not known before the last op has run.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import string
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodType, NoneType
from typing import Any

import torch

from hocket.pystate.bodies import Body
from hocket.pystate.places import is_a
from hocket.sinks import Sink

_VALUE = "_hocket_value_{}"
_NUMBER = "_hocket_number"
_WHOLE = "_hocket_whole"
_POSITIVE = "_hocket_positive"
_SMALL = "_hocket_small"
_LEVELS = frozenset(("debug", "info", "warning", "error", "critical", "log"))
_MAX_EXPONENT = 700  # of `math.exp`, which raises above 709.78
_OF_THE_MOMENT = frozenset(("exc_info", "stack_info", "stacklevel"))
# A field of ``"%5d" % number``, with its kind. Some kinds raise unless they get a whole number, or one that can be one.
_FIELD = re.compile(r"%(?:\(.*?\))?[-#0 +]*(?:\*|\d+)?(?:\.(?:\*|\d+)?)?[hlL]?(.)", re.DOTALL)
_OF_KIND = {**dict.fromkeys("sra", ""), **dict.fromkeys("diouxXc", _WHOLE)}  # else a number
# Functions without side effects, which are called once their late numbers are known. The values name functions that
# check or convert a number before.
_PURE: dict[Any, str] = {
    **dict.fromkeys((str, repr, abs, min, max, json.dumps), ""),
    **dict.fromkeys((float, bool, format, math.isnan, math.isfinite, math.isinf), _NUMBER),
    **dict.fromkeys((int, round), _WHOLE),
    **dict.fromkeys((math.log, math.log2, math.log10), _POSITIVE),
    math.exp: _SMALL,
}
_OF_ROOT = tuple(getattr(logging, level) for level in _LEVELS)
_FUNCTIONS = (print, *_OF_ROOT)
_METHODS_OF_OBJECTS = (MethodType, BuiltinFunctionType)  # made anew whenever they are asked for
_ROWS = frozenset(("writerow", "writerows"))
# Methods that show or keep something, by the module and the name of the class. Where the step reads what they have
# kept, the watch sees that it has changed.
_METHODS = {
    ("collections", "deque"): frozenset(("append", "appendleft", "extend")),
    ("_io", "_IOBase"): frozenset(("write", "writelines", "flush")),
    ("_csv", "writer"): _ROWS,
    ("csv", "DictWriter"): _ROWS,
    ("logging", "Logger"): _LEVELS,
    ("tqdm.std", "tqdm"): frozenset(("update", "set_postfix", "set_postfix_str", "set_description", "write")),
    ("torch.utils.tensorboard.writer", "SummaryWriter"): frozenset(("add_scalar", "add_scalars", "add_text")),
    ("tensorboardX.writer", "SummaryWriter"): frozenset(("add_scalar", "add_scalars", "add_text")),
    ("wandb.sdk.wandb_run", "Run"): frozenset(("log",)),
}
# Packages whose code reads nothing of a step's but what it is given.
_PACKAGES = frozenset(("rich", "_pytest", *(module.partition(".")[0] for module, _ in _METHODS)))


def sink_for(body: Body, node: ast.Expr, asks: list[Callable[[], bool]]) -> ast.stmt | None:
    """A call of a sink, which the body is given, in place of a statement that only shows something, or None.

    `asks` gets what asks whether the statement still only shows something.
    """
    call = node.value
    if not isinstance(call, ast.Call) or not _shows(body, call):
        return None
    known = _looked_at(body, call)
    asks.append(lambda: _are_same(known, _looked_at(body, call)))
    values: list[ast.expr] = []
    shown = _Called(body, values).of(call)
    names = [_VALUE.format(place) for place in range(len(values))]
    function = body.function_of(names, ast.copy_location(ast.Expr(shown), node))
    body.given |= _GIVEN
    may_raise = body.value_of(call.func) is not print or any(each.arg == "file" for each in call.keywords)
    return ast.Expr(ast.Call(body.give(Sink(function, may_raise=may_raise)), values, []))


class _Called:
    """Finds what a call shows. `values` gets the expressions to evaluate where the call stands, in order."""

    def __init__(self, body: Body, values: list[ast.expr]) -> None:
        self.body, self.values = body, values

    def of(self, call: ast.Call) -> ast.Call:
        """The call, of the values by names."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        place = (name == "log") + 1 if name in _LEVELS else len(call.args)  # of the first value for a text before it
        args, values = [self.text(each) for each in call.args[:place]], call.args[place:]
        found = self._fields(args[-1].value, values) if values and _is_text(args[-1]) else None  # type: ignore[attr-defined]
        args += found if found is not None else [self.text(each) for each in values]
        given = [each if each.arg == "file" else ast.keyword(each.arg, self.text(each.value)) for each in call.keywords]
        return ast.Call(call.func, args, given)

    def text(self, node: ast.expr, of: str = "") -> ast.expr:
        """The expression with what it makes text of by names, or a name in its place (see `value`)."""
        if isinstance(node, ast.Constant):
            return node
        if isinstance(node, ast.Call) and any(isinstance(each, ast.GeneratorExp) for each in node.args):
            return self.value(node, of)  # it is used up once
        if isinstance(node, ast.JoinedStr):
            return ast.JoinedStr([self.text(each) for each in node.values])
        if isinstance(node, ast.FormattedValue):
            value = self.text(node.value, _NUMBER if node.conversion == -1 else "")
            return ast.FormattedValue(value, node.conversion, node.format_spec and self.text(node.format_spec))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and _has_text(node):
            return ast.BinOp(self.text(node.left), node.op, self.text(node.right))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
            return self._percent(node, node.left.value, node.right)  # type: ignore[attr-defined]
        if isinstance(node, ast.Call) and (pure := self._pure(node.func)) is not None:
            given = [ast.keyword(each.arg, self.text(each.value)) for each in node.keywords]
            argument = self.value if pure in (_WHOLE, _POSITIVE, _SMALL) else self.text
            return ast.Call(node.func, [argument(each, pure) for each in node.args], given)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._is_of_text(node.func):
            form = self.text(node.func.value)
            of = _NUMBER if node.func.attr == "format" and _is_simple(form) else ""
            given = [ast.keyword(each.arg, self.value(each.value, of)) for each in node.keywords]
            values = [self.value(each, of) for each in node.args]
            return ast.Call(ast.Attribute(form, node.func.attr, ast.Load()), values, given)
        if isinstance(node, (ast.List, ast.Tuple)):
            return type(node)([self.text(each) for each in node.elts], ast.Load())
        if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
            return ast.Dict(node.keys, [self.text(each) for each in node.values])
        return self.value(node, of)

    def _pure(self, node: ast.expr) -> str | None:
        called = self.body.value_of(node)
        return next((of for each, of in _PURE.items() if each is called), None)

    def _is_of_text(self, node: ast.Attribute) -> bool:
        """True of ``text.format`` and ``text.join``, and not of ``os.path.join``."""
        return node.attr in ("format", "join") and is_a(self.body.value_of(node.value), (str, NoneType))

    def _percent(self, node: ast.BinOp, text: str, right: ast.expr) -> ast.expr:
        values = right.elts if isinstance(right, ast.Tuple) else [right]
        found = self._fields(text, values)
        if found is None:
            return self.value(node)
        return ast.BinOp(node.left, node.op, ast.Tuple(found, ast.Load()) if isinstance(right, ast.Tuple) else found[0])

    def _fields(self, text: str, values: Sequence[ast.expr]) -> list[ast.expr] | None:
        """The values of a text's fields, or None where it is not known which field a value is for."""
        kinds = [kind for kind in _FIELD.findall(text) if kind != "%"]
        if len(kinds) != len(values) or "%(" in text or any(isinstance(each, ast.Starred) for each in values):
            return None
        return [self.value(value, _OF_KIND.get(kind, _NUMBER)) for value, kind in zip(values, kinds, strict=True)]

    def value(self, node: ast.expr, of: str = "") -> ast.expr:
        """A name in place of an expression, or of what a function makes `of` it."""
        if isinstance(node, ast.Starred):
            return ast.Starred(self.value(node.value), ast.Load())
        name = ast.Name(_VALUE.format(len(self.values)), ast.Load())
        self.values.append(ast.Call(ast.Name(of, ast.Load()), [node], []) if of else node)
        return name


def _shows(body: Body, call: ast.Call) -> bool:
    """True of calls whose effect is not read by any step, as far as it is known."""
    function, file, logger, *parts = _looked_at(body, call)
    if any(each.arg == "file" for each in call.keywords) and not _has(file, "write"):
        return False
    if logger is not None:
        # No filter, handler or formatter of the user's may look at what the step has done so far.
        of_the_moment = any(each.arg is None or each.arg in _OF_THE_MOMENT for each in call.keywords)
        if of_the_moment or not all(each is None or _is_known(type(each)) for each in parts):
            return False
    if any(function is each for each in _FUNCTIONS):
        return True
    return isinstance(call.func, ast.Attribute) and _has(body.value_of(call.func.value), call.func.attr)


def _looked_at(body: Body, call: ast.Call) -> list[Any]:
    """The function that is called, its file, its logger, and all that the logger hands a record to."""
    function = body.value_of(call.func)
    files = [body.value_of(each.value) for each in call.keywords if each.arg == "file"]
    owner = getattr(function, "__self__", None)
    here = (
        owner if is_a(owner, logging.Logger) else logging.root if any(function is each for each in _OF_ROOT) else None
    )
    found = [function, files[0] if files else None, here]
    while here is not None:
        found += [here, *here.filters]
        for handler in here.handlers:
            found += [handler, handler.formatter, *handler.filters]
        here = here.parent if here.propagate else None
    return found


def _are_same(before: Sequence[Any], now: Sequence[Any]) -> bool:
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and type(one) in _METHODS_OF_OBJECTS and one == other)
        for one, other in zip(before, now, strict=True)
    )


def _has(owner: Any, name: str) -> bool:
    """True if the object has such a method that shows something, and it is no code of the user's."""
    kinds = type.mro(type(owner))
    found = any(name in _METHODS.get((kind.__module__, kind.__name__), ()) for kind in kinds)
    return found and _is_known(next((kind for kind in kinds if name in vars(kind)), type(owner)))


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in _PACKAGES


def _number(value: Any) -> Any:
    """The number that a tensor of one element is shown as in text."""
    return value.item() if is_a(value, torch.Tensor) and type(value) is torch.Tensor and value.dim() == 0 else value


def _checked(asks: Callable[[Any], object]) -> Callable[[Any], Any]:
    """The same, of a number that is asked where it is shown, since what shows it raises for others."""

    def checked(value: Any) -> Any:
        number = _number(value)
        asks(number)
        return number

    return checked


_GIVEN: dict[str, Callable[[Any], Any]] = {
    _NUMBER: _number,
    _WHOLE: _checked(lambda number: isinstance(number, float) and math.isfinite(number)),
    _POSITIVE: _checked(lambda number: number > 0),
    _SMALL: _checked(lambda number: number < _MAX_EXPONENT),
}


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _has_text(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _has_text(node.left) or _has_text(node.right)
    return isinstance(node, ast.JoinedStr) or _is_text(node)


def _is_simple(form: ast.expr) -> bool:
    """True of a text by which all that is formatted are values themselves, in their own format."""
    if not isinstance(form, ast.Constant) or not isinstance(form.value, str):
        return False
    try:
        fields = [(name or "", conversion) for _, name, _, conversion in string.Formatter().parse(form.value)]
    except ValueError:
        return False
    return not any(conversion or "." in name or "[" in name for name, conversion in fields)
