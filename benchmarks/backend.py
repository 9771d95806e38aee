"""Backends of `torch.compile` in turns with eager: ``python -m benchmarks backend``.

Contenders, in one process, each on a twin of the same job (`benchmarks.turns`). The update is eager's but in the last:

- ``dynamo``: Dynamo's graphs as they stand (``backend="eager"``), with Dynamo's guards: no backend can undo their time;
- ``aot_eager``: the graphs of AOTAutograd op by op, what a region has to beat;
- ``bitwise`` and ``close``: the model compiled with ``backend="hocket"`` and these ``numerics``;
- ``inductor``: torch's own backend;
- ``schedule``: the whole step by `hocket.schedule`.

Regions have decided before they are timed, and their audits go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.contenders import compiled_step, decided, gpt2
from benchmarks.turns import in_turns
from hocket import zoo
from hocket.dynamo import Region, regions
from hocket.errors import InputError
from hocket.job import Job

__all__ = ["CONTENDERS", "run"]

CONTENDERS = ("dynamo", "aot_eager", "bitwise", "close", "inductor", "schedule")
TARGETS: dict[str, Callable[[], Job]] = {
    "mlp": lambda: zoo.load("mlp"),
    "gpt2": lambda: gpt2(64),
    "resnet20": lambda: zoo.load("resnet20", batch_size=4),
    "lstm-cells": lambda: zoo.load("lstm-cells", batch_size=20),
}
BLOCK = 8
# Steps after which a region that has not decided is timed as it is.
MAX_SEARCHED = 400


def run(
    targets: Sequence[str] = (),
    *,
    rounds: int = 12,
    close: bool = True,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Measure each target.

    Args:
        targets: names of some. All by default.
        rounds: blocks of 8 steps for each contender.
        close: measure ``close`` too.
        save: called with the result so far after each target.

    Raises:
        InputError: a target is not known.
    """
    for name in targets:
        if name not in TARGETS:
            raise InputError(f"bench backend: expected some of {', '.join(TARGETS)}, got {name!r}")
    result: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "targets": {}}
    for name in targets or TARGETS:
        result["targets"][name] = _measured(TARGETS[name], rounds, close)
        save(result)
    return result


def _measured(make: Callable[[], Job], rounds: int, close: bool) -> dict[str, Any]:
    eager = make()
    contenders: dict[str, Callable[[Any], Any]] = {"eager": eager.step}
    failed: dict[str, Any] = {}
    found: dict[str, list[Region]] = {}
    ways: dict[str, dict[str, Any]] = {
        "dynamo": {"backend": "eager"},
        "aot_eager": {"backend": "aot_eager"},
        "bitwise": {"backend": "hocket", "options": {"numerics": "bitwise"}},
        "close": {"backend": "hocket", "options": {"numerics": "close"}},
        "inductor": {},
    }
    for label, options in ways.items():
        if label == "close" and not close:
            continue
        known = set(regions())
        job = make()
        step, report = compiled_step(job, False, False, **options)
        if step is None:
            failed[label] = report
            continue
        contenders[label] = step
        found[label] = [region for region in regions() if region not in known]
        for number in range(MAX_SEARCHED):
            if all(region.verdict != "searching" for region in found[label]):
                break
            step(job.batch(number))
    contenders["schedule"] = decided(make(), "bitwise")
    turns = in_turns(contenders, eager.batch, rounds=rounds, block=BLOCK)
    made = found.get("bitwise", [])
    return {
        "times": {label: turn.summary() for label, turn in turns.items()},
        "speedup": {label: turns["eager"].median_ms / turn.median_ms for label, turn in turns.items()},
        "regions": len(made),
        "planned": sum(region.verdict == "planned" for region in made),
        "verdicts": {label: [(each.kind, each.verdict, each.why) for each in some] for label, some in found.items()},
        "failed": failed,
    }
