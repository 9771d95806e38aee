"""Lanes as CUDA streams: one host thread launches all ops, streams run them side by side, events order them.

`StreamLanes` launches every op in every step and is the reference. `GraphedLanes` captures one launch in a CUDA graph
and replays it.
"""

from __future__ import annotations

from hocket.execution.streams.device import CudaDevice, StreamDevice
from hocket.execution.streams.graphs import GraphedLanes, as_launched
from hocket.execution.streams.lanes import StreamLanes

__all__ = ["CudaDevice", "GraphedLanes", "StreamDevice", "StreamLanes", "as_launched"]
