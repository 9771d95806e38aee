"""What every scheduler of per-model rates is: for each model and parameter group a torch scheduler of its own.

Each of them has a shadow optimizer with a single group, which holds the numbers of one model and nothing to train. A
step copies the models' numbers in, steps the schedulers, and copies what they set out again::

    group["lr"]  0.1 | (B,)  --in-->  B shadow groups  --torch's step-->  B shadow groups  --out-->  in place

So a model's rate is, to the last bit, the one that a scheduler of its own would set, whatever the scheduler. Schedulers
may be stacked, and a rate that was changed by hand stays changed, as in torch.
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
from hocket.fusion.lr_scheduler.checks import checked
from hocket.fusion.lr_scheduler.shadows import KEYS, Shadow, epoch_of, moved, put, read
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import is_number, is_row, numbers_of, plain, row

__all__ = ["FusedScheduler"]

Rows = list[list[Any]]  # for each group of parameters a value of each model


class FusedScheduler(LRScheduler):
    """A schedule of the rates of B models, each with arguments of its own; a torch scheduler like any other.

    An argument is one value for all models, or a list of B. With several parameter groups it may also be a list of
    such lists, one for each group.

    Attributes:
        torch_class: the scheduler that this is B of; the arguments have its names and defaults.
        keys: the numbers of a group that a step reads or sets.
        arguments: for each of them the values, by group and model.
        children: the schedulers that this one is made of, for one that takes `schedulers`.

    Args:
        optimizer: one of `hocket.optim`.
        arguments: of `torch_class`, by position.
        named: of `torch_class`, by name.

    Raises:
        InputError: another optimizer, arguments of the wrong length, out of bounds, or refused by torch.
    """

    torch_class: ClassVar[type[LRScheduler]]
    keys: ClassVar[tuple[str, ...]] = ("lr",)
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
        signature = inspect.signature(self.torch_class)
        own = [parameter for name, parameter in signature.parameters.items() if name != "optimizer"]
        bound = signature.replace(parameters=own).bind(*arguments, **named)
        bound.apply_defaults()
        values = bound.arguments
        self.last_epoch = _checked_epoch(optimizer, values.pop("last_epoch", -1))
        self.children = [_checked_child(optimizer, child) for child in values.pop("schedulers", [])]
        self.arguments = {name: self._rows(name, value) for name, value in values.items()}
        self._check_arguments()
        self._step_count = 1
        self._cells = [
            [self._made(model, number, shadow, self.last_epoch) for number, shadow in enumerate(shadows)]
            for model, shadows in enumerate(self._shadows())
        ]
        self.last_epoch += 1
        if any(value != values[0] for rows in self.arguments.values() for values in rows for value in values):
            self._widen()
        self._copy_out(range(optimizer.num_models))

    def torch_scheduler(self, model: int, group: int = 0) -> LRScheduler:
        """The torch scheduler of a model, for one parameter group."""
        return self._cells[self.optimizer.checked_model(model)][group]

    @property
    def epochs(self) -> list[int]:
        """For each model how many steps it has seen; a refilled slot begins at 0."""
        return [epoch_of(cells[0]) for cells in self._cells]

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
        if len(self._cells) != self.optimizer.num_models:
            raise InputError(
                f"step: expected an optimizer of {len(self._cells)} models, got one of {self.optimizer.num_models}; "
                "call select_models with what the optimizer's was called with"
            )
        due = [[cell for cell in cells if not self._is_over(cell)] for cells in self._cells]
        if not any(due):
            longest = max(max(steps) for steps in self.arguments["total_steps"])
            raise InputError(f"step: expected at most {longest} steps, the longest cycle of these models")
        self._copy_in([[cell.optimizer for cell in cells] for cells in self._cells], self.keys)
        for cells, own in zip(due, given, strict=True):
            for cell in cells:
                cell.step(*own)
        self.last_epoch += 1
        self._step_count += 1
        self._copy_out(range(len(due)), self.keys)

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
        kind = type(self).__name__
        for name, value in arguments.items():
            if name not in self.arguments:
                raise InputError(f"refill: expected arguments among {', '.join(self.arguments)}, got {name}={value!r}")
        values = {name: checked(kind, name, value) for name, value in arguments.items()}
        before = self.arguments
        self.arguments = {
            name: [[*own[:slot], values[name], *own[slot + 1 :]] for own in rows] if name in values else rows
            for name, rows in before.items()
        }
        shadows = self._shadows()[slot]
        for shadow in shadows:
            shadow.param_groups[0].pop("initial_lr", None)
            if lr is not None:
                shadow.param_groups[0]["lr"] = numbers_of("lr", lr, 1, self.optimizer.bounds["lr"])
        try:
            cells = [self._made(slot, number, shadow, anew=True) for number, shadow in enumerate(shadows)]
        except InputError:
            self.arguments = before
            raise
        self._cells[slot] = cells
        self._copy_out([slot])

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order: call it with what `optimizer.select_models` was called with."""
        self._cells = [self._cells[model] for model in models]
        for each in (self, *self.children):
            each.arguments = {
                name: [[values[model] for model in models] for values in rows] for name, rows in each.arguments.items()
            }
        self._last_lr = self._rates()

    @property
    def num_models(self) -> int:
        """B, the number of models."""
        return len(self._cells)

    def model_state(self, model: int) -> dict[str, Any]:
        """The schedule of one model, a copy: states of its schedulers, arguments, and what they noted in the groups."""
        keys = [key for key in KEYS if key not in self.optimizer.bounds]
        state = {
            "class": type(self).__name__,
            "schedulers": [cell.state_dict() for cell in self._cells[model]],
            "arguments": {name: [values[model] for values in rows] for name, rows in self._plain_arguments().items()},
            "notes": [
                {key: read(group[key], self.num_models)[model] for key in keys if key in group}
                for group in self.optimizer.param_groups
            ],
        }
        return copy.deepcopy(state)

    def load_model_state(self, model: int, state: Mapping[str, Any]) -> None:
        """Let the schedule of one slot go on from what `model_state` gave; functions stay those of the slot.

        Raises:
            InputError: it is of another scheduler or number of groups.
        """
        kind, cells, given = type(self).__name__, self._cells[model], copy.deepcopy(dict(state))
        if given["class"] != kind or len(given["schedulers"]) != len(cells):
            raise InputError(f"state: expected one of a {kind} of {len(cells)} groups, got one of {given['class']}")
        for cell, own in zip(cells, given["schedulers"], strict=True):
            cell.load_state_dict(own)
        for name, values in given["arguments"].items():
            for row_, value in zip(self.arguments[name], values, strict=True):
                row_[model] = value
        for group, notes in zip(self.optimizer.param_groups, given["notes"], strict=True):
            for key, value in notes.items():
                values = read(group.get(key, value), self.num_models)
                put(self.optimizer, group, key, [*values[:model], value, *values[model + 1 :]])
        self._last_lr = self._rates()

    def _plain_arguments(self) -> dict[str, Rows]:
        return {name: rows for name, rows in self.arguments.items() if not callable(rows[0][0])}

    def state_dict(self) -> dict[str, Any]:
        """The states of the torch schedulers, by model and group, and the arguments; a copy.

        Of functions among the arguments only what objects that can be called hold is saved, as in torch.
        """
        arguments = self._plain_arguments()
        state = {"last_epoch": self.last_epoch, "step_count": self._step_count, "arguments": arguments}
        schedulers = [[cell.state_dict() for cell in cells] for cells in self._cells]
        return copy.deepcopy({"class": type(self).__name__, **state, "schedulers": schedulers})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models.

        Raises:
            InputError: it is of another scheduler, or of other numbers of models or groups.
        """
        kind = type(self).__name__
        if state_dict.get("class") != kind:
            raise InputError(f"state_dict: expected one of a {kind}, got one of {state_dict.get('class')}")
        state = copy.deepcopy(state_dict)
        states, cells = state["schedulers"], self._cells
        if len(states) != len(cells):
            raise InputError(f"state_dict: expected one of {len(cells)} models, got one of {len(states)}")
        if len(states[0]) != len(cells[0]):
            raise InputError(f"state_dict: expected one of {len(cells[0])} groups, got one of {len(states[0])}")
        for own, saved in zip(cells, states, strict=True):
            for cell, each in zip(own, saved, strict=True):
                cell.load_state_dict(each)
        self.arguments |= state["arguments"]
        self.last_epoch, self._step_count = state["last_epoch"], state["step_count"]
        self._last_lr = self._rates()

    def _check_arguments(self) -> None:
        """Check what the arguments demand of each other and of the optimizer."""

    def _is_over(self, cell: Any) -> bool:
        """Whether a torch scheduler has no step left."""
        return False

    def _made(self, model: int, group: int, shadow: Shadow, last_epoch: int = -1, anew: bool = False) -> LRScheduler:
        """A torch scheduler of this model's arguments for a group, on a shadow; its children made `anew` or moved."""
        own = {name: rows[group][model] for name, rows in self.arguments.items()}
        if "last_epoch" in inspect.signature(self.torch_class).parameters:
            own["last_epoch"] = last_epoch
        if self.children:
            make = (lambda child: child._made(model, group, shadow, anew=True)) if anew else None
            own["schedulers"] = [
                make(each) if make else moved(each._cells[model][group], shadow) for each in self.children
            ]
        try:
            return self.torch_class(optimizer=shadow, **own)
        except (TypeError, ValueError) as error:
            raise InputError(f"{type(self).__name__} of model {model}: {error}") from error

    def _shadows(self) -> list[list[Shadow]]:
        """For each model and group a new shadow, which holds the model's numbers."""
        groups = range(len(self.optimizer.param_groups))
        found = [[Shadow(self.optimizer) for _ in groups] for _ in range(self.optimizer.num_models)]
        self._copy_in(found)
        return found

    def _copy_in(self, shadows: Sequence[Sequence[torch.optim.Optimizer]], keys: Sequence[str] = KEYS) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            own = [each[number].param_groups[0] for each in shadows]
            for key in keys:
                if key in group:
                    for shadow, value in zip(own, read(group[key], len(shadows)), strict=True):
                        shadow[key] = value

    def _copy_out(self, models: Sequence[int], keys: Sequence[str] = KEYS) -> None:
        """Set in the fused optimizer what the schedulers of these models have set."""
        total = self.optimizer.num_models
        for number, group in enumerate(self.optimizer.param_groups):
            own = {model: self._cells[model][number].optimizer.param_groups[0] for model in models}
            for key in (key for key in keys if key in own[models[0]]):
                old = read(group.get(key), total)
                new = [own[model][key] if model in own else value for model, value in enumerate(old)]
                if new != old:
                    put(self.optimizer, group, key, new)
        self._last_lr = self._rates()

    def _rates(self) -> list[Any]:
        rates = [plain(group["lr"]) for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _widen(self) -> None:
        """Make room for numbers of each model now: a step that is captured with one cannot hold B of them later."""
        optimizer = self.optimizer
        cycles = any(value for values in self.arguments.get("cycle_momentum", []) for value in values)
        for group in optimizer.param_groups:
            group["lr"] = optimizer.widened(group, group["lr"])
            if cycles and "betas" in optimizer.bounds:
                group["betas"] = (optimizer.widened(group, group["betas"][0]), *group["betas"][1:])
            elif cycles:
                group["momentum"] = optimizer.widened(group, group["momentum"])

    def _rows(self, name: str, value: Any) -> Rows:
        """An argument, one for all, B, or for each group one or B, as checked values by group and model."""
        groups, models = len(self.optimizer.param_groups), self.optimizer.num_models
        if name == "milestones":  # a list for all models, or B lists
            epochs = list(value)
            each = any(isinstance(element, (list, tuple, set)) for element in epochs)
            rows = [row(name, epochs, models, "a list") if each else [epochs] * models] * groups
        elif not is_row(value):
            rows = [[value] * models] * groups
        elif any(is_row(element) for element in value):
            if len(value) != groups:
                raise InputError(f"{name}: expected a list for each of {groups} groups, got {len(value)}: {value!r}")
            rows = [row(name, inner, models) if is_row(inner) else [inner] * models for inner in value]
        else:
            what = "a number" if all(is_number(element) for element in value) else "a value"
            rows = [row(name, value, models, what)] * groups
        kind = type(self).__name__
        return [[checked(kind, name, element) for element in values] for values in rows]


def _checked_epoch(optimizer: FusedOptimizer, last_epoch: Any) -> int:
    if isinstance(last_epoch, bool) or not isinstance(last_epoch, int) or last_epoch < -1:
        raise InputError(f"last_epoch: expected a whole number >= -1, got {last_epoch!r}")
    for number, group in enumerate(optimizer.param_groups):
        if last_epoch != -1 and "initial_lr" not in group:
            raise InputError(f"last_epoch: expected -1, got {last_epoch}, but group {number} has no 'initial_lr'")
    return last_epoch


def _checked_child(optimizer: FusedOptimizer, child: Any) -> FusedScheduler:
    if not isinstance(child, FusedScheduler) or child.optimizer is not optimizer:
        raise InputError(f"schedulers: expected some of hocket.lr_scheduler, of one optimizer, got {child!r}")
    return child
