r"""The slots of one fused model: trials come and go by values, and what runs their steps stays.

      slot 0    slot 1    slot 2                    a trial's own model, optimizer and scheduler
    [ trial 4 | trial 1 | trial 7 ]  <--- put ----  weights, buffers, state of the optimizer, its numbers
      one array, one optimizer       --- sync --->

Shapes stay, so a step that was captured and planned once serves all trials of a group. Each trial keeps the torch
scheduler it was made with: once an epoch it steps on the trial's own optimizer, whose numbers are then copied into the
trial's slot, so any scheduler works, and a rate is to the last bit what it is alone.

Source: Wang et al., "Horizontally Fused Training Array", MLSys 2021, Appendix E.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import itemgetter, length_hint
from time import perf_counter
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from hocket.errors import InputError
from hocket.fusion import fuse
from hocket.fusion.loss import Losses
from hocket.optim import FusedOptimizer, ModelSlots, TrainedModel, clip_grad_norm_, clip_grad_value_
from hocket.search.data import RandomState, are_same_batches, is_fixed
from hocket.search.run import EpochResult, Run, Status, plain_attributes, set_attributes
from hocket.search.split import Train, difference, fused_class, is_same_loss, options_of, reads_model, unlike
from hocket.search.trainer import CannotFuseError, EpochTrainer
from hocket.search.training import Training

log = logging.getLogger(__name__)

# The cost of planning a step, in seconds and in steps, and the share of a step's time that a good plan takes.
PLANNING_S, PLANNING_STEPS, PLANNED_SHARE = 2.0, 100, 0.5
SHORT_STEPS = 500  # in fewer, timing several plans for a step of small models does not pay itself back
SMALL_BYTES = 2**23  # of a slot
SETTLED_STEPS = 16  # from then on, or from the second epoch, the array has tried its plans

Runner = Callable[[Callable[[Any, Any], torch.Tensor], Any, Any], Callable[[Any, Any], torch.Tensor]]


class FusedTrainer(EpochTrainer):
    """Slots that train together.

    `runs` has a trial for each slot, of one signature and the same data. `options` names the optimizer's numbers
    that differ between trials. Models that draw random numbers in training (`draws`) have a generator each.
    `runner` wraps ``step(inputs, target) -> losses`` of the fused model and optimizer, as `hocket.schedule` does.
    """

    kind = "fused"
    batch_dim = 1
    step_s: float  # of all slots, the fastest one of the last epoch; infinite where each plan has not had its turn

    def __init__(
        self,
        train: Train,
        runs: Sequence[Run],
        seed: int,
        options: frozenset[str] = frozenset(),
        draws: bool = True,
        runner: Runner | None = None,
        slot_bytes: int = 0,
    ) -> None:
        super().__init__(len(runs), seed)
        self._train, self._draws, self._runner = train, draws, runner
        trainings = [run.build(train) for run in runs]
        first = trainings[0]
        self.setup = first
        self._loss, self._batches = first.loss, first.batches
        # Later trials are compared with this one, also after the first trial has ended.
        self._leader = Run(runs[0].number, runs[0].params, seed, training=first, signature=runs[0].signature)
        for run in runs:
            self._check(run)
        for each in trainings:
            each.model.train()
        try:
            self.model = fuse(
                [each.model for each in trainings],
                backend=self._backend(runs, slot_bytes),
                shared=True,
                seeds=[run.seed for run in runs] if draws else None,
            )
            self._optimizer = fused_optimizer(self.model, trainings, options)
        except InputError as error:
            raise CannotFuseError(str(error)) from error
        self._slots = ModelSlots(self.model, self._optimizer)
        self.slots = list(runs)
        self._losses = [each.loss for each in trainings]
        self._clip_norms, self._clip_values = [NO_LIMIT] * len(runs), [NO_LIMIT] * len(runs)
        self._numbers: dict[int, list[dict[str, Any]]] = {}  # of the optimizer, as they stand in the slots
        for slot, run in enumerate(runs):
            self._enter(slot, run)
            if draws and run.random is not None:
                device = first.device
                self.model.generators_on(device)[slot].set_state(run.random.on(device))
        self._step: Callable[[Any, Any], torch.Tensor] = self._part_of_step
        if runner is not None and first.accumulate > 1:
            log.warning(
                "hocket.tune: a step that only adds up gradients is not planned, so these trials train as fused"
            )
            self._runner = None
        self.step_s, self._steps = math.inf, 0
        self._first_s: float | None = None
        self._epoch_s = math.inf

    def _backend(self, runs: Sequence[Run], slot_bytes: int) -> str:
        """The array's choice by timing, or all models at once: fastest for small models without convolutions."""
        has_images = any(isinstance(layer, _ConvNd) for layer in self.setup.model.modules())
        num_batches = length_hint(self._batches, SHORT_STEPS)  # some loaders have no length
        steps = num_batches * max(1, *(run.until - run.epochs for run in runs))
        return "rule" if steps < SHORT_STEPS and slot_bytes <= SMALL_BYTES and not has_images else "auto"

    @property
    def step(self) -> Callable[[Any, Any], torch.Tensor]:
        """The step for each batch: the runner's, if there is one."""
        return self._step

    def admits(self, run: Run) -> bool:
        """True unless batches change from epoch to epoch and the trial is at another epoch than the slots."""
        active = self.active
        return is_fixed(self._batches) or not active or active[0][1].epochs == run.epochs

    def put(self, slot: int, run: Run) -> None:
        run.build(self._train)
        self._check(run)
        if differs := unlike(self._leader.made, run.made):
            raise CannotFuseError(differs)
        before = self.slots[slot]
        run.made.model.train(self.model.training)
        try:
            if before is not None and not before.status.is_over:
                self.sync(slot)
            self._slots.put(slot, self._trained_model(run))
        except InputError as error:
            raise CannotFuseError(str(error)) from error
        self.slots[slot] = run
        self._losses[slot] = run.made.loss
        self._enter(slot, run)

    def sync(self, slot: int) -> None:
        run = self.slots[slot]
        assert run is not None
        bring_home(run, self._slots, slot)

    def part(self, outputs: Any, slot: int) -> Any:
        if isinstance(outputs, torch.Tensor):  # by far the most outputs are, and small ones are many
            return outputs[slot]
        return pytree.tree_map_only(torch.Tensor, itemgetter(slot), outputs)

    def draws(self) -> AbstractContextManager[object]:
        return no_draws()

    def advance(self) -> Sequence[tuple[Run, EpochResult]]:
        for slot, run in enumerate(self.slots):  # all slots are stepped: who waits may not stay
            if run is not None and run.status is Status.PAUSED:
                self.sync(slot)
                self.slots[slot] = None
        self._times_s = list[float]()
        start = perf_counter()
        results = self.train_epoch()
        took_s = perf_counter() - start
        steps = len(self._times_s)
        is_settled = self._steps > 0 or steps >= SETTLED_STEPS
        self.step_s, self._steps = min(self._times_s) if is_settled else math.inf, self._steps + steps
        self._first_s = took_s if self._first_s is None else self._first_s
        self._epoch_s = min(self._epoch_s, took_s)
        return results

    def plan_if_it_pays(self, num_waiting: int) -> None:
        """Let the runner take over the steps, once what it saves in those ahead is more than what planning costs."""
        if self._runner is None or self._step != self._part_of_step or self.step_s == math.inf:
            return
        epochs = max((run.until - run.epochs for _, run in self.active), default=0)
        steps = epochs * len(self._times_s) * (1 + num_waiting / len(self.slots))
        if PLANNED_SHARE * steps * self.step_s >= PLANNING_S + PLANNING_STEPS * self.step_s:
            self._optimizer.count_per_model()  # so that trials that come later leave the captured step as it is
            self._step = self._runner(self._part_of_step, self.model, self._optimizer)

    def shrink(self) -> None:
        """Drop finished slots if the epochs ahead save twice the overhead of a new first epoch."""
        keep = [slot for slot, run in enumerate(self.slots) if run is not None and not run.status.is_over]
        ahead = max((self.slots[slot].until - self.slots[slot].epochs for slot in keep), default=0)  # type: ignore[union-attr]
        saved_s = self._epoch_s * (1 - len(keep) / len(self.slots)) * ahead
        if not keep or len(keep) == len(self.slots) or saved_s <= 2 * ((self._first_s or 0.0) - self._epoch_s):
            return
        self._slots.take(keep)
        self.slots = [self.slots[slot] for slot in keep]
        self._losses = [self._losses[slot] for slot in keep]
        self._clip_norms = [self._clip_norms[slot] for slot in keep]
        self._clip_values = [self._clip_values[slot] for slot in keep]
        self._numbers = {place: self._numbers[slot] for place, slot in enumerate(keep)}
        self._has_one_loss = all(is_same_loss(self._loss, each) for each in self._losses)
        self._first_s, self._epoch_s = None, math.inf
        self.step_s, self._steps = math.inf, 0

    def close(self) -> None:
        super().close()
        if self._step != self._part_of_step and hasattr(self._step, "close"):
            self._step.close()

    # -------------------------------------------------------------------------------------------------- one epoch

    def train_batch(self, inputs: Any, target: Any, *, begins: bool, ends: bool) -> torch.Tensor:
        start = perf_counter()
        step = self._step if begins and ends else partial(self._part_of_step, begins=begins, ends=ends)
        losses = step(inputs, target)
        self._times_s.append(perf_counter() - start)
        return losses

    def _part_of_step(self, inputs: Any, target: Any, *, begins: bool = True, ends: bool = True) -> torch.Tensor:
        if begins:
            self._optimizer.zero_grad()
        with self.setup.precision():
            losses = (
                self.model.losses(self._loss, (inputs,), target) if self._has_one_loss else self._own(inputs, target)
            )
        parts = self.setup.accumulate
        losses.backward(None if parts == 1 else torch.full_like(losses.detach().as_subclass(torch.Tensor), 1 / parts))
        if ends:
            clip(self.model, self._clip_norms, self._clip_values)
            self._optimizer.step()
        return losses

    def _own(self, inputs: Any, target: Any) -> torch.Tensor:
        """Each trial's own loss of its own outputs."""
        outputs = self.model(inputs)
        losses = [loss(self.part(outputs, slot), target).sum() for slot, loss in enumerate(self._losses)]
        return torch.stack(losses).as_subclass(Losses)

    def step_schedulers(self, values: dict[int, float] | None = None) -> None:
        super().step_schedulers(values)
        self._copy_numbers()

    def _copy_numbers(self) -> None:
        """Set in the slots what the trials' schedulers have set in their own optimizers."""
        own = {slot: options_of(run.training) for slot, run in self.active if run.training is not None}
        for number, group in enumerate(self._optimizer.param_groups):
            for key in self._optimizer.bounds:
                for slot, numbers in own.items():
                    if numbers[number][key] != self._numbers[slot][number][key]:
                        self._optimizer.set_for_model(group, key, slot, numbers[number][key])
        for slot, numbers in own.items():
            self._numbers[slot] = numbers

    # ------------------------------------------------------------------------------------------------ who may come

    def _check(self, run: Run) -> None:
        if differs := why_apart(self._leader, run):
            raise CannotFuseError(differs)
        for field in ("loss", "metric"):
            if reads_model(getattr(run.made, field), run.made.model):
                raise CannotFuseError(f"{field}: it holds the trial's own model, whose weights would be old")
        if self._runner is not None and not is_same_loss(self._loss, run.made.loss):
            raise CannotFuseError("loss: not provably one function, so the step of all trials cannot be captured")

    def _trained_model(self, run: Run) -> TrainedModel:
        """A trial as `ModelSlots` takes it."""
        assert run.random is not None
        device = run.made.device
        return TrainedModel(
            module=run.made.model,
            optimizers=[run.made.optimizer.state_dict()],
            schedulers=[],
            seed=run.seed,
            generators={device: run.random.on(device)} if self._draws else None,
        )

    def _enter(self, slot: int, run: Run) -> None:
        run.made.optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler asks for it
        self._numbers[slot] = options_of(run.made)
        self._clip_norms[slot] = min(run.made.clip_norm or NO_LIMIT, NO_LIMIT)
        self._clip_values[slot] = min(run.made.clip_value or NO_LIMIT, NO_LIMIT)
        self._has_one_loss = all(is_same_loss(self._loss, each) for each in self._losses)


