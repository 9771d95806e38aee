"""`JoinedJob` and `JobStep`: the start, errors and end that all steps of several processes share.

`StepGuard` watches a step before its capture, and guards the Python state that it reads from then on.
`hocket.schedule` does the same (`hocket.pystate`), but falls back to the user's own step, which ranks that run parts of
it cannot do. So a step that writes Python state or reads a clock is refused by name, and so is a call before which
something that the step reads has changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

import torch
from torch.utils._pytree import tree_flatten

from hocket.arguments import spreading
from hocket.distributed.membership import Membership
from hocket.distributed.staging import check_default_streams, devices_of
from hocket.distributed.wire import Wire
from hocket.errors import CaptureError, ExecutionError, InputError, PeerError, StaleCaptureError
from hocket.execution import EXECUTORS
from hocket.execution.base import Executor
from hocket.execution.streams import StreamDevice
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.pystate.changes import in_words, named
from hocket.pystate.guards import Guards
from hocket.pystate.watch import MAX_WATCHED, PurityWatch
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from hocket.tracing.saved_state import Saved
from hocket.tracing.signature import signature_of
from hocket.tracing.sources import Entry
from hocket.tracing.state import inventory

# The parts of `signature_of`, as a user knows them.
PARTS = (
    "the form of the batch",
    "shape, dtype or strides of a tensor in the batch; leave out a smaller last batch",
    "a value in the batch",
    "a tensor that is in the batch twice",
    "a module's mode",
    "the parameters that are trained",
    "a fused model",
    "autocast or another switch of torch",
)
# Index of the gradients. Whether they exist does not matter, since the step drops them.
GRADIENTS = 5


class StepGuard:
    """Watches a step on one batch, and undoes its effects on models and optimizers. It refuses any other effect."""

    def __init__(self, step: Callable[[Any], Any], model: Any, optimizer: Any, batch: Any) -> None:
        places = inventory(model, optimizer)
        own = getattr(step, "__wrapped__", step)  # so that places have the names that they have for the user
        self._watch = PurityWatch(own, (*places.models, *places.optimizers))
        self._guards: Guards | None = None
        saved = Saved(places, [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)])
        try:
            self._run(step, batch)
        finally:
            saved.restore()
        if self._watch.outputs:
            raise CaptureError(
                f"distribute: the step sets {self._watch.outputs[0].name}, and its parts would not; do it between steps"
            )
        if self._watch.executed.calls_sinks:
            raise CaptureError("distribute: the step calls a sink; return what is to be shown")
        if self._watch.appended:
            raise CaptureError("distribute: the step appends to a list; return what is to be kept")

    def begin(self) -> None:
        """Guard everything that the step reads from now on."""
        self._guards = Guards(self._watch.look(), self._watch)

    def check_call(self, captured: Captured, batch: Any) -> None:
        """Raise a `StaleCaptureError` if a call is not like the captured one, or the step reads other values."""
        found, expected = signature_of(captured.trace.places, batch), captured.signature
        for place, (one, other) in enumerate(zip(found, expected, strict=True)):
            if place == GRADIENTS:
                one, other = ([requires for requires, _ in each] for each in (one, other))
            if one != other:
                raise StaleCaptureError(
                    f"distribute: this call is not like the first one ({PARTS[place]}); all steps of a job are"
                )
        self.check()

    def check(self) -> None:
        """Raise a `StaleCaptureError` that names a value which the step reads and which has changed."""
        assert self._guards is not None
        if not self._guards.hold() and not self._guards.renew() and (changes := self._guards.changes()):
            raise StaleCaptureError(f"distribute: {named(changes)} changed since the first call; nothing was run")

    def _run(self, step: Callable[[Any], Any], batch: Any) -> None:
        for _ in range(MAX_WATCHED):
            seen = self._watch.run(step, batch)
            if seen.before is not None and seen.findings:
                raise CaptureError(f"distribute: the step cannot be divided: {in_words(seen.findings)}")
            if seen.settled:
                return
        raise CaptureError(f"distribute: the step ran code for the first time in each of {MAX_WATCHED} steps")


# Commands that rank 0 sends, or that all ranks agree on.
STEP, GATHER, CLOSE, PUBLISH, REJOIN, SAVE, LOAD = range(7)
# Names of values on wires: commands with rank 0's rates, and bytes by which a link is measured.
COMMANDS, PROBE = "commands", "probe"
PROBE_BYTES = 4 << 20


@dataclass(frozen=True)
class JoinedJob:
    """A captured step and the wires of this rank."""

    membership: Membership  # place of this rank in the job
    captured: Captured  # the whole step
    wires: Mapping[int, Wire]  # wire to each other rank, by the number of the worker or server there

    @cached_property
    def rates(self) -> tuple[Entry, ...]:
        """Numbers among the optimizers' options (rates, decays), without those that schedulers add."""
        numbers = [entry for entry in self.captured.trace.places.numbers if entry.kind == "group"]
        return tuple(entry for entry in numbers if entry.key in entry.table.optimizer.defaults)

    @cached_property
    def devices(self) -> list[StreamDevice]:
        """The GPUs of the model."""
        return devices_of(self.captured.trace.places.models)

    @property
    def command_bytes(self) -> int:
        return 8 * (2 + len(self.rates))

    def send_command(self, command: int, argument: int = 0) -> None:
        """Rank 0 sends a command and its rates to the ranks it has wires to, without waiting."""
        values = torch.tensor([command, argument, *(float(entry.get()) for entry in self.rates)], dtype=torch.float64)
        for wire in self.wires.values():
            wire.post(COMMANDS, values)

    def receive_command(self) -> tuple[int, int]:
        """Wait for rank 0's next command and its argument, and take over its rates. Whole numbers stay integers."""
        values = torch.empty(2 + len(self.rates), dtype=torch.float64)
        self.wires[0].get(COMMANDS, values)
        command, argument, *rates = values.tolist()
        for entry, rate in zip(self.rates, rates, strict=True):
            is_whole = isinstance(entry.get(), int) and float(rate).is_integer()
            entry.set(int(rate) if is_whole else rate)
        return int(command), int(argument)

    def failed(self, error: BaseException) -> PeerError:
        """Leave the job after an error, and return what to raise."""
        return self.membership.failed(self.wires, error)


