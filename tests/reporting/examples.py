"""A training step made by hand: layers with forward and gradient ops, a serial timeline, and a plan on two lanes."""

import random
from dataclasses import dataclass

from hocket.ir import ROLES, Costs, Edge, Graph, Lane, Op, Plan, Span, Timeline
from hocket.reporting import Comparison, Sample

HOSTILE = """</script><script>alert(1)</script>&"'<b>{{data}}\u2028"""


@dataclass(frozen=True)
class Example:
    graph: Graph
    costs: Costs
    plan: Plan
    baseline: Plan
    timelines: dict[str, Timeline]
    comparison: Comparison


def example(layers: int = 30, *, lanes: int = 2, prefix: str = "", seed: int = 0) -> Example:
    """About nine ops for each layer."""
    rng = random.Random(seed)
    ops, edges, durations = _ops(layers, prefix, rng)
    graph = Graph(tuple(ops), tuple(edges))
    costs = Costs({op: {"1": value, "2": value * 0.62} for op, value in durations.items()}, note="made up")
    serial = Plan((Lane("main", graph.order, width=2, cores=(0, 1)),), planner="serial")
    eager = Timeline(tuple(_serial(graph, durations, rng)), ("main",), "measured")
    spans, order = _list_schedule(graph, durations, lanes)
    names = tuple(f"cpu0.{index}" for index in range(lanes))
    plan = Plan(
        tuple(Lane(name, tuple(order[index]), cores=(index,)) for index, name in enumerate(names)), planner="list"
    )
    planned = Timeline(tuple(spans), names, "measured")
    work_us = sum(durations.values())
    lower_us = 0.93 * work_us / lanes
    times = [planned.makespan_us / 1e3 * (1 + 0.01 * n) for n in range(30)]
    base = [eager.makespan_us / 1e3 * (1 + 0.01 * n) for n in range(30)]
    comparison = Comparison(
        target=prefix + "resnet20_cifar10",
        device="Example CPU",
        cores=lanes,
        ops=len(graph),
        eager_ms=Sample.of(base),
        planned_ms=Sample.of(times),
        lower_bound_ms=lower_us / 1e3,
        efficiency=0.71,
        speedup=eager.makespan_us / planned.makespan_us,
        verdict="planned",
        why="the median of 30 planned steps is below that of 30 eager steps" + prefix,
        max_abs_diff=0.0,
        bitwise=True,
        planner="list",
        versions={"hocket": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
        notes=("batch 8, float32" + prefix,),
    )
    return Example(graph, costs, plan, serial, {"eager": eager, "planned": planned}, comparison)


def _ops(layers: int, prefix: str, rng: random.Random) -> tuple[list[Op], list[Edge], dict[str, float]]:
    ops: list[Op] = []
    edges: list[Edge] = []
    durations: dict[str, float] = {}

    def add(name: str, target: str, role: str, layer: str, time: float, *after: str) -> str:
        name = "".join((prefix + name).split())
        ops.append(Op(name, target, role, prefix + layer, flops=time * 4e4, size_bytes=time * 900))
        edges.extend(Edge(src, name, 8e5) for src in after)
        durations[name] = round(time * rng.uniform(0.8, 1.25), 2)
        return name

    last = add("input", "aten.clone", "other", "", 40)
    inputs: list[tuple[str, str, float]] = []
    for n in range(layers):
        layer = f"stage{n // 10 + 1}.unit{n % 10 + 1}.body.conv{n % 2 + 1}"
        size = 900 / (1 + n // 10) + 60
        conv = add(f"{layer}", "aten.convolution", "forward", layer, size, last)
        norm = add(f"{layer}/norm", "aten.native_batch_norm", "forward", layer, size / 6, conv)
        side = add(f"{layer}/side", "aten.avg_pool2d", "forward", layer, size / 2, last)
        inputs.append((layer, last, size))
        last = add(f"{layer}/cat", "aten.cat", "forward", layer, size / 14, norm, side)
    last = add("loss", "aten.nll_loss", "forward", "", 25, last)
    for layer, before, size in reversed(inputs):
        back = add(f"{layer}/cat.grad", "aten.split", "activation_grad", layer, size / 12, last)
        norm = add(f"{layer}/norm.grad", "aten.batch_norm_backward", "activation_grad", layer, size / 4, back)
        weight = add(f"{layer}/weight.grad", "aten.convolution_backward", "weight_grad", layer, size, norm, before)
        bias = add(f"{layer}/bias.grad", "aten.sum", "bias_grad", layer, size / 20, norm)
        last = add(f"{layer}/input.grad", "aten.convolution_backward", "activation_grad", layer, size, norm)
        add(f"{layer}.weight/update", "aten.add_", "update", layer, size / 10, weight)
        add(f"{layer}.bias/update", "aten.add_", "update", layer, 4, bias)
    return ops, edges, durations


def _serial(graph: Graph, durations: dict[str, float], rng: random.Random) -> list[Span]:
    spans, now = [], 3.0
    for op in graph.order:
        spans.append(Span(op, "main", now, now + durations[op] * 0.78))
        now = spans[-1].end_us + rng.uniform(1.0, 9.0)
    return spans


def _list_schedule(graph: Graph, durations: dict[str, float], lanes: int) -> tuple[list[Span], list[list[str]]]:
    rank: dict[str, float] = {}
    for op in reversed(graph.order):
        rank[op] = durations[op] + max((rank[after] for after in graph.successors[op]), default=0.0)
    free, done = [0.0] * lanes, dict[str, float]()
    order: list[list[str]] = [[] for _ in range(lanes)]
    spans = []
    waiting = set(graph.order)
    while waiting:
        ready = [op for op in waiting if all(before in done for before in graph.predecessors[op])]
        when = {op: max((done[before] for before in graph.predecessors[op]), default=0.0) for op in ready}
        lane = min(range(lanes), key=lambda index: free[index])
        op = min(ready, key=lambda op: (max(free[lane], when[op]), -rank[op], op))
        lane = min(range(lanes), key=lambda index: (max(free[index], when[op]), index))
        start = max(free[lane], when[op]) + 2.0
        spans.append(Span(op, f"cpu0.{lane}", start, start + durations[op]))
        free[lane] = done[op] = spans[-1].end_us
        order[lane].append(op)
        waiting.remove(op)
    return spans, order


def many_spans(count: int, lanes: int = 2, gap_us: float = 3.0) -> tuple[Graph, Timeline]:
    """`count` short spans of random roles, for what must stay light."""
    rng = random.Random(1)
    free = [0.0] * lanes
    ops, spans = [], []
    for number in range(count):
        lane = number % lanes
        start = free[lane] + rng.uniform(0, gap_us)
        free[lane] = start + rng.expovariate(1 / 30)
        ops.append(Op(f"stage1.unit{number}.conv/grad{number}", role=rng.choice(ROLES), layer=f"stage1.unit{number}"))
        spans.append(Span(ops[-1].name, f"cpu0.{lane}", start, free[lane]))
    return Graph(tuple(ops)), Timeline(tuple(spans), tuple(f"cpu0.{lane}" for lane in range(lanes)))
