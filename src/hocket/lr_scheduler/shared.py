"""torch's schedulers on shadow optimizers: one for all models and parameter groups whose schedules are alike.

    lr     0.1  0.2  0.3            scheduler A: gamma 0.5    shadow groups  0.1  0.2   of models 0 and 1
    gamma  0.5  0.5  0.9    -->     scheduler B: gamma 0.9    shadow group   0.3        of model 2

torch's schedulers treat each parameter group by itself, with the same Python arithmetic. So each model's numbers are,
to the last bit, those that a scheduler of its own would set, however many models stand in one as groups of a shadow.
What concerns one model (its state, another schedule) is done to a scheduler of its own: `split`, then `joined` again.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["KEYS", "Place", "Shadow", "SharedScheduler", "epoch_of", "is_over", "joined", "moved", "split"]

Place = tuple[int, int]  # a model, and the number of a parameter group

KEYS = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")
BY_GROUP = ("base_lrs", "_last_lr", "max_lrs", "min_lrs", "base_momentums", "max_momentums", "lr_lambdas")


class Shadow(torch.optim.Optimizer):
    """An optimizer with the numbers of these parameter groups, and nothing to train."""

    _opt_called = True  # whether steps come in order is asked of the fused optimizer

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        super().__init__([torch.zeros(0)], {key: groups[0][key] for key in KEYS[:3] if key in groups[0]})
        self.param_groups = [{**self.param_groups[0], **group} for group in groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is trained here."""

    # As torch marks a step that notes its calls.
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class SharedScheduler:
    """A torch scheduler, and whose schedule it is: for each group of its shadow the place."""

    scheduler: Any
    places: tuple[Place, ...]


def joined(singles: Mapping[Place, LRScheduler]) -> list[SharedScheduler]:
    """Schedulers of one group each, those that are alike as one."""
    alike: dict[Any, list[Place]] = {}
    for place, single in singles.items():
        alike.setdefault(_kind(single, place), []).append(place)
    return [
        SharedScheduler(_together([singles[place] for place in places]), tuple(places)) for places in alike.values()
    ]


def split(cells: Sequence[SharedScheduler]) -> dict[Place, LRScheduler]:
    """For each place a scheduler of its own."""
    return {
        place: cell.scheduler if len(cell.places) == 1 else _part(cell.scheduler, number)
        for cell in cells
        for number, place in enumerate(cell.places)
    }


def moved(single: LRScheduler, shadow: Shadow) -> LRScheduler:
    """A torch scheduler, with those that it is made of, on another shadow from now on."""
    single.optimizer = shadow
    for inner in getattr(single, "_schedulers", ()):
        moved(inner, shadow)
    return single


def epoch_of(scheduler: Any) -> int:
    """How many steps a torch scheduler has seen, or the first of those that it is made of."""
    return scheduler.last_epoch if hasattr(scheduler, "last_epoch") else epoch_of(scheduler._schedulers[0])


def is_over(scheduler: Any) -> bool:
    """Whether a torch scheduler has no step left: torch's `OneCycleLR` raises then."""
    return hasattr(scheduler, "total_steps") and scheduler.last_epoch >= scheduler.total_steps


def _kind(single: LRScheduler, place: Place) -> Any:
    """The same for schedulers that differ in numbers of their groups alone; else, and in doubt, the place."""

    def frozen(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value), *map(frozen, value)
        if isinstance(value, dict):
            return type(value), *((key, frozen(each)) for key, each in value.items())
        if value is not None and not isinstance(value, (bool, int, float, str, types.FunctionType)):
            raise TypeError
        return type(value), value

    try:
        return type(single), frozen({key: value for key, value in vars(single).items() if key not in _OWN})
    except TypeError:
        return place


_OWN = ("optimizer", *BY_GROUP)


def _together(singles: Sequence[LRScheduler]) -> LRScheduler:
    if len(singles) == 1:
        return singles[0]
    whole = copy.copy(singles[0])
    for name in vars(whole).keys() & set(BY_GROUP):
        setattr(whole, name, [getattr(single, name)[0] for single in singles])
    whole.optimizer = Shadow([single.optimizer.param_groups[0] for single in singles])
    return whole


def _part(whole: LRScheduler, number: int) -> LRScheduler:
    part = copy.copy(whole)
    for name, value in vars(whole).items():
        if isinstance(value, (list, dict)):
            setattr(part, name, [value[number]] if name in BY_GROUP else copy.copy(value))
    part.optimizer = Shadow([whole.optimizer.param_groups[number]])
    return part
