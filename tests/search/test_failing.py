"""A trial that diverges or raises ends alone, and the others go on as alone."""

from dataclasses import replace

import pytest
from optuna.distributions import CategoricalDistribution
from tests.search.pieces import accuracy, train, train_diverging
from tests.search.searches import alone, as_serial, searched
from torch.nn import functional


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
