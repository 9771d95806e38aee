"""Live numbers are the numbers they stand for, and wherever their value leaves our sight a guard stays behind."""

from __future__ import annotations

import copy
import ctypes
import decimal
import fractions
import functools
import json
import math
import operator
import pickle
import statistics
import struct
from math import cos as cos_by_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from equivalence.compare import Planned, Twins, assert_same, check_twins, everything, twins
from hocket.errors import CaptureError
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.program import compile_tape
from hocket.tracing.refusals import remembered_refusals
from hocket.tracing.scalars.followed_math import followed_math
from hocket.tracing.scalars.live import LateFloat, Live, LiveFloat, LiveInt
from hocket.tracing.scalars.tape import Tape

# What takes the value away: each of them for a float and a whole number alike.
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


def settled(tape: Tape, other: float) -> bool:
    """Whether the program of the tape refuses another value of its one leaf."""
    results = [evaluate([other]) for evaluate in (tape.evaluate, compile_tape(tape))]
    return results == [None, None]


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
    assert settled(tape, value + 1.5 if isinstance(value, float) else value + 7)


@pytest.mark.parametrize("name", WHOLE)
def test_every_exit_of_a_whole_number_is_a_guard(name):
    tape = Tape()
    found, expected = WHOLE[name](tape.leaf(None, 3)), WHOLE[name](3)
    assert repr(found) == repr(expected)
    assert tape.evaluate([3]) is not None
    assert settled(tape, 4)


IMPOSSIBLE = [decimal.Decimal, json.dumps, lambda x: statistics.mean([x, 1.0]), lambda x: x @ x, lambda x: x[0]]


@pytest.mark.parametrize("use", IMPOSSIBLE)
@pytest.mark.parametrize("value", [0.5, 3])
def test_what_cannot_be_done_is_an_error_and_bakes_nothing(use, value):
    with pytest.raises((TypeError, CaptureError)):
        use(Tape().leaf(None, value))


def test_what_torch_does_with_symbolic_numbers_is_refused():
    live = Tape().leaf(None, 0.5)
    with pytest.raises(CaptureError, match="cannot be followed"):
        torch.sym_max(live, 1.0)
    with pytest.raises(CaptureError, match="cannot be followed"):
        _ = live << 1


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
        assert tape.evaluate([first])[found.index] == expected


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
    assert settled(tape, 4)
    assert torch.equal(torch.tensor([2.0, 3.0]) == live.plain, torch.tensor([False, True]))


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
        assert values[found.index] == function(other)
        assert type(values[found.index]) is type(function(other))


def test_a_zero_and_no_number_are_guarded_with_their_sign():
    for value, other in ((0.0, -0.0), (-0.0, 0.0), (math.nan, 1.0)):
        tape = Tape()
        float(tape.leaf(None, value))
        for evaluate in (tape.evaluate, compile_tape(tape)):
            assert evaluate([value]) is not None
            assert evaluate([other]) is None


def test_a_number_that_outlives_its_trace_computes_like_a_plain_one():
    tape = Tape()
    live = tape.leaf(None, 3)
    tape.closed = True
    assert type(live + 1) is int
    assert float(live) == 3.0
    assert not tape.guards


@pytest.mark.parametrize("name", [*EXITS, "sum"])
def test_no_exit_is_open_to_a_late_number(name):
    late = LateFloat(torch.tensor(0.5), "train.py:7", 0.5)
    use = EXITS.get(name, lambda x: x + 1)
    with remembered_refusals() as refusals:
        # C may hide the reason ("required argument is not a float"); the trace remembers it.
        with pytest.raises((CaptureError, struct.error)), followed_math():
            use(late)
        with pytest.raises(CaptureError, match=r"train\.py:7"):
            refusals.check()


# --- Live numbers inside a step ---


