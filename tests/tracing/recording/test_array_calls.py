"""Arrays of a batch: they are followed into tensors and C code, and what stands for one leaves no trace."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hocket
from hocket.tracing.recording import record

OTHER_NAME = torch.from_numpy

READS = {
    "asarray": lambda x: np.asarray(x).max(),
    "array": lambda x: np.array(x).max(),
    "array of a list": lambda x: np.array([x, x]).max(),
    "ascontiguousarray": lambda x: np.ascontiguousarray(x.T).max(),
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


@pytest.mark.parametrize(
    "read",
    [
        lambda x: len(bytes(memoryview(x))) // 80,
        lambda x: int(torch.frombuffer(x, dtype=torch.float32).max()),
        lambda x: len(json.dumps(1)),
        lambda x, made_of=torch.from_numpy: int(made_of(x).shape[0]),
        lambda x: 1 if type(x) is np.ndarray else 2,
    ],
    ids=["memory", "buffer", "plain values", "closure", "types"],
)
def test_a_step_that_could_tell_an_array_from_its_stand_in_stays_eager(read):
    model = nn.Linear(4, 2)
    fast = scheduled(lambda x: model(torch.from_numpy(x)).square().mean() * read(x), model)
    assert "and its batch holds a numpy array" in fast.why


@pytest.mark.parametrize(
    "tensor_of",
    [
        torch.Tensor,
        lambda x: torch.Tensor(x[1:]),
        lambda x: OTHER_NAME(x * 2),
        lambda x: torch.DoubleTensor(x / 2).float(),
        lambda x: torch.FloatTensor([row.mean() for row in x.T]),
        lambda x: torch.from_dlpack(x),
        lambda x: torch.as_tensor(np.asarray(x)),
        lambda x: torch.as_tensor(x, dtype=torch.float64, device="cpu").float(),
        lambda x: torch.eye(4)[np.abs(x[:3, 0]).astype(int) % 4],
    ],
)
def test_tensors_made_of_arrays_are_followed(tensor_of):
    model = nn.Linear(4, 2)
    assert scheduled(lambda x: model(tensor_of(x)).square().mean(), model).verdict == "planned"


def test_arrays_of_the_batch_are_followed_beside_a_device(monkeypatch):
    class OnDevice(record.KnownState):
        has_cuda = property(lambda self: True, lambda self, _: None)

    monkeypatch.setattr(record, "KnownState", OnDevice)
    model = nn.Linear(4, 2)
    fast = scheduled(lambda x: model(torch.from_numpy(((x - x.mean()) / 2)[np.argsort(x[:, 0])])).mean(), model)
    assert fast.verdict == "planned"
    fast = scheduled(lambda x: model(torch.from_numpy(x)).mean() * model.weight.detach().numpy().max(), model)
    assert "out of torch's sight" in fast.why


def test_the_users_own_arrays_are_kept():
    model, kept = nn.Linear(4, 2), []

    def step(x):
        kept.append((x, {"part": x[2:]}))
        return model(torch.from_numpy(x)).square().mean()

    scheduled(step, model)
    assert {type(each) for x, held in kept for each in (x, held["part"])} == {np.ndarray}
