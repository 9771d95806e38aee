"""Jobs of several processes that torchrun starts.

`worker` and `server` train with parameter servers, and an `agent` may join and leave such a job. `stages` divides one
training step between ranks.
"""

from hocket.distributed.agent import Agent, agent
from hocket.distributed.server import server
from hocket.distributed.stages.partitioned import PartitionedStep, stages
from hocket.distributed.worker import DistributedStep, worker

__all__ = ["Agent", "DistributedStep", "PartitionedStep", "agent", "server", "stages", "worker"]
