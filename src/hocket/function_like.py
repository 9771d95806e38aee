"""`FunctionLike`: gives a schedule the attributes of the step that it wraps, as `functools.wraps` does, and binding.

Frameworks read the name, the signature or the code of a step, and look methods up on a class::

    class Trainer:
        @hocket.scheduled(model, optimizer)
        def training_step(self, batch): ...

    Trainer().training_step(batch)      # each instance has its own schedule, of its bound method

The schedules of an instance are in its ``__dict__``, where Python's collector sees them. A copy of the instance begins
without any, and so does one that was pickled.
"""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

# Attributes of functions that an object which acts as one looks up on the function.
_OF_FUNCTIONS = frozenset(
    (
        "__builtins__", "__closure__", "__code__", "__defaults__", "__func__", "__globals__",
        "__kwdefaults__", "__self__", "__type_params__",
    )
)  # fmt: skip
_PER_INSTANCE = "_hocket_schedules"


class PerInstance(dict[Any, Any]):
    """The schedules of one instance, by the schedule that its class holds."""

    def __deepcopy__(self, memo: Any) -> PerInstance:
        return PerInstance()

    def __reduce__(self) -> Any:
        return PerInstance, ()


class FunctionLike(ABC):
    """Acts as a function: has its name, documentation, signature and attributes, and binds as it does."""

    step: Callable[..., Any]  # the function, also available as ``__wrapped__``

    def stand_for(self, step: Callable[..., Any]) -> None:
        """Take the names and the documentation of `step`."""
        self.step = step
        self.__wrapped__ = step
        kind = type(step)
        self.__name__ = getattr(step, "__name__", kind.__name__)
        self.__qualname__ = getattr(step, "__qualname__", kind.__qualname__)
        self.__module__ = getattr(step, "__module__", None) or kind.__module__
        self.__doc__ = step.__doc__
        self.__annotations__ = getattr(step, "__annotations__", {})

    @abstractmethod
    def of_method(self, method: Callable[..., Any], instance: Any) -> FunctionLike:
        """Make one for `method`, which is the function bound to `instance`."""

    def __getattr__(self, name: str) -> Any:
        step = self.__dict__.get("step")
        if step is not None and (name in _OF_FUNCTIONS or name in getattr(step, "__dict__", ())):
            return getattr(step, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        bind = getattr(type(self.step), "__get__", None)
        if instance is None or bind is None or isinstance(self.step, types.MethodType):
            return self  # looked up on the class, or an object that binds to none
        table = getattr(instance, "__dict__", None)
        if type(table) is not dict:
            raise AttributeError(f"a {type(instance).__name__} has no __dict__ that could hold its schedule")
        made = table.get(_PER_INSTANCE)
        if made is None:
            made = table[_PER_INSTANCE] = PerInstance()
        if self not in made:
            made[self] = self.of_method(bind(self.step, instance, owner), instance)
        return made[self]

    def __copy__(self) -> FunctionLike:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        if isinstance(self.step, types.MethodType) and id(self.step.__self__) in memo:
            return copy.deepcopy(self.step, memo)  # a copy of its owner trains itself, by its own method
        return self  # as a function

    def __reduce__(self) -> Any:
        if isinstance(self.step, types.MethodType):
            return self.step.__reduce__()
        raise TypeError("a schedule belongs to its process: pickle model and optimizer, and schedule the step again")


def keep_from_dynamo(function: Any) -> None:
    """Make `torch.compile` run this function, and everything that it calls, as it stands. This costs calls no time."""
    import torch

    function._torchdynamo_disable = True  # where a traced function calls it
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        frames.set_code_exec_strategy(function.__code__, skipped)
