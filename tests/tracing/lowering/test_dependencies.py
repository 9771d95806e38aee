"""Orders between ops, against a reference that looks at every pair of accesses."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from hocket.tracing.lowering.dependencies import Access, around_raises, carried, orders

ROOTS = st.frozensets(st.integers(0, 3), max_size=2)


@st.composite
def sequences(draw) -> list[Access]:
    found = []
    for _ in range(draw(st.integers(0, 9))):
        reads, writes = draw(ROOTS), draw(ROOTS)
        # An op that writes in place reads what it writes, or does not: both occur.
        found.append(Access(reads | (writes if draw(st.booleans()) else frozenset()), writes, draw(st.booleans())))
    return found


def conflicts(first: Access, second: Access) -> bool:
    if first.random and second.random:
        return True
    return bool(first.writes & (second.reads | second.writes) or first.reads & second.writes)


def reachable(pairs, count: int) -> set[tuple[int, int]]:
    """All pairs that `pairs` imply."""
    found = set(pairs)
    for middle in range(count):
        before = {a for a, b in found if b == middle}
        after = {b for a, b in found if a == middle}
        found |= {(a, b) for a in before for b in after}
    return found


@given(sequences())
def test_every_pair_that_conflicts_is_ordered_and_no_other(accesses):
    found = orders(accesses)
    implied = reachable(found, len(accesses))
    for first, second in combinations(range(len(accesses)), 2):
        if conflicts(accesses[first], accesses[second]):
            assert (first, second) in implied
    assert all(first < second and conflicts(accesses[first], accesses[second]) for first, second in found)


@given(sequences())
def test_every_value_that_is_read_flows_from_who_wrote_it_last(accesses):
    found = orders(accesses)
    for (first, second), roots in found.items():
        for root in roots:
            assert root in accesses[first].writes
            assert root in accesses[second].reads
            assert not any(root in accesses[between].writes for between in range(first + 1, second))
    flowing = {(second, root) for (_, second), roots in found.items() for root in roots}
    for second, access in enumerate(accesses):
        for root in access.reads:
            if any(root in before.writes for before in accesses[:second]):
                assert (second, root) in flowing


@given(sequences(), ROOTS)
def test_two_steps_in_a_row_are_ordered_by_the_orders_of_one_and_what_is_carried(accesses, lasting):
    """Unrolled: with the orders of each step and the carried ones, two steps are ordered as one long one would be."""
    count = len(accesses)
    one = orders(accesses)
    pairs = [*one, *((a + count, b + count) for a, b in one), *((a, b + count) for a, b in carried(accesses, lasting))]
    implied = reachable(pairs, 2 * count)
    for first, before in enumerate(accesses):
        for second, after in enumerate(accesses):
            read_or_written = before.writes & (after.reads | after.writes) | before.reads & after.writes
            if read_or_written & lasting:
                assert (first, second + count) in implied


@given(sequences(), ROOTS)
def test_nothing_is_carried_by_what_does_not_outlive_the_step(accesses, lasting):
    for before, after in carried(accesses, lasting):
        first, second = accesses[before], accesses[after]
        assert (first.writes & (second.reads | second.writes) | first.reads & second.writes) & lasting


@given(sequences(), st.frozensets(st.integers(0, 8)), ROOTS)
def test_what_outlives_the_step_stays_on_its_side_of_an_op_that_may_raise(accesses, raising, lasting):
    pairs = around_raises(accesses, raising, lasting)
    implied = reachable(pairs, len(accesses))
    kept = {n for n, access in enumerate(accesses) if access.random or access.writes & lasting}
    for pair in combinations(range(len(accesses)), 2):
        both_raise = set(pair) <= raising
        one_raises = len(raising.intersection(pair)) == 1 and len(kept.intersection(pair)) >= 1
        if both_raise or (one_raises and (kept - raising).intersection(pair)):
            assert pair in implied
    assert all(first < second for first, second in pairs)
    assert all(raising.intersection(pair) and set(pair) <= kept | raising for pair in pairs)
