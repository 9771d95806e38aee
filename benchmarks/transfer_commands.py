"""The bench of transfers, as a command: simulated, measured, or with paced workers; its tables or its JSON."""

from __future__ import annotations

from argparse import Namespace
from functools import partial

from benchmarks.commands import write_so_far
from hocket.cli.arguments import Verbs, add_output, add_verb, count
from hocket.cli.console import Bar, UsageError, print_json, print_tables, table
from hocket.cli.files import output_file

__all__ = ["add_transfers", "transfers_bench"]


def add_transfers(names: Verbs) -> None:
    """The parser of the bench of transfers."""
    transfers = add_verb(
        names,
        "transfers",
        transfers_bench,
        "orders of received parameters: simulated, to 1,024 workers; or measured",
        "python -m benchmarks transfers --workers 1024 resnet152",
    )
    transfers.add_argument("--workers", type=count, default=1024, metavar="N", help="workers of the cluster (1024)")
    transfers.add_argument("--ratio", type=float, default=1.0, metavar="R", help="communication over computation (1)")
    transfers.add_argument("--seed", type=int, default=0, metavar="N", help="draws other random orders (0)")
    transfers.add_argument(
        "--mbit",
        type=count,
        action="append",
        default=[],
        metavar="N",
        help="measured instead: a worker and a server, over a link of so many Mbit/s; may be given again; needs root",
    )
    transfers.add_argument(
        "--order", action="append", default=[], metavar="ORDER", help="measured: only this one; may be given again"
    )
    transfers.add_argument("--rounds", type=count, default=2, metavar="N", help="turns of each order, measured (2)")
    transfers.add_argument("--steps", type=count, default=10, metavar="N", help="steps of a turn, at the most (10)")
    transfers.add_argument(
        "--batch-size", type=count, metavar="N", help="of the measured models (what takes as long as receiving)"
    )
    transfers.add_argument("--agents", action="store_true", help="with --mbit: forwards that pull in every call")
    transfers.add_argument(
        "--paced", action="store_true", help="many workers whose computing is slept, over real links; needs root"
    )
    transfers.add_argument(
        "--urgent", action="store_true", help="a small value behind a large one, over a link; needs root"
    )
    transfers.add_argument("--seconds", type=float, metavar="S", help="about how long to measure (paced: 240)")
    add_output(transfers, "the result, after each model, as JSON")
    transfers.add_argument("target", nargs="*", metavar="MODEL", help="zoo models (those of TicTac that the zoo has)")


def transfers_bench(args: Namespace) -> None:
    """Orders of received parameters, simulated; or measured, where rates of a link are given."""
    for wanted, measure in ((args.urgent, _urgent), (args.paced, _paced), (args.mbit, _measured)):
        if wanted:
            measure(args)
            return
    from benchmarks.transfers import NAMES, ORDERS, run

    if not args.ratio > 0:
        raise UsageError(f"--ratio: expected a number above 0, got {args.ratio:g}")
    target = output_file(args.output)
    with Bar("every order on each model"):
        result = run(
            tuple(args.target) or NAMES,
            ratio=args.ratio,
            workers=args.workers,
            seed=args.seed,
            save=partial(write_so_far, target, "transfers", complete=False),
        )
    write_so_far(target, "transfers", result)
    if args.format == "json":
        print_json({"bench": "transfers", **result})
        return
    rows = []
    for row in result["models"]:
        best_us = row["orders"]["auto"]["step_us"]
        rates = [f"{row['orders'][order]['step_us'] / best_us:.3f}" for order in ORDERS]
        stragglers = [f"{row['cluster'][order]['straggler_share']:.0%}" for order in ("tac", "random")]
        rows.append(
            (row["model"], row["recvs"], f"{row['tac_ms']:.0f}", f"{row['potential']:.2f}", *rates, *stragglers)
        )
    columns = ("model", "recvs", "TAC ms", "potential", *ORDERS, "stragglers", "random")
    print_tables(table(f"step time over auto's, simulated; {args.workers} workers", columns, rows))


