"""Channels over wires, with a wire that delivers when the test says so."""

from __future__ import annotations

import pytest
import torch

from hocket.distributed.channels import PushChannel
from hocket.errors import ExecutionError


class SlowWire:
    def __init__(self) -> None:
        self.sent: list = []

    def send(self, name, tensor, epoch, done) -> None:
        self.sent.append((name, tensor, epoch, done))


@pytest.mark.parametrize("is_written", [False, True])
def test_a_gradient_that_is_written_before_it_was_delivered_is_an_error(is_written):
    wire, told = SlowWire(), []
    gradient = torch.ones(3)
    PushChannel(wire).begin("push:w.grad", gradient.detach(), 1, told.append)
    assert not told
    if is_written:
        gradient.zero_()  # what a `zero_grad(set_to_none=False)` between two steps does
    wire.sent[0][3](None)
    (error,) = told
    if is_written:
        assert isinstance(error, ExecutionError)
        assert "'push:w.grad': the gradient was written between two steps" in str(error)
    else:
        assert error is None


def test_what_fails_on_the_way_is_told_as_it_is():
    wire, told, failure = SlowWire(), [], ConnectionResetError("gone")
    gradient = torch.ones(3)
    PushChannel(wire).begin("push:w.grad", gradient, 1, told.append)
    gradient.zero_()
    wire.sent[0][3](failure)
    assert told == [failure]
