"""Ranks that never hold the whole model: captured on fake tensors, as rank 0 captures on real ones.

Memory of a model that a rank gives back, and takes again.
"""

import pytest
import torch
from torch import nn

from distributed.ranks import Ranks, returned
from distributed.stages.trained import alone, check_as_alone, on_meta, rank_of_stages, work_of
from hocket import distribute
from hocket.distributed.description import OF_RANK_0, described, difference
from hocket.distributed.stages.memory import PartMemory, captured_at, given_memory
from hocket.errors import InputError
from hocket.tracing.state import inventory


def captured_twice(name: str):
    real, fake = work_of(name, "adam"), on_meta(name)
    return (
        captured_at(0, real.step, real.model, real.optimizer, real.batches[0]),
        captured_at(1, fake.step, fake.model, fake.optimizer, fake.batches[0]),
        fake,
    )


@pytest.mark.parametrize(
    "name", ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlp", "transformer", "resnet20"))]
)
def test_a_capture_on_fake_tensors_is_that_on_real_ones(name):
    real, captured, work = captured_twice(name)
    assert captured.graph == real.graph
    assert difference(described(captured, 2, 0), described(real, 2, 0)) is None
    assert all(parameter.is_meta for parameter in work.model.parameters())
    weights = dict(work.model.named_parameters())
    made = given_memory(captured)
    for parameter_name, parameter in work.model.named_parameters():
        assert parameter is weights[parameter_name]
        assert type(parameter) is nn.Parameter
        assert parameter.device.type == "cpu"
    assert all(type(value) is torch.Tensor and not value.is_meta for value in made.stand_ins.values())


def test_calls_that_differ_are_named():
    real, captured, _ = captured_twice("mixed")
    mine, its = described(captured, 2, 0), described(real, 2, 0)
    name, said = next(iter(mine["op"].items()))
    mine["op"][name] = said[:-1] + ("0" if said[-1] != "0" else "1")
    assert f"op {name!r} is " in str(difference(mine, its))
    assert difference({"constant": {"w": OF_RANK_0}}, {"constant": {"w": "abc"}}) is None
    assert difference({"constant": {"w": "abd"}}, {"constant": {"w": "abc"}}) is not None


def test_rank_0_has_the_values():
    work = on_meta("mixed")
    with pytest.raises(InputError, match=r"'first\.weight' of rank 0 is on the meta device"):
        captured_at(0, work.step, work.model, work.optimizer, work.batches[0])


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("mixed", 2), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in ("transformer", "resnet20", "lstm-cells"))],
)
def test_ranks_without_values_train_as_one_process_does(name, ranks):
    ends = returned(rank_of_stages, ranks, name, "adam", 5, 1, "python", False, timeout_s=150)
    check_as_alone(ends, alone(name, "adam", 5))


def reads_a_value(rank, say):
    with torch.device("meta" if rank else "cpu"):
        model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        if loss.item() > 0:
            optimizer.step()
        return loss

    with distribute.stages(step, model, optimizer, timeout_s=20.0) as fast:
        fast(torch.ones(3, 4))


@pytest.mark.slow
def test_a_step_that_reads_what_is_not_there_is_refused():
    with Ranks(reads_a_value, 2) as ranks:
        text = ranks.raised(1)
    assert "reads the value of a tensor" in text
    assert "model is on the meta device" in text


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
