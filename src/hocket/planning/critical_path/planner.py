"""`critical-path`: critical-path ops first, with parameter gradients and updates on other streams meanwhile.

The planner combines the other modules: streams by layer path and task, their priorities, the priority levels of the
GPU, the waits that keep a memory limit, and the order of transfers. Each of TurboDL's methods can be left out, to
measure its contribution (the paper's Fig. 11):

    ()                                           one stream
    ("streams",)                                 the tasks of a layer side by side, layer by layer
    ("streams", "asynchronous")                  and no barrier between layers
    ("streams", "asynchronous", "priorities")    and critical ops first, which is the whole method
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Lane, Machine, Plan
from hocket.planning.base import Planner, cpu_devices, gpu_of, misplaced
from hocket.planning.channels import ROLES, by_earliest, plan_around, transfers_of
from hocket.planning.critical_path.backbone import dependency_distance
from hocket.planning.critical_path.cores import core_plans, switches_us
from hocket.planning.critical_path.memory import ROUNDING, held_back, min_memory_order, pool_bytes, serial_peak_bytes
from hocket.planning.critical_path.streams import MAX_STREAMS, Streams, layer_sync, step_order, stream_plan, streams_of
from hocket.planning.critical_path.streams import METHODS as LEVEL_METHODS
from hocket.simulation import LAUNCHES, simulate

METHODS = ("streams", "asynchronous", "priorities")

# Default limit over eager's peak. A lower one costs time at small batches, where most of the memory is parameters and
# their gradients would have to wait for each other (docs/critical-path.md).
PEAK_RATIO = 1.10
# Bounds that are tried for one plan, and numbers of streams, until all pools together keep the limit.
MAX_BOUNDS = 2
FEWER_STREAMS = (4, 2)


class CriticalPath(Planner):
    """TurboDL's methods, on the streams of a GPU or on CPU lanes.

    The plan is for the first GPU under whose name every op has a duration, or else for the first CPU device.

    Args:
        methods: those of ``streams``, ``asynchronous``, ``priorities`` to apply. Each needs the ones before it, and CPU
            lanes have all of them or none.
        max_streams: 1 to 8.
        levels: the method for a GPU with too few priority levels: ``order``, ``waits``, ``plain``, ``flat`` (see
            `hocket.planning.critical_path.streams`), or ``auto`` for the one that simulates shortest.
        peak_limit_bytes: the peak memory allowed, by default 1.1 times eager's, on a GPU for the pools of all streams
            together (`hocket.planning.critical_path.memory`). It has no effect on a graph without buffers.
        launches: the way in which a GPU's ops will be launched (``free``, ``eager``, ``graph``), for the simulation.
        wait_us: delay of a CPU lane after an op of another lane, for the simulation.

    Example:
        >>> from hocket.ir import Edge, Op
        >>> ops = (Op("f", role="forward"), Op("dA", role="activation_grad"), Op("dW", role="weight_grad"))
        >>> graph = Graph((*ops, Op("u", role="update")), (Edge("f", "dA"), Edge("dA", "dW"), Edge("dW", "u")))
        >>> costs = Costs({op.name: {"gpu0": 9.0} for op in graph.ops})
        >>> print(CriticalPath().plan(graph, costs, Machine.preset("p100")), end="")
        hocket-plan/1 planner=critical-path
        lane gpu0.activation0 kind=stream device=gpu0
        run f
        run dA
        run dW
        run u
    """

    name = "critical-path"

    def __init__(
        self,
        methods: Collection[str] = METHODS,
        max_streams: int = MAX_STREAMS,
        levels: str = "auto",
        peak_limit_bytes: float | None = None,
        launches: str = "graph",
        wait_us: float = 5.0,
    ) -> None:
        self.methods = tuple(method for method in METHODS if method in methods)
        if set(methods) != set(METHODS[: len(self.methods)]):
            raise InputError(
                f"planner critical-path: expected the first of {', '.join(METHODS)}, in order, got {', '.join(methods)}"
            )
        if isinstance(max_streams, bool) or not isinstance(max_streams, int) or not 1 <= max_streams <= MAX_STREAMS:
            raise InputError(f"planner critical-path: expected 1 to {MAX_STREAMS} streams, got {max_streams!r}")
        self.max_streams = max_streams
        for option, value, allowed in (("levels", levels, ("auto", *LEVEL_METHODS)), ("launches", launches, LAUNCHES)):
            if value not in allowed:
                raise InputError(
                    f"planner critical-path: expected {option} to be one of {', '.join(allowed)}, got {value!r}"
                )
        self.levels, self.launches = levels, launches
        self.require_finite(peak_limit_bytes=peak_limit_bytes, wait_us=wait_us)
        self.peak_limit_bytes, self.wait_us = peak_limit_bytes, wait_us

    def plan(self, graph: Graph, costs: Costs, machine: Machine) -> Plan:
        transfers = transfers_of(graph, costs, machine)
        if not transfers:
            return self.compute_plan(graph, costs, machine, {})
        # Updates wait for transfers, so they come after all gradients on their stream.
        compute_plan = partial(self.compute_plan, updates_last=True)
        return plan_around(graph, transfers, costs, machine, dependency_distance(graph), compute_plan)

    def compute_plan(
        self, graph: Graph, costs: Costs, machine: Machine, earliest_us: Mapping[str, float], updates_last: bool = False
    ) -> Plan:
        if any(op.role in ROLES for op in graph.ops):  # with a cost on a device and no link: ops like any other
            graph = replace(graph, ops=tuple(replace(op, role="other") if op.role in ROLES else op for op in graph.ops))
        device = gpu_of(graph, costs, machine) or cpu_devices(machine)[0]
        made = self._shortest(graph, costs, machine, device, earliest_us, updates_last)
        return replace(made, planner=self.name)

    def _shortest(
        self,
        graph: Graph,
        costs: Costs,
        machine: Machine,
        device: Device,
        earliest_us: Mapping[str, float],
        updates_last: bool,
    ) -> Plan:
        """The shortest of the plans that keep the memory limit."""
        eager_bytes = serial_peak_bytes(graph) if graph.buffers else 0.0
        limit_bytes = self.peak_limit_bytes if self.peak_limit_bytes is not None else PEAK_RATIO * eager_bytes
        chosen: tuple[float, Plan, float] | None = None
        is_refused = False  # some plan exceeds the limit

        def takes_us(plan: Plan) -> float:
            if any(lane.kind == "stream" for lane in plan.lanes):
                timeline = simulate(graph, plan, costs, machine, launches=self.launches, earliest_us=earliest_us)
                return timeline.makespan_us
            timeline = simulate(graph, plan, costs, machine, self.wait_us, earliest_us=earliest_us)
            return timeline.makespan_us + switches_us(plan)

        def consider(plans: Iterable[tuple[Plan, Sequence[str]]]) -> None:
            nonlocal chosen, is_refused
            timed = [(takes_us(plan), plan, order) for plan, order in plans if not misplaced(plan, costs)]
            for free_us, plan, order in sorted(timed, key=lambda entry: entry[0]):
                if chosen is not None and free_us >= chosen[0]:
                    break  # added waits make no plan shorter
                held = _within(limit_bytes, graph, plan, order, device) if graph.buffers else (plan, 0.0)
                is_refused |= held is None
                if held is not None:
                    held_us = free_us if held[0] is plan else takes_us(held[0])
                    if chosen is None or held_us < chosen[0]:
                        chosen = (held_us, *held)

        whole = device.cores if device.kind == "cpu" else 1
        widths = {op.name: costs.nearest_width(op.name, whole) for op in graph.ops}
        durations = {op: costs.duration_us(op, width=width, device=device.name) for op, width in widths.items()}
        streams = streams_of(graph, durations, self.max_streams, updates_last=updates_last)
        consider(self._plans(graph, costs, device, streams, earliest_us))
        if graph.buffers:  # other orders may have a lower peak
            backbone_first = step_order(graph, streams.backbone.ops, updates_last=True)
            others = dict.fromkeys((backbone_first, graph.order, min_memory_order(graph)))
            others.pop(streams.order, None)
            for order in others:
                kept = replace(streams, order=order)
                consider(self._plans(graph, costs, device, kept, earliest_us, keep_order=True))
        if earliest_us:
            order = by_earliest(graph, earliest_us)
            consider([(_one_lane(order, device), order)])
        if device.kind == "cuda" and self.methods == METHODS and self.levels == "auto":
            for num_streams in FEWER_STREAMS:  # with fewer pools
                if is_refused and num_streams < self.max_streams:
                    fewer = streams_of(graph, durations, num_streams, updates_last=updates_last)
                    consider(self._plans(graph, costs, device, fewer, earliest_us))
            # Fewer waits, for steps in which waits cost more than parallel streams gain.
            one_by_one = _one_lane(graph.order, device), layer_sync(graph, streams, device.name)
            consider((plan, graph.order) for plan in one_by_one)
        if chosen is None and device.kind == "cuda":
            consider([(_one_lane(graph.order, device), graph.order)])
        if chosen is None:
            least = min(serial_peak_bytes(graph, order) for order in (graph.order, min_memory_order(graph)))
            raise InputError(
                f"planner critical-path: no plan holds at most {limit_bytes:,.0f} bytes; the least that was found is "
                f"{least:,.0f}, and eager holds {eager_bytes:,.0f}"
            )
        _, plan, peak_bytes = chosen
        if not graph.buffers:
            return plan
        return replace(plan, peak_bytes=math.ceil(peak_bytes), eager_peak_bytes=math.ceil(eager_bytes))

    def _plans(
        self,
        graph: Graph,
        costs: Costs,
        device: Device,
        streams: Streams,
        earliest_us: Mapping[str, float],
        *,
        keep_order: bool = False,
    ) -> Iterator[tuple[Plan, Sequence[str]]]:
        """Plans to choose from, each with the order that its lanes keep."""
        if keep_order:
            yield _one_lane(streams.order, device), streams.order
        if not self.methods or (device.kind == "cpu" and len(self.methods) < len(METHODS)):
            yield _one_lane(graph.order, device), graph.order
        elif device.kind == "cpu":
            yield from core_plans(graph, costs, device, streams, self.wait_us, earliest_us, keep_order=keep_order)
        elif len(self.methods) == 1:
            yield layer_sync(graph, streams, device.name), graph.order
        else:
            yield from self._on_streams(graph, device, streams, keep_order)

    def _on_streams(
        self, graph: Graph, device: Device, streams: Streams, keep_order: bool
    ) -> Iterator[tuple[Plan, Sequence[str]]]:
        wanted = {streams.priority(stream) for stream in streams.lanes()}
        levels: tuple[str, ...] = LEVEL_METHODS if len(wanted) > device.priorities else ("plain", "flat")
        if self.levels != "auto":
            levels = (self.levels,)
        if "priorities" not in self.methods:
            levels = ("flat",)
        if keep_order:  # the others change the order
            levels = tuple(method for method in levels if method in ("plain", "flat"))
        for method in levels:
            yield stream_plan(graph, streams, device.name, device.priorities, method)


def _within(
    limit_bytes: float, graph: Graph, plan: Plan, order: Sequence[str], device: Device
) -> tuple[Plan, float] | None:
    """The plan with waits that keep the limit, and its peak, or None if none are found.

    Waits bound what is alive. The pools of streams on a GPU need more, so there a lower bound is tried, a few times.
    """
    bound_bytes = limit_bytes
    for _ in range(MAX_BOUNDS if device.kind == "cuda" else 1):
        held = held_back(graph, plan, order, bound_bytes)
        if held is None or device.kind != "cuda":
            return held
        needed_bytes = pool_bytes(graph, held[0])
        if needed_bytes <= limit_bytes * (1 + ROUNDING):
            return held[0], needed_bytes
        bound_bytes = min(bound_bytes, held[1]) * limit_bytes / needed_bytes
    return None


def _one_lane(order: Sequence[str], device: Device) -> Plan:
    if device.kind == "cuda":
        return Plan((Lane(f"{device.name}.activation0", tuple(order), "stream", device.name),))
    cores = tuple(range(device.cores))
    return Plan((Lane(device.name, tuple(order), "cores", device.name, device.cores, cores),))
