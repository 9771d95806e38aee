"""A process of a measurement of agents: ``python -m benchmarks.transfers_agents SETTINGS``, see `transfers_real`.

Agents take turns, one for each order: nothing is pulled ahead, so a call begins when it asks for its first parameter.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from hocket import distribute
from hocket.cli.targets import wait_policy
from hocket.zoo import load

TIMEOUT_S = 300.0


def _publish(settings: Mapping[str, Any]) -> None:
    """A rank of the job. Ends when it is killed."""
    job = load(settings["model"], **{**settings["sizes"], "batch_size": 2})
    options: dict[str, Any] = {"num_servers": 1, "timeout_s": TIMEOUT_S}
    if settings["rank"] == 1:
        distribute.server(job.step, job.model, job.optimizer, job.batch(0), **options)
        return
    fast = distribute.worker(job.step, job.model, job.optimizer, order="layer", **options)
    fast(job.batch(0))
    fast.publish()
    threading.Event().wait()


def _call(settings: Mapping[str, Any]) -> None:
    """Agents, one after another."""
    job = load(settings["model"], **settings["sizes"])
    model, inputs = job.models[0].eval(), job.batch(0)[0]
    for order in settings["orders"]:
        options: dict[str, Any] = {"order": order, "ahead": False, "every_call": True, "timeout_s": TIMEOUT_S}
        times_us, in_order = [], 0
        with distribute.agent(model, settings["address"], **options) as fresh:
            fresh(inputs)
            assert fresh.plan is not None
            assert fresh.bounds is not None
            planned = [op[5:] for lane in fresh.plan.lanes if lane.kind == "channel" for op in lane.ops]
            for _ in range(settings["calls"]):
                begin_s = time.perf_counter()
                fresh(inputs)
                times_us.append((time.perf_counter() - begin_s) * 1e6)
                in_order += list(fresh.arrivals()["server0"][: len(planned)]) == planned
        turn = {"order": order, "calls_us": times_us, "predicted_us": fresh.predicted_us, "in_order": in_order}
        turn |= {"lower_us": fresh.bounds.lower_us, "upper_us": fresh.bounds.upper_us}
        print(json.dumps(turn), flush=True)


if __name__ == "__main__":
    wait_policy()
    told = json.loads(sys.argv[1])
    (_call if told["rank"] is None else _publish)(told)
