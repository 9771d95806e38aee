"""The base of the optimizers over fused parameters.

A fused parameter holds one tensor of each of B models, (B, n, ...). An update is element-wise, so it is the same few
kernels for B models as for one. Only the numbers in it become columns (HFTA, section 3: "multiplying a vector of
learning rates with the concatenated gradients of all models")::

    group["lr"] (B,)  --[coefficients, float64]-->  (B,)  --[one copy in the parameters' dtype]-->  (B, 1, ...)
    step counts       --'                                                                             |
    parameters, gradients, states, a chunk at a time ------------------------------------------> [update]

A state holds torch's entries with an axis of models in front. Step counts are torch's: one number on the CPU, shared by
the parameters that are in step. From the moment on when models may skip steps on their own, B numbers. A model that is
skipped (frozen, or with a gradient that is not finite) is put back afterwards, parameters, state and count, from a copy
of its slices: nothing of its neighbours' arithmetic depends on it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.optim import optimizer as torch_optimizer

from hocket.errors import InputError
from hocket.fusion.gradients import models_without_gradient
from hocket.optim.arithmetic import Tensors, is_on
from hocket.optim.chunks import Bucket, Chunk, Layout, columns, lay_out
from hocket.optim.counts import groups_of, options_of, signature_of, step_of
from hocket.optim.hyper import Number, one_of, plain
from hocket.optim.slots import slots_of
from hocket.optim.state import ModelStates

NONFINITE = ("step", "skip", "freeze")
IS_SPARSE = attrgetter("grad.is_sparse")
GLOBAL_HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


class FusedOptimizer(ModelStates, ABC):
    """An optimizer over fused parameters. All of torch's machinery (groups, hooks, schedulers) works on it.

    Attributes:
        torch_class: the optimizer of one plain model that this is B of. Arguments have its names and defaults.
        bounds: the numbers among its options, and what each may be. Of these each may be one number or B.
        counters: entries of a state that count steps, and that parameters share, with what they begin with.
        fixed: options that are no arguments.

    Args:
        params: fused parameters of shape (B, ...), with an attribute `_hocket_models` = B. Parameters of single models,
            with an attribute `_hocket_model` = i, or groups of such, as torch takes them.
        arguments: options by position, as in torch. A number is one for all models, or B in a list. A pair of betas
            has one or B in each place, or is a list of B pairs. Flags are the same for all models.
        num_models: B. Where it is given, parameters without such an attribute that begin with B are fused ones.
        nonfinite: what becomes of a model in whose gradients something is not finite: ``"step"`` like any other, as
            in torch, ``"skip"`` this step, or ``"freeze"`` it, until it is unfrozen. The latter two look at the
            gradients, one pass over them and, on a GPU, a wait for them.
        named: options by name.

    Raises:
        InputError: no parameters, parameters of other numbers of models, options out of bounds or of a wrong length.
    """

    fixed: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        if hasattr(cls, "torch_class"):
            cls.__signature__ = signature_of(cls.torch_class)  # type: ignore[attr-defined]

    def __init__(
        self, params: Any, *arguments: Any, num_models: int | None = None, nonfinite: str = "step", **named: Any
    ) -> None:
        self.nonfinite = one_of("nonfinite", nonfinite, NONFINITE)
        defaults = {**options_of(type(self), arguments, named), **self.fixed}
        groups = groups_of(params)
        if len(groups) > 1 and not all(group["params"] for group in groups):
            warnings.warn(
                "params: a group is empty: p.ndim >= 2 holds for fused biases, too; form groups by names", stacklevel=2
            )
        self._slots = slots_of([p for group in groups for p in group["params"]], num_models)
        self._frozen = [False] * self.num_models
        self._hocket_version = 0  # incremented when captured steps become invalid
        self._per_model_steps = nonfinite != "step"
        self._layouts: dict[int, Layout] = {}  # of each group, by its number
        super().__init__(groups, defaults)

    @abstractmethod
    def coefficients(self, group: dict[str, Any], step: Number, state: dict[str, Any]) -> dict[str, Number]:
        """The numbers of this step's update besides decay and eps, each a float or B of them. `step` counts from 1."""

    @abstractmethod
    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        """Update a chunk in place, by the coefficients: each a float, or for each parameter a tensor beside it."""

    def kernel_numbers(self, group: dict[str, Any], dtype: torch.dtype) -> dict[str, Number] | None:
        """The numbers of `update_by_kernel`, or None where no kernel of torch's has these options."""
        return None

    def update_by_kernel(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        """Update a chunk in one pass over its memory."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the losses again and returns them.
        """
        # torch gives each call a name for a profiler, which takes a quarter of a small model's update.
        hooks = (self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *GLOBAL_HOOKS)
        if torch._C._autograd._profiler_enabled() or any(hooks):
            return _observed_step(self) if closure is None else _observed_step(self, closure)
        return self._step(closure)

    step.hooked = True  # type: ignore[attr-defined]  # or torch would wrap it

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the gradients, or set them to zero."""
        if not set_to_none:
            super().zero_grad(set_to_none=False)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        with torch.no_grad():
            bad = [] if self.nonfinite == "step" else self._slots.not_finite()
            if self.nonfinite == "freeze":
                for model in bad:
                    self._frozen[model] = True
            self._update_all(bad)
        return loss

    def step_without(self, models: Iterable[int]) -> None:
        """Update all models but these, whose parameters and state stay as they are, bit for bit."""
        with torch.no_grad():
            self._update_all([self.checked_model(model) for model in models])

    def _update_all(self, skipped: Sequence[int]) -> None:
        if skipped or True in self._frozen:
            skipped = sorted({*skipped, *(model for model, frozen in enumerate(self._frozen) if frozen)})
        work = []
        for group in self.param_groups:
            self.settle(group)
            ready = [p for p in group["params"] if p.grad is not None]
            if skipped:
                ready = [p for p in ready if self._slots[p] not in skipped]
            if any(map(IS_SPARSE, ready)):
                shape = next(tuple(p.shape) for p in ready if IS_SPARSE(p))
                raise InputError(
                    f"{type(self).__name__}: a parameter of shape {shape} has a sparse gradient; "
                    "make its embedding with sparse=False"
                )
            work.append((group, ready))
        self._opt_called = True  # schedulers, torch's too, ask for it
        if len(skipped) == self.num_models:
            return
        if skipped:
            self.count_per_model()
        absent = {p: models for _, ready in work for p in ready if (models := models_without_gradient(p))}
        if absent:
            self.count_per_model()
        laid = [self._laid_out(number, group, ready, absent) for number, (group, ready) in enumerate(work)]
        kept = [each for layout in laid for each in self._kept(layout, skipped, absent)] if skipped or absent else []
        for (group, _), layout in zip(work, laid, strict=True):
            self.count(group, [bucket.state for bucket in layout.buckets])
            for bucket in layout.buckets:
                self._update_bucket(group, bucket)
        for tensor, index, values in kept:
            tensor.index_copy_(0, index, values)

    def _laid_out(
        self, number: int, group: dict[str, Any], ready: Tensors, absent: Mapping[torch.Tensor, list[int]]
    ) -> Layout:
        """The layout of a group's parameters that have gradients, whose states are complete from here on."""
        states = [self.state[p] for p in ready]
        entries = (*self.entries(group), *(tuple(absent.get(p, ())) for p in ready if absent))
        layout = self._layouts.get(number)
        if layout is None or not layout.is_of(ready, states, entries):
            self._slots.check_shapes(ready)
            for p, state in zip(ready, states, strict=True):
                self.complete(p, group, state)
            self.share_counts(group, resting={*group["params"]} - {*ready}, absent=absent)
            layout = self._layouts[number] = lay_out(ready, states, entries, self._slots)
        return layout

    def _kept(
        self, layout: Layout, skipped: Sequence[int], absent: Mapping[torch.Tensor, list[int]]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Copies of the slices of parameters and states of skipped models, and of those without a gradient."""
        for p, state in zip(layout.params, layout.states, strict=True):
            models = sorted({*skipped, *absent.get(p, ())})
            if models and self._slots[p] is None:
                for tensor in (p, *state.values()):
                    index = torch.tensor(models, device=tensor.device)
                    yield tensor, index, tensor.index_select(0, index)

    def _update_bucket(self, group: dict[str, Any], bucket: Bucket) -> None:
        numbers = self.kernel_numbers(group, bucket.params[0].dtype) if bucket.fits_kernels() else None
        by_kernel = numbers is not None
        update, threads = (self.update_by_kernel, bucket.threads()) if by_kernel else (self.update, nullcontext())
        if numbers is None:
            eps = {"eps": group["eps"]} if "eps" in group else {}
            own = self.coefficients(group, step_of(bucket.state), bucket.state)
            numbers = {"decay": self.decay(group), **eps, **own}
        rows = bucket.rows(numbers)
        # Without rows the kernel makes one pass: nothing is read again from a cache.
        chunks = [bucket.whole] if by_kernel and not rows else bucket.chunks
        with threads:
            for pieces in chunks:
                by = {**numbers, **columns(rows, pieces, self._slots)} if rows else numbers
                chunk = pieces.chunk(group["maximize"])
                update(chunk if by_kernel else self.decayed(chunk, group, by["decay"]), group, by)

    def decay(self, group: dict[str, Any]) -> Number:
        """The factor of parameters in gradients, or, decoupled, the one that parameters are multiplied by."""
        number: Number = group["weight_decay"]
        return 1 - group["lr"] * number if group.get("decoupled_weight_decay") and is_on(number) else number

    def decayed(self, chunk: Chunk, group: dict[str, Any], decay: Any) -> Chunk:
        """A chunk with its weight decay in the gradients, or, decoupled, taken off the parameters."""
        if not group.get("decoupled_weight_decay"):
            return chunk.decayed(decay)
        if is_on(group["weight_decay"]):
            torch._foreach_mul_(chunk.params, decay)
        return chunk

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with B numbers as a tensor of shape (B,), and which models are frozen under ``"hocket"``."""
        found = super().state_dict()
        for group in found["param_groups"]:
            for key, value in group.items():
                group[key] = tuple(map(plain, value)) if type(value) is tuple else plain(value)
        found["hocket"] = {"num_models": self.num_models, "frozen": list(self._frozen)}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave, for as many models.

        Raises:
            InputError: it is of another number of models, or its tensors do not fit the parameters.
        """
        self.check_fits(state_dict)
        frozen = state_dict.get("hocket", {}).get("frozen", self._frozen)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "hocket"})
        self._frozen = list(frozen)
        for group in self.param_groups:
            self.settle(group)
        self.share_all_counts()
        self._hocket_version += 1

    def __getstate__(self) -> dict[str, Any]:
        own = ("nonfinite", "_slots", "_frozen", "_per_model_steps", "_hocket_version")
        kept = {key: getattr(self, key) for key in own}
        return {**super().__getstate__(), **kept, "_layouts": {}}


@torch.optim.Optimizer.profile_hook_step
def _observed_step(self: FusedOptimizer, closure: Callable[[], Any] | None = None) -> Any:
    return self._step(closure)
