"""The bench of partitions, as a command: run it, then print its tables or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.commands import write_so_far
from hocket.cli.arguments import Verbs, add_output, add_verb, count
from hocket.cli.console import Bar, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.reporting.words import duration_text, quantity_text

__all__ = ["add_partition", "partition_bench"]


def add_partition(names: Verbs) -> None:
    """The parser of the bench of partitions."""
    partition = add_verb(
        names,
        "partition",
        partition_bench,
        "parts of a step against METIS, Mt-KaHyPar, dynamic programming and HEFT",
        "python -m benchmarks partition Layer-gnmt_training resnet20 --parts 4 -o partition.json",
    )
    partition.add_argument(
        "--parts", type=count, action="append", default=[], metavar="K", help="devices (2, 4, 8; paced 2, 3, 4)"
    )
    partition.add_argument(
        "--paced", action="store_true", help="pipelines of GPT-2, Llama, ResNet-18 and a U-Net, computing slept"
    )
    partition.add_argument(
        "--hog", action="store_true", help="two ranks, one of them beside a program that takes its core; ops move"
    )
    partition.add_argument("--search-s", type=float, default=5.0, metavar="S", help="seconds of each search (5)")
    add_output(partition, "the result, after each graph, as JSON")
    partition.add_argument("target", nargs="*", metavar="GRAPH", help="workloads and zoo models (16 of them)")


def partition_bench(args: Namespace) -> None:
    """Partitions by every objective, against other partitioners."""
    from benchmarks.partition import run

    file = output_file(args.output)
    if args.paced or args.hog:
        (_paced if args.paced else _hog)(args, file)
        return
    with Bar("every objective on each graph"):
        result = run(
            tuple(args.target),
            parts=tuple(args.parts) or (2, 4, 8),
            budget_s=args.search_s,
            save=partial(write_so_far, file, "partition", complete=False),
        )
    write_so_far(file, "partition", result)
    if args.format == "json":
        print_json({"bench": "partition", **result})
        return
    columns = ("graph", "parts", "metis", "mt-kahypar", "hocket", "alone", "acyclic", "time", "heft")
    print_tables(
        table("bytes moved (* beyond the balance); time over one device's", columns, map(_row, result["cut"])),
        table(
            "largest load",
            ("workload", "hocket", "intervals", "published"),
            (
                (name, f"{row['hocket']:.4f}", f"{row['intervals'] or float('nan'):.4f}", f"{row['published']:.4f}")
                for name, row in result["load"].items()
            ),
        ),
        *(f"{label}: {found}" for label, found in result["summary"].items()),
    )


def _paced(args: Namespace, file: Path | None) -> None:
    from benchmarks.partition.paced import run

    with Bar("paced pipelines, split in two ways, in turns"):
        result = run(
            tuple(args.target),
            ranks=tuple(args.parts) or (2, 3, 4),
            save=partial(write_so_far, file, "partition-paced", complete=False),
        )
    write_so_far(file, "partition-paced", result)
    if args.format == "json":
        print_json({"bench": "partition-paced", **result})
        return
    rows = [
        (
            row["model"],
            str(row["ranks"]),
            duration_text(row["equal_layers"]["step_us"]),
            duration_text(row["hocket"]["step_us"]),
            f"{row['to_equal_layers']:.2f}",
            f"{row['predicted_over_measured']:.2f}",
        )
        for row in result["rows"]
    ]
    columns = ("model", "ranks", "equal layers", "hocket", "ratio", "predicted over measured")
    print_tables(table(f"paced: {result['paced']}", columns, rows), str(result["summary"]))


def _hog(args: Namespace, file: Path | None) -> None:
    from benchmarks.partition.hog import run

    with Bar("a job beside a hog, first without moves, then with them"):
        result = run(save=partial(write_so_far, file, "partition-hog", complete=False))
    write_so_far(file, "partition-hog", result)
    if args.format == "json":
        print_json({"bench": "partition-hog", **result})
        return
    found = result["summary"]
    rows = [
        (label, duration_text(found[f"{label}_us"]), f"{found[f'{label}_us'] / found['idle_us']:.2f}")
        for label in ("idle", "hogged", "recovered")
    ]
    moved = [found[f"units_moved_{when}"] for when in ("before_the_hog", "in_20_steps", "later")]
    print_tables(
        table(f"a hog on the core of rank 1: {result['model']}", ("steps", "median", "to idle"), rows),
        f"won back: {found['won_back']:.2f}; units moved before the hog {moved[0]}, in 20 steps {moved[1]}, "
        f"in the {found['steps_later']} after {moved[2]}",
        *(each["text"] for each in result["moving"]["migrations"]),
    )


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    def moved(label: str) -> str:
        found = row[label]
        mark = "" if found.get("balanced", True) else "*"
        return "none" if found["bytes"] is None else quantity_text(found["bytes"], "B") + mark

    moves = [moved(label) for label in ("metis", "mtkahypar", "hocket", "alone", "acyclic")]
    times = [f"{row[label] / row['one_device_us']:.2f}" for label in ("time_us", "heft_us")]
    return (row["graph"], str(row["parts"]), *moves, *times)
