"""Calls of modules and of `torch.autograd.Function`, which go to the listener of their thread.

Torch has no hook around a whole call of a module that may give another result, so its methods are exchanged while a
thread listens. Several threads may listen, and the methods are put back when the last of them is done.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn


class Listener(Protocol):
    """Makes the calls of one thread."""

    def layer(self, module: nn.Module, usual: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a module. `usual` is ``nn.Module.__call__``."""

    def function(self, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a `torch.autograd.Function`. `apply` is bound to its class."""


class _Current(threading.local):
    listener: Listener | None = None


_current = _Current()
_lock = threading.Lock()
_usual: list[tuple[Any, Any]] = []  # torch's two methods, once for each block that is open


@contextmanager
def calls_given(listener: Listener) -> Iterator[None]:
    """While this is open, such calls of this thread go to `listener`."""
    with _lock:
        _usual.append(_usual[-1] if _usual else _exchange())
    before, _current.listener = _current.listener, listener
    try:
        yield
    finally:
        _current.listener = before
        with _lock:
            call, apply = _usual.pop()
            if not _usual:
                nn.Module.__call__ = call  # type: ignore[method-assign]
                torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _exchange() -> tuple[Any, Any]:
    usual: Any = nn.Module.__call__
    usual_apply: Any = torch.autograd.Function.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listener = _current.listener
        return usual(module, *args, **kwargs) if listener is None else listener.layer(module, usual, args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        listener, function = _current.listener, usual_apply.__get__(None, cls)
        return function(*args, **kwargs) if listener is None else listener.function(function, args, kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    return usual, usual_apply
