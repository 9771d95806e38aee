"""Hill climbing: the width at which an op is fastest, found in a few training steps.

Threads help an op up to some width, then spawning and feeding them costs more than they do, so its time over its width
falls and then rises: one valley, no local minimum that is not the global one (1,025 ops of four networks, Liu et al.:
"Runtime Concurrency Control and Operation Scheduling for High Performance Neural Network Training", IPDPS 2019,
section III-C). So: start at one thread, add `interval` threads a step until the time rises or the cores end, and take
the width before the rise. Between measured widths the time is assumed to be linear::

    us |*                                     * measured, interval 4
       |                                      . interpolated
       |  .
       |    *                     *           the time rises from 9 to 13: the climb ends there,
       |      . . * . . . * . .               and 9 threads it is
       +--1---5---9---13---------- width

Where cores share a cache, each width is measured twice: with neighbouring threads together in a cache (``compact``)
and, while there are enough caches, each thread alone in one (``scatter``).

All ops climb at once, each one width a step, in real training steps: none is thrown away. Ops of one kind (the same
kernel, flops and bytes) climb together. One thing is added to the paper's method: an op whose climb has ended spends
two more steps, one at 2 threads and one at all cores. The first takes away most of the error of interpolation, since
nowhere does the time fall as steeply as from one thread to the next few. Without the second nothing would be known
beyond the climb's end, and all cores is what eager runs at. ``also=()`` leaves both out.

`climbing` does this in whole training steps. Every step runs all ops one after another on one lane, at the width that
the ops which still climb want next, so that the team of threads does not change within a step. Ops whose climb has
ended are measured along with them::

    step     1, 2   3, 4   5, 6   7, 8   9, 10          each setting twice: the first time threads and caches are new
    width      1      2      5      9     68 (all)
    conv       *      *      *      *      *            fastest at 5: two widths beyond are known, too
    add        *      *      *      *      *            ended at 5

It goes on while ops with more than a fiftieth of the step's time still want it: a few small ops whose times fall by
chance would take the whole step to the last width. So on C cores it takes at most ``RUNS * 2 * (MAX_WIDTHS + 1)``
steps, whatever C is, twice because of the two placements where cores share caches: on 16 cores 12 steps, on a Knights
Landing of 68 cores 56. Measuring every width would take 32 and 202.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Device, Op, Timeline

COMPACT, SCATTER = "compact", "scatter"
# Up to this many cores, every width that a plan may use is one of 1, 2, 4 and all: there is nothing to climb.
FEW_CORES = 4
# Steps at each setting; the shortest time of an op counts.
RUNS = 2
# The paper's interval, for up to 68 cores; where there are more it grows with them.
INTERVAL = 4
MAX_WIDTHS = 18
# Ops that still climb and together have less than this share of the step do not carry it on.
MIN_SHARE = 0.02


class Setting(NamedTuple):
    """The number of threads of an op, and their affinity: neighbours in one cache, or each in another one."""

    width: int
    affinity: str = COMPACT


class HillClimb:
    """The climbs of all ops of a step, at the same time.

    Args:
        ops: the ops, such as ``graph.ops``.
        cores: cores of the machine.
        interval: threads added a step. The paper chooses 4.
        cores_per_cache: cores that share their last private cache, 2 on a Knights Landing tile.
        also: widths that every op is measured at after its climb. Defaults to 2 and all cores.
        tolerance: the share by which the time must rise above the best so far to end a climb. 0 is the paper's. On a
            noisy machine a few percent keep a climb from ending on a flat slope.

    Raises:
        InputError: a number below 1, a width beyond the cores, a negative tolerance, or an op named twice.
    """

    def __init__(
        self,
        ops: Iterable[Op],
        cores: int,
        interval: int = 4,
        *,
        cores_per_cache: int = 1,
        also: Iterable[int] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        numbers = {"cores": cores, "interval": interval, "cores_per_cache": cores_per_cache}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"hill climb: expected {name} to be a whole number >= 1, got {value!r}")
        if not 0 <= tolerance < math.inf:
            raise InputError(f"hill climb: expected a tolerance >= 0, got {tolerance!r}")
        self._widest, self._interval, self._tolerance = cores, interval, tolerance
        self._also = tuple(sorted({min(2, cores), cores})) if also is None else tuple(also)
        for width in self._also:
            if not 1 <= width <= cores:
                raise InputError(f"hill climb: expected also to name widths from 1 to {cores}, got {width!r}")
        # One core a cache: there is nothing to choose. Otherwise a thread can be alone in a cache while caches last.
        self._caches = cores // cores_per_cache if cores_per_cache > 1 else 0
        self._samples: dict[tuple[str, float, float], dict[Setting, list[float]]] = {}
        self._of: dict[str, dict[Setting, list[float]]] = {}
        for op in ops:
            if op.name in self._of:
                raise InputError(f"hill climb: op {op.name!r} is named twice")
            self._of[op.name] = self._samples.setdefault((op.target, op.flops, op.size_bytes), {})

    @property
    def wanted(self) -> dict[Setting, tuple[str, ...]]:
        """Map settings to the ops to measure there next: those whose climb goes on, or lacks one of the `also`."""
        next_of = {id(samples): self._next(samples) for samples in self._samples.values()}
        found: dict[Setting, list[str]] = {}
        for op, samples in self._of.items():
            setting = next_of[id(samples)]
            if setting is not None:
                found.setdefault(setting, []).append(op)
        return {setting: tuple(found[setting]) for setting in sorted(found)}

    def record(self, op: str, width: int, duration_us: float, affinity: str = COMPACT) -> None:
        """Record one measurement, requested or not. Of several at the same setting the shortest counts."""
        samples = self._of.get(op)
        if samples is None:
            raise InputError(f"hill climb: no op {op!r} to record a duration for")
        if not 1 <= width <= self._widest:
            raise InputError(f"hill climb: op {op!r}: expected a width from 1 to {self._widest}, got {width!r}")
        setting = Setting(width, affinity)
        if setting not in self._settings(width):
            names = " or ".join(s.affinity for s in self._settings(width))
            raise InputError(f"hill climb: op {op!r}: expected affinity {names} at width {width}, got {affinity!r}")
        if not 0 <= duration_us < math.inf:
            raise InputError(f"hill climb: op {op!r}: expected a duration in microseconds, got {duration_us!r}")
        samples.setdefault(setting, []).append(duration_us)

    def best_us(self) -> dict[str, float]:
        """Map each op that was measured to its shortest time so far."""
        return {op: min(map(min, samples.values())) for op, samples in self._of.items() if samples}

    @property
    def placement(self) -> str:
        """The better affinity of the step as a whole: by the sum of all ops at the widths measured in both."""
        return SCATTER if sum(map(_gain_us, self._of.values())) > 0 else COMPACT

    def costs(self) -> Costs:
        """Return the measurements as `Costs`, in the affinity that is better for the whole step if both were measured.

        A plan has lanes in that placement, and further lanes for ops that are faster in the other one, as far as there
        are cores for them. So their durations are not counted on.
        """
        placement = self.placement
        other, sign = (COMPACT, -1) if placement == SCATTER else (SCATTER, 1)
        placements = {op: other for op, samples in self._of.items() if sign * _gain_us(samples) > 0}
        durations: dict[str, dict[str, float]] = {}
        spreads: dict[str, dict[str, float]] = {}
        for op, samples in self._of.items():
            for (width, affinity), times_us in sorted(samples.items()):
                if affinity == placement or Setting(width, placement) not in samples:
                    durations.setdefault(op, {})[str(width)] = min(times_us)
                    spreads.setdefault(op, {})[str(width)] = median(times_us) - min(times_us)
        note = f"hill climbing in steps of {self._interval} up to {self._widest} threads"
        return Costs(durations, spreads, note=note, placement=placement, placements=placements)

    def _settings(self, width: int) -> tuple[Setting, ...]:
        both = 1 < width <= self._caches
        return (Setting(width), Setting(width, SCATTER)) if both else (Setting(width),)

    def _next(self, samples_us: Mapping[Setting, Sequence[float]]) -> Setting | None:
        """Return the setting to measure an op at next, or None when its climb has ended."""
        best_us = math.inf
        width = 1
        while True:
            for setting in self._settings(width):
                if setting not in samples_us:
                    return setting
            time_us = min(min(samples_us[setting]) for setting in self._settings(width))
            if width == self._widest or time_us > best_us * (1 + self._tolerance):
                break
            best_us = min(best_us, time_us)
            width = min(width + self._interval, self._widest)
        ahead = (setting for width in self._also for setting in self._settings(width) if setting not in samples_us)
        return next(ahead, None)


def _gain_us(samples: Mapping[Setting, Sequence[float]]) -> float:
    """The time that an op is faster when scattered, summed over the widths measured in both affinities."""
    both = [(Setting(width), Setting(width, SCATTER)) for width, affinity in samples if affinity == SCATTER]
    return sum(min(samples[near]) - min(samples[apart]) for near, apart in both if near in samples)


def interval_of(cores: int) -> int:
    """Threads added from one width to the next."""
    return max(INTERVAL, math.ceil((cores - 1) / (MAX_WIDTHS - 1)))


def climbing(ops: Iterable[Op], device: Device) -> Generator[Setting, Iterable[Timeline], Costs]:
    """Yield settings at which a few whole steps are to run, receive their timelines, and return the costs."""
    search = HillClimb(ops, device.cores, interval_of(device.cores), cores_per_cache=device.cores_per_cache)
    while (setting := _next(search, device.cores)) is not None:
        for timeline in (yield setting):
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
