"""Which cores an op gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hocket.planning.moldable.core_allocator import CoreAllocator, members


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


def test_members():
    assert members(lane(0, 2, 69)) == (0, 2, 69)
    assert members(0) == ()
