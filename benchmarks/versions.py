"""Another version's steps against this one's: two processes, in turns, on the same targets.

A target is a zoo entry, whose step is scheduled, or one of the fuse bench with a number of models, as in ``mlp-32:8``,
whose models are fused; or ``search-mlp-32:12``, a search of that number of trials. ``own-mlp-32:8`` gives each model a
rate of its own. ``lengths-mlp-32:8`` and ``search-lengths-mlp-32:12`` train with batches of 40 lengths.

Each process prepares the step with its own sources and then makes a block of steps whenever it is asked to; the two
never run at the same time. What is compared is what a caller pays: whole calls of the schedule, whole steps from
`zero_grad` to the optimizer's, or whole searches. The first step of fresh models, or the first search, is timed apart.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import hocket
from benchmarks.bench import Save, by_target, unsaved
from benchmarks.fuse.targets import TARGETS, Target
from hocket.cli.console import table
from hocket.errors import InputError
from hocket.reporting import lower_quartile

STEPS_IN_A_ROW = 10
# Before the name of a target: one of its searches is a step, its models have rates of their own, its batches lengths.
SEARCH, OWN, LENGTHS = "search-", "own-", "lengths-"
SEARCHES_IN_A_ROW = 1
NUM_LENGTHS = 40

# These run in both processes, so they ask for nothing that an older version lacks.
_SCHEDULED = """
import inspect, json, sys
import hocket
from hocket import zoo
job = zoo.load(sys.argv[1])
options = {"cache": False} if "cache" in inspect.signature(hocket.schedule).parameters else {}
fast, number = hocket.schedule(job.step, job.model, job.optimizer, **options), 0
while not fast.decided:
    fast(job.batch(number))
    number += 1
said = {"calls": number, "verdict": str(fast.verdict), "why": fast.why}
plain = job.step
"""
_FUSED = """
import json, sys
from statistics import median
from time import perf_counter
import torch
import hocket
from hocket import optim, zoo
from torch.nn.functional import cross_entropy
entry, kind, size, batch_size, options, owns_rates, lengths = json.loads(sys.argv[1])
jobs = [zoo.load(entry, seed=n, batch_size=batch_size, num_batches=1, **options) for n in range(size)]
loss = {
    "classifier": cross_entropy,
    "words": lambda out, words: cross_entropy(out.flatten(0, 1), words.flatten()),
    "own": lambda out: out.loss,
}[kind]
job, number, calls = jobs[0], 0, 60 + 4 * lengths
if lengths:
    rows = zoo.load(entry, seed=0, batch_size=lengths + 8, num_batches=1, **options).batch(0)
    class job:
        batch = staticmethod(lambda number: tuple(each[: 8 + number % lengths] for each in rows))
def step_of(model, optimizer, losses):
    def step(batch):
        optimizer.zero_grad()
        losses(batch).sum().backward()
        optimizer.step()
    return step
rates = [1e-3 * (1 + number / size) if owns_rates else 1e-3 for number in range(size)]
def plain_step(model, rate):
    def losses(batch):
        return loss(model(**batch)) if kind == "own" else loss(model(batch[0]), batch[1])
    return step_of(model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), losses)
models, firsts_ms = [model for own in jobs for model in own.models], []
for _ in range(6):  # the first one imports what is not imported yet
    start = perf_counter()
    array = hocket.fuse(models, shared=True)
    fast = step_of(
        array,
        optim.SGD(array.parameters(), lr=rates if owns_rates else 1e-3, momentum=0.9),
        lambda batch: array.losses(loss, batch) if kind == "own" else array.losses(loss, batch[0], batch[1]),
    )
    fast(job.batch(0))
    firsts_ms.append((perf_counter() - start) * 1e3)
singles = list(map(plain_step, models, rates))
def plain(batch):
    for single in singles:
        single(batch)
for each in range(calls):  # by which choices are made
    fast(job.batch(each if lengths else 0))
plain(job.batch(0))
why = str([str(getattr(each, "winner", each)) for each in array.choices])
said = {"first_ms": median(firsts_ms[1:]), "calls": calls, "verdict": "fused", "why": why}
"""
_SEARCHED = """
import copy, json, sys
from time import perf_counter
from types import SimpleNamespace
import optuna, torch
import hocket
from hocket import zoo
from optuna.distributions import FloatDistribution, IntDistribution
from torch.nn.functional import cross_entropy
entry, kind, trials, batch_size, options, _, lengths = json.loads(sys.argv[1])
optuna.logging.set_verbosity(optuna.logging.ERROR)
many, sized = max(16, lengths), lengths + 8 if lengths else batch_size
loaded, number = zoo.load(entry, seed=0, batch_size=sized, num_batches=many + 8, **options), 0
batches = list(loaded.batches)
if lengths:
    batches = [tuple(each[: 8 + place % lengths] for each in batch) for place, batch in enumerate(batches)]
