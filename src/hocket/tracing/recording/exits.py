"""Methods that take a step out of the recorder's sight: a scheduler's `step`, the text of a tensor, DLPack.

While a step is recorded they note a reason not to capture it, and do what they always do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hocket.tracing.reasons import Reasons


@contextmanager
def exits_noted(reasons: Reasons) -> Iterator[None]:
    """Note calls of such methods by this thread while the block lasts."""
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and issubclass(kind, LRScheduler)]

    def schedules(scheduler: Any) -> None:
        reasons.add("steps a scheduler", type(scheduler).__name__)

    def leaves(tensor: Any) -> None:
        reasons.add("leaves torch", "it is printed, or handed on by DLPack")

    methods: list[tuple[type, str, Callable[[Any], None]]]
    methods = [(kind, "step", schedules) for kind in kinds if "step" in vars(kind)]
    methods += [(torch.Tensor, "__repr__", leaves), (torch.Tensor, "__dlpack__", leaves)]
    usual = [(kind, name, vars(kind)[name]) for kind, name, _ in methods]
    try:
        for kind, name, note in methods:
            setattr(kind, name, _noting(vars(kind)[name], note))
        yield
    finally:
        for kind, name, method in usual:
            setattr(kind, name, method)


def _noting(method: Any, note: Callable[[Any], None]) -> Any:
    here = threading.get_ident()

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == here:  # another thread may train something else meanwhile
            note(self)
        return method(self, *args, **kwargs)

    return noted