class Scheduled(torch.optim.Optimizer):
    """An optimizer whose step does with its count whatever `use` says."""

    def __init__(self, params, use):
        self.use = use
        super().__init__(params, {"lr": 0.01, "decay": 0.5})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("count", 0)
                state["count"] += 1
                p.add_(self.use(p, state["count"], group), alpha=-group["lr"])


def scheduled_job(use) -> Job:
    model = torch.nn.Linear(4, 3)
    optimizer = Scheduled(model.parameters(), use)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, [torch.randn(5, 4) for _ in range(3)])


# The captures that six steps may need: a guard on a count fails in every step.
USES = {
    "as a factor": (lambda p, count, group: p.grad * count, 1),
    "of whole tensors": (lambda p, count, group: p.grad + torch.arange(3).sum() * count, 1),
    "made a tensor": (lambda p, count, group: p.grad * torch.tensor(count), 1),
    "in a list": (lambda p, count, group: p.grad * torch.tensor([count, 2])[0], 5),
    "as a size": (lambda p, count, group: p.grad * torch.ones(count).sum(), 5),
    "as a range": (lambda p, count, group: p.grad * torch.arange(count).sum(), 5),
    "as a slice": (lambda p, count, group: p.grad * p.flatten()[: min(count, 2)].sum(), 2),
    "as a place": (lambda p, count, group: p.grad * p.flatten()[count % 2], 5),
    "put somewhere": (lambda p, count, group: torch.zeros_like(p.grad).index_fill_(0, torch.tensor([0]), count), 1),
    "as a dimension": (lambda p, count, group: p.grad * p.softmax(count - count), 1),
    "a branch": (lambda p, count, group: p.grad if count % 3 else -p.grad, 4),
    "in a hook": (lambda p, count, group: with_hook(p, count), 1),
}


def with_hook(p, count):
    with torch.enable_grad():
        leaf = torch.ones(3, requires_grad=True)
        leaf.register_hook(lambda gradient: gradient * count)
        (leaf * 2).sum().backward()
    return p.grad * leaf.grad[0]


@pytest.mark.parametrize("name", USES)
def test_a_count_in_a_step_is_followed_or_guarded(name):
    use, captures = USES[name]
    check_twins(functools.partial(scheduled_job, use), captures=captures)


def test_a_branch_that_a_moved_number_would_not_take_is_traced_again():
    def use(p, count, group):
        assert group["decay"] == 0.5
        return p.grad * group["decay"]

    check_twins(functools.partial(scheduled_job, use))


def test_a_number_is_moved_where_no_branch_asks_for_it():
    pair: Twins = twins(functools.partial(scheduled_job, lambda p, count, group: p.grad * group["decay"]))
    pair.planned.step(pair.planned.batch(0))
    captured = Planned(pair.planned).capture(pair.planned.batch(0))
    moved = {leaf.name: value for leaf, value in zip(captured.trace.tape.leaves, captured.trace.tape.stand_ins)}  # noqa: B905
    assert moved["optimizer.group0.decay"] == 0.5 * 0.96875


def test_nothing_of_a_trace_stays_in_the_optimizer():
    job = scheduled_job(lambda p, count, group: p.grad * count)
    job.step(job.batch(0))
    before = [(n, copy.deepcopy(v)) for n, v in everything(job)]
    capture(job.step, job.model, job.optimizer, job.batch(0))
    assert_same(before, list(everything(job)))


def test_what_the_step_keeps_of_its_numbers_is_plain_afterwards():
    kept = SimpleNamespace(losses=[], table={}, last=None)

    def use(p, count, group):
        kept.table["count"] = count
        kept.last = group["lr"] * 2
        return p.grad

    job = scheduled_job(use)

    def step(batch):
        loss = job.step(batch)
        kept.losses.append(loss.item())
        return loss

    step(job.batch(0))
    capture(step, job.model, job.optimizer, job.batch(0))
    assert [type(loss) for loss in kept.losses] == [float, float]
    assert kept.losses[0] != kept.losses[1]
    assert type(kept.table["count"]) is int
    assert type(kept.last) is float
