"""Refusals: what a captured step cannot hold, told with the user's line, even where the step swallows the error.

A refusal is raised inside the user's own code, and that code may catch it::

    try:
        value = float(loss)     # refused: the value depends on what the step computes
    except Exception:
        value = 0.0             # the trace would go on along a branch that eager does not take

So the first refusal of a trace is remembered: every op that follows raises it again, and so does the end of the trace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import CaptureError
from hocket.tracing.purity.executed import origin

__all__ = ["Refusals", "exits_refused", "refusal", "remembered_refusals", "schedulers_refused", "user_line"]


class Refusals:
    """The first refusal of one trace."""

    def __init__(self) -> None:
        self.first: CaptureError | None = None

    def check(self) -> None:
        """Raise the first refusal, if there was one."""
        if self.first is not None:
            raise self.first


# One trace is under way at a time in a process; autograd may run a part of it in threads of its own.
_under_way: list[Refusals] = []


@contextmanager
def remembered_refusals() -> Iterator[Refusals]:
    """While this lasts, the first `refusal` is remembered."""
    refusals = Refusals()
    _under_way.append(refusals)
    try:
        yield refusals
    finally:
        _under_way.remove(refusals)


def refusal(reason: str) -> CaptureError:
    """The error to raise where the step does what a graph cannot hold; remembered by the trace that is under way."""
    error = CaptureError(reason)
    if _under_way and _under_way[-1].first is None:
        _under_way[-1].first = error
    return error


def user_line() -> str:
    """``file.py:12`` of the innermost frame of the user's; of an installed library's, where there is none."""
    frame, of_library = sys._getframe(1), ""
    while frame is not None:
        file = frame.f_code.co_filename
        whose = origin(file)
        if whose == "user":
            return f"{Path(file).name}:{frame.f_lineno}"
        if whose == "library" and not of_library:
            of_library = f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return of_library or "an unknown line"


@contextmanager
def schedulers_refused() -> Iterator[None]:
    """While this lasts, a scheduler's `step` in this thread raises a `CaptureError` before it changes anything."""

    def reason(scheduler: Any) -> str:
        return (
            f"the step at {user_line()} calls the step() of a scheduler ({type(scheduler).__name__}); call it after "
            "the training step, not inside it"
        )

    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and issubclass(kind, LRScheduler)]
    with _refused([(kind, "step") for kind in kinds if "step" in vars(kind)], reason):
        yield


@contextmanager
def exits_refused() -> Iterator[None]:
    """While this lasts, methods of tensors that are written in Python and read data below every mode are refused."""

    def reason(tensor: Any) -> str:
        return f"the step at {user_line()} takes a tensor out of torch's sight (it is printed, or handed on by DLPack)"

    with _refused([(torch.Tensor, "__repr__"), (torch.Tensor, "__dlpack__")], reason):
        yield


@contextmanager
def _refused(methods: list[tuple[type, str]], reason: Callable[[Any], str]) -> Iterator[None]:
    """Exchange methods for ones that raise a refusal in this thread; elsewhere they do what they did."""
    here = threading.get_ident()

    def refused(method: Any) -> Any:
        def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != here:
                return method(self, *args, **kwargs)  # somebody else's training, beside the one that is captured
            raise refusal(reason(self))

        return refuse

    usual = [(kind, name, vars(kind)[name]) for kind, name in methods]
    try:
        for kind, name, method in usual:
            setattr(kind, name, refused(method))
        yield
    finally:
        for kind, name, method in usual:
            setattr(kind, name, method)
