"""Every way of running a step on the cores of this machine, side by side: ``python -m benchmarks concurrency``.

Contenders, all in one process, each on a twin of the same job, in turns (`benchmarks.turns`), medians with spread:

- ``eager``: torch as recommended, threads = cores; ``eager_1`` and so on: the same with fewer threads;
- ``compile``: `torch.compile` of the model, with what it really compiled: graphs, breaks, recompiles;
  ``compile_update``: of the model and of the optimizer's step; ``compile_last`` and ``compile_last_update``: the same
  with model and images in channels last, where there are images; ``compile_autotune``: all of these, in its mode
  ``max-autotune``;
- ``uniform_2x1`` and so on: every inter x intra combination (lanes by threads each), ops in program order on equal
  native lanes, too many threads for the cores included (the paper's manual optimisation);
- ``serial``: native lanes, one lane of all cores, program order;
- ``s1``, ``s12``, ``s123`` (and ``s1234`` where cores have siblings): the paper's strategies, added in turn;
- ``lookahead``: the search on top of them; ``phases``: see `hocket.planning.phases`;
- ``all``: `hocket.schedule`, called as a user calls it: signature and guards included. Of its audits, which take at
  most 0.25% of a long run, the first ones would be every other step here. They are put off. ``rounding`` and
  ``close``: the same with these ``numerics``, and ``close_compiled`` once its compiled forms are there.
- ``jax``: ``jit`` of the whole step, in a process of its own, where JAX is installed: the MLP, LSTM cells and GPT-2.

The bound is that of the graph that ``all`` runs (where it is left out, that of the first after it), from median times
of its ops on native lanes, one lane at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import torch
import torch._dynamo
from torch.utils._pytree import tree_leaves

from benchmarks.bench import Save, ratios, unsaved
from benchmarks.contenders import compiled_step, decided, gpt2, is_image
from benchmarks.jax_steps import IN_A_ROW, MODELS, JaxStep, jax_missing
from benchmarks.turns import Turns, in_turns, summaries, title
from hocket import zoo
from hocket.cli.console import table
from hocket.errors import InputError
from hocket.execution import executor
from hocket.execution.base import Executor
from hocket.ir import Costs, Lane, Machine, Plan, Timeline
from hocket.ir._fields import write_text
from hocket.job import Job
from hocket.planning import bounds, plan
from hocket.profiling import profile
from hocket.profiling.tracer import serial_plan
from hocket.reporting import corunning_of, corunning_svg
from hocket.session import Schedule
from hocket.tracing.captured import Captured
from hocket.tracing.capturing import capture_step

SMALL: dict[str, dict[str, Any]] = {
    "mlp": {},
    # The width, depth, heads, steps and characters of nanoGPT's model for CPUs (github.com/karpathy/nanoGPT, README).
    "transformer": {"batch_size": 4, "width": 128, "depth": 4, "heads": 4, "steps": 64, "vocab": 65},
    "lstm-cells": {"batch_size": 20},
    "resnet20": {"batch_size": 4},
    "gpt2": {},  # that of `benchmarks.contenders`
    "bert-tiny": {},
}
LARGE: dict[str, dict[str, Any]] = {
    "resnet20": {"batch_size": 64},
    "densenet40": {"batch_size": 32},
    "inception-v3": {"batch_size": 4},
    "resnet50": {"batch_size": 8},
    "vgg16": {"batch_size": 2},
    "vgg11": {"batch_size": 8},
    "mobilenet-v2": {"batch_size": 8},
    "dcgan": {"batch_size": 64},
}
# Contenders in the tables: what a user would choose from, and native lanes by one plan each.
COMPILED = ("compile", "compile_update", "compile_last", "compile_last_update", "compile_autotune")
CHOICES = (*COMPILED, "all", "close", "close_compiled", "jax")
PLANS = ("serial", "s1", "s12", "s123", "lookahead", "phases")
GPT2_WIDTH, GPT2_HEADS = 64, 4
# Blocks per contender, and counted steps in each.
ROUNDS = {"small": (12, 8), "large": (12, 2)}


def run(
    *,
    quick: bool = False,
    compiled: bool = True,
    planned: bool = True,
    bitwise: bool = True,
    rounds: int | None = None,
    targets: tuple[str, ...] = (),
    report: Path | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Measure the small-op steps, and unless `quick` the large-op steps.

    Returns:
        By group and target what `measure` returns, and for each group geometric means over its targets.
    """
    result: dict[str, Any] = {
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "wait_policy": {name: os.environ.get(name, "") for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")},
        "small": {},
        "large": {},
    }
    for group, entries in _chosen(targets, quick).items():
        for name, size in entries:
            label = _label(name, size)
            blocks, block = ROUNDS[group]
            result[group][label] = measure(
                name,
                size,
                compiled=compiled,
                planned=planned,
                bitwise=bitwise,
                rounds=rounds or blocks,
                block=block,
                report=report,
            )
            save(result)
        rows = list(result[group].values())
        if rows:
            result[f"{group}_geomean"] = {
                "speedup": _geomean(row["speedup"][row["scheduled"]] for row in rows),
                "to_bound": _geomean(row["to_bound"].get(row["scheduled"]) for row in rows),
            }
    return result


def _chosen(targets: Sequence[str], quick: bool) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The name and size of each target, by group."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "small": list(SMALL.items()),
        "large": [] if quick else list(LARGE.items()),
    }
    known = {word for item in (*SMALL.items(), *LARGE.items()) for word in (item[0], _label(*item))}
    others = []
    for target in sorted(set(targets) - known):
        name, _, batch_size = target.partition("/")
        if name not in LARGE or not batch_size.isdecimal() or not int(batch_size):
            raise InputError(f"bench concurrency: expected some of {', '.join(sorted(known))}, got {target!r}")
        others.append((name, LARGE[name] | {"batch_size": int(batch_size)}))
    if targets:
        found = {
            group: [item for item in entries if {item[0], _label(*item)} & set(targets)]
            for group, entries in found.items()
        }
    found["large"] += others
    return found


