"""Loops in which a class, an attribute, the kind of a batch or a switch of torch's changes between two calls."""

from __future__ import annotations

import abc
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


def with_batches(late: Callable[[torch.Tensor], Any], loss_of: Callable[[Program, Any], torch.Tensor]) -> Program:
    """Batches that are tensors, but for some late ones."""
    made = program()
    made.trains(lambda batch: loss_of(made, batch))
    made.batch = lambda call, x: late(x.clone()) if LATE_CALL <= call < LATE_CALL + 5 else x
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


@case
def class_between_gets_an_attribute() -> Program:
    _, middle, leaf = _classes()
    return scaled_by(lambda made: leaf().factor, lambda made: setattr(middle, "factor", 2.0))


@case
def class_gets_an_attribute_that_it_inherited() -> Program:
    _, _, leaf = _classes()
    return scaled_by(lambda made: leaf.factor, lambda made: setattr(leaf, "factor", 2.0))


@case
def class_gets_an_attribute_that_no_class_had() -> Program:
    class State:
        pass

    state = State()
    return scaled_by(lambda made: getattr(state, "factor", 1.0), lambda made: setattr(State, "factor", 2.0))


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
    return scaled_by(lambda made: getattr(state, "factor", 1.0), lambda made: setattr(state, "factor", 2.0))


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
def parameter_gets_an_attribute() -> Program:
    return scaled_by(
        lambda made: getattr(made.model[2].weight, "factor", 1.0),
        lambda made: setattr(made.model[2].weight, "factor", 2.0),
    )


@case
def buffer_gets_an_attribute() -> Program:
    made = scaled_by(
        lambda made: getattr(made.model.mask, "factor", 1.0), lambda made: setattr(made.model.mask, "factor", 2.0)
    )
    made.model.register_buffer("mask", torch.ones(3))
    return made


@case
def tensors_of_a_list_get_attributes() -> Program:
    tensors = [torch.ones(3), torch.ones(3)]
    return scaled_by(lambda made: getattr(tensors[1], "factor", 1.0), lambda made: setattr(tensors[1], "factor", 2.0))


# --------------------------------------------------------------------------------------------------- kinds of batches


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, kinds, args, kwargs or {})
        return found * 2 if function is nn.functional.linear else found


@case
def batch_of_a_subclass() -> Program:
    return with_batches(
        lambda x: x.as_subclass(Doubling),
        lambda made, batch: made.model(batch).square().mean(),
    )


@case
def batch_is_a_parameter() -> Program:
    return with_batches(
        lambda x: nn.Parameter(x, requires_grad=False),
        lambda made, batch: made.model(batch).square().mean() * (2 if isinstance(batch, nn.Parameter) else 1),
    )


def _attributed(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    vars(x).update(attributes)
    return x


@case
def batch_has_an_attribute() -> Program:
    return with_batches(
        lambda x: _attributed(x, factor=2.0),
        lambda made, batch: made.model(batch).square().mean() * getattr(batch, "factor", 1.0),
    )


@case
def batch_has_a_tensor_as_attribute() -> Program:
    return with_batches(
        lambda x: _attributed(x, mask=(x > 0).float()),
        lambda made, batch: made.model(batch * getattr(batch, "mask", 1.0)).square().mean(),
    )


@case
def batch_is_given_an_attribute_by_the_step() -> Program:
    def loss_of(made: Program, batch: torch.Tensor) -> torch.Tensor:
        batch.mean_seen = 1.0
        return made.model(batch).square().mean()

    made = with_batches(lambda x: x, loss_of)
    batches: list[torch.Tensor] = []
    usual = made.batch

    def batch_of(call: int, x: torch.Tensor) -> torch.Tensor:
        batches.append(usual(call, x.clone()))
        return batches[-1]

    made.batch = batch_of
    made.after = lambda result: made.numbers.append(dict(vars(batches[-1])))
    return made


@case
def batch_of_inference_mode() -> Program:
    def inferred(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return x.clone()

    return with_batches(
        inferred, lambda made, batch: made.model(batch.clone()).square().mean() * (2 if batch.is_inference() else 1)
    )


@case
def batch_is_negated_lazily() -> Program:
    return with_batches(
        lambda x: torch._neg_view(x),
        lambda made, batch: made.model(batch).square().mean() * (2 if batch.is_neg() else 1),
    )


@case
def batch_has_a_graph() -> Program:
    made = with_batches(
        lambda x: x,
        lambda made, batch: made.model(batch.detach()).square().mean() * (2 if batch.grad_fn is not None else 1),
    )
    made.batch = lambda call, x: x * x.clone().requires_grad_() if call >= LATE_CALL else x.clone().requires_grad_()
    return made


@case
def batch_has_a_gradient() -> Program:
    def given(x: torch.Tensor) -> torch.Tensor:
        x.grad = torch.ones_like(x)
        return x

    return with_batches(
        given, lambda made, batch: made.model(batch if batch.grad is None else batch + batch.grad).square().mean()
    )


# -------------------------------------------------------------------------------------- equal, and told apart by code


def _signed(zero: Any, other: Any) -> Program:
    made = program()

    def loss_of(batch: Any) -> torch.Tensor:
        x, number = batch
        return made.model(x).square().mean() * (2 + float(np.copysign(1.0, np.real(number))))

    made.trains(loss_of)
    made.batch = lambda call, x: (x, other if LATE_CALL <= call < LATE_CALL + 5 else zero)
    return made


@case
def zero_of_the_other_sign_in_a_batch() -> Program:
    return _signed(0.0, -0.0)


@case
def complex_zero_of_the_other_sign_in_a_batch() -> Program:
    return _signed(0j, complex(-0.0, 0.0))


@case
def key_of_a_batch_is_true_and_no_one() -> Program:
    made = program()
    made.trains(lambda batch: made.model(batch[1]).square().mean() * (2 if True in map(_itself, batch) else 1))
    made.batch = lambda call, x: {True if LATE_CALL <= call < LATE_CALL + 5 else 1: x}
    return made


def _itself(key: Any) -> Any:
    return key if type(key) is bool else None


@case
def numpys_zero_of_the_other_sign() -> Program:
    state = {"zero": np.float32(0.0)}
    return scaled_by(
        lambda made: 2 + float(np.copysign(1.0, state["zero"])), lambda made: state.update(zero=np.float32(-0.0))
    )


# -------------------------------------------------------------------------------------------------- switches of torch


@case
def another_default_device() -> Program:
    made = program()
    made.trains(lambda batch: (made.model(batch) + torch.ones(3)).square().mean())

    @contextlib.contextmanager
    def around(call: int) -> Iterator[None]:
        torch.set_default_device("meta" if LATE_CALL <= call < LATE_CALL + 3 else "cpu")
        try:
            yield
        finally:
            torch.set_default_device(None)

    made.around = around
    return made


def _with_precision(backend: Any, precision: str) -> Program:
    made = program()

    @contextlib.contextmanager
    def around(call: int) -> Iterator[None]:
        usual = backend.fp32_precision
        backend.fp32_precision = precision if LATE_CALL <= call < LATE_CALL + 5 else usual
        try:
            yield
        finally:
            backend.fp32_precision = usual

    made.around = around
    return made


@case
def precision_of_products() -> Program:
    return _with_precision(torch.backends.mkldnn.matmul, "bf16")  # type: ignore[attr-defined]


@case
def precision_of_all() -> Program:
    return _with_precision(torch.backends, "tf32")
