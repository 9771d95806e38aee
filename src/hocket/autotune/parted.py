"""The pool of a scheduled step, of which the part that runs ops is planned where the whole cannot be.

A step that prints, steps a scheduler or draws with `random` is refused as a whole: no graph does that. What is refused
stands before its ops or after them, mostly, and may run there as it is (see `hocket.pystate.parts`)::

    refused ---> before (Python) ---> middle: a pool of its own ---> after (Python)

Each part is made once in each call, whatever makes the middle. Where that is refused, too, the whole step stays eager,
for both reasons.
"""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten

from hocket.arguments import spreading
from hocket.autotune.candidate import TunerConfig
from hocket.autotune.pool import MAX_STATES, VariantPool
from hocket.autotune.searching import RefusedCalls
from hocket.autotune.variant import Variant
from hocket.errors import CaptureError
from hocket.pystate.drawn import DrawnAhead, ways
from hocket.pystate.step_parts import StepParts, is_end
from hocket.pystate.watch import PurityWatch

log = logging.getLogger(__name__)

_VALUES = re.compile(r"\([^()]* -> [^()]*\)")  # which differ in each step, where the reason is the same

_OF_BATCH = re.compile(r"tensor (\d+) of its batch|other values into its batch")  # the whole says the latter, too

_Parts = StepParts | DrawnAhead
# Variants of one signature; where there are more, a middle may need fewer.
MAX_UNDIVIDED = 2
# Times that a step is looked at from the beginning, since parts of it were exchanged.
MAX_BEGUN = 4
# Calls of a refused step after which it is looked at once more, and the growth of this number.
LOOK_AGAIN = (1000, 10)


class LastResort(Protocol):
    """Runs a step that was refused."""

    is_eager: bool  # nothing is planned of it, and nothing will be

    def __call__(self, batch: Any) -> Any:
        """One training step."""


