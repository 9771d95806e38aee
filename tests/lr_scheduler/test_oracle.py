"""Every scheduler against B of torch's: each model's rate is the very same float, in every epoch."""

import copy
import inspect
import itertools
import math
import pickle
from collections import Counter

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from hocket import lr_scheduler
from lr_scheduler.cases import CASES, COMPOSITES, EPOCHS, PLATEAUS, SIZES, both, check_same, rates, schedulers
from optim.twins import Twins, of_model, options_of
from quick import covering

SIMPLE = covering(CASES, ["sgd-momentum", "sgd-momenta", "adam", "adam-all"])
COMPOSED = list(itertools.product(COMPOSITES, ["sgd-momentum", "adam-all"]))


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize(("case", "optimizer"), [*SIMPLE, *COMPOSED])
def test_rates_are_the_floats_of_torch(optimizer, case, num_models):
    twins = Twins(optimizer, num_models)
    fused, singles = schedulers(case, twins)
    keys = ["lr", "betas" if "adam" in optimizer else "momentum"]
    check_same(twins, keys)
    for _ in range(EPOCHS):
        twins.step()
        fused.step()
        for single in singles:
            single.step()
        check_same(twins, keys)
    twins.check_parameters(1e-9)
    last = fused.get_last_lr()[0]
    expected = [single.get_last_lr()[0] for single in singles]
    assert (last.tolist() if isinstance(last, torch.Tensor) else [last] * num_models) == expected
    for state, other in zip(twins.fused.unfuse(), twins.torch, strict=True):
        assert state["param_groups"] == other.state_dict()["param_groups"]


def test_what_a_scheduler_is_made_of_is_stepped_with_it_and_by_itself():
    twins = Twins("sgd-rates", 3)
    gammas = [0.5, 0.5, 0.9]
    inner = lr_scheduler.ExponentialLR(twins.fused, gamma=gammas)
    middle = lr_scheduler.ChainedScheduler([inner])
    outer = lr_scheduler.ChainedScheduler([middle, lr_scheduler.ConstantLR(twins.fused, factor=1.0)])
    before = rates(twins.fused)
    for scheduler in (outer, inner, middle):
        twins.fused.step()
        scheduler.step()
        before = [rate * gamma for rate, gamma in zip(before, gammas, strict=True)]
        assert rates(twins.fused) == before
    assert inner.epochs == middle.epochs == outer.epochs == [3, 3, 3]


def test_restarts_by_fractions_of_an_epoch():
    twins = Twins("sgd-rates", 3)
    fused, singles = both("CosineAnnealingWarmRestarts", twins, T_0=[3, 1, 5], T_mult=2, eta_min=[0.0, 0.01, 0.0])
    for number in range(40):
        epochs = [number / 4, number / 5, number / 3] if number % 2 else number / 4
        twins.fused.step()
        fused.step(epochs)
        for m, single in enumerate(singles):
            single.step(of_model(epochs, m))
        check_same(twins, ["lr"])
    fused.step()
    assert fused.epochs == [single.last_epoch + 1 for single in singles]


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("case", PLATEAUS)
def test_each_model_has_its_plateau(case, num_models):
    twins = Twins("sgd-rates", num_models)
    fused, singles = schedulers(case, twins)
    generator = torch.Generator().manual_seed(0)
    reduced = set()
    for epoch in range(40):
        metrics = torch.rand(7, dtype=torch.float64, generator=generator)[:num_models] + 1 / (1 + epoch)
        if epoch == 20:
            metrics[0] = math.nan
        fused.step(metrics if epoch % 2 else metrics.tolist())
        for single, metric in zip(singles, metrics.tolist(), strict=True):
            single.step(metric)
        check_same(twins, ["lr"])
        reduced.add(tuple(rates(twins.fused)))
    assert len(reduced) > 1


