"""The strategies of Liu et al. on many cores: ``python -m benchmarks manycore``.

Simulated, on curves built from published figures (`benchmarks.knl`), beside what the paper printed (IPDPS 2019, Figure
3 and Table I). With ``--measured`` the same plans are made from times measured on this machine's own cores, and run.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, mean
from typing import Any

from benchmarks.assumptions import VARIANTS, Setup, timeline_of
from benchmarks.bench import Budget, Save, columns_of, table_of, unsaved
from benchmarks.curves import for_graph
from benchmarks.knl import published_knl
from benchmarks.turns import in_turns, summaries, title
from hocket import zoo
from hocket.cli.console import UsageError
from hocket.errors import InputError, MissingDependencyError
from hocket.execution import executor
from hocket.ir import Graph, Machine, Plan
from hocket.planning import bounds, plan
from hocket.planning.moldable.instance import as_plan, instance_of
from hocket.planning.moldable.sgs import parallel_sgs
from hocket.profiling import profile
from hocket.reporting import corunning_of
from hocket.tracing import capture

# Zoo entries, with the batch sizes of section IV-A.
TARGETS: dict[str, dict[str, Any]] = {
    "resnet50": {"image_size": 32, "batch_size": 64, "optimizer": "adam"},
    "dcgan": {"batch_size": 64},
    "inception-v3": {"batch_size": 16},
    "lstm-cells": {"batch_size": 20},
}
QUICK = ("dcgan", "lstm-cells")
CORES, SMT = (68, 16), 4
# The gain of each strategy over those before it, and `over_uniform` of all four over the best setting found by hand.
# `s1234` of DCGAN and LSTM is the product of these, the others are printed.
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
ROUNDS = 5
LABELS = (*STRATEGIES, "halves", "uniform", "all")


def run(
    *,
    quick: bool = False,
    measured: bool = False,
    budget_s: float | None = None,
    cores: Sequence[int] = CORES,
    save: Save = unsaved,
) -> dict[str, Any]:
    """Simulate every target on every number of cores (68 at most), or measure on this machine's.

    `quick` are only targets that are captured in seconds, and no changed assumptions. ``sensitivity`` is what each
    changed assumption makes of the speedups on the first number of cores.
    """
    names = QUICK if quick else tuple(TARGETS)
    if measured:
        return _on_cores(names, budget_s, save)
    if budget_s is not None:
        raise UsageError("--budget-s is for --measured; a simulation is as long as it is")
    graphs = {name: _captured(name) for name in names}
    setups = {count: {name: _setup(graph, count) for name, graph in graphs.items()} for count in cores}
    machines: dict[str, dict[str, Any]] = {}
    for count, of_target in setups.items():
        rows = {name: figures(setup) for name, setup in of_target.items()}
        speedups = [row["speedup"] for row in rows.values()]
        means: dict[str, Callable[[Any], float]] = {"mean": mean, "geomean": geometric_mean}
        machines[str(count)] = {"targets": rows} | {
            # The paper's 1.36 is an arithmetic mean.
            kind: {label: of(row[label] for row in speedups) for label in LABELS}
            for kind, of in means.items()
        }
    result: dict[str, Any] = {
        "curves": published_knl().note,
        "sizes": {name: TARGETS[name] for name in names},
        "paper": {"figure_3": FIGURE_3, "mean": 1.36, "corunning": FIGURE_4},
        "machines": machines,
    }
    if not quick:
        result["sensitivity"] = _sensitivity(setups[cores[0]], machines[str(cores[0])]["mean"])
    return result


def figures(setup: Setup) -> dict[str, Any]:
    """One step on one machine.

    ``speedup`` over one op at a time on all cores is that of strategies 1, 1 and 2, ... (paper's plan as it is), of all
    four with halved widths (``halves``), of the best setting that is the same for all ops (``uniform``), and of
    everything with looking ahead (``all``); ``added``: what each strategy adds to those before it; ``to_bound``: time
    by all over the lower bound without sibling threads.
    """
    recommended_us = _recommended_us(setup)
    plans = {label: _planned(setup, added) for label, added in STRATEGIES.items()}
    plans["halves"] = _planned(setup, halves=True)
    plans["uniform"], uniform = _uniform(setup)
    plans["all"] = _planned(setup, lookahead=True)
    timelines = {label: timeline_of(setup, made) for label, made in plans.items()}
    speedup = {label: recommended_us / (timeline.makespan_us + setup.alone_us) for label, timeline in timelines.items()}
    lower_us = bounds(setup.graph, setup.costs, Machine.of(cores=setup.machine.cores)).lower_us
    added = {"s3": speedup["s123"] / speedup["s12"], "s4": speedup["s1234"] / speedup["s123"]}
    return {
        "ops": len(setup.graph),
        "recommended_ms": recommended_us / 1e3,
        "speedup": speedup,
        "added": {"s12": speedup["s12"], **added},
        "uniform_best": uniform,
        "to_bound": timelines["all"].makespan_us / lower_us,
        "corunning": {label: mean(corunning_of(timelines[label])) for label in ("s123", "s1234", "all")},
    }


def _captured(name: str) -> Graph:
    job = zoo.load(name, **TARGETS[name])
    graph = capture(job.step, job.models, job.optimizers, job.batch(0)).graph
    del job
    gc.collect()  # a network of 25 million parameters, copied, before the next one comes
    return graph


def _setup(graph: Graph, cores: int) -> Setup:
    return Setup(graph, for_graph(graph, published_knl(cores)), Machine.of(cores=cores, smt=SMT))


def _recommended_us(setup: Setup) -> float:
    return setup.makespan_us(plan(setup.graph, setup.costs, setup.machine, planner="serial"))


def _planned(
    setup: Setup, strategies: tuple[int, ...] = (1, 2, 3, 4), *, lookahead: bool = False, halves: bool = False
) -> Plan:
    options: dict[str, Any] = {} if lookahead else {"lookahead_ms": 0.0, "coarsen_us": 0.0, "halves": halves}
    options |= {"strategies": strategies, "wait_us": setup.wait_us}
    return plan(setup.graph, setup.costs, setup.machine, planner="concurrency", **options)


def _uniform(setup: Setup) -> tuple[Plan, str]:
    """The best of inter x intra: a number of ops at a time, each on a number of threads, the first ready op first."""
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
        label: recommended_us / setup.makespan_us(_planned(setup, lookahead=ahead))
        for label, ahead in (("s1234", False), ("all", True))
    }


def _on_cores(names: Sequence[str], budget_s: float | None, save: Save) -> dict[str, Any]:
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
    budget = Budget(budget_s)
    result = {"paper": {"figure_3": FIGURE_3, "mean": 1.36}, "targets": rows, "left_out": budget.left_out}
    for name in names:
        with budget.item(name, spared=MissingDependencyError) as begun:  # the other targets need no more than torch
            if begun:
                rows[name] = _measured(name, machine)
        speedups = [row["speedup"] for row in rows.values()]
        result["mean"] = {label: mean(row[label] for row in speedups) for label in ("s12", "s123", "all") if rows}
        save(result)
    return result


def _measured(name: str, machine: Machine) -> dict[str, Any]:
    job = zoo.load(name, **TARGETS[name])
    job.step(job.batch(0))
    captured = capture(job.step, job.models, job.optimizers, job.batch(0), split=False)
    setup = Setup(captured.graph, profile(captured, machine=machine, runs=3), machine)
    labels = {label: added for label, added in STRATEGIES.items() if 4 not in added or machine.devices[0].smt > 1}
    plans = {label: _planned(setup, added) for label, added in labels.items()}
    plans["serial"] = plan(setup.graph, setup.costs, machine, planner="serial")
    plans["uniform"], uniform = _uniform(setup)
    plans["all"] = _planned(setup, tuple(labels.values())[-1], lookahead=True)
    lanes_of = {label: executor(captured, made, machine) for label, made in plans.items()}
    found = summaries(in_turns({"eager": job.step, **lanes_of}, job.batch, rounds=ROUNDS, block=2))
    medians_ms = {label: each["median_ms"] for label, each in found["contenders"].items()}
    predicted = {label: setup.makespan_us(made) / 1e3 / medians_ms[label] for label, made in plans.items()}
    return {"ops": len(setup.graph), "uniform_best": uniform, **found, "predicted": predicted}


def tables(result: dict[str, Any]) -> Iterator[Any]:
    """Show the result."""
    if "machines" not in result:
        labels = ("serial", *STRATEGIES, "uniform", "all")
        columns = {"target": "{name}", **columns_of("speedup", labels), "which": "{uniform_best}"}
        yield table_of(title(result), columns, result["targets"])
        return
    columns = {
        **{"target": "{name}", "ms": "{recommended_ms:,.0f}", "1+2": "{added[s12]:.2f}", "+3": "{added[s3]:.2f}"},
        **{"+4": "{added[s4]:.2f}", "1 to 4": "{speedup[s1234]:.2f}", **columns_of("speedup", ("halves", "uniform"))},
        **{"lookahead": "{speedup[all]:.2f}", "to bound": "{to_bound:.2f}"},
    }
    for cores, machine in result["machines"].items():
        rows = [{"name": name, **row} for name, row in machine["targets"].items()]
        if cores == "68":
            rows += [_printed(name) for name in machine["targets"] if name in FIGURE_3]
        rows.append({"name": "mean", "speedup": machine["mean"]})
        yield table_of(f"{cores} cores, simulated on published curves: speedup over recommended", columns, rows)
    if "sensitivity" in result:
        changed = {"if": "{words}", "1-4": "{mean[s1234]:.2f}", "lookahead": "{mean[all]:.2f}"}
        cores = next(iter(result["machines"]))
        variants = result["sensitivity"]["variants"].values()
        yield table_of(f"means on {cores} cores if one thing is otherwise", changed, variants)


def _printed(name: str) -> dict[str, Any]:
    """The paper's figures as a row."""
    printed = FIGURE_3[name]
    uniform = printed["s1234"] / printed["over_uniform"]
    return {"name": f"the paper's {name}", "added": printed, "speedup": {**printed, "uniform": uniform}}
