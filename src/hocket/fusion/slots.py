"""Models change in mid-training: one leaves, or another one takes its place."""

from __future__ import annotations

import copy
from collections.abc import Sequence
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
        """Take one model out, in place, and give it back as a plain module.

        Parameters keep their identity; their first axis is one shorter, and their gradients are gone. Optimizers and
        schedulers have to drop it too: `hocket.optim.ModelSlots` does that.
        """
        self._check_slot(model)
        if self.num_models == 1:
            raise InputError("drop: only one model is left")
        plain = self._plain(model)
        self.select_models([index for index in range(self.num_models) if index != model])
        return plain

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order, in place; what `drop` says of parameters holds.

        Raises:
            InputError: no models, one twice, or one that is not there.
        """
        keep = list(models)
        for model in keep:
            self._check_slot(model)
        if not keep or len(set(keep)) < len(keep):
            raise InputError(f"models: expected at least one model, each at most once, got {keep}")
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

    def refill(self, model: int, new: nn.Module, *, seed: int | None = None) -> nn.Module:
        """Put another model into a slot, in place, and give the old one back as a plain module.

        Where the new one differs from the old one in the values of its tensors alone, and no block is separate, nothing
        else changes: what was traced, timed and captured stays as it is.

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
        other = next((index for index in range(self.num_models) if index != model), None)
        blocks = compare([old if other is None else self._plain(other), new], [*self._separate_index])
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
                group, module = self._group(place), new.get_submodule(block)
                mine, its = dict(named_tensors(group[model])), dict(named_tensors(module))
                shapes = {name: tensor.shape for name, tensor in mine.items()}
                if _same_attributes(group[model], module) and shapes == {name: t.shape for name, t in its.items()}:
                    for name, tensor in mine.items():  # the parameters that an optimizer knows
                        tensor.copy_(its[name])
                    continue
                group[model] = copy.deepcopy(module)
                self.separate[place] = nn.ModuleList(group)
                mark(group)
        is_alike = not self._separate_index and _same_attributes(self._templates[model], new)
        if not is_alike:
            self._templates[model] = template_of(new, model)
            self._templates[model].train(self.training)
        if self._seeds is not None and seed is not None:
            self._seeds[model] = int(seed)
            for generators in self._generators.values():
                generators[model].manual_seed(int(seed))
        if not is_alike:
            self._forget()
        return old

    def _check_slot(self, model: int) -> None:
        if isinstance(model, bool) or not isinstance(model, int) or not 0 <= model < self.num_models:
            raise InputError(f"model: expected a slot from 0 to {self.num_models - 1}, got {model!r}")


def _same_attributes(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models of one structure differ in nothing but tensors: what cannot be compared counts as other."""
    plain = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)

    def is_same(one: Any, other: Any) -> bool:
        if type(one) is tuple and type(other) is tuple:
            return len(one) == len(other) and all(map(is_same, one, other))
        return one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)

    def attributes(module: nn.Module) -> dict[str, Any]:
        hidden = ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
        return {
            key: value
            for key, value in vars(module).items()
            if key not in hidden and not (key.startswith("_") and isinstance(value, dict) and not value)
        }

    pairs = zip(first.named_modules(), second.named_modules(), strict=False)
    if len(list(first.named_modules())) != len(list(second.named_modules())):
        return False
    for (name, one), (other_name, other) in pairs:
        mine, its = attributes(one), attributes(other)
        if name != other_name or type(one) is not type(other) or mine.keys() != its.keys():
            return False
        if not all(is_same(value, its[key]) for key, value in mine.items()):
            return False
    return True


def _replace(parameter: nn.Parameter, data: Tensor) -> None:
    """Give a parameter data of another shape, while graphs of earlier steps may still be alive.

    Such a graph keeps the node that accumulates the gradient, with the old shape. torch makes a new node only when the
    type of the data changes, so it does, for a moment.
    """
    other = torch.float64 if data.dtype != torch.float64 else torch.float32
    parameter.data = torch.empty_like(data, dtype=other)
    parameter.data = data
