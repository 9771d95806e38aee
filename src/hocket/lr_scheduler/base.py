"""B torch schedulers, one for each model and parameter group, stepped in a loop.

A torch scheduler reads and sets the numbers of an optimizer's groups. Here each has a stand-in optimizer that holds the
numbers of one model in one group. A step copies them in, steps torch's schedulers, and copies them out again::

    group["lr"]  0.1 | (B,)  --in-->  B stand-ins  --torch's step-->  B stand-ins  --out-->  in place

So a model's rate is, to the last bit, the one that a scheduler of its own would set, whatever the scheduler. Schedulers
may be stacked, and a rate that was changed by hand stays changed, as in torch. The loop costs 3 to 7 us a model.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch.optim.lr_scheduler import LRScheduler

from hocket.errors import InputError
from hocket.lr_scheduler.arguments import Place, bound, by_place, checked
from hocket.optim.base import FusedOptimizer
from hocket.optim.hyper import as_tuple, by_model, check_whole, numbers_of, of_model, plain

KEYS = ("lr", "momentum", "betas", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum")


class StandIn(torch.optim.Optimizer):
    """An optimizer with one model's numbers of a parameter group, and nothing to train."""

    _opt_called = True  # the order of steps is checked by the fused scheduler

    def __init__(self, numbers: dict[str, Any]) -> None:
        super().__init__([torch.zeros(0)], {key: numbers[key] for key in KEYS[:3] if key in numbers})
        self.param_groups[0].update(numbers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No-op: nothing is trained here."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # or torch would wrap it to note its calls


class FusedScheduler(LRScheduler):
    """A torch scheduler of the rates of B models, each with arguments of its own.

    An argument is one value for all models, or a list of B. With several parameter groups it may also be a list of
    such lists, one for each group.

    Attributes:
        torch_class: the scheduler that this is B of. The arguments have its names and defaults.
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
        last_epoch = check_whole("last_epoch", values.pop("last_epoch", -1), -1)
        self.children: list[FusedScheduler] = values.pop("schedulers", [])
        for child in self.children:
            if not isinstance(child, FusedScheduler) or child.optimizer is not optimizer:
                raise InputError(f"schedulers: expected some of hocket.lr_scheduler, of one optimizer, got {child!r}")
        self.arguments = by_place(self.torch_class, values, optimizer)
        self.last_epoch = last_epoch + 1
        self._step_count = 1
        resumed = {} if last_epoch == -1 else {"last_epoch": last_epoch}
        self._singles: dict[Place, Any] = {}
        for place, own in self.arguments.items():
            stand_in = self._stand_in(place)
            inner = [_moved(child._singles[place], stand_in) for child in self.children]
            self._singles[place] = self._made(place, stand_in, {**own, **resumed}, inner)
        if "metrics" in inspect.signature(self.torch_class.step).parameters or any(
            own != self.arguments[0, group] for (_, group), own in self.arguments.items()
        ):
            self._widen()
        self._copy_out()

    def torch_scheduler(self, model: int, group: int = 0) -> LRScheduler:
        """The torch scheduler of a model, for one parameter group."""
        return self._singles[self.optimizer.checked_model(model), group]

    @property
    def epochs(self) -> list[int]:
        """For each model how many steps it has seen. A refilled slot begins at 0."""

        def epoch(single: Any) -> int:
            return single.last_epoch if hasattr(single, "last_epoch") else epoch(single._schedulers[0])

        return [epoch(self._singles[model, 0]) for model in range(self.num_models)]

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
        # torch's OneCycleLR raises at its end.
        is_over = {
            at: each.last_epoch >= each.total_steps
            for at, each in self._singles.items()
            if hasattr(each, "total_steps")
        }
        due = [(model, single) for (model, group), single in self._singles.items() if not is_over.get((model, group))]
        if not due:
            longest = max(single.total_steps for single in self._singles.values())
            raise InputError(f"step: expected at most {longest} steps, the longest cycle of these models")
        self._copy_in()
        for model, single in due:
            single.step(*given[model])
        self.last_epoch += 1
        self._step_count += 1
        self._copy_out()

    def refill(self, model: int, lr: float | None = None, **arguments: Any) -> None:
        """Begin the schedule of one slot anew, at epoch 0. The others go on undisturbed.

        Args:
            model: the slot.
            lr: the rate it begins with. By default the slot's present rate, that of `optimizer.refill`.
            arguments: of the scheduler, for this model (``gamma=0.5``). By default the slot's old ones.

        Raises:
            InputError: an unknown argument, or a value out of bounds.
        """
        places = [(self.optimizer.checked_model(model), group) for group in range(len(self.optimizer.param_groups))]
        known = self.arguments[places[0]]
        for name, value in arguments.items():
            if name not in known:
                raise InputError(f"refill: expected arguments among {', '.join(known)}, got {name}={value!r}")
        values = {name: checked(self.torch_class, name, value) for name, value in arguments.items()}
        own = {place: {**self.arguments[place], **values} for place in places}
        new = {}
        for place in places:
            stand_in = self._stand_in(place)
            stand_in.param_groups[0].pop("initial_lr", None)
            if lr is not None:
                stand_in.param_groups[0]["lr"] = numbers_of("lr", lr, 1, self.optimizer.bounds["lr"])
            new[place] = self._made(place, stand_in, own[place])
        # All of it fits: from here on nothing is refused.
        self.arguments |= own
        self._copy_in()
        for place, single in new.items():
            self._take(place, single)
        self._copy_out()

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order: call it with what `optimizer.select_models` was called with."""
        places = list(itertools.product(enumerate(models), range(len(self.optimizer.param_groups))))
        self.arguments = {(now, group): self.arguments[was, group] for (now, was), group in places}
        self._singles = {(now, group): self._singles[was, group] for (now, was), group in places}
        self.num_models = len(models)
        self._last_lr = self._rates()
        for child in self.children:
            child.select_models(models)

    def model_state(self, model: int) -> dict[str, Any]:
        """The schedule of one model, a copy: states of its schedulers, arguments, and what they noted in the groups.

        Of functions among the arguments only what objects that can be called hold is saved, as in torch.
        """
        groups = list(enumerate(self.optimizer.param_groups))
        notes = [key for key in KEYS if key not in self.optimizer.bounds]
        arguments = [self.arguments[model, number].items() for number, _ in groups]
        return copy.deepcopy(
            {
                "class": type(self).__name__,
                "schedulers": [self._singles[model, number].state_dict() for number, _ in groups],
                "arguments": [{name: value for name, value in own if not callable(value)} for own in arguments],
                "notes": [{key: of_model(group[key], model) for key in notes if key in group} for _, group in groups],
            }
        )

    def load_model_state(self, model: int, state: Mapping[str, Any]) -> None:
        """Let the schedule of one slot go on from what `model_state` gave. Functions stay those of the slot.

        Raises:
            InputError: it is of another scheduler or number of groups.
        """
        self._load({model: state}, "state", 1)

    def state_dict(self) -> dict[str, Any]:
        """The state of each model's schedule, as a copy, as `model_state` gives it."""
        models = [self.model_state(model) for model in range(self.num_models)]
        return {"last_epoch": self.last_epoch, "step_count": self._step_count, "models": models}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models.

        Raises:
            InputError: it is of another scheduler, or of other numbers of models or groups.
        """
        self._load(dict(enumerate(state_dict.get("models", ()))), "state_dict", self.num_models)
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["step_count"]

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
        for model, state in copy.deepcopy(dict(states)).items():
            for number, group in enumerate(groups):
                self._singles[model, number].load_state_dict(state["schedulers"][number])
                self.arguments[model, number] |= state["arguments"][number]
                for key, value in state["notes"][number].items():
                    group.setdefault(key, value)
                    self.optimizer.set_for_model(group, key, model, value)

    def _made(
        self, place: Place, stand_in: StandIn, arguments: Mapping[str, Any], inner: Sequence[Any] | None = None
    ) -> LRScheduler:
        """A torch scheduler with one model's arguments for a group, made of the schedulers `inner` or of new ones."""
        if inner is None:
            inner = [child._made(place, stand_in, child.arguments[place]) for child in self.children]
        try:
            return self.torch_class(optimizer=stand_in, **{**arguments, **({"schedulers": inner} if inner else {})})
        except (TypeError, ValueError, KeyError) as error:
            raise InputError(f"{type(self).__name__} of model {place[0]}: {error}") from error

    def _take(self, place: Place, single: Any) -> None:
        """Go on with a torch scheduler that is new in this place, and with those that it is made of."""
        self._singles[place] = single
        for child, inner in zip(self.children, getattr(single, "_schedulers", ()), strict=True):
            child._take(place, inner)

    def _stand_in(self, place: Place) -> StandIn:
        """A new stand-in, which holds a model's numbers of a group."""
        model, group = place[0], self.optimizer.param_groups[place[1]]
        self.optimizer.settle(group)
        return StandIn({key: of_model(group[key], model) for key in KEYS if key in group})

    def _numbers(self, group: int) -> list[dict[str, Any]]:
        """For each model the numbers of its stand-in for a group."""
        return [self._singles[model, group].optimizer.param_groups[0] for model in range(self.num_models)]

    def _copy_in(self) -> None:
        for number, group in enumerate(self.optimizer.param_groups):
            self.optimizer.settle(group)
            numbers = self._numbers(number)
            for key in (key for key in KEYS if key in group):
                for own, value in zip(numbers, by_model(group[key], self.num_models), strict=True):
                    own[key] = value

    def _copy_out(self) -> None:
        """Set in the fused optimizer what the schedulers have set."""
        for number, group in enumerate(self.optimizer.param_groups):
            numbers = self._numbers(number)
            for key in (key for key in KEYS if key in numbers[0]):
                new = [own[key] for own in numbers]
                if new != by_model(group.get(key), self.num_models):
                    self.optimizer.set_by_model(group, key, new)
        self._last_lr = self._rates()

    def _rates(self) -> list[Any]:
        rates = [plain(group["lr"]) for group in self.optimizer.param_groups]
        return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _widen(self) -> None:
        """Make room for numbers of each model now: a step that is captured with one cannot hold B of them later."""
        cycles = any(own.get("cycle_momentum") for own in self.arguments.values())
        for group in self.optimizer.param_groups:
            for key in (key for key in (KEYS[:3] if cycles else KEYS[:1]) if key in group):
                first, *rest = as_tuple(group[key])
                first = self.optimizer.widened(group, first)
                group[key] = (first, *rest) if rest else first


def _moved(single: Any, stand_in: StandIn) -> Any:
    """A torch scheduler, with those that it is made of, on another stand-in from now on."""
    single.optimizer = stand_in
    for inner in getattr(single, "_schedulers", ()):
        _moved(inner, stand_in)
    return single
