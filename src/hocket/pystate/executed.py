"""Notes which code a step runs: the names by which it can read and write state, and what it asks of the world outside.

State is reached by names: of closures, globals and attributes. Only attributes that executed code names are watched
(all where names are computed, see `ExecutedCode.dynamic`). Two of Python's own hooks report which code runs:

- `sys.setprofile` reports calls of Python and of C functions. Among the latter are clocks, files and sockets: what
  they return is no state that could be watched, so a step that asks them is refused by name. And it reports returns:
  objects in the variables of the user's functions are watched wherever they come from.
- where a profiler owns that hook, `sys.settrace` reports calls of Python functions.

Code of ops that are written in Python (`torch.library`) is not looked at, since a planned step runs it, too. Composite
ones are taken apart, so theirs is. What Python's collector runs (finalizers, callbacks) is no part of the step.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from hocket.errors import CaptureError
from hocket.function_like import keep_from_dynamo
from hocket.heap import collections_held
from hocket.pystate import bytecode, settings
from hocket.pystate.layout import weakly
from hocket.pystate.op_lines import OpLines, watching_frame
from hocket.pystate.origins import OURS, TORCH, origin, user_line
from hocket.pystate.strict import is_strict, reads_text, reads_text_by, strict_function, strict_names
from hocket.pystate.world import as_called, asked_of_the_world, is_quiet
from hocket.sinks import Sink

_SINK = Sink.__call__.__code__  # what it calls is not looked at
_SHOWS = vars(warnings)["_showwarnmsg"].__code__
_DISPATCH = os.path.join(TORCH, "_ops.py")
# What records and walks is no part of the step.
_LOOKING_ON = tuple(OURS + name + os.sep for name in ("tracing", "pystate"))
_IMPORTS = ("<frozen importlib", os.path.join("importlib", ""))
# Python takes plain numbers from them.
_CONVERSIONS = frozenset(("__float__", "__int__", "__index__", "__complex__", "__hash__"))
_OF_TORCH = re.compile(r"torch(?!\._dynamo)")
_EXCHANGED = re.compile("has_torch_function|[gs]et_rng_state")  # while another thread records

# They set the state of a generator of `random`. Nothing sees numpy do so: there the names count.
_SEEDING = (random.Random.seed.__code__, random.Random.setstate.__code__)
_SEEDS = frozenset(("seed", "set_state", "bit_generator"))

# Values that are not worth a look: they cannot change, or are looked at otherwise.
_UNMET = (torch.Tensor, ModuleType, type, tuple, str, int, float, complex, bytes, CodeType, FrameType)


class _CodeFacts:
    """Facts about one piece of code that the hook needs at each event.

    Attributes:
        code: kept alive, so that no other one gets its address.
        owner: of its file.
        of_user: its names count as the user's.
        is_added: its names were counted.
        looks_on: it records or walks, and is no part of the step.
        seeds: it sets the state of a generator of `random`.
    """

    __slots__ = ("code", "is_added", "looks_on", "of_user", "owner", "seeds")

    def __init__(self, code: CodeType, namespace: dict[str, Any]) -> None:
        self.code = code
        self.owner = origin(code.co_filename)
        self.of_user = origin(_file_of(code, namespace)) in ("user", "library")
        self.is_added = False
        self.looks_on = code.co_filename.startswith(_LOOKING_ON)
        self.seeds = code in _SEEDING


@dataclass(frozen=True)
class NamesKnown:
    """The names that counted at some moment.

    Attributes:
        attributes: by which every object is looked at.
        spaces: by the address of a module's dict, its names.
        is_wide: all attributes counted.
    """

    attributes: frozenset[str]
    spaces: Mapping[int, frozenset[str]]
    is_wide: bool

    def count(self, owner: Any, key: Any) -> bool:
        """True if a name of a dict of attributes, or of a module's, was among them."""
        if id(owner) in self.spaces:
            return key in self.spaces[id(owner)]
        return self.is_wide or key in self.attributes


