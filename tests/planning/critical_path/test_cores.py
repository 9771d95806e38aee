"""Plans for CPU lanes: whatever order is asked for, the lanes keep it."""

from dataclasses import replace

import pytest

from hocket.ir import Costs, Machine
from hocket.planning.critical_path.cores import core_plans
from hocket.planning.critical_path.memory import min_memory_order
from hocket.planning.critical_path.streams import step_order, streams_of
from planning.critical_path.examples import network


@pytest.mark.parametrize("cores", [2, 3, 4])
@pytest.mark.parametrize("which", ["of streams", "updates last", "program", "frugal"])
def test_every_plans_lanes_and_waits_keep_the_order_that_comes_with_it(cores, which):
    graph = network(6)
    costs = Costs({op.name: {"1": 10.0, str(cores): 6.0} for op in graph.ops})
    device = Machine.of(cores=cores).devices[0]
    streams = streams_of(graph, {op.name: 6.0 for op in graph.ops})
    orders = {
        "of streams": streams.order,
        "updates last": step_order(graph, streams.backbone.ops, updates_last=True),
        "program": graph.order,
        "frugal": min_memory_order(graph),
    }
    streams = replace(streams, order=tuple(orders[which]))
    keep_order = which != "of streams"
    found = list(core_plans(graph, costs, device, streams, 5.0, {}, keep_order=keep_order))
    assert len(found) >= 3
    for plan, order in found:
        place = {op: at for at, op in enumerate(order)}
        assert place.keys() == graph.by_name.keys()
        for lane in plan.lanes:
            assert list(lane.ops) == sorted(lane.ops, key=place.__getitem__)
        for op, others in plan.after.items():
            assert all(place[other] < place[op] for other in others)
