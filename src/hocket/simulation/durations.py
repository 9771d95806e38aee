"""The durations of all ops of a plan on their lanes, as one array."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from hocket.errors import InputError
from hocket.ir import Costs, Graph, Lane, Link, Machine, Op, Plan
from hocket.simulation.plan_arrays import plan_arrays, remember

_Floats = npt.NDArray[np.float64]


def durations(graph: Graph, plan: Plan, costs: Costs, machine: Machine) -> _Floats:
    """The duration of each op on its lane, in the graph's order. One without a cost or a link is an `InputError`."""
    position = plan_arrays(graph, plan).position
    columns = _columns(graph, costs)
    found = np.empty(len(position))
    begin = 0
    for lane in plan.lanes:
        places = position[begin : begin + len(lane.ops)]
        begin += len(lane.ops)
        if lane.kind == "channel":
            found[places] = _on_channel(lane, graph, costs, machine)
        else:
            key = (lane.device, lane.width)
            column = columns.get(key)
            if column is None:
                column = columns[key] = np.full(len(graph), np.nan)
            unknown = np.isnan(column[places])
            if unknown.any():
                ops = lane.ops if unknown.all() else [lane.ops[at] for at in np.flatnonzero(unknown)]
                column[places[unknown]] = _on_device(ops, lane, costs)
            found[places] = column[places]
    return found


@remember
def _columns(graph: Graph, costs: Costs) -> dict[tuple[str, int], _Floats]:
    """Durations that were looked up before, by device and width, and NaN for all others."""
    return {}


def _on_channel(lane: Lane, graph: Graph, costs: Costs, machine: Machine) -> list[float]:
    link = machine.link(*lane.ends)
    return [transfer_us(graph[op], link, costs) for op in lane.ops]


def transfer_us(op: Op, link: Link, costs: Costs) -> float:
    """The duration of a transfer on a link: its cost if it has one, else that of the link."""
    return costs.duration_us(op.name, device=link.channel) if op.name in costs else link.duration_us(op.size_bytes)


def _on_device(ops: Sequence[str], lane: Lane, costs: Costs) -> list[float]:
    """`Costs.lookup` for all `ops` of a lane at once, without a call and three texts for each."""
    exact, device, width = f"{lane.device}:{lane.width}", lane.device, str(lane.width)
    try:
        rows = list(map(costs.durations_us.__getitem__, ops))
    except KeyError as error:
        raise InputError(f"costs: no duration for op {error.args[0]!r}, which lane {lane.name!r} runs") from None
    durations_us = [
        row[exact]
        if exact in row
        else row[device]
        if device in row
        else row[width]
        if width in row
        else costs.duration_us(op, width=lane.width, device=device)
        for op, row in zip(ops, rows, strict=True)
    ]
    if costs.only_listed and inf in durations_us:
        raise InputError(f"costs: op {ops[durations_us.index(inf)]!r} may not run with {width} thread(s)")
    return durations_us
