"""`Comparison`: eager against planned, as every report states it.

A comparison states how the times were sampled, how far the bound is, if the result is the same, which of the two was
kept, and why.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hocket.errors import InputError
from hocket.ir._fields import save_document
from hocket.reporting.words import duration_text

FORMAT = "hocket-comparison/2"

VERDICTS = ("planned", "regions", "eager")


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile, on which all decisions and reported times are based.

    On a shared machine other programs make whole blocks of steps slower, and nothing makes one faster. A median of a
    few steps then reflects interference, and the lower quartile does not.
    """
    return sorted(values)[(len(values) - 1) // 4]


@dataclass(frozen=True)
class Sample:
    """Times of repeated runs, in milliseconds. Decisions, speedups and bounds use the lower quartile.

    Attributes:
        lower_quartile: a quarter of the runs were at least as fast.
        median: half of the runs were faster.
        min: the fastest run.
        p90: nine out of ten runs were at least as fast, interpolated between runs.
        runs: how many there were.
    """

    lower_quartile: float
    median: float
    min: float
    p90: float
    runs: int

    def __post_init__(self) -> None:
        times = (self.min, self.lower_quartile, self.median, self.p90)
        if not all(math.isfinite(value) and value >= 0 for value in times) or list(times) != sorted(times):
            raise InputError(f"sample: expected 0 <= min <= lower quartile <= median <= p90, got {times}")
        if self.runs < 1:
            raise InputError(f"sample: expected at least one run, got {self.runs}")

    @staticmethod
    def of(values_ms: Iterable[float]) -> Sample:
        """Summarise runs. Raises `InputError` if there are none, or a value is no duration."""
        values = sorted(float(value) for value in values_ms)
        if not values:
            raise InputError("sample: expected at least one run, got none")
        for value in values:
            if not math.isfinite(value) or value < 0:
                raise InputError(f"sample: expected milliseconds, finite and >= 0, got {value!r}")
        return Sample(lower_quartile(values), _quantile(values, 0.5), values[0], _quantile(values, 0.9), len(values))

    def to_json(self) -> dict[str, float | int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Comparison:
    """Eager against planned on one target.

    Attributes:
        target: what was run.
        device: such as ``2 CPU cores`` or ``NVIDIA H100``.
        cores: number of cores, or of multiprocessors of a GPU.
        ops: number of ops in the graph.
        eager_ms: times of the eager step.
        planned_ms: times of the planned step.
        lower_bound_ms: no plan is faster than this, by the measured costs of ops. None if not known.
        efficiency: ``(U - m) / (U - L)``, 1 at the bound. None if not known.
        speedup: eager's time over planned's time, by lower quartiles.
        verdict: what was kept: ``planned``, ``regions`` (planned parts of a step) or ``eager``.
        why: the reason, in words.
        max_abs_diff: the largest difference of any result from eager's. None if not compared.
        bitwise: every result is equal, bit by bit.
        planner: the planner that made the plan.
        versions: name -> version of the software it ran on.
        notes: further lines for the reader.
        speedup_interval: between which the verdict expects the speedup. None if not known.
    """

    target: str
    device: str
    cores: int
    ops: int
    eager_ms: Sample
    planned_ms: Sample
    lower_bound_ms: float | None
    efficiency: float | None
    speedup: float
    verdict: str
    why: str
    max_abs_diff: float | None
    bitwise: bool
    planner: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    speedup_interval: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "lower_bound_ms", _finite(self.lower_bound_ms))
        object.__setattr__(self, "efficiency", _finite(self.efficiency))
        if self.verdict not in VERDICTS:
            raise InputError(f"comparison: verdict: expected one of {', '.join(VERDICTS)}, got {self.verdict!r}")

    @property
    def result(self) -> str:
        """Text that says if the planned step computed what eager computed."""
        if self.bitwise:
            return "same result: bitwise"
        if self.max_abs_diff is None:
            return "result not compared"
        return f"max difference {self.max_abs_diff:.2g}"

    @property
    def headline(self) -> str:
        """The whole comparison in one sentence."""
        parts = [f"{self.outcome}, {'same result bitwise' if self.bitwise else self.result}"]
        parts += [self.bound] if self.bound else []
        return "; ".join(parts)

    @property
    def bound(self) -> str:
        """Text that gives the distance from the bound, empty if no bound is known."""
        if self.lower_bound_ms is None:
            return ""
        bound = duration_text(self.lower_bound_ms * 1e3)
        if self.over_bound is None:
            return f"bound at {bound}"
        if self.is_bound_beaten:
            return f"{self.over_bound:.2f}x of the estimated bound of {bound}, which a measured step has beaten"
        return f"{self.over_bound:.2f}x of the bound of {bound}"

    @property
    def is_bound_beaten(self) -> bool:
        """True if a measured step is faster than the bound, which is then an estimate."""
        fastest_ms = min(self.eager_ms.min, self.planned_ms.min)
        return self.lower_bound_ms is not None and fastest_ms < self.lower_bound_ms

    @property
    def disagreement(self) -> str:
        """Text that says that the speedup is not the one of the verdict, empty if it is, as far as two digits show."""
        if self.speedup_interval is None or not math.isfinite(self.speedup):
            return ""
        low, high = self.speedup_interval
        if round(low, 2) <= round(self.speedup, 2) <= round(high, 2):
            return ""
        return f"speedup {self.speedup:.2f}x in this run, and {low:.2f}x to {high:.2f}x expected by the verdict"

    @property
    def over_bound(self) -> float | None:
        """The planned step's lower quartile over the bound, or None without a bound."""
        return self.planned_ms.lower_quartile / self.lower_bound_ms if self.lower_bound_ms else None

    @property
    def outcome(self) -> str:
        """Text that compares the plan with eager, and says so if eager was kept."""
        if self.verdict == "eager" and not self.ops:
            return "eager kept: no plan was made"
        if not math.isfinite(self.speedup) or self.speedup <= 0:
            words = "speed not compared"
        elif round(self.speedup, 2) == 1.0:
            words = "as fast as eager"
        elif self.speedup > 1:
            words = f"{self.speedup:.2f}x faster than eager"
        else:
            words = f"{1 / self.speedup:.2f}x slower than eager"
        return f"eager kept: the plan is {words}" if self.verdict == "eager" else words

    def to_json(self) -> dict[str, Any]:
        """Return the content of a ``hocket-comparison/2`` file. Numbers that are not finite become null."""
        document = {each.name: getattr(self, each.name) for each in fields(self)}
        document |= {name: getattr(self, name).to_json() for name in ("eager_ms", "planned_ms")}
        document |= {name: _finite(getattr(self, name)) for name in ("speedup", "max_abs_diff")}
        document |= {"versions": dict(self.versions), "notes": list(self.notes)}
        if self.speedup_interval is not None:
            document["speedup_interval"] = list(self.speedup_interval)
        return {"format": FORMAT, **document, "result": self.result, "headline": self.headline}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a ``hocket-comparison/2`` file."""
        save_document(path, self.to_json())


def _quantile(ordered: list[float], share: float) -> float:
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
