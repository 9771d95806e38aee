r"""A traced model run for B models by an `ExecutionPlan`: one program for all, or one for each group of models.

    leaves, stacked tensors --split--> group 0's, group 1's, ... --program each--> outputs --joined--> output
                                                                 \--loss, backward--> losses, and gradients that wait

Where groups go to the end of their backward, gradients are there before somebody asks for them: they wait in the
stacked buffers until ``losses.backward()`` hands them over, times whatever gradient the losses get there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import fallback
from hocket.fusion.gradients import LARGE_BYTES, Gather, Parts, Places, leaf_parts, linked_parts, split
from hocket.fusion.loss import Losses, loss_of_one, own_targets_of, stacked_loss
from hocket.fusion.model_slice import ModelSlice
from hocket.fusion.plan import ExecutionPlan
from hocket.fusion.program import FusedProgram
from hocket.fusion.rules.base import is_watched
from hocket.fusion.single_model import SingleModel
from hocket.fusion.stacked import Stacked, as_tensors
from hocket.fusion.trace import Traced

__all__ = ["GroupExecutor", "LeadsElsewhereError"]


class LeadsElsewhereError(InputError):
    """A loss has gradients for something else than the models' parameters, which one group's backward would lose."""


class GroupExecutor:
    """A traced model, run group after group.

    Args:
        models: all of them.
        traced: the model.
        plan: how many at a time, how far, and in which layout.
    """

    def __init__(self, models: ModelSlice, traced: Traced, plan: ExecutionPlan) -> None:
        self._models = models
        self._plan = plan
        size, total = plan.group_size, models.num_models
        self._size = size
        self._places = Places()
        memory = self._places if plan.per_group_backward else models.gradient_memory
        slices = [
            ModelSlice(models.store, models.settings, start, start + size, memory, is_alone=size == 1)
            for start in range(0, total, size)
        ]
        slices = [
            ModelSlice(models.store, models.settings, start, start + size, memory, is_alone=size == 1)
            for start in range(0, total, size)
        ]
        self._programs = [FusedProgram(each, traced) for each in slices]
        self._single = [SingleModel(each, plan.channels_last) for each in self._programs] if size == 1 else []
        self._leaves_of: Mapping[int, tuple[Tensor, ...]] = {}
        make = self._watched_leaves if plan.per_group_backward else linked_parts
        self._parts = Parts(len(slices), size, make)

    def forward(self, leaves: list[Any]) -> Any:
        """The output for these leaves of the arguments, `Stacked` where models have their own; of single models."""
        outs = [
            self._run(index, leaves, own, part)
            for index, (own, part) in enumerate(self._grouped(leaves, self._linked()))
        ]
        return fallback.stack_parts(outs, "the model itself")

    def losses(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        """The loss of each model, ``(B,)``.

        Args:
            fn: a loss function of one model's output and targets.
            leaves: the leaves of the arguments, `Stacked` where models have their own.
            targets: as of `hocket.fusion.loss.per_model_loss`.

        Raises:
            InputError: `fn` fails.
            LeadsElsewhereError: the loss has gradients for something that the loss function brings along.
        """
        if self._plan.per_group_backward:
            return self._losses_and_gradients(fn, leaves, targets)
        [(own, part)] = self._grouped(leaves, self._linked())
        out = self._run(0, leaves, own, part)
        given = own_targets_of(self._models.settings.model_axis, fn, targets, out, 1, 1)
        return self._loss(fn, out, given, 0).unsqueeze(0)

    def _losses_and_gradients(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        wholes = self._models.store.all_tensors()
        parts = self._parts.of(wholes)
        trained = list({id(whole): whole for whole in wholes.values() if whole.requires_grad}.values())
        gather = Gather(self._models.gradient_memory, self._leaves_of, trained, self._size)
        self._places.gather = gather
        losses: list[Tensor] = []
        given: tuple[Any, ...] | None = None
        try:
            for index, (own, part) in enumerate(self._grouped(leaves, parts)):
                out = self._run(index, leaves, own, part)
                if given is None:
                    total = self._models.num_models
                    given = own_targets_of(self._models.settings.model_axis, fn, targets, out, self._size, total)
                loss = self._loss(fn, out, given, index)
                if not index and self._leads_elsewhere(loss, out):
                    raise LeadsElsewhereError(
                        "losses: the gradient of a tensor that the loss function brings along would be lost; use "
                        "array.loss(fn, array(x), y)"
                    )
                del out  # the graph holds what the backward needs
                losses.append(loss.detach())
                self._backward(loss, gather, index)
                del loss
        finally:
            self._places.gather = None
        values = torch.stack(losses) if self._size == 1 else torch.cat(losses)
        grads = [gather.whole(whole) for whole in trained]
        if all(grad is None for grad in grads):  # nothing that trains has a part in the losses
            return values
        ready: Tensor = _Ready.apply(_Waiting(values, grads), *trained)
        return ready.as_subclass(Losses)

    def _run(self, index: int, leaves: list[Any], own: list[Any], tensors: Mapping[str, Tensor]) -> Any:
        """The output of one group, of plain tensors, with the models first if it is a group of several."""
        if self._single:
            return self._single[index](own, tensors)
        stacked = [Stacked(each) if isinstance(leaf, Stacked) else each for leaf, each in zip(leaves, own, strict=True)]
        out = self._programs[index].run(stacked, lambda name: Stacked(tensors[name]))
        return as_tensors(out, self._size)

    def _grouped(self, leaves: list[Any], parts: list[dict[str, Tensor]]) -> list[tuple[list[Any], dict[str, Tensor]]]:
        """Each group's part of the leaves, and its tensors."""
        given = [split(leaf.tensor, self._size) if isinstance(leaf, Stacked) else None for leaf in leaves]
        return [
            ([leaf if each is None else each[index] for leaf, each in zip(leaves, given, strict=True)], part)
            for index, part in enumerate(parts)
        ]

    def _linked(self) -> list[dict[str, Tensor]]:
        """Each group's tensors, whose gradients lead back to the stacked ones."""
        wholes = self._models.store.all_tensors()
        watched = is_watched() or torch._C._are_functorch_transforms_active() or torch.is_inference_mode_enabled()
        if not watched and all(whole.is_leaf for whole in wholes.values()):
            return self._parts.of(wholes)
        of = {id(whole): split(whole, self._size) for whole in wholes.values()}
        return [{name: of[id(whole)][index] for name, whole in wholes.items()} for index in range(len(self._programs))]

    def _loss(self, fn: Callable[..., Any], out: Any, targets: tuple[Any, ...], index: int) -> Tensor:
        """The loss of one model, or the losses of a group."""
        start = index * self._size
        if self._size == 1:
            return loss_of_one(fn, out, _mapped(targets, lambda each: each[start]), start)
        own = _mapped(targets, lambda each: Stacked(each[start : start + self._size]))
        return stacked_loss(fn, pytree.tree_map_only(Tensor, Stacked, out), own, self._size)

    def _backward(self, loss: Tensor, gather: Gather, index: int) -> None:
        if not loss.requires_grad:
            return
        own = {key: leaves[index] for key, leaves in self._leaves_of.items()}
        try:
            with _without_autocast(loss.device.type):
                torch.autograd.backward([loss], [torch.ones_like(loss)], inputs=list(own.values()))
            for key, leaf in own.items():
                if leaf.grad is not None:
                    gather.bring(key, index, leaf.grad)
        finally:
            for leaf in own.values():
                leaf.grad = None

    def _watched_leaves(self, wholes: list[Tensor], size: int) -> Mapping[int, tuple[Tensor, ...]]:
        """As `leaf_parts`; a large gradient goes to its place while it is in the cache."""
        self._leaves_of = leaf_parts(wholes, size)
        self._places.of.clear()
        for whole in wholes:
            for index, own in enumerate(self._leaves_of[id(whole)]):
                self._places.of[id(own)] = id(whole), index
                if own.nbytes >= LARGE_BYTES:
                    own.register_post_accumulate_grad_hook(_bring_now(self._places, whole, index))
        return self._leaves_of

    def _leads_elsewhere(self, loss: Tensor, out: Any) -> bool:
        """Whether a loss has gradients for anything but the model's output and parameters."""
        known = {id(leaves[0]) for leaves in self._leaves_of.values()}
        ends = {leaf.grad_fn for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)}
        nodes, seen = [loss.grad_fn], set(ends)
        while nodes:
            node: Any = nodes.pop()
            if node is None or node in seen:
                continue
            if id(getattr(node, "variable", None)) not in known and hasattr(node, "variable"):
                return True
            seen.add(node)
            nodes += [each for each, _ in node.next_functions]
        return False


