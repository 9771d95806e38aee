"""Regions of a step that stays eager: its own Python runs, its models and optimizers by plan, where that is faster.

A step of which no part may be one graph (it looks at a value, asks a solver, draws a batch between ops) goes through
these stages, with one ordinary training step in each call::

    waiting      eager, until the program has run for as long as an attempt takes
    looking      eager: which modules does the step call, of those given or of their parts, the outermost ones
    searching    modules and updates in their places; regions find plans (see `hocket.dynamo`)
    turns        steps with regions and plain ones, until it is clear which are faster; then with updates alone
    regions, or eager from then on

An attempt costs seconds, of which Dynamo takes most. How long a program will run is not known. One that begins when it
has run as long as the attempt takes costs at most as much again, however early the program ends (the argument of
ski-rental, Karlin et al. 1988).
"""

from __future__ import annotations

import linecache
import logging
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from torch import nn

from hocket.autotune.candidate import TunerConfig
from hocket.autotune.comparison import Turns, expected_interval, speedup_text
from hocket.autotune.decision import Decision
from hocket.autotune.pool import VariantPool
from hocket.pystate.origins import TORCH, origin
from hocket.pystate.watch import PurityWatch
from hocket.reporting import lower_quartile
from hocket.tracing.state import Inventory

log = logging.getLogger(__name__)

# An attempt takes as long: to load Dynamo and search, and for each module to be compiled.
ATTEMPT_S, MODULE_S = 5.0, 0.05
# Calls that are looked on.
NUM_LOOKS = 3
# Models, or parts of models, that a step may call by themselves.
MAX_CALLED = 16
# A line of code that may differentiate twice. The wrapper and the base class of old programs do not.
_TWICE = re.compile(
    r"create_graph|autograd\.grad\(|autograd\.functional|autograd import (?!(Variable|Function)( as \w+)?\s*(#.*)?$)"
)
# Calls in which regions are searched for, and how many times longer than it was thought to take that may be.
MAX_SEARCHED, MAX_OVERRUN = 600, 4.0


