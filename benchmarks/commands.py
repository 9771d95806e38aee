"""One function for each bench: run it with the parsed arguments, then print its tables or its JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.cli.arguments import add_output, count
from hocket.cli.console import Bar, UsageError, print_json, print_tables, table
from hocket.cli.files import output_file, written
from hocket.errors import ExecutionError
from hocket.reporting._files import write_text
from hocket.reporting.words import count_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "add_budget",
    "concurrency_bench",
    "critical_path_bench",
    "gpu_bench",
    "manycore_bench",
    "overhead_bench",
    "simulate_bench",
    "write_so_far",
]

# Contenders of the concurrency bench: what a user would choose from, and native lanes by one plan each.
COMPILED = ("compile", "compile_update", "compile_last", "compile_last_update", "compile_autotune")
CHOICES = (*COMPILED, "all", "close", "close_compiled", "jax")
PLANS = ("serial", "s1", "s12", "s123", "lookahead", "phases")


def write_so_far(target: Path | None, bench: str, result: dict[str, Any], *, complete: bool = True) -> None:
    """Into the file of ``-o``, if any, after each item: whoever stops a bench finds what it had measured."""
    if target is not None:
        document = {"bench": bench, "complete": complete, **result}
        write_text(target, json.dumps(document, indent=2, allow_nan=False) + "\n")


def add_budget(parser: ArgumentParser) -> None:
    """``--budget-s`` and ``-o``, of a bench that may be stopped after any item."""
    parser.add_argument("--budget-s", type=count, metavar="S", help="seconds; what they do not suffice for is left out")
    add_output(parser, "the result, after each item, as JSON")


def concurrency_bench(args: Namespace) -> None:
    """Every way of running a step on these cores, in turn."""
    from benchmarks.concurrency import run

    file = output_file(args.output)
    with Bar("every contender in turn, on each target"):
        result = run(
            quick=args.quick,
            save=partial(write_so_far, file, "concurrency", complete=False),
            compiled=not args.no_compile,
            planned=not args.no_plans,
            bitwise=not args.close,
            rounds=args.rounds,
            targets=tuple(args.target),
            report=args.report,
        )
    write_so_far(file, "concurrency", result)
    if args.format == "json":
        print_json({"bench": "concurrency", **result})
        return
    choices, plans = [], []
    for target, row in (item for group in ("small", "large") for item in result[group].items()):
        uniform = f"{row['speedup'][row['uniform_best']]:.2f}" if row["uniform_best"] else "-"
        to_bound = f"{row['to_bound'][row['scheduled']]:.2f}" if row["to_bound"] else "-"
        choices.append((target, *_speedups(row, CHOICES), to_bound, f"{100 * row['faults_to_eager']:.1f}%"))
        plans.append((target, *_speedups(row, PLANS), uniform))
    title = f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"
    print_tables(
        table(f"{title}: what a user would choose from", ("target", *CHOICES, "to bound", "page faults"), choices),
        table("and native lanes by one plan each", ("target", *PLANS, "uniform"), plans),
    )


def _speedups(row: dict[str, Any], labels: Sequence[str]) -> list[str]:
    return [f"{row['speedup'][label]:.2f}" if label in row["speedup"] else "-" for label in labels]


def manycore_bench(args: Namespace) -> None:
    """The paper's strategies on many cores: simulated, or measured on this machine's."""
    from benchmarks.manycore import measured, run

    target = output_file(args.output)
    if args.measured:
        with Bar("measure each network"):
            result = measured(
                quick=args.quick,
                budget_s=args.budget_s,
                save=partial(write_so_far, target, "manycore", complete=False),
            )
    elif args.budget_s is not None:
        raise UsageError("--budget-s is for --measured; a simulation is as long as it is")
    else:
        with Bar("capture, plan and simulate each network"):
            result = run(quick=args.quick)
    write_so_far(target, "manycore", result)
    if args.format == "json":
        print_json({"bench": "manycore", **result})
    elif args.measured:
        print_tables(_measured_table(result), *(f"left out: {why}" for why in result["left_out"].values()))
    else:
        print_tables(*(_manycore_table(cores, result) for cores in result["machines"]), *_sensitivity_table(result))


def _manycore_table(cores: str, result: dict[str, Any]) -> Table:
    """A row for each target, and below it what the paper has, for 68 cores."""
    machine, paper = result["machines"][cores], result["paper"]["figure_3"] if cores == "68" else {}
    rows: list[tuple[str, ...]] = []
    for target, row in machine["targets"].items():
        figures = [*(row["added"][label] for label in ("s12", "s3", "s4")), row["speedup"]["s1234"]]
        figures += [*(row["speedup"][label] for label in ("halves", "uniform", "all")), row["to_bound"]]
        rows.append((target, f"{row['recommended_ms']:,.0f}", *(f"{figure:.2f}" for figure in figures)))
        if target in paper:
            printed = paper[target]
            figures = [printed[label] for label in ("s12", "s3", "s4", "s1234")]
            uniform = printed["s1234"] / printed["over_uniform"]
            rows.append(("  the paper", "", *(f"{figure:.2f}" for figure in figures), "", f"{uniform:.2f}", "", ""))
    means = (f"{machine['mean'][label]:.2f}" for label in ("s1234", "halves", "uniform", "all"))
    rows.append(("mean", "", "", "", "", *means, ""))
    theirs = [paper[target]["s1234"] for target in machine["targets"] if target in paper]
    if theirs:
        rows.append(("  the paper", "", "", "", "", f"{sum(theirs) / len(theirs):.2f}", "", "", "", ""))
    columns = ("target", "ms", "1+2", "+3", "+4", "1 to 4", "halves", "uniform", "lookahead", "to bound")
    return table(f"{cores} cores, simulated on published curves: speedup over recommended", columns, rows)


def _sensitivity_table(result: dict[str, Any]) -> list[Table]:
    if "sensitivity" not in result:
        return []
    rows = [
        (found["words"], f"{found['mean']['s1234']:.2f}", f"{found['mean']['all']:.2f}")
        for found in result["sensitivity"]["variants"].values()
    ]
    cores = next(iter(result["machines"]))
    return [table(f"means on {cores} cores if one thing is otherwise", ("if", "1-4", "lookahead"), rows)]


def _measured_table(result: dict[str, Any]) -> Table:
    labels = ("serial", "s1", "s12", "s123", "s1234", "uniform", "all")
    rows = []
    for target, row in result["targets"].items():
        speedups = [f"{row['speedup'][label]:.2f}" if label in row["speedup"] else "-" for label in labels]
        rows.append((target, *speedups, row["uniform_best"]))
    title = f"speedup over eager, measured on {result['cores']} cores, torch {result['torch']}"
    return table(title, ("target", *labels, "which"), rows)


def critical_path_bench(args: Namespace) -> None:
    """Streams by critical path against what others do."""
    from benchmarks.critical_path import run

    target = output_file(args.output)
    options: dict[str, Any] = {"machine": args.machine}
    if args.device != "sim":
        save = partial(write_so_far, target, "critical-path", complete=False)
        options = {"budget_s": args.budget_s, "save": save}
    elif args.budget_s is not None:
        raise UsageError("--budget-s is for --device cpu and cuda; a simulation is as long as it is")
    with Bar("every contender on each network"):
        result = run(device=args.device, quick=args.quick, **options)
    write_so_far(target, "critical-path", result)
    if args.format == "json":
        print_json({"bench": "critical-path", **result})
        return
    if args.device != "sim":
        print_tables(_measured_streams(result), *(f"left out: {why}" for why in result["left_out"].values()))
        return
    labels = tuple(result["geomean"])
    rows = []
    for group in ("networks", "depths", "depths_at_equal_batch"):
        for name, row in result[group].items():
            speedups = [f"{row['speedup'][label]:.3f}" for label in labels]
            rows.append((name, str(row["batch_size"]), *speedups, f"{row['to_bound']:.2f}", str(row["streams"])))
    for name, sizes in result["batches"].items():
        for row in sizes.values():
            speedups = [f"{row['speedup'][label]:.3f}" for label in labels]
            rows.append((name, str(row["batch_size"]), *speedups, f"{row['to_bound']:.2f}", str(row["streams"])))
    rows.append(("geometric mean", "paper's", *(f"{result['geomean'][label]:.3f}" for label in labels), "", ""))
    title = f"speedup over layer by layer, {result['machine']} simulated (the paper's mean of six, measured: 1.30)"
    tables = [table(title, ("network", "batch", *labels, "full to bound", "streams"), rows)]
    if "sensitivity" in result:
        changed = [(label, f"{mean:.3f}") for label, mean in result["sensitivity"].items()]
        tables.append(table("the six networks' mean speedup of full, one assumption changed", ("", "mean"), changed))
    print_tables(*tables)


def _measured_streams(result: dict[str, Any]) -> Table:
    """What each contender took on a device that is there, as speedup over eager."""
    labels = tuple(dict.fromkeys(label for row in result["networks"].values() for label in row["over_eager"]))
    rows = [
        (name, *(f"{row['over_eager'][label]:.2f}" if label in row["over_eager"] else "-" for label in labels))
        for name, row in result["networks"].items()
    ]
    where = result.get("gpu") or f"{result['cores']} cores"
    return table(f"speedup over eager, measured on {where}", ("network/batch", *labels), rows)


def gpu_bench(args: Namespace) -> None:
    """All that is to be measured on a machine with a GPU, in one file."""
    from benchmarks.gpu import run

    target = output_file(args.output)
    save = partial(write_so_far, target, "gpu", complete=False)
    with Bar("every bench in turn"):
        result = run(device=args.device, budget_s=args.budget_s, save=save)
    write_so_far(target, "gpu", result)
    if args.format == "json":
        print_json({"bench": "gpu", **result})
    else:
        lines = [f"{name}: {found['took_s']:.0f} s" for name, found in result["parts"].items()]
        left_out = [line for found in result["parts"].values() for line in found.get("left_out", {}).values()]
        print_tables(
            *lines, *(f"left out: {why}" for why in (*left_out, *result["stopped"].values())), *written(target)
        )
    if result["failed"]:
        raise ExecutionError("; ".join(result["failed"].values()))


def overhead_bench(args: Namespace) -> None:
    """What capture, profile and the time between ops cost."""
    from benchmarks.overhead import TARGETS, run

    with Bar("eager and both executors in turn"):
        result = run(tuple(args.target) or TARGETS)
    if args.format == "json":
        print_json({"bench": "overhead", **result})
        return
    rows = [
        (
            target,
            str(row["ops"]),
            f"{row['capture_steps']:.0f}",
            f"{row['profile_steps']:.0f}",
            f"{row['op_us']:.1f}",
            f"{row['eager_overhead_us']:.2f}",
            f"{row['python_overhead_us']:.2f}",
            f"{row['native_overhead_us']:.2f}",
        )
        for target, row in result["targets"].items()
    ]
    columns = ("target", "ops", "capture, steps", "profile, steps", "us in an op", "eager us", "python us", "native us")
    print_tables(table("what Hocket itself costs (times between ops, per op)", columns, rows))


def simulate_bench(args: Namespace) -> None:
    """The simulator against SimPy."""
    from benchmarks.simulate import run

    with Bar("simulate with both engines in turn"):
        result = run(args.ops, args.lanes, args.repeats, args.seed)
    if args.format == "json":
        print_json({"bench": "simulate", **result})
        return
    rows = [
        (
            question.replace("_", " "),
            *(f"{found[engine]['median']:,.3f}" for engine in ("hocket_ms", "simpy_ms")),
            f"{found['ratio']['median']:,.1f}x",
            f"{found['ratio']['min']:,.1f}x to {found['ratio']['max']:,.1f}x",
        )
        for question, found in result["questions"].items()
    ]
    title = (
        f"simulate {count_text(args.ops, 'op')} on {count_text(args.lanes, 'lane')}, "
        f"medians of {count_text(args.repeats, 'round')}"
    )
    columns = ("plan", "Hocket ms", f"SimPy {result['versions']['simpy']} ms", "ratio", "from")
    print_tables(table(title, columns, rows))
