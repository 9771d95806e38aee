"""Owners of code (torch, Python, an installed library, or the user), and lines of the user's code."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

# Folders.
TORCH = os.path.dirname(torch.__file__) + os.sep
OPTIM = os.path.join(TORCH, "optim", "")
SCALER = os.path.join(TORCH, "amp", "grad_scaler")
_STDLIB = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})
OURS = str(Path(__file__).parents[1]) + os.sep
_ZOO = os.path.join(OURS, "zoo") + os.sep  # its steps are users' steps


@functools.cache
def origin(file: str) -> str:
    """The owner of a file: ``torch`` (numpy and Hocket too), ``stdlib``, ``library`` or ``user``."""
    if file.startswith((TORCH, "<hocket", "<fused")) or (file.startswith(OURS) and not file.startswith(_ZOO)):
        return "torch"
    root = _library_root(file)
    if root:
        return "torch" if file.startswith(root + os.sep + "numpy" + os.sep) else "library"
    return "stdlib" if file.startswith((*_STDLIB, "<frozen")) else "user"


def _library_root(file: str) -> str:
    """The folder of installed packages that a file is in. Empty if it is in none."""
    for name in ("site-packages", "dist-packages"):
        before, found, _ = file.rpartition(os.sep + name + os.sep)
        if found:
            return before + os.sep + name
    folders = [*site.getsitepackages(), site.getusersitepackages(), *sys.path]
    for folder in sorted(set(folders), key=len, reverse=True):
        if folder and file.startswith(folder + os.sep):
            return folder if _has_packages(folder) else ""
    return ""


@functools.cache
def _has_packages(folder: str) -> bool:
    """True if packages were installed into a folder (``pip install --target``, which PYTHONPATH or a .pth file names).

    A project that is worked on has metadata, too, but no list of installed files: it is the user's.
    """
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return any(
        name == "EGG-INFO"
        or name.endswith(".dist-info")
        or (name.endswith(".egg-info") and os.path.exists(os.path.join(folder, name, "installed-files.txt")))
        for name in names
    )


def is_user_code(code: CodeType) -> bool:
    """True if code is neither Python's, nor torch's, nor that of an installed library."""
    return origin(code.co_filename) == "user"


def frames_from(frame: FrameType | None, end: FrameType | None = None) -> Iterator[FrameType]:
    """Yield a frame and those around it, the innermost first, up to `end`, which is left out."""
    while frame is not None and frame is not end:
        yield frame
        frame = frame.f_back


def user_line(frame: FrameType | None = None) -> str:
    """``train.py:12`` of the innermost frame of the user's, and ``, in layers.py:34`` where that calls a library."""
    of_library = ""
    for each in frames_from(frame or sys._getframe(1)):
        file = each.f_code.co_filename
        whose = "library" if file.startswith("<eval_with_key") else origin(file)  # the former is code of fx
        if whose == "user":
            return f"{Path(file).name}:{each.f_lineno}" + (of_library and f", in {of_library}")
        if whose == "library" and not of_library:
            of_library = f"{Path(file).name}:{each.f_lineno}"
    return of_library or "an unknown line"


def runs_torchs(place: str) -> bool:
    """True if the innermost code of the user's that is running has called code of torch's at this place."""
    files = (each.f_code.co_filename for each in frames_from(sys._getframe(1)))
    inner = itertools.takewhile(lambda file: origin(file) not in ("user", "library"), files)
    return any(file.startswith(place) for file in inner)


def step_line(step: Any, *, returns: bool = False) -> str:
    """``file.py:12`` of a step: where it is defined, or where it returns last."""
    function = inspect.unwrap(step)
    function = getattr(function, "func", function)  # of a partial
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:
        return "an unknown line"
    line, found = code.co_firstlineno, code.co_firstlineno
    for instruction in dis.get_instructions(code) if returns else ():
        line = (instruction.positions and instruction.positions.lineno) or line
        found = line if instruction.opname in ("RETURN_VALUE", "RETURN_CONST") else found
    return f"{Path(code.co_filename).name}:{found}"


def level_of_user() -> int:
    """The number of frames from its caller up to the first one outside of hocket and torch."""
    files = (each.f_code.co_filename for each in frames_from(sys._getframe(1)))
    return 1 + sum(1 for _ in itertools.takewhile(lambda file: origin(file) == "torch", files))
