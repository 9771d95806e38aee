"""What runs a rank's part of a step: an executor, with channels to the ranks that it exchanges values with."""

from __future__ import annotations

import torch

from hocket.distributed.channels import PullChannel
from hocket.distributed.stages.joined import link_name, plan_of_rank
from hocket.distributed.stages.stage_job import StageJob
from hocket.distributed.wire import Wire
from hocket.execution import executor
from hocket.execution.channels import Channel, Done

__all__ = ["RunningPart"]


class RunningPart:
    """The part of a rank, ready to be run; all ranks make theirs at the same time.

    Args:
        job: as it has been divided.
        kind: of executor.
        steps: how many had run before.

    Attributes:
        executor: called with a batch, it runs a step.
    """

    def __init__(self, job: StageJob, kind: str, steps: int) -> None:
        self._arriving: list[PullChannel] = []
        self._since = steps
        channels: dict[str, Channel] = {}
        here = job.peers.rank
        for rank, wire in job.wires.items():
            lasting = [each.recv for each in job.crossings if each.lasts and (each.home, each.to) == (rank, here)]
            self._arriving.append(PullChannel(wire, lasting))
            channels[link_name(rank, here)] = self._arriving[-1]
            channels[link_name(here, rank)] = StageSends(wire, job, rank)
        self.executor = executor(job.part, plan_of_rank(job.plan, here), kind=kind, channels=channels)
        job.first_values()

    def synchronize(self, steps: int) -> None:
        """Wait until nothing is on its way, after so many steps; raises `PeerError` if a rank is gone."""
        for channel in self._arriving:
            channel.wait(steps - self._since + 1)


class StageSends:
    """Values on their way to one other rank; what outlives the step is for its next one."""

    runs_ahead = False
    runs_behind = False

    def __init__(self, wire: Wire, job: StageJob, to: int) -> None:
        self._wire = wire
        self._sent = {each.send: each for each in job.crossings if (each.home, each.to) == (job.peers.rank, to)}

    def begin(self, op: str, tensor: torch.Tensor, epoch: int, done: Done) -> None:
        each = self._sent[op]
        self._wire.send(each.recv, tensor, epoch + 1 if each.lasts else epoch, done)
