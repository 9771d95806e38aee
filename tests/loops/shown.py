"""Loops that show what they do: printed, logged, written to files, a progress bar."""

from __future__ import annotations

import csv
import io
import logging
import time

import torch
import torch.nn.functional as F

from loops.loop import Loop, loop, train, update


class Writer:
    """As tensorboard's SummaryWriter."""

    def __init__(self):
        self.rows, self.file = [], io.StringIO()

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, float(value), step))
        self.file.write(f"{tag} {value} {step}\n")

    def add_histogram(self, tag, values, step):
        self.rows.append((tag, torch.histc(values.detach(), 4).tolist(), step))

    def flush(self):
        self.file.flush()


@loop(planned=True)
def prints_the_tensor(model, optimizer, batches) -> Loop:
    def step(batch):
        loss = train(model, optimizer, batch)
        print("loss:", loss.detach())
        return loss

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def logs_by_logging(model, optimizer, batches) -> Loop:
    out = io.StringIO()
    log = logging.Logger("train", logging.INFO)
    log.addHandler(logging.StreamHandler(out))

    def step(batch):
        loss = train(model, optimizer, batch)
        log.info("loss %.5f", loss.item())
        log.debug("not shown %s", loss)
        return loss.item()

    return Loop(step, model, optimizer, batches, lambda: {"out": out.getvalue()})


@loop(planned=True)
def summary_writer(model, optimizer, batches) -> Loop:
    writer, state = Writer(), {"step": 0}

    def step(batch):
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        accuracy = (out.argmax(1) == batch[1]).float().mean()
        update(optimizer, loss)
        state["step"] += 1
        writer.add_scalar("train/loss", loss.item(), state["step"])
        writer.add_scalar("train/accuracy", accuracy, state["step"])
        writer.flush()
        return loss

    return Loop(
        step,
        model,
        optimizer,
        batches,
        lambda: {"rows": writer.rows, "file": writer.file.getvalue(), "s": state},
    )


@loop(planned=True)
def csv_rows(model, optimizer, batches) -> Loop:
    file = io.StringIO()
    table = csv.writer(file)
    epoch = 3

    def step(batch):
        loss = train(model, optimizer, batch)
        table.writerow([epoch, loss.item(), "train"])
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"file": file.getvalue()})


@loop(planned=True)
def throughput_by_the_clock(model, optimizer, batches) -> Loop:
    seen = {"images": 0, "slow": 0}

    def step(batch):
        start = time.perf_counter()
        images, labels = batch
        loss = F.cross_entropy(model(images), labels)
        update(optimizer, loss)
        elapsed = time.perf_counter() - start
        seen["images"] += images.size(0)
        if images.size(0) / max(elapsed, 1e-9) < 1e-3:
            seen["slow"] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: seen)


@loop(planned=True)
def a_writer_that_raises(model, optimizer, batches) -> Loop:
    rows, n = [], [0]

    def write(number, loss):
        if number % 13 == 0:
            raise OSError(f"no space left for row {number}")
        rows.append((number, loss))

    def step(batch):
        loss = train(model, optimizer, batch)
        n[0] += 1
        print("step", n[0])
        write(n[0], loss.item())
        print("written", n[0])
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"rows": rows, "n": n})


@loop(planned=True)
def prints_before_an_op_that_raises(model, optimizer, batches) -> Loop:
    def step(batch):
        x, y, z = batch
        first = F.cross_entropy(model(x), y)
        print(f"first {first.item():.4f}")
        return update(optimizer, first + F.cross_entropy(model(-x), z))

    def batch(n):
        x, y = batches[n % 10]
        return x, y, y if n % 17 != 16 else y + 4

    return Loop(step, model, optimizer, batch)
