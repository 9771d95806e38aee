"""The benches of a schedule itself: what it costs beside its plan, and what it takes until it has decided."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from benchmarks.commands import write_so_far
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file, written

__all__ = [
    "backend_bench",
    "call_bench",
    "compiling_bench",
    "decision_bench",
    "guards_bench",
    "memory_bench",
    "strangers_bench",
    "versions_bench",
]


def backend_bench(args: Namespace) -> None:
    """Models compiled by this backend and by others, in turns with eager."""
    from benchmarks.backend import CONTENDERS, run

    target = output_file(args.output)
    with Bar("every backend in turn, on each target"):
        result = run(
            tuple(args.target),
            rounds=args.rounds,
            close=not args.no_close,
            save=partial(write_so_far, target, "backend", complete=False),
        )
    write_so_far(target, "backend", result)
    if args.format == "json":
        print_json({"bench": "backend", **result})
        return
    rows = []
    for name, row in result["targets"].items():
        shown = [f"{row['speedup'][label]:.2f}" if label in row["speedup"] else "-" for label in CONTENDERS]
        rows.append((name, *shown, f"{row['planned']} of {row['regions']}"))
    columns = ("target", *CONTENDERS, "regions planned")
    title = f"speedup over eager, torch {result['torch']}, {result['threads']} thread(s), medians of interleaved steps"
    print_tables(table(title, columns, rows), *written(target))


def call_bench(args: Namespace) -> None:
    """What a call takes beyond the ops of its plan."""
    from benchmarks.call import TARGETS, run

    target = output_file(args.output)
    with Bar("call the schedule of each target"):
        result = run(
            tuple(args.target) or TARGETS, args.rounds, save=partial(write_so_far, target, "call", complete=False)
        )
    write_so_far(target, "call", result)
    if args.format == "json":
        print_json({"bench": "call", **result})
        return
    figures = ("call", "signature", "guards", "executor", "python", "described")
    rows = []
    for name, row in result["targets"].items():
        for label, found in ((name, row), ("  best", row["best"])):
            shown = [f"{found[f'{figure}_us']:.1f}" for figure in figures]
            rows.append((label, str(row["ops"]), shown[0], f"{row['bar_us']:.1f}", *shown[1:]))
    columns = ("target", "ops", "call", "bar", "signature", "guards", "executor", "in Python:", "signature")
    print_tables(table("us of a call beyond its ops, lower quartiles", columns, rows), *written(target))


def decision_bench(args: Namespace) -> None:
    """What it takes until a schedule has decided."""
    from benchmarks.decision import run
    from hocket import zoo

    target = output_file(args.output)
    with Bar("schedule each target until it is decided"):
        result = run(
            tuple(args.target) or tuple(zoo.entries()), save=partial(write_so_far, target, "decision", complete=False)
        )
    write_so_far(target, "decision", result)
    if args.format == "json":
        print_json({"bench": "decision", **result})
        return
    rows = []
    for name, row in result["targets"].items():
        warm = row["warm"]
        times = (f"{row['eager_ms']:.1f}", str(row["calls"]), f"{row['seconds']:.1f}", "yes" if row["within"] else "no")
        rows.append((name, *times, row["verdict"], str(warm["calls"]), f"{warm['seconds']:.1f}", str(warm["recalled"])))
    columns = ("target", "eager ms", "calls", "seconds", "within", "verdict", "warm calls", "seconds", "recalled")
    print_tables(table("what it takes until a schedule has decided", columns, rows), *written(target))


def compiling_bench(args: Namespace) -> None:
    """What compiling takes, and what it costs the steps beside it."""
    from benchmarks.compiling import BAR, TARGETS, run

    target = output_file(args.output)
    with Bar("compile each target beside its own steps"):
        result = run(tuple(args.target) or TARGETS, save=partial(write_so_far, target, "compiling", complete=False))
    write_so_far(target, "compiling", result)
    if args.format == "json":
        print_json({"bench": "compiling", **result})
        return
    rows = []
    for name, row in result["targets"].items():
        times = [f"{row[name]:.2f}" for name in ("eager_ms", "alone_ms", "beside_ms", "over_eager", "mean_over_eager")]
        compiling = (
            str(row["nice"]),
            f"{row['compile_s']:.1f}",
            f"{row['compile_cores']:.2f}",
            f"{row['cached_s']:.2f}",
        )
        rows.append((name, *times, "yes" if row["within"] else "no", *compiling))
    beside = ("target", "eager ms", "alone ms", "beside ms", "of eager", "of means", f"within {BAR}")
    columns = (*beside, "nice", "compiling s", "by cores", "kept: s")
    title = "scheduled steps beside the compiler, in turns with such steps alone and eager ones"
    print_tables(table(title, columns, rows), *written(target))


def memory_bench(args: Namespace) -> None:
    """What a process holds at most while a step is searched, and by its plan."""
    from benchmarks.memory import BAR, TARGETS, run

    target = output_file(args.output)
    with Bar("schedule each target in a process of its own"):
        result = run(
            tuple(args.target) or TARGETS,
            numerics=args.numerics,
            compiled=args.compile,
            save=partial(write_so_far, target, "memory", complete=False),
        )
    write_so_far(target, "memory", result)
    if args.format == "json":
        print_json({"bench": "memory", **result})
        return
    figures = ("search", "planned", "compiled_search", "compiled_planned")
    rows = []
    for name, row in result["targets"].items():
        sizes = [f"{row[each] / 2**20:.0f}" for each in ("bare_bytes", "eager_bytes")]
        ratios = [f"{row[f'{each}_ratio']:.2f}" if f"{each}_ratio" in row else "-" for each in figures]
        rows.append((name, *sizes, *ratios, "yes" if row["within"] else "no"))
    columns = ("target", "bare MiB", "eager MiB", *(each.replace("_", " ") for each in figures), f"within {BAR}")
    print_tables(table("peak of the process, over that of eager steps", columns, rows), *written(target))


def guards_bench(args: Namespace) -> None:
    """What guards, watching and audits cost."""
    from benchmarks.guards import run
    from hocket import zoo

    target = output_file(args.output)
    with Bar("watch, guard and audit each target"):
        result = run(
            tuple(args.target) or tuple(zoo.entries()),
            save=partial(write_so_far, target, "guards", complete=False),
        )
    write_so_far(target, "guards", result)
    if args.format == "json":
        print_json({"bench": "guards", **result})
        return
    rows = [
        (
            name,
            str(row["groups"]),
            str(row["values"]),
            f"{row['check_us']:.2f}",
            f"{row['after_step_us']:.0f}",
            f"{100 * row['check_share']:.2f}%",
            f"{row['watch_steps']:.1f}",
            f"{row['audit_steps']:.1f}",
            f"{100 * row['audit_share']:.2f}%",
        )
        for name, row in result["targets"].items()
    ]
    columns = ("target", "groups", "values", "us", "after", "share", "watch", "audit", "of 10,000")
    title = "what guards, watching and audits cost (us of a check, in a row and after a step; steps)"
    print_tables(table(title, columns, rows), *written(target))


def versions_bench(args: Namespace) -> None:
    """Another version's scheduled or fused steps against this one's."""
    from benchmarks.versions import run

    target = output_file(args.output)
    save = partial(write_so_far, target, "versions", complete=False)
    with Bar("prepare each target in two processes, and make steps in turns"):
        result = run(args.sources.resolve(), tuple(args.target), args.rounds, save)
    write_so_far(target, "versions", result)
    if args.format == "json":
        print_json({"bench": "versions", **result})
        return
    rows = []
    for name, row in result["targets"].items():
        other, this = row["other"], row["this"]
        spread = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        verdicts = f"{other['verdict']}, {this['verdict']}"
        rows.append((name, f"{other['step_ms']:.3f}", f"{this['step_ms']:.3f}", spread, verdicts))
    columns = ("target", "other ms", "this ms", "other over this", "verdicts")
    title = f"another version's steps; geometric mean {result['geometric_mean']:.3f}"
    print_tables(table(title, columns, rows), *written(target))


def strangers_bench(args: Namespace) -> None:
    """Models that nobody here wrote."""
    from benchmarks.strangers import TARGETS, run

    target = output_file(args.output)
    with Bar("schedule models of pytorchcv and transformers"):
        result = run(
            tuple(args.target) or TARGETS,
            compiled=args.compile,
            rounds=args.rounds,
            save=partial(write_so_far, target, "strangers", complete=False),
        )
    write_so_far(target, "strangers", result)
    if args.format == "json":
        print_json({"bench": "strangers", **result})
        return
    labels = ("compile", "bitwise", "close")
    rows = [
        (
            name,
            *(f"{row['speedup'][label]:.2f}" if label in row["speedup"] else "-" for label in labels),
            row["verdicts"]["bitwise"]["verdict"],
            row["verdicts"]["close"]["verdict"],
        )
        for name, row in result["targets"].items()
    ]
    title = f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"
    print_tables(table(title, ("model", *labels, "bitwise is", "close is"), rows), *written(target))