space = {
    "lr": FloatDistribution(1e-4, 1e-2, log=True),
    "weight_decay": FloatDistribution(1e-5, 1e-2, log=True),
    "period": IntDistribution(1, 6),
}
def train(params):
    model = copy.deepcopy(loaded.models[0])
    optimizer = torch.optim.Adam(model.parameters(), lr=params["lr"], weight_decay=params["weight_decay"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, params["period"], 0.5)
    return hocket.Training(model, optimizer, cross_entropy, batches[:many], cross_entropy, scheduler, batches[many:])
def searched(executor):
    sampler, pruner = optuna.samplers.RandomSampler(seed=0), optuna.pruners.NopPruner()
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    hocket.tune(train, space, trials, 8, study=study, executor=executor)
    return study.best_value
fast, plain, job = lambda _: searched("auto"), lambda _: searched("serial"), SimpleNamespace(batch=lambda number: None)
start = perf_counter()
why = str(searched("auto"))
said = {"first_ms": (perf_counter() - start) * 1e3, "calls": 1, "verdict": "searched", "why": why}
"""
# A line in, a line of milliseconds out.
_BLOCKS = """
from time import perf_counter
print(json.dumps(said), flush=True)
for line in sys.stdin:
    work = plain if line.split()[0] == "eager" else fast
    times = []
    for _ in range(int(line.split()[1])):
        batch = job.batch(number)
        start = perf_counter()
        work(batch)
        times.append((perf_counter() - start) * 1e3)
        number += 1
    print(json.dumps(times), flush=True)
"""


def run(
    other: Path,
    targets: tuple[str, ...] = ("mlp", "lenet", "digits-cnn"),
    rounds: int = 10,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure each target with the sources in `other` and with those of this process."""
    result = by_target(targets, lambda target: measure(other.resolve(), target, rounds), save)
    return {**result, "geometric_mean": geometric_mean(row["ratio"] for row in result["targets"].values())}


def measure(other: Path, target: str, rounds: int) -> dict[str, Any]:
    """One target: ``calls`` until the decision, its ``verdict``, and lower quartiles of its steps and of plain ones.

    ``ratio`` is the other's time over this one's, and ``low`` and ``high`` the quartiles of the ratios of single
    rounds.
    """
    in_a_row = SEARCHES_IN_A_ROW if target.startswith(SEARCH) else STEPS_IN_A_ROW
    in_a_row = NUM_LENGTHS if target.startswith(LENGTHS) else in_a_row
    here = Path(hocket.__file__).parents[1]
    with ExitStack() as stack:
        # One after the other: a search beside another one would decide by what it disturbs.
        old = stack.enter_context(_worker(other, target))
        found: dict[str, Any] = {"other": _answer(old)}
        new = stack.enter_context(_worker(here, target))
        found["this"] = _answer(new)
        times: dict[str, list[list[float]]] = {"other": [], "this": []}
        eager: dict[str, list[float]] = {"other": [], "this": []}
        for _ in range(rounds):
            for name, process in (("other", old), ("this", new)):
                times[name].append(_steps(process, "scheduled", in_a_row))
                eager[name] += _steps(process, "eager", in_a_row)
    for name, row in found.items():
        row["step_ms"] = lower_quartile([step_ms for block in times[name] for step_ms in block])
        row["eager_ms"] = lower_quartile(eager[name])
    ratios = sorted(median(a) / median(b) for a, b in zip(times["other"], times["this"], strict=True))
    quarter = (len(ratios) - 1) // 4
    firsts = [row["first_ms"] for row in found.values() if "first_ms" in row]
    return {
        **found,
        **({"first_ratio": firsts[0] / firsts[1]} if firsts else {}),
        "ratio": found["other"]["step_ms"] / found["this"]["step_ms"],
        "low": ratios[quarter],
        "high": ratios[-1 - quarter],
    }


def _steps(process: subprocess.Popen[str], kind: str, count: int) -> list[float]:
    """A block of steps. The first one finds the caches as another process left them, and is not counted."""
    assert process.stdin is not None
    process.stdin.write(f"{kind} {count + 1}\n")
    process.stdin.flush()
    times: list[float] = _answer(process)[1:]
    return times


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the comparison ended with status {process.wait()}")
    return json.loads(line)


@contextmanager
def _worker(sources: Path, target: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(sources)}
    name, _, size = target.partition(":")
    code = _SEARCHED if name.startswith(SEARCH) else _FUSED
    words = [code + _BLOCKS, _fused(name.removeprefix(SEARCH), size)] if size else [_SCHEDULED + _BLOCKS, name]
    command = [sys.executable, "-c", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _fused(name: str, size: str) -> str:
    """Return the argument of `_FUSED` and `_SEARCHED`."""
    owns_rates, has_lengths = name.startswith(OWN), name.startswith(LENGTHS)
    name = name.removeprefix(OWN).removeprefix(LENGTHS)
    target = TARGETS.get(name, Target(name))
    if has_lengths and target.kind != "classifier":
        raise InputError(f"versions: expected a classifier, whose batches may have any length, got {name}")
    if not size.isdecimal() or target.kind == "gan":
        raise InputError(
            f"versions: expected a target with one model and a number, such as mlp-32:8, got {name}:{size}"
        )
    lengths = NUM_LENGTHS * has_lengths
    options = dict(target.options)
    return json.dumps([target.entry, target.kind, int(size), target.batch_size, options, owns_rates, lengths])


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = []
    for name, row in result["targets"].items():
        other, this = row["other"], row["this"]
        spread = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        verdicts = f"{other['verdict']}, {this['verdict']}"
        first = f"{row['first_ratio']:.2f}" if "first_ratio" in row else "-"
        rows.append((name, f"{other['step_ms']:.3f}", f"{this['step_ms']:.3f}", spread, first, verdicts))
    columns = ("target", "other ms", "this ms", "other over this", "first call", "verdicts")
    yield table(f"another version's steps; geometric mean {result['geometric_mean']:.3f}", columns, rows)
