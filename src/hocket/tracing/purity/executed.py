"""Which code a step runs, noted while it runs: the names that it can read and write state by, and the outside world.

State is reached by names: of closures, globals and attributes. An attribute that no executed code names cannot be read
by the step (but for `getattr` with a computed name, see `ExecutedCode.dynamic`), so only named ones have to be watched.
Two of Python's own hooks tell which code runs:

- `sys.setprofile` reports calls of Python and of C functions. Among the latter are clocks, files and sockets: what
  they return is no state that could be watched, so a step that asks them is refused by name.
- where a profiler owns that hook, `sys.settrace` reports calls of Python functions.

Ops that are written in Python (`torch.library`) are ops: a planned step runs them, too. Their code is not looked at.
Neither is that of finalizers and callbacks that Python's collector runs, wherever it happens to start.
"""

from __future__ import annotations

import dis
import gc
import io
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.heap import collections_held

__all__ = ["ExecutedCode", "is_user_code", "origin"]

_TORCH = os.path.dirname(torch.__file__) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = (sysconfig.get_paths()["purelib"] + os.sep, sysconfig.get_paths()["platlib"] + os.sep)
_OURS = str(Path(__file__).parents[2]) + os.sep
_DISPATCH = os.path.join(_TORCH, "_ops.py")
_ZOO = os.path.join(_OURS, "zoo") + os.sep  # its steps are users' steps

_CLOCKS = frozenset(
    ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "thread_time")
)
_CALENDAR = frozenset(("now", "utcnow", "today"))
_WORLD_MODULES = frozenset(("posix", "nt", "socket", "_socket", "select", "fcntl", "_posixsubprocess", "_ssl"))
_HARMLESS = frozenset(("fspath", "getpid", "register_at_fork"))
_INPUT = frozenset(("open", "input", "open_code"))
_STREAMING = frozenset(
    ("write", "writelines", "flush", "truncate", "read", "readline", "readlines", "readinto", "__next__")
)
# What these say of the time and the place is no business of the step.
_QUIET = ("linecache.py", "warnings.py", "threading.py", os.path.join("logging", "__init__.py"))

# Code that looks at attributes by computed names.
_DYNAMIC = frozenset(("getattr", "setattr", "delattr", "vars", "eval", "exec", "globals", "locals", "attrgetter"))

_GLOBAL_OPS = frozenset(("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME", "DELETE_NAME"))


def origin(file: str) -> str:
    """Whose code a file holds: ``torch`` (numpy and Hocket too), ``stdlib``, ``library`` or ``user``."""
    if file.startswith((_TORCH, "<hocket", "<fused")) or (file.startswith(_OURS) and not file.startswith(_ZOO)):
        return "torch"
    if file.startswith(_SITE):
        return "torch" if file.startswith(tuple(site + "numpy" + os.sep for site in _SITE)) else "library"
    if file.startswith((_STDLIB, "<frozen")):
        return "stdlib"
    return "user"


def is_user_code(code: CodeType) -> bool:
    """Whether code is neither Python's, nor torch's, nor that of an installed library."""
    return origin(code.co_filename) == "user"


