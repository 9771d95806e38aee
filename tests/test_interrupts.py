"""Ctrl-C at any moment of a schedule's life leaves whole steps behind, and nothing of Hocket's."""

import math
import os
import random
import signal
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hocket
from hocket.interrupts import held_interrupts

STEPS = 200


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def snapshot(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [None if t is None else t.detach().clone() for t in (*model.state_dict().values(), *states, *gradients)]


def same(first, second):
    return len(first) == len(second) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(first, second, strict=True)
    )


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(STEPS)
    ]


def eager_states():
    model, optimizer, step = made()
    found = [snapshot(model, optimizer)]
    for batch in batches():
        step(batch)
        found.append(snapshot(model, optimizer))
    return found


def left_behind(model, handler):
    """Describe the objects of Hocket that are alive between two steps."""
    tables = [table for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")]
    return {
        "hooks on modules": any(isinstance(table, dict) and table for table in tables),
        "modes of torch": torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack() > 0,
        "a profiler": sys.getprofile() is not None,
        "functions of math": not isinstance(math.sqrt, type(len)),
        "our handler of SIGINT": signal.getsignal(signal.SIGINT) is not handler,
        "a grad mode": not torch.is_grad_enabled(),
    }


def called(fast, batch):
    """Interrupts are for this call and what it calls; the test's own code is spared."""
    return fast(batch)


@contextmanager
def interrupting(draw: random.Random):
    """SIGINT at random moments; yields the event that asks for the next one, and the handler."""
    handled, stop = threading.Event(), threading.Event()

    def handle(number, frame):
        while frame is not None:
            if frame.f_code is called.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back
        handled.set()

    def interrupt():
        while not stop.wait(draw.expovariate(1 / 0.004)):
            handled.clear()
            os.kill(os.getpid(), signal.SIGINT)
            handled.wait(20)  # a second one within one step would go through at once

    usual = signal.signal(signal.SIGINT, handle)
    sender = threading.Thread(target=interrupt, daemon=True)
    sender.start()
    try:
        yield handled, handle
    finally:
        stop.set()
        handled.set()
        sender.join()
        signal.signal(signal.SIGINT, usual)


def interrupted(seed: int, expected, interrupts: int) -> int:
    """Train under random interrupts; how many there were."""
    model, optimizer, step = made()
    fast = hocket.schedule(step, model, optimizer, guard=False, planner="serial", machine=hocket.Machine.of(cores=1))
    data = batches()
    caught = whole = 0
    threads = threading.active_count() + 1
    with interrupting(random.Random(seed)) as (handled, handler):
        while whole < STEPS and caught < interrupts:
            try:
                called(fast, data[whole])
                whole += 1
            except KeyboardInterrupt:
                caught += 1
                now = snapshot(model, optimizer)
                # It came before the step began, or when it was whole.
                assert any(same(now, expected[n]) for n in (whole, whole + 1) if n <= STEPS), (seed, caught, whole)
                whole += not same(now, expected[whole])
                assert not [what for what, there in left_behind(model, handler).items() if there]
                assert threading.active_count() <= threads + 2
                handled.set()
    return caught


def sweep(count: int) -> None:
    expected = eager_states()
    caught, seed = 0, 0
    while caught < count:
        caught += interrupted(seed, expected, 60)
        seed += 1


@pytest.mark.usefixtures("one_thread")
def test_an_interrupt_leaves_whole_steps_and_nothing_else():
    sweep(20)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_six_hundred_interrupts_leave_whole_steps_and_nothing_else():
    sweep(600)


def test_a_second_interrupt_goes_through_at_once():
    reached = []

    def twice():
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("the first one waits")
            signal.raise_signal(signal.SIGINT)
            reached.append("the second one does not")

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == ["the first one waits"]


def test_a_hold_ends_with_the_interrupt_that_came_meanwhile():
    reached = []

    def nested():
        with held_interrupts(), held_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("inside")
        reached.append("after it")

    with pytest.raises(KeyboardInterrupt):
        nested()
    assert reached == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
