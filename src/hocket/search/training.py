"""The user's setup for one set of hyper-parameters: all that one trial trains with.

The argument of the user's function is a dict of hyper-parameters with the `suggest_*` of Optuna's trial::

    params["lr"]                                   a space of distributions was given
    params.suggest_float("lr", 1e-4, 1e-1)         the function itself says what there is to propose

A trial is built again and again: to see what changes shapes, in a slot, in a process, after a kill. Only the first call
proposes. Later the dict answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hocket.errors import InputError
from hocket.optim.hyper import check_whole


@dataclass(frozen=True, eq=False)
class Training:
    """One trial: a plain module, what trains it, and how well it does.

    Attributes:
        model: the module. Its forward takes the inputs of a batch.
        optimizer: of torch.optim, over parameters of the model.
        loss: ``loss(outputs, target)`` of one model, a tensor of one number.
        batches: pairs ``(inputs, target)``, which can be iterated again and again: a list, a ``DataLoader``. Their
            order may differ from epoch to epoch (a loader shuffles by torch's generator, seeded for each epoch).
        metric: ``metric(outputs, target)`` of one model in evaluation, a number. It is averaged over the batches by
            their sizes. Whether more is better is what the study says.
        scheduler: of torch.optim.lr_scheduler, over `optimizer`, or None. It steps once an epoch, after the metric is
            known. ``ReduceLROnPlateau`` steps with the metric.
        validation: the batches that the metric is taken on, by default `batches`.
        scheduler_interval: ``"epoch"``, or ``"batch"``: the scheduler then steps after each step of the optimizer.
        metric_interval: ``"batch"``, or ``"epoch"``: the metric then gets all outputs and targets of an epoch at once,
            joined along their first axis, as F1 or the area under a curve need them.
        accumulate: over how many batches gradients are summed up, each divided by this number, before the optimizer
            steps. It steps after an epoch's last batch in any case.
        clip_norm: the largest norm of the model's gradients, as of `torch.nn.utils.clip_grad_norm_`, or None for any.
        clip_value: the largest gradient, as of `torch.nn.utils.clip_grad_value_`, or None for any.
        autocast: ``torch.bfloat16`` to run model, loss and metric under `torch.autocast`, or None.
        on_epoch: called with the trial of Optuna, the epoch (from 1) and its value, after each. May note
            ``trial.set_user_attr(...)``, and raise ``optuna.TrialPruned``. The model itself is not up to date there.

    Raises:
        InputError: something is of another kind. The message names the field.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> loss = nn.functional.mse_loss
        >>> Training(model, optimizer, loss, batches, metric=loss).scheduler is None
        True
        >>> Training(model, optimizer, loss, iter(batches), metric=loss)
        Traceback (most recent call last):
        ...
        hocket.errors.InputError: Training.batches: an iterator is read only once, but epochs repeat: use list(batches)
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Any, Any], torch.Tensor]
    batches: Iterable[tuple[Any, Any]]
    metric: Callable[[Any, Any], Any]
    scheduler: Any = None
    validation: Iterable[tuple[Any, Any]] | None = None
    scheduler_interval: str = "epoch"
    metric_interval: str = "batch"
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    autocast: torch.dtype | None = None
    on_epoch: Callable[[Any, int, float], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"Training.model: expected a torch.nn.Module, got {_kind(self.model)}")
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise InputError(f"Training.optimizer: expected one of torch.optim, got {_kind(self.optimizer)}")
        for field in ("loss", "metric"):
            if not callable(getattr(self, field)):
                got = _kind(getattr(self, field))
                raise InputError(f"Training.{field}: expected a function of (outputs, target), got {got}")
        if self.scheduler is not None:
            if not callable(getattr(self.scheduler, "step", None)):
                raise InputError(f"Training.scheduler: expected one of torch.optim, got {_kind(self.scheduler)}")
            if getattr(self.scheduler, "optimizer", None) is not self.optimizer:
                raise InputError("Training.scheduler: expected one over Training.optimizer, got one over another")
        for field in ("scheduler_interval", "metric_interval"):
            if getattr(self, field) not in ("epoch", "batch"):
                raise InputError(f"Training.{field}: expected 'epoch' or 'batch', got {getattr(self, field)!r}")
        if self.scheduler_interval == "batch" and isinstance(self.scheduler, ReduceLROnPlateau):
            raise InputError("Training.scheduler_interval: ReduceLROnPlateau steps with the metric, once an epoch")
        check_whole("Training.accumulate", self.accumulate, 1)
        for field in ("clip_norm", "clip_value"):
            limit = getattr(self, field)
            if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
                raise InputError(f"Training.{field}: expected a number above 0, got {limit!r}")
        if self.autocast not in (None, torch.bfloat16):
            raise InputError(f"Training.autocast: expected torch.bfloat16 or None, got {self.autocast!r}")
        if self.on_epoch is not None and not callable(self.on_epoch):
            raise InputError(f"Training.on_epoch: expected a function, got {_kind(self.on_epoch)}")
        _check_batches("batches", self.batches)
        if self.validation is not None:
            _check_batches("validation", self.validation)

    @property
    def measured_on(self) -> Iterable[tuple[Any, Any]]:
        """The batches that the metric is taken on."""
        return self.batches if self.validation is None else self.validation

    @property
    def device(self) -> torch.device:
        """The device of the model's parameters."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def precision(self) -> AbstractContextManager[object]:
        """The context of model, loss and metric."""
        return nullcontext() if self.autocast is None else torch.autocast(self.device.type, self.autocast)


def _kind(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def _check_batches(field: str, batches: Any) -> None:
    if isinstance(batches, (Mapping, str, bytes)) or not isinstance(batches, Iterable):
        raise InputError(f"Training.{field}: expected batches in a list or a loader, got {_kind(batches)}")
    if isinstance(batches, Iterator):
        raise InputError(f"Training.{field}: an iterator is read only once, but epochs repeat: use list({field})")
    if isinstance(batches, (list, tuple)) and not batches:
        raise InputError(f"Training.{field}: expected at least one batch, got none")


PLAIN = (type(None), bool, int, float, str)


def first_value(name: str, distribution: Any) -> Any:
    """The first choice, or the lowest number."""
    choices = getattr(distribution, "choices", None)
    return distribution.low if choices is None else choices[0]


class Hyperparameters(dict[str, Any]):
    """Hyper-parameters by name.

    Args:
        params: those that are known.
        suggest: proposes the value of a name and a distribution that is not known.

    Example:
        >>> params = Hyperparameters({"lr": 0.1})
        >>> params["lr"], params.suggest_float("lr", 0.01, 1.0), params.suggest_categorical("size", [(8,), (8, 4)])
        (0.1, 0.1, (8,))
        >>> sorted(params)
        ['lr', 'size']
    """

    def __init__(self, params: Mapping[str, Any], suggest: Callable[[str, Any], Any] = first_value) -> None:
        super().__init__(params)
        self._suggest = suggest
        self._asked: dict[str, Any] = {}  # the distribution that each name was first asked with

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """A number from an interval, as `optuna.Trial.suggest_float`."""
        from optuna.distributions import FloatDistribution

        return float(self._value(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """A whole number from an interval, as `optuna.Trial.suggest_int`."""
        from optuna.distributions import IntDistribution

        return int(self._value(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of several values, as `optuna.Trial.suggest_categorical`. They may be tuples and lists."""
        return self._value(name, categories(choices))

    def _value(self, name: str, distribution: Any) -> Any:
        from optuna.distributions import check_distribution_compatibility

        check_distribution_compatibility(self._asked.setdefault(name, distribution), distribution)  # as Optuna does
        if name not in self:
            self[name] = self._suggest(name, distribution)
        return self[name]


def categories(choices: Sequence[Any]) -> Any:
    """Optuna's distribution of these, without its warning of what storages cannot keep, since here they can."""
    import warnings

    from optuna.distributions import CategoricalDistribution

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Choices for a categorical distribution")
        return CategoricalDistribution(choices)


def stored_form(distribution: Any) -> tuple[Any, dict[Any, Any]]:
    """A distribution as files and databases keep it, and what its values there stand for.

    They keep numbers and text only. A tuple comes back as a list, which is another category for Optuna.

    Example:
        >>> kept, meaning = stored_form(categories([(8,), (8, 4), "none"]))
        >>> kept.choices, meaning["(8, 4)"]
        (('(8,)', '(8, 4)', 'none'), (8, 4))
    """
    choices = getattr(distribution, "choices", ())
    if all(isinstance(choice, PLAIN) for choice in choices):
        return distribution, {}
    named = [choice if isinstance(choice, PLAIN) else repr(choice) for choice in choices]
    meaning = {name: choice for name, choice in zip(named, choices, strict=True) if not isinstance(choice, PLAIN)}
    return categories(named), meaning
