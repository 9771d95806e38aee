"""The bench of whole searches, as a command: run it, then print its table or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from statistics import median

from benchmarks.commands import add_budget, write_so_far
from hocket.cli.arguments import Verbs, add_verb, count
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy

__all__ = ["add_tune", "tune_bench"]


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
