"""Where this process is: on which machine, and whether it is the one that Hocket was loaded in.

What another machine is described by can be planned for and simulated, but not run on.
"""

from __future__ import annotations

import functools
import logging
import os
import sys

from hocket.errors import ExecutionError
from hocket.ir import Device, Lane, Machine, hardware_threads, names_threads

log = logging.getLogger(__name__)

_LOADED_IN = os.getpid()


def unavailable_reason(device: Device) -> str:
    """Return the reason why this process cannot run on `device`. Empty if it can, or if the device is no CPU.

    A device without CPU numbers stands for any cores of this process, as many as it has.
    """
    if device.kind != "cpu":
        return ""
    if device.cpus:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
        lacking = sorted({cpu for core in device.cpus for cpu in core} - allowed)
        if lacking:
            numbers = ", ".join(map(str, lacking[:8])) + (", ..." if len(lacking) > 8 else "")
            return f"device {device.name!r} has CPUs {numbers}, which this process may not use; see Machine.here()"
        return ""
    if device.cores > 1 and device.cores > (cores := Machine.here().cores):
        return (
            f"device {device.name!r} has {device.cores} cores, and this process may use {cores}; a plan for such a "
            "machine can be simulated, not run here"
        )
    return ""


def cpus_of(lane: Lane, machine: Machine | None) -> set[int]:
    """The hardware threads a lane is pinned to: the first of each of its cores, and siblings only when it is wider."""
    if machine is None:
        return set()
    device = machine.by_name.get(lane.device)
    if device is None:
        names = ", ".join(machine.by_name)
        raise ExecutionError(f"lane {lane.name!r} runs on device {lane.device!r}; the machine has only {names}")
    if not device.cpus and (problem := unavailable_reason(device)):
        raise ExecutionError(f"lane {lane.name!r}: {problem}")
    if not device.cpus or not lane.cores:
        return set()
    places = [divmod(thread, device.cores) for thread in hardware_threads(lane, device)]
    lacking = [core for sibling, core in places if sibling >= len(device.cpus[core])]
    if lacking and names_threads(lane, device):
        raise ExecutionError(f"lane {lane.name!r} is pinned to a hardware thread that core {lacking[0]} lacks")
    wanted = {cpu for sibling, core in places for cpu in device.cpus[core][sibling : sibling + 1]}
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else wanted
    if not wanted <= allowed:
        missing = ", ".join(map(str, sorted(wanted - allowed)))
        raise ExecutionError(f"lane {lane.name!r} is pinned to CPUs {missing}, which this process may not use")
    return wanted


def forked() -> bool:
    """Return True if this process was forked after Hocket was loaded.

    OpenMP's threads do not come along into the child, and a thread that had a team of them waits for it for ever. So
    wide ops may not run on the thread that forked. A new thread gets a team of its own.
    """
    return os.getpid() != _LOADED_IN


@functools.cache
def advise_spinning() -> None:
    """Say once what has to be in the environment before torch is loaded, and is not."""
    if sys.platform.startswith("linux") and not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(os.environ):
        log.warning(
            "hocket: set GOMP_SPINCOUNT=10000 in the environment before torch is loaded, so that idle OpenMP threads "
            "do not spin for milliseconds on cores that other lanes need"
        )
