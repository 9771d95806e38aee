"""Use of the CPUs that a process may run on, by itself and by other programs. Linux only, else unknown."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from time import process_time

PROC_STAT = Path("/proc/stat")
# Columns of a line of /proc/stat: user nice system idle iowait irq softirq steal. Guests are in user and nice already.
IDLE = (3, 4)
COLUMNS = 8
# Ticks, of 10 ms as a rule, that must have passed for a use to mean anything.
MIN_TICKS = 5


class CpuUse:
    """Measures the use of the CPUs that this process may run on."""

    def __init__(self) -> None:
        self._last = _ticks()
        self._own_s = process_time()

    def since_last(self) -> float | None:
        """The share of time, from 0 to 1, that the CPUs were busy since the last call, or None if it is unknown."""
        before, self._last = self._last, _ticks()
        self._own_s = process_time()
        if before is None or self._last is None or self._last[1] <= before[1]:
            return None
        return min(1.0, max(0.0, (self._last[0] - before[0]) / (self._last[1] - before[1])))

    def cores_of_others(self) -> float:
        """The cores that other programs used on average since the last call of `since_last`. 0 if it is unknown."""
        now, own_s = _ticks(), process_time() - self._own_s
        if self._last is None or now is None:
            return 0.0
        num_cpus = len(os.sched_getaffinity(0))
        passed = (now[1] - self._last[1]) / num_cpus
        if passed < MIN_TICKS:
            return 0.0
        return max(0.0, (now[0] - self._last[0] - own_s * os.sysconf("SC_CLK_TCK")) / passed)


def cpu_ticks(cpus: Collection[int], stat: Path = PROC_STAT) -> tuple[int, int] | None:
    """Busy ticks and all ticks of some CPUs since the system began, or None if the system does not report them."""
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return None
    wanted = {f"cpu{cpu}" for cpu in cpus}
    rows = [list(map(int, line.split()[1 : COLUMNS + 1])) for line in lines if line.split(" ", 1)[0] in wanted]
    if not rows or any(len(row) < COLUMNS for row in rows):
        return None
    whole = sum(map(sum, rows))
    return whole - sum(row[column] for row in rows for column in IDLE), whole


def _ticks() -> tuple[int, int] | None:
    return cpu_ticks(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
