"""Updates as chains: each optimizer's with eager's bits, and which ops stay as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn, optim

from hocket.native import available
from hocket.tracing import capture
from hocket.tracing.captured import Captured, relowered
from hocket.tracing.lowering.chains import exact_ops, run_chain
from hocket.tracing.lowering.lower import UPDATE_CHAINS
from support.captures import kernels, one_lane
from support.steps import training_step

pytestmark = pytest.mark.skipif(not available(), reason=available().why)

# Large enough for several blocks, with rows that fill no vector, and one parameter for two threads.
SIZES = (37, 301, 211, 5)
BATCHES = [(torch.randn(16, SIZES[0]), torch.randint(SIZES[-1], (16,))) for _ in range(4)]
# Each optimizer, and the kernels of its update that are left beside chains.
OPTIMIZERS: dict[str, tuple[Callable[..., optim.Optimizer], set[str]]] = {
    "sgd": (lambda p: optim.SGD(p, lr=0.1), set()),
    "momentum": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2), set()),
    "nesterov": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True), set()),
    "adam": (lambda p: optim.Adam(p, weight_decay=0.1), set()),
    "adamw": (lambda p: optim.AdamW(p, betas=(0.4, 0.7)), set()),
    "one by one": (lambda p: optim.AdamW(p, foreach=False), set()),
    "rmsprop": (lambda p: optim.RMSprop(p, centered=True, momentum=0.5), set()),
    "adagrad": (lambda p: optim.Adagrad(p, lr_decay=0.1), set()),
    "nadam": (lambda p: optim.NAdam(p), set()),
    "amsgrad": (lambda p: optim.Adam(p, amsgrad=True), {"maximum", "sqrt"}),
    "adadelta": (lambda p: optim.Adadelta(p), {"sqrt_", "addcmul_"}),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in pairwise(SIZES)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def chained(step: Any, model: nn.Module, optimizer: optim.Optimizer) -> Captured:
    step(BATCHES[0])
    return relowered(capture(step, model, optimizer, BATCHES[0]), split=False, native_ops=(UPDATE_CHAINS,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_has_eagers_bits(name: str) -> None:
    """Parameters and states after each of several steps, with a rate that changes."""
    make, left = OPTIMIZERS[name]
    model = network()
    optimizer = make(model.parameters())
    captured = chained(training_step(model, optimizer), model, optimizer)
    found = kernels(captured)
    assert found["update_chain"]
    assert left <= set(found)
    assert left or not {"mul_", "add_", "addcdiv_", "addcmul_", "lerp_", "sqrt"} & set(found)
    twin, theirs = copy.deepcopy((model, optimizer))
    step = training_step(twin, theirs)
    with one_lane(captured) as run:
        for number, batch in enumerate(BATCHES):
            for each in (optimizer, theirs):
                each.param_groups[0]["lr"] = 0.1 / (1 + number)
            assert torch.equal(run(batch), step(batch))
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert torch.equal(p, q)
                for key, value in theirs.state[q].items():
                    assert value is None or torch.equal(
                        torch.as_tensor(optimizer.state[p][key]), torch.as_tensor(value)
                    )


def test_an_average_is_an_update() -> None:
    """Weights that follow the parameters behind the update, which reads what it has written."""
    model = network()
    average = copy.deepcopy(model)
    optimizer = optim.Adam(model.parameters())
    step = training_step(model, optimizer)

    @torch.no_grad()
    def follow(own: nn.Module, other: nn.Module) -> None:
        for p, q in zip(own.parameters(), other.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)

    def averaged(batch: Any) -> torch.Tensor:
        loss = step(batch)
        follow(average, model)
        return loss

    averaged(BATCHES[0])
    seen = capture(averaged, [model, average], optimizer, BATCHES[0])
    captured = relowered(seen, split=False, native_ops=(UPDATE_CHAINS,))
    assert not {"mul_", "add_"} & set(kernels(captured))
    twin, theirs, other = copy.deepcopy((model, optimizer, average))
    with one_lane(captured) as run:
        for batch in BATCHES:
            assert torch.equal(run(batch), training_step(twin, theirs)(batch))
            follow(other, twin)
    assert all(map(torch.equal, average.parameters(), other.parameters()))


def test_writes_are_counted() -> None:
    """Autograd refuses a backward that needs a parameter which a step has written."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    captured = chained(training_step(model, optimizer), model, optimizer)
    output = model(BATCHES[0][0]).sum()
    with one_lane(captured) as run:
        run(BATCHES[1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_other_ops_see_is_made_where_it_was() -> None:
    """A step that reads a momentum between its writes, and one that writes a gradient there."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[torch.Tensor] = []

    class Reading(optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    moving = self.state[p].setdefault("moving", torch.ones_like(p))
                    moving.mul_(0.9)
                    seen.append(moving.amax())
                    moving.add_(p.grad, alpha=0.1)
                    p.grad.clamp_(-1, 1)
                    p.add_(p.grad, alpha=-self.param_groups[0]["lr"]).add_(moving, alpha=-0.01)

    optimizer = Reading(model.parameters(), {"lr": 0.1})
    step = training_step(model, optimizer)

    def watched(batch: Any) -> Any:
        seen.clear()
        return step(batch), torch.stack(list(seen))

    captured = chained(watched, model, optimizer)
    twin, theirs = copy.deepcopy((model, optimizer))
    with one_lane(captured) as run:
        for batch in BATCHES:
            loss, largest = run(batch)
            wanted = training_step(twin, theirs)
            seen.clear()
            assert torch.equal(loss, wanted(batch))
            assert torch.equal(largest, torch.stack(list(seen)))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_no_write_moves_past_an_op_that_may_raise() -> None:
    """An average is written in two parts, with a loss between them that a label may end."""
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    average = nn.Parameter(torch.ones(SIZES[-1]), requires_grad=False)
    holder = nn.ParameterList([average])
    step = training_step(model, optimizer)

    def averaged(batch: Any) -> torch.Tensor:
        with torch.no_grad():
            average.mul_(0.5)
        loss = step(batch)
        with torch.no_grad():
            average.add_(1.0)
        return loss

    averaged(BATCHES[0])
    seen = capture(averaged, [model, holder], optimizer, BATCHES[0])
    captured = relowered(seen, split=False, native_ops=(UPDATE_CHAINS,))
    average.fill_(1.0)
    wrong = (BATCHES[1][0], torch.full_like(BATCHES[1][1], 99))
    with one_lane(captured) as run, pytest.raises(IndexError):
        run(wrong)
    assert torch.equal(average, torch.full_like(average, 0.5))


def test_flat_parameters_stay_op_by_op() -> None:
    """Views of one buffer share memory, which instructions of one chain may not."""
    model = network()
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = part.view_as(p)
    optimizer = optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    captured = chained(training_step(model, optimizer), model, optimizer)
    assert not kernels(captured)["update_chain"]


def test_bad_chains() -> None:
    """Each is an error of its own, and writes nothing."""
    one, other = torch.ones(4), torch.ones(5)
    op = exact_ops()["mul_number"]
    with pytest.raises(RuntimeError, match="no op 99"):
        run_chain([1, 1, 99, 0, 0, 0, 0, 0], [one], [2.0])
    with pytest.raises(RuntimeError, match="no operand 1"):
        run_chain([1, 1, op, 0, 1, 0, 0, 0], [one], [2.0])
    with pytest.raises(RuntimeError, match="ends within an instruction"):
        run_chain([1, 2, op, 0, 0, 0, 0, 0], [one], [2.0])
    with pytest.raises(RuntimeError, match="was given 2"):
        run_chain([1, 1, op, 0, 0, 0, 0, 0], [one, other], [2.0])
    with pytest.raises(RuntimeError, match="lacks numbers"):
        run_chain([1, 1, op, 0, 0, 0, 0, 3], [one], [2.0])
    with pytest.raises(RuntimeError, match="of one layout"):
        run_chain([2, 1, op, 0, 1, 0, 0, 0], [one, other], [2.0])
    assert torch.equal(one, torch.ones(4))
