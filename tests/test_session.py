"""`hocket.schedule`: every call is a training step, the result is eager's, and the verdict says why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hocket
from hocket import zoo
from hocket.errors import CaptureError, InputError
from hocket.verify import differ

# More calls than any life takes until its verdict.
MANY = 200


def twin(**size: int) -> tuple[hocket.Job, hocket.Job]:
    made = [zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam", **size) for _ in range(2)]
    return made[0], made[1]


def state(job: hocket.Job) -> list[tuple[str, torch.Tensor]]:
    (model,), (optimizer,) = job.models, job.optimizers
    found = list(model.state_dict().items())
    for number, values in enumerate(optimizer.state.values()):
        found += [(f"{number}.{key}", value) for key, value in values.items()]
    return found


def decide(fast: hocket.Schedule, job: hocket.Job) -> int:
    """Call until there is a verdict; how many calls that took."""
    for number in range(MANY):
        fast(job.batch(number))
        if fast.decided:
            return number + 1
    raise AssertionError(f"no verdict after {MANY} steps")


@pytest.mark.parametrize("planner", ["auto", "serial", "list"])
def test_every_call_is_a_training_step_and_none_is_lost(planner: str) -> None:
    eager, planned = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, planner=planner, guard=False)
    rates = [torch.optim.lr_scheduler.StepLR(job.optimizers[0], 3, 0.9) for job in (eager, planned)]
    for number in range(45):
        first, second = eager.step(eager.batch(number)), fast(planned.batch(number))
        assert first.item() == pytest.approx(second.item(), rel=1e-3)
        for rate in rates:
            rate.step()
    assert fast.decided
    assert fast.verdict == "planned"
    assert differ(state(eager), state(planned)).relative < 1e-2


def test_a_serial_plan_is_bitwise_eager_through_the_whole_life() -> None:
    eager, planned = twin()
    fast = hocket.schedule(planned.step, planned.model, planned.optimizer, planner="serial", guard=False)
    width = torch.get_num_threads()
    machine = hocket.Machine.of(cores=width)
    fast = hocket.schedule(
        planned.step, planned.model, planned.optimizer, planner="serial", guard=False, machine=machine
    )
    for number in range(12):
        eager.step(eager.batch(number))
        fast(planned.batch(number))
    found = differ(state(eager), state(planned))
    # Profiling runs real steps at one thread, too; this model is too small for torch to split its sums.
    assert found.bitwise, found


def test_the_guard_decides_by_measurement_and_says_so() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer)
    assert fast.verdict == "eager"
    assert fast.why == "not decided yet"
    assert decide(fast, job) > 10
    assert fast.verdict in ("planned", "eager")
    assert "of eager's time" in fast.why
    comparison = fast.comparison()
    assert (fast.verdict == "planned") == (comparison.speedup > 1)


def test_what_cannot_be_captured_stays_eager_with_a_reason() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    fast = hocket.schedule(step, model, optimizer)
    before = model.weight.detach().clone()
    fast(torch.randn(8, 4))
    assert not torch.equal(before, model.weight)
    assert fast.decided
    assert fast.verdict == "eager"
    assert "test_session.py" in fast.why
    fast(torch.randn(8, 4))
    with pytest.raises(InputError, match="there is no plan"):
        _ = fast.plan
    strict = hocket.schedule(step, model, optimizer, strict=True)
    with pytest.raises(CaptureError, match=r"test_session\.py:\d+ .*data-dependent"):
        strict(torch.randn(8, 4))


def test_a_new_shape_is_captured_again_and_remembered() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial", guard=False)
    for number in range(15):
        fast(job.batch(number))
    assert fast.decided
    whole = fast.captured
    inputs, targets = job.batch(0)
    fast((inputs[:2], targets[:2]))
    assert not fast.decided
    fast(job.batch(1))
    assert fast.decided
    assert fast.captured is whole


def test_switching_a_module_to_eval_is_another_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    fast = hocket.schedule(step, model, optimizer, planner="serial", guard=False)
    batch = torch.randn(8, 4)
    for _ in range(15):
        fast(batch)
    assert fast.decided
    model.eval()
    fast(batch)
    assert not fast.decided


def test_an_error_in_the_step_reaches_the_caller_and_the_schedule_survives() -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial", guard=False)
    inputs, targets = job.batch(0)
    for number in range(15):
        fast(job.batch(number))
    wrong = targets.clone()
    wrong[0] = 10_000
    with pytest.raises(IndexError) as caught:
        fast((inputs, wrong))
    assert any("nll_loss_forward" in note for note in caught.value.__notes__)
    captured = fast.captured
    for _ in range(3):
        assert torch.isfinite(fast((inputs, targets)))
        assert fast.decided, "one step without gradients is no reason to begin anew"
    assert fast.captured is captured


def test_gradients_that_are_cleared_between_the_steps_are_found_cleared_by_the_plan() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]

    def made(model: nn.Module, optimizer: torch.optim.Optimizer):
        def step(batch: torch.Tensor) -> torch.Tensor:
            loss = model(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    eager = made(models[0], optimizers[0])
    fast = hocket.schedule(made(models[1], optimizers[1]), models[1], optimizers[1], planner="serial", guard=False)
    captures = set()
    for _ in range(30):
        batch = torch.randn(8, 4)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert fast(batch).item() == pytest.approx(eager(batch).item(), rel=1e-4)
        captures.add(id(fast.captured) if fast.decided else None)
    assert fast.verdict == "planned"
    assert len(captures) == 2, "none, and then one for good"
    for first, second in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad)


def test_a_branch_on_a_rate_is_taken_anew_when_the_rate_crosses_it() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    twin_model = nn.Linear(4, 1)
    twin_model.load_state_dict(model.state_dict())
    twin_optimizer = torch.optim.SGD(twin_model.parameters(), lr=0.1)

    def made(model: nn.Module, optimizer: torch.optim.Optimizer):
        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).pow(2).mean()
            if optimizer.param_groups[0]["lr"] < 0.05:
                loss = loss * 0.5
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    fast = hocket.schedule(made(model, optimizer), model, optimizer, planner="serial", guard=False)
    eager = made(twin_model, twin_optimizer)
    batch = torch.randn(8, 4)
    for number in range(30):
        for each in (optimizer, twin_optimizer):
            each.param_groups[0]["lr"] = 0.1 if number < 15 else 0.01
        assert fast(batch).item() == eager(batch).item()
    assert torch.equal(model.weight, twin_model.weight)


def test_report_writes_page_and_trace(tmp_path) -> None:
    _, job = twin()
    fast = hocket.schedule(job.step, job.model, job.optimizer, planner="serial")
    decide(fast, job)
    fast(job.batch(0))
    files = fast.report(tmp_path / "report")
    assert (tmp_path / "report" / "index.html").exists()
    assert {"trace.json", "plan.txt", "graph.json"} <= set(files)
    assert fast.timeline().makespan_us > 0


def test_bad_arguments_are_named() -> None:
    _, job = twin()
    with pytest.raises(InputError, match="unknown planner 'fastest'"):
        hocket.schedule(job.step, job.model, job.optimizer, planner="fastest")
    with pytest.raises(InputError, match="expected a step to call"):
        hocket.schedule(None, job.model, job.optimizer)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer: expected"):
        hocket.schedule(job.step, job.model, job.model)
