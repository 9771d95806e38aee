"""The key promise: a trial's values are those it has alone, whatever it was fused with, or swapped after."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from tests.search.pieces import (
    BATCHES,
    LR,
    SPACE,
    X,
    Y,
    accuracy,
    classifier,
    train,
    train_normed,
    train_shuffled,
    train_smoothed,
    training,
)
from tests.search.searches import (
    advance,
    alone,
    as_serial,
    assert_alone,
    assert_runs_alone,
    assert_same,
    random_study,
    searched,
)
from torch import nn
from torch.nn import functional

from hocket import Asha, Halving, Hyperband, Training
from hocket.search.fused import FusedTrainer
from hocket.search.run import Run
from hocket.search.trainer import SerialTrainer

MOMENTUM = {"lr": LR, "momentum": FloatDistribution(0.0, 0.9), "factor": FloatDistribution(0.1, 0.9)}
DECAY = {"lr": LR, "decay": FloatDistribution(1e-3, 1.0)}
SMOOTHING = {"beta": FloatDistribution(0.5, 0.95), "smoothing": FloatDistribution(0.0, 0.5)}
SPACES = [(train, SPACE), (train_normed, MOMENTUM), (train_shuffled, DECAY), (train_smoothed, SMOOTHING)]


@pytest.mark.parametrize(("function", "space"), SPACES)
def test_trials_are_as_alone_whatever_they_are_fused_with(function, space):
    _, record = as_serial(function, space, trials=7, epochs=3, slots=3)
    assert "fused" in {each.kind for each in record.epochs}


@pytest.mark.parametrize("halving", [Halving(), Asha(eta=2), Hyperband(), Hyperband(eta=2, skip_last=1)], ids=repr)
def test_halving_prunes_the_same_trials_with_the_same_values(halving):
    trials = None if isinstance(halving, Hyperband) else 11
    options = {"epochs": 9, "halving": halving, "trials": trials}
    alone, _ = searched(train, SPACE, executor="serial", **options)
    together, _ = searched(train, SPACE, executor="fused", **options)
    if isinstance(halving, Asha):
        for first, second in zip(alone.trials, together.trials, strict=True):
            for epoch in first.intermediate_values.keys() & second.intermediate_values.keys():
                assert first.intermediate_values[epoch] == pytest.approx(second.intermediate_values[epoch], rel=1e-9)
    else:
        assert_same(alone, together)


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_swaps_gives_the_values_of_each_trial_alone(seed):
    drawn = random.Random(seed)
    proposals = [{"lr": 0.01 * (number + 1), "step": 1 + number % 3, "rate": 0.3} for number in range(6)]
    runs = [Run(number, params, seed=0) for number, params in enumerate(proposals)]
    trainer = FusedTrainer(train, runs[:3], 0, frozenset({"lr"}))
    for _ in range(8):
        advance(trainer)
        waiting = [run for run in runs if run not in trainer.slots]
        for run in drawn.sample(waiting, drawn.randint(0, 3)):
            trainer.put(drawn.randrange(3), run)
    trainer.close()
    assert_runs_alone(runs, train)


def test_a_trial_goes_on_alone_where_it_stopped_in_a_slot():
    runs = [Run(number, {"lr": 0.02 * (number + 1), "rate": 0.2}, seed=0) for number in range(3)]
    trainer = FusedTrainer(train, runs, 0)
    advance(trainer)
    trainer.close()
    serial = SerialTrainer(train, 0)
    serial.put(0, runs[1])
    [(_, result)] = serial.advance()
    assert [*runs[1].values, result.value] == pytest.approx(alone(train, runs[1].params, 2), rel=1e-9)


class Drifting(nn.Module):
    """A buffer that no state dict has, and that every forward in training moves."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, inputs):
        if self.training:
            self.scale = self.scale * 0.99
        return self.inner(inputs) * self.scale


def train_drifting(params):
    return training(Drifting(), params["lr"], torch.optim.Adam)


def test_buffers_that_no_state_dict_has_move_with_their_trial(tmp_path):
    runs = [Run(number, {"lr": 0.02 * (number + 1)}, seed=0) for number in range(3)]
    trainer = FusedTrainer(train_drifting, runs[:2], 0, frozenset({"lr"}), draws=False)

    advance(trainer)
    trainer.put(0, runs[2])
    advance(trainer)
    trainer.put(1, runs[0])
    advance(trainer)
    trainer.close()
    again = Run(0, runs[1].params, seed=0, saved=runs[1].state())
    again.build(train_drifting)
    serial = SerialTrainer(train_drifting, 0)
    serial.put(0, again)
    [(_, result)] = serial.advance()
    assert [*runs[1].values, result.value] == pytest.approx(alone(train_drifting, runs[1].params, 3), rel=1e-9)
    assert_runs_alone(runs, train_drifting)


