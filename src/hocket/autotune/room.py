"""Memory for a step in float64, the reference of forms that are not bitwise.

Its peak is that of the plain step with float64 in place of every float: twice eager's memory in float32, beside the
training's own. A comparison must not end a training that just fits, so the forms are refused if the peak is more than
half of the free memory. Between two ops it holds less than eager's activations. Its other values lie in a file
(`hocket.tracing.spill`), so that the peak of the process stays near eager's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from hocket import native
from hocket.errors import CaptureError
from hocket.heap import trim_heap
from hocket.ir.limits import free_bytes
from hocket.planning.critical_path import serial_peak_bytes
from hocket.tracing.captured import Captured

# The share of the free memory that a step in float64 may take.
MAX_SHARE = 0.5
_LARGEST = 8
# What a step in float64 may hold between two ops, of what the plain step holds beyond its parameters and state: an op
# has its arguments and its results on top of it, and so has a plan what it keeps. Less than this is not worth a file.
LIMIT_SHARE, LEAST_LIMIT_BYTES = 0.25, 4 * 2**20


def expect_room(captured: Captured) -> None:
    """Raise a `CaptureError` if a step in float64 would take more than half of the free memory."""
    free_bytes, needed_bytes = available_bytes(), float64_peak_bytes(captured)
    if free_bytes is not None and needed_bytes > MAX_SHARE * free_bytes:
        needed, free = needed_bytes / 2**20, free_bytes / 2**20
        raise CaptureError(
            f"a step in float64 to compare with would take {needed:,.0f} MiB, and {free:,.0f} MiB are free"
        )


def float64_peak_bytes(captured: Captured) -> float:
    """Return the peak size of a step in float64. Tensors of integers count as if they grew, too."""
    values = (node.meta.get("val") for node in captured.lowered.slot_of)
    floats = (v.element_size() for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    return serial_peak_bytes(captured.graph) * _LARGEST / min(floats, default=_LARGEST)


def float64_limit_bytes(captured: Captured) -> float:
    """Return how much a step in float64 may hold between two ops."""
    graph = captured.graph
    lasting = sum(buffer.size_bytes for buffer in graph.buffers if buffer.life in ("lasting", "input"))
    return max(LEAST_LIMIT_BYTES, LIMIT_SHARE * (serial_peak_bytes(graph) - lasting))


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory available without swapping, within the limits of a container or a job, or None if unknown."""
    limit = free_bytes()
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return limit
    found = [int(line.split()[1]) * 2**10 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *([] if limit is None else [limit])], default=None)


def release_memory() -> None:
    """Give memory that lanes and the heap keep between steps back to the system."""
    native.release_kept_memory()
    trim_heap()
