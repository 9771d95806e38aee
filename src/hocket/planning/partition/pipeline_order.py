"""Schedules of torch's pipelines as values: the actions of each rank in order, and the time of a step.

    rank 0   F0 F1 F2 F3       B0       B1    B2    B3       F: forward of a micro-batch
    rank 1      F0    F1 B0    F2 B1 F3 B2    B3             B: backward, or I (of the input), and later W (of weights)

An action starts when its rank has finished the one before and its input has arrived, from the previous stage for a
forward and from the next stage for a backward. Stages of one rank send nothing to each other. Torch's schedules with
several stages per rank post their receives ahead, so that transfers overlap with computation. 1F1B and GPipe receive
only when they need the tensor: the reader waits for the transfer, and a rank that changes between forwards and
backwards waits until its last send is received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hocket.errors import InputError

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

    Raises `InputError` at construction for a stage that is nowhere or on two ranks.
    """

    schedule: str  # the name of the schedule
    ranks: tuple[tuple[PipelineAction, ...], ...]  # for each rank its actions
    stages: int  # the number of stages, each of which is on one rank
    micro_batches: int  # the number of micro-batches
    receives_ahead: bool = True  # True if transfers overlap with other actions of their reader

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
    def place(self) -> dict[PipelineAction, tuple[int, int]]:
        """The rank of each action, and its number there."""
        return {action: (rank, n) for rank, actions in enumerate(self.ranks) for n, action in enumerate(actions)}

    def source(self, action: PipelineAction) -> PipelineAction | None:
        """The action of another stage whose result `action` needs, or None."""
        return self._sources.get(action)

    def reader(self, action: PipelineAction) -> PipelineAction | None:
        """The action of another rank that needs the result of `action`, or None."""
        return self._readers.get(action)

    @cached_property
    def _sources(self) -> dict[PipelineAction, PipelineAction]:
        found = {}
        for action in self.place:
            stage, kind, micro_batch = action
            if kind == "F" and stage > 0:
                found[action] = PipelineAction(stage - 1, "F", micro_batch)
            elif kind in ("B", "I") and stage < self.stages - 1:
                behind = PipelineAction(stage + 1, "B", micro_batch)
                found[action] = behind if behind in self.place else behind._replace(kind="I")
        return found

    @cached_property
    def _readers(self) -> dict[PipelineAction, PipelineAction]:
        rank_of = self.rank_of
        return {s: action for action, s in self._sources.items() if rank_of[s.stage] != rank_of[action.stage]}

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage has begun and not finished."""
        most = [0] * self.stages
        for actions in self.ranks:
            for held in _held(actions, self.stages):
                most = [max(known, now) for known, now in zip(most, held, strict=True)]
        return tuple(most)


def pipeline_step_us(
    order: PipelineOrder, forward_us: Sequence[float], backward_us: Sequence[float], crossing_us: Sequence[float]
) -> float:
    """The end of the last action of a step.

    The forwards and backwards of stages are for one micro-batch, and `crossing_us` is one way over the border
    before each stage. The first value is not used.
    """
    rank_of, place = order.rank_of, order.place
    ends_us: list[list[float]] = [[] for _ in order.ranks]  # of the actions that have been placed
    remaining = sum(map(len, order.ranks))

    def end_us(action: PipelineAction | None) -> float | None:
        """The end of an action, 0 for no action, None if it has not been placed yet."""
        if action is None:
            return 0.0
        rank, number = place[action]
        return ends_us[rank][number] if number < len(ends_us[rank]) else None

    def crosses_us(one: PipelineAction, other: PipelineAction) -> float:
        return crossing_us[max(one.stage, other.stage)] if rank_of[one.stage] != rank_of[other.stage] else 0.0

    def ready_us(rank: int) -> float | None:
        """The start of the next action of a rank, None if that is not known yet."""
        action, number = order.ranks[rank][len(ends_us[rank])], len(ends_us[rank])
        before = order.ranks[rank][number - 1] if number else None
        idle_us = end_us(before) or 0.0
        start_us, source = idle_us, order.source(action)
        if source is not None:
            made_us = end_us(source)
            if made_us is None:
                return None
            ahead = order.receives_ahead or rank_of[source.stage] == rank
            start_us = max(idle_us, made_us + crosses_us(source, action))
            if not ahead:
                start_us = max(idle_us, made_us) + crosses_us(source, action)
        reader = None if before is None or order.receives_ahead else order.reader(before)
        if before is not None and reader is not None and before.kind != action.kind:
            at, its_number = place[reader]
            posted_us = end_us(order.ranks[at][its_number - 1] if its_number else None)
            if posted_us is None:
                return None
            start_us = max(start_us, max(idle_us, posted_us) + crosses_us(before, reader))
        return start_us

    while remaining:
        known = remaining
        for rank, actions in enumerate(order.ranks):
            while len(ends_us[rank]) < len(actions) and (start_us := ready_us(rank)) is not None:
                stage, kind, _ = actions[len(ends_us[rank])]
                share = {"B": 1.0, "I": INPUT_SHARE, "W": 1.0 - INPUT_SHARE}.get(kind, 0.0)
                takes_us = forward_us[stage] if kind == "F" else share * backward_us[stage]
                ends_us[rank].append(start_us + takes_us)
                remaining -= 1
        if remaining == known:
            waiting = [str(tuple(a[len(e)])) for a, e in zip(order.ranks, ends_us, strict=True) if len(e) < len(a)]
            raise InputError(f"schedule {order.schedule}: {', '.join(waiting)} wait for each other")
    return max((ends[-1] for ends in ends_us if ends), default=0.0)


def rank_memory_bytes(
    order: PipelineOrder, kept_bytes: Sequence[float], saved_bytes: Sequence[float]
) -> tuple[float, ...]:
    """The peak memory of each rank: its stages' parameters, and tensors saved for their backwards.

    Both numbers are of each stage, `saved_bytes` for one micro-batch.
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
    """After each forward, the number of micro-batches of each stage whose backward is not finished."""
    now = [0] * stages
    found = [list(now)]
    for stage, kind, _ in actions:
        if kind == "F":
            now[stage] += 1
            found.append(list(now))
        elif kind in ("B", "W"):
            now[stage] -= 1
    return found
