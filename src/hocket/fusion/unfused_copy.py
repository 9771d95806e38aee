"""One of B models as a function of its own, on views of the stacked tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.fusion import fallback
from hocket.fusion.checkpointing import without_checkpoints
from hocket.fusion.rules.random import drawing_from
from hocket.fusion.store import Store, named_tensors

__all__ = ["call_with", "one_by_one"]


class _UnfusedCopy:
    """One model on its part of the stacked tensors, drawing from its own generator where it has one."""

    def __init__(self, store: Store, template: nn.Module, tensors: dict[str, Tensor], index: int) -> None:
        self._store = store
        self._shell = template
        self._tensors = tensors
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(iter(self._tensors.values())).device if self._tensors else torch.device("cpu")
        generators = self._store.generators_on(device)
        if not generators:
            return call_with(self._shell, self._tensors, args, kwargs)
        with drawing_from(generators[self._index]):
            return call_with(self._shell, self._tensors, args, kwargs)


def one_by_one(store: Store, spec: Any, values: list[Any]) -> Any:
    """The plain models one after another, on views of the stacked tensors.

    Args:
        store: of the models.
        spec: the tree of the arguments.
        values: their leaves, `Stacked` where models have their own.
    """
    args, kwargs = pytree.tree_unflatten(values, spec)
    parts: dict[int, tuple[Tensor, ...]] = {}
    tensors: dict[str, tuple[Tensor, ...]] = {}
    for name, whole in store.all_tensors().items():
        tensors[name] = parts.setdefault(id(whole), whole.unbind(0))
    targets: list[Callable[..., Any]] = []
    for index, template in enumerate(store.templates):
        own = {name: each[index] for name, each in tensors.items()}
        for block in store.separate_index:
            module = (store.separate_block(block) or [])[index]
            own |= {f"{block}.{name}": each for name, each in named_tensors(module)}
        targets.append(_UnfusedCopy(store, template, own, index))
    return fallback.loop(targets, args, kwargs, "the model itself")


def call_with(template: nn.Module, tensors: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a template with these tensors; a buffer that its forward assigns anew is written into its tensor."""

    def write_back(module: nn.Module, _: Any, __: Any) -> None:
        for name, value in module.named_buffers(remove_duplicate=False):
            if name in tensors and value is not tensors[name]:
                tensors[name].copy_(value)

    handle = template.register_forward_hook(write_back)
    try:
        with without_checkpoints():
            return torch.func.functional_call(template, tensors, args, kwargs)
    finally:
        handle.remove()
