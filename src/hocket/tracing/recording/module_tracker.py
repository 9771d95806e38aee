"""Tells which phase of the step and which module an op belongs to, and where optimizers update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class _Hook:
    """A hook of a tracker. Copies and pickles of its module, which the step may make, have one that does nothing."""

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """Do nothing."""


class ModuleTracker:
    """Tells which phase and module the step is in, by hooks on the user's modules and optimizers."""

    def __init__(self, paths: dict[torch.nn.Module, str], optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        # called where the step of an optimizer begins and ends, with the optimizer and whether it begins
        self.on_update: Callable[[torch.optim.Optimizer, bool], None] = lambda optimizer, begins: None
        self._stack: list[str] = []
        self._updating = 0
        self._layer_of_sequence: dict[int, str] = {}
        self._handles = []
        for module, path in paths.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            self._handles.append(module.register_forward_pre_hook(_Hook(partial(self._enter, path)), prepend=True))
            self._handles.append(module.register_forward_hook(_Hook(self._leave), always_call=True))
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(partial(self._update, True)))
            self._handles.append(optimizer.register_step_post_hook(partial(self._update, False)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def here(self) -> tuple[str, str]:
        """Phase and layer of the op that is about to run."""
        node = torch._C._current_autograd_node()
        if self._updating:
            return "update", ""
        if node is not None:
            return "backward", self._layer_of_sequence.get(node._sequence_nr(), "")
        return "forward", self._stack[-1] if self._stack else ""

    def ran(self, layer: str) -> None:
        """Remember which layer the autograd node belongs to that the last forward op made."""
        # An op that makes no node leaves the number where it was; the node belongs to the first op that saw it.
        number: int = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        self._layer_of_sequence.setdefault(number, layer)

    def _enter(self, path: str, *_: Any) -> None:
        self._stack.append(path)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _update(self, begins: bool, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._updating += 1 if begins else -1
        self.on_update(optimizer, begins)
