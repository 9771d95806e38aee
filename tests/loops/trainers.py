"""Loops of trainers: methods, callbacks, partials, several models and optimizers."""

from __future__ import annotations

import copy
import functools
import math
import random
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from loops.loop import CHANGE, Loop, classifier, loop, mlp, task, train, update
from loops.shown import Writer


class Trainer:
    def __init__(self, callbacks=()):
        self.model, self.optimizer, self.batches = task()
        self.scheduler = lr_scheduler.ExponentialLR(self.optimizer, 0.98)
        self.criterion = nn.CrossEntropyLoss()
        self.writer, self.callbacks = Writer(), list(callbacks)
        self.global_step, self.log_every, self.metrics = 0, 5, {}

    def log(self, name, value):
        self.metrics[name] = value
        self.writer.add_scalar(name, value, self.global_step)

    def train_step(self, batch):
        self.model.train()
        x, y = batch
        loss = self.criterion(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.global_step += 1
        if self.global_step % self.log_every == 0:
            self.log("loss", loss.item())
            self.log("lr", self.scheduler.get_last_lr()[0])
        for callback in self.callbacks:
            callback(self, loss.item())
        return loss

    def loop(self, step):
        return Loop(
            step,
            self.model,
            self.optimizer,
            self.batches,
            lambda: {"step": self.global_step, "rows": self.writer.rows, "metrics": self.metrics},
        )


@loop(planned=True)
def callbacks() -> Loop:
    seen = []

    def show(trainer, loss):
        if trainer.global_step % 10 == 0:
            print(trainer.global_step, loss)

    own = Trainer([lambda trainer, loss: seen.append((trainer.global_step, loss)), show])
    return own.loop(own.train_step)


class Engine:
    """Called as a function."""

    def __init__(self):
        self.model, self.optimizer, self.batches = task()
        self.n = 0

    def __call__(self, batch):
        loss = train(self.model, self.optimizer, batch)
        self.n += 1
        print(f"iteration {self.n}: {loss.item():.3f}")
        return loss.item()


@loop(planned=True)
def engine() -> Loop:
    own = Engine()
    return Loop(own, own.model, own.optimizer, own.batches, lambda: {"n": own.n})


def averaging_step(model, optimizer, state, batch, *, every=10):
    """One step."""
    model.train()
    inputs, targets = batch
    outputs = model(inputs)
    loss = F.cross_entropy(outputs, targets)
    update(optimizer, loss)
    state["n"] += 1
    state["loss"] += loss.item()
    if state["n"] % every == 0:
        print("mean loss", state["loss"] / every)
        state["loss"] = 0.0


@loop(planned=True)
def partial(model, optimizer, batches) -> Loop:
    state = {"n": 0, "loss": 0.0}
    return Loop(
        functools.partial(averaging_step, model, optimizer, state, every=7), model, optimizer, batches, lambda: state
    )


@loop(planned=True)
def adversarial() -> Loop:
    maker, judge = mlp(4, 8, 8), mlp(8, 8, 1)
    _, _, batches = task()
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-2, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), lr=1e-2, betas=(0.5, 0.999))
    n = [0]

    def step(batch):
        real = batch[0]
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = maker(torch.randn(len(real), 4))
        loss_judge = F.binary_cross_entropy_with_logits(judge(real), ones)
        loss_judge = loss_judge + F.binary_cross_entropy_with_logits(judge(fake.detach()), zeros)
        update(of_judge, loss_judge)
        loss_maker = F.binary_cross_entropy_with_logits(judge(fake), ones)
        update(of_maker, loss_maker)
        n[0] += 1
        print(f"[{n[0]}/60] Loss_D: {loss_judge.item():.4f} Loss_G: {loss_maker.item():.4f}")

    return Loop(step, [maker, judge], [of_maker, of_judge], batches, lambda: {"n": n})


