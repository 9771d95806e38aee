"""Facts of bytecode, which each version of Python spells in another way."""

import math
from typing import Any

from hocket.pystate.bytecode import compares_types, globals_of, names_in_modules
from hocket.pystate.origins import step_line

RATE = 3


def computes(x: Any, table: Any) -> Any:
    scaled = [RATE * each for each in x]
    return math.sqrt(len(scaled)) + math.pi


def looks_up(x: Any, table: Any) -> Any:
    return table[type(x)]


def test_names_are_those_of_modules_and_globals() -> None:
    namespace = globals()
    found = {name: table for table, name in names_in_modules(computes.__code__, namespace)}
    assert found.keys() >= {"math", "sqrt", "pi"}
    assert found["sqrt"] is vars(math) is found["pi"]
    assert found["math"] is namespace
    assert {"math", "len"} <= globals_of(computes.__code__)
    assert compares_types(looks_up.__code__)
    assert not compares_types(computes.__code__)


def test_a_line_is_a_number() -> None:
    code = computes.__code__
    assert step_line(computes, returns=True) == f"test_bytecode.py:{code.co_firstlineno + 2}"
