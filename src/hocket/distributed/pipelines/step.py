"""A user's step as what a pipeline needs: the inputs of its one model, and a loss of what the model returns.

The step itself is asked for both. Up to the model's call it tells the inputs. Run again with the model replaced by what
the last stage has made, it ends at its call of ``backward``, which tells the loss. Nothing after that is run.

    step(batch):  zero_grad .. model(inputs) .. loss .. backward .. optimizer.step
                               |<- inputs       |<- the loss, of a given output

`PipelinedStep.check` refuses steps that do more than that, by the gradients of model and loss apart in this process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.errors import InputError
from hocket.job import Job
from hocket.pystate.origins import user_line

# The largest distance of a gradient from eager's, as a share of the parameter's largest gradient.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
# Another way to run a step on several ranks, which takes any step that can be captured.
BY_OPS = "divide the step by its ops (hocket partition, then hocket run --partition)"


class _CalledError(Exception):
    """The step has called the model."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs, self.named, self.line = args, kwargs, user_line()
        self.has_autocast = torch.is_autocast_enabled("cpu")


class _BackwardError(Exception):
    """The step has called ``backward``."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss, self.line = loss, user_line()


def micro_batches_of(batch: Any, count: int) -> list[Any]:
    """A batch as `count` equal ones: each tensor of it is divided along its first dimension.

    Raises:
        InputError: there is no tensor, or their first dimensions differ or cannot be divided.
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
        self.inputs = [self._inputs(number) for number in range(microbatches)]

    def loss(self, output: Any, number: int) -> torch.Tensor:
        """The step's loss on a micro-batch, if the model returned `output`."""
        return self._loss(output, number).loss

    def _loss(self, output: Any, number: int) -> _BackwardError:
        calls = 0

        def returned(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            return output

        with _replaced(self.model, returned):
            found = self._until_backward(number)
        if calls != 1:
            raise InputError(f"pipeline: the step calls the model {calls} times, and a pipeline runs it once")
        return found

    def eager_gradients(self) -> dict[str, torch.Tensor]:
        """The mean over the micro-batches of eager's gradients. Parameters without one are left out.

        Buffers and gradients of the model are afterwards as they were.
        """
        with self._restored():
            for number in range(len(self.batches)):
                (self._until_backward(number).loss / len(self.batches)).backward()
            return self._gradients()

    def check(self, expected: Mapping[str, torch.Tensor]) -> None:
        """Raise an `InputError` unless the model, and a loss of its result alone, give the gradients of eager."""
        for name, gradient in expected.items():
            if not gradient.isfinite().all():
                losses = [self._until_backward(number) for number in range(len(self.batches))]
                bad = next((each for each in losses if not each.loss.isfinite()), None)
                what = f"the gradient of {name!r} by the loss at {losses[0].line} is not finite"
                what = what if bad is None else f"the loss at {bad.line} is {bad.loss.item()}"
                raise InputError(f"pipeline: {what}, in one process, too: there is nothing to compare stages with")
        with self._restored():
            for number, inputs in enumerate(self.inputs):
                output = self.model(*inputs)
                given = output.detach().requires_grad_()
                reached = self._loss(given.clone(), number)
                (reached.loss / len(self.batches)).backward()
                reaching = [name for name, p in self.model.named_parameters() if p.grad is not None]
                if number == 0 and reaching:
                    raise InputError(
                        f"pipeline: the loss at {reached.line} reaches the parameter {reaching[0]!r} by another way "
                        "than what the model returns, which is all that the last stage has: do that in its "
                        f"forward, leave a penalty to the optimizer (weight_decay=), or {BY_OPS}"
                    )
                if given.grad is not None:
                    output.backward(given.grad)
            _, error, where = farthest(self._gradients(), expected)
        if error > 1.0:
            raise InputError(
                f"pipeline: the loss at {reached.line} depends on more than the batch and what the model returns (a "
                "count, numbers that Python draws), so gradients of stages would not be eager's, "
                f"{where}: make it a part of the batch"
            )
        self._check_single_backward()

    def _check_single_backward(self) -> None:
        backward, lines = torch.autograd.backward, list[str]()

        def counted(*args: Any, **kwargs: Any) -> None:
            lines.append(user_line())
            backward(*args, **kwargs)

        with self._restored(), _without("step", self.job.optimizers), _backward_is(counted), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as a scheduler's, which misses the optimizer's step
            self.job.step(self.batches[0])
        if len(lines) > 1:
            raise InputError(
                f"pipeline: the step calls backward() {len(lines)} times, last at {lines[-1]}, and a pipeline runs one "
                "forward and backward (--microbatches adds up gradients of parts of a batch)"
            )

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters(remove_duplicate=False)
        return {name: p.grad.clone() for name, p in named if p.grad is not None}

    @contextmanager
    def _restored(self) -> Iterator[None]:
        """Begin without gradients, and let gradients and buffers of the model be as before afterwards."""
        tables = [module._buffers for module in self.model.modules()]
        buffers = [(table, name, b, b.clone()) for table in tables for name, b in table.items() if b is not None]
        kept = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for table, name, buffer, value in buffers:  # which the forward may have bound anew
                    table[name] = buffer
                    buffer.copy_(value)
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _inputs(self, number: int) -> tuple[torch.Tensor, ...]:
        def called(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _CalledError(args, kwargs)

        handle = self.model.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
        try:
            self._run(number)
        except _CalledError as call:
            if call.named or not call.inputs or not all(isinstance(value, torch.Tensor) for value in call.inputs):
                got = ", ".join([*(type(v).__name__ for v in call.inputs), *(f"{name}=" for name in call.named)])
                raise InputError(
                    f"pipeline: expected the model to be called with tensors by place, got ({got}) at {call.line}"
                ) from None
            if call.has_autocast:
                raise InputError(
                    f"pipeline: the step calls the model under torch.autocast at {call.line}, and stages are traced "
                    f"without it: {BY_OPS}"
                ) from None
            return tuple(value.detach() for value in call.inputs)
        finally:
            handle.remove()
        raise InputError("pipeline: the step does not call the model itself (only parts of it, or nothing)")

    def _until_backward(self, number: int) -> _BackwardError:
        def reached(tensors: Any, *_: Any, **__: Any) -> None:
            raise _BackwardError(tensors)

        try:
            with _backward_is(reached):
                self._run(number)
        except _BackwardError as found:
            if not isinstance(found.loss, torch.Tensor) or found.loss.numel() != 1:
                raise InputError(
                    f"pipeline: expected the step to call backward() on one loss at {found.line}"
                ) from None
            return found
        raise InputError("pipeline: the step does not call backward() on its loss")

    def _run(self, number: int) -> None:
        """Run the step on a micro-batch, each time with the same random numbers of torch. Gradients are summed up."""
        with torch.random.fork_rng(devices=[]), _without("zero_grad", (*self.job.models, *self.job.optimizers)):
            torch.default_generator.manual_seed(number)
            self.job.step(self.batches[number])


def farthest(
    found: Mapping[str, torch.Tensor | None], expected: Mapping[str, torch.Tensor]
) -> tuple[float, float, str]:
    """Return the largest error of gradients: as a share of a parameter's largest by eager, in tolerances, in words."""
    largest = max((float(value.abs().max()) for value in expected.values() if value.numel()), default=0.0)
    worst = (0.0, 0.0, "")
    for name, gradient in found.items():
        wanted = expected.get(name)
        given = wanted if gradient is None else gradient
        if given is None or not given.numel():
            continue
        share, where = float("inf"), f"{name!r} has one {'in eager' if gradient is None else 'here'} alone"
        if gradient is not None and wanted is not None:
            # A gradient that is all rounding (a bias before a norm) is held against the others.
            scale = max(float(wanted.abs().max()), 1e-3 * largest, 1e-300)
            share = float((gradient - wanted).abs().max()) / scale
            share = float("inf") if share != share else share
            where = f"that of {name!r} by {share:.3g} of its largest"
        tolerance = TOLERANCE.get(given.dtype, TOLERANCE[torch.float32])
        worst = max(worst, (share, share / tolerance, where), key=lambda each: each[1])
    return worst


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
def _backward_is(instead: Callable[..., None]) -> Iterator[None]:
    """Exchange ``backward`` of a tensor, and of `torch.autograd`."""
    before = torch.autograd.backward
    torch.autograd.backward = instead
    try:
        yield
    finally:
        torch.autograd.backward = before


@contextmanager
def _without(method: str, owners: Sequence[Any]) -> Iterator[None]:
    """Let a method of these objects do nothing."""
    before = [owner.__dict__.get(method) for owner in owners]  # a scheduler puts its own there
    for owner in owners:
        owner.__dict__[method] = lambda *_, **__: None
    try:
        yield
    finally:
        for owner, own in zip(owners, before, strict=True):
            owner.__dict__.pop(method) if own is None else owner.__dict__.update({method: own})
