"""A saved state is put back whatever memory its tensors have."""

import pytest
import torch
from torch import nn

import hocket
from hocket.tracing.saved_state import RandomStates, Saved
from hocket.tracing.state import inventory


def of_inference_mode():
    with torch.inference_mode():
        return torch.randn(3, 4)


TENSORS = {
    "expanded": lambda: torch.randn(3, 1).expand(3, 4),
    "expanded twice": lambda: torch.randn(1, 1).expand(3, 4),
    "of inference mode": of_inference_mode,
    "transposed": lambda: torch.randn(4, 3).t(),
    "of every second element": lambda: torch.randn(3, 8)[:, ::2],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensor_is_put_back(kind):
    tensor = TENSORS[kind]()
    before = tensor.clone()
    saved = Saved(inventory(nn.Linear(2, 2), None), [tensor])
    with torch.inference_mode():
        tensor[:1].add_(1) if kind == "of inference mode" else tensor.as_strided((1,), (1,)).add_(1)
    assert not torch.equal(tensor, before)
    saved.restore()
    assert torch.equal(tensor, before)


def test_draws_of_devices_in_use_are_put_back(monkeypatch):
    drawn = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", (drawn,))
    states = RandomStates()
    first = torch.rand(3, generator=drawn)
    states.restore()
    assert torch.equal(first, torch.rand(3, generator=drawn))


@pytest.mark.parametrize("call", [3, 5, 6, 20])
def test_weight_is_expanded_between_steps(call):
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD([model[1].weight, *model[0].parameters()], lr=0.1, foreach=False)

        def step(x):
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            model[0].weight.grad = None
            optimizer.step()
            return loss

        return step, model, optimizer

    x = torch.randn(3, 4)
    eager, model, _ = build()
    step, other, optimizer = build()
    machine = hocket.Machine.of(cores=1)
    with hocket.schedule(step, other, optimizer, guard=False, planner="serial", machine=machine, cache=False) as fast:
        for n in range(40):
            if n == call:
                for each in (model, other):
                    each[0].weight.data = each[0].weight.data[:, :1].expand(4, 4)
            assert torch.equal(eager(x), fast(x))
            assert "failed" not in fast.why
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("call", [2, 4, 6, 12, 30])
@pytest.mark.parametrize("numerics", ["bitwise", "close"])
def test_gradient_that_torch_would_not_take_back_costs_no_step(numerics, call):
    def run(is_scheduled):
        torch.manual_seed(0)
        net, aside = nn.Linear(4, 3), nn.Linear(4, 3)
        optimizer = torch.optim.SGD([*net.parameters(), *aside.parameters()], lr=0.05)
        table = {"h": torch.zeros(4, 3)}

        def step(batch):
            net.zero_grad()
            loss = (net(batch) + table["h"]).square().mean()
            loss.backward()
            optimizer.step()
            table["h"] = 0.5 * table["h"] + net(batch).detach()
            return loss.detach()

        run_step = hocket.schedule(step, net, optimizer, numerics=numerics) if is_scheduled else step
        aside(torch.ones(1, 4)).sum().backward()
        losses = []
        for number in range(call + 12):
            if number == call:
                aside.weight.data = aside.weight.data.double()
            losses.append(run_step(torch.randn(4, 4)))
        return [*losses, *net.parameters(), *aside.parameters(), table["h"]]

    for eager, scheduled in zip(run(False), run(True), strict=True):
        if numerics == "bitwise":
            assert torch.equal(eager, scheduled)
        else:
            assert torch.allclose(eager, scheduled, 1e-3, 1e-4)
