"""Modules of torch that check their tensors for ``__torch_function__``, and then compute in another way.

Attention and encoder layers have a fast path in C++ for inference, and avoid it if a tensor has a
``__torch_function__``, as a held one has. To take the same path as for ordinary tensors, their forward first waits for
all tensors that it may check. The hook that waits removes itself before that, because hooks are checked, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class _Gate:
    """A forward pre-hook that waits, and then removes itself and the gates of the modules that its module checks."""

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
        """Share the gate with a copy of the module, which waits for the same tensors."""
        return self


def add_gate(module: torch.nn.Module, waits: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Let the next forward of a module begin with all `waits`, and return a function that removes the gate.

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
    """Return the tensors that the forward of a module checks. Most modules check none."""
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
