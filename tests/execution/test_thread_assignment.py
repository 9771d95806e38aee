"""Threads of lanes, and their sleeps."""

from hypothesis import given
from hypothesis import strategies as st

from hocket.execution.base import synchronisation
from hocket.execution.native.thread_assignment import workers_of
from hocket.ir import Edge, Graph, Lane, Machine, Op, Plan
from strategies import legal_cases

WIDE = Lane("wide", ("a", "b"), width=2, cores=(0, 1))
FIRST = Lane("first", ("c", "d"), width=1, cores=(0,))
SECOND = Lane("second", ("e", "f"), width=1, cores=(1,))
GRAPH = Graph(tuple(map(Op, "abcdef")), tuple(Edge(*pair) for pair in ("ab", "bc", "cd", "be", "ef")))


def found(plan: Plan, usual: int = 2, graph: Graph = GRAPH):
    return workers_of(graph, plan, synchronisation(graph, plan), usual)


def test_a_narrow_lane_shares_the_thread_of_the_wide_one_on_its_first_core():
    shared = found(Plan((FIRST, SECOND, WIDE)))
    assert [worker.ops for worker in shared.workers] == [("a", "b", "c", "d"), ("e", "f")]
    assert [lane.name for lane in shared.workers[0].lanes] == ["wide", "wide", "first", "first"]


def test_whoever_shares_a_core_with_others_sleeps_until_they_are_done():
    assert found(Plan((FIRST, SECOND, WIDE))).asleep == {"e": ("b",)}
    # Lanes with cores of their own never sleep by order.
    apart = Plan((Lane("one", tuple("abcd"), cores=(0,)), Lane("two", ("e", "f"), cores=(1,))))
    assert found(apart).asleep == {}


def test_the_caller_runs_the_lane_of_its_own_width_else_one_of_width_one_else_none():
    two = Plan((Lane("narrow", tuple("abcd"), cores=(2,)), Lane("wide", ("e", "f"), width=2, cores=(0, 1))))
    assert found(two, usual=2).workers[0].ops == ("e", "f")
    assert found(two, usual=1).workers[0].ops == tuple("abcd")
    wide = Plan((Lane("wide", tuple("abcdef"), width=2, cores=(0, 1)),))
    assert [worker.ops for worker in found(wide, usual=4).workers] == [(), tuple("abcdef")]


CPU_ONLY = st.builds(lambda cores: Machine.of(cores=cores), st.integers(1, 4))


@given(case=legal_cases(machines=CPU_ONLY))
def test_any_legal_plan_is_divided_without_a_circle(case):
    shared = found(case.plan, usual=case.machine.cores, graph=case.graph)
    assert sorted(op for worker in shared.workers for op in worker.ops) == sorted(op.name for op in case.graph.ops)
    before = synchronisation(case.graph, case.plan)
    for op, others in shared.asleep.items():
        assert all(before.before(other, op) for other in others)
    for worker in shared.workers:
        assert len({lane.width for lane in worker.lanes} - {1}) <= 1, "one team a thread"
