"""The CPU backend on machines that are not here: profiles on many cores, with simulated lanes."""

from types import SimpleNamespace
from typing import Any

import pytest

from hocket.backends import CpuBackend
from hocket.ir import Costs, Edge, Graph, Machine, Op, Plan
from hocket.simulation import simulate

GRAPH = Graph((Op("a", "conv"), Op("b", "add")), (Edge("a", "b"),))
STEP: Any = SimpleNamespace(graph=GRAPH)
SPAWN_US = 2.0


class SimulatedLanes:
    """Takes what the simulation says; ops on cores of one cache share it, and take longer by `shared`."""

    def __init__(self, plan: Plan, machine: Machine, shared: float) -> None:
        (device,) = machine.devices
        self.plan, self.closed = plan, False
        (lane,) = plan.lanes
        crowded = len({core // device.cores_per_cache for core in lane.cores}) < min(lane.width, device.cores)
        us = (1000.0 / lane.width + SPAWN_US * lane.width) * (shared if crowded else 1.0)
        costs = Costs({op.name: {str(lane.width): us} for op in GRAPH.ops})
        self._timeline = simulate(GRAPH, plan, costs, machine)

    def timeline(self):
        return self._timeline

    def close(self):
        self.closed = True


class Simulated(CpuBackend):
    def __init__(self, machine: Machine, shared: float = 1.0) -> None:
        super().__init__(machine, "python")
        self.made: list[SimulatedLanes] = []
        self._shared = shared

    def executor(self, captured: Any, plan: Plan) -> Any:
        self.made.append(SimulatedLanes(plan, self.machine, self._shared))
        return self.made[-1]


def profiled(backend: Simulated) -> tuple[Costs, list[Plan]]:
    """Findings of the backend, and the plan of each step that it asked for."""
    rounds = backend.profiled(STEP)
    plans: list[Plan] = []
    while True:
        try:
            executor: Any = next(rounds)
        except StopIteration as end:
            return end.value, plans
        assert not executor.closed
        plans.append(executor.plan)


@pytest.mark.parametrize(
    ("cores", "widths", "runs"), [(2, [1, 2], 4), (4, [1, 2, 4], 4), (16, [1, 2, 5, 9, 13, 16], 2)]
)
def test_few_cores_are_measured_at_every_width_and_more_by_climbing(cores, widths, runs):
    backend = Simulated(Machine.of(cores=cores, smt=2))
    costs, plans = profiled(backend)
    assert sorted({plan.lanes[0].width for plan in plans}) == widths
    assert len(plans) == runs * len(widths)
    assert all(executor.closed for executor in backend.made)
    assert costs.durations_us["a"] == {str(width): pytest.approx(1000.0 / width + SPAWN_US * width) for width in widths}


@pytest.mark.parametrize(("shared", "placement"), [(1.5, "scatter"), (0.9, "compact")])
def test_a_profile_on_many_cores_finds_the_better_placement(shared, placement):
    backend = Simulated(Machine.of(cores=68, smt=4, cores_per_cache=2), shared)
    costs, plans = profiled(backend)
    assert len(plans) <= 56
    assert costs.placement == placement
    apart = {plan.lanes[0].cores for plan in plans if plan.lanes[0].width == 5}
    assert apart == {(0, 1, 2, 3, 4), (0, 2, 4, 6, 8)}
    assert all(executor.closed for executor in backend.made)


def test_a_profile_that_is_given_up_leaves_no_lanes():
    backend = Simulated(Machine.of(cores=16))
    rounds = backend.profiled(STEP)
    next(rounds)
    rounds.close()
    assert [executor.closed for executor in backend.made] == [True]
