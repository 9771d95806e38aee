"""Eight workloads of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), as problems.

Their files are beside this one, unchanged (MIT licence). A tensor costs what moving it between an accelerator and host
memory takes; the host, the last device, pays nothing for that, and takes ten times as long for an op.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hocket.planning.partition import PartitionProblem, Tensor

FOLDER = Path(__file__).parent / "workloads"

# The largest load under the best contiguous parts, by running the authors' dynamic programme.
DYNAMIC_PROGRAMME = {
    "Layer-bert24_training": 41.7458,
    "Layer-gnmt_inference": 32.9107,
    "Layer-gnmt_training": 107.004,
    "Layer-resnet50_inference": 33.7747,
    "Operator-bert_l-3_inference": 27.9186,
    "Operator-bert_l-3_training": 65.3031,
    "Operator-bert_l-6_inference": 29.5795,
    "Operator-resnet50_inference": 124.349,
}


def workload(name: str, *, host: bool = True, parts: int | None = None) -> PartitionProblem:
    """One of the eight, its times taken for microseconds and its costs of 1 for 2**20 bytes.

    Args:
        name: a key of `DYNAMIC_PROGRAMME`.
        host: with the host as the last device.
        parts: so many accelerators instead of the file's number.
    """
    document = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    nodes = document["nodes"]
    accelerators = document["maxFPGAs"] if parts is None else parts
    at = {node["id"]: position for position, node in enumerate(nodes)}
    takes = np.array([[node["fpgaLatency"]] * accelerators + [node["cpuLatency"]] * host for node in nodes])
    readers: dict[int, tuple[float, dict[int, None]]] = {}
    for edge in document["edges"]:
        readers.setdefault(at[edge["sourceId"]], (edge["cost"], {}))[1][at[edge["destId"]]] = None
    classes: dict[object, int] = {}
    group = [classes.setdefault(node.get("colorClass", ("alone", node["id"])), len(classes)) for node in nodes]
    return PartitionProblem(
        tuple(node["name"] for node in nodes),
        takes,
        tuple(Tensor(source, tuple(found), cost * 2**20, cost) for source, (cost, found) in readers.items()),
        [(at[edge["sourceId"]], at[edge["destId"]]) for edge in document["edges"]],
        (*(f"accelerator{number}" for number in range(accelerators)), *(["host"] if host else [])),
        np.array([node["size"] for node in nodes], float),
        np.array([document["maxSizePerFPGA"]] * accelerators + [np.inf] * host),
        np.array(group, np.int32),
        np.array([bool(node["isBackwardNode"]) for node in nodes]),
        np.array([1.0] * accelerators + [0.0] * host),
    )
