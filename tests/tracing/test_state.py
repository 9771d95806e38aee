"""Each place of a step's state is found once, by name, and read anew in every step."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from torch import nn

from equivalence.compare import assert_same, everything, serial, twins
from equivalence.test_steps import mse, simple
from hocket.errors import ExecutionError
from hocket.execution.threads import ThreadLanes
from hocket.tracing import capture
from hocket.tracing.saved_state import Saved
from hocket.tracing.state import inventory
from support.captures import captured_job
from support.refusals import fails, refused


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    model(inputs).square().mean().backward()
    optimizer.step()


def test_places_of_a_model_and_its_optimizer_are_listed_by_name():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    trained(model, optimizer, torch.randn(4, 2))
    places = inventory(model, optimizer)
    assert [e.name for e in places.parameters] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert [e.layer for e in places.parameters] == ["0", "0", "1", "1"]
    names = [entry.name for entry in places.tensors]
    assert names[:3] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert "optimizer.0.weight.exp_avg" in names
    assert len(names) == 3 + 4 * 3
    numbers = {entry.name: entry.get() for entry in places.numbers}
    assert numbers["optimizer.group0.lr"] == 0.1
    # One name for both betas; they differ by their position.
    assert [e.get() for e in places.numbers if e.name == "optimizer.group0.betas"] == [0.8, 0.9]
    assert "optimizer.group0.amsgrad" not in numbers, "a switch is no number"
    assert {entry.owner for entry in places.tensors if entry.kind == "state"} == {e.name for e in places.parameters}


def test_a_shared_tensor_is_one_place():
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    second.register_buffer("seen", torch.zeros(1))
    first.register_buffer("seen", second.seen)
    places = inventory([nn.Sequential(first, first), second], None)
    assert [entry.name for entry in places.parameters] == ["model0.0.weight", "model0.0.bias", "model1.bias"]
    assert [entry.name for entry in places.tensors] == ["model0.0.seen"]


def test_places_of_several_models_optimizers_and_lone_parameters():
    models, lone = [nn.Linear(2, 2), nn.Linear(2, 1)], nn.Parameter(torch.zeros(3))
    optimizers = [torch.optim.SGD(models[0].parameters(), lr=0.1), torch.optim.SGD([lone], lr=0.2)]
    places = inventory(models, optimizers)
    assert [entry.name for entry in places.parameters][-1] == "optimizer1.group0.0"
    assert places.parameters[-1].get() is lone
    rates = [entry.get() for entry in places.numbers if entry.key == "lr"]
    assert rates == [0.1, 0.2]


@pytest.mark.parametrize(("model", "optimizer"), [("net", None), (nn.Linear(1, 1), "adam"), ([nn.Linear(1, 1), 3], [])])
def test_what_is_no_module_or_no_optimizer_is_refused(model, optimizer):
    refused(r"expected a torch\.(nn|optim)", inventory, model, optimizer)


class Wrapper(torch.optim.Optimizer):
    """Hands all on to another optimizer, as accelerate's does, and has no state and no hooks of its own."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer


def test_an_optimizer_in_another_one_is_found():
    net = nn.Linear(2, 2)
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    assert inventory(net, Wrapper(Wrapper(inner))).optimizers == (inner,)
    refused(r"optimizer: Wrapper was made without torch.optim.Optimizer.__init__", inventory, net, Wrapper(None))


def test_an_element_of_a_tuple_can_be_set():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], betas=(0.8, 0.9))
    entries = [entry for entry in inventory([], optimizer).numbers if entry.key == "betas"]
    entries[1].set(0.5)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.5)


def test_a_step_captured_before_its_first_run_fits_after_it():
    pair = twins(lambda: simple(mse))
    job = pair.planned
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    assert_same(everything(pair.eager), everything(pair.planned))
    planned = ThreadLanes(captured, serial(captured))
    fails(ExecutionError, "run one eager step", planned, job.batch(0))
    assert_same(everything(pair.eager), everything(pair.planned), "a step that was refused")
    for each in pair.both():
        each.step(each.batch(0))
    assert captured.fits(job.batch(1))
    for number in range(3):
        pair.eager.step(pair.eager.batch(number))
        planned(job.batch(number))
        assert_same(everything(pair.eager), everything(pair.planned), f"step {number}")


def test_a_state_that_was_thrown_away_is_missed():
    job = simple(mse)
    captured = captured_job(job)
    job.optimizer.state = defaultdict(dict)
    fails(ExecutionError, "run one eager step", ThreadLanes(captured, serial(captured)), job.batch(0))
    assert not job.optimizer.state


def test_a_gradient_that_the_step_adds_to_is_missed():
    job = simple(mse, clear=lambda: None)
    captured = captured_job(job)
    job.optimizer.zero_grad()
    assert not captured.fits(job.batch(0))
    fails(ExecutionError, r"0\.weight\.grad", ThreadLanes(captured, serial(captured)), job.batch(0))


def test_a_graph_stands_only_for_what_it_was_captured_for():
    job = simple(lambda model, batch: mse(model, batch["rows"]) * batch["scale"], batches=[{}])
    batch = {"rows": (torch.randn(4, 6), torch.randn(4, 3)), "scale": 1}
    job.step(batch)
    captured = capture(job.step, job.model, job.optimizer, batch)
    rows, targets = batch["rows"]
    assert captured.fits(batch)
    assert captured.fits({"rows": (rows * 2, targets - 1), "scale": 1})
    others = [
        {**batch, "scale": 2},
        {**batch, "scale": 1.0},
        {**batch, "scale": True},
        {**batch, "rows": (rows[:3], targets[:3])},
        {**batch, "rows": (rows.double(), targets)},
        {**batch, "rows": (rows.t().contiguous().t(), targets)},
        {**batch, "rows": [rows, targets]},
        {**batch, "more": 1},
    ]
    assert not any(captured.fits(other) for other in others)
    job.model.eval()
    assert not captured.fits(batch)
    job.model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not captured.fits(batch)
    job.model[0].weight.requires_grad_(False)
    assert not captured.fits(batch)
    job.model[0].weight.requires_grad_(True)
    assert captured.fits(batch)


def test_what_is_there_now_is_told_in_the_order_of_what_was_saved():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    places, closed_over = inventory(model, optimizer), torch.zeros(3)
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"]
    saved = Saved(places, [momentum, closed_over, model[0].weight])
    names = [name for name, _ in saved.values()]
    assert [name for name in names if name.startswith("closed over")] == ["closed over 0"], "the others have a place"
    assert [name for name, _ in saved.current()] == names
    assert_same(dict(saved.values()).items(), dict(saved.current()).items())
    closed_over += 1
    with torch.no_grad():
        model[0].weight += 1
    model[0].bias.grad = None
    now = dict(saved.current())
    assert torch.equal(now["closed over 0"], torch.ones(3))
    assert torch.equal(now["0.weight"], model[0].weight)
    assert now["0.bias.grad"] is None
    saved.restore()
    assert torch.equal(closed_over, torch.zeros(3))
    assert_same(dict(saved.values()).items(), dict(saved.current()).items())
