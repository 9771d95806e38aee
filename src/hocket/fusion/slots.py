"""Models change in mid-training: one leaves, or another one takes its place."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hocket.errors import InputError
from hocket.fusion.compare import compare
from hocket.fusion.store import Store, mark, named_tensors, template_of

__all__ = ["MutableStore"]


class MutableStore(Store):
    """A store whose models can change."""

    def drop(self, model: int) -> nn.Module:
        """Take one model out, in place, and give it back as a plain module. Optimizers have to drop its state too.

        Parameters keep their identity; their first axis is one shorter, and their gradients are gone.
        """
        self._check_slot(model)
        if self.num_models == 1:
            raise InputError("drop: only one model is left")
        plain = self._plain(model)
        keep = [index for index in range(self.num_models) if index != model]
        for store, leaf in dict.fromkeys(self._places.values()):
            tensor: Any = getattr(store, leaf)
            kept = tensor.detach()[keep].clone()
            if isinstance(tensor, nn.Parameter):
                tensor.grad = None
                _replace(tensor, kept)
                tensor._hocket_models = len(keep)  # type: ignore[attr-defined]
            else:
                store._buffers[leaf] = kept
        for number in range(len(self.separate)):
            group = self._group(number)
            self.separate[number] = nn.ModuleList([group[index] for index in keep])
            mark(self._group(number))
        self._templates = [self._templates[index] for index in keep]
        if self._seeds is not None:
            self._seeds = [self._seeds[index] for index in keep]
        self._generators = {device: tuple(each[index] for index in keep) for device, each in self._generators.items()}
        self.num_models = len(keep)
        self._forget()
        return plain

    def refill(self, model: int, new: nn.Module, *, seed: int | None = None) -> nn.Module:
        """Put another model into a slot, in place, and give the old one back as a plain module.

        Args:
            model: the slot.
            new: a module that could have been fused with the others.
            seed: of its random numbers; needed where the array has seeds.

        Raises:
            InputError: the new model does not fit.
        """
        self._check_slot(model)
        if self._seeds is not None and seed is None:
            raise InputError("refill: seed: expected a number, because the other models have seeds")
        old = self._plain(model)
        others = [self._plain(index) for index in range(self.num_models) if index != model][:1] or [old]
        blocks = compare([*others, new], [*self._separate_index])
        extra = set(blocks.separate) - set(self._blocks.separate)
        if extra:
            named = "; ".join(f"{name}: {blocks.separate[name]}" for name in sorted(extra))
            raise InputError(f"refill: the new model differs from the others: {named}")
        tensors = dict(named_tensors(new))
        with torch.no_grad():
            for name in self._places:
                whole = self.tensor(name).tensor
                whole[model].copy_(tensors[name])
                if whole.grad is not None:
                    whole.grad[model].zero_()
            for block, place in self._separate_index.items():
                module = copy.deepcopy(new.get_submodule(block))
                group = self._group(place)
                group[model] = module
                self.separate[place] = nn.ModuleList(group)
                mark(group)
        self._templates[model] = template_of(new, model)
        self._templates[model].train(self.training)
        if self._seeds is not None and seed is not None:
            self._seeds[model] = int(seed)
            for generators in self._generators.values():
                generators[model].manual_seed(int(seed))
        self._forget()
        return old

    def _check_slot(self, model: int) -> None:
        if isinstance(model, bool) or not isinstance(model, int) or not 0 <= model < self.num_models:
            raise InputError(f"model: expected a slot from 0 to {self.num_models - 1}, got {model!r}")


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data
