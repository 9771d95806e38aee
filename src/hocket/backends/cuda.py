"""The streams of one CUDA device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hocket.backends.streams import StreamBackend
from hocket.execution.streams import CudaDevice
from hocket.ir import Device, Machine

# GPUs whose rates come with Hocket; see `hocket.ir.Machine.preset`.
_KNOWN = ("p100", "v100", "a100", "h100", "h200")
# Single-precision lanes of a multiprocessor by compute capability (NVIDIA, CUDA C++ Programming Guide, "Arithmetic
# Instructions"); 128 for those that are not listed.
_LANES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


class CudaBackend(StreamBackend):
    """The streams of one CUDA device.

    Raises:
        ExecutionError: there is no such device.
    """

    is_asynchronous = True

    def __init__(self, index: int) -> None:
        device = CudaDevice(index)
        found = torch.cuda.get_device_properties(index)
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
        gpu = replace(
            _published(found.name) or _by_properties(found),
            cores=found.multi_processor_count,
            memory_bytes=float(found.total_memory),
            priorities=least - greatest + 1,
        )
        super().__init__(device, Machine((gpu,), note=found.name), found.name)


def _published(name: str) -> Device | None:
    """Return the published rates of the GPU of this name, or None if Hocket does not have them.

    Example:
        >>> _published("Tesla P100-PCIE-16GB").launch_us, _published("some other")
        (5.0, None)
    """
    words = name.lower().replace("-", " ").split()
    known = next((known for known in _KNOWN if known in words), None)
    return replace(Machine.preset(known).devices[0], name="gpu0") if known else None


def _by_properties(found: Any) -> Device:
    """Rates of a GPU by its clocks and widths, as the driver states them, and the launch costs of an A100.

    Without a clock of the memory (the driver of some cards states none) the ratio of an A100's rates stands for it.
    """
    known = Machine.preset("a100").devices[0]
    lanes = _LANES.get((found.major, found.minor), 128)
    clock_hz = getattr(found, "clock_rate", 0) * 1e3 or 1.5e9
    flops_per_s = 2.0 * lanes * found.multi_processor_count * clock_hz
    # Two transfers in each cycle of the memory's clock.
    bytes_per_s = 2.0 * getattr(found, "memory_clock_rate", 0) * 1e3 * getattr(found, "memory_bus_width", 0) / 8
    if not bytes_per_s:
        assert known.bytes_per_s is not None
        assert known.flops_per_s is not None
        bytes_per_s = flops_per_s * known.bytes_per_s / known.flops_per_s
    return replace(known, name="gpu0", flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
