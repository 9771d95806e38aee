"""`array.losses`, however it runs, against B plain torch runs in float64."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
from tests.fuse.nets import NETS, VANISHING, Residual, mlp
from tests.fuse.oracle import assert_close, check_state, made
from tests.fuse.prefer import in_one_go, prefer, ways
from tests.fuse.test_training import LEFT_OUT, close
from torch import Tensor, nn
from torch.nn import functional as F

import hocket
from hocket.errors import InputError

D = torch.float64
RATES = [0.05, 0.02, 0.1, 0.01, 0.03, 0.07, 0.04]
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "SGD": (
        lambda p, n: hocket.optim.SGD(p, lr=RATES[:n], momentum=0.9),
        lambda p, m: torch.optim.SGD(p, lr=RATES[m], momentum=0.9),
    ),
    "Adam": (lambda p, n: hocket.optim.Adam(p, lr=RATES[:n]), lambda p, m: torch.optim.Adam(p, lr=RATES[m])),
}
GO = "1 in one go"


def plain(losses: Tensor) -> Tensor:
    return losses.detach().as_subclass(Tensor)


class Runs:
    """An array that trains by `losses`, beside plain models that train alone.

    After each step the plain models get the array's numbers, so that each step is compared from the same start.
    """

    def __init__(self, models: list[nn.Module], optimizer: str = "SGD", net: str = "", **options: Any) -> None:
        self.left_out = LEFT_OUT.get(net, {})
        self.vanishing = VANISHING.get(net, frozenset())
        self.array = hocket.fuse(copy.deepcopy(models), **options)
        self.models = models
        fused, alone = OPTIMIZERS[optimizer]
        self.optimizer = fused(self.array.parameters(), len(models))
        self.alone = [alone(model.parameters(), index) for index, model in enumerate(models)]

    def step(self, fn: Any, inputs: Any, targets: tuple[Any, ...], own_inputs: Any, own_targets: Any) -> None:
        """`own_inputs` and `own_targets` give what model i takes."""
        self.optimizer.zero_grad()
        losses = self.array.losses(fn, inputs, *targets)
        assert losses.shape == (len(self.models),)
        losses.backward()
        for index, (model, optimizer) in enumerate(zip(self.models, self.alone, strict=True)):
            optimizer.zero_grad()
            given = own_inputs(index)
            out = model(**given) if isinstance(given, dict) else model(*given)
            loss = fn(out, *own_targets(index)).sum()
            loss.backward()
            assert_close(plain(losses)[index], loss.detach(), f"loss of model {index}")
        check_state(self.array, self.models, self.vanishing)
        self.optimizer.step()
        for index, (model, optimizer) in enumerate(zip(self.models, self.alone, strict=True)):
            optimizer.step()
            state = self.array.state_dict(model=index)
            for name, tensor in model.state_dict().items():
                part = self.left_out.get(name, lambda each: each)
                if tensor.is_floating_point():
                    close(part(state[name]), part(tensor), 1e-9, f"{name} of model {index} after the step")
            model.load_state_dict(state)


def whole_cases() -> list[Any]:
    cases = []
    for name in NETS:
        for num_models in (2, 3, 4, 7):
            for way in ways(num_models, images=name == "residual"):
                quick = num_models == 4 if way != "whole" else num_models == 3
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
    for number in range(3):
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
    winners = [choice.winner for choice in runs.array.choices if choice.winner != "rule"]
    assert winners == [way] * 2, "one choice for each kind of targets"


@pytest.mark.parametrize("forward", ["loop", "loop, channels last", "2 at a time", "mixed"])
def test_a_whole_step_by_any_forward(forward, monkeypatch):
    prefer(monkeypatch, "whole", forward)
    runs = Runs(made(Residual, 4), net="residual", shared=True)
    for _ in range(3):
        x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
        runs.step(F.cross_entropy, x, (y,), lambda _, x=x: (x,), lambda _, y=y: (y,))


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5], dtype=D))

    def forward(self, out, target):
        return F.cross_entropy(out, target, self.weight, label_smoothing=0.1)


def weighted(out, target, factor, *, power=2):
    return ((out - target).abs() ** power * factor).sum(1)


LOSSES: dict[str, tuple[Any, str]] = {
    "function": (lambda: F.cross_entropy, "labels"),
    "module": (nn.CrossEntropyLoss, "labels"),
    "module with a buffer": (Smooth, "labels"),
    "summed": (lambda: nn.CrossEntropyLoss(reduction="sum"), "labels"),
    "not reduced": (lambda: nn.CrossEntropyLoss(reduction="none"), "labels"),
    "partial": (lambda: partial(F.cross_entropy, label_smoothing=0.2), "labels"),
    "partial of a partial": (
        lambda: partial(partial(F.cross_entropy, reduction="none"), label_smoothing=0.2),
        "labels",
    ),
    "mean of squares": (lambda: F.mse_loss, "values"),
    "lambda": (lambda: lambda out, target: (out - target).square().mean(), "values"),
    "two targets, the second a number": (lambda: weighted, "values and a number"),
    "a tree of targets": (lambda: lambda out, tree: weighted(out, tree["y"], tree["w"][0]), "tree"),
}


@pytest.mark.parametrize("own", [False, True], ids=["shared targets", "own targets"])
@pytest.mark.parametrize("num_models", [3, 4])  # 4 is also the number of examples
@pytest.mark.parametrize("way", ["whole", "2 in one go", GO])
@pytest.mark.parametrize("name", LOSSES)
def test_any_loss_function(name, way, num_models, own, monkeypatch):
    if way == "2 in one go" and num_models == 3:
        way = "whole"
    prefer(monkeypatch, way)
    make_fn, kind = LOSSES[name]
    runs = Runs(made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), num_models))
    lead = (num_models,) if own else ()
    for _ in range(2):
        x = torch.randn(4, 6, dtype=D)
        values = torch.randn(*lead, 4, 3, dtype=D)
        targets: tuple[Any, ...] = {
            "labels": (torch.randint(0, 3, (*lead, 4)),),
            "values": (values,),
            "values and a number": (values, 0.5),
            "tree": ({"y": values, "w": [2.0]},),
        }[kind]
        runs.step(
            make_fn(),
            x,
            targets,
            lambda _, x=x: (x,),
            lambda index, targets=targets: torch.utils._pytree.tree_map_only(
                Tensor, lambda each: each[index] if own else each, targets
            ),
        )
    assert runs.array.choices[-1].winner == way
    assert len(runs.array.choices) == 2, "a loss function that is made anew is no other one"


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
    runs = Runs(made(Two, 3), shared=None if "number" in kind else not own)
    for times in (2, 3, 2):
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

        runs.step(F.mse_loss, given(None), (target,), given, lambda _, target=target: (target,))
        assert in_one_go(runs.array)


def test_a_tensor_and_shared_and_own_inputs_together(monkeypatch):
    prefer(monkeypatch, GO)
    runs = Runs(made(Two, 3))
    for _ in range(2):
        x, y, target = (torch.randn(*size, dtype=D) for size in ((3, 4, 6), (4, 5), (4, 3)))
        runs.step(F.mse_loss, (x, y), (target,), lambda index, x=x, y=y: (x[index], y), lambda _, t=target: (t,))
    assert in_one_go(runs.array)


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x, target):
        out = self.layer(x)
        return {"loss": F.cross_entropy(out, target), "out": [out], "note": "a word"}


@pytest.mark.parametrize("num_models", [2, 4])
@pytest.mark.parametrize("way", ["whole", "2 in one go", GO])
def test_models_that_give_their_own_loss_in_a_tree(way, num_models, monkeypatch):
    if num_models == 2 and way == "2 in one go":
        way = "whole"
    prefer(monkeypatch, way)
    runs = Runs(made(OwnLoss, num_models), shared=True)
    for _ in range(3):
        x, y = torch.randn(5, 6, dtype=D), torch.randint(0, 3, (5,))
        runs.step(lambda found: found["loss"] + found["out"][0].square().mean(), {"x": x, "target": y}, (),
                  lambda _, x=x, y=y: (x, y), lambda _: ())  # fmt: skip
    assert runs.array.choices[-1].winner == way


class Penalised(nn.Module):
    """Gives its own weight too, for a loss that holds it small."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x), self.layer.weight


