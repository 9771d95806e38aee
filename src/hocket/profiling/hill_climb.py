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
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median
from typing import NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Op

__all__ = ["AFFINITIES", "Climb", "HillClimb", "Setting", "accuracy", "climb"]

COMPACT, SCATTER = "compact", "scatter"
AFFINITIES = (COMPACT, SCATTER)


class Setting(NamedTuple):
    """The number of threads of an op, and their affinity: neighbours in one cache, or each in another one."""

    width: int
    affinity: str = COMPACT


@dataclass(frozen=True)
class Climb:
    """The result of a climb for one op.

    Attributes:
        times_us: width -> microseconds, of the better affinity. Only measured widths.
        affinities: width -> the better affinity.
        spread_us: width -> median minus minimum of its measurements.
        path: the widths that the climb itself visited, in order. `times_us` may have others.
        interval: threads added a step.
        cores: all cores, in threads: the widest that was allowed.
        num_steps: training steps it took.
    """

    times_us: Mapping[int, float]
    affinities: Mapping[int, str]
    spread_us: Mapping[int, float]
    path: tuple[int, ...]
    interval: int
    cores: int
    num_steps: int

    @cached_property
    def best_width(self) -> int:
        """The fastest measured width, the narrowest one if several are equally fast."""
        return min(self.times_us, key=lambda width: (self.times_us[width], width))

    @property
    def best_affinity(self) -> str:
        return self.affinities[self.best_width]

    @property
    def best_us(self) -> float:
        return self.times_us[self.best_width]

    @property
    def durations_us(self) -> dict[str, float]:
        """The op's entry in `Costs.durations_us`."""
        return {str(width): time_us for width, time_us in sorted(self.times_us.items())}

    def predict_us(self, width: int) -> float:
        """The time at any width, by the rule of `Costs`."""
        return self._costs.duration_us("op", width=width)

    @cached_property
    def _costs(self) -> Costs:
        return Costs({"op": self.durations_us})


@dataclass(frozen=True)
class _Rules:
    """The parameters of climbs, see `HillClimb`."""

    widest: int
    interval: int
    caches: int
    also: tuple[int, ...]
    tolerance: float

    def settings(self, width: int) -> tuple[Setting, ...]:
        both = 1 < width <= self.caches
        return (Setting(width), Setting(width, SCATTER)) if both else (Setting(width),)

    def next(self, samples_us: Mapping[Setting, Sequence[float]]) -> tuple[tuple[int, ...], Setting | None]:
        """The widths climbed so far, and what to measure next: nothing when the climb has ended."""
        path: list[int] = []
        best_us = math.inf
        width = 1
        while True:
            for setting in self.settings(width):
                if setting not in samples_us:
                    return tuple(path), setting
            path.append(width)
            time_us = min(min(samples_us[setting]) for setting in self.settings(width))
            if width == self.widest or time_us > best_us * (1 + self.tolerance):
                break
            best_us = min(best_us, time_us)
            width = min(width + self.interval, self.widest)
        for width in self.also:
            for setting in self.settings(width):
                if setting not in samples_us:
                    return tuple(path), setting
        return tuple(path), None

    def result(self, samples_us: Mapping[Setting, Sequence[float]]) -> Climb:
        best: dict[int, Setting] = {}
        for setting in sorted(samples_us):
            now = best.setdefault(setting.width, setting)
            if min(samples_us[setting]) < min(samples_us[now]):
                best[setting.width] = setting
        return Climb(
            times_us={width: min(samples_us[setting]) for width, setting in best.items()},
            affinities={width: setting.affinity for width, setting in best.items()},
            spread_us={width: median(samples_us[s]) - min(samples_us[s]) for width, s in best.items()},
            path=self.next(samples_us)[0],
            interval=self.interval,
            cores=self.widest,
            num_steps=len(samples_us),
        )


