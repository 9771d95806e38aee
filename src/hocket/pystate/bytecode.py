"""Facts read from the bytecode of a function: the global names that it uses, strings, and comparisons of types."""

from __future__ import annotations

import dis
import itertools
import re
import sys
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from types import CodeType, ModuleType
from typing import Any

_GLOBAL_OPS = frozenset(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME"))
_GLOBAL_CODES = frozenset(dis.opmap[name] for name in _GLOBAL_OPS)
_LOAD_GLOBAL = dis.opmap["LOAD_GLOBAL"]
_PUSH_NULL = dis.opmap["PUSH_NULL"]
_STORES = frozenset(code for name, code in dis.opmap.items() if name.startswith("STORE_"))
_ASKING = frozenset(("isinstance", "issubclass"))
_FINDERS = frozenset(("__import__", "import_module", "modules"))
_PASSED_OVER = (dis.opmap["CACHE"], dis.EXTENDED_ARG)
_HAS_FLAG = sys.version_info >= (3, 12)  # LOAD_ATTR loads methods, too
_LOADS_ATTRIBUTE = (dis.opmap["LOAD_ATTR"],) if _HAS_FLAG else (dis.opmap["LOAD_ATTR"], dis.opmap["LOAD_METHOD"])
_COMPARING_OPS = frozenset(("IS_OP", "COMPARE_OP", "CONTAINS_OP", "BINARY_SUBSCR"))
# Code that looks at attributes by computed names. Torch's own does so by the tables of its objects, which are known.
DYNAMIC = frozenset(("getattr", "setattr", "delattr", "vars", "eval", "exec", "globals", "locals", "attrgetter"))
_DYNAMIC_OF_USER = DYNAMIC | {
    "__dict__", "__getattribute__", "getattr_static", "asdict", "astuple", "model_dump", "f_globals", "__globals__",
}  # fmt: skip
_FIELDS = re.compile(r"\.([^\W\d]\w*)")  # "{0.rate}"


def _operations(code: CodeType) -> Iterator[tuple[int, int]]:
    """The operations of code, each with its argument. `dis` would take ten times longer to list them."""
    extended, raw = 0, code.co_code
    for place in range(0, len(raw), 2):
        operation, argument = raw[place], raw[place + 1] | extended
        extended = argument << 8 if operation == dis.EXTENDED_ARG else 0
        if operation not in _PASSED_OVER:
            yield operation, argument


def globals_of(code: CodeType) -> set[str]:
    """The names that code reads or writes as global ones. One bit of an argument of LOAD_GLOBAL is a flag."""
    return {code.co_names[arg >> (op == _LOAD_GLOBAL)] for op, arg in _operations(code) if op in _GLOBAL_CODES}


def _attribute(code: CodeType, operation: int, argument: int) -> tuple[str, bool]:
    """The name that an operation loads, and whether it is loaded to be called."""
    if _HAS_FLAG:
        return code.co_names[argument >> 1], bool(argument & 1)
    return code.co_names[argument], operation == _LOADS_ATTRIBUTE[-1]


def calls_any(code: CodeType, names: AbstractSet[str]) -> bool:
    """True if code calls what has one of these names, or hands that on. It may ask for instances of it."""
    if names.isdisjoint(code.co_names):
        return False
    asks = not _ASKING.isdisjoint(code.co_names)
    operations = [*_operations(code), (-1, 0)]
    is_called = False  # what is loaded next, or an attribute of that
    for (operation, argument), (following, _) in itertools.pairwise(operations):
        if operation == _LOAD_GLOBAL:
            name, is_called = code.co_names[argument >> 1], is_called or bool(argument & 1)
        elif operation in _LOADS_ATTRIBUTE:
            name, is_method = _attribute(code, operation, argument)
            is_called = is_called or is_method
        else:
            name, is_called = "", operation == _PUSH_NULL
        is_kept = following == _PUSH_NULL or following in _STORES
        if name in names and (is_called or is_kept or not asks):
            return True
    return False


def names_in_modules(code: CodeType, namespace: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Names that code reads as globals, or of modules that these are (``F.linear``), each with the dict that has it."""
    table: dict[str, Any] | None = None
    for operation, argument in _operations(code):
        if operation == _LOAD_GLOBAL:
            table, name = namespace, code.co_names[argument >> 1]
        elif table is not None and operation in _LOADS_ATTRIBUTE:
            name, _ = _attribute(code, operation, argument)
        else:
            table = None
            continue
        if name in table or table is not namespace:  # else it is one of Python's own
            yield table, name
        value = table.get(name)
        table = vars(value) if isinstance(value, ModuleType) else None


def imports_of(code: CodeType, namespace: dict[str, Any]) -> set[str]:
    """Names of modules that code may import, or find by a string. Not all of them are modules."""
    if dis.opmap["IMPORT_NAME"] not in code.co_code[::2] and _FINDERS.isdisjoint(code.co_names):
        return set()
    found = {*code.co_names, *(each for each in code.co_consts if type(each) is str)}
    packages = [str(namespace.get("__package__") or "")]
    while packages[-1]:
        packages.append(packages[-1].rpartition(".")[0])
    return {f"{package}.{name}".strip(".") for package in packages for name in found}


def strings_of(code: CodeType) -> set[str]:
    """The names that code spells as strings, for `getattr`, a dict (whose keys are one tuple) or `str.format`."""
    return {name for constant in code.co_consts for name in _strings_in(constant)}


def _strings_in(constant: Any) -> Iterator[str]:
    if type(constant) is str:
        yield from [constant] if constant.isidentifier() else _FIELDS.findall(constant) if "{" in constant else ()
    elif type(constant) in (tuple, frozenset):
        for each in constant:
            yield from _strings_in(each)


def computes_names(code: CodeType) -> bool:
    """True if code may look at attributes by computed names. ``model.eval()`` does not."""
    found = _DYNAMIC_OF_USER.intersection(code.co_names)
    return bool(found) and (found != {"eval"} or "eval" in globals_of(code))


def compares_types(code: CodeType) -> bool:
    """Return whether code compares ``type(x)`` with anything, or looks something up by it."""
    instructions = list(dis.get_instructions(code))
    for place, instruction in enumerate(instructions):
        if instruction.opname in _GLOBAL_OPS and instruction.argval == "type":
            following = instructions[place + 1 : place + 12]
            if following and following[0].argval not in ("self", "cls"):
                return any(each.opname in _COMPARING_OPS for each in following)
    return False


def with_nested(code: CodeType) -> Iterator[CodeType]:
    """`code`, and that of the functions and classes within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from with_nested(constant)
