"""What every scheduler of per-model rates is.

A schedule is a few operations on one float for each model and group. They are done in Python floats by torch's own
formulas, so each model's rate is the very float that a scheduler of its own would set; what takes time on a device is
one small copy into the rate's tensor, when a rate changes::

    group["lr"]  0.1 | [0.1, 0.2, 0.3]   --next_rate(model, group, epoch, rate)-->   written in place

A chained schedule (StepLR, ...) goes on from the rate that it finds, so schedulers may be stacked, and a rate that was
changed by hand stays changed, as in torch.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import InputError
from hocket.fusion.optim.base import FusedOptimizer
from hocket.fusion.optim.hyper import as_list, is_number, is_row, plain, row

__all__ = ["FusedScheduler", "Rows", "check_optimizer", "read_rates", "widen", "write_rates"]

Rows = list[list[Any]]  # for each group of parameters a value of each model


class FusedScheduler(LRScheduler, ABC):
    """A schedule of the rates of B models, each with arguments of its own; a torch scheduler like any other.

    An argument is one value for all models, or a list of B. With several parameter groups it may also be a list of
    such lists, one for each group.

    Attributes:
        epochs: for each model how many steps it has seen (a refilled slot begins at 0).
        base_rates: for each group the rate that each model began with.

    Args:
        optimizer: one of `hocket.optim`.
        last_epoch: as in torch: -1 begins; another one resumes, from ``group["initial_lr"]``.

    Raises:
        InputError: another optimizer, arguments of the wrong length or out of bounds.
    """

    optimizer: FusedOptimizer

    def __init__(self, optimizer: FusedOptimizer, last_epoch: int = -1) -> None:
        check_optimizer(self, optimizer)
        if isinstance(last_epoch, bool) or not isinstance(last_epoch, int) or last_epoch < -1:
            raise InputError(f"last_epoch: expected a whole number >= -1, got {last_epoch!r}")
        for number, group in enumerate(optimizer.param_groups):
            if last_epoch == -1:
                group.setdefault("initial_lr", _copy(group["lr"]))
            elif "initial_lr" not in group:
                raise InputError(f"last_epoch: expected -1, got {last_epoch}, but group {number} has no 'initial_lr'")
        self.base_rates: Rows = [as_list(group["initial_lr"], optimizer.num_models) for group in optimizer.param_groups]
        if any(isinstance(value, Argument) and value.differs for value in vars(self).values()):
            widen(optimizer, "lr")
        self.epochs = [last_epoch] * optimizer.num_models
        self._began = [False] * optimizer.num_models
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def next_rate(self, model: int, group: int, epoch: int, rate: float) -> float:
        """The rate of one model in one group at `epoch`, where it was `rate` up to now.

        Before the first step of a model (see `is_first`) it is asked for epoch 0, or for the epoch that it resumes at.
        """

    def is_first(self, model: int) -> bool:
        """Whether the schedule of this model is only being set up."""
        return not self._began[model]

    def step(self, epoch: int | None = None) -> None:
        """Go on to the next epoch, after the optimizer's step."""
        if epoch is not None:
            raise InputError(f"step: expected no epoch (torch deprecates it), got {epoch!r}")
        # torch wraps the optimizer's step to know this
        if self._step_count == 1 and not getattr(self.optimizer, "_opt_called", False):
            warnings.warn(
                "lr_scheduler.step() was called before optimizer.step(): the first rate of the schedule is skipped",
                UserWarning,
                stacklevel=2,
            )
        self._step_count += 1
        self.last_epoch += 1
        self.epochs = [epoch + 1 for epoch in self.epochs]
        self.advance(range(self.optimizer.num_models))

    def advance(self, models: Sequence[int]) -> None:
        """Set the rates of these models to those of their epochs."""
        for number, group in enumerate(self.optimizer.param_groups):
            rates = read_rates(self.optimizer, group)
            new = list(rates)
            for model in models:
                new[model] = self.next_rate(model, number, self.epochs[model], rates[model])
            write_rates(self.optimizer, group, rates, new)
        for model in models:
            self._began[model] = True
        self._last_lr = [_copy(group["lr"]) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[Any]:
        """For each group the rate: a float, or of shape (B,)."""
        return self._last_lr

    def get_lr(self) -> list[Any]:
        """As `get_last_lr`: a fused schedule computes nothing ahead."""
        return self._last_lr

    def refill(self, model: int, lr: float | None = None, **arguments: Any) -> None:
        """Begin the schedule of one slot anew, at epoch 0; the others go on undisturbed.

        Args:
            model: the slot.
            lr: the rate it begins with; by default the slot's present rate, that of `optimizer.refill`.
            arguments: of the scheduler, for this model (``gamma=0.5``); by default the slot's old ones.
        """
        slot = self.optimizer.checked_model(model)
        self.set_arguments(slot, arguments)
        for number, group in enumerate(self.optimizer.param_groups):
            begin = read_rates(self.optimizer, group)[slot] if lr is None else lr
            self.optimizer.set_for_model(group, "lr", slot, begin)
            self.base_rates[number][slot] = float(begin)
            initial = as_list(group["initial_lr"], self.optimizer.num_models)
            initial[slot] = float(begin)
            group["initial_lr"] = torch.tensor(initial, dtype=torch.float64)
        self.epochs[slot] = 0
        self._began[slot] = False
        self.begin_model(slot)
        self.advance([slot])

    def begin_model(self, model: int) -> None:
        """Set up what else this model's schedule begins with."""

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order: call it with what `optimizer.take` was called with."""
        for name, value in list(vars(self).items()):
            if isinstance(value, Argument):
                value.rows = [[values[model] for model in models] for values in value.rows]
            elif name in self.per_model:
                setattr(self, name, [value[model] for model in models])
        self.base_rates = [[values[model] for model in models] for values in self.base_rates]
        self._last_lr = [_copy(group["lr"]) for group in self.optimizer.param_groups]

    per_model: tuple[str, ...] = ("epochs", "_began")  # attributes with one element for each model

    def argument(self, name: str, value: Any, check: Callable[[str, Any], Any]) -> Argument:
        """An argument of the constructor as a value for each group and model, each one passed through `check`."""
        groups = len(self.optimizer.param_groups)
        return Argument(name, _rows(name, value, self.optimizer.num_models, groups, check), check)

    def set_arguments(self, model: int, arguments: Mapping[str, Any]) -> None:
        """Set arguments of the constructor for one model."""
        known = {argument.name: argument for argument in vars(self).values() if isinstance(argument, Argument)}
        for name, value in arguments.items():
            if name not in known:
                raise InputError(f"refill: expected arguments among {', '.join(known)}, got {name}={value!r}")
            known[name].check(name, value)
        for name, value in arguments.items():
            for values in known[name].rows:
                values[model] = known[name].check(name, value)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer, in plain values."""
        return {
            key: {"rows": [list(values) for values in value.rows]} if isinstance(value, Argument) else value
            for key, value in vars(self).items()
            if key != "optimizer"
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models."""
        models = len(state_dict["epochs"])
        if models != self.optimizer.num_models:
            raise InputError(f"state_dict: expected one of {self.optimizer.num_models} models, got one of {models}")
        for key, value in state_dict.items():
            own = getattr(self, key, None)
            if isinstance(own, Argument):
                own.rows = [list(values) for values in value["rows"]]
            else:
                setattr(self, key, list(value) if isinstance(value, list) else value)


class Argument:
    """An argument of a scheduler: for each group a value of each model, and how a value is checked."""

    def __init__(self, name: str, rows: Rows, check: Callable[[str, Any], Any]) -> None:
        self.name = name
        self.rows = rows
        self.check = check

    @property
    def differs(self) -> bool:
        """Whether it is not the same for all models of a group."""
        return any(value != values[0] for values in self.rows for value in values)

    def __call__(self, model: int, group: int = 0) -> Any:
        """The value of a model in a group."""
        return self.rows[group][model]


def check_optimizer(scheduler: Any, optimizer: Any) -> None:
    """Refuse an optimizer that knows of no models."""
    if not isinstance(optimizer, FusedOptimizer):
        raise InputError(
            f"optimizer: expected one of hocket.optim, got {type(optimizer).__module__}.{type(optimizer).__name__}; "
            f"for that one there is torch.optim.lr_scheduler.{type(scheduler).__name__}"
        )
    scheduler.optimizer = optimizer


def read_rates(optimizer: FusedOptimizer, group: Mapping[str, Any], key: str = "lr") -> list[float]:
    """The rate of each model as it is now; waits for a GPU that holds them."""
    return as_list(plain(group[key]), optimizer.num_models)


def write_rates(optimizer: FusedOptimizer, group: dict[str, Any], old: list[float], new: list[float]) -> None:
    """Set the rates of a group, if they changed; one float stays one float while it may."""
    if new == old:
        return
    if not isinstance(group["lr"], torch.Tensor) and all(rate == new[0] for rate in new):
        group["lr"] = new[0]
    else:
        optimizer.set_number(group, "lr", new)


def widen(optimizer: FusedOptimizer, key: str) -> None:
    """Make room for a rate of each model now: a step that is captured with one number cannot hold B of them later."""
    for group in optimizer.param_groups:
        if key == "betas":
            first, *rest = group[key]
            group[key] = (optimizer.widened(group, first), *rest)
        else:
            group[key] = optimizer.widened(group, group[key])


def _rows(name: str, value: Any, num_models: int, num_groups: int, check: Callable[[str, Any], Any]) -> Rows:
    """`value`, one for all, B, or for each group one or B, as rows of checked values.

    Example:
        >>> _rows("gamma", [0.5, 0.1], 2, 1, lambda name, value: value)
        [[0.5, 0.1]]
        >>> _rows("gamma", [[0.5, 0.1], 0.9], 2, 2, lambda name, value: value)
        [[0.5, 0.1], [0.9, 0.9]]
    """
    if not is_row(value):
        return [[check(name, value) for _ in range(num_models)] for _ in range(num_groups)]
    if any(is_row(element) for element in value):
        if len(value) != num_groups:
            raise InputError(f"{name}: expected a list for each of {num_groups} groups, got {len(value)}: {value!r}")
        return [
            [check(name, v) for v in (row(name, inner, num_models) if is_row(inner) else [inner] * num_models)]
            for inner in value
        ]
    what = "a number" if all(is_number(element) for element in value) else "a value"
    values = row(name, value, num_models, what)
    return [[check(name, element) for element in values] for _ in range(num_groups)]


def _copy(value: Any) -> Any:
    return plain(value).clone() if isinstance(value, torch.Tensor) else value
