"""One model leaves, moves or comes, in everything that a training is made of: array, optimizers, schedulers, scaler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hocket.errors import InputError
from hocket.fusion.shared_objects import named_tensors
from hocket.optim.base import FusedOptimizer
from hocket.optim.grad_scaler import GradScaler

if TYPE_CHECKING:
    from hocket.fusion.model import Array


@dataclass(frozen=True)
class TrainedModel:
    """A copy of all that belongs to one model in training, from which it goes on where it stopped.

    Attributes:
        module: the plain module.
        optimizers: a plain state dict for each optimizer, which torch's loads too.
        schedulers: for each scheduler the states of this model's torch schedulers, by parameter group.
        scaler: a plain state dict of `torch.amp.GradScaler`, where there is a scaler.
        seed: of its random numbers, where the array has seeds.
        generators: the states of its random generators, by device.
    """

    module: nn.Module
    optimizers: Sequence[dict[str, Any]]
    schedulers: Sequence[Mapping[str, Any]]
    scaler: dict[str, Any] | None = None
    seed: int | None = None
    generators: Mapping[torch.device, torch.Tensor] | None = None


class ModelSlots:
    """The slots of B models in an array and in what trains it, which change together.

    Args:
        array: of `hocket.fuse`.
        optimizers: of `hocket.optim`, one or several.
        schedulers: of `hocket.lr_scheduler`, none, one or several.
        scaler: a `hocket.optim.GradScaler`, if there is one.

    Raises:
        InputError: they are not all of one number of models.

    Example:
        >>> import hocket
        >>> array = hocket.fuse([nn.Linear(3, 2) for _ in range(3)])
        >>> optimizer = hocket.optim.Adam(array.parameters(), lr=[0.1, 0.2, 0.3])
        >>> slots = ModelSlots(array, optimizer)
        >>> gone = slots.drop(0)
        >>> array.num_models, optimizer.param_groups[0]["lr"].tolist(), gone.optimizers[0]["param_groups"][0]["lr"]
        (2, [0.2, 0.3], 0.1)
        >>> _ = slots.refill(1, nn.Linear(3, 2), lr=0.05)
        >>> optimizer.param_groups[0]["lr"].tolist()
        [0.2, 0.05]
    """

    def __init__(
        self,
        array: Array,
        optimizers: FusedOptimizer | Sequence[FusedOptimizer],
        schedulers: Any = (),
        scaler: GradScaler | None = None,
    ) -> None:
        self.array = array
        self.optimizers = tuple(optimizers) if isinstance(optimizers, Sequence) else (optimizers,)
        self.schedulers = tuple(schedulers) if isinstance(schedulers, Sequence) else (schedulers,)
        self.scaler = scaler
        self._parts: list[Any] = [*self.optimizers, *self.schedulers, *([] if scaler is None else [scaler])]
        self._check()

    def state(self, model: int, module: nn.Module | None = None) -> TrainedModel:
        """A copy of all that belongs to one model.

        Args:
            model: the slot.
            module: a plain module of the same layers that takes the values of the tensors. Without it a new one does.
        """
        self._check(model)
        array = self.array
        if module is None:
            module = array._store.plain(model)
        else:
            own, values = dict(named_tensors(module)), array._store.tensors_of(model)
            if values:
                with torch.no_grad():
                    torch._foreach_copy_([own[name] for name in values], list(values.values()))
        generators = {device: each[model].get_state() for device, each in array._store.generators.items()}
        return TrainedModel(
            module=module,
            optimizers=[optimizer.model_state(model) for optimizer in self.optimizers],
            schedulers=[scheduler.model_state(model) for scheduler in self.schedulers],
            scaler=None if self.scaler is None else self.scaler.unfuse()[model],
            seed=None if array._store.seeds is None else array._store.seeds[model],
            generators=generators,
        )

    def drop(self, model: int) -> TrainedModel:
        """Take one model out, and give it back. The models after it move up.

        Raises:
            InputError: no such model, or it is the only one.
        """
        gone = self.state(model)
        if self.array.num_models == 1:
            raise InputError("drop: only one model is left")
        self.take([other for other in range(self.array.num_models) if other != model])
        return gone

    def take(self, models: Sequence[int]) -> None:
        """Keep these models, in this order.

        Raises:
            InputError: no models, one twice, or one that is not there.
        """
        self._check(*models)
        chosen = list(models)
        self.array.select_models(chosen)
        for part in self._parts:
            part.select_models(chosen)

    def refill(
        self, model: int, new: nn.Module | TrainedModel, *, seed: int | None = None, **options: Any
    ) -> TrainedModel:
        """Put another model into a slot, and give the old one back. The others go on undisturbed.

        Args:
            model: the slot.
            new: a module, which begins at epoch 0 with fresh states, or what `state`, `drop` or `refill` gave, which
                goes on where it stopped: with its optimizer's state, epoch, scale and random numbers.
            seed: of a new module's random numbers. Needed where the array has seeds.
            options: numbers of the optimizers for this model (``lr=0.1``). By default those of `new`, else the slot's.

        Raises:
            InputError: the new model, its states or the options do not fit. Then nothing has changed.
        """
        old = self.state(model)
        self.put(model, new if isinstance(new, TrainedModel) else TrainedModel(new, [], [], seed=seed), **options)
        return old

    def put(self, model: int, new: TrainedModel, **options: Any) -> None:
        """`refill`, without giving the old model back: for one that is not needed any more.

        Raises:
            InputError: as `refill`.
        """
        self._check(model)
        none: Sequence[Any] = [None] * len(self.optimizers)
        states = new.optimizers or none
        if len(states) != len(self.optimizers) or (new.schedulers and len(new.schedulers) != len(self.schedulers)):
            raise InputError(
                f"refill: expected a model of {len(self.optimizers)} optimizers and {len(self.schedulers)} schedulers, "
                f"got one of {len(states)} and {len(new.schedulers)}"
            )
        checked = [
            optimizer.checked_refill(model, state, options)
            for optimizer, state in zip(self.optimizers, states, strict=True)
        ]
        array = self.array
        before: dict[str, torch.Tensor] = {}
        if array._store.separate_index:
            before = dict(array.named_parameters())
            names = [
                sorted(name for name, _ in module.named_parameters())
                for module in (array._store.templates[model], new.module)
            ]
            if names[0] != names[1]:
                raise InputError(f"refill: the new model differs: expected parameters {names[0]}, got {names[1]}")
        array._put(model, new.module, new.seed)
        # A separate block that differs in more than values came with parameters of its own.
        after = dict(array.named_parameters()) if before else {}
        others: dict[torch.Tensor, torch.Tensor] = {
            before[name]: p for name, p in after.items() if p is not before[name]
        }
        for optimizer, found in zip(self.optimizers, checked, strict=True):
            if others:
                optimizer.exchange(others)
            optimizer.put_model(model, found)
        for place, scheduler in enumerate(self.schedulers):
            if new.schedulers:
                scheduler.load_model_state(model, new.schedulers[place])
            else:
                scheduler.refill(model)
        if self.scaler is not None:
            self.scaler.refill(model, new.scaler)
        for device, generator in (new.generators or {}).items():
            array.generators_on(device)[model].set_state(generator)

    def _check(self, *models: int) -> None:
        """Check that all are of one number of models still, and that these are some of them."""
        total = self.array.num_models
        counts = [part.num_models for part in self._parts]
        if any(count != total for count in counts):
            raise InputError(f"expected optimizers, schedulers and scaler of {total} models, got {counts}")
        for model in models:
            self.array._store.check_slot(model)