class ExecutedCode:
    """The code that ran while `watching`, over all watched steps.

    Attributes:
        names: every name and attribute in that code, user code that it refers to included.
        user_names: those of code that is neither torch's nor Python's own.
        global_names: for each module (by its ``__dict__``), the global names that code uses.
        world: clocks, files and the like that the last watched step asked, with where.
        dynamic: user functions with `getattr`, `vars` or the like: every attribute counts then.
        persistent: objects that code met in two watched steps running, and so outlive a step.
        num_new: how many pieces of code the last watched step ran for the first time.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.user_names: set[str] = set()
        self.global_names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.world: dict[str, None] = {}
        self.dynamic: dict[str, None] = {}
        self.persistent: dict[int, Any] = {}
        self.codes: set[CodeType] = set()
        self.num_new = 0
        self._origins: dict[str, str] = {}
        self._met: dict[int, Any] = {}
        self._met_before: dict[int, Any] = {}
        self._skipped: FrameType | None = None  # runs an op written in Python, or has called the collector

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all code that this thread runs meanwhile.

        Raises:
            CaptureError: a profiler and a debugger own both of Python's hooks.
        """
        set_hook, hook = self._free_hook()
        self.world = {}
        known = len(self.codes)
        with collections_held():
            set_hook(hook)
            try:
                yield
            finally:
                set_hook(None)
                self._noted(known)

    def _noted(self, num_known: int) -> None:
        """Sum up a watched step."""
        self._skipped = None
        self.num_new = len(self.codes) - num_known
        for address, value in self._met.items():
            if self._met_before.get(address) is value:
                self.persistent[address] = value
        self._met_before, self._met = self._met, {}

    def _free_hook(self) -> tuple[Callable[[Any], None], Callable[..., Any]]:
        if sys.getprofile() is None:
            return sys.setprofile, self._profiled
        if sys.gettrace() is None:
            return sys.settrace, self._traced
        raise CaptureError("a profiler and a debugger own both of Python's hooks, so the step cannot be watched")

    def add(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Count the names of `code`, which runs with these globals."""
        if code in self.codes or code.co_name == "<module>":
            return  # a module's own code runs when it is imported
        self.codes.add(code)
        whose = self._origin(code.co_filename)
        for part in _with_nested(code):
            self.names.update(part.co_names)
            if whose == "torch" or whose == "stdlib":
                continue
            self.user_names.update(part.co_names)
            # A name may also be spelled as a string, for getattr or a dict.
            self.names.update(c for c in part.co_consts if type(c) is str and c.isidentifier())
            if whose == "user" and not _DYNAMIC.isdisjoint(part.co_names):
                self.dynamic[code.co_qualname] = None
            used = self.global_names.setdefault(id(namespace), (namespace, set()))[1]
            used.update(i.argval for i in dis.get_instructions(part) if i.opname in _GLOBAL_OPS)

    def _origin(self, file: str) -> str:
        found = self._origins.get(file)
        if found is None:
            found = self._origins[file] = origin(file)
        return found

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if self._skipped is not None:
            if frame is self._skipped and (event == "return" or arg is gc.collect):
                self._skipped = None
        elif event == "call":
            if _is_op(frame) and self._origin(code.co_filename) != "torch":
                self._skipped = frame
            elif code not in self.codes:
                self.add(code, frame.f_globals)
        elif event == "c_call":
            if arg is gc.collect:
                self._skipped = frame
                return
            whose = self._origin(code.co_filename)
            if whose != "torch":
                self._called(arg, code, whose)
        elif event == "return" and self._origin(code.co_filename) in ("user", "library"):
            self._meet(arg)

    def _traced(self, frame: FrameType, event: str, arg: Any) -> None:
        caller: FrameType | None = frame
        while caller is not None and not _is_op(caller):
            caller = caller.f_back
        if caller is None and frame.f_code not in self.codes:
            self.add(frame.f_code, frame.f_globals)

    def _called(self, function: Any, code: CodeType, whose: str) -> None:
        """A C function is called by code that is not torch's."""
        owner = getattr(function, "__self__", None)
        if owner is not None:
            self._meet(owner)
        name, module = function.__name__, getattr(function, "__module__", None)
        if isinstance(owner, io.IOBase) and name in _STREAMING:
            self.world[f"{name} of a {type(owner).__name__} in {code.co_qualname}"] = None
        if whose == "stdlib" and code.co_filename.endswith(_QUIET):
            return
        if (name in _CLOCKS and module == "time") or (name in _CALENDAR and isinstance(owner, type)):
            self.world[f"the clock ({name} in {code.co_qualname})"] = None
        elif module in _WORLD_MODULES and name not in _HARMLESS:
            self.world[f"{module}.{name} in {code.co_qualname}"] = None
        elif name in _INPUT and module in ("io", "_io", "builtins"):
            self.world[f"{name} in {code.co_qualname}"] = None
        elif name == "print" and module == "builtins":
            self.world[f"print in {code.co_qualname}"] = None

    def _meet(self, value: Any) -> None:
        if value is None or isinstance(value, (torch.Tensor, ModuleType, type, tuple, str, int, float, bytes)):
            return
        self._met[id(value)] = value


def _is_op(frame: FrameType) -> bool:
    """Whether the dispatcher called this function as an op."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == _DISPATCH


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
