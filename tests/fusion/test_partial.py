"""Partial fusion, and input that has to be refused, each time with the layer's name."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
from tests.fusion.nets import Residual
from tests.fusion.oracle import check, made
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

import hocket
from hocket.errors import InputError
from support.refusals import refused


class Body(nn.Module):
    """A stem and a head that agree, around a block that may not."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Linear(4, 6), block, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.block(torch.relu(self.stem(x))))


def inner(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6))


BLOCKS = {
    "another class": (lambda: nn.Tanh(), lambda: nn.Sigmoid()),
    "another option": (lambda: nn.LeakyReLU(0.1), lambda: nn.LeakyReLU(0.2)),
    "another width": (lambda: inner(4), lambda: inner(9)),
    "another depth": (lambda: inner(4), lambda: nn.Sequential(*inner(4), nn.ReLU())),
    "a norm or none": (lambda: nn.LayerNorm(6), lambda: nn.Identity()),
    "another eps": (lambda: nn.LayerNorm(6), lambda: nn.LayerNorm(6, eps=1e-3)),
    "another momentum": (lambda: nn.BatchNorm1d(6), lambda: nn.BatchNorm1d(6, momentum=0.5)),
}


@pytest.mark.parametrize("backend", ["rule", "loop", "auto"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_that_differs_stays_separate_and_the_rest_fuses(name, shared, backend):
    makers = iter(BLOCKS[name] * 2)
    models = made(lambda: Body(next(makers)()), 3)
    x = torch.randn((5, 4) if shared else (3, 5, 4)).double()
    array = check(models, x, shared=shared, backend=backend)
    assert "separate: block" in array.report()
    owners = [parameter._hocket_model for parameter in array.separate.parameters()]
    assert sorted(set(owners)) in ([0, 1, 2], [0, 2], [1], [])
    fused = [parameter for parameter in array.parameters() if hasattr(parameter, "_hocket_models")]
    assert len(fused) == 4
    back = array.unfuse()
    assert [type(model.block) for model in back] == [type(model.block) for model in models]
    assert not any(hasattr(each, "_hocket_model") for model in back for each in model.parameters())


def test_blocks_may_be_kept_separate_by_name():
    x = torch.randn(3, 4, 3, 6, 6).double()
    array = check(made(Residual, 3), x, shared=False, separate=["block"], vanishing={"stem.bias"})
    assert "separate: block (as asked for)" in array.report()
    assert "block  Sequential" in array.report()


def test_separate_models_drop_refill_and_save():
    makers = iter([inner(4), inner(9), inner(5)])
    models = made(lambda: Body(next(makers)), 3)
    array = hocket.fuse(models, backend="rule")
    x = torch.randn(5, 4).double()
    out = array(x)
    state = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    array.load_state_dict(state)
    array.drop(1)
    assert torch.allclose(array(x), out[[0, 2]])
    assert {parameter._hocket_model for parameter in array.separate.parameters()} == {0, 1}


def test_strict_refuses_to_keep_anything_separate():
    with pytest.raises(InputError, match="block: Tanh in model 0, Sigmoid in model 1"):
        hocket.fuse([Body(nn.Tanh()), Body(nn.Sigmoid())], strict=True)


class Named(nn.Module):
    """Attributes of the user's own: one that matters and one that does not."""

    def __init__(self, name: str, twice: bool = False) -> None:
        super().__init__()
        self.name, self.twice, self.fc = name, twice, nn.Linear(2, 2)

    def forward(self, x):
        x = self.fc(x)
        return self.fc(x) if self.twice else x


def test_attributes_that_change_nothing_do_not_matter_and_others_are_named():
    check([Named("a").double(), Named("b").double()], torch.randn(2, 3, 2).double(), shared=False)
    models = [Named("a").double(), Named("a", twice=True).double()]
    with pytest.warns(UserWarning, match=r"layer fc: linear in model 1 \(twice: False in model 0, True"):
        check(models, torch.randn(2, 3, 2).double(), shared=False, steps=4)


def shared_layer():
    layer = nn.Linear(2, 2)
    return [nn.Sequential(layer, nn.ReLU()), nn.Sequential(layer, nn.ReLU())]


def shared_weight():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    models[1].weight = models[0].weight
    return [nn.Sequential(model) for model in models]


def hooked():
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    models[1][0].register_forward_hook(lambda module, args, out: out)
    return models


def hooked_parameters(register):
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    getattr(models[1][0].weight, register)(lambda value: None)
    return models


def half_frozen():
    models = [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    models[1][0].weight.requires_grad_(False)
    return models


def half_in_eval():
    models = [nn.Sequential(nn.Linear(2, 2), nn.Dropout()) for _ in range(2)]
    models[1].eval()
    return models


REFUSED = {
    "no models": (lambda: [], "at least one module"),
    "not a list": (lambda: nn.Linear(2, 2), "expected a list"),
    "not modules": (lambda: [nn.ReLU(), 3], "model 1: expected an nn.Module, got int"),
    "other classes": (lambda: [nn.Linear(2, 2), nn.Bilinear(2, 2, 2)], "Linear in model 0, Bilinear in model 1"),
    "other shapes": (lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], "(2, 2) in model 0, (3, 2) in model 1"),
    "other shapes, layer by layer": (
        lambda: [nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, 2)) for n in (3, 5)],
        "layer 0: weight: (3, 4) in model 0, (5, 4) in model 1; layer 0: bias: (3,) in model 0, (5,) in model 1; "
        "layer 2: weight: (2, 3) in model 0, (2, 5) in model 1",
    ),
    "other depth": (
        lambda: [nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2), nn.ReLU())],
        "other layers than model 0: 1",
    ),
    "other dtypes": (lambda: [nn.Linear(2, 2), nn.Linear(2, 2).double()], "torch.float64"),
    "a model twice": (lambda: [nn.Linear(2, 2)] * 2, "model 1, the model itself: shared with model 0"),
    "a shared layer": (shared_layer, "model 1, layer 0: shared with model 0 (layer 0)"),
    "a shared weight": (shared_weight, "model 1, layer 0.weight: shared with model 0"),
    "a hook": (hooked, "model 1, layer 0: has a hook (forward_hooks)"),
    **{
        hook: (lambda hook=hook: hooked_parameters(hook), "model 1: 0.weight: has a hook on its gradient")
        for hook in ("register_hook", "register_post_accumulate_grad_hook")
    },
    "compiled": (
        lambda: [nn.Sequential(torch.compile(nn.Linear(2, 2))) for _ in range(2)],
        "model 0, layer 0: is compiled; fuse the module that it was made from",
    ),
    "half frozen": (half_frozen, "layer 0: weight: trained in one of model 0 and model 1 only"),
    "half in eval": (half_in_eval, "training is True in model 0, False in model 1"),
    "momentum None": (
        lambda: [nn.Sequential(nn.BatchNorm1d(2, momentum=None)) for _ in range(2)],
        "model 0, layer 0: momentum: expected a number, got None",
    ),
    "not initialised": (
        lambda: [nn.Sequential(nn.LazyLinear(2)) for _ in range(2)],
        "model 0, layer 0: not initialised",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_fuse_are_refused_by_name(name):
    import re

    make, message = REFUSED[name]
    refused(re.escape(message), hocket.fuse, make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fastest"}, "backend: expected one of auto, rule, vmap, loop"),
        ({"seeds": [1, 2, 3]}, "seeds: expected 2, one for each model, got 3"),
        ({"separate": ["nowhere"]}, "no block is called 'nowhere'"),
    ],
)
def test_options_that_make_no_sense(options, message):
    refused(message, hocket.fuse, [nn.Linear(2, 2), nn.Linear(2, 2)], **options)


