"""Notes at which instructions of the code on the stack ops run, while C functions are called."""

from __future__ import annotations

import dis
import functools
import os
import sys
from collections.abc import Collection
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_GENERATOR
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from hocket.pystate.apart import Reach, reach_of
from hocket.pystate.origins import OPTIM, OURS, TORCH, frames_from, origin

# Methods of tensors that look at one, and are no work.
_LOOKS = frozenset(
    (
        "item", "tolist", "numpy", "detach", "cpu", "size", "dim", "numel", "stride", "is_floating_point", "data_ptr",
        "is_complex", "element_size", "storage_offset", "untyped_storage", "requires_grad_", "is_contiguous",
        "get_device", "__format__", "__repr__", "__len__", "__float__", "__int__", "__bool__",
    )
)  # fmt: skip
# Methods of torch's that call the user's: of data sets and loaders.
_LOADING = frozenset(("__getitem__", "__iter__", "__next__"))
_CACHE = dis.opmap["CACHE"]
_CALLS = frozenset(dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "PRECALL") if name in dis.opmap)
_MODULES = frozenset(f"torch._C._{name}" for name in ("nn", "linalg", "fft", "special", "sparse", "nested"))
# The text of a tensor is made by ops.
_TRACING = os.path.join(OURS, "tracing", "")
_TEXT = os.path.join(TORCH, "_tensor_str.py")
_CONTEXTS = contextmanager.__code__.co_filename
_OF_USER = ("user", "library")


# Line and column of an instruction, as the nodes of a syntax tree count them. Without columns (``python -X
# no_debug_ranges``), it stands for its line.
Place = tuple[int, int | None]


@dataclass(frozen=True)
class SourceSpan:
    """A part of the source, from its first character to the one after its last."""

    line: int
    column: int
    end_line: int
    end_column: int

    def covers(self, place: Place) -> bool:
        line, column = place
        if column is None:
            return self.line <= line <= self.end_line
        return (self.line, self.column) <= (line, column) < (self.end_line, self.end_column)


class OpLines:
    """Instructions of the watched steps so far, each as its code and its offset in it (see `places`)."""

    def __init__(self) -> None:
        # of each function of the user's or a library's that was on the stack when an op ran
        self.ops: set[tuple[CodeType, int]] = set()
        self.trains: set[tuple[CodeType, int]] = set()  # those of `ops` where a backward or an optimizer's update ran
        # those where a function of the user's or a library's was called, by torch perhaps
        self.calls: set[tuple[CodeType, int]] = set()
        # for code that trains, its local names and what they led to when it returned last
        self.bound: dict[CodeType, dict[str, Reach]] = {}
        # of each function of the user's or a library's, those that are no call and have called a function that is
        # written in Python: a property, an operator, an iterator
        self.unseen: set[tuple[CodeType, int]] = set()
        self.outside: FrameType | None = None  # the frame within which the watched step runs. None where none does.

    def entered(self, frame: FrameType, of_user: bool) -> None:
        """A function that is written in Python is called, one of the user's or of a library's perhaps."""
        caller = frame.f_back
        if of_user:
            self._note_call(caller)
        if caller is None or caller is self.outside or _role(caller.f_code.co_filename) not in _OF_USER:
            return
        if _role(frame.f_code.co_filename) == "torch" and frame.f_code.co_name not in _LOADING:
            return  # attributes of modules, arithmetic of tensors
        code, place = caller.f_code.co_code, caller.f_lasti
        while code[place] == _CACHE and place > 0:
            place -= 2
        if code[place] not in _CALLS:
            self.unseen.add((caller.f_code, caller.f_lasti))

    def called(self, frame: FrameType, function: Any) -> None:
        """A C function is called by a frame."""
        owner: Any = getattr(function, "__self__", None)
        kind = type(owner)
        if kind is ModuleType:
            is_op = owner.__name__ in _MODULES
        elif owner is None:
            is_op = getattr(function, "__module__", None) == "torch"
        elif issubclass(kind, torch.Tensor):
            is_op = function.__name__ not in _LOOKS
        else:
            is_op = function.__name__ == "run_backward"
        if is_op:
            self._note_op(frame, kind is not ModuleType and function.__name__ == "run_backward")

    def returned(self, frame: FrameType) -> None:
        """A function of the user's or of a library's returns."""
        if any(code is frame.f_code for code, _ in self.trains):
            with torch._C.DisableTorchFunction():
                self.bound[frame.f_code] = {name: reach_of(value) for name, value in frame.f_locals.items()}

    def _note_call(self, frame: FrameType | None) -> None:
        own = (each for each in frames_from(frame, self.outside) if _role(each.f_code.co_filename) in _OF_USER)
        self.calls.update((each.f_code, each.f_lasti) for each in own)

    def _note_op(self, frame: FrameType | None, trains: bool) -> None:
        found: list[tuple[CodeType, int]] = []
        for each in frames_from(frame, self.outside):
            role = _role(each.f_code.co_filename)
            if role == "text" or (role == "tracing" and not found):
                return
            if role == "optimizer":
                trains = True
            elif role in _OF_USER:
                found.append((each.f_code, each.f_lasti))
        self.ops.update(found)
        if trains:
            self.trains.update(found)


def places(instructions: Collection[tuple[CodeType, int]], code: CodeType) -> set[Place]:
    """Return where in the source those of the instructions stand that are the code's own."""
    offsets = {offset // 2 for each, offset in instructions if each is code}
    return {(line or 0, column) for n, (line, _, column, _) in enumerate(code.co_positions()) if n in offsets}


def watching_frame() -> FrameType | None:
    """The frame that has begun to watch: those around it are no part of the step."""
    codes = ((each, each.f_code) for each in frames_from(sys._getframe(1)))
    return next((each for each, c in codes if not c.co_flags & CO_GENERATOR and c.co_filename != _CONTEXTS), None)


@functools.cache
def _role(file: str) -> str:
    """The owner of a file, or what its code does."""
    if file == _TEXT:
        return "text"
    for role, folder in (("tracing", _TRACING), ("optimizer", OPTIM)):
        if file.startswith(folder):
            return role
    return origin(file)
