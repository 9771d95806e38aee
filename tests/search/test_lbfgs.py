"""Optimizers that call a closure: each trial alone, with the values of the loop that one would write by hand."""

import pytest
import torch
from optuna.distributions import FloatDistribution
from tests.search.pieces import BATCHES, X, Y, classifier
from tests.search.searches import searched
from torch import nn
from torch.nn import functional

from hocket import Training
from hocket.search.data import RandomState

SPACE = {"lr": FloatDistribution(0.05, 0.5)}
SIZES = [16, 16, 10, 6]  # an epoch ends with half a step, where two batches make one
UNEVEN = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
EPOCHS = 3


class Halves(torch.optim.SGD):
    """An optimizer of the user's that cannot step without a closure: of two steps, it takes the second."""

    def step(self, closure):
        closure()
        return super().step(closure)


def lbfgs(params, **options):
    model = classifier(8, rate=0.2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=params["lr"], max_iter=4, line_search_fn="strong_wolfe")
    return Training(model, optimizer, functional.cross_entropy, UNEVEN, functional.cross_entropy, **options)


def accumulated(params):
    return lbfgs(params, accumulate=2, clip_norm=0.2, clip_value=0.1)


def own(params):
    model = classifier(8)
    optimizer = Halves(model.parameters(), lr=params["lr"], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return Training(model, optimizer, functional.cross_entropy, BATCHES, functional.cross_entropy, scheduler)


def by_hand(function, params):
    with RandomState(0).active():
        training = function(params)
    model, optimizer, random, found = training.model, training.optimizer, RandomState(0), []
    batches = list(training.batches)
    for _ in range(EPOCHS):
        model.train()
        with random.active():
            for place in range(0, len(batches), training.accumulate):
                part = batches[place : place + training.accumulate]

                def closure(part=part):
                    optimizer.zero_grad()
                    losses = [training.loss(model(inputs), target) / training.accumulate for inputs, target in part]
                    sum(losses).backward()
                    if training.clip_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
                        nn.utils.clip_grad_value_(model.parameters(), training.clip_value)
                    return sum(losses)

                optimizer.step(closure)
        if training.scheduler is not None:
            training.scheduler.step()
        model.eval()
        with torch.no_grad():
            total = sum(float(training.metric(model(inputs), target)) * len(target) for inputs, target in batches)
        found.append(total / len(Y))
    return found


@pytest.mark.parametrize("executor", ["auto", "serial", "fused"])
@pytest.mark.parametrize("function", [lbfgs, accumulated, own])
def test_values_equal_those_by_hand(function, executor):
    study, record = searched(function, SPACE, trials=3, epochs=EPOCHS, executor=executor)
    assert {each.kind for each in record.epochs} == {"serial"}
    for trial in study.trials:
        assert trial.state.name == "COMPLETE", trial.user_attrs
        assert list(trial.intermediate_values.values()) == pytest.approx(by_hand(function, trial.params), rel=1e-9)
