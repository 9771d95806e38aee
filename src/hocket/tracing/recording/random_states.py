"""Reads and writes of the random state as ops, so that a graph holds them: activation checkpoints recompute dropout.

A checkpoint reads the state before its forward, and puts it back before it makes the same forward again::

    get_rng_state() ──> state ·· dropout ·· backward ·· set_rng_state(state) ·· dropout, with the same numbers

Both ops are among those that draw random numbers, which a plan leaves in their order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _write(state: torch.Tensor) -> None:
    torch.default_generator.set_state(state)


_LIBRARY = torch.library.Library("hocket", "FRAGMENT")
for _schema in ("read_random_state() -> Tensor", "write_random_state(Tensor state) -> ()"):
    _LIBRARY.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
# Without a tensor among its arguments an op has no device to choose a kernel by.
_LIBRARY.impl("read_random_state", torch.default_generator.get_state, "CompositeExplicitAutograd")
_LIBRARY.impl("write_random_state", _write, "CompositeExplicitAutograd")
READ, WRITE = (getattr(torch.ops.hocket, name).default for name in ("read_random_state", "write_random_state"))


@contextmanager
def random_as_ops(on_cpu: bool) -> Iterator[None]:
    """While this lasts, `torch.get_rng_state` and `torch.set_rng_state` are ops where this thread calls them.

    Only `on_cpu`: a graph of a device holds no op of the host.
    """
    if not on_cpu:
        yield
        return
    here = threading.get_ident()
    usual = torch.get_rng_state, torch.set_rng_state

    def read() -> torch.Tensor:
        return READ() if threading.get_ident() == here else usual[0]()

    def write(state: torch.Tensor) -> None:
        (WRITE if threading.get_ident() == here else usual[1])(state)

    owners: tuple[Any, ...] = (torch, torch.random)
    try:
        for owner in owners:
            owner.get_rng_state, owner.set_rng_state = read, write
        yield
    finally:
        for owner in owners:
            owner.get_rng_state, owner.set_rng_state = usual
