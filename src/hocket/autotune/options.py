"""The options of a schedule: the values that each may have, and the device that runs its plans."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from hocket.autotune.candidate import TunerConfig
from hocket.backends import Backend, CpuBackend, CudaBackend
from hocket.errors import InputError
from hocket.execution import EXECUTORS, unavailable_reason
from hocket.execution.streams import CudaDevice
from hocket.ir import Machine, Plan
from hocket.planning import planners
from hocket.tracing.standing import value_now
from hocket.tracing.state import Inventory

log = logging.getLogger(__name__)

# The results that a plan may have: eager's bits, those of other numbers of threads, or results as close to float64.
NUMERICS = ("bitwise", "rounding", "close")


def check_options(
    step: Any,
    machine: Any,
    *,
    planner: str = "auto",
    plan: Any = None,
    numerics: str = "bitwise",
    executor: str = "auto",
    on_progress: Any = None,
    **_: Any,
) -> None:
    """Raise an `InputError` that names the argument of `hocket.schedule` which cannot be used."""
    if not callable(step):
        raise InputError(f"schedule: expected a step to call, got {type(step).__name__}")
    if not isinstance(machine, Machine):
        raise InputError(f"schedule: machine: expected one such as hocket.Machine.of(cores=1), got {machine!r}")
    if on_progress is not None and not callable(on_progress):
        raise InputError(f"schedule: on_progress: expected a function, got {on_progress!r}")
    if plan is not None and (planner != "auto" or not isinstance(plan, Plan)):
        raise InputError("schedule: plan: expected a hocket.Plan and no planner beside it")
    known = {"planner": ("auto", *planners()), "numerics": NUMERICS, "executor": EXECUTORS}
    for option, given in (("planner", planner), ("numerics", numerics), ("executor", executor)):
        if given not in known[option]:
            raise InputError(f"schedule: unknown {option} {given!r}; available: {', '.join(known[option])}")
    for device in machine.devices:
        if problem := unavailable_reason(device):
            raise InputError(f"schedule: machine: {problem}")


def backend_of(config: TunerConfig) -> Backend:
    """The device that runs a schedule's plans: the one that has the parameters."""
    if config.backend is not None:
        return config.backend()
    devices = _devices_of(config.places)
    if len(devices) == 1 and (device := next(iter(devices))).type == "cuda":
        index = device.index or 0
        if index not in config.gpus:
            config.gpus[index] = CudaDevice(index)
        return CudaBackend(config.gpus[index])
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
    return {value.device for value in map(value_now, places.parameters) if isinstance(value, torch.Tensor)}


def until_it_raises(callback: Callable[[str, int], object]) -> Callable[[str, int], None]:
    """Make a callback that calls the user's until that raises, which is logged once: training goes on."""
    is_over = False

    def call(stage: str, num_steps: int) -> None:
        nonlocal is_over
        if is_over:
            return
        try:
            callback(stage, num_steps)
        except Exception as error:  # noqa: BLE001
            is_over = True
            log.warning("hocket: on_progress raised %s: %s; it is not called again", type(error).__name__, error)

    return call
