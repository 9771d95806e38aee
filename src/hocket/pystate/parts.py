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
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from hocket.pystate.bodies import Body, parsed
from hocket.pystate.cuts import BodyCut
from hocket.pystate.layout import attribute_of
from hocket.pystate.op_lines import OpLines, places
from hocket.pystate.origins import origin
from hocket.pystate.places import is_a
from hocket.pystate.sinking import Sunk, sink
from hocket.pystate.step_parts import LIVE, StepParts

_TRAINED = (torch.nn.Module, torch.optim.Optimizer)


def split(step: Any, lines: OpLines, trained: Collection[int] = ()) -> list[StepParts]:
    """The parts of a step, in each way that is worth a try.

    All ops are in the middle, or all but those after the training, or but statements that may come after it. What comes
    before are draws, or all up to an op, or all that makes the batch.
    Empty where a step has no Python but in between its ops, or where its source is not at hand.

    Args:
        step: a function, a method, a partial, or an object with a `__call__` of the user's.
        lines: where ops ran.
        trained: addresses of the memory of models, gradients and optimizers.
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
    method = inspect.getattr_static(type(step), "__call__", None)
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
    return StepParts(None, middle, after, "", None, step)


def _split(function: types.FunctionType, owner: Any, lines: OpLines, trained: Collection[int]) -> list[StepParts]:
    code = function.__code__
    if origin(code.co_filename) not in ("user", "library"):
        return []
    body = parsed(function, owner)
    if body is None or (len(body.statements) == 1 and isinstance(body.statements[0].node, ast.Return)):
        return _split_delegate(function, owner, lines, trained)
    found: dict[tuple[Any, ...], StepParts] = {}  # by their code
    for sinks, instructions in itertools.product((False, True), (lines.ops, lines.trains)):
        one = parsed(function, owner)
        assert one is not None
        one.divide_branch(places(instructions, code))
        moved = sink(one, _spanned(one, instructions), lines, trained) if sinks else Sunk()
        for parts in _split_body(one, lines, moved) if moved else ():
            codes = tuple(getattr(each, "__code__", None) for each in (parts.before, parts.middle, parts.after))
            found.setdefault(codes, parts)
    return list(found.values())


def _split_body(body: Body, lines: OpLines, moved: Sunk) -> Iterator[StepParts]:
    """The parts of a body whose last branch is divided already.

    Args:
        body: of the function.
        lines: where ops ran.
        moved: statements that come after the middle. Without any, it ends after the last op, or after the training.
    """
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

    ``optimizer.zero_grad()`` and ``model.train()`` begin one: they read no weight and leave none changed.
    """
    own = [
        not _begins(s.node)
        and any(is_a(body.value_of(n), _TRAINED) for n in ast.walk(s.node) if isinstance(n, (ast.Name, ast.Attribute)))
        for s in body.statements
    ]
    return next((place for place, each in enumerate(zip(own, trains, strict=True)) if any(each)), 0)


def _begins(node: ast.stmt) -> bool:
    called = node.value.func if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("zero_grad", "train")


def _end(body: Body, runs: Sequence[bool]) -> int:
    """Return the position after the last statement of the middle, which excludes the return statement."""
    end = max(place for place, each in enumerate(runs) if each) + 1
    return end - isinstance(body.statements[end - 1].node, ast.Return)


def _split_delegate(
    function: types.FunctionType, owner: Any, lines: OpLines, trained: Collection[int]
) -> list[StepParts]:
    """The parts of the function that a step does nothing but call, with the same arguments."""
    code = function.__code__
    ask = _delegate(function, owner)
    if ask is None or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount:
        return []
    called = ask()
    found = [replace(parts, is_called=_asking(ask, called, parts.is_called)) for parts in split(called, lines, trained)]
    return found if owner is None else [parts.bound(lambda p: functools.partial(_without_first, p)) for parts in found]


def _asking(ask: Callable[[], Any], called: Any, inner: Callable[[], bool] | None) -> Callable[[], bool]:
    return lambda: bool(ask() == called) and (inner is None or inner())


def _without_first(part: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any) -> Any:
    return part(*args, **kwargs)


def _delegate(function: types.FunctionType, owner: Any) -> Callable[[], Any] | None:
    """Return what finds ``trainer.step`` for ``lambda batch: trainer.step(batch)``, and None for any other function."""
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount]
    body = [
        i for i in dis.get_instructions(code) if i.opname not in ("RESUME", "COPY_FREE_VARS", "PUSH_NULL", "PRECALL")
    ]
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    root: Callable[[], Any] = lambda: None  # noqa: E731
    names: list[str] = []
    for place, instruction in enumerate(body):
        if instruction.opname == "LOAD_DEREF":
            root, names = functools.partial(_content, cells[instruction.argval]), []
        elif instruction.opname == "LOAD_GLOBAL":
            root, names = functools.partial(function.__globals__.get, instruction.argval), []
        elif instruction.opname == "LOAD_FAST" and place == 0 and owner is not None:
            if instruction.argval != parameters[0]:
                return None
            root = functools.partial(_itself, owner)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            names.append(instruction.argval)
        else:
            break
    else:
        return None
    given = parameters[1:] if owner is not None else parameters
    rest = [(i.opname, i.argval) for i in body[place:]]
    expected = [("LOAD_FAST", name) for name in given] + [("CALL", len(given)), ("RETURN_VALUE", None)]
    if rest != expected or code.co_cellvars:
        return None

    def ask() -> Any:
        return functools.reduce(_attribute, names, root())

    return None if ask() is None else ask


def _itself(value: Any) -> Any:
    return value


def _attribute(value: Any, name: str) -> Any:
    return None if value is None else attribute_of(value, name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
