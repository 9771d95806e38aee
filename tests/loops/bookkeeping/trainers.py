"""Steps that raise, trainer classes and callbacks."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler

from loops.bookkeeping.job import Job, Meter, Writer, step
from loops.loop import mlp


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
