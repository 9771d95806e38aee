"""One of B models as a function of its own, on views of the stacked tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.fusion.rules.random import drawing_from
from hocket.fusion.steps import Owner

__all__ = ["UnfusedCopy", "call_with"]


class UnfusedCopy:
    """One model on its part of the stacked tensors, drawing from its own generator where it has one."""

    def __init__(self, owner: Owner, template: nn.Module, tensors: dict[str, Tensor], index: int) -> None:
        self._owner = owner
        self._shell = template
        self._tensors = tensors
        self._index = index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = next(iter(self._tensors.values())).device if self._tensors else torch.device("cpu")
        generators = self._owner.generators_on(device)
        if not generators:
            return call_with(self._shell, self._tensors, args, kwargs)
        with drawing_from(generators[self._index]):
            return call_with(self._shell, self._tensors, args, kwargs)


def call_with(template: nn.Module, tensors: dict[str, Any], args: Any, kwargs: Any) -> Any:
    """Call a template with these tensors; a buffer that its forward assigns anew is written into its tensor."""

    def write_back(module: nn.Module, _: Any, __: Any) -> None:
        for name, value in module.named_buffers(remove_duplicate=False):
            if name in tensors and value is not tensors[name]:
                tensors[name].copy_(value)

    handle = template.register_forward_hook(write_back)
    try:
        return torch.func.functional_call(template, tensors, args, kwargs)
    finally:
        handle.remove()
