"""Functions that are exchanged while a step is recorded: those that leave the recorder's sight, and the random state's.

The text of a tensor and DLPack note a reason not to capture the step, and do what they always do.
`torch.save` saves plain numbers, which any reader knows.

Reads and writes of the random state are ops, so that a graph holds them. A checkpoint reads the state before its
forward, and puts it back before it makes the same forward again::

    get_rng_state() ──> state ·· dropout ·· backward ·· set_rng_state(state) ·· dropout, with the same numbers

Both ops are among those that draw random numbers, which a plan leaves in their order.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from hocket.tracing.reasons import Reasons
from hocket.tracing.scalars.followed_math import exchanged
from hocket.tracing.scalars.live import plain_of


def exits_noted(reasons: Reasons) -> AbstractContextManager[None]:
    """Note calls of such methods by this thread while the block lasts."""

    def schedules(scheduler: Any) -> None:
        reasons.add("steps a scheduler", type(scheduler).__name__)

    def leaves(tensor: Any) -> None:
        reasons.add("leaves torch", "it is printed, or handed on by DLPack")

    methods: list[tuple[type, str, Callable[[Any], None]]]
    methods = [(torch.Tensor, "__repr__", leaves), (torch.Tensor, "__dlpack__", leaves)]
    if reasons.raises:  # a step that is captured by itself: where they count has not been watched
        kinds = [each for each in vars(lr_scheduler).values() if isinstance(each, type)]
        methods += [
            (each, "step", schedules) for each in kinds if issubclass(each, LRScheduler) and "step" in vars(each)
        ]
    noted = [(kind, name, _noting(vars(kind)[name], note)) for kind, name, note in methods]
    return exchanged([*noted, *((module, "save", _saving(torch.save)) for module in (torch, torch.serialization))])


def _saving(save: Any) -> Any:
    @functools.wraps(save)
    def saved(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return save(_with_plain(obj), *args, **kwargs)

    return saved


def _with_plain(value: Any) -> Any:
    """The value with plain numbers in place of followed ones. What holds none stays the same object."""
    if not isinstance(value, (dict, list)) and type(value) is not tuple:
        return plain_of(value)
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    changed = {key: plain for key, each in items if (plain := _with_plain(each)) is not each}
    if not changed:
        return value
    if type(value) is tuple:
        return tuple(changed.get(place, each) for place, each in items)
    made: Any = copy.copy(value)
    for key, plain in changed.items():
        made[key] = plain
    return made


def _by_this_thread(function: Callable[..., Any], usual: Callable[..., Any]) -> Any:
    """A function for this thread, and the usual one for others, which may train something else meanwhile."""
    here = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == here else usual)(*args, **kwargs)

    return called


def _noting(method: Any, note: Callable[[Any], None]) -> Any:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        note(self)
        return method(self, *args, **kwargs)

    return _by_this_thread(noted, method)


def renaming_noted(note: Callable[[torch.Tensor, torch.Tensor], None]) -> AbstractContextManager[None]:
    """Note each tensor that this thread makes of another one by its class alone, as parameters are: no op is seen."""

    def noted(usual: Callable[..., Any], place: int) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            made = usual(*args, **kwargs)
            note(made, args[place])
            return made

        return _by_this_thread(make, usual)

    make_subclass, as_subclass = noted(torch.Tensor._make_subclass, 1), noted(torch.Tensor.as_subclass, 0)
    methods = {"_make_subclass": staticmethod(make_subclass), "as_subclass": as_subclass}
    return exchanged((torch.Tensor, *each) for each in methods.items())


def _write(state: torch.Tensor) -> None:
    torch.default_generator.set_state(state)


_LIBRARY = torch.library.Library("hocket", "FRAGMENT")
for _schema in ("read_random_state() -> Tensor", "write_random_state(Tensor state) -> ()"):
    _LIBRARY.define(_schema, tags=(torch.Tag.nondeterministic_seeded,))
# Without a tensor among its arguments an op has no device to choose a kernel by.
_LIBRARY.impl("read_random_state", torch.default_generator.get_state, "CompositeExplicitAutograd")
_LIBRARY.impl("write_random_state", _write, "CompositeExplicitAutograd")
READ, WRITE = (getattr(torch.ops.hocket, name).default for name in ("read_random_state", "write_random_state"))


def random_as_ops(on_cpu: bool) -> AbstractContextManager[None]:
    """While this lasts, `torch.get_rng_state` and `torch.set_rng_state` are ops where this thread calls them.

    Only `on_cpu`: a graph of a device holds no op of the host.
    """
    ops = (("get_rng_state", READ), ("set_rng_state", lambda new_state: WRITE(new_state))) if on_cpu else ()
    functions = [(name, _by_this_thread(op, getattr(torch, name))) for name, op in ops]
    return exchanged((owner, name, function) for owner in (torch, torch.random) for name, function in functions)
