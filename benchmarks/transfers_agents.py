"""Forwards of an agent that pulls all parameters in every call, by order, over a link of a given rate.

A job of one worker and one server publishes one version, and does nothing more; both are at one end of the link. At the
other end agents take turns, one for each order: nothing is pulled ahead, so a call begins when it asks for its first
parameter. ``python -m benchmarks.transfers_agents SETTINGS`` is one of these processes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench import Save, unsaved
from benchmarks.namespaces import linked
from benchmarks.transfers_real import MBITS, TARGETS, check_orders, over_links, process_at, summary
from benchmarks.transfers_real import tables as tables  # of `Bench`
from hocket import distribute
from hocket.cli.targets import wait_policy
from hocket.errors import InputError
from hocket.zoo import load

ORDERS: tuple[str, ...] = ("auto", "tac", "layer", "random", "reverse")
PORT = "29575"
TIMEOUT_S = 300.0


def run(
    targets: Sequence[str] = TARGETS,
    *,
    mbits: Sequence[int] = MBITS,
    orders: Sequence[str] = ORDERS,
    rounds: int = 1,
    steps: int = 5,
    batch_size: int | None = None,
    seconds: float | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Every order of every model at every rate. Arguments as `benchmarks.transfers_real.run` has them, for calls.

    Raises:
        InputError: there can be no network namespaces here, or a process failed. Says why.
    """
    check_orders(orders, ORDERS)

    def measured(model: str, sizes: dict[str, int], mbit: int, _: float | None) -> dict[str, Any]:
        turns = _turns(model, sizes, mbit, [*orders] * rounds, steps)
        by_order = {order: [turn for turn in turns if turn["order"] == order] for order in orders}
        return {order: summary([us for turn in own for us in turn["calls_us"]], own) for order, own in by_order.items()}

    return over_links(measured, targets, mbits, batch_size, seconds, save, forward_only=True)


def _turns(model: str, sizes: Mapping[str, int], mbit: int, orders: Sequence[str], calls: int) -> list[dict[str, Any]]:
    """Run the agent, and return what it reports of each turn."""
    with linked(mbit) as (agent, job):
        settings = {"model": model, "sizes": sizes, "address": f"{job.address}:{PORT}"}
        store, module = (job.address, PORT), "transfers_agents"
        ranks = [
            process_at(job, rank, store, module, json.dumps({**settings, "rank": rank}), is_heard=False)
            for rank in (0, 1)
        ]
        wanted = {**settings, "orders": orders, "calls": calls, "rank": None}
        caller = process_at(agent, 0, store, module, json.dumps(wanted))
        try:
            out, said = caller.communicate(timeout=3 * TIMEOUT_S)
        finally:
            for process in (*ranks, caller):
                process.kill()
                process.wait()
    if caller.returncode:
        raise InputError(f"agents of {model}: {said.strip().splitlines()[-1] if said.strip() else 'no word'}")
    return [json.loads(line) for line in out.splitlines()]


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
