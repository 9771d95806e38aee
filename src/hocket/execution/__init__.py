"""Runs any plan: on native lanes, on Python threads (the reference), or on CUDA streams."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from hocket.errors import ExecutionError, InputError
from hocket.execution.process import unavailable_reason
from hocket.ir import Machine, Plan

if TYPE_CHECKING:
    from hocket.execution.base import Executor
    from hocket.execution.channels import Channel
    from hocket.tracing.captured import Captured

__all__ = ["EXECUTORS", "executor", "unavailable_reason"]

EXECUTORS = ("auto", "native", "python")

log = logging.getLogger(__name__)


@cache
def _warn_once(reason: str) -> None:
    log.warning("hocket: %s", reason)


def executor(
    captured: Captured,
    plan: Plan,
    machine: Machine | None = None,
    *,
    kind: str = "auto",
    channels: Mapping[str, Channel] | None = None,
) -> Executor:
    """Make an executor for `plan`.

    Args:
        captured: the step.
        plan: what to run.
        machine: the hardware threads of each core. Without it lanes are not pinned.
        kind: ``native`` lanes, ``python`` threads, or ``auto``: native where they can be built, else Python, and a
            CUDA graph for a plan on streams.
        channels: the channel of each link (``src->dst``) of a channel lane.

    Raises:
        PlanError: the plan is not one for this step.
        ExecutionError: the kind is not available here, or the machine is another one. The message says why.
    """
    if kind not in EXECUTORS:
        raise InputError(f"executor: expected one of {', '.join(EXECUTORS)}, got {kind!r}")
    if kind == "auto" and any(lane.kind == "stream" for lane in plan.lanes):
        from hocket.execution.streams import GraphedLanes

        return GraphedLanes(captured, plan)
    if kind != "python":
        from hocket.execution.native import NativeLanes
        from hocket.native import available

        ready = available()
        if ready or kind == "native":
            try:
                return NativeLanes(captured, plan, machine, channels=channels)
            except ExecutionError as error:
                if kind == "native":
                    raise
                log.info("hocket: Python lanes are used: %s", error)
        else:
            _warn_once(ready.why)
    from hocket.execution.threads import ThreadLanes

    return ThreadLanes(captured, plan, machine, channels=channels)
