"""Loops of which the middle alone is planned: values that cross its borders, and Python around it that raises."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F

from loops.loop import Loop, classifier, loop, train, update


@loop(planned=True)
def group_kept_in_a_variable(model, optimizer, batches) -> Loop:
    def step(batch):
        (group,) = list(optimizer.param_groups)
        loss = train(model, optimizer, batch)
        group["lr"] *= 0.99
        print(loss.item())

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def dict_kept_elsewhere(model, optimizer, batches) -> Loop:
    table = {}

    def step(batch):
        info = {"size": len(batch[0])}
        table["info"] = info
        loss = train(model, optimizer, batch)
        info["loss"] = loss.item()
        print(info)

    return Loop(step, model, optimizer, batches, lambda: table)


@loop(planned=True)
def count_read_before_it_is_raised(model, optimizer, batches) -> Loop:
    state = {"n": 0}

    def step(batch):
        n = state["n"]
        state["n"] += 1
        print("step", n)
        return update(optimizer, classifier(model, batch) * (1 + n / 100))

    return Loop(step, model, optimizer, batches, lambda: state)


@loop(planned=True)
def batch_kept_for_the_next_step(model, optimizer, batches) -> Loop:
    state = {"last": batches[0]}

    def step(batch):
        x, y = state["last"]
        state["last"] = batch
        print(len(x))
        return update(optimizer, classifier(model, (x, y)) + classifier(model, batch))

    return Loop(step, model, optimizer, batches, lambda: state)


@loop(planned=True)
def pair_and_list_written_under_another_name(model, optimizer, batches) -> Loop:
    pair, names = [1.0, 2.0], []

    def step(batch):
        found, (low, high) = names, pair
        one, other = pair
        count = len(names)
        pair[0] = high
        pair[1] = low
        found += [str(count)]
        optimizer.zero_grad()
        loss = classifier(model, batch) * (one / other + count / 100)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Loop(step, model, optimizer, batches, lambda: {"pair": pair, "names": names})


@loop(planned=True)
def method_that_counts_what_was_read(model, optimizer, batches) -> Loop:
    class Trainer:
        rate, count = 1.0, 0

        def begin(self):
            self.count += 1
            self.rate = 1 / self.count
            print("step", self.count)

        def step(self, batch):
            net, rate = model, self.rate
            count = self.count
            self.begin()
            return update(optimizer, classifier(net, batch) * (rate + count / 100))

    trainer = Trainer()
    return Loop(trainer.step, model, optimizer, batches, lambda: vars(trainer))


@loop(planned=True)
def raises_before_the_middle(model, optimizer, batches) -> Loop:
    weights = [1.0]

    def step(batch):
        weight = random.choice(weights)
        if weight != weight:
            raise ValueError("no weight")
        loss = train(model, optimizer, (batch[0] * weight, batch[1]))
        weights.append(float("nan") if len(weights) % 7 == 6 else loss.item())
        return loss.item()

    return Loop(step, model, optimizer, batches, lambda: {"weights": weights})


@loop(planned=True)
def another_branch_later(model, optimizer, batches) -> Loop:
    count = [0]

    def step(batch):
        x, y = batch
        if random.random() < 0.3:
            x = x.flip(0)
        if count[0] > 40:
            x = x * random.uniform(0.5, 1.5)
        loss = train(model, optimizer, (x, y))
        count[0] += 1
        print(loss.item())

    return Loop(step, model, optimizer, batches, lambda: {"count": count})


@loop(planned=True)
def changes_what_the_middle_reads(model, optimizer, batches) -> Loop:
    settings = {"scale": 1.0, "name": "a"}

    def step(batch):
        x, y = batch
        if settings["name"] == "b":
            x = -x
        loss = train(model, optimizer, (x * settings["scale"], y))
        settings["scale"] = 0.9 * settings["scale"] + 0.1 * (loss.item() > 1.3)
        settings["name"] = "b" if loss.item() > 1.5 else "a"
        print(settings)

    return Loop(step, model, optimizer, batches, lambda: settings)


@loop(planned=True)
def list_under_two_names(model, optimizer, batches) -> Loop:
    history = []

    def step(batch):
        both = []
        loss = train(model, optimizer, batch)
        both.append(loss.detach())
        same = both
        same.append(len(both))
        history.append(same)
        print(both)

    return Loop(step, model, optimizer, batches, lambda: {"history": history})


@loop(planned=True)
def weight_that_ramps_up_as_a_plain_float(model, optimizer, batches) -> Loop:
    """A mean teacher: numpy and `float` hide how the weight is computed, so that it is another number in each step."""
    teacher, seen = copy.deepcopy(model), {"steps": 0}

    def ramped(step, length):
        return float(np.exp(-5.0 * (1.0 - np.clip(step, 0.0, length) / length) ** 2))

    def step(batch):
        x, y = batch
        weight = ramped(seen["steps"], 50)
        output = model(x)
        with torch.no_grad():
            target = teacher(x).softmax(1)
        loss = F.cross_entropy(output, y) + weight * F.mse_loss(output.softmax(1), target)
        update(optimizer, loss)
        for own, mean in zip(model.parameters(), teacher.parameters(), strict=True):
            mean.data.mul_(0.9).add_(own.data, alpha=0.1)
        seen["steps"] += 1
        return loss.item()

    return Loop(step, [model, teacher], optimizer, batches, lambda: dict(seen))
