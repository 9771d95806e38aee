"""Live numbers: what Python computes with them the tape computes again, for other values too, or it says it cannot."""

from __future__ import annotations

import math
import operator
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import Tape, TapeRef
from hocket.tracing.sources import ItemOf

BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
UNARY = ("neg", "pos", "abs")
MATH = ("sqrt", "exp", "log", "cos", "floor", "ceil", "log1p", "fabs")
NUMBERS = st.one_of(st.floats(0.01, 4.0), st.integers(1, 6))
CONSTANTS = NUMBERS | st.just(True)


@st.composite
def programs(draw):
    """Random straight-line arithmetic over three leaves and constants, on either side."""
    lines = []
    for number in range(draw(st.integers(1, 8))):
        operand = st.one_of(st.integers(0, 2 + number), CONSTANTS.map(lambda constant: ("constant", constant)))
        kind = draw(st.sampled_from(["binary", "binary", "binary", "unary", "math"]))
        if kind == "binary":
            lines.append((draw(st.sampled_from(BINARY)), (draw(operand), draw(operand))))
        else:
            lines.append((draw(st.sampled_from(UNARY if kind == "unary" else MATH)), (draw(operand),)))
    return lines


def run(lines, leaves):
    """The program in plain Python; functions of `math` are looked up when they are called, as in any module."""
    values = list(leaves)
    for name, operands in lines:
        picked = [operand[1] if isinstance(operand, tuple) else values[operand] for operand in operands]
        function = getattr(operator, name, None) or getattr(math, name)
        values.append(function(*picked))
    return values


def plain(values):
    return [value.plain if isinstance(value, Live) else value for value in values]


def outcome(function):
    """Return value of `function`, None where it cannot be computed at all."""
    try:
        values = function()
    except (ArithmeticError, ValueError):
        return None
    return None if any(isinstance(value, complex) for value in values) else values


def identical(a, b) -> bool:
    return type(a) is type(b) and (a == b or (a != a and b != b))


@given(programs(), st.lists(NUMBERS, min_size=3, max_size=3), st.data())
def test_the_tape_computes_what_python_computes(lines, leaves, data):
    expected = outcome(lambda: run(lines, leaves))
    # A count stays a count and a rate a rate, but their values change.
    others = [data.draw(st.integers(1, 6) if isinstance(v, int) else st.floats(0.01, 4.0)) for v in leaves]
    other = outcome(lambda: run(lines, others))
    assume(expected is not None and other is not None)
    tape = Tape()
    with followed_math():
        live = run(lines, [tape.leaf(None, value) for value in leaves])
    assert all(map(identical, plain(live), expected))
    again = tape.evaluate(others)
    assert again is not None
    for value, wanted in zip(live, other, strict=True):
        found = again[value.entry] if isinstance(value, Live) else value
        assert identical(found, wanted)


GUARDED = {
    "comparison": (lambda x: x > 0.4, 0.45, 0.3),
    "equality": (lambda x: x == 0.5, 0.5, 0.6),
    "truth": (bool, 0.7, 0.0),
    "as a plain float": (float, 0.5, 0.6),
    "as a whole number": (int, 0.9, 1.1),
    "is it whole": (lambda x: x.is_integer(), 0.7, 1.0),
    "is it finite": (lambda x: math.isfinite(x), 0.7, math.inf),
    "larger of two": (lambda x: max(0.1, x), 0.7, 0.05),
}


@pytest.mark.parametrize("name", GUARDED)
def test_a_branch_on_a_number_becomes_a_guard(name):
    ask, holds, breaks = GUARDED[name]
    tape = Tape()
    with followed_math():
        ask(tape.leaf(None, 0.5))
    assert tape.evaluate([holds]) is not None
    assert tape.evaluate([breaks]) is None


def test_what_a_guard_protects_is_not_an_error_when_the_guard_fails():
    tape = Tape()
    rate = tape.leaf(None, 0.5)
    if rate != 0:
        _ = 1 / rate
    assert tape.evaluate([0.25])[-1] == 4.0
    assert tape.evaluate([0.0]) is None


def test_equal_constants_of_different_types_stay_different():
    tape = Tape()
    rate = tape.leaf(None, 3)
    kinds = [type(tape.evaluate([5])[value.entry]) for value in (rate * 1, rate * 1.0, rate * True)]
    assert kinds == [int, float, int]
    signs = [math.copysign(1, tape.evaluate([5])[value.entry]) for value in (rate * 0.0, rate * -0.0)]
    assert signs == [1.0, -1.0]


def test_equal_computations_are_written_once():
    tape = Tape()
    rate = tape.leaf(None, 0.5)
    first, second = rate * 2 + 1, rate * 2 + 1
    assert first.entry == second.entry
    assert len(tape.entries) == 3


def test_a_reference_to_the_tape_can_be_computed_with():
    tape = Tape()
    rate, count = tape.leaf(None, 0.5), tape.leaf(None, 2)
    total = tape.apply(operator.add, rate, TapeRef((count * 3).entry))
    assert total.plain == 6.5
    assert tape.evaluate([1.0, 4])[total.entry] == 13.0


def test_a_result_that_is_no_number_is_plain_and_its_operands_stay():
    tape = Tape()
    assert tape.apply(str, tape.leaf(None, 0.5)) == "0.5"
    assert tape.leaf(None, -2.0) ** 0.5 == (-2.0) ** 0.5
    assert tape.evaluate([0.5, -2.0]) is not None
    assert tape.evaluate([0.25, -2.0]) is None
    assert tape.evaluate([0.5, -3.0]) is None


def test_math_is_put_back_even_after_an_error():
    before = dict(vars(math))

    def fails():
        with followed_math():
            assert math.sqrt is not before["sqrt"]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert vars(math) == before


def test_the_leaves_of_a_guard_that_fails():
    tape = Tape()
    rate, count = tape.leaf(None, 0.5), tape.leaf(SimpleNamespace(name="count"), 3)
    assert rate > 0
    assert count * 2 < 9
    assert "not compared" in tape.why_not([0.5, 3])
    assert "(count)" in tape.why_not([0.5, 8])
    assert "(in its batch)" in tape.why_not([-1.0, 8])
    assert "another type" in tape.why_not(None)
    assert tape.leaf(ItemOf(SimpleNamespace(name="averages")), 0) == 0
    assert "(averages)" in tape.why_not([0.5, 3, 1])
    assert "run eager steps before the capture until it stays" in tape.why_not([0.5, 3, 1])


def test_a_number_is_looked_up_at_the_position_of_a_later_step():
    tape, table = Tape(), [0.1, 0.2, 0.3]
    position = tape.leaf(None, 1)
    found = position.item_of(table)
    assert (found.plain, tape.guards) == (0.2, [])
    assert tape.evaluate([2])[found.entry] == 0.3
    assert tape.evaluate([3]) is None
    assert position.item_of(["a", "b"]) == "b"
    assert tape.guards == [(0, 1)]
