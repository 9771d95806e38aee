from __future__ import annotations

from hocket.planning.transfers.outstanding import NEVER, Outstanding, in_units
from hocket.planning.transfers.receives import receives_of
from planning.transfers.examples import FIGURE_1, FIGURE_4B


def outstanding(step):
    receives = receives_of(step.graph, step.costs, step.machine)
    times, works = [list(map(int, us)) for us in (receives.times_us, receives.works_us)]
    return Outstanding(receives, times, works), receives


def test_properties_of_figure_1():
    """recv1.P is the time of op1, recv2.P is 0, and both M+ are the sum of both transfers."""
    found, receives = outstanding(FIGURE_1)
    one, two = map(receives.names.index, ("recv1", "recv2"))
    properties = found.properties()
    assert (properties.loads[one], properties.loads[two]) == (6, 0)
    assert properties.impending[one] == properties.impending[two] == 8
    found.complete(one)
    assert found.properties().loads[two] == 5
    assert found.properties().impending[two] == NEVER


def test_properties_of_figure_4b():
    found, receives = outstanding(FIGURE_4B)
    properties = found.properties()
    by_name = dict(zip(receives.names, properties.impending, strict=True))
    assert by_name == {"A": 7, "B": 7, "C": 9, "D": 10}
    assert set(properties.loads) == {0}


def test_units_are_as_fine_as_they_can_be_and_keep_what_is_equal_equal():
    (one, other), (large,) = in_units([0.1, 0.1 + 0.2], [1e15])
    assert one > 0
    assert large > 2**60 > other
    (small, tiny), _ = in_units([3e-9, 1e-9], [])
    assert abs(small - 3 * tiny) <= 2
    assert in_units([0.0], [0.0]) == [[0], [0]]
