"""Loops that draw numbers with Python and numpy, and that fetch their batch themselves."""

from __future__ import annotations

import random
from collections import deque

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
def flipped_at_random(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y = batch
        if random.random() < 0.5:
            x = x.flip(1)
        return update(optimizer, F.cross_entropy(model(x), y))

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
def scaled_by_a_generator_of_its_own(model, optimizer, batches) -> Loop:
    own = random.Random(5)

    def step(batch):
        factor = own.uniform(0.8, 1.2)
        loss = update(optimizer, F.cross_entropy(model(batch[0] * factor), batch[1]))
        print(f"{factor:.3f} {loss.item():.3f}")
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"own": own})


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


@loop(planned=True)
def scaled_at_random(model, optimizer, batches) -> Loop:
    n = [0]

    def step(batch):
        x, y = batch
        x = x * random.uniform(0.8, 1.2) + random.gauss(0, 0.1)
        loss = F.cross_entropy(model(x), y)
        update(optimizer, loss)
        n[0] += 1
        print(n[0], loss.item())

    return Loop(step, model, optimizer, batches, lambda: {"n": n})


@loop(planned=True)
def noise_by_a_generator(model, optimizer, batches) -> Loop:
    rng = np.random.default_rng(5)

    def step(batch):
        x, y = batch
        noise = torch.from_numpy(rng.normal(size=x.shape)).float()
        return update(optimizer, F.cross_entropy(model(x + 0.1 * noise), y))

    return Loop(step, model, optimizer, batches, lambda: {"rng": rng})


@loop(planned=True)
def batch_from_an_iterator(model, optimizer, batches) -> Loop:
    source = iter(batches * 8)

    def step(_):
        images, labels = next(source)
        return update(optimizer, F.cross_entropy(model(images), labels))

    return Loop(step, model, optimizer, [0])


@loop(planned=True)
def replay_buffer(model, optimizer, batches) -> Loop:
    """As deep Q-learning: a batch of past transitions, the exploration rate decays."""
    target = mlp(8, 6, 4)
    memory = deque([(x[i].clone(), y[i].clone()) for x, y in batches for i in range(len(y))], maxlen=50)
    state = {"epsilon": 1.0, "steps": 0}

    def step(_):
        transitions = random.sample(memory, 6)
        states = torch.stack([s for s, _ in transitions])
        actions = torch.stack([a for _, a in transitions])
        values = model(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = 0.9 * target(states).max(1).values
        loss = F.smooth_l1_loss(values, wanted)
        update(optimizer, loss)
        state["steps"] += 1
        state["epsilon"] = max(0.1, state["epsilon"] * 0.99)
        if state["steps"] % 20 == 0:
            target.load_state_dict(model.state_dict())
        return loss.item()

    return Loop(step, [model, target], optimizer, [0], lambda: state)


@loop(planned=True)
def drawn_by_a_function_between_ops(model, optimizer, batches) -> Loop:

    def mixed(x, y):
        lam = np.random.beta(1.0, 1.0)  # noqa: NPY002
        index = torch.randperm(len(x))
        return lam * x + (1 - lam) * x[index], y, y[index], lam

    def step(batch):
        x, a, b, lam = mixed(*batch)
        out = model(x)
        return update(optimizer, lam * F.cross_entropy(out, a) + (1 - lam) * F.cross_entropy(out, b))

    return Loop(step, model, optimizer, batches)
