"""Hocket schedules the ops of a PyTorch training step into idle time, without changing what the step computes.

``import hocket`` is light: torch is loaded by the first call that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hocket import errors
from hocket.adaptation import DriftLimits
from hocket.checking import check
from hocket.fusion import fuse
from hocket.ir import Costs, Graph, Machine, Plan, Timeline
from hocket.job import Job
from hocket.planning import Bounds, bounds, efficiency, plan, planners, potential
from hocket.profiling import profile
from hocket.simulation import simulate
from hocket.sinks import sink
from hocket.tracing import capture
from hocket.version import VERSION

if TYPE_CHECKING:
    from hocket import distribute, lr_scheduler, optim
    from hocket.autotune.decision import Decision, Verdict
    from hocket.decorator import scheduled
    from hocket.distributed.pipelines.split import split_policy
    from hocket.distributed.prefetching import prefetch
    from hocket.loading.loader import load
    from hocket.search.best import best_model
    from hocket.search.policy import Asha, Halving, Hyperband
    from hocket.search.population import Population
    from hocket.search.training import Training
    from hocket.session import Schedule, schedule
    from hocket.tuning import tune
    from hocket.updates import schedule_update

__all__ = [
    "Asha",
    "Bounds",
    "Costs",
    "Decision",
    "DriftLimits",
    "Graph",
    "Halving",
    "Hyperband",
    "Job",
    "Machine",
    "Plan",
    "Population",
    "Schedule",
    "Timeline",
    "Training",
    "Verdict",
    "best_model",
    "bounds",
    "capture",
    "check",
    "distribute",
    "efficiency",
    "errors",
    "fuse",
    "load",
    "lr_scheduler",
    "optim",
    "plan",
    "planners",
    "potential",
    "prefetch",
    "profile",
    "schedule",
    "schedule_update",
    "scheduled",
    "simulate",
    "sink",
    "split_policy",
    "tune",
]

__version__ = VERSION

# Where public names are that need torch.
ELSEWHERE = {
    **dict.fromkeys(("schedule", "Schedule", "Decision", "Verdict"), "session"),
    "best_model": "search.best",
    **dict.fromkeys(("Asha", "Halving", "Hyperband"), "search.policy"),
    "Population": "search.population",
    "Training": "search.training",
    "load": "loading.loader",
    "schedule_update": "updates",
    "scheduled": "decorator",
    "split_policy": "distributed.pipelines.split",
    "prefetch": "distributed.prefetching",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:
        return getattr(importlib.import_module(f"hocket.{ELSEWHERE[name]}"), name)
    if name in ("distribute", "loading", "optim", "lr_scheduler"):
        return importlib.import_module(f"hocket.{name}")
    raise AttributeError(f"module 'hocket' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
