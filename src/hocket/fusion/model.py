r"""The fused module: B models as one, their parameters stacked, their ops fused where a rule, ``vmap`` or a loop can.

    models --compare--> blocks
       |--tensors, stacked--> parameters (B, *shape)      (`fusion.store`)
       \--copied--> templates --first call, recorded--> program --later calls, by some plan--> output  (`fusion.calls`)

Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, section 3.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook, _IncompatibleKeys

from hocket.errors import InputError
from hocket.fusion import slots
from hocket.fusion.calls import Calls
from hocket.fusion.compare import check_layers, compare
from hocket.fusion.contest import Choice
from hocket.fusion.coupling import warn_of_coupling, warn_of_layers
from hocket.fusion.inputs import ModelAxis
from hocket.fusion.program import Settings
from hocket.fusion.store import Store
from hocket.heap import keep_freed_blocks

BACKENDS = ("auto", "rule", "vmap", "loop")


class Array(nn.Module):
    """B fused models. `hocket.fusion.fuse` makes one.

    Attributes:
        fused: the stacked tensors, under the names they have in a model.
        separate: blocks that stay B modules each.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        *,
        backend: str = "auto",
        strict: bool = False,
        separate: Sequence[str] = (),
        seeds: Sequence[int] | None = None,
        shared: bool | Mapping[str, bool] | None = None,
    ) -> None:
        if backend not in BACKENDS:
            raise InputError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
        reasons = compare(models, separate)
        models = list(models)
        if strict and reasons:
            named = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise InputError(f"blocks that cannot fuse (strict=True): {named}")
        if seeds is not None and len(seeds) != len(models):
            raise InputError(f"seeds: expected {len(models)}, one for each model, got {len(seeds)}")
        super().__init__()
        self.training = models[0].training
        self._hocket_version = 0  # incremented when captured steps become invalid
        self._store = Store(models, reasons, seeds)
        self._calls = Calls(self._store, Settings(backend, strict, ModelAxis(shared)))
        self.fused, self.separate = self._store.fused, self._store.separate
        keep_freed_blocks()  # of activations of all models, which are large

    @property
    def num_models(self) -> int:
        """B."""
        return self._store.num_models

    @property
    def backend(self) -> str:
        """The backend that was asked for: "auto", "rule", "vmap" or "loop"."""
        return self._calls.settings.backend

    @property
    def choices(self) -> list[Choice]:
        """The plans timed and chosen, one for each kind of call so far (``backend="auto"``)."""
        return self._calls.choices

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of all models, the models first.

        Args:
            args: arguments of one model, with tensors ``(B, N, ...)``, or ``(N, ...)`` for all models.
            kwargs: likewise.

        Raises:
            InputError: an op fails, or the input fits no model. The message names the layer.
        """
        out = self._calls.forward(args, kwargs)
        if self._store.is_reshaped:
            self._forget()
        return out

    def loss(self, fn: Callable[..., Any], out: Any, target: Any, *args: Any) -> Tensor:
        """The loss of each model, ``(B,)``. Its ``backward()`` gives each model its own gradient.

        Args:
            fn: any loss function or module of one model's output and target.
            out: what the array gave, ``(B, N, ...)``.
            target: ``(B, N, ...)``, or ``(N, ...)`` for all models.
            args: more arguments of `fn`.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> loss = array.loss(nn.functional.mse_loss, array(torch.ones(5, 3)), torch.zeros(5, 2))
            >>> loss.shape
            torch.Size([2])
            >>> loss.backward()
        """
        return self._calls.loss(fn, out, (target, *args))

    def losses(self, fn: Callable[..., Any], inputs: Any, *targets: Any) -> Tensor:
        """The loss of each model, ``(B,)``, from its inputs: `loss` of what the models give for them.

        With ``backend="auto"``, where it is faster, each model runs its forward, loss and backward before the next one
        begins, so that the activations of one model at a time are in memory. The gradients then exist before
        ``losses.backward()``, which hands them over and can be called once. Where no gradients are wanted, use
        ``torch.no_grad()``.

        Args:
            fn: any loss function or module of one model's output and targets.
            inputs: a tensor, a tuple of arguments of one model, or a dict of named ones, with tensors ``(B, N, ...)``,
                or ``(N, ...)`` for all models.
            targets: more arguments of `fn`: ``(B, N, ...)``, or ``(N, ...)`` for all models.

        Raises:
            InputError: an op or `fn` fails, or a shape fits no model. The message names the layer.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> losses = array.losses(nn.functional.mse_loss, torch.ones(5, 3), torch.zeros(5, 2))
            >>> losses.shape
            torch.Size([2])
            >>> losses.backward()
        """
        hooks = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        losses = self._calls.losses(self, fn, inputs, targets, is_hooked=bool(hooks) or _has_any_global_hook())
        if self._store.is_reshaped:
            self._forget()
        return losses

    def unfuse(self) -> list[nn.Module]:
        """B plain modules of the user's class, with parameters and buffers of their own.

        Example:
            >>> array = Array([nn.Linear(3, 2), nn.Linear(3, 2)])
            >>> [type(model).__name__ for model in array.unfuse()]
            ['Linear', 'Linear']
        """
        return [self._store.plain(index) for index in range(self.num_models)]

    def report(self) -> str:
        """A report of what fused, line by line: layer, op, and what computed it in the last call.

        Example:
            >>> array = Array([nn.Sequential(nn.Linear(3, 2), nn.ReLU()) for _ in range(2)], backend="rule")
            >>> _ = array(torch.ones(5, 3))
            >>> print(array.report())
            2 models, 2 ops: 2 by rule
            0  linear  rule
            1  relu    rule
        """
        return self._calls.report()

    def drop(self, model: int) -> nn.Module:
        """Take one model out, in place, and give it back as a plain module.

        Parameters keep their identity. Their first axis is one shorter, and their gradients are gone. Optimizers and
        schedulers have to drop it too: `hocket.optim.ModelSlots` does that.

        Raises:
            InputError: no such model, or it is the only one.
        """
        self._store.check_slot(model)
        if self.num_models == 1:
            raise InputError("drop: only one model is left")
        plain = self._store.plain(model)
        self.select_models([index for index in range(self.num_models) if index != model])
        return plain

    def select_models(self, models: Sequence[int]) -> None:
        """Keep these models, in this order, in place. Parameters change as in `drop`.

        Raises:
            InputError: no models, one twice, or one that is not there.
        """
        slots.select_models(self._store, models)
        self._forget()

    def refill(self, model: int, new: nn.Module, *, seed: int | None = None) -> nn.Module:
        """Put another model into a slot, in place, and give the old one back as a plain module.

        If the new model differs from the old one in the values of its tensors alone, and no block is separate,
        recordings, timings and captured steps stay valid.

        Args:
            model: the slot.
            new: a module that could have been fused with the others.
            seed: seed of its random numbers, which is needed if the array has seeds.

        Raises:
            InputError: the new model does not fit.
        """
        self._store.check_slot(model)
        old = self._store.plain(model)
        self._put(model, new, seed)
        return old

    def _put(self, model: int, new: nn.Module, seed: int | None) -> None:
        """`refill`, without the old model."""
        if not slots.refill(self._store, model, new, seed, self.training):
            self._forget()

    def set_attribute(self, name: str, value: Any, *, model: int | None = None) -> None:
        """Set an attribute of the models, such as the rate of a dropout.

        Args:
            name: path of the attribute in a model, such as ``"drop.p"``.
            value: the new value.
            model: the model whose attribute is set, or None for all of them.

        Raises:
            InputError: no such layer or attribute, or it is a parameter, a buffer or a layer.

        Example:
            >>> array = Array([nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)) for _ in range(2)])
            >>> array.set_attribute("1.p", 0.0)
            >>> [each[1].p for each in array.unfuse()]
            [0.0, 0.0]
        """
        self._store.set_attribute(name, value, model)
        self._forget()

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        model: int | None = None,
    ) -> dict[str, Any]:
        """The states of the plain modules: ``"0.fc.weight"``, ``"1.fc.weight"``, ..., as of a list of modules.

        Args:
            args: as of `torch.nn.Module.state_dict`.
            destination: as there.
            prefix: as there.
            keep_vars: as there.
            model: give the state of this model alone, with its own names.
        """
        if args:
            given: Any = (*args, *(destination, prefix, keep_vars)[len(args) :])
            destination, prefix, keep_vars = given
        found: dict[str, Any] = OrderedDict() if destination is None else destination
        slots.save(self._store, found, prefix, keep_vars, model)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, model: int | None = None
    ) -> Any:
        """Load what `state_dict` gave.

        Args:
            state_dict: state of all models, or of a plain module if `model` is given.
            strict: as of `torch.nn.Module.load_state_dict`.
            assign: False.
            model: the one that a plain module's state is for.

        Raises:
            InputError: `assign` is True (stacked parameters keep their identity), or no such model.
            RuntimeError: keys or shapes do not match, as of any module.
        """
        if assign:
            raise InputError("load_state_dict: assign=True is not possible: the models' tensors are stacked")
        if model is not None:
            self._store.check_slot(model)
        missing, unexpected, errors = slots.load(self._store, state_dict, model=model)
        if strict:
            errors += [f"missing: {', '.join(missing)}"] * bool(missing)
            errors += [f"unexpected: {', '.join(unexpected)}"] * bool(unexpected)
        if errors:
            raise RuntimeError("while loading the states of fused models: " + "; ".join(errors))
        return _IncompatibleKeys(missing, unexpected)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        missing, unexpected, errors = slots.load(self._store, state_dict, prefix)
        missing_keys += missing
        unexpected_keys += unexpected
        error_msgs += errors
        if isinstance(state_dict, dict):  # a module around this one goes on to the separate blocks, which are loaded
            state_dict |= {f"{prefix}separate.{name}": each for name, each in self.separate.state_dict().items()}

    def all_tensors(self) -> dict[str, Tensor]:
        """Every stacked parameter and buffer ``(B, *shape)``, by each of its names in a model."""
        return self._store.all_tensors()

    def generators_on(self, device: torch.device) -> tuple[torch.Generator, ...]:
        """The models' random generators on a device, or none where no seeds were given."""
        return self._store.generators_on(device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters, as of any module. Warns if the caller couples models, as torch's `clip_grad_norm_` does."""
        warn_of_coupling(sys._getframe(1))  # in a generator: the caller that takes the first one
        yield from super().parameters(recurse)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """The array and the stores of its tensors. Warns if the user, or torch's `update_bn`, looks for layers."""
        warn_of_layers(sys._getframe(1))
        yield from super().modules(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of `modules`, with their names."""
        warn_of_layers(sys._getframe(1))
        yield from super().named_modules(*args, **kwargs)

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call a function with each layer of each model, as `torch.nn.Module.apply` does, and with the array."""
        self._store.link()
        for template in self._store.templates:
            template.apply(fn)
        check_layers(self._store.templates)
        self._store.settle()
        self._forget()
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set all models to training, or to evaluation."""
        super().train(mode)
        if len({layer.training for layer in self._store.templates[0].modules()}) > 1:
            self._forget()  # what is known of a call goes by the flag of the model, and layers had their own
        for template in self._store.templates:
            template.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """As of any module: to another device or type.

        Raises:
            InputError: with ``memory_format``: stacked tensors have an axis more than the format's.
        """
        if kwargs.get("memory_format") is not None:
            raise InputError("to: memory_format: no such format fits stacked parameters; 'auto' lays out images")
        return super().to(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._store.mark()
        self._forget()
        return self

    def _forget(self) -> None:
        """Let go of everything that was made from the models as they were."""
        self._hocket_version += 1
        self._store.is_reshaped = False
        self._calls.forget()

    @property
    def _hocket_form(self) -> str | None:
        """The one of `_hocket_forms` that a captured step uses, see `hocket.tracing.variants`."""
        return self._calls.form

    @_hocket_form.setter
    def _hocket_form(self, form: str | None) -> None:
        self._calls.form = form

    def _hocket_forms(self) -> tuple[str, ...]:
        return self._calls.forms()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._store.mark()
        keep_freed_blocks()  # this may be another process
