"""What each rank of a pipeline runs, in which order, and what a step by it takes: torch's schedules, as values.

    rank 0   F0 F1 F2 F3       B0       B1    B2    B3       F: forward of a micro-batch
    rank 1      F0    F1 B0    F2 B1 F3 B2    B3             B: backward, or I (of the input), and later W (of weights)

An action starts when its rank has finished the one before and its input has arrived: of a forward from the stage
before, of a backward from the stage behind. Between stages of one rank nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hocket.errors import InputError

__all__ = ["PipelineAction", "PipelineOrder", "pipeline_step_us", "rank_memory_bytes"]

Kind = Literal["F", "B", "I", "W"]
# A backward takes about twice its forward: half of it for the input's gradient, half for the weights'.
INPUT_SHARE = 0.5


class PipelineAction(NamedTuple):
    """One stage's work on one micro-batch: ``F`` forward, ``B`` backward, or ``I`` and ``W``, its two halves."""

    stage: int
    kind: Kind
    micro_batch: int


@dataclass(frozen=True)
class PipelineOrder:
    """The actions of each rank, in the order in which it runs them.

    Attributes:
        schedule: the name of the schedule.
        ranks: for each rank its actions.
        stages: how many there are; each is on one rank.
        micro_batches: how many each stage works on.

    Raises `InputError` at construction for a stage that is nowhere or on two ranks.

    Example:
        >>> F, B = PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)
        >>> PipelineOrder("gpipe", ((F, B),), 1, 1).rank_of
        (0,)
    """

    schedule: str
    ranks: tuple[tuple[PipelineAction, ...], ...]
    stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        for stage in range(self.stages):
            homes = [rank for rank, actions in enumerate(self.ranks) if any(a.stage == stage for a in actions)]
            if len(homes) != 1:
                raise InputError(f"schedule {self.schedule}: stage {stage} is on ranks {homes}, expected one rank")

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """For each stage its rank."""
        found = {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}
        return tuple(found[stage] for stage in range(self.stages))

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage how many micro-batches it has begun and not finished, at the most."""
        most = [0] * self.stages
        for actions in self.ranks:
            for held in _held(actions, self.stages):
                most = [max(known, now) for known, now in zip(most, held, strict=True)]
        return tuple(most)


def pipeline_step_us(
    order: PipelineOrder, forward_us: Sequence[float], backward_us: Sequence[float], crossing_us: Sequence[float]
) -> float:
    """When the last action of a step ends.

    Args:
        order: who runs what.
        forward_us: of each stage, for one micro-batch.
        backward_us: of each stage, for one micro-batch.
        crossing_us: what one way over the border before each stage takes; that of the first is not looked at.

    Raises:
        InputError: actions that wait for each other in a circle.

    Example:
        >>> actions = tuple((PipelineAction(s, "F", 0), PipelineAction(s, "B", 0)) for s in (0, 1))
        >>> pipeline_step_us(PipelineOrder("gpipe", actions, 2, 1), [1.0, 1.0], [2.0, 2.0], [0.0, 5.0])
        16.0
    """
    rank_of, last = order.rank_of, order.stages - 1
    forward_end: dict[tuple[int, int], float] = {}
    backward_end: dict[tuple[int, int], float] = {}
    idle_us = [0.0] * len(order.ranks)
    at = [0] * len(order.ranks)
    remaining = sum(map(len, order.ranks))
    while remaining:
        before = remaining
        for rank, actions in enumerate(order.ranks):
            while at[rank] < len(actions):
                stage, kind, micro_batch = actions[at[rank]]
                ready_us: float | None = 0.0
                source = stage
                if kind == "F" and stage > 0:
                    source, ready_us = stage - 1, forward_end.get((stage - 1, micro_batch))
                elif kind in ("B", "I") and stage < last:
                    source, ready_us = stage + 1, backward_end.get((stage + 1, micro_batch))
                if ready_us is None:
                    break
                if rank_of[source] != rank:
                    ready_us += crossing_us[max(source, stage)]
                share = {"F": 0.0, "B": 1.0, "I": INPUT_SHARE, "W": 1.0 - INPUT_SHARE}[kind]
                takes_us = forward_us[stage] if kind == "F" else share * backward_us[stage]
                idle_us[rank] = max(idle_us[rank], ready_us) + takes_us
                if kind == "F":
                    forward_end[stage, micro_batch] = idle_us[rank]
                elif kind != "W":
                    backward_end[stage, micro_batch] = idle_us[rank]
                at[rank] += 1
                remaining -= 1
        if remaining == before:
            waiting = [str(tuple(a[at[rank]])) for rank, a in enumerate(order.ranks) if at[rank] < len(a)]
            raise InputError(f"schedule {order.schedule}: {', '.join(waiting)} wait for each other")
    return max(idle_us, default=0.0)


def rank_memory_bytes(
    order: PipelineOrder, kept_bytes: Sequence[float], saved_bytes: Sequence[float]
) -> tuple[float, ...]:
    """For each rank the most that it holds at once: its stages' parameters, and what is saved for their backwards.

    Args:
        order: who runs what.
        kept_bytes: what each stage keeps.
        saved_bytes: what each stage saves for one micro-batch.
    """
    found = []
    for rank, actions in enumerate(order.ranks):
        kept = sum(size for stage, size in enumerate(kept_bytes) if order.rank_of[stage] == rank)
        most = max(
            sum(count * size for count, size in zip(held, saved_bytes, strict=True))
            for held in _held(actions, order.stages)
        )
        found.append(kept + most)
    return tuple(found)


def _held(actions: Sequence[PipelineAction], stages: int) -> list[list[int]]:
    """After each forward, how many micro-batches of each stage have not finished their backward."""
    now = [0] * stages
    found = [list(now)]
    for stage, kind, _ in actions:
        if kind == "F":
            now[stage] += 1
            found.append(list(now))
        elif kind in ("B", "W"):
            now[stage] -= 1
    return found
