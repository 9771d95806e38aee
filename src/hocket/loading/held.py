"""Tensors whose first use is noticed, wherever it is: in a module's forward, in another module's, or in no module's.

A parameter that has not arrived must not be read, and Python has many ways to read one: ``F.linear(x, other.weight)``,
a tied weight, ``model.state_dict()``, an optimizer, ``copy.deepcopy``. So the tensor itself tells: its class is
exchanged for a subclass whose ``__torch_function__`` is called before any function or method of torch that gets it,
and restored before the function runs. (`torch.nn.parameter.UninitializedParameter` changes class in place, too.)

Few functions bypass that: those of C++ that are bound by hand (DLPack, process groups, extensions). They must not read
uninitialised memory, so a held tensor has none: it is on the meta device, and its use raises an error. Its memory,
gradient and flags are kept in another tensor until it is released::

    held      weight: ArrivingParameter, meta          memory: Tensor, the weight's own storage and gradient
    released  weight: Parameter, its own storage and gradient

It stays the same object, so ties, optimizers and a module's lists of weights remain valid. Attributes that do not
depend on the values (`shape`, `dtype`, `requires_grad`) do not count as a use.

Some modules of torch check their tensors for ``__torch_function__``, and then compute in another way. Attention and
encoder layers have a fast path in C++ for inference, and avoid it if a tensor has a ``__torch_function__``, as a held
one has. To take the same path as for ordinary tensors, their forward first waits for all tensors that it may check. The
hook that waits removes itself before that, because hooks are checked, too.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

# Where a held tensor keeps its `_Hold`.
_KEY = "_hocket_hold"

_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad", "grad_fn", "itemsize"),
    *("nbytes", "is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xpu"),
    "is_mps",
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


def _seen(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch that gets held tensors, among others."""
    if function in _VALUE_FREE and args and not kwargs and not any(map(is_held, args[1:])):
        hold = _hold_of(args[0])
        if hold is not None:
            return hold.ask(args[0], function, *args[1:])
    for leaf in tree_leaves((args, kwargs)):
        if is_held(leaf):
            use(leaf)
    return function(*args, **kwargs)


def mark_changed(tensor: torch.Tensor) -> None:
    """Increment the version of a tensor, so that a backward that saved its values raises an error."""
    if not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)


class _Hold:
    """The state of a held tensor."""

    def __init__(self, tensor: torch.Tensor, first_use: Callable[[], object]) -> None:
        self.first_use = first_use  # called at the first use
        # Exchanging two tensors takes several steps, and no other thread may see an intermediate state.
        self._lock = threading.RLock()
        # an ordinary tensor that has the held one's memory, gradient and flags
        self.memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        self.memory.requires_grad_(tensor.requires_grad)
        mark_changed(tensor)
        torch._C._swap_tensor_impl(tensor, self.memory)
        tensor.__dict__[_KEY] = self
        tensor.__class__ = _CLASSES[type(tensor)]

    def ask(self, tensor: torch.Tensor, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that does not depend on values, on the tensor that has the memory."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if not is_held(tensor):
                return function(tensor, *args)
            answer = function(self.memory, *args)
            # A graph that gets the held tensor must fail in its backward, and not lose this gradient.
            tensor.requires_grad_(self.memory.requires_grad)
            return tensor if answer is self.memory else answer

    def release(self, tensor: torch.Tensor) -> None:
        """Exchange the two again."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():
            if is_held(tensor):
                torch._C._swap_tensor_impl(tensor, self.memory)
                tensor.__class__ = _PLAIN[type(tensor)]
                del tensor.__dict__[_KEY]


class _Held:
    """Methods of a held tensor, which make its first use noticed."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = _seen(function, args, kwargs or {})
        if function is torch.Tensor.detach and sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            # `torch.nn.Parameter(weight)` has seen the class of a held one, and wants a result of the weight's class.
            return found.as_subclass(type(args[0]))
        return found

    # `torch.nn.Parameter` defines these two, which check the class before they read the values.
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

# Tensors of exactly these classes can be held: subclasses may define `__torch_function__` themselves.
HOLDABLE = (*_CLASSES, *_PLAIN)


def hold(tensor: torch.Tensor, first_use: Callable[[], object]) -> None:
    """Have `first_use` called before anything reads the values of `tensor`, in any thread.

    The tensor is an ordinary one again when that returns, or by `release`. For a tensor that is already held,
    `first_use` is replaced.
    """
    held = _hold_of(tensor)
    if held is None:
        _Hold(tensor, first_use)
    else:
        held.first_use = first_use


def release(tensor: torch.Tensor) -> None:
    """Make it an ordinary tensor again."""
    held = _hold_of(tensor)
    if held is not None:
        held.release(tensor)


def use(tensor: torch.Tensor) -> None:
    """Use a tensor, which is an ordinary one afterwards. Errors of its first use pass through."""
    held = _hold_of(tensor)
    if held is not None:
        held.first_use()
        held.release(tensor)
    elif is_held(tensor):
        # The tensor was created with the class of a held one, and has values.
        tensor.__class__ = _PLAIN[type(tensor)]


def waiting_for(tensor: torch.Tensor) -> Callable[[], object] | None:
    """Return the function that is called at the first use of a tensor, or None for an ordinary one."""
    held = _hold_of(tensor)
    return None if held is None else held.first_use


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of this one, held or not, whatever its content."""
    held = _hold_of(tensor)
    return tensor if held is None else held.memory


def is_held(value: object) -> bool:
    """Return True if this is a tensor that has not been used yet."""
    return type(value) in _PLAIN


def _hold_of(value: Any) -> _Hold | None:
    return value.__dict__.get(_KEY) if is_held(value) else None


class _Gate:
    """A forward pre-hook that waits, and then removes itself and the gates of the modules that its module checks."""

    def __init__(self, waits: Sequence[Callable[[], object]]) -> None:
        self._waits = tuple(waits)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        for wait in self._waits:
            wait()
        _remove(module)
        asking = _asking(module)
        for part in () if asking is None else asking.modules():
            _remove(part)

    def __deepcopy__(self, memo: Any) -> _Gate:
        """Share the gate with a copy of the module, which waits for the same tensors."""
        return self


def add_gate(module: torch.nn.Module, waits: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Let the next forward of a module begin with all `waits`, and return a function that removes the gate."""
    module.register_forward_pre_hook(_Gate(waits), prepend=True)
    return partial(_remove, module)


def asked_about(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the tensors that the forward of a module checks. Most modules check none."""
    asking = _asking(module)
    return [] if asking is None else list(dict.fromkeys((*asking.parameters(), *asking.buffers())))


def _asking(module: torch.nn.Module) -> torch.nn.Module | None:
    if isinstance(module, (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)):
        return module
    return next(iter(module.layers), None) if isinstance(module, torch.nn.TransformerEncoder) else None


def _remove(module: torch.nn.Module) -> None:
    for key, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Gate):
            module._forward_pre_hooks.pop(key, None)
