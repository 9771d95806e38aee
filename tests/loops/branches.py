"""Loops that branch on what they compute: checks for NaN, large norms, distributions that look at values."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from loops.loop import CHANGE, Loop, loop, mlp, task, update

# Steps whose batch holds a NaN: in a search, after the verdict, two in a row.
BAD = (40, CHANGE + 10, CHANGE + 11, CHANGE + 30)


def spoilt(batches, numbers=BAD):
    """The batches in turns, with a NaN in some of them."""

    def batch(n):
        x, y = batches[n % len(batches)]
        if n not in numbers:
            return x, y
        x = x.clone()
        x[0, 0] = math.nan
        return x, y

    return batch


def regular() -> nn.Sequential:
    """A classifier that draws numbers and writes buffers in its forward."""
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 4))


@loop(planned=True)
def loss_that_is_not_finite_is_skipped() -> Loop:
    model, optimizer, batches = task()
    state = {"skipped": 0}

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if not torch.isfinite(loss):
            state["skipped"] += 1
            return loss.detach()
        loss.backward()
        optimizer.step()
        return loss

    return Loop(step, model, optimizer, spoilt(batches), lambda: state)


@loop(planned=True)
def skipped_after_draws_and_statistics() -> Loop:
    """The forward draws and writes buffers before the check, and the gradients of the step before are still there."""
    _, _, batches = task()
    model = regular()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = {"skipped": 0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if torch.isnan(loss).any() or torch.isinf(loss):
            state["skipped"] += 1
            return loss.detach()
        return update(optimizer, loss)

    return Loop(step, model, optimizer, spoilt(batches), lambda: state)


@loop(planned=True)
def number_of_the_loss_is_asked_for_nan() -> Loop:
    model, optimizer, batches = task()
    state = {"bad": 0, "sum": 0.0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        value = loss.item()
        if not math.isfinite(value) or np.isnan(value) or value != value or abs(value) * 2 > 1e6:
            state["bad"] += 1
            return None
        update(optimizer, loss)
        state["sum"] += value
        return value

    return Loop(step, model, optimizer, spoilt(batches), lambda: state)


@loop(planned=True)
def step_of_an_optimizer_that_is_left_out() -> Loop:
    model, optimizer, batches = task()
    state = {"left_out": 0}

    def step(batch):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isfinite(norm) and norm < 1e4:
            optimizer.step()
        else:
            state["left_out"] += 1
        return loss

    return Loop(step, model, optimizer, spoilt(batches), lambda: state)


@loop(planned=True)
def output_that_is_asserted() -> Loop:
    model, optimizer, batches = task()

    def step(batch):
        output = model(batch[0])
        assert torch.isfinite(output).all(), "an output is not finite"
        assert not torch.allclose(output, torch.zeros_like(output))
        return update(optimizer, F.cross_entropy(output, batch[1]))

    return Loop(step, model, optimizer, batches)


@loop()
def output_that_raises_in_some_steps() -> Loop:
    """The user's error is raised where eager raises it, and leaves what eager leaves."""
    _, _, batches = task()
    model = regular()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch):
        output = model(batch[0])
        if torch.isnan(output).any():
            raise FloatingPointError("an output is NaN")
        return update(optimizer, F.cross_entropy(output, batch[1]))

    return Loop(step, model, optimizer, spoilt(batches, (150,)))


@loop(planned=True)
def branch_that_changes_once() -> Loop:
    """A loss above a bound is halved. The bound moves, so that the other branch is taken from then on."""
    model, optimizer, batches = task()
    scale = torch.ones(())

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) * scale
        if loss > 5:
            loss = loss * 0.5
        return update(optimizer, loss)

    def after(n, _):
        if n == 60:
            scale.fill_(50.0)

    return Loop(step, model, optimizer, batches, lambda: {"scale": scale}, after)


@loop()
def branch_that_changes_all_the_time() -> Loop:
    model, optimizer, batches = task()

    def step(batch):
        output = model(batch[0])
        loss = F.cross_entropy(output, batch[1])
        if output.detach().mean() * 1e4 % 2 > 1:
            loss = loss * 0.5
        return update(optimizer, loss)

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def variational_autoencoder_by_distributions() -> Loop:
    model = nn.ModuleDict({"encoder": mlp(8, 12, 4), "decoder": mlp(2, 12, 8)})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    _, _, batches = task()

    def step(batch):
        mean, scale = model["encoder"](batch[0]).chunk(2, 1)
        posterior = Normal(mean, scale.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        loss = F.mse_loss(model["decoder"](posterior.rsample()), batch[0])
        return update(optimizer, loss + 0.1 * kl_divergence(posterior, prior).mean())

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def policy_gradient_by_distributions() -> Loop:
    model, optimizer, batches = task()

    def step(batch):
        policy = Categorical(logits=model(batch[0]))
        action = policy.sample()
        reward = (action == batch[1]).float()
        loss = -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
        update(optimizer, loss)
        return reward.mean().item()

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def gradients_accumulated_unless_not_finite() -> Loop:
    model, optimizer, batches = task()
    state = {"count": 0, "bad": 0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) / 2
        if not torch.isfinite(loss):
            state["bad"] += 1
            return None
        loss.backward()
        state["count"] += 1
        if state["count"] % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Loop(step, model, optimizer, spoilt(batches, (CHANGE + 10,)), lambda: state)


@loop()
def value_that_is_written_before_it_is_asked() -> Loop:
    """The number was read before the write, and the branch is on that."""
    model, optimizer, batches = task()

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        kept = loss.detach().clone()
        value = kept.item()
        kept.mul_(100)
        if value > 50:
            return kept
        update(optimizer, loss)
        return value

    return Loop(step, model, optimizer, batches)