def _load(name: str, size: dict[str, Any]) -> Job:
    return gpt2(GPT2_WIDTH) if name == "gpt2" else zoo.load(name, **size)


def _label(name: str, size: dict[str, Any]) -> str:
    return f"{name}/{size['batch_size']}" if size else name


def measure(
    name: str,
    size: dict[str, Any],
    *,
    compiled: bool = True,
    planned: bool = True,
    bitwise: bool = True,
    rounds: int = 12,
    block: int = 8,
    report: Path | None = None,
) -> dict[str, Any]:
    """One target: times in milliseconds, ratios to eager and to the bound, and what `torch.compile` did."""
    machine = Machine.here()
    usual = torch.get_num_threads()
    contenders: dict[str, Callable[[Any], Any]] = {}
    eager = _load(name, size)
    contenders["eager"] = eager.step
    for threads in range(1, machine.cores if planned else 1):
        contenders[f"eager_{threads}"] = _at_width(_load(name, size).step, threads, usual)
    notes: dict[str, Any] = {}
    if compiled:
        torch._dynamo.reset()
        ways: list[tuple[str, bool, bool, str | None]] = [
            ("compile", False, False, None),
            ("compile_update", True, False, None),
        ]
        has_images = any(map(is_image, tree_leaves(eager.batch(0))))
        if has_images:
            ways += [("compile_last", False, True, None), ("compile_last_update", True, True, None)]
        ways.append(("compile_autotune", True, has_images, "max-autotune"))
        for label, update, last, mode in ways:
            step, notes[label] = compiled_step(_load(name, size), update, last, mode)
            if step is None and mode and last:  # a model that cannot have its channels last is tuned without
                step, notes[label] = compiled_step(_load(name, size), update, False, mode)
            if step is not None:
                contenders[label] = step
    captured = _captured(name, size)
    plans = single_plans(captured, machine) if planned else {}
    lanes_of = {label: executor(captured, made, machine) for label, made in plans.items()}
    contenders |= lanes_of
    scheduled: dict[str, Schedule] = {}
    if bitwise:
        scheduled["all"] = decided(_load(name, size), "bitwise")
        scheduled["rounding"] = decided(_load(name, size), "rounding")
    if bitwise or not compiled:
        scheduled["close"] = decided(_load(name, size), "close")
    if compiled:
        scheduled["close_compiled"] = decided(_load(name, size), "close", compiled=True)
    main = next(iter(scheduled))
    fast = scheduled[main]
    contenders |= scheduled
    notes |= {label: each.why for label, each in scheduled.items()}
    jax = (
        JaxStep(name, _load(name, size), heads=GPT2_HEADS, in_a_row=IN_A_ROW)
        if name in MODELS and not jax_missing()
        else None
    )
    if jax is not None:
        contenders["jax"] = jax
    found = in_turns(contenders, eager.batch, rounds=rounds, block=block)
    if jax is not None:
        jax.close()
    corunning: dict[str, Timeline] = {}
    for label in ("s123", "lookahead", main):
        step = contenders.get(label)
        if isinstance(step, Executor) or (step is fast and fast.verdict == "planned"):
            step(eager.batch(0))
            corunning[label] = step.timeline()
    row = _summary(found, main, fast, machine, len(captured.graph)) | {"compile": notes}
    counts = {label: corunning_of(timeline) for label, timeline in corunning.items()}
    row["corunning"] = {label: {"most": max(found), "mean": mean(found)} for label, found in counts.items() if found}
    if report is not None and corunning:
        report.mkdir(parents=True, exist_ok=True)
        label = f"{name}-{size['batch_size']}" if "batch_size" in size else name
        picture = corunning_svg(corunning, title=f"{label}: ops side by side, from event to event")
        write_text(report / f"{label}.svg", picture)
    for lanes in lanes_of.values():
        lanes.close()
    for each in scheduled.values():
        each.close()
    return row


