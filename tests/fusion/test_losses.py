"""`array.losses`, however it runs, against B plain torch runs in float64."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.fusion.losses import GO, D, Runs, linears
from tests.fusion.nets import NETS, VANISHING, Residual
from tests.fusion.oracle import made
from tests.fusion.prefer import ALL, in_one_go, prefer, ways, winner, winners
from torch import Tensor, nn
from torch.nn import functional as F

from quick import covering


def whole_cases() -> list[Any]:
    cases = []
    for name in NETS:
        for num_models in (2, 3, 4, 7):
            for way in ways(images=name == "residual"):
                quick = num_models == 4 if way != ALL else num_models == 3
                quick |= num_models == 2 and way == GO
                marks = [] if quick else [pytest.mark.slow]
                cases.append(pytest.param(name, num_models, way, marks=marks, id=f"{name}-{num_models}-{way}"))
    return cases


@pytest.mark.parametrize(("name", "num_models", "way"), whole_cases())
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_losses_gradients_and_buffers_are_those_of_plain_models(name, num_models, way, shared, monkeypatch):
    prefer(monkeypatch, way)
    make, given = NETS[name]
    runs = Runs(made(make, num_models), "SGD" if shared else "Adam", name, shared=shared)
    for number in (0, 0, 1, 1, 0):  # two kinds of targets
        x = given() if shared else torch.stack([given() for _ in range(num_models)])
        lead = () if shared ^ (number == 1) else (num_models,)  # shared and own targets with both kinds of inputs
        y = torch.randint(0, 5, (*lead, x.shape[0 if shared else 1]))
        runs.step(
            lambda out, target: F.cross_entropy(out, target),  # made anew in each step
            x,
            (y,),
            lambda index, x=x: (x if shared else x[index],),
            lambda index, y=y: (y[index] if y.ndim > 1 else y,),
        )
    assert winners(runs.array) == [way], "one choice for both kinds of targets"


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5], dtype=D))

    def forward(self, out, target):
        return F.cross_entropy(out, target, self.weight, label_smoothing=0.1)


def weighted(out, target, factor, *, power=2):
    return ((out - target).abs() ** power * factor).sum(1)


def branching(out, target):
    return F.mse_loss(out, target) if out.sum() > 0 else F.l1_loss(out, target)


def likelihood(out, target):
    return -torch.distributions.Normal(out, out.exp()).log_prob(target).mean()


LOSSES: dict[str, tuple[Any, str]] = {
    "branch": (lambda: branching, "values"),
    "likelihood": (lambda: likelihood, "values"),
    "function": (lambda: F.cross_entropy, "labels"),
    "module": (nn.CrossEntropyLoss, "labels"),
    "module with a buffer": (Smooth, "labels"),
    "summed": (lambda: nn.CrossEntropyLoss(reduction="sum"), "labels"),
    "not reduced": (lambda: nn.CrossEntropyLoss(reduction="none"), "labels"),
    "label smoothing": (lambda: nn.CrossEntropyLoss(label_smoothing=0.1), "labels"),
    "class weights": (lambda: nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=D)), "labels"),
    "nll": (lambda: lambda out, target: F.nll_loss(out.log_softmax(1), target), "labels"),
    "multi margin": (lambda: F.multi_margin_loss, "labels"),
    "labels to ignore": (lambda: F.cross_entropy, "some labels"),
    "partial": (lambda: partial(F.cross_entropy, label_smoothing=0.2), "labels"),
    "partial of a partial": (
        lambda: partial(partial(F.cross_entropy, reduction="none"), label_smoothing=0.2),
        "labels",
    ),
    "mean of squares": (lambda: F.mse_loss, "values"),
    "module of squares": (nn.MSELoss, "values"),
    "huber": (nn.HuberLoss, "values"),
    "shares": (lambda: F.binary_cross_entropy_with_logits, "shares"),
    "lambda": (lambda: lambda out, target: (out - target).square().mean(), "values"),
    "two targets, the second a number": (lambda: weighted, "values and a number"),
    "a tree of targets": (lambda: lambda out, tree: weighted(out, tree["y"], tree["w"][0]), "tree"),
}


# Four models are also the number of examples.
@pytest.mark.parametrize(
    ("name", "way", "num_models", "own"),
    [*covering(LOSSES, [ALL, GO], [3, 4], [False, True]), *product(LOSSES, ["outputs"], [1, 3, 4], [False, True])],
)
def test_any_loss_function(name, way, num_models, own, monkeypatch):
    prefer(monkeypatch, way)
    make_fn, kind = LOSSES[name]
    runs = Runs(linears(num_models), by_outputs=way == "outputs")
    lead = (num_models,) if own else ()
    for _ in range(2):
        x = torch.randn(4, 6, dtype=D)
        values, labels = torch.randn(*lead, 4, 3, dtype=D), torch.randint(0, 3, (*lead, 4))
        targets: tuple[Any, ...] = {
            "labels": (labels,),
            "some labels": (
                torch.where(torch.tensor([True, True, False, False]) | (values[..., 0] > 0), labels, -100),
            ),
            "values": (values,),
            "shares": (values.sigmoid(),),
            "values and a number": (values, 0.5),
            "tree": ({"y": values, "w": [2.0]},),
        }[kind]

        def own_targets(index: int, targets: tuple[Any, ...] = targets) -> Any:
            return torch.utils._pytree.tree_map_only(Tensor, lambda each: each[index] if own else each, targets)

        runs.step(make_fn(), x, targets, own_targets=own_targets)
    assert way == "outputs" or winner(runs.array) == way
    assert len(runs.array.choices) == 1, "a loss function that is made anew is no other one"


class Two(nn.Module):
    """Two arguments, one of them a number with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(5, 3)

    def forward(self, x, y, times=1):
        return self.a(x) * times + self.b(y)


