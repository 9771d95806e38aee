"""Every loop of this folder ends scheduled where it ends eagerly, and pure ones are planned.

After 200 steps from the same seed (quick: 110, the last change of any loop comes after 100) the scheduled run has, bit
by bit, the parameters, buffers, gradients, optimizer state, Python state and random state of the eager one. It has
returned, printed and raised the same, and has called the user's step no more often. On two cores a plan may run ops at
other widths than eager does; there it is within rounding.
"""

from __future__ import annotations

import importlib

import pytest

import hocket
from loops.loop import CASES
from loops.runner import STEPS, builder, problems, run

KINDS = (
    "averages",
    "batches",
    "branches",
    "callables",
    "changes",
    "counters",
    "draws",
    "history",
    "early_looks",
    "late_draws",
    "meters",
    "methods",
    "mixed_draws",
    "optimizers",
    "selections",
    "settings",
    "sinks",
    "sources",
    "updates",
)
for kind in KINDS:
    importlib.import_module(f"loops.{kind}")

QUICK_STEPS = 110
MODES = ("default", "plan", "two cores")


def options(mode):
    """Options of a schedule: on one core guarded or not, or unguarded on this machine (two cores or more)."""
    machine = hocket.Machine.here() if mode == "two cores" else hocket.Machine.of(cores=1)
    return {"machine": machine, "guard": mode == "default"}


def runs():
    """Every loop in every mode; quick is every second one, by plan where there has to be one, and by default elsewhere.

    Calls are counted in a quarter of the quick runs, and in all others.
    """
    for mode in MODES:
        for number, (name, case) in enumerate(CASES.items()):
            quick = mode == ("plan" if case.planned else "default") and number % 2 == 0
            counted = not quick or number % 6 == 0
            yield pytest.param(name, mode, counted, marks=() if quick else pytest.mark.slow, id=f"{name}-{mode}")


@pytest.mark.parametrize(("name", "mode", "counted"), list(runs()))
def test_scheduled_steps_end_where_eager_steps_end(name, mode, counted, tmp_path, request):
    case = CASES[name]
    build = builder(case, tmp_path)
    steps = STEPS if request.node.get_closest_marker("slow") else QUICK_STEPS
    eager = run(build, steps=steps, counted=counted)
    scheduled = run(build, steps=steps, options=options(mode), counted=counted)
    lines = problems(eager, scheduled, exact=mode != "two cores")
    for verdict, why in scheduled.verdicts:
        if verdict == "eager" and mode != "default" and case.planned:
            lines.append("the step is pure, and yet there is no plan")
        if verdict == "eager" and case.word not in why:
            lines.append(f"the reason does not contain {case.word!r}")
    verdicts = "; ".join(f"{verdict}, because {why}" for verdict, why in scheduled.verdicts)
    if lines:
        pytest.fail("\n".join([f"{name} ({mode}): {verdicts}", *lines]), pytrace=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eager_steps_repeat(name, tmp_path):
    """Without this, a difference would say nothing."""
    build = builder(CASES[name], tmp_path)
    assert not problems(run(build), run(build))
