r"""Forward, loss and backward of a few models in one go, then of the next: no activations wait for the others.

    array(x), then loss, then backward          in one go
    forward 0, forward 1, ... forward B-1       forward 0, loss 0, backward 0
    loss                                        forward 1, loss 1, backward 1
    backward B-1, ... backward 0                ...
    in memory: B models' activations            one model's, in the memory of the one before it

What B models hold at once leaves the caches, and the heap grows and shrinks by it in every step: malloc gives it back
to the system, and page faults take a fifth of a step of large models. The price is that gradients are there before
somebody asks for them: they wait in the stacked buffers until ``losses.backward()`` hands them over, times whatever
gradient the losses get there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hocket.errors import HocketError, InputError
from hocket.fusion.gather import Gather, Places, split
from hocket.fusion.groups import Groups
from hocket.fusion.loss import Losses, stacked_loss
from hocket.fusion.shares import LARGE_BYTES
from hocket.fusion.stacked import Stacked
from hocket.fusion.steps import Owner
from hocket.fusion.trace import Traced

__all__ = ["Alone", "PerGroupBackward"]

REQUIRES_GRAD = attrgetter("requires_grad")


class Alone:
    """The only model and its loss: as in plain torch, with nothing around them but an axis of one loss.

    Args:
        owner: of one model.
        traced: the model.
        channels_last: as of `Groups`.
    """

    def __init__(self, owner: Owner, traced: Traced, channels_last: bool = False) -> None:
        self._owner = owner
        self._groups = Groups(owner, traced, 1, channels_last)

    def run(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        """As `PerGroupBackward.run`, ``(1,)``, but its backward computes the gradients."""
        out = self._groups.run_alone(leaves)
        shape = (1, *_first(out).shape)
        own_targets = self._owner.model_axis.targets(fn, targets, out, shape, 1)
        own = _mapped(own_targets, lambda each: each.squeeze(0))
        return _loss_of_one(fn, out, own, 0).unsqueeze(0)


class _GroupTensors:
    """One group's tensors, leaves of a graph of their own.

    Args:
        tensors: by name.
        trained: those that get a gradient, by the id of the stacked parameter.
    """

    def __init__(self, tensors: dict[str, Tensor], trained: dict[int, Tensor]) -> None:
        self.tensors = tensors
        self.trained = trained


class PerGroupBackward:
    """A traced model and its loss, run for `size` models at a time, each group to the end of its backward.

    Args:
        owner: of all models.
        traced: the model.
        size: models in a group.
        channels_last: as of `Groups`.
    """

    def __init__(self, owner: Owner, traced: Traced, size: int, channels_last: bool = False) -> None:
        self._owner = owner
        self._size = size
        self._places = Places()
        self._groups = Groups(owner, traced, size, channels_last, self._places)
        self._parts: list[_GroupTensors] = []
        self._trained: list[Tensor] = []
        self._seen: Any = None  # what the parts were made of, which they keep alive

    def run(self, fn: Callable[..., Any], leaves: list[Any], targets: tuple[Any, ...]) -> Tensor:
        """The loss of each model, ``(B,)``; its backward hands over gradients that are there already.

        Args:
            fn: a loss function of one model's output and targets.
            leaves: the leaves of the arguments, `Stacked` where models have their own.
            targets: as of `per_model_loss`.

        Raises:
            InputError: `fn` fails.
        """
        parts = self._current_parts()
        wholes = self._trained
        gather = Gather(self._owner.gradient_memory, wholes, len(parts), self._size)
        self._places.gather = gather
        given = [split(leaf.tensor, self._size) if isinstance(leaf, Stacked) else leaf for leaf in leaves]
        losses: list[Tensor] = []
        own_targets: tuple[Any, ...] | None = None
        try:
            for index, part in enumerate(parts):
                own = [
                    each[index] if isinstance(leaf, Stacked) else leaf for leaf, each in zip(leaves, given, strict=True)
                ]
                out = self._groups.run_one(index, own, leaves, part.tensors)
                if own_targets is None:
                    first = out if self._size == 1 else pytree.tree_map_only(Tensor, itemgetter(0), out)
                    shape = self._shape_of(out)
                    own_targets = self._owner.model_axis.targets(fn, targets, first, shape, self._owner.num_models)
                loss = self._loss(fn, out, own_targets, index)
                if not index and _goes_further(loss, out, part):
                    raise InputError(
                        "losses: the gradient of a tensor that the loss function brings along would be lost; use "
                        "array.loss(fn, array(x), y)"
                    )
                del out  # the graph holds what the backward needs
                losses.append(loss.detach())
                self._backward(loss, part, gather, index)
                del loss
        finally:
            self._places.gather = None
        values = torch.stack(losses) if self._size == 1 else torch.cat(losses)
        grads = [gather.whole(whole) for whole in wholes]
        if all(grad is None for grad in grads):  # nothing that trains has a part in the losses
            return values
        ready: Tensor = _Ready.apply(_Grads(values, grads), *wholes)
        return ready.as_subclass(Losses)

    def _loss(self, fn: Callable[..., Any], out: Any, targets: tuple[Any, ...], index: int) -> Tensor:
        """The loss of one model, or the losses of a group."""
        start = index * self._size
        if self._size == 1:
            return _loss_of_one(fn, out, _mapped(targets, lambda each: each[start]), start)
        stop = min(start + self._size, self._owner.num_models)
        own = _mapped(targets, lambda each: Stacked(each[start:stop]))
        return stacked_loss(fn, pytree.tree_map_only(Tensor, Stacked, out), own, stop - start)

    def _backward(self, loss: Tensor, part: _GroupTensors, gather: Gather, index: int) -> None:
        if not loss.requires_grad:
            return
        try:
            with _without_autocast(loss.device.type):
                torch.autograd.backward([loss], [torch.ones_like(loss)], inputs=list(part.trained.values()))
            grads = {key: leaf.grad for key, leaf in part.trained.items() if leaf.grad is not None}
            gather.bring(index, grads)
        finally:
            for leaf in part.trained.values():
                leaf.grad = None

    def _shape_of(self, out: Any) -> tuple[int, ...]:
        """What the first tensor of all models' output would have for a shape."""
        first = _first(out)
        return (self._owner.num_models, *(first.shape if self._size == 1 else first.shape[1:]))

    def _current_parts(self) -> list[_GroupTensors]:
        """Each group's tensors; made anew when the stacked ones are others, or lie elsewhere."""
        now = list(self._owner.all_tensors().values())
        seen = (list(map(id, now)), list(map(Tensor.data_ptr, now)), list(map(REQUIRES_GRAD, now)))
        if seen != self._seen:
            self._parts = self._made_parts()
            self._seen = seen
            self._trained = list({id(whole): whole for whole in now if whole.requires_grad}.values())
        return self._parts

    def _made_parts(self) -> list[_GroupTensors]:
        wholes = self._owner.all_tensors()
        count = -(-self._owner.num_models // self._size)
        parts = [_GroupTensors({}, {}) for _ in range(count)]
        self._places.of.clear()
        made: dict[int, list[Tensor]] = {}  # tied tensors once
        for name, whole in wholes.items():
            key = id(whole)
            if key not in made:
                made[key] = [piece.detach() for piece in split(whole.detach(), self._size)]
                for index, own in enumerate(made[key]):
                    if whole.requires_grad:
                        parts[index].trained[key] = own.requires_grad_()
                        self._places.of[id(own)] = key, index
                        if own.nbytes >= LARGE_BYTES:
                            own.register_post_accumulate_grad_hook(_bring_now(self._places, whole, index))
            for index, own in enumerate(made[key]):
                parts[index].tensors[name] = own
        return parts


def _bring_now(places: Places, whole: Tensor, index: int) -> Callable[[Tensor], None]:
    """A large gradient goes to its place while it is in the cache."""

    def bring(leaf: Tensor) -> None:
        assert leaf.grad is not None
        assert places.gather is not None
        gather, grad, leaf.grad = places.gather, leaf.grad, None
        gather.bring(index, {id(whole): grad})
        if not gather.is_at_place(id(whole), index, grad):
            gather.memory.hold(whole, grad)

    return bring


class _Grads:
    """Losses and the gradients that belong to them, until somebody takes these."""

    def __init__(self, losses: Tensor, grads: list[Tensor | None]) -> None:
        self.losses = losses
        self.grads: list[Tensor | None] | None = grads


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ready: _Grads, *wholes: Tensor) -> Tensor:
        ctx.ready = ready
        return ready.losses

    @staticmethod
    def backward(ctx: Any, *by: Tensor) -> tuple[Tensor | None, ...]:
        grads, ctx.ready.grads = ctx.ready.grads, None
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


def _loss_of_one(fn: Callable[..., Any], out: Any, targets: tuple[Any, ...], model: int) -> Tensor:
    try:
        loss = fn(out, *targets)
    except (HocketError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        given = ", ".join(
            str(tuple(each.shape)) for each in pytree.tree_leaves((out, targets)) if isinstance(each, Tensor)
        )
        raise InputError(f"loss: of outputs and targets of shapes {given}, model {model}: {error}") from error
    if not isinstance(loss, Tensor):
        raise InputError(f"loss: expected one tensor from the loss function, got {type(loss).__name__}")
    return loss.sum() if loss.ndim else loss


def _first(out: Any) -> Tensor:
    """The first tensor of an output."""
    if isinstance(out, Tensor):
        return out
    found = next((leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise InputError("losses: the model gives no tensor")
    return found


def _goes_further(loss: Tensor, out: Any, part: _GroupTensors) -> bool:
    """Whether a loss has gradients for anything but the model's output and parameters."""
    known = set(map(id, part.trained.values()))
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
