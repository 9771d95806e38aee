"""The objects that a value leads to: is any of them a model, an optimizer, or code that could know of one?"""

from __future__ import annotations

import dis
import gc
import io
import sys
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from hocket.pystate.bytecode import globals_of, with_nested
from hocket.pystate.origins import is_user_code, origin
from hocket.pystate.places import is_a

# Objects after which a value counts as one that could lead anywhere.
MAX_OBJECTS = 5_000
# Attributes by which code leads from a tensor to its gradient or its graph, from a model to its weights, or to
# everything, by which it writes into memory that a tensor may have, and by which it asks the clock.
FORBIDDEN = frozenset(
    (
        "grad", "grad_fn", "backward", "retain_grad", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad", "is_leaf", "parameters", "named_parameters", "state_dict", "load_state_dict", "zero_grad",
        "step", "_getframe", "get_objects", "get_referrers", "data_ptr", "sort", "fill", "put", "partition", "itemset",
        "setfield", "copyto", "putmask", "place", "fill_diagonal", "time", "time_ns", "perf_counter", "perf_counter_ns",
        "monotonic", "process_time",
    )
)  # fmt: skip
# Functions that lead to everything, or to attributes whose names are not spelled out.
_LEADING = (eval, exec, globals, locals, vars, getattr, setattr, delattr, __import__)
_NAMES = FORBIDDEN.union(each.__name__ for each in _LEADING)
_TRAINED = (torch.nn.Module, torch.optim.Optimizer, torch.amp.GradScaler)
_WEAK = (weakref.ReferenceType, *weakref.ProxyTypes)
_PLAIN = (int, float, complex, bool, str, bytes, type(None), CodeType, torch.dtype, torch.device, torch.Size, range)


@dataclass(frozen=True)
class Reach:
    """All that a value leads to."""

    is_closed: bool  # it leads to no model, no optimizer, and no code that could know of one
    addresses: frozenset[int] = frozenset()  # of the memory of tensors and arrays that it leads to
    stores: bool = False  # it leads to code with ``x[i] = y``, whose ``x`` could be a tensor

    def is_apart(self, trained: Collection[int]) -> bool:
        """True if it leads to none of this memory either."""
        return self.is_closed and self.addresses.isdisjoint(trained)


_OPEN = Reach(False)


def reach_of(value: Any) -> Reach:
    """Follow a value to all that it leads to."""
    waiting, seen, addresses, stores = [value], dict[int, Any](), set[int](), False
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if id(each) in seen or issubclass(kind, _PLAIN):
            continue
        seen[id(each)] = each
        if issubclass(kind, torch.Tensor):
            address = _address(each)
            if address is None or (each.requires_grad and each.is_leaf):
                return _OPEN
            addresses.add(address)
            continue
        if issubclass(kind, np.ndarray):
            addresses.add(np.ndarray.__array_interface__.__get__(each)["data"][0])
        if issubclass(kind, FunctionType) and is_user_code(each.__code__):
            stores = stores or any(map(_stores, with_nested(each.__code__)))
        if issubclass(kind, _TRAINED) or len(seen) > MAX_OBJECTS or not _is_known(each):
            return _OPEN
        waiting.extend(_next(each))
    return Reach(True, frozenset(addresses), stores)


def addresses_of(roots: Collection[Any]) -> set[int]:
    """The memory of models, gradients, and optimizers with their state."""
    tensors: list[torch.Tensor] = []
    for root in roots:
        if is_a(root, torch.nn.Module):
            tensors += [*root.parameters(), *root.buffers()]
        elif is_a(root, torch.optim.Optimizer):
            tensors += [each for group in root.param_groups for each in group["params"]]
            tensors += [leaf for leaf in tree_leaves(list(root.state.values())) if is_a(leaf, torch.Tensor)]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return {address for each in tensors if (address := _address(each)) is not None}


def writes_in_place(name: str) -> bool:
    """True of the methods that write a tensor, ``add_`` and the like."""
    return name.endswith("_") and not name.endswith("__")


def _address(tensor: torch.Tensor) -> int | None:
    """The memory of a tensor. None where it has none of its own: sparse ones, wrappers, those of `torch.func`."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def _may_write(code: CodeType) -> bool:
    """True of code with ``f(out=x)``, whose ``x`` could be the memory of a tensor, and of imports."""
    return any(type(each) is tuple and "out" in each for each in code.co_consts) or any(
        each.opname == "IMPORT_NAME" for each in dis.get_instructions(code)
    )


def _stores(code: CodeType) -> bool:
    return any(each.opname == "STORE_SUBSCR" for each in dis.get_instructions(code))


def _is_known(value: Any) -> bool:
    """True of values that can be followed."""
    if is_a(value, FunctionType) and is_user_code(value.__code__):
        codes = list(with_nested(value.__code__))
        names = {name for code in codes for name in code.co_names}
        return _NAMES.isdisjoint(names) and not any(map(writes_in_place, names)) and not any(map(_may_write, codes))
    if is_a(value, ModuleType):
        return origin(vars(value).get("__file__") or "<frozen") != "user"
    if is_a(value, BuiltinFunctionType):
        return value not in _LEADING and value.__name__ not in FORBIDDEN
    gives_values = any("__next__" in vars(kind) for kind in type(value).__mro__)  # without asking a mock for it
    return not is_a(value, _WEAK) and (is_a(value, io.IOBase) or not gives_values)


def _next(value: Any) -> Iterator[Any]:
    """The objects that a value leads to at once."""
    if is_a(value, FunctionType):
        if is_user_code(value.__code__):
            yield from (value.__defaults__, value.__kwdefaults__, value.__closure__)
            names = {name for code in with_nested(value.__code__) for name in globals_of(code)}
            yield from (value.__globals__[name] for name in names if name in value.__globals__)
    elif is_a(value, (MethodType, BuiltinFunctionType)):
        yield from (value.__self__, getattr(value, "__func__", None))
    elif is_a(value, type):
        yield from value.__bases__
        module = sys.modules.get(str(vars(value).get("__module__")))
        if origin(getattr(module, "__file__", None) or "") == "user":
            yield from vars(value).values()
    elif is_a(value, np.ndarray):
        yield np.ndarray.base.__get__(value)  # a subclass may note who asks
    elif not is_a(value, (ModuleType, io.IOBase)):
        yield type(value)
        yield from gc.get_referents(value)
