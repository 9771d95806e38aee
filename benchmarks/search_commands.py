"""The bench of whole searches, as a command: run it, then print its table or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from statistics import median

from benchmarks.commands import add_budget, write_so_far
from hocket.cli.arguments import Verbs, add_output, add_verb, count
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy

__all__ = ["add_tune", "add_tune_short", "short_bench", "tune_bench"]


def add_tune(names: Verbs) -> None:
    """The parser of the bench of searches."""
    tune = add_verb(
        names,
        "tune",
        tune_bench,
        "whole searches for hyper-parameters: serial, in processes, fused, auto, fused and scheduled",
        "python -m benchmarks tune mlp-32 --algorithm random -o tune.json",
    )
    tune.add_argument("--contender", action="append", default=[], metavar="NAME", help="serial and this one only (all)")
    tune.add_argument(
        "--algorithm",
        action="append",
        default=[],
        metavar="NAME",
        help="random or hyperband only (what the target has)",
    )
    tune.add_argument("--trials", type=count, metavar="N", help="trials of random search (60, of MobileNet 8)")
    tune.add_argument("--quick", action="store_true", help="few trials and epochs, to see that it works")
    add_budget(tune)
    tune.add_argument("target", nargs="*", metavar="TARGET", help="such as mlp-128 or pointnet (all)")


def add_tune_short(names: Verbs) -> None:
    """The parser of the bench of short searches."""
    tune = add_verb(
        names,
        "tune-short",
        short_bench,
        "short searches of a small MLP, in turns with one trial at a time: CPU time",
        "OMP_NUM_THREADS=1 python -m benchmarks tune-short --trials 12",
    )
    tune.add_argument("--trials", type=count, default=48, metavar="N", help="of each search (48)")
    tune.add_argument("--repeats", type=count, default=5, metavar="N", help="searches by each executor (5)")
    add_output(tune, "the result, as JSON")


def short_bench(args: Namespace) -> None:
    """Short searches, by every executor that shares this process."""
    from benchmarks.tune.short import run

    file = output_file(args.output)
    result = run(args.trials, args.repeats)
    write_so_far(file, "tune-short", result)
    if args.format == "json":
        print_json({"bench": "tune-short", **result})
        return
    rows = [
        (name, f"{median(own):.2f}", f"{result['to_serial'][name]:.2f}", f"{result['best'][name]:.4f}")
        for name, own in result["cpu_s"].items()
    ]
    title = f"{args.trials} trials of 8 epochs of 16 batches, {result['threads']} threads, torch {result['torch']}"
    print_tables(table(title, ("executor", "CPU seconds", "speedup", "best"), rows))


def tune_bench(args: Namespace) -> None:
    """Whole searches, by every executor."""
    policy = wait_policy()
    from benchmarks.tune import CONTENDERS, apart, run

    file = output_file(args.output)
    with Bar("every search by every executor"):
        result = run(
            tuple(args.target),
            contenders=tuple(args.contender) or CONTENDERS,
            algorithms=tuple(args.algorithm),
            trials=args.trials,
            quick=args.quick,
            budget_s=args.budget_s,
            save=partial(write_so_far, file, "tune", complete=False),
        )
    result["wait_policy"] = policy
    write_so_far(file, "tune", result)
    if args.format == "json":
        print_json({"bench": "tune", **result})
        return
    rows = [
        (
            name,
            contender,
            f"{row['seconds']:.1f}",
            f"{row['to_serial']:.2f}",
            f"{median(apart(found['serial'], row) or [0.0]):.0e}",
            f"{row['farthest']:.0e}",
        )
        for name, found in result["searches"].items()
        for contender, row in found.items()
    ]
    columns = ("search", "executor", "seconds", "speedup", "apart (median)", "farthest")
    title = f"whole searches, {result['threads']} threads, torch {result['torch']}: speedup over serial"
    print_tables(table(title, columns, rows, words=2), *(f"left out: {why}" for why in result["left_out"].values()))
