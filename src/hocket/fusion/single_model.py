"""A traced model as a plain Python function of one model's tensors: nothing fused, and nothing costs more than in it.

It runs models one after another where fusing does not pay. The tracer has left out the modules around the ops, so a
small op costs less than in the model itself.

Convolutions may get their images with the channels last. oneDNN computes on blocks of channels; images that come plane
by plane it turns around before each convolution and back after it, and what comes out of one with the channels last
stays so until the next. Same numbers in another order in memory; strides are all that a model could see of it. Whoever
calls the model sees nothing of it: what comes out lies as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hocket.errors import HocketError, InputError
from hocket.fusion.program import FusedProgram
from hocket.fusion.rules.base import where
from hocket.fusion.source import ProgramSource
from hocket.fusion.stacked import Stacked, map_tree
from hocket.fusion.steps import Step

__all__ = ["SingleModel", "has_images"]

CHANNELS_LAST = {
    "conv2d": torch.channels_last,
    "conv_transpose2d": torch.channels_last,
    "conv3d": torch.channels_last_3d,
    "conv_transpose3d": torch.channels_last_3d,
}


class SingleModel:
    """One model's program, called with the leaves of its arguments and its tensors by name."""

    def __init__(self, program: FusedProgram, channels_last: bool = False) -> None:
        assert program.models.num_models == 1
        self._program = program
        self._channels_last = channels_last
        self._source = ProgramSource(program)
        for step in program.steps:
            function = step.plain or _by_rule(program, step)
            if channels_last and step.op in CHANNELS_LAST:
                function = _channels_last(function, CHANNELS_LAST[step.op])
            self._source.add(step, function)
        self._run = self._source.function()

    def __call__(self, leaves: list[Any], tensors: Mapping[str, Tensor]) -> Any:
        """The output, of plain tensors."""
        try:
            out = self._run(leaves, tensors.__getitem__)
        except (HocketError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            step = self._source.failed(error)
            if step is None:
                raise
            raise InputError(f"{where(step.layer)}: {step.op}: {error}") from error
        if self._channels_last:
            out = map_tree(out, _as_usual)
        return self._program.traced.unflatten(out)


def has_images(program: FusedProgram) -> bool:
    """Whether a program has convolutions for which it matters where the channels are."""
    return any(step.op in CHANNELS_LAST for step in program.steps)


def _channels_last(function: Callable[..., Any], layout: torch.memory_format) -> Callable[..., Any]:
    dims = 4 if layout is torch.channels_last else 5

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # `contiguous` leaves one channel, or one pixel, as it is, and what follows would lie plane by plane again.
        return function(input.to(memory_format=layout) if input.ndim == dims else input, *args, **kwargs)

    return run


def _as_usual(value: Any) -> Any:
    """A tensor with the channels last, plane by plane again."""
    if not isinstance(value, Tensor) or value.ndim not in (4, 5) or value.is_contiguous():
        return value
    layout = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
    return value.contiguous() if value.is_contiguous(memory_format=layout) else value


def _by_rule(program: FusedProgram, step: Step) -> Callable[..., Any]:
    """A step that has to go through its rule, as of a fused model with one model in it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if step.names:
            args = ({name: Stacked(tensor.unsqueeze(0)) for name, tensor in args[0].items()}, *args[1:])
        return map_tree(program.perform(step, args, kwargs), _only)

    return run


def _only(value: Any) -> Any:
    return value.tensor.squeeze(0) if isinstance(value, Stacked) else value
