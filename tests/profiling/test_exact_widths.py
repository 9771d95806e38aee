"""The widths at which ops have eager's bits: found on copies, for ops that split sums and for those that do not."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from hocket.profiling import exact_widths
from hocket.profiling.exact_widths import ExactWidths, same_bits
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step
from support.steps import update


def captured_sum(size: int) -> Captured:
    """Scales a vector by a parameter, and sums up the squares."""
    scale = nn.Parameter(torch.full((size,), 0.5))
    model = nn.Module()
    model.scale = scale
    optimizer = torch.optim.SGD([scale], lr=1e-3)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, (batch * scale).square().sum()).detach()

    batch = torch.randn(size)
    for _ in range(2):
        step(batch)
    return capture_step(step, model, optimizer, batch)


@pytest.mark.usefixtures("two_threads")
def test_a_long_sum_has_eagers_bits_at_eagers_width_only() -> None:
    captured = captured_sum(1_000_003)
    found = ExactWidths(2).of(captured, (1, 2))
    sums = {op for op in found if "sum" in op}
    assert sums
    assert all(found[op] == {2} for op in sums)
    assert {op for op in found if "mul" in op}
    assert all(found[op] == {1, 2} for op in found if "mul" in op)


@pytest.mark.usefixtures("two_threads")
def test_a_sum_with_one_term_in_the_recorded_step_may_have_more_in_others() -> None:
    """As of a unit that a ReLU lets live for one sample: the gradients of all others are zero."""
    model = nn.Sequential(nn.Conv2d(1, 16, 1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, model(batch)[:1].square().sum()).detach()

    batch = torch.randn(6, 1, 1, 1)
    for _ in range(2):
        step(batch)
    found = ExactWidths(2).of(capture_step(step, model, optimizer, batch), (1, 2))
    assert all(widths == {2} for op, widths in found.items() if op.endswith("backward.weight")), found


def test_ops_that_one_thread_makes_have_the_same_bits_at_any_width() -> None:
    found = ExactWidths(1).of(captured_sum(100), (1, 2))
    assert set(found.values()) == {frozenset({1, 2})}


@pytest.mark.usefixtures("two_threads")
def test_trials_leave_no_trace() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.BatchNorm1d(64))
    optimizer = torch.optim.Adam(model.parameters())

    def step(batch: torch.Tensor) -> torch.Tensor:
        return update(optimizer, model(batch).square().mean()).detach()

    batch = torch.randn(256, 64)
    for _ in range(2):
        step(batch)
    captured = capture_step(step, model, optimizer, batch)

    def everything() -> list[Any]:
        state = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
        state += [value for row in optimizer.state.values() for value in row.values()]
        return [
            torch.get_rng_state(),
            torch.get_num_threads(),
            *(value.clone() for value in state if value is not None),
        ]

    before = everything()
    ExactWidths(2).of(captured, (1, 2))
    for old, new in zip(before, everything(), strict=True):
        assert torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new


def test_where_trials_were_wrong_every_op_runs_at_the_usual_width() -> None:
    exact = ExactWidths(2)
    exact.is_trusted = False
    captured = captured_sum(100)
    assert set(exact.of(captured, (1, 2, 4)).values()) == {frozenset({2})}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_bits_are_compared_and_every_nan_is_one(dtype: torch.dtype) -> None:
    ones = torch.ones(3, dtype=dtype)
    nan, other = ones.clone(), ones.clone()
    nan[1] = other[1] = float("nan")
    assert same_bits(nan, other)
    assert not same_bits(ones, nan)
    assert not same_bits(torch.zeros(2, dtype=dtype), -torch.zeros(2, dtype=dtype))
    assert not same_bits(ones, torch.ones(3, dtype=torch.float64))
    assert not same_bits(ones, ones[:2])


def test_another_payload_of_nan_is_no_difference() -> None:
    first = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    second = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    assert same_bits(first, second)


def test_one_element_that_is_repeated_is_compared() -> None:
    assert same_bits(torch.ones(()).expand(1), torch.ones(1))
    assert not same_bits(torch.ones(()).expand(1), torch.zeros(1))


def test_conjugates_have_bits_too():
    numbers = torch.randn(4, dtype=torch.complex64)
    assert same_bits(numbers.conj(), numbers.conj().resolve_conj())
    assert not same_bits(numbers.conj(), numbers)
    assert same_bits(numbers.conj().imag, -numbers.imag)


def test_trials_of_large_ops_are_few_and_their_copies_are_dropped_at_once(monkeypatch) -> None:
    trials: list[int] = []
    made: list[list[weakref.ref[torch.Tensor]]] = []
    own = exact_widths._copies

    def noted(values: Any, trial: int) -> Any:
        alive = [copies for copies in made if any(each() is not None for each in copies)]
        assert len(alive) <= 1, "copies of an earlier trial are still there"
        copies = own(values, trial)
        made.append([weakref.ref(value) for value in copies.values()])
        trials.append(trial)
        return copies

    monkeypatch.setattr(exact_widths, "_copies", noted)
    captured = captured_sum(4096)
    few = {}
    gc.disable()
    try:
        for limit in (1, 2**24):
            monkeypatch.setattr(exact_widths, "MAX_READ", limit)
            trials.clear()
            ExactWidths(torch.get_num_threads()).of(captured, [torch.get_num_threads() + 1])
            few[limit] = max(trials)
    finally:
        gc.enable()
    assert few == {1: 1, 2**24: exact_widths.MAX_TRIALS}
