"""All that a tuner has to know about a device: machine, executors, profiling, planners, synchronisation."""

from hocket.backends.base import Backend
from hocket.backends.cpu import CpuBackend
from hocket.backends.cuda import CudaBackend

__all__ = ["Backend", "CpuBackend", "CudaBackend"]
