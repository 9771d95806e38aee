"""Loops whose step reaches what it trains in another way. See `loops.test_callables` for kinds of steps."""

from __future__ import annotations

import threading
import types
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import CHANGE, Loop, labelled, loop, mlp, ordinary, train, update


class Shy(nn.Module):
    """Its attributes are computed: reading one that the step does not read is an effect."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.read = []

    @property
    def summary(self) -> str:
        self.read.append("summary")
        return repr(self.inner)

    def forward(self, x):
        return self.inner(x)


@loop(planned=True)
def property_with_an_effect() -> Loop:
    model = Shy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    return Loop(ordinary(model, optimizer), model, optimizer, labelled(), lambda: {"read": model.read})


@loop(planned=True)
def model_by_a_weak_reference(model, optimizer, batches) -> Loop:
    reference = weakref.ref(model)

    def step(batch):
        return update(optimizer, F.cross_entropy(reference()(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def names_in_a_namespace(model, optimizer, batches) -> Loop:
    """Everything hangs on one object that also points at itself."""
    space = types.SimpleNamespace(model=model, optimizer=optimizer, smoothing=0.1)
    space.self = [space, {"again": space}]

    def step(batch):
        out = space.model(batch[0])
        return update(space.optimizer, F.cross_entropy(out, batch[1], label_smoothing=space.self[0].smoothing))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def step_under_a_lock(model, optimizer, batches) -> Loop:
    lock = threading.RLock()

    def step(batch):
        with lock:
            loss = train(model, optimizer, batch)
        return loss

    return Loop(step, model, optimizer, batches)


class Scale:
    factor = 2.0


@loop(word="whose object may go at any time")
def object_by_a_weak_reference(model, optimizer, batches) -> Loop:
    """It goes when the loop drops it: what looks at the step does not keep it."""
    held = [Scale()]
    reference = weakref.ref(held[0])

    def step(batch):
        scale = reference()
        factor = 0.5 if scale is None else scale.factor
        return update(optimizer, factor * F.cross_entropy(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches, after=lambda n, result: held.clear() if n == CHANGE else None)
