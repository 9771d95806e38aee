"""Arrays of a batch: reads of numpy's own C code are noted, and what stands for an array leaves no trace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket

READS = {
    "asarray": lambda x: np.asarray(x).max(),
    "array": lambda x: np.array(x).max(),
    "array of a list": lambda x: np.array([x, x]).max(),
    "ascontiguousarray": lambda x: np.ascontiguousarray(x.T).max(),
    "frombuffer": lambda x: np.frombuffer(x, np.float32).max(),
}


def scheduled(step: Any, model: nn.Module) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = step(batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = hocket.schedule(whole, model, optimizer, machine=hocket.Machine.of(cores=1), guard=False, cache=False)
    random = np.random.default_rng(0)
    for _ in range(40):
        fast(random.standard_normal((5, 4)).astype(np.float32))
    return fast


@pytest.mark.parametrize("name", READS)
def test_reads_by_code_that_asks_no_class_are_noted(name):
    read, model = READS[name], nn.Linear(4, 2)
    fast = scheduled(lambda x: model(torch.from_numpy(x)).square().mean() * int(read(x)), model)
    assert "computes with a numpy array" in fast.why


@pytest.mark.parametrize("name", READS)
def test_so_are_they_where_arrays_are_not_followed(name):
    read, model = READS[name], nn.Linear(4, 2)
    fast = scheduled(lambda x: model(torch.Tensor(x)).square().mean() * int(read(x)) * len(bytes(2)), model)
    assert "computes with a numpy array" in fast.why


def test_an_array_as_it_is_stays_followed():
    model = nn.Linear(4, 2)
    fast = scheduled(lambda x: model(torch.as_tensor(np.asarray(x))).square().mean(), model)
    assert fast.verdict == "planned"


def test_the_users_own_arrays_are_kept():
    model, kept = nn.Linear(4, 2), []

    def step(x):
        kept.append((x, {"part": x[2:]}))
        return model(torch.from_numpy(x)).square().mean()

    scheduled(step, model)
    assert {type(each) for x, held in kept for each in (x, held["part"])} == {np.ndarray}
