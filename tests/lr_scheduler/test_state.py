"""Schedules that are saved, resumed, taken along and refilled."""

import copy

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from hocket import lr_scheduler
from lr_scheduler.cases import ALL, CASES, COMPOSITES, check_same, rates, schedulers
from optim.twins import Twins, of_model, options_of
from support.refusals import refused


def made(case, num_models=3):
    twins = Twins("sgd-momenta", num_models)
    return twins, schedulers(case, twins)[0]


def epochs(twins, scheduler, count, offset=0, models=(0, 1, 2)):
    """The rates after each of some epochs, in which these models have metrics of their own."""
    found = []
    for epoch in range(offset, offset + count):
        twins.fused.step()
        metrics = [1.0 + 0.1 * model + 0.01 * epoch for model in models]
        scheduler.step(*([metrics] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        found.append(rates(twins.fused))
    return found


@pytest.mark.parametrize("case", [*ALL, *COMPOSITES])
def test_saved_and_loaded(case):
    twins, scheduler = made(case)
    epochs(twins, scheduler, 4)
    state, optimizer_state = scheduler.state_dict(), copy.deepcopy(twins.fused.state_dict())
    before = copy.deepcopy(state)
    expected = epochs(twins, scheduler, 6, offset=4)
    assert state == before, "a state is a value: it does not go on with the training"
    others, other = made(case)
    other.load_state_dict(state)
    assert other.epochs == [4] * 3
    others.fused.load_state_dict(optimizer_state)
    assert epochs(others, other, 6, offset=4) == expected
    assert state == before


@pytest.mark.parametrize("case", CASES)
def test_resumed_from_an_epoch_as_torch_resumes(case):
    twins, scheduler = made(case)
    epochs(twins, scheduler, 4)
    for model, other in enumerate(twins.torch):
        group = {key: value for key, value in twins.fused.param_groups[0].items() if key != "params"}
        lists = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        other.param_groups[0].update({key: of_model(value, model) for key, value in lists.items()})
    resumed, singles = schedulers(case, twins, last_epoch=4)
    for _ in range(5):
        twins.fused.step()
        resumed.step()
        for other, single in zip(twins.torch, singles, strict=True):
            other.step()
            single.step()
        check_same(twins, ["lr"])


@pytest.mark.parametrize("case", [*ALL, *COMPOSITES])
def test_models_that_are_kept_keep_their_schedules(case):
    twins, scheduler = made(case)
    untouched, other = made(case)
    epochs(twins, scheduler, 3)
    epochs(untouched, other, 3)
    for p in twins.params:
        p.data, p.grad = p.data[[2, 1]].clone(), None
    twins.fused.select_models([2, 1])
    scheduler.select_models([2, 1])
    expected = epochs(untouched, other, 9, offset=3)
    assert epochs(twins, scheduler, 9, offset=3, models=(2, 1)) == [[row[2], row[1]] for row in expected]


@pytest.mark.parametrize("case", ALL)
def test_a_refilled_slot_begins_its_schedule_anew(case):
    twins, scheduler = made(case)
    untouched, other = made(case)
    begun, fresh = made(case)
    before = epochs(twins, scheduler, 3)
    assert epochs(untouched, other, 3) == before
    first = options_of("sgd-momenta", 3)["lr"][1]
    twins.fused.refill(1, lr=first)
    scheduler.refill(1)
    sides = [epochs(*each, 6, offset=3) for each in ((twins, scheduler), (untouched, other), (begun, fresh))]
    for found, expected, anew in zip(*sides, strict=True):
        assert found == [expected[0], anew[1], expected[2]]


@pytest.mark.parametrize("case", COMPOSITES)
def test_a_refilled_slot_of_a_composite_is_a_new_scheduler_of_torch(case):
    """Its children begin anew too, at the rate that is given; the neighbours go on."""
    twins, scheduler = made(case)
    untouched, other = made(case)
    epochs(twins, scheduler, 3)
    epochs(untouched, other, 3)
    fresh = torch.optim.SGD([torch.ones(1)], lr=0.25, momentum=0.9)
    twins.fused.refill(1)
    scheduler.refill(1, lr=0.25)
    single = COMPOSITES[case](torch_schedulers, fresh, lambda values: values[1])
    fresh.step()
    for _ in range(6):
        assert rates(twins.fused)[1] == fresh.param_groups[0]["lr"]
        found, expected = epochs(twins, scheduler, 1)[0], epochs(untouched, other, 1)[0]
        single.step()
        assert [found[0], found[2]] == [expected[0], expected[2]]
    assert scheduler.epochs == [9, 6, 9]


def test_a_refill_that_is_refused_changes_nothing():
    twins, scheduler = made("cyclics")
    before, groups = scheduler.state_dict(), copy.deepcopy(twins.fused.unfuse())
    for wrong, match in (
        ({"lr": -1.0}, "lr: expected numbers >= 0"),
        ({"max_lr": "high"}, "max_lr: expected a number"),
    ):
        refused(match, scheduler.refill, 1, **wrong)
    assert scheduler.state_dict() == before
    assert [state["param_groups"] for state in twins.fused.unfuse()] == [state["param_groups"] for state in groups]


def test_refilled_with_arguments_of_its_own():
    twins, scheduler = made("steps")
    epochs(twins, scheduler, 3)
    scheduler.refill(1, lr=0.8, gamma=0.5, step_size=1)
    assert rates(twins.fused)[1] == 0.8
    assert [row[1] for row in epochs(twins, scheduler, 3)] == [0.4, 0.2, 0.1]
    refused(r"refill: expected arguments among step_size, gamma, got gama=0.5", scheduler.refill, 1, gama=0.5)
    refused(r"step_size: expected a whole number >= 1, got 0", scheduler.refill, 1, step_size=0)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("one-cycle")])
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam"])
def test_torchs_own_cycle_goes_on_where_the_fused_one_stopped(case, optimizer):
    """The plain states say all that torch's scheduler reads from its groups, of a slot that was refilled, too."""
    twins = Twins(optimizer, 3)
    scheduler, torchs = schedulers(case, twins)
    epochs(twins, scheduler, 2)
    for other, single in list(zip(twins.torch, torchs, strict=True)) * 2:
        other.step()
        single.step()
    for state, other in zip(twins.fused.unfuse(), twins.torch, strict=True):
        assert state["param_groups"] == other.state_dict()["param_groups"]
    scheduler.refill(1, max_lr=0.9)
    again = {key: of_model(value, 1) for key, value in CASES[case][1].items()} | {"max_lr": 0.9}
    torch_schedulers.OneCycleLR(twins.torch[1], **again)
    assert twins.fused.unfuse()[1]["param_groups"] == twins.torch[1].state_dict()["param_groups"]
