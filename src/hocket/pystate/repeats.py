"""Asks whether a statement of the first part may change what an earlier one, which the middle repeats, has read.

``n = state["n"]`` is evaluated by the first part and again by the middle, so that a graph is not given what it can
have without. That is sound unless the first part goes on with ``state["n"] += 1``.
"""

from __future__ import annotations

import ast
from collections import deque
from functools import partial

import numpy as np
import torch

from hocket.pystate.bodies import Body, Statement
from hocket.pystate.layout import in_class
from hocket.pystate.places import is_a, is_plain

_DATA = (torch.Tensor, np.ndarray, list, tuple, dict, set, frozenset, deque)
_PLACES = (ast.Attribute, ast.Subscript, ast.Name)
_HARMLESS = (print, len, range, min, max, abs, round, float, int, bool, str)


def may_change(body: Body, statement: Statement, read: ast.stmt) -> bool:
    """Return whether a statement may change what a plain one, which came before it, gives."""
    if not isinstance(read, ast.Assign):
        return False  # an import
    values = read.value.elts if isinstance(read.value, ast.Tuple) else [read.value]
    unpacks = isinstance(read.targets[0], ast.Tuple) and len(values) == 1
    within = list(ast.walk(statement.node))
    if not all(_is_harmless(body, each) for each in within if isinstance(each, ast.Call)):
        return unpacks or not all(map(partial(_stays, body), values))
    looks_into = unpacks or any(
        isinstance(n, ast.Subscript) or (isinstance(n, ast.Call) and isinstance(n.func, ast.Name))
        for n in ast.walk(read.value)
    )
    if looks_into and any(isinstance(n, ast.AugAssign) and _may_grow(body, n.target) for n in within):
        return True
    written = [n for n in within if isinstance(n, _PLACES) and not isinstance(n.ctx, ast.Load)]
    if unpacks and any(isinstance(each, ast.Subscript) for each in written):
        return True
    return any(_meet(body, one, other) for one in written for other in ast.walk(read.value))


def _may_grow(body: Body, target: ast.expr) -> bool:
    """True if ``target += more`` may write into an object that has other names."""
    return not isinstance(target, ast.Subscript) and not is_a(body.value_of(target), (int, float, str, tuple))


def _stays(body: Body, node: ast.expr) -> bool:
    """True of constants, local names, and objects such as models, which unseen code exchanges for no others."""
    if isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in body.names):
        return True
    value = body.value_of(node)
    return not (value is None or is_plain(value) or is_a(value, _DATA))


def _is_harmless(body: Body, call: ast.Call) -> bool:
    function = body.value_of(call.func)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad":
        return is_a(body.value_of(call.func.value), torch.optim.Optimizer)
    return any(function is each for each in _HARMLESS) or body.draw_of(call) == "draw"


def _meet(body: Body, written: ast.AST, read: ast.AST) -> bool:
    """True if a place may be the one that is read, or if more than the place is written."""
    if isinstance(written, ast.Name):
        return written.id not in body.names and isinstance(read, ast.Name) and read.id == written.id
    if isinstance(written, ast.Subscript):
        if not isinstance(read, ast.Subscript):
            return isinstance(read, ast.Call)  # a length
        keys = [each.slice.value for each in (written, read) if isinstance(each.slice, ast.Constant)]
        return not (len(keys) == 2 and all(isinstance(key, str) for key in keys) and keys[0] != keys[1])
    assert isinstance(written, ast.Attribute)
    owner = type(body.value_of(written.value))
    is_property = isinstance(in_class(owner, written.attr), property)
    return is_property or (isinstance(read, ast.Attribute) and read.attr == written.attr)