class PartedPool:
    """Makes a call by a plan of the step, or of its middle.

    `before_eager` is called before a call that runs the user's own step and nothing else. Given the pool of a step that
    was refused, `for_good` makes what runs the step once it is not looked at any more.
    """

    def __init__(
        self, config: TunerConfig, before_eager: Callable[[], None], for_good: Callable[[VariantPool], LastResort]
    ) -> None:
        self._asked = config
        self._before_eager = before_eager
        self._for_good = for_good
        self._num_begun = 1
        self._reasons: set[str] = set()  # kinds that were said
        self._last_resort: LastResort | None = None
        self._refused_calls = RefusedCalls(*LOOK_AGAIN)
        self._begin()

    def _begin(self) -> None:
        # Refusals of the whole are no news as long as its middle may be planned.
        self._is_open = self._asked.plan is None and self._num_begun <= MAX_BEGUN
        config = replace(self._asked, is_tentative=True, strict=False) if self._is_open else self._asked
        self._whole = VariantPool(config, self._before_eager)
        self._told: Variant | None = None  # whose refusal was said
        self._ways: list[_Parts] = []
        self._parts: _Parts | None = None
        self._middle: VariantPool | None = None
        self._num_calls = 0  # of the user's code within the middle, which have been looked at
        self._why_not = ""  # a middle was refused

    def __call__(self, batch: Any) -> Any:
        """One training step.

        Raises:
            CaptureError: ``strict`` was asked for, and the step cannot be captured. The step was run.
            Exception: whatever the step raises.
        """
        if self._parts is not None and not self._parts.holds:
            log.info("hocket: what the step calls or draws from was exchanged: it is divided anew")
            self.close()
            self._asked.watch.generators.clear()
            self._num_begun += 1
            self._begin()
        if self._middle is not None:
            return self._by_parts(self._middle, batch)
        if self._is_eager_for_good and self._refused_calls.are_many():
            self.close()  # it may be refused for what only begins so: a window that fills, or a cache
            self._begin()
        result = self._whole(batch)
        is_news = self._whole.current.is_refused and self._whole.current is not self._told
        if self._is_open and (is_news or self._whole.num_states > MAX_UNDIVIDED):
            self._divide(batch)
        elif is_news and self._asked.plan is None:
            self._refuse()
        return result

    @property
    def config(self) -> TunerConfig:
        """Configuration of the schedule."""
        return replace(self._whole.config, strict=self._asked.strict, is_tentative=False)

    @property
    def active(self) -> VariantPool:
        """The pool of the whole step, or of its middle."""
        return self._middle or self._whole

    @property
    def current(self) -> Variant:
        """The variant of the last call."""
        return self.active.current

    @property
    def recognised(self) -> Any:
        """Native check that recognised the last call, or None if the call had to be described."""
        return self.active.recognised

    @property
    def parts(self) -> StepParts | DrawnAhead | None:
        """The parts of a step that is divided."""
        return self._parts

    @property
    def python(self) -> str:
        """Lines of the step that run as Python before and after its planned ops. Empty where there are none."""
        return self._parts.lines if self._parts is not None else ""

    def start_anew(self) -> None:
        """Models were dropped, refilled or frozen: every tensor may be another one."""
        self.active.start_anew()

    def close(self) -> None:
        """Close all lanes."""
        self._whole.close()
        if self._middle is not None:
            self._middle.close()

    @property
    def _is_eager_for_good(self) -> bool:
        """True if no batch has a plan, nor a region, and the refusal was no error."""
        last = self._last_resort
        return last is not None and last.is_eager and not self._whole.has_plan and not self._asked.strict

    def _divide(self, batch: Any) -> None:
        """Plan the middle from the next call on, where there is one."""
        watch: PurityWatch = self._asked.watch
        try:
            self._ways = [] if _is_iterator(batch) else ways(watch)
        except Exception as error:  # the step has run, and its source may hold anything
            log.warning("hocket: the step could not be divided; please report it", exc_info=error)
            self._ways = []
        self._next()

    def _next(self) -> None:
        """The next way to divide the step is tried from the next call on."""
        if self._middle is not None:
            self._middle.close()
        self._whole.close()
        self._parts = self._middle = None
        self._num_calls = 0
        if not self._ways:
            self._refuse()
            return
        parts = self._parts = self._ways.pop(0)
        places = self._asked.places.again(())
        config = replace(
            self._asked,
            step=spreading(parts.middle),
            places=places,
            watch=parts.watch((*places.models, *places.optimizers)),
            leaves={},
            strict=False,
            is_tentative=True,
        )
        self._middle = VariantPool(config, lambda: None)
        log.info("hocket: %s; tried without %s", self._whole.current.decision.reason, parts.lines)

    def _refuse(self) -> None:
        """The whole step is planned as it is, or eager."""
        self._is_open = False
        if not self._whole.current.is_refused:
            return
        if self._told is None and self._last_resort is None:
            self._last_resort = self._whole.for_good = self._for_good(self._whole)
        self._told = refused = self._whole.current
        reason = refused.decision.reason
        if self._why_not and self._why_not.partition(";")[0] not in reason:
            reason += f"; with that left out, {self._why_not}"  # else the first cure would not help
            refused.decision = replace(refused.decision, reason=reason)
        if self._asked.strict:
            raise CaptureError(reason)
        kind = _VALUES.sub("", reason)
        if kind not in self._reasons:
            self._reasons.add(kind)
            log.warning("hocket: the step stays eager: %s", reason)

    def _by_parts(self, middle: VariantPool, batch: Any) -> Any:
        parts = self._parts
        assert parts is not None
        own, kept = parts.begin(batch)
        if is_end(kept):
            if parts.is_over:
                self._next()
            return own
        try:
            live = middle(own)
        except BaseException:
            parts.raised()
            raise
        never_settles = middle.num_states > MAX_STATES and bool(self._ways)
        refused = middle.current.is_refused and (not middle.has_plan or never_settles)
        why = middle.current.decision.reason if refused else "it draws otherwise" if parts.was_left else ""
        if not middle.has_plan and _is_held_elsewhere(live, middle.config.watch.executed.holders):
            why = why or "it hands on what it keeps"
        if not middle.has_plan and parts.before is not None and _holds_graph(own):
            why = why or "its first part begins a graph for the backward"
        calls = middle.config.watch.executed.lines.calls
        if len(calls) > self._num_calls and parts.runs_users(calls):
            why = why or "code of yours runs in its backward or its update (a hook?)"
        if middle.is_scattered and self._ways:
            why = why or "what its first part gives is never the same"
        self._num_calls = len(calls)
        if why:
            log.info("hocket: not so: %s", why)
            num_given = len(tree_flatten(batch)[0])  # what the first part gives comes behind them
            if refused and all(place and int(place) < num_given for place in _OF_BATCH.findall(why)):
                self._why_not = why
            if parts.was_left:
                self._ways[:0] = parts.anew()
            try:
                self._next()
            except CaptureError:
                parts.end(batch, kept, live)
                raise
        return parts.end(batch, kept, live)


def _is_iterator(batch: Any) -> bool:
    """True if an argument gives each value once, so that no part of the step may look at it in place of another."""
    return any(hasattr(type(leaf), "__next__") for leaf in tree_flatten(batch)[0])


def _holds_graph(batch: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in tree_flatten(batch)[0])


def _is_held_elsewhere(live: tuple[Any, ...], known: Iterable[Any]) -> bool:
    """True if a list or a dict in `live`, what the middle returned, is held by anything but it and the `known` holders.

    A planned step returns another one.
    """
    waiting: list[Any] = [live]
    found: dict[int, Any] = {}
    holders = {id(live), id(waiting), id(found), *map(id, known)}
    while waiting:
        value = waiting.pop()
        for part in value.values() if isinstance(value, dict) else value:
            if not isinstance(part, (list, dict, tuple)):
                continue
            if id(part) in found:
                return True
            if not isinstance(part, tuple):
                found[id(part)] = part
            holders.add(id(part))
            waiting.append(part)
    if not found:
        return False
    asked = tuple(found.values())  # which Python 3.13 finds, too
    others = (each for each in gc.get_referrers(*asked) if each is not asked and id(each) not in holders)
    return not all(isinstance(holder, FrameType) for holder in others)
