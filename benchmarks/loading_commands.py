"""The bench of loading, as a command: run it, then print its tables or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from benchmarks.commands import write_so_far
from hocket.cli.arguments import Verbs, add_output, add_verb, count
from hocket.cli.console import Bar, UsageError, print_json, print_tables, table
from hocket.cli.files import output_file
from hocket.cli.steps import wait_policy

__all__ = ["add_loading", "loading_bench"]


def add_loading(names: Verbs) -> None:
    """The parser of the bench of loading."""
    loading = add_verb(
        names,
        "loading",
        loading_bench,
        "from a file to the first output: load then run, and streamed in several orders",
        "python -m benchmarks loading resnet50 --rounds 3 -o loading.json",
    )
    loading.add_argument("--gbit", type=float, default=1.0, metavar="R", help="rate of the link in Gbit/s (1)")
    loading.add_argument("--rounds", type=count, default=5, metavar="N", help="runs of each contender (5)")
    loading.add_argument("--batch-size", type=count, metavar="N", help="of the forward (as long as reading takes)")
    add_output(loading, "the result, after each model, as JSON")
    loading.add_argument(
        "target", nargs="*", metavar="MODEL", help="resnet50, vgg16, bert-base, gpt2, inception-v3 (the first four)"
    )


def loading_bench(args: Namespace) -> None:
    """From a file to the first output, by every contender."""
    policy = wait_policy()
    from benchmarks.loading import CONTENDERS, GBIT_BYTES_PER_S, NAMES, run
    from benchmarks.loading.networks import NETWORKS

    for name in args.target:
        if name not in NETWORKS:
            raise UsageError(f"{name}: expected one of {', '.join(NETWORKS)}")
    if not args.gbit > 0:
        raise UsageError(f"--gbit: expected a number above 0, got {args.gbit:g}")
    file = output_file(args.output)
    with Bar("every contender in turn, on each model"):
        result = run(
            tuple(args.target) or NAMES,
            bytes_per_s=args.gbit * GBIT_BYTES_PER_S,
            rounds=args.rounds,
            batch_size=args.batch_size,
            save=partial(write_so_far, file, "loading", complete=False),
        )
    result["wait_policy"] = policy
    write_so_far(file, "loading", result)
    if args.format == "json":
        print_json({"bench": "loading", **result})
        return
    rows, warm = [], []
    for name, found in result["models"].items():
        ratios = [f"{found['over_load_then_run'][contender]:.2f}" for contender in CONTENDERS[1:]]
        figures = [f"{found['bytes'] / 2**20:.0f}", f"{found['read_s']:.2f}", f"{found['forward_s']:.2f}"]
        same = all(row["same_bits"] for row in found["over_link"].values())
        rows.append((name, *figures, *ratios, f"{found['first_use_over_file_order']:.2f}", "yes" if same else "NO"))
        disk = found["warm_disk"]
        warm.append((name, *(f"{disk[until]['over_load_file']:.2f}" for until in ("ready", "output"))))
    columns = ("model", "MiB", "read s", "forward s", *CONTENDERS[1:], "first use over file order", "same bits")
    title = f"first output over load-then-run, {args.gbit:g} Gbit/s, {result['threads']} threads"
    tables = [table(title, [column.replace("_", " ") for column in columns], rows)]
    tables.append(table("warm disk, over load_file and load_state_dict", ("model", "all there", "first output"), warm))
    print_tables(*tables)
