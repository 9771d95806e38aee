"""``step in milestones``: which set or dict is a number looked up in?

A lookup asks the number for its hash, and tells nothing else. The instruction that asks tells the rest: where both of
its operands are names or attributes, the container is found by reading these once more. Later steps then have to find
the same answer, and not the same number.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from hocket.pystate.layout import attribute_of, in_class
from hocket.pystate.places import is_a, is_plain

_LOOKED_UP = tuple(kind.__contains__ for kind in (dict, set, frozenset))
_NOT_SEEN = frozenset(("CACHE", "EXTENDED_ARG"))


def keys_asked(frame: FrameType, number: Any) -> frozenset[Any] | None:
    """The keys among which the instruction of a frame looks for a number. None where it does not, or cannot be seen.

    Args:
        frame: of the code that has asked for the hash of the number.
        number: the number itself. It may stand in a tuple that is looked up.
    """
    places, instructions = _instructions(frame.f_code)
    place = places.get(frame.f_lasti)
    if place is None or instructions[place].opname != "CONTAINS_OP":
        return None
    container, place = _operand(frame, instructions, place - 1)
    asked, _ = _operand(frame, instructions, place)
    is_usual = is_a(container, (dict, set, frozenset)) and in_class(type(container), "__contains__") in _LOOKED_UP
    return frozenset(container) if is_usual and asked is number and all(map(is_plain, container)) else None


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
    found = [each for each in dis.get_instructions(code) if each.opname not in _NOT_SEEN]
    return {each.offset: place for place, each in enumerate(found)}, found
