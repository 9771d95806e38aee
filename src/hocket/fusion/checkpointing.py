"""Activation checkpointing inside of models that are fused.

`torch.utils.checkpoint` calls its function again in the backward. In a graph it would be one op that nothing fuses. A
module that gets its tensors for the time of a call only would have none when the function is called again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["without_checkpoints"]

_lock = threading.Lock()
_inside: list[
    int
] = []  # threads, each as often as it has entered; while there are any, torch's functions are exchanged


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Call a checkpoint's function once and keep what its backward needs, in this thread only."""
    with _lock:
        if not _inside:
            _exchange()
        _inside.append(threading.get_ident())
    try:
        yield
    finally:
        with _lock:
            _inside.remove(threading.get_ident())
            if not _inside:
                checkpoint._checkpoint_without_reentrant_generator = _around.usual
                del checkpoint.CheckpointFunction.apply


def _exchange() -> None:
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
        return _nothing() if threading.get_ident() in _inside else self.usual(*args, **options)


_around = _Around()


def _nothing() -> Iterator[None]:
    yield
