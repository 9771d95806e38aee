"""`hocket.schedule_update`: updates by plan in a loop that stays the user's, with eager's bits."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

import hocket
from equivalence.compare import assert_same, named_leaves
from hocket.errors import InputError

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "fused adamw": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
}
STEPS = 40


class Training:
    """A classifier that is trained by eager's forward and backward.

    Args:
        optimizer: a name in `OPTIMIZERS`.
        way: of an update: ``plain``, ``scheduler before`` or ``scheduler after`` the update was scheduled, by a
            ``closure``, or by a ``scaler`` that meets infinite gradients.
        by_plan: schedule the updates.
    """

    def __init__(self, optimizer: str, way: str, by_plan: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.scheduler = ExponentialLR(self.optimizer, 0.97) if way == "scheduler before" else None
        self.fast = hocket.schedule_update(self.optimizer, guard=False, cache=False) if by_plan else None
        if way == "scheduler after":
            self.scheduler = ExponentialLR(self.optimizer, 0.97)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=6) if way == "scaler" else None
        self.way = way

    def loss(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator)
        if self.scaler is not None and number % 9 == 8:
            x = x * torch.inf
        self.optimizer.zero_grad()
        return F.cross_entropy(self.model(x), y)

    def closure(self, number: int) -> torch.Tensor:
        loss = self.loss(number)
        loss.backward()
        return loss

    def step(self, number: int) -> Any:
        if self.way == "closure":
            return self.optimizer.step(lambda: self.closure(number))
        if self.scaler is None:
            loss = self.closure(number)
            self.optimizer.step()
        else:
            loss = self.loss(number)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss

    def trained(self) -> list[Any]:
        losses = [self.step(number).detach() for number in range(STEPS)]
        scale = self.scaler.state_dict() if self.scaler is not None else {}
        states = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scaler": scale}
        return list(named_leaves("state", [losses, states]))


@pytest.mark.parametrize("way", ["plain", "scheduler before", "scheduler after", "closure", "scaler"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_by_plan_have_the_bits_of_eager(optimizer: str, way: str) -> None:
    planned = Training(optimizer, way, by_plan=True)
    assert_same(Training(optimizer, way, by_plan=False).trained(), planned.trained())
    assert planned.fast is not None
    assert planned.fast.verdict == "planned", planned.fast.why


def test_closures_are_called_by_the_optimizer_where_hooks_come_first() -> None:
    def trained(by_plan: bool) -> list[str]:
        training, order = Training("sgd", "closure", by_plan), []
        training.optimizer.register_step_pre_hook(lambda *_: order.append("hook"))
        training.optimizer.step(lambda: order.append("closure"))
        return order

    assert trained(True) == trained(False) == ["hook", "closure"]


def test_a_closure_of_lbfgs_is_called_as_often_as_by_eager() -> None:
    def trained(by_plan: bool) -> tuple[int, list[float]]:
        weight, calls = nn.Parameter(torch.tensor([2.0, -1.0])), []
        optimizer = torch.optim.LBFGS([weight], max_iter=5)
        fast = hocket.schedule_update(optimizer, cache=False) if by_plan else None

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (weight**4).sum()
            loss.backward()
            calls.append(loss.item())
            return loss

        for _ in range(8):
            optimizer.step(closure)
        assert fast is None or "LBFGS.step gets a closure" in fast.why
        return len(calls), weight.tolist()

    assert trained(True) == trained(False)


def test_copies_and_pickles_are_plain_and_it_can_be_undone() -> None:
    training = Training("adam", "plain", by_plan=True)
    training.step(0)
    for other in (copy.deepcopy(training.optimizer), pickle.loads(pickle.dumps(training.optimizer))):
        assert "step" not in vars(other)
    del training.optimizer.step
    training.step(1)
    hocket.schedule_update(training.optimizer, cache=False)


def test_whole_steps_with_a_scheduled_update_are_eager_steps() -> None:
    def trained(by_plan: bool) -> list[Any]:
        training = Training("adam", "plain", by_plan)

        def step(number: int) -> None:
            training.step(number)

        run = hocket.schedule(step, training.model, training.optimizer, cache=False) if by_plan else step
        for number in range(STEPS):
            run(number)
        return list(training.model.named_parameters())

    assert_same(trained(True), trained(False))


def test_bad_arguments_are_named() -> None:
    optimizer = Training("sgd", "plain", by_plan=True).optimizer
    with pytest.raises(InputError, match="scheduled already"):
        hocket.schedule_update(optimizer)
    with pytest.raises(InputError, match="expected an optimizer of torch's kind, got Linear"):
        hocket.schedule_update(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="numerics"):
        hocket.schedule_update(torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1), numerics="exact")
