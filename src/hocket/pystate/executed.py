"""Notes which code a step runs (see `code_names`), what it asks of the world outside, and which objects it meets.

The hook of `sys.setprofile` reports calls of Python and of C functions. Among the latter are clocks, files and sockets:
what they return is no state that could be watched, so a step that asks them is refused by name. And it reports returns:
objects in the variables of the user's functions are watched wherever they come from.

Code of ops that are written in Python (`torch.library`) is not looked at, since a planned step runs it, too. Composite
ones are taken apart, so theirs is. What Python's collector runs (finalizers, callbacks) is no part of the step.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import os
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.function_like import keep_from_dynamo
from hocket.heap import collections_held
from hocket.pystate import settings
from hocket.pystate.code_names import LOOKING_ON, CodeNames, file_of
from hocket.pystate.layout import weakly
from hocket.pystate.op_lines import OpLines, watching_frame
from hocket.pystate.origins import OURS, TORCH, frames_from, origin, user_line
from hocket.pystate.plain_code import compiler_of
from hocket.pystate.strict import is_strict, reads_text, strict_function
from hocket.sinks import Sink

_SINK = Sink.__call__.__code__  # what it calls is not looked at
_SHOWS = vars(warnings)["_showwarnmsg"].__code__
_DISPATCH = os.path.join(TORCH, "_ops.py")
_COMPILER = os.path.join(TORCH, "_dynamo", "eval_frame.py")
_PLAIN = ("eager", "aot_eager", "hocket")  # backends of torch.compile whose code computes what the user's own does
_IMPORTS = ("<frozen importlib", os.path.join("importlib", ""))

# They set the state of a generator of `random`.
_SEEDING = (random.Random.seed.__code__, random.Random.setstate.__code__)

# Values that are not worth a look: they cannot change, or are looked at otherwise.
_UNMET = (torch.Tensor, ModuleType, type, tuple, str, int, float, complex, bytes, CodeType, FrameType)

# Names of C functions that ask the world outside, and their modules.
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
# Time and place in these modules do not concern the step, nor does the path of a module.
_QUIET = ("linecache.py", "warnings.py", "threading.py", os.path.join("logging", "__init__.py"))


class _CodeFacts:
    """Facts about one piece of code that the hook needs at each event."""

    __slots__ = ("code", "compiles", "is_added", "looks_on", "of_user", "owner", "seeds")

    def __init__(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.code = code  # kept alive, so that no other one gets its address
        self.owner = origin(code.co_filename)  # of its file
        self.of_user = origin(file_of(code, namespace)) in ("user", "library")  # its names count as the user's
        self.is_added = False  # its names were counted
        self.looks_on = code.co_filename.startswith(LOOKING_ON)  # it records or walks, and is no part of the step
        self.seeds = code in _SEEDING  # it sets the state of a generator of `random`
        self.compiles = code.co_name == "compile_wrapper" and code.co_filename == _COMPILER


@dataclass(frozen=True)
class NamesKnown:
    """The names that counted at some moment."""

    attributes: frozenset[str]  # by which every object is looked at
    spaces: Mapping[int, frozenset[str]]  # by the address of a module's dict, its names
    is_wide: bool  # all attributes counted

    def count(self, owner: Any, key: Any) -> bool:
        """True if a name of a dict of attributes, or of a module's, was among them."""
        if id(owner) in self.spaces:
            return key in self.spaces[id(owner)]
        return self.is_wide or key in self.attributes


