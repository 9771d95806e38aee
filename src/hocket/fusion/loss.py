"""One loss per model, whose backward gives every model its own gradient (HFTA, section 3 and Appendix C).

HFTA takes the mean over everything and multiplies it by B. Here the loss stays a vector ``(B,)``, one number a model,
and ``backward()`` starts from a one for each: the same gradients, for any reduction, and a model whose loss is not
finite cannot reach the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hocket.errors import HocketError, InputError
from hocket.fusion import fallback
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.rules.base import is_watched
from hocket.fusion.shared_objects import held_by
from hocket.fusion.stacked import ModelValues, Stacked, unwrap
from hocket.fusion.watching import ForwardWatch
from hocket.pystate.origins import level_of_user

UNCHANGED = (HocketError, torch.OutOfMemoryError)
FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
DEPTH = 4  # of functions that hold functions


class Losses(Tensor):
    """Losses ``(B,)``. ``backward()`` needs no argument: each model's loss counts once.

    Example:
        >>> w = torch.ones(2, requires_grad=True)
        >>> (w * torch.tensor([3.0, 5.0])).as_subclass(Losses).backward()
        >>> w.grad
        tensor([3., 5.])
    """

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        """As `Tensor.backward`, from ones."""
        plain = self.as_subclass(Tensor)
        plain.backward(torch.ones_like(plain) if gradient is None else gradient, *args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results that go backward from several losses are such, too; numbers, and what is kept, are plain."""
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return found.as_subclass(cls) if type(found) is Tensor and found.ndim and found.requires_grad else found


