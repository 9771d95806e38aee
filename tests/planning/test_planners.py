from __future__ import annotations

import gc
import sys

import pytest

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Machine, Op
from hocket.planning import plan, planners
from hocket.planning.base import Planner
from hocket.planning.serial import Serial

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
    with pytest.raises(TypeError):
        planners()["mine"] = Planner  # type: ignore[index]


def test_unknown_planner_and_unknown_option():
    with pytest.raises(InputError, match="unknown planner 'lists'; available: serial, list"):
        plan(GRAPH, COSTS, MACHINE, planner="lists")
    with pytest.raises(InputError, match="planner list: unknown option 'lane'; it takes lanes"):
        plan(GRAPH, COSTS, MACHINE, lane=2)
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
