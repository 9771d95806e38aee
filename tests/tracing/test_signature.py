"""Signatures recognised natively are those that `signature_of` describes, whatever changes between two calls."""

from __future__ import annotations

import collections
import contextlib
from functools import partial

import pytest
import torch
from torch import nn

from hocket.native import available
from hocket.tracing import signature
from hocket.tracing.signature import Signatures, signature_of
from hocket.tracing.state import Inventory, inventory

Named = collections.namedtuple("Named", "x y")


class Setting:
    """A model with gradients, and a batch with one of everything."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 2, bias=False))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.first, self.second = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)
        self.batch = {"x": [self.first, (self.second, 2)], "more": Named(0.5, "word"), "none": None, "yes": True}
        self.live: frozenset[int] = frozenset()
        self.places: Inventory = inventory(self.model, self.optimizer)


def _put(key, value):
    return lambda setting: setting.batch.__setitem__(key, value)


def _first_layer(name, value):
    return lambda setting: setattr(setting.model[0], name, value)


CHANGES = {
    "other values in the tensors": lambda s: s.first.add_(1),
    "another batch of the same kind": lambda s: _put("x", [torch.zeros(5, 4), (torch.ones(5, dtype=torch.int64), 2)])(
        s
    ),
    "another shape": lambda s: _put("x", [torch.ones(6, 4), (s.second, 2)])(s),
    "other strides": lambda s: _put("x", [torch.ones(4, 5).t(), (s.second, 2)])(s),
    "another dtype": lambda s: _put("x", [s.first, (s.second.int(), 2)])(s),
    "a batch that requires a gradient": lambda s: s.first.requires_grad_(),
    "one tensor twice": lambda s: _put("none", s.first)(s),
    "another number": lambda s: _put("more", Named(0.25, "word"))(s),
    "another type of number": lambda s: _put("x", [s.first, (s.second, 2.0)])(s),
    "a bool for a number": lambda s: _put("x", [s.first, (s.second, True)])(s),
    "zero of another sign": lambda s: _put("more", Named(-0.0, "word"))(s),
    "another word": lambda s: _put("more", Named(0.5, "other"))(s),
    "a tuple for a list": lambda s: _put("x", (s.first, (s.second, 2)))(s),
    "one more entry": _put("last", 1),
    "entries in another order": lambda s: s.batch.update(x=s.batch.pop("x")),
    "a parameter for a tensor": lambda s: _put("x", [nn.Parameter(s.first), (s.second, 2)])(s),
    "evaluation": lambda s: s.model.eval(),
    "evaluation of one layer": lambda s: s.model[1].eval(),
    "a frozen parameter": lambda s: s.model[0].weight.requires_grad_(False),
    "no gradient": lambda s: s.optimizer.zero_grad(),
    "one gradient gone": lambda s: setattr(s.model[2].weight, "grad", None),
    "another parameter": _first_layer("weight", nn.Parameter(torch.ones(3, 4))),
    "a parameter with other data": lambda s: setattr(s.model[0].weight, "data", torch.ones(3, 4)),
}


# Further ones, after each of which the signature is another.
TOLD_APART = {
    "an attribute of a tensor": lambda s: setattr(s.first, "weight", 2.0),
    "a tensor as an attribute of a tensor": lambda s: setattr(s.first, "weight", torch.ones(1)),
    "a subclass": lambda s: _put("x", [s.first.as_subclass(Special), (s.second, 2)])(s),
    "a parameter": lambda s: _put("x", [nn.Parameter(s.first, requires_grad=False), (s.second, 2)])(s),
    "a tensor of inference mode": lambda s: _put("x", [_inferred(), (s.second, 2)])(s),
    "a lazily negated tensor": lambda s: _put("x", [torch._neg_view(s.first), (s.second, 2)])(s),
    "a gradient": lambda s: setattr(s.first, "grad", torch.ones(5, 4)),
    "zero of the other sign": _put("zeros", (-0.0, 0j)),
    "complex zero of the other sign": _put("zeros", (0.0, complex(0.0, -0.0))),
    "an int for a float": _put("zeros", (0, 0j)),
    "True as a key": lambda s: s.batch["keys"].update({True: s.batch["keys"].pop(1)}),
}


class Special(torch.Tensor):
    pass


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(5, 4)


@pytest.fixture
def setting() -> Setting:
    return Setting()


def recognised(setting: Setting) -> Signatures:
    """Signatures that have met the setting's often enough to know it."""
    signatures = Signatures()
    found = {signatures.of(setting.places, setting.batch, setting.live) for _ in range(3)}
    assert len(found) == 1
    return signatures


@pytest.mark.skipif(not available(), reason="the native core cannot be built here")
def test_a_signature_that_was_met_is_not_described_again(setting, monkeypatch):
    signatures = recognised(setting)
    known = signatures.of(setting.places, setting.batch, setting.live)
    monkeypatch.setattr(signature, "signature_of", None)
    assert signatures.of(setting.places, setting.batch, setting.live) is known
    setting.first.add_(1)
    assert signatures.of(setting.places, dict(setting.batch), setting.live) is known


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(setting, change):
    signatures = recognised(setting)
    CHANGES[change](setting)
    expected = signature_of(setting.places, setting.batch, setting.live)
    assert signatures.of(setting.places, setting.batch, setting.live).parts == expected
    for _ in range(2):
        assert signatures.of(setting.places, setting.batch, setting.live).parts == expected