def _bring_now(places: Places, whole: Tensor, index: int) -> Callable[[Tensor], None]:
    def bring(leaf: Tensor) -> None:
        assert leaf.grad is not None
        assert places.gather is not None
        gather, grad, leaf.grad = places.gather, leaf.grad, None
        gather.bring(id(whole), index, grad)
        if not gather.is_at_place(id(whole), index, grad):
            gather.memory.hold(whole, grad)

    return bring


class _Waiting:
    """Losses and the gradients that belong to them, until somebody takes these."""

    def __init__(self, losses: Tensor, grads: list[Tensor | None]) -> None:
        self.losses = losses
        self.grads: list[Tensor | None] | None = grads


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, *wholes: Tensor) -> Tensor:
        ctx.waiting = waiting
        return waiting.losses

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.waiting.grads = ctx.waiting.grads, None
        if grads is None or torch.is_grad_enabled():
            raise InputError(
                "losses: gradients come with the losses and are handed over once; to differentiate twice or again, "
                "use array.loss(fn, array(x), y)"
            )
        factor = by[0]
        if factor.device.type == "cpu" and bool((factor == 1).all()):
            return (None, *grads)
        for grad in grads:
            if grad is not None:
                grad.mul_(factor.view(-1, *(1,) * (grad.ndim - 1)))
        return (None, *grads)


def _mapped(targets: tuple[Any, ...], change: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """Targets with those that models have of their own changed."""
    if set(map(type, targets)) <= {Stacked, Tensor}:
        return tuple([change(target.tensor) if type(target) is Stacked else target for target in targets])
    found: tuple[Any, ...] = pytree.tree_map(
        lambda leaf: change(leaf.tensor) if isinstance(leaf, Stacked) else leaf,
        targets,
        is_leaf=lambda leaf: isinstance(leaf, Stacked),
    )
    return found


def _without_autocast(device: str) -> AbstractContextManager[Any]:
    """A backward runs outside of autocast, as torch advises."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
