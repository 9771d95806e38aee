"""Trials that share a fused model, its end, trials one at a time, and failures of single trials."""

from dataclasses import replace

import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution
from tests.search.pieces import BATCHES, LR, accuracy, classifier, train, train_diverging, training
from tests.search.searches import advance, alone, as_serial, assert_runs_alone, random_study, searched
from torch import nn
from torch.nn import functional

from hocket import Halving, Training
from hocket.search.fused import FusedTrainer
from hocket.search.group import TrialGroup, Ways
from hocket.search.run import Run
from hocket.search.split import Split
from hocket.search.trainer import CannotFuseError
from support.refusals import fails


def test_slots_are_given_up_when_that_saves_time():
    runs = [Run(number, {"lr": 0.02 * (number + 1)}, seed=0, until=1000) for number in range(4)]
    trainer = FusedTrainer(train, runs, 0)
    advance(trainer, 3)
    runs[0].status = runs[2].status = type(runs[0].status).COMPLETE
    trainer._first_s = trainer._epoch_s
    trainer.shrink()
    assert trainer.slots == [runs[1], runs[3]]
    advance(trainer)
    for run in (runs[1], runs[3]):
        assert run.values == pytest.approx(alone(train, run.params, 4), rel=1e-9)


def test_slots_stay_where_beginning_anew_costs_more():
    runs = [Run(number, {"lr": 0.02}, seed=0, until=4) for number in range(3)]
    trainer = FusedTrainer(train, runs, 0)
    advance(trainer)
    runs[0].status = type(runs[0].status).COMPLETE
    trainer._first_s = trainer._epoch_s * 100
    trainer.shrink()
    assert trainer.slots == runs


def test_a_trial_alone_fuses_when_more_come():
    ways = Ways(train, Split(("lr",), (), options=frozenset({"lr"})), max_slots=8)
    group = TrialGroup((), ways)
    kinds = []

    def epoch():
        assert group.fill() == []
        kinds.append((group.trainer.kind, len(group.trainer.active)))
        advance(group.trainer)

    runs = [Run(number, {"lr": 0.01 * (number + 1)}, seed=0, until=9) for number in range(6)]
    for more in (runs[:1], (), runs[1:3], runs[3:], ()):
        group.waiting += more
        epoch()
    group.close()
    assert kinds == [("serial", 1), ("serial", 1), ("fused", 3), ("fused", 6), ("fused", 6)]
    assert_runs_alone(runs, train)


@pytest.mark.parametrize(("slot_bytes", "until", "backend"), [(0, 4, "rule"), (2**24, 4, "auto"), (0, 1000, "auto")])
def test_plans_are_timed_for_large_models_and_long_searches(slot_bytes, until, backend):
    runs = [Run(number, {"lr": 0.02}, seed=0, until=until) for number in range(3)]
    trainer = FusedTrainer(train, runs, 0, slot_bytes=slot_bytes)
    assert trainer.model.backend == backend


def test_an_optimizer_that_cannot_fuse_trains_one_at_a_time_and_says_so(caplog):
    class Own(torch.optim.SGD):
        pass

    def own(params):
        return training(classifier(), params["lr"], Own, metric=accuracy)

    study, record = searched(own, {"lr": LR}, trials=3, epochs=2, executor="fused")
    assert {each.kind for each in record.epochs} == {"serial"}
    assert "optimizer: Own has no fused form" in caplog.text
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)


def test_another_optimizer_inside_a_group_sets_trials_apart():
    def either(params):
        kind = torch.optim.SGD if params["lr"] < 0.02 else torch.optim.Adam
        return training(classifier(), params["lr"], kind, metric=accuracy)

    space = {"lr": FloatDistribution(0.001, 0.04), "unused": FloatDistribution(0, 1)}
    _, record = as_serial(either, space, trials=12, epochs=2, fusible=None)
    assert record.split == (("unused",), ("lr",))


def test_data_that_differs_is_never_shared():
    def own_data(params):
        made = train({"lr": 0.01})
        batches = [(inputs * params["scale"], target) for inputs, target in BATCHES]
        return Training(made.model, made.optimizer, made.loss, batches, made.metric)

    space = {"scale": CategoricalDistribution([1.0, 2.0])}
    _, record = as_serial(own_data, space, trials=6, epochs=2)
    assert len(record.groups) == 2


@pytest.mark.parametrize("field", ["loss", "metric"])
def test_a_loss_or_metric_that_holds_the_model_trains_one_at_a_time(field, caplog):
    def decayed(params):
        made = train(params)

        def own(outputs, target):
            return functional.cross_entropy(outputs, target) + 0.1 * made.model[0].weight.square().sum()

        functions = {"loss": made.loss, "metric": made.metric, field: own}
        return Training(made.model, made.optimizer, functions["loss"], BATCHES, functions["metric"], made.scheduler)

    _, record = as_serial(decayed, {"lr": LR}, trials=4, epochs=2)
    assert {each.kind for each in record.epochs} == {"serial"}
    assert f"{field}: it holds the trial's own model" in caplog.text