@pytest.mark.parametrize("way", ["whole", "2 in one go", GO])
def test_models_that_give_a_weight(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Penalised, 4), shared=True)
    for _ in range(2):
        x, y = torch.randn(5, 6, dtype=D), torch.randint(0, 3, (5,))
        runs.step(
            lambda found, y: F.cross_entropy(found[0], y) + 0.1 * found[1].square().sum(),
            x,
            (y,),
            lambda _, x=x: (x,),
            lambda _, y=y: (y,),
        )
    assert runs.array.choices[-1].winner == way


X, Y = torch.linspace(-1, 1, 24, dtype=D).view(4, 6), torch.tensor([0, 1, 2, 1])
W = torch.tensor([0.5, -2.0, 3.0], dtype=D)


def linears(num_models: int = 3) -> list[nn.Module]:
    return made(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), num_models)


def pair(monkeypatch, way=GO, make=linears, **options):
    """An array that runs this way, and the same that goes the ordinary way."""
    prefer(monkeypatch, way)
    models = make()
    options = {"shared": True} | options
    return hocket.fuse(copy.deepcopy(models), **options), hocket.fuse(models, **(options | {"backend": "rule"}))


def ordinary(array, fn=F.cross_entropy, x=X, y=Y):
    return array.loss(fn, array(x), y)


