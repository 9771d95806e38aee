"""``hocket bench NAME``: measurements of Hocket itself, each against its baseline in the same run."""

from __future__ import annotations

from argparse import Namespace

from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.report.words import count_text

__all__ = ["simulate_bench"]


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
