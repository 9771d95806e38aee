"""Parameter servers: `worker` and `server` train, in processes that torchrun starts; an `agent` may come and go."""

from hocket.distributed.agent import Agent, agent
from hocket.distributed.server import server
from hocket.distributed.worker import DistributedStep, worker

__all__ = ["Agent", "DistributedStep", "agent", "server", "worker"]