def same_gradients(array, other, scale=1.0):
    for (name, found), expected in zip(array.named_parameters(), other.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            assert_close(found.grad, expected.grad * scale, name)


BACKWARDS = {
    "backward": lambda losses: losses.backward(),
    "sum": lambda losses: losses.sum().backward(),
    "mean": lambda losses: losses.mean().backward(),
    "weights": lambda losses: (losses * W).sum().backward(),
    "one of them": lambda losses: losses[1].backward(),
    "a gradient": lambda losses: losses.backward(W),
    "a gradient of ones": lambda losses: losses.backward(gradient=torch.ones(3, dtype=D)),
    "a gradient in another type": lambda losses: losses.backward(gradient=W, retain_graph=True),
    "something after": lambda losses: (losses.exp() * 2).sum().backward(),
    "torch.autograd.backward": lambda losses: torch.autograd.backward([losses], [W]),
}


@pytest.mark.parametrize("way", ["whole", GO])
@pytest.mark.parametrize("name", BACKWARDS)
def test_weights_of_losses(name, way, monkeypatch):
    array, other = pair(monkeypatch, way)
    for _ in range(2):
        for each in (array, other):
            each.zero_grad()
        BACKWARDS[name](array.losses(F.cross_entropy, X, Y))
        BACKWARDS[name](ordinary(other))
        same_gradients(array, other)
    assert array.choices[-1].winner == way


@pytest.mark.parametrize("way", ["whole", GO])
def test_gradients_as_autograd_grad_gives_them(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    found = torch.autograd.grad(array.losses(F.cross_entropy, X, Y).sum(), list(array.parameters()))
    expected = torch.autograd.grad(ordinary(other).sum(), list(other.parameters()))
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two, "gradient")
    assert all(p.grad is None for p in array.parameters())


@pytest.mark.parametrize("way", ["whole", GO])
def test_gradients_accumulate(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    batches = [(torch.randn(4, 6, dtype=D), torch.randint(0, 3, (4,))) for _ in range(3)]
    for x, y in batches:
        array.losses(F.cross_entropy, x, y).backward()
        ordinary(other, x=x, y=y).backward()
        same_gradients(array, other)
    for each in (array, other):
        each.zero_grad()
    sum(array.losses(F.cross_entropy, x, y) for x, y in batches).sum().backward()
    sum(ordinary(other, x=x, y=y) for x, y in batches).sum().backward()
    same_gradients(array, other)
    first, second = (array.losses(F.cross_entropy, x, y) for x, y in batches[:2])
    for x, y in (batches[1], batches[0]):
        ordinary(other, x=x, y=y).backward()
    second.backward()  # the other way round
    first.backward()
    same_gradients(array, other)


def test_gradients_are_handed_over_once(monkeypatch):
    array, other = pair(monkeypatch)
    losses = array.losses(F.cross_entropy, X, Y)
    losses.backward(retain_graph=True)
    with pytest.raises(InputError, match=r"handed over once.*array\.loss"):
        losses.backward()
    ordinary(other).backward()
    same_gradients(array, other)  # the second did nothing
    for create_graph in (
        lambda losses: losses.backward(create_graph=True),
        lambda losses: torch.autograd.grad(losses.sum(), list(array.parameters()), create_graph=True),
    ):
        with pytest.raises(InputError, match=r"differentiate twice.*array\.loss"):
            create_graph(array.losses(F.cross_entropy, X, Y))
    same_gradients(array, other)


@pytest.mark.parametrize("way", ["whole", GO])
def test_losses_that_nobody_backpropagates_leave_no_gradient(way, monkeypatch):
    array, other = pair(monkeypatch, way)
    kept = [array.losses(F.cross_entropy, X * factor, Y) for factor in (1, 2, 3)]
    assert all(p.grad is None for p in array.parameters())
    array.losses(F.cross_entropy, X, Y).backward()
    ordinary(other).backward()
    same_gradients(array, other)
    for each in (array, other):
        each.zero_grad()
    kept[1].backward()  # its gradients have waited, untouched
    ordinary(other, x=X * 2).backward()
    same_gradients(array, other)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_goes_backward(mode, monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y).backward()
    array.zero_grad()
    choices = len(array.choices)
    with mode():
        losses = array.losses(F.cross_entropy, X, Y)
        expected = ordinary(other)
    assert not losses.requires_grad
    assert_close(losses.as_subclass(Tensor), expected.as_subclass(Tensor), "losses")
    assert all(p.grad is None for p in array.parameters())
    assert all("in one go" not in choice.winner for choice in array.choices[choices:])
    array.losses(F.cross_entropy, X, Y).backward()
    ordinary(other).backward()
    same_gradients(array, other)


@pytest.mark.parametrize("way", ways(4, images=True))
def test_evaluation_and_back_to_training(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Residual, 4), net="residual", shared=True)
    for number, training in enumerate((True, False, True, False)):
        runs.array.train(training)
        for model in runs.models:
            model.train(training)
        if not training:
            runs.vanishing = frozenset()
        before = runs.array.get_buffer("fused.norm.running_mean").clone()
        x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
        array, plain_models = runs.array, runs.models
        array.zero_grad()
        losses = array.losses(F.cross_entropy, x, y)
        losses.backward()
        for index, model in enumerate(plain_models):
            model.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            assert_close(plain(losses)[index], loss.detach(), "loss")
        if training:
            check_state(array, plain_models, VANISHING["residual"])
        else:
            for index, model in enumerate(plain_models):
                assert_close(array.tensor("stem.weight").tensor.grad[index], model.stem.weight.grad, "stem.weight")
        moved = not torch.equal(before, array.get_buffer("fused.norm.running_mean"))
        assert moved is training, number
    assert {choice.winner for choice in array.choices} == {way, "rule"}


# ------------------------------------------------------------------------------------------ isolation


def trained(array, x, y, steps=2):
    found = []
    for _ in range(steps):
        array.zero_grad()
        losses = array.losses(F.cross_entropy, x, y)
        losses.backward()
        with torch.no_grad():
            for parameter in array.parameters():
                parameter -= 0.1 * parameter.grad
        found.append(plain(losses))
    return torch.stack(found, 1), [p.grad.clone() for p in array.parameters()], array.state_dict()


@pytest.mark.parametrize("spoilt", ["weights", "targets", "inputs"])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=[pytest.mark.slow] if way == "whole" or name == "words" else [])
        for name in ("residual", "mlp", "words")
        for way in ways(4, images=name == "residual")
    ],
)
def test_a_spoilt_model_leaves_the_others_bit_identical(name, way, spoilt, monkeypatch):
    prefer(monkeypatch, way)
    make, given = NETS[name]
    models, x = made(make, 4), torch.stack([given() for _ in range(4)])
    y = torch.rand(4, 4, 11 if name == "words" else 5, dtype=D)  # shares of classes
    expected = trained(hocket.fuse(copy.deepcopy(models), shared=False), x, y)
    x, y = x.clone(), y.clone()
    if spoilt == "weights":
        for parameter in models[2].parameters():
            parameter.data.fill_(torch.nan)
    elif spoilt == "targets":
        y[2] = torch.inf
    elif x.is_floating_point():
        x[2] = torch.nan
    else:
        x[2] = x[2].flip(0)
    array = hocket.fuse(models, shared=False)
    found = trained(array, x, y)
    assert array.choices[-1].winner == way
    keep = [0, 1, 3]
    assert torch.equal(found[0][keep], expected[0][keep])
    assert not torch.equal(found[0], expected[0]), "what was spoilt must show"
    for one, two in zip(found[1], expected[1], strict=True):
        assert torch.equal(one[keep], two[keep])
    for key, tensor in expected[2].items():
        if not key.startswith("2."):
            assert torch.equal(found[2][key], tensor), key


