"""Findings of the watch: what a step does that its graph could not, in words, with the user's line and a cure.

A *finding* is about Python's state or the world outside. What cannot be recorded has its table in
`hocket.tracing.reasons`. `docs/eager.md` lists the same entries as both.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from hocket.pystate.bytecode import with_nested
from hocket.pystate.origins import origin
from hocket.pystate.places import Place

# By kind: what the step does, and what helps.
FINDINGS: dict[str, tuple[str, str]] = {
    "draws": ("it advances {}", "draw with torch's default generator, or draw outside the step and pass the numbers"),
    "advances": ("it advances {}", "fetch what it gives outside the step, and pass it"),
    "keeps a graph": ("it keeps a tensor with its autograd graph in {}", "detach it"),
    "counts": ("it changes {}", "count outside the step, or return the number"),
    "hands on": ("it changes {}, which takes plain ones only", "do that outside the step"),
    "grows": ("it changes {}", "return what is to be kept, and keep it outside the step"),
    "writes an array": (
        "it changes {}",
        "keep it in a tensor, which the step may write and exchange, or write it after the last op",
    ),
    "exchanges": ("it changes {}", "make it once, outside the step, and write into it"),
    "refills": (
        "it changes {}",
        "make it once, outside the step, or have it hold numbers and tensors alone, under the same keys",
    ),
    "marks a tensor": ("it changes {}", "set it outside the step, or take it back at the end of the step"),
}

_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_NAME")
_ITEM_STORES = ("STORE_SUBSCR", "DELETE_SUBSCR")
_VARIABLES = ("DEREF", "FAST")


def finding(kind: str, subject: object, line: str = "") -> str:
    """One finding.

    Example:
        >>> finding("counts", "closure of step: count (1 -> 2)", "train.py:12")
        'it changes closure of step: count (1 -> 2): count outside the step, or return the number (train.py:12)'
    """
    text, cure = FINDINGS[kind]
    return f"{text.format(subject)}: {cure}" + (f" ({line})" if line else "")


def codes_of(step: Any) -> list[CodeType]:
    """The code of a step, and of the functions within it."""
    code = getattr(inspect.unwrap(step), "__code__", None)
    return [] if code is None else list(with_nested(code))


def line_about(place: Place, codes: Iterable[CodeType]) -> str:
    """The line of the user's code that writes a place, or else one that names it. Empty if none does."""
    mine = sorted((code for code in codes if origin(code.co_filename) == "user"), key=lambda code: code.co_firstlineno)
    for name in _names(place):
        read = ""
        for code in mine:
            for line, writes in _uses(code, name, variables=name != place.key or place.kind == "cell"):
                found = f"{Path(code.co_filename).name}:{line}"
                if writes:
                    return found
                read = read or found
        if read:
            return read
    return ""


def _uses(code: CodeType, name: str, *, variables: bool) -> Iterator[tuple[int, bool]]:
    """The lines where code spells a name, and whether it writes there."""
    spelled = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts)
    if not any(name in names for names in spelled):
        return  # most code: taking it apart takes long
    line = 0
    instructions = list(dis.get_instructions(code))
    for instruction, following in zip(instructions, (*instructions[1:], None), strict=True):
        line = (instruction.positions and instruction.positions.lineno) or line
        if instruction.argval != name or (not variables and instruction.opname.endswith(_VARIABLES)):
            continue
        is_key = following is not None and following.opname in _ITEM_STORES
        yield line, instruction.opname in _STORES or is_key


def _names(place: Place) -> Iterator[Any]:
    """The names by which code reaches a place, its own first."""
    if isinstance(place.key, str) and place.key:
        yield place.key
    path: Any = place.path
    while path:
        path, _, key = path
        if isinstance(key, str):
            yield key.split()[-1].rpartition(".")[2] if key.strip() else key
