"""The key promise: a trial's values are those it has alone, whatever it was fused with, or swapped after."""

from __future__ import annotations

import math
import random

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
    assert_same,
    classifier,
    searched,
    train,
    train_normed,
    train_shuffled,
    train_smoothed,
)
from torch import nn
from torch.nn import functional

from hocket import Asha, Halving, Hyperband, Training
from hocket.search.fused import FusedTrainer
from hocket.search.group import TrialGroup, Ways
from hocket.search.probe import alone_s
from hocket.search.run import Run
from hocket.search.serial import SerialTrainer
from hocket.search.split import Split
from hocket.search.trainer import CannotFuseError

MOMENTUM = {"lr": LR, "momentum": FloatDistribution(0.0, 0.9), "factor": FloatDistribution(0.1, 0.9)}
DECAY = {"lr": LR, "decay": FloatDistribution(1e-3, 1.0)}
SMOOTHING = {"beta": FloatDistribution(0.5, 0.95), "smoothing": FloatDistribution(0.0, 0.5)}
SPACES = [(train, SPACE), (train_normed, MOMENTUM), (train_shuffled, DECAY), (train_smoothed, SMOOTHING)]


@pytest.mark.parametrize(("function", "space"), SPACES)
def test_trials_are_as_alone_whatever_they_are_fused_with(function, space):
    alone, plain = searched(function, space, trials=7, epochs=3, executor="serial")
    together, record = searched(function, space, trials=7, epochs=3, executor="fused", slots=3)
    assert {each.kind for each in plain.epochs} == {"serial"}
    assert "fused" in {each.kind for each in record.epochs}
    assert_same(alone, together)


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


def alone(function, params, epochs):
    run = Run(0, params, seed=0)
    trainer = SerialTrainer(function, 0)
    trainer.put(0, run)
    for _ in range(epochs):
        [(_, result)] = trainer.advance()
        run.values.append(result.value)
    return run.values


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_swaps_gives_the_values_of_each_trial_alone(seed):
    drawn = random.Random(seed)
    proposals = [{"lr": 0.01 * (number + 1), "step": 1 + number % 3, "rate": 0.3} for number in range(6)]
    runs = [Run(number, params, seed=0) for number, params in enumerate(proposals)]
    trainer = FusedTrainer(train, runs[:3], 0, frozenset({"lr"}))
    for _ in range(8):
        for run, result in trainer.advance():
            run.values.append(result.value)
        waiting = [run for run in runs if run not in trainer.slots]
        for run in drawn.sample(waiting, drawn.randint(0, 3)):
            trainer.put(drawn.randrange(3), run)
    trainer.close()
    for run in runs:
        assert run.values == pytest.approx(alone(train, run.params, run.epochs), rel=1e-9)


def test_a_trial_goes_on_alone_where_it_stopped_in_a_slot():
    runs = [Run(number, {"lr": 0.02 * (number + 1), "rate": 0.2}, seed=0) for number in range(3)]
    trainer = FusedTrainer(train, runs, 0)
    for run, result in trainer.advance():
        run.values.append(result.value)
    trainer.close()
    serial = SerialTrainer(train, 0)
    serial.put(0, runs[1])
    [(_, result)] = serial.advance()
    assert [*runs[1].values, result.value] == pytest.approx(alone(train, runs[1].params, 2), rel=1e-9)


def test_slots_are_given_up_when_that_saves_time():
    runs = [Run(number, {"lr": 0.02 * (number + 1)}, seed=0, until=1000) for number in range(4)]
    trainer = FusedTrainer(train, runs, 0)
    for _ in range(3):
        for run, result in trainer.advance():
            run.values.append(result.value)
    runs[0].status = runs[2].status = type(runs[0].status).COMPLETE
    trainer._first_s = trainer._epoch_s
    trainer.shrink()
    assert trainer.slots == [runs[1], runs[3]]
    for run, result in trainer.advance():
        run.values.append(result.value)
    for run in (runs[1], runs[3]):
        assert run.values == pytest.approx(alone(train, run.params, 4), rel=1e-9)


