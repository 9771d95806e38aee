"""Steps on devices as users run them: pinned batches, streams of their own, two devices, models that are moved."""

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hocket
from hocket.execution.streams import StreamLanes
from hocket.tracing.capturing import capture_step
from support.lagging_cuda import Lagging, LaggingCuda
from support.random_plans import on_lanes, on_streams, random_order
from support.steps import update
from support.strict_cuda import HOST, StrictCuda
from support.strict_twins import NUM_STEPS, OPTIMIZERS, Twins, same, scheduled

NUM_LATE = 12


class Late:
    """A model that a step trains eagerly, and an equal one on lanes of a device that does nothing before it has to."""

    def __init__(self, make_step: Callable[[Any, Any, Any], Callable[[Any], Any]], seed: int) -> None:
        torch.manual_seed(0)
        net: Any = nn.Module()
        net.linear, net.other = nn.Linear(8, 4), nn.Linear(8, 4)
        net.register_buffer("staging", torch.zeros(4, 8))
        nets = [net, copy.deepcopy(net)]
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in nets]
        self.gpus, self.net, self.expected = Lagging(), nets[1], nets[0]
        self.device: LaggingCuda = self.gpus.devices[0]
        self.eager, step = (make_step(*pair, self.gpus) for pair in zip(nets, optimizers, strict=True))
        for run in (self.eager, step):
            run(torch.ones(4, 8))
        captured = capture_step(step, nets[1], optimizers[1], torch.ones(4, 8))
        chance = random.Random(seed)
        plan = on_streams(on_lanes(random_order(captured.graph, chance), 3, chance))
        self.lanes = StreamLanes(captured, plan, device=self.device)
        self.device.own(list(nets[1].state_dict().values()), [optimizers[1].state[p] for p in nets[1].parameters()])

    def wait(self) -> None:
        event = self.device.event()
        self.device.record(event, self.device.current())
        self.device.wait_on_host(event)

    def check(self) -> None:
        self.gpus.synchronize()
        assert same(*(list(each.state_dict().values()) for each in (self.expected, self.net)))


def copies_later(net: Any, optimizer: Any, gpus: Lagging) -> Callable[[Any], Any]:
    def step(batch: torch.Tensor) -> torch.Tensor:
        net.staging.copy_(batch, non_blocking=True)
        return update(optimizer, (net.linear(net.staging) * net.other(net.staging)).square().mean()).detach()

    return step


@pytest.mark.parametrize("seed", range(3))
def test_a_pinned_batch_may_be_written_once_the_callers_stream_is_done(seed: int) -> None:
    late = Late(copies_later, seed)
    pinned = late.device.pinned(4 * 8 * 4).view(torch.float32).view(4, 8)
    for _ in range(NUM_LATE):
        batch = torch.randn(4, 8)
        late.eager(batch)
        pinned.copy_(batch)
        late.lanes(pinned)
        late.wait()
    late.check()


@pytest.mark.parametrize("seed", range(3))
def test_steps_keep_their_order_on_streams_of_the_callers(seed: int) -> None:
    late = Late(copies_later, seed)
    streams = [late.device.stream(0) for _ in range(2)]
    for number in range(NUM_LATE):
        batch = torch.randn(4, 8)
        late.eager(batch)
        late.device.own(batch)
        event = late.device.event()
        late.device.launch(streams[number % 2], lambda batch=batch: late.lanes(batch))
        late.device.record(event, streams[number % 2])
        late.device.wait(streams[1 - number % 2], event)
    late.check()


def test_what_a_step_makes_on_another_device_stays_outside_of_its_graph() -> None:
    class Two(Twins):
        def step_of(self, model: Any, optimizer: Any) -> Callable[[Any], Any]:
            def step(batch: torch.Tensor) -> torch.Tensor:
                there = batch.to(HOST, copy=True).tanh()
                near = model(batch)
                far = (there @ near.detach().to(HOST, copy=True).mT.mm(there).mT).to("cpu", copy=True)
                return update(optimizer, (near * far).square().mean()).detach()

            return step

    twins = Two(OPTIMIZERS["Adam"])
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned", twins.fast.why
    assert twins.device.num_replays > 20
    twins.fast.close()


def test_a_model_that_is_moved_in_mid_training_is_named_where_it_cannot_be_planned() -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fast = scheduled(lambda batch: update(optimizer, net(batch).square().mean()).detach(), net, optimizer, StrictCuda())
    for _ in range(NUM_STEPS):
        fast(torch.randn(4, 8))
    assert fast.verdict == "planned"
    net.to("meta")
    assert fast(torch.randn(4, 8, device="meta")).is_meta
    assert "meta; a step is planned on CPU cores or on one GPU" in fast.why


def test_models_that_are_fused_are_planned_on_a_device() -> None:
    device, arrays, steps = StrictCuda(), [], []
    for _ in range(2):
        torch.manual_seed(0)
        array = hocket.fuse(
            [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)) for _ in range(3)], backend="rule"
        )
        optimizer = hocket.optim.Adam(array.parameters(), lr=[0.01, 0.02, 0.03], num_models=3)
        arrays.append((array, optimizer))

    def step_of(array: Any, optimizer: Any) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            losses = array(batch).square().mean((1, 2))
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        return step

    steps = [step_of(*each) for each in arrays]
    fast = scheduled(steps[1], *arrays[1], device)
    for number in range(NUM_STEPS):
        batch = torch.randn(4, 8)
        assert same(steps[0](batch), fast(batch)), number
        assert same(*(list(array.state_dict().values()) for array, _ in arrays)), number
    assert fast.verdict == "planned", fast.why
    assert device.num_replays > 20


def test_a_step_that_asks_for_the_current_gpu_has_a_recording_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stand_in in {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "current_device": sys.get_coroutine_origin_tracking_depth,  # into which nothing can look, as into CUDA's
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    class Asking(Twins):
        def step_of(self, model: Any, optimizer: Any) -> Callable[[Any], Any]:
            def step(batch: torch.Tensor) -> torch.Tensor:
                return update(optimizer, model(batch).square().mean() * (1 + torch.cuda.current_device())).detach()

            return step

    twins = Asking(OPTIMIZERS["SGD"])
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == "planned", twins.fast.why
    try:
        sys.set_coroutine_origin_tracking_depth(2)
        twins.train(NUM_STEPS)
    finally:
        sys.set_coroutine_origin_tracking_depth(0)
    twins.train(3)
    twins.fast.close()
