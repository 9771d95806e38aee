"""The experiment on a simulated GPU: captured networks, kernel times from the analytic model, published constants.

Each network is captured as it is trained (on ``meta`` tensors, so no memory is needed), its convolutions' backward
split into activation, weight and bias gradients. docs/critical-path.md tells what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import geometric_mean
from time import process_time
from typing import Any

from hocket import zoo
from hocket.checking import hazards
from hocket.ir import Costs, Graph, Machine, Plan, synchronisation
from hocket.planning import bounds, plan
from hocket.planning.critical_path import METHODS
from hocket.profiling.gpu import Fit, GpuModel, estimate_gpu
from hocket.simulation import simulate
from hocket.tracing.capturing import capture_step

# TurboDL, section 4.2: the batch of each network in Fig. 7, and what was measured over Caffe with cuDNN on a P100.
PAPER = {"lenet": 64, "alexnet": 128, "caffenet": 256, "vgg16": 100, "googlenet": 32, "resnet50": 32}
PAPER_SPEEDUP = {"lenet": 1.38, "alexnet": 1.21, "caffenet": 1.31, "vgg16": 1.27, "googlenet": 1.30, "resnet50": 1.35}

# Fig. 9 and the speedups the paper gives with it; its batches shrink with depth, so one batch for all is tried, too.
DEPTHS = {"resnet18": 32, "resnet34": 32, "resnet50": 32, "resnet101": 28, "resnet152": 18}
EQUAL_BATCH = 8
PAPER_DEPTH_SPEEDUP = {"resnet18": 1.27, "resnet34": 1.29, "resnet50": 1.35, "resnet101": 1.38, "resnet152": 1.40}

# Fig. 8 asks what the batch size does; its bars' sizes are not in the text, but for VGG-16's 100 to 400.
BATCHES = {
    "lenet": (16, 64, 256, 1024),
    "alexnet": (8, 32, 128, 512),
    "caffenet": (16, 64, 256, 1024),
    "vgg16": (4, 25, 100, 400),
    "googlenet": (2, 8, 32, 128),
    "resnet50": (2, 8, 32, 128),
}


@dataclass(frozen=True)
class Setting:
    """A GPU and a model of its kernels.

    Kernels leave the part `left` of what they fill to others, and a barrier between layers takes `barrier_us` beyond
    its events, with the host in it for instance.
    """

    machine: Machine
    model: GpuModel = field(default_factory=GpuModel)
    left: float = 0.0
    barrier_us: float = 0.0

    def costs(self, graph: Graph) -> Costs:
        found = estimate_gpu(graph, self.machine, model=self.model)
        shares = {
            op: {device: share._replace(multiprocessors=share.multiprocessors * (1 - self.left))}
            for op, row in found.shares.items()
            for device, share in row.items()
        }
        return replace(found, shares=shares)


def simulated(*, quick: bool = False) -> dict[str, Any]:
    """The whole experiment, or with `quick` the six networks at the paper's batch sizes and ResNet-18 and 152."""
    setting = Setting(Machine.preset("p100"))

    @cache
    def row(name: str, batch: int) -> dict[str, Any]:
        return measure(graph_of(name, batch), setting, batch)

    networks = {name: row(name, batch) for name, batch in PAPER.items()}
    ends = {name: batch for name, batch in DEPTHS.items() if not quick or name in ("resnet18", "resnet152")}
    batches = {} if quick else BATCHES
    result: dict[str, Any] = {
        "machine": "p100",
        "note": setting.machine.note,
        "networks": networks,
        "depths": {name: row(name, batch) for name, batch in ends.items()},
        "depths_at_equal_batch": {name: row(name, EQUAL_BATCH) for name in ends},
        "batches": {name: {f"{name}/{batch}": row(name, batch) for batch in sizes} for name, sizes in batches.items()},
        "geomean": {
            label: geometric_mean(row["speedup"][label] for row in networks.values())
            for label in networks["lenet"]["speedup"]
        },
        "paper": {"networks": PAPER_SPEEDUP, "geomean": 1.30, "depths": PAPER_DEPTH_SPEEDUP},
    }
    if not quick:
        result["sensitivity"] = sensitivity({name: graph_of(name, batch) for name, batch in PAPER.items()}, setting)
    return result


@cache
def graph_of(name: str, batch_size: int) -> Graph:
    """The captured graph of a network."""
    job = zoo.load(name, batch_size=batch_size, num_batches=1, device="meta")
    return capture_step(job.step, job.model, job.optimizer, job.batch(0)).graph


