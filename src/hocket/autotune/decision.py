"""The result of a search: run this plan or stay eager, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from hocket.adaptation import CoRun
from hocket.autotune.candidate import Candidate
from hocket.autotune.comparison import MOMENTS_DIFFER, expected_interval
from hocket.autotune.store import Figures

# Calls after which the search for a plan that was not compared with eager has paid.
MIN_PAID = 30


class Verdict(str):
    """``"planned"``, ``"regions"`` or ``"eager"``, with the reason in `why`."""

    why: str

    def __new__(cls, choice: str, why: str) -> Verdict:
        verdict = super().__new__(cls, choice)
        verdict.why = why
        return verdict

    def __repr__(self) -> str:
        return f"{str(self)!r}, because {self.why}"


@dataclass(frozen=True)
class Decision(Figures):
    """The decision of one search."""

    best: Candidate | None = None  # the plan that runs, or None for eager
    # all plans that were compared, with the times of their steps, the best one first
    candidates: tuple[Candidate, ...] = ()
    co_runs: tuple[CoRun, ...] = ()  # pairs of ops that ran side by side, as they were measured
    is_recalled: bool = False  # it was made by an earlier search and remembered
    left_out: tuple[tuple[str, str], ...] = ()  # forms that were not compared, each with the reason

    @property
    def verdict(self) -> Verdict:
        return Verdict(self.kind, self.reason)

    @property
    def candidate(self) -> Candidate | None:
        """The plan that runs, or would be the best one to run."""
        return self.best or next(iter(self.candidates), None)

    @property
    def expected_ms(self) -> float:
        """The median step time that the decision stands on."""
        return self.best.step_ms if self.best else median(self.eager_ms)

    @property
    def promised(self) -> tuple[float, float] | None:
        """The interval of the speedup that other moments may have, too. None if no plan was timed."""
        if self.low is None or self.high is None:
            return None
        return expected_interval(self.low, self.high, self.cores_of_others)

    @property
    def ahead(self) -> float:
        """Speedup over eager of the steps that it leads to, 1 if these are eager."""
        return max(1.0, self.speedup or 1.0) if self.best is not None else 1.0

    @property
    def kept_bytes(self) -> float:
        """The memory that the plan keeps between steps."""
        return self.best.kept_bytes if self.best is not None else 0.0

    def has_paid(self, num_calls: int, search_s: float | None) -> bool:
        """Return True if this number of calls by plan has saved what the search took (None without a comparison)."""
        if search_s is None or not self.eager_ms:
            return self.best is not None and num_calls >= MIN_PAID
        return num_calls * median(self.eager_ms) * (1 - 1 / self.ahead) >= search_s * 1e3

    def is_kept(self, slowdown: float) -> bool:
        """Return True if a few steps of its first candidate that take `slowdown` of eager's time are as it says."""
        if self.best is None:
            return slowdown * MOMENTS_DIFFER >= 1
        return slowdown <= MOMENTS_DIFFER and (self.promised is None or slowdown * self.promised[0] <= 1)

    def close(self) -> None:
        """Close all executors."""
        for candidate in self.candidates:
            candidate.executor.close()


UNDECIDED = Decision("eager", "not decided yet")
