"""Assumptions of `benchmarks.manycore`, and the results if one of them is changed.

Each can be changed here on its own: a `Setup` goes in and comes out with one thing different.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from benchmarks.curves import kind_of
from hocket.ir import Costs, Edge, Graph, Machine, Plan, Timeline
from hocket.simulation import simulate

# The cost of dispatching an op in the published curves (`benchmarks.knl`), at every width.
LAUNCH_US = 10.0
# TensorFlow 1.9 has MKL-DNN kernels for these types; the paper changed only their widths (section IV-A).
MKL_DNN = ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "MatMul", "FusedBatchNorm", "MaxPooling", "AvgPool")


@dataclass(frozen=True)
class Setup:
    """A step and all that is assumed about running it on a machine of one CPU device.

    An op starts `wait_us` later than one of another lane ends that it waits for, and takes `beside` times as long while
    it runs beside another one. Other ops of the step take `alone_us`, during which none of the graph's runs.
    """

    graph: Graph
    costs: Costs
    machine: Machine
    wait_us: float = 5.0
    beside: float = 1.0
    alone_us: float = 0.0

    def makespan_us(self, plan: Plan) -> float:
        """Return the duration of a step by this plan."""
        return timeline_of(self, plan).makespan_us + self.alone_us


def timeline_of(setup: Setup, plan: Plan) -> Timeline:
    """The step as simulated.

    Where ops disturb each other, it is simulated a second time: with each op longer for that part of it that had
    company the first time.
    """
    timeline = simulate(setup.graph, plan, setup.costs, setup.machine, setup.wait_us)
    if setup.beside == 1.0:
        return timeline
    (device,) = setup.machine.devices
    shares = _company(timeline)
    longer = {}
    for lane in plan.lanes:
        for op in lane.ops:
            own_us = setup.costs.duration_us(op, width=lane.width, device=device.name)
            longer[op] = {device.name: own_us * (1.0 + (setup.beside - 1.0) * shares[op])}
    return simulate(setup.graph, plan, Costs(longer), setup.machine, setup.wait_us)


def _company(timeline: Timeline) -> dict[str, float]:
    """For each op the share of its time during which another one runs."""
    events = sorted({time_us for span in timeline.spans for time_us in span[2:]})
    place = {time_us: number for number, time_us in enumerate(events)}
    change = [0] * len(events)
    for span in timeline.spans:
        change[place[span.start_us]] += 1
        change[place[span.end_us]] -= 1
    with_company = [(end - begin) * (ops > 1) for (begin, end), ops in zip(pairwise(events), accumulate(change))]  # noqa: B905
    shared_us = list(accumulate(with_company, initial=0.0))
    return {
        span.op: (shared_us[place[span.end_us]] - shared_us[place[span.start_us]]) / (span.duration_us or 1.0)
        for span in timeline.spans
    }


class Variant(NamedTuple):
    """One assumption, changed: its name, in words, and how."""

    name: str
    words: str
    change: Callable[[Setup], Setup]


def launch(us: float) -> Callable[[Setup], Setup]:
    """Dispatching an op costs `us`."""

    def changed(of_op: Mapping[str, float], _: str) -> dict[str, float]:
        return {width: max(1.0, time_us + us - LAUNCH_US) for width, time_us in of_op.items()}

    return lambda setup: replace(setup, costs=_each(setup, changed))


def best_widths(factor: float) -> Callable[[Setup], Setup]:
    """Ops that are no convolutions scale to `factor` times as many threads, and lose as much with each one beyond."""

    def changed(of_op: Mapping[str, float], kind: str) -> dict[str, float]:
        if kind.startswith("Conv2D"):
            return dict(of_op)
        times_us = list(of_op.values())
        best = min(range(len(times_us)), key=times_us.__getitem__) + 1
        beyond = len(times_us) - best
        slope_us = (times_us[-1] - times_us[best - 1]) / beyond if beyond else 0.0
        work_us = max(0.0, times_us[0] - LAUNCH_US)
        wanted = min(max(1, round(best * factor)), len(times_us))
        return {
            str(width): min(times_us[0], LAUNCH_US) + work_us / min(width, wanted) + slope_us * max(0, width - wanted)
            for width in range(1, len(times_us) + 1)
        }

    return lambda setup: replace(setup, costs=_each(setup, changed))


def siblings(speedup: float) -> Callable[[Setup], Setup]:
    """Set the work of two threads of a core, relative to that of one."""

    def change(setup: Setup) -> Setup:
        (device,) = setup.machine.devices
        return replace(setup, machine=Machine((replace(device, smt_speedup=speedup),)))

    return change


def only_mkl(setup: Setup) -> Setup:
    """Ops without an MKL-DNN kernel run one after another on all cores, alone.

    The others are planned for as if these took no time, and their time is added: a plan that also had to stop for them
    would be longer, so this is a limit to what the paper's runtime could gain.
    """
    ours = [op for op in setup.graph.ops if kind_of(op) in MKL_DNN]
    names = {op.name for op in ours}
    origins: dict[str, frozenset[str]] = {}  # for each op the nearest of ours that it waits for, or is
    edges: dict[tuple[str, str], None] = {}
    for name in setup.graph.order:
        before = frozenset[str]().union(*(origins[other] for other in setup.graph.predecessors[name]))
        origins[name] = frozenset([name]) if name in names else before
        if name in names:
            edges |= {(other, name): None for other in before}
    width = setup.machine.devices[0].cores
    alone_us = sum(setup.costs.duration_us(op, width=width) for op in setup.graph.by_name if op not in names)
    graph = Graph(tuple(ours), tuple(Edge(*pair) for pair in edges))
    return replace(setup, graph=graph, costs=setup.costs.restricted(names), alone_us=alone_us)


def _each(setup: Setup, change: Callable[[Mapping[str, float], str], dict[str, float]]) -> Costs:
    return Costs(
        {op.name: change(setup.costs.durations_us[op.name], kind_of(op)) for op in setup.graph.ops},
        sources=setup.costs.sources,
        note=setup.costs.note,
    )


VARIANTS = (
    Variant("beside 1.1", "an op takes 10% longer while it runs beside another one", lambda s: replace(s, beside=1.1)),
    Variant("beside 1.3", "an op takes 30% longer while it runs beside another one", lambda s: replace(s, beside=1.3)),
    Variant("launch 1 us", "dispatching costs 1 us an op", launch(1.0)),
    Variant("launch 30 us", "dispatching costs 30 us an op", launch(30.0)),
    Variant("wake-up 0 us", "an op starts at once when another lane is done", lambda s: replace(s, wait_us=0.0)),
    Variant("wake-up 20 us", "an op starts 20 us after another lane is done", lambda s: replace(s, wait_us=20.0)),
    Variant("widths x 0.5", "ops that are no convolutions scale to half as many threads", best_widths(0.5)),
    Variant("widths x 2", "ops that are no convolutions scale to twice as many threads", best_widths(2.0)),
    Variant("widths x 4", "ops that are no convolutions scale to four times as many threads", best_widths(4.0)),
    Variant("siblings 1.3", "two threads of a core get done 1.3 times what one does alone", siblings(1.3)),
    Variant("MKL-DNN only", "ops without an MKL-DNN kernel keep all cores to themselves", only_mkl),
)
