"""A live number is a plain one wherever the step has put it, when the recording is over."""

import functools

import pytest

from hocket.tracing.scalars.tape import Tape


@pytest.mark.parametrize("number", [3, 0.5])
@pytest.mark.parametrize("size", [None, 8])
def test_a_cache_gives_plain_numbers(size, number):
    cached = functools.lru_cache(size)(lambda x: x * 2)
    tape = Tape()
    live = tape.leaf("n", number)
    assert cached(live) == number * 2
    del live
    tape.close()
    assert type(cached(number)) is type(number * 2)
    assert cached.cache_info().currsize == 1


def test_a_number_by_itself_and_in_a_tuple():
    tape, held = Tape(), {}
    live = tape.leaf("n", 3)
    held.update(a=live, b=(live, [live]))
    del live
    tape.close()
    assert [type(held["a"]), type(held["b"][0]), type(held["b"][1][0])] == [int] * 3


def test_a_cached_call_is_met_again():
    cached = functools.cache(lambda x: object())
    tape = Tape()
    live = tape.leaf("n", 3)
    made = cached(live)
    del live
    tape.close()
    assert cached(3) is made
