"""Orders of transfers, measured: one worker and one server, real computing, a link of a given rate between them.

Each order runs as a job of its own (``hocket ps``), and the orders take turns, round by round, so that what else the
machine does falls on all of them alike. A step's time is the median over all steps of all rounds; E is TicTac's
efficiency, (U - m) / (U - L), of the time that was predicted and of the one that was measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from benchmarks.namespaces import Namespace, linked, unavailable_reason
from hocket.errors import InputError

__all__ = ["ORDERS", "run"]

ORDERS = ("auto", "tac", "layer", "random")
PORT = "29571"
TIMEOUT_S = 900


def run(
    models: Sequence[str],
    *,
    mbits: Sequence[int],
    orders: Sequence[str] = ORDERS,
    rounds: int = 3,
    steps: int = 10,
    settings: Sequence[str] = (),
    save: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Every order of every model at every rate.

    Args:
        models: of the zoo.
        mbits: rates of the link, in Mbit/s each way.
        orders: of the planner ``transfers``.
        rounds: jobs of each order.
        steps: of a job; the first one captures and plans, and does not count.
        settings: further words for ``hocket ps``, such as ``--batch-size 4``.
        save: told the result so far, after each model and rate.

    Raises:
        InputError: there can be no network namespaces here; says why.
    """
    if (reason := unavailable_reason()) is not None:
        raise InputError(f"transfers over real links are SKIPPED: {reason}")
    result: dict[str, Any] = {"rounds": rounds, "steps": steps, "settings": list(settings), "rows": []}
    for model in models:
        for mbit in mbits:
            jobs: dict[str, list[dict[str, Any]]] = {order: [] for order in orders}
            with linked(mbit) as (worker, server):
                for _ in range(rounds):
                    for order in orders:
                        jobs[order].append(_job(model, order, steps, settings, worker, server))
            found = {order: _summary(made) for order, made in jobs.items()}
            result["rows"].append({"model": model, "mbit_per_s": mbit, "orders": found})
            if save is not None:
                save(result)
    return result


def _job(
    model: str, order: str, steps: int, settings: Sequence[str], worker: Namespace, server: Namespace
) -> dict[str, Any]:
    """What rank 0 of one job says."""
    words = [sys.executable, "-m", "hocket", "ps", model, "-w", "1", "-s", "1", "--order", order]
    words += ["--steps", str(steps), "--timeout", "300", "--format", "json", *settings]
    processes = []
    for rank, end in enumerate((worker, server)):
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": worker.address,
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": end.interface,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                end.command(*words),
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        ends = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, said) in zip(processes, ends, strict=True):
        if process.returncode:
            raise InputError(f"{model}, order {order}: {said.strip().splitlines()[-1] if said.strip() else 'no word'}")
    found: dict[str, Any] = json.loads(ends[0][0])
    return found


def _summary(jobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    times = sorted(us for job in jobs for us in job["steps_us"][1:])
    step_us, predicted_us = median(times), median(job["predicted_us"] for job in jobs)
    lower_us, upper_us = (median(job[bound] for job in jobs) for bound in ("lower_us", "upper_us"))
    room_us = upper_us - lower_us
    return {
        "step_us": step_us,
        "deciles_us": quantiles(times, n=10) if len(times) > 1 else [],
        "predicted_us": predicted_us,
        "efficiency_predicted": (upper_us - predicted_us) / room_us if room_us else 1.0,
        "efficiency_measured": (upper_us - step_us) / room_us if room_us else 1.0,
        "potential": room_us / lower_us,
        "planner": jobs[0]["planner"],
        "steps_in_order": sum(job["steps_in_order"] for job in jobs),
        "steps": sum(job["steps"] for job in jobs),
    }
