"""Schedulers with their arguments, other ones for each of seven models, and the rates that they set."""

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedulers

from hocket import lr_scheduler
from optim.twins import cut, of_model

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
GAMMAS = [0.9, 0.5, 0.1, 1.0, 0.3, 0.7, 0.2]
MAXIMA = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
TOTALS = [40, 31, 50, 100, 60, 35, 45]
STEPS = [3, 1, 7, 29, 9, 40, 5]
MILESTONES = [[3, 7], [1], [2, 2, 9], [], [5, 6, 7], [29], [0, 4]]
# For each case the class and arguments for B = 7; a list is one value for each model.
CASES = {
    "step": ("StepLR", {"step_size": 3, "gamma": 0.5}),
    "steps": ("StepLR", {"step_size": [1, 2, 3, 4, 5, 10, 100], "gamma": GAMMAS}),
    "step-gammas": ("StepLR", {"step_size": 4, "gamma": GAMMAS}),
    "milestones": ("MultiStepLR", {"milestones": MILESTONES, "gamma": GAMMAS}),
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
    "linears": ("LinearLR", {"end_factor": [0.1, 0.5, 1.0, 0.3, 0.05, 0.2, 0.7], "total_iters": STEPS}),
    "polynomial": ("PolynomialLR", {"power": [1.0, 2.0, 0.5, 3.0, 1.5, 0.9, 1.1], "total_iters": STEPS}),
    "factor": ("MultiplicativeLR", {"lr_lambda": powers}),
    "factors": ("MultiplicativeLR", {"lr_lambda": LAMBDAS}),
    "cyclic": ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4, "mode": "triangular2"}),
    "cyclics": (
        "CyclicLR",
        {
            "base_lr": [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07],
            "max_lr": MAXIMA,
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
            "max_lr": MAXIMA,
            "total_steps": TOTALS,
            "pct_start": [0.3, 0.1, 0.5, 0.25, 0.7, 0.3, 0.4],
            "div_factor": [25.0, 10.0, 4.0, 2.0, 100.0, 5.0, 8.0],
            "final_div_factor": [1e4, 1e3, 10.0, 1e4, 1e2, 5.0, 1e5],
            "base_momentum": [0.85, 0.8, 0.7, 0.5, 0.1, 0.85, 0.6],
            "max_momentum": [0.95, 0.9, 0.99, 0.8, 0.7, 0.95, 0.9],
        },
    ),
    "one-cycle-three": ("OneCycleLR", {"max_lr": MAXIMA, "total_steps": 40, "three_phase": True}),
    "one-cycle-linear": ("OneCycleLR", {"max_lr": 0.3, "total_steps": TOTALS, "anneal_strategy": "linear"}),
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
ALL = CASES | {name: ("ReduceLROnPlateau", arguments) for name, arguments in PLATEAUS.items()}
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
            of.CyclicLR(o, base_lr=0.01, max_lr=pick(MAXIMA), step_size_up=3),
        ]
    ),
    "nested": lambda of, o, pick: of.ChainedScheduler(
        [
            of.SequentialLR(
                o, [of.ConstantLR(o, total_iters=2), of.ExponentialLR(o, pick([0.9, 0.5] * 3 + [0.7]))], milestones=[5]
            ),
            of.LinearLR(o, total_iters=pick(STEPS)),
        ]
    ),
}


def rates(optimizer, key="lr", group=0):
    value = optimizer.param_groups[group][key]
    value = value[0] if key == "betas" else value
    return value.tolist() if isinstance(value, torch.Tensor) else [value] * optimizer.num_models


def check_same(twins, keys, group=0):
    for key in keys:
        theirs = [optimizer.param_groups[group][key] for optimizer in twins.torch]
        assert rates(twins.fused, key, group) == [value[0] if key == "betas" else value for value in theirs]


def schedulers(case, twins, **more):
    """A scheduler of fused models, and torch's of each model alone."""
    if case not in COMPOSITES:
        name, arguments = ALL[case]
        return both(name, twins, **arguments, **more)
    num_models = twins.fused.num_models
    fused = COMPOSITES[case](lr_scheduler, twins.fused, lambda values: values[:num_models])
    singles = [
        COMPOSITES[case](torch_schedulers, other, lambda values, m=m: values[m]) for m, other in enumerate(twins.torch)
    ]
    return fused, singles


def both(name, twins, **arguments):
    """The same from the name of a class and its arguments."""
    own = {key: cut(value, twins.fused.num_models) for key, value in arguments.items()}
    singles = [
        getattr(torch_schedulers, name)(other, **{key: of_model(value, m) for key, value in arguments.items()})
        for m, other in enumerate(twins.torch)
    ]
    return getattr(lr_scheduler, name)(twins.fused, **own), singles