def test_slots_stay_where_beginning_anew_costs_more():
    runs = [Run(number, {"lr": 0.02}, seed=0, until=4) for number in range(3)]
    trainer = FusedTrainer(train, runs, 0)
    for run, result in trainer.advance():
        run.values.append(result.value)
    runs[0].status = type(runs[0].status).COMPLETE
    trainer._first_s = trainer._epoch_s * 100
    trainer.shrink()
    assert trainer.slots == runs


def test_a_trial_that_diverges_ends_alone():
    def some_diverge(params):
        made = train(params)
        if params["lr"] > 0.05:
            made.optimizer.param_groups[0]["lr"] = 1e200
        return made

    space = {"lr": CategoricalDistribution([0.01, 0.06])}
    together, _ = searched(some_diverge, space, trials=8, epochs=3, executor="fused")
    serial, _ = searched(some_diverge, space, trials=8, epochs=3, executor="serial")
    assert_same(serial, together)
    failed = [trial for trial in together.trials if trial.state.name == "FAIL"]
    assert failed
    assert all(trial.params["lr"] == 0.06 for trial in failed)
    assert all("its loss is" in trial.user_attrs["hocket:error"] for trial in failed)
    assert together.best_trial.params["lr"] < 0.05


def test_a_trial_whose_metric_raises_or_is_nan_ends_alone():
    def troubled(params):
        def metric(outputs, target):
            if params["lr"] == 0.02:
                raise RuntimeError("this one breaks")
            return float("nan") if params["lr"] == 0.03 else accuracy(outputs, target)

        made = train(params)
        return Training(made.model, made.optimizer, made.loss, made.batches, metric)

    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    study, _ = searched(troubled, space, trials=9, epochs=2, executor="fused")
    by_rate = {trial.params["lr"]: trial for trial in study.trials}
    assert {rate: trial.state.name for rate, trial in by_rate.items()} == {0.01: "COMPLETE", 0.02: "FAIL", 0.03: "FAIL"}
    assert "this one breaks" in by_rate[0.02].user_attrs["hocket:error"]
    assert "its metric is nan in epoch 1" in by_rate[0.03].user_attrs["hocket:error"]


def test_a_loss_that_raises_for_one_trial_ends_that_one():
    def breaking(params):
        def loss(outputs, target):
            if params["lr"] == 0.02:
                raise RuntimeError("no such loss")
            return functional.cross_entropy(outputs, target)

        made = train(params)
        return Training(made.model, made.optimizer, loss, made.batches, accuracy)

    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    study, record = searched(breaking, space, trials=9, epochs=2, executor="fused")
    assert {trial.params["lr"] for trial in study.trials if trial.state.name == "FAIL"} == {0.02}
    assert {each.kind for each in record.epochs} == {"fused"}


def test_a_loss_that_raises_later_ends_that_trial_and_the_others_go_on_as_alone():
    def breaking(params):
        made = train(params)
        calls = 0

        def loss(outputs, target):
            nonlocal calls
            calls += 1
            if params["lr"] == 0.02 and calls > 12:  # in the second epoch, also after a few steps on copies
                raise RuntimeError("no more")
            return functional.cross_entropy(outputs, target)

        return Training(made.model, made.optimizer, loss, made.batches, accuracy, made.scheduler)

    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    together, record = searched(breaking, space, trials=6, epochs=6, executor="fused")
    assert {each.kind for each in record.epochs} == {"fused", "serial"}
    for trial in together.trials:
        assert trial.state.name == ("FAIL" if trial.params["lr"] == 0.02 else "COMPLETE")
        epochs = list(trial.intermediate_values.values())
        assert epochs == pytest.approx(alone(breaking, {"lr": trial.params["lr"]}, len(epochs)), rel=1e-9)