def _measured(args: Namespace) -> None:
    if args.agents:
        from benchmarks.transfers_agents import ORDERS, run
    else:
        from benchmarks.transfers_real import ORDERS, run
    if unknown := set(args.order) - set(ORDERS):
        raise UsageError(f"--order: expected one of {', '.join(ORDERS)}, got {unknown.pop()!r}")
    if args.order and "layer" not in args.order:
        raise UsageError("--order: layer has to be among them, which all others are compared with")
    bench = "transfers-agents" if args.agents else "transfers-real"

    target = output_file(args.output)
    with Bar("every order on each model, over real links"):
        result = run(
            tuple(args.target) or ("alexnet", "vgg16", "inception-v3"),
            mbits=args.mbit,
            orders=args.order or ORDERS,
            rounds=args.rounds,
            steps=args.steps,
            batch_size=args.batch_size,
            seconds=args.seconds,
            save=partial(write_so_far, target, bench, complete=False),
        )
    write_so_far(target, bench, result)
    if args.format == "json":
        print_json({"bench": bench, **result})
        return
    rows = []
    for row in result["rows"]:
        for order, found in row["orders"].items():
            of_layer = found["step_us"] / row["orders"]["layer"]["step_us"]
            rows.append(
                (
                    *(row["model"], str(row["mbit_per_s"]), order, f"{found['step_us'] / 1e3:.1f}", f"{of_layer:.3f}"),
                    *(f"{found['predicted_us'] / 1e3:.1f}", f"{found['potential']:.2f}"),
                    *(f"{found['efficiency_predicted']:.2f}", f"{found['efficiency_measured']:.2f}"),
                    f"{found['steps_in_order']} of {found['steps']}",
                )
            )
    columns = (
        "model",
        "Mbit/s",
        "order",
        "call ms" if args.agents else "step ms",
        "of layer's",
        "predicted",
        "S",
        "E predicted",
        "E",
        "in order",
    )
    print_tables(table("one worker, one server, a link between them", columns, rows))


def _paced(args: Namespace) -> None:
    from benchmarks.paced import run

    target = output_file(args.output)
    if len(args.target) > 1:
        raise UsageError(f"--paced: expected one model, got {', '.join(args.target)}")
    with Bar("paced workers, over real links"):
        result = run(
            args.target[0] if args.target else "googlenet",
            seconds=args.seconds or 240.0,
            save=partial(write_so_far, target, "transfers-paced", complete=False),
        )
    write_so_far(target, "transfers-paced", result)
    if args.format == "json":
        print_json({"bench": "transfers-paced", **result})
        return
    rows = []
    for row in result["rows"]:
        planned, other = row["planned"], row["random"]
        rows.append(
            (
                *(str(row["workers"]), str(row["servers"]), str(row["steps"]), f"{row['r2_of_efficiency']:.3f}"),
                *(f"{planned['step_us'] / 1e3:.0f}", f"{planned['predicted_us'] / 1e3:.0f}"),
                *(f"{row['throughput']:.3f}", f"{planned['normalised_p95']:.3f}", f"{other['normalised_p95']:.3f}"),
                *(f"{planned['straggler_share']:.1%}", f"{other['straggler_share']:.1%}"),
            )
        )
    columns = (
        "W",
        "S",
        "steps",
        "R^2 of E",
        "step ms",
        "predicted",
        "over random",
        "p95",
        "random",
        "waiting",
        "random",
    )
    print_tables(table(f"{result['model']}, {result['paced']}", columns, rows))


def _urgent(args: Namespace) -> None:
    from benchmarks.urgent import run

    target = output_file(args.output)
    rows, results = [], []
    for mbit in args.mbit or [200]:
        results.append(run(mbit, args.rounds))
        for way in ("wire", "gloo"):
            found = results[-1][way]
            delays = (f"{found['delay_ms']:.1f}", f"{found['longest_delay_ms']:.1f}")
            rows.append((str(mbit), way, *delays, f"{found['mbit_per_s']:.1f}"))
    write_so_far(target, "transfers-urgent", {"rows": results})
    if args.format == "json":
        print_json({"bench": "transfers-urgent", "rows": results})
        return
    columns = ("Mbit/s", "way", "delay ms, median", "longest", "Mbit/s of the large one")
    print_tables(table("1 KiB that becomes urgent behind 16 MiB", columns, rows))
