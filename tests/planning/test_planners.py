import gc
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.checking import check
from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Op
from hocket.planning import plan, planners
from hocket.planning.base import Planner
from hocket.planning.serial import Serial
from hocket.simulation import simulate
from strategies import MACHINES, costs_of, graphs
from support.refusals import refused

GRAPH, COSTS, MACHINE = Graph((Op("a"),)), Costs({"a": {"1": 1.0}}), Machine.of(cores=2)


def test_planners_are_found_by_name():
    assert list(planners()) == [
        "serial",
        "list",
        "phases",
        "concurrency",
        "critical-path",
        "transfers",
        "partition",
        "exact",
    ]
    for name, planner in planners().items():
        assert issubclass(planner, Planner)
        assert planner.name == plan(GRAPH, COSTS, MACHINE, planner=name).planner == name
        empty = plan(Graph(()), Costs({}), MACHINE, planner=name)
        assert not [op for lane in empty.lanes for op in lane.ops]
    with pytest.raises(TypeError):
        planners()["mine"] = Planner  # type: ignore[index]


def test_unknown_planner_and_unknown_option():
    refused("unknown planner 'lists'; available: serial, list", plan, GRAPH, COSTS, MACHINE, planner="lists")
    refused("planner list: unknown option 'lane'; it takes lanes", plan, GRAPH, COSTS, MACHINE, lane=2)
    with pytest.raises(InputError, match="planner serial: unknown option 'lanes'; it takes width"):
        plan(GRAPH, COSTS, MACHINE, planner="serial", lanes=2)


@pytest.mark.parametrize("was_on", [True, False])
def test_pythons_collector_is_left_as_it_was_found(was_on):
    seen = []

    class Looks(Serial):
        def plan(self, graph, costs, machine):
            seen.append(gc.isenabled())
            return super().plan(graph, costs, machine)

    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(vars(sys.modules["hocket.planning"])["_PLANNERS"], "serial", Looks)
            plan(GRAPH, COSTS, MACHINE, planner="serial")
            assert gc.isenabled() == was_on
            with pytest.raises(InputError):
                plan(GRAPH, Costs({}), MACHINE, planner="list")
            assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False]


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
