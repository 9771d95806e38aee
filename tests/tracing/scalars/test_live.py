"""Live numbers are the numbers they stand for, and what cannot be followed is refused."""

import copy
import decimal
import json
import math
import operator
import statistics

import numpy as np
import pytest
import torch

from hocket.errors import CaptureError
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.live import Live, LiveFloat, LiveInt
from hocket.tracing.scalars.tape import Tape

IMPOSSIBLE = [decimal.Decimal, json.dumps, lambda x: statistics.mean([x, 1.0]), lambda x: x @ x, lambda x: x[0]]


@pytest.mark.parametrize("use", IMPOSSIBLE)
@pytest.mark.parametrize("value", [0.5, 3])
def test_what_cannot_be_done_is_an_error_and_bakes_nothing(use, value):
    with pytest.raises((TypeError, CaptureError)):
        use(Tape().leaf(None, value))


@pytest.mark.parametrize("value", [0.5, 3])
def test_torch_computes_with_the_true_value_where_it_is_not_seen(value):
    """No mode looks at torch functions here. The ops get plain numbers from the recorder of ops."""
    live, ones = Tape().leaf(None, value), torch.ones(2)
    assert torch.add(ones, ones, alpha=live).tolist() == [1 + value] * 2
    assert torch.clamp(ones, max=live).tolist() == [min(1, value)] * 2
    with pytest.raises(TypeError):
        _ = Tape().leaf(None, 0.5) << 1


INTS = ("add", "sub", "mul", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize(("first", "second"), [(7, 3), (-7, 3), (2**70, 5), (0, 1)])
def test_whole_numbers_stay_whole_numbers(name, first, second):
    function = getattr(operator, name)
    tape = Tape()
    live = tape.leaf(None, first)
    for operands in ((live, second), (second, live) if abs(first) < 99 else (live, second)):
        plain = [value.plain if isinstance(value, Live) else value for value in operands]
        try:
            expected = function(*plain)
        except (ValueError, ZeroDivisionError):
            continue
        found = function(*operands)
        assert type(found) is (LiveInt if type(expected) is int else LiveFloat)
        assert found.plain == expected
        assert tape.evaluate([first])[found.entry] == expected


def test_a_whole_number_is_one_to_whoever_asks():
    tape = Tape()
    count, rate = tape.leaf(None, 3), tape.leaf(None, 0.5)
    assert isinstance(count, int)
    assert not isinstance(count, float)
    assert isinstance(rate, float)
    assert not isinstance(rate, int)
    assert count.__class__ is int
    assert type(count / 2) is LiveFloat
    assert type(~count) is LiveInt
    assert (count.real, count.imag, count.numerator, count.denominator) == (3, 0, 3, 1)
    assert not hasattr(rate, "__index__")
    assert copy.copy(count) is count
    assert tape.guards, "comparisons are guards"


def test_a_text_is_one_and_notes_what_looks_at_it():
    for name in ("upper", "isdigit", "split", "encode", "index", "__len__", "__hash__", "__iter__", "__str__"):
        tape = Tape()
        text = tape.leaf(None, "a 1")
        assert (isinstance(text, str), text.__class__, copy.copy(text) is text) == (True, str, True)
        assert not tape.guards
        arguments = ("1",) if name == "index" else ()
        found, expected = (getattr(each, name)(*arguments) for each in (text, "a 1"))
        assert list(found) == list(expected) if name == "__iter__" else found == expected
        assert tape.guards == [(0, "a 1")]
        assert tape.evaluate(["b 1"]) is None


@pytest.mark.parametrize(
    "look",
    [lambda t: "x" + t, lambda t: t + "x", lambda t: f"{t}", lambda t: {"a": 1}.get(t), lambda t: t == "a", bool,
     lambda t: str(t), lambda t: t in ["a"], lambda t: "b" in t, lambda t: sorted([t, "a"])],
)  # fmt: skip
def test_an_operator_looks_at_a_text(look):
    tape = Tape()
    assert look(tape.leaf(None, "12")) == look("12")
    assert tape.guards == [(0, "12")]


FOLLOWED = {
    "least": lambda x: min(x, 10),
    "most": lambda x: max(x, 1),
    "sum": lambda x: sum([x, x, 0.5]),
    "product": lambda x: math.prod([x, 2]),
    "size": abs,
    "rounded": lambda x: round(x * 1.26, 1),
    "half": lambda x: x // 2,
    "parity": lambda x: x % 2,
    "both": lambda x: divmod(x, 2)[1],
    "cosine": lambda x: math.cos(x),
    "power": lambda x: 0.9**x,
    "numpy's sine": lambda x: np.sin(x),
    "numpy's double": lambda x: np.float64(2) * x,
    "down": lambda x: math.floor(x * 1.5),
    "whole part": lambda x: math.trunc(x * 1.5),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_arithmetic_is_followed(name):
    function = FOLLOWED[name]
    for value, other in ((3, 5), (3.0, 5.0)):
        tape = Tape()
        with followed_math():
            found = function(tape.leaf(None, value))
        assert isinstance(found, Live)
        assert found.plain == function(value)
        values = tape.evaluate([other])
        assert values is not None
        assert values[found.entry] == function(other)
        assert type(values[found.entry]) is type(function(other))


def test_a_zero_and_no_number_are_guarded_with_their_sign():
    for value, other in ((0.0, -0.0), (-0.0, 0.0), (math.nan, 1.0)):
        tape = Tape()
        float(tape.leaf(None, value))
        assert tape.evaluate([value]) is not None
        assert tape.evaluate([other]) is None


def test_a_number_that_outlives_its_trace_computes_like_a_plain_one():
    tape = Tape()
    live = tape.leaf(None, 3)
    tape.closed = True
    assert type(live + 1) is int
    assert float(live) == 3.0
    assert not tape.guards
