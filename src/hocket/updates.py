"""`hocket.schedule_update`: the update of an optimizer by plan, in a loop that cannot be one step.

The method of the optimizer stays its method: schedulers, scalers and trainers call it, wrap it and look it up as they
do with any other. An update that is faster by itself may slow down what follows, whose data lie in other caches then:
planned and plain updates take turns in the loop, from one update to the next. The planned ones stay unless the loop is
clearly slower with them, twice: their own gain is measured already, in a long loop it is smaller than the noise, and
regions of a compiled model may be searching for plans meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from time import perf_counter
from types import MethodType
from typing import Any

import torch

from hocket.autotune.comparison import expected_interval
from hocket.autotune.decision import Decision
from hocket.autotune.turns import Turns
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
        options: of `hocket.schedule`. Without ``guard`` planned updates stay in any case. The default ``planner`` is
            ``"serial"``: a second lane would save less here than the rest of the loop would lose to its thread.

    Returns:
        The schedule of the updates, which stay planned unless the loop is clearly slower with them. Its ``verdict`` and
        ``why`` say how they run. ``del optimizer.step`` undoes it, and copies and pickles of the optimizer do not have
        it.

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
    update = _Update(fast, plain, options.get("guard", True))

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None:
            return update()
        if not _calls_closure_first(self, plain):
            if not fast.history:
                reason = f"{type(self).__name__}.step gets a closure, which it may call anywhere"
                fast.overrule(Decision("eager", f"{reason}; after loss.backward() step() without one can be planned"))
            return plain(closure)
        with torch.enable_grad():
            loss = closure()
        update()
        return loss

    update_wrapper(step, plain)
    setattr(step, _SCHEDULE, fast)
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return fast


class _Update:
    """The updates of one optimizer: by their schedule, then in turns with plain ones where there is a plan."""

    def __init__(self, fast: Schedule, plain: Callable[[], Any], takes_turns: bool) -> None:
        self._fast, self._plain = fast, plain
        self._stays: Callable[[], Any] | None = None if takes_turns else fast
        self._turns: Turns | None = None
        self._start_s: float | None = None
        self._was_slower = False

    @property
    def contender(self) -> str:
        """The contender whose turn it is. Empty before there are turns and after them."""
        return "" if self._turns is None or self._turns.is_over else self._turns.contender

    def __call__(self) -> Any:
        if self._stays is not None:
            return self._stays()
        if self._turns is None:
            result = self._fast()
            if self._fast.decided:
                is_planned = self._fast.verdict == "planned"
                self._turns, self._stays = (Turns("plain", "planned", ""), None) if is_planned else (None, self._fast)
            return result
        start_s = perf_counter()
        if self._start_s is not None:
            self._turns.note((start_s - self._start_s) * 1e3)
        self._start_s = start_s
        if self._turns.is_over:
            self._decide(self._turns)
            self._start_s = None
            return self()
        return (self._fast if self.contender == "planned" else self._plain)()

    def _decide(self, found: Turns) -> None:
        is_slower = found.high < 1
        if is_slower and not self._was_slower:
            self._was_slower, self._turns = True, Turns("plain", "planned", "again")
            return
        self._stays = self._plain if is_slower else self._fast
        if is_slower:
            low, high = expected_interval(found.low, found.high)
            reason = f"with planned updates the loop is {found.speedup:.2f}x as fast ({low:.2f} to {high:.2f} expected)"
            decision = Decision("eager", reason, found.speedup, found.low, found.high, eager_ms=found.incumbent_ms)
            self._fast.overrule(decision)


def _calls_closure_first(optimizer: torch.optim.Optimizer, plain: Callable[..., Any]) -> bool:
    """True if `plain` calls a closure once, before all else. L-BFGS calls it many times, and hooks may come before."""
    module = type(optimizer).step.__module__
    is_own = getattr(plain, "__func__", None) is type(optimizer).step or hasattr(plain, "_wrapped_by_lr_sched")
    if not is_own or not module.startswith("torch.optim.") or module == "torch.optim.lbfgs":
        return False
    return not runs_hooks(optimizer)
