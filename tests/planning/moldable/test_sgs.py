"""Placing ops whose widths are decided: what starts when, and who may pass whom."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from hocket.planning.moldable.instance import makespan_us
from hocket.planning.moldable.sgs import CoreAllocator, members, parallel_sgs, serial_sgs
from invariants import placement_faults
from strategies import decided_cases, instance_by


@st.composite
def decided(draw):
    _, instance, widths = draw(decided_cases())
    return instance, widths, [float(draw(st.integers(0, 3))) for _ in widths]


@given(decided())
def test_packed_ops_keep_the_rules(made):
    instance, widths, priority = made
    placed = parallel_sgs(instance, widths, priority)
    assert placement_faults(instance, placed) == []
    assert all(len(one.cores) == widths[one.op] for one in placed)


@given(decided())
def test_ops_in_order_keep_the_rules_and_the_order(made):
    instance, widths, _ = made
    placed = serial_sgs(instance, widths, instance.order)
    assert placement_faults(instance, placed) == []
    assert [one.op for one in placed] == list(instance.order)
    assert [len(one.cores) for one in placed] == [widths[one.op] for one in placed]


@given(decided())
def test_in_order_of_their_starts_no_op_starts_later(made):
    """No order is better for these widths than that of the best placement's starts, on which `exact` relies."""
    instance, widths, priority = made
    instance = replace(instance, wait_us=0.0, apart={})
    packed = {one.op: one for one in parallel_sgs(instance, widths, priority)}
    place = {op: at for at, op in enumerate(instance.order)}
    order = sorted(packed, key=lambda op: (packed[op].start_us, packed[op].end_us, place[op]))
    again = serial_sgs(instance, widths, order)
    assert all(one.start_us <= packed[one.op].start_us * (1 + 1e-9) for one in again)
    assert makespan_us(again) <= makespan_us(packed.values()) * (1 + 1e-9)


@given(decided())
def test_no_op_waits_that_could_run(made):
    """At the start of every op that had to wait, something had just ended or something wider was ahead of it."""
    instance, widths, priority = made
    instance = replace(instance, wait_us=0.0, apart={})
    narrow = [1] * len(widths)
    placed = parallel_sgs(instance, narrow, priority)
    ends = {one.op: one.end_us for one in placed}
    for one in placed:
        ready_us = max((ends[other] for other in instance.predecessors[one.op]), default=0.0)
        if one.start_us > ready_us:
            busy = [other for other in placed if other.start_us <= ready_us < other.end_us]
            assert len(busy) == instance.num_cores


def test_narrow_ops_pass_a_wide_one_only_if_they_do_not_hold_it_up():
    # a b on two cores; d (2 cores) is next in line; c may pass it, e may not.
    instance = instance_by({"a": [2.0, 2.0], "b": [5.0, 5.0], "c": [3.0, 3.0], "d": [4.0, 4.0], "e": [4.0, 4.0]})
    placed = parallel_sgs(instance, [1, 1, 1, 2, 1], [9.0, 8.0, 2.0, 7.0, 3.0])
    starts = {one.op: one.start_us for one in placed}
    assert starts == {0: 0.0, 1: 0.0, 2: 2.0, 3: 5.0, 4: 9.0}


def test_a_lane_has_to_be_woken():
    instance = replace(instance_by({"a": [2.0, 2.0], "b": [5.0, 5.0], "c": [3.0, 3.0]}, "ac", "bc"), wait_us=0.5)
    placed = {one.op: one for one in parallel_sgs(instance, [1, 1, 1], [1.0, 1.0, 1.0])}
    assert placed[2].cores == placed[1].cores, "on the lane of who ends last"
    assert placed[2].start_us == 5.0
    placed = {one.op: one for one in parallel_sgs(instance, [1, 1, 2], [1.0, 1.0, 1.0])}
    assert placed[2].start_us == 5.5


def lane(*cores: int) -> int:
    return sum(1 << core for core in cores)


@given(st.data())
def test_only_idle_cores_are_given_and_as_many_as_asked_for(data):
    num_cores = data.draw(st.integers(1, 70))
    cores = CoreAllocator(num_cores)
    taken: dict[int, None] = {}
    for at_us in range(data.draw(st.integers(1, 30))):
        if taken and data.draw(st.booleans()):
            one = data.draw(st.sampled_from(list(taken)))
            del taken[one]
            cores.give_back(one, float(at_us))
        elif cores.num_idle:
            width = data.draw(st.integers(1, cores.num_idle))
            near = data.draw(st.lists(st.integers(1, (1 << num_cores) - 1), max_size=2))
            one = cores.choose(width, near)
            assert one.bit_count() == width
            assert one < 1 << num_cores
            assert not any(one & other for other in taken)
            assert cores.take(one) <= at_us
            taken[one] = None
        assert cores.num_idle == num_cores - sum(other.bit_count() for other in taken)


def test_a_lane_that_is_there_goes_before_a_new_one_and_that_of_a_predecessor_before_all():
    cores = CoreAllocator(4)
    first = cores.choose(1)
    cores.take(first)
    second = cores.choose(1)
    cores.take(second)
    assert first != second
    cores.give_back(first, 1.0)
    cores.give_back(second, 1.0)
    assert cores.choose(1) == first
    assert cores.choose(1, near=[second]) == second
    assert cores.choose(1, near=[lane(0, 1), second]) == second, "one of another width is passed over"


def test_a_width_that_no_halving_gives_is_counted_from_the_last_core_or_from_the_first():
    cores = CoreAllocator(10)
    for width, expected in ((6, lane(0, 1, 2, 3, 4, 5)), (3, lane(7, 8, 9)), (1, lane(6))):
        found = cores.choose(width)
        assert found == expected, "the wide one from the first core on, the others from the last"
        cores.take(found)


def test_halves_fill_up_before_a_new_half_is_broken():
    cores = CoreAllocator(8)
    taken = []
    for width in (2, 4, 2):
        taken.append(cores.choose(width))
        cores.take(taken[-1])
    assert taken[0] | taken[2] | taken[1] == (1 << 8) - 1
    assert members(taken[1]) in ((0, 1, 2, 3), (4, 5, 6, 7))


def test_idle_cores_from_anywhere_where_no_block_is_left():
    cores = CoreAllocator(4)
    cores.take(lane(0))
    cores.take(lane(2))
    assert cores.choose(2) == lane(1, 3)


def test_cores_come_later_from_another_lane_than_from_their_own():
    cores = CoreAllocator(4, wait_us=2.0)
    both = lane(0, 1)
    assert cores.take(both) == 0.0
    cores.give_back(both, 10.0)
    assert cores.take(both) == 10.0
    cores.give_back(both, 20.0)
    assert cores.take(lane(0)) == 22.0
    cores.give_back(lane(0), 30.0)
    assert cores.take(both) == 32.0, "core 0 from another lane; core 1 it had itself"