def test_trials_go_on_alone_where_that_was_faster(monkeypatch):
    monkeypatch.setattr("hocket.search.group.alone_s", lambda training, num_steps: 0.0)
    serial, _ = searched(train, {"lr": LR}, trials=4, epochs=5, executor="serial")
    chosen, record = searched(train, {"lr": LR}, trials=4, epochs=5, executor="auto")
    assert [each.kind for each in record.epochs] == ["fused"] * 8 + ["serial"] * 12
    assert record.groups[0][1].startswith("a fused step takes ")
    assert_same(serial, chosen)
    _, record = searched(train, {"lr": LR}, trials=4, epochs=5, executor="fused")
    assert {each.kind for each in record.epochs} == {"fused"}


def test_the_time_alone_leaves_a_trial_as_it_is():
    run = Run(0, {"lr": 0.02, "rate": 0.2}, seed=0)
    made = run.build(train)
    before = [each.clone() for each in made.model.parameters()]
    drawn = torch.get_rng_state()
    assert alone_s(made, 3) > 0
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(map(torch.equal, before, made.model.parameters()))
    assert not made.optimizer.state


def test_trials_that_went_on_alone_fuse_again_when_more_come(monkeypatch):
    times_s = iter([0.0])  # when the group is judged first, steps alone take no time
    monkeypatch.setattr("hocket.search.group.alone_s", lambda training, num_steps: next(times_s, math.inf))
    ways = Ways(train, Split(("lr",), (), options=frozenset({"lr"})), max_slots=8)
    group = TrialGroup((), ways)
    kinds = []

    def epoch():
        assert group.fill() == []
        kinds.append((group.trainer.kind, len(group.trainer.active)))
        for run, result in group.trainer.advance():
            run.values.append(result.value)

    runs = [Run(number, {"lr": 0.01 * (number + 1)}, seed=0, until=9) for number in range(6)]
    group.waiting = runs[:2]
    for _ in range(3):  # each plan has had its turn after the second epoch
        epoch()
    group.waiting += runs[2:]
    for _ in range(2):
        epoch()
    group.close()
    assert kinds == [("fused", 2), ("fused", 2), ("serial", 1), ("fused", 6), ("fused", 6)]
    for run in runs:
        assert run.values == pytest.approx(alone(train, run.params, run.epochs), rel=1e-9)


def test_an_optimizer_that_cannot_fuse_trains_one_at_a_time_and_says_so(caplog):
    class Own(torch.optim.SGD):
        pass

    def own(params):
        model = classifier()
        return Training(model, Own(model.parameters(), lr=params["lr"]), nn.CrossEntropyLoss(), BATCHES, accuracy)

    study, record = searched(own, {"lr": LR}, trials=3, epochs=2, executor="fused")
    assert {each.kind for each in record.epochs} == {"serial"}
    assert "optimizer: Own has no fused form" in caplog.text
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)


def test_another_optimizer_inside_a_group_sets_trials_apart():
    def either(params):
        model = classifier()
        kind = torch.optim.SGD if params["lr"] < 0.02 else torch.optim.Adam
        optimizer = kind(model.parameters(), lr=params["lr"])
        return Training(model, optimizer, functional.cross_entropy, BATCHES, accuracy)

    space = {"lr": FloatDistribution(0.001, 0.04), "unused": FloatDistribution(0, 1)}
    together, record = searched(either, space, trials=12, epochs=2, executor="fused", fusible=None)
    alone_, _ = searched(either, space, trials=12, epochs=2, executor="serial")
    assert_same(alone_, together)
    assert record.split == (("unused",), ("lr",))


def test_data_that_differs_is_never_shared():
    def own_data(params):
        made = train({"lr": 0.01})
        batches = [(inputs * params["scale"], target) for inputs, target in BATCHES]
        return Training(made.model, made.optimizer, made.loss, batches, made.metric)

    space = {"scale": CategoricalDistribution([1.0, 2.0])}
    together, record = searched(own_data, space, trials=6, epochs=2, executor="fused")
    alone_, _ = searched(own_data, space, trials=6, epochs=2, executor="serial")
    assert_same(alone_, together)
    assert len(record.groups) == 2


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
    model = Drifting()
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
    return Training(model, optimizer, functional.cross_entropy, BATCHES, functional.cross_entropy)


