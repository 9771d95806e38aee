"""`Costs`: how long an op takes at each width or on each device, and where that figure comes from.

A duration's key is a width (``"2"``: two threads), a device (``"gpu0"``), or a width on a device (``"cpu1:4"``).
Measured durations are used unchanged. Between two measured widths a duration is interpolated linearly (Liu et al.,
IPDPS 2019, section III-B), and beyond the last one it is constant. `Costs.lookup` says which of these applies.

A kernel rarely needs a whole GPU. Its *share* is the part of the multiprocessors and of the memory's bandwidth that it
uses. `hocket.simulate` divides a GPU among ops by their shares.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from hocket.errors import FormatError, InputError
from hocket.ir._fields import Reader, load_document, read_from, require_duration, save_document, shortened

FORMAT = "hocket-costs/1"

_Value = TypeVar("_Value")

# No machine has a billion threads, and Python refuses to convert some thousand digits.
MAX_WIDTH_DIGITS = 9

SOURCES = ("measured", "analytic", "published")
PLACEMENTS = ("compact", "scatter")

# In the order of a file, which leaves out all but the durations where they are the defaults.
_FIELDS = ("note", "durations_us", "spread_us", "sources", "shares", "placement", "placements", "only_listed")


class Duration(NamedTuple):
    """A duration and how it is known: one of `SOURCES`, or ``interpolated`` or ``extrapolated`` from those."""

    duration_us: float
    source: str


class Share(NamedTuple):
    """Parts of a GPU that an op uses when it runs alone, as averages over its duration from 0 to 1."""

    multiprocessors: float
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Costs:
    """Durations of ops in microseconds, by width or device.

    Attributes:
        durations_us: op -> key -> microseconds (the minimum over the runs, when measured).
        spread_us: op -> key -> median minus minimum over the runs, when measured.
        sources: op -> one of `SOURCES`. An op that is not listed was measured.
        note: where the figures come from, in words.
        shares: op -> GPU -> the op's share of it. An op that is not listed slows down no other op.
        placement: one of `PLACEMENTS`, the cores of a lane's threads while they were measured and in a plan:
            neighbours, or one core of each cache first (`Device.cores_per_cache`).
        placements: op -> the other placement, where the op is faster in that one. Durations are those in `placement`.
        only_listed: an op may run only at the widths that have a duration, because its result has other bits at others
            (see `hocket.profiling.exact_widths`). At any other width its duration is infinite.

    Raises `FormatError` at construction for a negative or NaN duration, a key that is no width and no device name,
    an op without any duration, an unknown source or placement, and a share that is none or more than all.

    Example:
        >>> Costs({"conv1": {"1": 300.0, "3": 100.0}}).duration_us("conv1", width=2)
        200.0
    """

    durations_us: Mapping[str, Mapping[str, float]]
    spread_us: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    note: str = ""
    shares: Mapping[str, Mapping[str, Share]] = field(default_factory=dict)
    placement: str = "compact"
    only_listed: bool = False
    placements: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shares", _shares(self.shares))
        object.__setattr__(self, "durations_us", _normalised(self.durations_us, "durations_us"))
        object.__setattr__(self, "spread_us", _normalised(self.spread_us, "spread_us"))
        object.__setattr__(self, "sources", dict(self.sources))
        object.__setattr__(self, "placements", dict(self.placements))
        given = {"placement": self.placement, **{f"placements[{op!r}]": own for op, own in self.placements.items()}}
        for where, placement in given.items():
            if placement not in PLACEMENTS:
                raise FormatError("costs", where, f"expected {' or '.join(PLACEMENTS)}, got {placement!r}")
        for op, source in self.sources.items():
            if source not in SOURCES:
                raise FormatError("costs", f"sources[{op!r}]", f"expected one of {', '.join(SOURCES)}, got {source!r}")

    def __contains__(self, op: str) -> bool:
        return op in self.durations_us

    @cached_property
    def _by_width(self) -> dict[str, tuple[tuple[int, ...], tuple[float, ...]]]:
        result = {}
        for op, durations in self.durations_us.items():
            pairs = sorted((int(key), value) for key, value in durations.items() if key.isdecimal())
            result[op] = (tuple(width for width, _ in pairs), tuple(value for _, value in pairs))
        return result

    def lookup(self, op: str, *, width: int = 1, device: str = "") -> Duration:
        """Duration of `op` at `width` threads on `device`, and its origin.

        Raises:
            InputError: there is no duration for `op` that applies to this width and device.
        """
        durations = self.durations_us.get(op)
        if durations is None:
            raise InputError(f"costs: no duration for op {op!r}")
        source = self.sources.get(op, "measured")
        for key in (f"{device}:{width}", device, str(width)):
            if key in durations:
                return Duration(durations[key], source)
        widths, values = self._by_width[op]
        if self.only_listed:
            return Duration(math.inf, source)
        if not widths:
            raise InputError(f"costs: op {op!r} has no duration for device {device!r}, only for {', '.join(durations)}")
        at = bisect_left(widths, width)
        if at == 0 or at == len(widths):
            return Duration(values[min(at, len(widths) - 1)], "extrapolated")
        low, high = widths[at - 1], widths[at]
        share = (width - low) / (high - low)
        return Duration(values[at - 1] + share * (values[at] - values[at - 1]), "interpolated")

    def duration_us(self, op: str, *, width: int = 1, device: str = "") -> float:
        """`lookup` without the source."""
        return self.lookup(op, width=width, device=device).duration_us

    def allows(self, op: str, width: int) -> bool:
        """False where `op` may not run at this width."""
        return not self.only_listed or op not in self.durations_us or str(width) in self.durations_us[op]

    def nearest_width(self, op: str, width: int) -> int:
        """The width next to this one at which `op` may run, the wider one of two that are equally near.

        Example:
            >>> costs = Costs({"sum": {"2": 10.0}, "relu": {"1": 6.0, "2": 4.0}}, only_listed=True)
            >>> costs.nearest_width("sum", 1), costs.nearest_width("relu", 1)
            (2, 1)
        """
        widths = self._by_width[op][0] if self.only_listed and op in self.durations_us else ()
        return min(widths, key=lambda other: (abs(other - width), -other), default=width)

    def at_widths(self, widths: Mapping[str, Collection[int]]) -> Costs:
        """Only the durations at these widths of each op, which are all at which it may run."""

        def listed(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
            return {
                op: {key: value for key, value in row.items() if not key.isdecimal() or int(key) in widths[op]}
                for op, row in table.items()
            }

        return replace(self, durations_us=listed(self.durations_us), spread_us=listed(self.spread_us), only_listed=True)

    def merged(self, other: Costs) -> Costs:
        """These costs with the ops and widths of `other` added, which replace durations that both have.

        The placement stays the one of these costs.
        """
        return replace(
            self,
            durations_us=_merge(self.durations_us, other.durations_us),
            spread_us=_merge(self.spread_us, other.spread_us),
            sources={**self.sources, **{op: other.sources.get(op, "measured") for op in other.durations_us}},
            note=other.note or self.note,
            shares=_merge(self.shares, other.shares),
            only_listed=self.only_listed or other.only_listed,
        )

    def restricted(self, ops: Iterable[str]) -> Costs:
        """Only the durations of `ops`."""
        keep = set(ops)

        def kept(table: Mapping[str, _Value]) -> dict[str, _Value]:
            return {op: value for op, value in table.items() if op in keep}

        return replace(
            self,
            durations_us=kept(self.durations_us),
            spread_us=kept(self.spread_us),
            sources=kept(self.sources),
            shares=kept(self.shares),
            placements=kept(self.placements),
        )

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Costs:
        """Read a ``hocket-costs/1`` file."""
        return Costs.read(load_document(path, FORMAT))

    @staticmethod
    def read(reader: Reader) -> Costs:
        """Costs from the document of a ``hocket-costs/1`` file."""
        reader.only("format", *_FIELDS)

        def durations(table: Reader) -> dict[str, dict[str, float]]:
            return {op: {key: value.duration_us() for key, value in row.items()} for op, row in table.items()}

        found: dict[str, Any] = {
            "durations_us": durations(reader["durations_us"]),
            "spread_us": durations(reader.get("spread_us", {})),
            "note": reader.get("note", "").text(),
            "shares": {
                op: {device: Share(*(part.number() for part in value.elements(2))) for device, value in row.items()}
                for op, row in reader.get("shares", {}).items()
            },
            "placement": reader.get("placement", "compact").text(),
            "only_listed": reader.get("only_listed", False).boolean(),
            **{key: {op: text.text() for op, text in reader.get(key, {}).items()} for key in ("sources", "placements")},
        }
        with read_from(reader.source):
            return Costs(**found)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-costs/1`` file that reads back to equal costs."""
        save_document(path, self.document())

    def document(self) -> dict[str, Any]:
        """The content of a ``hocket-costs/1`` file of these costs."""
        found, defaults = {key: getattr(self, key) for key in _FIELDS}, Costs({})
        return {
            "format": FORMAT,
            **{key: value for key, value in found.items() if key == "durations_us" or value != getattr(defaults, key)},
        }


