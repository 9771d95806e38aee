r"""Orders of parameters for steps in a row, in which parameters become free at different times.

TicTac orders the parameters of one step as if all of them were at the sender when it begins. In a row of steps a
parameter is free when the previous step has used it for the last time and it has been updated. The backward goes from
the last layer to the first, so the parameter that is needed first is free last, and the wire is idle while it waits for
that one::

    compute          [ f1 ][ f2 ][ f3 ][  b3  ][  b2  ][  b1  ][ f1 ][ f2 ][ f3 ]
    by first use     1, 2, 3 are free after          b3     b2     b1 [ w1 ][ w2 ][ w3 ]
    as they are free                                  [ w3 ] [ w2 ] [ w1 ]

A simulation of a wire that always sends the most urgent free parameter (ByteScheduler: Peng et al., SOSP 2019) gives a
fixed order, which every step repeats and a counter at the sender can enforce.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from heapq import heappop, heappush

from hocket.ir import Costs, Graph, Machine, Plan
from hocket.simulation.durations import durations
from hocket.simulation.steps import unrolled

# Simulated steps. The order of the last but one is taken, since the first ones may differ.
STEPS = 5


def in_order_of_readiness(
    graph: Graph, plan: Plan, costs: Costs, machine: Machine, lanes: Collection[str], urgency: Mapping[str, float]
) -> Plan:
    """`plan` with new orders on some channels: of the ready transfers the most urgent always goes next.

    Carried edges tell when a transfer is ready for the next step. `lanes` names the channels. The lowest number in
    `urgency` goes first, and ops of earlier steps before all others.
    """
    longer, row, more = unrolled(graph, plan, costs, STEPS)
    took_us = dict(zip((op.name for op in longer.ops), durations(longer, row, more, machine).tolist(), strict=True))
    waits = {op.name: {*longer.predecessors[op.name], *row.after.get(op.name, ())} for op in longer.ops}
    for lane in row.lanes:
        for before, op in zip(lane.ops, lane.ops[1:], strict=False):
            if lane.name not in lanes:
                waits[op].add(before)
    waiting: dict[str, list[str]] = {name: [] for name in waits}
    for name, others in waits.items():
        for other in others:
            waiting[other].append(name)
    urgent = {f"{op}@{step}": (step, urgency[op], op) for step in range(STEPS) for op in urgency}
    left = {name: len(others) for name, others in waits.items()}
    channel_of = {op: lane.name for lane in row.lanes if lane.name in lanes for op in lane.ops}
    ready: dict[str, list[tuple[tuple[int, float, str], str]]] = {name: [] for name in lanes}
    busy: set[str] = set()
    went: dict[str, list[str]] = {name: [] for name in lanes}
    over: list[tuple[float, int, str]] = []
    now_us = 0.0

    def begin(name: str) -> None:
        heappush(over, (now_us + took_us[name], longer.index[name], name))

    def carry() -> None:
        for channel, of_channel in ready.items():
            if of_channel and channel not in busy:
                name = heappop(of_channel)[1]
                busy.add(channel)
                went[channel].append(name)
                begin(name)

    def may_begin(name: str) -> None:
        if name in channel_of:
            heappush(ready[channel_of[name]], (urgent[name], name))
        else:
            begin(name)

    for name in longer.order:
        if not left[name]:
            may_begin(name)
    carry()
    while over:
        now_us, _, ended = heappop(over)
        busy.discard(channel_of.get(ended, ""))
        for name in waiting[ended]:
            left[name] -= 1
            if not left[name]:
                may_begin(name)
        if not over or over[0][0] > now_us:  # after all ends of this moment
            carry()
    suffix = f"@{STEPS - 2}"
    order = {channel: [op.removesuffix(suffix) for op in ops if op.endswith(suffix)] for channel, ops in went.items()}
    return replace(
        plan,
        lanes=tuple(replace(lane, ops=tuple(order[lane.name])) if lane.name in order else lane for lane in plan.lanes),
    )
