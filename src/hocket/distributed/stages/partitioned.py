"""`hocket.distribute.stages`: one training step over the ranks of a job, each of which runs its part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hocket.arguments import packed, spreading
from hocket.distributed.channels import PullChannel
from hocket.distributed.membership import DEFAULT_TIMEOUT_S, job_store
from hocket.distributed.plans import LATENCY_US, PROFILE_RUNS
from hocket.distributed.setup import GATHER, STEP
from hocket.distributed.stages.checkpoint import load_part_state, part_state
from hocket.distributed.stages.crossings import Borders, rank_name
from hocket.distributed.stages.job import StageJob, begun_job
from hocket.distributed.stages.joined import joined_plan, link_name, plan_of_rank, ranks_of
from hocket.distributed.stages.on_meta import standing_for_cpu
from hocket.distributed.stages.peers import Peers
from hocket.distributed.watched import StepGuard
from hocket.distributed.wire import Wire
from hocket.errors import ExecutionError, InputError, PeerError
from hocket.execution import EXECUTORS, executor
from hocket.execution.base import Executor
from hocket.execution.channels import Channel, Done
from hocket.heap import trim_heap
from hocket.ir import Costs, Device, Link, Machine, Plan, Timeline
from hocket.planning.partition import OBJECTIVES, Partition, partitioned, problem_of
from hocket.profiling import profile
from hocket.tracing.captured import Captured

__all__ = ["PartitionedStep", "stages"]


class PartitionedStep:
    """A rank's part of a training step; call it as you would call the step. See `stages`.

    Attributes:
        steps: how many have run.
        plan: of all ranks and channels, from the first call on; made by rank 0.
        part: what this rank runs of the captured step.
        partition: how rank 0 divided it, there, unless that was given.
        costs, machine: what rank 0 made it from, there.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        peers: Peers,
        given: Plan | Mapping[str, int] | None,
        objective: str,
        epsilon: float | None,
        budget_s: float,
        seed: int,
        kind: str,
    ) -> None:
        self.steps = 0
        self.plan: Plan | None = None
        self.part: Captured | None = None
        self.partition: Partition | None = None
        self.costs: Costs | None = None
        self.machine: Machine | None = None
        self._step, self._model, self._optimizer = spreading(step), model, optimizer
        self._peers, self._given, self._kind = peers, given, kind
        self._search = {"objective": objective, "epsilon": epsilon, "budget_s": budget_s, "seed": seed}
        self._job: StageJob | None = None
        self._guard: StepGuard | None = None
        self._executor: Executor | None = None
        self._arriving: list[PullChannel] = []
        self._failure: PeerError | None = None
        self._gathered = self._closed = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; every rank calls it with the same batch, and gets what the step returns.

        Raises:
            PeerError: a rank is gone, silent or trains something else; names it.
            StaleCaptureError: the batch, or a mode of a module, is not as in the first call; nothing was run.
        """
        if self._closed or self._failure is not None:
            raise self._failure or ExecutionError("distribute: the step was closed")
        batch = packed(args, kwargs)
        if self._job is None:
            self._start(batch)
        assert self._job is not None
        assert self._guard is not None
        assert self._executor is not None
        if self._gathered:
            self._job.memory.keep(self._job.kept)
            self._gathered = False
        self._guard.check_call(self._job.captured, batch)
        try:
            self._job.agree(STEP)
            result = self._executor(batch)
            if self._job.random_home is not None:
                self._job.share_random_state(self._job.random_home)
        except BaseException as error:
            raise self._failed(error) from error
        self.steps += 1
        return result

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 plans and gathers."""
        return self._peers.rank

    def synchronize(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            PeerError: a rank is gone.
        """
        try:
            for channel in self._arriving:
                channel.wait(self.steps + 1)
        except PeerError as error:
            raise self._failed(error) from error

    def gather(self) -> None:
        """Make model and optimizer of rank 0 what they are where one process trains; save their ``state_dict()`` then.

        Every rank calls it. What rank 0 does not use in a step has its memory until the next one. Raises as
        `synchronize`.
        """
        self.synchronize()
        if self._job is None:
            return
        try:
            self._job.agree(GATHER)
            if self.rank != 0:
                self._job.homed_at(self.rank).send(self._job.wires[0])
            else:
                self._job.memory.restore()
                self._gathered = True
            for rank, wire in self._job.wires.items() if self.rank == 0 else ():
                self._job.homed_at(rank).receive(wire)
        except PeerError as error:
            raise self._failed(error) from error

    def state_dict(self) -> dict[str, Any]:
        """What this rank has of model and optimizer: ``torch.distributed.checkpoint.save({"train": fast}, ...)``.

        Every rank calls it, between the same two steps, and all of them together have the whole. Tensors are the live
        ones. Keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``.

        Raises:
            ExecutionError: before the first step (load into model and optimizer themselves), or without a process
                group, where each rank would save its part as if it were all there is.
            InputError: several models or optimizers.
            PeerError: a rank is gone, or does something else.
        """
        if self._job is None:
            raise ExecutionError("distribute: before the first step, save and load model and optimizer themselves")
        if not torch.distributed.is_initialized():
            raise ExecutionError(
                "distribute: torch.distributed.checkpoint needs a process group to save parts of one checkpoint; call "
                "torch.distributed.init_process_group('gloo')"
            )
        self.synchronize()
        try:
            self._job.agree(GATHER)
        except PeerError as error:
            raise self._failed(error) from error
        return part_state(self._model, self._optimizer, self._job.entries, self._job.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gives, as ``torch.distributed.checkpoint.load({"train": fast}, ...)`` does.

        Every rank calls it, between the same two steps; each needs what its own part uses.

        Raises:
            ExecutionError: before the first step.
            InputError: something is missing, or not like what is here; names it, and nothing has changed.
        """
        if self._job is None:
            raise ExecutionError("distribute: before the first step, save and load model and optimizer themselves")
        self.synchronize()
        load_part_state(self._model, self._optimizer, self._job.entries, self._job.kept, state)

    def timeline(self) -> Timeline:
        """When each op and each transfer of this rank's last step ran."""
        if self._executor is None:
            raise ExecutionError("no step has run yet")
        return self._executor.timeline()

    def close(self) -> None:
        """Take leave of the other ranks."""
        if self._closed:
            return
        if self._job is not None and self._failure is None:
            self.synchronize()
            self._job.close()
        if self._executor is not None:
            self._executor.close()
        self._closed = True

    def __enter__(self) -> PartitionedStep:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self._job is not None and self._failure is None:
            self._failed(error)
        self.close()

    def _start(self, batch: Any) -> None:
        try:
            with standing_for_cpu(self._model, self._optimizer):
                self._guard = StepGuard(self._step, self._model, self._optimizer, batch)
        except BaseException as error:
            self._peers.fail(error)
            raise
        job = begun_job(self._step, self._model, self._optimizer, batch, self._peers, self._planned)
        self._job, self.plan, self.part = job, job.plan, job.part
        try:
            channels: dict[str, Channel] = {}
            for rank, wire in job.wires.items():
                lasting = [e.recv for e in job.crossings if e.lasts and (e.home, e.to) == (rank, self.rank)]
                self._arriving.append(PullChannel(wire, lasting))
                channels[link_name(rank, self.rank)] = self._arriving[-1]
                channels[link_name(self.rank, rank)] = StageSends(wire, job, rank)
            self._executor = executor(job.part, plan_of_rank(job.plan, self.rank), kind=self._kind, channels=channels)
            job.first_values()
            self._guard.begin()
            trim_heap()  # of what the capture of the whole step took
        except BaseException as error:
            raise self._failed(error) from error

    def _planned(self, captured: Captured, borders: Borders, bytes_per_s: float) -> Plan:
        """The plan of all ranks, on rank 0."""
        num_ranks, threads = self._peers.num_workers, torch.get_num_threads()
        order: tuple[str, ...] = captured.graph.order
        if self._given is None:
            self.machine = machine_of_ranks(num_ranks, threads, bytes_per_s)
            self.costs = profile(captured, widths=[threads], runs=PROFILE_RUNS, machine=Machine.of(cores=threads))
            problem = problem_of(
                captured.graph, self.costs, self.machine, together=[ops for ops, _ in borders.together]
            )
            self.partition = partitioned(problem, **self._search)  # type: ignore[arg-type]
            order = self.partition.names_in_order
            rank_of = dict(zip(problem.names, self.partition.part, strict=True))
        elif isinstance(self._given, Plan):
            rank_of = ranks_of(self._given)
        else:
            rank_of = dict(self._given)
        borders.check(rank_of, num_ranks)
        return joined_plan(captured.graph, order, rank_of, borders.crossings(rank_of, num_ranks), threads)

    def _failed(self, error: BaseException) -> PeerError:
        assert self._job is not None
        if self._failure is None:
            self._failure = self._job.failed(error)
        return self._failure


class StageSends:
    """Values on their way to one other rank; what outlives the step is for its next one."""

    runs_ahead = False

    def __init__(self, wire: Wire, job: StageJob, to: int) -> None:
        self._wire = wire
        self._sent = {each.send: each for each in job.crossings if (each.home, each.to) == (job.peers.rank, to)}

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        each = self._sent[op]
        self._wire.send(each.recv, tensor, epoch + 1 if each.lasts else epoch, done)


def machine_of_ranks(num_ranks: int, threads: int, bytes_per_s: float) -> Machine:
    """Equal devices, as many as ranks, and a link each way between any two.

    Example:
        >>> [link.channel for link in machine_of_ranks(2, 1, 1e9).links]
        ['rank0->rank1', 'rank1->rank0']
    """
    names = [rank_name(rank) for rank in range(num_ranks)]
    links = [Link(one, other, bytes_per_s, LATENCY_US) for one in names for other in names if one != other]
    return Machine(tuple(Device(name, cores=threads) for name in names), tuple(links))


def stages(
    step: Callable[..., Any],
    model: Any,
    optimizer: Any,
    *,
    partition: Plan | Mapping[str, int] | None = None,
    objective: str = "load",
    epsilon: float | None = None,
    budget_s: float = 5.0,
    seed: int = 0,
    executor: str = "auto",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> PartitionedStep:
    """Train one model over all ranks of a torchrun job: each runs its part of the captured step.

    Every rank calls this, and then the result with the same batches. Ops go to ranks by the partitioner (Tavarageri et
    al., "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support"). Each parameter,
    running statistic and optimizer state has one home, where it is updated; other ranks that read it get a copy in
    each step. The step computes what it computes in one process, to the bit where ranks use as many threads.

    Args:
        step: the user's own, unchanged; it zeroes gradients, computes them, and updates.
        model: the module it trains, or a list of them. The parameters and buffers of rank 0 count; on other ranks the
            model may be on the meta device, and gets memory for what its part uses.
        optimizer: the optimizer it steps, or a list. State and rates are those of rank 0.
        partition: a rank for each op, or a plan of `hocket partition` with a lane for each rank; on rank 0. None: ops
            are profiled and partitioned.
        objective: of the partitioner: ``load``, ``time`` or ``cut`` (``docs/partition.md``).
        epsilon: how far the work of a rank may be from its share.
        budget_s: how long a partition is searched for.
        seed: of that search.
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        timeout_s: how long another rank is waited for, in a step as well.

    Returns:
        A `PartitionedStep`. Its first call captures the step, and on rank 0 divides it.

    Raises:
        InputError: an unknown objective or executor, or torchrun has not started this process.
        PeerError: the job's store does not answer.

    Example:
        >>> fast = hocket.distribute.stages(step, model, optimizer)  # doctest: +SKIP
        >>> with fast:  # doctest: +SKIP
        ...     for batch in my_batches:  # the same on every rank
        ...         loss = fast(batch)
        ...     fast.gather()
    """
    if objective not in OBJECTIVES[:3]:
        raise InputError(f"distribute: unknown objective {objective!r}; one of {', '.join(OBJECTIVES[:3])}")
    if executor not in EXECUTORS:
        raise InputError(f"distribute: unknown executor {executor!r}; available: {', '.join(EXECUTORS)}")
    store, rank, world = job_store(timeout_s)
    peers = Peers(rank, world, 0, store, timeout_s)
    return PartitionedStep(step, model, optimizer, peers, partition, objective, epsilon, budget_s, seed, executor)
