"""Steps that draw random numbers or fetch their own batches."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.bookkeeping.job import step


@step
def mixup(job):
    def train(batch):
        x, y = batch
        lam = np.random.beta(0.4, 0.4)  # noqa: NPY002
        order = torch.randperm(len(x))
        out = job.model(lam * x + (1 - lam) * x[order])
        loss = lam * F.cross_entropy(out, y) + (1 - lam) * F.cross_entropy(out, y[order])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def noise_of_numpy(job):
    rng = np.random.default_rng(3)
    job.state["rng"] = lambda: rng.bit_generator.state["state"]["state"]

    def train(batch):
        x, y = batch
        noise = torch.from_numpy(rng.normal(0, 0.1, x.shape)).float()
        return job.train(x + noise, y)

    return train


@step
def flipped_at_random(job):
    def train(batch):
        x, y = batch
        if random.random() < 0.5:
            x = x.flip(1)
        return job.train(x, y)

    return train


@step
def cropped_at_random(job):
    def train(batch):
        x, y = batch
        i = random.randint(0, 3)
        x = F.pad(x, (2, 2))[:, i : i + 8]
        return job.train(x, y)

    return train


@step
def scaled_at_random(job):
    own = random.Random(5)
    job.state["own"] = lambda: hash(own.getstate())

    def train(batch):
        x, y = batch
        factor = own.uniform(0.8, 1.2)
        loss = F.cross_entropy(job.model(x * factor), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        print(f"{factor:.3f} {loss.item():.3f}")
        return loss

    return train


@step
def label_smoothing_at_random(job):
    def train(batch):
        x, y = batch
        smoothing = random.choice([0.0, 0.1])
        loss = F.cross_entropy(job.model(x), y, label_smoothing=smoothing)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss.item()

    return train


@step
def mask_of_numpy(job):
    def train(batch):
        x, y = batch
        mask = torch.as_tensor(np.random.rand(*x.shape) > 0.2)  # noqa: NPY002
        loss = F.cross_entropy(job.model(x * mask), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def fetched_inside(job):
    data = itertools.cycle(job.batches)

    def train(_):
        x, y = next(data)
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def fetched_until_it_ends(job):
    """Raises StopIteration from call 51 on."""
    data = iter([job.batches[n % 10] for n in range(50)])
    job.state["n"] = n = [0]

    def train(_):
        batch = next(data)
        n[0] += 1
        loss = job.train(*batch)
        print(n[0], f"{loss.item():.3f}")
        return loss

    return train


@step
def fetched_again_at_the_end(job):
    data = iter(job.batches)
    job.state["epoch"] = epoch = {"n": 0}

    def train(_):
        nonlocal data
        try:
            x, y = next(data)
        except StopIteration:
            epoch["n"] += 1
            data = iter(job.batches)
            x, y = next(data)
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss.item()

    return train


@step
def rows_drawn_from_a_buffer(job):
    buffer = [(torch.randn(8), n % 4) for n in range(30)]

    def train(_):
        rows = random.sample(buffer, 6)
        x = torch.stack([row for row, _ in rows])
        y = torch.tensor([label for _, label in rows])
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def layer_dropped_at_random(job):
    """As in stochastic depth: the draw is inside the model."""

    class Stochastic(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            x = self.first(x).relu()
            if random.random() < 0.8:
                x = x + self.middle(x).relu()
            return self.last(x)

    job.model = Stochastic()
    job.__post_init__()
    return lambda batch: job.train(*batch)
