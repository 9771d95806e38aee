"""Partitions against those of others: ``python -m benchmarks partition``.

Bytes moved, at a balance of 0.03 above the target: against METIS and Mt-KaHyPar (km1), each within the balance or left
out. The heaviest part: against contiguous intervals by dynamic programming, and the published optimum over all
contiguous parts. Simulated time with delays: against HEFT, which is our search without any cycle.

Eight workloads are of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020). Their files
are beside this one, unchanged (MIT licence). A tensor costs what moving it between an accelerator and host memory
takes; the host, the last device, pays nothing for that, and takes ten times as long for an op.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.bench import Save, table_of, unsaved
from hocket.errors import InputError
from hocket.ir import Machine
from hocket.planning.partition import PartitionProblem, Tensor, equal_devices, partitioned, problem_of
from hocket.planning.partition.contiguous import contiguous_start
from hocket.planning.partition.evaluation import bytes_moved, loads_us, part_cycle, simulated_us, work_of_parts
from hocket.planning.partition.partitioned import schedule
from hocket.planning.partition.starts import metis_start, mtkahypar_start
from hocket.profiling.analytic import estimate
from hocket.tracing import capture
from hocket.zoo import load

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

    It has its own number of accelerators or as many as `parts`, and with `host` the host as the last device.
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


EPSILON = 0.03
ZOO = ("mlp", "lenet", "lstm-lm", "transformer", "bert-tiny", "resnet20", "densenet40", "dcgan")


def run(
    targets: Sequence[str] = (*DYNAMIC_PROGRAMME, *ZOO),
    parts: Sequence[int] = (2, 4, 8),
    search_s: float = 2.0,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Every objective on every graph, for these numbers of equal devices. The heaviest part for the workloads' own."""
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"epsilon": EPSILON, "budget_s": search_s, "cut": rows, "load": {}, "summary": {}}
    for name in targets:
        if name in DYNAMIC_PROGRAMME:
            result["load"][name] = _load(name, search_s)
        for k in parts:
            problem = _problem(name, k)
            heaviest = problem.by_group(problem.work_us).max()
            if heaviest <= (1 + EPSILON) * problem.work_us.sum() / k:
                rows.append({"graph": name, "parts": k, **_cut(problem, search_s), **_time(problem, search_s)})
        result["summary"] = _summary(rows)
        save(result)
    return result


def _problem(name: str, parts: int) -> PartitionProblem:
    if name in DYNAMIC_PROGRAMME:
        return workload(name, host=False, parts=parts)
    job = load(name)
    graph = capture(job.step, job.model, job.optimizer, job.batch(0)).graph
    one = Machine.of(cores=1, flops_per_s=5e10, bytes_per_s=1e10)
    return problem_of(graph, estimate(graph, one), equal_devices(one, parts))


def _load(name: str, budget_s: float) -> dict[str, Any]:
    problem = workload(name)
    begin_s = perf_counter()
    found = partitioned(problem, objective="load", budget_s=budget_s, rounds=1_000_000)
    took_s = perf_counter() - begin_s
    intervals = contiguous_start(problem)
    return {
        "hocket": max(found.loads_us),
        "intervals": None if intervals is None else float(loads_us(problem, intervals.tolist()).max()),
        "published": DYNAMIC_PROGRAMME[name],
        "seconds": took_s,
    }


def _cut(problem: PartitionProblem, budget_s: float) -> dict[str, Any]:
    """With and without the others' partitions among the starts."""
    row: dict[str, Any] = {"ops": len(problem)}
    most = (1 + EPSILON) * problem.work_us.sum() / problem.num_parts * (1 + 1e-6)
    for label, maker in (("metis", metis_start), ("mtkahypar", mtkahypar_start)):
        begin_s = perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part = maker(problem, EPSILON).tolist()
        row[label] = {
            "bytes": bytes_moved(problem, part),
            "balanced": bool(work_of_parts(problem, part).max() <= most),
            "cycle": part_cycle(problem, part) is not None,
            "seconds": perf_counter() - begin_s,
        }
    options: dict[str, Any] = {"epsilon": EPSILON, "two_sided": False, "budget_s": budget_s, "rounds": 1_000_000}
    for label, peers, acyclic in (("hocket", True, False), ("alone", False, False), ("acyclic", False, True)):
        begin_s = perf_counter()
        try:
            found = partitioned(problem, acyclic=acyclic, peers=peers, **options)
        except InputError as error:
            row[label] = {"bytes": None, "why": str(error)}
            continue
        took_s = perf_counter() - begin_s
        row[label] = {"bytes": found.bytes_moved, "cycle": found.cycle is not None, "seconds": took_s}
    return row


def _time(problem: PartitionProblem, budget_s: float) -> dict[str, Any]:
    part, order, _ = schedule(problem, rounds=0, proof_ops=0)
    found = partitioned(problem, objective="time", budget_s=budget_s)
    return {
        "one_device_us": float(problem.duration_us.sum(axis=0).min()),
        "heft_us": simulated_us(problem, part.tolist(), order),
        "time_us": found.simulated_us,
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of bytes moved to the best of the others that keeps the balance, and to METIS."""
    summary: dict[str, Any] = {}
    for label in ("hocket", "alone", "acyclic"):
        best, metis = [], []
        for row in rows:
            ours = row[label]["bytes"]
            able = {peer: row[peer]["bytes"] for peer in ("metis", "mtkahypar") if row[peer]["balanced"]}
            if ours and able and min(able.values()) > 0:
                best.append(ours / min(able.values()))
                metis += [ours / able["metis"]] if "metis" in able else []
        summary[label] = {
            "graphs": len(best),
            "at_most": sum(ratio <= 1 + 1e-9 for ratio in best) / len(best) if best else None,
            "to_best": geometric_mean(best) if best else None,
            "to_metis": geometric_mean(metis) if metis else None,
        }
    return summary


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    peers = {each: f"{{{each}[bytes]:.4g}} {{{each}[balanced]}}" for each in ("metis", "mtkahypar")}
    ours = {each: f"{{{each}[bytes]:.4g}}" for each in ("hocket", "alone", "acyclic")}
    columns = {"graph": "{graph}", "parts": "{parts}", **peers, **ours}
    columns |= {"one device us": "{one_device_us:.0f}", "time": "{time_us:.0f}", "heft": "{heft_us:.0f}"}
    yield table_of("bytes moved (and within the balance), and time", columns, result["cut"])
    columns = {"workload": "{name}", **{each: f"{{{each}:.4f}}" for each in ("hocket", "intervals", "published")}}
    yield table_of("largest load", columns, result["load"])
    yield from (f"{label}: {found}" for label, found in result["summary"].items())