@contextmanager
def no_draws() -> Iterator[None]:
    """Refuse draws from the global generators, which belong to no trial, and leave them as they were."""
    before, after = RandomState(), RandomState()
    with after.active():
        yield
    if not after.is_at(before):
        raise CannotFuseError(
            "a loss or a metric draws random numbers, or something draws Python's or numpy's (a model may draw torch's)"
        )


def why_apart(first: Run, second: Run) -> str:
    """In words why two trials cannot train as one model, or nothing."""
    mine, its = first.made, second.made
    if differs := difference(first.signature, second.signature):
        return differs
    if not are_same_batches(mine.batches, its.batches):
        return "batches: not provably the same data"
    if not are_same_batches(mine.measured_on, its.measured_on):
        return "validation: not provably the same data"
    return ""


NO_LIMIT = sys.float_info.max  # of gradients


def bring_home(run: Run, slots: ModelSlots, slot: int) -> None:
    """Put what a slot has made of a trial into its own model and optimizer, whose numbers are the trial's already."""
    assert run.random is not None
    state = slots.state(slot, run.made.model)
    set_attributes(run.made.model, plain_attributes(slots.array._store.templates[slot]))
    optimizer, entries = run.made.optimizer, state.optimizers[0]["state"]
    params = [(p, group.get("fused")) for group in optimizer.param_groups for p in group["params"]]
    for index, (p, is_fused) in enumerate(params):
        optimizer.state[p] = entries.get(index, {})
        if is_fused and "step" in optimizer.state[p]:  # torch's kernel counts where the parameter is
            optimizer.state[p]["step"] = optimizer.state[p]["step"].to(p.device)
    for device, generator in (state.generators or {}).items():
        run.random.set_on(device, generator)


