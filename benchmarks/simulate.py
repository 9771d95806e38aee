"""`hocket.simulate` against a SimPy model of the same plan: ``python -m benchmarks simulate``.

The SimPy model is the one that its documentation teaches: a process per lane, an event per op, and a process waits
only for events that have not been triggered yet. Both sides run in turns, and must end with the same makespan.

- ``again``: the same plan was simulated before. SimPy has every duration and dependency looked up beforehand.
- ``again_spans``: the same, and all spans are read, which Hocket otherwise makes only when asked for.
- ``new_plan``: another plan for the same graph and costs. SimPy as before.
- ``first``: the graph, plan and costs are all new. SimPy looks up every duration as it goes.
"""

from __future__ import annotations

import gc
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import simpy

from benchmarks.bench import table_of
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan, Span
from hocket.reporting.words import count_text
from hocket.simulation import simulate


def run(num_ops: int = 100_000, num_lanes: int = 8, repeats: int = 3, seed: int = 0) -> dict[str, Any]:
    """Simulate a random plan with both engines, in turns: milliseconds and their ratio for each question above."""
    graph, plan, costs = _random_step(num_ops, num_lanes, seed)
    machine = Machine.of(cores=num_lanes)
    durations_us = _looked_up(plan, costs)
    makespan_us = simulate(graph, plan, costs, machine).makespan_us
    milliseconds: dict[str, tuple[list[float], list[float]]] = {
        question: ([], []) for question in ("again", "again_spans", "new_plan", "first")
    }
    for _ in range(repeats):
        for question, (ours, theirs) in milliseconds.items():
            ours.append(_ours(question, graph, plan, costs, machine, makespan_us))
            if question == "first":
                theirs.append(_timed(lambda: _simpy_spans(graph, plan, _looked_up(plan, costs)), makespan_us))
            else:
                theirs.append(_timed(lambda: _simpy_spans(graph, plan, durations_us), makespan_us))
    return {
        "num_ops": num_ops,
        "num_edges": len(graph.edges),
        "num_lanes": num_lanes,
        "repeats": repeats,
        "makespan_us": makespan_us,
        "questions": {
            question: {
                "hocket_ms": _summary(ours),
                "simpy_ms": _summary(theirs),
                "ratio": _summary([b / a for a, b in zip(ours, theirs, strict=True)]),
            }
            for question, (ours, theirs) in milliseconds.items()
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "simpy": version("simpy")},
    }


def _random_step(num_ops: int, num_lanes: int, seed: int) -> tuple[Graph, Plan, Costs]:
    """A step whose ops depend on one to three recent ones, on lanes drawn by chance, not in program order."""
    rng = random.Random(seed)
    names = [f"op{number}" for number in range(num_ops)]
    edges = [
        Edge(names[rng.randrange(max(0, number - 50), number)], names[number])
        for number in range(1, num_ops)
        for _ in range(rng.randint(1, 3))
    ]
    graph = Graph(tuple(map(Op, names)), tuple(edges))
    costs = Costs({name: {"1": rng.uniform(5.0, 500.0), "2": rng.uniform(5.0, 300.0)} for name in names})
    height: dict[str, float] = {}  # grows along every edge, so sorting by it respects them all
    for name in names:
        height[name] = max((height[before] for before in graph.predecessors[name]), default=0.0) + rng.random()
    lanes: list[list[str]] = [[] for _ in range(num_lanes)]
    for name in sorted(names, key=height.__getitem__):
        lanes[rng.randrange(num_lanes)].append(name)
    plan = Plan(tuple(Lane(f"lane{number}", tuple(ops), cores=(number,)) for number, ops in enumerate(lanes)))
    return graph, plan, costs


def _looked_up(plan: Plan, costs: Costs) -> dict[str, float]:
    return {op: costs.duration_us(op, width=lane.width, device=lane.device) for lane in plan.lanes for op in lane.ops}


def _simpy_spans(graph: Graph, plan: Plan, durations_us: dict[str, float]) -> list[Span]:
    env = simpy.Environment()
    done = {op: env.event() for op in durations_us}
    spans: list[Span] = []

    def run_lane(lane: Lane) -> Iterator[Any]:
        for op in lane.ops:
            for before in graph.predecessors[op]:
                if not done[before].triggered:
                    yield done[before]
            start_us = env.now
            yield env.timeout(durations_us[op])
            done[op].succeed()
            spans.append(Span(op, lane.name, start_us, env.now))

    for lane in plan.lanes:
        env.process(run_lane(lane))  # type: ignore[arg-type]
    env.run()
    return spans


def _ours(question: str, graph: Graph, plan: Plan, costs: Costs, machine: Machine, makespan_us: float) -> float:
    if question == "first":
        graph, costs = Graph(graph.ops, graph.edges), Costs(costs.durations_us)
    if question in ("first", "new_plan"):
        plan = Plan(plan.lanes)
    if question == "again_spans":
        return _timed(lambda: list(simulate(graph, plan, costs, machine).spans), makespan_us)
    return _timed(lambda: simulate(graph, plan, costs, machine).makespan_us, makespan_us)


def _timed(work: Callable[[], list[Span] | float], makespan_us: float) -> float:
    """Milliseconds that `work` takes. Checks that its result, spans or a makespan, is right."""
    gc.collect()
    begin = time.perf_counter()
    result = work()
    milliseconds = (time.perf_counter() - begin) * 1e3
    found_us = max(span.end_us for span in result) if isinstance(result, list) else result
    if found_us != makespan_us:
        raise AssertionError(f"the engines disagree: a makespan of {found_us!r} us, and one of {makespan_us!r} us")
    return milliseconds


def _summary(values: list[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"plan": "{name}", "Hocket ms": "{hocket_ms[median]:,.3f}", "SimPy ms": "{simpy_ms[median]:,.3f}"},
        **{"ratio": "{ratio[median]:,.1f}x", "from": "{ratio[min]:,.1f}x to {ratio[max]:,.1f}x"},
    }
    where = f"{count_text(result['num_ops'], 'op')} on {count_text(result['num_lanes'], 'lane')}"
    title = f"simulate {where}, medians of {count_text(result['repeats'], 'round')}"
    yield table_of(title, columns, result["questions"])