@pytest.mark.parametrize("way", ways(4, images=True))
def test_permuted_models_give_permuted_losses(way, monkeypatch):
    prefer(monkeypatch, way)
    models = made(Residual, 4)
    x, y, order = torch.randn(4, 3, 3, 6, 6, dtype=D), torch.randint(0, 5, (4, 3)), [2, 0, 3, 1]
    found = trained(hocket.fuse([copy.deepcopy(models[i]) for i in order], shared=False), x[order], y[order], 1)
    expected = trained(hocket.fuse(models, shared=False), x, y, 1)
    assert_close(found[0], expected[0][order], "losses")
    for index, number in enumerate(order):
        for name in ("stem.weight", "norm.weight", "block.0.weight", "head.bias", "norm.running_var"):
            assert torch.allclose(found[2][f"{index}.{name}"], expected[2][f"{number}.{name}"], rtol=1e-11), name


@pytest.mark.parametrize("fault", ["gradient", "loss", "order"])
def test_a_fault_in_one_group_is_caught(fault, monkeypatch):
    from hocket.fuse import one_go

    prefer(monkeypatch, GO)
    right_bring, right_loss = one_go.Gather.bring, one_go.OneGo._loss

    def bring(self, index, grads):
        if fault == "gradient" and index == 1:
            grads = {key: grad * (1 + 1e-9) for key, grad in grads.items()}
        right_bring(self, 1 - index if fault == "order" and index < 2 else index, grads)

    def loss(self, fn, out, targets, index):
        found = right_loss(self, fn, out, targets, index)
        return found * (1 + 1e-9) if fault == "loss" and index == 1 else found

    monkeypatch.setattr(one_go.Gather, "bring", bring)
    monkeypatch.setattr(one_go.OneGo, "_loss", loss)
    runs = Runs(linears(), shared=True)
    named = "loss of model 1" if fault == "loss" else "gradient of .*, model 0" if fault == "order" else "model 1"
    with pytest.raises(AssertionError, match=named):
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))


# ---------------------------------------------------------------- what the contest leaves, what it does not


