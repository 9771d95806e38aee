r"""A captured step divided between workers and servers, each of which runs its own `cut` of it.

Servers run everything after the gradients (clipping, scaling, the update), and workers run everything else::

    worker   [pull w] --> forward --> backward --> [push w.grad]
    server                 [push w.grad] --> clip --> update of w --> [pull w]

Ops of the servers that share memory or depend on each other stay together. Each connected component is a *shard*. An
update of one parameter is usually a shard of its own. Clipping by the norm of all gradients reads them all, so it makes
one shard of everything, and one server has all the work.

With several workers, buffers that the forward writes (statistics of batch norm) come from worker 0, as with
DistributedDataParallel. They go up with the gradients, and down with the parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from hocket.distributed.staging import TRAVELLING
from hocket.errors import InputError
from hocket.ir import DisjointSets, Graph
from hocket.tracing.captured import Captured
from hocket.tracing.cut import cut
from hocket.tracing.division import Arrival, Departure, is_of_batch
from hocket.tracing.sources import Constant, ItemOf

# The other end of the servers' channels: all workers together.
WORKERS = "workers"


@dataclass(frozen=True)
class Exchanged:
    """A value that goes between the workers and one server in each step."""

    name: str  # name of the transfer, at both ends
    buffer: str  # buffer of the graph of the whole step
    server: int
    size_bytes: int
    averaged: bool = False  # True: the server takes the mean over all workers. False: it takes the value of worker 0.


@dataclass(frozen=True)
class Assignment:
    """Ops of the workers and of each server, and the values that they exchange."""

    pulls: tuple[Exchanged, ...]  # values that workers receive
    pushes: tuple[Exchanged, ...]  # values that workers send
    worker_ops: frozenset[str]  # names of the ops that workers run
    server_ops: tuple[frozenset[str], ...]  # for each server the names of the ops that it runs

    @cached_property
    def by_name(self) -> Mapping[str, Exchanged]:
        return {each.name: each for each in (*self.pulls, *self.pushes)}


def server_name(number: int) -> str:
    """The name of a server in plans and machines."""
    return f"server{number}"


def assigned(captured: Captured, num_servers: int, *, num_workers: int) -> Assignment:
    """Divide a captured step.

    The step was captured while every parameter had a gradient. Shards go to servers by size, the largest first,
    each to the one with the least. With several workers, buffers that the forward writes are exchanged, too.

    Raises:
        InputError: more servers than shards, a step that adds to the gradients it finds, an update that needs more of
            the rest of the step than gradients, tensors that are neither on a CPU nor on a CUDA GPU, or a buffer that
            the step binds anew.
    """
    graph = captured.graph
    served = _after_gradients(graph)
    check_exchangeable(captured, num_workers)
    makers = {buffer: op.name for op in graph.ops for buffer in op.writes if buffer.startswith(f"{op.name}:")}
    gradients = _gradient_buffers(captured)
    life = {buffer.name: buffer.life for buffer in graph.buffers}
    used: dict[str, str] = {}  # values that servers need from workers, each with an op that needs it
    for op in graph.ops:
        for buffer in op.reads if op.name in served else ():
            if makers.get(buffer, op.name) not in served or life[buffer] == "input":
                used.setdefault(buffer, op.name)
    for buffer, name in used.items():
        if buffer not in gradients:
            raise InputError(
                f"distribute: op {name!r} of the update reads {buffer!r}, which is no gradient; call backward() before "
                "optimizer.step(), not in a closure, and leave the gradients as they are"
            )
    touched = {buffer for op in graph.ops if op.name not in served for buffer in (*op.reads, *op.writes)}
    updated = list(dict.fromkeys(b for op in graph.ops if op.name in served for b in op.writes if life[b] == "lasting"))
    buffers = _written_buffers(captured, served) if num_workers > 1 else []
    items = items_of(captured)
    _check_numbers(captured, served, items, {*updated, *buffers}, buffers)
    shards = [*_shards(graph, served, items), *([buffer] for buffer in buffers)]
    if num_servers > max(1, len(shards)):
        raise InputError(
            f"distribute: {num_servers} servers, and the step has {len(shards)} shards for them (clipping by the norm "
            "of all gradients, foreach=True and fused=True keep parameters on one server)"
        )
    size = {buffer.name: int(buffer.size_bytes) for buffer in graph.buffers}
    home = _homes(graph, shards, size, num_servers)
    pulls = [Exchanged(f"pull:{b}", b, home[b], size[b]) for b in (*updated, *buffers) if b in touched]
    pushes = [Exchanged(f"push:{gradients[b]}", b, home[used[b]], size[b], averaged=True) for b in used]
    pushes += [Exchanged(f"push:{b}", b, home[b], size[b]) for b in buffers]
    return Assignment(
        tuple(pulls),
        tuple(pushes),
        frozenset(op.name for op in graph.ops if op.name not in served),
        tuple(frozenset(op for op in served if home[op] == number) for number in range(num_servers)),
    )


def worker_part(captured: Captured, assignment: Assignment) -> Captured:
    """The part of a worker: all but the servers' ops, with a pull for each parameter and a push for each gradient."""
    arrivals = [Arrival(each.name, each.buffer, server_name(each.server)) for each in assignment.pulls]
    departures = [
        Departure(each.name, each.buffer, server_name(each.server), unfinished=each.averaged)
        for each in assignment.pushes
    ]
    return cut(captured, assignment.worker_ops, arrivals, departures)


