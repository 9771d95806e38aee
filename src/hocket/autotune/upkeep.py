"""When a plan in use is examined next: at steps 1, 2, 4, 8, ... of it, and then as seldom as its share of time allows.

Two things are examined. An audit asks whether a planned step still computes what eager computes
(`hocket.autotune.audit`), and a look whether it is still as fast as its verdict says. The first examinations may cost
as much as `start_steps` planned steps together, all others `max_share` of the time.

A verdict is a comparison made once, and what it compared changes: another program comes or goes, a processor becomes
warmer, batches become longer. Step times alone show some of it (`hocket.adaptation.drift`), and then plans are searched
again. They do not show an eager step that became faster. So a look times a few eager steps beside the latest planned
ones, or the other way round after "eager" (`hocket.autotune.tuner.Tuner.look`). Where the verdict is not kept, its
plans are compared in full. Looks come at steps 25, 50, 100, ... after the first verdict, and at once where step times
have changed. They may take 0.5% of the time.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field

from hocket.adaptation import Drift, DriftDetector, DriftLimits
from hocket.autotune.decision import Decision
from hocket.autotune.searching import PlanSearch
from hocket.reporting import lower_quartile

# Steps before a look that it compares with its own.
NUM_RECENT = 8
# The first looks may take as long as this number of planned steps, all others this share of the time.
LOOK_STEPS, LOOK_SHARE, FIRST_LOOK = 25, 0.005, 25
# Step times that have changed in this number of windows bring on a look at once, unless the last one is not this number
# of steps ago: the first while the first looks have not taken what they may, then the second.
CHANGED_WINDOWS, SHORT_GAP, LONG_GAP = 2, 50, 200


@dataclass
class Upkeep:
    """The schedule of one kind of examination, by what it has cost so far.

    Example:
        >>> looks = Upkeep(start_steps=10, max_share=0.01, due=2)
        >>> [looks.counts() for _ in range(3)]
        [False, True, True]
        >>> looks.ended(0.021, 0.001); looks.due  # 20 steps more than a planned one: 30 too many at 0.01 each
        3000
    """

    start_steps: float  # planned steps that the first examinations may take together
    max_share: float  # share of the time that all others may take
    due: int = 1  # the step that is examined next
    num_steps: int = 0  # planned steps since the decision
    num_done: int = 0  # how many examinations there were
    _spent_steps: float = 0.0
    _last: int = 0
    _pid: int = field(default_factory=os.getpid)

    def counts(self) -> bool:
        """Count a planned step, and return True if it has to be examined.

        A forked child examines nothing: eager ops on several threads of OpenMP would wait for threads that are gone.
        """
        self.num_steps += 1
        return self.num_steps >= self.due and os.getpid() == self._pid

    @property
    def has_allowance(self) -> bool:
        """True if the first examinations have not taken together what they may."""
        return self._spent_steps < self.start_steps

    def hasten(self, gap: int) -> None:
        """Examine the next step, unless the last examination is less than `gap` steps ago."""
        if self.num_steps - self._last >= gap:
            self.due = self.num_steps + 1

    def ended(self, duration_s: float, step_s: float, num_made: int = 1) -> None:
        """Note what an examination took that made `num_made` steps, where a planned step takes `step_s`."""
        self.num_done += 1
        self._last = self.num_steps
        self._spent_steps += max(duration_s / step_s - num_made, 0.0) if step_s > 0 else 0.0
        each = self._spent_steps / self.num_done
        over = self._spent_steps + each - self.start_steps
        self.due = max(2 * self.num_steps, int(over / self.max_share)) if over > 0 else 2 * self.num_steps


class StepWatch:
    """Follows the steps after a verdict that another search, or a look at the verdict, could turn round."""

    def __init__(self, limits: DriftLimits, *, looks: bool) -> None:
        self.upkeep: Upkeep | None = None  # when the next look is due. None while there is no plan to look at.
        self.recent_ms: deque[float] = deque(maxlen=NUM_RECENT)  # times of the latest steps
        self.has_drifted = False
        self._looks = Upkeep(LOOK_STEPS, LOOK_SHARE, due=FIRST_LOOK) if looks else None
        self._limits = limits
        self._drift: DriftDetector | None = None

    def counts(self) -> int:
        """Count a step. Return how many there were if a look is due now, else 0."""
        if self.upkeep is None or not self.upkeep.counts() or len(self.recent_ms) < NUM_RECENT:
            return 0
        return self.upkeep.num_steps

    def decided(self, decision: Decision, before: Decision, search: PlanSearch) -> None:
        """`search` is over: `decision` stands now, where `before` stood."""
        self.upkeep = self._looks if decision.candidates else None
        if search.is_look and self._looks is not None:
            self._looks.ended(search.spent_s, lower_quartile(self.recent_ms) / 1e3, search.num_calls)
        if not (search.is_look and decision is before):
            self.recent_ms.clear()
            self.has_drifted = False
            self._drift = DriftDetector(decision.expected_ms, search.spent_s * 1e3, self._limits)

    def note(self, step_ms: float) -> Drift | None:
        """Record the time of a step, and return a `Drift` when it is time to search again."""
        if self._drift is None:
            return None
        self.recent_ms.append(step_ms)
        drift = self._drift.observe(step_ms)
        self.has_drifted |= drift is not None
        if drift is None and self._drift.num_departed >= CHANGED_WINDOWS and self.upkeep is not None:
            self.upkeep.hasten(SHORT_GAP if self.upkeep.has_allowance else LONG_GAP)
        return drift
