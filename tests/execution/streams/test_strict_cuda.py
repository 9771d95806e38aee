"""Schedules on a device as strict as CUDA: what a graph repeats, what it must not hold, and captures that fail."""

from __future__ import annotations

import copy
import importlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hocket.backends import SimulatedBackend, SimulatedClock
from hocket.ir import Machine
from hocket.session import Schedule
from support.steps import update
from support.strict_cuda import CaptureRefusedError, StrictCuda

NUM_STEPS = 60
A100 = Machine.preset("a100")


class Twins:
    """Two equal models and optimizers: one is trained eagerly, one by a schedule on the strict device.

    Step counts of an optimizer, but for capturable ones, stand for tensors on the CPU, as torch keeps them.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer], device: StrictCuda | None = None) -> None:
        torch.manual_seed(0)
        self.device = device or StrictCuda()
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.models = [model, copy.deepcopy(model)]
        self.optimizers = [make(each.parameters()) for each in self.models]
        self.steps = [self.step_of(*pair) for pair in zip(self.models, self.optimizers, strict=True)]
        self.fast = scheduled(self.steps[1], self.models[1], self.optimizers[1], self.device)

    def step_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            return update(optimizer, model(batch).square().mean()).detach()

        return step

    def train(self, num_steps: int, batch: Callable[[int], Any] = lambda number: torch.randn(4, 8)) -> None:
        """Both make these steps, and are compared after each."""
        for number in range(num_steps):
            torch.manual_seed(1000 + number)
            given = batch(number)
            drawn = torch.get_rng_state()
            expected = self.steps[0](given)
            torch.set_rng_state(drawn)
            found = self.fast(given)
            self.mark_counts()
            assert torch.equal(expected, found), number
            assert same(self.state(0), self.state(1)), number

    def mark_counts(self) -> None:
        for group in self.optimizers[1].param_groups:
            for parameter in group["params"] if not group.get("capturable") and not group.get("fused") else ():
                count = self.optimizers[1].state[parameter].get("step")
                if isinstance(count, torch.Tensor):
                    self.device.on_host(count)

    def state(self, which: int) -> list[Any]:
        model, optimizer = self.models[which], self.optimizers[which]
        gradients = [parameter.grad for parameter in model.parameters()]
        kept = [list(optimizer.state[parameter].values()) for parameter in model.parameters()]
        return [list(model.state_dict().values()), gradients, kept]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)


def scheduled(step: Any, model: Any, optimizer: Any, device: StrictCuda, **options: Any) -> Schedule:
    clock = SimulatedClock()

    class OnStrict(SimulatedBackend):
        def __init__(self) -> None:
            super().__init__(A100, clock)
            self.device = device

    options = {"cache": False, "clock": clock, **options}
    return Schedule(step, model, optimizer, backend=OnStrict, **options)


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    **{
        name: partial(getattr(torch.optim, name), lr=0.01)
        for name in ("Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_ends_as_eager(name: str, foreach: bool) -> None:
    twins = Twins(partial(OPTIMIZERS[name], foreach=foreach))
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned", twins.fast.why
    assert twins.device.num_replays > NUM_STEPS // 3
    twins.fast.close()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_capturable_updates_end_as_eager(amsgrad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("torch.optim.adam"), "_get_capturable_supported_devices", lambda **_: ["cpu"]
    )
    twins = Twins(partial(torch.optim.Adam, lr=0.01, capturable=True, foreach=True, amsgrad=amsgrad))
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned", twins.fast.why
    twins.fast.close()


def test_a_batch_that_the_step_moves_to_the_device_is_moved_before_the_graph() -> None:
    device = StrictCuda()
    torch.manual_seed(0)
    models = [nn.Linear(4, 4)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step_of(which: int) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            moved = batch.to(torch.float32)  # what `.to(device)` is here
            return update(optimizers[which], models[which](moved).relu().sum()).detach()

        return step

    eager, step = step_of(0), step_of(1)
    fast = scheduled(step, models[1], optimizers[1], device)
    for number in range(NUM_STEPS):
        batch = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        device.on_host(batch)
        assert torch.equal(eager(batch), fast(batch)), number
        assert torch.equal(models[0].weight, models[1].weight), number


@pytest.mark.parametrize("number_in_graph", [0, 5])
@pytest.mark.parametrize("error", [CaptureRefusedError("not permitted"), torch.OutOfMemoryError("CUDA out of memory")])
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

    def fail(capture: int, op: int) -> None:
        if chance.random() < rate:
            raise CaptureRefusedError("CUDA error: operation not permitted when stream is capturing")

    twins = Twins(OPTIMIZERS[chance.choice(list(OPTIMIZERS))], StrictCuda(fail))
    twins.train(NUM_STEPS)
    twins.fast.close()


def test_a_capture_that_fails_later_goes_on_op_by_op() -> None:
    fails = []
    twins = Twins(OPTIMIZERS["SGD"], StrictCuda(lambda capture, op: (_ for _ in ()).throw(*fails) if fails else None))
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned"
    fails.append(CaptureRefusedError("not permitted"))
    weight = twins.models[1][0].weight
    weight.data = weight.data.clone()  # another address: the graph is captured again
    before = twins.device.num_replays
    twins.train(20)
    assert twins.device.num_replays == before


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
            optimizer.zero_grad()
            loss = net(batch).square().mean()
            loss.backward()
            optimizer.step()
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
