"""Code that `torch.compile` has made, run as it was written while a step or a forward is recorded.

A mode of torch keeps the compiler from a frame, and then for good. `torch.cond` and `map` would need the compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map


def compiler_of(frame: FrameType) -> str:
    """Return the name of the backend whose code a call of a compiled function runs. It is eager where there is none."""
    from torch._dynamo import eval_frame  # loaded late, with the first optimizer

    callback: Any = eval_frame._callback_from_stance(frame.f_locals.get("callback"))
    return getattr(eval_frame.innermost_backend(callback), "compiler_name", "") if callback else "eager"


@contextmanager
def plain_code(note: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, compiled code runs as it was written, and what `torch.compile` made stays.

    So do functions of `torch.cond` and `map` in this thread.

    Args:
        note: called where such a function draws random numbers, since a backward of torch's draws them again.
    """
    from torch._higher_order_ops.cond import CondOp
    from torch._higher_order_ops.map import MapImpl

    def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
        return (true_fn if pred else false_fn)(*operands)

    def mapped(function: Any, inputs: Any, further: Any) -> Any:
        return tree_map(
            lambda *each: torch.stack(each), *[function(*one, *further) for one in zip(*inputs, strict=True)]
        )

    def by_this_thread(plain: Any, usual: Any) -> Any:
        def called(self: Any, *args: Any) -> Any:
            if threading.get_ident() != here:
                return usual(self, *args)
            before = torch.default_generator.get_state()
            result = plain(*args)
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                draws = not torch.equal(before, torch.default_generator.get_state())
            if draws:
                note("torch.cond or map, in which it draws random numbers")
            return result

        return called

    here, usual = threading.get_ident(), {op: op.__call__ for op in (CondOp, MapImpl)}
    try:
        for op, plain in ((CondOp, cond), (MapImpl, mapped)):
            setattr(op, "__call__", by_this_thread(plain, usual[op]))  # noqa: B010
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for op, call in usual.items():
            setattr(op, "__call__", call)  # noqa: B010
