"""Parameter servers on `torch.distributed`: `worker` and `server`, for processes that torchrun starts."""

from hocket.distributed.server import server
from hocket.distributed.worker import DistributedStep, worker

__all__ = ["DistributedStep", "server", "worker"]
