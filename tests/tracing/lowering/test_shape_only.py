"""Ops that only look at shapes wait for nobody."""

import torch
from torch import nn

import hocket
from support.steps import update


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
