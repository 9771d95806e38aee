"""When a plan in use is examined next: at steps 1, 2, 4, 8, ... of it, and then as seldom as its share of time allows.

Two things are examined. An audit asks whether a planned step still computes what eager computes
(`hocket.autotune.audit`), and a look whether it is still as fast as its verdict says (`hocket.autotune.looks`). The
first examinations may cost as much as `start_steps` planned steps together, all others `max_share` of the time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field


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