def test_input_that_fits_no_layer_names_the_layer():
    models = [nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)) for _ in range(2)]
    array = hocket.fuse(models, backend="rule")
    refused(r"layer 0: linear\(torch.int64", array, torch.ones(5, 4, dtype=torch.int64))
    refused("layer 0: linear", array, torch.ones(5, 7))
    with pytest.raises(InputError, match=r"expected 2 models in the first axis, got shape \(3, 5, 4\)"):
        hocket.fuse(models, shared=False)(torch.ones(3, 5, 4))
    words = hocket.fuse([nn.Sequential(nn.Embedding(3, 2)) for _ in range(2)])
    refused(r"layer 0: embedding.*indices", words, torch.ones(4, 5))


def test_an_op_without_a_rule_is_refused_by_strict():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return torch.cdist(self.fc(x), x)

    array = hocket.fuse([Odd(), Odd()], strict=True, backend="rule", shared=False)
    refused("the model itself: cdist: no rule", array, torch.ones(2, 5, 3))


def test_separate_blocks_of_different_shapes_say_so():
    models = [nn.Sequential(nn.Linear(4, 3), nn.Flatten(start)) for start in (0, 1)]
    with pytest.raises(InputError, match=r"its output differs in shape: \(5, 3\) in model 1, \(15,\) in model 0"):
        hocket.fuse(models, backend="rule")(torch.ones(5, 4))
    blocks = iter((nn.Identity(), nn.Unflatten(1, (3, 1))))
    models = made(lambda: nn.Sequential(nn.Linear(4, 3), next(blocks), nn.Flatten()), 2)
    with pytest.warns(UserWarning, match="layer 1: its output differs in shape"):
        check(models, torch.ones(5, 4).double(), shared=True, steps=3)


