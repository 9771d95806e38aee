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
from hocket.errors import InputError
from hocket.optim import SGD

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


class BoundMethod(Net):
    def hold(self):
        self.inner = self.layer.forward


class PartialOfAHelper(Net):
    def hold(self):
        self.inner = functools.partial(Helper(self.layer).run)


class Lambda(Net):
    def hold(self):
        self.inner = lambda x: self.layer(x)


class ClosureOfALayer(Net):
    def hold(self):
        layer = self.layer

        def inner(x):
            return layer(x)

        self.inner = inner


class ClosureOfAParameter(Net):
    def hold(self):
        weight = self.layer.weight
        self.inner = lambda x: x @ weight


class ClosureOfAList(Net):
    def hold(self):
        layers = [self.layer]
        self.inner = lambda x: layers[0](x)


class ClosureOfAHelper(Net):
    def hold(self):
        helper = Helper(self.layer)
        self.inner = lambda x: helper.run(x)


class DefaultArgument(Net):
    def hold(self):
        self.inner = lambda x, layer=self.layer: layer(x)


class PartialOfAClosure(Net):
    def hold(self):
        self.inner = functools.partial(lambda f, x: f(x), lambda x, layer=self.layer: layer(x))


class InADeque(Net):
    def hold(self):
        self.steps = deque([lambda x, layer=self.layer: layer(x)])

    def through(self, x):
        return self.steps[0](x)


class AttributeOfAFunction(Net):
    def hold(self):
        def inner(x):
            return inner.layer(x)

        inner.layer = self.layer
        self.inner = inner


class LocalClass(Net):
    def hold(self):
        layer = self.layer

        class Inner:
            def __call__(self, x):
                return layer(x)

        self.inner = Inner()


class Cached(Net):
    def hold(self):
        self.inner = functools.lru_cache(2)(self.layer.forward)


class Weakly(Net):
    def hold(self):
        self.inner = weakref.ref(self.layer)

    def through(self, x):
        return self.inner()(x)


class WeaklyItself(Net):
    """A child that knows its model, whose mode it reads."""

    def hold(self):
        self.model = weakref.ref(self)

    def through(self, x):
        return self.layer(x) if self.model().training else x


class InAContext(Net):
    def hold(self):
        self.inner = contextvars.ContextVar("layer")
        self.inner.set(self.layer)

    def through(self, x):
        return self.inner.get()(x)


class OwnForward(Net):
    def hold(self):
        def forward(model, x):
            return self.layer(torch.tanh(model.first(x)))

        self.forward = types.MethodType(forward, self)


class InAGlobal(Net):
    def hold(self):
        REGISTRY[self.number] = self.layer

    def through(self, x):
        return REGISTRY[self.number](x)


class InAClass(Net):
    layers: ClassVar = {}

    def hold(self):
        self.layers[self.number] = self.layer

    def through(self, x):
        return type(self).layers[self.number](x)


class LastInAClass(Net):
    """All models go through the layer of the last one."""

    last = None

    def hold(self):
        type(self).last = [self.layer]

    def through(self, x):
        return type(self).last[0](x)


class DataInAGlobal(Net):
    """A view of a parameter, which follows it as it trains."""

    def hold(self):
        REGISTRY[self.number] = self.layer.weight.detach()

    def through(self, x):
        return self.layer(x) @ REGISTRY[self.number]


class WritesAGlobal(Net):
    def hold(self):
        REGISTRY[self.number] = self.calls

    def through(self, x):
        REGISTRY[self.number].add_(1)
        return self.layer(x)


class HelperWithoutCopies(Net):
    def hold(self):
        self.inner = SharedHelper(self.layer).run


class HeldByAHelper(Net):
    def hold(self):
        self.inner = SharedHelper(self.layer)

    def through(self, x):
        return self.inner.run(x)


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


RIGHT = (BoundMethod, PartialOfAHelper)
REFUSED = (
    Lambda, ClosureOfALayer, ClosureOfAParameter, ClosureOfAList, ClosureOfAHelper, DefaultArgument, PartialOfAClosure,
    InADeque, AttributeOfAFunction, LocalClass, Cached, Weakly, WeaklyItself, InAContext, OwnForward, InAGlobal,
    InAClass, LastInAClass, DataInAGlobal, WritesAGlobal, HelperWithoutCopies, HeldByAHelper, CopyShares, CopyIsItself,
    CopyIsNew, StateWithoutLayer, StateWithoutBuffer, LayerShares,
)  # fmt: skip


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
    with pytest.raises(InputError, match=r"model \d[,:].*(layer|inner|calls|model|forward|copied)"):
        trained_fused(kind, backend=backend)
