"""Options of a `Training` beside a plain loop: values equal those of the loop that one would write by hand."""

from dataclasses import replace
from functools import partial

import optuna
import pytest
import torch
from optuna.distributions import FloatDistribution
from tests.search.pieces import BATCHES, LR, X, Y, classifier, training
from tests.search.searches import alone, as_serial, assert_same, random_study, searched
from torch import nn
from torch.nn import functional

import hocket
from hocket import Halving, Training
from hocket.search.data import RandomState, joined
from support.refusals import refused

SPACE = {"lr": LR, "limit": FloatDistribution(0.01, 0.5)}
SIZES = [16, 16, 10, 6]  # an epoch ends with half a step, where two batches make one
UNEVEN = list(zip(X.split(SIZES), Y.split(SIZES), strict=True))
EPOCHS = 4


def f1(outputs, target):
    """The mean F1 of three classes; of single batches it has another mean."""
    found = []
    for label in range(3):
        hit, is_label = outputs.argmax(1) == label, target == label
        both = (hit & is_label).sum()
        found.append(2 * both / (hit.sum() + is_label.sum()).clamp(min=1))
    return torch.stack(found).mean()


def made(params, **options):
    return training(classifier(8), params["lr"], torch.optim.Adam, UNEVEN, **options)


def clipped(params):
    return made(params, clip_norm=params["limit"])


def clamped(params):
    return made(params, clip_value=params["limit"] / 10)


def some_clipped(params):
    return made(params, clip_norm=params["limit"] if params["lr"] > 0.01 else None)


def accumulated(params):
    return made(params, accumulate=2)


def one_cycle(params):
    plain = made(params)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        plain.optimizer, max_lr=params["lr"], total_steps=len(UNEVEN) * EPOCHS + 1
    )
    return replace(plain, scheduler=scheduler, scheduler_interval="batch", clip_norm=params["limit"])


def cyclic(params):
    model = classifier(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, params["lr"] / 10, params["lr"], step_size_up=3)
    loss = functional.cross_entropy
    return Training(
        model, optimizer, loss, UNEVEN, loss, scheduler, scheduler_interval="batch", accumulate=3, clip_value=0.1
    )


def scored(params):
    return made(params, metric=f1, metric_interval="epoch", validation=BATCHES)


def all_of_them(params):
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=params["lr"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, params["lr"], total_steps=100)
    return Training(
        model,
        optimizer,
        functional.cross_entropy,
        UNEVEN,
        f1,
        scheduler,
        scheduler_interval="batch",
        metric_interval="epoch",
        accumulate=2,
        clip_norm=params["limit"],
        clip_value=0.2,
    )


OPTIONS = [clipped, clamped, some_clipped, accumulated, one_cycle, cyclic, scored, all_of_them]


class Halves(torch.optim.SGD):
    """An optimizer of the user's that cannot step without a closure: of two steps, it takes the second."""

    def step(self, closure):
        closure()
        return super().step(closure)


def lbfgs(params, **options):
    model = classifier(8, rate=0.2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=params["lr"], max_iter=4, line_search_fn="strong_wolfe")
    return Training(model, optimizer, functional.cross_entropy, UNEVEN, functional.cross_entropy, **options)


def lbfgs_accumulated(params):
    return lbfgs(params, accumulate=2, clip_norm=0.2, clip_value=0.1)


def halves(params):
    plain = training(classifier(8), params["lr"], partial(Halves, momentum=0.9))
    return replace(plain, scheduler=torch.optim.lr_scheduler.StepLR(plain.optimizer, 2, 0.5))


# By optimizers that need a closure, each trial trains alone.
CLOSURES = [lbfgs, lbfgs_accumulated, halves]


