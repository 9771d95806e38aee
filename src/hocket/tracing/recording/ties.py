"""Which numbers among an op's arguments are live ones: found by their value, in the call that was given them.

A live number reaches an op as a plain number, so it is looked for by its value. That is safe in one call, whose live
numbers are known, and where two are equal the first place belongs to the first of them.

Autograd keeps the numbers of a differentiable call for its backward ops::

    loss * rate              mul(loss, <tape 7>)
    loss.backward()          mul(grad, <tape 7>)        the same number, kept in C++
    x ** power               pow(x, <tape 8>)
    (x ** power).backward()  pow(x, 1.7), mul(2.7)      one that C++ computed from it

A number there that is none of the call's live ones may have been computed from them. Then these are settled: the step
is good for their values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import fx

from hocket.tracing.recording.data_reads import NUMBERS_THAT_SHAPE
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import Tape, TapeRef


def tie(
    node: fx.Node, scalars: dict[tuple[Any, ...], TapeRef], live: Sequence[Live], tape: Tape
) -> tuple[set[int], bool]:
    """Note in `scalars` which numbers of the op are filled from the tape. Sizes and indices are settled instead.

    Returns the entries of the tape that were found in the op, and True if it has further numbers.
    """
    found: set[int] = set()
    others = False
    waiting = list(live)
    given = [(path, value, True) for path, value in _numbers((node.args, node.kwargs), ())]
    left_out = [(path, value, False) for path, value in _defaults(node)]
    for path, value, is_given in given + left_out:
        match = next((number for number in waiting if number.plain == value), None)
        if match is None:
            others = others or (is_given and _is_scalar(node, path))
            continue
        # The next equal number in this op belongs to the next equal live one, as in a list of rates.
        waiting.remove(match)
        if match.entry in tape.settled or not _is_scalar(node, path):
            tape.settle(match)
        else:
            scalars[path] = TapeRef(match.entry)
        found.add(match.entry)
    return found, others


def _defaults(node: fx.Node) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Numbers that the node leaves out because they are the defaults of the op: ``alpha=1``."""
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        value = argument.default_value
        given = position < len(node.args) or argument.name in node.kwargs
        if not given and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (1, argument.name), value


def _numbers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
    if isinstance(value, (tuple, list)):
        for position, element in enumerate(value):
            yield from _numbers(element, (*path, position))
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _numbers(element, (*path, key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


def _is_scalar(node: fx.Node, path: tuple[Any, ...]) -> bool:
    """Return True if the place in the op's arguments takes a number for arithmetic, not for a shape."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    at = path[1]
    argument = next(a for position, a in enumerate(schema.arguments) if at in (position, a.name))
    # `x / 2` is an op on two tensors of which one is a number.
    return schema.name not in NUMBERS_THAT_SHAPE and "int" not in str(argument.type)