def server_part(captured: Captured, assignment: Assignment, number: int) -> Captured:
    """The part of a server: its shards, from the workers' gradients to the parameters that the next step pulls."""
    arrivals = [Arrival(each.name, each.buffer, WORKERS) for each in assignment.pushes if each.server == number]
    departures = [Departure(each.name, each.buffer, WORKERS) for each in assignment.pulls if each.server == number]
    return cut(captured, assignment.server_ops[number], arrivals, departures)


def _after_gradients(graph: Graph) -> frozenset[str]:
    """Ops outside of modules that change gradients, ops of the update, and all ops that depend on them."""
    found: set[str] = set()
    for name in graph.order:
        op = graph[name]
        if op.role in ("update", "other") or not found.isdisjoint(graph.predecessors[name]):
            if op.role not in ("update", "other"):
                raise InputError(
                    f"distribute: op {name!r} of layer {op.layer!r} comes after what is done to gradients; "
                    "a step that goes on with what it updated cannot be divided: do that between two steps, after "
                    "synchronize()"
                )
            found.add(name)
    if not found:
        raise InputError("distribute: the step updates nothing")
    return frozenset(found)


def check_exchangeable(captured: Captured, num_workers: int) -> None:
    """Refuse a step that adds to existing gradients, writes a tensor of its closure, or keeps what cannot be sent."""
    closed_over = {s.name: s.value for s in captured.trace.sources.values() if isinstance(s, Constant)}
    for op in captured.graph.ops:
        for name in closed_over.keys() & set(op.writes):
            raise InputError(
                f"distribute: op {op.name!r} writes a tensor of shape {tuple(closed_over[name].shape)} that belongs to "
                "no model and no optimizer of the job; pass the one that has it, or make it a buffer of a model"
            )
    groups = [group for optimizer in captured.trace.places.optimizers for group in optimizer.param_groups]
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    for gradient in captured.read_gradients:
        cure = "call optimizer.zero_grad() in the step before backward(), without set_to_none=False"
        if id(gradient.parameter.get()) not in updated:
            cure = "no optimizer of the job has this parameter: freeze it (requires_grad_(False)), or call the model's "
            cure += "zero_grad() in the step before backward()"
        raise InputError(f"distribute: the step adds to {gradient.name}, which it finds; {cure}")
    for entry in (*captured.trace.places.parameters, *captured.trace.places.tensors):
        if entry.kind != "state" and entry.get().device.type not in TRAVELLING:
            raise InputError(
                f"distribute: {entry.name!r} is on {entry.get().device}, and ranks have CPUs and CUDA GPUs"
            )
        if entry.kind == "group":
            raise InputError(f"distribute: the option {entry.name!r} is a tensor; make it a number")
    for entry in captured.trace.places.numbers:
        if entry.kind == "state":
            raise InputError(f"distribute: the optimizer keeps {entry.name!r} as a number of Python, not as a tensor")
    for entry in captured.trace.rebound:
        if entry.kind == "buffer" and num_workers > 1:
            raise InputError(f"distribute: the step binds the buffer {entry.name!r} anew; write into it instead")


