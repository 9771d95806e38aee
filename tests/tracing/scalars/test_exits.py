"""Wherever the value of a live number leaves our sight a guard stays behind."""

import ctypes
import fractions
import functools
import math
import operator
import pickle
import struct
from math import cos as cos_by_name

import numpy as np
import pytest
import torch

from hocket.tracing.reasons import Reasons
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.late import LateTape
from hocket.tracing.scalars.live import Live
from hocket.tracing.scalars.tape import Tape

# Exits of a value, each for a float and for a whole number.
EXITS = {
    "float": float,
    "complex": complex,
    "text": str,
    "text for programmers": repr,
    "formatted": lambda x: f"block{x}",
    "formatted by a mark": lambda x: format(x, ".2f"),
    "by the old mark": lambda x: "%.3f" % x,  # noqa: UP031
    "old mark for whole numbers": lambda x: "%d" % x,  # noqa: UP031
    "hash": hash,
    "key": lambda x: {x: 1},
    "looked up": lambda x: {3: "three"}.get(x),
    "in a set": lambda x: x in {1, 2, 3},
    "ratio": lambda x: x.as_integer_ratio(),
    "fraction": fractions.Fraction,
    "bytes": lambda x: struct.pack("d", x),
    "c": ctypes.c_double,
    "pickled": lambda x: pickle.loads(pickle.dumps(x)),
    "array": lambda x: np.array([x]),
    "numpy float": np.float64,
    "numpy whole number": lambda x: np.int64(x) if x == 3 else None,
    "array of": lambda x: np.arange(4.0) * x,
    "numpy's function": lambda x: np.maximum(x, [1, 2]),
    "numpy's sum": lambda x: np.add.reduce([x, 1.0]),
    "single precision": lambda x: np.float32(2) * x,
    "single precision, left": lambda x: x * np.float32(2),
    "complex sum": lambda x: 1j + x,
    "complex sum, left": lambda x: x + 1j,
    "equal to complex": lambda x: x == 3j,
    "math, by name": cos_by_name,
    "math, several": lambda x: math.fsum([x, 1.0]),
    "math, generated": lambda x: math.fsum(y for y in (x, 1.0)),
    "math, with an option": lambda x: math.isclose(x, 3.0, rel_tol=0.5),
    "math, a pair": math.frexp,
    "to the power of, modulo": lambda x: pow(int(x), 2, 5),
    "cached": lambda x: functools.lru_cache(lambda y: 1)(x),
    "hexadecimal": lambda x: x.hex() if isinstance(x, float) else hex(x),
}
# C functions that read the value of a float without asking it; what they make of it is seen where torch gets it.
READ_IN_C = ("by the old mark", "bytes", "c", "math, by name", "math, a pair", "complex sum")
WHOLE = {
    "index": operator.index,
    "range": lambda x: list(range(x)),
    "item of a list": lambda x: [0, 1, 2, 3][x],
    "slice": lambda x: [0, 1, 2, 3][:x],
    "repeated": lambda x: [0] * x,
    "repeated, left": lambda x: x * "a",
    "binary": bin,
    "character": chr,
    "common divisor": lambda x: math.gcd(x, 6),
    "bits": lambda x: x.bit_length(),
    "as bytes": lambda x: x.to_bytes(2, "big"),
    "power, modulo": lambda x: pow(x, 2, 5),
    "zeros": np.zeros,
    "counted": np.arange,
}


@pytest.mark.parametrize("value", [3.0, 3])
@pytest.mark.parametrize("name", EXITS)
def test_every_exit_is_a_guard(name, value):
    tape = Tape()
    with followed_math():
        found = EXITS[name](tape.leaf(None, value))
    expected = EXITS[name](value)
    assert not isinstance(found, Live)
    assert repr(found) == repr(expected) or "c_double" in repr(found)
    assert tape.evaluate([value]) is not None
    other = value + 1.5 if isinstance(value, float) else value + 7
    assert tape.evaluate([other]) is None, "the value is guarded"


@pytest.mark.parametrize("name", WHOLE)
def test_every_exit_of_a_whole_number_is_a_guard(name):
    tape = Tape()
    found, expected = WHOLE[name](tape.leaf(None, 3)), WHOLE[name](3)
    assert repr(found) == repr(expected)
    assert tape.evaluate([3]) is not None
    assert tape.evaluate([4]) is None


@pytest.mark.parametrize(
    ("name", "value"), [*((name, 0.5) for name in [*EXITS, "sum"]), *((name, 3) for name in [*EXITS, *WHOLE, "sum"])]
)
def test_no_exit_is_open_to_a_late_number(name, value):
    reasons = Reasons()
    late = LateTape(tape=Tape(reasons=reasons)).read(value, None, "train.py:7")
    use = (EXITS | WHOLE).get(name, lambda x: x + 1)
    with followed_math():
        try:
            found = use(late)
        except TypeError:
            found = TypeError
    try:
        expected = use(value)
    except TypeError:
        expected = TypeError
    assert repr(found) == repr(expected) or "c_double" in repr(found), "the step goes on as eager does"
    assert (str(reasons.first).count("train.py:7") == 1) == (name not in READ_IN_C or type(value) is int)


def test_comparisons_with_what_is_no_number_are_those_of_a_plain_number():
    tape = Tape()
    live = tape.leaf(None, 3)
    assert live is not None
    assert (live == None) is False  # noqa: E711
    assert live != "abc"
    assert live not in ["abc", None, (3,)]
    assert not tape.guards
    with pytest.raises(TypeError):
        _ = live < "abc"
    assert live in ["abc", 3]
    assert tape.evaluate([4]) is None
    assert torch.equal(torch.tensor([2.0, 3.0]) == live.plain, torch.tensor([False, True]))
