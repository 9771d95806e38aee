"""Searches of HFHT's settings, simulated: the real rungs, with measured times of steps in place of training.

The policies of `hocket.tune` decide on trials of random values. A group of up to 64 slots trains one epoch at a time,
and the models that are left cost what a fused step of that number was measured to take. Recording and choosing are not
in the simulation. Source: S. Wang et al., "Horizontally Fused Training Array", MLSys 2021, Tables 11 and 12, Appendix
E.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any

from benchmarks.bench import table_of
from benchmarks.fuse.targets import Target, Training, named, step_of
from benchmarks.turns import in_turns
from hocket.search.group import MAX_SLOTS
from hocket.search.policy import Hyperband, Move, Policy, Schedules

SIZES = (1, 4, 16, 32)
SEARCHES = 20  # simulated ones of each setting
TARGETS = ("mlp-32", "pointnet-tuned")
CONTENDERS = ("serial", "auto")
MAX_UNSETTLED = 64  # steps before those that count, by which the array chooses
WARM_UP = 3  # the first step is recorded, and only later ones are chosen from
ROUNDS, BLOCK = 3, 4


@dataclass(frozen=True)
class Setting:
    """A search of `epochs` a trial at most (Hyperband's R): by these brackets, or if None by `sets` of random search.

    Trials are drawn among `groups` combinations of infusible parameters.
    """

    epochs: int
    hyperband: Hyperband | None = None
    sets: int = 0
    groups: int = 1

    @property
    def trials(self) -> int:
        """The number of trials that begin."""
        return self.sets if self.hyperband is None else self.hyperband.trials(self.epochs) or 0

    def policy(self) -> Policy:
        """A new policy of this search."""
        return (self.hyperband or Schedules()).policy(self.trials, self.epochs, maximize=False)


# PointNet's and MobileNet's columns of Table 11. Either has two infusible parameters of two values.
SETTINGS = {
    "random, 60 sets of 25 epochs": Setting(25, sets=60, groups=4),
    "R = 250, eta = 5, skip 1": Setting(250, Hyperband(eta=5, skip_last=1), groups=4),
    "R = 250, eta = 5, skip 1, one group": Setting(250, Hyperband(eta=5, skip_last=1)),
    "R = 81, eta = 3, one group": Setting(81, Hyperband(eta=3)),
}


def run(targets: Sequence[str] = TARGETS) -> dict[str, Any]:
    """Measure steps of numbers of models, and simulate every setting with them, and steps interpolated between them."""
    steps_ms: dict[str, dict[str, dict[int, float]]] = {}
    for name in targets:
        by_size = {size: _steps_ms(named(name), size) for size in SIZES}
        steps_ms[name] = {each: {size: row[each] for size, row in by_size.items()} for each in CONTENDERS}
    found = {
        target: {name: _mean(setting, ms) for name, setting in SETTINGS.items()} for target, ms in steps_ms.items()
    }
    return {"steps_ms": steps_ms, "searches": found}


def _steps_ms(target: Target, size: int) -> dict[str, float]:
    """Median CPU times of steps in turns, in ms: a busy machine stretches the time of day of each by another factor."""
    training = Training(optimizer="adam", own_rates=True)
    in_turn = {name: step_of(name, target, size, "cpu", training) for name in CONTENDERS}
    for step in in_turn.values():
        for number in range(MAX_UNSETTLED):
            step()
            if number >= WARM_UP and step.is_settled():
                break
    times_ms = in_turns(in_turn, rounds=ROUNDS, block=BLOCK, warm_up=1, clock=process_time)
    return {name: median(own) for name, own in times_ms.items()}


def _mean(setting: Setting, steps_ms: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    runs = [simulated(setting, seed) for seed in range(SEARCHES)]
    epochs = sum(map(sum, runs)) / SEARCHES
    fused = sum(interpolated(steps_ms["auto"], size) for sizes in runs for size in sizes) / SEARCHES
    return {
        "trials": setting.trials,
        "epochs": epochs,
        "fused_epochs": sum(map(len, runs)) / SEARCHES,
        "to_serial": epochs * steps_ms["serial"][1] / fused,
    }


def interpolated(times: Mapping[int, float], size: int) -> float:
    """The time of a step of this number of models, on straight lines between the measured ones, and from zero behind.

    Example:
        >>> interpolated({1: 1.0, 4: 2.5, 8: 3.0}, 2), interpolated({1: 1.0, 4: 2.5, 8: 3.0}, 16)
        (1.5, 6.0)
    """
    below = max(each for each in times if each <= size)
    above = min((each for each in times if each > size), default=None)
    if above is None:
        return times[below] * size / below
    return times[below] + (times[above] - times[below]) * (size - below) / (above - below)


def simulated(setting: Setting, seed: int = 0) -> list[int]:
    """Search, and return the number of models in every epoch of every group, in order.

    Example:
        >>> simulated(Setting(2, sets=3)), simulated(Setting(4, Hyperband(eta=2)))
        ([3, 3], [10, 8, 5, 5])
    """
    drawn = random.Random(seed)
    policy = setting.policy()
    group, until, done = dict[int, int](), dict[int, int](), dict[int, int]()  # of trials by their numbers

    def apply(moves: Iterable[Move]) -> None:
        for move in moves:
            if move.what == "go":
                until[move.number] = move.until
            else:
                del until[move.number]

    for number in range(setting.trials):
        group[number], done[number] = drawn.randrange(setting.groups), 0
        until[number] = policy.start(number)
    apply(policy.all_started())
    sizes: list[int] = []
    while True:
        ready = [number for number in until if done[number] < until[number]]
        if not ready:
            return sizes
        by_group = [[number for number in ready if group[number] == each] for each in range(setting.groups)]
        chosen = max(by_group, key=len)
        chosen.sort(key=lambda number: done[number] == 0)  # trials that have begun keep their slots
        training = chosen[:MAX_SLOTS]
        sizes.append(len(training))
        for number in training:
            done[number] += 1
            if done[number] == until[number]:
                apply(policy.report(number, done[number], drawn.random()))


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = [
        {"target": target, "search": name, **found}
        for target, by_setting in result["searches"].items()
        for name, found in by_setting.items()
    ]
    columns = {
        **{"target": "{target}", "search": "{search}", "trials": "{trials}", "epochs": "{epochs:.0f}"},
        **{"fused epochs": "{fused_epochs:.0f}", "speedup": "{to_serial:.2f}"},
    }
    yield table_of(f"searches simulated with measured steps, {result['threads']} threads", columns, rows, words=2)
