"""Splits a step into the Python before its ops, the part that runs ops, and the Python after them.

A planned step runs ops and none of its Python, and much of what a step does besides is of no concern to an op: it
prints, logs, steps a scheduler, keeps the best loss, fetches the next batch, draws a number. Such code stands at the
end of nearly every step, or its result is known before the first op. It needs no graph, only its turn::

    def step(batch):
        lam = random.betavariate(0.4, 0.4)      before:  lam = random.betavariate(0.4, 0.4)
        loss = lam * loss_of(model, batch)      middle:  a graph, of (batch, lam), which returns loss
        update(optimizer, loss)
        scheduler.step()                        after:   the user's own statements, with loss
        print(f"{loss.item():.3f}")

The three parts are functions with the globals, the closure and the lines of the user's own. Called one after the other
they are the step: whatever is put into which part, so nothing here has to be known about what a statement does. The
split is by statements of the function's own body. After comes whatever follows the last statement that ran an op.
Before come draws and fetches: calls of generators of numbers, and `next`. Such a call is moved to the front only if it
is made in any case, what it is given is there by then, and nothing is passed over that could draw itself. All other
draws stay in the middle, which is given their numbers (`hocket.pystate.drawn`).
"""

from __future__ import annotations

import ast
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.pystate.bodies import Body, is_plain, parsed
from hocket.pystate.cuts import BodyCut
from hocket.pystate.inner_calls import call_of, opened
from hocket.pystate.layout import in_class
from hocket.pystate.op_lines import OpLines, places
from hocket.pystate.origins import origin
from hocket.pystate.places import is_a
from hocket.pystate.sinking import Sunk, sink
from hocket.pystate.step_parts import LIVE, StepParts

_BEGINNING = frozenset(("zero_grad", "train", "eval", "load_state_dict"))
_TRAINED = (torch.nn.Module, torch.optim.Optimizer)


def split(step: Any, lines: OpLines, trained: Collection[int] = ()) -> list[StepParts]:
    """The parts of a step, in each way that is worth a try.

    All ops are in the middle, or all but those after the training, or but statements that may come after it. What comes
    before are draws, or all up to an op, or all that makes the batch.

    Empty where a step has no Python but in between its ops, or where its source is not at hand. `trained` are addresses
    of the memory of models, gradients and optimizers.
    """
    if isinstance(step, functools.partial):
        return [
            parts.bound(lambda part: functools.partial(part, *step.args, **step.keywords))
            for parts in split(step.func, lines, trained)
        ]
    if isinstance(step, types.MethodType):
        if not isinstance(step.__func__, types.FunctionType):
            return []
        found = _split(step.__func__, step.__self__, lines, trained)
        return [parts.bound(lambda part: types.MethodType(part, step.__self__)) for parts in found]
    if isinstance(step, types.FunctionType):
        return _split(step, None, lines, trained)
    method = in_class(type(step), "__call__")
    if not isinstance(method, types.FunctionType):
        return []
    return split(types.MethodType(method, step), lines, trained)


