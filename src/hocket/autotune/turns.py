"""Two contenders in turns, in blocks of the user's own steps, until it is clear which is faster.

The first step of a block finds caches and threads as the other contender left them, and is not counted. The order
within a round is drawn, so that no contender always follows a disturbance of the same period.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain

from hocket.autotune.comparison import speedup_interval
from hocket.reporting import lower_quartile

NUM_ROUNDS = 6
# Where it is not clear after as many, there are more, up to this number of times.
MAX_ATTEMPTS = 6
# Steps of a block.
BLOCK = 4
# The challenger has to be faster by this: less is within what two runs of the same code differ by.
MIN_SPEEDUP = 1.03


class Turns:
    """The turns of an incumbent, which stays in a draw, and a challenger, and the outcome.

    Comparisons within one step have orders of different seeds, so that each is judged alone.
    """

    def __init__(self, incumbent: str, challenger: str, seed: str) -> None:
        # Of the challenger over the incumbent, as a ratio of lower quartiles, and its interval.
        self.speedup = self.low = self.high = 1.0
        self._labels = (incumbent, challenger)
        self._seed = seed
        self._num_attempts = 0
        self._rounds_ms: dict[str, list[list[float]]] = {label: [] for label in self._labels}
        self._left = _turns(self._labels, seed)

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
        self.speedup, self.low, self.high = _speedup(*(self._rounds_ms[label] for label in self._labels))
        self._num_attempts += 1
        if not self.is_clear and self._num_attempts < MAX_ATTEMPTS:
            self._left = _turns(self._labels, f"{self._seed}{self._num_attempts}")


def _speedup(
    incumbent_ms: Sequence[Sequence[float]], challenger_ms: Sequence[Sequence[float]]
) -> tuple[float, float, float]:
    """The speedup of the challenger and its interval, from the times of both by round."""
    speedup = lower_quartile([*chain(*incumbent_ms)]) / lower_quartile([*chain(*challenger_ms)])
    return speedup, *speedup_interval(incumbent_ms, challenger_ms)


def _turns(labels: tuple[str, str], seed: str) -> list[tuple[str, int]]:
    """The contender of each step, and the place of the step in its block."""
    order = random.Random(seed)
    return [(label, place) for _ in range(NUM_ROUNDS) for label in order.sample(labels, 2) for place in range(BLOCK)]
