"""Peak memory of whole processes: a step run eagerly, and by plan, each in a process of its own.

What counts is what the process grew by since before the model was made, at its highest while steps are run, as the
kernel sees it (``VmHWM`` of /proc/self/status, set back after the warm-up). So memory that a lane keeps between steps
counts, and what capturing has left behind, too. What loading torch's tracer and Hocket takes, once for a process and
whatever it trains, is stated apart: both processes capture and run a step of one layer before the model is made.
"""

from __future__ import annotations

import torch

from benchmarks.ranks import in_process
from benchmarks.resident import is_measurable, peak_bytes, resident_bytes, set_back_peak
from hocket import zoo
from hocket.execution import executor
from hocket.ir import Lane, Machine, Plan
from hocket.tracing.capturing import capture_step

WARM_UP = 3
STEPS = 5
TIMEOUT_S = 300.0


def peaks_on_cores(name: str, batch_size: int, plan: Plan) -> dict[str, float]:
    """Peaks of a zoo model's step, eager and by plan.

    Returns:
        ``eager_bytes`` and ``plan_bytes``; ``ratio`` of the second to the first; what the plan predicts of that,
        ``predicted_ratio``; and ``loading_bytes``, which is in neither. Empty where the operating system does not tell.
    """
    if not is_measurable():
        return {}
    eager, _ = in_process(_peak_bytes, name, batch_size, None, timeout_s=TIMEOUT_S)
    planned, loading = in_process(_peak_bytes, name, batch_size, str(plan), timeout_s=TIMEOUT_S)
    found = {"eager_bytes": eager, "plan_bytes": planned, "ratio": planned / eager, "loading_bytes": loading}
    if plan.peak_bytes and plan.eager_peak_bytes:
        found["predicted_ratio"] = plan.peak_bytes / plan.eager_peak_bytes
    return found


def _peak_bytes(name: str, batch_size: int, plan: str | None) -> tuple[float, float]:
    bare = resident_bytes()
    _run_one_layer()
    before = resident_bytes()
    job = zoo.load(name, batch_size=batch_size)
    step = job.step
    if plan is not None:
        job.step(job.batch(0))
        captured = capture_step(job.step, job.model, job.optimizer, job.batch(0))
        step = executor(captured, Plan.parse(plan), Machine.here())
    for number in range(WARM_UP):
        step(job.batch(number))
    set_back_peak()
    for number in range(STEPS):
        step(job.batch(number))
    return peak_bytes() - before, before - bare


def _run_one_layer() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        return loss

    batch = torch.randn(2, 2)
    captured = capture_step(step, model, optimizer, batch)
    lanes = executor(captured, Plan((Lane("cpu0", captured.graph.order, cores=(0,)),)), Machine.here())
    for _ in range(2):
        lanes(batch)
    lanes.close()
