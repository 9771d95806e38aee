"""Another version's steps against this one's: two processes, in turns, on the same targets.

A target is a zoo entry, whose step is scheduled, or one of the fuse bench with a number of models, as in ``mlp-32:8``,
whose models are fused, or ``search-mlp-32:12``, a search of that number of trials. ``own-mlp-32:8`` gives each model a
rate of its own. ``lengths-mlp-32:8`` and ``search-lengths-mlp-32:12`` train with batches of 40 lengths.

Each process prepares the step with its own sources and then makes a block of steps whenever it is asked to. The two
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
from benchmarks.bench import Save, by_target, table_of, unsaved
from benchmarks.fuse.targets import TARGETS, Target
from hocket.errors import InputError
from hocket.reporting import lower_quartile

STEPS_IN_A_ROW = 10
# Before the name of a target: one of its searches is a step, its models have rates of their own, its batches lengths.
SEARCH, OWN, LENGTHS = "search-", "own-", "lengths-"
SEARCHES_IN_A_ROW = 1
NUM_LENGTHS = 40

# These run in both processes, so they ask for nothing that an older version lacks. They say what they have prepared,
# and make `fast` and `plain` steps of a number.
_BEGIN = """
import copy, inspect, itertools, json, sys
from statistics import median
from time import perf_counter
import torch
from torch.nn.functional import cross_entropy
import hocket
from hocket import optim, zoo
entry, kind, size, batch_size, options, owns_rates, lengths = json.loads(sys.argv[1])
"""
_SCHEDULED = """
job = zoo.load(entry)
options = {"cache": False} if "cache" in inspect.signature(hocket.schedule).parameters else {}
scheduled, calls = hocket.schedule(job.step, job.model, job.optimizer, **options), 0
fast, plain = lambda number: scheduled(job.batch(number)), lambda number: job.step(job.batch(number))
while not scheduled.decided:
    fast(calls)
    calls += 1
said = {"calls": calls, "verdict": str(scheduled.verdict), "why": scheduled.why}
"""
_FUSED = """
jobs = [zoo.load(entry, seed=n, batch_size=batch_size, num_batches=1, **options) for n in range(size)]
loss = {
    "classifier": cross_entropy,
    "words": lambda out, words: cross_entropy(out.flatten(0, 1), words.flatten()),
    "own": lambda out: out.loss,
}[kind]
calls = 60 + 4 * lengths
if lengths:
    rows = zoo.load(entry, seed=0, batch_size=lengths + 8, num_batches=1, **options).batch(0)
def batch_of(number):
    return tuple(each[: 8 + number % lengths] for each in rows) if lengths else jobs[0].batch(0)
def step_of(optimizer, losses):
    def step(number):
        optimizer.zero_grad()
        losses(batch_of(number)).sum().backward()
        optimizer.step()
    return step
rates = [1e-3 * (1 + number / size) if owns_rates else 1e-3 for number in range(size)]
def plain_step(model, rate):
    def losses(batch):
        return loss(model(**batch)) if kind == "own" else loss(model(batch[0]), batch[1])
    return step_of(torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), losses)
models, firsts_ms = [model for own in jobs for model in own.models], []
for _ in range(6):  # the first one imports what is not imported yet
    start = perf_counter()
    array = hocket.fuse(models, shared=True)
    fast = step_of(
        optim.SGD(array.parameters(), lr=rates if owns_rates else 1e-3, momentum=0.9),
        lambda batch: array.losses(loss, batch) if kind == "own" else array.losses(loss, batch[0], batch[1]),
    )
    fast(0)
    firsts_ms.append((perf_counter() - start) * 1e3)
singles = list(map(plain_step, models, rates))
def plain(number):
    for single in singles:
        single(number)
for number in range(calls):  # by which choices are made
    fast(number)
plain(0)
why = str([str(getattr(each, "winner", each)) for each in array.choices])
said = {"first_ms": median(firsts_ms[1:]), "calls": calls, "verdict": "fused", "why": why}
"""
_SEARCHED = """
import optuna
from optuna.distributions import FloatDistribution, IntDistribution
optuna.logging.set_verbosity(optuna.logging.ERROR)
many, sized = max(16, lengths), lengths + 8 if lengths else batch_size
loaded = zoo.load(entry, seed=0, batch_size=sized, num_batches=many + 8, **options)
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
    hocket.tune(train, space, size, 8, study=study, executor=executor)
    return study.best_value
fast, plain = lambda number: searched("auto"), lambda number: searched("serial")
start = perf_counter()
why = str(searched("auto"))
said = {"first_ms": (perf_counter() - start) * 1e3, "calls": 1, "verdict": "searched", "why": why}
"""
# A line in, a line of milliseconds out.
_BLOCKS = """
print(json.dumps(said), flush=True)
numbers = itertools.count()
for line in sys.stdin:
    kind, count = line.split()
    times = []
    for number in itertools.islice(numbers, int(count)):
        start = perf_counter()
        (plain if kind == "eager" else fast)(number)
        times.append((perf_counter() - start) * 1e3)
    print(json.dumps(times), flush=True)
"""


def run(
    other: Path, targets: tuple[str, ...] = ("mlp", "lenet", "digits-cnn"), rounds: int = 10, save: Save = unsaved
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
    sources = {"other": other, "this": Path(hocket.__file__).parents[1]}
    found, processes = dict[str, Any](), dict[str, Any]()
    with ExitStack() as stack:
        # One after the other: a search beside another one would decide by what it disturbs.
        for name, path in sources.items():
            processes[name] = stack.enter_context(_worker(path, target))
            found[name] = _answer(processes[name])
        times: dict[str, list[list[float]]] = {name: [] for name in sources}
        eager: dict[str, list[float]] = {name: [] for name in sources}
        for _ in range(rounds):
            for name, process in processes.items():
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
        **{"low": ratios[quarter], "high": ratios[-1 - quarter]},
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
    name, _, size = target.partition(":")
    code = _SEARCHED if name.startswith(SEARCH) else _FUSED if size else _SCHEDULED
    settings = _settings(name.removeprefix(SEARCH), size) if size else [name, *[None] * 6]
    command = [sys.executable, "-c", _BEGIN + code + _BLOCKS, json.dumps(settings)]
    environment, pipe = {**os.environ, "PYTHONPATH": str(sources)}, subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _settings(name: str, size: str) -> list[Any]:
    """Return what `_BEGIN` reads, of a number of models or trials."""
    owns_rates, lengths = name.startswith(OWN), NUM_LENGTHS * name.startswith(LENGTHS)
    name = name.removeprefix(OWN).removeprefix(LENGTHS)
    target = TARGETS.get(name, Target(name))
    if not size.isdecimal() or target.kind == "gan" or (lengths and target.kind != "classifier"):
        raise InputError(
            "versions: expected a target with one model and a number, such as mlp-32:8, and to have lengths a "
            f"classifier, got {name}:{size}"
        )
    return [target.entry, target.kind, int(size), target.batch_size, dict(target.options), owns_rates, lengths]


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {
        **{"target": "{name}", "other ms": "{other[step_ms]:.3f}", "this ms": "{this[step_ms]:.3f}"},
        **{"other over this": "{ratio:.2f} ({low:.2f} to {high:.2f})", "first call": "{first_ratio:.2f}"},
        "verdicts": "{other[verdict]}, {this[verdict]}",
    }
    title = f"another version's steps; geometric mean {result['geometric_mean']:.3f}"
    yield table_of(title, columns, result["targets"])
