"""An op of our own that looks around on the thread that runs it, and a step made of several of them.

The op's implementation may do what a scheduled step may not (keep lists, ask clocks): it runs in planned steps, too.
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from hocket.ir import Lane, Plan
from hocket.job import Job
from hocket.native import available
from hocket.tracing import capture
from hocket.tracing.captured import Captured

KINDS = [
    "python",
    pytest.param("native", marks=pytest.mark.skipif(not available(), reason="native lanes cannot be built here")),
]

_LIBRARY = torch.library.Library("hocket_probe", "DEF")
_LIBRARY.define("look(Tensor x, int number) -> Tensor")


@dataclass(frozen=True)
class Look:
    """State of an op's thread, and true if the user's own step runs it."""

    number: int
    thread: int
    width: int
    cpus: frozenset[int]
    grad_mode: bool
    eager: bool


looks: list[Look] = []
meanwhile: list[Callable[[int], None]] = []
meanwhile_in_eager: list[Callable[[int], None]] = []


def forget() -> None:
    """Clear what the looks saw, and what is done in them."""
    looks.clear()
    meanwhile.clear()
    meanwhile_in_eager.clear()


def _is_eager() -> bool:
    """True if `look` called the op: planned steps and traces come to it in other ways."""
    frame = sys._getframe(1).f_back  # of torch, or of a lane; there is none on a thread that is not Python's
    while frame is not None and frame.f_code.co_filename == torch._ops.__file__:
        frame = frame.f_back
    return frame is not None and frame.f_code is look.__code__


def _look(x: torch.Tensor, number: int) -> torch.Tensor:
    cpus = frozenset(os.sched_getaffinity(0))
    grad_mode, eager = torch.is_grad_enabled(), _is_eager()
    looks.append(Look(number, threading.get_native_id(), torch.get_num_threads(), cpus, grad_mode, eager))
    for action in (*meanwhile, *(meanwhile_in_eager if eager else ())):
        action(number)
    return x.clone()


_LIBRARY.impl("look", _look, "CPU")


def look(x: torch.Tensor, number: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.ops.hocket_probe.look(x, number)


def probing_job(count: int = 3) -> Job:
    """`count` looks that do not depend on each other, and a layer to train; a token beyond 4 makes it fail."""
    model = nn.ModuleDict({"words": nn.Embedding(5, 4), "out": nn.Linear(4, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        inputs = batch[0].float()
        seen = sum(look(inputs, number) for number in range(count))
        loss = model["out"](model["words"](batch[0])).sum() + seen.sum()
        loss.backward()
        optimizer.step()
        return loss

    return Job(step, model, optimizer, [(torch.tensor([0, 2, 4, 1]),), (torch.tensor([0, 3, 3, 0]),)])


def captured_job(job: Job) -> Captured:
    job.step(job.batch(0))
    found = capture(job.step, job.model, job.optimizer, job.batch(0))
    looks.clear()
    return found


def probed(count: int = 3) -> tuple[Job, Captured]:
    job = probing_job(count)
    return job, captured_job(job)


def spread(captured: Captured, *lanes: Lane) -> Plan:
    """The looks on the lanes one after the other, all else on the first lane."""
    ops: list[list[str]] = [[] for _ in lanes]
    turn = 0
    for name in captured.graph.order:
        if "look" in name:
            ops[turn % len(lanes)].append(name)
            turn += 1
        else:
            ops[0].append(name)
    return Plan(
        tuple(
            Lane(lane.name, mine, lane.kind, lane.device, lane.width, lane.cores)
            for lane, mine in zip(lanes, ops, strict=True)
        )
    )
