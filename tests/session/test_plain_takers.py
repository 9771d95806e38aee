"""Numbers that change, handed to C code that takes plain ones only: the call is made once, and ends as eager."""

import ctypes
import datetime
import decimal
import json
import marshal
import os
import sqlite3
import statistics
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket import heap
from quick import covering
from support.steps import update
from support.twins import Program, ran

pytestmark = pytest.mark.usefixtures("one_core")

Span = datetime.timedelta
connection = sqlite3.connect(":memory:")

# Each makes a number of a whole number and of a rate.
TAKERS: dict[str, Callable[[int, float], float]] = {
    "timedelta": lambda n, lr: datetime.timedelta(days=n, seconds=lr).total_seconds() / 86400,
    "timedelta by another name": lambda n, lr: Span(days=n).days + lr,
    "timedelta times": lambda n, lr: (Span(seconds=1) * n + lr * Span(seconds=1)).total_seconds(),
    "timedelta divided": lambda n, lr: (Span(seconds=1) / n + Span(seconds=n) // n).total_seconds() + lr,
    "Decimal": lambda n, lr: float(decimal.Decimal(n) / 7 + decimal.Decimal(lr)),
    "json": lambda n, lr: len(json.dumps({"n": n, "lr": lr})) / 7,
    "marshal": lambda n, lr: marshal.loads(marshal.dumps((n, lr)))[0],
    "sqlite": lambda n, lr: connection.execute("select ? + ?", (n, lr)).fetchone()[0],
    "ctypes": lambda n, lr: ctypes.c_int(n).value + ctypes.c_double(lr).value,
    "ctypes array": lambda n, lr: (ctypes.c_double * 2)(n, lr)[0],
    "statistics": lambda n, lr: statistics.mean([n, 1, 4.5]) + statistics.pstdev([lr, 1.0]),
    "sleep": lambda n, lr: (time.sleep(lr / 1e6), n)[1],
    "calendar": lambda n, lr: datetime.datetime.fromtimestamp(n * 86400, datetime.UTC).day + lr,
    "unbound methods": lambda n, lr: int.bit_length(n) + float.__add__(lr, 1.0) + float.fromhex(float.hex(lr)),
    "numpy seed": lambda n, lr: float(np.random.default_rng(n).random()) + lr,
    "numpy date": lambda n, lr: float(np.datetime64(n, "s").astype(np.int64)) + lr,
    "generator": lambda n, lr: torch.Generator().manual_seed(n).initial_seed() + lr,
    "threads": lambda n, lr: (torch.set_num_threads(1 + n * 0), n)[1],
    "power, modulo": lambda n, lr: pow(3, n, 7) + pow(n, 2, 5) + pow(lr, 2),
    "index": lambda n, lr: list(range(n))[n // 2] + len(([0.5] * n)[:n]),
    "struct": lambda n, lr: struct.unpack("id", struct.pack("id", n, lr))[0],
    "array": lambda n, lr: array("d", [n, lr])[1],
    "text": lambda n, lr: float(format(lr, ".3f")) + int("%d" % n),  # noqa: UP031
    "new tensor": lambda n, lr: float(torch.ones(3).new_full((2,), n).shape[0]) + lr,
}
OPTIONS: tuple[dict[str, Any], ...] = ({"guard": True}, {}, {"guard": True, "numerics": "close"})


def handing_on(taker: Callable[[int, float], float], first: int, moves: bool) -> Callable[[], Program]:
    """A step that counts, and hands its count and its rate on in some of its calls.

    Args:
        taker: one of `TAKERS`.
        first: the call that hands on for the first time.
        moves: the rate changes with each call.
    """

    def make() -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        table, unseen = {"n": 0}, array("q", [0])

        def step(batch: torch.Tensor) -> torch.Tensor:
            unseen[0] += 1  # in a place that no watch sees
            table["n"] += 1
            loss = model(batch).square().mean()
            if table["n"] >= first:
                loss = loss * (1 + taker(table["n"] % 20 + 1, optimizer.param_groups[0]["lr"]) / 100)
            return update(optimizer, loss).detach()

        def between(number: int) -> None:
            if moves:
                optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)

        return Program(step, model, optimizer, between, lambda: [table, unseen[0], optimizer.state_dict()["state"]])

    return make


@pytest.mark.parametrize(("name", "number", "first"), covering(TAKERS, range(len(OPTIONS)), [1, 4]))
def test_a_number_that_c_code_refuses_costs_no_second_call_and_no_error(name, number, first):
    make = handing_on(TAKERS[name], first, moves=number != 1)
    ran(make, lambda number: torch.randn(4, 6), 12, planner="serial", **OPTIONS[number])


def test_a_constant_rate_that_is_handed_on_does_not_keep_a_step_from_its_plan():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: torch.Tensor) -> torch.Tensor:
        scale = datetime.timedelta(days=optimizer.param_groups[0]["lr"]).total_seconds()
        return update(optimizer, (model(batch) * scale).square().mean()).detach()

    fast = hocket.schedule(step, model, optimizer, planner="serial", guard=False)
    for number in range(60):
        fast(torch.randn(4, 6))
        if number == 40:
            assert fast.verdict == "planned", fast.why
            optimizer.param_groups[0]["lr"] = 0.02
    fast.close()


