"""Bad input is refused with a message that restates it."""

import numpy as np
import pytest
import torch

from hocket import lr_scheduler
from hocket.errors import InputError
from optim.twins import Twins
from support.refusals import refused


@pytest.fixture
def optimizer():
    return Twins("sgd-momentum", 3).fused


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("StepLR", {"step_size": [1, 2]}, r"step_size: expected 3 numbers, one for each model, .* got 2: \[1, 2\]"),
        ("StepLR", {"step_size": 0}, "step_size: expected a whole number >= 1, got 0"),
        ("StepLR", {"step_size": [1, 2, 2.5]}, "step_size: expected a whole number >= 1, got 2.5"),
        ("StepLR", {"step_size": 1, "gamma": "fast"}, "gamma: expected a number, got 'fast'"),
        ("StepLR", {"step_size": 1, "gamma": [0.1]}, "gamma: expected 3 numbers"),
        ("StepLR", {"step_size": 1, "gamma": [[0.1] * 3, 0.2]}, "gamma: expected a list for each of 1 groups, got 2"),
        ("StepLR", {"step_size": 1, "last_epoch": -2}, "last_epoch: expected a whole number >= -1, got -2"),
        (
            "StepLR",
            {"step_size": 1, "last_epoch": 3},
            r"StepLR of model 0: .*'initial_lr' is not specified in param_groups\[0\]",
        ),
        ("MultiStepLR", {"milestones": [[1], [2]]}, r"milestones: expected 3 lists, .* got 2"),
        ("MultiStepLR", {"milestones": [1, -2]}, "milestones: expected a whole number >= 0, got -2"),
        ("MultiStepLR", {"milestones": [[1], [2], 3]}, r"milestones: expected epochs in a list, got 3"),
        ("ExponentialLR", {"gamma": [0.1, 0.2, None]}, r"gamma: expected a number, got None"),
        ("ExponentialLR", {"gamma": float("nan")}, r"gamma: expected a number, got nan"),
        ("CosineAnnealingLR", {"T_max": 0}, "T_max: expected a whole number >= 1, got 0"),
        ("LambdaLR", {"lr_lambda": 0.5}, "lr_lambda: expected a function of the epoch, got 0.5"),
        ("LambdaLR", {"lr_lambda": [abs, abs]}, "lr_lambda: expected 3 values"),
        ("OneCycleLR", {"max_lr": 0.1}, "OneCycleLR of model 0: You must define either total_steps OR"),
        ("OneCycleLR", {"max_lr": 0.1, "epochs": 3}, "OneCycleLR of model 0: You must define either total_steps OR"),
        ("OneCycleLR", {"max_lr": -0.1, "total_steps": 9}, "max_lr: expected a number >= 0, got -0.1"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": [9, 9]}, "total_steps: expected 3 numbers"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 9, "pct_start": 2}, "pct_start: expected a number >= 0 and <= 1"),
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 9, "anneal_strategy": "no"},
            "anneal_strategy: expected one of cos",
        ),
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 9, "three_phase": 1},
            "three_phase: expected True or False, got 1",
        ),
        ("ConstantLR", {"factor": 1.5}, "factor: expected a number >= 0 and <= 1, got 1.5"),
        ("LinearLR", {"start_factor": 0}, "LinearLR of model 0: Starting multiplicative factor expected"),
        ("PolynomialLR", {"total_iters": [1, 2, 0.5]}, "total_iters: expected a whole number >= 0, got 0.5"),
        ("CosineAnnealingWarmRestarts", {"T_0": 0}, "T_0: expected a whole number >= 1, got 0"),
        (
            "CyclicLR",
            {"base_lr": 0.1, "max_lr": 1.0, "mode": "square"},
            "mode: expected one of triangular, triangular2",
        ),
        ("CyclicLR", {"base_lr": [0.1, 0.2], "max_lr": 1.0}, "base_lr: expected 3 numbers"),
        ("MultiplicativeLR", {"lr_lambda": [abs, abs, 1.0]}, "lr_lambda: expected a function of the epoch, got 1.0"),
        ("ReduceLROnPlateau", {"factor": 1.0}, "factor: expected a number >= 0 and < 1, got 1.0"),
        ("ReduceLROnPlateau", {"mode": "least"}, "mode: expected one of min, max, got 'least'"),
        ("ReduceLROnPlateau", {"patience": [1, 2]}, "patience: expected 3 numbers"),
    ],
)
def test_arguments(optimizer, name, arguments, match):
    refused(match, getattr(lr_scheduler, name), optimizer, **arguments)


