"""Every scheduler against B of torch's: each model's rate is the very same float, in every epoch."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
from collections import Counter

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from fusion.optim.twins import Twins, of_model, options_of
from hocket.fusion import lr_scheduler
from quick import covering

EPOCHS = 30


def powers(epoch):
    return 0.95**epoch


def falling(epoch):
    return 1 / (1 + epoch)


class Halving:
    """A function of the epoch that is an object, whose attributes are saved."""

    def __init__(self, every):
        self.every = every

    def __call__(self, epoch):
        return 0.5 ** (epoch // self.every)


LAMBDAS = [powers, falling, Halving(3), Halving(5), powers, falling, Halving(1)]
# One model, and as many as there are values in a case; the rest is for the slow tests.
SIZES = (1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 7)
MILESTONES = [[3, 7], [1], [2, 2, 9], [], [5, 6, 7], [29], [0, 4]]

# For each case the class and arguments for B = 7; a list is one value for each model.
CASES = {
    "step": ("StepLR", {"step_size": 3, "gamma": 0.5}),
    "steps": ("StepLR", {"step_size": [1, 2, 3, 4, 5, 10, 100], "gamma": [0.9, 0.5, 0.1, 1.0, 0.3, 0.7, 0.2]}),
    "step-gammas": ("StepLR", {"step_size": 4, "gamma": [0.9, 0.5, 0.1, 1.0, 0.3, 0.7, 0.2]}),
    "milestones": ("MultiStepLR", {"milestones": MILESTONES, "gamma": [0.9, 0.5, 0.1, 1.0, 0.3, 0.7, 0.2]}),
    "exponential": ("ExponentialLR", {"gamma": 0.9}),
    "exponentials": ("ExponentialLR", {"gamma": [0.9, 0.5, 0.99, 1.0, 0.3, 0.7, 0.2]}),
    "cosine": ("CosineAnnealingLR", {"T_max": 12}),
    "cosines": (
        "CosineAnnealingLR",
        {"T_max": [5, 1, 12, 30, 7, 3, 2], "eta_min": [0.0, 0.01, 0.0, 1e-3, 0.5, 0.02, 0.0]},
    ),
    "restarts": ("CosineAnnealingWarmRestarts", {"T_0": [3, 1, 5, 30, 2, 7, 4], "T_mult": [1, 2, 3, 1, 2, 1, 2]}),
    "constant": (
        "ConstantLR",
        {"factor": [0.5, 0.25, 1.0, 0.1, 0.3, 0.9, 0.7], "total_iters": [3, 1, 7, 29, 0, 40, 5]},
    ),
    "linear": ("LinearLR", {"start_factor": [0.1, 0.5, 1.0, 0.3, 0.9, 0.2, 0.7], "end_factor": 0.8, "total_iters": 6}),
    "linears": (
        "LinearLR",
        {"end_factor": [0.1, 0.5, 1.0, 0.3, 0.05, 0.2, 0.7], "total_iters": [3, 1, 7, 29, 9, 40, 5]},
    ),
    "polynomial": (
        "PolynomialLR",
        {"power": [1.0, 2.0, 0.5, 3.0, 1.5, 0.9, 1.1], "total_iters": [3, 1, 7, 29, 9, 40, 5]},
    ),
    "factor": ("MultiplicativeLR", {"lr_lambda": powers}),
    "factors": ("MultiplicativeLR", {"lr_lambda": LAMBDAS}),
    "cyclic": ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "mode": "triangular2"}),
    "cyclics": (
        "CyclicLR",
        {
            "base_lr": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07],
            "max_lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
            "step_size_up": [4, 3, 7, 10, 2, 5, 1],
            "step_size_down": [2, 3, 5, 10, 8, 1, 4],
            "mode": ["triangular", "triangular2", "exp_range", "triangular", "triangular2", "exp_range", "triangular"],
            "gamma": [1.0, 0.9, 0.8, 0.7, 0.99, 0.95, 0.5],
            "base_momentum": [0.8, 0.7, 0.5, 0.1, 0.6, 0.85, 0.3],
        },
    ),
    "cyclic-scaled": ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "scale_fn": LAMBDAS}),
    "lambda": ("LambdaLR", {"lr_lambda": powers}),
    "lambdas": ("LambdaLR", {"lr_lambda": LAMBDAS}),
    "one-cycle": ("OneCycleLR", {"max_lr": 0.2, "total_steps": 40}),
    "one-cycle-epochs": ("OneCycleLR", {"max_lr": 0.2, "epochs": [5, 6, 7, 8, 9, 10, 11], "steps_per_epoch": 7}),
    "one-cycles": (
        "OneCycleLR",
        {
            "max_lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7],
            "total_steps": [40, 31, 50, 100, 60, 35, 45],
            "pct_start": [0.3, 0.1, 0.5, 0.25, 0.7, 0.3, 0.4],
            "div_factor": [25.0, 10.0, 4.0, 2.0, 100.0, 5.0, 8.0],
            "final_div_factor": [1e4, 1e3, 10.0, 1e4, 1e2, 5.0, 1e5],
            "base_momentum": [0.85, 0.8, 0.7, 0.5, 0.1, 0.85, 0.6],
            "max_momentum": [0.95, 0.9, 0.99, 0.8, 0.7, 0.95, 0.9],
        },
    ),
    "one-cycle-three": (
        "OneCycleLR",
        {"max_lr": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], "total_steps": 40, "three_phase": True},
    ),
    "one-cycle-linear": (
        "OneCycleLR",
        {"max_lr": 0.3, "total_steps": [40, 31, 50, 100, 60, 35, 45], "anneal_strategy": "linear"},
    ),
    "one-cycle-still": ("OneCycleLR", {"max_lr": [0.1] * 7, "total_steps": 40, "cycle_momentum": False}),
}
PLATEAUS = {
    "plateau": {"patience": 1},
    "plateau-all": {
        "factor": [0.1, 0.5, 0.9, 0.2, 0.3, 0.7, 0.8],
        "patience": [0, 1, 2, 3, 0, 1, 2],
        "threshold": [1e-4, 0.1, 0.0, 0.01, 0.2, 1e-3, 0.05],
        "cooldown": [0, 1, 2, 0, 3, 0, 1],
        "min_lr": [0.0, 1e-3, 0.02, 0.0, 0.0, 1e-4, 0.05],
        "eps": [1e-8, 1e-8, 1e-2, 1e-8, 1e-4, 1e-8, 1e-8],
    },
    "plateau-max": {"mode": "max", "patience": [0, 1, 2, 3, 0, 1, 2]},
    "plateau-abs": {"threshold_mode": "abs", "threshold": [0.1, 0.2, 0.0, 0.3, 0.05, 0.5, 1.0], "patience": 0},
    "plateau-max-abs": {"mode": "max", "threshold_mode": "abs", "threshold": 0.1, "patience": 1},
}


# Schedulers made of others, built alike from `hocket.lr_scheduler` and from torch's; `pick` gives a model's arguments.
COMPOSITES = {
    "warm-up": lambda of, o, pick: of.SequentialLR(
        o,
        [
            of.LinearLR(o, start_factor=pick([0.1, 0.5, 0.2, 0.3, 0.4, 0.6, 0.7]), total_iters=4),
            of.CosineAnnealingLR(o, T_max=pick([5, 1, 12, 30, 7, 3, 2])),
            of.ExponentialLR(o, gamma=pick([0.9, 0.5, 0.99, 1.0, 0.3, 0.7, 0.2])),
        ],
        milestones=pick([[4, 9], [2, 3], [4, 20], [1, 28], [5, 6], [7, 8], [10, 11]]),
    ),
    "warm-up-together": lambda of, o, pick: of.SequentialLR(
        o, [of.ConstantLR(o, factor=0.5, total_iters=3), of.StepLR(o, step_size=2, gamma=0.5)], milestones=[3]
    ),
    "chained": lambda of, o, pick: of.ChainedScheduler(
        [
            of.ConstantLR(o, factor=pick([0.5, 0.1, 1.0, 0.3, 0.9, 0.7, 0.2]), total_iters=4),
            of.ExponentialLR(o, gamma=pick([0.9, 0.5, 0.99, 1.0, 0.3, 0.7, 0.2])),
            of.CyclicLR(o, base_lr=0.01, max_lr=pick([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]), step_size_up=3),
        ]
    ),
    "nested": lambda of, o, pick: of.ChainedScheduler(
        [
            of.SequentialLR(
                o, [of.ConstantLR(o, total_iters=2), of.ExponentialLR(o, pick([0.9, 0.5] * 3 + [0.7]))], milestones=[5]
            ),
            of.LinearLR(o, total_iters=pick([3, 1, 7, 29, 9, 40, 5])),
        ]
    ),
}


def cut(value, num_models):
    return value[:num_models] if isinstance(value, list) else value


def rates(optimizer, key="lr"):
    value = optimizer.param_groups[0][key]
    value = value[0] if key == "betas" else value
    return value.tolist() if isinstance(value, torch.Tensor) else [value] * optimizer.num_models


def check_same(twins, keys):
    for key in keys:
        theirs = [optimizer.param_groups[0][key] for optimizer in twins.torch]
        assert rates(twins.fused, key) == [value[0] if key == "betas" else value for value in theirs]


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize(("case", "optimizer"), covering(CASES, ["sgd-momentum", "sgd-momenta", "adam", "adam-all"]))
def test_rates_are_the_floats_of_torch(optimizer, case, num_models):
    twins = Twins(optimizer, num_models)
    name, arguments = CASES[case]
    arguments = {key: cut(value, num_models) for key, value in arguments.items()}
    fused = getattr(lr_scheduler, name)(twins.fused, **arguments)
    singles = [
        getattr(torch_schedulers, name)(other, **{key: of_model(value, m) for key, value in arguments.items()})
        for m, other in enumerate(twins.torch)
    ]
    keys = ["lr", "betas" if "adam" in optimizer else "momentum"]
    check_same(twins, keys)
    for _ in range(EPOCHS):
        twins.step()
        fused.step()
        for single in singles:
            single.step()
        check_same(twins, keys)
    for slot in range(num_models):
        for p, single in zip(twins.params, twins.singles[slot], strict=True):
            torch.testing.assert_close(p[slot], single, rtol=1e-9, atol=0)
    last = fused.get_last_lr()[0]
    expected = [single.get_last_lr()[0] for single in singles]
    assert (last.tolist() if isinstance(last, torch.Tensor) else [last] * num_models) == expected


def composites(case, twins):
    """A scheduler made of others, of fused models, and torch's of each model alone."""
    num_models = twins.fused.num_models
    fused = COMPOSITES[case](lr_scheduler, twins.fused, lambda values: values[:num_models])
    singles = [
        COMPOSITES[case](torch_schedulers, other, lambda values, m=m: values[m]) for m, other in enumerate(twins.torch)
    ]
    return fused, singles


