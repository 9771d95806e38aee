"""`hocket.schedule_update`: the update of an optimizer by plan, in a loop that cannot be one step.

The method of the optimizer stays its method: schedulers, scalers and trainers call it, wrap it and look it up as they
do with any other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import MethodType
from typing import Any

import torch

from hocket.autotune.decision import Decision
from hocket.errors import InputError
from hocket.session import Schedule, schedule
from hocket.tracing.rerecording import runs_hooks

_SCHEDULE = "_hocket_schedule"


def schedule_update(optimizer: torch.optim.Optimizer, **options: Any) -> Schedule:
    """Run the updates of an optimizer by plan from now on, with eager's bits.

    For loops of which only the models are compiled (``torch.compile(model, backend="hocket")``), such as those of
    trainers. Where a whole step can be planned, `hocket.schedule` gains more.

    Args:
        optimizer: one whose ``step()`` needs no closure. A closure that is given is called first where the optimizer is
            one of torch's, without hooks. With all others, calls with a closure are the optimizer's own.
        options: of `hocket.schedule`. The default ``planner`` is ``"serial"``: a second lane would save less here than
            the rest of the loop would lose to its thread.

    Returns:
        The schedule of the updates. Its ``verdict`` and ``why`` say how they run. ``del optimizer.step`` undoes it, and
        copies and pickles of the optimizer do not have it.

    Raises:
        InputError: this is no optimizer, its updates are scheduled already, or an option cannot be used.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> fast = schedule_update(optimizer, cache=False)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> str(fast.verdict), fast.why
        ('eager', 'not decided yet')
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(f"schedule_update: expected an optimizer of torch's kind, got {type(optimizer).__name__}")
    plain = optimizer.step
    if hasattr(plain, _SCHEDULE):
        raise InputError("schedule_update: the updates of this optimizer are scheduled already")
    fast = schedule(plain, [], optimizer, **{"planner": "serial", **options})

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return fast()
        if not _calls_closure_first(self, plain):
            if not fast.history:
                reason = f"{type(self).__name__}.step gets a closure, which it may call anywhere"
                fast.overrule(Decision("eager", f"{reason}; after loss.backward() step() without one can be planned"))
            return plain(closure)
        with torch.enable_grad():
            loss = closure()
        fast()
        return loss

    update_wrapper(step, plain)
    setattr(step, _SCHEDULE, fast)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return fast


def _calls_closure_first(optimizer: torch.optim.Optimizer, plain: Callable[..., Any]) -> bool:
    """True if `plain` calls a closure once, before all else. L-BFGS calls it many times, and hooks may come before."""
    module = type(optimizer).step.__module__
    is_own = getattr(plain, "__func__", None) is type(optimizer).step or hasattr(plain, "_wrapped_by_lr_sched")
    if not is_own or not module.startswith("torch.optim.") or module == "torch.optim.lbfgs":
        return False
    return not runs_hooks(optimizer)
