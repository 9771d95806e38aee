"""The schedules of `torch.distributed.pipelining`, as torch itself lists their actions. Nothing of them is re-written.

A schedule is made for stages that compute nothing, in this process alone, and asked for the order of its actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from hocket.errors import InputError
from hocket.planning.partition.pipeline_order import PipelineAction, PipelineOrder

# By lower-case name, without the word that they begin with.
SCHEDULES: dict[str, Any] = {
    name.removeprefix("Schedule").lower(): getattr(pipelining, name)
    for name in pipelining.__all__
    if name.startswith("Schedule")
}


def schedule_class(name: str) -> Any:
    """Torch's class of a schedule, by its name in any case, with or without ``Schedule`` before it.

    Raises:
        InputError: there is none.
    """
    found = SCHEDULES.get(name.lower().removeprefix("schedule"))
    if found is None:
        raise InputError(f"split_policy: unknown schedule {name!r}; one of {', '.join(SCHEDULES)}")
    return found


def has_one_stage_a_rank(name: str) -> bool:
    """True if a schedule takes one stage for each rank. The others take any number, or two."""
    return issubclass(schedule_class(name), PipelineScheduleSingle)


def torch_order(name: str, *, stages: int, ranks: int, microbatches: int) -> PipelineOrder:
    """The actions of each rank, by torch's schedule of that name.

    Args:
        name: of the schedule.
        stages: how many there are in all.
        ranks: how many share them, the same number each.
        microbatches: how many there are in a step.

    Raises:
        InputError: an unknown schedule, or numbers that it does not take, with torch's words.

    Example:
        >>> order = torch_order("1f1b", stages=2, ranks=2, microbatches=2)
        >>> ["".join(map(str, action)) for action in order.ranks[0]]
        ['0F0', '0F1', '0B0', '0B1']
    """
    made = schedule_class(name)
    per_rank, remainder = divmod(stages, ranks)
    if remainder or per_rank < 1:
        raise InputError(f"split_policy: {stages} stages cannot be shared by {ranks} ranks evenly")
    single = has_one_stage_a_rank(name)
    if single and per_rank > 1:
        raise InputError(
            f"split_policy: schedule {name!r} has one stage for each rank, got {stages} stages for {ranks} ranks"
        )
    stand_in = SimpleNamespace(num_stages=stages, group_size=ranks, group_rank=0, submod=None)
    try:
        listed = made(*([stand_in] if single else [[stand_in] * per_rank]), microbatches).pipeline_order
    except (AssertionError, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        raise InputError(
            f"split_policy: schedule {name!r} does not take {microbatches} micro-batches for {stages} stages on "
            f"{ranks} ranks: {problem}"
        ) from error
    actions = tuple(tuple(_flat(listed[rank])) for rank in range(ranks))
    # Torch 2.13 lists the forwards of the last stage of 1F1B from micro-batch 1 on; it runs them from 0 on.
    actions = tuple(map(_renumbered, actions)) if single else actions
    return PipelineOrder(name.lower(), actions, stages, microbatches, receives_ahead=not single)


def _flat(listed: Iterable[Any]) -> Iterator[PipelineAction]:
    for action in listed:
        for each in () if action is None else action.sub_actions or (action,):
            if each.computation_type.value in ("F", "B", "I", "W"):  # the others are about sharded parameters
                yield PipelineAction(each.stage_index, each.computation_type.value, each.microbatch_index)


def _renumbered(actions: tuple[PipelineAction, ...]) -> tuple[PipelineAction, ...]:
    counted = {"F": 0, "B": 0}
    found = []
    for action in actions:
        found.append(action._replace(micro_batch=counted[action.kind]))
        counted[action.kind] += 1
    return tuple(found)
