"""Loops that print and log between their ops: between two updates, in a loop over micro-batches, in a helper."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import random
import sys
from collections import deque

import torch
import torch.nn.functional as F
from tqdm import tqdm

from loops.loop import Loop, classifier, loop
from loops.methods import adversaries, critic_loss, generator_loss
from support.steps import update


@loop(planned=True)
def prints_between_two_updates() -> Loop:
    generator, critic, (of_generator, of_critic), batches = adversaries()
    state = {"step": 0}

    def step(real):
        loss = update(of_critic, critic_loss(generator, critic, real))
        if state["step"] % 5 == 0:
            print(f"[{state['step']}] critic {loss.item():.4f}, mean {loss:.3f}" + " of " + str(round(loss.item(), 2)))
            print(f"perplexity {math.exp(loss.item()):.2f}", max(loss.item(), 1.0), json.dumps({"loss": loss.item()}))
        print(
            "critic: {:.4f}".format(loss),  # noqa: UP032
            "%.3e in step %d" % (loss.item(), state["step"]),  # noqa: UP031
            end=";\n",
            file=sys.stdout,
        )
        state["step"] += 1
        return update(of_generator, generator_loss(generator, critic))

    return Loop(step, [generator, critic], [of_generator, of_critic], batches, lambda: state)


class Adversaries:
    """A trainer whose helpers log, in a form that names function and line."""

    def __init__(self) -> None:
        self.generator, self.critic, self.optimizers, self.batches = adversaries()
        self.out, self.num_steps = io.StringIO(), 0
        self.logger = logging.Logger("adversaries", logging.INFO)
        handler = logging.StreamHandler(self.out)
        handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s:%(lineno)d %(message)s"))
        self.logger.addHandler(handler)

    def train_critic(self, real):
        loss = update(self.optimizers[1], critic_loss(self.generator, self.critic, real))
        self.logger.info("critic %.4f in step %d", loss.item(), self.num_steps)
        self.logger.debug(f"not shown {loss.item()}")
        return loss

    def train_generator(self):
        loss = update(self.optimizers[0], generator_loss(self.generator, self.critic))
        self.logger.warning(f"generator {loss.item():.4f}")
        return loss

    def step(self, real):
        self.num_steps += 1
        both = self.train_critic(real), self.train_generator()
        return both[0] + both[1]


class NamedAdversaries(Adversaries):
    """Its base class logs, and a tensor is formatted as the number that it is."""

    def train_critic(self, real):
        loss = super().train_critic(real)
        self.logger.info("tensor %.4f, whole %d, %s", loss.detach(), self.num_steps, "critic")
        return loss


@loop(planned=True)
def base_class_that_logs() -> Loop:
    own = NamedAdversaries()
    return Loop(own.step, [own.generator, own.critic], own.optimizers, own.batches, lambda: {"log": own.out.getvalue()})


@loop(planned=True)
def helper_exchanged_for_one_that_prints_more() -> Loop:
    own = Adversaries()

    def train_critic(real):
        loss = update(own.optimizers[1], critic_loss(own.generator, own.critic, real))
        own.logger.error("other: %.4f", loss.item() * 2)
        return loss

    def after(n, _):
        if n == 70:
            own.train_critic = train_critic

    models = [own.generator, own.critic]
    return Loop(own.step, models, own.optimizers, own.batches, lambda: {"log": own.out.getvalue()}, after)


@loop(planned=True)
def prints_for_each_micro_batch(model, optimizer, batches) -> Loop:
    """Behind each print an op may raise: it looks up labels."""

    def step(batch):
        optimizer.zero_grad()
        total = 0.0
        for place, (x, y) in enumerate(zip(batch[0].chunk(3), batch[1].chunk(3), strict=True)):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            total += loss.item()
            print(f"  part {place}: {loss.item():.5f}, so far {total:.4f}")
        optimizer.step()
        return total

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def prints_what_it_draws_between_updates(model, optimizer, batches) -> Loop:
    def step(batch):
        for place in range(2):
            loss = update(optimizer, classifier(model, (batch[0] + random.random(), batch[1])))
            print(place, f"{loss.item():.3f}", random.random(), tuple(batch[0].shape), [loss.item(), "x"])
        return loss

    return Loop(step, model, optimizer, batches)


@loop(planned=True)
def prints_before_labels_that_there_are_not(model, optimizer, batches) -> Loop:
    """The print of a step that raises is made, and the step is caught outside."""
    x, y = batches[3]
    rare = [*batches[:3], (x, torch.full_like(y, 9)), *batches[4:]]

    def step(batch):
        out = model(batch[0])
        print(f"mean {out.mean():.4f}")
        loss = F.cross_entropy(out, batch[1])
        return update(optimizer, loss)

    return Loop(step, model, optimizer, lambda n: rare[n % 10] if n > 75 else batches[n % 3])


@loop(planned=True)
def bar_between_two_updates() -> Loop:
    generator, critic, (of_generator, of_critic), batches = adversaries()
    out = io.StringIO()
    bar = tqdm(total=200, file=out, mininterval=0, ascii=True, bar_format="{n_fmt}{postfix}")

    def step(real):
        loss = update(of_critic, critic_loss(generator, critic, real))
        bar.set_postfix({"critic": f"{loss.item():.3f}"})
        bar.update(1)
        return update(of_generator, generator_loss(generator, critic))

    models = [generator, critic]
    return Loop(step, models, [of_generator, of_critic], batches, lambda: {"n": bar.n, "shown": out.getvalue()})


@loop(planned=True)
def kept_and_written_between_two_updates() -> Loop:
    """A list that is shown changes afterwards, and what is kept is read by the loop."""
    generator, critic, (of_generator, of_critic), batches = adversaries()
    recent, file, row = deque(maxlen=5), io.StringIO(), [0.0, 0.0]
    rows, seen = csv.writer(file), []

    def step(real):
        row[0] = update(of_critic, critic_loss(generator, critic, real)).item()
        recent.append(row[0])
        rows.writerow(["critic", row[0]])
        file.write(f"{row[0]:.2f}\n")
        print(row, {"row": row}, real.shape, real.dtype)
        row[1] = row[0] + 1
        return update(of_generator, generator_loss(generator, critic)), real.shape

    def after(_, result):
        seen.append((result[1].numel(), sum(recent)))

    models = [generator, critic]
    state = {"row": row, "seen": seen}
    return Loop(step, models, [of_generator, of_critic], batches, lambda: {**state, "file": file.getvalue()}, after)


@loop(word="changes")
def kept_between_two_updates_and_read_by_another_name() -> Loop:
    generator, critic, (of_generator, of_critic), batches = adversaries()
    recent, state = deque(maxlen=5), {"mean": 0.0}
    elsewhere = {"window": recent}

    def step(real):
        recent.append(update(of_critic, critic_loss(generator, critic, real)).item())
        state["mean"] = sum(elsewhere["window"]) / len(elsewhere["window"])
        return update(of_generator, generator_loss(generator, critic))

    return Loop(step, [generator, critic], [of_generator, of_critic], batches, lambda: state)


@loop(planned=True)
def prints_a_whole_number_of_what_is_not_finite(model, optimizer, batches) -> Loop:
    """It cannot be made a text, which eager finds where the print stands."""
    spoilt = [(x * float("nan"), y) for x, y in batches[:2]]

    def step(batch):
        loss = update(optimizer, classifier(model, (batch[0].nan_to_num(), batch[1])))
        mean = batch[0].mean().item()
        try:
            print("mean %d in a thousand, %.3f" % (mean * 1000, loss.item()), round(mean))  # noqa: UP031
        except ValueError:
            print("no mean")
        return loss + update(optimizer, classifier(model, (batch[0].nan_to_num() / 2, batch[1])))

    return Loop(step, model, optimizer, lambda n: spoilt[n % 2] if n in (80, 130) else batches[n % 10])


@loop(word="asks write of")
def logs_from_where_it_is_called() -> Loop:
    own = Adversaries()

    def log(*values):
        own.logger.info("critic %.4f", *values, stacklevel=2)

    def step(real):
        loss = own.train_critic(real)
        try:
            log(loss.item())
            raise KeyError(0)
        except KeyError:
            own.logger.error("not found", exc_info=True)
        return loss + own.train_generator()

    return Loop(step, [own.generator, own.critic], own.optimizers, own.batches, lambda: {"log": own.out.getvalue()})


@loop(word="print")
def reads_what_a_print_has_counted() -> Loop:
    generator, critic, (of_generator, of_critic), batches = adversaries()

    class Out:
        num_lines = 0

        def write(self, text):
            self.num_lines += text.count("\n")

    out = Out()

    def step(real):
        loss = update(of_critic, critic_loss(generator, critic, real))
        print(f"{loss.item():.4f}", file=out)
        return loss + update(of_generator, generator_loss(generator, critic) * (1 + out.num_lines / 100))

    return Loop(step, [generator, critic], [of_generator, of_critic], batches, lambda: {"n": out.num_lines})


@loop()
def print_exchanged_for_one_that_counts() -> Loop:
    generator, critic, (of_generator, of_critic), batches = adversaries()
    state = {"n": 0}

    def counting(*values):
        state["n"] += 1

    class Console:
        print = staticmethod(print)

    def step(real):
        loss = update(of_critic, critic_loss(generator, critic, real))
        Console.print(f"{loss.item():.4f}")
        return loss + update(of_generator, generator_loss(generator, critic) * (1 + state["n"] / 100))

    def after(n, _):
        if n == 70:
            Console.print = staticmethod(counting)

    models = [generator, critic]
    return Loop(step, models, [of_generator, of_critic], batches, lambda: {"n": state["n"]}, after)


@loop(word="prints, logs or calls a sink")
def prints_an_object_between_updates() -> Loop:
    """Its text is its own matter, and changes with it."""
    generator, critic, (of_generator, of_critic), batches = adversaries()

    class Meter:
        total = 0.0

        def __str__(self):
            return f"total {self.total}"

    meter = Meter()

    def step(real):
        loss = update(of_critic, critic_loss(generator, critic, real))
        print(meter)
        return loss + update(of_generator, generator_loss(generator, critic))

    return Loop(step, [generator, critic], [of_generator, of_critic], batches)


@loop(word="where it may catch what that raises")
def writes_to_a_file_that_is_closed_meanwhile(model, optimizer, batches) -> Loop:
    file, state = io.StringIO(), {"failures": 0}

    def step(batch):
        loss = update(optimizer, classifier(model, batch))
        try:
            file.write(f"{loss.item():.4f}\n")
        except ValueError:
            state["failures"] += 1
        return update(optimizer, classifier(model, batch))

    def after(n, _):
        if n == 100:
            file.close()

    return Loop(step, model, optimizer, batches, lambda: state, after)


@loop(planned=True)
def code_of_called_functions_exchanged(model, optimizer, batches) -> Loop:
    """Notebooks that load a module again put the new code into the functions that there are."""

    def show(loss, scale=1.0):
        print(f"{loss * scale:.4f}")

    def show_twice(loss, scale=1.0):
        print(f"{loss:.4f} {loss * scale:.4f}")

    def train(batch, weight=1.0):
        for _ in range(2):
            loss = update(optimizer, classifier(model, batch) * weight)
            show(loss.item())
        return loss

    def train_with_penalty(batch, weight=1.0):
        for _ in range(2):
            loss = update(optimizer, classifier(model, batch) * weight + 0.1)
            show(loss.item())
        return loss

    def step(batch):
        loss = train(batch)
        print("trained")
        return loss

    def after(n, _):
        if n == 70:
            show.__code__, show.__defaults__ = show_twice.__code__, (2.0,)
        if n == 120:
            train.__code__ = train_with_penalty.__code__
        if n == 160:
            train.__defaults__ = (0.5,)

    return Loop(step, model, optimizer, batches, after=after)


def shown(value):
    print("not this one", value)


@loop(word="print")
def name_of_a_comprehension_hides_a_function_that_prints(model, optimizer, batches) -> Loop:
    def step(batch):
        loss = update(optimizer, classifier(model, batch))
        scale = sum([shown(loss) for shown in (torch.sigmoid, torch.tanh)])
        shown(loss.item())
        return update(optimizer, classifier(model, batch) * scale.detach())

    return Loop(step, model, optimizer, batches)
