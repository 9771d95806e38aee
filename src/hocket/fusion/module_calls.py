"""Calls of modules and of `torch.autograd.Function`, which go to the listener of their thread.

Torch has no hook around a whole call of a module that may give another result, so its methods are exchanged while a
thread listens. Several threads may listen, and the methods are put back when the last of them is done.

`torch.utils.checkpoint` is exchanged in the same way inside of models that are fused. It calls its function again in
the backward. In a graph it would be one op that nothing fuses. A module that gets its tensors for the time of a call
only would have none when the function is called again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import checkpoint


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


# Threads, each as often as it has entered; while there are any, torch's functions are exchanged.
_inside: list[int] = []


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Call a checkpoint's function once and keep what its backward needs, in this thread only."""
    with _lock:
        if not _inside:
            _exchange_checkpoints()
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(threading.get_ident())
            if not _inside:
                checkpoint._checkpoint_without_reentrant_generator = _around.usual
                del checkpoint.CheckpointFunction.apply


def _exchange_checkpoints() -> None:
    checkpoint.CheckpointFunction.apply = classmethod(_apply)  # type: ignore[method-assign, assignment]
    _around.usual = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = _around


def _apply(cls: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    if threading.get_ident() in _inside:
        return function(*args)
    return super(checkpoint.CheckpointFunction, cls).apply(function, preserve_rng_state, *args)


class _Around:
    """Stands for the generator around a function that is not reentrant."""

    usual: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _yields_once() if threading.get_ident() in _inside else self.usual(*args, **options)


_around = _Around()


def _yields_once() -> Iterator[None]:
    yield
