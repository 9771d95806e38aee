"""The benches that compare plans of single steps: on cores, on many cores, by critical path and on GPUs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from benchmarks.bench import BUDGET, Bench, Save, ratios, targets
from hocket.cli.arguments import Verb, arg, count, output
from hocket.cli.console import UsageError, table
from hocket.errors import ExecutionError

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PLANS", "VERBS"]

# Contenders of the concurrency bench: what a user would choose from, and native lanes by one plan each.
COMPILED = ("compile", "compile_update", "compile_last", "compile_last_update", "compile_autotune")
CHOICES = (*COMPILED, "all", "close", "close_compiled", "jax")
PLANS = ("serial", "s1", "s12", "s123", "lookahead", "phases")


def _title(result: dict[str, Any]) -> str:
    return f"speedup over eager, {result['cores']} cores, torch {result['torch']}, medians of interleaved steps"


# ---------------------------------------------------------------------------------- concurrency, strangers, manycore


def _concurrency(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.concurrency import run

    return run(
        quick=args.quick,
        save=save,
        compiled=not args.no_compile,
        planned=not args.no_plans,
        bitwise=not args.close,
        rounds=args.rounds,
        targets=tuple(args.target),
        report=args.report,
    )


def _concurrency_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    choices, plans = [], []
    for target, row in (item for group in ("small", "large") for item in result[group].items()):
        to_bound = ratios(row["to_bound"], [row["scheduled"]])
        choices.append((target, *ratios(row["speedup"], CHOICES), *to_bound, f"{100 * row['faults_to_eager']:.1f}%"))
        plans.append((target, *ratios(row["speedup"], [*PLANS, row["uniform_best"]])))
    title = f"{_title(result)}: what a user would choose from"
    yield table(title, ("target", *CHOICES, "to bound", "page faults"), choices)
    yield table("and native lanes by one plan each", ("target", *PLANS, "uniform"), plans)


def _strangers(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.strangers import TARGETS, run

    return run(tuple(args.target) or TARGETS, compiled=args.compile, rounds=args.rounds, save=save)


def _strangers_tables(_: Namespace, result: dict[str, Any]) -> Iterator[Table]:
    labels = ("compile", "bitwise", "close")
    rows = [
        (name, *ratios(row["speedup"], labels), *(row["verdicts"][label]["verdict"] for label in labels[1:]))
        for name, row in result["targets"].items()
    ]
    yield table(_title(result), ("model", *labels, "bitwise is", "close is"), rows)


def _manycore(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.manycore import measured, run

    if args.measured:
        return measured(quick=args.quick, budget_s=args.budget_s, save=save)
    if args.budget_s is not None:
        raise UsageError("--budget-s is for --measured; a simulation is as long as it is")
    return run(quick=args.quick)


def _manycore_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    if args.measured:
        labels = ("serial", "s1", "s12", "s123", "s1234", "uniform", "all")
        rows = [(name, *ratios(row["speedup"], labels), row["uniform_best"]) for name, row in result["targets"].items()]
        title = f"speedup over eager, measured on {result['cores']} cores, torch {result['torch']}"
        yield table(title, ("target", *labels, "which"), rows)
        yield from (f"left out: {why}" for why in result["left_out"].values())
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


# -------------------------------------------------------------------------------------------- critical path and GPUs


def _critical_path(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.critical_path import run

    if args.device != "sim":
        return run(device=args.device, quick=args.quick, budget_s=args.budget_s, save=save)
    if args.budget_s is not None:
        raise UsageError("--budget-s is for --device cpu and cuda; a simulation is as long as it is")
    return run(device=args.device, quick=args.quick, machine=args.machine)


def _critical_path_tables(args: Namespace, result: dict[str, Any]) -> Iterator[Any]:
    if args.device != "sim":
        labels = tuple(dict.fromkeys(label for row in result["networks"].values() for label in row["over_eager"]))
        rows = [(name, *ratios(row["over_eager"], labels)) for name, row in result["networks"].items()]
        where = result.get("gpu") or f"{result['cores']} cores"
        yield table(f"speedup over eager, measured on {where}", ("network/batch", *labels), rows)
        yield from (f"left out: {why}" for why in result["left_out"].values())
        return
    labels = tuple(result["geomean"])
    measured = [item for group in ("networks", "depths", "depths_at_equal_batch") for item in result[group].items()]
    measured += [(name, row) for name, sizes in result["batches"].items() for row in sizes.values()]
    rows = [
        (
            *(name, str(row["batch_size"]), *ratios(row["speedup"], labels, 3)),
            *(f"{row['to_bound']:.2f}", str(row["streams"])),
        )
        for name, row in measured
    ]
    rows.append(("geometric mean", "paper's", *ratios(result["geomean"], labels, 3), "", ""))
    title = f"speedup over layer by layer, {result['machine']} simulated (the paper's mean of six, measured: 1.30)"
    yield table(title, ("network", "batch", *labels, "full to bound", "streams"), rows)
    if "sensitivity" in result:
        changed = [(label, f"{mean:.3f}") for label, mean in result["sensitivity"].items()]
        yield table("the six networks' mean speedup of full, one assumption changed", ("", "mean"), changed)


def _gpu(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.gpu import run

    return run(device=args.device, budget_s=args.budget_s, save=save)


def _gpu_lines(_: Namespace, result: dict[str, Any]) -> Iterator[str]:
    yield from (f"{name}: {found['took_s']:.0f} s" for name, found in result["parts"].items())
    left_out = [line for found in result["parts"].values() for line in found.get("left_out", {}).values()]
    yield from (f"left out: {why}" for why in (*left_out, *result["stopped"].values()))


def gpu_bench(args: Namespace) -> None:
    """Run all parts, print what there is, and fail if a part failed.

    Raises:
        ExecutionError: a part failed.
    """
    if failed := Bench("gpu", "every bench in turn", _gpu, _gpu_lines).run(args)["failed"]:
        raise ExecutionError("; ".join(failed.values()))


def _gpu_papers(args: Namespace, save: Save) -> dict[str, Any]:
    from benchmarks.gpu_papers import run

    return run(budget_s=args.budget_s, save=save)


def _gpu_papers_lines(_: Namespace, result: dict[str, Any]) -> Iterator[str]:
    for label, row in result["rows"].items():
        shown = row if isinstance(row, str) else ", ".join(f"{key} {_short(value)}" for key, value in row.items())
        yield f"{label}: {shown}"


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return f"({len(value)} values)" if isinstance(value, (list, dict)) else str(value)


_AFTER_EACH = output("the result, after each target, as JSON")
_BATCHES = "zoo names, or NAME/BATCH (a selection)"

VERBS = (
    Verb(
        "concurrency",
        Bench("concurrency", "every contender in turn, on each target", _concurrency, _concurrency_tables),
        "every way of running a step on these cores, side by side",
        "python -m benchmarks concurrency --quick",
        (
            arg("--quick", action="store_true", help="only the steps of small ops"),
            arg("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)"),
            arg("--no-plans", action="store_true", help="only what a user would choose from, no single plans"),
            arg("--close", action="store_true", help="leave out what is bitwise (a search on each target)"),
            arg("--rounds", type=count, metavar="N", help="blocks of steps of each contender"),
            arg("--report", metavar="DIR", help="draw how many ops run side by side, one picture a step"),
            _AFTER_EACH,
            targets("only these, such as mlp or resnet20/64"),
        ),
    ),
    Verb(
        "strangers",
        Bench("strangers", "schedule models of pytorchcv and transformers", _strangers, _strangers_tables),
        "models of pytorchcv and transformers, in both promises of numerics",
        "python -m benchmarks strangers nin_cifar10 GPT2LMHeadModel",
        (
            arg("--compile", action="store_true", help="measure torch.compile too (it takes minutes)"),
            arg("--rounds", type=count, default=8, metavar="N", help="blocks of steps of each contender (8)"),
            _AFTER_EACH,
            targets("only these (all)"),
        ),
        "Needs: pip install pytorchcv transformers.",
    ),
    Verb(
        "manycore",
        Bench("manycore", "every plan of each network", _manycore, _manycore_tables),
        "the paper's strategies on 16 and 68 cores, simulated, or on this machine's",
        "python -m benchmarks manycore --quick",
        (
            arg("--quick", action="store_true", help="only two of the four networks, nothing assumed anew"),
            arg("--measured", action="store_true", help="run on this machine's own cores, if more than 2"),
            *BUDGET,
        ),
        "Simulated on published curves; docs/concurrency.md says what that assumes.",
    ),
    Verb(
        "critical-path",
        Bench("critical-path", "every contender on each network", _critical_path, _critical_path_tables),
        "streams by critical path against layer by layer, on TurboDL's networks",
        "python -m benchmarks critical-path --quick --device sim",
        (
            arg("--quick", action="store_true", help="fewer networks and batch sizes"),
            arg("--device", choices=("cpu", "cuda", "sim"), default="sim", help="what to run on (sim)"),
            arg("--machine", default="p100", metavar="NAME", help="the GPU to simulate (p100)"),
            *BUDGET,
        ),
    ),
    Verb(
        "gpu-papers",
        Bench("gpu-papers", "rows of the papers on a GPU", _gpu_papers, _gpu_papers_lines),
        "co-runs, blocks of a kernel, occupancy: rows that need a GPU",
        "python -m benchmarks gpu-papers",
        BUDGET,
        "Without a GPU each row says that it is not measured.",
    ),
    Verb(
        "gpu",
        gpu_bench,
        "all benches for a machine with a GPU, into one file",
        "python -m benchmarks gpu --budget-s 360 -o gpu.json",
        (
            arg("--device", choices=("cpu", "cuda"), default="cuda", help="what to measure (cuda)"),
            arg("--budget-s", type=count, default=360, metavar="S", help="seconds for all of it (360)"),
            output("all results"),
        ),
        "With --device cpu the same in small, to see that it works.",
    ),
)
