"""The device on which a step is planned, or why there is none."""

from __future__ import annotations

from typing import Any

import torch

from hocket.autotune.candidate import TunerConfig
from hocket.backends import Backend, CpuBackend, CudaBackend
from hocket.tracing.state import Entry, Inventory

__all__ = ["backend_of", "unplannable"]


def backend_of(config: TunerConfig) -> Backend:
    """The device that runs a schedule's plans: the one that has the parameters."""
    if config.backend is not None:
        return config.backend()
    devices = _devices_of(config.places)
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        return CudaBackend(device.index or 0)
    return CpuBackend(config.machine, config.executor, bitwise=config.numerics == "bitwise")


def unplannable(places: Inventory) -> str:
    """Why no plan can run where this step's parameters are. Empty if one can."""
    devices = _devices_of(places)
    if len(devices) > 1 or any(device.type not in ("cpu", "cuda") for device in devices):
        names = ", ".join(sorted(map(str, devices)))
        return f"its parameters are on {names}; a step is planned on CPU cores or on one GPU"
    return ""


def _devices_of(places: Inventory) -> set[torch.device]:
    """The devices of the parameters. One that is gone, or is no tensor any more, has none."""
    found = [_value(entry) for entry in places.parameters]
    return {value.device for value in found if isinstance(value, torch.Tensor)}


def _value(entry: Entry) -> Any:
    try:
        return entry.get()
    except LookupError:
        return None
