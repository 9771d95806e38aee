"""Every optimizer of torch on the strict device: rates, batches and accumulation change, and no bit differs."""

import copy
import importlib
import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hocket.execution.streams import GraphedLanes
from hocket.ir import Lane, Plan
from hocket.tracing.capturing import capture_step
from hocket.tracing.recording import outcomes
from support.strict_cuda import StrictCuda
from support.strict_twins import NUM_STEPS, OPTIMIZERS, Twins, same

SLOW = partial(pytest.param, marks=pytest.mark.slow)
KINDS = ("single", "foreach", "fused", "capturable", "capturable foreach", "tensor rate")
MADE = ("before", "within", "after")


def has(name: str, kind: str) -> bool:
    named = inspect.signature(getattr(torch.optim, name)).parameters
    return all(word in named for word in kind.split() if word in ("foreach", "fused", "capturable")) and (
        kind != "fused" or name in ("SGD", "Adam", "AdamW", "Adagrad")
    )


CELLS = [(name, kind, made) for name in OPTIMIZERS for kind in KINDS if has(name, kind) for made in MADE]
QUICK = set(random.Random(5).sample(CELLS, 3)) | {("Adam", kind, "within") for kind in ("foreach", "fused")}
ACCUMULATES = 25  # after so many steps the number of micro-batches changes


class Accumulating(Twins):
    """A batch is a tuple of micro-batches, whose gradients are added."""

    def step_of(self, model: Any, optimizer: Any) -> Callable[[Any], Any]:
        def step(batches: tuple[torch.Tensor, ...]) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for batch in batches:
                loss = model(batch).square().mean() / len(batches)
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            return total

        return step

    def set_rate(self, rate: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def make_states_anew(self) -> None:
        """As a loaded checkpoint does: other tensors in all places."""
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        self.mark_counts()


def maker(name: str, kind: str) -> Callable[..., torch.optim.Optimizer]:
    flags = {word: True for word in kind.split() if word in ("foreach", "fused", "capturable")}
    if not flags:
        flags = {"foreach": False}
    make = OPTIMIZERS[name]
    if kind == "tensor rate":
        return lambda parameters: make(parameters, **flags, lr=torch.tensor(make.keywords["lr"]))
    return partial(make, **flags)


@pytest.fixture
def _capturable_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in OPTIMIZERS:
        module = importlib.import_module(f"torch.optim.{name.lower()}")
        if hasattr(module, "_get_capturable_supported_devices"):
            monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    return


@pytest.mark.usefixtures("_capturable_on_cpu")
@pytest.mark.parametrize(
    ("name", "kind", "made"), [pytest.param(*cell, marks=() if cell in QUICK else pytest.mark.slow) for cell in CELLS]
)
def test_no_bit_differs_from_eager(name: str, kind: str, made: str) -> None:
    twins = Accumulating(maker(name, kind), StrictCuda())
    if made == "before":
        for number in range(2):
            for step in twins.steps:
                torch.manual_seed(number)
                step((torch.randn(4, 8),))
        twins.mark_counts()
    for first in range(0, 125 if (name, kind, made) in QUICK else 200, ACCUMULATES):
        twins.set_rate(0.01 / (1 + first // 50))
        if made == "after" and first == 2 * ACCUMULATES:
            twins.make_states_anew()
        num_micro = 1 + first // ACCUMULATES % 2
        twins.train(ACCUMULATES, lambda number, first=first, num=num_micro: micro_batches(first + number, num))
    if kind != "tensor rate" or "reads the values of tensors" not in twins.fast.why:
        assert twins.device.num_replays, twins.fast.why
    twins.fast.close()


def micro_batches(seed: int, num: int) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(4, 8, generator=chance) for _ in range(num))


def test_an_optimizer_that_reads_its_weights_is_named() -> None:
    twins = Twins(partial(torch.optim.Adafactor, lr=0.01))
    twins.train(12)
    assert "the optimizer at" in twins.fast.why
    assert "as LBFGS and Adafactor do" in twins.fast.why


class Scaled(Twins):
    """Each has a scaler, whose scale grows until it is too large."""

    clips = False

    def step_of(self, model: Any, optimizer: Any) -> Callable[[Any], Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
        self.__dict__.setdefault("scalers", []).append(scaler)
        clips = self.clips

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = model(batch).float().square().mean()
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    def state(self, which: int) -> list[Any]:
        return [*super().state(which), list(self.scalers[which].state_dict().values())]


class ScaledAndClipped(Scaled):
    clips = True


def some_infinite(number: int) -> torch.Tensor:
    return torch.full((4, 8), torch.inf) if random.Random(number).random() < 0.05 else torch.randn(4, 8)


@pytest.mark.parametrize("kind", [Scaled, ScaledAndClipped])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["SGD", SLOW("Adam"), "AdamW"])
def test_an_update_that_its_scaler_skips_is_undone(name: str, foreach: bool, kind: type[Twins]) -> None:
    twins = kind(partial(OPTIMIZERS[name], foreach=foreach))
    twins.train(150, some_infinite)
    assert twins.device.num_replays > 40, twins.fast.why
    twins.fast.close()


@pytest.mark.parametrize("is_fused", [True, False])
def test_an_update_that_cannot_be_undone_is_named_unless_it_is_fused(
    is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outcomes, "MAX_KEPT_BYTES", 0)
    twins = Scaled(partial(torch.optim.Adam, lr=0.01, fused=is_fused))
    twins.train(NUM_STEPS)
    assert twins.fast.verdict == ("planned" if is_fused else "eager"), twins.fast.why
    assert is_fused or "fused=True" in twins.fast.why


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_graph_with_a_scaler_skips_the_same_steps_as_eager(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))]
    models.append(copy.deepcopy(models[0]))
    optimizers = [OPTIMIZERS[name](model.parameters(), fused=True) for model in models]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=10) for _ in models]

    def step_of(model: Any, optimizer: Any, scaler: Any) -> Callable[[Any], Any]:
        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = model(batch).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    steps = [step_of(*each) for each in zip(models, optimizers, scalers, strict=True)]
    for step in steps:
        step(torch.ones(4, 8))
    captured = capture_step(steps[1], models[1], optimizers[1], torch.ones(4, 8))
    order = Plan((Lane("gpu0.0", captured.graph.order, "stream", "gpu0"),), planner="serial")
    device = StrictCuda()
    lanes = GraphedLanes(captured, order, device=device)
    for number in range(NUM_STEPS):
        batch = torch.full((4, 8), torch.inf) if number % 17 == 16 else torch.randn(4, 8)
        assert same(steps[0](batch), lanes(batch)), number
        assert same([*models[0].state_dict().values()], [*models[1].state_dict().values()]), number
        assert scalers[0].state_dict() == scalers[1].state_dict(), number
    assert device.num_replays == NUM_STEPS
    lanes.close()
