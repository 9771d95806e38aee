"""The benches of what a step costs: simulating, deciding, compiling, memory, other versions and backends."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.bench import Bench, Save, ratios, targets
from hocket.cli.arguments import Verb, arg, count, output
from hocket.cli.console import table
from hocket.reporting.words import count_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["VERBS"]

# ------------------------------------------------------------------------------------------- simulate and overhead


def _simulate(args: Namespace, _: Save) -> dict[str, Any]:
    from benchmarks.simulate import run

    return run(args.ops, args.lanes, args.repeats, args.seed)


def _simulate_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (
            question.replace("_", " "),
            *(f"{found[engine]['median']:,.3f}" for engine in ("hocket_ms", "simpy_ms")),
            f"{found['ratio']['median']:,.1f}x",
            f"{found['ratio']['min']:,.1f}x to {found['ratio']['max']:,.1f}x",
        )
        for question, found in result["questions"].items()
    ]
    where = f"{count_text(args.ops, 'op')} on {count_text(args.lanes, 'lane')}"
    columns = ("plan", "Hocket ms", f"SimPy {result['versions']['simpy']} ms", "ratio", "from")
    yield table(f"simulate {where}, medians of {count_text(args.repeats, 'round')}", columns, rows)


def _overhead(args: Namespace, _: Save) -> dict[str, Any]:
    from benchmarks.overhead import TARGETS, run

    return run(tuple(args.target) or TARGETS)


def _overhead_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    figures = ("eager_overhead_us", "python_overhead_us", "native_overhead_us")
    rows = [
        (
            *(target, str(row["ops"]), f"{row['capture_steps']:.0f}", f"{row['profile_steps']:.0f}"),
            *(f"{row['op_us']:.1f}", *ratios(row, figures)),
        )
        for target, row in result["targets"].items()
    ]
    columns = ("target", "ops", "capture, steps", "profile, steps", "us in an op", "eager us", "python us", "native us")
    yield table("what Hocket itself costs (times between ops, per op)", columns, rows)


# ------------------------------------------------------------------- decision, compiling, memory, versions, backend


def _decision(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.decision import run
    from hocket import zoo

    return run(tuple(args.target) or tuple(zoo.entries()), save=save)


def _decision_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for name, row in result["targets"].items():
        warm = row["warm"]
        times = (f"{row['eager_ms']:.1f}", str(row["calls"]), f"{row['seconds']:.1f}", "yes" if row["within"] else "no")
        rows.append((name, *times, row["verdict"], str(warm["calls"]), f"{warm['seconds']:.1f}", str(warm["recalled"])))
    columns = ("target", "eager ms", "calls", "seconds", "within", "verdict", "warm calls", "seconds", "recalled")
    yield table("what it takes until a schedule has decided", columns, rows)


def _promises(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.promises import NEIGHBOURS, TARGETS, run

    return run(tuple(args.target) or TARGETS, args.runs, tuple(args.neighbour or NEIGHBOURS), save)


def _promises_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for name, row in result["targets"].items():
        for neighbour, found in row.items():
            planned = [each for each in found["runs"] if each["met"] is not None]
            figures = [
                f"{median(each[key] for each in planned):.2f}" if planned else "-"
                for key in ("promised", "met", "met_total")
            ]
            counts = (str(len(planned)), str(found["kept"]), str(found["noticed"]))
            rows.append((name, neighbour, *figures, *counts))
    columns = ("target", "neighbour", "promised", "met", "met by all time", "planned", "kept", "noticed")
    yield table(f"speedups over eager, promised and met; of {count_text(args.runs, 'run')} each", columns, rows)


def _compiling(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.compiling import TARGETS, run

    return run(tuple(args.target) or TARGETS, save=save)


def _compiling_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    from benchmarks.compiling import BAR

    figures = ("eager_ms", "alone_ms", "beside_ms", "over_eager", "mean_over_eager")
    rows = [
        (
            *(name, *ratios(row, figures), "yes" if row["within"] else "no", str(row["nice"])),
            *(f"{row['compile_s']:.1f}", *ratios(row, ("compile_cores", "cached_s"))),
        )
        for name, row in result["targets"].items()
    ]
    beside = ("target", "eager ms", "alone ms", "beside ms", "of eager", "of means", f"within {BAR}")
    title = "scheduled steps beside the compiler, in turns with such steps alone and eager ones"
    yield table(title, (*beside, "nice", "compiling s", "by cores", "kept: s"), rows)


def _memory(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.memory import TARGETS, run

    return run(tuple(args.target) or TARGETS, numerics=args.numerics, compiled=args.compile, save=save)


def _memory_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    from benchmarks.memory import BAR

    figures = ("search", "planned", "compiled_search", "compiled_planned")
    rows = []
    for name, row in result["targets"].items():
        sizes = [f"{row[each] / 2**20:.0f}" for each in ("bare_bytes", "eager_bytes")]
        shares = ratios(row, [f"{each}_ratio" for each in figures])
        rows.append((name, *sizes, *shares, "yes" if row["within"] else "no"))
    columns = ("target", "bare MiB", "eager MiB", *(each.replace("_", " ") for each in figures), f"within {BAR}")
    yield table("peak of the process, over that of eager steps", columns, rows)


def _versions(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.versions import run

    return run(args.sources.resolve(), tuple(args.target), args.rounds, save)


def _versions_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for name, row in result["targets"].items():
        other, this = row["other"], row["this"]
        spread = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
        verdicts = f"{other['verdict']}, {this['verdict']}"
        first = f"{row['first_ratio']:.2f}" if "first_ratio" in row else "-"
        rows.append((name, f"{other['step_ms']:.3f}", f"{this['step_ms']:.3f}", spread, first, verdicts))
    columns = ("target", "other ms", "this ms", "other over this", "first call", "verdicts")
    yield table(f"another version's steps; geometric mean {result['geometric_mean']:.3f}", columns, rows)


def _backend(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.backend import run

    return run(tuple(args.target), rounds=args.rounds, close=not args.no_close, save=save)


def _backend_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    from benchmarks.backend import CONTENDERS

    rows = [
        (name, *ratios(row["speedup"], CONTENDERS), f"{row['planned']} of {row['regions']}")
        for name, row in result["targets"].items()
    ]
    title = f"speedup over eager, torch {result['torch']}, {result['threads']} thread(s), medians of interleaved steps"
    yield table(title, ("target", *CONTENDERS, "regions planned"), rows)


_AFTER_EACH = output("the result, after each target, as JSON")
_BATCHES = "zoo names, or NAME/BATCH (a selection)"

VERBS = (
    Verb(
        "simulate",
        Bench("simulate", "simulate with both engines in turn", _simulate, _simulate_tables),
        "the simulator against SimPy, on one random plan",
        "python -m benchmarks simulate --ops 10000",
        (
            arg("--ops", type=count, default=100_000, metavar="N", help="ops in the plan (100000)"),
            arg("--lanes", type=count, default=8, metavar="N", help="lanes in the plan (8)"),
            arg("--repeats", type=count, default=5, metavar="N", help="rounds (5)"),
            arg("--seed", type=int, default=0, metavar="N", help="draws another plan (0)"),
        ),
    ),
    Verb(
        "overhead",
        Bench("overhead", "eager and both executors in turn", _overhead, _overhead_tables),
        "what capture, profile and the time between ops cost",
        "python -m benchmarks overhead mlp resnet20",
        (targets("zoo names (a selection)"),),
    ),
    Verb(
        "decision",
        Bench("decision", "schedule each target until it is decided", _decision, _decision_tables),
        "calls and seconds until a schedule has decided",
        "python -m benchmarks decision mlp digits-cnn -o decision.json",
        (_AFTER_EACH, targets("zoo names (all of them)")),
    ),
    Verb(
        "promises",
        Bench("promises", "decide each target in a new process, then time it", _promises, _promises_tables),
        "the speedup of a verdict, beside that of the 200 steps after it",
        "python -m benchmarks promises mlp gpt2 --runs 5 -o promises.json",
        (
            arg("--runs", type=count, default=20, metavar="N", help="processes of each kind (20)"),
            arg("--neighbour", action="append", choices=("none", "before", "after"), help="only this kind (all three)"),
            _AFTER_EACH,
            targets(_BATCHES),
        ),
    ),
    Verb(
        "compiling",
        Bench("compiling", "compile each target beside its own steps", _compiling, _compiling_tables),
        "what compiling a step takes, and eager steps beside it",
        "python -m benchmarks compiling mlp densenet40/32 -o compiling.json",
        (_AFTER_EACH, targets(_BATCHES)),
    ),
    Verb(
        "memory",
        Bench("memory", "schedule each target in its own process", _memory, _memory_tables),
        "peak memory of a process while a step is searched, and by its plan",
        "python -m benchmarks memory mlp resnet20/64 -o memory.json",
        (
            arg("--numerics", choices=("bitwise", "close"), default="close", help="of the schedule (close)"),
            arg("--no-compile", dest="compile", action="store_false", help="without the search of compiled forms"),
            _AFTER_EACH,
            targets("zoo names, gpt2, or NAME/BATCH (a selection)"),
        ),
    ),
    Verb(
        "versions",
        Bench("versions", "prepare each target in two processes, and make steps in turns", _versions, _versions_tables),
        "scheduled or fused steps of another version's sources and of these, in turns",
        "python -m benchmarks versions ../older/src mlp own-mlp-32:8 -o FILE",
        (
            arg("sources", type=Path, metavar="SOURCES", help="the folder that the other package is in"),
            arg(
                "target",
                nargs="*",
                default=["mlp", "lenet", "digits-cnn"],
                metavar="TARGET",
                help="zoo names, NAME:MODELS of fuse, or search-NAME:TRIALS; own-NAME has own rates, lengths-NAME 40 "
                "lengths of batches",
            ),
            arg("--rounds", type=count, default=10, metavar="N", help="blocks of steps of each kind (10)"),
            output("the result as JSON"),
        ),
    ),
    Verb(
        "backend",
        Bench("backend", "every backend in turn, on each target", _backend, _backend_tables),
        "torch.compile with this backend, with Inductor, and whole steps, over eager",
        "python -m benchmarks backend mlp gpt2 -o backend.json",
        (
            arg("--rounds", type=count, default=12, metavar="N", help="blocks of steps of each contender (12)"),
            arg("--no-close", action="store_true", help="leave out what is not bitwise, which compiles"),
            _AFTER_EACH,
            targets("only these, such as mlp or gpt2"),
        ),
    ),
)
