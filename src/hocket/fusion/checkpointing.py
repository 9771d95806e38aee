"""Activation checkpointing inside of models that are fused.

`torch.utils.checkpoint` calls its function again in the backward. In a trace it would be one op that nothing fuses; in
a template, which gets a model's tensors for the time of a call, it would find none at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["without_checkpoints"]


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """While this is open, a checkpoint calls its function once: the same numbers, and what a backward needs is kept."""
    usual = checkpoint._checkpoint_without_reentrant_generator
    checkpoint.CheckpointFunction.apply = staticmethod(_call)  # type: ignore[method-assign]
    checkpoint._checkpoint_without_reentrant_generator = _nothing_around
    try:
        yield
    finally:
        del checkpoint.CheckpointFunction.apply
        checkpoint._checkpoint_without_reentrant_generator = usual


def _call(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    return function(*args)


def _nothing_around(*_: Any, **__: Any) -> Iterator[None]:
    yield
