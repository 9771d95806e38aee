"""A time budget: a bench measures what it can in so many seconds, and names what it left out.

An item begins only where time is left for it. What it will take is guessed from the items of its kind before it: as
long per unit (a model, a layer) as the dearest of them, so a guess is rather too high. The first of a kind begins if
any time is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter


class Budget:
    """So many seconds, from now on.

    Args:
        total_s: how many. All the time there is if None.
        clock: gives seconds.

    Attributes:
        left_out: a line for each item that did not begin, or failed.

    Example:
        >>> budget = Budget(0.0)
        >>> with budget.item("resnet152") as begun:
        ...     begun
        False
        >>> budget.left_out
        {'resnet152': 'resnet152: no time: expected 0 s, 0 s left of 0'}
    """

    def __init__(self, total_s: float | None = None, clock: Callable[[], float] = perf_counter) -> None:
        self.total_s = math.inf if total_s is None else total_s
        self.left_out: dict[str, str] = {}
        self._clock = clock
        self._begin = clock()
        self._dearest_s: dict[str, float] = {}
        self._spent_s: dict[str, float] = {}

    def left_s(self) -> float:
        """Seconds that are left, at least 0."""
        return max(0.0, self.total_s - (self._clock() - self._begin))

    @contextmanager
    def item(
        self,
        what: str,
        *,
        kind: str = "",
        units: float = 1.0,
        share: float = 1.0,
        spared: type[Exception] | tuple[type[Exception], ...] = (),
    ) -> Iterator[bool]:
        """Give whether there is time for an item, and look how long it takes.

        Args:
            what: its name.
            kind: what it is compared with to guess how long it takes.
            units: how large it is.
            share: of the whole budget, for all items of this kind.
            spared: errors that cost this item alone: their first line is noted in `left_out`, and they end here.
        """
        left_s = min(self.left_s(), share * self.total_s - self._spent_s.get(kind, 0.0))
        expected_s = self._dearest_s.get(kind, 0.0) * units
        if left_s <= 0 or expected_s > left_s:
            self.left_out[what] = (
                f"{what}: no time: expected {expected_s:.0f} s, {left_s:.0f} s left of {self.total_s:.0f}"
            )
            yield False
            return
        begin = self._clock()
        try:
            yield True
        except spared as error:
            lines = str(error).splitlines() or [type(error).__name__]
            self.left_out[what] = f"{what}: {lines[0]}"
        finally:
            took_s = self._clock() - begin
            self._spent_s[kind] = self._spent_s.get(kind, 0.0) + took_s
            self._dearest_s[kind] = max(self._dearest_s.get(kind, 0.0), took_s / units)