@pytest.mark.parametrize("kind", ["tuple", "dict", "dict with a number", "tuple with a number"])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_inputs_of_any_kind(kind, own, monkeypatch):
    prefer(monkeypatch, GO)
    runs = Runs(made(Two, 3), shared=not own)
    for times in (2, 2, 3, 3, 2):
        lead = (3,) if own else ()
        x, y = torch.randn(*lead, 4, 6, dtype=D), torch.randn(*lead, 4, 5, dtype=D)
        target = torch.randn(4, 3, dtype=D)

        def given(index: int | None, x=x, y=y, times=times) -> Any:
            part = (x, y) if index is None or not own else (x[index], y[index])
            found: dict[str, Any] = {
                "tuple": part,
                "dict": dict(zip("yx", part[::-1], strict=True)),
                "dict with a number": {"x": part[0], "y": part[1], "times": times},
                "tuple with a number": (*part, times),
            }
            return found[kind]

        runs.step(F.mse_loss, given(None), (target,), given)
    assert in_one_go(runs.array)


def test_a_tensor_and_shared_and_own_inputs_together(monkeypatch):
    prefer(monkeypatch, GO)
    runs = Runs(made(Two, 3), shared={"x": False, "y": True})
    for _ in range(2):
        x, y, target = (torch.randn(*size, dtype=D) for size in ((3, 4, 6), (4, 5), (4, 3)))
        runs.step(F.mse_loss, (x, y), (target,), lambda index, x=x, y=y: (x[index], y))
    assert in_one_go(runs.array)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, target):
        out = self.layer(x)
        return {"loss": F.cross_entropy(out, target), "out": [out], "note": "a word"}


@pytest.mark.parametrize("num_models", [2, 4])
@pytest.mark.parametrize("way", [ALL, GO])
def test_models_that_give_their_own_loss_in_a_tree(way, num_models, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(OwnLoss, num_models), shared=True)
    for _ in range(3):
        x, y = torch.randn(5, 6, dtype=D), torch.randint(0, 3, (5,))
        runs.step(lambda found: found["loss"] + found["out"][0].square().mean(), {"x": x, "target": y})
    assert winner(runs.array) == way


class Penalised(nn.Module):
    """Gives its own weight too, for a loss that holds it small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x), self.layer.weight


@pytest.mark.parametrize("way", [ALL, GO])
def test_models_that_give_a_weight(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Penalised, 4), shared=True)
    for _ in range(2):
        x, y = torch.randn(5, 6, dtype=D), torch.randint(0, 3, (5,))
        runs.step(lambda found, y: F.cross_entropy(found[0], y) + 0.1 * found[1].square().sum(), x, (y,))
    assert winner(runs.array) == way


@pytest.mark.parametrize("way", ways(images=True))
def test_evaluation_and_back_to_training(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Residual, 4), net="residual", shared=True)
    for number, training in enumerate((True, True, False, False, True, False)):
        runs.array.train(training)
        for model in runs.models:
            model.train(training)
        runs.vanishing = VANISHING["residual"] if training else frozenset()
        before = runs.array.get_buffer("fused.norm.running_mean").clone()
        runs.step(F.cross_entropy, torch.randn(3, 3, 6, 6, dtype=D), (torch.randint(0, 5, (3,)),))
        moved = not torch.equal(before, runs.array.get_buffer("fused.norm.running_mean"))
        assert moved is training, number
    assert set(winners(runs.array)) == {way}
