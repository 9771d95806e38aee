from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from hocket.ir import Costs, Graph, Lane, Op, Plan, Span, Timeline
from hocket.reporting.summary import _longest_increasing, changes, lane_text, lane_uses, op_costs, timeline_of, totals

GRAPH = Graph((Op("a", role="forward", layer="x"), Op("b", role="weight_grad", layer="x"), Op("c"), Op("d")))


def two_lanes(*spans: tuple[str, str, float, float]) -> Timeline:
    return Timeline(tuple(Span(*span) for span in spans), ("l", "r"))


def test_costs_follow_the_plan() -> None:
    costs = Costs({"a": {"1": 4.0, "2": 2.0}, "b": {"gpu0": 7.0}, "c": {"1": 1.0}}, sources={"c": "analytic"})
    plan = Plan((Lane("l", ("a",), width=2), Lane("r", ("b", "c", "d"))))
    assert [(row.duration_us, row.source) for row in op_costs(GRAPH, costs, plan)] == [
        (2.0, "measured"),
        (7.0, "measured"),  # known for another device only
        (1.0, "analytic"),
        (0.0, ""),
    ]
    assert op_costs(GRAPH, costs)[0].duration_us == 4.0


def test_totals_add_up() -> None:
    rows = op_costs(GRAPH, Costs({name: {"1": time} for name, time in zip("abcd", (1.0, 2.0, 5.0, 0.5), strict=True)}))
    assert totals(rows, lambda op: op.layer) == [("", 2, 5.5), ("x", 2, 3.0)]
    assert sum(total.duration_us for total in totals(rows, lambda op: op.role)) == 8.5


def test_use_of_lanes() -> None:
    uses = lane_uses(two_lanes(("a", "l", 0.0, 8.0), ("b", "l", 8.0, 10.0), ("c", "r", 2.0, 4.0)))
    assert uses == [("l", 2, 10.0, 0.0, 1.0), ("r", 1, 2.0, 8.0, 0.2)]
    assert lane_uses(Timeline((), ("l",))) == [("l", 0, 0.0, 0.0, 0.0)]


def test_lanes_in_words() -> None:
    assert lane_text(Lane("x")) == "cpu0, 1 thread"
    assert lane_text(Lane("x", cores=(3,))) == "cpu0, 1 thread, core 3"
    assert lane_text(Lane("x", kind="stream", device="gpu0", priority=2)) == "gpu0, stream, priority 2"
    assert lane_text(Lane("x", kind="channel", device="a->b")) == "channel a to b"


def test_changes_against_the_serial_order() -> None:
    # a c d stay in order; b is delayed to the end and runs on the other lane
    plan = Plan((Lane("l", ("a", "c", "d")), Lane("r", ("b",))))
    timeline = two_lanes(("a", "l", 0, 1), ("c", "l", 1, 2), ("d", "l", 2, 3), ("b", "r", 3, 4))
    found = changes(GRAPH, plan, {"plan": timeline})
    assert (found.moved, found.earlier, found.later, found.ops) == (("b",), (), ("b",), 4)


def test_one_op_that_overtakes_counts_once() -> None:
    plan = Plan((Lane("main", ("d", "a", "b", "c")),))
    found = changes(GRAPH, plan)
    assert (found.moved, found.earlier, found.later) == ((), ("d",), ())


def test_lanes_of_another_name_have_not_moved() -> None:
    before = Plan((Lane("x", ("a", "b")), Lane("y", ("c", "d"))))
    after = Plan((Lane("l", ("a", "b", "c")), Lane("r", ("d",))))
    found = changes(GRAPH, after, {}, before)
    assert len(found.moved) == 1  # c or d, whichever lane counts as the heir of y
    assert found.earlier is None


def test_a_measured_timeline_comes_first() -> None:
    plan = Plan((Lane("l", ("a",)), Lane("r", ())))
    simulated = two_lanes(("a", "l", 0.0, 1.0))
    measured = Timeline(simulated.spans, simulated.lanes, "measured")
    other = two_lanes(("a", "r", 0.0, 1.0))
    assert timeline_of(plan, {"other": other, "simulated": simulated, "measured": measured}) == "measured"
    assert timeline_of(plan, {"other": other}) is None


@given(st.permutations(range(7)))
def test_longest_increasing_subsequence_is_longest(ranks: list[int]) -> None:
    found = sorted(_longest_increasing(ranks))
    values = [ranks[position] for position in found]
    assert values == sorted(values)
    longest = max(n for n in range(1, 8) for some in combinations(ranks, n) if list(some) == sorted(some))
    assert len(found) == longest
