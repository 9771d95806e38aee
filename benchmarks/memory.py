"""Peak memory of a scheduled step, by stage, each target in a process of its own: ``python -m benchmarks memory``.

First eager steps, then the same job through `hocket.schedule`, searched, and on Linux the peak of the process's
resident memory is set back after each step, so that it is known which stage made it. Then planned steps, and the search
that follows once compiled forms are there. Figures are those of the whole process, which torch alone makes 200 MB
large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import Save, by_target, table_of, unsaved
from benchmarks.contenders import job_of, until_decided
from benchmarks.ranks import in_process, is_measurable, peak_bytes, resident_bytes, set_back_peak
from hocket.errors import InputError
from hocket.job import Job
from hocket.session import Schedule

TARGETS = ("mlp", "gpt2", "resnet20/4", "resnet20/64")
# The largest allowed peak of a scheduled step, over eager's.
BAR = 1.1
EAGER_STEPS, PLANNED_STEPS = 6, 30
MAX_STEPS = 4000
TIMEOUT_S = 1200.0
PEAKS = ("search", "planned", "compiled_search", "compiled_planned")


def run(targets: tuple[str, ...] = TARGETS, *, save: Save = unsaved) -> dict[str, Any]:
    """Measure each target in a process of its own.

    Raises:
        InputError: the system does not tell what a process has held.
    """
    if not is_measurable():
        raise InputError("what a process held at most is only known on Linux (/proc/self/clear_refs)")
    return by_target(targets, lambda target: in_process(measure, target, timeout_s=TIMEOUT_S), save)


def measure(target: str) -> dict[str, Any]:
    """One target, in this process: peaks by stage, of both searches, and of the planned steps after each."""
    job = job_of(target)
    bare = resident_bytes()
    set_back_peak()
    for number in range(EAGER_STEPS):
        job.step(job.batch(number))
    eager = peak_bytes()
    row: dict[str, Any] = {"bare_bytes": bare, "eager_bytes": eager, "stages": {}, "compiled_stages": {}}
    with tempfile.TemporaryDirectory() as folder:
        stages: dict[str, float] = row["stages"]

        def note(stage: str, _: int) -> None:
            stages[stage] = max(stages.get(stage, 0.0), peak_bytes())
            set_back_peak()

        fast = Schedule(job.step, job.model, job.optimizer, numerics="close", cache=Path(folder), on_progress=note)
        row |= _peaks("", fast, job, stages)
        if fast.compile():
            stages = row["compiled_stages"]
            row |= _peaks("compiled_", fast, job, stages)
        best = fast.decision.best
        row |= {"verdict": str(fast.verdict), "form": None if best is None else best.form}
        fast.close()
    row |= {f"{each}_ratio": row[f"{each}_bytes"] / eager for each in PEAKS if f"{each}_bytes" in row}
    return row | {"within": all(row[name] <= BAR for name in row if name.endswith("_ratio"))}


def _peaks(prefix: str, fast: Schedule, job: Job, stages: dict[str, float]) -> dict[str, float]:
    """The peak of a search and of planned steps after it."""
    set_back_peak()
    fast(job.batch(0))
    until_decided(fast, job, MAX_STEPS)
    search = max(stages.values(), default=0.0)
    for number in range(PLANNED_STEPS):
        if number == PLANNED_STEPS // 3:  # the first ones are audited
            set_back_peak()
        fast(job.batch(number))
    return {f"{prefix}search_bytes": search, f"{prefix}planned_bytes": peak_bytes()}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    columns = {"target": "{name}", "bare bytes": "{bare_bytes:.4g}", "eager bytes": "{eager_bytes:.4g}"}
    columns |= {each.replace("_", " "): f"{{{each}_ratio:.2f}}" for each in PEAKS} | {f"within {BAR}": "{within}"}
    yield table_of("peak of the process, over that of eager steps", columns, result["targets"])
