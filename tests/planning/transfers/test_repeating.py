"""Orders for steps in a row: read off what a wire does that sends the most urgent of what is ready."""

import random
import statistics
from dataclasses import replace
from itertools import pairwise, permutations

import pytest

from hocket.ir import Carried, Costs, Edge, Graph, Lane, Link, Machine, Op, Plan
from hocket.planning.transfers.repeating import in_order_of_readiness
from hocket.simulation.steps import step_us

WIRE = "server->cpu0"
MACHINE = Machine(Machine.of(cores=1).devices, (Link("server", "cpu0", 1e6),))


def net(forward_us, backward_us, receive_us, *, updated=True) -> tuple[Graph, Plan, Costs]:
    """A chain of layers; a parameter is free after its layer's backward, or, if not `updated`, after its forward."""
    layers = range(len(forward_us))
    recvs = [Op(f"w{n}", role="recv") for n in layers]
    computing = [f"f{n}" for n in layers] + [f"b{n}" for n in reversed(layers)]
    edges = [*pairwise(computing), *((f"w{n}", f"f{n}") for n in layers)]
    carried = tuple(Carried(f"b{n}" if updated else f"f{n}", f"w{n}") for n in layers)
    graph = Graph((*recvs, *map(Op, computing)), tuple(Edge(*ends) for ends in edges), carried)
    times = {f"f{n}": us for n, us in enumerate(forward_us)} | {f"b{n}": us for n, us in enumerate(backward_us)}
    durations = {op: {"1": us} for op, us in times.items()} | {f"w{n}": {WIRE: us} for n, us in enumerate(receive_us)}
    lanes = (Lane("cpu", tuple(computing)), Lane("wire", tuple(op.name for op in recvs), "channel", WIRE))
    return graph, Plan(lanes), Costs(durations)


def readiness(graph: Graph, plan: Plan, costs: Costs) -> Plan:
    urgency = {f"w{n}": float(n) for n in range(len(graph))}
    return in_order_of_readiness(graph, plan, costs, MACHINE, ["wire"], {op: urgency[op] for op in plan.lanes[1].ops})


def test_the_last_layers_come_while_the_backward_goes_on():
    """Layer 2 has all the bytes and its backward is first: it is received during that of layers 1 and 0."""
    graph, plan, costs = net([1.0, 1.0, 1.0], [5.0, 5.0, 5.0], [1.0, 1.0, 9.0])
    made = readiness(graph, plan, costs)
    assert made.lanes[1].ops == ("w2", "w1", "w0")
    assert made.lanes[0] == plan.lanes[0]
    # By first use the wire waits for w0 until the backward is over; then layer 2 comes 11 later, and two layers run.
    assert step_us(graph, plan, costs, MACHINE) == pytest.approx(18.0 + 9.0)
    # Only w0, which is free last, is waited for.
    assert step_us(graph, made, costs, MACHINE) == pytest.approx(18.0 + 1.0)


def test_what_is_free_in_the_order_of_its_use_comes_in_this_order():
    graph, plan, costs = net([3.0, 3.0, 3.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], updated=False)
    assert readiness(graph, plan, costs).lanes[1].ops == ("w0", "w1", "w2")


def test_the_most_urgent_of_what_is_ready_goes_first():
    """The first layer takes all the time: all others are free before it, and go by their use, not by when they were."""
    graph, plan, costs = net([1.0] * 4, [100.0, 0.5, 0.5, 0.5], [2.0] * 4)
    assert readiness(graph, plan, costs).lanes[1].ops == ("w3", "w1", "w2", "w0")


def random_net(seed: int) -> tuple[Graph, Plan, Costs]:
    draw = random.Random(seed)
    layers, part = draw.randint(2, 5), draw.choice([0.5, 1.0, 2.0])
    forward_us, backward_us, receive_us = ([draw.uniform(1, 10) for _ in range(layers)] for _ in range(3))
    return net(forward_us, backward_us, [part * us for us in receive_us])


def test_the_better_of_this_order_and_first_use_is_next_to_the_best():
    over_best, first_use_over_best = [], []
    for seed in range(30):
        graph, plan, costs = random_net(seed)
        compute, wire = plan.lanes
        made = readiness(graph, plan, costs)
        assert sorted(made.lanes[1].ops) == sorted(wire.ops)
        row_us = {
            order: step_us(graph, replace(plan, lanes=(compute, replace(wire, ops=order))), costs, MACHINE)
            for order in permutations(wire.ops)
        }
        best_us = min(row_us.values())
        over_best.append(min(row_us[made.lanes[1].ops], row_us[wire.ops]) / best_us)
        first_use_over_best.append(row_us[wire.ops] / best_us)
    assert statistics.mean(over_best) <= 1.01
    assert max(over_best) <= 1.1
    assert statistics.mean(first_use_over_best) >= 1.04
