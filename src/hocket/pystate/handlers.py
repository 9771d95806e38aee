"""Reads from frames whether the user's code may catch what is raised where it runs, from its exception tables.

Python's compiler notes for each instruction the handler of what it raises. A handler of ``except`` asks for the kind
of the error (or ends by forgetting it), one of ``finally`` raises again, and one of ``with`` asks the manager. Managers
of torch's and locks let errors through; of all others it is not known.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
from types import CodeType, FrameType
from typing import Any

from hocket.pystate.origins import frames_from, origin

_CATCHING = frozenset(("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT"))
_ROOTS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF"))
_NOTHING = frozenset(("PUSH_NULL", "PRECALL", "COPY_FREE_VARS", "CACHE"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_LETS_THROUGH = frozenset(("torch", "_thread", "threading"))  # managers of these modules
_UNKNOWN = object()


def may_catch(frame: FrameType | None, outside: FrameType | None) -> bool:
    """Return whether a frame of the user's or a library's, from this one out to `outside`, may catch its error."""
    own = (each for each in frames_from(frame, outside) if origin(each.f_code.co_filename) in ("user", "library"))
    return any(map(_catches, own))


def _catches(frame: FrameType) -> bool:
    code, at = frame.f_code, frame.f_lasti
    if not code.co_exceptiontable:
        return False
    instructions, table = _facts(code)
    met: set[int] = set()
    while True:
        target = next((entry.target for entry in table if entry.start <= at < entry.end), None)
        if target is None or target in met:
            return False
        met.add(target)
        handler = [each for each in instructions if each.offset >= target]
        names = [each.opname for each in handler]
        end = names.index("RERAISE") if "RERAISE" in names else len(names)
        if names[0] == "PUSH_EXC_INFO":
            if "WITH_EXCEPT_START" in names[:2]:
                begin = min(entry.start for entry in table if entry.target == target)
                if not _lets_through(frame, instructions, begin):
                    return True
            elif end == len(names) or not _CATCHING.isdisjoint(names[:end]):
                return True
        if end == len(names):
            return False
        at = handler[end].offset


@functools.lru_cache(64)
def _facts(code: CodeType) -> tuple[list[dis.Instruction], list[Any]]:
    """Its instructions, and its exception table."""
    return list(dis.get_instructions(code)), dis._parse_exception_table(code)  # type: ignore[attr-defined]


def _lets_through(frame: FrameType, instructions: list[dis.Instruction], begin: int) -> bool:
    """Return whether the manager of the ``with`` whose block begins there is known to let errors through."""
    entering = [
        place for place, each in enumerate(instructions) if each.offset < begin and each.opname == "BEFORE_WITH"
    ]
    if not entering or instructions[entering[-1]].is_jump_target:  # one of two managers
        return False
    chain = [each for each in _operand(instructions[: entering[-1]]) if each.opname not in _NOTHING]
    found: Any = _UNKNOWN
    if chain and chain[0].opname in _ROOTS:
        found = frame.f_locals.get(chain[0].argval, frame.f_globals.get(chain[0].argval, _UNKNOWN))
    for each in itertools.takewhile(lambda each: each.opname in _ATTRIBUTES, chain[1:]):
        found = inspect.getattr_static(found, each.argval, _UNKNOWN)
    if found is _UNKNOWN:
        return False
    kind = found if inspect.isclass(found) or inspect.isroutine(found) else type(found)
    module = getattr(kind, "__module__", None) or ""
    return kind is contextlib.nullcontext or module.partition(".")[0] in _LETS_THROUGH


def _operand(instructions: list[dis.Instruction]) -> list[dis.Instruction]:
    """The last ones of these, which push one value."""
    depth = 0
    for place in reversed(range(len(instructions))):
        each = instructions[place]
        depth += dis.stack_effect(each.opcode, each.arg if each.opcode >= dis.HAVE_ARGUMENT else None, jump=False)
        if depth == 1:
            return instructions[place:]
    return []