def by_hand(function, params, epochs):
    """A trial as one would write it."""
    with RandomState(0).active():
        training = function(params)
    model, optimizer, scheduler = training.model, training.optimizer, training.scheduler
    batches, random, found = list(training.batches), RandomState(0), []
    for _ in range(epochs):
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
                    if training.clip_value is not None:
                        nn.utils.clip_grad_value_(model.parameters(), training.clip_value)
                    return sum(losses)

                optimizer.step(closure)
                if training.scheduler_interval == "batch":
                    scheduler.step()
        if scheduler is not None and training.scheduler_interval == "epoch":
            scheduler.step()
        model.eval()
        with torch.no_grad():
            outputs = [(model(inputs), target) for inputs, target in training.measured_on]
            if training.metric_interval == "epoch":
                value = training.metric(torch.cat([each for each, _ in outputs]), torch.cat([t for _, t in outputs]))
                found.append(float(value))
            else:
                total = sum(float(training.metric(out, target)) * len(target) for out, target in outputs)
                found.append(total / sum(len(target) for _, target in outputs))
    return found


@pytest.mark.parametrize(
    ("function", "executor", "kind"),
    [
        *((function, "fused", "fused") for function in OPTIONS),
        *((function, executor, "serial") for function in CLOSURES for executor in ("auto", "serial", "fused")),
    ],
)
def test_values_equal_those_by_hand(function, executor, kind):
    study, record = searched(function, SPACE, trials=5, epochs=EPOCHS, executor=executor)
    assert {each.kind for each in record.epochs} == {kind}
    for trial in study.trials:
        assert trial.state.name == "COMPLETE", trial.user_attrs
        hand = by_hand(function, trial.params, EPOCHS)
        for values in (list(trial.intermediate_values.values()), alone(function, trial.params, EPOCHS)):
            assert values == pytest.approx(hand, rel=1e-9)


@pytest.mark.parametrize("function", OPTIONS)
def test_values_equal_alone_with_trials_that_move_and_end(function, tmp_path):
    as_serial(function, SPACE, trials=9, epochs=EPOCHS, halving=Halving(eta=2), slots=3, checkpoints=tmp_path)


def test_bfloat16_is_that_of_autocast():
    def low(params):
        model = classifier(8).float()
        optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"])
        seen.append(model)
        batches = [(inputs.float(), target) for inputs, target in BATCHES]
        return Training(model, optimizer, loss, batches, loss, autocast=torch.bfloat16)

    def loss(outputs, target):
        dtypes.add(outputs.dtype)
        return functional.cross_entropy(outputs, target)

    seen, dtypes = [], set()
    together, record = searched(low, {"lr": LR}, trials=4, epochs=3, executor="fused")
    assert {each.kind for each in record.epochs} == {"fused"}
    assert dtypes == {torch.bfloat16}
    assert {p.dtype for model in seen for p in model.parameters()} == {torch.float32}
    for trial in together.trials:
        own = alone(low, trial.params, 3)
        assert list(trial.intermediate_values.values()) == pytest.approx(own, rel=2e-2)  # two digits of bfloat16


def test_an_epoch_hook_sees_the_trial_and_may_prune_it():
    def noted(params):
        def on_epoch(trial, epoch, value):
            trial.set_user_attr(f"value {epoch}", value)
            if epoch == 2 and params["lr"] > 0.01:
                raise optuna.TrialPruned
            if epoch == 3 and params["lr"] < 0.002:
                raise RuntimeError("no more of this one")

        return made(params, on_epoch=on_epoch)

    found = []
    for executor in ("serial", "fused"):
        study, _ = searched(noted, {"lr": LR}, trials=10, epochs=4, executor=executor, halving=Halving(eta=2))
        found.append(study)
        for trial in study.trials:
            noticed = {int(key.split()[1]): value for key, value in trial.user_attrs.items() if "value" in key}
            assert noticed == trial.intermediate_values
            assert max(noticed) <= (2 if trial.params["lr"] > 0.01 else 4)
    assert_same(*found)


