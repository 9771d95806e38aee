"""Notes at which lines of the code on the stack ops run and numbers are drawn, while C functions are called."""

from __future__ import annotations

import os
from collections import Counter
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch

from hocket.pystate.origins import OURS, TORCH, origin
from hocket.pystate.tokens import DRAWING

# Methods of tensors that look at one, and are no work.
_LOOKS = frozenset(
    (
        *(
            "item",
            "tolist",
            "numpy",
            "detach",
            "cpu",
            "size",
            "dim",
            "numel",
            "stride",
            "is_floating_point",
            "data_ptr",
        ),
        *(
            "is_complex",
            "element_size",
            "storage_offset",
            "untyped_storage",
            "requires_grad_",
            "is_contiguous",
            "get_device",
        ),
        *("__format__", "__repr__", "__len__", "__float__", "__int__", "__bool__"),
    )
)
_MODULES = frozenset(f"torch._C._{name}" for name in ("nn", "linalg", "fft", "special", "sparse", "nested"))
_OPTIM = os.path.join(TORCH, "optim", "")
# The text of a tensor is made by ops.
_TRACING = os.path.join(OURS, "tracing", "")
_TEXT = os.path.join(TORCH, "_tensor_str.py")
_IMPORTING = "<frozen importlib"


class OpLines:
    """Lines of the watched steps so far.

    Attributes:
        trains: those of `ops` where a backward or an optimizer's update ran.
        ops: code and line, of each function of the user's or a library's that was on the stack when an op ran.
        draws: for code and line, how many draws, or fetches by `next`, a step has made there at most.
    """

    def __init__(self) -> None:
        self.ops: set[tuple[CodeType, int]] = set()
        self.trains: set[tuple[CodeType, int]] = set()
        self.draws: Counter[tuple[CodeType, int]] = Counter()
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._drawn: Counter[tuple[CodeType, int]] = Counter()
        self._last: dict[tuple[CodeType, int], FrameType | None] = {}
        self._fetching: FrameType | None = None

    def note(self, frame: FrameType, event: str, function: Any) -> None:
        """A C function is called by a frame, or has returned to it."""
        if event != "c_call":
            if function is next and frame is self._fetching:
                self._fetching = None
            return
        owner = getattr(function, "__self__", None)
        if _is_op(function, owner):
            self._note_op(frame, function.__name__ == "run_backward")
        elif self._fetching is None and issubclass(type(owner), DRAWING):
            self._note_draw(frame)
        elif self._fetching is None and function is next and _is_of_user(frame):
            self._note_draw(frame)
            self._fetching = frame

    def _note_op(self, frame: FrameType | None, trains: bool) -> None:
        found: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _TEXT or (not found and code.co_filename.startswith(_TRACING)):
                return
            trains = trains or code.co_filename.startswith(_OPTIM)
            if _is_of_user(frame):
                found.append((code, frame.f_lineno))
            frame = frame.f_back
        self.ops.update(found)
        if trains:
            self.trains.update(found)

    def _note_draw(self, frame: FrameType | None) -> None:
        """Count a draw where it was asked for: several that one function makes on the way are one."""
        called: FrameType | None = None
        found: list[tuple[tuple[CodeType, int], FrameType | None]] = []
        while frame is not None:
            if frame.f_code.co_filename.startswith(_IMPORTING):
                return  # a module's own, made once
            place = frame.f_code, frame.f_lineno
            if _is_of_user(frame) and (called is None or self._last.get(place) is not called):
                found.append((place, called))
            called, frame = frame, frame.f_back
        for place, called in found:
            self._drawn[place] += 1
            self._last[place] = called
            self.draws[place] = max(self.draws[place], self._drawn[place])


def _is_of_user(frame: FrameType) -> bool:
    return origin(frame.f_code.co_filename) in ("user", "library")


def _is_op(function: Any, owner: Any) -> bool:
    if issubclass(type(owner), torch.Tensor):
        return function.__name__ not in _LOOKS
    if owner is None:
        return getattr(function, "__module__", None) == "torch"
    if type(owner) is ModuleType:
        return owner.__name__ in _MODULES
    return bool(function.__name__ == "run_backward")
