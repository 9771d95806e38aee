"""Steps of every kind of callable are counted on to run, to be watched and to be planned alike."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import hocket
from loops.loop import Loop, task, update
from loops.runner import compared


def plain(model, optimizer, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    update(optimizer, loss)
    return loss


class Steps:
    """One step, as every kind of member."""

    __slots__ = ("__weakref__", "model", "optimizer")

    def __init__(self, model, optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def method(self, batch):
        return plain(self.model, self.optimizer, batch)

    def __call__(self, batch):
        return self.method(batch)

    def general(self, scale, batch):
        return plain(self.model, self.optimizer, (scale * batch[0], batch[1]))

    partial = functools.partialmethod(general, 0.5)

    @property
    def made(self):
        return lambda batch: self.method(batch)


def generator_of_steps(model, optimizer):
    batch = yield
    while True:
        batch = yield plain(model, optimizer, batch)


def sent(model, optimizer):
    steps = generator_of_steps(model, optimizer)
    next(steps)
    return steps.send


def decorated(model, optimizer):
    def step(batch):
        return plain(model, optimizer, batch)

    @functools.wraps(step)
    def wrapper(*args, **kwargs):
        return step(*args, **kwargs)

    return wrapper


def executed(name, space):
    def make(model, optimizer):
        source = "def step(batch):\n    return plain(model, optimizer, batch)\n"
        inside = {"plain": plain, "model": model, "optimizer": optimizer, **space}
        exec(compile(source, name, "exec"), inside)
        return inside["step"]

    return make


STEPS = {
    "bound_method": lambda m, o: Steps(m, o).method,
    "callable_class": Steps,
    "decorated": decorated,
    "executed": executed("<string>", {"__name__": "made_up"}),
    "executed_without_a_name": executed("<string>", {}),
    "executed_without_builtins": executed("<string>", {"__builtins__": {}}),
    "executed_with_an_empty_file_name": executed("", {"__name__": "__main__"}),
    "generator": sent,
    "lambda": lambda m, o: lambda batch: plain(m, o, batch),
    "notebook": executed("<ipython-input-1>", {"__name__": "__main__", "In": ["a cell"], "Out": {}}),
    "partial": lambda m, o: functools.partial(plain, m, o),
    "partial_of_a_lambda": lambda m, o: functools.partial(lambda model, batch: plain(model, o, batch), m),
    "partial_method": lambda m, o: Steps(m, o).partial,
    "property": lambda m, o: Steps(m, o).made,
    "without_gradients_forbidden": lambda m, o: torch.enable_grad()(functools.partial(plain, m, o)),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_every_kind(name):
    def build():
        model, optimizer, batches = task()
        return Loop(STEPS[name](model, optimizer), model, optimizer, batches)

    options = {"machine": hocket.Machine.of(cores=1), "guard": False, "planner": "serial"}
    ((verdict, _),) = compared(build, options, steps=63)
    assert verdict == "planned" or name == "generator"  # which is in the middle of its own run: that is left open
