"""Durations of the ops of a captured step, measured where possible and estimated elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hocket.ir import Costs, Machine

if TYPE_CHECKING:
    from hocket.tracing.captured import Captured

__all__ = ["profile"]


def profile(
    captured: Captured,
    *,
    widths: Sequence[int] | None = None,
    runs: int = 5,
    machine: Machine | None = None,
    executor: str = "auto",
) -> Costs:
    """Time every op of a captured step, in place: whole steps on copies of all state, at each width.

    Args:
        captured: the result of `hocket.capture`.
        widths: numbers of threads. Defaults to 1, 2, 4 and all cores, on more than four of them to the widths of a hill
            climb (`hocket.profiling.hill_climb`), as in a schedule.
        runs: counted steps at each width, after one that is not counted. The minimum is the op's duration, and
            median minus minimum its spread.
        machine: where to run. Defaults to `Machine.here()`.
        executor: ``native``, ``python``, or ``auto``: what the plan will be run by.

    Returns:
        Durations in microseconds, by op and width. Those of a step on a GPU are by op and ``gpu0``, timed by events.

    Raises:
        InputError: a width below 1 or beyond the cores.

    Example:
        >>> import torch
        >>> from hocket.tracing import capture
        >>> model = torch.nn.Linear(4, 1)
        >>> captured = capture(lambda batch: model(batch).sum().backward(), model, None, torch.ones(2, 4))
        >>> costs = profile(captured, widths=[1], runs=1)
        >>> all(costs.duration_us(op.name, width=1) >= 0 for op in captured.graph.ops)
        True
    """
    from hocket.profiling.tracer import cuda_index, trace_costs, trace_streams

    if (index := cuda_index(captured)) is not None:
        from hocket.execution.streams import CudaDevice

        return trace_streams(captured, CudaDevice(index), runs)
    return trace_costs(captured, widths=widths, runs=runs, machine=machine or Machine.here(), kind=executor)
