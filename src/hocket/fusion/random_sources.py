"""Random generators that a forward may draw from, whose states are what they were after it was traced.

A trace that draws numbers has them as constants, so a forward that does it where no op is recorded has no graph; and
what the models draw afterwards must not depend on whether they have been traced.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hocket.fusion.stacked import unwatched

__all__ = ["default_sources", "is_random_source", "restored_sources"]


def default_sources() -> list[Any]:
    """Those of torch, Python and numpy."""
    found: list[Any] = [torch.default_generator, random]
    if torch.cuda.is_initialized():
        found += torch.cuda.default_generators
    if "numpy" in sys.modules:
        found.append(sys.modules["numpy"].random)
    return found


def is_random_source(value: Any) -> bool:
    """Whether numbers can be drawn from a value, and its state be set: a generator of torch, Python or numpy."""
    return isinstance(value, (torch.Generator, random.Random)) or (
        type(value).__module__.startswith("numpy.random")
        and (hasattr(value, "bit_generator") or hasattr(value, "get_state"))
    )


@contextmanager
def restored_sources(sources: Sequence[Any]) -> Iterator[Callable[[], bool]]:
    """Afterwards these draw what they would have drawn before; gives what says whether they have been drawn from."""
    with unwatched():  # a transform or a tracer would have its own
        states = [_state(source) for source in sources]
        before = list(map(_bytes, states))

    def is_drawn() -> bool:
        with unwatched():
            return before != [_bytes(_state(source)) for source in sources]

    try:
        yield is_drawn
    finally:
        for source, state in zip(sources, states, strict=True):
            _set_state(source, state)


def _state(source: Any) -> Any:
    if hasattr(source, "getstate"):
        return source.getstate()
    return source.get_state() if hasattr(source, "get_state") else source.bit_generator.state


def _set_state(source: Any, state: Any) -> None:
    if hasattr(source, "getstate"):
        source.setstate(state)
    elif hasattr(source, "get_state"):
        source.set_state(state)
    else:
        source.bit_generator.state = state


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
