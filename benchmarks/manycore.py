"""The strategies of Liu et al. on many cores: ``python -m benchmarks manycore``.

Simulated, on curves built from published figures (`benchmarks.knl`), beside what the paper printed (Liu et al.,
IPDPS 2019, Figure 3 and Table I): four networks at the paper's batch sizes, captured here, planned for 68 and for 16
cores. What that takes for granted, and what comes of it if it is otherwise, is in `benchmarks.assumptions`.

With ``--measured`` the same plans are made from times measured on this machine's own cores, and run.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean
from time import process_time
from typing import TYPE_CHECKING, Any

from benchmarks.assumptions import ASSUMPTIONS, VARIANTS, Setup, timeline_of
from benchmarks.bench import Budget, Save, ratios, unsaved
from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from hocket.cli.console import UsageError, table
from hocket.errors import InputError, MissingDependencyError
from hocket.ir import Graph, Machine, Plan
from hocket.planning import bounds, plan
from hocket.planning.moldable.instance import as_plan, instance_of
from hocket.planning.moldable.sgs import parallel_sgs
from hocket.reporting import corunning_of

if TYPE_CHECKING:
    from rich.table import Table

# Of the zoo, with the batch sizes of section IV-A.
TARGETS: dict[str, dict[str, Any]] = {
    "resnet50": {"image_size": 32, "batch_size": 64, "optimizer": "adam"},
    "dcgan": {"batch_size": 64},
    "inception-v3": {"batch_size": 16},
    "lstm-cells": {"batch_size": 20},
}
QUICK = ("dcgan", "lstm-cells")
CORES, SMT = (68, 16), 4
# What each strategy adds to those before it; `s1234` of DCGAN and LSTM is the product of these, the others are printed.
# `over_uniform`: all four over the best setting found by hand.
FIGURE_3: dict[str, dict[str, float]] = {
    "resnet50": {"s12": 1.02, "s3": 1.35, "s4": 1.08, "s1234": 1.49, "over_uniform": 1.08},
    "dcgan": {"s12": 1.12, "s3": 1.15, "s4": 1.04, "s1234": 1.34, "over_uniform": 1.07},
    "inception-v3": {"s12": 1.02, "s3": 1.07, "s4": 1.07, "s1234": 1.17, "over_uniform": 0.98},
    "lstm-cells": {"s12": 1.14, "s3": 1.25, "s4": 1.00, "s1234": 1.43, "over_uniform": 1.02},
}
# Figure 4: ops running at an event, in the mean, by strategies 1 to 3 and by all.
FIGURE_4 = {"resnet50": (1.61, 1.89), "dcgan": (1.62, 2.04), "inception-v3": (1.52, 1.74)}
STRATEGIES = {"s1": (1,), "s12": (1, 2), "s123": (1, 2, 3), "s1234": (1, 2, 3, 4)}
FEWEST_CORES = 3  # to measure on
LABELS = (*STRATEGIES, "halves", "uniform", "all")


def run(
    *,
    quick: bool = False,
    budget_s: float | None = None,
    targets: Mapping[str, Mapping[str, Any]] | None = None,
    cores: Sequence[int] = CORES,
) -> dict[str, Any]:
    """Simulate every target on every number of cores.

    Args:
        quick: only those that are captured in seconds, and no changed assumptions.
        targets: settings by zoo name, in place of the paper's four networks.
        cores: of the machine, 68 at most.

    Returns:
        ``machines``: by cores and target what `figures` returns, and means over the targets; ``sensitivity``: what
        each changed assumption makes of the speedups on the first number of cores, and which one changes the mean of
        the four strategies ``most``; ``assumptions``, and ``paper``.
    """
    if budget_s is not None:
        raise UsageError("--budget-s is for --measured; a simulation is as long as it is")
    chosen = dict(targets or TARGETS)
    if quick and targets is None:
        chosen = {name: chosen[name] for name in QUICK}
    graphs = {name: _captured(name, size) for name, size in chosen.items()}
    setups = {count: {name: _setup(graph, count) for name, graph in graphs.items()} for count in cores}
    machines: dict[str, dict[str, Any]] = {}
    for count, of_target in setups.items():
        rows = {name: figures(setup) for name, setup in of_target.items()}
        machines[str(count)] = {"targets": rows} | _means([row["speedup"] for row in rows.values()])
    result: dict[str, Any] = {
        "curves": published_knl().note,
        "sizes": chosen,
        "assumptions": list(ASSUMPTIONS),
        "paper": {"figure_3": FIGURE_3, "mean": 1.36, "corunning": FIGURE_4},
        "machines": machines,
    }
    if not quick:
        first = str(cores[0])
        result["sensitivity"] = _sensitivity(setups[cores[0]], machines[first]["mean"])
    return result


def figures(setup: Setup) -> dict[str, Any]:
    """One step on one machine.

    Returns:
        ``recommended_ms``: one op at a time on all cores; ``speedup`` over that of strategies 1, 1 and 2, ... (paper's
        plan as it is), of all four with halved widths (``halves``), of the best setting that is the same for all ops
        (``uniform``, and which one that is), and of everything with looking ahead (``all``); ``added``: what each
        strategy adds to those before it, as the paper's Figure 3 has it; ``to_bound``: time by all over the lower bound
        without sibling threads; ``corunning``: ops running at an event, in the mean; ``planning_s``: processor time of
        the last plan.
    """
    recommended_us = _recommended_us(setup)
    plans = {label: _planned(setup, strategies=added) for label, added in STRATEGIES.items()}
    plans["halves"] = _planned(setup, strategies=(1, 2, 3, 4), halves=True)
    plans["uniform"], uniform = _uniform(setup)
    start = process_time()
    plans["all"] = _planned(setup, strategies=(1, 2, 3, 4), lookahead=True)
    planning_s = process_time() - start
    timelines = {label: timeline_of(setup, made) for label, made in plans.items()}
    speedup = {label: recommended_us / (timeline.makespan_us + setup.alone_us) for label, timeline in timelines.items()}
    lower_us = bounds(setup.graph, setup.costs, Machine.of(cores=setup.machine.cores)).lower_us
    return {
        "ops": len(setup.graph),
        "recommended_ms": recommended_us / 1e3,
        "speedup": speedup,
        "added": {
            "s12": speedup["s12"],
            "s3": speedup["s123"] / speedup["s12"],
            "s4": speedup["s1234"] / speedup["s123"],
        },
        "uniform_best": uniform,
        "to_bound": timelines["all"].makespan_us / lower_us if lower_us else 1.0,
        "corunning": {label: mean(corunning_of(timelines[label])) for label in ("s123", "s1234", "all")},
        "lanes": {label: len(made.lanes) for label, made in plans.items()},
        "planning_s": planning_s,
    }


def _captured(name: str, size: Mapping[str, Any]) -> Graph:
    from hocket import zoo
    from hocket.tracing import capture

    job = zoo.load(name, **size)
    graph = capture(job.step, job.models, job.optimizers, job.batch(0)).graph
    del job
    gc.collect()  # a network of 25 million parameters, copied, before the next one comes
    return graph


def _setup(graph: Graph, cores: int) -> Setup:
    return Setup(graph, for_graph(graph, published_knl(cores)), Machine.of(cores=cores, smt=SMT))


def _recommended_us(setup: Setup) -> float:
    return setup.makespan_us(plan(setup.graph, setup.costs, setup.machine, planner="serial"))


def _planned(setup: Setup, *, strategies: tuple[int, ...], lookahead: bool = False, halves: bool = False) -> Plan:
    options: dict[str, Any] = {} if lookahead else {"lookahead_ms": 0.0, "coarsen_us": 0.0, "halves": halves}
    return plan(
        setup.graph,
        setup.costs,
        setup.machine,
        planner="concurrency",
        strategies=strategies,
        wait_us=setup.wait_us,
        **options,
    )


def _uniform(setup: Setup) -> tuple[Plan, str]:
    """The best of inter x intra: so many ops at a time, each on so many threads, first ready first served."""
    device = setup.machine.devices[0]
    place = {op: at for at, op in enumerate(setup.graph.order)}
    first = [-float(place[op.name]) for op in setup.graph.ops]
    found = {}
    for inter in (1, 2, 4, 8):
        for intra in {max(1, setup.machine.cores // share) for share in (1, 2, 4, 8, 16, 32)}:
            if inter * intra <= setup.machine.cores:
                few = replace(device, cores=inter * intra)
                instance = instance_of(setup.graph, setup.costs, few, wait_us=setup.wait_us)
                placed = parallel_sgs(instance, [intra] * len(instance.order), first)
                found[f"{inter}x{intra}"] = as_plan(setup.graph, placed, device, "uniform")
    best = min(found, key=lambda label: setup.makespan_us(found[label]))
    return found[best], best


def _means(speedups: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Arithmetic means, as the paper's 1.36 is one, and geometric ones."""
    return {
        "mean": {label: mean(row[label] for row in speedups) for label in LABELS},
        "geomean": {label: geometric_mean(row[label] for row in speedups) for label in LABELS},
    }


