"""Loops that show what they do: printed, logged, written to files, a progress bar."""

from __future__ import annotations

import csv
import io
import logging
import math
import sys
import time

import torch
import torch.nn.functional as F

from loops.loop import Loop, classifier, loop, train, update


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


class Run:
    """As wandb's run."""

    def __init__(self):
        self.history, self.summary = [], {}

    def log(self, metrics, step=None, commit=True):
        self.history.append((step, dict(metrics)))
        self.summary.update(metrics)


class Bar:
    """As tqdm's bar, that writes to a stream."""

    def __init__(self):
        self.n, self.text, self.out = 0, "", io.StringIO()

    def update(self, n=1):
        self.n += n
        self.out.write(f"\r{self.n} {self.text}")

    def set_postfix(self, **values):
        self.text = ", ".join(f"{k}={v}" for k, v in values.items())


@loop(planned=True)
def prints_each_loss(model, optimizer, batches) -> Loop:
    def step(batch):
        optimizer.zero_grad()
        loss = classifier(model, batch)
        loss.backward()
        optimizer.step()
        print("loss", loss.item())
        return loss

    return Loop(step, model, optimizer, batches)


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
def wandb_log(model, optimizer, batches) -> Loop:
    run, step_of = Run(), [0]

    def step(batch):
        loss = classifier(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log({"loss": loss.item(), "norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]}, step=step_of[0])
        step_of[0] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"run": run.history, "n": step_of, "last": run.summary})


@loop(planned=True)
def tqdm_bar(model, optimizer, batches) -> Loop:
    bar, total = Bar(), {"loss": 0.0, "n": 0}

    def step(batch):
        loss = train(model, optimizer, batch)
        total["loss"] += loss.item() * len(batch[0])
        total["n"] += len(batch[0])
        bar.set_postfix(loss=f"{total['loss'] / total['n']:.3f}")
        bar.update()

    return Loop(step, model, optimizer, batches, lambda: {"bar": bar.out.getvalue(), "total": total})


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
def prints_until_a_step_raises(model, optimizer, batches) -> Loop:
    """Every seventeenth batch has labels that are no classes."""
    n = [0]

    def step(batch):
        optimizer.zero_grad()
        loss = classifier(model, batch)
        loss.backward()
        optimizer.step()
        n[0] += 1
        print(n[0], f"{loss.item():.4f}")
        return loss

    def batch(n):
        x, y = batches[n % 10]
        return x, y if n % 17 != 16 else y + 4

    return Loop(step, model, optimizer, batch, lambda: {"n": n})


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
def prints_every_fifth_before_the_update(model, optimizer, batches) -> Loop:
    count = {"n": 0}

    def step(batch):
        optimizer.zero_grad()
        loss = classifier(model, batch)
        loss.backward()
        if count["n"] % 5 == 0:
            print("batch", count["n"], "loss", round(loss.item(), 4))
        optimizer.step()
        count["n"] += 1
        return loss

    return Loop(step, model, optimizer, batches, lambda: count)


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


@loop(planned=True)
def prints_when_time_has_passed(model, optimizer, batches) -> Loop:
    state = {"last": time.time(), "n": 0}

    def step(batch):
        loss = train(model, optimizer, batch)
        state["n"] += 1
        if time.time() - state["last"] > 1e6:
            print(f"{state['n']} steps, loss {loss.item():.3f}")
            state["last"] = time.time()
        return loss

    return Loop(step, model, optimizer, batches, lambda: {"n": state["n"]})


@loop(planned=True)
def raises_on_nan(model, optimizer, batches) -> Loop:

    def step(batch):
        loss = train(model, optimizer, batch)
        value = loss.item()
        if not math.isfinite(value):
            print(f"loss is {value}, stopping")
            raise FloatingPointError(value)
        return value

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def table_of_classes(model, optimizer, batches) -> Loop:

    def step(batch):
        logits = model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        update(optimizer, loss)
        hits = logits.argmax(1).eq(batch[1]).sum()
        print(" | ".join(f"{k}: {v:.3f}" for k, v in {"loss": loss.item(), "hits": hits.item()}.items()))

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def written_to_stderr(model, optimizer, batches) -> Loop:

    def step(batch):
        loss = train(model, optimizer, batch)
        if math.isnan(loss.item()):
            sys.stderr.write("the loss is nan\n")
        return loss

    return Loop(step, model, optimizer, batches)
