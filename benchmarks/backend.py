"""Backends of `torch.compile` in turns with eager, each on a twin of the same job: ``python -m benchmarks backend``.

Each contender has a process of its own, as a training has. In one process the teams of threads of nine contenders would
slow each other down, eager most of all.

- ``dynamo``: Dynamo's graphs as they stand, with Dynamo's guards: no backend can undo their time;
- ``aot_eager``: the graphs of AOTAutograd op by op, what a region has to beat;
- ``bitwise`` and ``close``: the model compiled with ``backend="hocket"`` and these ``numerics``;
- ``+update``: and `hocket.schedule_update` for the optimizer, or for Inductor a compiled ``optimizer.step``;
- ``schedule``: the whole step by `hocket.schedule`.

Regions and updates have decided before they are timed, their turns with what has no plan are over, and their audits go
on. With
``close`` their forms are compiled before that, as a training does by itself when it has run for half a minute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from time import perf_counter
from typing import Any

import hocket
from benchmarks.bench import Save, by_target, check_names, columns_of, table_of, unsaved
from benchmarks.contenders import compiled_step, decided, job_of
from benchmarks.turns import in_turns, summaries, title
from hocket.autotune.turns import BLOCK as BLOCK_OF_TURNS
from hocket.autotune.turns import MAX_ATTEMPTS, NUM_ROUNDS
from hocket.dynamo import regions
from hocket.job import Job

# How the model is compiled, and who makes the update: "eager", "planned" or "compiled". Options that are the defaults
# tell two ways apart: Dynamo would give what it has compiled for one to the other, whose model has the same code.
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "dynamo": ({"backend": "eager"}, "eager"),
    "aot_eager": ({"backend": "aot_eager"}, "eager"),
    "bitwise": ({"backend": "hocket", "options": {"numerics": "bitwise"}}, "eager"),
    "close": ({"backend": "hocket", "options": {"numerics": "close"}}, "eager"),
    "inductor": ({}, "eager"),
    "bitwise+update": ({"backend": "hocket", "options": {"numerics": "bitwise", "cache": False}}, "planned"),
    "close+update": ({"backend": "hocket", "options": {"numerics": "close", "cache": False}}, "planned"),
    "inductor+update": ({"options": {"fallback_random": False}}, "compiled"),
}
CONTENDERS = (*WAYS, "schedule")
TARGETS = ("mlp", "gpt2", "resnet20/4", "lstm-cells/20", "convmixer")
BLOCK = 8
ANSWER = "hocket: "  # before a line that is meant for the other process
# Steps after which a region that has not decided is timed as it is.
MAX_SEARCHED = 400
# Steps in which graphs and updates with a plan take turns with those without, at the most: updates may do so twice.
MAX_TURNS = 2 * (2 * NUM_ROUNDS * MAX_ATTEMPTS + 1) * BLOCK_OF_TURNS


def run(targets: tuple[str, ...] = TARGETS, *, rounds: int = 12, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target."""
    check_names("backend", targets, TARGETS)
    return by_target(targets, lambda target: _measured(target, rounds), save)


class _Compiled:
    """A compiled step whose lanes can be closed, as a schedule's are."""

    def __init__(self, job: Job, label: str) -> None:
        options, update = WAYS[label]
        known = set(regions())
        self.updates: list[hocket.Schedule] = []
        if update == "planned":
            numerics = options["options"]["numerics"]
            self.updates = [hocket.schedule_update(each, numerics=numerics, cache=False) for each in job.optimizers]
        self.step, self.report = compiled_step(job, update == "compiled", False, **options)
        self.regions = [region for region in regions() if region not in known]
        if self.step is None or not (self.regions or self.updates):
            return
        for number in range(MAX_SEARCHED):
            if self._is_decided():
                break
            self.step(job.batch(number))
        num_compiled = sum(region.compile() for region in self.regions if region.was_called)
        for number in range(MAX_TURNS + (MAX_SEARCHED if num_compiled else 0)):
            self.step(job.batch(number))

    def __call__(self, batch: Any) -> Any:
        assert self.step is not None
        return self.step(batch)

    def _is_decided(self) -> bool:
        # A copy of a backward for gradients that are never asked for is never called.
        waiting = [each for each in self.regions if each.verdict == "searching" and each.was_called]
        return not waiting and all(each.decided for each in self.updates)


class _Worker:
    """A contender in a process of its own. `said` has its verdicts, or why it failed."""

    def __init__(self, target: str, label: str) -> None:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "benchmarks.backend", target, label]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.said: dict[str, Any] = self._answer()

    def seconds(self, _: Any = None) -> float:
        """Make a step and return what it took."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: float = self._answer()
        return found

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"a process of the comparison ended with status {self._process.wait()}")


def _serve(target: str, label: str) -> None:
    """Make a step for each line of the input, and write what it took."""
    job = job_of(target)
    step: Callable[[Any], Any] | None = job.step
    said: dict[str, Any] = {}
    if label == "schedule":
        step = decided(job, "bitwise")
        said = {"verdicts": [("step", str(step.verdict), step.why)]}
    elif label != "eager":
        made = _Compiled(job, label)
        said["verdicts"] = [(one.kind, one.verdict, one.why) for one in made.regions if one.was_called]
        said["updates"] = [(str(one.verdict), one.why) for one in made.updates]
        step = made.step
        if step is None:
            said["failed"] = made.report
    print(ANSWER + json.dumps(said), flush=True)
    for number, _ in enumerate(sys.stdin):
        assert step is not None
        batch = job.batch(number)
        start = perf_counter()
        step(batch)
        print(ANSWER + json.dumps(perf_counter() - start), flush=True)


def _measured(target: str, rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        made: dict[str, _Worker] = {}
        for label in ("eager", *CONTENDERS):  # one after the other: a search beside another one would be disturbed
            made[label] = _Worker(target, label)
            stack.callback(made[label].end)
        contenders: dict[str, Any] = {label: each for label, each in made.items() if "failed" not in each.said}
        found = summaries(in_turns(contenders, rounds=rounds, block=BLOCK, warm_up=4))
    return {**found, "said": {label: each.said for label, each in made.items() if each.said}}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {"target": "{name}", **columns_of("speedup", CONTENDERS)}
    yield table_of(title(result), columns, result["targets"])


if __name__ == "__main__":
    _serve(*sys.argv[1:])
