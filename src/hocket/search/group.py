"""The trials that may train as one model: a queue of those that wait, and what trains them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.errors import InputError
from hocket.fusion.stacked import tensors_in
from hocket.search.data import RandomState, epoch_batches, is_fixed
from hocket.search.fused import FusedTrainer, Runner, why_apart
from hocket.search.run import Run, Status
from hocket.search.split import Split, Train, unlike
from hocket.search.trainer import CannotFuseError, SerialTrainer, Trainer, needs_closure
from hocket.search.training import Training

MAX_SLOTS = 64

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ways:
    """The settings by which the groups of one search train."""

    train: Train  # the user's function
    split: Split  # which parameters are fusible
    executor: str = "auto"  # ``"serial"`` fuses nothing, the others do where there is more than one trial to fuse
    seed: int = 0  # of weights, random numbers and the order of data
    max_slots: int = MAX_SLOTS  # how many models are fused at most
    memory_bytes: int | None = None  # what the models of a group may take; None for any
    runner: Runner | None = None  # see `FusedTrainer`
    processes: Callable[[], Trainer] | None = None  # makes a trainer of processes, where trials train in such


class TrialGroup:
    """One group of a search."""

    def __init__(self, key: tuple[Any, ...], ways: Ways) -> None:
        self.key = key  # the values of the infusible parameters, and what else sets it apart
        self.waiting: list[Run] = []  # trials that are ready and in no slot, the first one to go first
        self.trainer: Trainer | None = None  # what trains them; None while there is none
        self.why_serial = ""  # why these trials do not train as one model, if they do not
        self.searches = 0  # how many fused models were made
        self._ways = ways
        self._probe: Probe | None = None

    @property
    def num_ready(self) -> int:
        """The number of trials that may train now."""
        return len(self.waiting) + (len(self.trainer.active) if self.trainer else 0)

    def fill(self) -> list[tuple[Run, str]]:
        """Let waiting trials into slots, and return those that cannot train here, with the reasons."""
        refused = self._refused_by_building()
        if isinstance(self.trainer, FusedTrainer):
            self.trainer.plan_if_it_pays(len(self.waiting))
        if not self.waiting and self.trainer is not None:
            self.trainer.shrink()
            return refused
        if self._is_outgrown():
            self.close()
        if self.trainer is None and self.waiting:
            refused += self._begin()
        if self.trainer is None:
            return refused
        for run in [run for run in self.waiting if self.trainer.admits(run)]:
            slot = self.trainer.free_slot()
            if slot is None:
                break
            self.waiting.remove(run)
            before = self.trainer.slots[slot]
            try:
                self.trainer.put(slot, run)
            except CannotFuseError as error:
                refused.append((run, str(error)))
                continue
            if before is not None and before.status.is_over:
                before.release()
        return refused

    def remove(self, run: Run) -> None:
        """A trial is over."""
        if run in self.waiting:
            self.waiting.remove(run)
        if self.trainer is not None and run not in self.trainer.slots:
            run.release()

    def take_out(self, run: Run) -> None:
        """A trial leaves the group, with its state."""
        if run in self.waiting:
            self.waiting.remove(run)
        elif self.trainer is not None and run in self.trainer.slots:
            slot = self.trainer.slots.index(run)
            self.trainer.sync(slot)
            self.trainer.slots[slot] = None

    def state_of(self, run: Run) -> dict[str, Any]:
        """A trial's state, wherever it is."""
        if self.trainer is not None and run in self.trainer.slots:
            self.trainer.sync(self.trainer.slots.index(run))
        return run.state()

    def close(self) -> None:
        """Close the trainer. Its trials wait for another."""
        if self.trainer is not None:
            back = [run for _, run in self.trainer.active]
            self.trainer.close()
            self.trainer = None
            self.waiting = [*back, *self.waiting]

    # ------------------------------------------------------------------------------------------- what trains them

    def _refused_by_building(self) -> list[tuple[Run, str]]:
        """Trials that cannot be built end here."""
        room = self._ways.max_slots
        refused = []
        for run in self.waiting[:room] if self._ways.executor != "processes" else []:
            try:
                run.build(self._ways.train)
            except InputError:
                raise
            except Exception as error:  # noqa: BLE001 - the user's code; this trial ends, no other one
                run.error = f"{type(error).__name__}: {error}"
                refused.append((run, ""))
        self.waiting = [run for run in self.waiting if run.error is None]
        return refused

    def _is_outgrown(self) -> bool:
        """True if enough trials wait to double the slots."""
        if not isinstance(self.trainer, (FusedTrainer, SerialTrainer)) or self._is_serial:
            return False
        return len(self.waiting) >= len(self.trainer.slots) < self._capacity() and self.num_ready > 1

    @property
    def _is_serial(self) -> bool:
        return self._ways.executor == "serial" or bool(self.why_serial)

    def _capacity(self) -> int:
        most = self._ways.max_slots
        if self._ways.memory_bytes is not None and self._probe is not None:
            most = min(most, max(1, self._ways.memory_bytes // max(1, self._probe.slot_bytes)))
        return most

    def _begin(self) -> list[tuple[Run, str]]:
        """Make what trains the waiting trials, and return those that differ from the first one."""
        ways = self._ways
        if ways.processes is not None:
            self.trainer = ways.processes()
            return []
        if self._is_serial or len(self.waiting) == 1:
            self.trainer = SerialTrainer(ways.train, ways.seed)
            return []
        runs, refused = self._alike(self.waiting[: ways.max_slots])
        self.waiting = [run for run in self.waiting if run not in [each for each, _ in refused]]
        try:
            if needs_closure(optimizer := runs[0].made.optimizer):
                raise CannotFuseError(f"optimizer: {type(optimizer).__name__} calls a closure")
            if self._probe is None:
                self._probe = probe(runs[0].made)
            runs = runs[: self._capacity()]
            if len(runs) > 1:
                draws, size_bytes = self._probe.draws, self._probe.slot_bytes
                self.trainer = FusedTrainer(
                    ways.train, runs, ways.seed, ways.split.options, draws, ways.runner, size_bytes
                )
                self.searches += 1
        except CannotFuseError as error:
            self._train_apart(runs, str(error))
        except Exception as error:  # noqa: BLE001 - the user's step raises, for some trials or for all
            refused += self._culprits(runs, error)
            if not self.why_serial:
                return refused  # the others begin without them
        if self.trainer is None:
            self.trainer = SerialTrainer(ways.train, ways.seed)
        else:
            self.waiting = [run for run in self.waiting if run not in runs]
        return refused

    def _alike(self, runs: Sequence[Run]) -> tuple[list[Run], list[tuple[Run, str]]]:
        """Those that fuse with the first one, and why the others do not."""
        first, *others = runs
        alike, refused = [first], []
        for run in others:
            if differs := why_apart(first, run) or unlike(first.made, run.made):
                refused.append((run, differs))
            elif is_fixed(first.made.batches) or run.epochs == first.epochs:
                alike.append(run)
        return alike, refused

    def fall_back(self, error: Exception) -> list[tuple[Run, str]]:
        """Restart the trials of a failed fused step, and return those whose own next step fails, too."""
        assert self.trainer is not None
        slots = [run for run in self.trainer.slots if run is not None]
        runs, found = [run for run in slots if not run.status.is_over], []
        if not isinstance(error, CannotFuseError):
            for run in runs:
                self.trainer.sync(self.trainer.slots.index(run))
            found = self._culprits(runs, error, may_be_another=len(runs) < len(slots))
            runs = [run for run in runs if run.error is None]
        for run in runs:
            run.restart()
        self.waiting = [*(run for run in runs if run.status is Status.READY), *self.waiting]
        self.trainer.slots = []
        self.trainer.close()
        self.trainer = None
        refused = found + self._refused_by_building()
        if isinstance(error, CannotFuseError):  # something draws, perhaps in evaluation or at other trials' rates only
            assert self._probe is not None
            if self._probe.draws:
                self._train_apart(runs, str(error))
            self._probe = replace(self._probe, draws=True)
        return refused

    def _culprits(
        self, runs: Sequence[Run], error: Exception, *, may_be_another: bool = False
    ) -> list[tuple[Run, str]]:
        """The trials whose next step raises. Where none does, all train one at a time from now on.

        Unless it may be a trial that is over, which trains on in its slot.
        """
        found = []
        for run in runs:
            try:
                probe(run.made)
            except Exception as own:  # noqa: BLE001 - the user's code; this trial ends, no other one
                run.error = f"{type(own).__name__}: {own}"
                found.append((run, ""))
        self.waiting = [run for run in self.waiting if run.error is None]
        if not found and not may_be_another:
            self._train_apart(runs, f"a fused step raises {type(error).__name__}: {error}")
        return found

    def _train_apart(self, runs: Sequence[Run], why: str) -> None:
        """Train trials one at a time from now on."""
        self.why_serial = why
        log.warning("hocket.tune: trials %s train one at a time: %s", [run.number for run in runs], why)


@dataclass(frozen=True)
class Probe:
    """Results of a step."""

    draws: bool  # whether the model draws random numbers in training: each model then needs its own generator
    # memory of one more slot: parameters, buffers and state of the optimizer twice (in the slot, and in the trial's
    # own model), gradients, and tensors saved for the backward
    slot_bytes: int


def probe(training: Training) -> Probe:
    """Take a step of a copy. The trial itself and all generators stay as they are."""
    model, optimizer = copy.deepcopy((training.model.train(), training.optimizer))
    inputs, target = next(iter(epoch_batches(training.batches, 0, 0)))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with RandomState().active():
        device = training.device
        before = RandomState().on(device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), training.precision():
            loss = training.loss(model(inputs), target)
        draws = not torch.equal(before, RandomState().on(device))
        loss.backward()
        optimizer.step()
    own = [*model.parameters(), *model.buffers()]
    for tensor in (*own, *tensors_in((inputs, target))):  # these are counted below, or belong to all
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    states = tensors_in(list(optimizer.state.values()))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    slot_bytes = 2 * (_bytes(own) + _bytes(states)) + _bytes(grads) + sum(kept.values())
    return Probe(draws, slot_bytes)


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
