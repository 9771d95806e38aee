"""The bench of whole searches, as a command: run it, then print its table or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from statistics import median

from benchmarks.commands import write_so_far
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy

__all__ = ["tune_bench"]


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