def test_an_error_of_the_users_own_is_eagers_word_for_word():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrong = {
        "range": lambda lr: range(lr), "index": lambda lr: [1, 2][lr], "text": lambda lr: "a" + lr,
        "bytes": lambda lr: b"".join([lr]), "mark": lambda lr: f"{lr:x}", "shape": lambda lr: torch.zeros(2, lr),
    }  # fmt: skip
    for use in wrong.values():
        with pytest.raises((TypeError, ValueError)) as expected:
            use(0.01)
        calls = []

        def step(batch: torch.Tensor, use: Any = use, calls: Any = calls) -> torch.Tensor:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            calls.append(1)
            if len(calls) >= 4:
                use(optimizer.param_groups[0]["lr"])
            return loss.detach()

        fast = hocket.schedule(step, model, optimizer)
        for _ in range(3):
            fast(torch.randn(4, 6))
        for number in range(4, 7):
            with pytest.raises((TypeError, ValueError)) as caught:
                fast(torch.randn(4, 6))
            assert (type(caught.value), str(caught.value)) == (type(expected.value), str(expected.value))
            assert len(calls) == number
        fast.close()


def test_an_error_beside_live_numbers_is_the_users_own_and_the_step_is_called_once():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    calls = []

    def step(batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return update(optimizer, model(batch).square().mean()).detach()

    fast = hocket.schedule(step, model, optimizer)
    for number in range(1, 12):
        optimizer.param_groups[0]["lr"] = None if number in (4, 7) else 0.01
        if number in (4, 7):
            with pytest.raises(TypeError, match="bad operand type for unary -: 'NoneType'"):
                fast(torch.randn(4, 6))
        else:
            fast(torch.randn(4, 6))
        assert len(calls) == number
    fast.close()


@pytest.mark.parametrize("inside", [False, True], ids=["a number", "in a tensor"])
@pytest.mark.parametrize("name", ["timedelta", "json", "Decimal", "ctypes"])
def test_a_number_of_the_batch_is_handed_on(name, inside):
    def make() -> Program:
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(inputs: torch.Tensor, number: Any) -> torch.Tensor:
            number = number.item() if inside else number
            return update(optimizer, model(inputs).square().mean() * (1 + TAKERS[name](number, number / 7))).detach()

        return Program(step, model, optimizer)

    def batch(call: int) -> Any:
        number = (call + 1) // 2
        return torch.randn(4, 6), torch.tensor(number) if inside else number

    ran(make, batch, 24, planner="serial", guard=True)


def assert_counted_numbers_are_followed(model: nn.Linear, batch: torch.Tensor, times: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counted = {"n": 0}

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = torch.cat([model(batch) for _ in range(times)]).square().mean()
        counted["n"] += 1
        return update(optimizer, loss * (1 + 0.1 * counted["n"]))

    with hocket.schedule(step, model, optimizer, guard=False, planner="serial", cache=False) as fast:
        for _ in range(20):
            fast(batch)
        assert fast.verdict == "planned", fast.why
    assert counted["n"] == 20


def test_what_trims_the_heap_while_a_step_is_recorded_takes_none_of_its_numbers() -> None:
    heap._libc.cache_clear()  # as in a process that has not trimmed any yet
    # Results of 48 MiB, beyond which it is trimmed.
    assert_counted_numbers_are_followed(nn.Linear(256, 256), torch.ones(2048, 256), times=12)


def test_a_library_that_torch_loads_in_each_step_takes_none_of_its_numbers() -> None:
    """A build for GPUs asks NVML for them in each update where an environment says so, as Lightning does."""
    model = nn.Linear(4, 4)
    of_torch: dict[str, Any] = {"__name__": "torch.cuda"}
    source = "def ask(*_):\n    import ctypes\n    ctypes.CDLL(None)"
    exec(compile(source, os.path.join(os.path.dirname(torch.__file__), "cuda", "__init__.py"), "exec"), of_torch)
    model.register_forward_hook(of_torch["ask"])
    assert_counted_numbers_are_followed(model, torch.ones(2, 4))
