"""Eager and the best plans in turns, on real steps, until it is clear who is faster.

Each contender runs four steps per round. The first of them is a warm-up and not counted, since caches and threads are
as another contender left them. Beside other programs the warm-up is longer: until threads are spread over cores anew,
which takes about a tenth of a second, steps are up to 16 times as slow. Of steps that take half a second or more one is
counted, not three. The confidence interval of the speedup (eager over the best plan) is computed from whole rounds,
since steps in a row are slow together when another program runs. The comparison ends once the interval excludes 1. If
it never does, the step stays eager.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from hocket.adaptation import CoRun
from hocket.autotune.candidate import Candidate, TimedStep
from hocket.autotune.store import MAX_CORES_OF_OTHERS
from hocket.backends import Backend
from hocket.ir import Timeline
from hocket.profiling.tracer import ENOUGH_MS
from hocket.reporting import lower_quartile

# Two moments of one machine, and a few steps and many, differ by this factor. Of 30 trainings that had the machine for
# themselves 21 kept the interval of their comparison, and 29 one that is wider by as much at both ends.
MOMENTS_DIFFER = 1.1
# 55 trainings ran beside another one: 41 kept an interval that was wider by a tenth, and 47 one that was wider by this.
MOMENTS_DIFFER_BESIDE_OTHERS = 1.2
MIN_ROUNDS = 3
MAX_ROUNDS = 6
STEPS_IN_A_ROW = 4
# Beside other programs a warm-up lasts this long, or has as many steps.
SETTLING_MS, MAX_SETTLING_STEPS = 100.0, 4
# A contender slower than the fastest by this factor leaves after a round.
HOPELESS = 1.4
RESAMPLES = 200
# Rounds of `Turns`, and the factor by which they grow at most while the result is not clear.
NUM_ROUNDS = MAX_ATTEMPTS = 6
# The challenger has to be faster by this: less is within what two runs of the same code differ by.
MIN_SPEEDUP = 1.03


@dataclass(frozen=True)
class StepComparison:
    """Result of a comparison."""

    eager_ms: tuple[float, ...]  # times of eager steps
    # all plans that took part, with the times of their steps. The first is the best one, which was timed in turns with
    # these eager steps to the end. Plans that left earlier may have met another load.
    candidates: tuple[Candidate, ...]
    low: float  # the interval of the speedup of the best one, at this moment
    high: float
    # pairs of ops that ran side by side in the best plan that has such, as they were measured
    co_runs: tuple[CoRun, ...] = ()

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def speedup(self) -> float:
        """Speedup of the best candidate over eager, as a ratio of lower quartiles."""
        return lower_quartile(self.eager_ms) / self.best.rank_ms

    @property
    def is_clear(self) -> bool:
        """True if one is faster: the interval excludes 1."""
        return not self.low <= 1 <= self.high


def compare_steps(
    candidates: Sequence[Candidate], backend: Backend, after_eager: Callable[[], None], settling_ms: float = 0.0
) -> Generator[TimedStep, float, StepComparison]:
    """Compare eager with these candidates. Yields steps to run, and is sent the duration of each."""
    eager_ms: list[list[float]] = []
    rounds_ms: list[list[list[float]]] = [[] for _ in candidates]
    timelines: list[list[Timeline]] = [[] for _ in candidates]
    left = list(range(len(candidates)))
    for round_ in range(MAX_ROUNDS):
        eager_ms.append((yield from take_turn(None, after_eager, settling_ms)))
        for number in left:
            candidate = candidates[number]
            after_each = _keeping(candidate, timelines[number])
            rounds_ms[number].append((yield from take_turn(candidate, after_each, settling_ms)))
            backend.release(candidate.executor)
        quartile_ms = {number: lower_quartile([*chain(*rounds_ms[number])]) for number in left}
        left.sort(key=quartile_ms.__getitem__)
        best = left[0]
        low, high = speedup_interval(eager_ms, rounds_ms[best])
        left = [number for number in left if quartile_ms[number] <= HOPELESS * quartile_ms[best]]
        if round_ + 1 >= MIN_ROUNDS:
            if not low <= 1 <= high:
                break
            left = left[:2]
    measured = tuple(
        replace(candidate, steps_ms=tuple(chain(*rounds)), timelines=tuple(lines))
        for candidate, rounds, lines in zip(candidates, rounds_ms, timelines, strict=True)
    )
    others = sorted((one for number, one in enumerate(measured) if number != best), key=attrgetter("rank_ms"))
    return StepComparison(tuple(chain(*eager_ms)), (measured[best], *others), low, high)


def release_wide(candidate: Candidate, backend: Backend) -> None:
    """Close lanes that would disturb eager steps. Those of one thread do not, and opening them takes milliseconds."""
    if any(lane.width > 1 for lane in candidate.plan.lanes):
        backend.release(candidate.executor)


def take_turn(
    candidate: Candidate | None, after_each: Callable[[], None], settling_ms: float = 0.0
) -> Generator[TimedStep, float, list[float]]:
    """Yield a few steps in a row of a plan, or of eager for None. Return the times of those after the warm-up."""
    warm_up_ms: list[float] = []
    times_ms: list[float] = []
    while len(times_ms) < STEPS_IN_A_ROW - 1 and sum(times_ms) < ENOUGH_MS:
        took_ms = yield TimedStep(candidate.executor, form=candidate.form) if candidate else TimedStep()
        is_settling = sum(warm_up_ms) < settling_ms and len(warm_up_ms) < MAX_SETTLING_STEPS
        is_warm_up = is_settling or not warm_up_ms
        (warm_up_ms if is_warm_up else times_ms).append(took_ms)
        if not is_warm_up or candidate is None:
            after_each()
    return times_ms


def expected_interval(low: float, high: float, cores_of_others: float = 0.0) -> tuple[float, float]:
    """Widen the interval of one moment to the speedup that other moments may have, by what others used of the cores."""
    factor = MOMENTS_DIFFER if cores_of_others <= MAX_CORES_OF_OTHERS else MOMENTS_DIFFER_BESIDE_OTHERS
    return low / factor, high * factor


def speedup_text(speedup: float, expected: tuple[float, float], *details: str) -> str:
    """Return a text such as "0.80x of eager's time (0.69 to 0.93 expected)", with more details in the brackets."""
    slowest, fastest = expected
    within = ", ".join((f"{1 / fastest:.2f} to {1 / slowest:.2f} expected", *details))
    return f"{1 / speedup:.2f}x of eager's time ({within})"


def _keeping(candidate: Candidate, timelines: list[Timeline]) -> Callable[[], None]:
    """Keep the timeline of each counted step, where ops may run side by side."""
    if not (candidate.co_runs and candidate.executor.keeps_time):
        return lambda: None
    return lambda: timelines.append(candidate.executor.timeline())


def speedup_interval(eager_ms: Sequence[Sequence[float]], planned_ms: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the 95% confidence interval of the ratio of lower quartiles, by bootstrap of rounds (Efron 1979).

    Durations are by round, and those of eager and of the plan are of the same rounds.
    """
    draw = random.Random(0)
    rounds = list(zip(eager_ms, planned_ms, strict=True))
    ratios = []
    for _ in range(RESAMPLES):
        eager, planned = zip(*draw.choices(rounds, k=len(rounds)), strict=True)
        ratios.append(lower_quartile([*chain(*eager)]) / lower_quartile([*chain(*planned)]))
    ratios.sort()
    return ratios[RESAMPLES // 40], ratios[-1 - RESAMPLES // 40]


class Turns:
    """Two contenders in turns: an incumbent, which stays in a draw, and a challenger, in the user's own steps.

    The order within a round is drawn, so that no contender always follows a disturbance of the same period. Comparisons
    within one step have orders of different seeds, so that each is judged alone.
    """

    def __init__(self, incumbent: str, challenger: str, seed: str) -> None:
        # The speedup of the challenger over the incumbent, as a ratio of lower quartiles, and its interval.
        self.speedup = self.low = self.high = 1.0
        self._labels = (incumbent, challenger)
        self._seed = seed
        self._num_attempts = 0
        self._rounds_ms: dict[str, list[list[float]]] = {label: [] for label in self._labels}
        self._left = self._drawn()

    @property
    def contender(self) -> str:
        """Label of the contender that makes the next step."""
        return self._left[0][0]

    @property
    def is_over(self) -> bool:
        """True if there are no more turns."""
        return not self._left

    @property
    def is_clear(self) -> bool:
        """True if one is faster than the other."""
        return self.low > 1 or self.high < MIN_SPEEDUP

    @property
    def is_faster(self) -> bool:
        """True if the challenger is faster, and clearly so."""
        return self.is_clear and self.speedup >= MIN_SPEEDUP

    @property
    def incumbent_ms(self) -> tuple[float, ...]:
        """Times of the incumbent's steps."""
        return tuple(chain(*self._rounds_ms[self._labels[0]]))

    def note(self, duration_ms: float) -> None:
        """The contender's step took this time."""
        label, place = self._left.pop(0)
        if place == 1:
            self._rounds_ms[label].append([])
        if place:
            self._rounds_ms[label][-1].append(duration_ms)
        if not self._left:
            self._judge()

    def _judge(self) -> None:
        incumbent_ms, challenger_ms = self._rounds_ms.values()
        self.speedup, self.low, self.high = speedup_of(incumbent_ms, challenger_ms)
        self._num_attempts += 1
        if not self.is_clear and self._num_attempts < MAX_ATTEMPTS:
            self._left = self._drawn()

    def _drawn(self) -> list[tuple[str, int]]:
        """The contender of each step, and the place of the step in its block."""
        order = random.Random(f"{self._seed}{self._num_attempts or ''}")
        blocks = [label for _ in range(NUM_ROUNDS) for label in order.sample(self._labels, 2)]
        return [(label, place) for label in blocks for place in range(STEPS_IN_A_ROW)]


def speedup_of(
    eager_ms: Sequence[Sequence[float]], planned_ms: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """The ratio of lower quartiles, and its interval, from durations by round."""
    speedup = lower_quartile([*chain(*eager_ms)]) / lower_quartile([*chain(*planned_ms)])
    return speedup, *speedup_interval(eager_ms, planned_ms)