def _normalised(table: Mapping[str, Mapping[str, float]], name: str) -> dict[str, dict[str, float]]:
    result: dict[str, dict[str, float]] = {}
    for op, durations in table.items():
        where = f"{name}[{op!r}]"
        if not durations:
            raise FormatError("costs", where, "expected at least one width or device")
        for key in durations:
            device, colon, width = key.rpartition(":")
            is_width = not width.isdecimal() or (len(width) <= MAX_WIDTH_DIGITS and int(width) >= 1)
            if not key or (colon and not device) or not is_width or width.startswith("-"):
                raise FormatError("costs", where, f"expected a width >= 1 or a device name, got {shortened(key)}")
        result[op] = {key: require_duration(value, "costs", f"{where}[{key!r}]") for key, value in durations.items()}
    return result


def _shares(table: Mapping[str, Mapping[str, Share]]) -> dict[str, dict[str, Share]]:
    result: dict[str, dict[str, Share]] = {}
    for op, row in table.items():
        for device, share in row.items():
            where = f"shares[{op!r}][{device!r}]"
            if not device or device.isdecimal():
                raise FormatError("costs", where, f"expected a device name, got {device!r}")
            if not (0.0 < share[0] <= 1.0 and 0.0 <= share[1] <= 1.0):
                raise FormatError(
                    "costs",
                    where,
                    f"expected parts of the multiprocessors (> 0) and of the bandwidth, up to 1, got {list(share)}",
                )
        result[op] = {device: Share(*share) for device, share in row.items()}
    return result


def _merge(
    first: Mapping[str, Mapping[str, _Value]], second: Mapping[str, Mapping[str, _Value]]
) -> dict[str, dict[str, _Value]]:
    return {
        **{op: dict(value) for op, value in first.items()},
        **{op: {**first.get(op, {}), **value} for op, value in second.items()},
    }
