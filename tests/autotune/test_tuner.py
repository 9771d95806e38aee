"""The search with made-up times: what is decided at once, and that plans which cannot win make no step."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.adaptation import Drift
from hocket.autotune.admission import Admission
from hocket.autotune.decision import Decision
from hocket.autotune.tuner import Tuner
from hocket.backends import Backend
from hocket.execution.base import Executor
from hocket.ir import Costs, Edge, Graph, Lane, Machine, Op, Plan, Timeline
from hocket.profiling.tracer import costs_of, steps_of
from hocket.simulation import simulate

MACHINE = Machine.of(cores=2)


class SimulatedLanes(Executor):
    """Takes what the simulation says."""

    def __init__(self, graph: Graph, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self._timeline = simulate(graph, plan, costs, MACHINE)

    def run(self, frame: Any) -> None:
        raise AssertionError("nothing runs here")

    def timeline(self) -> Timeline:
        return self._timeline

    def close(self) -> None:
        """Nothing."""


class SimulatedBackend(Backend):
    """Two cores on which ops take so long, and steps as long as simulated, and `overhead_ms` more."""

    machine = MACHINE
    label = "2 simulated cores"
    splits = False

    def __init__(self, costs: Costs) -> None:
        self._true = costs

    def serial_plan(self, captured: Any) -> Plan:
        return self._serial(captured.graph, 2)

    def executor(self, captured: Any, plan: Plan) -> Executor:
        return SimulatedLanes(captured.graph, plan, self._true)

    def profiled(self, captured: Any) -> Any:
        found = {}
        for width in (1, 2):
            found[width] = yield from steps_of(self.executor(captured, self._serial(captured.graph, width)), 3, 1)
        return costs_of(found)

    def candidate_planners(self, planner: str) -> list[tuple[str, dict[str, Any]]]:
        return [("serial", {}), ("list", {}), ("serial", {"width": 1})]

    def synchronize(self) -> None:
        """Nothing."""

    def release(self, executor: Executor) -> None:
        """Nothing."""

    def _serial(self, graph: Graph, width: int) -> Plan:
        return Plan((Lane("main", graph.order, width=width, cores=tuple(range(width))),), planner="serial")


def searched(
    graph: Graph, costs: Costs, eager_ms: float, overhead_ms: float = 0.0, *, guard: bool = True, drift: Any = None
) -> tuple[Decision, Counter[str]]:
    """Decision of a search, and the number of steps of each kind that it asked for."""
    tuner: Any = Tuner.__new__(Tuner)
    tuner.admission = Admission(None, None)  # type: ignore[arg-type]
    tuner.admission.forms = {"": SimpleNamespace(graph=graph)}
    tuner._backend = SimulatedBackend(costs)
    tuner._config = SimpleNamespace(planner="auto", plan=None, guard=guard)
    search = tuner.search_again(drift)
    steps: Counter[str] = Counter()
    item = next(search)
    while True:
        took_ms = eager_ms
        name = "eager"
        if item.executor is not None:
            took_ms = item.executor.timeline().makespan_us / 1e3 + overhead_ms
            name = f"{item.stage} {item.executor.plan.planner} {max(lane.width for lane in item.executor.plan.lanes)}"
        steps[name] += 1
        try:
            item = search.send(took_ms)
        except StopIteration as end:
            return end.value, steps


ONE = Graph((Op("lstm"), Op("loss")), (Edge("lstm", "loss"),))
ONE_COSTS = Costs({"lstm": {"1": 16000.0, "2": 9900.0}, "loss": {"1": 60.0, "2": 60.0}})
WIDE = Graph(tuple(Op(name) for name in "abcd"))
WIDE_COSTS = Costs({name: {"1": 1000.0, "2": 900.0} for name in "abcd"})


def test_a_step_of_one_op_is_decided_at_once():
    found, steps = searched(ONE, ONE_COSTS, eager_ms=10.1)
    assert (found.kind, found.candidates, found.best) == ("eager", (), None)
    assert found.reason == "no plan can be faster: of 10.1 ms that eager takes, op 'lstm' alone takes 98%"
    assert steps["eager"] == 4
    assert not any(name.startswith("compare") for name in steps)
    assert found.expected_ms == 10.1, "the step is watched for drift against what eager took"


def test_a_chain_of_ops_that_leaves_nothing_is_decided_at_once_too():
    names = [f"op{n}" for n in range(5)]
    chain = Graph(tuple(map(Op, names)), tuple(map(Edge, names, names[1:])))
    found, steps = searched(chain, Costs({name: {"1": 2000.0, "2": 2000.0} for name in names}), eager_ms=10.1)
    assert found.reason == "no plan can be faster: of 10.1 ms that eager takes, ops that wait for each other take 99%"
    assert steps["eager"] == 4


def test_what_eager_spends_between_ops_can_be_gained():
    found, steps = searched(ONE, ONE_COSTS, eager_ms=12.0)
    assert found.kind == "planned"
    assert steps["eager"] > 4


def test_a_step_that_may_be_gained_from_spends_no_eager_steps_to_find_out():
    found, steps = searched(WIDE, WIDE_COSTS, eager_ms=3.7)
    assert found.kind == "planned"
    assert found.best.plan.planner == "list"
    assert steps["eager"] == steps["compare list 1"] == 12


def test_without_the_guard_there_is_a_plan_whatever_can_be_gained():
    found, steps = searched(ONE, ONE_COSTS, eager_ms=10.1, guard=False)
    assert found.kind == "planned"
    assert steps["eager"] == 0


@pytest.mark.parametrize(("overhead_ms", "narrow"), [(0.0, False), (8.0, True)])
def test_plans_that_lose_in_simulation_make_no_step_unless_simulation_is_that_wrong(overhead_ms, narrow):
    graph = Graph((*WIDE.ops, Op("e")), tuple(Edge(name, "e") for name in "abcd"))
    costs = Costs({op.name: {"1": 2000.0, "2": 1050.0} for op in graph.ops})
    found, steps = searched(graph, costs, eager_ms=20.0, overhead_ms=overhead_ms)
    assert found.kind == "planned"
    assert (steps["compare serial 1"] > 0) == narrow
    assert steps["compare serial 2"] > 0


def test_why_it_was_measured_again_is_told():
    found, _ = searched(ONE, ONE_COSTS, eager_ms=10.1, drift=Drift(10.0, 20.0, 25))
    assert found.reason.endswith(
        "; measured again because the step time went from 10 ms to 20 ms (over the last 25 steps)"
    )


def test_forms_that_were_slower_are_forgotten_but_plain_ones_stay() -> None:
    admission: Any = Admission(None, None)  # type: ignore[arg-type]
    admission.forms = dict.fromkeys(["", "+fused-update", "+channels-last", "+channels-last+fused-norm"])
    admission.keep(["+fused-update"])
    assert list(admission.forms) == ["", "+fused-update"]