def _sensitivity(setups: Mapping[str, Setup], usual: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variant in VARIANTS:
        rows = {name: _changed(variant.change(setup)) for name, setup in setups.items()}
        means = {label: mean(row[label] for row in rows.values()) for label in ("s1234", "all")}
        found[variant.name] = {"words": variant.words, "targets": rows, "mean": means}
    return {
        "variants": found,
        "most": max(found, key=lambda name: abs(math.log(found[name]["mean"]["s1234"] / usual["s1234"]))),
    }


def _changed(setup: Setup) -> dict[str, float]:
    recommended_us = _recommended_us(setup)
    return {
        label: recommended_us / setup.makespan_us(_planned(setup, strategies=(1, 2, 3, 4), lookahead=ahead))
        for label, ahead in (("s1234", False), ("all", True))
    }


def measured(
    *,
    quick: bool = False,
    rounds: int = 5,
    budget_s: float | None = None,
    save: Save = unsaved,
) -> dict[str, Any]:
    """The same on this machine's own cores: ops profiled at 1, 2, 4, ... and all cores, plans run, in turns with eager.

    Raises:
        InputError: this machine has two cores or fewer, where there is hardly anything to divide. Or all targets need a
            package that is not installed (one that does is left out otherwise, and named in ``left_out``).
    """
    machine = Machine.here()
    if machine.cores < FEWEST_CORES:
        raise InputError(
            f"manycore: this machine has {machine.cores} cores, and with --measured it takes more than 2; "
            "`python -m benchmarks concurrency` measures on any number"
        )
    rows: dict[str, dict[str, Any]] = {}
    missing: dict[str, str] = {}
    budget = Budget(budget_s)

    def result() -> dict[str, Any]:
        return {
            "paper": {"figure_3": FIGURE_3, "mean": 1.36},
            "targets": rows,
            "left_out": missing | budget.left_out,
            "mean": {
                label: mean(row["speedup"][label] for row in rows.values()) for label in ("s12", "s123", "all") if rows
            },
        }

    for name in QUICK if quick else TARGETS:
        with budget.item(name) as begun:
            if begun:
                try:
                    rows[name] = _measured(name, machine, rounds)
                except MissingDependencyError as error:  # the other targets need no more than torch
                    missing[name] = str(error)
                save(result())
    if not rows and missing:
        raise InputError(f"manycore: no target can be measured here: {'; '.join(missing.values())}")
    return result()


def _measured(name: str, machine: Machine, rounds: int) -> dict[str, Any]:
    from benchmarks.turns import in_turns, summaries
    from hocket import zoo
    from hocket.execution import executor
    from hocket.profiling import profile
    from hocket.tracing import capture

    job = zoo.load(name, **TARGETS[name])
    job.step(job.batch(0))
    captured = capture(job.step, job.models, job.optimizers, job.batch(0), split=False)
    setup = Setup(captured.graph, profile(captured, machine=machine, runs=3), machine)
    labels = {label: added for label, added in STRATEGIES.items() if 4 not in added or machine.devices[0].smt > 1}
    plans = {label: _planned(setup, strategies=added) for label, added in labels.items()}
    plans["serial"] = plan(setup.graph, setup.costs, machine, planner="serial")
    plans["uniform"], uniform = _uniform(setup)
    plans["all"] = _planned(setup, strategies=tuple(labels.values())[-1], lookahead=True)
    lanes_of = {label: executor(captured, made, machine) for label, made in plans.items()}
    contenders: dict[str, Callable[[Any], Any]] = {"eager": job.step, **lanes_of}
    found = in_turns(contenders, job.batch, rounds=rounds, block=2)
    for lanes in lanes_of.values():
        lanes.close()
    return {
        "ops": len(setup.graph),
        "uniform_best": uniform,
        **summaries(found),
        "predicted": {label: setup.makespan_us(made) / 1e3 / found[label].median_ms for label, made in plans.items()},
    }


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    if "machines" not in result:
        labels = ("serial", "s1", "s12", "s123", "s1234", "uniform", "all")
        rows = [(name, *ratios(row["speedup"], labels), row["uniform_best"]) for name, row in result["targets"].items()]
        title = f"speedup over eager, measured on {result['cores']} cores, torch {result['torch']}"
        yield table(title, ("target", *labels, "which"), rows)
        return
    for cores in result["machines"]:
        yield _manycore_table(cores, result)
    if "sensitivity" in result:
        changed = [
            (found["words"], *ratios(found["mean"], ("s1234", "all")))
            for found in result["sensitivity"]["variants"].values()
        ]
        cores = next(iter(result["machines"]))
        yield table(f"means on {cores} cores if one thing is otherwise", ("if", "1-4", "lookahead"), changed)


def _manycore_table(cores: str, result: dict[str, Any]) -> Table:
    """A row for each target, and below it the paper's, for 68 cores."""
    machine, paper = result["machines"][cores], result["paper"]["figure_3"] if cores == "68" else {}
    rows: list[tuple[str, ...]] = []
    for target, row in machine["targets"].items():
        figures = [*ratios(row["added"], ("s12", "s3", "s4"))]
        figures += [*ratios(row["speedup"], ("s1234", "halves", "uniform", "all")), f"{row['to_bound']:.2f}"]
        rows.append((target, f"{row['recommended_ms']:,.0f}", *figures))
        if target in paper:
            printed = paper[target]
            uniform = printed["s1234"] / printed["over_uniform"]
            rows.append(
                ("  the paper", "", *ratios(printed, ("s12", "s3", "s4", "s1234")), "", f"{uniform:.2f}", "", "")
            )
    rows.append(("mean", "", "", "", "", *ratios(machine["mean"], ("s1234", "halves", "uniform", "all")), ""))
    theirs = [paper[target]["s1234"] for target in machine["targets"] if target in paper]
    if theirs:
        rows.append(("  the paper", "", "", "", "", f"{sum(theirs) / len(theirs):.2f}", "", "", "", ""))
    columns = ("target", "ms", "1+2", "+3", "+4", "1 to 4", "halves", "uniform", "lookahead", "to bound")
    return table(f"{cores} cores, simulated on published curves: speedup over recommended", columns, rows)