def test_a_trial_that_diverges_ends_alone():
    space = {"lr": CategoricalDistribution([0.01, 0.06])}
    together, _ = as_serial(train_diverging, space, trials=8, epochs=3)
    failed = [trial for trial in together.trials if trial.state.name == "FAIL"]
    assert failed
    assert all(trial.params["lr"] == 0.06 for trial in failed)
    assert all("its loss is" in trial.user_attrs["hocket:error"] for trial in failed)
    assert together.best_trial.params["lr"] < 0.05


def test_a_trial_whose_metric_raises_or_is_not_finite_ends_alone():
    def troubled(params):
        def metric(outputs, target):
            if params["lr"] == 0.02:
                raise RuntimeError("this one breaks")
            return {0.03: float("nan"), 0.04: float("-inf")}.get(params["lr"], accuracy(outputs, target))

        return replace(train(params), metric=metric)

    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.03, 0.04])}
    study, _ = searched(troubled, space, trials=16, epochs=2, executor="fused")
    by_rate = {trial.params["lr"]: trial for trial in study.trials}
    assert {rate for rate, trial in by_rate.items() if trial.state.name == "COMPLETE"} == {0.01}
    assert "this one breaks" in by_rate[0.02].user_attrs["hocket:error"]
    assert "its metric is nan in epoch 1" in by_rate[0.03].user_attrs["hocket:error"]
    assert "its metric is -inf in epoch 1" in by_rate[0.04].user_attrs["hocket:error"]


@pytest.mark.parametrize(("after", "kinds"), [(0, {"fused"}), (12, {"fused", "serial"})])
def test_a_loss_that_raises_ends_that_trial_and_the_others_go_on_as_alone(after, kinds):
    def breaking(params):
        calls = 0

        def loss(outputs, target):
            nonlocal calls
            calls += 1
            if params["lr"] == 0.02 and calls > after:  # at once, or in the second epoch, after a few steps on copies
                raise RuntimeError("no more")
            return functional.cross_entropy(outputs, target)

        return replace(train(params), loss=loss, metric=accuracy)

    space = {"lr": CategoricalDistribution([0.01, 0.02, 0.03])}
    study, record = searched(breaking, space, trials=6, epochs=6, executor="fused")
    assert {each.kind for each in record.epochs} == kinds
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "FAIL"}
    for trial in study.trials:
        assert trial.state.name == ("FAIL" if trial.params["lr"] == 0.02 else "COMPLETE")
        epochs = list(trial.intermediate_values.values())
        assert epochs == pytest.approx(alone(breaking, {"lr": trial.params["lr"]}, len(epochs)), rel=1e-9)


class Folded(nn.Linear):
    def __init__(self, parts):
        super().__init__(6, 6)
        self.parts = [parts]

    def forward(self, x):
        return super().forward(x).view(len(x), *self.parts, -1).flatten(1)


def folded(params):
    return training(Folded(params["parts"]).double(), params["lr"])


def likely(params):
    made = training(classifier(), 1e300 if params["parts"] == 4 else params["lr"])

    def loss(outputs, target):
        return -torch.distributions.Categorical(logits=outputs).log_prob(target).mean()

    return replace(made, loss=loss, metric=loss)


@pytest.mark.parametrize("function", [folded, likely])
def test_a_trial_whose_step_raises_fails_alone(function):
    space = {"lr": LR, "parts": CategoricalDistribution([1, 2, 4])}
    study, record = as_serial(function, space, trials=12, epochs=3)
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "FAIL"}
    assert {each.kind for each in record.epochs} == {"fused"}


class Spoilt(nn.Linear):
    """Raises in the eighth step, for weights that are no numbers any more."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps += self.training
        outputs = super().forward(x)
        return torch.distributions.Categorical(logits=outputs / (self.steps < 8)).logits


def test_a_trial_that_raises_once_it_is_over_leaves_the_others_fused(caplog):
    seen = []

    def spoilt(params):
        model = Spoilt().double()
        with torch.no_grad():
            model.steps -= 100 * params["good"]
        made = training(model, params["lr"], metric=lambda *_: -params["good"])
        return replace(made, on_epoch=lambda trial, epoch, _: seen.append((trial.number, epoch)))

    study = random_study()
    for good in (0, 1, 0, 1):
        study.enqueue_trial({"good": good})
    space = {"lr": LR, "good": CategoricalDistribution([0, 1])}
    options = {"halving": Halving(eta=2, min_epochs=2), "trials": 4, "epochs": 8}
    _, record = searched(spoilt, space, study=study, executor="fused", **options)
    assert {each.kind for each in record.epochs} == {"fused"}
    assert "one at a time" not in caplog.text
    assert len(set(seen)) == len(seen)


def test_a_refused_trial_is_named():
    first, second = Run(0, {"width": 8}, 0), Run(1, {"width": 12}, 0)
    fails(CannotFuseError, r"model.0.weight: \(8, 6\)", FusedTrainer, train, [first, second], 0)
