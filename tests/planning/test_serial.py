from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Op
from hocket.planning import plan
from hocket.simulation import simulate
from strategies import MACHINES, costs_of, graphs


@given(data=st.data())
def test_takes_the_sum_of_the_durations_at_full_width(data):
    graph, machine = data.draw(graphs()), data.draw(MACHINES)
    costs = data.draw(costs_of(graph, devices=("cpu0",)))
    serial = plan(graph, costs, machine, planner="serial")
    check(graph, serial, machine)
    total_us = 0.0
    for op in graph.order:
        total_us += costs.duration_us(op, width=machine.devices[0].cores, device="cpu0")
    assert simulate(graph, serial, costs, machine).makespan_us == total_us


def test_takes_the_first_cpu_device():
    machine = Machine((Device("gpu0", "cuda"), Device("node1", cores=3), Device("node2", cores=9)))
    (lane,) = plan(Graph((Op("a"),)), Costs({}), machine, planner="serial").lanes
    assert (lane.device, lane.width, lane.cores) == ("node1", 3, (0, 1, 2))
    with pytest.raises(InputError, match=r"at least one cpu device, got only gpu0 \(cuda\)"):
        plan(Graph((Op("a"),)), Costs({}), Machine((Device("gpu0", "cuda"),)), planner="serial")
