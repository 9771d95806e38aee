"""Allotments of widths: what is tried first."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hocket.planning.moldable.instance import Instance
from hocket.planning.moldable.widths import allotments, ladder, useful_widths
from strategies import instance_by, moldable_cases


def _amdahl(work: dict[str, float], cores: int, *edges: str, serial: float = 0.1) -> Instance:
    return instance_by(
        {op: [us * (serial + (1 - serial) / p) for p in range(1, cores + 1)] for op, us in work.items()}, *edges
    )


@given(case=moldable_cases())
def test_every_allotment_gives_each_op_a_width_that_the_device_has(case):
    found = [tuple(widths) for widths in allotments(case.instance)]
    assert found
    assert len(set(found)) == len(found), "none twice"
    for widths in found:
        assert len(widths) == len(case.graph)
        assert all(1 <= width <= case.device.cores for width in widths)


@given(st.integers(1, 300))
def test_a_ladder_halves(cores):
    steps = ladder(cores)
    assert steps[0] == 1
    assert steps[-1] == cores
    assert all(below == above // 2 for below, above in pairwise(steps))


@given(st.lists(st.integers(0, 9).map(float), min_size=1, max_size=12))
def test_useful_widths_are_those_that_beat_all_narrower_ones(durations):
    found = useful_widths([0.0, *durations])
    assert found[0] == 1
    for width in range(1, len(durations) + 1):
        beats_all = all(durations[width - 1] < durations[other - 1] for other in range(1, width))
        assert (width in found) == beats_all


def test_a_chain_is_widened_and_what_stands_beside_it_stays_narrow():
    chain = {f"chain{i}": 100.0 for i in range(4)}
    beside = {f"beside{i}": 10.0 for i in range(8)}
    instance = _amdahl(chain | beside, 4, *[(f"chain{i}", f"chain{i + 1}") for i in range(3)])
    widest = max(allotments(instance), key=lambda widths: sum(widths[:4]) - sum(widths[4:]))
    assert min(widest[:4]) > 1
    assert set(widest[4:]) == {1}


def test_economical_and_fastest_widths_are_both_tried():
    instance = _amdahl({"a": 10.0, "b": 10.0}, 8)
    found = list(allotments(instance))
    assert [1, 1] in found
    assert [8, 8] in found
    assert [4, 4] in found


def test_widening_stops_where_it_is_of_no_use():
    instance = _amdahl({"a": 100.0, "b": 1.0}, 8, "ab", serial=1.0)
    assert all(widths[0] == 1 for widths in allotments(instance) if widths[0] != widths[1])
    assert max(instance.ranks_at_us([1, 1])) == 101.0
