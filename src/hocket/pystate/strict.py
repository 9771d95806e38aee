"""Callables that take plain numbers only: C code that looks at a number's type before it asks for its value.

While a step is recorded, a number that changes between steps is an object that remembers how it was computed
(`hocket.tracing.scalars.live`). Most C functions ask it for its value (``range(n)``, ``struct.pack("d", x)``) and a
guard is noted. Some look at the type first and raise::

    datetime.timedelta(seconds=lr)      TypeError: unsupported type for timedelta seconds component
    json.dumps({"step": n})             TypeError: Object of type ... is not JSON serializable

That could not be mended once the step runs. A step that can reach such a callable is therefore recorded with plain
numbers, and its graph stands for their values alone. Calls of C functions are seen by the watch, calls of types are
not, which is why the names in the user's code count, too.

A text that changes between batches is a `str` all the same, and notes which of its methods are called. What
reads it without one is known by `reads_text` (``",".join(names)``, ``open(path)``) and `reads_text_by`.
"""

from __future__ import annotations

import collections
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_MODULES = frozenset(
    (
        *("json", "datetime", "decimal", "statistics", "sqlite3", "ctypes", "marshal"),
        *("_json", "_datetime", "_pydatetime", "_decimal", "_statistics", "_sqlite3", "_ctypes"),
    )
)
# Attributes, wherever they are found.
_NAMES = frozenset(
    (
        *("timedelta", "Decimal", "fromtimestamp", "sleep", "gmtime", "localtime", "default_rng", "SeedSequence"),
        *("datetime64", "timedelta64", "set_num_threads", "manual_seed"),
    )
)
# C functions of these ask for the value, and torch's are recorded.
_ASKING = frozenset((*sys.stdlib_module_names, "builtins", "numpy", "torch", "hocket")) - _MODULES
# C functions behind those of scipy's that a recording calls with plain values (see `recording.step_arrays`).
_FOLLOWED = frozenset(("linear_sum_assignment", "_linear_filter"))
# C functions that call a method of a text, or only keep it.
_KEEPING_TEXT = frozenset(
    ("_collections", "_functools", "_operator", "_thread", "gc", "itertools", "math", "time", "torch")
)
_READING_TEXT = frozenset(("open", "ord", "exec", "eval", "compile", "__import__"))
_READING_CLASSES = frozenset(("bytes", "bytearray", "complex", "StringIO", "BytesIO"))
_HOLDERS = (list, tuple, dict, set, frozenset, collections.deque, int, float)
_HAS_NAME = (ModuleType, type, FunctionType, BuiltinFunctionType)


def is_strict(value: Any) -> bool:
    """True if a value is such a callable, or a module that is full of them."""
    kind = type(value)
    if not issubclass(kind, _HAS_NAME):
        return False
    if issubclass(kind, ModuleType):
        return _root(getattr(value, "__name__", None)) in _MODULES
    owners = type.mro(value) if issubclass(kind, type) and kind is type else [value]
    return any(_root(getattr(owner, "__module__", None)) in _MODULES for owner in owners)


def strict_function(function: Any) -> str:
    """Return the name of the called C function if it accepts only plain numbers. Empty if it asks for the value."""
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None)
    if owner is not None and not issubclass(type(owner), ModuleType):
        kinds = type.mro(owner if type(owner) is type else type(owner))
        # A class may override the C function in Python and call it from there: `dict.get` is then dict's all the same.
        own = ((kind.__module__, vars(kind).get(function.__name__)) for kind in kinds)
        module = next(
            (name for name, value in own if value is not None and type(value) is not FunctionType), "builtins"
        )
    root = _root(module)
    if function.__name__ in _FOLLOWED:
        return ""
    return f"{root}.{function.__name__}" if root and root not in _ASKING and not root.startswith("__") else ""


def reads_text(function: Any) -> bool:
    """Return False for a C function that reads no text, or only by the methods of its class."""
    owner = getattr(function, "__self__", None)
    if owner is None or issubclass(type(owner), ModuleType):
        root, name = _root(getattr(function, "__module__", None)), function.__name__
        return name in _READING_TEXT if root == "builtins" else root not in _KEEPING_TEXT
    kind = owner if issubclass(type(owner), type) else type(owner)
    if kind is str and function.__name__ == "format":
        return False
    return not issubclass(kind, _HOLDERS) and _root(kind.__module__) not in ("torch", "random")


def reads_text_by(code: CodeType) -> bool:
    """True of code that may read text by a class of C's, or looks for what is no constant in what may be text."""
    if not _READING_CLASSES.isdisjoint(code.co_names):
        return True
    if dis.opmap["CONTAINS_OP"] not in code.co_code[::2]:
        return False
    loaded: list[dis.Instruction] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "CONTAINS_OP" and not (_is_constant(loaded[-1]) or _is_constant(loaded[-2], str)):
            return True
        if instruction.opname not in ("LOAD_ATTR", "CACHE"):
            loaded.append(instruction)
    return False


def _is_constant(loaded: dis.Instruction, *kinds: type) -> bool:
    """True of a constant: one of these kinds, or without any, one that is no text."""
    value = loaded.argval
    return loaded.opname == "LOAD_CONST" and (isinstance(value, kinds) if kinds else not isinstance(value, str))


def strict_names(code: CodeType, namespace: dict[str, Any]) -> Iterator[str]:
    """Such callables that code names, with the line."""
    if not any(_may_be_strict(name, namespace) for name in code.co_names):
        return  # most code: taking it apart takes long
    line, number_type = code.co_firstlineno, None
    for instruction in dis.get_instructions(code):
        line = (instruction.positions and instruction.positions.lineno) or line
        operation, name = instruction.opname, instruction.argval
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            found = is_strict(namespace.get(name))
        elif operation == "IMPORT_NAME":
            found = _root(name) in _MODULES
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            found = name in _NAMES or (number_type is not None and name in vars(number_type))  # float.hex(lr)
        else:
            found = False
        number_type = {"int": int, "float": float}.get(name) if operation == "LOAD_GLOBAL" else None
        if found:
            yield f"{name} at {Path(code.co_filename).name}:{line}"


def _may_be_strict(name: str, namespace: dict[str, Any]) -> bool:
    is_named = name in ("int", "float") or name in _NAMES or _root(name) in _MODULES
    return is_named or is_strict(namespace.get(name))


def _root(module: Any) -> str:
    return module.partition(".")[0] if isinstance(module, str) else ""