def undivided(step: Any) -> StepParts:
    """A step of which all is middle."""

    def middle(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (step(*args, **kwargs),)

    def after(*args: Any, **kwargs: Any) -> Any:
        return kwargs[LIVE][0]

    middle.__wrapped__ = step  # type: ignore[attr-defined]
    return StepParts(None, middle, after, "")


def _split(function: types.FunctionType, owner: Any, lines: OpLines, trained: Collection[int]) -> list[StepParts]:
    code = function.__code__
    if origin(code.co_filename) not in ("user", "library"):
        return []
    if parsed(function, owner) is None:
        return []
    found: dict[tuple[Any, ...], StepParts] = {}  # by their code
    for sinks, instructions in itertools.product((False, True), (lines.ops, lines.trains)):
        one = parsed(function, owner)
        assert one is not None
        one.divide_branch(places(instructions, code))
        moved = sink(one, _spanned(one, instructions), lines, trained) if sinks else Sunk()
        for parts in _split_body(one, lines, moved) if moved else ():
            codes = tuple(getattr(each, "__code__", None) for each in (parts.before, parts.middle, parts.after))
            found.setdefault(codes, parts)
    all_parts = [*found.values(), *_split_call(function, owner, lines, trained)]
    return sorted(all_parts, key=lambda parts: parts.is_exchanged)  # in a part of its own it may do anything


def _split_call(
    function: types.FunctionType, owner: Any, lines: OpLines, trained: Collection[int]
) -> Iterator[StepParts]:
    """The parts of a function that has all its ops in one call, in each way to divide what it calls."""
    body, runs_op = _with_named_result(function, owner, lines)
    call = call_of(body, runs_op)
    called = None if call is None else call[1]()
    if call is None or called is None or called is function:
        return
    for inner in split(called, lines, trained):
        body, runs_op = _with_named_result(function, owner, lines)
        place, ask = call_of(body, runs_op) or call
        unseen = places(lines.unseen, function.__code__)
        if parts := opened(body, place, runs_op, inner, unseen):
            yield replace(parts, asks=(*parts.asks, *inner.asks, _asking(ask, called)))


def _with_named_result(function: types.FunctionType, owner: Any, lines: OpLines) -> tuple[Body, list[bool]]:
    """A function's body and which of its statements run ops. ``return train(batch)`` is two of them."""
    body = parsed(function, owner)
    assert body is not None
    runs_op = _spanned(body, lines.ops)
    if isinstance(body.statements[-1].node, ast.Return) and runs_op[-1]:
        body.name_result()
        runs_op.append(False)
    return body, runs_op


def _asking(ask: Callable[[], Any], called: Any) -> Callable[[], bool]:
    return lambda: bool(ask() == called)


def _split_body(body: Body, lines: OpLines, moved: Sunk) -> Iterator[StepParts]:
    """The parts of a body whose last branch is divided already."""
    runs_op, trains = (_spanned(body, instructions) for instructions in (lines.ops, lines.trains))
    if trains[-1] and isinstance(body.statements[-1].node, ast.Return):  # ``return update(optimizer, loss)``
        body.name_result()
        runs_op, trains = [*runs_op, False], [*trains, False]
    ends = [moved.cut] if moved.cut else [_end(body, runs) for runs in (runs_op, trains) if any(runs)]
    cuts = [cut for cut in dict.fromkeys(ends) if cut]
    ways = [(cut, runs_op, takes_all) for takes_all in (False, True) for cut in cuts]
    num_fetching = _num_fetching(body, trains)
    if any(runs_op[:num_fetching]):
        ways += [(cut, [False] * num_fetching + runs_op[num_fetching:], True) for cut in cuts if cut > num_fetching]
    unseen = places(lines.unseen, body.function.__code__)
    for cut, runs, takes_all in ways:
        parts = BodyCut(body, cut, runs, unseen, takes_all).parts()
        if parts is not None:
            yield replace(parts, passed=moved.passed)


def _spanned(body: Body, instructions: Collection[tuple[types.CodeType, int]]) -> list[bool]:
    """For each statement, whether it spans one of these instructions, or updates weights."""
    found = places(instructions, body.function.__code__)
    return [s.spans(found) or body.updates(s) for s in body.statements]


def _num_fetching(body: Body, trains: Sequence[bool]) -> int:
    """Return how many of the first statements make the batch: they know of no model and no optimizer, or begin a step.

    ``optimizer.zero_grad()`` and ``model.train()`` begin one: they read no weight and leave none changed. So does
    ``if n % 100 == 0: target.load_state_dict(model.state_dict())``, whose copies are no part of a graph. Behind
    ``model = self.model``, `model` is a model, too.
    """
    known: set[str] = set()
    for place, (statement, is_training) in enumerate(zip(body.statements, trains, strict=True)):
        names = [n for n in ast.walk(statement.node) if isinstance(n, (ast.Name, ast.Attribute))]
        is_own = any(is_a(body.value_of(n), _TRAINED) or (isinstance(n, ast.Name) and n.id in known) for n in names)
        if is_training or (is_own and not (_begins(statement.node) or is_plain(statement.node, body))):
            return place
        known |= statement.stores if is_own else frozenset()
    return 0


def _sets_what_is_trained(node: ast.stmt) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr in ("requires_grad", "requires_grad_") for n in ast.walk(node))


def _begins(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return all(map(_begins, (*node.body, *node.orelse)))
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in _BEGINNING


def _end(body: Body, runs: Sequence[bool]) -> int:
    """Return the position after the last statement of the middle, which excludes the return statement.

    What takes back ``parameter.requires_grad = False`` belongs to it.
    """
    end = max(place for place, each in enumerate(runs) if each) + 1
    while end < len(body.statements) and _sets_what_is_trained(body.statements[end].node):
        end += 1
    return end - isinstance(body.statements[end - 1].node, ast.Return)
