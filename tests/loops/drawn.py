"""Loops that draw numbers with Python and numpy, and that fetch their batch themselves."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F

from loops.loop import Loop, classifier, loop, mlp, train, update


@loop(planned=True)
def mixup_by_numpy(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        lam = np.random.beta(0.4, 0.4)  # noqa: NPY002
        index = torch.randperm(x.size(0))
        out = model(lam * x + (1 - lam) * x[index])
        return update(optimizer, lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[index]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def order_by_numpy(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        order = torch.as_tensor(np.random.permutation(len(x)))  # noqa: NPY002
        return update(optimizer, F.cross_entropy(model(x[order]), y[order]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def cropped_at_random(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        left = random.randint(0, 1)
        x = F.pad(x, (left, 2 - left))[:, 1:9]
        return update(optimizer, F.cross_entropy(model(x), y))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def iterator_that_ends(model, optimizer, batches) -> Loop:
    source = iter(batches * 4)

    def step(_):
        batch = next(source)
        return train(model, optimizer, batch)

    return Loop(step, model, optimizer, [0])


@loop(planned=True)
def iterator_begun_again(model, optimizer, batches) -> Loop:
    source, epoch = iter(batches), 0

    def step(_):
        nonlocal source, epoch
        try:
            x, y = next(source)
        except StopIteration:
            epoch += 1
            source = iter(batches)
            x, y = next(source)
        loss = F.cross_entropy(model(x), y)
        update(optimizer, loss)
        print(epoch, loss.item())

    return Loop(step, model, optimizer, [0], lambda: {"epoch": epoch})


@loop(planned=True)
def generator_of_batches(model, optimizer, batches) -> Loop:
    def endless():
        while True:
            random.shuffle(batches)
            yield from batches

    source = endless()

    def step(_):
        batch = next(source)
        optimizer.zero_grad()
        loss = classifier(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, [0])


@loop(planned=True)
def smoothing_chosen_at_random(model, optimizer, batches) -> Loop:
    def step(batch):
        smoothing = random.choice([0.0, 0.1])
        loss = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing)
        update(optimizer, loss)
        print(f"{smoothing}: {loss.item():.4f}")

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def rows_of_a_memory_in_numpy() -> Loop:
    """A replay memory of arrays, which numpy itself indexes by what was drawn."""
    model = mlp(8, 12, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    seen, wanted = (np.random.randn(40, width).astype(np.float32) for width in (8, 1))  # noqa: NPY002

    def step(batch):
        rows = np.random.randint(0, 40, size=6)  # noqa: NPY002
        x, y = (torch.as_tensor(each[rows]) for each in (seen, wanted))
        loss = F.mse_loss(model(x), y)
        update(optimizer, loss)
        return loss.item()

    return Loop(step, model, optimizer, [None])


@loop(planned=True)
def mixup_by_random(model, optimizer, batches) -> Loop:
    alpha = 0.2

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        lam = random.betavariate(alpha, alpha) if alpha > 0 else 1.0
        mixed = lam * x + (1 - lam) * x.flip(0)
        loss = lam * F.cross_entropy(model(mixed), y) + (1 - lam) * F.cross_entropy(model(mixed), y.flip(0))
        loss.backward()
        optimizer.step()
        return loss.item()

    return Loop(step, model, optimizer, batches)