def test_arguments_of_torch_and_numpy(optimizer):
    for value in (np.array([1, 2, 3]), torch.tensor([1, 2, 3]), [np.int64(1), torch.tensor(2), 3]):
        scheduler = lr_scheduler.StepLR(optimizer, step_size=value, gamma=np.float32(0.5))
        found = [scheduler.torch_scheduler(model).step_size for model in range(3)]
        assert (found, [type(each) for each in found]) == ([1, 2, 3], [int] * 3)
        assert type(scheduler.torch_scheduler(0).gamma) is float
    for value in (np.array([2, 5]), torch.tensor([2, 5]), np.array([[2, 5], [2, 5], [2, 5]])):
        scheduler = lr_scheduler.MultiStepLR(optimizer, milestones=value)
        assert scheduler.torch_scheduler(2).milestones == {2: 1, 5: 1}
    for value in (
        np.array([1.0, 2.0, 3.0]),
        np.array([True] * 3),
        float("nan"),
        True,
        np.bool_(True),
        torch.tensor(1.5),
    ):
        refused("step_size: expected a whole number >= 1, got", lr_scheduler.StepLR, optimizer, step_size=value)
    for value in (np.array([0.1, np.nan, 0.2]), torch.tensor(float("nan")), np.float64("inf"), True):
        refused("gamma: expected a number, got", lr_scheduler.ExponentialLR, optimizer, gamma=value)


def test_optimizers():
    plain = torch.optim.SGD([torch.ones(3)], lr=0.1)
    with pytest.raises(InputError, match=r"optimizer: expected one of hocket.optim, got torch.optim.sgd.SGD; for that"):
        lr_scheduler.StepLR(plain, step_size=1)
    with pytest.raises(InputError, match=r"OneCycleLR of model 0: .* must support momentum .* `cycle_momentum`"):
        lr_scheduler.OneCycleLR(Twins("adagrad", 2).fused, max_lr=0.1, total_steps=9)


def test_schedulers_made_of_others(optimizer):
    first, second = lr_scheduler.StepLR(optimizer, 1), lr_scheduler.ExponentialLR(optimizer, 0.5)
    stranger = lr_scheduler.StepLR(Twins("sgd", 3).fused, 1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    for wrong, match in (
        ([first, stranger], "schedulers: expected some of hocket.lr_scheduler, of one optimizer, got"),
        ([first, torch.optim.lr_scheduler.StepLR(optimizer, 1)], "schedulers: expected some of hocket.lr_scheduler"),
        ([first, plateau], "SequentialLR of model 0: .* does not support `ReduceLROnPlateau`"),
        ([first], "SequentialLR of model 0: .* one more than the number of milestone points"),
    ):
        refused(match, lr_scheduler.SequentialLR, optimizer, wrong, milestones=[3])
    with pytest.raises(InputError, match=r"milestones: expected 3 lists, .* got 2"):
        lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[[1], [2]])
    refused("schedulers: expected at least one to be chained, got none", lr_scheduler.ChainedScheduler, [])


def test_an_optimizer_whose_models_were_selected_alone(optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1)
    optimizer.step()
    optimizer.select_models(
        [0, 2], [torch.nn.Parameter(p.detach()[[0, 2]]) for p in optimizer.param_groups[0]["params"]]
    )
    refused("step: expected an optimizer of 3 models, got one of 2; call select_models", scheduler.step)
    scheduler.select_models([0, 2])
    scheduler.step()
    assert scheduler.epochs == [1, 1]


def test_metrics(optimizer):
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer)
    refused(r"metrics: expected 3 numbers, one for each model, .* got 2: \[1.0, 2.0\]", scheduler.step, [1.0, 2.0])
    refused(r"metrics: expected a number, or one for each model, got 'low'", scheduler.step, "low")
    scheduler.step(1.0)
    scheduler.step(torch.ones(3))


def test_a_step_too_early_and_an_epoch(optimizer):
    scheduler = lr_scheduler.StepLR(optimizer, step_size=1)
    with pytest.warns(UserWarning, match=r"called before optimizer.step\(\)"):
        scheduler.step()
    refused(r"step: expected no epoch \(torch deprecates it\), got 3", scheduler.step, 3)


def test_a_state_of_another_number_of_models(optimizer):
    state = lr_scheduler.StepLR(Twins("sgd", 2).fused, step_size=1).state_dict()
    with pytest.raises(InputError, match="state_dict: expected one of 3 models, got one of 2"):
        lr_scheduler.StepLR(optimizer, step_size=1).load_state_dict(state)
    with pytest.raises(InputError, match="state_dict: expected one of a ExponentialLR, got one of StepLR"):
        lr_scheduler.ExponentialLR(optimizer, gamma=0.5).load_state_dict(state)