def per_model_loss(
    fn: Callable[..., Any],
    outputs: Any,
    targets: tuple[Any, ...],
    num_models: int,
    axis: ModelAxis,
    watched: dict[Any, str],
    may_read_otherwise: bool = True,
) -> Tensor:
    """``fn(output, *targets)`` of each model.

    Args:
        fn: any loss function or module of one model's output and target. Several numbers are summed up.
        outputs: the fused model's output, ``(B, N, ...)``, or a tree of such.
        targets: ``(B, N, ...)``, or ``(N, ...)`` for all models, or trees of such, or anything else that `fn` takes.
        num_models: B.
        axis: what is settled about targets.
        watched: for each kind of function that has been watched, what one call for all models would lose.
        may_read_otherwise: where `fn` fails, take targets of which only the first axis says that each model has its own
            as of all models.

    Raises:
        InputError: `outputs` has no model axis, or `fn` fails. The message restates the shapes.
    """
    is_one = num_models == len(targets) == 1 and type(outputs) is type(targets[0]) is Tensor
    if is_one and outputs.shape[:1] == (1,) and not is_watched():  # one number, which needs no class of its own
        out = outputs.squeeze(0)
        [own] = axis.targets(fn, targets, out, outputs.shape, 1)
        loss = fn(out, own.tensor.squeeze(0) if isinstance(own, Stacked) else own)
        if isinstance(loss, Tensor):
            return loss.unsqueeze(0) if loss.ndim == 0 else loss.sum().unsqueeze(0)
    leaves, spec = pytree.tree_flatten(outputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(leaf.ndim == 0 or leaf.shape[0] != num_models for leaf in tensors):
        shapes = [tuple(leaf.shape) for leaf in tensors]
        raise InputError(f"loss: expected outputs of shape ({num_models}, N, ...), got {shapes}")
    stacked = pytree.tree_unflatten([Stacked(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    first = pytree.tree_map_only(Tensor, itemgetter(0), outputs)
    own_targets = axis.targets(fn, targets, first, tensors[0].shape, num_models)
    try:
        found = _alone(fn, (stacked, *own_targets)) if num_models == 1 else _quick(fn, stacked, own_targets, num_models)
        losses = _any(fn, (stacked, *own_targets), num_models, watched) if found is None else found
    except UNCHANGED:
        raise
    except FAILURES as error:
        failed = _restated(error, (stacked, own_targets), f"{num_models} models")
        if may_read_otherwise and axis.reads_otherwise():
            try:
                return per_model_loss(fn, outputs, targets, num_models, axis, watched, may_read_otherwise=False)
            except InputError:
                raise failed from error
        raise failed from error
    losses = losses.flatten(1).sum(1) if losses.ndim > 1 else losses
    return _traced(losses) if is_watched() else losses.as_subclass(Losses) if losses.requires_grad else losses


def loss_of_one(fn: Callable[..., Any], out: Any, targets: tuple[Any, ...], model: int) -> Tensor:
    """``fn(out, *targets)`` of one plain model, a tensor without axes."""
    try:
        loss = fn(out, *targets)
    except UNCHANGED:
        raise
    except FAILURES as error:
        raise _restated(error, (out, targets), f"model {model}") from error
    if not isinstance(loss, Tensor):
        raise InputError(f"loss: expected one tensor from the loss function, got {type(loss).__name__}")
    return loss.sum() if loss.ndim else loss


def _restated(error: Exception, values: Any, who: str) -> InputError:
    """An error of a loss function, with the shapes that it was given."""
    leaves = map(unwrap, pytree.tree_leaves(values, is_leaf=lambda value: isinstance(value, Stacked)))
    given = ", ".join(str(tuple(each.shape)) for each in leaves if isinstance(each, Tensor))
    return InputError(f"loss: of outputs and targets of shapes {given}, {who}: {error}")


def first_tensor(out: Any) -> Tensor:
    """The first tensor of an output."""
    if isinstance(out, Tensor):
        return out
    found = next((leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)), None)
    if found is None:
        raise InputError("losses: the model gives no tensor")
    return found


def _traced(losses: Tensor) -> Tensor:
    """Give a plain tensor the backward of `Losses` by a change of its class: a tracer would see no view of another."""
    losses.__class__ = _TracedLosses
    return losses


class _TracedLosses(Tensor):
    """Losses while a step is traced."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
        """As `Tensor.backward`, from ones."""
        torch.autograd.backward(self, torch.ones_like(self) if gradient is None else gradient, *args, **kwargs)


def _computed(name: str) -> Callable[..., Any]:
    plain = getattr(Tensor, name)

    def compute(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = plain(self, *args, **kwargs)
        return _traced(found) if type(found) is Tensor and found.shape == self.shape else found

    return compute


_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "pow")
for _name in (*(f"__{each}__" for each in _OPERATORS), "add", "sub", "mul", "div", "neg", "pow", "clamp"):
    setattr(_TracedLosses, _name, _computed(_name))


def _alone(fn: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """The loss of the only model, computed without fusing, or None if it is not one tensor."""
    result = fn(*of_one(args, lambda tensor: tensor.squeeze(0)))
    return result.unsqueeze(0) if isinstance(result, Tensor) else None


def of_one(args: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
    """Arguments as one model sees them. Outputs keep their class, because a loss may read ``out.loss``."""
    return pytree.tree_map(
        lambda leaf: change(leaf.tensor) if isinstance(leaf, Stacked) else leaf,
        args,
        is_leaf=lambda leaf: isinstance(leaf, Stacked),
    )


def _any(fn: Callable[..., Any], args: tuple[Any, ...], num_models: int, watched: dict[Any, str]) -> Tensor:
    kind = _code_of(fn)
    try:
        if kind not in watched and not is_watched() and not _is_of_torch(fn):
            result = _first(fn, args, num_models, watched)
        elif watched.get(kind):
            result = _each(fn, args, num_models)
        else:
            with _Agreeing() if (kind, "branches") in watched else nullcontext():
                result = fallback.vmap(fn, args, {}, num_models)
    except (RuntimeError, ValueError, TypeError):
        watched[kind, "branches"] = ""  # as it seems
        result = _each(fn, args, num_models)
    if isinstance(result, Tensor):
        return result.expand(num_models)
    losses = unwrap(result)
    if not isinstance(losses, Tensor):
        got = losses.values[0] if isinstance(losses, ModelValues) else losses
        raise InputError(f"loss: expected one tensor from the loss function, got {type(got).__name__}")
    return losses


class _Agreeing(TorchFunctionMode):
    """Branches on values, such as assertions, that all models take alike, under torch's batching."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__bool__ or not is_batchedtensor(args[0]):
            return func(*args, **(kwargs or {}))
        values = get_unwrapped(args[0])
        answer = bool(values.all())
        if not answer and values.any():
            raise RuntimeError("models go different ways")
        return answer


def _each(fn: Callable[..., Any], args: tuple[Any, ...], num_models: int, one: Callable[[], Any] = nullcontext) -> Any:
    """The losses of a call for each model."""
    outs = []
    for index in range(num_models):
        with one():
            outs.append(fn(*of_one(args, itemgetter(index))))
    return fallback.stack_parts(outs, "loss")


def _first(fn: Callable[..., Any], args: tuple[Any, ...], num_models: int, watched: dict[Any, str]) -> Any:
    """The same, and a look at what the function does besides: keep a value, count, draw, ask a clock."""
    own = [tensor for each in _held(fn) for tensor in ([each] if isinstance(each, Tensor) else each.buffers())]
    before = [tensor._version for tensor in own]
    seen = ForwardWatch(fn.forward if isinstance(fn, nn.Module) else fn).run(partial(_each, fn, args, num_models))
    is_written = before != [tensor._version for tensor in own]
    reason = watched[_code_of(fn)] = seen.reason or "it writes into a tensor that it holds" * is_written
    if reason:
        warnings.warn(
            f"hocket.fuse: loss: {reason}; it is called for one model after another", stacklevel=level_of_user()
        )
    return seen.result


def _is_of_torch(fn: Any) -> bool:
    """True of functions and modules of torch's, which do nothing besides."""
    while isinstance(fn, partial):
        fn = fn.func
    parts = map(type, fn.modules()) if isinstance(fn, nn.Module) else [fn]
    return all((getattr(part, "__module__", None) or "torch.").startswith("torch.") for part in parts)


def _quick(fn: Any, output: Any, targets: tuple[Any, ...], num_models: int) -> Tensor | None:
    """Compute the two commonest losses, with default options, without the overhead of vmap. Returns None for others."""
    if len(targets) != 1 or not isinstance(output, Stacked) or not isinstance(targets[0], (Stacked, Tensor)):
        return None
    target = targets[0]
    if _is_plain(fn, functional.cross_entropy, nn.CrossEntropyLoss) and output.ndim == 2 and target.ndim == 1:
        rows, classes = output.shape
        if rows == 0 or target.shape[0] != rows:
            return None
        labels = target.tensor if isinstance(target, Stacked) else target.expand(num_models, rows)
        each = functional.cross_entropy(output.tensor.reshape(-1, classes), labels.reshape(-1), reduction="none")
        return each.view(num_models, rows).sum(1) / (labels != -100).sum(1)
    if _is_plain(fn, functional.mse_loss, nn.MSELoss) and tuple(target.shape) == tuple(output.shape):
        other = target.tensor if isinstance(target, Stacked) else target.expand_as(output.tensor)
        each = functional.mse_loss(output.tensor, other, reduction="none")
        return each.flatten(1).mean(1) if each.ndim > 1 else each  # of a batch of one that was squeezed, a number
    return None


def _is_plain(fn: Any, function: Any, cls: type[nn.Module]) -> bool:
    """The function itself, or the module without options."""
    if fn is function:
        return True
    if type(fn) is not cls:
        return False
    options: tuple[Any, ...] = (getattr(fn, "weight", None), fn.reduction, getattr(fn, "ignore_index", -100))
    return options == (None, "mean", -100) and getattr(fn, "label_smoothing", 0.0) == 0.0


# ------------------------------------------------------------ what is known of a loss function without calling it


def kind_of(fn: Callable[..., Any]) -> Any:
    """A key of a loss function, equal for one that is written anew in each step."""
    return (_code_of(fn), any(map(_trains, _held(fn))))


def buffers_in(fn: Callable[..., Any]) -> list[Tensor]:
    """Buffers of the modules in a loss function."""
    return [buffer for each in _held(fn) if isinstance(each, nn.Module) for buffer in each.buffers()]


def _code_of(fn: Any) -> Any:
    if isinstance(fn, partial):
        return (_code_of(fn.func), *[_code_of(arg) for arg in fn.args if callable(arg)])
    return getattr(fn, "__code__", None) or type(fn)


def _held(fn: Any, depth: int = DEPTH) -> Iterator[Tensor | nn.Module]:
    """Tensors and modules that a loss function brings along, as far as can be seen."""
    if isinstance(fn, (Tensor, nn.Module)):
        yield fn
    elif callable(fn) and depth:
        for each in held_by(fn):
            yield from _held(each, depth - 1)


def _trains(held: Tensor | nn.Module) -> bool:
    if isinstance(held, Tensor):
        return held.requires_grad
    return any(param.requires_grad for param in held.parameters())
