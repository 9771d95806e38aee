"""`hocket.distribute.worker`: a training step whose parameters and updates are on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from hocket.arguments import packed, spreading
from hocket.distributed.channels import PullChannel
from hocket.distributed.job_step import JobStep
from hocket.distributed.membership import DEFAULT_TIMEOUT_S, Membership, join
from hocket.distributed.parts import server_name, worker_part
from hocket.distributed.plans import link_rates, profiled, tell_plan, told_plan, worker_lanes, worker_plan
from hocket.distributed.returning import READY, Announcements, come_again, let_in, take_part
from hocket.distributed.setup import CLOSE, GATHER, LET_IN, PUBLISH, STEP, Setup, set_up
from hocket.distributed.watched import StepGuard
from hocket.errors import ExecutionError, InputError
from hocket.execution import EXECUTORS
from hocket.execution.base import Executor
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning import Bounds, bounds
from hocket.planning.transfers import ORDERS

__all__ = ["DistributedStep", "worker"]

# How often rank 0 looks for workers that come again: a question to the store, which a short step would notice.
LOOK_EVERY_S = 0.1


class DistributedStep(JobStep):
    """A worker's training step; call it as you would call the step. See `worker`.

    Attributes:
        steps: how many the job has run: of a worker that came again, also those before it did.
        setup: the job, from the first call on.
        plan: what all workers run, made by rank 0.
        costs, machine: what rank 0 made it from, there.
        bounds: between which times any order lies, there.
        predicted_us: what a step takes by these in a row of steps, there: servers compute as fast as rank 0.
    """

    def __init__(
        self, step: Callable[..., Any], model: Any, optimizer: Any, membership: Membership, order: str, kind: str
    ) -> None:
        super().__init__()
        self.steps = 0
        self.setup: Setup | None = None
        self.plan: Plan | None = None
        self.costs: Costs | None = None
        self.machine: Machine | None = None
        self.predicted_us = 0.0
        self.bounds: Bounds | None = None
        self._step, self._model, self._optimizer = spreading(step), model, optimizer
        self._membership, self._order, self._kind = membership, order, kind
        self._executor: Executor | None = None
        self._pulls: list[PullChannel] = []
        self._guard: StepGuard | None = None
        self._published: int | None = None
        self._since = 0
        self._ready = Announcements(membership.store, READY)
        self._look_again_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step on this worker's batch; returns what the step returns.

        What only servers know (the norm of all gradients, where the step returns it) is None. Parameters of the next
        step arrive after this one: see `synchronize`.

        Raises:
            PeerError: a rank is gone, silent or trains something else; names it.
            StaleCaptureError: the batch, or a mode of a module, is not as in the first call, or a number that the step
                branches on; nothing was run, and the next call may go on.
        """
        self._check_open()
        batch = packed(args, kwargs)
        if self.setup is None:
            self._start(batch)
        assert self.setup is not None
        assert self._executor is not None
        self._check(batch)
        frame = self._executor.begin(batch)  # before anybody is told: it may be refused
        try:
            if self._membership.rank == 0:
                self._let_in(self.setup)
                self.setup.order(STEP)
            self._executor.run(frame)
            result = self._executor.captured.finish(frame)
        except BaseException as error:
            raise self._failed(error) from error
        self.steps += 1
        return result

    def start(self, *args: Any, **kwargs: Any) -> int:
        """Join the job without running a step, which the first call does otherwise; again, it changes nothing.

        Args:
            args: a batch like those of the steps, so that the step can be captured.
            kwargs: what the step is called with by name.

        Returns:
            How many steps the job has run: 0, unless this worker takes the place of one that was lost. Its own first
            step is the one after these.

        Raises:
            PeerError: as a call.
        """
        self._check_open()
        if self.setup is None:
            self._start(packed(args, kwargs))
        return self.steps

    @property
    def rank(self) -> int:
        """The rank of this worker; rank 0 plans and gathers."""
        return self._membership.rank

    def synchronize(self) -> None:
        """Wait until all parameters are those after the last step: before the model is evaluated or saved.

        Raises:
            PeerError: a server is gone.
        """
        with self._exchanging():
            for channel in self._pulls:
                channel.wait(self.steps - self._since + 1)

    def gather(self) -> None:
        """Make model and optimizer what they are where one process trains; on rank 0 the optimizer's state comes, too.

        Save their ``state_dict()`` then, as ever. Every rank may call it; raises as `synchronize`.
        """
        self.synchronize()
        if self._membership.rank != 0 or self.setup is None:
            return
        with self._exchanging():
            self.setup.order(GATHER)
            for number, wire in enumerate(self.setup.wires):
                self.setup.shard(number).receive(wire)

    def publish(self) -> int:
        """Let agents have the parameters and buffers as they are after the last step, as one version.

        Every rank may call it; rank 0 orders the servers to copy what they have, and goes on.

        Returns:
            The number of the version: of the steps so far.

        Raises:
            ExecutionError: no step has run yet, or the step was closed.
            PeerError: a server is gone.
        """
        if self.setup is None or self._closed or self._failure is not None:
            raise self._failure or ExecutionError("distribute: there is nothing to publish before the first step")
        if self._membership.rank == 0 and self._published != self.steps:
            self.setup.order(PUBLISH)
            self.setup.give(changed_only=self._published is not None)
            self._published = self.steps
        return self.steps

    def timeline(self) -> Timeline:
        """When each op and each transfer of the last step ran."""
        if self._executor is None:
            raise ExecutionError("no step has run yet")
        return self._executor.timeline()

    def arrivals(self) -> Mapping[str, tuple[str, ...]]:
        """For each server the parameters of the last step, in the order in which they arrived here, by the clock."""
        wires = self.setup.wires if self.setup is not None else ()
        return {
            server_name(number): tuple(
                name.removeprefix("pull:") for name, _ in wire.arrived.get(self.steps - self._since, [])
            )
            for number, wire in enumerate(wires)
        }

    def _joined(self) -> Setup | None:
        return self.setup

    def _take_leave(self) -> None:
        """Rank 0 ends the servers."""
        assert self.setup is not None
        if self._membership.rank == 0:
            self.setup.order(CLOSE)
            self._membership.is_over()
        self.setup.close()

    def _release(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _start(self, batch: Any) -> None:
        try:
            self._guard = StepGuard(self._step, self._model, self._optimizer, batch)
        except BaseException as error:
            self._membership.fail(error)
            raise
        self.setup = set_up(self._step, self._model, self._optimizer, batch, self._membership)
        try:
            self._plan(self.setup)
            self._guard.begin()
            if self._membership.coming:
                self.steps = self._since = take_part(self._membership)
        except BaseException as error:
            raise self._failed(error) from error

    def _plan(self, made: Setup) -> None:
        part = worker_part(made.captured, made.assignment)
        rates = [] if made.membership.coming else link_rates(made)
        if made.membership.rank == 0:
            plan, cycle, self.predicted_us = worker_plan(made, part, profiled(made), rates, self._order)
            self.costs, self.machine = cycle.costs, cycle.machine
            self.bounds = bounds(part.graph, self.costs, self.machine)
            tell_plan(made, plan, rates)
            made.membership.tell_agents([value.told for value, _ in made.values.values()])
        told = told_plan(made)
        self.plan = told.plan
        self._executor, self._pulls = worker_lanes(made, part, told, self._kind)

    def _let_in(self, made: Setup) -> None:
        """Between two steps, have servers let in the workers that have come again."""
        if perf_counter() < self._look_again_s:
            return
        with suppress(RuntimeError):  # the store is gone with whoever kept it: nobody can come any more
            for coming in self._ready.new():
                made.order(LET_IN, coming)
                let_in(self._membership, coming, self.steps)
        self._look_again_s = perf_counter() + LOOK_EVERY_S

    def _check(self, batch: Any) -> None:
        assert self.setup is not None
        assert self._guard is not None
        self._guard.check_call(self.setup.captured, batch)


def worker(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *,
    num_servers: int = 1,
    order: str = "auto",
    executor: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DistributedStep:
    """Train on parameter servers: this process computes gradients of its batches, servers update.

    Every process of a torchrun job calls this, or `server` if it is one of the last `num_servers` ranks. A step is as
    one process would make it of all workers' batches, with the mean of their gradients; buffers that the forward
    writes are those of rank 0. Parameters arrive in the order that lets the step end soonest. Where servers go on
    without a worker that is lost, a process of its rank that calls this takes its place.

    Args:
        step: the user's own, unchanged; it zeroes gradients, computes them, and updates.
        model: the module it trains, or a list of them.
        optimizer: the optimizer it steps, or a list. Numbers in its groups (the rate) are those of rank 0 in each step.
        num_servers: how many of the ranks are servers, the last ones.
        order: of the planner ``transfers`` (``docs/transfers.md``): ``auto``, ``tac``, ``layer``, ``random``, ...
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        timeout_s: how long another rank is waited for at the beginning; later on, one that is silent for so long is
            lost, and one that lives is waited for.

    Returns:
        A `DistributedStep`. Its first call captures the step, and on rank 0 profiles and plans it.

    Raises:
        InputError: an unknown order or executor, or torchrun has not started this process as a worker.
        PeerError: the job's store does not answer, or has a job that does not go on without this rank.

    Example:
        >>> fast = hocket.distribute.worker(step, model, optimizer, num_servers=1)  # doctest: +SKIP
        >>> with fast:  # doctest: +SKIP
        ...     for batch in my_batches:
        ...         loss = fast(batch)
        ...     fast.gather()
    """
    if order not in ORDERS:
        raise InputError(f"distribute: unknown order {order!r}; available: {', '.join(ORDERS)}")
    if executor not in EXECUTORS:
        raise InputError(f"distribute: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
    membership = come_again(join(num_servers, timeout_s))
    if not membership.is_worker:
        raise InputError(f"distribute: rank {membership.rank} is a server; call hocket.distribute.server(...) there")
    return DistributedStep(step, model, optimizer, membership, order, executor)
