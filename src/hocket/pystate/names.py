"""The names that statements and expressions read, bind, and have surely bound once they have run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def own_nodes(node: ast.AST) -> Iterable[ast.AST]:
    """Yield all nodes but those of functions within, and of names that a comprehension binds for itself."""
    yield node
    if not isinstance(node, SCOPES):
        inner = [node.iter, *node.ifs] if isinstance(node, ast.comprehension) else ast.iter_child_nodes(node)
        for each in inner:
            yield from own_nodes(each)


def read_names(node: ast.AST) -> set[str]:
    """Return the names that are read or deleted, without those that a comprehension binds for itself."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Store) else {node.id}
    found: set[str] = set()
    for each in ast.iter_child_nodes(node):
        found |= read_names(each)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    if isinstance(node, _COMPREHENSIONS):
        targets = [n.id for each in node.generators for n in ast.walk(each.target) if isinstance(n, ast.Name)]
        found = (found - set(targets)) | read_names(node.generators[0].iter)
    return found


def used_names(node: ast.AST) -> set[str]:
    """Return the names that are read, bound or deleted."""
    return bound_names(node) | {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def bound_names(node: ast.AST) -> set[str]:
    """Return the names that may be bound or deleted."""
    found: set[str] = set()
    for each in own_nodes(node):
        if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            found.add(each.id)
        elif isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, ast.alias):
            found.add(each.asname or each.name.partition(".")[0])
        elif isinstance(each, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and each.name:
            found.add(each.name)
        elif isinstance(each, ast.MatchMapping) and each.rest:
            found.add(each.rest)
    return found


def surely_bound(node: ast.stmt) -> set[str]:
    """Return the names that are bound once a statement has run."""
    if isinstance(node, ast.If):
        return _all_bound(node.body) & _all_bound(node.orelse)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return set()
    if isinstance(node, ast.With):  # it may end an error of its body
        optional = [item.optional_vars for item in node.items if item.optional_vars is not None]
        return {name for each in optional for name in bound_names(each)}
    if isinstance(node, ast.Try):
        found = _all_bound(node.body) | _all_bound(node.orelse)
        for handler in node.handlers:
            leaves = isinstance(handler.body[-1], (ast.Raise, ast.Return))
            found &= found if leaves else _all_bound(handler.body)
        return found | _all_bound(node.finalbody)
    if isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.TryStar, ast.Match)):
        return set()
    conditional = (ast.BoolOp, ast.IfExp, ast.Compare, *_COMPREHENSIONS)
    branches = [each for each in own_nodes(node) if isinstance(each, conditional)]
    return bound_names(node) - {name for each in branches for name in bound_names(each)}


def _all_bound(statements: Sequence[ast.stmt]) -> set[str]:
    return set().union(*map(surely_bound, statements))
