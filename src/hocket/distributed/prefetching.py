r"""`hocket.prefetch`: let FSDP2 gather parameters ahead, in the order of their use and as memory allows.

Under FSDP the parameters of a unit are gathered before it computes, in the order of their first use, as TicTac orders a
chain. The remaining choice is how far ahead::

    compute  | unit 1 | unit 2 | unit 3 |
    gather     2, 3     4        5              as many as fit into memory beside the unit that computes

FSDP2 itself gathers one unit ahead, in the backward the one that came before in the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hocket.errors import InputError


class Prefetching:
    """The lists that `prefetch` has set, from the end of the first forward on.

    Attributes:
        order: names of the units in the order of their first use, empty before the first forward.
        forward: for each unit those that are gathered after it in the forward. If empty, FSDP2 decides.
        backward: the same for the backward.
    """

    def __init__(self, units: Mapping[str, torch.nn.Module], sizes: Mapping[str, int], memory_bytes: int) -> None:
        self.order: tuple[str, ...] = ()
        self.forward: dict[str, tuple[str, ...]] = {}
        self.backward: dict[str, tuple[str, ...]] = {}
        self._units, self._sizes, self._memory_bytes = dict(units), dict(sizes), memory_bytes
        self._used: dict[str, None] = {}
        root = next(iter(self._units.values()))
        self._hooks: list[Any] = [root.register_forward_hook(self._over)]
        for name, unit in self._units.items():
            self._hooks.append(unit.register_forward_pre_hook(lambda *_, name=name: self._used.setdefault(name)))

    def _over(self, *_: Any) -> None:
        """Set all lists at the end of the first forward, when the order is known."""
        for hook in self._hooks:
            hook.remove()
        self.order = tuple(self._used)
        self.forward = ahead(self.order, self._sizes, self._memory_bytes)
        self.backward = ahead(self.order[::-1], self._sizes, self._memory_bytes)
        for name in self.order:
            unit: Any = self._units[name]
            unit.set_modules_to_forward_prefetch([self._units[other] for other in self.forward[name]])
            unit.set_modules_to_backward_prefetch([self._units[other] for other in self.backward[name]])


def ahead(order: Sequence[str], sizes: Mapping[str, int], memory_bytes: int) -> dict[str, tuple[str, ...]]:
    """Map each unit to those after it that fit into memory together. Units without parameters are left out."""
    found = {}
    for place, name in enumerate(order):
        chosen: list[str] = []
        left = memory_bytes
        for other in order[place + 1 :]:
            left -= sizes[other]
            if left < 0:
                break
            if sizes[other]:
                chosen.append(other)
        found[name] = tuple(chosen)
    return found


def prefetch(fsdp_model: torch.nn.Module, *, memory_bytes: int) -> Prefetching:
    """Let FSDP2 gather the parameters of further units ahead, as many as memory allows.

    The first forward shows in which order units are used. At its end the lists of all units are set
    (``set_modules_to_forward_prefetch`` and ``..._backward_prefetch``). Results stay the same.

    Args:
        fsdp_model: a model to which ``torch.distributed.fsdp.fully_shard`` was applied.
        memory_bytes: memory for parameters that are gathered ahead, beside those of the unit that computes, counted at
            the dtype that they are kept in.

    Returns:
        The lists, which are set at the end of the first forward.

    Raises:
        InputError: a model that FSDP2 does not shard itself, or a negative number of bytes.

    Example:
        >>> for layer in model.layers:  # doctest: +SKIP
        ...     fully_shard(layer)
        >>> fully_shard(model)  # doctest: +SKIP
        >>> hocket.prefetch(model, memory_bytes=2 << 30)  # doctest: +SKIP
    """
    from torch.distributed.fsdp import FSDPModule

    if memory_bytes < 0:
        raise InputError(f"prefetch: expected no negative number of bytes, got {memory_bytes}")
    if not isinstance(fsdp_model, FSDPModule):
        raise InputError(
            f"prefetch: {type(fsdp_model).__name__} is not sharded; call torch.distributed.fsdp.fully_shard on it first"
        )
    units: dict[str, Any] = {n: module for n, module in fsdp_model.named_modules() if isinstance(module, FSDPModule)}
    own = {name: {id(p): p for p in module.parameters()} for name, module in units.items()}
    sizes = {}
    for name in units:
        within = f"{name}." if name else ""
        inner = {key for other in units if other != name and other.startswith(within) for key in own[other]}
        sizes[name] = sum(p.numel() * p.element_size() for key, p in own[name].items() if key not in inner)
    return Prefetching(units, sizes, memory_bytes)