@dataclasses.dataclass
class Out:
    scores: torch.Tensor


class Wrapped(nn.Module):
    """Gives an object that is not searched for tensors."""

    def __init__(self, wrap) -> None:
        super().__init__()
        self.fc, self.wrap = nn.Linear(4, 3), wrap

    def forward(self, x):
        return self.wrap(self.fc(x))


def test_inputs_and_targets_in_objects_are_refused_where_each_model_may_have_its_own():
    class Unwrapped(nn.Linear):
        def forward(self, x):
            return super().forward(getattr(x, "scores", x))

    def loss(out, target):
        return (out - target.scores).square().mean()

    models, x = made(lambda: Unwrapped(4, 3), 2), torch.ones(2, 5, 4).double()
    array = hocket.fuse(models, shared=False)
    refused("^input: a Out holds tensors that begin with 2.*register_dataclass.*shared=True", array, Out(x))
    target = Out(torch.zeros(2, 5, 3).double())
    refused("^loss: target: a Out holds tensors.*register_dataclass.*partial", array.loss, loss, array(x), target)
    assert hocket.fuse(models, shared=True)(Out(x[0])).shape == (2, 5, 3)
    assert array.loss(loss, array(x), Out(target.scores[0])).shape == (2,)


@pytest.mark.filterwarnings("ignore:hocket.fuse")
@pytest.mark.parametrize("backend", ["rule", "vmap", "loop", "auto"])
def test_outputs_in_objects_are_refused_rather_than_those_of_one_model(backend):
    array = hocket.fuse(made(lambda: Wrapped(Out), 2), backend=backend)
    refused(
        r"^the model itself: expected tensors in tuples, lists and dicts, got Out; .*register_dataclass",
        array,
        torch.randn(5, 4).double(),
    )


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
@pytest.mark.parametrize("given", [lambda params: params, lambda params: [{"params": params}]])
def test_optimizers_that_couple_models_are_named(name, given):
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    with pytest.warns(UserWarning, match=f"torch.optim.{name} takes.*as they do alone"):
        getattr(torch.optim, name)(given(array.parameters()))


def test_optimizers_that_go_element_by_element_are_not():
    array = hocket.fuse([nn.Linear(3, 2), nn.Linear(3, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, hocket.optim.Adam):
            kind(array.parameters(), lr=0.1)
        torch.optim.LBFGS(nn.Linear(3, 2).parameters())


@pytest.mark.parametrize("within", [lambda array: array, nn.Sequential, AveragedModel])
def test_code_that_looks_for_layers_is_said_to_find_none(within):
    array = hocket.fuse([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    whole = within(array)
    for look in (lambda: list(whole.modules()), lambda: update_bn([torch.ones(5, 3)], whole)):
        with pytest.warns(UserWarning, match=r"no layers among modules\(\).*array\.apply") as said:
            look()
        assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(whole.parameters())) == 2
