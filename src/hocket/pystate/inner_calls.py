"""Opens the call that runs the ops of a step, so that the Python around the ops of the called function is seen, too.

Trainers call a method of their base class, and scripts a function of everything that it needs::

    def step(batch):                                before:  front = trained.before(model, batch)
        loss = train(model, batch)          ->      middle:  held = trained.middle(model, batch)
        print(loss)                                 after:   loss = trained.after(model, batch, held); print(loss)

The called function is divided as a step is, and may itself call one that is. What it is called with is evaluated again
by each part where it is a local name, which the called function cannot bind anew, and once, before the ops, otherwise.
"""

from __future__ import annotations

import ast
import copy
import dis
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hocket.pystate.bodies import Body, Statement, is_pure
from hocket.pystate.cuts import BodyCut
from hocket.pystate.op_lines import Place
from hocket.pystate.step_parts import BEFORE, LIVE, RETURNED, StepParts, is_end

_ARGUMENT = "_hocket_argument_{}"
# Local names: what the first part made for the middle and for the last part, whether it has ended, and the middle's.
_DRAWN, _KEPT, _ENDED, _HELD = (f"_hocket_inner_{name}" for name in ("drawn", "kept", "ended", "held"))
# Names of the parts.
_FIRST, _MIDDLE, _LAST = (f"_hocket_inner_{name}" for name in ("first", "middle", "last"))


def call_of(body: Body, runs_op: Sequence[bool]) -> tuple[int, Callable[[], Any]] | None:
    """Return the position of the last statement that runs ops, where it does nothing but call, and what finds what.

    A result that is returned has to have a name (see `Body.name_result`).
    """
    place = max((n for n, each in enumerate(runs_op) if each), default=None)
    node = body.statements[place].node if place is not None else None
    value = node.value if isinstance(node, (ast.Expr, ast.Assign)) else None
    if place is None or not isinstance(value, ast.Call):
        return None
    given = [*value.args, *(each.value for each in value.keywords)]
    if not all(is_pure(each.value if isinstance(each, ast.Starred) else each, body) for each in given):
        return None
    called = value.func
    return place, lambda: body.called(called)


def opened(body: Body, place: int, runs_op: Sequence[bool], parts: StepParts, unseen: set[Place]) -> StepParts | None:
    """The parts of a body in which a call is divided: its statements are put into the form above."""
    node: Any = body.statements[place].node
    given = _evaluated_once(body, node.value)
    middle, first = parts.middle, parts.before
    made = [*given]
    if first is not None:
        body.given[_FIRST], middle = _first(first), _unless_ended(parts.middle)
        names = ast.Tuple([ast.Name(name, ast.Store()) for name in (_DRAWN, _KEPT, _ENDED)], ast.Store())
        made.append(ast.Assign([names], _calling(node.value, _FIRST)))
    body.given |= {_MIDDLE: middle, _LAST: _last(parts.after)}
    passed = () if first is None else (_DRAWN, _ENDED)
    asked = _without_unread(_calling(node.value, _MIDDLE, *passed), parts.middle)
    made.append(ast.Assign([ast.Name(_HELD, ast.Store())], asked))
    cut = place + len(made)
    node.value = _without_unread(_calling(node.value, _LAST, _HELD, *(() if first is None else (_KEPT,))), parts.after)
    body.names |= {_DRAWN, _KEPT, _ENDED, _HELD, *(each.targets[0].id for each in given)}  # type: ignore[attr-defined]
    nodes = [each.node for each in body.statements]
    nodes[place:place] = [ast.fix_missing_locations(ast.copy_location(each, node)) for each in made]
    body.statements = [Statement(each, body.names) for each in nodes]
    runs = [*runs_op[:place], *(False for _ in made[1:]), True, *(False for _ in runs_op[place:])]
    found = BodyCut(body, cut, runs, unseen, place > 0 or first is not None).parts()
    if found is None:
        return None
    return replace(
        found,
        lines=f"{found.lines}; {parts.lines}",
        codes=(*found.codes, *parts.codes),
        passed=parts.passed,
        leaves_draws=found.leaves_draws or parts.leaves_draws,
        is_exchanged=found.is_exchanged or parts.is_exchanged,
    )


def _evaluated_once(body: Body, call: ast.Call) -> list[ast.Assign]:
    """Give names to all arguments of a call but local names, which only the function itself can bind anew."""
    own = body.names - set(body.function.__code__.co_cellvars)
    found: list[ast.Assign] = []

    def named(node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Starred):
            return ast.Starred(named(node.value), ast.Load())
        if isinstance(node, ast.Tuple):
            return ast.Tuple([named(each) for each in node.elts], ast.Load())
        if isinstance(node, ast.Constant) or (isinstance(node, ast.Name) and node.id in own):
            return node
        name = _ARGUMENT.format(len(found))
        found.append(ast.Assign([ast.Name(name, ast.Store())], node))
        return ast.Name(name, ast.Load())

    call.args = [named(each) for each in call.args]
    call.keywords = [ast.keyword(each.arg, named(each.value)) for each in call.keywords]
    return found


def _calling(call: ast.Call, part: str, *names: str) -> ast.Call:
    """A call of a part with the arguments of the function, and with these local names by the names that they have."""
    further = [ast.keyword(name, ast.Name(name, ast.Load())) for name in names]
    return ast.Call(ast.Name(part, ast.Load()), copy.deepcopy(call.args), [*copy.deepcopy(call.keywords), *further])


def _without_unread(call: ast.Call, part: Any) -> ast.Call:
    """The call with None for what the part does not read: a table of results, say, which changes with every step."""
    num_bound = 0
    while isinstance(part, types.MethodType):
        part, num_bound = part.__func__, num_bound + 1
    if not isinstance(part, types.FunctionType):
        return call
    code = part.__code__
    read: set[Any] = set(code.co_cellvars)
    for instruction in dis.get_instructions(code):
        if "LOAD" in instruction.opname:
            name = instruction.argval
            read.update(name if isinstance(name, tuple) else (name,))
    unread = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]) - read
    for place, name in enumerate(code.co_varnames[num_bound : code.co_argcount]):
        if place >= len(call.args) or isinstance(call.args[place], ast.Starred):
            break
        call.args[place] = ast.Constant(None) if name in unread else call.args[place]
    for each in call.keywords:
        each.value = ast.Constant(None) if each.arg in unread else each.value
    return call


def _first(before: Callable[..., Any]) -> Callable[..., Any]:
    def first(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        drawn, kept = before(*args, **kwargs)
        return drawn, kept, is_end(kept)

    return first


def _unless_ended(middle: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        drawn, ended = kwargs.pop(_DRAWN), kwargs.pop(_ENDED)
        if ended:
            return drawn, RETURNED
        found: tuple[Any, ...] = middle(*args, **kwargs, **({BEFORE: drawn} if drawn else {}))
        return found

    return run


def _last(after: Callable[..., Any]) -> Callable[..., Any]:
    def last(*args: Any, **kwargs: Any) -> Any:
        held, kept = kwargs.pop(_HELD), kwargs.pop(_KEPT, ())
        if len(held) == 2 and is_end(held[1]):
            return held[0]
        return after(*args, **kwargs, **{BEFORE: kept, LIVE: held})

    return last
