"""A convolution's backward taken apart: which parts there are, what each computes, and which stay together."""

from typing import Any

import pytest
import torch
from torch import nn

from hocket.tracing import capture
from hocket.tracing.captured import relowered
from hocket.tracing.lowering.passes import PARTS
from support.steps import update


def net() -> tuple[Any, ...]:
    """Arguments of a capture."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        return update(optimizer, model(batch).square().mean())

    return step, model, optimizer, torch.randn(2, 3, 8, 8)


def backward_ops(captured) -> dict[str, str]:
    return {op.name: op.role for op in captured.graph.ops if op.target == "aten.convolution_backward"}


def test_capture_splits_on_demand_and_asks_what_pays():
    arguments = net()
    assert backward_ops(capture(*arguments, split=False)) == {
        "2/convolution_backward": "activation_grad",
        "0/convolution_backward": "weight_grad",
    }
    assert backward_ops(capture(*arguments)) == {
        "2/convolution_backward.activation": "activation_grad",
        "2/convolution_backward.weight": "weight_grad",
        "2/convolution_backward.bias": "bias_grad",
        "0/convolution_backward.weight": "weight_grad",
        "0/convolution_backward.bias": "bias_grad",
    }
    asked = []

    def pays(name, part):
        asked.append((name, part))
        return name.startswith("2/") and part == "activation"

    found = backward_ops(capture(*arguments, pays=pays))
    assert found == {
        "2/convolution_backward.activation": "activation_grad",
        "2/convolution_backward.weight": "weight_grad",
        "0/convolution_backward.weight": "weight_grad",
    }
    assert {("2/convolution_backward", part) for part in PARTS} <= set(asked)


def test_a_captured_step_can_be_split_later_without_another_trace():
    arguments = net()
    together, apart = capture(*arguments, split=False), capture(*arguments, split=True)
    assert relowered(together, split=True).graph == apart.graph
    assert relowered(apart, split=False).graph == together.graph


def test_a_split_keeps_the_operations_of_the_joint_op():
    arguments = net()
    together, apart = capture(*arguments, split=False), capture(*arguments, split=True)
    for layer in ("0", "2"):
        whole = sum(op.flops for op in together.graph.ops if op.layer == layer and "backward" in op.target)
        shares = sum(op.flops for op in apart.graph.ops if op.layer == layer and "backward" in op.target)
        assert shares == pytest.approx(whole)
