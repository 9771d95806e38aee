"""Plans of a fused model's steps, and the choice between them while it trains.

All models at once make every activation B times as large. Where one model's fill the caches already, B models' do not
fit any more, and blocks above 32 MiB cost page faults besides. So a call runs all models at once, or one at a time:

    array(x), then loss, then backward          each model to the end of its backward
    forward 0, forward 1, ... forward B-1       forward 0, loss 0, backward 0
    loss                                        forward 1, loss 1, backward 1
    backward B-1, ... backward 0                ...
    in memory: B models' activations            one model's, in the memory of the one before it

All plans give the same numbers, so each may take real steps: choosing costs only what the slower plans take longer,
not passes of its own. In a search that is short, or of large models, those would be as long as what they save.

    round 1    plan A: 2 steps    plan B: 2 steps    plan C: 2 steps
    round 2    plan A: 2 steps    plan B: 2 steps

The first step of a turn is warm-up, because it finds caches and heap as another plan left them. From the second round
on the order is drawn at random. Otherwise, with several calls in a step or two contests side by side, a plan would
always be timed at the same one of them.

Noise must not decide, and gradients that several plans have laid out differently are slow to add up. So the first plan
is the usual one, and another has to be clearly faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from hocket.errors import HocketError


@dataclass(frozen=True)
class ExecutionPlan:
    """One way to run B models."""

    group_size: int  # models at a time, which is one or B
    per_group_backward: bool = False  # whether each model goes through its loss and backward before the next one begins
    channels_last: bool = False  # whether convolutions of single models get their images with the channels last

    def __str__(self) -> str:
        backward, layout = " with backward" * self.per_group_backward, ", channels last" * self.channels_last
        return f"{self.group_size} at a time{backward}{layout}"


def plans_for(num_models: int, *, with_losses: bool, has_images: bool) -> list[ExecutionPlan]:
    """The plans that are worth a try, the usual one first: all models at once, and images as they come."""
    backward = with_losses and num_models > 1
    plans = [ExecutionPlan(num_models)] if num_models > 1 else []
    plans.append(ExecutionPlan(1, backward))
    return [*plans, ExecutionPlan(1, backward, channels_last=True)] if has_images else plans


TURN = 2
FAILURES = (HocketError, RuntimeError, ValueError, TypeError, LookupError)  # out of memory is a RuntimeError
# Times the fastest step so far: what is slower leaves, after one round and another, until the leader has won. Anything
# may happen between two calls, an evaluation of the models included.
RATIOS = (math.inf, 1.5, 1.3, 1.2, 1.1, 1.1, 1.1, 1.1)
HANDICAP = 1.05  # times what a plan took that is not the usual one


@dataclass
class Choice:
    """The plan that calls of a kind run by."""

    kind: Any  # "forward" or "losses", and what else tells such calls apart but their arguments' shapes
    winner: ExecutionPlan  # the plan that runs from now on, or the fastest so far while the choice is not settled
    times_us: Mapping[ExecutionPlan, float]  # shortest time from a call to the next call, in microseconds, by plan
    is_settled: bool = True  # whether calls have shown which plan it is, or there was only one
    size: int = 0  # how many numbers the arguments have
    is_current: bool = True  # whether the models are still as they were, so that it says something of later calls

    def behind(self) -> dict[ExecutionPlan, float]:
        """Times of the plans as multiples of the fastest time. The winner has 0."""
        fastest_us = min(self.times_us.values(), default=1.0)
        return {plan: us / fastest_us for plan, us in self.times_us.items()} | {self.winner: 0.0}


class PlanContest:
    """Turns of plans, the usual one first, until one is left or has won."""

    def __init__(self, plans: Sequence[ExecutionPlan]) -> None:
        self.times_s = dict.fromkeys(plans, math.inf)  # the fastest step of each, those that have left included
        self._left = list(plans)
        self._turn = list(plans)
        self._rounds = 0
        self._steps = 0
        self._random = random.Random()  # its own: the user's draws stay as they are

    @property
    def plan(self) -> ExecutionPlan:
        return self.leader if self.is_over else self._turn[0]

    @property
    def leader(self) -> ExecutionPlan:
        """The plan of the fastest step so far, where another one than the usual has to be clearly faster."""
        return min(self._left, key=self._compared_s)

    @property
    def is_over(self) -> bool:
        """True if the leader has won."""
        return len(self._left) == 1 or self._rounds == len(RATIOS)

    @property
    def step_s(self) -> float:
        return min(self.times_s.values())

    def leave(self, plan: ExecutionPlan) -> None:
        """Take a plan out that cannot win, unless it is the only one."""
        if plan in self._left and len(self._left) > 1:
            self._left.remove(plan)
            self._turn = [each for each in self._turn if each != plan]
            if not self._turn:
                self._end_round()

    def took(self, seconds: float) -> None:
        self._steps += 1
        if self._steps < TURN:
            return
        plan = self._turn.pop(0)
        self.times_s[plan] = min(self.times_s[plan], seconds)
        self._steps = 0
        if not self._turn:
            self._end_round()

    def _end_round(self) -> None:
        limit_s = RATIOS[self._rounds] * self._compared_s(self.leader)
        self._left = [plan for plan in self._left if self._compared_s(plan) <= limit_s]
        self._rounds += 1
        self._turn = self._random.sample(self._left, len(self._left))

    def _compared_s(self, plan: ExecutionPlan) -> float:
        """The fastest step of a plan, lengthened for all but the usual one of those that are left."""
        return self.times_s[plan] * (1.0 if plan == self._left[0] else HANDICAP)


class Intervals:
    """Time from each call of an array to its next call of any kind, with its own backward and update."""

    def __init__(self) -> None:
        self._contest: PlanContest | None = None
        self._began_s = 0.0

    def begin(self, contest: PlanContest | None) -> None:
        """A call begins, which may be one of a contest."""
        if self._contest is None and contest is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now_s = perf_counter()
        if self._contest is not None and not self._contest.is_over:
            self._contest.took(now_s - self._began_s)
        self._contest, self._began_s = contest, now_s


class ContestedCall:
    """Calls of one kind, run by several plans in turns until one has won by its shortest time from call to call.

    Args:
        make: functions that build the run of each plan, the usual one first.
        choice: is given the leader and the times of all plans.
        intervals: the clock of the array.
        at_least_s: lower bounds: a plan has no turn once another one is faster than its bound.
        guard: restores what a failed call has written.
    """

    def __init__(
        self,
        make: Mapping[ExecutionPlan, Callable[[], Callable[..., Any]]],
        choice: Choice,
        intervals: Intervals,
        at_least_s: Mapping[ExecutionPlan, float],
        guard: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._make = dict(make)
        self._runs: dict[ExecutionPlan, Callable[..., Any]] = {}
        self._choice = choice
        self._intervals = intervals
        self._at_least_s = at_least_s
        self._guard = guard
        self._contest = PlanContest(list(make))
        self._winner: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        """Run the call, by whose turn it is."""
        if self._winner is not None:
            self._intervals.begin(None)
            return self._winner(*args)
        self._intervals.begin(self._contest)
        for plan, least_s in self._at_least_s.items():
            if self._contest.step_s <= least_s:
                self._contest.leave(plan)
        plan, choice = self._contest.plan, self._choice
        choice.winner, choice.is_settled = self._contest.leader, self._contest.is_over
        choice.times_us = {each: time_s * 1e6 for each, time_s in self._contest.times_s.items() if time_s < math.inf}
        if self._contest.is_over:
            self._winner = self._run_by(plan)
            self._runs.clear()  # what the others hold on to is free
            return self._winner(*args)
        if plan in self._runs or plan == next(iter(self._make)):
            return self._run_by(plan)(*args)
        try:
            with self._guard():
                return self._run_by(plan)(*args)
        except FAILURES:  # a forward that sees strides may fail in another layout
            self._contest.leave(plan)
            return self(*args)

    def _run_by(self, plan: ExecutionPlan) -> Callable[..., Any]:
        if plan not in self._runs:
            self._runs[plan] = self._make[plan]()
        return self._runs[plan]
