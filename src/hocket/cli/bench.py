"""``hocket bench NAME``: measurements of Hocket itself, each against its baseline in the same run."""

from __future__ import annotations

from argparse import Namespace

from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.report.words import count_text

__all__ = ["concurrency_bench", "critical_path_bench", "overhead_bench", "simulate_bench"]


def concurrency_bench(args: Namespace) -> None:
    """Every way of running a step on these cores, in turn."""
    from hocket.bench.concurrency import run

    with Bar("every contender in turn, on each target"):
        result = run(quick=args.quick, compiled=not args.no_compile, rounds=args.rounds)
    if args.format == "json":
        print_json({"bench": "concurrency", **result})
        return
    labels = ("eager", "compile", "serial", "s1", "s12", "s123", "all")
    rows = []
    for group in ("small", "large"):
        for target, row in result[group].items():
            uniform = row["speedup"][row["uniform_best"]]
            speedups = [f"{row['speedup'][label]:.2f}" if label in row["speedup"] else "-" for label in labels]
            rows.append((target, *speedups, f"{uniform:.2f}", f"{row['to_bound']['all']:.2f}"))
    title = f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"
    print_tables(table(title, ("target", *labels, "uniform", "to bound"), rows))


def critical_path_bench(args: Namespace) -> None:
    """Streams by critical path against what others do."""
    from hocket.bench.critical_path import run

    options = {"machine": args.machine} if args.device == "sim" else {}
    with Bar("every contender on each network"):
        result = run(device=args.device, quick=args.quick, **options)
    if args.format == "json":
        print_json({"bench": "critical-path", **result})
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


def overhead_bench(args: Namespace) -> None:
    """What capture, profile and the time between ops cost."""
    from hocket.bench.overhead import TARGETS, run

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
    from hocket.bench.simulate import run

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
