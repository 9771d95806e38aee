"""A training step in two parts: a worker that computes gradients, and a server that updates."""

import copy
import threading
from dataclasses import dataclass

import torch
from torch import nn

from hocket.ir import Lane, Plan
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from hocket.tracing.cut import Arrival, Departure, cut
from support.steps import update


@dataclass
class Training:
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch):
        x, y = batch
        return update(self.optimizer, nn.functional.mse_loss(self.model(x), y))


def training(adam: bool = False) -> Training:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    if adam:
        return Training(model, torch.optim.Adam(model.parameters(), lr=0.05))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def twin(one: Training) -> Training:
    return copy.deepcopy(one)


def batches(count: int) -> list:
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(6, 4, generator=generator).double(), torch.randn(6, 2, generator=generator).double())
        for _ in range(count)
    ]


BATCHES = batches(6)


def captured_of(of: Training, batch) -> Captured:
    return capture(of.step, of.model, of.optimizer, batch)


def parameters_of(captured: Captured) -> list[str]:
    return [entry.name for entry in captured.trace.places.parameters]


def gradients_of(captured: Captured) -> dict[str, str]:
    """For each parameter the buffer of its gradient."""
    maker = {slot: (action.name, at) for action in captured.program.actions for at, slot in enumerate(action.fills)}
    root = {buffer.name for buffer in captured.graph.buffers}
    found = {}
    for gradient, slot in captured.gradients:
        name, at = maker[slot]
        while f"{name}:{at}" not in root:
            at -= 1
        found[gradient.parameter.name] = f"{name}:{at}"
    return found


def worker_of(captured: Captured) -> Captured:
    keep = [op.name for op in captured.graph.ops if op.role != "update"]
    arrivals = [Arrival(f"recv:{name}", name, "server") for name in parameters_of(captured)]
    departures = [Departure(f"send:{name}.grad", b, "server") for name, b in gradients_of(captured).items()]
    return cut(captured, keep, arrivals, departures)


def server_of(captured: Captured) -> Captured:
    keep = [op.name for op in captured.graph.ops if op.role == "update"]
    arrivals = [Arrival(f"recv:{name}.grad", b, "worker0") for name, b in gradients_of(captured).items()]
    departures = [Departure(f"send:{name}", name, "worker0") for name in parameters_of(captured)]
    return cut(captured, keep, arrivals, departures)


def half_of(captured: Captured, layers: set[str], peer: str) -> Captured:
    """The ops of some layers, with channels for every value that crosses to or from the others."""
    keep = {op.name for op in captured.graph.ops if op.layer in layers}
    makes = {buffer: op.name for op in captured.graph.ops for buffer in op.writes if buffer.startswith(f"{op.name}:")}
    crossing = {
        buffer
        for op in captured.graph.ops
        for buffer in op.reads
        if buffer in makes and (op.name in keep) != (makes[buffer] in keep)
    }
    arrivals = [Arrival(f"recv:{buffer}", buffer, peer) for buffer in sorted(crossing) if makes[buffer] not in keep]
    departures = [Departure(f"send:{buffer}", buffer, peer) for buffer in sorted(crossing) if makes[buffer] in keep]
    return cut(captured, keep, arrivals, departures)


def plan_of(captured: Captured, me: str, peer: str, cores: int = 1) -> Plan:
    """Computing on some lanes of one thread, in turn, and a channel each way, all in program order."""
    order = [name for name in captured.graph.order if captured.graph[name].role not in ("recv", "send")]
    lanes = [Lane(f"lane{n}", tuple(order[n::cores])) for n in range(cores)]
    of_role = {role: tuple(op.name for op in captured.graph.ops if op.role == role) for role in ("recv", "send")}
    lanes.append(Lane("in", of_role["recv"], "channel", f"{peer}->{me}"))
    lanes.append(Lane("out", of_role["send"], "channel", f"{me}->{peer}"))
    return Plan(tuple(lanes))


def part_of(adam: bool, make):
    """A twin's part of the step, captured after one step."""
    found = training(adam)
    found.step(BATCHES[0])
    return found, make(captured_of(found, BATCHES[0]))


def both_ways(one: str, other: str, channel) -> dict:
    return {f"{one}->{other}": channel, f"{other}->{one}": channel}


def in_thread(step):
    found = []

    def run():
        try:
            found.append(step())
        except BaseException as error:  # noqa: BLE001 (looked at by the test)
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a test that fails leaves it waiting
    thread.start()
    return thread, found


def all_begun(channel, part) -> list[str]:
    """The recvs of the first step, once each has been begun."""
    found = [op.name for op in part.graph.ops if op.role == "recv"]
    for op in found:
        channel.wait_for(op, 1)
    return found


def arrive(channel, part, epoch, role):
    for op in part.graph.ops:
        if op.role == role:
            channel.arrive(op.name, epoch)