@pytest.mark.parametrize("change", TOLD_APART)
def test_what_a_step_can_tell_apart_is_told_apart(setting, change):
    setting.batch |= {"zeros": (0.0, 0j), "keys": {1: 1.5}}
    signatures = recognised(setting)
    before = signatures.of(setting.places, setting.batch)
    TOLD_APART[change](setting)
    for _ in range(3):
        now = signatures.of(setting.places, setting.batch)
        assert now.parts == signature_of(setting.places, setting.batch) != before.parts


@pytest.mark.skipif(not available(), reason="the native core cannot be built here")
def test_attributes_of_a_tensor_are_recognised(setting, monkeypatch):
    def with_weight(weight):
        setting.batch["x"][0] = tensor = torch.ones(5, 4)
        tensor.weight = weight
        return signatures.of(setting.places, setting.batch)

    signatures = Signatures()
    first, *others = [with_weight(2.0) for _ in range(3)]
    assert others == [first, first]
    assert with_weight(-0.0) != first
    assert with_weight(2) != first
    monkeypatch.setattr(signature, "signature_of", None)
    assert with_weight(2.0) is first


def test_a_number_that_is_none_is_met_again(setting):
    signatures = Signatures()
    found = {signatures.of(setting.places, (setting.first, float("nan"))) for _ in range(3)}
    assert len(found) == 1


def test_the_gradient_of_a_graph_s_input_does_not_count(setting):
    signatures, graph = Signatures(), inventory([], [])
    before = signatures.of(graph, [setting.first])
    setting.first.grad = torch.ones(5, 4)
    setting.first.weight = 2.0
    assert signatures.of(graph, [setting.first]) == before


@contextlib.contextmanager
def precision(owner, name):
    usual, owner.fp32_precision = owner.fp32_precision, name
    yield
    owner.fp32_precision = usual


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@contextlib.contextmanager
def less_precise(name):
    matmul = torch.backends.cuda.matmul
    usual = getattr(matmul, name)
    setattr(matmul, name, not usual)
    yield
    setattr(matmul, name, usual)


@contextlib.contextmanager
def other_attention():
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize(
    "around",
    [
        *(partial(less_precise, f"allow_{name}_reduced_precision_reduction") for name in ("fp16", "bf16")),
        *(partial(less_precise, "allow_fp16_accumulation"), other_attention),
        *(lambda: precision(torch.backends, "tf32"), lambda: precision(torch.backends.mkldnn.matmul, "bf16")),
        *(lambda: precision(torch.backends.mkldnn.conv, "bf16"), default_dtype, default_device, torch.no_grad),
        *(lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.autocast("cpu", dtype=torch.float16)),
    ],
)
def test_settings_around_a_call_are_seen_and_raise_nothing(setting, around):
    signatures = recognised(setting)
    plain = signatures.of(setting.places, setting.batch)
    with around():
        for _ in range(3):
            inside = signatures.of(setting.places, setting.batch)
            assert inside.parts == signature_of(setting.places, setting.batch) != plain.parts
    assert signatures.of(setting.places, setting.batch) is plain


def test_signatures_that_alternate_stay_known(setting, monkeypatch):
    batches = [torch.ones(length, 4) for length in (3, 4, 5)]
    signatures = Signatures()
    found = [[signatures.of(setting.places, batch) for batch in batches] for _ in range(3)]
    assert len({id(each) for each in found[0]}) == 3
    assert all(one is two for one, two in zip(found[0], found[2], strict=True))


def test_a_parameter_that_is_gone_is_said(setting):
    signatures = recognised(setting)
    del setting.model[0].weight
    with pytest.raises(KeyError):
        signatures.of(setting.places, setting.batch)


def test_a_live_number_does_not_count(setting):
    setting.live = frozenset((0,))  # the 2 beside the labels
    signatures = recognised(setting)
    plain = signatures.of(setting.places, setting.batch, setting.live)
    setting.batch["x"][1] = (setting.second, 3)
    assert signatures.of(setting.places, setting.batch, setting.live) is plain
    assert signatures.of(setting.places, setting.batch).values[0] == (int, 3)


def test_a_module_whose_mode_is_a_property_is_asked(setting):
    class Odd(nn.Linear):
        training = property(lambda self: self.mode, lambda self, mode: vars(self).__setitem__("mode", mode))

    setting.model[2] = Odd(3, 2)
    setting.places = inventory(setting.model, setting.optimizer)
    signatures = recognised(setting)
    setting.model[2].eval()
    assert signatures.of(setting.places, setting.batch).parts == signature_of(setting.places, setting.batch)


def test_numbers_and_text_that_moved(setting):
    signatures = Signatures()
    first = signatures.of(setting.places, (setting.first, 1, "a"))
    assert signatures.leaves_moved(first, ()) == []
    assert signatures.leaves_moved(signatures.of(setting.places, (setting.first, 2, "a")), ()) == [0]
    assert signatures.leaves_moved(signatures.of(setting.places, (setting.first, 2, "a")), {0}) == []
    assert signatures.leaves_moved(signatures.of(setting.places, (setting.first, 2, "b")), ()) == [0, 1]
    assert signatures.leaves_moved(signatures.of(setting.places, (setting.first, 2.0, "a")), ()) == []
