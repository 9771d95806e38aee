"""Comparing two runs: a wrong rate is found, the user's state stays eager's."""

import math
import re

import pytest
import torch

import hocket
from equivalence.compare import assert_same, everything
from hocket import zoo
from hocket.autotune import verification
from hocket.autotune.verification import differ, distance, largest, verify
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.tracing import capture


def setup_step():
    job = zoo.load("mlp", depth=2, width=16, batch_size=4, optimizer="adam")
    job.step(job.batch(0))
    captured = capture(job.step, job.model, job.optimizer, job.batch(0))
    plan = Plan((Lane("main", captured.graph.order, width=torch.get_num_threads()),))
    return job, captured, ThreadLanes(captured, plan)


def test_five_steps_are_bitwise_and_the_state_is_eagers() -> None:
    job, captured, executor = setup_step()
    found, returned = verify(captured, executor, [job.batch(n) for n in range(5)])
    assert found.bitwise
    assert found.equal
    assert found.steps == len(returned) == 5


def test_without_room_for_copies_nothing_is_run_and_the_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    twin, job = (zoo.load("mlp", depth=2, width=512, batch_size=4, optimizer="adam") for _ in range(2))
    fast = hocket.schedule(job.step, job.model, job.optimizer, cache=False)
    monkeypatch.setattr(verification, "available_bytes", lambda: 2**20)
    for number in range(12):
        twin.step(twin.batch(number))
        fast(job.batch(number))
    assert str(fast.verdict) == "eager"
    assert re.search(r"a comparison of a plan with eager would take \d+ MiB, and 1 MiB are free", fast.why)
    assert_same(everything(job), everything(twin))


def test_a_step_with_another_rate_is_found() -> None:
    job, captured, executor = setup_step()
    (optimizer,) = job.optimizers

    def wrong(batch):
        optimizer.param_groups[0]["lr"] *= 1.5
        try:
            return executor(batch)
        finally:
            optimizer.param_groups[0]["lr"] /= 1.5

    found, _ = verify(captured, wrong, [job.batch(n) for n in range(3)])
    assert not found.bitwise
    assert not found.equal
    assert found.where


def test_a_failing_plan_is_a_difference_and_leaves_eagers_state_behind() -> None:
    (job, captured, _), (twin, _, _) = setup_step(), setup_step()
    (model,) = job.models

    def broken(batch):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(math.nan)
        raise RuntimeError("broken")

    found, (loss,) = verify(captured, broken, [job.batch(0)])
    assert not found.equal
    assert found.error == "RuntimeError: broken"
    assert torch.equal(loss, twin.step(twin.batch(0)))
    assert_same(everything(twin), everything(job))


def test_differences_are_told_apart() -> None:
    one, nan = torch.tensor([1.0, 2.0]), torch.tensor([math.nan, 2.0])
    assert differ([("a", one)], [("a", one.clone())]).bitwise
    assert differ([("a", nan)], [("a", nan.clone())]).bitwise
    assert differ([("a", torch.tensor(0.0))], [("a", torch.tensor(-0.0))]).bitwise is False
    assert differ([("a", one)], [("a", nan)]).max_abs_diff == math.inf
    assert differ([("a", one)], [("a", one[:1])]).max_abs_diff == math.inf
    assert differ([("a", 1)], [("a", None)]).max_abs_diff == math.inf
    found = differ([("a", one), ("b", one)], [("a", one), ("b", one + 1e-3)])
    assert found.where == "b"
    assert not found.bitwise
    assert math.isclose(found.max_abs_diff, 1e-3, rel_tol=1e-3)


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([math.nan, 1.0], [-math.nan, 1.0], True),  # the sign of a NaN says nothing
        ([math.nan, 1.0], [math.nan, 1.0 + 1e-6], True),
        ([math.nan, 1.0], [math.nan, 2.0], False),
        ([math.nan, 1.0], [1.0, math.nan], False),
        ([math.inf, 1.0], [math.inf, 1.0 + 1e-6], True),
        ([math.inf, 1.0], [math.inf, 2.0], False),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([math.inf, 1.0], [3e38, 1.0], False),
        ([complex(math.nan, 1.0)], [complex(math.nan, 1.0 + 1e-9)], True),
        ([complex(math.nan, 1.0)], [complex(math.nan, 2.0)], False),
    ],
)
def test_what_is_no_number_is_equal_to_itself_and_hides_nothing(first, second, equal) -> None:
    for one, other in ((first, second), (second, first)):
        found = differ([("a", torch.tensor(one))], [("a", torch.tensor(other))])
        assert found.equal == equal, found
        if not equal:
            assert found.where == "a"
            assert found.relative > 0


@pytest.mark.parametrize(
    ("place", "value"), [(2**18 - 1, 2.0), (2**18, 2.0), (2**18 + 5, math.nan), (2**19, -math.inf)]
)
def test_every_part_of_a_large_tensor_is_compared(place: int, value: float) -> None:
    first = torch.ones(2**19 + 1)
    second = first.clone()
    second[place] = value
    absolute, relative = distance(first, second)
    expected = (1.0, 0.5) if value == 2.0 else (math.inf, math.inf)
    assert (absolute, relative) == expected
    assert largest(second) == (2.0 if value == 2.0 else 1.0)


def test_complex_numbers_are_no_distance_from_real_ones_that_is_known() -> None:
    assert distance(torch.ones(3), torch.ones(3, dtype=torch.complex64)) == (math.inf, math.inf)


def test_strides_where_there_is_one_element_do_not_matter() -> None:
    odd = torch.arange(6.0).as_strided((2, 3, 1), (3, 1, 32))
    assert odd.is_contiguous()
    assert differ([("a", odd)], [("a", odd.clone())]).bitwise
    assert not differ([("a", odd)], [("a", odd + 1)]).equal


def test_a_loss_that_is_no_number_is_the_same_by_plan() -> None:
    job, captured, executor = setup_step()
    inputs, targets = job.batch(0)
    inputs = inputs.clone()
    inputs[0, 0] = math.nan
    found, (loss,) = verify(captured, executor, [(inputs, targets)])
    assert math.isnan(loss.item())
    assert found.equal, found
    (model,) = job.models
    assert any(p.isnan().any() for p in model.parameters()), "eager's state is kept, NaN and all"