@pytest.mark.parametrize("place", ["train", "metric"])
def test_what_a_function_prunes_does_not_fail(place):
    def pruning(params):
        def metric(outputs, target):
            if params["lr"] > 0.01:
                raise optuna.TrialPruned
            return plain.metric(outputs, target)

        if place == "train" and params["lr"] > 0.01:
            raise optuna.TrialPruned("of no use")
        plain = made(params)
        return plain if place == "train" else replace(plain, metric=metric)

    found = []
    for executor in ("serial", "fused"):
        study, _ = searched(pruning, {"lr": LR}, trials=8, epochs=2, executor=executor)
        found.append(study)
        assert {t.state.name for t in study.trials if t.params["lr"] > 0.01} == {"PRUNED"}
        assert {t.state.name for t in study.trials if t.params["lr"] <= 0.01} == {"COMPLETE"}
    assert_same(*found)


def test_a_scheduler_whose_cycle_is_over_ends_its_trial_alone():
    def short(params):
        plain = made(params)
        steps = 6 if params["lr"] > 0.01 else 40
        scheduler = torch.optim.lr_scheduler.OneCycleLR(plain.optimizer, 0.1, total_steps=steps)
        return replace(plain, scheduler=scheduler, scheduler_interval="batch")

    together, _ = as_serial(short, {"lr": LR}, trials=6, epochs=3)
    assert {trial.state.name for trial in together.trials} == {"COMPLETE", "FAIL"}


def test_options_that_differ_set_trials_apart():
    def either(params):
        return made({"lr": 0.01}, accumulate=params["parts"])

    space = {"parts": optuna.distributions.IntDistribution(1, 2)}
    _, record = as_serial(either, space, trials=6, epochs=2)
    assert record.split == ((), ("parts",))


def test_a_scheduled_search_says_that_accumulated_steps_are_not_planned(caplog):
    def runner(step, array, optimizer):
        raise AssertionError("not asked")

    as_serial(accumulated, SPACE, trials=3, epochs=2, executor="scheduled", runner=runner)
    assert "is not planned" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate": 0}, "Training.accumulate: expected a whole number >= 1, got 0"),
        ({"clip_norm": -1.0}, "Training.clip_norm: expected a number above 0, got -1.0"),
        ({"clip_value": "1"}, "Training.clip_value: expected a number above 0, got '1'"),
        ({"autocast": torch.float16}, "Training.autocast: expected torch.bfloat16 or None"),
        ({"metric_interval": "step"}, "Training.metric_interval: expected 'epoch' or 'batch', got 'step'"),
        ({"on_epoch": 3}, "Training.on_epoch: expected a function, got a value of type int"),
    ],
)
def test_other_options_are_named(options, words):
    refused(words, made, {"lr": 0.1}, **options)
    plain = made({"lr": 0.1})
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(plain.optimizer)
    words = "ReduceLROnPlateau steps with the metric"
    refused(words, replace, plain, scheduler=plateau, scheduler_interval="batch")


def test_outputs_of_any_form_are_joined():
    parts = [
        ({"a": torch.ones(2, 3), "b": (torch.tensor(1.0), 5)},),
        ({"a": torch.zeros(1, 3), "b": (torch.tensor(2.0), 5)},),
    ]
    [whole] = joined(parts)
    assert whole["a"].shape == (3, 3)
    assert whole["b"][0].tolist() == [1.0, 2.0]
    assert whole["b"][1] == 5


def chained(params):
    """A scheduler without a count of its own."""
    plain = made(params)
    steps = [torch.optim.lr_scheduler.ExponentialLR(plain.optimizer, gamma) for gamma in (0.9, 0.99)]
    chain = torch.optim.lr_scheduler.ChainedScheduler(steps, plain.optimizer)
    return replace(plain, scheduler=chain, scheduler_interval="batch")


@pytest.mark.parametrize("function", [one_cycle, chained])
def test_population_goes_on_with_a_scheduler_by_batch(function):
    options = {"trials": 4, "epochs": EPOCHS, "halving": hocket.Population(interval=2, share=0.5, seed=1)}
    found = [
        searched(function, SPACE, study=random_study(), executor=each, **options)[0] for each in ("serial", "fused")
    ]
    assert_same(*found)
    assert {trial.state.name for trial in found[0].trials} == {"COMPLETE"}
    assert any("hocket:exploits" in trial.user_attrs for trial in found[0].trials)
