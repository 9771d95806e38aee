"""A step may give gradients to tensors that belong to no model and no optimizer of its schedule."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hocket
from quick import covering
from support.twins import Program, ran

pytestmark = pytest.mark.usefixtures("one_core")

CHANGE_AT = 45
NUM_CALLS = 60


class _Loop:
    """A step that gives gradients to `delta` or to `other`, of which its schedule does not know."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.other = copy.deepcopy(self.net)
        self.delta = torch.zeros(4, 8, requires_grad=True)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "accumulated":
            loss = self.other(x).pow(2).mean() + self.net(x).mean()
        elif self.kind == "cleared":
            self.other.zero_grad()
            loss = self.other(self.net[0](x)).pow(2).mean() + self.net(x).mean()
        elif self.kind == "used":  # free adversarial training
            self.delta.grad = None
            self.net(x + self.delta).pow(2).mean().backward()
            with torch.no_grad():
                self.delta += 0.01 * self.delta.grad.sign()
            loss = self.net(x + self.delta.detach()).pow(2).mean()
        else:
            self.optimizer.zero_grad()
            loss = self.net(x + self.delta).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    def gradients(self) -> list[torch.Tensor | None]:
        found = [self.delta, *self.other.parameters()]
        return [None if each.grad is None else each.grad.clone() for each in found]


def _removed(loop: _Loop) -> None:
    loop.other[2].weight.grad = None
    loop.delta.grad = None


def _exchanged(loop: _Loop) -> None:
    loop.other[2].weight.grad = torch.ones(2, 8)
    loop.delta.grad = torch.ones(4, 8)


def _rewritten(loop: _Loop) -> None:
    for each in (loop.other[2].weight, loop.delta):
        if each.grad is not None:
            each.grad.data = torch.ones_like(each)


def _left(loop: _Loop) -> None:
    """No-op."""


@pytest.mark.parametrize(
    ("kind", "change"), covering(["accumulated", "cleared", "used", "kept"], [_left, _removed, _exchanged, _rewritten])
)
def test_gradients_are_eagers(kind: str, change: Callable[[_Loop], None]) -> None:
    def make() -> Program:
        loop = _Loop(kind)

        def between(number: int) -> None:
            if number == CHANGE_AT:
                change(loop)

        return Program(loop.step, loop.net, loop.optimizer, between, loop.gradients)

    assert ran(make, lambda number: torch.randn(4, 8), NUM_CALLS).verdict == "planned"


@pytest.mark.parametrize("inside", [True, False])
def test_gradient_of_the_batch_is_refused(inside: bool) -> None:
    net = nn.Linear(8, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x.requires_grad_() if inside else x).pow(2).mean()
        loss.backward()
        net.zero_grad()
        return loss.detach()

    fast = hocket.schedule(step, net, [])
    for _ in range(12):
        x = torch.randn(4, 8, requires_grad=not inside)
        fast(x)
        assert x.grad is not None
    assert fast.verdict == "eager"
    assert "x.detach().requires_grad_()" in fast.why


def test_capture_leaves_gradients_of_others_alone() -> None:
    loop = _Loop("accumulated")
    loop.step(torch.randn(4, 8))
    before = loop.gradients()
    captured = hocket.capture(loop.step, loop.net, loop.optimizer, torch.randn(4, 8))
    after = loop.gradients()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert {source.name for _, source in captured.inputs} >= {"leaf0", "leaf0.grad"}