@loop(planned=True)
def actor_with_a_temperature(model, optimizer, batches) -> Loop:
    log_alpha = torch.zeros(1, requires_grad=True)
    of_alpha = torch.optim.SGD([log_alpha], lr=0.1)
    writer, agent = Writer(), {"alpha": 1.0, "updates": 0}

    def step(batch):
        loss = classifier(model, batch) * agent["alpha"]
        update(optimizer, loss)
        of_alpha.zero_grad()
        loss_alpha = -(log_alpha * (loss.detach() - 1.0)).mean()
        loss_alpha.backward()
        of_alpha.step()
        agent["alpha"] = log_alpha.exp().item()
        agent["updates"] += 1
        writer.add_scalar("loss", loss.item(), agent["updates"])
        writer.add_scalar("alpha", agent["alpha"], agent["updates"])

    return Loop(step, model, [optimizer, of_alpha], batches, lambda: {"rows": writer.rows, **agent})


@loop(planned=True)
def mixed_precision(model, optimizer, batches) -> Loop:
    def step(batch):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0])
            loss = F.cross_entropy(out.float(), batch[1])
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.3f} {out.dtype}")
        return loss

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def statements_on_one_line(model, optimizer, batches) -> Loop:
    """As notebooks have them: the ops, the count and the result share two lines."""
    seen = {"steps": 0}

    # fmt: off
    def step(batch):
        x, y = batch; optimizer.zero_grad(); loss = F.cross_entropy(model(x), y)  # noqa: E702
        loss.backward(); optimizer.step(); seen["steps"] += 1; return float(loss.detach()) / seen["steps"]  # noqa: E702
    # fmt: on

    return Loop(step, model, optimizer, batches, lambda: dict(seen))


@loop(planned=True)
def branch_on_one_line(model, optimizer, batches) -> Loop:
    """The best weights are copied within a branch whose statements share a line."""
    best = {"loss": math.inf, "weights": {}, "bad": 0}

    # fmt: off
    def step(batch):
        loss = train(model, optimizer, batch).item()
        if loss < best["loss"]: best["loss"] = loss; best["weights"] = copy.deepcopy(model.state_dict())  # noqa: E701, E702
        else: best["bad"] += 1  # noqa: E701
        return loss
    # fmt: on

    return Loop(step, model, optimizer, batches, lambda: dict(best))


class Reporting(Trainer):
    """A subclass of a trainer, with an attribute that is private to its class."""

    def __init__(self):
        super().__init__()
        self.__seen = []

    def train_step(self, batch):
        loss = super().train_step(batch)
        self.__seen.append(loss.item())
        print(f"{__class__.__name__} {len(self.__seen)} {loss.item():.5f}")
        return loss.item()


@loop(planned=True)
def trainer_subclass() -> Loop:
    own = Reporting()
    return Loop(own.train_step, own.model, own.optimizer, own.batches, lambda: {"seen": own._Reporting__seen})


def train_and_report(model, optimizer, scheduler, batch, table, *, clip):
    """One step as scripts have it: all that it needs is given, and much of it is no op."""
    if batch is None:
        print("no batch")
        return None
    weight = random.random()
    loss = weight * F.cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    table.setdefault("losses of all steps", []).append(loss.item())
    print(f"{len(table)} {weight:.3f} {loss.item():.5f}")
    return loss.item()


@loop(planned=True)
def everything_is_given(model, optimizer, batches) -> Loop:
    scheduler, table = lr_scheduler.StepLR(optimizer, 20, 0.5), {}

    def step(batch):
        batch = None if batch is None else (batch[0], batch[1])
        return train_and_report(model, optimizer, scheduler, batch, table, clip=1.0)

    def timed(batch):
        start = time.perf_counter()
        result = step(batch)
        table["took time"] = time.perf_counter() >= start
        return result

    given = [*batches[:5], None]
    return Loop(lambda batch: timed(batch), model, optimizer, given, lambda: table)


