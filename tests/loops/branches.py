"""Loops that branch on what they compute: checks for NaN, large norms, distributions that look at values."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence

from loops.loop import CHANGE, Loop, labelled, loop, mlp, task, train, update

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


@loop(planned=True)
def step_of_an_optimizer_that_is_left_out(model, optimizer, batches) -> Loop:
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
def output_that_is_asserted(model, optimizer, batches) -> Loop:
    def step(batch):
        output = model(batch[0])
        assert torch.isfinite(output).all(), "an output is not finite"
        assert not torch.allclose(output, torch.zeros_like(output))
        return update(optimizer, F.cross_entropy(output, batch[1]))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def branch_that_changes_once(model, optimizer, batches) -> Loop:
    """A loss above a bound is halved. The bound moves, so that the other branch is taken from then on."""
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
def policy_gradient_by_distributions(model, optimizer, batches) -> Loop:
    def step(batch):
        policy = Categorical(logits=model(batch[0]))
        action = policy.sample()
        reward = (action == batch[1]).float()
        loss = -(policy.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * policy.entropy().mean()
        update(optimizer, loss)
        return reward.mean().item()

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def gradients_accumulated_unless_not_finite(model, optimizer, batches) -> Loop:
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
def value_that_is_written_before_it_is_asked(model, optimizer, batches) -> Loop:
    """The number was read before the write, and the branch is on that."""

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


@loop(planned=True)
def a_weight_that_is_asked_after_the_update(model, optimizer, batches) -> Loop:
    """The model begins anew, without the optimizer's state, where an update has made a weight that is no number."""
    begun = {"anew": 0}

    def step(batch):
        loss = train(model, optimizer, batch)
        if not torch.isfinite(model[0].weight).all():
            begun["anew"] += 1
            with torch.no_grad():
                for p in model.parameters():
                    p.fill_(0.1)
            optimizer.state.clear()
        return loss

    return Loop(step, model, optimizer, spoilt(batches), lambda: dict(begun))


@loop(planned=True)
def scaled_gradients_of_two_parts_are_accumulated() -> Loop:
    """The scaler looks at what has been added up, and at the second part after the update of the first."""
    model = mlp()
    parts = [torch.optim.Adam(model[0].parameters(), lr=0.01), torch.optim.SGD(model[2].parameters(), lr=0.05)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)
    batches = spoilt(labelled())
    seen = {"batches": 0}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1]) / 3
        scaler.scale(loss).backward()
        seen["batches"] += 1
        if seen["batches"] % 3 == 0:
            for optimizer in parts:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in parts:
                optimizer.zero_grad()
        return loss

    return Loop(step, model, parts, batches, lambda: {**seen, **scaler.state_dict()})


@loop(planned=True)
def a_skipped_step_before_a_scheduler(model, optimizer, batches) -> Loop:
    """An early end stands between a step's ops, and Python after them."""
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    state = {"skipped": 0, "best": math.inf}

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if not torch.isfinite(loss):
            state["skipped"] += 1
            print("skipped")
            return None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state["best"] = min(state["best"], loss.item())
        print(f"{loss.item():.3f} at {scheduler.get_last_lr()[0]:.4f}")
        return loss.item()

    return Loop(step, model, optimizer, spoilt(batches), lambda: {**state, "at": scheduler.last_epoch})


@loop(planned=True)
def ends_early_in_a_loop_over_micro_batches(model, optimizer, batches) -> Loop:
    seen = []

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        for part in (slice(0, 3), slice(3, 6)):
            loss = F.cross_entropy(model(x[part]), y[part])
            if loss.isnan():
                return "spoilt", part.start
            (loss / 2).backward()
        optimizer.step()
        seen.append(round(loss.item(), 4))
        return loss.detach()

    return Loop(step, model, optimizer, spoilt(batches), lambda: {"seen": seen})


@loop(planned=True)
def small_batches_are_returned_at_once(model, optimizer, batches) -> Loop:
    """A branch on the batch: each way is a recording of its own."""
    counts = {"used": 0, "lines": 0}

    def step(batch):
        x, y = batch
        out = model(x)
        if (y == 3).all():
            return out.detach().sum()
        loss = update(optimizer, F.cross_entropy(out, y))
        counts["used"] += 1
        if counts["used"] % 7 == 0:
            print(f"{loss.item():.3f}")
            counts["lines"] += 1
        return loss

    def batch(n):
        x, y = batches[n % len(batches)]
        return x, torch.full_like(y, 3) if n % 5 == 0 else y

    return Loop(step, model, optimizer, batch, lambda: counts)


@loop()
def draws_after_what_may_end_the_step(model, optimizer, batches) -> Loop:
    """A draw that a skipped step does not make must not be made before it."""
    draw = random.Random(5)
    used = []

    def step(batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if not torch.isfinite(loss):
            return None
        scale = draw.random()
        optimizer.zero_grad()
        (loss * scale).backward()
        optimizer.step()
        used.append(scale)
        return loss.item()

    return Loop(step, model, optimizer, spoilt(batches), lambda: {"draw": draw, "used": used})