def fused_optimizer(array: Any, trainings: Sequence[Training], options: frozenset[str]) -> FusedOptimizer:
    """The fused optimizer of these plain ones, which goes on where they are."""
    first = trainings[0]
    kind = fused_class(first.optimizer)
    if kind is None:
        raise CannotFuseError(f"optimizer: {type(first.optimizer).__name__} has no fused form")
    stacked = array.all_tensors()
    names = {id(parameter): name for name, parameter in first.model.named_parameters()}
    groups = []
    for number, group in enumerate(first.optimizer.param_groups):
        own = [names.get(id(parameter)) for parameter in group["params"]]
        if any(name is None or name not in stacked for name in own):
            raise CannotFuseError(f"optimizer: group {number} has parameters that are not fused")
        groups.append({"params": [stacked[str(name)] for name in own]})
        if any(group.get(flag) for flag in ("differentiable", "capturable")):
            raise CannotFuseError("optimizer: differentiable and capturable have no fused form")
    optimizer = kind(groups)
    optimizer.load_unfused([each.optimizer.state_dict() for each in trainings])
    changing = options | ({"lr"} if any(each.scheduler is not None for each in trainings) else set())
    for group in optimizer.param_groups:
        for key in changing & set(optimizer.bounds):
            whole = group[key]
            if isinstance(whole, tuple):
                group[key] = tuple(optimizer.widened(group, part) for part in whole)
            else:
                group[key] = optimizer.widened(group, whole)
    return optimizer


def clip(array: Any, norms: Sequence[float], values: Sequence[float]) -> None:
    """Clip each trial's gradients by its own limits, `NO_LIMIT` for none."""
    for function, limits in ((clip_grad_norm_, norms), (clip_grad_value_, values)):
        if any(limit < NO_LIMIT for limit in limits):
            parameters = [parameter for _, parameter in array.named_parameters()]
            function(parameters, list(limits), num_models=len(limits))