class Counts(nn.Module):
    """A loss with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, out, target):
        self.calls += 1
        return F.cross_entropy(out, target)


@pytest.mark.parametrize("way", ways(4, images=True))
def test_the_first_call_leaves_the_trace_of_one_call(way, monkeypatch):
    prefer(monkeypatch, way)
    models = made(lambda: nn.Sequential(Residual(), nn.Dropout(0.5)), 4)
    array = hocket.fuse(models, shared=True)
    x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
    before = {name: p.detach().clone() for name, p in array.named_parameters()}
    counts = Counts()
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        losses = array.losses(counts, x, y)
        states.append((torch.get_rng_state(), int(counts.calls), plain(losses)))
        assert all(p.grad is None for p in array.parameters())
        assert all(torch.equal(p.detach(), before[name]) for name, p in array.named_parameters())
    assert array.get_buffer("fused.0.norm.num_batches_tracked").tolist() == [2] * 4
    assert torch.equal(states[0][0], states[1][0]), "as many random numbers as a call draws"
    assert states[1][1] == 2 * states[0][1], "as many calls of the loss"
    assert torch.equal(states[0][2], states[1][2]), "the same dropout, and batch norm in training forgets"
    for model in models:
        model(x)
        model(x)
    assert_close(array.state_dict()["3.0.norm.running_var"], models[3][0].norm.running_var, "running_var")
    assert array.choices[-1].winner == way


@pytest.mark.parametrize("way", ways(4, images=True))
def test_with_seeds_each_model_draws_what_the_plain_one_draws(way, monkeypatch):
    prefer(monkeypatch, way)
    make = partial(nn.Sequential, nn.Conv2d(3, 4, 3), nn.Dropout(0.4), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten())
    models = made(lambda: copy.deepcopy(make(nn.Linear(64, 5))), 4)
    runs = Runs(models, seeds=[5, 6, 7, 8], shared=True)
    usual = torch.get_rng_state()
    draws: list[Any] = [None] * 4

    def own(index: int) -> tuple[Tensor]:
        torch.manual_seed(5 + index) if draws[index] is None else torch.set_rng_state(draws[index])
        return (x,)

    def fn(out, y):
        return F.cross_entropy(out, y)

    for number in range(3):
        torch.set_rng_state(usual)
        x, y = torch.randn(2, 3, 6, 6, dtype=D), torch.randint(0, 5, (2,))
        usual = torch.get_rng_state()

        def own_targets(index: int, y=y) -> tuple[Tensor]:
            draws[index] = torch.get_rng_state()
            return (y,)

        runs.step(fn, x, (y,), own, own_targets)
        if not number:
            torch.set_rng_state(usual)
            twin = hocket.fuse(made(lambda: copy.deepcopy(make(nn.Linear(64, 5))), 4), seeds=[5, 6, 7, 8], shared=True)
            torch.set_rng_state(usual)
            twin.losses(fn, x, y)
            assert torch.equal(torch.get_rng_state(), usual), "models with seeds leave torch's generator alone"
    assert runs.array.choices[-1].winner == way


def test_without_seeds_every_model_has_its_own_draw(monkeypatch):
    prefer(monkeypatch, GO)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5))
    array = hocket.fuse([copy.deepcopy(model).double() for _ in range(3)], shared=True)
    losses = array.losses(lambda out: out.sum(), X)
    again = array.losses(lambda out: out.sum(), X)
    assert in_one_go(array)
    assert len({*plain(losses).tolist(), *plain(again).tolist()}) == 6


class Partly(nn.Module):
    """A layer that nobody calls, one that is frozen, tied weights, large and small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(6, 8).requires_grad_(False)
        self.table = nn.Linear(8, 17_000, bias=False)  # more than a MiB of one model in float64
        self.back = nn.Linear(17_000, 8, bias=False)
        self.back.weight = nn.Parameter(self.table.weight.detach().t().contiguous())
        self.tied = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.back(torch.tanh(self.table(self.frozen(x))))
        return self.head(self.again(torch.tanh(self.tied(x))))


@pytest.mark.parametrize("way", ways(4, images=False))
def test_frozen_unused_tied_large_and_small_parameters(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(Partly, 4), shared=True)
    for number in range(5):
        for each in (runs.array.fused, *runs.models):
            each.get_submodule("frozen").requires_grad_(number in (1, 3))  # on and off in mid-training
            each.get_submodule("head").requires_grad_(number != 2)
            each.get_submodule("table").requires_grad_(number != 3)
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))
        grads = {name: p.grad is not None for name, p in runs.array.named_parameters()}
        assert not grads["fused.unused.weight"]
        assert grads["fused.frozen.weight"] is (number in (1, 3))
        assert grads["fused.head.weight"] is (number != 2)
        assert grads["fused.table.weight"] is (number != 3)
        assert grads["fused.tied.weight"]
    assert runs.array.choices[-1].winner == way


