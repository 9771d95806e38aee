"""A process of a measurement of transfers, see `benchmarks.transfers_real`: a rank of a job, or an agent.

A rank captures and profiles the step once. Then the orders take turns: each turn has wires and a plan of its own, and
goes on with the parameters that the one before left. The contender ``all-first`` has the order of first use, and
computes nothing before the last parameter has arrived.

Agents take turns, one for each order: nothing is pulled ahead, so a call begins when it asks for its first parameter.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.namespaces import Namespace
from benchmarks.ranks import join_job
from hocket import distribute
from hocket.distributed.agent_server import Versions
from hocket.distributed.job import CLOSE, STEP
from hocket.distributed.membership import join
from hocket.distributed.parts import worker_part
from hocket.distributed.plans import announce_plan, announced_plan, link_rates, profiled, worker_executor, worker_plan
from hocket.distributed.rejoin import LiveWorkers
from hocket.distributed.server import serve_steps
from hocket.distributed.setup import ShardedJob, set_up
from hocket.ir import Costs, Plan
from hocket.planning import bounds
from hocket.tracing.captured import Captured
from hocket.zoo import load

ALL_FIRST = "all-first"
# In a turn's first step all parameters are there at once; in the second one gradients are not late yet.
WARM_UP_STEPS = 2
PORT = 29571
TIMEOUT_S = 300.0


def pulls_first(plan: Plan) -> Plan:
    """The same plan, where the first op of each computing lane waits for all parameters."""
    pulls = tuple(op for lane in plan.lanes if lane.kind == "channel" for op in lane.ops if op.startswith("pull:"))
    first = [lane.ops[0] for lane in plan.lanes if lane.kind != "channel" and lane.ops]
    after = {**plan.after, **{op: (*plan.after.get(op, ()), *pulls) for op in first}}
    return replace(plan, after=after, planner=f"transfers-{ALL_FIRST}")


class Asked(NamedTuple):
    """A measurement: turns by each order, their steps or calls, and about how many seconds it takes."""

    model: str
    sizes: Mapping[str, Any]
    orders: Sequence[str]
    rounds: int
    steps: int
    seconds: float | None


def run_rank(rank: int, ends: Sequence[Namespace], asked: Asked) -> list[dict[str, Any]]:
    """Take part, in all turns. Rank 0, the worker, returns the times of each."""
    join_job(rank, 2, ends[0].address, PORT, ends[rank])
    job, (orders, rounds, steps, seconds) = load(asked.model, **asked.sizes), asked[2:]
    made = set_up(job.step, job.model, job.optimizer, job.batch(0), join(1, TIMEOUT_S))
    worker = worker_part(made.captured, made.assignment)
    costs = profiled(made.captured) if made.membership.is_worker else None
    begin_s, found = time.monotonic(), []
    for number in range(rounds * len(orders)):
        turn_round, position = divmod(number, len(orders))
        if position == 0 and turn_round and seconds is not None:
            if costs is not None:  # a further round, if it will not take longer than what is left
                is_next = (time.monotonic() - begin_s) * (turn_round + 1) / turn_round < seconds
                made.membership.announce(f"round {turn_round}", is_next)
            if not made.membership.announced(f"round {turn_round}", by=0):
                break
        turn = replace(made, membership=replace(made.membership, store=made.membership.store.within(f"turn{number}")))
        turn = replace(turn, wires=turn.membership.wires())
        turn.begin_wires()
        if costs is None:
            serve_steps(turn, "auto", Versions(), LiveWorkers(turn.wires))
        else:
            left_s = None if seconds is None else seconds / rounds / len(orders)
            found.append(_turn(turn, worker, costs, orders[position], steps, left_s, job.batch(0)))
        turn.membership.leave(turn.wires)
    made.membership.leave(made.wires)
    return found


def _turn(
    made: ShardedJob, part: Captured, costs: Costs, order: str, steps: int, left_s: float | None, batch: Any
) -> dict[str, Any]:
    """Steps of one order: as many as are wanted, or two and what there is time for."""
    begin_s = time.monotonic()
    rates = link_rates(made)
    plan, cycle, predicted_us = worker_plan(made, part, costs, rates, "layer" if order == ALL_FIRST else order)
    if order == ALL_FIRST:
        plan = pulls_first(plan)
        predicted_us = cycle.step_us(plan)
    announce_plan(made, plan, rates)
    lanes, pulls = worker_executor(made, part, announced_plan(made), "auto")
    planned = [op for lane in plan.lanes if lane.device == "server0->cpu0" for op in lane.ops]
    times_us, in_order = [], 0
    for step in range(1, WARM_UP_STEPS + steps + 1):
        made.send_command(STEP)
        start_s = time.perf_counter()
        lanes(batch)
        times_us.append((time.perf_counter() - start_s) * 1e6)
        in_order += made.wires[0].arrived[step] == planned
        next_s = time.monotonic() - begin_s + 2 * times_us[-1] / 1e6  # and what it has under way at the end
        if left_s is not None and len(times_us) > WARM_UP_STEPS and next_s > left_s:
            break
    for channel in pulls:
        channel.wait(len(times_us) + 1)
    made.send_command(CLOSE)
    lanes.close()
    limits = bounds(part.graph, cycle.costs, cycle.machine)
    return _times(order, times_us[WARM_UP_STEPS:], len(times_us), predicted_us, limits, in_order)


def _times(order: str, times_us: list[float], steps: int, predicted_us: float, limits: Any, in_order: int) -> Any:
    return {
        **{"order": order, "times_us": times_us, "steps": steps, "in_order": in_order},
        **{"predicted_us": predicted_us, "lower_us": limits.lower_us, "upper_us": limits.upper_us},
    }


def run_with_agents(rank: int, ends: Sequence[Namespace], asked: Asked) -> list[dict[str, Any]]:
    """As rank 0 call agents, one after another, as 1 and 2 be the job that publishes, at the other end of the link."""
    address, end = ends[1].address, ends[min(rank, 1)]
    join_job(max(0, rank - 1), 2, address, PORT, end)
    options: dict[str, Any] = {"timeout_s": TIMEOUT_S}
    if rank == 0:
        job = load(asked.model, **asked.sizes)
        net, inputs = job.models[0].eval(), job.batch(0)[0]
        options |= {"ahead": False, "every_call": True}
        turns = [*asked.orders] * asked.rounds
        return [_calls(net, inputs, f"{address}:{PORT}", order, asked.steps, options) for order in turns]
    job = load(asked.model, **{**asked.sizes, "batch_size": 2})
    if rank == 2:
        distribute.server(job.step, job.model, job.optimizer, job.batch(0), num_servers=1, **options)
    else:
        fast = distribute.worker(job.step, job.model, job.optimizer, order="layer", num_servers=1, **options)
        fast(job.batch(0))
        fast.publish()
        threading.Event().wait()  # until it is killed
    return []


def _calls(net: Any, inputs: Any, address: str, order: str, calls: int, options: dict[str, Any]) -> dict[str, Any]:
    times_us, in_order = [], 0
    with distribute.agent(net, address, order=order, **options) as fresh:
        fresh(inputs)
        assert fresh.plan is not None
        planned = [op[5:] for lane in fresh.plan.lanes if lane.kind == "channel" for op in lane.ops]
        for _ in range(calls):
            begin_s = time.perf_counter()
            fresh(inputs)
            times_us.append((time.perf_counter() - begin_s) * 1e6)
            in_order += list(fresh.arrivals()["server0"][: len(planned)]) == planned
    return _times(order, times_us, calls, fresh.predicted_us, fresh.bounds, in_order)
