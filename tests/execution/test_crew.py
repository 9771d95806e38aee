"""Threads that run lanes are shared by all plans of a process, also by those whose steps run at the same time."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hocket.execution.native import NativeLanes
from hocket.ir import Lane, Plan
from hocket.native import available
from hocket.tracing import capture
from support.random_plans import on_lanes, random_order

pytestmark = pytest.mark.skipif(not available(), reason="the native core cannot be built here")
NUM_LANES = 3


class Example:
    """A step on three lanes, and eager's losses of its batches. A batch of index 9 raises.

    Args:
        seed: of the model and of the plan.
    """

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

        def step(batch: torch.Tensor) -> torch.Tensor:
            model.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        self.batches = [torch.tensor([number, 8 - number, 1]) for number in range(9)]
        self.losses = [step(batch).detach() for batch in self.batches]
        captured = capture(step, model, [], self.batches[0], split=False)
        chance = random.Random(seed)
        self.lanes = NativeLanes(captured, on_lanes(random_order(captured.graph, chance), NUM_LANES, chance))

    def run(self, num_steps: int = 9) -> None:
        for number in range(num_steps):
            assert torch.equal(self.lanes(self.batches[number % 9]), self.losses[number % 9])


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_many_plans_share_the_threads_of_one() -> None:
    Example(0).run()
    before = num_threads()
    examples = [Example(seed) for seed in range(8)]
    for example in (*examples, *examples[::-1]):
        example.run()
    assert num_threads() <= before


def test_a_step_that_raises_and_lanes_that_are_closed_leave_their_threads_to_others() -> None:
    failing, other = Example(1), Example(2)
    other.run()
    before = num_threads()
    for _ in range(5):
        with pytest.raises(IndexError):
            failing.lanes(torch.tensor([0, 9, 1]))
        other.run()
        failing.lanes.close()
        failing.run()
    assert num_threads() <= before


def wide_lanes(example: Example) -> NativeLanes:
    """Two lanes of two threads each, which have run once."""
    captured = example.lanes.captured
    order = random_order(captured.graph, random.Random(0))
    made = NativeLanes(captured, Plan(tuple(Lane(f"lane{n}", tuple(order[n::2]), width=2) for n in range(2))))
    made(example.batches[0])
    return made


def settled_threads() -> int:
    """The number of threads, once it has been the same for half a second: a thread ends when it gets to it."""
    found, since = num_threads(), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.01)
        if (now := num_threads()) != found:
            found, since = now, time.monotonic()
    return found


def test_threads_with_a_team_end_with_their_last_plan() -> None:
    """libgomp counts the threads of all teams, and those of plans that are tried and left must not stay."""
    example = Example(0)
    first = wide_lanes(example)
    during = num_threads()
    first.close()  # torch itself has begun a thread for wide ops, which stays
    after = settled_threads()
    assert after < during
    first, second = wide_lanes(example), wide_lanes(example)
    assert num_threads() == during
    first.close()
    second(example.batches[0])
    assert num_threads() == during
    second.close()
    assert settled_threads() == after


def test_steps_of_several_threads_run_at_the_same_time() -> None:
    examples = [Example(seed) for seed in range(4)]
    with ThreadPoolExecutor(len(examples)) as callers:
        for done in [callers.submit(example.run, 300) for example in examples]:
            done.result()