@pytest.mark.parametrize("case", CASES)
def test_groups_keep_their_own_rates(case):
    def groups(params, model=None):
        first = [0.1, 0.3]
        return [{"params": params[:2], "lr": first if model is None else first[model]}, {"params": params[2:]}]

    twins = Twins("sgd-momentum", 2, groups=groups)
    fused, singles = schedulers(case, twins)
    for _ in range(5):
        twins.step()
        fused.step()
        for single in singles:
            single.step()
        for number in range(2):
            check_same(twins, ["lr"], number)


def test_a_list_for_each_group():
    params = Twins("sgd", 2).params
    from hocket.optim import SGD

    optimizer = SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, gamma=[[0.5, 0.25], 0.75])
    optimizer.step()
    scheduler.step()
    assert [group["lr"].tolist() for group in optimizer.param_groups] == [[0.5, 0.25], [0.75, 0.75]]


def test_one_list_of_milestones_is_for_all():
    twins = Twins("sgd", 3)
    scheduler = lr_scheduler.MultiStepLR(twins.fused, milestones=[1, 3], gamma=0.5)
    for _ in range(3):
        twins.fused.step()
        scheduler.step()
    assert twins.fused.param_groups[0]["lr"] == 0.1 * 0.5 * 0.5
    assert scheduler.torch_scheduler(1).milestones == Counter([1, 3])


def test_schedules_stack_and_leave_changes_made_by_hand():
    twins = Twins("sgd-rates", 2)
    first = lr_scheduler.StepLR(twins.fused, step_size=1, gamma=[0.5, 1.0])
    second = lr_scheduler.ExponentialLR(twins.fused, gamma=[1.0, 0.5])
    twins.fused.param_groups[0]["lr"] = [0.8, 0.4]
    twins.fused.step()
    first.step()
    second.step()
    assert rates(twins.fused) == [0.4, 0.2]


def test_a_cycle_that_is_over_waits_for_the_others():
    twins = Twins("sgd-momentum", 2)
    fused = lr_scheduler.OneCycleLR(twins.fused, max_lr=0.2, total_steps=[4, 6])
    single = torch_schedulers.OneCycleLR(twins.torch[0], max_lr=0.2, total_steps=4)
    for epoch in range(6):
        twins.step()
        fused.step()
        if epoch < 4:
            single.step()
        assert rates(twins.fused)[0] == single.get_last_lr()[0]
    with pytest.raises(ValueError, match="step: expected at most 6 steps, the longest cycle of these models"):
        fused.step()


def test_a_models_scheduler_may_be_changed():
    twins = Twins("sgd-rates", 7)
    gammas = [0.5, 0.5, 0.9, 0.5, 0.9, 0.5, 0.5]
    fused = lr_scheduler.StepLR(twins.fused, step_size=1, gamma=gammas)
    before = rates(twins.fused)
    fused.torch_scheduler(1).gamma = gammas[1] = 0.25
    twins.fused.step()
    fused.step()
    assert rates(twins.fused) == [rate * gamma for rate, gamma in zip(before, gammas, strict=True)]


def test_a_documentation_and_a_signature_are_those_of_torch():
    for name in lr_scheduler.schedulers.__all__:
        kind, theirs = getattr(lr_scheduler, name), getattr(torch_schedulers, name)
        assert inspect.signature(kind) == inspect.signature(theirs)
        assert (kind.__name__, kind.__module__) == (name, "hocket.lr_scheduler.schedulers")
        assert f"torch.optim.lr_scheduler.{name}` of B models" in kind.__doc__
    assert "gamma (float)" in lr_scheduler.StepLR.__doc__


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_copied_and_pickled(copied):
    twins = Twins("sgd-rates", 3)
    scheduler = lr_scheduler.StepLR(twins.fused, step_size=2, gamma=[0.5, 0.9, 0.5])
    others, other = copied((twins.fused, scheduler))
    for optimizer, schedule in ((twins.fused, scheduler), (others, other)) * 3:
        optimizer.step()
        schedule.step()
    assert rates(others) == rates(twins.fused) != options_of("sgd-rates", 3)["lr"]
