"""`hocket.distribute.worker`: a training step whose parameters and updates are on servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from time import perf_counter
from typing import Any

from hocket.arguments import packed
from hocket.distributed.channels import PullChannel
from hocket.distributed.job import CLOSE, GATHER, PUBLISH, REJOIN, STEP, JobStep, ending_on_error
from hocket.distributed.membership import DEFAULT_TIMEOUT_S, Membership
from hocket.distributed.parts import server_name, worker_part
from hocket.distributed.plans import announce_plan, announced_plan, link_rates, profiled, worker_executor, worker_plan
from hocket.distributed.rejoin import READY, Announcements, admit, wait_until_admitted
from hocket.distributed.setup import ShardedJob, joined_as, set_up
from hocket.errors import ExecutionError
from hocket.execution import EXECUTORS
from hocket.planning import Bounds, bounds
from hocket.planning.transfers import ORDERS

# The interval in which rank 0 looks for rejoining workers: each query of the store takes time of a step.
LOOK_EVERY_S = 0.1


class DistributedStep(JobStep[ShardedJob]):
    """A worker's training step. Call it as you would call the step. See `worker`.

    Attributes:
        steps: number of steps that the job has run, including those before this worker rejoined.
        plan: plan of all workers, made by rank 0.
        costs, machine: input of the planner, at rank 0.
        bounds: bounds on the step time for any order, at rank 0.
        predicted_us: predicted time of a step in a row of steps, at rank 0. Servers are assumed as fast as rank 0.
    """

    def __init__(
        self, step: Callable[..., Any], model: Any, optimizer: Any, membership: Membership, order: str, executor: str
    ) -> None:
        super().__init__(step, model, optimizer, membership, executor)
        self.predicted_us = 0.0
        self.bounds: Bounds | None = None
        self._order = order
        self._pulls: list[PullChannel] = []
        self._published: int | None = None
        self._since = 0
        self._ready = Announcements(membership.store, READY)
        self._look_again_s = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on this worker's batch, and return what the step returns.

        Results that only servers know (the norm of all gradients) are None. Parameters of the next step arrive after
        this one: see `synchronize`.

        Raises:
            PeerError: a rank is gone, silent or trains something else, and is named.
            StaleCaptureError: the batch, a mode of a module, or a number that the step branches on is not as in the
                first call. Nothing was run, and the next call may go on.
        """
        batch = packed(args, kwargs)
        job = self._begun(batch)
        assert self._guard is not None
        assert self._executor is not None
        self._guard.check_call(job.captured, batch)
        frame = self._executor.begin(batch)  # before any command is sent, since the executor may refuse the batch
        with ending_on_error(self._failed):
            if self.rank == 0:
                self._admit(job)
                job.send_command(STEP)
            self._executor.run(frame)
            result = self._executor.captured.finish(frame)
        self.steps += 1
        return result

    def start(self, *args: Any, **kwargs: Any) -> int:
        """Join the job without running a step. The first call does so otherwise, and further calls change nothing.

        Args:
            args: a batch like those of the steps, so that the step can be captured.
            kwargs: keyword arguments of the step.

        Returns:
            The number of steps that the job has run: 0, unless this worker takes the place of a lost one. Its own
            first step is the next one.

        Raises:
            PeerError: as a call.
        """
        self._begun(packed(args, kwargs))
        return self.steps

    @property
    def setup(self) -> ShardedJob | None:
        """The job, from the first call on."""
        return self._job

    def synchronize(self) -> None:
        """Wait until all parameters are those after the last step, before the model is evaluated or saved.

        Raises:
            PeerError: a server is gone.
        """
        with self._exchanging():
            for channel in self._pulls:
                channel.wait(self.steps - self._since + 1)

    def gather(self) -> None:
        """Give model and optimizer the state of training in one process. Only rank 0 gets the optimizer's state.

        Save their ``state_dict()`` afterwards as usual. Every rank may call it. Raises as `synchronize`.
        """
        self._check_open()
        self.synchronize()
        if self.rank == 0 and self._job is not None:
            with self._exchanging():
                self._job.send_command(GATHER)
                for number, wire in self._job.wires.items():
                    self._job.shard(number).receive(wire)

    def publish(self) -> int:
        """Publish the parameters and buffers after the last step as one version for agents.

        Every rank may call it. Rank 0 has the servers copy their values, and goes on.

        Returns:
            The number of the version, which is the number of steps so far.

        Raises:
            ExecutionError: no step has run yet, or the step was closed.
            PeerError: a server is gone.
        """
        self._check_open()
        if self._job is None:
            raise ExecutionError("distribute: there is nothing to publish before the first step")
        if self.rank == 0 and self._published != self.steps:
            self._job.send_command(PUBLISH)
            self._job.give(changed_only=self._published is not None)
            self._published = self.steps
        return self.steps

    def arrivals(self) -> Mapping[str, tuple[str, ...]]:
        """For each server the parameters of the last step in the order in which they arrived here, by the clock."""
        step = self.steps - self._since
        return {
            server_name(number): tuple(op.removeprefix("pull:") for op in wire.arrived.get(step, []))
            for number, wire in (self._job.wires.items() if self._job is not None else ())
        }

    def _join(self, batch: Any) -> ShardedJob:
        return set_up(self._step, self._model, self._optimizer, batch, self._membership)

    def _prepare(self, job: ShardedJob) -> None:
        membership, part = self._membership, worker_part(job.captured, job.assignment)
        rates = [] if membership.rejoin else link_rates(job)
        if membership.rank == 0:
            plan, cycle, self.predicted_us = worker_plan(job, part, profiled(job.captured), rates, self._order)
            self.costs, self.machine = cycle.costs, cycle.machine
            self.bounds = bounds(part.graph, self.costs, self.machine)
            announce_plan(job, plan, rates)
            membership.announce_to_agents([value.as_list for value, _ in job.values.values()])
        announced = announced_plan(job)
        self.plan = announced.plan
        self._executor, self._pulls = worker_executor(job, part, announced, self._kind)
        if membership.rejoin:
            self.steps = self._since = wait_until_admitted(membership)

    def _end(self, job: ShardedJob) -> None:
        if self.rank == 0:
            job.send_command(CLOSE)
            self._membership.end()

    def _admit(self, job: ShardedJob) -> None:
        """Have servers admit workers that are ready to rejoin, between two steps."""
        if perf_counter() < self._look_again_s:
            return
        with suppress(RuntimeError):  # the store's host has exited, so no worker can rejoin
            for rejoin in self._ready.new():
                job.send_command(REJOIN, rejoin)
                admit(self._membership, rejoin, self.steps)
        self._look_again_s = perf_counter() + LOOK_EVERY_S


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
    """Train on parameter servers: this process computes gradients of its batches, and servers update the parameters.

    Every process of a torchrun job calls this, or `server` if it is one of the last `num_servers` ranks. A step
    computes what one process would compute on the batches of all workers, with the mean of their gradients. Buffers
    that the forward writes are those of rank 0. Parameters arrive in the order that lets the step end soonest. If
    servers go on without a lost worker, a process of its rank that calls this takes its place.

    Args:
        step: the user's own step, unchanged. It zeroes gradients, computes them, and updates.
        model: the module that is trained, or a list of modules.
        optimizer: the optimizer, or a list. Numbers in its groups (the rate) are those of rank 0 in each step.
        num_servers: how many of the ranks are servers, the last ones.
        order: order of the planner ``transfers`` (``docs/transfers.md``): ``auto``, ``tac``, ``layer``, ``random``, ...
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        timeout_s: how long another rank is waited for at the start. Later on, a rank that is silent for so long is
            lost, and one that lives is waited for.

    Returns:
        A `DistributedStep`. Its first call captures the step, and at rank 0 profiles and plans it.

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
    options = {"executor": (executor, EXECUTORS), "order": (order, ORDERS)}
    membership = joined_as("worker", num_servers, timeout_s, **options)
    return DistributedStep(step, model, optimizer, membership, order, executor)
