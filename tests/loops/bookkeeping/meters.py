"""Steps with meters, counts and averages, and steps that skip updates."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from loops.bookkeeping.job import Meter, step

seen_in_all = 0
best_of_all = float("inf")


@step
def meter_with_a_window(job):
    meter = Meter()
    job.state["meter"] = lambda: (meter.sum, meter.count, list(meter.values), meter.median)

    def train(batch):
        loss = job.train(*batch)
        meter.update(loss.item(), batch[0].size(0))
        return meter.median

    return train


@step
def meter_before_the_update(job):
    job.state["meter"] = meter = {"sum": 0.0, "n": 0}

    def train(batch):
        x, y = batch
        out = job.model(x)
        loss = F.nll_loss(F.log_softmax(out, 1), y)
        meter["sum"] += loss.item() * len(x)
        meter["n"] += len(x)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return meter["sum"] / meter["n"]

    return train


@step
def last_losses_in_a_deque(job):
    job.state["last"] = last = deque(maxlen=10)

    def train(batch):
        loss = job.train(*batch)
        last.append(loss.item())
        return sum(last) / len(last)

    return train


@step
def history_in_a_dict(job):
    job.state["history"] = history = defaultdict(list)

    def train(batch):
        loss = job.train(*batch)
        history["loss"].append(loss.item())
        history["lr"].append(job.optimizer.param_groups[0]["lr"])
        return loss

    return train


@step
def counted_classes(job):
    job.state["classes"] = classes = Counter()

    def train(batch):
        loss = job.train(*batch)
        classes.update(batch[1].tolist())
        return loss

    return train


@step
def confusion_matrix(job):
    job.state["matrix"] = matrix = np.zeros((4, 4), int)

    def train(batch):
        x, y = batch
        out = job.model(x)
        loss = F.cross_entropy(out, y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        np.add.at(matrix, (y.numpy(), out.argmax(1).numpy()), 1)
        return loss

    return train


@step
def best_so_far(job):
    job.state["best"] = best = {"loss": float("inf"), "at": -1, "n": 0}

    def train(batch):
        loss = job.train(*batch)
        best["n"] += 1
        if loss.item() < best["loss"]:
            best.update(loss=loss.item(), at=best["n"])
        return loss

    return train


@step
def best_in_a_global(job):
    global best_of_all, seen_in_all
    best_of_all, seen_in_all = float("inf"), 0
    job.state["best"] = lambda: (best_of_all, seen_in_all)

    def train(batch):
        global best_of_all, seen_in_all
        loss = job.train(*batch)
        seen_in_all += len(batch[0])
        best_of_all = min(best_of_all, loss.item())
        return loss

    return train


@step
def best_weights_kept(job):
    job.state["best"] = best = {"loss": 9.0, "weights": None}

    def train(batch):
        loss = job.train(*batch)
        value = loss.item()
        if value < best["loss"]:
            best["loss"] = value
            best["weights"] = {k: v.clone() for k, v in job.model.state_dict().items()}
        return value

    return train


@step
def patience(job):
    job.state["stop"] = stop = {"best": 9.0, "bad": 0, "stopped": False}

    def train(batch):
        loss = job.train(*batch).item()
        stop["bad"] = 0 if loss < stop["best"] else stop["bad"] + 1
        stop["best"] = min(loss, stop["best"])
        stop["stopped"] = stop["bad"] > 8
        return loss, stop["stopped"]

    return train


@step
def perplexity(job):
    job.state["n"] = n = [0]

    def train(batch):
        loss = job.train(*batch)
        n[0] += 1
        return {"loss": loss.item(), "perplexity": math.exp(min(loss.item(), 20)), "step": n[0]}

    return train


@step
def stop_at_nan(job):
    def train(batch):
        x, y = batch
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        if not torch.isfinite(loss):
            raise FloatingPointError("the loss is not finite")
        return loss.item()

    return train


@step
def update_skipped_at_nan(job):
    def train(batch):
        x, y = batch
        loss = F.cross_entropy(job.model(x), y)
        if torch.isnan(loss):
            return None
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def update_skipped_at_a_large_norm(job):
    job.state["skipped"] = skipped = [0]

    def train(batch):
        x, y = batch
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        if norm.item() < 0.9:
            job.optimizer.step()
        else:
            skipped[0] += 1
        return loss

    return train


@step
def scaled_gradients(job):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)
    job.state["scale"] = lambda: scaler.state_dict()

    def train(batch):
        x, y = batch
        job.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(job.model(x), y)
        scaler.scale(loss).backward()
        scaler.step(job.optimizer)
        scaler.update()
        return loss.item()

    return train


@step
def accumulated_and_printed(job):
    job.state["n"] = n = [0]

    def train(batch):
        x, y = batch
        loss = F.cross_entropy(job.model(x), y) / 4
        loss.backward()
        n[0] += 1
        if n[0] % 4 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        if n[0] % 8 == 0:
            print(f"{n[0]}: {4 * loss.item():.4f}")
        return loss

    return train


@step
def average_of_weights(job):
    average = torch.optim.swa_utils.AveragedModel(job.model, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
    job.state["average"] = lambda: dict(average.state_dict())

    def train(batch):
        loss = job.train(*batch)
        average.update_parameters(job.model)
        print(f"{loss.item():.3f}")
        return loss

    return train