AnyJob = TypeVar("AnyJob", bound=JoinedJob)


class JobStep(ABC, Generic[AnyJob]):
    """A step that this process runs together with others. An error ends it, and is raised by all further calls."""

    def __init__(self, step: Any, model: Any, optimizer: Any, membership: Membership, executor: str) -> None:
        self.steps = 0
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.machine: Machine | None = None
        self._step, self._model, self._optimizer = spreading(step), model, optimizer
        self._membership, self._kind = membership, executor
        self._job: AnyJob | None = None
        self._guard: StepGuard | None = None
        self._executor: Executor | None = None
        self._failure: PeerError | None = None
        self._closed = False

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until no transfer is under way. Raises `PeerError` if a rank is gone."""

    @abstractmethod
    def _join(self, batch: Any) -> AnyJob:
        """Capture the step, and connect to the other ranks."""

    @abstractmethod
    def _prepare(self, job: AnyJob) -> None:
        """Make the plan and the executor."""

    @property
    def rank(self) -> int:
        """The rank of this process. Rank 0 plans and gathers."""
        return self._membership.rank

    def timeline(self) -> Timeline:
        """Return when each op and each transfer of the last step ran at this rank."""
        if self._executor is None:
            raise ExecutionError("no step has run yet")
        return self._executor.timeline()

    def close(self) -> None:
        """Leave the job once all transfers have arrived. Parameters are then those after all steps."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._job is None:
                self._membership.fail(ExecutionError("it has left before its first step"))
            elif self._failure is None:
                self.synchronize()
                with self._exchanging():
                    self._end(self._job)
                    self._membership.leave(self._job.wires)
        finally:
            if self._executor is not None:
                self._executor.close()

    def __enter__(self) -> Self:
        return self

    def _check_open(self) -> None:
        if self._closed or self._failure is not None:
            raise self._failure or ExecutionError("distribute: the step was closed; step and gather() come first")

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            (self._failed if self._job is not None else self._membership.fail)(error)
        self.close()

    def _begun(self, batch: Any) -> AnyJob:
        """Return the job, which the first call starts on its batch."""
        self._check_open()
        if self._job is None:
            with self._membership.reporting_errors():
                check_default_streams(devices_of(self._model))
                self._guard = self._watched(batch)
            self._job = self._join(batch)
            with ending_on_error(self._failed):
                self._prepare(self._job)
                self._guard.begin()
        check_default_streams(self._job.devices)
        return self._job

    def _watched(self, batch: Any) -> StepGuard:
        return StepGuard(self._step, self._model, self._optimizer, batch)

    def _end(self, job: AnyJob) -> None:
        """Tell the other ranks that the job is over, before this one leaves."""

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """End the job if a rank is lost while values are exchanged between two steps."""
        try:
            yield
        except PeerError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> PeerError:
        """Return the error that ended the job: the first one."""
        if self._failure is None:
            assert self._job is not None
            self._failure = self._job.failed(error)
        return self._failure


@contextmanager
def ending_on_error(failed: Callable[[BaseException], PeerError]) -> Iterator[None]:
    """End a job by `failed` on any error, and raise its result. An interrupt and an exit stay what they are."""
    try:
        yield
    except Exception as error:
        raise failed(error) from error
    except BaseException as error:
        failed(error)
        raise


def captured_for(step: Any, model: Any, optimizer: Any, batch: Any) -> Captured:
    """Capture a step while each trained parameter has a gradient, so that adding to an existing gradient shows."""
    models = model if isinstance(model, (list, tuple)) else [model]
    bare = [p for one in models for p in one.parameters() if p.requires_grad and p.grad is None]
    for parameter in bare:
        parameter.grad = torch.zeros_like(parameter)
    try:
        return capture(step, model, optimizer, batch)
    finally:
        for parameter in bare:
            parameter.grad = None


def check_choice(what: str, given: str, available: Sequence[str] = EXECUTORS, prefix: str = "distribute") -> None:
    """Raise an `InputError` unless an option has one of the available values."""
    if given not in available:
        raise InputError(f"{prefix}: unknown {what} {given!r}; available: {', '.join(available)}")
