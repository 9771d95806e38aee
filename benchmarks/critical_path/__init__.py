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

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Save, ratios, unsaved
from benchmarks.critical_path.measured import on_cores, on_gpu
from benchmarks.critical_path.simulated import simulated
from hocket.cli.console import UsageError, table


def run(
    *,
    device: str = "sim",
    quick: bool = False,
    machine: str = "p100",
    budget_s: float | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Run the experiment on `device`, or simulate it on `machine`. The fields of the result are those of each."""
    if device != "sim":
        measured = on_cores if device == "cpu" else on_gpu
        return {"device": device, **measured(quick=quick, budget_s=budget_s, save=save)}
    if budget_s is not None:
        raise UsageError("--budget-s is for --device cpu and cuda; a simulation is as long as it is")
    return {"device": device, **simulated(quick=quick, machine=machine)}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    if result["device"] != "sim":
        labels = tuple(dict.fromkeys(label for row in result["networks"].values() for label in row["over_eager"]))
        rows = [(name, *ratios(row["over_eager"], labels)) for name, row in result["networks"].items()]
        where = result.get("gpu") or f"{result['cores']} cores"
        yield table(f"speedup over eager, measured on {where}", ("network/batch", *labels), rows)
        return
    labels = tuple(result["geomean"])
    measured = [item for group in ("networks", "depths", "depths_at_equal_batch") for item in result[group].items()]
    measured += [(name, row) for name, sizes in result["batches"].items() for row in sizes.values()]
    rows = [
        (
            *(name, str(row["batch_size"]), *ratios(row["speedup"], labels, 3)),
            *(f"{row['to_bound']:.2f}", str(row["streams"])),
        )
        for name, row in measured
    ]
    rows.append(("geometric mean", "paper's", *ratios(result["geomean"], labels, 3), "", ""))
    title = f"speedup over layer by layer, {result['machine']} simulated (the paper's mean of six, measured: 1.30)"
    yield table(title, ("network", "batch", *labels, "full to bound", "streams"), rows)
    if "sensitivity" in result:
        changed = [(label, f"{mean:.3f}") for label, mean in result["sensitivity"].items()]
        yield table("the six networks' mean speedup of full, one assumption changed", ("", "mean"), changed)
