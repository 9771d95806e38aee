"""Sixty more steps with bookkeeping, written before it was known which are planned: a check of `loops.sixty`.

Each is a function that takes a `Job` and returns the step. All reach their books through one object, whose attribute
`state` has a name that code of torch uses, too.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import random
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from loops.loop import labelled, mlp

__all__ = ["STEPS", "Job"]

seen_in_all = 0
best_of_all = float("inf")


class Writer:
    """Keeps scalars, as a SummaryWriter does, or metrics, as wandb does."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def add_scalar(self, tag, value, step):
        self.rows.append((tag, value, step))

    def log(self, metrics, step=None):
        self.rows.append((step, dict(metrics)))


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self) -> None:
        self.n, self.postfix, self.text = 0, {}, io.StringIO()

    def update(self, n=1):
        self.n += n
        if self.n % 5 == 0:
            self.text.write(f"\r{self.n} {self.postfix}")

    def set_postfix(self, **values):
        self.postfix = {key: f"{value:.3g}" for key, value in values.items()}


class Meter:
    def __init__(self) -> None:
        self.sum, self.count, self.values = 0.0, 0, deque(maxlen=4)

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n
        self.values.append(value)

    @property
    def median(self):
        return sorted(self.values)[len(self.values) // 2]


@dataclass
class Job:
    """What a step trains, and what it keeps its books in.

    Attributes:
        state: everything that two runs are compared by besides the model and the optimizer.
    """

    model: Any = field(default_factory=mlp)
    rate: float = 0.05
    state: dict[str, Any] = field(default_factory=dict)
    batches: Any = field(default_factory=labelled)
    optimizer: Any = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.rate, momentum=0.9)

    def train(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


STEPS: dict[str, Callable[[Job], Any]] = {}


def step(function: Callable[[Job], Any]) -> Callable[[Job], Any]:
    STEPS[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------------- schedulers


def scheduled(make: Callable[[Any], Any]) -> Callable[[Job], Any]:
    def build(job: Job) -> Any:
        scheduler = make(job.optimizer)
        job.state["scheduler"] = scheduler.state_dict

        def train(batch):
            x, y = batch
            loss = F.cross_entropy(job.model(x), y)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            scheduler.step()
            return loss

        return train

    return build


for _name, _make in {
    "step_lr": lambda o: lr_scheduler.StepLR(o, 10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 40),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=100),
    "warm_up_by_lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: min(1.0, (n + 1) / 20)),
    "warm_up_then_cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=8), lr_scheduler.CosineAnnealingLR(o, 50)], [8]
    ),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=7),
}.items():
    STEPS[_name] = scheduled(_make)


@step
def plateau(job):
    scheduler = lr_scheduler.ReduceLROnPlateau(job.optimizer, patience=2, factor=0.7)
    job.state["scheduler"] = scheduler.state_dict

    def train(batch):
        loss = job.train(*batch)
        scheduler.step(loss.item())
        return loss.item()

    return train


@step
def scheduler_every_tenth(job):
    scheduler = lr_scheduler.ExponentialLR(job.optimizer, 0.9)
    job.state["count"] = count = {"n": 0}

    def train(batch):
        loss = job.train(*batch)
        count["n"] += 1
        if count["n"] % 10 == 0:
            scheduler.step()
            print(f"step {count['n']}: lr {scheduler.get_last_lr()[0]:.5f} loss {loss.item():.4f}")
        return loss

    return train


@step
def two_schedulers(job):
    warm, decay = lr_scheduler.ConstantLR(job.optimizer, 0.5, 5), lr_scheduler.ExponentialLR(job.optimizer, 0.99)
    job.state["rates"] = rates = []

    def train(batch):
        loss = job.train(*batch)
        warm.step()
        decay.step()
        rates.append(decay.get_last_lr()[0])
        return loss

    return train


@step
def rate_by_hand(job):
    job.state["count"] = count = {"n": 0}

    def train(batch):
        count["n"] += 1
        for group in job.optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, count["n"] / 15)
        return job.train(*batch)

    return train


# ------------------------------------------------------------------------------------------------- prints and logs


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


# ------------------------------------------------------------------------------------------------ meters and counts


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


# ------------------------------------------------------------------------------------------------ draws and fetches


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


