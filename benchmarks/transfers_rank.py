"""One rank of a measured job: ``python -m benchmarks.transfers_rank SETTINGS``, JSON; see `benchmarks.transfers_real`.

The step is captured and profiled once. Then the orders take turns: each turn has wires and a plan of its own, and goes
on with the parameters that the one before left. The contender ``all-first`` has the order of first use, and computes
nothing before the last parameter has arrived.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from hocket.cli.targets import wait_policy
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


@dataclass(frozen=True)
class Turn:
    """The report of rank 0 on one order's turn."""

    order: str
    steps_us: list[float]
    predicted_us: float
    lower_us: float
    upper_us: float
    in_order: int


def pulls_first(plan: Plan) -> Plan:
    """The same plan, where the first op of each computing lane waits for all parameters."""
    pulls = tuple(op for lane in plan.lanes if lane.kind == "channel" for op in lane.ops if op.startswith("pull:"))
    first = [lane.ops[0] for lane in plan.lanes if lane.kind != "channel" and lane.ops]
    after = {**plan.after, **{op: (*plan.after.get(op, ()), *pulls) for op in first}}
    return replace(plan, after=after, planner=f"transfers-{ALL_FIRST}")


def main(settings: dict[str, Any]) -> None:
    """Take part, in all turns."""
    wait_policy()
    job = load(settings["model"], **settings["sizes"])
    made = set_up(job.step, job.model, job.optimizer, job.batch(0), join(1, settings["timeout_s"]))
    worker = worker_part(made.captured, made.assignment)
    costs = profiled(made.captured) if made.membership.is_worker else None
    turns = [order for _ in range(settings["rounds"]) for order in settings["orders"]]
    begin_s, seconds = time.monotonic(), settings["seconds"]
    for number, order in enumerate(turns):
        rounds, position = divmod(number, len(settings["orders"]))
        if position == 0 and rounds and seconds is not None:
            if costs is not None:  # a further round, if it will not take longer than what is left
                made.membership.announce(
                    f"round {rounds}", (time.monotonic() - begin_s) * (rounds + 1) / rounds < seconds
                )
            if not made.membership.announced(f"round {rounds}", by=0):
                break
        turn = replace(made, membership=replace(made.membership, store=made.membership.store.within(f"turn{number}")))
        turn = replace(turn, wires=turn.membership.wires())
        turn.begin_wires()
        if costs is None:
            serve_steps(turn, "auto", Versions(), LiveWorkers(turn.wires))
        else:
            left_s = None if seconds is None else seconds / len(turns)
            found = _turn(turn, worker, costs, order, settings["steps"], left_s, job.batch(0))
            print(json.dumps(vars(found)), flush=True)
        turn.membership.leave(turn.wires)
    made.membership.leave(made.wires)


def _turn(
    made: ShardedJob, part: Captured, costs: Costs, order: str, steps: int, left_s: float | None, batch: Any
) -> Turn:
    """Steps of one order: so many, or two and what there is time for."""
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
        in_order += [name for name, _ in made.wires[0].arrived[step]] == planned
        next_s = time.monotonic() - begin_s + 2 * times_us[-1] / 1e6  # and what it has under way at the end
        if left_s is not None and len(times_us) > WARM_UP_STEPS and next_s > left_s:
            break
    for channel in pulls:
        channel.wait(len(times_us) + 1)
    made.send_command(CLOSE)
    lanes.close()
    limits = bounds(part.graph, cycle.costs, cycle.machine)
    return Turn(order, times_us[WARM_UP_STEPS:], predicted_us, limits.lower_us, limits.upper_us, in_order)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