class ExecutedCode(CodeNames):
    """The code that ran while `watching`, over all watched steps."""

    def __init__(self, divided: tuple[CodeType, ...] = ()) -> None:
        super().__init__()
        self.divided = divided  # code of which the watched step is a part, which counts only if it runs
        # clocks, files and the like that the last watched step asked, with the user's line
        self.world: dict[str, None] = {}
        # objects that code met in two watched steps running, and so outlive a step, or weak references to them
        self.persistent: dict[int, Any] = {}
        self.num_new = 0  # pieces of code that the last watched step ran for the first time
        self.calls_sinks = False  # a watched step has called a sink
        self.compiled = ""  # where it has called code that `torch.compile` has made, which may compute otherwise
        self.asks_draws = False  # what draws or seeds is asked otherwise (see `hocket.pystate.drawn`)
        # generators of which it was seen that the step leaves them as it finds them, by their address
        self.restored: set[int] = set()
        self.lines = OpLines()  # where ops ran
        self._met: dict[int, Any] = {}
        # by its address what the last watched step has met, lists and the like by strong references
        self.met_before: dict[int, Any] = {}
        self._warned, self._warned_before = set[str](), set[str]()  # lines that showed a warning in the last two steps
        self._skipped: FrameType | None = None  # runs an op written in Python, or has called the collector
        self._outer: Callable[..., Any] | None = None  # hook of the watch around this one, or of a profiler
        self._facts: dict[int, _CodeFacts] = {}  # by address: code is slow to hash

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all code that this thread runs meanwhile.

        Raises:
            CaptureError: see `outer_hook`.
        """
        self._outer = outer_hook()
        self.world = {}
        self._warned, self._warned_before = set(), self._warned
        self.num_new_of_user = 0
        self.lines.outside = watching_frame()
        known = len(self.codes)
        with collections_held():
            sys.setprofile(self._profiled)
            try:
                yield
            finally:
                sys.setprofile(self._outer)
                self._noted(known)

    def _noted(self, num_known: int) -> None:
        """Sum up a watched step."""
        self._skipped = None
        self.lines.outside = None
        self.num_new = len(self.codes) - num_known
        self.persistent |= {at: held for at, held in self._met.items() if self.met_before.get(at) is held}
        self.met_before, self._met = self._met, {}

    def outliving(self) -> list[Any]:
        """The objects that code met in two watched steps running. Others may hold them weakly: they may go, too."""
        found = self.persistent.items()
        values = [held() if type(held) is weakref.ref and id(held) != at else held for at, held in found]
        return [value for value in values if value is not None]

    @property
    def holders(self) -> tuple[Any, ...]:
        """Tables that hold objects of the step because they were met."""
        return self._met, self.met_before, self.persistent

    def names_now(self) -> NamesKnown:
        """The names that count so far."""
        spaces = {address: frozenset(names) for address, (_, names) in self.global_names.items()}
        return NamesKnown(frozenset(self.names & self.user_names), spaces, bool(self.dynamic))

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        # It runs at each event, thousands of times a step: what is rare comes last, and what is known is not asked.
        if self._outer is not None:
            self._outer(frame, event, arg)
        facts = self._facts.get(id(frame.f_code)) or self._facts_of(frame)
        if facts.looks_on and event != "call" and self._skipped is None and arg is not gc.collect:
            return
        if event == "c_call":
            self.lines.called(frame, arg)
        if self._skipped is not None:
            if frame is self._skipped and (event == "return" or arg is gc.collect):
                self._skipped = None
            return
        if event == "call":
            self._entered(frame, facts)
        elif event == "c_call":
            if arg is gc.collect:
                self._skipped = frame
            elif facts.owner != "torch":
                self._called(arg, frame, facts.owner)
            elif arg is warnings.warn:
                self.user_names.add("warn")  # where filters are guarded
        elif facts.of_user and event == "return":
            self._meet(arg)
            self.lines.returned(frame)
            for name, value in frame.f_locals.items():
                self._meet(value)
                if is_strict(value):  # closed over
                    self.strict[f"{name} at {user_line(frame)}"] = None

    def _entered(self, frame: FrameType, facts: _CodeFacts) -> None:
        """A function that is written in Python is called."""
        code, caller = facts.code, frame.f_back
        self.lines.entered(frame, facts.of_user)
        if code is _SINK:
            self._skipped, self.calls_sinks = frame, True
            return
        if facts.owner != "torch" and _is_op(frame):
            if _is_leaf_op(frame):
                self._skipped = frame
                return
            self._meet_function(code)
        self.seeds = self.seeds or facts.seeds
        if facts.compiles and (compiler := compiler_of(frame)) not in _PLAIN:
            self.compiled = f"{compiler!r} at {user_line(frame)}"
        if code is _SHOWS:  # or records, under `catch_warnings`
            self._warned.add(line := user_line(caller))
            if line in self._warned_before:  # most are shown once
                self.world[f"for a warning to be shown in each step (a filter may ignore it) at {line}"] = None
        if caller is not None and not _counts(facts, caller):
            self._skipped = frame
        elif not facts.is_added:
            facts.is_added = True
            self.add(code, frame.f_globals)

    def _facts_of(self, frame: FrameType) -> _CodeFacts:
        if id(frame.f_code) not in self._facts:
            self._facts[id(frame.f_code)] = _CodeFacts(frame.f_code, frame.f_globals)
        return self._facts[id(frame.f_code)]

    def _called(self, function: Any, frame: FrameType, whose: str) -> None:
        """A C function is called by code that is not torch's."""
        if whose == "stdlib" and not _is_for_user(frame):
            return
        owner = getattr(function, "__self__", None)
        self._meet(owner)
        self.reads_text = self.reads_text or reads_text(function)
        if function.__name__ in settings.NAMES:  # by another name: of a closure, say
            self.user_names.add(function.__name__)
        is_found = function is not torch.from_numpy or _is_named(function, frame)  # else a recording cannot exchange it
        if name := strict_function(function) if is_found else "torch.from_numpy by another name":
            self.strict[f"{name} at {user_line(frame)}"] = None
        asked = _asked_of_the_world(function.__name__, getattr(function, "__module__", None), owner)
        if not asked or (whose == "stdlib" and _is_quiet(frame, asked)):
            return
        self.world[f"{_as_called(asked, frame)} at {user_line(frame)}"] = None

    def _meet(self, value: Any) -> None:
        if value is not None and not issubclass(type(value), _UNMET):  # isinstance asks proxies
            self._met[id(value)] = weakly(value)

    def _meet_function(self, code: CodeType) -> None:
        """A function that the dispatcher holds, where no walk over objects would find it."""
        self.persistent |= {id(each): each for each in gc.get_referrers(code) if isinstance(each, FunctionType)}


