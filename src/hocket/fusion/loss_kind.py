"""What is known of a loss function without calling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from hocket.fusion.shared_objects import held_by

__all__ = ["buffers_in", "kind_of"]

DEPTH = 4  # of functions that hold functions


def kind_of(fn: Callable[..., Any]) -> Any:
    """What tells loss functions apart, and is the same for one that is written anew in each step."""
    return (_code_of(fn), any(map(_trains, _held(fn))))


def buffers_in(fn: Callable[..., Any]) -> list[Tensor]:
    """Of the modules in a loss function."""
    return [buffer for each in _held(fn) if isinstance(each, nn.Module) for buffer in each.buffers()]


def _code_of(fn: Any) -> Any:
    if isinstance(fn, partial):
        return (_code_of(fn.func), *[_code_of(arg) for arg in fn.args if callable(arg)])
    return getattr(fn, "__code__", None) or type(fn)


def _held(fn: Any, depth: int = DEPTH) -> Iterator[Tensor | nn.Module]:
    """Tensors and modules that a loss function brings along, as far as can be seen."""
    if isinstance(fn, (Tensor, nn.Module)):
        yield fn
        return
    if not callable(fn) or not depth:
        return
    held = [getattr(fn, "__self__", None), *held_by(fn)]
    if isinstance(fn, partial):
        held += [fn.func, *fn.args, *fn.keywords.values()]
    for each in held:
        if isinstance(each, (Tensor, nn.Module)):
            yield each
        elif callable(each):
            yield from _held(each, depth - 1)


def _trains(held: Tensor | nn.Module) -> bool:
    if isinstance(held, Tensor):
        return held.requires_grad
    return any(param.requires_grad for param in held.parameters())
