"""Hill climbing on whole training steps: which width and placement the next step of a profile runs at.

The method is that of `hocket.profiling.hill_climb` (Liu et al., IPDPS 2019, section III-C): widths grow by an interval
while the times of ops fall. Here every step runs all ops one after another on one lane, at the width that the ops which
still climb want next, so that the team of threads does not change within a step. Ops whose climb has ended are measured
along with them::

    step     1, 2   3, 4   5, 6   7, 8   9, 10          each setting twice: the first time threads and caches are new
    width      1      2      5      9     68 (all)
    conv       *      *      *      *      *            fastest at 5: two widths beyond are known, too
    add        *      *      *      *      *            ended at 5

The climb goes on while ops with more than a fiftieth of the step's time still want it: a few small ops whose times
fall by chance would take the whole step to the last width. So on C cores it takes at most ``RUNS * 2 * (MAX_WIDTHS +
1)`` steps, whatever C is, twice because of the two placements where cores share caches: on 16 cores 12 steps, on a
Knights Landing of 68 cores 56. Measuring every width would take 32 and 202.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping

from hocket.ir import Costs, Device, Op, Timeline
from hocket.profiling.hill_climb import HillClimb, Setting

# Up to this many cores, every width that a plan may use is one of 1, 2, 4 and all: there is nothing to climb.
FEW_CORES = 4
# Steps at each setting; the shortest time of an op counts.
RUNS = 2
# The paper's interval, for up to 68 cores; where there are more it grows with them.
INTERVAL = 4
MAX_WIDTHS = 18
# Ops that still climb and together have less than this share of the step do not carry it on.
MIN_SHARE = 0.02


def interval_of(cores: int) -> int:
    """Threads added from one width to the next.

    Example:
        >>> [interval_of(cores) for cores in (8, 68, 128)]
        [4, 4, 8]
    """
    return max(INTERVAL, math.ceil((cores - 1) / (MAX_WIDTHS - 1)))


def climbing(ops: Iterable[Op], device: Device, runs: int = RUNS) -> Generator[Setting, Timeline, Costs]:
    """Yield settings at which whole steps are to run, receive their timelines, and return the costs.

    Args:
        ops: of the step.
        device: its cores, and how many share a cache.
        runs: steps at each setting.
    """
    search = HillClimb(ops, device.cores, interval_of(device.cores), cores_per_cache=device.cores_per_cache)
    while (setting := _next(search, device.cores)) is not None:
        for _ in range(runs):
            timeline = yield setting
            for span in timeline.spans:
                search.record(span.op, setting.width, span.duration_us, setting.affinity)
    return search.costs()


def _next(search: HillClimb, cores: int) -> Setting | None:
    """Return the setting of the next step, the narrowest that enough of the step wants, or None at the end."""
    known_us = search.best_us()
    last = {2, cores}
    for setting, ops in search.wanted.items():
        if not known_us or setting.width in last or _share(ops, known_us) >= MIN_SHARE:
            return setting
    # All cores is what eager runs at, so that is always known.
    measured = {int(width) for durations in search.costs().durations_us.values() for width in durations}
    return Setting(cores) if measured and cores not in measured else None


def _share(ops: Iterable[str], known_us: Mapping[str, float]) -> float:
    total_us = sum(known_us.values())
    return sum(known_us[op] for op in ops) / total_us if total_us else 0.0