@pytest.mark.parametrize("num_models", SIZES)
@pytest.mark.parametrize("case", COMPOSITES)
@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam-all"])
def test_schedulers_made_of_others(optimizer, case, num_models):
    twins = Twins(optimizer, num_models)
    fused, singles = composites(case, twins)
    keys = ["lr", "betas" if "adam" in optimizer else "momentum"]
    check_same(twins, keys)
    for _ in range(EPOCHS):
        twins.step()
        fused.step()
        for single in singles:
            single.step()
        check_same(twins, keys)
    for slot, state in enumerate(twins.fused.unfuse()):
        assert state["param_groups"] == twins.torch[slot].state_dict()["param_groups"]


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
    arguments = {"T_0": [3, 1, 5], "T_mult": 2, "eta_min": [0.0, 0.01, 0.0]}
    fused = lr_scheduler.CosineAnnealingWarmRestarts(twins.fused, **arguments)
    singles = [
        torch_schedulers.CosineAnnealingWarmRestarts(other, **{key: of_model(v, m) for key, v in arguments.items()})
        for m, other in enumerate(twins.torch)
    ]
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
    arguments = {key: cut(value, num_models) for key, value in PLATEAUS[case].items()}
    fused = lr_scheduler.ReduceLROnPlateau(twins.fused, **arguments)
    singles = [
        torch_schedulers.ReduceLROnPlateau(other, **{key: of_model(value, m) for key, value in arguments.items()})
        for m, other in enumerate(twins.torch)
    ]
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
    name, arguments = CASES[case]
    arguments = {key: cut(value, 2) for key, value in arguments.items()}
    twins = Twins("sgd-momentum", 2)

    def groups(params, model=None):
        first = [0.1, 0.3]
        return [{"params": params[:2], "lr": first if model is None else first[model]}, {"params": params[2:]}]

    fused_optimizer = type(twins.fused)(groups(twins.params), lr=0.2, momentum=0.9)
    others = [
        torch.optim.SGD(groups(params, model), lr=0.2, momentum=0.9) for model, params in enumerate(twins.singles)
    ]
    fused = getattr(lr_scheduler, name)(fused_optimizer, **arguments)
    singles = [
        getattr(torch_schedulers, name)(other, **{key: of_model(value, m) for key, value in arguments.items()})
        for m, other in enumerate(others)
    ]
    for _ in range(5):
        fused_optimizer.step()
        fused.step()
        for other, single in zip(others, singles, strict=True):
            other.step()
            single.step()
        for number in range(2):
            found = fused_optimizer.param_groups[number]["lr"]
            found = found.tolist() if isinstance(found, torch.Tensor) else [found] * 2
            assert found == [other.param_groups[number]["lr"] for other in others]


