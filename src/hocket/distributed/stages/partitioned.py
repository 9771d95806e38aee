"""`hocket.distribute.stages`: one training step over the ranks of a job, each of which runs its part of the graph."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from hocket.adaptation import DeviceShare
from hocket.arguments import packed
from hocket.distributed.job import GATHER, LOAD, SAVE, STEP, JobStep, StepGuard, check_choice, ending_on_error
from hocket.distributed.membership import DEFAULT_TIMEOUT_S, Membership, join
from hocket.distributed.rejoin import rejoined
from hocket.distributed.stages.checkpoint import LOADED, check_alike, digests_of, part_state, part_to_load
from hocket.distributed.stages.memory import standing_for_cpu
from hocket.distributed.stages.planner import StagePlanner, limits_of
from hocket.distributed.stages.rebalancing import Migration, Rebalancer, rebalanced
from hocket.distributed.stages.stage_job import RunningPart, StageJob
from hocket.distributed.stages.start import begun_job
from hocket.errors import ExecutionError, InputError, StaleCaptureError
from hocket.heap import trim_heap
from hocket.ir import Plan
from hocket.planning.partition import OBJECTIVES, Partition
from hocket.tracing.captured import Captured

log = logging.getLogger(__name__)


class PartitionedStep(JobStep[StageJob]):
    """A rank's part of a training step. Call it as you would call the step. See `stages`.

    Attributes:
        steps: number of steps that have run.
        plan: plan of all ranks and channels, made by rank 0, from the first call on.
        part: part of this rank.
        partition: partition that rank 0 has found, at rank 0, unless one was given.
        costs, machine: input of the planner, at rank 0.
        peaks_bytes: predicted peak memory of each rank in a step, at rank 0.
        migrations: all migrations so far, the same at all ranks but for their durations.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        membership: Membership,
        planner: StagePlanner,
        executor: str,
        rebalance: int,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(step, model, optimizer, membership, executor)
        self.part: Captured | None = None
        self.partition: Partition | None = None
        self.peaks_bytes: tuple[float, ...] = ()
        self.migrations: tuple[Migration, ...] = ()
        self._planner, self._every_steps, self._weights = planner, rebalance, weights
        self._running: RunningPart | None = None
        self._rebalancer: Rebalancer | None = None
        self._gathered: dict[str, tuple[torch.Tensor, int]] | None = None  # values of other ranks, with their versions
        self._turn = threading.RLock()  # held by a step and by a checkpoint: neither sees half of a migration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step. Every rank calls it with the same batch, and gets the result of the step.

        Raises:
            PeerError: a rank is gone, silent or trains something else, and is named.
            StaleCaptureError: the batch, or a mode of a module, is not as in the first call. Nothing was run.
        """
        with self._turn:
            batch = packed(args, kwargs)
            job = self._begun(batch)
            assert self._guard is not None
            if self._gathered is not None:
                self._check_gathered(job, self._gathered)
                job.memory.keep(job.kept)
                self._gathered = None
            self._guard.check_call(job.captured, batch)
            with ending_on_error(self._failed):
                job.agree(STEP)
                self._rebalance()
                result = self._run(batch)
            self.steps += 1
            return result

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """Measurements of all ranks at their last decision whether ops move, empty before."""
        return self._rebalancer.shares if self._rebalancer is not None else ()

    def synchronize(self) -> None:
        """Wait until no transfer is under way.

        Raises:
            PeerError: a rank is gone.
        """
        with self._turn, self._exchanging():
            if self._running is not None:
                self._running.synchronize(self.steps)

    def gather(self) -> None:
        """Give model and optimizer of rank 0 the state of training in one process. Save their ``state_dict()`` then.

        Every rank calls it. Values that rank 0 does not use in a step keep their memory until the next one. Raises as
        `synchronize`.
        """
        with self._turn:
            self._check_open()
            self.synchronize()
            if (job := self._job) is None:
                return
            with self._exchanging():
                job.agree(GATHER)
                if self.rank != 0:
                    job.homed_at(self.rank).send(job.wires[0])
                    return
                job.memory.restore()
                for rank, wire in job.wires.items():
                    job.homed_at(rank).receive(wire)
                entries = {name: job.entries[name].get() for name, home in job.home_of.items() if home != self.rank}
                self._gathered = {name: (tensor, tensor._version) for name, tensor in entries.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank, for ``torch.distributed.checkpoint.save({"train": fast}, ...)``.

        Every rank calls it between the same two steps, and the states of all ranks make up the whole. Tensors are the
        live ones. Keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``.

        Raises:
            ExecutionError: no step has run (load into model and optimizer themselves), or there is no process group,
                without which each rank would save its part as the whole.
            InputError: two optimizers keep state of one parameter.
            PeerError: a rank is gone, or does something else.
        """
        job = self._stepped()
        if not torch.distributed.is_initialized():
            raise ExecutionError(
                "distribute: torch.distributed.checkpoint needs a process group to save parts of one checkpoint; call "
                "torch.distributed.init_process_group('gloo')"
            )
        with self._turn:
            self.synchronize()
            job = self._stepped()  # ops may have moved meanwhile
            with self._exchanging():
                job.agree(SAVE)
            return part_state(self._model, self._optimizer, job.entries, job.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`, as ``torch.distributed.checkpoint.load({"train": fast}, ...)`` does.

        Every rank calls it between the same two steps, with the values that its own part uses. All ranks load what they
        are given, or none does, except for values that torch has loaded in place.

        Raises:
            ExecutionError: no step has run.
            InputError: a value is missing or has another shape or dtype, another rank cannot load, or two ranks were
                given different values of one checkpoint. Raised on every rank.
            PeerError: a rank is gone, or does something else.
        """
        self._stepped()
        with self._turn:
            self.synchronize()
            job, part = self._stepped(), None
            error: Exception | None = None
            try:
                part = part_to_load(self._model, self._optimizer, job.entries, job.kept, state)
            except Exception as found:  # noqa: BLE001 (raised below, after the other ranks know)
                error = found
            with self._exchanging():
                job.agree(LOAD)
                mine = torch.tensor(digests_of(job.entries, state, fails=error is not None))
                digests = {rank: values.tolist() for rank, values in job.exchanged(LOADED, mine).items()}
            if error is not None:
                raise error
            check_alike(digests, list(job.entries))
            assert part is not None
            part.take()

    def __str__(self) -> str:
        """The number of ops of each rank, and all migrations so far."""
        if self.plan is None:
            return "a step over several ranks, of which none has run yet"
        ops = [f"{lane.name} {len(lane.ops)} ops" for lane in self.plan.lanes if lane.kind == "cores"]
        return "\n".join([f"{self.steps} steps, {', '.join(ops)}", *map(str, self.migrations)])

    def _check_gathered(self, job: StageJob, gathered: Mapping[str, tuple[torch.Tensor, int]]) -> None:
        for name, (tensor, version) in gathered.items():
            now = job.entries[name].get()
            if now is not tensor or now._version != version:
                raise StaleCaptureError(
                    f"distribute: {name!r} was written at rank 0 after gather(), and rank {job.home_of[name]} trains "
                    "it; load a state at all ranks, by load_state_dict of this step or in a new job"
                )

    def _stepped(self) -> StageJob:
        self._check_open()
        if self._job is None:
            raise ExecutionError("distribute: before the first step, save and load model and optimizer themselves")
        return self._job

    def _watched(self, batch: Any) -> StepGuard:
        with standing_for_cpu(self._model, self._optimizer):
            return super()._watched(batch)

    def _join(self, batch: Any) -> StageJob:
        plan, every_steps = self._planner.plan, self._every_steps
        return begun_job(
            self._step, self._model, self._optimizer, batch, self._membership, plan, every_steps, self._weights
        )

    def _prepare(self, job: StageJob) -> None:
        self.partition, self.costs = self._planner.partition, self._planner.costs
        self.machine, self.peaks_bytes = self._planner.machine, self._planner.peaks_bytes
        if self._every_steps:
            self._rebalancer = Rebalancer(self._planner.rules(job), self.rank, self._every_steps)
        self._use(job)
        trim_heap()  # the capture of the whole step leaves free memory

    def _use(self, job: StageJob) -> None:
        """Run this part of the job from now on."""
        self._job, self.plan, self.part = job, job.plan, job.part
        self._running = RunningPart(job, self._kind, self.steps)
        self._executor = self._running.executor

    def _run(self, batch: Any) -> Any:
        assert self._job is not None
        assert self._executor is not None
        result = self._executor(batch)
        if self._job.random_home is not None:
            self._job.share_random_state(self._job.random_home)
        if self._rebalancer is not None:
            self._rebalancer.note(self.steps + 1, self._executor.timeline)
        return result

    def _rebalance(self) -> None:
        """Move ops between two steps if that is decided. Every rank calls it at the same time."""
        rebalancer, job = self._rebalancer, self._job
        if rebalancer is None or job is None or not rebalancer.is_due(self.steps):
            return
        assert self._guard is not None
        began = perf_counter()
        job, migration = rebalanced(rebalancer, job, self.steps, self._stop)
        if job is not self._job:
            self._use(job)
            self._guard.begin()
            rebalancer.begin(self.steps)
        if migration is not None:
            migration = replace(migration, took_us=(perf_counter() - began) * 1e6)
            self.migrations = (*self.migrations, migration)
            log.info("%s: %s", self._membership.me, migration)

    def _stop(self) -> None:
        self.synchronize()
        if self._executor is not None:
            self._executor.close()


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
    rebalance: int = 0,
    memory_bytes: float | Sequence[float] | None = None,
    weights: str | os.PathLike[str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> PartitionedStep:
    """Train one model over all ranks of a torchrun job: each runs its part of the captured step.

    Every rank calls this, and then the result with the same batches. Ops go to ranks by the partitioner (Tavarageri et
    al., "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support"). Each parameter,
    running statistic and optimizer state has one home, where it is updated. Other ranks that read it get a copy in each
    step. The result is that of one process, to the bit if ranks use as many threads.

    Args:
        step: the user's own step, unchanged. It zeroes gradients, computes them, and updates.
        model: the module that is trained, or a list of modules. All ranks take the parameters and buffers of rank 0. At
            other ranks the model may be on the meta device, and gets memory for its part.
        optimizer: the optimizer, or a list. All ranks take state and rates of rank 0.
        partition: a rank for each op, or a plan of `hocket partition` with a lane for each rank, at rank 0. None: ops
            are profiled and partitioned.
        objective: objective of the partitioner: ``load``, ``time`` or ``cut`` (``docs/partition.md``).
        epsilon: allowed deviation of a rank's work from its share.
        budget_s: duration of the search for a partition.
        seed: seed of that search.
        executor: ``native`` lanes, ``python`` threads, or ``auto``.
        rebalance: number of steps after which ranks compare how busy they are, and ops may move from an overloaded rank
            to another one, with their parameters and state (``docs/partition.md``). 0: never.
        memory_bytes: upper limit of a rank's memory in a step, or one for each rank: parameters, gradients, optimizer
            state, activations and copies of exchanged values. It holds for the predicted memory. At rank 0. None: 1.3
            times an equal share of the memory of one process, if such a partition is found.
        weights: a safetensors file, the index of several, or a folder with either, with the values of all parameters
            and buffers. Each rank reads those of its part, and the model may be on the meta device at every rank.
            Optimizers begin without state, and costs are estimated, since no rank has all values. None: all ranks take
            the values of rank 0.
        timeout_s: how long another rank is waited for at the start. Later on, a rank that is silent for so long is
            lost, and one that lives is waited for.

    Returns:
        A `PartitionedStep`. Its first call captures the step, and at rank 0 divides it.

    Raises:
        InputError: an unknown objective or executor, a negative `rebalance`, a wrong memory limit, `rebalance` together
            with a memory limit or with `weights`, or torchrun has not started this process.
        PeerError: the job's store does not answer.

    Example:
        >>> fast = hocket.distribute.stages(step, model, optimizer)  # doctest: +SKIP
        >>> with fast:  # doctest: +SKIP
        ...     for batch in my_batches:  # the same on every rank
        ...         loss = fast(batch)
        ...     fast.gather()
    """
    check_choice("objective", objective, OBJECTIVES[:3])
    check_choice("executor", executor)
    if not isinstance(rebalance, int) or rebalance < 0:
        raise InputError(f"distribute: expected rebalance to be a number of steps, or 0 for never, got {rebalance!r}")
    if not isinstance(partition, (Plan, Mapping, type(None))):
        raise InputError(
            "distribute: expected partition to be a hocket.Plan or a rank for each op by name, "
            f"got a value of type {type(partition).__name__}; read a file by hocket.Plan.parse(Path(file).read_text())"
        )
    if rebalance and memory_bytes is not None:
        raise InputError(
            "distribute: memory_bytes limits only the first partition; it cannot be combined with rebalance="
        )
    if rebalance and weights is not None:
        raise InputError(
            "distribute: rebalance= needs profiling, which needs the full weights; it cannot be combined with weights="
        )
    membership = rejoined(join(0, timeout_s))
    limits = limits_of(memory_bytes, membership.num_workers)
    search = {"objective": objective, "epsilon": epsilon, "budget_s": budget_s, "seed": seed}
    planner = StagePlanner(partition, search, profiles=rebalance > 0, limits=limits, estimates=weights is not None)
    return PartitionedStep(step, model, optimizer, membership, planner, executor, rebalance, weights)