# ------------------------------------------------------------------------------------------------ errors, and classes


@step
def error_in_the_middle(job):
    """Every seventeenth batch has a label that is no class."""
    job.state["n"] = n = [0]

    def train(batch):
        x, y = batch
        n[0] += 1
        print("begin", n[0])
        y = y + 4 if n[0] % 17 == 0 else y
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        job.optimizer.step()
        print("end", n[0], f"{loss.item():.4f}")
        return loss

    return train


@step
def error_after_a_print_in_the_middle(job):
    job.state["n"] = n = [0]

    def train(batch):
        x, y = batch
        n[0] += 1
        second = y + 4 if n[0] % 17 == 0 else y
        first = F.cross_entropy(job.model(x), y)
        print(f"first {first.item():.4f}")
        loss = first + F.cross_entropy(job.model(-x), second)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        return loss

    return train


@step
def error_at_the_end(job):
    job.state["n"] = n = [0]

    def train(batch):
        loss = job.train(*batch)
        n[0] += 1
        if n[0] % 13 == 0:
            raise ValueError(f"no room for {n[0]}: {loss.item():.3f}")
        print(n[0])
        return loss

    return train


class Trainer:
    """A trainer as many projects have one."""

    def __init__(self, job: Job) -> None:
        self.model, self.optimizer = job.model, job.optimizer
        self.scheduler = lr_scheduler.StepLR(self.optimizer, 15)
        self.global_step, self.writer, self.meters = 0, Writer(), defaultdict(Meter)

    def training_step(self, batch, verbose=True):
        self.model.train()
        x, y = batch
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.global_step += 1
        self.log("loss", loss.item())
        self.log("accuracy", (out.argmax(1) == y).float().mean().item())
        if verbose and self.global_step % 10 == 0:
            print(f"{self.global_step}: {self.meters['loss'].median:.4f}")
        return loss

    def log(self, name, value):
        self.meters[name].update(value)
        self.writer.add_scalar(name, value, self.global_step)


@step
def trainer(job):
    own = Trainer(job)
    job.state["own"] = lambda: (own.global_step, own.writer.rows, [vars(m) for m in own.meters.values()])
    return own.training_step


@step
def trainer_with_callbacks(job):
    seen = []
    callbacks = [lambda n, loss: seen.append((n, loss)), lambda n, loss: print(n, f"{loss:.3f}")]
    job.state.update(seen=seen, n=[0])

    def train(batch):
        loss = job.train(*batch)
        job.state["n"][0] += 1
        for callback in callbacks:
            callback(job.state["n"][0], loss.item())
        return loss

    return train


@step
def evaluated_every_tenth(job):
    job.state["n"], job.state["scores"] = n, scores = [0], []

    def train(batch):
        x, y = batch
        job.model.train()
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        n[0] += 1
        if n[0] % 10 == 0:
            job.model.eval()
            with torch.no_grad():
                scores.append((job.model(x).argmax(1) == y).float().mean().item())
            print("score", scores[-1])
        return loss.item()

    return train


@step
def two_models(job):
    """As a GAN's step: two updates, two losses, printed together."""
    judge = mlp(4, 6, 1)
    of_judge = torch.optim.SGD(judge.parameters(), lr=0.01)
    job.state.update(judge=lambda: dict(judge.state_dict()), further=(judge, of_judge))

    def train(batch):
        x, _ = batch
        fake = job.model(x)
        real = torch.randn(len(x), 4)
        of_judge.zero_grad()
        of_both = F.softplus(judge(fake.detach())).mean() + F.softplus(-judge(real)).mean()
        of_both.backward()
        of_judge.step()
        job.optimizer.zero_grad()
        loss = F.softplus(-judge(fake)).mean()
        loss.backward()
        job.optimizer.step()
        print(f"D {of_both.item():.3f} G {loss.item():.3f}")
        return {"d": of_both.item(), "g": loss.item()}

    return train


@step
def keyword_arguments(job):
    job.state["n"] = n = [0]

    def train(x, y, *, weight=1.0):
        loss = F.cross_entropy(job.model(x), y) * weight
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        n[0] += 1
        print(n[0], weight, f"{loss.item():.3f}")
        return loss

    return train