@pytest.mark.parametrize("way", ["whole", GO])
def test_large_parameters_only(way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(made(lambda: nn.Sequential(nn.Linear(370, 370, bias=False), nn.Tanh()), 3), shared=True)
    for _ in range(3):
        x, y = torch.randn(4, 370, dtype=D), torch.randn(4, 370, dtype=D)
        runs.step(F.mse_loss, x, (y,), lambda _, x=x: (x,), lambda _, y=y: (y,))
    assert runs.array.choices[-1].winner == way


@pytest.mark.parametrize("way", ["whole", GO])
def test_losses_of_what_does_not_train(way, monkeypatch):
    """All that the loss reaches is frozen, and something else is not."""
    array, _ = pair(monkeypatch, way, make=lambda: made(lambda: nn.ModuleDict({"a": nn.Linear(6, 3)}), 2))
    del array

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    array = hocket.fuse(made(Net, 3), shared=True)
    expected = plain(array.losses(F.cross_entropy, X, Y))
    array.fused.get_submodule("used").requires_grad_(False)
    losses = array.losses(F.cross_entropy, X, Y)
    assert torch.equal(plain(losses), expected)
    assert not losses.requires_grad
    with pytest.raises(RuntimeError, match="does not require grad"):
        losses.backward()
    array.requires_grad_(False)
    assert torch.allclose(plain(array.losses(F.cross_entropy, X, Y)), expected, rtol=1e-12)
    array.requires_grad_(True)
    array.losses(F.cross_entropy, X, Y).backward()
    assert array.get_parameter("fused.used.weight").grad is not None
    assert array.get_parameter("fused.unused.weight").grad is None


# ------------------------------------------------------------------------ what becomes of the parameters


def replaced(runs: Runs) -> None:
    for index, model in enumerate(runs.models):
        for name, parameter in model.named_parameters():
            parameter.data = torch.randn_like(parameter)
            whole = runs.array.tensor(name).tensor
            if not index:
                whole.data = whole.data.clone()
            whole.data[index] = parameter.data


def loaded(runs: Runs) -> None:
    others = linears(len(runs.models) + 1)[1:]
    for model, other in zip(runs.models, others, strict=True):
        model.load_state_dict(other.state_dict())
    runs.array.load_state_dict(nn.ModuleList(others).state_dict())


def dropped(runs: Runs) -> None:
    runs.array.drop(1)
    runs.optimizer.drop(1)
    del runs.models[1], runs.alone[1]


def refilled(runs: Runs) -> None:
    runs.array.refill(1, copy.deepcopy(linears(5)[4]))
    runs.optimizer.refill(1)
    runs.models[1] = copy.deepcopy(linears(5)[4])
    runs.alone[1] = OPTIMIZERS["SGD"][1](runs.models[1].parameters(), 1)


def moved(runs: Runs) -> None:
    """To another type and back, which is a change of all tensors."""
    for each in (runs.array, *runs.models):
        each.float().double()


CHANGES = {each.__name__: each for each in (replaced, loaded, dropped, refilled, moved)}


@pytest.mark.parametrize("way", ["whole", "2 in one go", GO])
@pytest.mark.parametrize("name", CHANGES)
def test_parameters_that_change(name, way, monkeypatch):
    prefer(monkeypatch, way)
    runs = Runs(linears(4), shared=True)
    for number in range(4):
        if number == 2:
            CHANGES[name](runs)
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))


@pytest.mark.parametrize("way", ["whole", GO])
@pytest.mark.parametrize("how", ["copied", "saved"])
def test_a_copy_goes_its_own_way(how, way, monkeypatch):
    prefer(monkeypatch, way)
    array = hocket.fuse(made(Residual, 3), shared=True)
    x, y = torch.randn(3, 3, 6, 6, dtype=D), torch.randint(0, 5, (3,))
    array.losses(F.cross_entropy, x, y).backward()
    array.zero_grad()
    if how == "copied":
        twin = copy.deepcopy(array)
    else:
        file = io.BytesIO()
        torch.save(array, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    found = trained(twin, x, y)
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, before[name]), "the original stays as it was"
    assert all(p.grad is None for p in array.parameters())
    expected = trained(array, x, y)
    assert torch.equal(found[0], expected[0])
    for name, tensor in expected[2].items():
        assert torch.equal(found[2][name], tensor), name


# --------------------------------------------------------------------------- what goes the ordinary way


def test_inputs_and_targets_that_want_gradients_get_them(monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.mse_loss, X, torch.zeros(4, 3, dtype=D))
    for what in ("input", "target"):
        grads = []
        for each in (array, other):
            x, y = X.clone(), torch.zeros(4, 3, dtype=D)
            (x if what == "input" else y).requires_grad_()
            each.zero_grad()
            losses = each.losses(F.mse_loss, x, y) if each is array else ordinary(each, F.mse_loss, x, y)
            losses.backward()
            grads.append((x if what == "input" else y).grad)
        assert_close(grads[0], grads[1], what)
        same_gradients(array, other)


class Temperature(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3, dtype=D))

    def forward(self, out, y):
        return F.cross_entropy(out * self.log.exp(), y)


def closed_over(loss: nn.Module) -> Any:
    return lambda out, y: loss(out, y)


class Holder:
    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, out, y):
        return self.loss(out, y)


