"""Loops whose step advances a scheduler of the learning rate."""

from __future__ import annotations

import copy
import functools

import numpy as np
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

from loops.loop import CASES, Case, Loop, classifier, loop, task, train, update


def scheduled(make, step_of=lambda scheduler, loss: scheduler.step()) -> Loop:
    model, optimizer, batches = task()
    scheduler = make(optimizer)

    def step(batch):
        loss = train(model, optimizer, batch)
        step_of(scheduler, loss)
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"lr": scheduler.get_last_lr(), "epoch": scheduler.last_epoch})


def warm_up_then_cosine(optimizer):
    warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 50)], [10])


for _name, _make in {
    "step_lr": lambda o: lr_scheduler.StepLR(o, 10, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 60),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "warm_up_then_cosine": warm_up_then_cosine,
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7),
}.items():
    CASES[_name] = Case(_name, functools.partial(scheduled, _make), planned=True)


@loop(planned=True)
def plateau() -> Loop:
    return scheduled(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=3, factor=0.7), lambda s, loss: s.step(loss.item())
    )


@loop(planned=True)
def stepped_where_gradients_have_been_added_up(model, optimizer, batches) -> Loop:
    scheduler, seen = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=60), {"batches": 0, "others": 0}

    def step(batch):
        loss = classifier(model, batch) / 2
        loss.backward()
        seen["batches"] += 1
        if seen["batches"] % 2 == 0:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            print(f"{scheduler.get_last_lr()[0]:.4f}")
        else:
            seen["others"] += 1
        return loss.item()

    return Loop(step, model, optimizer, batches, lambda: {**seen, "lr": scheduler.get_last_lr()})


@loop(planned=True)
def stepped_behind_a_scaler(model, optimizer, batches) -> Loop:
    """The branch ends the step there in every tenth batch."""
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 40)
    scaler, seen = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5), {"batches": 0}

    def step(batch):
        seen["batches"] += 1
        loss = classifier(model, batch)
        scaler.scale(loss).backward()
        if seen["batches"] % 2 == 0:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            scheduler.step()
            if seen["batches"] % 10 == 0:
                print("every tenth")
                return None
        return loss.item()

    return Loop(step, model, optimizer, batches, lambda: {**seen, **scaler.state_dict(), "lr": scheduler.get_last_lr()})


@loop(planned=True)
def rates_and_momenta_looked_up_by_the_step(model, optimizer, batches) -> Loop:
    """As self-distillation is trained: each schedule is an array with an element for each step."""
    teacher = copy.deepcopy(model)
    rates, momenta = np.linspace(0.1, 0.001, 300), np.linspace(0.9, 1.0, 300).tolist()
    calls = [0]

    class Distillation(nn.Module):
        temperatures = tuple(0.05 + 0.001 * n for n in range(300))

        def forward(self, student, taught, n):
            target = (taught / self.temperatures[min(n, 40)]).softmax(1)
            return -(target * student.log_softmax(1)).sum(1).mean()

    criterion = Distillation()

    def step(batch):
        n = calls[0]
        optimizer.param_groups[0]["lr"] = rates[n]
        loss = criterion(model(batch[0]), teacher(batch[0]).detach(), n)
        update(optimizer, loss)
        with torch.no_grad():
            m = momenta[n]
            for slow, quick in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(m).add_((1 - m) * quick)
        calls[0] += 1
        return loss

    return Loop(step, [model, teacher], optimizer, batches, lambda: {"calls": calls})


@loop(planned=True)
def table_that_is_written_and_looked_up(model, optimizer, batches) -> Loop:
    """The position that is read is, now and then, the one that was written."""
    weights, calls = [1.0] * 5, [0]

    def step(batch):
        n = calls[0]
        weights[3] = 0.5 + n / 100
        loss = weights[n % 5] * classifier(model, batch)
        update(optimizer, loss)
        calls[0] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"weights": weights})


@loop()
def table_of_a_few_elements_that_ends(model, optimizer, batches) -> Loop:
    weights, calls = [1.0 + n / 100 for n in range(45)], [0]

    def step(batch):
        calls[0] += 1
        loss = weights[calls[0]] * classifier(model, batch)
        update(optimizer, loss)
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"calls": calls})


@loop(planned=True)
def rates_in_tensors(model, batches) -> Loop:
    """Adam divides its rate by a correction before it hands it to an op, which takes the number."""
    first, second = model[0].parameters(), model[2].parameters()
    rates = torch.tensor(0.02), torch.tensor(0.1, dtype=torch.float64)
    adam = torch.optim.AdamW(first, lr=rates[0], amsgrad=True)
    descent = torch.optim.SGD(second, lr=rates[1], momentum=0.9, nesterov=True)
    scheduler, seen = lr_scheduler.LambdaLR(adam, lambda n: 0.98**n), []

    def step(batch):
        loss = classifier(model, batch)
        model.zero_grad()
        loss.backward()
        adam.step()
        descent.step()
        scheduler.step()
        for group in descent.param_groups:
            group["lr"].mul_(0.99)
        seen.append((rates[0].item(), (1 - rates[1] / 2).item()))
        return loss

    return Loop(step, model, [adam, descent], batches, lambda: {"rates": rates, "seen": seen})
