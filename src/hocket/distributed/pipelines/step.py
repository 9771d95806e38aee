"""A user's step as what a pipeline needs: the inputs of its one model, and a loss of what the model returns.

The step itself is asked for both. Up to the model's call it tells the inputs. Run again with the model replaced by what
the last stage has made, it ends at its call of ``backward``, which tells the loss. Nothing after that is run.

    step(batch):  zero_grad .. model(inputs) .. loss .. backward .. optimizer.step
                               |<- inputs       |<- the loss, of a given output
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.errors import InputError
from hocket.job import Job


class _CalledError(Exception):
    """The step has called the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named = args, kwargs


class _BackwardError(Exception):
    """The step has called ``backward``."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss


def micro_batches_of(batch: Any, count: int) -> list[Any]:
    """A batch as `count` equal ones: each tensor of it is divided along its first dimension.

    Raises:
        InputError: there is no tensor, or their first dimensions differ or cannot be divided.

    Example:
        >>> [part.tolist() for part, _ in micro_batches_of((torch.arange(4), "mask"), 2)]
        [[0, 1], [2, 3]]
    """
    leaves, spec = tree_flatten(batch)
    rows = {leaf.shape[0] if leaf.ndim else 0 for leaf in leaves if isinstance(leaf, torch.Tensor)}
    if len(rows) != 1:
        raise InputError(
            f"pipeline: expected batches of tensors with one first dimension, got {sorted(rows) or 'none'}"
        )
    (size,) = rows
    if size % count or not size:
        raise InputError(f"pipeline: a batch of {size} rows cannot be divided into {count} equal micro-batches")
    parts = [leaf.chunk(count) if isinstance(leaf, torch.Tensor) else [leaf] * count for leaf in leaves]
    return [tree_unflatten([part[number] for part in parts], spec) for number in range(count)]


class PipelinedStep:
    """The step of a job, on one batch in micro-batches. It refuses several models, and a step of another kind."""

    def __init__(self, job: Job, microbatches: int) -> None:
        if len(job.models) != 1:
            raise InputError(f"pipeline: the job has {len(job.models)} models, and a pipeline has one")
        self.job = job
        self.model = job.models[0]
        self.batches = micro_batches_of(job.batch(0), microbatches)
        # For each micro-batch what the model is called with.
        self.inputs = [self._inputs(batch) for batch in self.batches]

    @property
    def whole_inputs(self) -> tuple[torch.Tensor, ...]:
        """The inputs of all micro-batches, one behind the other."""
        return tuple(torch.cat(parts) for parts in zip(*self.inputs, strict=True))

    def loss(self, output: Any, number: int) -> torch.Tensor:
        """The step's loss on a micro-batch, if the model returned `output`."""
        calls = 0

        def returned(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            return output

        with _replaced(self.model, returned):
            found = self._until_backward(self.batches[number])
        if calls != 1:
            raise InputError(f"pipeline: the step calls the model {calls} times, and a pipeline runs it once")
        return found

    def eager_gradients(self) -> dict[str, torch.Tensor]:
        """The mean over the micro-batches of eager's gradients. Parameters without one are left out.

        Buffers and gradients of the model are afterwards as they were.
        """
        tables = [module._buffers for module in self.model.modules()]
        buffers = [(table, name, b, b.clone()) for table in tables for name, b in table.items() if b is not None]
        kept = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        for batch in self.batches:
            (self._until_backward(batch) / len(self.batches)).backward()
        named = self.model.named_parameters(remove_duplicate=False)
        found = {name: p.grad.clone() for name, p in named if p.grad is not None}
        with torch.no_grad():
            for table, name, buffer, value in buffers:  # which the forward may have bound anew
                table[name] = buffer
                buffer.copy_(value)
        for parameter, gradient in kept:
            parameter.grad = gradient
        return found

    def _inputs(self, batch: Any) -> tuple[torch.Tensor, ...]:
        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _CalledError(args, kwargs)

        handle = self.model.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
        try:
            with _kept_gradients(self.job):
                self.job.step(batch)
        except _CalledError as call:
            if call.named or not call.inputs or not all(isinstance(value, torch.Tensor) for value in call.inputs):
                got = ", ".join([*(type(v).__name__ for v in call.inputs), *(f"{name}=" for name in call.named)])
                raise InputError(
                    f"pipeline: expected the model to be called with tensors by place, got ({got})"
                ) from None
            return tuple(value.detach() for value in call.inputs)
        finally:
            handle.remove()
        raise InputError("pipeline: the step does not call the model itself (only parts of it, or nothing)")

    def _until_backward(self, batch: Any) -> torch.Tensor:
        try:
            with _kept_gradients(self.job), _backward_tells():
                self.job.step(batch)
        except _BackwardError as reached:
            loss = reached.loss
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise InputError("pipeline: expected the step to call backward() on one loss") from None
            return loss
        raise InputError("pipeline: the step does not call backward() on its loss")


@contextmanager
def _replaced(model: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    own = "forward" in model.__dict__
    before = model.forward
    model.forward = forward
    try:
        yield
    finally:
        if own:
            model.forward = before
        else:
            del model.forward


@contextmanager
def _backward_tells() -> Iterator[None]:
    """``backward`` of a tensor, and of `torch.autograd`, end the step."""
    before = torch.autograd.backward

    def told(tensors: Any, *_: Any, **__: Any) -> None:
        raise _BackwardError(tensors)

    torch.autograd.backward = told
    try:
        yield
    finally:
        torch.autograd.backward = before


@contextmanager
def _kept_gradients(job: Job) -> Iterator[None]:
    """Gradients that have been summed up so far are kept: ``zero_grad`` does nothing."""
    owners = [*job.models, *job.optimizers]
    for owner in owners:
        owner.__dict__["zero_grad"] = lambda *_, **__: None
    try:
        yield
    finally:
        for owner in owners:
            owner.__dict__.pop("zero_grad")
