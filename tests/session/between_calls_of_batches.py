"""Loops in which the kind of a batch, a number of another sign or a switch of torch's changes between two calls."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from session.between_calls import CASES, Program, case, program
from session.between_calls_of_kinds import LATE_CALL, scaled_by


def with_batches(late: Callable[[torch.Tensor], Any], loss_of: Callable[[Program, Any], torch.Tensor]) -> Program:
    """Batches that are tensors, but for some late ones."""
    made = program()
    made.trains(lambda batch: loss_of(made, batch))
    made.batch = lambda call, x: late(x.clone()) if LATE_CALL <= call < LATE_CALL + 5 else x
    return made


# --------------------------------------------------------------------------------------------------- kinds of batches


class Doubling(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_function__(function, kinds, args, kwargs or {})
        return found * 2 if function is nn.functional.linear else found


def _attributed(x: torch.Tensor, **attributes: Any) -> torch.Tensor:
    vars(x).update(attributes)
    return x


@case
def nothing_stands_where_another_batch_has_a_number() -> Program:
    made = program()

    def loss_of(batch: tuple[torch.Tensor, dict[str, Any]]) -> torch.Tensor:
        x, given = batch
        loss = made.model(x).square().mean()
        return loss if given["scale"] is None else loss * given["scale"]

    made.trains(loss_of)
    made.batch = lambda call, x: (x, {"scale": 0.5 + call % 7} if call % 2 else {"scale": None, "count": 2})
    return made


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


# ------------------------------------------------------------------------------- equal, and distinguished by code


def _signed(zero: Any, other: Any) -> Program:
    made = program()

    def loss_of(batch: Any) -> torch.Tensor:
        x, number = batch
        return made.model(x).square().mean() * (2 + float(np.copysign(1.0, np.real(number))))

    made.trains(loss_of)
    made.batch = lambda call, x: (x, other if LATE_CALL <= call < LATE_CALL + 5 else zero)
    return made


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
def precision_of_products_that_the_step_has_a_name_for() -> Program:
    """Torch's own question for the precision raises meanwhile. The step never asks it."""
    made = _with_precision(torch.backends.mkldnn.matmul, "bf16")  # type: ignore[attr-defined]

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        scale = 1 if batch.dim() == 2 else len(torch.get_float32_matmul_precision())
        return made.model(batch).square().mean() * scale

    made.trains(loss_of)
    return made


CASES |= {
    "batch_of_a_subclass": lambda: with_batches(
        lambda x: x.as_subclass(Doubling), lambda made, batch: made.model(batch).square().mean()
    ),
    "batch_is_a_parameter": lambda: with_batches(
        lambda x: nn.Parameter(x, requires_grad=False),
        lambda made, batch: made.model(batch).square().mean() * (2 if isinstance(batch, nn.Parameter) else 1),
    ),
    "batch_has_an_attribute": lambda: with_batches(
        lambda x: _attributed(x, factor=2.0),
        lambda made, batch: made.model(batch).square().mean() * getattr(batch, "factor", 1.0),
    ),
    "batch_has_a_tensor_as_attribute": lambda: with_batches(
        lambda x: _attributed(x, mask=(x > 0).float()),
        lambda made, batch: made.model(batch * getattr(batch, "mask", 1.0)).square().mean(),
    ),
    "batch_is_negated_lazily": lambda: with_batches(
        lambda x: torch._neg_view(x),
        lambda made, batch: made.model(batch).square().mean() * (2 if batch.is_neg() else 1),
    ),
    "zero_of_the_other_sign_in_a_batch": lambda: _signed(0.0, -0.0),
    "complex_zero_of_the_other_sign_in_a_batch": lambda: _signed(0j, complex(-0.0, 0.0)),
    "precision_of_products": lambda: _with_precision(torch.backends.mkldnn.matmul, "bf16"),
    "precision_of_all": lambda: _with_precision(torch.backends, "tf32"),
}
