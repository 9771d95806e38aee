"""Memory of a model that a rank gives back, and takes again."""

from __future__ import annotations

import torch
from torch import nn

from hocket.distributed.stages.memory import PartMemory
from hocket.tracing.state import inventory


def test_what_is_not_kept_is_empty_until_it_is_restored():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    places = inventory(model, optimizer)
    entries = {entry.name: entry for entry in (*places.parameters, *places.tensors)}
    weight, bias = model.weight, model.bias.detach().clone()
    memory = PartMemory(entries)
    memory.keep(["bias"])
    assert model.weight is weight
    assert sorted(memory.released) == sorted(set(entries) - {"bias"})
    assert all(entries[name].get().untyped_storage().nbytes() == 0 for name in memory.released)
    assert torch.equal(model.bias, bias)
    memory.keep(["bias"])  # once more changes nothing
    memory.restore()
    assert not memory.released
    assert model.weight is weight
    assert weight.shape == (2, 3)
    assert optimizer.state[weight]["step"].shape == ()


def test_state_that_is_not_made_yet_has_nothing_to_give_back():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    places = inventory(model, optimizer)
    optimizer.state.clear()
    memory = PartMemory({entry.name: entry for entry in places.tensors})
    memory.keep([])
    assert not memory.released