def test_a_list_for_each_group():
    params = Twins("sgd", 2).params
    from hocket.fusion.optim import SGD

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


def test_models_that_are_alike_share_a_scheduler_until_one_is_asked_for():
    twins = Twins("sgd-rates", 7)
    fused = lr_scheduler.StepLR(twins.fused, step_size=1, gamma=[0.5, 0.5, 0.9, 0.5, 0.9, 0.5, 0.5])
    assert sorted(cell.places for cell in fused._cells) == [
        ((0, 0), (1, 0), (3, 0), (5, 0), (6, 0)),
        ((2, 0), (4, 0)),
    ]
    before = rates(twins.fused)
    fused.torch_scheduler(1).gamma = 0.25
    expected = [0.5, 0.25, 0.9, 0.5, 0.9, 0.5, 0.5]
    twins.fused.step()
    fused.step()
    assert rates(twins.fused) == [rate * gamma for rate, gamma in zip(before, expected, strict=True)]


def test_a_documentation_and_a_signature_are_those_of_torch():
    for name in lr_scheduler.schedulers.__all__:
        kind, theirs = getattr(lr_scheduler, name), getattr(torch_schedulers, name)
        assert inspect.signature(kind) == inspect.signature(theirs)
        assert (kind.__name__, kind.__module__) == (name, "hocket.fusion.lr_scheduler.schedulers")
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
