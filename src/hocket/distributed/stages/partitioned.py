"""`PartitionedStep`: one training step over the ranks of a job, each of which runs its part of the graph."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch

from hocket.adaptation import DeviceShare
from hocket.arguments import packed, spreading
from hocket.distributed.job_step import JobStep
from hocket.distributed.setup import GATHER, LOAD, SAVE, STEP
from hocket.distributed.stages.checkpoint import LOADED, check_alike, part_state, part_to_load, told_of
from hocket.distributed.stages.job import begun_job
from hocket.distributed.stages.migration import Migration
from hocket.distributed.stages.on_meta import standing_for_cpu
from hocket.distributed.stages.peers import Peers
from hocket.distributed.stages.planner import StagePlanner
from hocket.distributed.stages.rebalancing import Rebalancer, rebalanced
from hocket.distributed.stages.running import RunningPart
from hocket.distributed.stages.stage_job import StageJob
from hocket.distributed.watched import StepGuard
from hocket.errors import ExecutionError
from hocket.heap import trim_heap
from hocket.ir import Costs, Machine, Plan, Timeline
from hocket.planning.partition import Partition
from hocket.tracing.captured import Captured

__all__ = ["PartitionedStep"]

log = logging.getLogger(__name__)


class PartitionedStep(JobStep):
    """A rank's part of a training step; call it as you would call the step. See `stages`.

    Attributes:
        steps: how many have run.
        plan: of all ranks and channels, from the first call on; made by rank 0.
        part: what this rank runs of the captured step.
        partition: how rank 0 divided it, there, unless that was given.
        costs, machine: what rank 0 has profiled, there.
        peaks_bytes: how much each rank holds at the most in a step, as rank 0 predicts it, there.
        migrations: what has moved between ranks since, and why; alike on all ranks but for how long it took.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: Any,
        optimizer: Any,
        peers: Peers,
        planner: StagePlanner,
        kind: str,
        rebalance: int,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self.steps = 0
        self.plan: Plan | None = None
        self.part: Captured | None = None
        self.partition: Partition | None = None
        self.costs: Costs | None = None
        self.machine: Machine | None = None
        self.peaks_bytes: tuple[float, ...] = ()
        self.migrations: tuple[Migration, ...] = ()
        self._step, self._model, self._optimizer = spreading(step), model, optimizer
        self._peers, self._planner, self._kind = peers, planner, kind
        self._job: StageJob | None = None
        self._guard: StepGuard | None = None
        self._running: RunningPart | None = None
        self._every_steps = rebalance
        self._weights = weights
        self._rebalancer: Rebalancer | None = None
        self._gathered = False
        self._turn = threading.RLock()  # of a step, and of a checkpoint: neither sees half of a migration

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; every rank calls it with the same batch, and gets what the step returns.

        Raises:
            PeerError: a rank is gone, silent or trains something else; names it.
            StaleCaptureError: the batch, or a mode of a module, is not as in the first call; nothing was run.
        """
        with self._turn:
            self._check_open()
            batch = packed(args, kwargs)
            if self._job is None:
                self._start(batch)
            assert self._job is not None
            assert self._guard is not None
            if self._gathered:
                self._job.memory.keep(self._job.kept)
                self._gathered = False
            self._guard.check_call(self._job.captured, batch)
            try:
                self._job.agree(STEP)
                self._rebalance()
                result = self._run(batch)
            except BaseException as error:
                raise self._failed(error) from error
            self.steps += 1
            return result

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 plans and gathers."""
        return self._peers.rank

    @property
    def shares(self) -> tuple[DeviceShare, ...]:
        """What all ranks measured of themselves when they last looked whether ops should move; empty before."""
        return self._rebalancer.shares if self._rebalancer is not None else ()

    def synchronize(self) -> None:
        """Wait until nothing is on its way.

        Raises:
            PeerError: a rank is gone.
        """
        with self._turn, self._exchanging():
            if self._running is not None:
                self._running.synchronize(self.steps)

    def gather(self) -> None:
        """Make model and optimizer of rank 0 what they are where one process trains; save their ``state_dict()`` then.

        Every rank calls it. What rank 0 does not use in a step has its memory until the next one. Raises as
        `synchronize`.
        """
        with self._turn:
            self.synchronize()
            if self._job is None:
                return
            with self._exchanging():
                self._job.agree(GATHER)
                if self.rank != 0:
                    self._job.homed_at(self.rank).send(self._job.wires[0])
                else:
                    self._job.memory.restore()
                    self._gathered = True
                for rank, wire in self._job.wires.items() if self.rank == 0 else ():
                    self._job.homed_at(rank).receive(wire)

    def state_dict(self) -> dict[str, Any]:
        """What this rank has of model and optimizer: ``torch.distributed.checkpoint.save({"train": fast}, ...)``.

        Every rank calls it, between the same two steps, and all of them together have the whole. Tensors are the live
        ones. Keys are those of ``torch.distributed.checkpoint.state_dict.get_state_dict``.

        Raises:
            ExecutionError: before the first step (load into model and optimizer themselves), or without a process
                group, where each rank would save its part as if it were all there is.
            InputError: two optimizers keep state of one parameter.
            PeerError: a rank is gone, or does something else.
        """
        if self._job is None:
            raise ExecutionError("distribute: before the first step, save and load model and optimizer themselves")
        if not torch.distributed.is_initialized():
            raise ExecutionError(
                "distribute: torch.distributed.checkpoint needs a process group to save parts of one checkpoint; call "
                "torch.distributed.init_process_group('gloo')"
            )
        with self._turn:
            self.synchronize()
            with self._exchanging():
                self._job.agree(SAVE)
            return part_state(self._model, self._optimizer, self._job.entries, self._job.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gives, as ``torch.distributed.checkpoint.load({"train": fast}, ...)`` does.

        Every rank calls it, between the same two steps; each needs what its own part uses. All ranks take what they are
        given, or none does (but for what was loaded in place, as torch does).

        Raises:
            ExecutionError: before the first step.
            InputError: something is missing, or not like what is here, or another rank cannot load, or has been given
                another checkpoint, as far as two ranks were given the same; names it, on every rank.
            PeerError: a rank is gone, or does something else.
        """
        if self._job is None:
            raise ExecutionError("distribute: before the first step, save and load model and optimizer themselves")
        with self._turn:
            self.synchronize()
            entries, part = self._job.entries, None
            error: Exception | None = None
            try:
                part = part_to_load(self._model, self._optimizer, entries, self._job.kept, state)
            except Exception as found:  # noqa: BLE001 (raised below: the other ranks have to know first)
                error = found
            with self._exchanging():
                self._job.agree(LOAD)
                mine = torch.tensor(told_of(entries, state, fails=error is not None))
                told = {rank: values.tolist() for rank, values in self._job.exchanged(LOADED, mine).items()}
            if error is not None:
                raise error
            check_alike(told, list(entries))
            assert part is not None
            part.take()

    def timeline(self) -> Timeline:
        """When each op and each transfer of this rank's last step ran."""
        if self._running is None:
            raise ExecutionError("no step has run yet")
        return self._running.executor.timeline()

    def __str__(self) -> str:
        """Who runs how much of the step, and all migrations so far."""
        if self.plan is None:
            return "a step over several ranks, of which none has run yet"
        ops = [f"{lane.name} {len(lane.ops)} ops" for lane in self.plan.lanes if lane.kind == "cores"]
        return "\n".join([f"{self.steps} steps, {', '.join(ops)}", *map(str, self.migrations)])

    def _joined(self) -> StageJob | None:
        return self._job

    def _take_leave(self) -> None:
        assert self._job is not None
        with self._exchanging():
            self._job.close()

    def _release(self) -> None:
        if self._running is not None:
            self._running.executor.close()

    def _start(self, batch: Any) -> None:
        try:
            with standing_for_cpu(self._model, self._optimizer):
                self._guard = StepGuard(self._step, self._model, self._optimizer, batch)
        except BaseException as error:
            self._peers.fail(error)
            raise
        plan, every_steps = self._planner.plan, self._every_steps
        job = begun_job(self._step, self._model, self._optimizer, batch, self._peers, plan, every_steps, self._weights)
        self._job, self.plan, self.part = job, job.plan, job.part
        self.partition, self.costs = self._planner.partition, self._planner.costs
        self.machine, self.peaks_bytes = self._planner.machine, self._planner.peaks_bytes
        try:
            if self._every_steps:
                self._rebalancer = Rebalancer(self._planner.rules(job), self.rank, self._every_steps)
            self._running = RunningPart(job, self._kind, self.steps)
            self._guard.begin()
            trim_heap()  # of what the capture of the whole step took
        except BaseException as error:
            raise self._failed(error) from error

    def _run(self, batch: Any) -> Any:
        assert self._job is not None
        assert self._running is not None
        result = self._running.executor(batch)
        if self._job.random_home is not None:
            self._job.share_random_state(self._job.random_home)
        if self._rebalancer is not None:
            self._rebalancer.note(self.steps + 1, self._running.executor.timeline)
        return result

    def _rebalance(self) -> None:
        """Between two steps: have ops change rank where that is decided; every rank does so at the same time."""
        look, job = self._rebalancer, self._job
        if look is None or job is None or not look.is_due(self.steps):
            return
        assert self._guard is not None
        began = perf_counter()
        job, migration = rebalanced(look, job, self.steps, self._stop)
        if job is not self._job:
            self._job, self.plan, self.part = job, job.plan, job.part
            self._running = RunningPart(job, self._kind, self.steps)
            self._guard.begin()
            look.begin(self.steps)
        if migration is not None:
            migration = replace(migration, took_us=(perf_counter() - began) * 1e6)
            self.migrations = (*self.migrations, migration)
            log.info("%s: %s", self._peers.name(self.rank), migration)

    def _stop(self) -> None:
        self.synchronize()
        if self._running is not None:
            self._running.executor.close()
