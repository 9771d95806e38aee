"""Loops whose step counts: in a closure, a global, a default, an iterator, a tensor or an array."""

from __future__ import annotations

import contextvars
import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.loop import Loop, labelled, loop, mlp, train, update

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
def rates_of_dropout_norms_and_smoothing_that_fall() -> Loop:
    """They reach C++, which computes other numbers from some. Most are attributes that the step sets."""
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = {"steps": 0}

    def step(batch):
        seen["steps"] += 1
        model[2].p = max(0.1, 0.5 - 0.001 * seen["steps"])
        model[1].momentum, model[1].eps = 0.5 * 0.99 ** seen["steps"], 0.1 * 0.98 ** seen["steps"]
        loss = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1 * 0.99 ** seen["steps"])
        return update(optimizer, loss)

    return Loop(step, model, optimizer, labelled(), lambda: {**seen, "rate": model[2].p})


@loop(planned=True)
def a_rate_by_numpy() -> Loop:
    """A cosine, whose values are numpy's own floats, with a warm-up."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = {"steps": 0, "rates": []}

    def rate(step):
        warmed = min(1.0, (step + 1) / 10) * np.power(0.999, step)
        return warmed**1.1 * 0.005 * (1 + np.cos(np.pi * step / 300))

    def step(batch):
        for group in optimizer.param_groups:
            group["lr"] = rate(seen["steps"])
        seen["steps"] += 1
        return train(model, optimizer, batch)

    def after(n, _):
        seen["rates"].append((type(optimizer.param_groups[0]["lr"]).__name__, optimizer.param_groups[0]["lr"]))

    return Loop(step, model, optimizer, labelled(), lambda: dict(seen), after=after)


@loop(planned=True)
def accumulation_by_batch_index(model, optimizer, batches) -> Loop:
    """The place in the epoch travels in the batch, as `enumerate` gives it."""

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
def counter_and_a_remembered_rate(model, optimizer, batches) -> Loop:
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
def counter_in_a_tensor(model, optimizer, batches) -> Loop:
    done = torch.zeros(())

    def step(batch):
        done.add_(1)
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) / (1 + done / 100))

    return Loop(step, model, optimizer, batches, lambda: {"done": done})


@loop(planned=True)
def counter_in_a_buffer_elsewhere(model, optimizer, batches) -> Loop:
    """A module that the schedule does not get has a buffer that the step writes."""
    scale = nn.BatchNorm1d(8, affine=False)

    def step(batch):
        return update(optimizer, F.cross_entropy(model(scale(batch[0])), batch[1]))

    return Loop(step, model, optimizer, batches, scale.state_dict)


@loop(planned=True)
def counter_whose_type_is_asked(model, optimizer, batches) -> Loop:
    state = {"step": 0, "odd": 0}

    def step(batch):
        state["step"] += 1
        if type(state["step"]) is not int:
            state["odd"] += 1
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]) * 0.99 ** state["step"])

    return Loop(step, model, optimizer, batches, lambda: state)


@loop(planned=True)
def numbers_read_before_their_tensors_are_written(model, optimizer, batches) -> Loop:
    total = {"raw": 0.0, "hits": 0}
    hits = torch.zeros((), dtype=torch.long)

    def step(batch):
        with torch.inference_mode():
            spread = model(batch[0]).std().item()
        optimizer.zero_grad()
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        total["raw"] += loss.item() * spread
        loss /= 2
        loss.backward()
        steepest = model[2].bias.grad.max().item()
        first = model[2].bias.grad[0].item()
        for p in model.parameters():
            p.grad.clamp_(-0.1, 0.1)
        optimizer.step()
        hits.add_((out.argmax(1) == batch[1]).sum())
        total["hits"] += hits.item()
        hits.zero_()
        return loss.item(), steepest, first

    return Loop(step, model, optimizer, batches, lambda: total)


class _Counted:
    ended = 0

    def __del__(self):
        _Counted.ended += 1


@loop(planned=True)
def ends_of_objects_are_counted(model, optimizer, batches) -> Loop:
    _Counted.ended = 0

    def step(batch):
        kept = _Counted()  # noqa: F841  # it ends with the step
        return update(optimizer, F.cross_entropy(model(batch[0]), batch[1]))

    return Loop(step, model, optimizer, batches, lambda: {"ended": _Counted.ended})


class _Position:
    """Python takes plain numbers from its methods, whose number changes after some steps."""

    def __init__(self):
        self.number = 1

    def __float__(self):
        return self.number / 2

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self is other


@loop(planned=True)
def numbers_of_objects_that_convert(model, optimizer, batches) -> Loop:
    position = _Position()

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) * float(position)
        return update(optimizer, loss * {position: 0.9}[position])

    def after(n, _):
        position.number += n in (30, 60, 61)

    return Loop(step, model, optimizer, batches, lambda: {"number": position.number}, after)


@loop(planned=True)
def norms_that_average_all_batches() -> Loop:
    """Without a momentum, a norm weights each batch by the number of batches that it has seen."""
    model = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12, momentum=None), nn.ReLU(), nn.Linear(12, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def after(n, _):
        if n % 40 == 39:
            model[1].reset_running_stats()

    return Loop(lambda batch: train(model, optimizer, batch), model, optimizer, labelled(), after=after)


class Cooled(torch.optim.Optimizer):
    """Counts epochs as numbers of Python's, and hands them to functions of Python's."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})
        self.epoch = 0

    def step(self):
        self.epoch += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-group["lr"] * (1 - float(self.epoch) / 500) ** 2)


@loop(planned=True)
def weight_that_ramps_up_by_numpy(model, batches) -> Loop:
    """As in mean teachers, with a buffer that is given the size that it has."""
    optimizer, seen = Cooled(model.parameters()), {"steps": 0}
    images = torch.zeros(6, 8)

    def ramp(current, length):
        phase = 1.0 - np.clip(current, 0.0, length) / length
        return float(np.exp(-5.0 * phase * phase))

    def step(batch):
        images.resize_(batch[0].shape).copy_(batch[0])
        loss = F.cross_entropy(model(images), batch[1]) + ramp(seen["steps"] / 10, 8) * model(images).square().mean()
        seen["steps"] += 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, batches, lambda: {**seen, "epoch": optimizer.epoch, "images": images})


@loop(planned=True)
def divisions_that_raise_for_a_while(model, optimizer, batches) -> Loop:
    """An error that is caught of numbers which the step reads is a branch, too."""
    state = {"n": 0}

    def share(one, other):
        try:
            return one / other
        except ZeroDivisionError:
            return 0.0

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss = update(optimizer, loss * (1 + share(1, state["n"] % 5) + share(2, max(state["n"] - 30, 0))))
        state["n"] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: dict(state))
