"""The speedup that a verdict promises, beside the one that the next 200 steps have.

Each run is a process of its own: a new schedule decides, then planned and eager steps follow in blocks that are long
enough for caches and threads to settle. With a neighbour, another training has the same cores, from before the search
(``before``) or from the verdict on (``after``).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import hocket
from benchmarks.bench import Save, table_of, unsaved
from benchmarks.contenders import job_of, until_decided
from benchmarks.ranks import in_process, started
from benchmarks.turns import in_turns
from hocket import zoo
from hocket.reporting import lower_quartile

TARGETS = ("mlp", "digits-cnn", "lenet", "lstm-cells", "transformer", "bert-tiny", "gpt2", "resnet20/4")
NEIGHBOURS = ("none", "before", "after")
BLOCKS, BLOCK, SETTLING = 4, 47, 3  # 200 planned steps
MAX_CALLS = 1000
TIMEOUT_S = 600.0


def run(
    targets: tuple[str, ...] = TARGETS, runs: int = 20, neighbours: tuple[str, ...] = NEIGHBOURS, save: Save = unsaved
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

    ``met`` is the ratio of lower quartiles afterwards, ``met_total`` that of all time, which a disturbed program feels.
    A speedup is ``kept`` if ``met`` is at least the promise's ``low``, and ``noticed`` is a schedule that has decided
    anew, or has gone eager, within these steps.
    """
    job = job_of(target)
    with started(_train, [()] if neighbour != "none" else [], daemon=True) as pipes:
        for pipe in pipes:
            pipe.recv()  # its job is loaded
            if neighbour == "before":
                pipe.send("start")
        fast = hocket.schedule(job.step, job.model, job.optimizer, cache=False)
        found: dict[str, Any] = {"calls": until_decided(fast, job, MAX_CALLS)}
        decision = fast.decision
        found |= {"verdict": str(fast.verdict), "why": fast.why}
        low, high = decision.promised or (None, None)
        found |= {"promised": decision.speedup, "low": low, "high": high}
        for pipe in pipes if neighbour == "after" else ():
            pipe.send("start")
        if str(fast.verdict) != "planned":
            fast.close()
            return found | {"met": None, "met_total": None, "kept": True, "noticed": False}
        verdicts = len(fast.history)
        # Not the schedule itself, whose lanes would be closed after a block.
        contenders = {"planned": lambda batch: fast(batch), "eager": job.step}
        times_ms = in_turns(contenders, job.batch, rounds=BLOCKS, block=BLOCK, warm_up=SETTLING)
        noticed = len(fast.history) > verdicts or not fast.decided or str(fast.verdict) != "planned"
        fast.close()
    met = lower_quartile(times_ms["eager"]) / lower_quartile(times_ms["planned"])
    found |= {"met": met, "met_total": sum(times_ms["eager"]) / sum(times_ms["planned"])}
    return found | {"kept": low is None or met >= low, "noticed": noticed}


def _train(pipe: Any) -> None:
    """Another training of this machine's cores."""
    job = zoo.load("mlp")
    pipe.send("loaded")
    pipe.recv()
    number = 0
    while True:
        job.step(job.batch(number))
        number += 1


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    rows = []
    for name, by_neighbour in result["targets"].items():
        for neighbour, found in by_neighbour.items():
            planned = [each for each in found["runs"] if each["met"] is not None]
            medians = {
                key: median(each[key] for each in planned) for key in ("promised", "met", "met_total") if planned
            }
            rows.append(
                {"target": name, "by": neighbour, **found, **medians, "of": len(found["runs"]), "n": len(planned)}
            )
    columns = {
        **{"target": "{target}", "neighbour": "{by}", "promised": "{promised:.2f}", "met": "{met:.2f}"},
        **{"met by all time": "{met_total:.2f}", "planned": "{n} of {of}", "kept": "{kept}", "noticed": "{noticed}"},
    }
    yield table_of("speedups over eager, promised and met", columns, rows)
