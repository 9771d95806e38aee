"""How much of this process's CPUs anybody has used, by the system's own counters."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

__all__ = ["CpuUse", "cpu_ticks"]

PROC_STAT = Path("/proc/stat")
# Columns of a line of /proc/stat: user nice system idle iowait irq softirq steal; guests are in user and nice already.
IDLE = (3, 4)
COLUMNS = 8


class CpuUse:
    """The use of the CPUs that this process may run on, since it was last asked for."""

    def __init__(self) -> None:
        self._last = cpu_ticks(os.sched_getaffinity(0))

    def since_last(self) -> float | None:
        """A share between 0 and 1, of this process and all others together; None where the system does not say."""
        before, self._last = self._last, cpu_ticks(os.sched_getaffinity(0))
        if before is None or self._last is None or self._last[1] <= before[1]:
            return None
        return min(1.0, max(0.0, (self._last[0] - before[0]) / (self._last[1] - before[1])))


def cpu_ticks(cpus: Collection[int], stat: Path = PROC_STAT) -> tuple[int, int] | None:
    """Ticks that some CPUs were busy, and all their ticks, since the system began; None where it does not say."""
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
