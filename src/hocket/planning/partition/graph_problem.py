"""The partition problem of a graph on a machine: durations, tensors, memory, and groups of ops that stay together.

Groups are those of the paper (Tavarageri et al., section 2, phase 1): an op with state is on the device of the other
ops that write the same memory (`one_home`), or that the graph puts together with it. Of the other ops the expensive
ones are placed freely, and the cheap ones follow the neighbour that they share the most bytes with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hocket.errors import InputError
from hocket.ir import Costs, Device, DisjointSets, Graph, Machine, Op
from hocket.planning.partition.problem import PartitionProblem, Tensor

BACKWARD_ROLES = frozenset({"activation_grad", "weight_grad", "bias_grad", "update"})

# For machines without links between their devices: the order of magnitude of PCIe 3.0 with 16 lanes.
LINK_BYTES_PER_S = 1e10
LINK_LATENCY_US = 10.0


def equal_devices(machine: Machine, count: int) -> Machine:
    """`count` devices like the first one of a machine, without links."""
    if count < 1:
        raise InputError(f"partition: expected at least one device, got {count}")
    first = machine.devices[0]
    return Machine(tuple(replace(first, name=f"device{number}", cpus=()) for number in range(count)))


def problem_of(
    graph: Graph,
    costs: Costs,
    machine: Machine,
    *,
    expensive: float = 1.0,
    twins: bool = False,
    together: Iterable[Iterable[str]] = (),
) -> PartitionProblem:
    """The problem of partitioning a step of `graph` over the devices of `machine`.

    Args:
        graph: one step.
        costs: the duration of each op. If they name no device, the rates of the devices scale them.
        machine: its devices become the parts, in their order. The slowest link between them counts for all.
        expensive: the most expensive ops with this share of the time are placed freely, and others follow them.
        twins: keep the ops of one layer, forward and backward, together.
        together: names of ops that stay together (color classes), in addition to `graph.together` and shared memory.

    Raises:
        InputError: an op without a cost, an unknown name, a device that an op does not run on, or an op that fits into
            no device's memory.
    """
    if not 0 < expensive <= 1:
        raise InputError(f"partition: expected a part of the time in (0, 1], got expensive={expensive}")
    durations = np.array([[_takes_us(op, device, costs, machine) for device in machine.devices] for op in graph.ops])
    durations = durations.reshape(len(graph), len(machine.devices))
    links = [link for link in machine.links if link.src in machine.by_name and link.dst in machine.by_name]
    latency_us = max((link.latency_us for link in links), default=LINK_LATENCY_US)
    bytes_per_s = min((link.bytes_per_s for link in links), default=LINK_BYTES_PER_S)
    tensors = tuple(
        Tensor(source, readers, size_bytes, latency_us + size_bytes / bytes_per_s * 1e6)
        for source, readers, size_bytes in _flows(graph)
    )
    group = _groups(graph, twins, together)
    group = _followed(group, durations.mean(axis=1), tensors, graph, expensive)
    limits = [np.inf if device.memory_bytes is None else device.memory_bytes for device in machine.devices]
    return PartitionProblem(
        tuple(op.name for op in graph.ops),
        durations,
        tensors,
        [(graph.index[edge.src], graph.index[edge.dst]) for edge in graph.edges],
        tuple(device.name for device in machine.devices),
        _memory(graph),
        np.array(limits),
        group,
        np.array([op.role in BACKWARD_ROLES for op in graph.ops], np.bool_),
    )


def _takes_us(op: Op, device: Device, costs: Costs, machine: Machine) -> float:
    row = costs.durations_us.get(op.name)
    if row is None:
        raise InputError(f"costs: no duration for op {op.name!r}")
    takes_us = costs.duration_us(op.name, width=device.cores, device=device.name)
    named = device.name in row or any(key.startswith(f"{device.name}:") for key in row)
    first = machine.devices[0]
    if named or device == first or not (op.flops or op.size_bytes):
        return takes_us
    # The measured time, scaled by the ratio of the rates for this op.
    here, there = _roofline_s(op, device), _roofline_s(op, first)
    return takes_us * here / there if here and there else takes_us


def _roofline_s(op: Op, device: Device) -> float:
    if device.flops_per_s is None or device.bytes_per_s is None:
        return 0.0
    return max(op.flops / device.flops_per_s, op.size_bytes / device.bytes_per_s)


def _flows(graph: Graph) -> list[tuple[int, tuple[int, ...], float]]:
    """The source, readers and bytes of each tensor, within the step and into the next one.

    Edges from one op with the same number of bytes count as one tensor. The next step reads an update's result.
    """
    index = graph.index
    found: dict[tuple[str, float, str], dict[int, None]] = {}
    for edge in graph.edges:
        if edge.size_bytes > 0:
            found.setdefault((edge.src, edge.size_bytes, ""), {})[index[edge.dst]] = None
    size_of = {buffer.name: buffer.size_bytes for buffer in graph.buffers if buffer.life == "lasting"}
    reads = {op.name: set(op.reads) for op in graph.ops}
    for src, dst in graph.carried:
        for buffer in graph[src].writes if src != dst else ():
            if size_of.get(buffer, 0.0) > 0 and buffer in reads[dst]:
                found.setdefault((src, size_of[buffer], buffer), {})[index[dst]] = None
    return [(index[src], tuple(readers), size) for (src, size, _), readers in found.items()]


def _groups(graph: Graph, twins: bool, together: Iterable[Iterable[str]]) -> NDArray[np.int32]:
    layers: dict[str, list[str]] = {}
    for op in graph.ops:
        if twins and op.layer:
            layers.setdefault(op.layer, []).append(op.name)
    sets = DisjointSets(graph.by_name)
    sharing = (ops for _, ops in one_home(graph))
    for names in (*graph.together, *map(tuple, together), *sharing, *layers.values()):
        for name in names:
            if name not in graph.by_name:
                raise InputError(f"partition: no op is called {name!r}")
            sets.join(names[0], name)
    return np.array([graph.index[sets.first_of(op)] for op in graph.by_name], np.int32)


def _followed(
    group: NDArray[np.int32], takes_us: NDArray[np.float64], tensors: Sequence[Tensor], graph: Graph, expensive: float
) -> NDArray[np.int32]:
    """Groups after each cheap op has joined the neighbour that it shares the most bytes with."""
    if expensive >= 1.0 or not len(graph):
        return group
    order = np.argsort(-takes_us, kind="stable")
    enough = int(np.searchsorted(np.cumsum(takes_us[order]), expensive * takes_us.sum())) + 1
    cheap = set(order[enough:].tolist())
    best: dict[int, tuple[float, int]] = {}
    for tensor in tensors:
        for reader in tensor.readers:
            for one, other in ((tensor.source, reader), (reader, tensor.source)):
                if one in cheap and tensor.size_bytes > best.get(one, (0.0, -1))[0]:
                    best[one] = (tensor.size_bytes, other)
    joined = group.tolist()
    for op, (_, other) in sorted(best.items()):
        ours, theirs = joined[op], joined[other]
        # Only single ops join, so that the group of the expensive op never moves.
        if ours != theirs and joined.count(ours) == 1:
            joined[op] = theirs
    return np.array(joined, np.int32)


def _memory(graph: Graph) -> NDArray[np.float64]:
    """The bytes that each op keeps on its device.

    Memory that outlives the step (gradients and results included) counts for its first writer, or else for its first
    reader. Tensors of the forward pass that the backward pass reads count for their source.
    """
    held = np.zeros(len(graph))
    size = {buffer.name: buffer for buffer in graph.buffers}
    home: dict[str, int] = {}
    last_reader_backward: set[str] = set()
    for position, op in enumerate(graph.ops):
        for name in op.writes:
            home.setdefault(name, position)
        if op.role in BACKWARD_ROLES:
            last_reader_backward.update(op.reads)
    for position, op in enumerate(graph.ops):
        for name in op.reads:
            home.setdefault(name, position)
    for name, position in home.items():
        if name in size:
            forward = graph.ops[position].role not in BACKWARD_ROLES
            if size[name].life != "step" or (forward and name in last_reader_backward):
                held[position] += size[name].size_bytes
    if graph.buffers:
        return held
    for source, readers, size_bytes in _flows(graph):
        crosses = any(graph.ops[reader].role in BACKWARD_ROLES for reader in readers)
        if crosses and graph.ops[source].role not in BACKWARD_ROLES:
            held[source] += size_bytes
    return held


def one_home(graph: Graph) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each buffer that is written, and the ops that share its home. Empty for a graph without buffers.

    An op on another device reads a copy, made once a step. So it may not need a value between two writes, and for
    memory that outlives the step it may not need a value that this step has written::

        lasting   read  read | write  read  write    all from the first write on
        a value                write  read  write | read  read    all up to the last write

    Ops that draw random numbers all write the generator, so they are together as well.
    """
    touching: dict[str, dict[str, None]] = {}
    writing: dict[str, list[str]] = {}
    for op in graph.ops:
        for buffer in (*op.reads, *op.writes):
            touching.setdefault(buffer, {})[op.name] = None
        for buffer in op.writes:
            writing.setdefault(buffer, []).append(op.name)
    life = {buffer.name: buffer.life for buffer in graph.buffers}
    place = graph.index
    for buffer, writers in writing.items():
        if buffer not in life:
            continue
        first, last = place[writers[0]], place[writers[-1]]
        lasts = life[buffer] in ("lasting", "input")
        sharing = (op for op in touching[buffer] if (place[op] >= first if lasts else place[op] <= last))
        yield buffer, tuple(sharing)