class StepRegions:
    """Makes the calls of a step that is eager for good.

    `before_eager` is called before a call that runs the user's own step and nothing else.
    """

    def __init__(self, pool: VariantPool, before_eager: Callable[[], None]) -> None:
        self.is_final = False  # nothing will be tried any more
        self.is_eager = False  # that is so, and no region is planned
        self._pool = pool
        self._before_eager = before_eager
        self._run: Callable[[Any], Any] = self._waiting
        self._attempt_s = self._wait_s = ATTEMPT_S + MODULE_S * len(pool.config.places.modules)
        self._times_s: list[float] = []
        self._spent_s = 0.0
        self._num_searched = 0
        self._parts: Any = None
        self._turns = Turns("eager", "regions", "")
        if not _is_asked_for(pool.config) or not is_suitable(pool.config.places, pool.config.watch):
            self._end()

    def __call__(self, batch: Any) -> Any:
        """One training step."""
        if threading.current_thread() is not threading.main_thread():
            return self._eager(batch)
        return self._run(batch)

    def hurry(self) -> bool:
        """Begin with the next call that runs the step. Return False if nothing will be tried any more."""
        self._wait_s = 0.0
        return not self.is_final and not self._pool.has_plan

    def close(self) -> None:
        """Close all lanes."""
        if self._parts is not None:
            self._parts.close()

    def _eager(self, batch: Any) -> Any:
        self._before_eager()
        return self._pool.config.step(batch)

    def _timed(self, run: Callable[[Any], Any], batch: Any) -> tuple[Any, float]:
        clock = self._pool.config.clock
        start = clock()
        result = run(batch)
        return result, clock() - start

    def _waiting(self, batch: Any) -> Any:
        result, took_s = self._timed(self._eager, batch)
        self._times_s = [*self._times_s[-99:], took_s]
        self._spent_s += took_s
        if self._spent_s >= self._wait_s:
            self._begin()
        return result

    def _begin(self) -> None:
        try:
            from hocket.dynamo.planned_parts import PlannedParts

            self._parts = PlannedParts(self._pool.config)
        except Exception as error:  # noqa: BLE001  # of torch's own compiler, whatever it is
            self._refuse(f"{type(error).__name__}: {error}")
            return
        self._spent_s = 0.0
        self._run = self._looking

    def _looking(self, batch: Any) -> Any:
        with self._parts.looked_on():
            result = self._pool.config.step(batch)
        self._num_searched += 1
        if self._num_searched >= NUM_LOOKS:
            self._num_searched, num_called = 0, len(self._parts.called)
            if 0 < num_called <= MAX_CALLED:
                self._parts.begin()
                self._run = self._searching
            else:
                self._refuse(f"it calls {num_called} modules by themselves" if num_called else "it calls no model")
        return result

    def _searching(self, batch: Any) -> Any:
        result, took_s = self._timed(self._compiled, batch)
        self._num_searched += 1
        self._spent_s += took_s - lower_quartile(self._times_s)
        if self._parts.failure:
            self._refuse(self._parts.failure)
        elif self._parts.is_decided or self._num_searched >= MAX_SEARCHED:
            if self._parts.is_planned:
                self._parts.freeze()
                self._run = self._in_turns
            else:
                self._refuse("none has a plan that is faster")
        elif self._spent_s > MAX_OVERRUN * self._attempt_s:
            self._refuse(f"the search was given up after {self._spent_s:.0f} s")
        return result

    def _in_turns(self, batch: Any) -> Any:
        found = self._turns
        run = self._planned if found.contender == "regions" else self._eager
        result, took_s = self._timed(run, batch)
        found.note(took_s * 1e3)
        if found.is_over:
            words = speedup_text(found.speedup, expected_interval(found.low, found.high))
            if found.is_faster or not self._pool.config.guard:
                self._run, self.is_final = self._planned, True
                self._conclude("regions", words, found)
            elif self._parts.leave_models_plain():
                log.info("hocket: with regions a step takes %s; tried with planned updates alone", words)
                self._turns = Turns("eager", "regions", "updates")
            else:
                self._refuse(words, found)
        return result

    def _compiled(self, batch: Any) -> Any:
        return self._within(self._parts.compiled(), batch)

    def _planned(self, batch: Any) -> Any:
        return self._within(self._parts.planned(), batch)

    def _within(self, parts: AbstractContextManager[None], batch: Any) -> Any:
        try:
            with parts:
                return self._pool.config.step(batch)
        except Exception as error:
            if _is_of_compiler(error):
                self._refuse(f"a step with them raised {type(error).__name__}")
            raise

    def _refuse(self, reason: str, found: Turns | None = None) -> None:
        """The step stays eager for good."""
        self._end()
        self._conclude("eager", reason, found)

    def _end(self) -> None:
        self.close()
        self._parts = None
        self.is_final = self.is_eager = True
        self._run = self._pool.for_good = self._pool.eagerly

    def _conclude(self, kind: str, reason: str, found: Turns | None) -> None:
        variant = self._pool.current
        why = f"{variant.decision.reason}; regions: {reason}"
        if found is None:
            variant.conclude(Decision(kind, why))
        else:
            variant.conclude(Decision(kind, why, found.speedup, found.low, found.high, eager_ms=found.incumbent_ms))


def _is_of_compiler(error: BaseException) -> bool:
    """True if an error has passed through torch's compiler: the user's own step may not have raised it."""
    files = (frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__))
    return any(file.startswith((TORCH + "_dynamo", TORCH + "_functorch")) for file in files)


def is_suitable(places: Inventory, watch: PurityWatch) -> bool:
    """True if regions of a step may be tried."""
    if not places.models or any(entry.get().device.type != "cpu" for entry in places.parameters):
        return False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False  # each rank would decide for itself
    if _takes_gradients_itself(watch.executed.codes):
        return False
    if any(_is_compiled(step) for step in (watch.step, *(each.step for each in places.optimizers))):
        return False
    return all(_is_plain(module) for module in places.modules)


def _is_asked_for(config: TunerConfig) -> bool:
    is_default = config.planner == "auto" and config.plan is None and config.executor == "auto"
    return is_default and not config.strict and config.backend is None


def _takes_gradients_itself(codes: Iterable[CodeType]) -> bool:
    """True if a file of the user's may differentiate twice, perhaps in a step yet to come. A model with norms cannot.

    ``create_graph`` may be given by position, so that any call of `torch.autograd`'s own functions counts.
    """
    files = {code.co_filename for code in codes}
    texts = (linecache.getlines(file) for file in files if origin(file) in ("user", "library"))
    return any(_TWICE.search(line) for lines in texts for line in lines)


def _is_compiled(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    return hasattr(function, "_torchdynamo_orig_callable") and not getattr(function, "_torchdynamo_disable", False)


def _is_plain(module: nn.Module) -> bool:
    """True if a call of this module is its forward and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    is_own = type(module).__call__ is nn.Module.__call__ and type(module)._call_impl is nn.Module._call_impl
    is_compiled = module._compiled_call_impl is not None or type(module).__module__.startswith("torch._dynamo")
    return is_own and not is_compiled and not any(hooks) and not isinstance(module, torch.jit.ScriptModule)
