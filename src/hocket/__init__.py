"""Hocket: fills the rests in a PyTorch training step, without changing what it computes.

``import hocket`` is light: torch is loaded by the first call that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket import errors
from hocket.capture import capture
from hocket.check import check
from hocket.fuse import fuse
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.job import Job
from hocket.plan import Bounds, bounds, efficiency, plan
from hocket.profile import profile
from hocket.simulate import simulate

if TYPE_CHECKING:
    from hocket.fuse import lr_scheduler, optim
    from hocket.session import Schedule, Verdict, schedule

__all__ = [
    "Bounds",
    "Costs",
    "Graph",
    "Job",
    "Machine",
    "Plan",
    "Schedule",
    "Timeline",
    "Verdict",
    "bounds",
    "capture",
    "check",
    "efficiency",
    "errors",
    "fuse",
    "lr_scheduler",
    "optim",
    "plan",
    "profile",
    "schedule",
    "simulate",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("schedule", "Schedule", "Verdict"):
        from hocket import session

        return getattr(session, name)
    if name in ("optim", "lr_scheduler"):
        return importlib.import_module(f"hocket.fuse.{name}")
    raise AttributeError(f"module 'hocket' has no attribute {name!r}")