class HillClimb:
    """The climbs of all ops of a step, at the same time.

    Args:
        ops: the ops, such as ``graph.ops``.
        cores: cores of the machine.
        interval: threads added a step. The paper chooses 4.
        smt: hardware threads of a core to climb onto. 1 is the paper's choice: two threads on a core slow an op down.
        cores_per_cache: cores that share their last private cache, 2 on a Knights Landing tile.
        also: widths that every op is measured at after its climb. Defaults to 2 and all cores.
        tolerance: the share by which the time must rise above the best so far to end a climb. 0 is the paper's. On a
            noisy machine a few percent keep a climb from ending on a flat slope.

    Raises:
        InputError: a number below 1, a width beyond the cores, a negative tolerance, or an op named twice.

    Example:
        >>> search = HillClimb([Op("mm", "aten.mm")], cores=8, interval=3)
        >>> while not search.done:
        ...     for op, width in search.next_widths().items():
        ...         search.record(op, width, duration_us=80.0 / width + 4.0 * width)
        >>> search.climbs()["mm"].best_width, search.num_steps
        (4, 5)
    """

    def __init__(
        self,
        ops: Iterable[Op],
        cores: int,
        interval: int = 4,
        *,
        smt: int = 1,
        cores_per_cache: int = 1,
        also: Iterable[int] | None = None,
        tolerance: float = 0.0,
    ) -> None:
        self._rules = _rules(cores, interval, smt, cores_per_cache, also, tolerance)
        self._samples: dict[tuple[str, float, float], dict[Setting, list[float]]] = {}
        self._of: dict[str, dict[Setting, list[float]]] = {}
        for op in ops:
            if op.name in self._of:
                raise InputError(f"hill climb: op {op.name!r} is named twice")
            self._of[op.name] = self._samples.setdefault((op.target, op.flops, op.size_bytes), {})

    @property
    def done(self) -> bool:
        """True if every climb has ended."""
        return all(self._rules.next(samples)[1] is None for samples in self._samples.values())

    @property
    def num_steps(self) -> int:
        """Training steps so far: those of the op that took the most."""
        return max((len(samples) for samples in self._samples.values()), default=0)

    @property
    def wanted(self) -> dict[Setting, tuple[str, ...]]:
        """Map settings to the ops to measure there next: those whose climb goes on, or lacks one of the `also`."""
        next_of = {id(samples): self._rules.next(samples)[1] for samples in self._samples.values()}
        found: dict[Setting, list[str]] = {}
        for op, samples in self._of.items():
            setting = next_of[id(samples)]
            if setting is not None:
                found.setdefault(setting, []).append(op)
        return {setting: tuple(found[setting]) for setting in sorted(found)}

    def next_settings(self) -> dict[str, Setting]:
        """Map each op to its setting in the next step, the best one if its climb has ended."""
        chosen = {id(samples): self._chosen(samples) for samples in self._samples.values()}
        return {op: chosen[id(samples)] for op, samples in self._of.items()}

    def next_widths(self) -> dict[str, int]:
        """`next_settings` without the affinities."""
        return {op: setting.width for op, setting in self.next_settings().items()}

    def record(self, op: str, width: int, duration_us: float, affinity: str = COMPACT) -> None:
        """Record one measurement, requested or not. Of several at the same setting the shortest counts.

        Raises:
            InputError: an unknown op, a width or an affinity that the machine does not have, or no duration.
        """
        samples = self._of.get(op)
        if samples is None:
            raise InputError(f"hill climb: no op {op!r} to record a duration for")
        if not 1 <= width <= self._rules.widest:
            raise InputError(f"hill climb: op {op!r}: expected a width from 1 to {self._rules.widest}, got {width!r}")
        setting = Setting(width, affinity)
        if setting not in self._rules.settings(width):
            names = " or ".join(s.affinity for s in self._rules.settings(width))
            raise InputError(f"hill climb: op {op!r}: expected affinity {names} at width {width}, got {affinity!r}")
        if not 0 <= duration_us < math.inf:
            raise InputError(f"hill climb: op {op!r}: expected a duration in microseconds, got {duration_us!r}")
        samples.setdefault(setting, []).append(duration_us)

    def run(self, time_us: Callable[[str, int, str], float]) -> HillClimb:
        """Climb to the end with an oracle ``time_us(op, width, affinity)``, and return itself."""
        while not self.done:
            for op, (width, affinity) in self.next_settings().items():
                self.record(op, width, time_us(op, width, affinity), affinity)
        return self

    def climbs(self) -> dict[str, Climb]:
        """The results so far of all ops that were measured."""
        found = {id(samples): self._rules.result(samples) for samples in self._samples.values() if samples}
        return {op: found[id(samples)] for op, samples in self._of.items() if samples}

    @property
    def placement(self) -> str:
        """The better affinity of the step as a whole: by the sum of all ops at the widths measured in both."""
        sums_us = dict.fromkeys(AFFINITIES, 0.0)
        for samples in self._of.values():
            for width, affinity in samples:
                if affinity == SCATTER and Setting(width) in samples:
                    for each in AFFINITIES:
                        sums_us[each] += min(samples[Setting(width, each)])
        return min(AFFINITIES, key=sums_us.__getitem__)

    def costs(self) -> Costs:
        """Return the measurements as `Costs`, in the affinity that is better for the whole step if both were measured.

        A plan has one placement: cores are assigned to lanes, and ops of all kinds run on one lane.
        """
        placement = self.placement
        durations: dict[str, dict[str, float]] = {}
        spreads: dict[str, dict[str, float]] = {}
        for op, samples in self._of.items():
            for (width, affinity), times_us in sorted(samples.items()):
                if affinity == placement or Setting(width, placement) not in samples:
                    durations.setdefault(op, {})[str(width)] = min(times_us)
                    spreads.setdefault(op, {})[str(width)] = median(times_us) - min(times_us)
        note = f"hill climbing in steps of {self._rules.interval} up to {self._rules.widest} threads"
        return Costs(durations, spreads, note=note, placement=placement)

    def _chosen(self, samples: Mapping[Setting, Sequence[float]]) -> Setting:
        wanted = self._rules.next(samples)[1]
        if wanted is not None:
            return wanted
        return min(samples, key=lambda setting: (min(samples[setting]), setting))


