"""Loops whose step, between its ops, makes a tuple, list or dict of numbers anew, or steps the scheduler of a rate."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import torch
from torch import nn
from torch.optim import lr_scheduler

from loops.loop import CASES, Case, Loop, loop, nothing

Shown = namedtuple("Shown", "loss count")


def adversaries(between, begin=None, step_rates=None, watched=None) -> Loop:
    """A generator and a discriminator. `between` their updates it is given the trainer and the first loss."""
    makes, judges = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(8, 1)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-3) for each in (makes, judges)]
    criterion = nn.BCEWithLogitsLoss()
    trainer = SimpleNamespace(stats=copy.deepcopy(begin), other=None, n=0, log=[])
    scheduler = None if step_rates is None else step_rates(optimizers[1])

    def step(batch):
        ones = torch.ones(len(batch), 1)
        fake = makes(torch.randn(len(batch), 8))
        optimizers[1].zero_grad()
        loss = criterion(judges(batch), ones) + criterion(judges(fake.detach()), 1 - ones)
        loss.backward()
        optimizers[1].step()
        if scheduler is not None:
            scheduler.step()
        result = between(trainer, loss)
        trainer.n += 1
        optimizers[0].zero_grad()
        other = criterion(judges(fake), ones)
        other.backward()
        optimizers[0].step()
        return other.detach() if result is None else result

    def state():
        rates = (
            {}
            if scheduler is None
            else {"rates": scheduler.get_last_lr(), "epoch": getattr(scheduler, "last_epoch", 0)}
        )
        return {**copy.deepcopy(vars(trainer)), "is_one": trainer.other is trainer.stats, **rates}

    after = None if watched is None else functools.partial(watched, trainer)
    return Loop(step, [makes, judges], optimizers, lambda n: torch.randn(12, 8), state, after or nothing)


def nests(trainer, loss):
    trainer.stats = {
        "train": {"loss": loss.item()},
        "rates": [0.1, trainer.n],
        "phase": "training",
        "of": (loss.item(), 2),
    }


def reads_what_it_replaces(trainer, loss):
    trainer.stats = {"mean": 0.9 * trainer.stats["mean"] + 0.1 * loss.item(), "n": trainer.stats["n"] + 1}


def resets_and_writes(trainer, loss):
    if trainer.n % 10 == 0:
        trainer.stats = {"sum": 0.0, "n": 0}
    trainer.stats["sum"] += loss.item()
    trainer.stats["n"] += 1


def writes_what_others_hold(trainer, loss):
    if trainer.n % 20 == 0:
        trainer.other = trainer.stats
    resets_and_writes(trainer, loss)


def slides_a_window(trainer, loss):
    trainer.stats = [*trainer.stats[1:], loss.item()]
    trainer.other = sum(trainer.stats) / len(trainer.stats)


def branches(trainer, loss):
    if trainer.stats["loss"] > 1.3:
        trainer.other = trainer.n
    trainer.stats = {"loss": loss.item()}


def returns_it(trainer, loss):
    trainer.stats = {"loss": loss.item(), "n": trainer.n}
    return trainer.stats


def keeps_it(trainer, loss):
    trainer.stats = {"loss": loss.item(), "n": trainer.n}
    trainer.log.append(trainer.stats)


def shows_it(trainer, loss):
    trainer.stats = [loss.item(), loss.detach()]
    print(trainer.stats[0], f"{trainer.stats[1].item():.3f}")


def sums_it(trainer, loss):
    trainer.other = sum(trainer.stats.values())
    if trainer.n % 30 == 0:
        trainer.stats = {"loss": 0.0, "n": 1}
    trainer.stats["loss"] += loss.item()


def adds_a_key(trainer, loss):
    trainer.stats = {"loss": loss.item()}
    if trainer.n % 7 == 0:
        trainer.stats["more"] = 1.0


for _name, _between, _begin in (
    ("tuple_made_anew", lambda t, loss: setattr(t, "stats", (t.n, loss.item())), (0, 0.0)),
    ("named_tuple_made_anew", lambda t, loss: setattr(t, "stats", Shown(loss.item(), t.n)), None),
    ("ordered_dict_made_anew", lambda t, loss: setattr(t, "stats", OrderedDict(loss=loss.item())), None),
    ("containers_made_anew_in_each_other", nests, None),
    ("means_that_replace_each_other", reads_what_it_replaces, {"mean": 0.0, "n": 0}),
    ("meter_that_is_reset", resets_and_writes, None),
    ("window_of_losses", slides_a_window, [0.0] * 5),
    ("branch_on_what_was_replaced", branches, {"loss": 2.0}),
    ("stats_returned", returns_it, None),
    ("stats_kept_in_a_history", keeps_it, None),
    ("stats_shown", shows_it, None),
    ("key_added_now_and_then", adds_a_key, None),
):
    CASES[_name] = Case(_name, functools.partial(adversaries, _between, _begin), planned=True)


for _name, _make in {
    "steps": lambda o: lr_scheduler.StepLR(o, 10, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [30, 50], 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 60),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 25),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.01, total_steps=300),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: min(1.0, (epoch + 1) / 30)),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.99)]),
}.items():
    build = functools.partial(adversaries, lambda trainer, loss: None, step_rates=_make)
    CASES[f"rates_between_updates_by_{_name}"] = Case(f"rates_between_updates_by_{_name}", build, planned=True)


@loop(planned=True)
def meter_that_is_reset_and_held() -> Loop:
    return adversaries(writes_what_others_hold, {"sum": 0.0, "n": 0})


@loop(word="stands elsewhere")
def stats_under_two_names() -> Loop:
    def names_both(trainer, loss):
        trainer.stats = trainer.other = {"loss": loss.item()}

    return adversaries(names_both)


@loop(word="written the one before")
def stats_written_and_replaced() -> Loop:
    def writes(trainer, loss):
        trainer.stats["loss"] += 1.0
        trainer.stats = {"loss": loss.item()}

    return adversaries(writes, {"loss": 0.0}, watched=lambda trainer, n, _: trainer.log.append(trainer.stats))


@loop(planned=True)
def stats_read_as_a_whole() -> Loop:
    def after(trainer, n, result):
        if n in (60, 90):
            trainer.stats[n] = 1.0

    return adversaries(sums_it, {"loss": 0.0, "n": 1}, watched=after)


@loop(planned=True)
def stats_swapped_between_steps() -> Loop:
    def writes(trainer, loss):
        trainer.stats["sum"] += loss.item()
        trainer.stats["n"] += 1
        trainer.seen = trainer.stats["n"] + (trainer.other["n"] * 2 if trainer.other else 0)

    def after(trainer, n, result):
        trainer.other = trainer.other or {"sum": 5.0, "n": 100}
        trainer.stats, trainer.other = trainer.other, trainer.stats

    return adversaries(writes, {"sum": 0.0, "n": 0}, watched=after)


@loop(planned=True)
def stats_written_between_steps() -> Loop:
    def after(trainer, n, result):
        if n % 9 == 0:
            trainer.stats["n"] = -n
        if n == 80:
            trainer.stats["more"] = 1.0

    return adversaries(lambda t, loss: setattr(t, "stats", {"loss": loss.item(), "n": t.n}), watched=after)
