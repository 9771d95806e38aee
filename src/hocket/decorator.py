"""`hocket.scheduled`: the decorator, for steps that are functions and for those that are methods of a class."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from hocket.errors import InputError
from hocket.function_like import FunctionLike
from hocket.session import Schedule, schedule


class ScheduledMethod(FunctionLike):
    """A method whose model and optimizer are those of the instance. Each instance has its own schedule.

    Model and optimizer may be functions that return them for an instance.
    """

    def __init__(self, method: Callable[..., Any], model: Any, optimizer: Any, options: dict[str, Any]) -> None:
        self.stand_for(method)
        self._trained = (model, optimizer)
        self._options = options

    def __call__(self, instance: Any, *args: Any, **kwargs: Any) -> Any:
        return super().__get__(instance, type(instance))(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        try:
            return super().__get__(instance, owner)
        except AttributeError:
            if not hasattr(instance, "__dict__"):
                raise
            return MethodType(self, instance)  # a trainer looks for the method before there is an optimizer

    def of_method(self, method: Callable[..., Any], instance: Any) -> Schedule:
        model, optimizer = (one(instance) if isinstance(one, FunctionType) else one for one in self._trained)
        return schedule(method, model, optimizer, **self._options)


def scheduled(model: Any, optimizer: Any = (), **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a training step, so that it is scheduled where it is defined.

    Args:
        model: the module it trains, or a list of modules. For a method of a class whose instances have their own: a
            function of the instance.
        optimizer: the optimizer it steps, or a list of optimizers, or such a function.
        options: of `hocket.schedule`.

    Returns:
        The decorator. It gives a `Schedule`. On a class, each instance gets its own when it first looks the method up.

    Example:
        >>> class Trainer:
        ...     def __init__(self, model, optimizer):
        ...         self.model, self.optimizer = model, optimizer
        ...
        ...     @scheduled(lambda self: self.model, lambda self: self.optimizer)
        ...     def training_step(self, batch):
        ...         self.optimizer.zero_grad()
        ...         loss = self.model(batch).square().mean()
        ...         loss.backward()
        ...         self.optimizer.step()
        ...         return loss.detach()
        >>> Trainer.training_step.__name__
        'training_step'
    """

    def decorate(step: Callable[..., Any]) -> Any:
        if not callable(step):  # such as a batch, where the decorator stands without its arguments
            got = type(step).__name__
            raise InputError(f"scheduled: expected a step, got {got}; write @scheduled(model, optimizer)")
        if any(isinstance(one, FunctionType) for one in (model, optimizer)):
            return ScheduledMethod(step, model, optimizer, options)
        return schedule(step, model, optimizer, **options)

    return decorate
