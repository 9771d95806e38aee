"""All that a tuner has to know about a device: machine, executors, profiling, planners, synchronisation."""

from hocket.backends.base import ROUNDING, Backend
from hocket.backends.cpu import CpuBackend
from hocket.backends.simulated import SimulatedBackend, SimulatedClock
from hocket.backends.streams import CudaBackend, StreamBackend

__all__ = ["ROUNDING", "Backend", "CpuBackend", "CudaBackend", "SimulatedBackend", "SimulatedClock", "StreamBackend"]
