"""Loops whose step counts: in a closure, a global, a default, an iterator, a tensor or an array."""

from __future__ import annotations

import contextvars
import functools
import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, loop, mlp, task, train, update

global_step = 0
position: contextvars.ContextVar[int] = contextvars.ContextVar("position")


@loop(planned=True)
def accumulation_whose_state_is_made_late() -> Loop:
    """Adam makes its state in the fourth call, and every second of its steps begins without gradients."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen = {"batches": 0}

    def step(batch):
        x, y = batch
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        seen["batches"] += 1
        if seen["batches"] > 3 and seen["batches"] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Loop(step, model, optimizer, labelled(), lambda: dict(seen))


@loop(planned=True)
def accumulation_by_batch_index() -> Loop:
    """The place in the epoch travels in the batch, as `enumerate` gives it."""
    model, optimizer, batches = task()

    def step(batch):
        place, x, y = batch
        loss = F.cross_entropy(model(x), y) / 5
        loss.backward()
        if (place + 1) % 5 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Loop(step, model, optimizer, lambda n: (n % 10, *batches[n % 10]))


@loop(planned=True)
def counter_in_a_global() -> Loop:
    global global_step
    global_step = 0
    model, optimizer, batches = task()

    def step(batch):
        global global_step
        global_step += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if global_step > 120:
            return update(optimizer, loss + 0.01 * model[0].weight.abs().sum())

    return Loop(step, model, optimizer, batches, lambda: {"global_step": global_step})


@loop(planned=True)
def every_tenth_by_a_counter_inside() -> Loop:
    model, optimizer, batches = task()
    count = 0

    def step(batch):
        nonlocal count
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if count % 10 == 0:
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        count += 1
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches, lambda: {"count": count})


@loop(planned=True)
def every_tenth_by_a_flag_outside() -> Loop:
    model, optimizer, batches = task()
    flags = {"penalise": True}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if flags["penalise"]:
            return update(optimizer, loss + 0.1 * sum(p.square().sum() for p in model.parameters()))

    def after(n, _):
        flags["penalise"] = (n + 1) % 10 == 0

    return Loop(step, model, optimizer, batches, lambda: flags, after)


@loop()
def counter_in_a_default() -> Loop:
    model, optimizer, batches = task()

    def step(batch, seen=[]):  # noqa: B006  # that it is shared is what is tested
        seen.append(len(seen))
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) / (1 + len(seen) / 50))

    return Loop(step, model, optimizer, batches, lambda: {"seen": step.__defaults__[0]})


@loop(planned=True)
def counter_on_the_function() -> Loop:
    model, optimizer, batches = task()

    def step(batch):
        step.calls += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        update(optimizer, loss * (0.5 if step.calls % 2 else 1.0))
        return loss

    step.calls = 0
    return Loop(step, model, optimizer, batches, lambda: {"calls": step.calls})


@loop(planned=True)
def counter_in_a_context_variable() -> Loop:
    model, optimizer, batches = task()
    position.set(0)

    def step(batch):
        position.set(position.get() + 1)
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) / position.get() ** 0.5)

    return Loop(step, model, optimizer, batches, lambda: {"position": position.get()})


@loop(planned=True)
def counter_in_an_iterator() -> Loop:
    model, optimizer, batches = task()
    counter = itertools.count()

    def step(batch):
        weight = 1.0 / (1 + next(counter) // 20)
        return update(optimizer, weight * F.cross_entropy(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches, lambda: {"counter": repr(counter)})


@loop(planned=True)
def counter_and_a_remembered_rate() -> Loop:
    model, optimizer, batches = task()
    state = {"step": 0}

    @functools.cache
    def rate(number):
        return 0.05 * 0.9 ** (number // 10)

    def step(batch):
        optimizer.param_groups[0]["lr"] = rate(state["step"] // 10)
        state["step"] += 1
        return train(model, optimizer, batch)

    return Loop(step, model, optimizer, batches, lambda: {**state, "remembered": rate.cache_info().currsize})


@loop(planned=True)
def remembered_function_that_is_pure() -> Loop:
    model, optimizer, batches = task()

    @functools.lru_cache(maxsize=8)
    def weight(classes):
        return 1.0 / classes

    def step(batch):
        return update(optimizer, weight(4) * F.cross_entropy(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def counter_in_a_tensor() -> Loop:
    model, optimizer, batches = task()
    done = torch.zeros(())

    def step(batch):
        done.add_(1)
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) / (1 + done / 100))

    return Loop(step, model, optimizer, batches, lambda: {"done": done})


@loop()
def counter_in_an_array() -> Loop:
    model, optimizer, batches = task()
    classes = np.zeros(4)

    def step(batch):
        x, y = batch
        classes[:] = 0.9 * classes + np.bincount(y.numpy(), minlength=4)
        weight = torch.from_numpy(1 / (1 + classes)).float()
        return update(optimizer, F.cross_entropy(model(x), y, weight=weight))

    return Loop(step, model, optimizer, batches, lambda: {"classes": classes})


@loop(planned=True)
def counter_in_a_buffer_elsewhere() -> Loop:
    """A module that the schedule is not told of has a buffer that the step writes."""
    model, optimizer, batches = task()
    scale = nn.BatchNorm1d(8, affine=False)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(scale(batch[0])), batch[1]))

    return Loop(step, model, optimizer, batches, scale.state_dict)


@loop(planned=True)
def counter_whose_type_is_asked() -> Loop:
    model, optimizer, batches = task()
    state = {"step": 0, "odd": 0}

    def step(batch):
        state["step"] += 1
        if type(state["step"]) is not int:
            state["odd"] += 1
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) * 0.99 ** state["step"])

    return Loop(step, model, optimizer, batches, lambda: state)