FNS = {
    "a module": lambda loss: loss,
    "a method": lambda loss: loss.forward,
    "a closure": closed_over,
    "a partial": lambda loss: partial(lambda out, y, by: by(out, y), by=loss),
    "a default": lambda loss: lambda out, y, by=loss: by(out, y),
}


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "from the second step on"])
@pytest.mark.parametrize("name", FNS)
def test_a_loss_with_parameters_of_its_own_gets_its_gradients(name, late, monkeypatch):
    array, other = pair(monkeypatch)
    losses = [Temperature().requires_grad_(not late) for _ in range(2)]
    array.losses(FNS[name](losses[0]), X, Y)
    assert in_one_go(array) is late
    for each, loss in zip((array, other), losses, strict=True):
        loss.requires_grad_(True)
        fn = FNS[name](loss)
        (each.losses(fn, X, Y) if each is array else ordinary(each, fn)).backward()
    assert_close(losses[0].log.grad, losses[1].log.grad, "the loss's own gradient")
    same_gradients(array, other)


def test_a_gradient_that_would_be_lost_is_an_error(monkeypatch):
    """Nobody can see that an object's loss trains, before it has been called."""
    array, _ = pair(monkeypatch)
    loss = Temperature().requires_grad_(False)
    array.losses(Holder(loss), X, Y)
    assert in_one_go(array)
    loss.requires_grad_()
    with pytest.raises(InputError, match=r"would be lost; use array\.loss"):
        array.losses(Holder(loss), X, Y)


def test_a_loss_of_the_stacked_parameters_themselves(monkeypatch):
    array, other = pair(monkeypatch)

    def penalised(each):
        return lambda out, y: F.cross_entropy(out, y) + each.get_parameter("fused.0.weight").square().sum()

    array.losses(penalised(array), X, Y).backward()
    ordinary(other, penalised(other)).backward()
    same_gradients(array, other)


def test_blocks_that_stay_separate(monkeypatch):
    array, other = pair(monkeypatch, separate=["2"])
    for each in (array, other):
        (each.losses(F.cross_entropy, X, Y) if each is array else ordinary(each)).backward()
    assert all("in one go" not in choice.winner for choice in array.choices)
    assert array.separate[0][1].weight.grad is not None
    same_gradients(array, other)


def test_half_precision(monkeypatch):
    array, _ = pair(monkeypatch)
    array.half().losses(F.mse_loss, X.half(), torch.zeros(4, 3).half()).backward()
    assert all(p.grad.dtype == torch.float16 for p in array.parameters())
    array.float()
    with torch.autocast("cpu", torch.float16):
        array.losses(F.mse_loss, X.float(), torch.zeros(4, 3)).backward()
    assert all("in one go" not in choice.winner for choice in array.choices)


def test_transforms_around(monkeypatch):
    array, other = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    found = torch.func.grad(lambda x: array.losses(F.cross_entropy, x, Y).sum())(X)
    expected = torch.func.grad(lambda x: ordinary(other, x=x).sum())(X)
    assert_close(found, expected, "torch.func.grad")
    xs = torch.stack([X, 2 * X])
    found = torch.vmap(lambda x: array.losses(F.cross_entropy, x, Y).as_subclass(Tensor))(xs)
    for index, x in enumerate(xs):
        assert_close(found[index].detach(), plain(ordinary(other, x=x)), "torch.vmap")
    found.sum().backward()
    sum(ordinary(other, x=x) for x in xs).sum().backward()
    same_gradients(array, other)


def test_hooks_on_parameters_run_at_the_backward(monkeypatch):
    array, other = pair(monkeypatch)
    losses = array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    del losses
    first, second = (each.get_parameter("fused.0.weight") for each in (array, other))
    for parameter in (first, second):
        parameter.register_hook(lambda grad: grad * 3)
    seen = []
    first.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    losses = array.losses(F.cross_entropy, X, Y)
    assert not seen, "not before losses.backward()"
    losses.backward()
    ordinary(other).backward()
    same_gradients(array, other)
    assert len(seen) == 1
    assert torch.equal(seen[0], first.grad)


@pytest.mark.parametrize("kind", ["forward", "forward pre", "backward", "global"])
def test_hooks_on_the_array_run(kind, monkeypatch):
    array, _ = pair(monkeypatch)
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    seen: list[int] = []
    handle = {
        "forward": lambda: array.register_forward_hook(lambda *_: seen.append(1)),
        "forward pre": lambda: array.register_forward_pre_hook(lambda *_: seen.append(1)),
        "backward": lambda: array.register_full_backward_hook(lambda *_: seen.append(1)),
        "global": lambda: nn.modules.module.register_module_forward_hook(
            lambda module, *_: seen.append(1) if module is array else None
        ),
    }[kind]()
    try:
        with pytest.warns(UserWarning, match="Full backward hook is firing") if kind == "backward" else _quiet():
            array.losses(F.cross_entropy, X, Y).backward()
        assert seen == [1]
    finally:
        handle.remove()


