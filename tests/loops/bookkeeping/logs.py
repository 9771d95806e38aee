"""Steps that print, log, write rows or measure time."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import sys
import time

import torch.nn.functional as F
from torch import nn

from loops.bookkeeping.job import Bar, Writer, step


@step
def printed_each_step(job):
    def train(batch):
        loss = job.train(*batch)
        print(f"loss: {loss.item():.4f}")
        return loss

    return train


@step
def printed_tensor(job):
    def train(batch):
        loss = job.train(*batch)
        print("loss", loss, loss.detach())
        return loss

    return train


@step
def printed_every_tenth(job):
    job.state["count"] = count = {"n": 0, "running": 0.0}

    def train(batch):
        loss = job.train(*batch)
        count["n"] += 1
        count["running"] += loss.item()
        if count["n"] % 10 == 0:
            print(f"[{count['n']:5d}] loss: {count['running'] / 10:.3f}")
            count["running"] = 0.0
        return loss

    return train


@step
def printed_before_the_update(job):
    def train(batch):
        x, y = batch
        loss = F.cross_entropy(job.model(x), y)
        print(f"loss {loss.item():.5f}")
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def printed_every_fifth_before_the_update(job):
    job.state["count"] = count = {"n": 0}

    def train(batch):
        x, y = batch
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        if count["n"] % 5 == 0:
            print("batch", count["n"], "loss", round(loss.item(), 4))
        job.optimizer.step()
        count["n"] += 1
        return loss

    return train


@step
def logged(job):
    log, text = logging.getLogger("loops.bookkeeping"), io.StringIO()
    handler = logging.StreamHandler(text)
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    job.state["text"] = text.getvalue

    def train(batch):
        loss = job.train(*batch)
        log.info("loss %.4f lr %g", loss.item(), job.optimizer.param_groups[0]["lr"])
        log.debug("not shown %s", loss)
        return loss.item()

    return train


@step
def summary_writer(job):
    writer = Writer()
    job.state.update(rows=writer.rows, n=[0])
    n = job.state["n"]

    def train(batch):
        loss = job.train(*batch)
        writer.add_scalar("train/loss", loss.item(), n[0])
        writer.add_scalar("train/lr", job.optimizer.param_groups[0]["lr"], n[0])
        n[0] += 1
        return loss

    return train


@step
def wandb_like(job):
    run = Writer()
    job.state["rows"] = run.rows

    def train(batch):
        x, y = batch
        out = job.model(x)
        loss = F.cross_entropy(out, y)
        job.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        accuracy = (out.argmax(1) == y).float().mean()
        run.log({"loss": loss.item(), "norm": norm.item(), "accuracy": accuracy.item()})
        return {"loss": loss.item()}

    return train


@step
def progress_bar(job):
    bar = Bar()
    job.state.update(bar=lambda: vars(bar) | {"text": bar.text.getvalue()})

    def train(batch):
        loss = job.train(*batch)
        bar.set_postfix(loss=loss.item(), lr=job.optimizer.param_groups[0]["lr"])
        bar.update()
        return loss

    return train


@step
def rows_of_csv(job):
    file = io.StringIO()
    writer = csv.writer(file)
    job.state.update(text=file.getvalue)

    def train(batch):
        loss = job.train(*batch)
        writer.writerow(["train", f"{loss.item():.6f}", len(batch[0])])
        return loss

    return train


@step
def lines_of_json(job):
    file = io.StringIO()
    job.state.update(text=file.getvalue, n=[0])

    def train(batch):
        loss = job.train(*batch)
        job.state["n"][0] += 1
        file.write(json.dumps({"step": job.state["n"][0], "loss": loss.item()}) + "\n")
        file.flush()
        return loss

    return train


@step
def written_to_stderr(job):
    def train(batch):
        loss = job.train(*batch)
        if math.isnan(loss.item()):
            sys.stderr.write("the loss is nan\n")
        return loss

    return train


@step
def time_per_step(job):
    job.state["n"] = n = [0]
    times = []

    def train(batch):
        start = time.perf_counter()
        loss = job.train(*batch)
        times.append(len(batch[0]) / (time.perf_counter() - start))
        n[0] += times[-1] > 0
        return loss

    return train


@step
def time_since_the_last_print(job):
    job.state["n"] = n = [0]
    last = time.time()

    def train(batch):
        nonlocal last
        loss = job.train(*batch)
        n[0] += 1
        if n[0] % 10 == 0:
            now = time.time()
            print(f"{n[0]} steps, loss {loss.item():.3f}", now >= last)
            last = now
        return loss

    return train
