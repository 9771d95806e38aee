"""The streams of one CUDA device."""

from __future__ import annotations

from dataclasses import replace

import torch

from hocket.backends.streams import StreamBackend
from hocket.execution.streams import CudaDevice
from hocket.ir import Device, Machine

__all__ = ["CudaBackend"]

# GPUs whose rates come with Hocket; see `hocket.ir.Machine.preset`.
_KNOWN = ("p100", "v100", "a100", "h200")


class CudaBackend(StreamBackend):
    """The streams of one CUDA device.

    Args:
        index: of the device.

    Raises:
        ExecutionError: there is no such device.
    """

    def __init__(self, index: int) -> None:
        device = CudaDevice(index)
        found = torch.cuda.get_device_properties(index)
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # it is static
        gpu = replace(
            _published(found.name),
            cores=found.multi_processor_count,
            memory_bytes=float(found.total_memory),
            priorities=least - greatest + 1,
        )
        super().__init__(device, Machine((gpu,), note=found.name), found.name)


def _published(name: str) -> Device:
    """Return the published rates of the GPU of this name, or none if Hocket does not have them.

    Example:
        >>> _published("Tesla P100-PCIE-16GB").launch_us, _published("some other").flops_per_s
        (5.0, None)
    """
    words = name.lower().replace("-", " ").split()
    known = next((known for known in _KNOWN if known in words), None)
    return replace(Machine.preset(known).devices[0], name="gpu0") if known else Device("gpu0", "cuda")
