"""The names by which a step's code can read and write state, and what else follows from the code itself.

State is reached by names: of closures, globals and attributes. Only attributes that executed code names are watched
(all where names are computed, see `CodeNames.dynamic`).
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from hocket.pystate import bytecode, settings
from hocket.pystate.origins import OURS, origin, user_line
from hocket.pystate.strict import is_strict, reads_text_by, strict_names

# The code that records and walks is no part of the step.
LOOKING_ON = tuple(OURS + name + os.sep for name in ("tracing", "pystate"))
# Python takes plain numbers from them.
_CONVERSIONS = frozenset(("__float__", "__int__", "__index__", "__complex__", "__hash__"))
TENSOR_TYPES = frozenset(
    f"{kind}Tensor"
    for kind in ("", "Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
)
# These read the memory of an array.
_READING_MEMORY = frozenset(
    ("memoryview", "bytes", "bytearray", "frombuffer", "crc32", "adler32", "md5", "sha1", "sha256")
)
_OF_TORCH = re.compile(r"torch(?!\._dynamo)")
_EXCHANGED = re.compile("has_torch_function|[gs]et_rng_state")  # while another thread records
# Nothing sees numpy set the state of a generator: the names count.
_SEEDS = frozenset(("seed", "set_state", "bit_generator"))


class CodeNames:
    """Names and facts of the code that was added, over all watched steps."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()  # what was added
        self.names: set[str] = set()  # every name and attribute in that code, user code that it refers to included
        self.user_names: set[str] = set()  # those of code that is neither torch's nor Python's own
        self.user_strings: set[str] = set()  # names that such code spells as strings
        # for each module (by its ``__dict__``), the global names that such code uses
        self.global_names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        # for each module, the names in it that torch's own code calls
        self.torchs_names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.imports: set[str] = set()  # names of modules, perhaps, that code of the user's imports or looks up
        # user functions with `getattr`, `vars` or the like: every attribute counts then
        self.dynamic: dict[str, None] = {}
        # user functions that compare ``type(x)``: they could tell a live number from a plain one
        self.asks_types: dict[str, None] = {}
        # callables that take plain numbers only, with the line: they would refuse a live one
        self.strict: dict[str, None] = {}
        self.reads_memory = False  # it calls what takes no array but one of numpy's own (``memoryview(data)``)
        self.reads_text = False  # code of the step may read text without calling a method of it
        # code of the user's sets the state of a generator. A step may leave it as the step before has left it.
        self.seeds = False
        self.num_new_of_user = 0  # pieces of the user's code that were added in the last watched step
        self.newest = ""  # the last such piece, in words

    @property
    def follows_numbers(self) -> bool:
        """False if the step could tell a live number from a plain one."""
        return not self.asks_types and not self.strict

    @property
    def refuses_arrays(self) -> str:
        """Say that the step could tell a stand-in from an array, or calls C code that takes none. Empty if not."""
        if self.asks_types:
            return "it compares types"
        if self.reads_memory:
            return "it reads memory (memoryview, bytes or a checksum)"
        return f"it calls {next(iter(self.strict))}" if self.strict else ""

    def add(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Count the names of `code`, which runs with these globals."""
        file = file_of(code, namespace)
        if code in self.codes or code.co_name == "<module>" or file.startswith(LOOKING_ON):
            return  # a module's own code runs when it is imported
        self.codes.add(code)
        self.user_names |= settings.NAMES & {code.co_name}
        whose = origin(file)
        if whose in ("user", "library"):
            self.num_new_of_user += 1
            self.newest = f"{code.co_qualname} at {Path(file).name}:{code.co_firstlineno}"
            if code.co_name in _CONVERSIONS and "hash" not in code.co_names:
                self.strict[f"{code.co_qualname} at {user_line()}"] = None
        if whose == "stdlib" and is_strict(sys.modules.get(namespace.get("__name__", ""))):
            self.strict[f"{namespace['__name__']}.{code.co_qualname} at {user_line()}"] = None
        for part in bytecode.with_nested(code):
            self.names.update(part.co_names)
            if whose == "torch":
                self._note_calls(part, namespace)
            if whose == "stdlib" or (whose == "torch" and bytecode.DYNAMIC.isdisjoint(part.co_names)):
                continue
            self.names |= bytecode.strings_of(part)  # torch's optimizers ask for `found_inf` so
            if whose == "torch":
                continue
            self.user_names.update(part.co_names)
            self.user_strings |= bytecode.strings_of(part)
            self.reads_text = self.reads_text or reads_text_by(part)
            self.imports |= bytecode.imports_of(part, namespace)
            self.reads_memory = self.reads_memory or bytecode.calls_any(part, _READING_MEMORY)
            if whose == "user" and bytecode.computes_names(part):
                self.dynamic[code.co_qualname] = None
            if whose == "user":
                self.strict |= dict.fromkeys(strict_names(part, namespace))
                if "type" in part.co_names and bytecode.compares_types(part):
                    self.asks_types[code.co_qualname] = None
            self.seeds = self.seeds or ("random" in part.co_names and not _SEEDS.isdisjoint(part.co_names))
            used = self.global_names.setdefault(id(namespace), (namespace, set()))[1]
            used.update(bytecode.globals_of(part))

    def _note_calls(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Functions that torch's code calls by the names of modules may be exchanged for others."""
        for table, name in bytecode.names_in_modules(code, namespace):
            if _OF_TORCH.match(str(table.get("__name__"))) and not _EXCHANGED.match(name):
                self.torchs_names.setdefault(id(table), (table, set()))[1].add(name)


def file_of(code: CodeType, namespace: dict[str, Any]) -> str:
    """The file of a piece of code, or of the module of generated code (methods of a dataclass)."""
    file = code.co_filename
    if not file.startswith("<string"):
        return file
    if str(namespace.get("__name__")).startswith("namedtuple_"):
        return "<frozen collections>"
    return namespace.get("__file__") or file  # text that the user runs, where it belongs to no module
