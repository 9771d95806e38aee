"""Streams by critical path on TurboDL's networks: ``python -m benchmarks critical-path --device sim``.

- ``eager``: one stream, each op launched by the host; ``graph``: launched as one CUDA graph;
- ``layers``: the tasks of a layer side by side, a barrier between layers: Caffe with cuDNN, the paper's baseline;
- ``asynchronous``: no barrier, streams by layer path and task; ``full``: and priorities; all launched like the
  baseline, and like the paper's without a limit on memory;
- ``full_graph``: the same as one CUDA graph; ``kept_graph``: and within 1.1 times eager's memory, as by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.bench import Save, columns_of, table_of, unsaved
from benchmarks.critical_path.measured import on_cores, on_gpu
from benchmarks.critical_path.simulated import simulated
from hocket.cli.console import UsageError


def run(
    *, device: str = "sim", quick: bool = False, budget_s: float | None = None, save: Save = unsaved
) -> dict[str, Any]:
    """Run the experiment on `device`, or simulate it. The fields of the result are those of each."""
    if device != "sim":
        measured = on_cores if device == "cpu" else on_gpu
        return {"device": device, **measured(quick=quick, budget_s=budget_s, save=save)}
    if budget_s is not None:
        raise UsageError("--budget-s is for --device cpu and cuda; a simulation is as long as it is")
    return {"device": device, **simulated(quick=quick)}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    if result["device"] != "sim":
        labels = dict.fromkeys(label for row in result["networks"].values() for label in row["over_eager"])
        where = result.get("gpu") or f"{result['cores']} cores"
        columns = {"network/batch": "{name}", **columns_of("over_eager", labels)}
        yield table_of(f"speedup over eager, measured on {where}", columns, result["networks"])
        return
    groups = [
        *(result[group] for group in ("networks", "depths", "depths_at_equal_batch")),
        *result["batches"].values(),
    ]
    rows = [{"name": name, **row} for group in groups for name, row in group.items()]
    rows.append({"name": "geometric mean", "speedup": result["geomean"]})
    columns = {"network": "{name}", "batch": "{batch_size}", **columns_of("speedup", result["geomean"], ".3f")}
    columns |= {"full to bound": "{to_bound:.2f}", "streams": "{streams}"}
    title = f"speedup over layer by layer, {result['machine']} simulated (the paper's mean of six, measured: 1.30)"
    yield table_of(title, columns, rows)
    if "sensitivity" in result:
        changed = [{"if": label, "mean": mean} for label, mean in result["sensitivity"].items()]
        columns = {"if": "{if}", "mean": "{mean:.3f}"}
        yield table_of("the six networks' mean speedup of full, one assumption changed", columns, changed)
