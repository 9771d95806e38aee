"""A step over several devices with assistants, simulated step by step; and the graphs it is tried with."""

from dataclasses import dataclass

import numpy as np

from hocket.adaptation.assistant_rules import assistant_rules
from hocket.adaptation.assistants import OpMove, decide, order_of, shares_of
from hocket.ir import Costs, Edge, Graph, Link, Machine, Op
from hocket.ir.machine import Device
from hocket.planning.partition import Partition, partitioned, problem_of

NOISE = 0.02
HOG_FROM = 10


def wide(ops: int = 96, seed: int = 0) -> tuple[Graph, Costs]:
    """Layers of a random graph: each op reads one or two of the layer before."""
    draw = np.random.default_rng(seed)
    names = [f"op{number}" for number in range(ops)]
    width = 12
    edges = []
    for number in range(width, ops):
        layer = number // width * width
        sources = draw.choice(width, size=draw.integers(1, 3), replace=False) + layer - width
        edges += [Edge(names[source], names[number], float(draw.integers(1, 9) * 1000)) for source in sources]
    takes_us = {name: {"1": float(draw.uniform(50, 400))} for name in names}
    return Graph(tuple(Op(name) for name in names), tuple(edges)), Costs(takes_us)


def branches(count: int = 8, length: int = 8) -> tuple[Graph, Costs]:
    """Chains side by side that meet at the end: an Inception, or the models of a search."""
    names = [f"b{branch}.{place}" for branch in range(count) for place in range(length)]
    edges = [Edge(f"b{b}.{p}", f"b{b}.{p + 1}", 4000.0) for b in range(count) for p in range(length - 1)]
    edges += [Edge(f"b{b}.{length - 1}", "join", 4000.0) for b in range(count)]
    costs = {name: {"1": 100.0 + 10.0 * (number % 7)} for number, name in enumerate(names)} | {"join": {"1": 50.0}}
    return Graph((*(Op(name) for name in names), Op("join")), tuple(edges)), Costs(costs)


def micro_batches(layers: int = 12, count: int = 8) -> tuple[Graph, Costs]:
    """Forwards of several micro-batches through the same layers, one behind the other."""
    names = [f"m{batch}.{layer}" for batch in range(count) for layer in range(layers)]
    edges = [Edge(f"m{b}.{x}", f"m{b}.{x + 1}", 8000.0) for b in range(count) for x in range(layers - 1)]
    costs = {name: {"1": 80.0 + 15.0 * (number % layers % 5)} for number, name in enumerate(names)}
    return Graph(tuple(Op(name) for name in names), tuple(edges)), Costs(costs)


def devices(count: int, speeds: tuple[float, ...] = ()) -> Machine:
    speeds = speeds or (1.0,) * count
    made = tuple(Device(f"d{n}", flops_per_s=1e9 * speed, bytes_per_s=1e9) for n, speed in enumerate(speeds))
    links = [Link(a.name, b.name, 1e9, 5.0) for a in made for b in made if a != b]
    return Machine(made, tuple(links))


@dataclass(frozen=True)
class Assisted:
    """Result of a run: the time of each step, without noise, and the moves by step."""

    steps_us: tuple[float, ...]
    moves: tuple[tuple[int, OpMove], ...]

    def moves_from(self, step: int) -> int:
        return sum(at >= step for at, _ in self.moves)


def hogged(costs: Costs, machine: Machine, hogs: dict[str, float]) -> Costs:
    """The costs on every device, longer where another program takes this part of the device."""
    return Costs(
        {
            op: {
                f"{device.name}:{device.cores}": costs.duration_us(op, width=device.cores, device=device.name)
                / (1.0 - hogs.get(device.name, 0.0))
                for device in machine.devices
            }
            for op in costs.durations_us
        }
    )


def assisted(graph: Graph, costs: Costs, machine: Machine, *, steps: int = 240, **rules) -> Assisted:
    """Steps by the plan for idle devices; from `HOG_FROM` on a hog takes half of one device."""
    draw = np.random.default_rng(1)
    planned = partitioned(problem_of(graph, costs, machine), objective="time", budget_s=0.5, rounds=3)
    known = assistant_rules(graph, costs, machine, **rules)
    part, since = planned.part, 0
    order = order_of(known, part, [1.0] * len(machine.devices))
    steps_us, moves = [], []
    for step in range(steps):
        hogs = {"d0": 0.5} if step >= HOG_FROM else {}
        slow = hogged(costs, machine, hogs)
        steps_us.append(Partition(problem_of(graph, slow, machine), part, order).simulated_us)
        seen = Costs(
            {op: {k: us * draw.uniform(1, 1 + NOISE) for k, us in row.items()} for op, row in slow.durations_us.items()}
        )
        since = 0 if step == HOG_FROM else since + 1
        timeline = Partition(problem_of(graph, seen, machine), part, order).timeline
        # A hog uses all that the step leaves of its device.
        shares = shares_of(timeline, known, activity=dict.fromkeys(hogs, 1.0), steps=since)
        found = decide(shares, known, part)
        if found:
            changed = list(part)
            for move in found:
                changed[move.op] = move.target
                moves.append((step, move))
            part, since = tuple(changed), 0
            order = order_of(known, part, [share.slowdown for share in shares])
    return Assisted(tuple(steps_us), tuple(moves))
