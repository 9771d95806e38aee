r"""Host memory between a GPU and a wire: gloo reads and writes memory of the CPU alone.

All threads of a rank launch on the default stream of a device, and so do these copies. What a value was made by, and
what it is read by, so come before and after its copy without further events. Only the host has to wait for bytes::

    stream   ... makes g | g to host | event ...              ... last reader of w | w to device | first reader of w
    wire                                     `--> bytes of g leave       bytes of w arrive --'

The host memory is pinned: CUDA copies from and to other memory at a time that no event shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hocket.errors import InputError
from hocket.execution.streams import CudaDevice, StreamDevice
from hocket.tracing.state import as_tuple

TRAVELLING = ("cpu", "cuda")


def device_of(tensor: torch.Tensor) -> StreamDevice | None:
    """The device of a tensor, or None if it is in memory of the CPU."""
    return _cuda(tensor.device.index) if tensor.is_cuda else None


def devices_of(model: Any) -> list[StreamDevice]:
    """The devices of a model, or of several, sorted by their index."""
    tensors = [t for each in as_tuple(model, nn.Module, "model") for t in (*each.parameters(), *each.buffers())]
    found = dict.fromkeys(device for tensor in tensors if (device := device_of(tensor)) is not None)
    return sorted(found, key=lambda device: device.index or 0)


def check_default_streams(devices: Sequence[StreamDevice]) -> None:
    """Refuse another current stream of these devices than the default: it has no order with the copies."""
    if any(device.current() != device.default() for device in devices):
        raise InputError(
            "distribute: ranks run on the default stream of their GPU, and another one is current here; call outside "
            "of torch.cuda.stream(...)"
        )


def memory_for(tensors: Sequence[torch.Tensor], size_bytes: int) -> torch.Tensor:
    """Allocate host memory for the bytes of these tensors."""
    device = next((found for tensor in tensors if (found := device_of(tensor)) is not None), None)
    return torch.empty(size_bytes, dtype=torch.uint8) if device is None else device.pinned(size_bytes)


def to_host(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> tuple[Callable[[], None], ...]:
    """Begin to copy tensors into places of host memory, and return waits after which the bytes are there."""
    waits: dict[StreamDevice, Callable[[], None]] = {}
    for tensor, place in pairs:
        device = device_of(tensor)
        if device is None:
            _copy_bytes(tensor, place)
            continue
        stream, event = device.default(), device.event()
        device.launch(stream, partial(_copy_bytes, tensor, place))
        device.record(event, stream)
        waits[device] = partial(device.wait_on_host, event)  # of one stream the last event implies the others
    return tuple(waits.values())


def from_host(place: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy bytes into a tensor. What is launched from now on reads the new value."""
    device = device_of(tensor)
    values = place.view(tensor.dtype).view(tensor.shape)

    def copy() -> None:
        tensor.detach().copy_(values, non_blocking=True)

    if device is None:
        copy()
    else:
        device.launch(device.default(), copy)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes. One of a single element may have any stride."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def random_state(devices: Sequence[StreamDevice]) -> torch.Tensor:
    """The state of the CPU's random generator, and those of these devices."""
    of_devices = [torch.cuda.get_rng_state(device.index) for device in devices if device.index is not None]
    return torch.cat([torch.get_rng_state(), *of_devices])


def set_random_state(devices: Sequence[StreamDevice], state: torch.Tensor) -> None:
    """Set the states that `random_state` returned here, or at a rank with as many devices."""
    size = torch.get_rng_state().numel()
    torch.set_rng_state(state[:size])
    indices = [device.index for device in devices if device.index is not None]
    for index, of_device in zip(indices, state[size:].chunk(max(1, len(indices))), strict=False):
        torch.cuda.set_rng_state(of_device, index)


def _copy_bytes(tensor: torch.Tensor, place: torch.Tensor) -> None:
    place.copy_(bytes_of(tensor.detach().contiguous()), non_blocking=True)


@cache
def _cuda(index: int) -> StreamDevice:
    return CudaDevice(index)