@loop(planned=True)
def called_function_exchanged(model, optimizer, batches) -> Loop:
    """From a step on another function stands where the called one stood."""
    own = type("Own", (), {})()

    def quietly(batch, scale):
        return update(optimizer, scale * F.cross_entropy(model(batch[0]), batch[1])).item()

    def aloud(batch, scale):
        loss = quietly(batch, scale)
        print(f"{loss:.4f}")
        return loss

    def step(batch):
        result = own.train(batch, own.scale)
        own.scale *= 0.99
        return result

    def after(n, _):
        if n == CHANGE // 2:
            own.train = quietly

    own.train, own.scale = aloud, 1.0
    return Loop(step, model, optimizer, batches, lambda: {"scale": own.scale}, after=after)


@loop(planned=True)
def evaluates_in_the_step(model, optimizer, batches) -> Loop:
    """The name of a model's method is that of a function of Python's, too."""
    best = {"loss": 9.0, "steps": 0}

    def step(batch):
        loss = train(model, optimizer, batch)
        model.eval()
        with torch.no_grad():
            value = classifier(model, batch).item()
            print(f"evaluated {value:.4f}")
        model.train()
        best["steps"] += 1
        if value < best["loss"]:
            best["loss"] = value
            print("better")
        return loss

    return Loop(step, model, optimizer, batches, lambda: best)


class _Sorted(torch.utils.data.Dataset):
    """Makes each sample by ops of torch's."""

    def __len__(self):
        return 40

    def __getitem__(self, place):
        x = torch.randn(8)
        return x, torch.argmax(x[:4])


@loop(planned=True)
def models_by_local_names_in_front_of_the_fetch(model, optimizer) -> Loop:
    """As in minGPT's trainer."""
    data = torch.utils.data.DataLoader(_Sorted(), batch_size=6, shuffle=True, drop_last=True)
    own = SimpleNamespace(model=model, batches=iter(data), config=SimpleNamespace(clip=1.0), count=0)

    def step(_):
        net, config = own.model, own.config
        try:
            batch = next(own.batches)
        except StopIteration:
            own.batches = iter(data)
            batch = next(own.batches)
        x, y = (each.to("cpu") for each in batch)
        loss = F.cross_entropy(net(x), y)
        net.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), config.clip)
        optimizer.step()
        own.count += 1
        if own.count % 5 == 0:
            print(own.count, loss.item())

    return Loop(step, model, optimizer, [0], lambda: {"count": own.count})


@loop(planned=True)
def critic_frozen_while_the_actor_learns(folder) -> Loop:
    """As in Spinning Up, with a file written at the end."""
    actor, critic = mlp(4, 8, 4), mlp(8, 8, 1)
    of_actor = torch.optim.Adam(actor.parameters(), lr=1e-2)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def step(seen):
        loss = (critic(torch.cat([seen, seen], 1)) - 1).pow(2).mean()
        update(of_critic, loss)
        for p in critic.parameters():
            p.requires_grad = False
        update(of_actor, -critic(torch.cat([seen, actor(seen)], 1)).mean())
        for p in critic.parameters():
            p.requires_grad = True
        (folder / "loss").write_text(f"{loss.item():.6f}")

    return Loop(step, [actor, critic], [of_actor, of_critic], [torch.randn(5, 4) for _ in range(10)])


@loop(planned=True)
def critic_frozen_until_the_next_step() -> Loop:
    """The maker learns in every third step, which leaves the critic frozen."""
    maker, critic, n = mlp(4, 8, 8), mlp(8, 8, 1), [0]
    of_maker, of_critic = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, critic))

    def step(real):
        loss = critic(maker(real).detach()).mean() - critic(real.repeat(1, 2)).mean()
        critic.requires_grad_(True)
        update(of_critic, loss if loss.requires_grad else critic(maker(real).detach()).square().mean())
        if n[0] % 3 == 0:
            for p in critic.parameters():
                p.requires_grad = False
            update(of_maker, -critic(maker(real)).mean())
        n[0] += 1
        return loss

    return Loop(step, [maker, critic], [of_maker, of_critic], [torch.randn(5, 4) for _ in range(10)], lambda: {"n": n})
