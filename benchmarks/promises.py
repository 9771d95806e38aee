"""The speedup that a verdict promises, beside the one that the next 200 steps have.

Each run is a process of its own: a new schedule decides, then planned and eager steps follow in blocks that are long
enough for caches and threads to settle. With a neighbour, another training has the same cores, from before the search
(``before``) or from the verdict on (``after``).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import hocket
from benchmarks.bench import Save, unsaved
from benchmarks.contenders import job_of, until_decided
from benchmarks.ranks import in_process
from hocket import zoo
from hocket.cli.console import table
from hocket.reporting import lower_quartile
from hocket.reporting.words import count_text

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from hocket.job import Job

TARGETS = ("mlp", "digits-cnn", "lenet", "lstm-cells", "transformer", "bert-tiny", "gpt2", "resnet20/4")
NEIGHBOURS = ("none", "before", "after")
PLANNED_STEPS, BLOCKS, SETTLING = 200, 4, 3
MAX_CALLS = 1000
TIMEOUT_S = 600.0


def run(
    targets: tuple[str, ...] = TARGETS,
    runs: int = 20,
    neighbours: tuple[str, ...] = NEIGHBOURS,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure each target `runs` times beside each kind of neighbour (see `measure`). `save` gets the result so far."""
    result: dict[str, Any] = {"targets": {}}
    for target in targets:
        row = result["targets"].setdefault(target, {})
        for neighbour in neighbours:
            own = [in_process(measure, target, neighbour, timeout_s=TIMEOUT_S) for _ in range(runs)]
            row[neighbour] = {"runs": own} | {key: sum(each[key] for each in own) for key in ("kept", "noticed")}
            save(result)
    return result


def measure(target: str, neighbour: str = "none") -> dict[str, Any]:
    """Decide one target in this process, and time 200 planned steps in turns with eager ones.

    Returns:
        ``verdict`` and ``why``. ``promised``, ``low``, ``high``: the speedup that was promised, with its interval.
        ``met``: the ratio of lower quartiles afterwards. ``met_total``: that of all time, which a disturbed program
        feels. ``kept``: ``met`` is at least ``low``, or nothing was promised.
        ``noticed``: the schedule has decided anew, or has gone eager, within these steps.
    """
    job = job_of(target)
    found: dict[str, Any] = {}
    with _training() if neighbour != "none" else nullcontext() as start:
        if start is not None and neighbour == "before":
            start.set()
        fast = hocket.schedule(job.step, job.model, job.optimizer, cache=False)
        number = until_decided(fast, job, MAX_CALLS)
        decision = fast.decision
        found |= {"verdict": str(fast.verdict), "why": fast.why, "calls": number}
        found |= {"promised": decision.speedup, "low": decision.low, "high": decision.high}
        if start is not None and neighbour == "after":
            start.set()
        if str(fast.verdict) != "planned":
            fast.close()
            return found | {"met": None, "met_total": None, "kept": True, "noticed": False}
        verdicts = len(fast.history)
        planned_ms: list[float] = []
        eager_ms: list[float] = []
        for _ in range(BLOCKS):
            for times, step in ((planned_ms, fast), (eager_ms, job.step)):
                times += _block(step, job, PLANNED_STEPS // BLOCKS)
        noticed = len(fast.history) > verdicts or not fast.decided or str(fast.verdict) != "planned"
        fast.close()
    met = lower_quartile(eager_ms) / lower_quartile(planned_ms)
    found |= {"met": met, "met_total": sum(eager_ms) / sum(planned_ms)}
    return found | {"kept": decision.low is None or met >= decision.low, "noticed": noticed}


def _block(step: Callable[[Any], Any], job: Job, steps: int) -> list[float]:
    times_ms = []
    for number in range(steps):
        batch = job.batch(number)
        start = perf_counter()
        step(batch)
        times_ms.append((perf_counter() - start) * 1e3)
    return times_ms[SETTLING:]


@contextmanager
def _training() -> Iterator[Event]:
    """Another training of this machine's cores, which is loaded and begins when the event that is given is set."""
    spawn = multiprocessing.get_context("spawn")
    start, ready = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_train, args=(start, ready), daemon=True)
    process.start()
    try:
        ready.wait(TIMEOUT_S)
        yield start
    finally:
        process.kill()
        process.join()


def _train(start: Event, ready: Event) -> None:
    job = zoo.load("mlp")
    ready.set()
    start.wait()
    number = 0
    while True:
        job.step(job.batch(number))
        number += 1


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = []
    for name, row in result["targets"].items():
        for neighbour, found in row.items():
            planned = [each for each in found["runs"] if each["met"] is not None]
            figures = [
                f"{median(each[key] for each in planned):.2f}" if planned else "-"
                for key in ("promised", "met", "met_total")
            ]
            counts = [str(len(planned)), str(found["kept"]), str(found["noticed"])]
            rows.append((name, neighbour, *figures, *counts))
            runs = len(found["runs"])
    columns = ("target", "neighbour", "promised", "met", "met by all time", "planned", "kept", "noticed")
    yield table(f"speedups over eager, promised and met; of {count_text(runs, 'run')} each", columns, rows)