def test_float32_stays_close():
    def single(params):
        return training(classifier().float(), params["lr"], torch.optim.Adam, [(X.float(), Y)])

    as_serial(single, {"lr": LR}, tolerance=1e-4, trials=4, epochs=3)


def train_images(params):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3)]
    batches = [(x.repeat(1, 3)[:, :16].unflatten(1, (1, 4, 4)), y) for x, y in BATCHES]
    return training(nn.Sequential(*layers).double(), params["lr"], partial(torch.optim.SGD, momentum=0.9), batches)


class Overwriting(nn.Module):
    """It writes over its batch: models that run one after another would read what the first one wrote."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs):
        return self.inner(inputs.mul_(0.9))


def train_over_input(params):
    data = torch.utils.data.TensorDataset(X, Y)  # a loader makes each batch anew
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return training(Overwriting(), params["lr"], batches=loader, metric=accuracy)


@pytest.mark.parametrize("function", [train_images, train_over_input])
def test_trials_are_as_alone_while_their_plan_is_chosen(function):
    _, record = as_serial(function, {"lr": LR}, trials=4, epochs=8)
    assert {each.kind for each in record.epochs} == {"fused"}


class Drawing(nn.Module):
    """Draws in training or in evaluation."""

    def __init__(self, draws) -> None:
        super().__init__()
        self.first, self.last, self.draws = nn.Linear(6, 6).double(), nn.Linear(6, 3).double(), draws

    def forward(self, x):
        return self.last(x + self.draws(self.training) * self.first(x))


def noise(like: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(like + torch.randn_like(like), torch.zeros(len(like), dtype=torch.int64))


# For each way to draw: the model, loss and metric of a rate, and what trains them.
DRAWS = {
    "in evaluation": (lambda rate: Drawing(lambda trains: 1 if trains else torch.rand(())), None, None, "fused"),
    "at some rates only": (lambda rate: nn.Sequential(nn.Dropout(rate), classifier()), None, None, "fused"),
    "Python's": (lambda rate: Drawing(lambda _: random.random()), None, None, "serial"),
    "numpy's": (lambda rate: Drawing(lambda _: np.random.rand()), None, None, "serial"),  # noqa: NPY002
    "in the loss": (lambda rate: classifier(), lambda outputs, _: noise(outputs), None, "serial"),
    "in the metric": (lambda rate: classifier(), None, lambda outputs, _: noise(outputs), "serial"),
}


@pytest.mark.filterwarnings("ignore:hocket.fuse. Sequential")
@pytest.mark.parametrize("name", DRAWS)
def test_what_trials_draw_is_what_they_draw_alone(name):
    make, loss, metric, kind = DRAWS[name]

    def draw(params):
        model = nn.Sequential(make(params["rate"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        return Training(model, optimizer, loss or functional.cross_entropy, BATCHES, metric or functional.cross_entropy)

    space = {"lr": LR, "rate": CategoricalDistribution([0, 0.5])}
    study = random_study(3)  # begins with a rate of 0
    state = random.getstate()
    together, record = searched(draw, space, study=study, trials=4, epochs=2, executor="fused")
    assert random.getstate() == state
    assert record.epochs[-1].kind == kind
    assert_alone(together, draw, 2)


WHOLE = {
    "a list": (lambda x: [x[:, :3], x[:, 3:]], lambda pair: torch.cat(list(pair), 1)),
    "a tuple": (lambda x: (x[:, :3], x[:, 3:]), lambda pair: torch.cat(pair, 1)),
    "a dict": (lambda x: {"x": x}, lambda named: named["x"]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_inputs_that_are_several_tensors_reach_the_model_whole(name):
    pack, unpack = WHOLE[name]

    class Unpacking(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()

        def forward(self, *inputs):
            return self.net(unpack(inputs[0])) * len(inputs)

    def whole(params):
        return training(Unpacking(), params["lr"], batches=[(pack(inputs), target) for inputs, target in BATCHES])

    together, record = searched(whole, {"lr": LR}, trials=3, epochs=2, executor="fused")
    assert {each.kind for each in record.epochs} == {"fused"}
    assert_alone(together, whole, 2)
