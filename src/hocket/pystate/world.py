"""Calls of C functions that ask the world outside (clocks, files, sockets), in words."""

from __future__ import annotations

import io
import itertools
import os
from types import FrameType
from typing import Any

from hocket.pystate.origins import frames_from, origin

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
# What these say of the time and the place is no business of the step; nor is where a module was found.
_QUIET = ("linecache.py", "warnings.py", "threading.py", os.path.join("logging", "__init__.py"))


def asked_of_the_world(name: str, module: str | None, owner: Any) -> str:
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


def as_called(asked: str, frame: FrameType) -> str:
    """The function of Python's library that the user's code, or a library's, has called."""
    if not asked.startswith(("posix.", "nt.")):
        return asked
    inner = list(itertools.takewhile(lambda each: origin(each.f_code.co_filename) == "stdlib", frames_from(frame)))
    if not inner:
        return asked
    name = f"{inner[-1].f_globals.get('__name__', '')}.{inner[-1].f_code.co_qualname}"
    return name.replace("genericpath.", "os.path.").replace("posixpath.", "os.path.")


def is_quiet(frame: FrameType, asked: str) -> bool:
    """Return True for a look at the time or a file that tells Python's library where it is."""
    return frame.f_code.co_filename.endswith(_QUIET) and not asked.startswith(tuple(_STREAMING))
