"""Rules of scheduling assistants, as data: ops with their tags, flows between them, and thresholds.

Tavarageri et al., "Automatic Model Parallelism for Deep Neural Networks with Compiler and Hardware Support", section 3:
each op is tagged by its bottleneck, and the planner programs the assistants with rules. The tag follows the roofline:
it is the longest of arithmetic, memory traffic, and moving the op's tensors to another device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from hocket.errors import InputError
from hocket.ir import Costs, Device, Graph, Machine, Op

Resource = Literal["compute", "memory", "network"]
RESOURCES: tuple[Resource, ...] = ("compute", "memory", "network")


class RuledOp(NamedTuple):
    """An op that may move."""

    name: str
    resource: Resource  # its bottleneck
    takes_us: tuple[float, ...]  # its duration on each device
    state_bytes: float = 0.0  # parameters and optimizer state that move with it, once
    is_movable: bool = True  # False if an op of another unit writes the same lasting memory, which is on one device
    unit: str = ""  # ops of one unit that are on one device move together. If empty, it moves alone.


class RuledFlow(NamedTuple):
    """An edge: positions of two ops, and what it takes longer if they are on two devices."""

    source: int
    reader: int
    transfer_us: float


@dataclass(frozen=True)
class AssistantRules:
    """The rules of all assistants, the same on every rank.

    Raises `InputError` at construction for thresholds out of (0, 1), numbers below their least, an op without a time
    for each device, or flows that do not go onward.
    """

    devices: tuple[str, ...]  # names, in the order of `RuledOp.takes_us`
    ops: tuple[RuledOp, ...]  # in a topological order
    flows: tuple[RuledFlow, ...] = ()  # between them
    theta: float = 0.95  # a device with a higher use puts ops into its out-box
    gamma: float = 0.50  # a device with a lower use takes ops first
    margin: float = 0.03  # the predicted saving of all moves together must be at least this part of a step
    horizon_steps: int = 200  # the moves must pay for moving the state within this number of steps
    settle_steps: int = 2  # steps after moves that are not measured
    max_moves: int = 8  # the number of units that move at once
    state_bytes_per_s: float = 1e10  # the rate at which state moves
    migration_us: float = 0.0  # the fixed duration of moves, during which no step runs

    def __post_init__(self) -> None:
        if not 0 < self.gamma < self.theta < 1 or not 0 <= self.margin < 1:
            raise InputError(
                f"assistants: expected 0 < gamma < theta < 1 and margin in [0, 1), got {self.gamma}, {self.theta} "
                f"and {self.margin}"
            )
        if min(self.horizon_steps, self.settle_steps, self.max_moves) < 1 or not self.state_bytes_per_s > 0:
            raise InputError("assistants: expected horizon_steps, settle_steps, max_moves and a rate of at least 1")
        if not 0 <= self.migration_us < float("inf"):
            raise InputError(f"assistants: expected a migration_us from 0 on, got {self.migration_us}")
        for op in self.ops:
            if len(op.takes_us) != len(self.devices) or not all(0 <= us < float("inf") for us in op.takes_us):
                raise InputError(f"assistants: op {op.name!r} needs a time on each of {len(self.devices)} devices")
        for flow in self.flows:
            if not 0 <= flow.source < flow.reader < len(self.ops) or not flow.transfer_us >= 0:
                raise InputError(f"assistants: a flow goes onward among {len(self.ops)} ops, got {tuple(flow)}")

    @cached_property
    def incoming(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each op who it waits for, and what that takes longer from another device."""
        return self._others((reader, source, transfer_us) for source, reader, transfer_us in self.flows)

    @cached_property
    def outgoing(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each op who waits for it, and what that takes longer on another device."""
        return self._others(self.flows)

    def _others(self, flows: Iterable[tuple[int, int, float]]) -> tuple[tuple[tuple[int, float], ...], ...]:
        found: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        for op, other, transfer_us in flows:
            found[op].append((other, transfer_us))
        return tuple(map(tuple, found))

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        """For each op the number of its unit."""
        numbers: dict[str, int] = {}
        alone = len(self.ops)
        return tuple(
            numbers.setdefault(op.unit, len(numbers)) if op.unit else alone + position
            for position, op in enumerate(self.ops)
        )

    @cached_property
    def ranks_us(self) -> tuple[float, ...]:
        """For each op the longest way from its start to the end of the step, with its mean time on the devices."""
        found = [0.0] * len(self.ops)
        for position in range(len(self.ops) - 1, -1, -1):
            behind = max((found[reader] for reader, _ in self.outgoing[position]), default=0.0)
            found[position] = behind + sum(self.ops[position].takes_us) / len(self.devices)
        return tuple(found)


def assistant_rules(
    graph: Graph, costs: Costs, machine: Machine, *, units: Iterable[Sequence[str]] = (), **thresholds: float
) -> AssistantRules:
    """Return the rules for a graph, its ops in a topological order, on the devices of a machine.

    On a device without rates, ops are compute-bound. `units` are groups of ops that move as one (see
    `hocket.adaptation.units`). All others move alone. `thresholds` are fields of `AssistantRules`.
    """
    names = [device.name for device in machine.devices]
    known = [link for link in machine.links if link.src in names and link.dst in names]
    latency_us = max((link.latency_us for link in known), default=10.0)
    bytes_per_s = min((link.bytes_per_s for link in known), default=1e10)

    def transfer_us(size: float) -> float:
        return latency_us + size / bytes_per_s * 1e6 if size else 0.0

    flows = [RuledFlow(graph.index[e.src], graph.index[e.dst], transfer_us(e.size_bytes)) for e in graph.edges]
    moved_us: dict[int, float] = {}
    for flow in flows:
        for end in (flow.source, flow.reader):
            moved_us[end] = max(moved_us.get(end, 0.0), flow.transfer_us)
    unit_of = {name: unit[0] for unit in units for name in unit if len(unit) > 1}
    state = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life == "lasting"}
    writers: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in state.keys() & set(op.writes):
            writers.setdefault(name, []).append(op.name)

    def ruled(position: int, op: Op) -> RuledOp:
        of_state = [name for name in op.writes if name in state]
        others = {name for buffer in of_state for name in writers[buffer]} - {op.name}
        return RuledOp(
            op.name,
            _resource(op, machine.devices[0], moved_us.get(position, 0.0)),
            tuple(costs.duration_us(op.name, width=device.cores, device=device.name) for device in machine.devices),
            sum(state[buffer] for buffer in of_state if writers[buffer][0] == op.name or op.name not in unit_of),
            all(op.name in unit_of and unit_of.get(name) == unit_of[op.name] for name in others),
            unit_of.get(op.name, ""),
        )

    ops = tuple(ruled(position, op) for position, op in enumerate(graph.ops))
    numbers: Mapping[str, float] = {"state_bytes_per_s": bytes_per_s, **thresholds}
    return AssistantRules(tuple(names), ops, tuple(flows), **numbers)  # type: ignore[arg-type]


def _resource(op: Op, device: Device, moved_us: float) -> Resource:
    arithmetic_us = op.flops / device.flops_per_s * 1e6 if device.flops_per_s else 0.0
    traffic_us = op.size_bytes / device.bytes_per_s * 1e6 if device.bytes_per_s else 0.0
    if not arithmetic_us and not traffic_us:
        return "compute"
    longest = max((arithmetic_us, "compute"), (traffic_us, "memory"), (moved_us, "network"), key=lambda pair: pair[0])
    return longest[1]  # type: ignore[return-value]
