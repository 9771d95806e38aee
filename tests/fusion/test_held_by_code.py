"""Parts of a model that a forward reaches by code, which no copy takes along: right, or refused by name."""

from __future__ import annotations

import contextvars
import functools
import types
import weakref
from collections import deque
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import hocket
from hocket.optim import SGD
from support.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:hocket.fuse")

NUM_MODELS = 3
REGISTRY = {}


class Net(nn.Module):
    """A model whose layer is reached by `inner`, which each kind makes another way."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.first, self.layer = nn.Linear(3, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.hold()

    def hold(self):
        self.inner = None

    def through(self, x):
        return self.inner(x)

    def forward(self, x):
        return self.through(torch.tanh(self.first(x)))


class Helper:
    """An object with a layer that it does not register."""

    def __init__(self, layer):
        self.layer = layer

    def run(self, x):
        return self.layer(x)


class SharedHelper(Helper):
    """A helper that no copy has of its own."""

    def __deepcopy__(self, memo):
        return self


def kind(name, inner=None, through=None):
    """A class of models that hold `inner`, and go through it another way if need be."""
    own = {} if inner is None else {"hold": lambda model: setattr(model, "inner", inner(model))}
    return type(name, (Net,), own if through is None else {**own, "through": through})


def over(value, call):
    """A closure of a value."""
    return lambda x: call(value, x)


def with_an_attribute(m):
    def inner(x):
        return inner.layer(x)

    inner.layer = m.layer
    return inner


def of_a_local_class(m):
    layer = m.layer

    class Inner:
        def __call__(self, x):
            return layer(x)

    return Inner()


def in_a_context(m):
    found = contextvars.ContextVar("layer")
    found.set(m.layer)
    return found


def registered(take):
    return lambda m: REGISTRY.update({m.number: take(m)})


class OwnForward(Net):
    def hold(self):
        def forward(model, x):
            return self.layer(torch.tanh(model.first(x)))

        self.forward = types.MethodType(forward, self)


class InAClass(Net):
    layers: ClassVar = {}

    def hold(self):
        self.layers[self.number] = self.layer

    def through(self, x):
        return type(self).layers[self.number](x)


def counted_in_a_global(m, x):
    REGISTRY[m.number].add_(1)
    return m.layer(x)


class CopyShares(Net):
    """A copy goes on with the layer of the original."""

    def through(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        made = type(self)(self.number)
        made.layer = self.layer
        return made


class CopyIsItself(Net):
    def through(self, x):
        return self.layer(x)

    def __deepcopy__(self, memo):
        return self


class CopyIsNew(Net):
    """A copy begins anew."""

    def through(self, x):
        return self.layer(x)

    def __reduce__(self):
        return type(self), (self.number,)


class StateWithoutLayer(Net):
    def through(self, x):
        return x if self.layer is None else self.layer(x)

    def __getstate__(self):
        state = self.__dict__.copy()
        state["_modules"] = {**state["_modules"], "layer": None}
        return state


class StateWithoutBuffer(Net):
    def through(self, x):
        if "calls" in self._buffers:
            self.calls += 1
        return self.layer(x)

    def __getstate__(self):
        return {**self.__dict__, "_buffers": {}}


class LayerShares(Net):
    """A layer of the user's class that copies have in common."""

    class Layer(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    def hold(self):
        self.layer = self.Layer(4, 4)

    def through(self, x):
        return self.layer(x)


RIGHT = (
    kind("BoundMethod", lambda m: m.layer.forward),
    kind("PartialOfAHelper", lambda m: functools.partial(Helper(m.layer).run)),
)
REFUSED = (
    kind("Lambda", lambda m: lambda x: m.layer(x)),
    kind("ClosureOfALayer", lambda m: over(m.layer, lambda layer, x: layer(x))),
    kind("ClosureOfAParameter", lambda m: over(m.layer.weight, lambda weight, x: x @ weight)),
    kind("ClosureOfAList", lambda m: over([m.layer], lambda layers, x: layers[0](x))),
    kind("ClosureOfAHelper", lambda m: over(Helper(m.layer), lambda helper, x: helper.run(x))),
    kind("DefaultArgument", lambda m: lambda x, layer=m.layer: layer(x)),
    kind("PartialOfAClosure", lambda m: functools.partial(lambda f, x: f(x), lambda x, layer=m.layer: layer(x))),
    kind("InADeque", lambda m: deque([lambda x, layer=m.layer: layer(x)]), lambda m, x: m.inner[0](x)),
    kind("AttributeOfAFunction", with_an_attribute),
    kind("LocalClass", of_a_local_class),
    kind("Cached", lambda m: functools.lru_cache(2)(m.layer.forward)),
    kind("Weakly", lambda m: weakref.ref(m.layer), lambda m, x: m.inner()(x)),
    kind("WeaklyItself", weakref.ref, lambda m, x: m.layer(x) if m.inner().training else x),
    kind("InAContext", in_a_context, lambda m, x: m.inner.get()(x)),
    kind("InAGlobal", registered(lambda m: m.layer), lambda m, x: REGISTRY[m.number](x)),
    kind("LastInAGlobal", lambda m: REGISTRY.update(last=[m.layer]), lambda m, x: REGISTRY["last"][0](x)),
    # a view of a parameter, which follows it as it trains
    kind("DataInAGlobal", registered(lambda m: m.layer.weight.detach()), lambda m, x: m.layer(x) @ REGISTRY[m.number]),
    kind("WritesAGlobal", registered(lambda m: m.calls), counted_in_a_global),
    kind("HelperWithoutCopies", lambda m: SharedHelper(m.layer).run),
    kind("HeldByAHelper", lambda m: SharedHelper(m.layer), lambda m, x: m.inner.run(x)),
    *(OwnForward, InAClass, CopyShares, CopyIsItself, CopyIsNew, StateWithoutLayer, StateWithoutBuffer, LayerShares),
)


def made(kind):
    torch.manual_seed(0)
    return [kind(number) for number in range(NUM_MODELS)]


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 3, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(5)]


def trained_one_by_one(kind):
    models = made(kind)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return [model.state_dict() for model in models]


def trained_fused(kind, **options):
    array = hocket.fuse(made(kind), shared=True, **options)
    optimizer = SGD(array.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        array.losses(mse_loss, x, y).sum().backward()
        optimizer.step()
    return [array.state_dict(model=number) for number in range(NUM_MODELS)]


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize("kind", RIGHT)
def test_what_copies_take_along_trains_as_one_by_one(kind, backend):
    for own, plain in zip(trained_fused(kind, backend=backend), trained_one_by_one(kind), strict=True):
        torch.testing.assert_close(own, plain)


@pytest.mark.parametrize("backend", ["auto", "loop"])
@pytest.mark.parametrize("kind", REFUSED)
def test_what_no_copy_takes_along_is_refused_by_name(kind, backend):
    refused(r"model \d[,:].*(layer|inner|calls|model|forward|copied)", trained_fused, kind, backend=backend)
