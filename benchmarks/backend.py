"""Backends of `torch.compile` in turns with eager, each on a twin of the same job: ``python -m benchmarks backend``.

Each contender has a process of its own, as a training has (`benchmarks.turns`).

- ``dynamo``: Dynamo's graphs as they stand, with Dynamo's guards: no backend can undo their time;
- ``aot_eager``: the graphs of AOTAutograd op by op, what a region has to beat;
- ``bitwise`` and ``close``: the model compiled with ``backend="hocket"`` and these ``numerics``;
- ``+update``: and `hocket.schedule_update` for the optimizer, or for Inductor a compiled ``optimizer.step``;
- ``schedule``: the whole step by `hocket.schedule`.

Regions and updates have decided before they are timed, their turns with graphs without a plan are over, and their
audits go on. With ``close`` their forms are compiled before that, as a training does by itself after half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hocket
from benchmarks.bench import Save, by_target, check_names, columns_of, table_of, unsaved
from benchmarks.contenders import Step, compared, compiled_step, eager_step, job_of, scheduled_step
from benchmarks.turns import title
from hocket.autotune.comparison import MAX_ATTEMPTS, NUM_ROUNDS, STEPS_IN_A_ROW
from hocket.dynamo import regions
from hocket.job import Job

# The options that compile the model, and the kind of update: "eager", "planned" or "compiled".
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "dynamo": ({"backend": "eager"}, "eager"),
    "aot_eager": ({"backend": "aot_eager"}, "eager"),
    "bitwise": ({"backend": "hocket", "options": {"numerics": "bitwise"}}, "eager"),
    "close": ({"backend": "hocket", "options": {"numerics": "close"}}, "eager"),
    "inductor": ({}, "eager"),
    "bitwise+update": ({"backend": "hocket", "options": {"numerics": "bitwise"}}, "planned"),
    "close+update": ({"backend": "hocket", "options": {"numerics": "close"}}, "planned"),
    "inductor+update": ({}, "compiled"),
}
CONTENDERS = (*WAYS, "schedule")
TARGETS = ("mlp", "gpt2", "resnet20/4", "lstm-cells/20", "convmixer")
BLOCK = 8
# Steps after which a region that has not decided is timed as it is.
MAX_SEARCHED = 400
# Steps in which graphs with a plan take turns with those without, at the most: once more when forms are compiled.
MAX_TURNS = 2 * (2 * NUM_ROUNDS * MAX_ATTEMPTS + 1) * STEPS_IN_A_ROW


def run(targets: tuple[str, ...] = TARGETS, *, rounds: int = 12, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target."""
    check_names("backend", targets, TARGETS)
    ways: dict[str, tuple[Any, ...]] = {"eager": (eager_step,), **{label: (_regional_step, label) for label in WAYS}}
    ways["schedule"] = (scheduled_step, "bitwise")
    return by_target(targets, lambda target: compared(ways, job_of, target, rounds, BLOCK), save)


def _regional_step(job: Job, label: str) -> tuple[Step | None, dict[str, Any]]:
    """A compiled step whose regions and updates have decided."""
    options, update = WAYS[label]
    updates: list[hocket.Schedule] = []
    if update == "planned":
        numerics = options["options"]["numerics"]
        updates = [hocket.schedule_update(each, numerics=numerics, cache=False) for each in job.optimizers]
    step, report = compiled_step(job, update == "compiled", False, **options)
    if step is not None and (regions() or updates):
        for number in range(MAX_SEARCHED):
            # A copy of a backward for gradients that are never asked for is never called.
            waiting = [each for each in regions() if each.verdict == "searching" and each.was_called]
            if not waiting and all(each.decided for each in updates):
                break
            step(job.batch(number))
        num_compiled = sum(region.compile() for region in regions() if region.was_called)
        for number in range(MAX_TURNS + (MAX_SEARCHED if num_compiled else 0)):
            step(job.batch(number))
    called = [region for region in regions() if region.was_called]
    verdicts = [(each.kind, each.verdict, each.why) for each in called]
    return step, {**report, "verdicts": verdicts, "updates": [(str(each.verdict), each.why) for each in updates]}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {"target": "{name}", **columns_of("speedup", CONTENDERS)}
    yield table_of(title(result), columns, result["targets"])
