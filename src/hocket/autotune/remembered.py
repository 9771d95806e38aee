"""Remembered decisions: their content, the conditions they were made under, and both as JSON.

A document is read strictly, and nothing in it is run or unpickled::

    {"format": "hocket-decision/1",
     "about": {"graphs": {"": "5f0c..."}, "machine": {...}, "threads": 2, "torch": "2.13.0", ...},
     "decision": {"kind": "planned", "reason": "...", "speedup": 1.7, "low": 1.6, "high": 1.8, "eager_ms": [...],
                  "cores_of_others": 0.0},
     "plan": {"form": "", "split": false, "text": "...", "steps_ms": [...], "costs": {"format": "hocket-costs/1", ...}}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hocket.ir import Costs, Machine
from hocket.ir._fields import Reader
from hocket.ir.limits import processor_name
from hocket.version import VERSION

FORMAT = "hocket-decision/1"
# Other programs that use less of the machine make no difference.
MAX_CORES_OF_OTHERS = 0.25
# They set how long idle threads of OpenMP spin, and so who is faster.
_SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class RememberedPlan:
    """A plan as it was measured."""

    form: str  # name of the step's form, see `hocket.tracing.variants`
    split: bool  # the backward of convolutions was split
    text: str  # the plan, as ``str(plan)`` writes it
    steps_ms: tuple[float, ...]  # durations of its steps in the comparison, empty before that
    costs: Costs  # durations of its ops


@dataclass(frozen=True)
class Remembered:
    """A decision as it is kept (see `hocket.autotune.decision.Decision`): its figures and its best plan, if any.

    The kind ``"regions"`` is that of a graph of Dynamo's whose regions are faster than the graph as it stands.
    `cores_of_others` is what other programs used of the machine meanwhile.
    """

    kind: str
    reason: str
    speedup: float | None = None
    low: float | None = None
    high: float | None = None
    eager_ms: tuple[float, ...] = ()
    plan: RememberedPlan | None = None
    cores_of_others: float = 0.0

    @property
    def is_clear(self) -> bool:
        """True if one was faster, or nothing had to be compared."""
        return self.low is None or self.high is None or not self.low <= 1 <= self.high

    @property
    def was_beside_others(self) -> bool:
        """True if other programs used the machine meanwhile: who is faster may hold only as long as they do."""
        return self.cores_of_others > MAX_CORES_OF_OTHERS


def about_step(
    fingerprints: Mapping[str, str], machine: Machine, *, planner: str, guard: bool, executor: str, numerics: str
) -> dict[str, Any]:
    """Everything that a decision depends on: the step as graphs, the machine, the versions and the options."""
    return {
        "graphs": dict(fingerprints),
        "machine": json.loads(json.dumps(machine.document())),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "spinning": {name: os.environ[name] for name in _SPINNING if name in os.environ},
        "torch": str(torch.__version__),
        "hocket": VERSION,
        "planner": planner,
        "guard": guard,
        "executor": executor,
        "numerics": numerics,
    }


def document_of(about: Mapping[str, Any], found: Remembered) -> dict[str, Any]:
    """A decision and what it is about, as JSON takes it: the fields of both classes by their names."""
    figures = dict(vars(found))
    plan: RememberedPlan | None = figures.pop("plan")
    kept = None if plan is None else {**vars(plan), "costs": plan.costs.document()}
    return {"format": FORMAT, "about": dict(about), "decision": figures, "plan": kept}


def read_document(reader: Reader, about: Mapping[str, Any]) -> Remembered:
    """The decision of a document, or a `FormatError` where it does not read, or is about something else."""
    reader.only("format", "about", "decision", "plan")
    if reader["format"].text() != FORMAT:
        raise reader["format"].fail(f'expected "{FORMAT}"')
    if reader["about"].mapping() != about:
        raise reader["about"].fail("it is about another step, machine or version")
    decision = reader["decision"]
    decision.only("kind", "reason", "speedup", "low", "high", "eager_ms", "cores_of_others")
    kind = decision["kind"].text()
    plan = None if reader["plan"].value is None else _read_plan(reader["plan"])
    if kind not in ("planned", "eager", "regions") or (kind == "planned" and plan is None):
        raise decision["kind"].fail(f"expected planned (with a plan), regions or eager, got {kind!r}")
    eager_ms = _times(decision["eager_ms"])
    if kind == "planned" and plan is not None and bool(eager_ms) != bool(plan.steps_ms):
        raise reader["plan"]["steps_ms"].fail("expected times of the plan and of eager, or of neither")
    return Remembered(
        kind,
        decision["reason"].text(),
        decision["speedup"].optional_number(),
        decision["low"].optional_number(),
        decision["high"].optional_number(),
        eager_ms,
        plan,
        decision.get("cores_of_others", 0.0).number(),
    )


def _read_plan(reader: Reader) -> RememberedPlan:
    reader.only("form", "split", "text", "steps_ms", "costs")
    costs = reader["costs"]
    if costs["format"].text() != "hocket-costs/1":
        raise costs["format"].fail('expected "hocket-costs/1"')
    return RememberedPlan(
        reader["form"].text(),
        reader["split"].boolean(),
        reader["text"].text(),
        _times(reader["steps_ms"]),
        Costs.read(costs),
    )


def _times(reader: Reader) -> tuple[float, ...]:
    return tuple(element.number() for element in reader.elements())