def _quiet():
    from contextlib import nullcontext

    return nullcontext()


@pytest.mark.parametrize("way", ["whole", "2 in one go", GO])
@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_under_autocast_as_plain_models_under_autocast(name, way, monkeypatch):
    """To bfloat16's rounding, as the tests of the forward under autocast."""
    prefer(monkeypatch, way)
    make, given = NETS[name]
    models = [model.float() for model in made(make, 4)]
    array = hocket.fuse(copy.deepcopy(models), shared=True)
    x, y = given().float(), torch.tensor([0, 1, 2, 3])
    for _ in range(2):
        array.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            losses = array.losses(F.cross_entropy, x, y)
        losses.backward()
        for index, model in enumerate(models):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            assert losses.dtype == loss.dtype == torch.float32
            assert abs(losses[index].item() - loss.item()) <= 0.05 * abs(loss.item())
            own, expected = array.tensor("head.weight" if name == "residual" else "3.weight").tensor.grad[index], (
                model.head if name == "residual" else model[3]
            ).weight.grad  # fmt: skip
            assert own.dtype == expected.dtype == torch.float32
            assert (own - expected).abs().max() <= 0.05 * expected.abs().max()
    assert array.choices[-1].winner == way


# --------------------------------------------------------------------------------------------- errors


def test_errors_name_shapes_before_and_after_a_choice(monkeypatch):
    array, other = pair(monkeypatch)
    far = torch.full((4,), 7)
    with pytest.raises(InputError, match=r"loss: .* \(3, 4, 3\), \(4,\), 3 models: Target 7 is out of bounds"):
        array.losses(F.cross_entropy, X, far)
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    with pytest.raises(InputError, match=r"loss: .* \(4, 3\), \(4,\), model 0: Target 7 is out of bounds"):
        array.losses(F.cross_entropy, X, far)
    own = Y.expand(3, 4).clone()
    array.losses(F.cross_entropy, X, own)
    own[2, 1] = 7
    with pytest.raises(InputError, match=r"loss: .* \(4, 3\), \(4,\), model 2: Target 7 is out of bounds"):
        array.losses(F.cross_entropy, X, own)
    with pytest.raises(InputError, match=r"loss: .* \(3, 4, 3\), \(5,\), 3 models: .*batch_size"):
        array.losses(F.cross_entropy, X, torch.zeros(5, dtype=torch.int64))
    with pytest.raises(InputError, match=r"layer 0: linear"):
        array.losses(F.cross_entropy, torch.ones(4, 5, dtype=D), Y)
    array.losses(F.cross_entropy, X, Y).backward()  # and it goes on as if nothing had been
    ordinary(other).backward()
    same_gradients(array, other)


def test_groups_name_shapes_too(monkeypatch):
    array, _ = pair(monkeypatch, "2 in one go", make=lambda: linears(4))
    array.losses(F.cross_entropy, X, Y)
    assert in_one_go(array)
    with pytest.raises(InputError, match=r"loss: .* \(2, 4, 3\), \(4,\), 2 models: Target 7 is out of bounds"):
        array.losses(F.cross_entropy, X, torch.full((4,), 7))


@pytest.mark.parametrize("inputs", [[X], X.numpy(), None, 3])
def test_inputs_of_another_kind_are_refused(inputs):
    array = hocket.fuse(linears())
    with pytest.raises(InputError, match=f"a dict of named ones, got {type(inputs).__name__}"):
        array.losses(F.cross_entropy, inputs, Y)


@pytest.mark.parametrize("way", ["whole", GO])
def test_a_loss_that_gives_no_tensor(way, monkeypatch):
    array, _ = pair(monkeypatch, way)
    answers: list[Any] = []

    def fn(out, y):
        return answers[-1] if answers else F.cross_entropy(out, y)

    array.losses(fn, X, Y)
    answers.append("none")
    with pytest.raises(InputError, match="loss: expected one tensor from the loss function, got str"):
        array.losses(fn, X, Y)


def test_one_model_goes_the_ordinary_way():
    runs = Runs(linears(1), shared=True)
    for _ in range(2):
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))
    assert all("in one go" not in choice.winner for choice in runs.array.choices)


@pytest.mark.parametrize("backend", ["rule", "vmap", "loop"])
def test_other_backends_go_the_ordinary_way(backend):
    runs = Runs(made(mlp, 3), backend=backend, shared=True)
    for _ in range(2):
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))
    assert not runs.array.choices


def test_the_real_contest_times_all_and_keeps_what_won():
    runs = Runs(linears(4), shared=True)
    for _ in range(3):
        runs.step(F.cross_entropy, X, (Y,), lambda _: (X,), lambda _: (Y,))
    assert len(runs.array.choices) == 2
    choice = runs.array.choices[-1]
    assert set(choice.whole_us) <= {"whole", "2 in one go", GO}
    assert choice.winner == min(choice.whole_us, key=lambda name: choice.whole_us[name])