def measure(graph: Graph, setting: Setting, batch_size: int) -> dict[str, Any]:
    """All contenders on one network: milliseconds, speedups over ``layers``, and figures of single plans.

    ``lower_bound_ms`` is the longest chain, or all multiprocessor time, whichever is longer. ``to_bound``, ``streams``,
    ``events`` and ``edges_across`` (streams) are of the full plan, ``planning_s`` and ``peak_ratio`` (over eager's) of
    the one that keeps the memory limit.
    """
    costs = setting.costs(graph)
    plans = {
        label: _plan(graph, costs, setting.machine, METHODS[:count], "eager")
        for label, count in (("eager", 0), ("layers", 1), ("asynchronous", 2), ("full", 3))
    }
    plans["graph"] = plans["eager"]
    plans["full_graph"] = _plan(graph, costs, setting.machine, METHODS, "graph")
    begin = process_time()
    kept = plans["kept_graph"] = plan(graph, costs, setting.machine, planner="critical-path")
    planning_s = process_time() - begin
    full = plans["full"]
    hazards(graph, full)
    takes_us = {label: _takes_us(graph, made, costs, setting.machine, label) for label, made in plans.items()}
    lower_us = bounds(graph, costs, setting.machine).lower_us
    return {
        "ops": len(graph),
        "batch_size": batch_size,
        "ms": {label: us / 1e3 for label, us in takes_us.items()},
        "speedup": {label: takes_us["layers"] / us for label, us in takes_us.items()},
        "lower_bound_ms": lower_us / 1e3,
        "to_bound": takes_us["full"] / lower_us,
        "streams": len(full.lanes),
        "events": sum(map(len, synchronisation(graph, full).waits.values())),
        "edges_across": sum(full.lane_of[edge.src] is not full.lane_of[edge.dst] for edge in graph.edges),
        "planning_s": planning_s,
        "peak_ratio": kept.peak_bytes / kept.eager_peak_bytes if kept.peak_bytes and kept.eager_peak_bytes else 1.0,
    }


def sensitivity(graphs: dict[str, Graph], setting: Setting) -> dict[str, Any]:
    """The six networks' mean speedup of ``full`` over ``layers``, with one assumption changed at a time."""
    found = {}
    for label, changed in _changes(setting):
        ratios = []
        for graph in graphs.values():
            costs = changed.costs(graph)
            layers, full = (
                _plan(graph, costs, changed.machine, methods, "eager") for methods in (METHODS[:1], METHODS)
            )
            layers_us = _takes_us(graph, layers, costs, changed.machine, "layers")
            barriers_us = changed.barrier_us * len(layers.after)  # ops that wait for a whole layer on several streams
            ratios.append((layers_us + barriers_us) / _takes_us(graph, full, costs, changed.machine, "full"))
        found[label] = geometric_mean(ratios)
    return found


def _changes(setting: Setting) -> Iterator[tuple[str, Setting]]:
    model, machine = setting.model, setting.machine
    yield "as it is", setting

    def faster(fit: Fit, factor: float) -> Fit:
        return fit._replace(at_50=fit.at_50 * factor)

    for label, factor in (("products 1.5 times as fast", 1.5), ("products 1.5 times as slow", 1 / 1.5)):
        fits = {role: faster(getattr(model, role), factor) for role in ("forward", "activation_grad", "weight_grad")}
        yield label, replace(setting, model=replace(model, most=model.most * factor, **fits))  # type: ignore[arg-type]
    for label, factor in (("weight gradients 1.4 times as fast", 1.4), ("weight gradients 1.4 times as slow", 1 / 1.4)):
        yield label, replace(setting, model=replace(model, weight_grad=faster(model.weight_grad, factor)))
    for blocks in (1, 4):
        yield f"{blocks} blocks a multiprocessor", replace(setting, model=replace(model, blocks_per_core=blocks))
    for threads in (1, 16):
        yield f"{threads} results a thread", replace(setting, model=replace(model, results_per_thread=threads))
    for part in (0.5, 0.9):
        yield f"bandwidth at {part:.0%}", replace(setting, model=replace(model, bandwidth_efficiency=part))
    for part in (0.1, 0.25, 0.5):
        yield f"kernels leave {part:.0%} of what they fill to others", replace(setting, left=part)
    for us in (5.0, 20.0, 50.0):
        yield f"a barrier takes {us:g} us", replace(setting, barrier_us=us)
    yield "25% to others, and a barrier of 20 us", replace(setting, left=0.25, barrier_us=20.0)
    for us in (1.0, 5.0):
        yield f"{us:g} us a kernel at least", replace(setting, model=replace(model, kernel_us=us))
    for rate, values in (("launch_us", (0.0, 2.5, 10.0)), ("event_us", (0.0, 3.0)), ("priorities", (1, 6))):
        for value in values:
            device = replace(machine.devices[0], **{rate: value})  # type: ignore[arg-type]
            yield f"{rate} {value:g}", replace(setting, machine=replace(machine, devices=(device,)))


def _plan(graph: Graph, costs: Costs, machine: Machine, methods: Sequence[str], launches: str) -> Plan:
    """A plan without a memory limit, as the paper's."""
    unlimited = 1e18
    return plan(graph, costs, machine, "critical-path", methods=methods, launches=launches, peak_limit_bytes=unlimited)


def _takes_us(graph: Graph, made: Plan, costs: Costs, machine: Machine, label: str) -> float:
    launches = "graph" if label.endswith("graph") else "eager"
    return simulate(graph, made, costs, machine, launches=launches).makespan_us
