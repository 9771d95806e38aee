"""Tensors whose first use is noticed, wherever it is: in a module's forward, in another module's, or in no module's.

A parameter that has not arrived must not be read, and Python has many ways to read one: ``F.linear(x, other.weight)``,
a tied weight, ``model.state_dict()``, an optimizer, ``copy.deepcopy``. So the tensor itself tells: its class is
exchanged for a subclass whose ``__torch_function__`` is called before any function or method of torch that gets it,
and put back before the function runs. (`torch.nn.parameter.UninitializedParameter` changes class in place, too.) It
stays the same object in the same memory, so that ties, optimizers and a module's own lists of weights hold.

What says something about a tensor without looking at its values (`shape`, `dtype`, `requires_grad`) is no use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

__all__ = ["HOLDABLE", "ArrivingParameter", "ArrivingTensor", "hold", "is_held", "release", "use", "waiting_for"]


# Where a held tensor keeps what is called at its first use.
_KEY = "_hocket_first_use"

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "itemsize"),
    *(
        "nbytes",
        "is_cpu",
        "is_cuda",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_xpu",
        "is_mps",
    ),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_inference", "requires_grad_", "__len__", "__hash__"),
)
_SET: tuple[Any, ...] = (torch.Tensor.requires_grad, torch.Tensor.grad)

# Functions that tell nothing of a tensor's values.
_VALUE_FREE = frozenset(
    (
        *(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(attribute.__set__ for attribute in _SET),
        *(attribute.__delete__ for attribute in _SET),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    )
)


def _first_use(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    kwargs = kwargs or {}
    if function in _VALUE_FREE:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    for leaf in tree_leaves((args, kwargs)):
        if is_held(leaf):
            use(leaf)
    return function(*args, **kwargs)


def waiting_for(tensor: torch.Tensor) -> Callable[[], object] | None:
    """What is called at the first use of a tensor; None for an ordinary one."""
    found: Callable[[], object] | None = tensor.__dict__.get(_KEY) if is_held(tensor) else None
    return found


def use(tensor: torch.Tensor) -> None:
    """Use a tensor: afterwards it is an ordinary one.

    Raises:
        Exception: whatever its first use raises.
    """
    first_use = waiting_for(tensor)
    # A copy that was made without asking anyone has nothing to wait for.
    if first_use is None:
        release(tensor)
    else:
        first_use()


class _Held:
    """What makes a tensor's first use noticed."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _first_use(function, args, kwargs)

    # `torch.nn.Parameter` has these two of its own, which look at the class before they look at the values.
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        use(self)  # type: ignore[arg-type]
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        use(self)  # type: ignore[arg-type]
        return self.__reduce_ex__(protocol)


class ArrivingParameter(_Held, torch.nn.Parameter):
    """A parameter whose first use is noticed."""


class ArrivingTensor(_Held, torch.Tensor):
    """A buffer whose first use is noticed."""


_CLASSES: dict[type, type] = {torch.nn.Parameter: ArrivingParameter, torch.Tensor: ArrivingTensor}
_PLAIN = {held: plain for plain, held in _CLASSES.items()}

# Of these very classes tensors can be held; subclasses have ideas of their own about `__torch_function__`.
HOLDABLE = (*_CLASSES, *_PLAIN)


def hold(tensor: torch.Tensor, first_use: Callable[[], object]) -> None:
    """Have `first_use` called before anything looks at the values of `tensor`, from whatever thread that is.

    It has to `release` the tensor or to raise.

    Example:
        >>> weight = torch.ones(3)
        >>> def arrive():
        ...     release(weight)
        ...     weight.fill_(2)
        >>> hold(weight, arrive)
        >>> weight.shape, is_held(weight), weight.sum().item(), is_held(weight)
        (torch.Size([3]), True, 6.0, False)
    """
    tensor.__dict__[_KEY] = first_use
    tensor.__class__ = _CLASSES.get(type(tensor), type(tensor))


def release(tensor: torch.Tensor) -> None:
    """Make it an ordinary tensor again."""
    tensor.__dict__.pop(_KEY, None)
    tensor.__class__ = _PLAIN.get(type(tensor), type(tensor))


def is_held(value: object) -> bool:
    """Whether this is a tensor whose first use is still to come."""
    return type(value) in _PLAIN
