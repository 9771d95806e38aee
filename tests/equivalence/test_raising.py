"""A step that raises in the middle leaves what eager leaves, on any number of lanes; the next goes on from there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hocket
from execution.probe import KINDS
from quick import covering


class Net(nn.Module):
    """An embedding, whose index may not exist, statistics that are written before the loss, dropout, and labels."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(4, 1)  # it has its gradient when another part raises
        self.words = nn.Embedding(11, 16)
        self.norm = nn.BatchNorm1d(16)
        self.inside = nn.Linear(16, 16)
        self.out = nn.Linear(16, 5)

    def forward(self, words):
        hidden = self.norm(self.words(words).mean(1))
        return self.out(F.dropout(self.inside(hidden).relu(), 0.2))


def made():
    torch.manual_seed(3)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)

    def step(batch):
        words, labels = batch
        optimizer.zero_grad()
        model.early(words / 11).square().mean().backward()
        loss = F.cross_entropy(model(words), labels)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def values(model, optimizer):
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found[f"{name}.grad"] = parameter.grad
        found[f"{name}.momentum"] = copy.copy(optimizer.state[parameter].get("momentum_buffer"))
    return found


def batch(number: int):
    draw = torch.Generator().manual_seed(number)
    words, labels = torch.randint(0, 11, (8, 4), generator=draw), torch.randint(0, 5, (8,), generator=draw)
    if number % 40 == 33:
        labels[3] = 7
    if number % 40 == 37:
        words[0, 0] = 99
    return words, labels


@pytest.mark.parametrize(("planner", "kind"), covering(["serial", "list", "concurrency", "critical-path"], KINDS))
def test_an_error_in_the_middle_of_a_step_leaves_what_eager_leaves(kind, planner):
    model, optimizer, step = made()
    twin_model, twin_optimizer, twin_step = made()
    machine = hocket.Machine.of(cores=2)
    fast = hocket.schedule(
        step, model, optimizer, planner=planner, guard=False, executor=kind, machine=machine, cache=False
    )
    raised = 0
    for number in range(120):
        states = []
        generator = torch.get_rng_state()
        for made_by in (fast, twin_step):
            torch.set_rng_state(generator)
            try:
                states.append(made_by(batch(number)))
            except (IndexError, RuntimeError) as error:
                raised += 1
                states.append(str(error).splitlines()[0])
        assert type(states[0]) is type(states[1])
        if isinstance(states[0], str):
            assert states[0] == states[1]
        mine, theirs = values(model, optimizer), values(twin_model, twin_optimizer)
        for name, value in theirs.items():
            # Rounding is that of another number of threads; a momentum that was scaled once more is far beyond it.
            same = mine[name] is None if value is None else torch.allclose(mine[name], value, rtol=1e-3, atol=1e-5)
            assert same, f"{name} after step {number}"
    assert raised == 12
    assert fast.verdict == "planned", fast.why