class ExecutedCode:
    """The code that ran while `watching`, over all watched steps.

    Attributes:
        calls_sinks: a watched step has called a sink.
        reads_text: code of the step may read text without calling a method of it.
        lines: where ops ran.
        names: every name and attribute in that code, user code that it refers to included.
        user_names: those of code that is neither torch's nor Python's own.
        user_strings: names that such code spells as strings.
        global_names: for each module (by its ``__dict__``), the global names that such code uses.
        torchs_names: for each module, the names in it that torch's own code calls.
        imports: names of modules, perhaps, that code of the user's imports or looks up.
        world: clocks, files and the like that the last watched step asked, with the user's line.
        dynamic: user functions with `getattr`, `vars` or the like: every attribute counts then.
        asks_types: user functions that compare ``type(x)``: they could tell a live number from a plain one.
        strict: callables that take plain numbers only, with the line: they would refuse a live one.
        persistent: objects that code met in two watched steps running, and so outlive a step.
        met_before: by its address what the last watched step has met, lists and the like by strong references.
        divided: code of which the watched step is a part, which counts only if it runs.
        seeds: code of the user's sets the state of a generator. A step may leave it as the step before has left it.
        restored: generators of which it was seen that the step leaves them as it finds them, by their address.
        asks_draws: what draws or seeds is asked otherwise (see `hocket.pystate.drawn`).
        num_new, num_new_of_user: pieces of code that the last watched step ran for the first time, all and the user's.
        newest: the last such piece of the user's, in words.
    """

    def __init__(self, divided: tuple[CodeType, ...] = ()) -> None:
        self.divided = divided
        self.names: set[str] = set()
        self.user_names: set[str] = set()
        self.user_strings: set[str] = set()
        self.imports: set[str] = set()
        self.global_names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.torchs_names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.world: dict[str, None] = {}
        self.dynamic: dict[str, None] = {}
        self.asks_types: dict[str, None] = {}
        self.strict: dict[str, None] = {}
        self.persistent: dict[int, Any] = {}
        self.codes: set[CodeType] = set()
        self.num_new = self.num_new_of_user = 0
        self.newest = ""
        self.calls_sinks = self.reads_text = self.seeds = self.asks_draws = False
        self.restored: set[int] = set()
        self.lines = OpLines()
        self._met, self.met_before = dict[int, Any](), dict[int, Any]()
        self._warned, self._warned_before = set[str](), set[str]()  # lines that showed a warning in the last two steps
        self._skipped: FrameType | None = None  # runs an op written in Python, or has called the collector
        self._facts: dict[int, _CodeFacts] = {}  # by address: code is slow to hash

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note all code that this thread runs meanwhile.

        Raises:
            CaptureError: a profiler and a debugger own both of Python's hooks.
        """
        set_hook, hook = self._free_hook()
        self.world = {}
        self._warned, self._warned_before = set(), self._warned
        self.reads_text = self.reads_text or set_hook is sys.settrace  # which sees no C functions
        self.num_new_of_user = 0
        self.lines.begin(watching_frame())
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
        self.lines.end()
        self.num_new = len(self.codes) - num_known
        for address, held in self._met.items():
            value = held() if type(held) is weakref.ref and id(held) != address else held
            if value is not None and self.met_before.get(address) is held:
                self.persistent[address] = value
        self.met_before, self._met = self._met, {}

    def _free_hook(self) -> tuple[Callable[[Any], None], Callable[..., Any]]:
        if sys.getprofile() is None:
            return sys.setprofile, self._profiled
        if sys.gettrace() is None:
            return sys.settrace, self._traced
        raise CaptureError("a profiler and a debugger own both of Python's hooks, so the step cannot be watched")

    @property
    def holders(self) -> tuple[Any, ...]:
        """Tables that hold objects of the step because they were met."""
        return self._met, self.met_before, self.persistent

    @property
    def follows_numbers(self) -> bool:
        """False if the step could tell a live number from a plain one."""
        return not self.asks_types and not self.strict

    def names_now(self) -> NamesKnown:
        """The names that count so far."""
        spaces = {address: frozenset(names) for address, (_, names) in self.global_names.items()}
        return NamesKnown(frozenset(self.names & self.user_names), spaces, bool(self.dynamic))

    def add(self, code: CodeType, namespace: dict[str, Any]) -> None:
        """Count the names of `code`, which runs with these globals."""
        file = _file_of(code, namespace)
        if code in self.codes or code.co_name == "<module>" or file.startswith(_LOOKING_ON):
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

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        # It runs at each event, thousands of times a step: what is rare comes last, and what is known is not asked.
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
        if code is _SHOWS:  # or records, under `catch_warnings`
            self._warned.add(line := user_line(caller))
            if line in self._warned_before:  # most are shown once
                self.world[f"for a warning to be shown in each step (a filter may ignore it) at {line}"] = None
        if caller is not None and not _counts(facts, caller):
            self._skipped = frame
        elif not facts.is_added:
            facts.is_added = True
            self.add(code, frame.f_globals)

    def _traced(self, frame: FrameType, event: str, arg: Any) -> None:
        caller: FrameType | None = frame
        while caller is not self.lines.outside and caller is not None:
            if caller.f_code is _SINK:
                self.calls_sinks = True
                return
            if _is_op(caller) and _is_leaf_op(caller):
                return
            caller = caller.f_back
        facts = self._facts_of(frame)
        self.lines.entered(frame, facts.of_user)
        if not facts.is_added:
            facts.is_added = True
            self.add(frame.f_code, frame.f_globals)

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
        if name := strict_function(function):
            self.strict[f"{name} at {user_line(frame)}"] = None
        asked = asked_of_the_world(function.__name__, getattr(function, "__module__", None), owner)
        if not asked or (whose == "stdlib" and is_quiet(frame, asked)):
            return
        self.world[f"{as_called(asked, frame)} at {user_line(frame)}"] = None

    def _meet(self, value: Any) -> None:
        if value is not None and not issubclass(type(value), _UNMET):  # isinstance asks proxies
            self._met[id(value)] = weakly(value)

    def _meet_function(self, code: CodeType) -> None:
        """A function that the dispatcher holds, where no walk over objects would find it."""
        self.persistent |= {id(each): each for each in gc.get_referrers(code) if isinstance(each, FunctionType)}


def _file_of(code: CodeType, namespace: dict[str, Any]) -> str:
    """The file of a piece of code, or of the module of generated code (methods of a dataclass)."""
    file = code.co_filename
    if not file.startswith("<string"):
        return file
    if str(namespace.get("__name__")).startswith("namedtuple_"):
        return "<frozen collections>"
    return namespace.get("__file__") or file  # text that the user runs, where it belongs to no module


def _counts(facts: _CodeFacts, caller: FrameType) -> bool:
    """False for code of Python's own library that runs for torch, or loads a library for it, or is a recorder's."""
    file = caller.f_code.co_filename
    if origin(file) == "stdlib":
        return _is_for_user(caller)
    is_loading = facts.code.co_filename == ctypes.__file__  # NVML, whenever torch asks for a GPU
    return facts.owner != "stdlib" or origin(file) != "torch" or not (is_loading or file.startswith(OURS))


def _is_for_user(frame: FrameType | None) -> bool:
    """True if a frame of Python's own library runs on behalf of the user: not to import a module, and not for torch."""
    caller = frame
    while caller is not None and origin(caller.f_code.co_filename) == "stdlib":
        if caller.f_code.co_filename.startswith(_IMPORTS[0]) or _IMPORTS[1] in caller.f_code.co_filename:
            return False
        caller = caller.f_back
    return caller is frame or caller is None or origin(caller.f_code.co_filename) != "torch"


def _is_op(frame: FrameType) -> bool:
    """Return whether the dispatcher called this function."""
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename == _DISPATCH


keep_from_dynamo(ExecutedCode._profiled)  # called within functions that are compiled, too
keep_from_dynamo(ExecutedCode._traced)


def _is_leaf_op(frame: FrameType) -> bool:
    """Return whether the function is a kernel that a planned step calls. Composite ops were decomposed before."""
    op = None if frame.f_back is None else frame.f_back.f_locals.get("self")
    name = getattr(op, "_qualified_op_name", None) or getattr(getattr(op, "_schema", None), "name", "")
    try:
        return not name or not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return True  # no op of this name
