"""What every optimizer over fused parameters is.

A fused parameter holds one tensor of each of B models, (B, n, ...). An update is element-wise, so it is the same few
kernels for B models as for one; only the numbers in it become columns (HFTA, section 3: "multiplying a vector of
learning rates with the concatenated gradients of all models")::

    group["lr"] (B,)  --[coefficients, float64]-->  (B,)  --[one copy in the parameters' dtype]-->  (B, 1, ...)
    step counts       --'                                                                             |
    parameters, gradients, states, a chunk at a time ------------------------------------------> [update]

Parameters of a group that share device, dtype and step count are updated together; on a CPU in chunks that fit a core's
cache with their intermediate results, elsewhere all at once. A model that is skipped (frozen, or with a gradient that
is not finite) is put back afterwards from a copy of its slices: nothing of its neighbours' arithmetic depends on it.

The step counts are torch's: one number on the CPU, here shared by the parameters that are in step; from the moment on
when models may skip steps on their own, B numbers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.optim import carry, select_models
from hocket.fusion.optim.arithmetic import Tensors
from hocket.fusion.optim.chunks import Bucket, Chunk, Columns, Layout, ParameterSlice, lay_out
from hocket.fusion.optim.hyper import Number, one_of, plain
from hocket.fusion.optim.model_state import ModelState
from hocket.fusion.optim.options import as_tuple, groups_of
from hocket.fusion.optim.slots import slots_of
from hocket.fusion.optim.step_counts import are_per_model, count_dtype, rejoin

__all__ = ["Chunk", "FusedOptimizer"]

NONFINITE = ("step", "skip", "freeze")


class FusedOptimizer(ModelState):
    """An optimizer over fused parameters; all of torch's machinery (groups, hooks, schedulers) works on it.

    Attributes:
        bounds: the numbers among its options, and what each may be; of these each may be one number or B.

    Args:
        params: fused parameters of shape (B, ...), with an attribute `_hocket_models` = B; parameters of single models,
            with an attribute `_hocket_model` = i; or groups of such, as torch takes them.
        defaults: the options, by torch's names.
        num_models: B; where it is given, parameters without such an attribute that begin with B are fused ones.
        nonfinite: what becomes of a model in whose gradients something is not finite: ``"step"`` like any other, as
            in torch; ``"skip"`` this step; ``"freeze"`` it, until it is unfrozen. The latter two look at the gradients,
            one pass over them and, on a GPU, a wait for them.

    Raises:
        InputError: no parameters, parameters of other numbers of models, options out of bounds or of a wrong length.
    """

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, num_models: int | None = None, nonfinite: str = "step"
    ) -> None:
        self.nonfinite = one_of("nonfinite", nonfinite, NONFINITE)
        groups = groups_of(params)
        self._slots = slots_of([p for group in groups for p in group["params"]], num_models)
        self._frozen = [False] * self.num_models
        self._hocket_version = 0  # whoever captured a step sees by it that another one is needed
        self._per_model_steps = nonfinite != "step"
        self._layouts: dict[int, Layout] = {}  # of each group, by its number
        super().__init__(groups, defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient.

        Args:
            closure: computes the losses again and returns them.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            skipped = [model for model, frozen in enumerate(self._frozen) if frozen]
            if self.nonfinite != "step":
                bad = [model for model, fine in enumerate(self.finite_models()) if not fine]
                skipped = sorted({*skipped, *bad})
                if self.nonfinite == "freeze":
                    for model in bad:
                        self._frozen[model] = True
            self._update_all(skipped)
        return loss

    def step_without(self, models: Iterable[int]) -> None:
        """Update all models but these, whose parameters and state stay as they are, bit for bit."""
        skipped = {self.checked_model(model) for model in models}
        with torch.no_grad():
            self._update_all(sorted(skipped | {model for model, frozen in enumerate(self._frozen) if frozen}))

    def _update_all(self, skipped: Sequence[int]) -> None:
        work = []
        for group in self.param_groups:
            self._settle(group)
            ready = [p for p in group["params"] if p.grad is not None]
            if skipped:
                ready = [p for p in ready if self._slots[p] not in skipped]
            if any(map(attrgetter("grad.is_sparse"), ready)):
                shape = next(tuple(p.shape) for p in ready if p.grad.is_sparse)
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
        laid = [self._laid_out(number, group, ready) for number, (group, ready) in enumerate(work)]
        kept = [list(self._kept(p, skipped)) for _, ready in work for p in ready] if skipped else []
        for (group, _), layout in zip(work, laid, strict=True):
            self._update_group(group, self._counted(group, layout))
        for tensor, index, values in (one for several in kept for one in several):
            tensor.index_copy_(0, index, values)
        for layout in laid:
            self.finish(layout.states, [self._slots[p] for p in layout.params] if skipped else [], skipped)

    def _laid_out(self, number: int, group: dict[str, Any], ready: Tensors) -> Layout:
        """The layout of a group's parameters that have gradients, whose states are complete from here on."""
        states = [self.state[p] for p in ready]
        layout = self._layouts.get(number)
        known = layout is not None and layout.is_of(ready, states)
        entries = set(self.entries(group))
        if not known or not all(map(entries.issubset, states)):
            self._prepare(group, ready, states)
            layout = self._layouts[number] = lay_out(ready, states, self._slots, self.num_models)
        assert layout is not None
        return layout

    def _kept(
        self, p: torch.Tensor, skipped: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What belongs to the skipped models: of a parameter and of each tensor of its state."""
        if self._slots[p] is not None:
            return
        index = torch.tensor(skipped, device=p.device)
        for tensor in (p, *(value for key, value in self.state[p].items() if key != "step")):
            yield tensor, index, tensor.index_select(0, index)

    def _prepare(self, group: dict[str, Any], ready: Tensors, states: Sequence[dict[str, Any]]) -> None:
        """Make what state is missing; parameters that begin together share one step count."""
        fresh: dict[bool, torch.Tensor] = {}
        for p, state in zip(ready, states, strict=True):
            if not state and self.counts:
                fused = self._slots[p] is None and self._per_model_steps
                if fused not in fresh:
                    fresh[fused] = self._zero_count(fused)
                state["step"] = fresh[fused]
            self.make_state(p, group, state)

    def _zero_count(self, per_model: bool) -> torch.Tensor:
        if per_model:
            return torch.zeros(self.num_models, dtype=torch.float64)
        return torch.tensor(0.0, dtype=count_dtype())

    def _counted(self, group: dict[str, Any], layout: Layout) -> Layout:
        """Count this step, of the parameters that take part."""
        if not self.counts:
            return layout
        steps = {id(step): step for step in layout.counts}
        if len(layout.params) < len(group["params"]):
            taking_part = set(layout.params)
            for p in group["params"]:
                # A parameter that stays behind can no longer share the count of those that go on.
                if p not in taking_part and id(self.state.get(p, {}).get("step")) in steps:
                    self.state[p]["step"] = self.state[p]["step"].clone()
        for step in steps.values():
            assert step is not None
            step += 1
        return layout

    def _update_group(self, group: dict[str, Any], layout: Layout) -> None:
        for bucket in layout.buckets:
            if bucket.is_even and self._updated_at_once(bucket, group):
                continue
            count = bucket.count
            step: Number | None = None if count is None else count if count.dim() else count.item()
            columns = Columns(self.coefficients(group, step), bucket.first, self._slots)
            for pieces in bucket.chunks:
                self.update(self._chunk(pieces, group), group, columns.beside(pieces))

    def _updated_at_once(self, bucket: Bucket, group: dict[str, Any]) -> bool:
        """Whether one kernel could update a bucket, in one pass over its memory."""
        if bucket.first.device.type != "cpu" or bucket.first.dtype not in (torch.float32, torch.float64):
            return False
        numbers = [part for key in self.bounds for part in as_tuple(group[key])]
        if not all(isinstance(number, (int, float)) for number in numbers) or (
            bucket.count is not None and bucket.count.dim()
        ):
            return False
        grads = [p.grad for p in bucket.params if p.grad is not None]
        if not all(map(torch.Tensor.is_contiguous, (*bucket.params, *grads))):
            return False
        if {grad.dtype for grad in grads} != {bucket.first.dtype}:
            return False
        return self.update_at_once(bucket.params, grads, bucket.states, group, bucket.count)

    def _chunk(self, pieces: Sequence[ParameterSlice], group: dict[str, Any]) -> Chunk:
        params = [piece.of(piece.p) for piece in pieces]
        grads = [piece.of(piece.p.grad) for piece in pieces if piece.p.grad is not None]
        states = [piece.state(self.state[piece.p]) for piece in pieces]
        is_complex = params[0].is_complex()
        if is_complex:
            params, grads = ([torch.view_as_real(tensor) for tensor in own] for own in (params, grads))
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        return Chunk(params, grads, states, is_complex)

    def update_at_once(
        self, params: Tensors, grads: Tensors, states: Sequence[dict[str, Any]], group: dict[str, Any], count: Any
    ) -> bool:
        """Update these parameters by one kernel, options being the same for all; False if there is none for that."""
        return False

    @abstractmethod
    def coefficients(self, group: dict[str, Any], step: Number | None) -> dict[str, Number]:
        """The numbers of this step's update, each a float or B of them; `step` counts from 1."""

    @abstractmethod
    def update(self, chunk: Chunk, group: dict[str, Any], by: Mapping[str, Any]) -> None:
        """Update a chunk in place, by the coefficients: each a float, or for each parameter a tensor beside it."""

    def finish(self, states: Sequence[dict[str, Any]], slots: Sequence[int | None], skipped: Sequence[int]) -> None:
        """After a step, give back to the models that were skipped what is not in slices: their step counts.

        `slots` is empty where no model was skipped.
        """
        if skipped and self.counts:
            for step in {id(state["step"]): state["step"] for state in states}.values():
                if step.dim():
                    step[list(skipped)] -= 1

    # ------------------------------------------------------------------------------- state, from and to plain torch

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
        carry.check_fits(state_dict, self)
        frozen = state_dict.get("hocket", {}).get("frozen", self._frozen)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "hocket"})
        self._frozen = list(frozen)
        for group in self.param_groups:
            self._settle(group)
        rejoin(self.param_groups, self.state)
        if any(self._frozen) or are_per_model(self.state):
            self.count_per_model()
        self._hocket_version += 1

    def __getstate__(self) -> dict[str, Any]:
        own = ("nonfinite", "_slots", "_frozen", "_per_model_steps", "_hocket_version")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own}, "_layouts": {}}

    def unfuse(self) -> list[dict[str, Any]]:
        """B plain state dicts, one for each model, that `torch_class` over that model's parameters loads.

        Example:
            >>> weights = torch.nn.Parameter(torch.zeros(2, 3)); weights.grad = torch.ones(2, 3)
            >>> from hocket.fusion.optim import SGD
            >>> optimizer = SGD([weights], lr=[0.1, 0.2], momentum=0.9, num_models=2)
            >>> optimizer.step()
            >>> second = optimizer.unfuse()[1]
            >>> second["param_groups"][0]["lr"], second["state"][0]["momentum_buffer"]
            (0.2, tensor([1., 1., 1.]))
            >>> torch.optim.SGD([weights[1].detach()], lr=1.0).load_state_dict(second)
        """
        return [carry.unfused(self, model) for model in range(self.num_models)]

    def load_unfused(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the states, and the options, of B plain optimizers of the class `torch_class`.

        Raises:
            InputError: not B of them, or they do not fit these parameters or each other.
        """
        carry.load_unfused(self, states)
        self._hocket_version += 1

    def select_models(self, models: Sequence[int], params: Iterable[torch.Tensor] | None = None) -> None:
        """Keep these models, in this order: it drops slots, or permutes them.

        Args:
            models: numbers of models as they are now, each at most once.
            params: the parameters of the remaining models, in the order in which the old ones stand in the groups; none
                where the parameters are the same objects, shrunk in place.

        Raises:
            InputError: no models, one twice, or parameters that do not fit.
        """
        select_models.select_models(self, models, params)
        self._hocket_version += 1

    def drop(self, model: int, params: Iterable[torch.Tensor] | None = None) -> None:
        """Drop the slot of a model; the models after it move up. `params` as in `select_models`."""
        slot = self.checked_model(model)
        self.select_models([other for other in range(self.num_models) if other != slot], params)

    def refill(self, model: int, state: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Begin anew in the slot of a model whose parameters are now another model's; the others go on undisturbed.

        Args:
            model: the slot.
            state: a plain state dict of `torch_class` to go on from, its options included; without, a fresh state.
            options: numbers of the new model (``lr=0.1``), for all groups; by default the slot's old ones.

        Raises:
            InputError: an unknown option or one out of bounds, or a state that does not fit.
        """
        select_models.refill(self, self.checked_model(model), state, options)
        self._hocket_version += 1
