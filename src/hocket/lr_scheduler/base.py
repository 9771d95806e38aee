"""What every scheduler of per-model rates is: torch's own, on shadows of the optimizer that hold each model's numbers.

A step copies the models' numbers into the shadows, steps torch's schedulers, and copies what they set out again::

    group["lr"]  0.1 | (B,)  --in-->  shadow groups  --torch's step-->  shadow groups  --out-->  in place

So a model's rate is, to the last bit, the one that a scheduler of its own would set, whatever the scheduler. Schedulers
may be stacked, and a rate that was changed by hand stays changed, as in torch. Models whose schedules are alike share a
torch scheduler; see `hocket.lr_scheduler.shared`.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import InputError
from hocket.lr_scheduler.arguments import bound, by_place, check_epoch, checked
from hocket.lr_scheduler.shared import (
    KEYS,
    Place,
    Shadow,
    SharedScheduler,
    epoch_of,
    is_over,
    joined,
    moved,
    split,
)
from hocket.optim.base import FusedOptimizer
from hocket.optim.hyper import by_model, numbers_of, plain

__all__ = ["FusedScheduler"]


class FusedScheduler(LRScheduler):
    """A schedule of the rates of B models, each with arguments of its own; a torch scheduler like any other.

    An argument is one value for all models, or a list of B. With several parameter groups it may also be a list of
    such lists, one for each group.

    Attributes:
        torch_class: the scheduler that this is B of; the arguments have its names and defaults.
        takes_metrics: whether models with equal arguments still go ways of their own.
        num_models: B, the number of models.
        arguments: those of each model and group.
        children: the schedulers that this one is made of, for one that takes `schedulers`.

    Args:
        optimizer: one of `hocket.optim`.
        arguments: of `torch_class`, by position.
        named: of `torch_class`, by name.

    Raises:
        InputError: another optimizer, arguments of the wrong length, out of bounds, or refused by torch.
    """

    torch_class: ClassVar[type[LRScheduler]]
    takes_metrics: ClassVar[bool] = False
    optimizer: FusedOptimizer

    def __init_subclass__(cls) -> None:
        cls.__signature__ = inspect.signature(cls.torch_class)  # type: ignore[attr-defined]

    def __init__(self, optimizer: FusedOptimizer, *arguments: Any, **named: Any) -> None:
        if not isinstance(optimizer, FusedOptimizer):
            raise InputError(
                f"optimizer: expected one of hocket.optim, got {type(optimizer).__module__}.{type(optimizer).__name__};"
                f" for that one there is torch.optim.lr_scheduler.{type(self).__name__}"
            )
        self.optimizer = optimizer
        self.num_models = optimizer.num_models
        values = bound(self.torch_class, arguments, named)
        self.last_epoch = check_epoch(optimizer, values.pop("last_epoch", -1))
        self.children: list[FusedScheduler] = values.pop("schedulers", [])
        for child in self.children:
            if not isinstance(child, FusedScheduler) or child.optimizer is not optimizer:
                raise InputError(f"schedulers: expected some of hocket.lr_scheduler, of one optimizer, got {child!r}")
            child._part()  # each of its schedulers goes into one of this
        self.arguments = by_place(self.torch_class, values, optimizer)
        self._keys = KEYS if self.children or "cycle_momentum" in values else KEYS[:1]  # what a step reads or sets
        self._step_count = 1
        self._shares = True  # whether models whose schedules are alike may share a torch scheduler
        self._keep({place: self._made(place, self._shadow(place), own) for place, own in self.arguments.items()})
        if self.children:
            self._part()  # they are on the shadows of this one by now
        self.last_epoch += 1
        if self.takes_metrics or any(own != self.arguments[0, group] for (_, group), own in self.arguments.items()):
            self._widen()
        self._copy_out(KEYS)

    def torch_scheduler(self, model: int, group: int = 0) -> LRScheduler:
        """The torch scheduler of a model, for one parameter group; from now on models share none."""
        place = (self.optimizer.checked_model(model), group)
        self._part()
        return split(self._cells)[place]

    @property
    def epochs(self) -> list[int]:
        """For each model how many steps it has seen; a refilled slot begins at 0."""
        found = {model: epoch_of(cell.scheduler) for cell in self._cells for model, _ in cell.places}
        return [found[model] for model in range(self.num_models)]

    def step(self, epoch: Any = None) -> None:
        """Go on to the next epoch, after the optimizer's step.

        Raises:
            InputError: an epoch is given, or every model's schedule is over.
        """
        if epoch is not None:
            raise InputError(f"step: expected no epoch (torch deprecates it), got {epoch!r}")
        if self._step_count == 1 and not getattr(self.optimizer, "_opt_called", False):
            warnings.warn(
                "lr_scheduler.step() was called before optimizer.step(): the first rate of the schedule is skipped",
                UserWarning,
                stacklevel=2,
            )
        self._advance([()] * self.optimizer.num_models)

    def _advance(self, given: Sequence[tuple[Any, ...]]) -> None:
        """Step each model's schedulers, with what is given for the model."""
        if self.num_models != self.optimizer.num_models:
            raise InputError(
                f"step: expected an optimizer of {self.num_models} models, got one of {self.optimizer.num_models}; "
                "call select_models with what the optimizer's was called with"
            )
        if self._shares and any(each != given[0] for each in given):
            self._part()
        due = [cell for cell in self._cells if not is_over(cell.scheduler)]
        if not due:
            longest = max(cell.scheduler.total_steps for cell in self._cells)
            raise InputError(f"step: expected at most {longest} steps, the longest cycle of these models")
        self._copy_in(self._keys)
        for cell in due:
            cell.scheduler.step(*given[cell.places[0][0]])
        self.last_epoch += 1
        self._step_count += 1
        self._copy_out(self._keys)

    def get_lr(self) -> list[Any]:
        """As `get_last_lr`: nothing is computed ahead."""
        return self._last_lr

    def refill(self, model: int, lr: float | None = None, **arguments: Any) -> None:
        """Begin the schedule of one slot anew, at epoch 0; the others go on undisturbed.

        Args:
            model: the slot.
            lr: the rate it begins with; by default the slot's present rate, that of `optimizer.refill`.
            arguments: of the scheduler, for this model (``gamma=0.5``); by default the slot's old ones.

        Raises:
            InputError: an unknown argument, or a value out of bounds.
        """
        slot = self.optimizer.checked_model(model)
        places = [place for place in self.arguments if place[0] == slot]
        known = self.arguments[places[0]]
        for name, value in arguments.items():
            if name not in known:
                raise InputError(f"refill: expected arguments among {', '.join(known)}, got {name}={value!r}")
        values = {name: checked(self.torch_class, name, value) for name, value in arguments.items()}
        own = {place: {**self.arguments[place], **values} for place in places}
        new = {}
        for place in places:
            shadow = self._shadow(place)
            shadow.param_groups[0].pop("initial_lr", None)
            if lr is not None:
                shadow.param_groups[0]["lr"] = numbers_of("lr", lr, 1, self.optimizer.bounds["lr"])
            new[place] = self._made(place, shadow, own[place], anew=True)
        # All of it fits: from here on nothing is refused.
        self.arguments |= own
        self._copy_in(KEYS)
        self._keep({**split(self._cells), **new})
        self._copy_out(KEYS)

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order: call it with what `optimizer.select_models` was called with."""
        groups, singles = range(len(self.optimizer.param_groups)), split(self._cells)
        kept = {(now, group): (was, group) for now, was in enumerate(models) for group in groups}
        self.arguments = {now: self.arguments[was] for now, was in kept.items()}
        self.num_models = len(models)
        self._keep({now: singles[was] for now, was in kept.items()})
        self._last_lr = self._rates()
        for child in self.children:
            child.select_models(models)

    def model_state(self, model: int) -> dict[str, Any]:
        """The schedule of one model, a copy: states of its schedulers, arguments, and what they noted in the groups.

        Of functions among the arguments only what objects that can be called hold is saved, as in torch.
        """
        return self._states([model])[0]

    def load_model_state(self, model: int, state: Mapping[str, Any]) -> None:
        """Let the schedule of one slot go on from what `model_state` gave; functions stay those of the slot.

        Raises:
            InputError: it is of another scheduler or number of groups.
        """
        self._load({model: state}, "state", 1)

    def state_dict(self) -> dict[str, Any]:
        """The state of each model's schedule, as `model_state` gives it; a copy."""
        models = self._states(range(self.num_models))
        return {"last_epoch": self.last_epoch, "step_count": self._step_count, "models": models}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models.

        Raises:
            InputError: it is of another scheduler, or of other numbers of models or groups.
        """
        self._load(dict(enumerate(state_dict.get("models", ()))), "state_dict", self.num_models)
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]

    def _states(self, models: Sequence[int]) -> list[dict[str, Any]]:
        """For each of these models what `model_state` gives."""
        groups, singles = list(enumerate(self.optimizer.param_groups)), split(self._cells)
        notes = [key for key in KEYS if key not in self.optimizer.bounds]
        values = [{key: by_model(group[key], self.num_models) for key in notes if key in group} for _, group in groups]

        def without_functions(arguments: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in arguments.items() if not callable(value)}

        return [
            copy.deepcopy(
                {
                    "class": type(self).__name__,
                    "schedulers": [singles[model, number].state_dict() for number, _ in groups],
                    "arguments": [without_functions(self.arguments[model, number]) for number, _ in groups],
                    "notes": [{key: own[model] for key, own in noted.items()} for noted in values],
                }
            )
            for model in models
        ]

    def _load(self, states: Mapping[int, Mapping[str, Any]], what: str, expected: int) -> None:
        """Let these models' schedules go on from what `model_state` gave."""
        kind, groups = type(self).__name__, self.optimizer.param_groups
        for state in states.values():
            if state["class"] != kind:
                raise InputError(f"{what}: expected one of a {kind}, got one of {state['class']}")
            if len(state["schedulers"]) != len(groups):
                raise InputError(f"{what}: expected one of {len(groups)} groups, got one of {len(state['schedulers'])}")
        if len(states) != expected:
            raise InputError(f"{what}: expected one of {expected} models, got one of {len(states)}")
        singles = split(self._cells)
        for model, state in copy.deepcopy(dict(states)).items():
            for number, group in enumerate(groups):
                singles[model, number].load_state_dict(state["schedulers"][number])
                self.arguments[model, number] |= state["arguments"][number]
                for key, value in state["notes"][number].items():
                    group.setdefault(key, value)
                    self.optimizer.set_for_model(group, key, model, value)
        self._keep(singles)
        self._last_lr = self._rates()

    def _made(self, place: Place, shadow: Shadow, arguments: Mapping[str, Any], anew: bool = False) -> LRScheduler:
        """A torch scheduler with one model's arguments for a group, on a shadow; its children made `anew` or moved."""
        own = dict(arguments)
        if self.last_epoch != -1 and not anew:
            own["last_epoch"] = self.last_epoch
        if self.children:
            own["schedulers"] = [
                child._made(place, shadow, child.arguments[place], anew=True)
                if anew
                else moved(split(child._cells)[place], shadow)
                for child in self.children
            ]
        try:
            return self.torch_class(optimizer=shadow, **own)
        except (TypeError, ValueError) as error:
            raise InputError(f"{type(self).__name__} of model {place[0]}: {error}") from error

    def _shadow(self, place: Place) -> Shadow:
        """A new shadow, which holds a model's numbers of a group."""
        model, group = place[0], self.optimizer.param_groups[place[1]]
        self.optimizer.settle(group)
        return Shadow([{key: by_model(group[key], self.num_models)[model] for key in KEYS if key in group}])

    def _keep(self, singles: Mapping[Place, LRScheduler]) -> None:
        """Go on with these schedulers, and note where the numbers of each group's models lie."""
        self._cells = (
            joined(singles) if self._shares else [SharedScheduler(single, (at,)) for at, single in singles.items()]
        )
        own = {
            place: shadow
            for cell in self._cells
            for place, shadow in zip(cell.places, cell.scheduler.optimizer.param_groups, strict=True)
        }
        self._shadows = [
            [own[model, group] for model in range(self.num_models)] for group in range(len(self.optimizer.param_groups))
        ]

    def _part(self) -> None:
        """From now on give each model schedulers of its own."""
        self._shares = False
        self._keep(split(self._cells))
        for child in self.children:
            child._part()

    def _copy_in(self, keys: Sequence[str]) -> None:
        for group, shadows in zip(self.optimizer.param_groups, self._shadows, strict=True):
            self.optimizer.settle(group)
            for key in (key for key in keys if key in group):
                for shadow, value in zip(shadows, by_model(group[key], self.num_models), strict=True):
                    shadow[key] = value

    def _copy_out(self, keys: Sequence[str]) -> None:
        """Set in the fused optimizer what the schedulers have set."""
        for group, shadows in zip(self.optimizer.param_groups, self._shadows, strict=True):
            for key in (key for key in keys if key in shadows[0]):
                new = [shadow[key] for shadow in shadows]
                if new != by_model(group.get(key), self.num_models):
                    self.optimizer.set_by_model(group, key, new)
        self._last_lr = self._rates()

    def _rates(self) -> list[Any]:
        rates = [plain(group["lr"]) for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _widen(self) -> None:
        """Make room for numbers of each model now: a step that is captured with one cannot hold B of them later."""
        optimizer = self.optimizer
        cycles = any(own.get("cycle_momentum") for own in self.arguments.values())
        for group in optimizer.param_groups:
            group["lr"] = optimizer.widened(group, group["lr"])
            if cycles and "betas" in optimizer.bounds:
                group["betas"] = (optimizer.widened(group, group["betas"][0]), *group["betas"][1:])
            elif cycles:
                group["momentum"] = optimizer.widened(group, group["momentum"])
