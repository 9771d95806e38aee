"""Loops in which a class or an attribute changes between two calls."""

import abc
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from session.between_calls import CHANGES, Program, case, program

# The change by which a plan stands, and the call before which it is made.
LATE, LATE_CALL = 3, CHANGES[3]


def scaled_by(factor_of: Callable[[Program], Any], change: Callable[[Program], Any]) -> Program:
    """A loss that is multiplied with a number, and a late change of what makes it."""
    made = program()
    made.trains(lambda batch: made.model(batch).square().mean() * factor_of(made))
    made.change = lambda number: change(made) if number == LATE else None
    return made


# ---------------------------------------------------------------------------------------------- classes of objects


@case
def layer_becomes_one_of_another_class() -> Program:
    return scaled_by(lambda made: 1.0, lambda made: setattr(made.model[1], "__class__", nn.Sigmoid))


@case
def optimizer_becomes_one_of_another_class() -> Program:
    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return super().step()

    return scaled_by(lambda made: 1.0, lambda made: setattr(made.optimizer, "__class__", Twice))


@case
def object_becomes_one_of_another_class() -> Program:
    first, second = type("First", (), {"factor": 1.0}), type("Second", (), {"factor": 2.0})
    state = first()
    return scaled_by(lambda made: state.factor, lambda made: setattr(state, "__class__", second))


@case
def parameter_becomes_one_of_another_class() -> Program:
    class Weight(nn.Parameter):
        pass

    return scaled_by(
        lambda made: 2.0 if isinstance(made.model[0].weight, Weight) else 1.0,
        lambda made: setattr(made.model[0].weight, "__class__", Weight),
    )


# -------------------------------------------------------------------------------------------- attributes of classes


def _classes() -> tuple[Any, Any, Any]:
    base = type("Base", (), {"factor": 1.0})
    middle = type("Middle", (base,), {})
    return base, middle, type("Leaf", (middle,), {})


def _gets_a_factor(of: Any, reads: Any = None) -> Program:
    """An object, or what is found by the loop, gets another factor than what reads it (itself) had."""
    return scaled_by(
        lambda made: getattr(of(made) if reads is None else reads, "factor", 1.0),
        lambda made: setattr(of(made), "factor", 2.0),
    )


@case
def class_between_gets_an_attribute() -> Program:
    _, middle, leaf = _classes()
    return _gets_a_factor(lambda made: middle, leaf())


@case
def class_gets_an_attribute_that_it_inherited() -> Program:
    _, _, leaf = _classes()
    return _gets_a_factor(lambda made: leaf)


@case
def class_gets_an_attribute_that_no_class_had() -> Program:
    state = type("State", (), {})
    return _gets_a_factor(lambda made: state, state())


@case
def class_of_torch_gets_an_attribute() -> Program:
    base: Any = nn.modules.batchnorm._NormBase
    made = scaled_by(lambda made: getattr(made.model[1], "between_calls", 1.0), lambda made: None)
    made.model[1] = nn.BatchNorm1d(6)

    @contextlib.contextmanager
    def around(call: int) -> Iterator[None]:
        if call >= LATE_CALL:
            base.between_calls = 2.0
        yield
        if call >= LATE_CALL:
            del base.between_calls

    made.around = around
    return made


@case
def class_gets_other_bases() -> Program:
    base, middle, leaf = _classes()
    other = type("Other", (base,), {"factor": 2.0})
    return scaled_by(lambda made: leaf().factor, lambda made: setattr(middle, "__bases__", (other,)))


@case
def class_between_layers_gets_a_forward() -> Program:
    class Base(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh()

    class Middle(Base):
        pass

    class Leaf(Middle):
        pass

    made = scaled_by(lambda made: 1.0, lambda made: setattr(Middle, "forward", lambda self, x: x.sin()))
    made.model[1] = Leaf()
    return made


@case
def class_registered_with_an_abstract_one() -> Program:
    class Abstract(abc.ABC):  # noqa: B024  # classes are registered with it
        pass

    class Other:
        pass

    state = Other()
    return scaled_by(lambda made: 2.0 if isinstance(state, Abstract) else 1.0, lambda made: Abstract.register(Other))


@case
def method_of_tensors_is_new() -> Program:
    made = program()

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        out = made.model(batch)
        return (out.between_calls() if hasattr(out, "between_calls") else out).square().mean()

    made.trains(loss_of)
    made.around = _tensors_with("between_calls", lambda tensor: tensor * 2)
    return made


@case
def method_of_tensors_is_exchanged() -> Program:
    made, usual = program(), torch.Tensor.sigmoid
    made.trains(lambda batch: made.model(batch).sigmoid().mean())
    made.around = _tensors_with("sigmoid", lambda tensor: usual(tensor) * 2)
    return made


def _tensors_with(name: str, method: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[int], Any]:
    @contextlib.contextmanager
    def around(call: int) -> Iterator[None]:
        if call >= LATE_CALL:
            setattr(torch.Tensor, name, method)
        yield
        if call >= LATE_CALL:
            delattr(torch.Tensor, name)

    return around


# ---------------------------------------------------------------------------------------- attributes that come later


class Slots:
    __slots__ = ("factor", "other")


@case
def slot_is_filled() -> Program:
    state = Slots()
    return _gets_a_factor(lambda made: state)


@case
def cell_is_filled() -> Program:
    cell = types.CellType()

    def read() -> float:
        try:
            return factor
        except NameError:
            return 1.0

    factor = None
    reads = types.FunctionType(read.__code__, globals(), closure=(cell,))
    return scaled_by(lambda made: reads(), lambda made: setattr(cell, "cell_contents", 2.0))


@case
def buffer_gets_an_attribute() -> Program:
    made = _gets_a_factor(lambda made: made.model.mask)
    made.model.register_buffer("mask", torch.ones(3))
    return made


@case
def tensors_of_a_list_get_attributes() -> Program:
    tensors = [torch.ones(3), torch.ones(3)]
    return _gets_a_factor(lambda made: tensors[1])


@case
def parameter_gets_an_attribute() -> Program:
    return _gets_a_factor(lambda made: made.model[2].weight)