def test_buffers_that_no_state_dict_has_move_with_their_trial(tmp_path):
    runs = [Run(number, {"lr": 0.02 * (number + 1)}, seed=0) for number in range(3)]
    trainer = FusedTrainer(train_drifting, runs[:2], 0, frozenset({"lr"}), draws=False)

    def epoch():
        for run, result in trainer.advance():
            run.values.append(result.value)

    epoch()
    trainer.put(0, runs[2])
    epoch()
    trainer.put(1, runs[0])
    epoch()
    trainer.close()
    again = Run(0, runs[1].params, seed=0, saved=runs[1].state())
    again.build(train_drifting)
    serial = SerialTrainer(train_drifting, 0)
    serial.put(0, again)
    [(_, result)] = serial.advance()
    assert [*runs[1].values, result.value] == pytest.approx(alone(train_drifting, runs[1].params, 3), rel=1e-9)
    for run in runs:
        assert run.values == pytest.approx(alone(train_drifting, run.params, run.epochs), rel=1e-9)


@pytest.mark.parametrize("field", ["loss", "metric"])
def test_a_loss_or_metric_that_holds_the_model_trains_one_at_a_time(field, caplog):
    def decayed(params):
        made = train(params)

        def own(outputs, target):
            return functional.cross_entropy(outputs, target) + 0.1 * made.model[0].weight.square().sum()

        functions = {"loss": made.loss, "metric": made.metric, field: own}
        return Training(made.model, made.optimizer, functions["loss"], BATCHES, functions["metric"], made.scheduler)

    together, record = searched(decayed, {"lr": LR}, trials=4, epochs=2, executor="fused")
    alone_, _ = searched(decayed, {"lr": LR}, trials=4, epochs=2, executor="serial")
    assert_same(alone_, together)
    assert {each.kind for each in record.epochs} == {"serial"}
    assert f"{field}: it holds the trial's own model" in caplog.text


def test_a_refused_trial_is_named():
    first, second = Run(0, {"width": 8}, 0), Run(1, {"width": 12}, 0)
    with pytest.raises(CannotFuseError, match=r"model.0.weight: \(8, 6\)"):
        FusedTrainer(train, [first, second], 0)


def test_float32_stays_close():
    def single(params):
        model = classifier().float()
        optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"])
        batches = [(X.float(), Y)]
        return Training(model, optimizer, functional.cross_entropy, batches, functional.cross_entropy)

    alone_, _ = searched(single, {"lr": LR}, trials=4, epochs=3, executor="serial")
    together, _ = searched(single, {"lr": LR}, trials=4, epochs=3, executor="fused")
    assert_same(alone_, together, tolerance=1e-4)


def train_images(params):
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=0.9)
    batches = [(x.repeat(1, 3)[:, :16].unflatten(1, (1, 4, 4)), y) for x, y in BATCHES]
    return Training(model, optimizer, functional.cross_entropy, batches, functional.cross_entropy)


class Overwriting(nn.Module):
    """It writes over its batch: models that run one after another would read what the first one wrote."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()

    def forward(self, inputs):
        return self.inner(inputs.mul_(0.9))


def train_over_input(params):
    model = Overwriting()
    optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
    data = torch.utils.data.TensorDataset(X, Y)  # a loader makes each batch anew
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    return Training(model, optimizer, functional.cross_entropy, loader, accuracy)


@pytest.mark.parametrize("function", [train_images, train_over_input])
def test_trials_are_as_alone_while_their_plan_is_chosen(function):
    options = {"trials": 4, "epochs": 8}
    together, record = searched(function, {"lr": LR}, executor="fused", **options)
    alone_, _ = searched(function, {"lr": LR}, executor="serial", **options)
    assert {each.kind for each in record.epochs} == {"fused"}
    assert_same(alone_, together)
