"""Ops that only look at shapes wait for nobody."""

import pytest
import torch
from torch import nn

import hocket
from hocket.tracing.lowering.calls import without_data
from support.steps import update

aten = torch.ops.aten


@pytest.mark.parametrize(
    "value",
    [torch.empty(2, 3), torch.empty(3, 2).t(), torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)],
    ids=["contiguous", "transposed", "channels last"],
)
def test_an_empty_tensor_keeps_shape_strides_and_type(value):
    for empty in (aten.empty_like.default, aten.new_empty_strided.default):
        func, args, kwargs = without_data(empty, value.to(torch.float64))
        made = func(*args, **kwargs)
        assert (made.shape, made.stride(), made.dtype) == (value.shape, value.stride(), torch.float64)


@pytest.mark.parametrize("func", [torch.zeros_like, torch.ones_like, torch.Tensor.new_zeros, torch.Tensor.new_ones])
def test_constants_of_a_shape(func):
    called = getattr(aten, func.__name__).default
    value = func(torch.randn(2, 3), *([(2, 3)] if "new" in func.__name__ else []))
    made, args, kwargs = without_data(called, value)
    assert torch.equal(made(*args, **kwargs), value)
    assert without_data(called, value.t()) is None, "a full tensor is contiguous"


def test_the_masks_of_dropout_wait_for_one_another_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        return update(optimizer, model(batch).sum())

    graph = hocket.capture(step, model, optimizer, torch.randn(2, 4)).graph
    masks = [op.name for op in graph.ops if op.target == "aten.bernoulli_"]
    assert len(masks) == 2
    ahead = {before for mask in masks for before in graph.predecessors[mask]}
    assert {graph[name].target for name in ahead} == {"aten.bernoulli_", "aten.empty_strided"}