def outer_hook() -> Callable[..., Any] | None:
    """The hook for calls that this thread has already, if any.

    Raises:
        CaptureError: it is that of a profiler written in C, which Python code cannot call.
    """
    found = sys.getprofile()
    if found is not None and not callable(found):
        raise CaptureError("a profiler sees all calls, and no other can meanwhile: profile the step once it is planned")
    return found


def _is_named(function: Any, frame: FrameType) -> bool:
    """True if code calls a function by its own name, or by one of the module that the code is in."""
    names = frame.f_code.co_names
    return function.__name__ in names or any(frame.f_globals.get(name) is function for name in names)


def _counts(facts: _CodeFacts, caller: FrameType) -> bool:
    """False for code of Python's own library that runs for torch, or loads a library for it, or is a recorder's."""
    file = caller.f_code.co_filename
    if origin(file) == "stdlib":
        return _is_for_user(caller)
    is_loading = facts.code.co_filename == ctypes.__file__  # NVML, whenever torch asks for a GPU
    return facts.owner != "stdlib" or origin(file) != "torch" or not (is_loading or file.startswith(OURS))


def _is_for_user(frame: FrameType | None) -> bool:
    """True if a frame of Python's own library runs on behalf of the user: not to import a module, and not for torch."""
    for each in frames_from(frame):
        file = each.f_code.co_filename
        if origin(file) != "stdlib":
            return each is frame or origin(file) != "torch"
        if file.startswith(_IMPORTS[0]) or _IMPORTS[1] in file:
            return False
    return True


def _is_op(frame: FrameType) -> bool:
    """Return whether the dispatcher called this function."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == _DISPATCH


keep_from_dynamo(ExecutedCode._profiled)  # called within functions that are compiled, too


def _is_leaf_op(frame: FrameType) -> bool:
    """Return whether the function is a kernel that a planned step calls. Composite ops were decomposed before."""
    op = None if frame.f_back is None else frame.f_back.f_locals.get("self")
    name = getattr(op, "_qualified_op_name", None) or getattr(getattr(op, "_schema", None), "name", "")
    try:
        return not name or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return True  # no op of this name


def _asked_of_the_world(name: str, module: str | None, owner: Any) -> str:
    """Describe the outside state (clock, file, ...) that a C function reads. Empty if none."""
    if isinstance(owner, io.IOBase) and name in _STREAMING:
        return f"{name} of a {type(owner).__name__}"
    if (name in _CLOCKS and module == "time") or (name in _CALENDAR and isinstance(owner, type)):
        return f"the clock ({name})"
    if module in _WORLD_MODULES and name not in _HARMLESS:
        return f"{module}.{name}"
    if (name in _INPUT and module in ("io", "_io", "builtins")) or (name == "print" and module == "builtins"):
        return name
    return ""


def _as_called(asked: str, frame: FrameType) -> str:
    """The function of Python's library that the user's code, or a library's, has called."""
    if not asked.startswith(("posix.", "nt.")):
        return asked
    inner = list(itertools.takewhile(lambda each: origin(each.f_code.co_filename) == "stdlib", frames_from(frame)))
    if not inner:
        return asked
    name = f"{inner[-1].f_globals.get('__name__', '')}.{inner[-1].f_code.co_qualname}"
    return name.replace("genericpath.", "os.path.").replace("posixpath.", "os.path.")


def _is_quiet(frame: FrameType, asked: str) -> bool:
    """Return True for a look at the time or a file that tells Python's library where it is."""
    return frame.f_code.co_filename.endswith(_QUIET) and not asked.startswith(tuple(_STREAMING))
