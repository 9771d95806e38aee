r"""A traced model run for one model after another, each on its part of the stacked tensors.

    leaves, stacked tensors --split--> model 0's, model 1's, ... --program each--> outputs --joined--> output
                                                                \--loss, backward--> losses, and gradients that wait

Where models go to the end of their backward, gradients are there before they are read: they wait in the
stacked buffers until ``losses.backward()`` hands them over, times whatever gradient the losses get there.

A traced model runs as a plain Python function without the modules around its ops, so a small op costs less than in the
model. Convolutions may get their images with the channels last: oneDNN computes on blocks of channels, and reorders
images that come plane by plane around each convolution. Outputs are in the usual layout again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import HocketError, InputError
from hocket.fusion import fallback
from hocket.fusion.contest import ExecutionPlan
from hocket.fusion.gradients import Gathered, Parts, note_absent
from hocket.fusion.loss import Losses, first_tensor, loss_of_one, of_one
from hocket.fusion.one_by_one import IS_LEAF, fail_after_updates
from hocket.fusion.program import FusedProgram
from hocket.fusion.rules.base import where
from hocket.fusion.source import ProgramSource
from hocket.fusion.stacked import Stacked, laid_out, map_tree

CHANNELS_LAST = {
    "conv2d": torch.channels_last,
    "conv_transpose2d": torch.channels_last,
    "conv3d": torch.channels_last_3d,
    "conv_transpose3d": torch.channels_last_3d,
}


class SingleModel:
    """One model's program, called with the leaves of its arguments and its tensors by name."""

    def __init__(self, program: FusedProgram, index: int, channels_last: bool = False) -> None:
        self._program = program
        self._channels_last = channels_last
        self._source = ProgramSource(program.layout, index)
        is_seeded = program.store.seeds is not None
        for step in program.steps:
            function = step.alone[index]
            if channels_last and step.op in CHANNELS_LAST:
                function = _channels_last(function, CHANNELS_LAST[step.op])
            elif channels_last and step.orders:  # numbers are drawn in the order of memory
                function = _laid_out(function, step.orders)
            elif channels_last and is_seeded:
                function = _usual_images(function)
            self._source.add(step, function)
        self._run = self._source.function()

    def __call__(self, leaves: list[Any], tensors: Mapping[str, Tensor]) -> Any:
        """The output, of plain tensors."""
        try:
            out = self._run(leaves, tensors.__getitem__)
        except (HocketError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            step = self._source.failed(error)
            if step is None:
                raise
            raise InputError(f"{where(step.layer)}: {step.op}: {error}") from error
        if self._channels_last:
            out = map_tree(out, _as_usual)
        return self._program.traced.unflatten(out)


def has_images(program: FusedProgram) -> bool:
    """True if a program has convolutions for which it matters where the channels are."""
    return any(step.op in CHANNELS_LAST for step in program.steps)


def _channels_last(function: Callable[..., Any], layout: torch.memory_format) -> Callable[..., Any]:
    dims = 4 if layout is torch.channels_last else 5

    def run(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # `contiguous` leaves one channel, or one pixel, as it is, and what follows would lie plane by plane again.
        return function(input.to(memory_format=layout) if input.ndim == dims else input, *args, **kwargs)

    return run


def _laid_out(function: Callable[..., Any], orders: tuple[tuple[int, ...], ...]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = laid_out((args, kwargs), orders)
        return function(*args, **kwargs)

    return run


def _usual_images(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*map_tree(args, _as_usual), **map_tree(kwargs, _as_usual))


def _as_usual(value: Any) -> Any:
    """A tensor with the channels last, plane by plane again."""
    if not isinstance(value, Tensor) or value.ndim not in (4, 5) or value.is_contiguous():
        return value
    layout = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
    return value.contiguous() if value.is_contiguous(memory_format=layout) else value


class SingleExecutor:
    """A traced model, run model after model."""

    def __init__(self, program: FusedProgram, plan: ExecutionPlan) -> None:
        self._store = store = program.store
        self._model_axis = program.settings.model_axis
        self._plan = plan
        self._single = [SingleModel(program, index, plan.channels_last) for index in range(store.num_models)]
        self._parts = Parts()

    def forward(self, leaves: list[Any]) -> Any:
        """The output for these leaves of the arguments, `Stacked` where models have their own."""
        outs = [single(*each) for single, each in zip(self._single, self._split(leaves, self._linked()), strict=True)]
        out = fallback.stack_parts(outs, "the model itself")
        fail_after_updates(out, list(self._store.all_tensors().values()))
        return out

    def losses(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        """The loss of each model, ``(B,)``."""
        if self._plan.per_group_backward:
            return self._losses_and_gradients(fn, leaves, targets)
        [each] = self._split(leaves, self._linked())
        out = self._single[0](*each)
        return self._loss(fn, out, self._own_targets(fn, targets, out), 0).unsqueeze(0)

    def _losses_and_gradients(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        wholes = self._store.all_tensors()
        parts = self._parts.of(wholes)
        names = list({id(whole): name for name, whole in wholes.items() if whole.requires_grad}.values())
        trained = [wholes[name] for name in names]
        grads = [Gathered(whole, self._store.memory) for whole in trained]
        losses: list[Tensor] = []
        given: tuple[Any, ...] | None = None
        for index, each in enumerate(self._split(leaves, parts)):
            out = self._single[index](*each)
            if given is None:
                given = self._own_targets(fn, targets, out)
            loss = self._loss(fn, out, given, index)
            own = [parts[index][name] for name in names]
            if not index and _leads_elsewhere(loss, out, own):
                raise InputError(
                    "losses: the gradient of a tensor that the loss function brings along would be lost; use "
                    "array.loss(fn, array(x), y)"
                )
            del out  # the graph holds what the backward needs
            losses.append(loss.detach())
            for grad, its in zip(grads, _gradients(loss, own), strict=True):
                grad.take(its)
            del loss
        values = torch.stack(losses)
        whole_grads = [grad.whole() for grad in grads]
        if all(grad is None for grad in whole_grads):  # nothing that trains has a part in the losses
            return values
        ready: Tensor = _Ready.apply(_Waiting(values, whole_grads, [grad.absent() for grad in grads]), *trained)
        return ready.as_subclass(Losses)

    def _split(self, leaves: list[Any], parts: list[dict[str, Tensor]]) -> list[tuple[list[Any], dict[str, Tensor]]]:
        """Each model's part of the leaves, and its tensors."""
        given = [leaf.tensor.unbind(0) if isinstance(leaf, Stacked) else None for leaf in leaves]
        return [
            ([leaf if each is None else each[index] for leaf, each in zip(leaves, given, strict=True)], part)
            for index, part in enumerate(parts)
        ]

    def _linked(self) -> list[dict[str, Tensor]]:
        """Each model's tensors, whose gradients lead back to the stacked ones."""
        wholes = self._store.all_tensors()
        if all(map(IS_LEAF, wholes.values())):
            return self._parts.of(wholes)
        of = {id(whole): whole.unbind(0) for whole in wholes.values()}
        return [{name: of[id(whole)][index] for name, whole in wholes.items()} for index in range(len(self._single))]

    def _own_targets(self, fn: Callable[..., Any], targets: tuple[Any, ...], out: Any) -> tuple[Any, ...]:
        """Targets, `Stacked` where models have their own, from the output of the first model."""
        total = self._store.num_models
        return self._model_axis.targets(fn, targets, out, (total, *first_tensor(out).shape), total)

    def _loss(self, fn: Callable[..., Any], out: Any, targets: tuple[Any, ...], index: int) -> Tensor:
        if set(map(type, targets)) <= {Stacked, Tensor}:
            own: Any = tuple([each.tensor[index] if type(each) is Stacked else each for each in targets])
        else:
            own = of_one(targets, itemgetter(index))
        return loss_of_one(fn, out, own, index)


def _gradients(loss: Tensor, parts: list[Tensor]) -> Sequence[Tensor | None]:
    """Gradients of one model's parameters, outside of autocast, as torch advises."""
    if not loss.requires_grad:
        return [None] * len(parts)
    device = loss.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        return torch.autograd.grad([loss], parts, [torch.ones_like(loss)], allow_unused=True)


def _leads_elsewhere(loss: Tensor, out: Any, parts: list[Tensor]) -> bool:
    """True if a loss has gradients for anything but the model's output and parameters."""
    leaves = [leaf for leaf in (*pytree.tree_leaves(out), *parts) if isinstance(leaf, Tensor)]
    nodes, seen = [loss.grad_fn], {leaf.grad_fn for leaf in leaves}
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):
            return True
        seen.add(node)
        nodes += [each for each, _ in node.next_functions]
    return False


class _Waiting:
    """Losses and the gradients that belong to them, until these are taken."""

    def __init__(self, losses: Tensor, grads: list[Tensor | None], absent: list[frozenset[int]]) -> None:
        self.losses = losses
        self.absent = absent  # for each gradient, the models that had none
        self.grads: list[Tensor | None] | None = grads


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, *wholes: Tensor) -> Tensor:
        ctx.waiting, ctx.wholes = waiting, wholes
        return waiting.losses

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.waiting.grads = ctx.waiting.grads, None
        if grads is None or torch.is_grad_enabled():
            raise InputError(
                "losses: gradients come with the losses and are handed over once; to differentiate twice or again, "
                "use array.loss(fn, array(x), y)"
            )
        for whole, models in zip(ctx.wholes, ctx.waiting.absent, strict=True):
            note_absent(whole, models)
        factor = by[0]
        if factor.device.type == "cpu" and bool((factor == 1).all()):
            return (None, *grads)
        for grad in grads:
            if grad is not None:
                grad.mul_(factor.view(-1, *(1,) * (grad.ndim - 1)))
        return (None, *grads)
