"""Modules of torch that ask whether their tensors are special, and if so compute in another way.

Attention and encoder layers have a fast path in C++ for inference, and leave it where some tensor has a
``__torch_function__``, as a held one has. So that they take the way that they take for ordinary tensors, their forward
waits at its beginning for all that it may ask about. The hook is gone before it asks: it asks about hooks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

__all__ = ["add_gate", "asked_about"]


class _Gate:
    """A forward pre-hook that waits, and removes itself and those of the modules that its own asks about."""

    def __init__(self, waits: Sequence[Callable[[], object]]) -> None:
        self._waits = tuple(waits)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for wait in self._waits:
            wait()
        _remove(module)
        asking = _asking(module)
        for part in () if asking is None else asking.modules():
            _remove(part)

    def __deepcopy__(self, memo: Any) -> _Gate:
        """A copy of the module waits for the same, and goes through its own forward."""
        return self


def add_gate(module: torch.nn.Module, waits: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Let the next forward of a module begin with all `waits`; returns what removes that.

    Example:
        >>> layer = torch.nn.MultiheadAttention(2, 1)
        >>> remove = add_gate(layer, [lambda: print("waits")])
        >>> for _ in range(2):
        ...     _ = layer(*[torch.ones(1, 1, 2)] * 3)
        waits
    """
    module.register_forward_pre_hook(_Gate(waits), prepend=True)
    return partial(_remove, module)


def asked_about(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that the forward of a module asks about; none for most modules."""
    asking = _asking(module)
    return [] if asking is None else list(dict.fromkeys((*asking.parameters(), *asking.buffers())))


def _asking(module: torch.nn.Module) -> torch.nn.Module | None:
    if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
        return module
    return next(iter(module.layers), None) if isinstance(module, torch.nn.TransformerEncoder) else None


def _remove(module: torch.nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Gate):
            module._forward_pre_hooks.pop(key, None)
