"""Streams by critical path against what others do: ``python -m benchmarks critical-path --device sim``.

The networks and batch sizes are those of TurboDL's experiments (section 4). Contenders:

- ``eager``: one stream, each op launched by the host;
- ``graph``: one stream, launched as one CUDA graph;
- ``layers``: the tasks of a layer side by side, a barrier between layers: Caffe with cuDNN, the paper's baseline;
- ``asynchronous``: no barrier, streams by layer path and task;
- ``full``: and priorities; both launched like the baseline, and like the paper's without a limit on memory;
- ``full_graph``: the same as one CUDA graph;
- ``kept_graph``: and within 1.1 times eager's memory, which is what the planner does when nobody says otherwise.

``sim`` simulates a GPU that need not be there; ``cuda`` and ``cpu`` measure on devices that are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.critical_path.measured import on_cores, on_gpu
from benchmarks.critical_path.simulated import simulated
from hocket.errors import InputError

__all__ = ["DEVICES", "run"]

DEVICES: Mapping[str, Callable[..., dict[str, Any]]] = {"sim": simulated, "cpu": on_cores, "cuda": on_gpu}


def run(*, device: str = "sim", quick: bool = False, **options: Any) -> dict[str, Any]:
    """Run the experiment on `device`. See `benchmarks.critical_path.simulated` for the fields of the result.

    Raises:
        InputError: this version has no experiment for that device.
    """
    if device not in DEVICES:
        raise InputError(
            f"bench critical-path: --device {device} is not part of this version; available: {', '.join(DEVICES)}"
        )
    return {"device": device, **DEVICES[device](quick=quick, **options)}
