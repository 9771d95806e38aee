"""Captured steps: which kernels they call, how they run in program order, and how close one form is to another."""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch

from hocket.autotune.closeness import Closeness, sample
from hocket.execution.threads import ThreadLanes
from hocket.ir import Lane, Plan
from hocket.job import Job
from hocket.tracing import capture
from hocket.tracing.captured import Captured
from hocket.tracing.compiling.folder import Compiling
from hocket.tracing.compiling.process import CompilingProcess
from hocket.tracing.program import Action, compile_action


def captured_job(job: Job) -> Captured:
    """The step of a job, which has run once."""
    job.step(job.batch(0))
    return capture(job.step, job.model, job.optimizer, job.batch(0))


def run_action(action: Action, values: list[Any], numbers: list[Any]) -> None:
    """Run one action as a lane does, within `below_autograd`."""
    torch._C._set_grad_enabled(action.grad_mode)
    compile_action(action)(values, numbers)
    torch._C._set_grad_enabled(False)


def kernels(captured: Captured) -> Counter[str]:
    """Number of ops that call each kernel, by the last part of its name."""
    return Counter(op.target.rpartition(".")[2] for op in captured.graph.ops)


def one_lane(captured: Captured, threads: int | None = None) -> closing[ThreadLanes]:
    """All ops in program order on one lane, of all threads by default."""
    width = threads or torch.get_num_threads()
    return closing(ThreadLanes(captured, Plan((Lane("main", captured.graph.order, width=width),))))


def closeness(
    plain: Captured, form: Captured, step: Any, batch: Any, *, samples: int = 3, threads: int | None = None
) -> Closeness:
    """Judge a form by this many samples, with an eager step after each."""
    seen, wide = Closeness(), {} if form.wide is None else {"form": form.wide}
    with one_lane(plain, threads) as eager, one_lane(form, threads) as executor:
        for number in range(samples):
            found, _ = sample(plain, eager, {"form": executor}, batch, number, wide)
            seen = seen.and_sample(found["form"])
            step(batch)
    return seen


def compiled_step(captured: Captured, folder: Path, *, threads: int) -> Captured:
    """The compiled form of a step that `folder` does not have yet."""
    return compiled_steps([(captured, folder)], threads=threads)[0]


def compiled_steps(steps: Sequence[tuple[Captured, Path]], *, threads: int) -> list[Captured]:
    """The compiled forms of steps that their folders do not have yet, by one process."""
    process = CompilingProcess()
    with ExitStack() as stack:
        found = [stack.enter_context(closing(Compiling(*step, threads=threads))) for step in steps]
        for compiling in found:
            compiling.start(process)
        process.begin()
        return [compiling.result() for compiling in found]