def climb(
    time_us: Callable[[int, str], float],
    cores: int,
    interval: int = 4,
    *,
    smt: int = 1,
    cores_per_cache: int = 1,
    also: Iterable[int] | None = None,
    tolerance: float = 0.0,
) -> Climb:
    """Climb with one op whose times an oracle gives. The arguments are those of `HillClimb`.

    Example:
        >>> climb(lambda width, affinity: 100.0 / width + width, cores=68).best_width
        9
    """
    rules = _rules(cores, interval, smt, cores_per_cache, also, tolerance)
    samples: dict[Setting, list[float]] = {}
    while (setting := rules.next(samples)[1]) is not None:
        samples[setting] = [time_us(*setting)]
    return rules.result(samples)


def accuracy(found: Climb, actual_us: Mapping[int, float], widths: Iterable[int] | None = None) -> float:
    """Return one minus the mean of |predicted - actual| / actual over the widths that were not measured (Table V).

    Args:
        found: the climb.
        actual_us: width -> microseconds.
        widths: the widths to compare. Defaults to all of `actual_us`.

    Returns:
        The accuracy, or NaN if all of these widths were measured.
    """
    judged = [width for width in (actual_us if widths is None else widths) if width not in found.times_us]
    if not judged:
        return math.nan
    return 1 - fmean(abs(found.predict_us(width) - actual_us[width]) / actual_us[width] for width in judged)


def _rules(
    cores: int, interval: int, smt: int, cores_per_cache: int, also: Iterable[int] | None, tolerance: float
) -> _Rules:
    numbers = {"cores": cores, "interval": interval, "smt": smt, "cores_per_cache": cores_per_cache}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"hill climb: expected {name} to be a whole number >= 1, got {value!r}")
    if not 0 <= tolerance < math.inf:
        raise InputError(f"hill climb: expected a tolerance >= 0, got {tolerance!r}")
    widest = cores * smt
    widths = tuple(sorted({min(2, cores), cores})) if also is None else tuple(also)
    for width in widths:
        if not 1 <= width <= widest:
            raise InputError(f"hill climb: expected also to name widths from 1 to {widest}, got {width!r}")
    # One core a cache: there is nothing to choose. Otherwise a thread can be alone in a cache while caches last.
    return _Rules(widest, interval, cores // cores_per_cache if cores_per_cache > 1 else 0, widths, tolerance)
