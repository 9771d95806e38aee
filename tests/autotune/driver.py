"""A tuner driven by real steps whose times are made up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hocket
from hocket.autotune.candidate import Item, TimedStep
from hocket.autotune.decision import Decision
from hocket.autotune.runner import StepRunner
from hocket.autotune.store import DecisionStore
from hocket.autotune.tuner import Tuner
from hocket.backends import CpuBackend
from hocket.session import Schedule

# More items than any search asks for.
MANY = 400


def searched(
    job: hocket.Job, takes_ms: Callable[[TimedStep], float], cache: Path | bool = False, cores: int = 1, **options: Any
) -> tuple[Decision, list[Item]]:
    """A new search for this job, as by a new process: what was decided, and what was asked for."""
    fast = Schedule(job.step, job.model, job.optimizer, machine=hocket.Machine.of(cores=cores), cache=cache, **options)
    config = fast._pool.config
    assert isinstance(config.store, DecisionStore)
    backend = CpuBackend(fast.machine, "auto")
    tuner = Tuner(config, backend)
    decision, items = drive(tuner, StepRunner(config, backend), job, takes_ms)
    if not decision.is_recalled:
        tuner.recall.keep(decision)
    decision.close()
    return decision, items


def drive(
    tuner: Tuner, runner: StepRunner, job: hocket.Job, takes_ms: Callable[[TimedStep], float]
) -> tuple[Decision, list[Item]]:
    """Perform what a tuner asks for, and send it made-up times."""
    search = tuner.search()
    item, items = next(search), []
    for number in range(MANY):
        items.append(item)
        runner.start()
        found = runner.perform(item, job.batch(number))
        try:
            item = search.send(takes_ms(item) if isinstance(item, TimedStep) else found)
        except StopIteration as end:
            return end.value, items
    raise AssertionError(f"no decision after {MANY} items")


def stages(items: list[Item]) -> list[str]:
    """The stages of a search, each once, and how many items it had: ``watch 3``."""
    found: list[tuple[str, int]] = []
    for item in items:
        name = item.stage if not isinstance(item, TimedStep) or item.executor is not None else f"{item.stage} eager"
        count = found.pop()[1] if found and found[-1][0] == name else 0
        found.append((name, count + 1))
    return [f"{name} {count}" for name, count in found]
