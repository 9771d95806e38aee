"""Plans that native lanes run in the bench of every way to run a step."""

from __future__ import annotations

from typing import Any

from hocket.ir import Lane, Machine, Plan
from hocket.planning import plan
from hocket.profiling import profile
from hocket.profiling.tracer import serial_plan
from hocket.tracing.captured import Captured


def single_plans(captured: Captured, machine: Machine) -> dict[str, Plan]:
    """Return the plans of the native contenders: uniform ones, program order, and the paper's strategies in turn."""
    costs = profile(captured, machine=machine, runs=5)
    plans = {
        f"uniform_{lanes}x{width}": _in_program_order(captured, lanes, width, machine.cores)
        for lanes in _halvings(machine.cores)
        for width in _halvings(machine.cores)
    }
    plans["serial"] = serial_plan(captured, machine.cores, machine)
    strategies = [(1,), (1, 2), (1, 2, 3)]
    if machine.devices[0].smt > 1:
        strategies.append((1, 2, 3, 4))
    for added in strategies:
        options: dict[str, Any] = {"strategies": added, "lookahead_ms": 0.0}
        label = "s" + "".join(map(str, added))
        plans[label] = plan(captured.graph, costs, machine, planner="concurrency", **options)
    plans["lookahead"] = plan(captured.graph, costs, machine, planner="concurrency")
    plans["phases"] = plan(captured.graph, costs, machine, planner="phases")
    return plans


def _halvings(cores: int) -> list[int]:
    """All cores, half of them, and so on down to one."""
    found = [cores]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found[::-1]


def _in_program_order(captured: Captured, lanes: int, width: int, cores: int) -> Plan:
    """The ops in program order, each to the lane of what it waits for if that is one lane, else to the shortest queue.

    Lanes that want more cores than there are share them all, as a framework's pools would.
    """
    dealt: list[list[str]] = [[] for _ in range(lanes)]
    place: dict[str, int] = {}
    for op in captured.graph.order:
        before = {place[other] for other in captured.graph.predecessors[op]}
        lane = before.pop() if len(before) == 1 else min(range(lanes), key=lambda number: len(dealt[number]))
        dealt[lane].append(op)
        place[op] = lane
    pinned = lanes * width <= cores
    return Plan(
        tuple(
            Lane(f"lane{n}", tuple(ops), width=width, cores=tuple(range(n * width, (n + 1) * width)) if pinned else ())
            for n, ops in enumerate(dealt)
        ),
        planner="uniform",
    )
