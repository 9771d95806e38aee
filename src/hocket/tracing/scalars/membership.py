"""The set or dict that a number is looked up in: ``step in milestones``.

A lookup asks the number for its hash, and tells nothing else. The instruction that asks tells the rest: where its
operands are names or attributes, or a sum of two, the container is found by reading these once more. Later steps then
have to find the same answer, and not the same number.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from hocket.pystate.layout import attribute_of, in_class
from hocket.pystate.places import Followed, is_a, is_number, is_plain

_LOOKED_UP = tuple(kind.__contains__ for kind in (dict, set, frozenset))


def keys_asked(frame: FrameType, number: Any) -> frozenset[Any] | None:
    """The keys among which the instruction of a frame looks for a number. None where that is not seen.

    The number may stand in a tuple that is looked up.
    """
    places, instructions = _instructions(frame.f_code)
    place = places.get(frame.f_lasti)
    if place is None or instructions[place].opname != "CONTAINS_OP":
        return None
    container, place = _operand(frame, instructions, place - 1)
    if not is_a(container, (dict, set, frozenset)) or in_class(type(container), "__contains__") not in _LOOKED_UP:
        return None
    is_asked = _is_asked(frame, instructions, place, number)
    return frozenset(container) if is_asked and all(map(is_plain, container)) else None


def _is_asked(frame: FrameType, instructions: Sequence[dis.Instruction], place: int, number: Any) -> bool:
    """True if the instructions up to this place load the number, or compute one of it: ``step + 1``."""
    if instructions[place].opname != "BINARY_OP":
        return _operand(frame, instructions, place)[0] is number
    right, place = _operand(frame, instructions, place - 1)
    left, _ = _operand(frame, instructions, place)
    return all(is_a(each, Followed) or is_number(each) for each in (left, right))


def _operand(frame: FrameType, instructions: Sequence[dis.Instruction], place: int) -> tuple[Any, int]:
    """The value that the instructions up to this place load, and the place before them. None if it is computed."""
    names = []
    while place > 0 and instructions[place].opname == "LOAD_ATTR":
        names.append(instructions[place].argval)
        place -= 1
    name, kind = instructions[place].argval, instructions[place].opname
    if kind == "LOAD_CONST":
        value = name
    elif kind in ("LOAD_FAST", "LOAD_DEREF"):
        value = frame.f_locals.get(name)
    else:
        value = frame.f_globals.get(name) if kind == "LOAD_GLOBAL" else None
    for each in reversed(names):
        value = None if value is None else attribute_of(value, each)
    return value, place - 1


@functools.lru_cache(maxsize=64)
def _instructions(code: CodeType) -> tuple[dict[int, int], Sequence[dis.Instruction]]:
    """The instructions of a function, and the place of each by its offset."""
    found = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
    return {each.offset: place for place, each in enumerate(found)}, found
