"""Schedules on a device as strict as CUDA: what a graph repeats, what it must not hold, and captures that fail."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hocket.autotune import tuner
from quick import covering
from support.steps import update
from support.strict_cuda import CaptureRefusedError, StrictCuda
from support.strict_twins import NUM_STEPS, OPTIMIZERS, Twins, scheduled


def test_a_batch_that_the_step_moves_to_the_device_is_moved_before_the_graph() -> None:
    device = StrictCuda()
    torch.manual_seed(0)
    models = [nn.Linear(4, 4)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step_of(which: int) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizers[which].zero_grad()
            moved = batch.to(torch.float32)  # what `.to(device)` is here
            loss = models[which](moved).relu().sum()
            loss.backward()
            optimizers[which].step()
            return loss.detach()

        return step

    eager, step = step_of(0), step_of(1)
    fast = scheduled(step, models[1], optimizers[1], device)
    for number in range(NUM_STEPS):
        batch = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        device.on_host(batch)
        assert torch.equal(eager(batch), fast(batch)), number
        assert torch.equal(models[0].weight, models[1].weight), number


@pytest.mark.parametrize(
    ("error", "number_in_graph"),
    covering([CaptureRefusedError("not permitted"), torch.OutOfMemoryError("CUDA out of memory")], [0, 5]),
)
def test_a_capture_that_fails_leaves_the_step_eager_once_and_with_the_reason(error, number_in_graph) -> None:
    def fail(capture: int, op: int) -> None:
        if op == number_in_graph:
            raise error

    twins = Twins(OPTIMIZERS["Adam"], StrictCuda(fail))
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "eager"
    assert str(error) in twins.fast.why
    assert twins.device.current() == "caller's"


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 500))])
def test_failures_at_random_never_reach_the_user(seed: int) -> None:
    chance = random.Random(seed)
    rate = chance.choice([0.001, 0.01, 0.1])
    said = chance.choice(["operation not permitted when stream is capturing", "out of memory", "unknown error"])

    def fail(*_: int) -> None:
        if chance.random() < rate:
            raise CaptureRefusedError(f"CUDA error: {said}")

    twins = Twins(OPTIMIZERS[chance.choice(list(OPTIMIZERS))], StrictCuda(fail, fail))
    twins.train(NUM_STEPS)
    if twins.fast.verdict == "eager":
        assert said in twins.fast.why or "faster" in twins.fast.why
    assert twins.device.current() == "caller's"
    twins.fast.close()


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_a_graph_that_fails_later_goes_on_op_by_op_until_it_is_closed(when: str) -> None:
    fails: list[Exception] = []

    def fail(*_: int) -> None:
        for error in fails:
            raise error

    device = StrictCuda(**{f"fail_{when}": fail})
    twins = Twins(OPTIMIZERS["SGD"], device)
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned"
    fails.append(CaptureRefusedError("not permitted"))
    weight = twins.models[1][0].weight
    weight.data = weight.data.clone()  # another address: the graph is captured again
    twins.train(3)
    before = device.num_replays
    twins.train(20)
    assert device.num_replays == before
    fails.clear()
    twins.train(5)
    assert device.num_replays == before
    twins.fast.close()
    twins.train(5)
    assert device.num_replays == before + 5


def test_a_gradient_that_is_kept_is_not_written_over() -> None:
    twins = Twins(OPTIMIZERS["SGD"])
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned"
    kept, expected = twins.models[1][0].weight.grad, twins.models[0][0].weight.grad.clone()
    before = twins.device.num_replays
    twins.train(3)
    assert torch.equal(kept, expected)
    del kept
    twins.train(5)
    assert before < twins.device.num_replays <= before + 6


def test_state_that_is_bound_anew_is_not_captured_again_in_each_step() -> None:
    device, nets = StrictCuda(), []
    for _ in range(2):
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        net.register_buffer("average", torch.zeros(1, 4))
        nets.append((net, torch.optim.SGD(net.parameters(), lr=0.1)))

    def step_of(net: Any, optimizer: Any) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = update(optimizer, net(batch).square().mean())
            net.average = net.average * 0.9 + net.weight.detach() * 0.1
            return loss.detach()

        return step

    eager = step_of(*nets[0])
    fast = scheduled(step_of(*nets[1]), *nets[1], device)
    kept = []
    for number in range(NUM_STEPS):
        batch = torch.randn(4, 4)
        assert torch.equal(eager(batch), fast(batch))
        assert torch.equal(nets[0][0].average, nets[1][0].average), number
        if number > NUM_STEPS - 5:
            kept.append((nets[0][0].average.clone(), nets[1][0].average))
    assert fast.verdict == "planned"
    assert device.num_captures < 12
    assert all(torch.equal(*pair) for pair in kept)


def test_a_search_holds_the_memory_of_one_graph_whatever_the_number_of_its_candidates(monkeypatch) -> None:
    """A capture begins by giving back what graphs had that are gone (`torch.cuda.graph` empties the cache)."""
    peaks, finalists = [], tuner.finalists
    for num in (1, 5):
        monkeypatch.setattr(tuner, "finalists", lambda proposals, num=num: finalists(proposals)[:1] * num)
        twins = Twins(OPTIMIZERS["Adam"])
        twins.train(3 * NUM_STEPS)
        assert len(twins.fast.decision.candidates) == num
        peaks.append(twins.device.peak_graph_bytes)
        twins.fast.close()
        assert not twins.device.graph_bytes
    assert peaks[0] == peaks[1]
