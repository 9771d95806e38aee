"""Fusible parameters are found by building; groups agree on the others."""

import itertools

import pytest
import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from tests.search.pieces import LR, X, Y, accuracy, classifier, train, training
from tests.search.searches import as_serial, assert_alone, random_study, searched
from torch import nn
from torch.nn import functional

from hocket import Training
from hocket.errors import HocketError, InputError
from hocket.search.split import built, difference, find_split, signature

EVERY = {
    "lr": LR,
    "beta": FloatDistribution(0.5, 0.9),
    "width": IntDistribution(4, 16),
    "rate": FloatDistribution(0.0, 0.5),  # without dropout there is a layer less
    "batch": CategoricalDistribution([8, 16]),
    "kind": CategoricalDistribution(["adam", "sgd"]),
    "amsgrad": CategoricalDistribution([True, False]),
    "schedule": CategoricalDistribution(["step", "exponential"]),
    "seed": IntDistribution(0, 9),
}
BASE = {"lr": 0.01, "beta": 0.8, "width": 8, "rate": 0.2, "batch": 16}
BASE |= {"kind": "adam", "amsgrad": False, "schedule": "step", "seed": 1}


def train_every(params):
    torch.manual_seed(params["seed"])
    model = classifier(params["width"], params["rate"])
    if params["kind"] == "adam":
        own = {"betas": (params["beta"], 0.99), "amsgrad": params["amsgrad"]}
        optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"], **own)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=params["lr"], momentum=params["beta"])
    if params["schedule"] == "step":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    else:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = list(zip(X.split(params["batch"]), Y.split(params["batch"]), strict=True))
    return Training(model, optimizer, functional.cross_entropy, batches, accuracy, scheduler)


def test_what_changes_shapes_options_or_classes_is_infusible():
    split = find_split(train_every, EVERY, BASE)
    assert split.fusible == ("lr", "beta", "rate", "schedule", "seed")
    assert split.why["width"].startswith("model.0.weight: (8, 6)")
    assert split.why["batch"].startswith("batch: inputs (16, 6)")
    assert split.why["kind"] == "optimizer: torch.optim.adam.Adam and torch.optim.sgd.SGD"
    assert split.why["amsgrad"] == "optimizer amsgrad: False and True"
    assert split.options == {"lr", "betas"}


def test_a_search_over_all_of_them_gives_the_values_of_each_alone():
    _, record = as_serial(train_every, EVERY, trials=12, epochs=2)
    assert len(record.groups) > 2


def test_a_space_with_nothing_fusible_trains_one_at_a_time_and_says_so(caplog):
    space = {"width": IntDistribution(4, 40)}
    study = random_study()
    for width in range(4, 9):
        study.enqueue_trial({"width": width})
    _, record = searched(train, space, study=study, trials=5, epochs=2, executor="fused")
    assert record.split == ((), ("width",))
    assert "nothing in the space is fusible, so trials train one at a time: model.0.weight: (" in caplog.text
    assert {each.kind for each in record.epochs} == {"serial"}


def test_trials_that_all_raise_are_not_said_to_declare_nothing_fusible(caplog):
    with pytest.raises(HocketError, match="all 2 trials failed"):
        searched(lambda params: 1 / 0, {"lr": FloatDistribution(0.1, 1)}, study=random_study(), trials=2, epochs=1)
    assert "fusible" not in caplog.text


def test_a_parameter_that_matters_only_beside_another_one_is_found_later():
    def deep(params):
        layers = [nn.Linear(6, 8), *([nn.Linear(8, params["width"])] if params["depth"] == 2 else [])]
        last = params["width"] if params["depth"] == 2 else 8
        return training(nn.Sequential(*layers, nn.Linear(last, 3)).double(), metric=accuracy)

    space = {"depth": CategoricalDistribution([1, 2]), "width": CategoricalDistribution([4, 8])}
    split = find_split(deep, space, {"depth": 1, "width": 4})
    assert split.fusible == ("width",)
    as_serial(deep, space, trials=10, epochs=2)
    study = random_study()
    study.enqueue_trial({"depth": 1, "width": 4})
    searched(deep, space, study=study, trials=10, epochs=2, executor="fused", fusible=["width"])
    assert_alone(study, deep, 2)


class Chosen(nn.Module):
    """Takes its ops and options by plain attributes."""

    def __init__(self, act, eps, drop, note):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 3)
        self.act, self.drop, self.note = act, drop, note

    def forward(self, x):
        h = self.norm(getattr(torch, self.act)(self.first(x)))
        return self.last(functional.dropout(h, self.drop, self.training) if self.drop else h)


CHOICES = {
    "act": CategoricalDistribution(["relu", "tanh"]),
    "eps": CategoricalDistribution([1e-5, 1e-2]),
    "drop": FloatDistribution(0.0, 0.3),
    "note": CategoricalDistribution(["a", "b"]),
    "lr": LR,
}


@pytest.mark.parametrize("fusible", [None, ["lr", "note", "drop", "act"]])
def test_trials_whose_forwards_call_the_same_ops_train_as_one(fusible):
    def chosen(params):
        return training(Chosen(*(params[name] for name in ("act", "eps", "drop", "note"))).double(), params["lr"])

    study = random_study()
    for act, eps in itertools.product(["relu", "tanh"], [1e-5, 1e-2]):
        for drop in (0.0, 0.0, 0.1, 0.2):
            study.enqueue_trial({"act": act, "eps": eps, "drop": drop})
    _, record = searched(chosen, CHOICES, study=study, trials=16, epochs=2, executor="fused", fusible=fusible)
    assert {each.kind for each in record.epochs} == {"fused"}
    assert record.searches == 8
    assert_alone(study, chosen, 2)


def test_a_parameter_declared_fusible_that_changes_shapes_is_named():
    with pytest.raises(InputError, match=r"'width' was declared fusible, and is not: model\.0\.weight: \(\d+, 6\)"):
        searched(train, {"lr": LR, "width": IntDistribution(4, 40)}, trials=4, epochs=1, fusible=["lr", "width"])
    with pytest.raises(InputError, match="fusible: expected names among lr, got 'width'"):
        searched(train, {"lr": LR}, trials=4, epochs=1, fusible=["width"])


def test_what_is_kept_from_the_meta_device_is_refused():
    kept = {}

    def caching(params):
        width = params["width"]
        if width not in kept:
            kept[width] = nn.Linear(6, 3, dtype=torch.float64)
        return training(kept[width], metric=accuracy)

    with pytest.raises(InputError, match="its tensors are on the meta device"):
        searched(caching, {"width": CategoricalDistribution([1, 2, 3])}, trials=9, epochs=1)


def test_what_cannot_be_built_without_data_is_built_with_it():
    def reading(params):
        model = classifier(params["width"])
        if float(next(model.parameters()).detach().sum()) == 0.125:
            raise RuntimeError("never")
        return training(model, metric=accuracy)

    split = find_split(reading, {"width": CategoricalDistribution([8, 12])}, {"width": 8})
    assert split.why["width"].startswith("model.0.weight: (8, 6)")


def test_building_leaves_the_generators_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = built(train, {}, 0)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.model[0].weight, built(train, {}, 0).model[0].weight)
    assert difference(signature(first), signature(built(train, {}, 1))) == ""
    assert not torch.equal(first.model[0].weight, built(train, {}, 1).model[0].weight)
