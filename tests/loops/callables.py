"""Loops whose step is a callable of another kind than a plain function: methods, partials, decorated, executed."""

from __future__ import annotations

import functools
import threading
import types
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, loop, mlp, ordinary, task, train, update


class Learner:
    """The step is a method; `history` is there and not touched by it."""

    def __init__(self) -> None:
        self.model, self.optimizer, self.batches = task()
        self.history = []
        self.scale = 1.0

    def step(self, batch):
        return update(self.optimizer, self.scale * F.cross_entropy(self.model(batch[0]), batch[1]))

    def __call__(self, batch):
        return self.step(batch)


@loop(planned=True)
def callable_object_whose_attribute_changes() -> Loop:
    learner = Learner()

    def after(n, _):
        if n == 70:
            learner.scale = 0.3

    return Loop(learner, learner.model, learner.optimizer, learner.batches, lambda: {"scale": learner.scale}, after)


def general_step(model, optimizer, criterion, batch):
    return update(optimizer, criterion(model(batch[0]), batch[1]))


def counted(function):
    """A decorator that counts."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return function(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


@loop(planned=True)
def decorated_with_a_counter() -> Loop:
    model, optimizer, batches = task()

    @counted
    def step(batch):
        return general_step(model, optimizer, F.cross_entropy, batch)

    return Loop(step, model, optimizer, batches, lambda: {"calls": step.calls})


@loop(planned=True)
def function_within_functions() -> Loop:
    def outer(width):
        model, optimizer, batches = mlp(8, width, 4), None, labelled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def forward(x):
            def inner(z):
                return model(z) * scale

            scale = 1 / width
            return inner(x)

        def step(batch):
            return update(optimizer, F.cross_entropy(forward(batch[0]), batch[1]))

        return Loop(step, model, optimizer, batches)

    return outer(10)


SOURCE = """
import torch.nn.functional as F
count = 0
def step(batch):
    {count}
    loss = F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss
"""


def executed(count: str, name: str) -> Loop:
    model, optimizer, batches = task()
    space = {"model": model, "optimizer": optimizer, "__name__": "__main__"}
    exec(compile(SOURCE.format(count=count), name, "exec"), space)
    return Loop(space["step"], model, optimizer, batches, lambda: {"count": space["count"]})


@loop(planned=True)
def cell_of_a_notebook_that_counts() -> Loop:
    return executed("global count; count += 1", "<ipython-input-1-8f2a>")


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
def model_by_a_weak_reference() -> Loop:
    model, optimizer, batches = task()
    reference = weakref.ref(model)

    def step(batch):
        return update(optimizer, F.cross_entropy(reference()(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def names_in_a_namespace() -> Loop:
    """Everything hangs on one object that also points at itself."""
    model, optimizer, batches = task()
    space = types.SimpleNamespace(model=model, optimizer=optimizer, smoothing=0.1)
    space.self = [space, {"again": space}]

    def step(batch):
        out = space.model(batch[0])
        return update(space.optimizer, F.cross_entropy(out, batch[1], label_smoothing=space.self[0].smoothing))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def step_under_a_lock() -> Loop:
    model, optimizer, batches = task()
    lock = threading.RLock()

    def step(batch):
        with lock:
            loss = train(model, optimizer, batch)
        return loss

    return Loop(step, model, optimizer, batches)