def _summary(found: dict[str, Turns], main: str, fast: Schedule, machine: Machine, ops: int) -> dict[str, Any]:
    medians = {label: turns.median_ms for label, turns in found.items()}
    uniform = {label: value for label, value in medians.items() if label.startswith("uniform_")}
    best = min(uniform, key=uniform.__getitem__, default=None)
    row: dict[str, Any] = {
        "ops": ops,
        "scheduled": main,
        **summaries(found),
        "uniform_best": best,
        "uniform_over_all": uniform[best] / medians[main] if best else None,
        "faults_to_eager": found[main].summary()["page_faults"] / max(1.0, found["eager"].summary()["page_faults"]),
        "verdict": str(fast.verdict),
        "why": fast.why,
        "lower_bound_ms": None,
        "to_bound": {},
    }
    if fast.candidate is not None:
        captured = fast.candidate.captured
        costs = profile(captured, machine=machine, runs=9)
        lower_ms = bounds(captured.graph, _medians(costs), machine).lower_us / 1e3
        row["lower_bound_ms"] = lower_ms
        row["to_bound"] = {label: value / lower_ms for label, value in medians.items()}
        row["plan"] = {"planner": fast.plan.planner, "lanes": [(lane.width, len(lane.ops)) for lane in fast.plan.lanes]}
    return row


def _medians(costs: Costs) -> Costs:
    """Costs of a usual run, where `Costs` has the fastest."""
    return Costs(
        {
            op: {key: us + costs.spread_us.get(op, {}).get(key, 0.0) for key, us in found.items()}
            for op, found in costs.durations_us.items()
        }
    )


def _geomean(values: Any) -> float:
    found = [value for value in values if value]
    return geometric_mean(found) if found else float("nan")


def _at_width(step: Callable[[Any], Any], threads: int, usual: int) -> Callable[[Any], Any]:
    def narrow(batch: Any) -> Any:
        torch.set_num_threads(threads)
        try:
            return step(batch)
        finally:
            torch.set_num_threads(usual)

    return narrow


def _captured(name: str, size: dict[str, Any]) -> Captured:
    job = _load(name, size)
    job.step(job.batch(0))
    return capture_step(job.step, job.model, job.optimizer, job.batch(0), split=False)


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    choices, plans = [], []
    for target, row in (item for group in ("small", "large") for item in result[group].items()):
        to_bound = ratios(row["to_bound"], [row["scheduled"]])
        choices.append((target, *ratios(row["speedup"], CHOICES), *to_bound, f"{100 * row['faults_to_eager']:.1f}%"))
        plans.append((target, *ratios(row["speedup"], [*PLANS, row["uniform_best"]])))
    yield table(
        f"{title(result)}: what a user would choose from", ("target", *CHOICES, "to bound", "page faults"), choices
    )
    yield table("and native lanes by one plan each", ("target", *PLANS, "uniform"), plans)


def single_plans(captured: Captured, machine: Machine) -> dict[str, Plan]:
    """Return the plans of the native contenders: uniform ones, program order, and the paper's strategies in turn."""
    costs = profile(captured, machine=machine, runs=5)
    plans = {
        f"uniform_{lanes}x{width}": _in_program_order(captured, lanes, width, machine.cores)
        for lanes in _halvings(machine.cores)
        for width in _halvings(machine.cores)
    }
    plans["serial"] = serial_plan(captured, machine.cores, machine)
    strategies = [(1,), (1, 2), (1, 2, 3)]
    if machine.devices[0].smt > 1:
        strategies.append((1, 2, 3, 4))
    for added in strategies:
        options: dict[str, Any] = {"strategies": added, "lookahead_ms": 0.0}
        label = "s" + "".join(map(str, added))
        plans[label] = plan(captured.graph, costs, machine, planner="concurrency", **options)
    plans["lookahead"] = plan(captured.graph, costs, machine, planner="concurrency")
    plans["phases"] = plan(captured.graph, costs, machine, planner="phases")
    return plans


def _halvings(cores: int) -> list[int]:
    """All cores, half of them, and so on down to one."""
    found = [cores]
    while found[-1] > 1:
        found.append(found[-1] // 2)
    return found[::-1]


def _in_program_order(captured: Captured, lanes: int, width: int, cores: int) -> Plan:
    """The ops in program order, each to the lane of what it waits for if that is one lane, else to the shortest queue.

    Lanes that want more cores than there are share them all, as a framework's pools would.
    """
    dealt: list[list[str]] = [[] for _ in range(lanes)]
    place: dict[str, int] = {}
    for op in captured.graph.order:
        before = {place[other] for other in captured.graph.predecessors[op]}
        lane = before.pop() if len(before) == 1 else min(range(lanes), key=lambda number: len(dealt[number]))
        dealt[lane].append(op)
        place[op] = lane
    pinned = lanes * width <= cores
    return Plan(
        tuple(
            Lane(f"lane{n}", tuple(ops), width=width, cores=tuple(range(n * width, (n + 1) * width)) if pinned else ())
            for n, ops in enumerate(dealt)
        ),
        planner="uniform",
    )