def _gradient_buffers(captured: Captured) -> dict[str, str]:
    """Map each buffer that is a gradient to its name, such as ``fc.weight.grad``."""
    found: dict[str, str] = {}
    maker = {slot: action for action in captured.program.actions for slot in action.fills}
    for gradient, slot in captured.gradients:
        if slot is None or slot not in maker:
            continue
        action = maker[slot]
        viewed = {out: call.reads[0] for call in action.calls[1:] if call.reads for out in call.outs.values()}
        while slot in viewed:
            slot = viewed[slot]
        if slot in action.fills:
            found.setdefault(f"{action.name}:{action.fills.index(slot)}", gradient.name)
    return found


def _written_buffers(captured: Captured, served: frozenset[str]) -> list[str]:
    """Buffers of modules that workers write."""
    named = {entry.name for entry in captured.trace.places.tensors if entry.kind == "buffer"}
    ops = [op for op in captured.graph.ops if op.name not in served]
    return list(dict.fromkeys(buffer for op in ops for buffer in op.writes if buffer in named))


def items_of(captured: Captured) -> dict[str, list[str]]:
    """Map each op to tensors whose number it reads at the start of the step, such as Adam's step count."""
    tape = captured.trace.tape
    found: dict[str, list[str]] = {}
    for action in captured.program.actions:
        indices = {number for call in action.calls for number in call.numbers}
        leaves = [tape.leaves[leaf] for index in sorted(indices) for leaf in tape.leaves_of(index)]
        found[action.name] = [leaf.source.name for leaf in leaves if isinstance(leaf, ItemOf)]
    return found


def _check_numbers(
    captured: Captured,
    served: frozenset[str],
    items: Mapping[str, list[str]],
    pulled: Collection[str],
    pushed: Collection[str],
) -> None:
    """Refuse ops that read a number before it arrives, and updates that read a number of the batch."""
    for action in captured.program.actions:
        of_server = action.name in served
        for name in items[action.name]:
            if name in (pushed if of_server else pulled):
                raise InputError(f"distribute: op {action.name!r} takes the number in {name!r} before it has arrived")
        indices = {number for call in action.calls for number in call.numbers}
        if of_server and any(is_of_batch(captured.trace.tape, index) for index in indices):
            raise InputError(f"distribute: op {action.name!r} of the update takes a number of the batch")


def _shards(graph: Graph, served: frozenset[str], items: Mapping[str, list[str]]) -> list[list[str]]:
    """Sets of ops that are connected by an edge, by memory, or by a number in memory."""
    sets = DisjointSets(name for name in graph.order if name in served)
    for one, other in _connected(graph, served, items):
        sets.join(one, other)
    return sets.groups()


def _connected(graph: Graph, served: frozenset[str], items: Mapping[str, list[str]]) -> Iterator[tuple[str, str]]:
    for edge in graph.edges:
        if edge.src in served and edge.dst in served:
            yield edge.src, edge.dst
    touching: dict[str, str] = {}
    for name in graph.order:
        op = graph[name]
        for buffer in (*op.reads, *op.writes, *items[name]) if name in served else ():
            yield touching.setdefault(buffer, name), name


def _homes(graph: Graph, shards: list[list[str]], size: Mapping[str, int], num_servers: int) -> dict[str, int]:
    """Map ops of shards, lasting buffers that they write, and exchanged buffers to their server."""
    weight = [sum(size[b] for b in {b for name in shard for b in _memory(graph, name)}) for shard in shards]
    load = [0] * num_servers
    found: dict[str, int] = {}
    for at in sorted(range(len(shards)), key=lambda at: (-weight[at], at)):
        server = load.index(min(load))
        load[server] += weight[at]
        for name in shards[at]:
            found[name] = server
            found.update(dict.fromkeys(graph[name].writes if name in graph.by_name else (), server))
    return found


def _memory(graph: Graph, name: str) -> tuple[str, ...]:
    """The buffers of an op, or the given name itself if it is a buffer."""
    if name in graph.by_name:
        return (*graph[name].reads, *graph[name].writes)
    return (name,)
