"""Models in groups: as many at a time as the caches hold, one group after another.

Fusing all B models makes every activation B times as large. Where one model's fill the cache already, B models' do not
fit any more, and what is larger than 32 MiB costs page faults too, because malloc gives it back to the system every
time. Groups keep what fusing saves on small ops and stay small enough. Groups of one are the plain models, one after
another.

Each group has a program of its own, on its part of the stacked tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hocket.fusion.program import make_program
from hocket.fusion.rules.base import is_watched
from hocket.fusion.shares import LARGE_BYTES, GradientMemory, shares
from hocket.fusion.single_model import SingleModel
from hocket.fusion.single_tensors import SingleTensors
from hocket.fusion.stacked import Stacked, of_models, with_model_dim
from hocket.fusion.steps import Owner
from hocket.fusion.trace import Traced

__all__ = ["Groups"]


class ModelSlice:
    """Models `start` to `stop` of a fused module, as the owner of a program."""

    _hocket_form: str | None = None

    def __init__(self, owner: Owner, start: int, stop: int, memory: GradientMemory) -> None:
        self._owner = owner
        self._slice = slice(start, stop)
        self.num_models = stop - start
        self.strict = owner.strict
        self.backend = owner.backend
        self.warned = owner.warned
        self.gradient_memory = memory
        self.model_axis = owner.model_axis
        self.tensors: Mapping[str, Tensor] = {}

    @property
    def is_seeded(self) -> bool:
        return self._owner.is_seeded

    def of_models(self, constant: Any) -> Any:
        return of_models(constant, self._slice.start, self._slice.stop)

    def tensor(self, name: str) -> Stacked:
        own = self.tensors[name]
        return Stacked(own.unsqueeze(0) if self.num_models == 1 else own)

    def layers(self, name: str) -> tuple[nn.Module, ...]:
        return self._owner.layers(name)[self._slice]

    def names_in(self, layer: str) -> list[str]:
        return self._owner.names_in(layer)

    def separate_block(self, name: str) -> list[nn.Module] | None:
        blocks = self._owner.separate_block(name)
        return None if blocks is None else blocks[self._slice]

    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]:
        return self._owner.generators_on(device)[self._slice]

    def all_parameters(self) -> list[Tensor]:
        return self._owner.all_parameters()

    def all_tensors(self) -> Mapping[str, Tensor]:
        return self.tensors


class Groups:
    """A traced model, run for `size` models at a time.

    Args:
        owner: of all models.
        traced: the model.
        size: models in a group, from 1 to B; the last group may be smaller.
        channels_last: whether convolutions of single models get their images with the channels last; see `plain`.
        memory: where rules write gradients of the groups' parameters; by default the owner's.
    """

    def __init__(
        self,
        owner: Owner,
        traced: Traced,
        size: int,
        channels_last: bool = False,
        memory: GradientMemory | None = None,
    ) -> None:
        self._owner = owner
        self._size = size
        starts = range(0, owner.num_models, size)
        memory = owner.gradient_memory if memory is None else memory
        self._parts = [ModelSlice(owner, start, min(start + size, owner.num_models), memory) for start in starts]
        self._programs = [make_program(part, traced) for part in self._parts]
        self._plain = [
            SingleModel(program, channels_last) if program.owner.num_models == 1 else None for program in self._programs
        ]
        self._single = SingleTensors()

    def run(self, leaves: list[Any]) -> Any:
        """As `FusedProgram.run`: the output for these leaves, `Stacked` where models have their own."""
        if self._owner.num_models == 1:
            out = self.run_alone(leaves)
            if isinstance(out, Tensor):
                return Stacked(out.unsqueeze(0))
            return pytree.tree_map_only(Tensor, lambda leaf: Stacked(leaf.unsqueeze(0)), out)
        given = [self._split(leaf.tensor) if isinstance(leaf, Stacked) else leaf for leaf in leaves]
        parts_of: dict[int, tuple[Tensor, ...]] = {}  # tied tensors are split once
        tensors: dict[str, tuple[Tensor, ...]] = {}
        for name, whole in self._owner.all_tensors().items():
            if id(whole) not in parts_of:
                parts_of[id(whole)] = self._split(whole)
            tensors[name] = parts_of[id(whole)]
        outs = []
        for index in range(len(self._parts)):
            own = [each[index] if isinstance(leaf, Stacked) else leaf for leaf, each in zip(leaves, given, strict=True)]
            outs.append(self.run_one(index, own, leaves, {name: parts[index] for name, parts in tensors.items()}))
        flat = [pytree.tree_flatten(out) for out in outs]
        columns = zip(*(each for each, _ in flat), strict=True)
        return pytree.tree_unflatten([self._joined(column) for column in columns], flat[0][1])

    def run_one(self, index: int, own: list[Any], leaves: list[Any], tensors: Mapping[str, Tensor]) -> Any:
        """The output of one group, of plain tensors, with the models first if it is a group of several.

        Args:
            index: which group.
            own: its part of each leaf.
            leaves: the leaves of all models, `Stacked` where models have their own.
            tensors: its part of each parameter and buffer.
        """
        part, plain = self._parts[index], self._plain[index]
        part.tensors = tensors
        try:
            if plain is not None:
                return plain(own, tensors)
            stacked = [
                Stacked(each) if isinstance(leaf, Stacked) else each for leaf, each in zip(leaves, own, strict=True)
            ]
            return pytree.tree_map(
                lambda leaf: with_model_dim(leaf, part.num_models) if isinstance(leaf, (Stacked, Tensor)) else leaf,
                self._programs[index].run(stacked),
                is_leaf=lambda leaf: isinstance(leaf, Stacked),
            )
        finally:
            part.tensors = {}

    def run_alone(self, leaves: list[Any]) -> Any:
        """The only model's output, without a models' axis."""
        part, plain = self._parts[0], self._plain[0]
        assert plain is not None
        part.tensors = self._single.tensors(self._owner.all_tensors())
        try:
            return plain(
                [leaf.tensor.squeeze(0) if isinstance(leaf, Stacked) else leaf for leaf in leaves], part.tensors
            )
        finally:
            part.tensors = {}

    def _split(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Each group's part; of a group of one, without the models' axis."""
        large = whole.nbytes >= LARGE_BYTES and whole.is_leaf and whole.requires_grad
        watched = is_watched() or torch._C._are_functorch_transforms_active()
        if large and torch.is_grad_enabled() and not watched:
            return shares(whole, self._owner.gradient_memory, self._size)
        return whole.unbind(0) if self._size == 1 else whole.split(self._size)

    def _joined(self, leaves: tuple[Any, ...]) -> Any:
        """One leaf of all groups' outputs."""
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return Stacked(torch.stack(leaves) if self._size == 1 else torch.cat(leaves))
